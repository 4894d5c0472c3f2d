"""LIV, TMO and TRN for drafters: heartbeats, reports, errors, silence, and what the transport must keep apart.

Spec: SPEC.md 8, 12, 14. Called by `catalogue`.
"""

from __future__ import annotations

from functools import partial

from ..frame import encode_frame
from ..messages import ErrorMessage, Ping, Pong, Stats
from ..registry import ErrorCode, Scope
from .as_verifier import DrafterUnderTest
from .forge import patched, raw_frame
from .judging import SlotBook
from .record import Family, Level, Role
from .verdicts import Unmet

LIV = Family("LIV", Role.DRAFTER)
TMO = Family("TMO", Role.DRAFTER)
TRN = Family("TRN", Role.DRAFTER)
E = ErrorCode
FAST_MS = 5


def _nonce(nonce: int, t: DrafterUnderTest) -> None:
    t.hello()
    t.say(Ping(t.epoch, nonce))
    frame, raw = t.expect(Pong)
    pong = frame.message
    assert isinstance(pong, Pong)
    if (pong.nonce, pong.epoch) != (nonce, t.terms.epoch):
        raise Unmet(f"nonce {nonce} of epoch {t.terms.epoch}", f"{pong.nonce}, {pong.epoch}", actual_frame=raw)


for _number, _value in ((1, 1), (2, 2**32), (3, 2**64 - 1)):
    LIV.add(_number, f"PING {_value} is answered with its nonce", "REQ-PNG-1", "a nonce that is cut, or counted",
            partial(_nonce, _value))  # fmt: skip


@LIV.case(4, "50 PINGs are answered in order", "REQ-PNG-1", "answers that are merged or reordered")
def many(t: DrafterUnderTest) -> None:
    t.hello()
    t.send(*[encode_frame(Ping(t.epoch, nonce)) for nonce in range(1, 51)])
    nonces = []
    for _ in range(50):
        message = t.expect(Pong)[0].message
        nonces.append(getattr(message, "nonce", 0))
    if nonces != list(range(1, 51)):
        raise Unmet("nonces 1 to 50", str(nonces))


@LIV.case(5, "PING, PONG and STATS of another epoch", "REQ-EPO-1", "messages of another process")
def other_epoch(t: DrafterUnderTest) -> None:
    t.hello()
    wrong = t.epoch ^ 1
    t.drops(E.WRONG_EPOCH, encode_frame(Ping(wrong, 1)), encode_frame(Pong(wrong, 1, 0, 0)), encode_frame(Stats(wrong)))


@LIV.case(6, "PING while drafting", "REQ-PNG-1", "a heartbeat that waits for the model")
def during(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    item = t.item()
    t.send(t.step_frame(item), encode_frame(Ping(t.epoch, 4711)))
    t.slots[0].round, t.slots[0].end = item.round, item.anchor_position
    pongs = 0
    seen: list[bytes] = []
    while not pongs or len(seen) < 2:
        frame, raw = t.next("a PONG and the reply")
        pongs += isinstance(frame.message, Pong)
        seen += [raw] if frame.message.NAME in ("ROW", "COMPLETION") else []


@LIV.case(7, "an unsolicited PONG is no news", "REQ-PNG-1", "an answer to an answer")
def pong(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    t.say(Pong(t.epoch, 77, 1000, 2**64 - 1))
    t.silence()
    t.alive()


@LIV.case(8, "STATS shows what is held", "REQ-STA-1", "a report that does not count")
def stats(t: DrafterUnderTest) -> None:
    t.hello()
    t.holds_nothing()
    for slot in range(min(2, t.terms.max_slots)):
        t.open(slot)
        t.round(slot)
        report = t.stats()
        if (report.slots_open, report.replies_cached) != (slot + 1, slot + 1):
            raise Unmet(f"{slot + 1} slots and replies", f"{report.slots_open}, {report.replies_cached}")
    for slot in range(min(2, t.terms.max_slots)):
        t.close(slot)
    t.holds_nothing()


@LIV.case(9, "a STATS report from a verifier", "REQ-STA-1", "a report that is answered with a report")
def report(t: DrafterUnderTest) -> None:
    t.hello()
    t.drops(E.UNEXPECTED_MESSAGE, encode_frame(Stats(t.epoch, is_report=1)))


@LIV.case(10, "every refusal is counted", "REQ-ERR-1", "faults that leave no trace")
def counted(t: DrafterUnderTest) -> None:
    t.hello()
    ping = bytes(encode_frame(Ping(t.epoch, 1)))
    for times in (1, 3):
        t.drops(E.RESERVED_NOT_ZERO, *[patched(ping, "flags", 1)] * times)
        t.drops(E.UNKNOWN_TYPE, *[patched(ping, "type", 200)] * times)


def _error(scope: Scope, t: DrafterUnderTest) -> None:
    """Whatever a verifier reports, it gets no ERROR back."""
    t.hello()
    t.open()
    t.say(ErrorMessage(E.BAD_BODY_CHECKSUM, scope, t.slots[0].session, "ROW"), t.slots[0].key)
    for frame, raw in t.barrier():
        raise Unmet("no answer to ERROR", frame.message.NAME, actual_frame=raw)


for _number, _scope in enumerate((Scope.FRAME, Scope.ROUND, Scope.SLOT, Scope.SESSION), 11):
    LIV.add(_number, f"ERROR of scope {_scope.name} is not answered with ERROR", "REQ-ERR-3", "two peers that refuse "
            "each other's refusals", partial(_error, _scope))  # fmt: skip


@LIV.case(15, "malformed ERROR is not answered with ERROR", "REQ-ERR-3", "two peers that refuse each other's refusals")
def bad_error(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    t.send(raw_frame(35, b"\xc1", t.slots[0].key), raw_frame(35, b"\x90", t.slots[0].key))
    for frame, raw in t.barrier():
        raise Unmet("no answer to ERROR", frame.message.NAME, actual_frame=raw)
    t.alive()


@TMO.case(1, "a verifier that is silent for 60 heartbeats loses its slots", "REQ-PNG-2", "leases of the dead")
def silent(t: DrafterUnderTest) -> None:
    t.hello(heartbeat_ms=FAST_MS)
    t.open()
    t.round()
    t.wait(FAST_MS * 90)
    t.send(encode_frame(Ping(t.epoch, 1)))
    answer = t.next()[0].message
    if not isinstance(answer, ErrorMessage) or answer.code is not E.HELLO_REQUIRED:
        raise Unmet("ERROR HELLO_REQUIRED", answer.NAME)
    t.hello()
    t.holds_nothing()


@TMO.case(
    2, "a verifier that is silent for 20 heartbeats keeps them", "REQ-PNG-2", "a verifier that is busy and punished"
)
def busy(t: DrafterUnderTest) -> None:
    t.hello(heartbeat_ms=FAST_MS * 10)
    t.open()
    t.round()
    t.wait(FAST_MS * 200)
    t.round()


@TMO.case(3, "any frame counts as life", "REQ-PNG-2", "life that is inferred from PING only", level=Level.SHOULD)
def any_frame(t: DrafterUnderTest) -> None:
    t.hello(heartbeat_ms=FAST_MS)
    t.open()
    for _ in range(4):
        t.wait(FAST_MS * 30)
        t.stats()
    t.round()


@TRN.case(1, "two connections do not share slots", "REQ-ROL-1", "one verifier that ends another one's rounds")
def two_peers(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    t.round()
    other = t.second()
    other.epoch ^= 0xFF
    other.hello()
    other.holds_nothing()
    other.open()
    other.round()
    other.close()
    t.round(accept=2)
    if t.stats().slots_open != 1:
        raise Unmet("the first verifier's slot", f"{t.stats().slots_open} slots")


@TRN.case(2, "junk on one connection does not hurt another", "REQ-ERR-5", "one verifier that ends another one's rounds")
def junk(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    other = t.second()
    other.send(b"", b"junk", bytes(48), bytes(4096))
    other.hello()
    t.round()


@TRN.case(
    3, "a verifier that comes back starts afresh", "REQ-ZMQ-2", "state that is kept by name instead of connection"
)
def comes_back(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    t.round()
    other = t.second()
    other.hello()
    other.holds_nothing()
    other.open()
    other.round()
    other.close()
    t.round()


@TRN.case(4, "HELLO, OPEN, CONTEXT and STEP in one piece", "REQ-TRN-1", "one frame for each read")
def in_one_piece(t: DrafterUnderTest) -> None:
    t.hello()
    message, key = t.open_message()
    book = SlotBook(0, message.session, key.generation, message.support, message.lane)
    t.slots[0] = book
    contexts = []
    for _ in range(4):
        contexts.append(t.context_frame(0, 1))
        book.end += 1
    item = t.item()
    t.send(encode_frame(message, key), *contexts, t.step_frame(item))
    book.round, book.end = item.round, item.anchor_position
    t.reply(item)


@TRN.case(5, "40 rounds in order", "REQ-TRN-1", "frames that overtake one another")
def long_run(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    for number in range(40):
        t.round(accept=number % 3)


@TRN.case(6, "a frame of several megabytes of junk", "REQ-ERR-5", "a size that ends the reader")
def big(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    t.drops(E.BAD_MAGIC, b"J" * (2**21))
    t.alive()
