"""From a world that fails to the few faults that make it fail: delta debugging over the fault program.

Invariant: what is returned fails in the same way (the same kind of violation) when it is run again. Called by `command`
and by tests; committed findings are (seed, world, rounds, faults).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

from dspark.sim import plants
from dspark.sim.faults import Fault
from dspark.sim.ledger import Violation
from dspark.sim.world import World


@dataclass(frozen=True, slots=True)
class Finding:
    """A world of `rounds` rounds that fails with these faults alone. `runs`: worlds that shrinking took."""

    seed: int
    world: int
    rounds: int
    faults: tuple[Fault, ...]
    violation: Violation
    runs: int
    plant: str | None = None
    kinds: tuple[str, ...] = ()


class Shrinker:
    """Runs one world with fewer and fewer faults."""

    def __init__(
        self, seed: int, world: int, rounds: int, kind: str, plant: str | None, kinds: tuple[str, ...]
    ) -> None:
        self.runs = 0
        self._kinds = kinds
        self._seed, self._world, self._rounds, self._kind, self._plant = seed, world, rounds, kind, plant

    def fails(self, kept: list[int] | None) -> tuple[Violation, tuple[Fault, ...]] | None:
        """The violation that is left with these faults, and they themselves; None when all is well."""
        self.runs += 1
        with plants.planted(self._plant) if self._plant else nullcontext():
            result = World(self._seed, self._world, self._rounds, kept, kinds=self._kinds).run()
        found = next((one for one in result.violations if one.kind == self._kind), None)
        return None if found is None else (found, result.faults)

    def minimal(self, indexes: list[int]) -> list[int]:
        """ddmin: ever smaller parts are left out, as long as the world goes on failing."""
        parts = 2
        while len(indexes) >= 1:
            size = max(1, len(indexes) // parts)
            for start in range(0, len(indexes), size):
                fewer = indexes[:start] + indexes[start + size :]
                if self.fails(fewer):
                    indexes, parts = fewer, max(2, parts - 1)
                    break
            else:
                if size == 1:
                    break
                parts = min(len(indexes), 2 * parts)
        return indexes


def shrink(
    seed: int, world: int, rounds: int, kind: str, plant: str | None = None, kinds: tuple[str, ...] = ()
) -> Finding:
    """The smallest program found that still ends in a violation of this kind.

    Raises ValueError when the world does not fail like that.
    """
    shrinker = Shrinker(seed, world, rounds, kind, plant, kinds)
    whole = shrinker.fails(None)
    if whole is None:
        raise ValueError(f"world {world} of seed {seed} has no violation {kind!r} in {rounds} rounds")
    violation, faults = whole
    # A fault that was due after the violation cannot have caused it, unless the violation is what never happened.
    early = [fault.index for fault in faults if fault.at_round <= violation.at_round]
    least = shrinker.minimal(early if shrinker.fails(early) else [fault.index for fault in faults])
    last = shrinker.fails(least)
    assert last is not None
    return Finding(seed, world, rounds, last[1], last[0], shrinker.runs, plant, kinds)


def command(found: Finding) -> str:
    """The command line that shows a finding again."""
    faults = ",".join(str(fault.index) for fault in found.faults) or "none"
    text = f"dspark sim --seed {found.seed} --world {found.world} --rounds {found.rounds} --faults {faults}"
    text += f" --kinds {','.join(found.kinds)}" if found.kinds else ""
    return f"{text} --plant {found.plant}" if found.plant else text
