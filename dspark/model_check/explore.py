"""Breadth-first search through all states of a small model.

For every reachable state: the model's own judgement of each step, and that home can still be reached (a deadlock
is a state from which it cannot). For the model as a whole: that every goal is reached, so that no model holds
because it does nothing. Deterministic: same model, same numbers, same trace; a counterexample is one of the
shortest. States are hashable values in canonical form. Called by ``__main__`` and by tests.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Step(NamedTuple):
    """One transition: what happens, where it leads, and which law it breaks ("" for none)."""

    label: str
    state: Hashable
    broken: str = ""


class Model(Protocol):
    """What can be explored. ``goals`` are the names that ``reached`` may give; all must occur."""

    name: str
    goals: frozenset[str]

    def initial(self) -> Hashable:
        """The first state."""

    def steps(self, state: Hashable) -> Iterable[Step]:
        """Every transition out of ``state``, in a fixed order; a deadlock has none."""

    def reached(self, state: Hashable) -> Iterable[str]:
        """The goals that ``state`` meets."""

    def is_home(self, state: Hashable) -> bool:
        """Whether ``state`` is one that every state must be able to get to."""


@dataclass(frozen=True)
class Report:
    """``broken`` is the law that fails, after the steps of ``trace``; "" when the model holds."""

    name: str
    states: int
    transitions: int
    depth: int
    broken: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        size = f"{self.name}: {self.states} states, {self.transitions} transitions, depth {self.depth}"
        if not self.broken:
            return f"{size}, holds"
        lines = [f"{size}, BROKEN after {len(self.trace)} steps: {self.broken}"]
        return "\n".join(lines + [f"  {number:3d}  {label}" for number, label in enumerate(self.trace, 1)])


class Numbers:
    """Numbers values in the order of their first use, so that a state can be made of small integers."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._values: list[Any] = []

    def number(self, value: Hashable) -> int:
        """The number of ``value``."""
        number = self._numbers.setdefault(value, len(self._values))
        if number == len(self._values):
            self._values.append(value)
        return number

    def value(self, number: int) -> Any:
        """The value with this number."""
        return self._values[number]


def bits(mask: int) -> Iterator[int]:
    """The numbers whose bit is set in ``mask``, a set of numbers."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


class _Graph:
    """States in the order of their discovery, and how they were reached."""

    def __init__(self, first: Hashable) -> None:
        self.states: list[Hashable] = [first]
        self.number: dict[Hashable, int] = {first: 0}
        self.parents: list[tuple[int, str]] = [(0, "")]
        self.depths: list[int] = [0]
        self.before: list[list[int]] = [[]]
        self.transitions = 0

    def add(self, source: int, step: Step) -> None:
        self.transitions += 1
        target = self.number.setdefault(step.state, len(self.states))
        if target == len(self.states):
            self.states.append(step.state)
            self.parents.append((source, step.label))
            self.depths.append(self.depths[source] + 1)
            self.before.append([])
        if target != source:
            self.before[target].append(source)

    def trace(self, number: int, *last: str) -> tuple[str, ...]:
        labels = list(reversed(last))
        while number:
            number, label = self.parents[number]
            labels.append(label)
        return tuple(reversed(labels))

    def stranded(self, home: Iterable[int]) -> int | None:
        """The first state from which none of ``home`` can be reached."""
        reaching = set(home)
        front = list(reaching)
        while front:
            fresh = {source for target in front for source in self.before[target]} - reaching
            reaching |= fresh
            front = list(fresh)
        return next((number for number in range(len(self.states)) if number not in reaching), None)


def explore(model: Model, max_states: int = 200_000) -> Report:
    """Search until a law is broken or everything has been seen; more than ``max_states`` is an error too."""
    graph = _Graph(model.initial())
    missing = set(model.goals)
    number = 0
    while number < len(graph.states):
        state = graph.states[number]
        missing.difference_update(model.reached(state))
        for step in model.steps(state):
            if step.broken:
                return _report(model, graph, step.broken, graph.trace(number, step.label))
            graph.add(number, step)
        number += 1
        if len(graph.states) > max_states:
            return _report(model, graph, f"more than {max_states} states")
    if missing:
        return _report(model, graph, f"never reached: {', '.join(sorted(missing))}")
    home = [number for number, state in enumerate(graph.states) if model.is_home(state)]
    stranded = graph.stranded(home)
    if stranded is not None:
        return _report(model, graph, "no way home from here", graph.trace(stranded))
    return _report(model, graph)


def _report(model: Model, graph: _Graph, broken: str = "", trace: tuple[str, ...] = ()) -> Report:
    return Report(model.name, len(graph.states), graph.transitions, graph.depths[-1], broken, trace)
