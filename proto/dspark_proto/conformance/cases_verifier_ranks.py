"""TPR for verifiers: a group of ranks is one peer.

How ranks agree is not on the wire, and a harness with one connection cannot make one rank differ. What it sees is a
group that speaks with two voices: a second HELLO, a round that is asked for, committed or reset by each rank for
itself. Spec: SPEC.md 2. Called by `catalogue`.
"""

from __future__ import annotations

from collections import Counter

from ..limits import NO_COMMIT
from ..messages import Commit, Reset, Step, StepItem
from ..prefix import Key
from .as_drafter import Outcome, VerifierUnderTest
from .record import Family, Role
from .verdicts import Unmet

TPR = Family("TPR", Role.VERIFIER)
_ROUNDS = 24


def _served(t: VerifierUnderTest) -> list[StepItem]:
    """Rounds across the end of some sessions; returns every item of the connection."""
    t.connect()
    for _ in range(_ROUNDS):
        t.accepts(lambda reply: reply.frames)
    steps = [frame.message for frame in t.log if isinstance(frame.message, Step)]
    return [item for step in steps for item in step.items]


def _twice(what: str, counted: Counter[Key]) -> None:
    several = [key for key, times in counted.items() if times > 1]
    if several:
        raise Unmet(f"one {what} for each round", f"{counted[several[0]]} for {several[0]}")


@TPR.case(100, "one rank speaks for all", "REQ-ROL-2", "a HELLO, or a connection, of each rank")
def one_voice(t: VerifierUnderTest) -> None:
    known = t.peers()
    _served(t)
    if t.left or t.peers() > known:
        raise Unmet("one HELLO on one connection", f"{t.peers() - known} more connections")


@TPR.case(101, "a round is asked for once", "REQ-ROL-2", "ranks that choose depth or anchor for themselves")
def one_item(t: VerifierUnderTest) -> None:
    """The identical item again is a retry, which anybody may send."""
    _twice("STEP item", Counter(Key(item.slot, item.generation, item.round) for item in dict.fromkeys(_served(t))))


@TPR.case(102, "a round is committed once", "REQ-ROL-2", "ranks that each report what they committed")
def one_commit(t: VerifierUnderTest) -> None:
    _served(t)
    last: dict[tuple[int, int], int] = {}
    commits: Counter[Key] = Counter()
    for frame in t.log:
        message = frame.message
        if isinstance(message, Commit):
            commits[frame.prefix.key] += 1
        for item in message.items if isinstance(message, Step) else ():
            slot = item.slot, item.generation
            if item.accepted_count != NO_COMMIT:
                commits[Key(*slot, last.get(slot, 0))] += 1
            last[slot] = item.round
    _twice("commit", commits)


@TPR.case(103, "a lost generation is reset once", "REQ-ROL-2", "ranks that each take a new generation")
def one_reset(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    mark = len(t.log)
    item = t.await_step()
    t.honest(item)
    if t.lost(item) is not Outcome.NEW_GENERATION:
        t.serves()
        return
    t.answer(t.await_step(item.slot))
    resets = [frame for frame in t.log[mark:] if isinstance(frame.message, Reset) and frame.prefix.slot == item.slot]
    if len(resets) > 1:
        raise Unmet("one RESET", f"{len(resets)}, to {[frame.prefix.generation for frame in resets]}")
    t.serves()
