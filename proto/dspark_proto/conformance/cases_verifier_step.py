"""STP for verifiers: what ends a round that is under way, and what must not.

Errors by code, scope and key; slots that fail beside others; replies that come late in their deadline. Spec: SPEC.md
3.3, 7.4, 12. Called by `catalogue`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..buffers import Buffer
from ..frame import encode_frame
from ..messages import ErrorMessage
from ..prefix import NO_KEY, Key
from ..registry import ErrorCode, Scope
from .as_drafter import HonestReply, Outcome, VerifierUnderTest
from .record import Family, Level, Role
from .verdicts import Unmet, Unsupported

STP = Family("STP", Role.VERIFIER)
E = ErrorCode
_ENDED = (Outcome.NEW_GENERATION, Outcome.CLOSED)


def _expect(found: Outcome, *allowed: Outcome) -> None:
    if found not in allowed:
        raise Unmet("the round " + " or ".join(one.value for one in allowed), found.value)


def _harmless(make: Callable[[HonestReply], Sequence[Buffer]], t: VerifierUnderTest) -> None:
    """Frames that end nothing: the right reply behind them is used."""
    t.connect()
    for _ in range(3):
        t.serves()
    t.accepts(lambda reply: [*make(reply), *reply.frames])
    t.serves()


def _error(reply: HonestReply, code: ErrorCode, scope: Scope, key: Key, session: int | None = None) -> list[Buffer]:
    about = reply.item.session if session is None else session
    return [encode_frame(ErrorMessage(code, scope, about, "test"), key)]


def _round_before(reply: HonestReply) -> Sequence[Buffer]:
    key = reply.key
    return _error(reply, E.CONTEXT_GAP, Scope.ROUND, Key(key.slot, key.generation, key.round - 1))


def _without_key(reply: HonestReply) -> Sequence[Buffer]:
    scopes = (Scope.ROUND, Scope.SLOT, Scope.SESSION)
    return [frame for scope in scopes for frame in _error(reply, E.CONTEXT_GAP, scope, NO_KEY)]


def _hello_required(reply: HonestReply) -> Sequence[Buffer]:
    return _error(reply, E.HELLO_REQUIRED, Scope.FRAME, reply.key)


for _number, _title, _anchor, _bug, _make in (
    (103, "ERROR of scope ROUND about the round before", "REQ-ERR-4", "an error that ends whatever round there is",
     _round_before),
    (104, "ERROR without a key, of scopes below CONNECTION", "REQ-ERR-4", "a slot that is guessed from a session",
     _without_key),
    (105, "a code of a lost connection, with scope FRAME", "REQ-ERR-7", "a reaction to the code and not to the scope",
     _hello_required),
):  # fmt: skip
    STP.add(_number, _title, _anchor, _bug, partial(_harmless, _make))


@STP.case(106, "a code of a bad frame, with scope SLOT", "REQ-ERR-7", "a reaction to the code and not to the scope")
def wide_scope(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    reply = t.honest(t.await_step())
    t.send(*_error(reply, E.BAD_PADDING, Scope.SLOT, reply.key), *reply.frames)
    _expect(t.lost(reply.item), *_ENDED)
    t.serves()


@STP.case(107, "ERROR for a free slot that names a live session", "REQ-GEN-2", "errors that are matched by session")
def free_slot(t: VerifierUnderTest) -> None:
    accept = t.connect()
    t.serves()
    t.drain_frames(0)
    used = {frame.prefix.slot for frame in t.log}
    free = next((slot for slot in range(accept.max_slots) if slot not in used), None)
    if free is None:
        raise Unsupported("a free slot")
    t.accepts(lambda reply: [
        *_error(reply, E.CONTEXT_GAP, Scope.SLOT, Key(free, reply.key.generation, reply.key.round)), *reply.frames,
    ])  # fmt: skip
    t.serves()


@STP.case(108, "ERROR about one of two rounds", "REQ-STP-2", "an error that takes a whole batch along")
def one_item(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    first, second = t.two_steps()
    wrong, right = t.honest(first), t.honest(second)
    t.send(*_error(wrong, E.DIGEST_MISMATCH, Scope.SLOT, wrong.key), *right.frames)
    _expect(t.outcome(first), *_ENDED)
    _expect(t.outcome(second), Outcome.COMMITTED, Outcome.CLOSED)
    t.serves()


@STP.case(109, "one of two rounds is never answered", "REQ-GEN-4", "a deadline that ends every slot")
def one_unanswered(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    first, second = t.two_steps()
    t.honest(first)
    t.watch(t.step_ms * 6 // 10)
    t.answer(second)
    _expect(t.outcome(second), Outcome.COMMITTED)
    third = t.await_step(second.slot)
    _expect(t.lost(first), *_ENDED)
    t.answer(third)
    _expect(t.outcome(third), Outcome.COMMITTED, Outcome.CLOSED)
    t.serves()


@STP.case(110, "a reply late in its deadline", "REQ-GEN-4", "giving up before the time that was agreed on",
          level=Level.SHOULD)  # fmt: skip
def late_in_time(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    item = t.await_step()
    reply = t.honest(item)
    t.watch(t.step_ms * 7 // 10)
    t.send(*reply.frames)
    _expect(t.outcome(item), Outcome.COMMITTED, Outcome.CLOSED)


@STP.case(111, "a round of a connection that is gone", "REQ-LIF-4", "a STEP that is sent again on the next connection")
def after_restart(t: VerifierUnderTest) -> None:
    """The books of the new connection know no slot, context or round of the old one."""
    for _ in range(3):
        t.connect()
        t.await_step()
        t.restart()
    t.connect()
    t.serves()


@STP.case(112, "ERROR of scope ROUND ends the round before its deadline", "REQ-ERR-4", "waiting for what is over")
def ends_at_once(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    reply = t.honest(t.await_step())
    t.send(*_error(reply, E.CONTEXT_GAP, Scope.ROUND, reply.key))
    _expect(t.outcome(reply.item, t.step_ms * 7 // 10), Outcome.PASSED_OVER, *_ENDED)
    t.serves()
