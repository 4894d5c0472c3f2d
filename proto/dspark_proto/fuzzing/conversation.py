"""A whole session between two connections, frame by frame: seeds, stages and script of the fuzzer.

``conversation`` makes the calls of both callers and yields each frame; whoever drives it delivers the frame,
or something else. Invariants: every message type but REJECT, CHALLENGE and ERROR occurs (``recorded`` adds those); slot
BYSTANDER stays in the round that it enters at Stage IN_FLIGHT; with perfect delivery the bytes are always the
same. A session may be under a shared secret, or of version 1; the script is one. Called by ``campaign`` and the tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from functools import cache
from typing import Final

from ..frame import encode_frame
from ..hello import Challenge, Reject
from ..messages import ErrorMessage
from ..prefix import Key
from ..registry import Cause, ErrorCode, Scope
from .pair import DRAFTER_EPOCH, SESSION, VERIFIER_EPOCH, Pair, Parcel, Side, Terms

BYSTANDER: Final = 3
"""The slot whose round no other slot's frame may touch."""

OTHER_SESSION: Final = 5000
"""First session id of the second recorded session, from which frames are spliced in."""


class Stage(Enum):
    """States in which connections are fuzzed.

    CHALLENGED and PROOF_SENT are those under a secret: before and after the verifier has the drafter's challenge.
    """

    FRESH = "fresh"
    HELLO_SENT = "hello_sent"
    HELLO_RECEIVED = "hello_received"
    OPEN = "open"
    IN_FLIGHT = "in_flight"
    HALF_REPLY = "half_reply"
    REPLIED = "replied"
    SECOND_ROUND = "second_round"
    DORMANT = "dormant"
    DRAINING = "draining"
    CHALLENGED = "challenged"
    PROOF_SENT = "proof_sent"
    V1_OPEN = "v1_open"
    V1_IN_FLIGHT = "v1_in_flight"
    V1_REPLIED = "v1_replied"

    @property
    def terms(self) -> Terms:
        """What the two sides of a pair in this stage offer."""
        if self in (Stage.CHALLENGED, Stage.PROOF_SENT):
            return Terms.SECRET
        return Terms.V1 if self in _IN_VERSION_1.values() else Terms.V2


_IN_VERSION_1: Final = {
    Stage.OPEN: Stage.V1_OPEN,
    Stage.IN_FLIGHT: Stage.V1_IN_FLIGHT,
    Stage.REPLIED: Stage.V1_REPLIED,
}
"""How a stage of the script is called in a session of version 1."""


STAGES: Final = (*Stage, Stage.OPEN, Stage.IN_FLIGHT, Stage.IN_FLIGHT, Stage.HALF_REPLY, Stage.SECOND_ROUND)
"""What a batch chooses from; where most can go wrong stands twice."""


def conversation(pair: Pair) -> Iterator[Parcel | Stage]:
    """Every frame of a session in order, and a Stage where one is reached."""
    for step in _script(pair):
        if isinstance(step, Stage) and pair.terms is Terms.V1:
            yield _IN_VERSION_1.get(step, step)
        else:
            yield step


def _script(pair: Pair) -> Iterator[Parcel | Stage]:
    yield Stage.FRESH
    (hello,) = pair.send(Side.DRAFTER, pair.verifier.hello, pair.now_ns)
    yield Stage.HELLO_SENT
    yield hello
    if pair.terms is Terms.SECRET:
        yield Stage.CHALLENGED
        yield from pair.sent()
        yield Stage.PROOF_SENT
        yield from pair.sent()
    yield Stage.HELLO_RECEIVED
    yield from pair.sent()
    yield from _fill_slots(pair)
    yield Stage.OPEN
    yield from _connection_messages(pair)
    yield from _first_round(pair)
    yield Stage.REPLIED
    yield from _second_round(pair)
    yield from _ends(pair)


def _fill_slots(pair: Pair) -> Iterator[Parcel]:
    for slot in range(4):
        yield from pair.open(slot)
    yield from pair.context(0, [7, 8, 9], with_tokens=True)
    yield from pair.context(1, [3], with_tokens=False)
    yield from pair.context(BYSTANDER, [5, 6], with_tokens=True)
    yield from pair.sent()


def _connection_messages(pair: Pair) -> Iterator[Parcel]:
    yield from pair.send(Side.DRAFTER, pair.verifier.ping, pair.now_ns)
    yield from pair.sent()
    yield from pair.send(Side.DRAFTER, pair.verifier.stats)
    yield from pair.sent()


def _first_round(pair: Pair) -> Iterator[Parcel | Stage]:
    yield from pair.step(1, BYSTANDER)
    yield from pair.step(1, 0)
    yield from pair.step(1, 1, 2)
    yield Stage.IN_FLIGHT
    for sent, parcel in enumerate(pair.replies(0)):
        if sent == 1:
            yield Stage.HALF_REPLY
        yield parcel
    yield from pair.replies(1, 2)


def _second_round(pair: Pair) -> Iterator[Parcel | Stage]:
    """Slot 0 commits with a message, slots 1 and 2 in their next STEP; one draft fails."""
    for slot in (0, 1, 2):
        pair.advance(slot, 2, 11)
    yield from pair.commit(0, 2)
    yield from pair.step(2, 0)
    yield from pair.step(2, 1, 2, accepted=2)
    yield Stage.SECOND_ROUND
    yield from pair.replies(0, 1)
    failed = [item for item in pair.items if item.slot == 2]
    pair.items = [item for item in pair.items if item.slot != 2]
    yield from (Parcel(Side.VERIFIER, bytes(one)) for item in failed for one in pair.drafter.fail(item))


def _ends(pair: Pair) -> Iterator[Parcel | Stage]:
    verifier = pair.verifier
    yield from pair.send(Side.DRAFTER, verifier.cancel, 1, Cause.PREEMPTED)
    yield Stage.DORMANT
    yield from pair.send(Side.DRAFTER, verifier.reset, 2, Cause.REPLY_REFUSED)
    yield from pair.send(Side.VERIFIER, pair.drafter.drain, 1000)
    yield Stage.DRAINING
    yield from pair.send(Side.DRAFTER, verifier.close, 1)
    yield from pair.send(Side.DRAFTER, verifier.close, 2)


def perfect(pair: Pair, until: Stage | None = None) -> Iterator[Parcel]:
    """Drive the conversation over a perfect link, up to ``until``; yields what was delivered."""
    for step in conversation(pair):
        if isinstance(step, Stage):
            if step is until:
                return
            continue
        pair.deliver(step.to, step.frame)
        yield step


def staged(stage: Stage) -> Pair:
    """A new pair in ``stage``."""
    pair = Pair(terms=stage.terms)
    for _ in perfect(pair, stage):
        pass
    return pair


@cache
def recorded(session: int = SESSION, terms: Terms = Terms.V2) -> tuple[Parcel, ...]:
    """All frames of one session, the reply to the bystander, and the types that a good session lacks."""
    pair = Pair(session, terms)
    frames = list(perfect(pair))
    slot_key = Key(0, pair.verifier.generation(0), 1)
    reject = Reject(DRAFTER_EPOCH, VERIFIER_EPOCH, 1, ErrorCode.INCOMPATIBLE, "vocab_size", "1000", "999")
    slot_error = ErrorMessage(ErrorCode.DRAFT_FAILED, Scope.SLOT, session, "STEP")
    frames += pair.replies(BYSTANDER)
    challenge = Challenge(DRAFTER_EPOCH, VERIFIER_EPOCH, 1, bytes(32))
    frames += [Parcel(Side.VERIFIER, bytes(encode_frame(one))) for one in (reject, challenge)]
    frames.append(Parcel(Side.VERIFIER, bytes(encode_frame(slot_error, slot_key))))
    frames.append(Parcel(Side.DRAFTER, bytes(encode_frame(ErrorMessage(ErrorCode.BAD_FIELD, Scope.FRAME, 0, "x")))))
    return tuple(frames)


@cache
def expected_at(stage: Stage) -> tuple[Parcel, ...]:
    """The frames that a session delivers after ``stage``, soonest first: what its connections can use."""
    before = sum(1 for _ in perfect(Pair(terms=stage.terms), stage))
    return recorded(terms=stage.terms)[before : before + 12]
