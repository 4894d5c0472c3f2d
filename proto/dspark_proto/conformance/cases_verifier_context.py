"""CTX for verifiers: credit that is short, told late, told twice or told by another connection.

The harness grants little and counts rows: its books refuse a verifier that sends more than it was granted. Spec:
SPEC.md 7.2, 12. Called by `catalogue`.
"""

from __future__ import annotations

from ..frame import encode_frame
from ..messages import Context, ErrorMessage, Pong, Step
from ..prefix import Key
from ..registry import ErrorCode, Scope
from .as_drafter import QUIET_MS, VerifierUnderTest
from .record import Family, Role
from .verdicts import Unmet, Unsupported

CTX = Family("CTX", Role.VERIFIER)
E = ErrorCode
_RECONNECTS = 6


def _refused_context(t: VerifierUnderTest) -> Key:
    """ERROR about the first CONTEXT of the connection; returns the key of the generation that it ends.

    A verifier without credit may bring the other rows with its STEP: that is not answered any more.
    """
    sent = [frame.prefix.key for frame in t.log if isinstance(frame.message, Context)]
    if not sent:
        raise Unsupported("context before the first STEP")
    t.say(ErrorMessage(E.BAD_BODY_CHECKSUM, Scope.SLOT, 0, "CONTEXT"), sent[0])
    t.drop_steps(sent[0].slot)
    return sent[0]


@CTX.case(104, "rows of a refused CONTEXT stay counted", "REQ-CTX-6", "credit that a verifier gives back to itself")
def refused_rows(t: VerifierUnderTest) -> None:
    """The books refuse rows beyond the window, in whatever generation they come."""
    t.starve(8)
    _refused_context(t)
    t.drain_frames(QUIET_MS)
    t.grants_credit = True
    t.grant()
    t.serves()


@CTX.case(105, "credit of an older connection is dead", "REQ-LIF-4", "a total that outlives its connection")
def older_credit(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    t.restart()
    t.starve(2)
    if t.rows_sent > 2:
        raise Unmet("at most 2 rows", f"{t.rows_sent} rows")
    t.grants_credit = True
    t.grant()
    t.serves()


@CTX.case(106, "rows of an older connection do not count", "REQ-CTX-4", "a window that shrinks with each reconnect")
def older_rows(t: VerifierUnderTest) -> None:
    for _ in range(_RECONNECTS):
        t.starve(32)
        t.restart()
    t.grants_credit = True
    t.connect(context_credit_rows=32)
    t.serves()


@CTX.case(107, "an answer to PING raises credit too", "REQ-CTX-7", "credit that only a PONG of nonce 0 may grant")
def credit_in_answer(t: VerifierUnderTest) -> None:
    t.grants_credit = False
    t.connect(context_credit_rows=2, heartbeat_ms=50)
    for _ in t.until(None, "a STEP"):
        t.take_in()
        t.book.frames_to_send()
        if t.waiting():
            break
        t.pump(what="a STEP")
    t.grants_credit = True
    t.grant()
    t.serves()


@CTX.case(108, "totals of credit that need 64 bits", "REQ-CTX-7", "a counter that is cut to 32 bits")
def large_totals(t: VerifierUnderTest) -> None:
    t.starve(2)
    t.unbounded_credit()
    t.say(Pong(t.epoch, 0, 0, 2**32))
    t.serves()
    t.say(Pong(t.epoch, 0, 0, 2**64 - 1))
    for _ in range(14):
        t.serves()


@CTX.case(109, "taps of STEP need no credit", "REQ-CTX-4", "rounds that starve when the window is used up")
def step_taps(t: VerifierUnderTest) -> None:
    t.connect()
    t.await_context()
    prompts = t.rows_sent
    t.restart()
    t.grants_credit = False
    t.connect(context_credit_rows=prompts + 8)
    for _ in range(8):
        t.serves()


@CTX.case(110, "credit before ACCEPT is none", "REQ-LIF-1", "a grant from before the connection")
def early_credit(t: VerifierUnderTest) -> None:
    t.grants_credit = False
    t.connect(lambda hello: [encode_frame(Pong(t.epoch, 0, 0, 1000))], context_credit_rows=2)
    t.await_context()
    if t.rows_sent > 2:
        raise Unmet("at most 2 rows", f"{t.rows_sent} rows")
    t.grants_credit = True
    t.grant()
    t.serves()


@CTX.case(111, "the same total three times", "REQ-CTX-7", "totals that are added up")
def same_total(t: VerifierUnderTest) -> None:
    t.starve(2)
    total = t.take_in(1)
    t.book.frames_to_send()
    for _ in range(3):
        t.say(Pong(t.epoch, 0, 0, total))
    t.drain_frames(QUIET_MS)
    if t.rows_sent > total:
        raise Unmet(f"at most {total} rows", f"{t.rows_sent} rows")
    t.grants_credit = True
    t.grant()
    t.serves()


@CTX.case(112, "an error about a CONTEXT, before the first STEP", "REQ-ERR-4", "errors that only a round can have")
def refused_early(t: VerifierUnderTest) -> None:
    t.starve(2)
    dead, mark = _refused_context(t), len(t.log)
    t.grants_credit = True
    t.grant()
    t.serves()
    keys = [frame.prefix.key for frame in t.log[mark:] if isinstance(frame.message, Context)]
    steps = [frame.message.items for frame in t.log[mark:] if isinstance(frame.message, Step)]
    keys += [Key(item.slot, item.generation) for items in steps for item in items]
    if any((key.slot, key.generation) == (dead.slot, dead.generation) for key in keys):
        raise Unmet(f"nothing more of generation {dead.generation} of slot {dead.slot}", "CONTEXT or STEP")
