"""The fault program of a world: a list of faults, drawn from the seed, and what became of each.

A fault says when (after how many rounds of the world), where (a channel or a process) and how much. It is *injected*
when it takes hold of something, and *verified* when its effect has been seen at the other end: bytes that differ and
were refused, a frame that came late or twice, a timer that had to wait, an epoch that changed. Leaving out one fault of
a program does not change the others. Called by `nemesis`, `network` and `shrink`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from dspark_proto import MessageType

UP = (MessageType.OPEN, MessageType.CONTEXT, MessageType.STEP, MessageType.RESET, MessageType.CLOSE, MessageType.PING)
DOWN = (MessageType.ROW, MessageType.COMPLETION, MessageType.PONG, MessageType.ACCEPT, MessageType.ERROR)

FRAME_KINDS = ("drop", "duplicate", "delay", "reorder", "corrupt", "forge", "truncate")
PATH_KINDS = ("partition", "partition_up", "partition_down", "clog", "swizzle")
PROCESS_KINDS = ("pause", "kill", "restart", "clock_jump", "clock_stall", "lie", "drain")
RANK_KINDS = (
    "rank_drop", "rank_duplicate", "rank_delay", "rank_reorder", "rank_partition", "rank_pause", "rank_restart",
    "slow_rank",
)  # fmt: skip
KINDS = (*FRAME_KINDS, *PATH_KINDS, *PROCESS_KINDS, *RANK_KINDS)

_AFTER_OPEN = frozenset(
    {MessageType.ROW, MessageType.COMPLETION, MessageType.STEP, MessageType.OPEN, MessageType.CONTEXT}
)
"""What is forged: an on-path liar about slots. Who may connect is a matter of authentication."""


_WEIGHTS = dict.fromkeys(FRAME_KINDS, 8) | dict.fromkeys(RANK_KINDS[:4], 3)
"""A frame costs a round; a process or a path costs seconds in which nothing is drafted."""

_AT_MOST = {"lie": 2, "forge": 60}
"""Each may cost a quarantine, after which a worker is asked again ever more rarely."""


@dataclass(slots=True)
class Fault:
    """One entry of a program. `message`: the type of frame it waits for, 0 for any. `amount`: milliseconds, or bits."""

    index: int
    kind: str
    at_round: int
    group: int
    worker: int
    message: int
    amount: int
    injected: bool = False
    verified: bool = False

    def hit(self) -> None:
        """It took hold, and its effect was seen in the same moment."""
        self.injected = self.verified = True

    def __str__(self) -> str:
        message = f" {MessageType(self.message).name}" if self.message else ""
        place = f"g{self.group} w{self.worker}"
        return f"#{self.index} round {self.at_round}: {self.kind}{message} at {place}, amount {self.amount}"


def program(rng: Random, rounds: int, every: int, kinds: Sequence[str], groups: int, workers: int) -> tuple[Fault, ...]:
    """About one fault every `every` rounds of a world, of these kinds, the costly ones a few times at most."""
    if not kinds:
        return ()
    times = sorted(rng.randrange(1, rounds) for _ in range(rounds // every)) if rounds > 1 else []
    made = [_fault(rng, index, at, kinds, groups, workers) for index, at in enumerate(times)]
    seen: Counter[str] = Counter()
    kept = []
    for fault in made:
        seen[fault.kind] += 1
        if seen[fault.kind] <= _AT_MOST.get(fault.kind, len(made)):
            kept.append(fault)
    return tuple(kept)


def _fault(rng: Random, index: int, at: int, kinds: Sequence[str], groups: int, workers: int) -> Fault:
    kind = rng.choices(kinds, [_WEIGHTS.get(kind, 1) for kind in kinds])[0]
    group, worker = rng.randrange(groups), rng.randrange(workers)
    message, amount = _message(rng, kind), _amount(rng, kind)
    return Fault(index, kind, at, group, worker, message, amount)


def _message(rng: Random, kind: str) -> int:
    """The busy types more often; control messages of slots as often as they occur."""
    choices = [m for m in (*UP, *DOWN) if m in _AFTER_OPEN] if kind == "forge" else [*UP, *DOWN]
    choices += [MessageType.STEP, MessageType.ROW, MessageType.COMPLETION] * 2
    chosen = rng.randrange(len(choices) + (kind != "forge"))
    return int(choices[chosen]) if chosen < len(choices) else 0


def _amount(rng: Random, kind: str) -> int:
    """Milliseconds of a fault that lasts (some short, some beyond every watchdog), else 32 random bits."""
    if kind in ("corrupt", "forge", "truncate", "lie"):
        return rng.getrandbits(32)
    return int(10 ** rng.uniform(0.3, 3.3))
