"""CMT for verifiers: which rounds are committed, and with which tokens, when something happens around the reply.

Spec: SPEC.md 7.6, 7.7, 12. Called by `catalogue`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..buffers import Buffer
from ..frame import encode_frame
from ..messages import Drain, ErrorMessage, Reset
from ..registry import ErrorCode, Scope
from .as_drafter import HonestReply, Outcome, VerifierUnderTest
from .blocks import redrawn
from .drafted_rows import TOTAL, DraftedRow
from .record import Family, Role
from .verdicts import Unmet

CMT = Family("CMT", Role.VERIFIER)
E = ErrorCode


def _expect(found: Outcome, *allowed: Outcome) -> None:
    if found not in allowed:
        raise Unmet("the round " + " or ".join(one.value for one in allowed), found.value)


def _bad(reply: HonestReply) -> list[Buffer]:
    """A reply whose checksum is wrong."""
    return [reply.frames[0], reply.with_completion(reply_checksum=bytes(8))]


def _about(reply: HonestReply, code: ErrorCode, scope: Scope) -> Buffer:
    """ERROR under the key of the reply's round."""
    return encode_frame(ErrorMessage(code, scope, reply.item.session, "STEP"), reply.key)


def _refused(spoil: Callable[[HonestReply], Sequence[Buffer]], t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    t.refuses(spoil)


CMT.add(103, "all rows, then ERROR of scope ROUND", "REQ-CMT-5", "rows that are used although the round was given up",
        partial(_refused, lambda reply: [reply.frames[0], _about(reply, E.CONTEXT_GAP, Scope.ROUND)]))  # fmt: skip
CMT.add(104, "a wrong reply, then the right one", "REQ-ERR-6", "a COMPLETION that is dropped where its round must be",
        partial(_refused, lambda reply: [*_bad(reply), *reply.frames]))  # fmt: skip


@CMT.case(105, "a reply, and the restart right behind it", "REQ-CMT-5", "a commit on another connection")
def then_restart(t: VerifierUnderTest) -> None:
    """The books of the new connection know no round that could be committed."""
    t.connect()
    t.serves()
    reply = t.honest(t.await_step())
    t.send(*reply.frames, encode_frame(ErrorMessage(E.HELLO_REQUIRED, Scope.CONNECTION, 0, "connection")))
    t.await_hello()
    t.connect()
    for _ in range(4):
        t.serves()


@CMT.case(106, "a reply, and ERROR of scope SLOT right behind it", "REQ-CMT-5", "a commit in another generation")
def then_error(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    reply = t.honest(t.await_step())
    t.send(*reply.frames, _about(reply, E.CONTEXT_GAP, Scope.SLOT))
    t.lost(reply.item)
    for _ in range(4):
        t.serves()


@CMT.case(107, "one slot's reply is wrong, another's is right", "REQ-ERR-6", "a fault that takes other rounds along")
def one_of_two(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    first, second = t.two_steps()
    wrong, right = t.honest(first), t.honest(second)
    t.send(wrong.frames[0], right.frames[0], _bad(wrong)[1], right.frames[1])
    _expect(t.outcome(first), Outcome.PASSED_OVER, Outcome.NEW_GENERATION, Outcome.CLOSED)
    _expect(t.outcome(second), Outcome.COMMITTED, Outcome.CLOSED)
    t.serves()


def _token_rounds(row: Callable[[int], DraftedRow], t: VerifierUnderTest) -> None:
    """Rounds whose drafts are all one token: the books know it, and refuse a digest over others."""
    t.connect()
    for _ in range(8):
        item = t.await_step()
        t.send(*t.honest(item, [row(t.book.parameters.compatibility.vocab_size)] * item.depth).frames)
        _expect(t.outcome(item), Outcome.COMMITTED, Outcome.CLOSED)


CMT.add(108, "drafts of token 0", "REQ-CMT-1", "a token that is taken for none",
        partial(_token_rounds, lambda size: DraftedRow((0,), (TOTAL,), 0)))  # fmt: skip
CMT.add(109, "drafts of the last token of the vocabulary", "REQ-CMT-1", "a bound that is off by one",
        partial(_token_rounds, lambda size: DraftedRow((size - 1,), (TOTAL,), size - 1)))  # fmt: skip


@CMT.case(110, "a reply after DRAIN", "REQ-DRN-1", "rounds that are given up when the drafter begins to leave")
def while_draining(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    item = t.await_step()
    reply = t.honest(item)
    t.send(encode_frame(Drain(t.epoch, 2000)), *reply.frames)
    _expect(t.outcome(item), Outcome.COMMITTED, Outcome.CLOSED)


@CMT.case(111, "a second reply with other tokens", "REQ-GEN-2", "a reply that replaces the one that was used")
def second_reply(t: VerifierUnderTest) -> None:
    """The books know the tokens of the first one. It comes whole, so the second one is about a round that has ended."""
    t.connect()
    t.serves()
    for _ in range(4):
        item = t.await_step()
        first = t.honest(item)
        t.send(*first.frames, *redrawn(first, 500, t.book.parameters.compatibility.vocab_size))
        _expect(t.outcome(item), Outcome.COMMITTED, Outcome.CLOSED)


def _failed_behind(reply: HonestReply) -> Sequence[Buffer]:
    """COMPLETION of a failed round behind the right one."""
    return [*reply.frames, reply.with_completion(status=102, row_count=0, reply_bytes=0, reply_checksum=bytes(8))]


@CMT.case(112, "a failed COMPLETION behind a right one", "REQ-GEN-2", "a generation that a duplicate can end")
def late_failure(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    mark = len(t.log)
    for _ in range(3):
        t.accepts(_failed_behind)
    if any(isinstance(frame.message, Reset) for frame in t.log[mark:]):
        raise Unmet("rounds of one generation", "RESET")
