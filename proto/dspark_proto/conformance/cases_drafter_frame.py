"""PFX, CAN and SEC for drafters: damaged and hostile frames on a live connection.

A frame without a usable key is only counted; one of a live slot is answered by ERROR and ends the generation;
either way everything else goes on. Spec: SPEC.md 4, 5, 12, 13. Called by `catalogue`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ..buffers import aligned
from ..frame import encode_frame
from ..messages import Context, Open, Ping, Step
from ..prefix import Key
from ..registry import BodyKind, Checksum, Dtype, ErrorCode, MessageType, Scope
from .as_verifier import DrafterUnderTest
from .forge import PREFIX_BYTES, field_of, flipped, patched, position_of, raw_frame, with_control, with_values
from .record import Family, Level, Role

PFX = Family("PFX", Role.DRAFTER)
CAN = Family("CAN", Role.DRAFTER)
SEC = Family("SEC", Role.DRAFTER)
E = ErrorCode
_IGNORED = "a fault that nobody counts, or that ends more than the frame"


def _ping(t: DrafterUnderTest) -> bytes:
    return bytes(encode_frame(Ping(t.epoch, 99)))


def _dropped(field: str, value: int, code: ErrorCode, t: DrafterUnderTest) -> None:
    """A PING with one prefix field changed is counted and nothing else happens."""
    t.hello()
    t.open()
    t.drops(code, patched(_ping(t), field, value))
    t.alive()


for _number, _title, _anchor, _field, _value, _code in (
    (100, "another magic", "REQ-PFX-2", "magic", 0x4B505358, E.BAD_MAGIC),
    (101, "major version 1", "REQ-PFX-4", "major", 1, E.BAD_VERSION),
    (102, "major version 3", "REQ-PFX-4", "major", 3, E.BAD_VERSION),
    (103, "type 0", "REQ-PFX-5", "type", 0, E.UNKNOWN_TYPE),
    (104, "type 255", "REQ-PFX-5", "type", 255, E.UNKNOWN_TYPE),
    (105, "a flag", "REQ-PFX-6", "flags", 0x80, E.RESERVED_NOT_ZERO),
    (106, "a reserved bit", "REQ-PFX-6", "reserved", 1, E.RESERVED_NOT_ZERO),
    (107, "control length 0", "REQ-PFX-7", "control_length", 0, E.LIMIT_EXCEEDED),
    (108, "control length 4,097", "REQ-PFX-7", "control_length", 4097, E.LIMIT_EXCEEDED),
    (109, "33 bodies", "REQ-PFX-7", "body_count", 33, E.LIMIT_EXCEEDED),
    (110, "a body of 2^63 bytes", "REQ-PFX-7", "body_length", 2**63, E.LIMIT_EXCEEDED),
    (111, "a body count without bodies", "REQ-PFX-8", "body_count", 1, E.WRONG_SIZE),
):
    PFX.add(_number, f"{_title} is counted and dropped", _anchor, _IGNORED, partial(_dropped, _field, _value, _code))


@PFX.case(112, "frames of 0, 1 and 47 bytes", "REQ-PFX-1", "a short frame that ends the reader")
def short(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    t.drops(E.WRONG_SIZE, b"", b"D", _ping(t)[:47])
    t.alive()


@PFX.case(113, "a damaged bit in each prefix field", "REQ-PFX-3", "a prefix that is used although damaged")
def prefix_crc(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    frames = [flipped(_ping(t), offset, offset % 8) for offset in range(4, PREFIX_BYTES, 3)]
    t.drops(E.BAD_PREFIX_CRC, *frames)
    t.alive()


@PFX.case(114, "another minor version is answered", "REQ-PFX-4", "refusing a newer minor version")
def minor(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    item = t.item()
    t.send(patched(t.step_frame(item), "minor", 9))
    t.slots[0].round, t.slots[0].end = item.round, item.anchor_position
    t.reply(item)


@PFX.case(115, "bytes after the frame", "REQ-FRM-1", "a second frame hidden behind the first")
def trailing(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    t.drops(E.WRONG_SIZE, _ping(t) + b"\0", _ping(t) + _ping(t), _ping(t)[:60])
    t.alive()


@PFX.case(116, "garbage between valid frames", "REQ-ERR-5", "a reader that does not get over one bad frame")
def garbage(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    for size in (48, 64, 1000):
        t.drops(E.BAD_MAGIC, bytes(range(1, 256)) * (size // 255) + b"g" * (size % 255))
        t.alive()


def _live(t: DrafterUnderTest) -> tuple[bytes, Key]:
    """A right STEP of an open slot, not yet sent, and its key."""
    t.hello()
    t.open()
    item = t.item()
    return t.step_frame(item), Key(item.slot, item.generation, item.round)


def _hurts(code: ErrorCode, frame: bytes, key: Key, t: DrafterUnderTest) -> None:
    """The frame is refused under its key, the generation is dead, and the slot serves again after RESET."""
    t.refuses(code, frame, key)
    t.is_dead()


@PFX.case(120, "STEP with damaged control", "REQ-CRC-2", "decoding control before its checksum")
def step_control(t: DrafterUnderTest) -> None:
    frame, key = _live(t)
    _hurts(E.BAD_CONTROL_CRC, flipped(frame, PREFIX_BYTES + 3), key, t)


@PFX.case(121, "STEP with a damaged tap", "REQ-CRC-3", "a body that is used although damaged")
def step_body(t: DrafterUnderTest) -> None:
    frame, key = _live(t)
    start = len(frame) - field_of(frame, "body_length")
    _hurts(E.BAD_BODY_CHECKSUM, flipped(frame, start + 5, 4), key, t)


@PFX.case(122, "CONTEXT with padding that is not zero", "REQ-FRM-3", "left-over memory in padding")
def context_padding(t: DrafterUnderTest) -> None:
    t.hello()
    book = t.open()
    frame = t.context_frame(0, 1)
    _hurts(E.BAD_PADDING, flipped(frame, len(frame) - 1), Key(0, book.generation), t)


@PFX.case(123, "STEP with padding after control that is not zero", "REQ-FRM-3", "left-over memory in padding")
def step_padding(t: DrafterUnderTest) -> None:
    frame, key = _live(t)
    end = PREFIX_BYTES + field_of(frame, "control_length")
    t.require(aligned(end) > end, "a STEP with padding")
    _hurts(E.BAD_PADDING, flipped(frame, end), key, t)


@PFX.case(124, "STEP that is one block too long", "REQ-FRM-1", "a frame length that is not recomputed")
def step_long(t: DrafterUnderTest) -> None:
    frame, key = _live(t)
    _hurts(E.WRONG_SIZE, frame + bytes(64), key, t)


def _described(change: dict[str, Any], t: DrafterUnderTest) -> None:
    """A CONTEXT whose TAPS descriptor does not fit the message."""
    t.hello()
    book = t.open()
    taps = t.taps(2)
    body = replace(t.describe_taps(taps, 2), **change)
    frame = encode_frame(Context(book.session, book.end, 2, (body,)), Key(0, book.generation), [taps])
    _hurts(E.BAD_DESCRIPTOR, bytes(frame), Key(0, book.generation), t)


_CHANGES: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (125, "rows", {"rows": 3}),
    (126, "entries", {"entries": 1}),
    (127, "kind", {"kind": BodyKind.Q}),
    (128, "dtype", {"dtype": Dtype.INT32}),
)
for _number, _title, _change in _CHANGES:
    PFX.add(
        _number, f"a descriptor whose {_title} do not fit the message", "REQ-BOD-1",
        "two sources for one size, and the wrong one believed", partial(_described, _change),
    )  # fmt: skip


@PFX.case(129, "a body under the other checksum", "REQ-BOD-2", "a checksum kind that the peer chooses per frame")
def other_checksum(t: DrafterUnderTest) -> None:
    t.hello()
    book = t.open()
    other = Checksum.CRC32C if t.terms.checksum_kind is Checksum.XXH3_64 else Checksum.XXH3_64
    taps = t.taps(1)
    body = t.describe_taps(taps, 1, other)
    frame = encode_frame(Context(book.session, book.end, 1, (body,)), Key(0, book.generation), [taps])
    _hurts(E.BAD_DESCRIPTOR, bytes(frame), Key(0, book.generation), t)


@PFX.case(130, "fewer bodies than descriptors", "REQ-FRM-4", "a body count that is not compared with control")
def missing_body(t: DrafterUnderTest) -> None:
    t.hello()
    book = t.open()
    frame = t.context_frame(0, 1)
    first = aligned(len(t.taps(1)))
    cut = patched(patched(frame, "body_count", 1), "body_length", first)
    cut = cut[: len(frame) - field_of(frame, "body_length") + first]
    _hurts(E.BAD_DESCRIPTOR, cut, Key(0, book.generation), t)


@CAN.case(200, "STEP in a longer encoding", "REQ-CAN-1", "a decoder that takes any msgpack")
def overlong(t: DrafterUnderTest) -> None:
    frame, key = _live(t)
    control = frame[PREFIX_BYTES : PREFIX_BYTES + field_of(frame, "control_length")]
    _hurts(E.NONCANONICAL, with_control(frame, b"\xdc\x00\x02" + control[1:]), key, t)


@CAN.case(201, "control that is not msgpack", "REQ-CAN-1", "a decoder whose exceptions get out")
def not_msgpack(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    bad = (b"\xc1", b"\x92\x01", b"\xdd\xff\xff\xff\xff", b"\x91" * 4000 + b"\0", b"\x92\xc0\xc0")
    t.drops(E.NONCANONICAL, *[raw_frame(MessageType.PING, control) for control in bad])
    t.alive()


@CAN.case(202, "PING with a field less, a field more, and a wrong type", "REQ-CAN-4", "fields that are not counted")
def fields(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    t.drops(
        E.BAD_FIELD, *[raw_frame(MessageType.PING, control) for control in (b"\x91\x01", b"\x93\1\1\1", b"\x92\xa1x\1")]
    )
    t.alive()


def _unknown_id(field: str, value: int, t: DrafterUnderTest) -> None:
    t.hello()
    message, key = t.open_message()
    frame = with_values(message, {position_of(Open, field): value}, key)
    t.refuses(E.BAD_FIELD, frame, key)
    t.open(prompt=4)
    t.alive()


for _number, _field, _value in ((203, "support", 17), (204, "lane", 9), (205, "draft_temperature_micro", 10**8 + 1)):
    CAN.add(
        _number, f"OPEN with {_field} {_value}", "REQ-VER-1", "an unknown id that falls through to a default",
        partial(_unknown_id, _field, _value),
    )  # fmt: skip


@CAN.case(206, "CLOSE with an unknown cause", "REQ-VER-1", "an unknown id that falls through to a default")
def unknown_cause(t: DrafterUnderTest) -> None:
    t.hello()
    book = t.open()
    key = Key(0, t.new_generation())
    frame = raw_frame(MessageType.CLOSE, b"\x92\xcd" + book.session.to_bytes(2, "big") + b"\x63", key)
    t.refuses(E.BAD_FIELD, frame, key)


@CAN.case(207, "STEP with 33 items", "REQ-LIM-1", "a list without a limit")
def many_items(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    item = t.item(tap_rows=0, anchor_position=t.slots[0].end)
    frame = with_values(Step((item,), ()), {0: [item.values()] * 33})
    t.drops(E.BAD_FIELD, frame)
    t.alive()


def _slot(slot: int, t: DrafterUnderTest) -> None:
    t.hello()
    message, _ = t.open_message()
    key = Key(slot, 1)
    t.refuses(E.SLOT_OUT_OF_RANGE, encode_frame(message, key), key, Scope.SESSION)
    t.open()
    t.alive()


@SEC.case(1, "OPEN of the first slot beyond the negotiated number", "REQ-LIM-1", "an index that is not bounded")
def slot_beyond(t: DrafterUnderTest) -> None:
    t.hello()
    _slot(t.terms.max_slots, t)


for _number, _value in ((2, 1024), (3, 2**31), (4, 2**32 - 2)):
    SEC.add(_number, f"OPEN of slot {_value}", "REQ-LIM-1", "an index that is not bounded", partial(_slot, _value))


@SEC.case(
    5, "every message type for a slot out of range", "REQ-PFX-9", "an index that is checked in some messages only"
)
def types_beyond(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    key = Key(t.terms.max_slots, 1, 1)
    for kind in (MessageType.OPEN, MessageType.CONTEXT, MessageType.STEP, MessageType.COMMIT, MessageType.RESET,
                 MessageType.CANCEL, MessageType.CLOSE):  # fmt: skip
        t.refuses(E.SLOT_OUT_OF_RANGE, raw_frame(kind, b"\x90", key), key, Scope.SESSION)
    t.alive()


@SEC.case(6, "50 HELLOs in a row", "REQ-SEC-3", "memory that each HELLO takes and none gives back")
def hello_flood(t: DrafterUnderTest) -> None:
    for _ in range(50):
        t.hello()
    t.open()
    t.alive()
    t.close()
    t.holds_nothing()


@SEC.case(7, "ERROR texts are constant", "REQ-ERR-3", "received bytes in log lines and answers")
def constant_text(t: DrafterUnderTest) -> None:
    from ..messages import ErrorMessage

    t.hello()
    texts = set()
    for session in (0x41414141, 0x42424242):
        message, key = t.open_message(session=session, slot=t.terms.max_slots)
        t.send(encode_frame(message, key))
        frame, _ = t.expect(ErrorMessage)
        texts.add(getattr(frame.message, "where", ""))
    t.same_bytes([b"one text"], [b"one text" if len(texts) == 1 else b"several texts"])


@SEC.case(8, "a thousand junk frames leave one slot unharmed", "REQ-ERR-5", "a fault budget that is shared")
def junk(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    frames = [flipped(_ping(t), 4 + index % 40) for index in range(250)]
    for _ in range(4):
        t.drops(E.BAD_PREFIX_CRC, *frames)
    t.alive()


@SEC.case(9, "HELLO with more bytes than compat and auth may have", "REQ-LIM-1", "text without a limit")
def long_hello(t: DrafterUnderTest) -> None:
    t.hello()
    hello = t.offer()
    for name, size in (("compat", 1025), ("auth", 65)):
        t.drops(E.BAD_FIELD, with_values(hello, {position_of(type(hello), name): bytes(size)}))


@SEC.case(10, "a frame of the largest control", "REQ-LIM-1", "a limit that is one too low", level=Level.SHOULD)
def largest(t: DrafterUnderTest) -> None:
    t.hello()
    t.drops(E.NONCANONICAL, raw_frame(MessageType.PING, b"\x92" + bytes(4095)))
