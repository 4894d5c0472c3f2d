"""STP, CTX, CMT, GEN, TMO, BUF, LIV, PFX, VER and TRN for verifiers: what the harness as a drafter can see.

The books (`as_drafter`) check every frame of the verifier; these cases bring about the situations. Spec: SPEC.md 3,
6 to 8, 11, 12. Called by `catalogue`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ..buffers import Buffer
from ..frame import encode_frame
from ..messages import Drain, ErrorMessage, Open, Ping, Pong, Reset, Stats
from ..prefix import Key
from ..registry import ErrorCode, MessageType, Scope
from .as_drafter import HonestReply, Outcome, VerifierUnderTest
from .forge import NEWER_TYPE, flipped, patched, raw_frame
from .record import Family, Level, Role
from .verdicts import TimedOut, Unmet, Unsupported

STP = Family("STP", Role.VERIFIER)
CTX = Family("CTX", Role.VERIFIER)
CMT = Family("CMT", Role.VERIFIER)
GEN = Family("GEN", Role.VERIFIER)
TMO = Family("TMO", Role.VERIFIER)
BUF = Family("BUF", Role.VERIFIER)
LIV = Family("LIV", Role.VERIFIER)
PFX = Family("PFX", Role.VERIFIER)
VER = Family("VER", Role.VERIFIER)
TRN = Family("TRN", Role.VERIFIER)
E = ErrorCode


@STP.case(100, "a long run keeps every rule", "REQ-STP-4", "rounds that drift from the context")
def long_run(t: VerifierUnderTest) -> None:
    t.connect()
    for _ in range(60):
        t.serves()


@STP.case(101, "one unresolved round for each slot", "REQ-STP-3", "a second STEP before the first is resolved")
def one_round(t: VerifierUnderTest) -> None:
    t.connect()
    item = t.await_step()
    t.honest(item)
    t.watch(t.step_ms * 2 // 3)
    again = [one for one in t.waiting() if (one.slot, one.generation) == (item.slot, item.generation)]
    if again:
        raise Unmet("no other round of the slot", f"round {again[0].round} beside {item.round}")


@STP.case(102, "every session has its own slot", "REQ-OPN-2", "two sessions in one slot")
def own_slots(t: VerifierUnderTest) -> None:
    t.connect()
    seen: dict[int, int] = {}
    for _ in range(24):
        item = t.await_step()
        owner = seen.setdefault(item.session, item.slot)
        if owner != item.slot:
            raise Unmet(f"session {item.session} in slot {owner}", f"slot {item.slot}")
        t.answer(item)


@CTX.case(100, "the verifier keeps within the credit", "REQ-CTX-4", "context that the drafter has no room for")
def credit(t: VerifierUnderTest) -> None:
    t.grants_credit = False
    t.connect(context_credit_rows=2)
    try:
        for _ in range(20):
            t.pump(100)
    except TimedOut:
        pass
    rows = t.book._rows_received
    if rows > 2:
        raise Unmet("at most 2 rows", f"{rows} rows")
    t.grants_credit = True
    for _ in range(3):
        t.grant()
        t.drain_frames(100)
    t.serves()


@CTX.case(101, "a grant of another epoch is dropped", "REQ-EPO-1", "credit from another process")
def foreign_grant(t: VerifierUnderTest) -> None:
    t.grants_credit = False
    t.connect(context_credit_rows=1)
    t.say(Pong(t.epoch ^ 1, 0, 0, 1000))
    t.drain_frames(100)
    if t.book._rows_received > 1:
        raise Unmet("at most 1 row", f"{t.book._rows_received} rows")


@CTX.case(102, "a total of credit below the last one", "REQ-CTX-4", "credit that is taken back")
def lower_total(t: VerifierUnderTest) -> None:
    t.grants_credit = False
    t.connect(context_credit_rows=2)
    t.drain_frames(100)
    t.grants_credit = True
    t.grant()
    t.say(Pong(t.epoch, 0, 0, 1))
    for _ in range(12):
        t.serves()


@CTX.case(103, "context starts again after RESET", "REQ-GEN-3", "a generation that builds on rows of the one before")
def reseeded(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    item = t.await_step()
    t.honest(item)
    t.lost(item)
    following = t.await_step(item.slot)
    if following.tap_first + following.tap_rows != following.anchor_position or following.generation == item.generation:
        raise Unmet("all positions before the anchor in a new generation", f"from {following.tap_first}")
    t.answer(following)
    t.serves()


@CMT.case(100, "a refused round is not committed", "REQ-CMT-5", "a commit of a proposal that was discarded")
def not_committed(t: VerifierUnderTest) -> None:
    t.connect()
    for _ in range(4):
        t.serves()
        t.refuses(lambda reply: [reply.frames[0], reply.with_completion(reply_checksum=bytes(8))])


@CMT.case(101, "the rows that were sent are the ones that count", "REQ-DIG-1", "a commit of tokens from another round")
def right_tokens(t: VerifierUnderTest) -> None:
    """The books know the drafted tokens, and refuse a digest that covers others."""
    t.connect()
    for shift in range(12):
        item = t.await_step()
        reply = t.honest(item, t.rows_for(item, shift * 5))
        t.send(*reply.frames)
        t.outcome(item)


@CMT.case(102, "a commit's numbers fit its round", "REQ-CMT-1", "more accepted drafts than rows")
def numbers(t: VerifierUnderTest) -> None:
    t.connect()
    previous: HonestReply | None = None
    for _ in range(12):
        item = t.await_step()
        if previous is not None and item.slot == previous.item.slot and item.accepted_count != 255:
            position = previous.item.anchor_position + item.accepted_count + 1
            if item.accepted_count > previous.item.depth or item.anchor_position < position:
                raise Unmet(f"an anchor at {position} or beyond", f"{item.anchor_position}")
        previous = t.answer(item)


def _ignored(extra: Callable[[HonestReply], Sequence[Buffer]], t: VerifierUnderTest) -> None:
    """Frames that must be dropped; the right reply after them is used."""
    t.connect()
    t.serves()
    t.accepts(lambda reply: [*extra(reply), *reply.frames])
    t.serves()


def _rekeyed(reply: HonestReply, generation: int = 0, round_: int = 0, slot: int = 0) -> list[bytes]:
    key = reply.key
    other = Key(key.slot + slot, max(0, key.generation + generation), max(0, key.round + round_))
    return [
        bytes(encode_frame(reply.row, other, reply.bodies)),
        bytes(encode_frame(replace(reply.completion, reply_checksum=bytes(8)), other)),
    ]


_KEYS: tuple[tuple[int, str, Callable[[HonestReply], Sequence[Buffer]]], ...] = (
    (100, "an older generation", lambda reply: _rekeyed(reply, generation=-1)),
    (101, "a newer generation", lambda reply: _rekeyed(reply, generation=1)),
    (102, "an older round", lambda reply: _rekeyed(reply, round_=-1)),
    (103, "a later round", lambda reply: _rekeyed(reply, round_=1)),
    (104, "a slot out of range", lambda reply: _rekeyed(reply, slot=1000)),
    (105, "no slot", lambda reply: [
        bytes(encode_frame(reply.row, Key(), reply.bodies)), reply.with_completion(Key(), reply_checksum=bytes(8)),
    ]),
)  # fmt: skip
for _number, _title, _extra in _KEYS:
    GEN.add(_number, f"a reply to {_title}", "REQ-PFX-9" if _number > 103 else "REQ-GEN-2",
            "a reply to another STEP that is used", partial(_ignored, _extra))  # fmt: skip


@GEN.case(106, "the reply of the round before, again", "REQ-GEN-2", "a late duplicate that is used")
def replayed(t: VerifierUnderTest) -> None:
    t.connect()
    old: list[bytes] = []

    def spoil(reply: HonestReply) -> Sequence[Buffer]:
        frames = [*old, *reply.frames]
        old[:] = reply.frames
        return frames

    for _ in range(6):
        t.accepts(spoil)


@GEN.case(107, "generations only grow, across reconnects too", "REQ-GEN-1", "keys that come back after a reconnect")
def growing(t: VerifierUnderTest) -> None:
    highest: dict[int, int] = {}
    for _ in range(3):
        t.connect()
        t.serves()
        opened: dict[int, int] = {}
        for frame in t.log:
            if isinstance(frame.message, Open):
                opened[frame.prefix.slot] = frame.prefix.generation
        for slot, generation in opened.items():
            if generation <= highest.get(slot, 0):
                raise Unmet(f"a generation above {highest[slot]} in slot {slot}", str(generation))
            highest[slot] = generation
        t.restart()
    t.connect()
    t.serves()


@GEN.case(108, "replies of an older process are dropped", "REQ-EPO-1", "a reply that outlives a restart")
def older_process(t: VerifierUnderTest) -> None:
    t.connect()
    kept: list[HonestReply] = []
    item = t.await_step()
    kept.append(t.honest(item))
    t.restart()
    t.epoch ^= 0xF0
    t.connect()
    t.accepts(lambda reply: [*kept[0].frames, *reply.frames])


def _error(scope: Scope, outcome: Outcome, t: VerifierUnderTest) -> None:
    """ERROR under the key of the unresolved round ends what its scope says."""
    t.connect()
    t.serves()
    item = t.await_step()
    reply = t.honest(item)
    message = ErrorMessage(E.CONTEXT_GAP, scope, item.session, "test")
    t.send(encode_frame(message, reply.key), *([] if outcome is not Outcome.COMMITTED else reply.frames))
    found = t.outcome(item)
    allowed = {outcome} if outcome is Outcome.COMMITTED else {outcome, Outcome.NEW_GENERATION, Outcome.CLOSED}
    if found not in allowed:
        raise Unmet(outcome.value, found.value)
    t.serves()


for _number, _scope, _outcome in (
    (110, Scope.FRAME, Outcome.COMMITTED),
    (111, Scope.ROUND, Outcome.PASSED_OVER),
    (112, Scope.SLOT, Outcome.NEW_GENERATION),
    (113, Scope.SESSION, Outcome.NEW_GENERATION),
):
    GEN.add(_number, f"ERROR of scope {_scope.name}", "REQ-ERR-4", "an error that ends too much, or too little",
            partial(_error, _scope, _outcome))  # fmt: skip


@GEN.case(114, "ERROR of another generation is dropped", "REQ-ERR-4", "an old error that ends a new round")
def stale_error(t: VerifierUnderTest) -> None:
    def extra(reply: HonestReply) -> Sequence[Buffer]:
        message = ErrorMessage(E.CONTEXT_GAP, Scope.SLOT, reply.item.session, "test")
        return [encode_frame(message, Key(reply.key.slot, reply.key.generation + n, reply.key.round)) for n in (-1, 1)]

    _ignored(extra, t)


@GEN.case(115, "ERROR of scope CONNECTION ends every slot", "REQ-ERR-4", "sessions on a connection that is gone")
def connection_error(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    t.restart()
    t.connect()
    t.serves()


@GEN.case(116, "an error beside a round ends the slot's generation", "REQ-ERR-4", "a lost CONTEXT that nobody notices")
def idle_error(t: VerifierUnderTest) -> None:
    t.connect()
    item = t.await_step()
    reply = t.honest(item)
    before = len([frame for frame in t.log if isinstance(frame.message, Reset)])
    message = ErrorMessage(E.BAD_BODY_CHECKSUM, Scope.SLOT, item.session, "CONTEXT")
    t.send(encode_frame(message, Key(item.slot, item.generation, 0)), *reply.frames)
    outcome = t.lost(item)
    resets = len([frame for frame in t.log if isinstance(frame.message, Reset)])
    if outcome is not Outcome.CLOSED and resets == before:
        raise Unmet("RESET or CLOSE", outcome.value)
    t.serves()


@TMO.case(100, "no reply: a new generation", "REQ-GEN-4", "waiting for ever, or going on in the old generation")
def no_reply(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    item = t.await_step()
    t.honest(item)
    outcome = t.lost(item)
    if outcome not in (Outcome.NEW_GENERATION, Outcome.CLOSED):
        raise Unmet("RESET or CLOSE after the step deadline", outcome.value)
    t.serves()


@TMO.case(101, "half a reply: a new generation", "REQ-GEN-4", "rows without COMPLETION that are used")
def half_reply(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    item = t.await_step()
    t.send(t.honest(item).frames[0])
    outcome = t.lost(item)
    if outcome not in (Outcome.NEW_GENERATION, Outcome.CLOSED):
        raise Unmet("RESET or CLOSE after the step deadline", outcome.value)
    t.serves()


@TMO.case(102, "a late reply is dropped", "REQ-GEN-2", "a reply that comes after its round was given up")
def late(t: VerifierUnderTest) -> None:
    t.connect()
    item = t.await_step()
    reply = t.honest(item)
    t.lost(item)
    t.accepts(lambda right: [*reply.frames, *right.frames])
    t.send(*reply.frames)
    t.serves()


@TMO.case(103, "the generation is bumped before the next STEP", "REQ-GEN-4", "two rounds under one key")
def bumped(t: VerifierUnderTest) -> None:
    t.connect()
    item = t.await_step()
    t.honest(item)
    t.lost(item)
    following = t.await_step(item.slot)
    if following.generation <= item.generation:
        raise Unmet(f"a generation above {item.generation}", str(following.generation))
    t.answer(following)
    t.serves()


@TMO.case(104, "a drafter that answers nothing, not even PING", "REQ-PNG-2", "believing in a peer that was stopped",
          tags=("slow",))  # fmt: skip
def stopped(t: VerifierUnderTest) -> None:
    t.connect(heartbeat_ms=50)
    t.serves()
    t.await_hello()
    t.connect()
    t.serves()


@TMO.case(105, "PING each heartbeat", "REQ-PNG-2", "silence that is taken for life", level=Level.SHOULD)
def heartbeat(t: VerifierUnderTest) -> None:
    t.connect(heartbeat_ms=50)
    t.await_step()
    pings = 0
    for _ in range(200):
        if isinstance(t.pump(1000, "a PING").message, Ping):
            pings += 1
        if pings == 3:
            return
    raise Unmet("3 PINGs", f"{pings}")


def _exhausts(spoil: Callable[[HonestReply], Sequence[Buffer]], t: VerifierUnderTest) -> None:
    """Far more lost rounds than staging blocks: every block must come back."""
    t.connect(max_in_flight=2)
    for _ in range(10):
        item = t.await_step()
        t.send(*spoil(t.honest(item)))
        t.lost(item)
    t.serves()


_LOST: tuple[tuple[int, str, str, Callable[[HonestReply], Sequence[Buffer]]], ...] = (
    (
        100,
        "refused completions",
        "REQ-STG-2",
        lambda reply: [reply.frames[0], reply.with_completion(reply_checksum=bytes(8))],
    ),
    (101, "refused rows", "REQ-STG-2", lambda reply: [reply.with_row(depth=1), reply.frames[1]]),
    (102, "rounds without an answer", "REQ-STG-2", lambda reply: [reply.frames[0]]),
    (103, "failed rounds", "REQ-STG-2", lambda reply: [reply.with_completion(status=102, row_count=0)]),
    (104, "right replies", "REQ-STG-2", lambda reply: reply.frames),
    (
        105,
        "ERRORs",
        "REQ-STG-2",
        lambda reply: [encode_frame(ErrorMessage(E.CONTEXT_GAP, Scope.SLOT, 0, "x"), reply.key)],
    ),
)
_GENERATIONS_LOST = {102, 103, 105}
"""Ten in a row: a verifier may rest ever longer between them, which takes its time on a real transport."""

for _number, _title, _anchor, _spoil in _LOST:
    BUF.add(_number, f"staging comes back after {_title}", _anchor, "a block that is never released",
            partial(_exhausts, _spoil), tags=("losses",) if _number in _GENERATIONS_LOST else ())  # fmt: skip


@BUF.case(
    106, "a late reply does not write into the next round", "REQ-STG-2", "staging that is leased while it is written"
)
def poison(t: VerifierUnderTest) -> None:
    t.connect(max_in_flight=2)
    item = t.await_step()
    old = t.honest(item, t.rows_for(item, 60))
    t.lost(item)
    for _ in range(6):
        t.accepts(lambda reply: [reply.frames[0], *old.frames, reply.frames[1]])


@BUF.case(107, "a restart gives every block back", "REQ-STG-1", "blocks of a connection that is gone")
def after_restart(t: VerifierUnderTest) -> None:
    for _ in range(6):
        t.connect(max_in_flight=2)
        t.honest(t.await_step())
        t.restart()
    t.connect(max_in_flight=2)
    t.serves()


@LIV.case(100, "PING is answered with its nonce", "REQ-PNG-1", "a drafter that takes its verifier for dead")
def ping(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    for nonce in (1, 2**32, 2**64 - 1):
        t.say(Ping(t.epoch, nonce))
        t.pong(nonce)


@LIV.case(101, "PING of another epoch", "REQ-EPO-1", "answering another process")
def other_epoch(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    t.say(Ping(t.epoch ^ 1, 4242))
    t.say(Ping(t.epoch, 7))
    for _ in t.until(None, "PONG 7"):
        message = t.pump().message
        if isinstance(message, Pong) and message.nonce == 4242:
            raise Unmet("no answer to another epoch", "PONG 4242")
        if isinstance(message, Pong) and message.nonce == 7:
            break
    t.serves()


def _rounds(count: int, t: VerifierUnderTest) -> None:
    """Right replies, until there are enough or no STEP comes any more."""
    for _ in range(count):
        try:
            t.answer(t.await_step())
        except TimedOut:
            return


@LIV.case(102, "after DRAIN no session is opened", "REQ-DRN-1", "sessions for a drafter that leaves")
def drain(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    t.say(Drain(t.epoch, 5000))
    t.drain_frames(0)
    mark = len(t.log)
    _rounds(60, t)
    if any(isinstance(frame.message, Open) for frame in t.log[mark:]):
        raise Unmet("no OPEN after DRAIN", "OPEN")


@LIV.case(103, "DRAIN of another epoch", "REQ-EPO-1", "leaving a drafter that stays")
def foreign_drain(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    t.say(Drain(t.epoch ^ 1, 5000))
    t.drain_frames(0)
    mark = len(t.log)
    _rounds(60, t)
    t.log = t.log[mark:]
    if not any(isinstance(frame.message, Open) for frame in t.log):
        raise Unsupported("a new session within 60 rounds")


@LIV.case(104, "ERROR is not answered with ERROR", "REQ-ERR-3", "two peers that refuse each other's refusals")
def no_error_back(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    mark = len(t.log)
    t.send(raw_frame(MessageType.ERROR, b"\xc1", Key(0, 1, 1)), raw_frame(MessageType.ERROR, b"\x90"))
    t.say(ErrorMessage(E.BAD_FIELD, Scope.FRAME, 0, "x"))
    t.serves()
    if any(isinstance(frame.message, ErrorMessage) for frame in t.log[mark:]):
        raise Unmet("no ERROR", "ERROR")


@LIV.case(105, "an unasked STATS report", "REQ-STA-1", "a report that ends the connection")
def unasked(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    t.say(Stats(t.epoch, 1))
    t.serves()


def _junk(make: Callable[[], bytes], t: VerifierUnderTest) -> None:
    """Junk in the middle of a reply is dropped from its prefix, and the reply is used."""
    t.connect()
    t.serves()
    t.accepts(lambda reply: [reply.frames[0], make(), reply.frames[1]])
    t.serves()


def _a_ping() -> bytes:
    return bytes(encode_frame(Ping(1, 1)))


_JUNK: tuple[tuple[int, str, str, Callable[[], bytes]], ...] = (
    (200, "an empty frame", "REQ-PFX-1", lambda: b""),
    (201, "47 bytes", "REQ-PFX-1", lambda: _a_ping()[:47]),
    (202, "another magic", "REQ-PFX-2", lambda: patched(_a_ping(), "magic", b"HTTP")),
    (203, "a damaged prefix", "REQ-PFX-3", lambda: flipped(_a_ping(), 30)),
    (204, "another major version", "REQ-PFX-4", lambda: patched(_a_ping(), "major", 1)),
    (205, "an unknown type", "REQ-PFX-5", lambda: patched(_a_ping(), "type", 99)),
    (206, "a set flag", "REQ-PFX-6", lambda: patched(_a_ping(), "flags", 2)),
    (207, "a control length of 2^32 - 1", "REQ-PFX-7", lambda: patched(_a_ping(), "control_length", 2**32 - 1)),
    (208, "a body of 2^63 bytes", "REQ-PFX-7", lambda: patched(_a_ping(), "body_length", 2**63)),
    (209, "control that is not msgpack", "REQ-CAN-1", lambda: raw_frame(MessageType.PING, b"\xc1")),
    (210, "a nesting bomb", "REQ-CAN-2", lambda: raw_frame(MessageType.PONG, b"\x91" * 4000)),
    (211, "an array of 2^32 - 1", "REQ-LIM-1", lambda: raw_frame(MessageType.STATS, b"\xdd\xff\xff\xff\xff")),
    (212, "a message of the other direction", "REQ-LIF-1", lambda: raw_frame(MessageType.OPEN, b"\x90", Key(0, 9))),
    (213, "HELLO", "REQ-LIF-1", lambda: raw_frame(MessageType.HELLO, b"\x90")),
    (214, "a megabyte of junk", "REQ-ERR-5", lambda: b"J" * 2**20),
    (215, "ACCEPT on a live connection", "REQ-LIF-1", lambda: raw_frame(MessageType.ACCEPT, b"\x90")),
)  # fmt: skip
for _number, _title, _anchor, _make in _JUNK:
    PFX.add(_number, f"{_title}, between ROW and COMPLETION", _anchor, "a bad frame that takes a good reply along",
            partial(_junk, _make))  # fmt: skip


@PFX.case(220, "another minor version is understood", "REQ-PFX-4", "refusing a newer minor version")
def minor(t: VerifierUnderTest) -> None:
    t.connect()
    t.accepts(lambda reply: [patched(frame, "minor", 5) for frame in reply.frames])


@VER.case(103, "a newer message type is dropped", "REQ-VER-1", "an unknown type that ends the connection")
def newer_type(t: VerifierUnderTest) -> None:
    _junk(lambda: patched(_a_ping(), "type", NEWER_TYPE), t)


@TRN.case(100, "a reply frame by frame", "REQ-TRN-1", "two frames that must come together")
def frame_by_frame(t: VerifierUnderTest) -> None:
    t.connect()
    for _ in range(3):
        item = t.await_step()
        for frame in t.honest(item).frames:
            t.send(frame)
            t.watch(t.step_ms // 10)
        if t.outcome(item) not in (Outcome.COMMITTED, Outcome.CLOSED):
            raise Unmet("the round committed", t.outcome(item).value)


@TRN.case(102, "a reply among PINGs, in one piece", "REQ-TRN-1", "frames that are lost when many come at once")
def in_one_piece(t: VerifierUnderTest) -> None:
    t.connect()
    nonces = range(500, 508)
    pings = [encode_frame(Ping(t.epoch, nonce)) for nonce in nonces]
    t.accepts(lambda reply: [*pings[:4], reply.frames[0], *pings[4:], reply.frames[1]])
    answered = [frame.message.nonce for frame in t.log if isinstance(frame.message, Pong)]
    if answered != [*nonces]:
        raise Unmet(f"PONGs {[*nonces]}", str(answered))
    t.serves()


@TRN.case(101, "replies of two slots out of order", "REQ-ROL-1", "replies that are matched by arrival")
def out_of_order(t: VerifierUnderTest) -> None:
    t.connect()
    first = t.await_step()
    t.drain_frames(20)
    others = [item for item in t.waiting() if item.slot != first.slot]
    if not others:
        t.answer(first)
        t.serves()
        return
    second = t.await_step(others[0].slot)
    one, two = t.honest(first), t.honest(second)
    t.send(one.frames[0], two.frames[0], two.frames[1], one.frames[1])
    for item in (first, second):
        if t.outcome(item) is not Outcome.COMMITTED:
            raise Unmet("both rounds committed", t.outcome(item).value)
