"""A run: worlds one after the other until enough rounds have been completed, and the sums over them.

Invariant: world w of a run is a function of (seed, w) alone, so any world can be run again without the others. Called
by `command` and by tests; prints nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TextIO

from dspark.sim.faults import KINDS
from dspark.sim.ledger import VIOLATIONS, Violation
from dspark.sim.randomness import branch
from dspark.sim.world import Result, World

WORLD_ROUNDS = (1000, 3000)
"""Rounds of a world, lowest and highest."""
AIMED = 20
"""A kind of fault that was set this often and never took hold is aimed at nothing: it counts as unverified."""
KEPT = 20


@dataclass
class Tally:
    """Sums over the worlds so far. `failures`: the worlds that failed, with their first violation."""

    worlds: int = 0
    rounds: int = 0
    proposals: int = 0
    virtual_ns: int = 0
    set_up: Counter[str] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)
    verified: Counter[str] = field(default_factory=Counter)
    target_only: Counter[str] = field(default_factory=Counter)
    discards: Counter[str] = field(default_factory=Counter)
    violations: Counter[str] = field(default_factory=Counter)
    liveness_ms: list[float] = field(default_factory=list)
    failures: list[tuple[int, int, Violation]] = field(default_factory=list)
    hashes: Any = field(default_factory=lambda: blake2b(digest_size=16))

    def add(self, result: Result, rounds: int) -> None:
        """One world more, of `rounds` rounds wanted."""
        self.worlds += 1
        self.rounds += result.rounds
        self.proposals += result.proposals
        self.virtual_ns += result.virtual_ns
        self.set_up.update(fault.kind for fault in result.faults)
        self.injected.update(fault.kind for fault in result.faults if fault.injected)
        self.verified.update(fault.kind for fault in result.faults if fault.injected and fault.verified)
        self.target_only += result.target_only
        self.discards += result.discards
        self.violations.update(one.kind for one in result.violations)
        self.liveness_ms += result.liveness_ms
        self.hashes.update(result.trace_hash.encode())
        if result.violations and len(self.failures) < KEPT:
            self.failures.append((result.world, rounds, result.violations[0]))

    @property
    def unverified(self) -> int:
        """Faults whose effect was not seen, and kinds that never found anything to act on."""
        missed = sum(self.injected.values()) - sum(self.verified.values())
        return missed + sum(self.set_up[kind] >= AIMED and not self.injected[kind] for kind in KINDS)

    @property
    def clean(self) -> bool:
        """Nothing that must not happen has happened, and every fault was seen to act."""
        return not self.violations and not self.unverified


def world_rounds(seed: int, world: int) -> int:
    """How long a world of a run is."""
    return branch(seed, "world", world, "rounds").randint(*WORLD_ROUNDS)


def run(
    seed: int, rounds: int, show: Callable[[Tally, float], None] | None = None,
    stopped: Callable[[], bool] = lambda: False, lines: TextIO | None = None,
    kinds: tuple[str, ...] = (),
) -> Tally:  # fmt: skip
    """Run worlds until `rounds` rounds are complete or `stopped()`; `show` is told after each, with the seconds."""
    tally, started = Tally(), time.monotonic()
    while tally.rounds < rounds and not stopped():
        wanted = min(world_rounds(seed, tally.worlds), max(1, rounds - tally.rounds))
        tally.add(World(seed, tally.worlds, wanted, None, lines, kinds).run(), wanted)
        if show is not None:
            show(tally, time.monotonic() - started)
    return tally


def report(tally: Tally, seed: int, seconds: float) -> dict[str, Any]:
    """The result object; `docs/internals/simulator.md` has its keys."""
    liveness = sorted(tally.liveness_ms)
    kinds = [kind for kind in KINDS if tally.set_up[kind]]
    return {
        "rounds": tally.rounds,
        "worlds": tally.worlds,
        "proposals": tally.proposals,
        "target_only_rounds": tally.rounds - tally.proposals,
        "virtual_hours": round(tally.virtual_ns / 3.6e12, 3),
        "faults": sum(tally.injected.values()),
        "faults_unverified": tally.unverified,
        **{kind: tally.violations[kind] for kind in VIOLATIONS},
        "liveness_max_ms": round(liveness[-1], 1) if liveness else None,
        "liveness_p99_ms": round(liveness[int(0.99 * (len(liveness) - 1))], 1) if liveness else None,
        "by_kind": {
            kind: {"set": tally.set_up[kind], "injected": tally.injected[kind], "verified": tally.verified[kind]}
            for kind in kinds
        },
        "discards": dict(tally.discards.most_common()),
        "target_only": dict(tally.target_only.most_common()),
        "trace_hash": tally.hashes.hexdigest(),
        "seed": seed,
        "seconds": round(seconds, 1),
        "failures": [
            {"world": world, "rounds": rounds, "kind": one.kind, "at_round": one.at_round, "detail": one.detail}
            for world, rounds, one in tally.failures
        ],
    }
