"""What one world is like: sizes, delays and kinds of faults, drawn from the seed so that a run is a swarm of worlds.

Called by `world`. Times are chosen so that watchdogs fire in earnest: a delay may exceed every deadline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from dspark.sim import faults
from dspark.sim.randomness import branch
from dspark_proto import SupportPolicy


@dataclass(frozen=True, slots=True)
class Options:
    """One world. `flights`: request groups of a Spark group whose rounds are under way at the same time.

    Delays are microseconds, lowest and highest. fault_every: rounds of the world per fault. refuses: a send to a dead
    worker fails at once, as on a socket whose peer has closed. direct: rows are written into staging by the transport.
    watched: every event of the ledgers is checked against the model.
    """

    groups: int
    workers: int
    ranks: int
    slots: int
    flights: int
    vocab: int
    depth: int
    support: SupportPolicy
    max_in_flight: int
    credit_rows: int
    heartbeat_ms: int
    deadline_ms: int
    rank_deadline_ms: int
    delay_us: tuple[int, int]
    draft_us: tuple[int, int]
    forward_us: tuple[int, int]
    read_us: tuple[int, int]
    prompt_max: int
    tokens_max: int
    kinds: tuple[str, ...]
    fault_every: int
    rule: str
    direct: bool
    refuses: bool
    audit_rate: float
    abort_permille: int
    watched: bool

    @property
    def context_max(self) -> int:
        """Positions that a session can come to."""
        return self.prompt_max + self.tokens_max + self.depth + 2


DENSE_EVERY = 3
"""Rounds per fault where the kinds are given."""


def draw_options(seed: int, world: int, kinds: tuple[str, ...] = ()) -> Options:
    """The options of one world of a run; `kinds` are used instead of drawn ones, with a fault every few rounds."""
    drawn = _drawn(seed, world)
    # A forged OPEN can raise a worker's generation above its verifier's, which no honest trace does.
    drawn = replace(drawn, watched=drawn.watched and "forge" not in (kinds or drawn.kinds))
    return replace(drawn, kinds=kinds, fault_every=DENSE_EVERY) if kinds else drawn


def _drawn(seed: int, world: int) -> Options:
    rng = branch(seed, "world", world, "options")
    deadline_ms = rng.choice((30, 100, 200, 500))
    forward_us = rng.choice(((10_000, 30_000), (50_000, 150_000), (100_000, 300_000)))
    slots = rng.choice((1, 3, 6, 8, 8, 12))
    flights = min(slots, rng.choice((1, 1, 2)))
    return Options(
        groups=rng.choice((1, 1, 2)),
        workers=rng.choice((1, 2, 2, 3)),
        ranks=2,
        slots=slots,
        flights=flights,
        vocab=rng.choice((8, 12, 16, 24, 32, 64)),
        depth=rng.randint(1, 4),
        support=rng.choice((SupportPolicy.K16, SupportPolicy.K16, SupportPolicy.DENSE)),
        max_in_flight=max(2, rng.randint(slots - 1, slots + 3)),
        # A window is spent once a turn: one that holds less than what the slots add in a turn starves them by design.
        credit_rows=rng.choice((8 * slots, 128, 1024)),
        heartbeat_ms=rng.choice((100, 300, 1000)),
        deadline_ms=deadline_ms,
        rank_deadline_ms=rng.choice((100, 500)) + 2 * forward_us[1] // 1000,
        delay_us=rng.choice(((20, 100), (50, 2000), (1000, 6000))),
        draft_us=rng.choice(((100, 400), (500, 3000))),
        forward_us=forward_us,
        read_us=rng.choice(((5, 20), (5, 20), (500, 4000))),
        prompt_max=rng.choice((3, 12, 30)),
        tokens_max=rng.choice((30, 90, 200)),
        kinds=_kinds(rng),
        fault_every=rng.choice((4, 6, 10, 20)),
        rule=rng.choice(("block", "standard", "standard")),
        direct=rng.random() < 0.25,
        refuses=rng.random() < 0.5,
        audit_rate=1.0,
        abort_permille=rng.choice((0, 5, 20)),
        watched=rng.random() < 0.15,
    )


def _kinds(rng: Random) -> tuple[str, ...]:
    """A subset: rare kinds come through only where frequent ones are absent."""
    share = rng.choice((0.2, 0.5, 1.0))
    chosen = tuple(kind for kind in faults.KINDS if rng.random() < share)
    return chosen or (faults.KINDS[rng.randrange(len(faults.KINDS))],)
