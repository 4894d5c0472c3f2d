"""Results of Tiers 2 and 3: declared tests with their p-values, and facts that are true or not.

Purpose: the list of tests is fixed before anything runs (``DECLARED`` of each tier); a test that did not come to a
p-value has failed, and no test can be added by looking at data.

Called by ``tier2``, ``tier3`` and ``prove``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from dspark.proof.chi_square import ImpossibleError, Outcome

Key = TypeVar("Key")


@dataclass(frozen=True)
class Trial:
    """A declared test. outcome: None when it could not be made; then ``error`` says why. samples: what it is over."""

    tier: str
    name: str
    samples: int
    outcome: Outcome | None = None
    error: str = ""

    @property
    def p(self) -> float:
        """0 for a test that could not be made: it counts as failed."""
        return self.outcome.p if self.outcome else 0.0


@dataclass(frozen=True)
class Fact:
    """A statement about the run that is true or not, no statistics."""

    tier: str
    name: str
    holds: bool
    detail: str


@dataclass(frozen=True)
class Rate:
    """Accepted drafts at one place of a round: seen, and expected by sum min(p, q)."""

    place: int
    drafts: int
    seen: float
    expected: float


@dataclass
class Evidence:
    """What a tier has found so far."""

    trials: list[Trial] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)

    def test(self, tier: str, name: str, samples: int, make: Callable[[], Outcome]) -> None:
        """Make one declared test."""
        try:
            self.trials.append(Trial(tier, name, samples, make()))
        except (ImpossibleError, ValueError, ZeroDivisionError) as error:
            self.trials.append(Trial(tier, name, samples, None, f"{type(error).__name__}: {error}"))

    def fact(self, tier: str, name: str, holds: bool, detail: str) -> None:
        """State one fact."""
        self.facts.append(Fact(tier, name, bool(holds), detail))


def in_declared_order(trials: Sequence[Trial], declared: Sequence[tuple[str, str]]) -> list[Trial]:
    """The trials of all declared tests; one that nobody made has failed.

    Raises:
        ValueError: a trial that was not declared, or twice.
    """
    made: Mapping[tuple[str, str], Trial] = {(trial.tier, trial.name): trial for trial in trials}
    if len(made) != len(trials) or not made.keys() <= set(declared):
        raise ValueError("a test was made that is not declared, or made twice")
    return [made.get(key, Trial(*key, 0, None, "was not made")) for key in declared]
