"""PFX for decoders: prefix and framing, one fault at a time and in the order in which faults count.

Spec: SPEC.md 4. Called by `catalogue`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..buffers import aligned
from ..frame import encode_frame
from ..messages import Message
from ..registry import ErrorCode, MessageType
from .as_codec import CodecUnderTest
from .examples import KEY, examples, frame_of
from .forge import PREFIX_BYTES, changed, field_of, flipped, patched, position_of, raw_frame, with_control, with_values
from .record import Family, Role

PFX = Family("PFX", Role.CODEC)
E = ErrorCode


def _refused(frame: bytes, code: ErrorCode, t: CodecUnderTest) -> None:
    t.refuses(frame, code)


@PFX.case(1, "every message type decodes and encodes to the same bytes", "REQ-FRM-1", "a type that is not implemented")
def every_type(t: CodecUnderTest) -> None:
    for name in examples():
        t.accepts(frame_of(name))


@PFX.case(2, "every length below 48 bytes is too short", "REQ-PFX-1", "reading past the end of a short prefix")
def short(t: CodecUnderTest) -> None:
    for length in (0, 1, 4, 43, 47):
        t.refuses(frame_of("PING")[:length], E.WRONG_SIZE)


@PFX.case(3, "each damaged magic byte", "REQ-PFX-2", "comparing only part of the magic")
def magic(t: CodecUnderTest) -> None:
    for offset in range(4):
        t.refuses(flipped(frame_of("PING"), offset), E.BAD_MAGIC)
    t.refuses(patched(frame_of("PING"), "magic", b"DSP1"), E.BAD_MAGIC)


@PFX.case(4, "a flipped bit in any field after the magic", "REQ-PFX-3", "a prefix checksum that is not checked")
def prefix_crc(t: CodecUnderTest) -> None:
    for offset in range(4, PREFIX_BYTES):
        t.refuses(flipped(frame_of("COMPLETION"), offset, offset % 8), E.BAD_PREFIX_CRC)


@PFX.case(5, "the prefix checksum is CRC32C, not CRC32", "REQ-CRC-1", "the checksum of zlib")
def other_crc(t: CodecUnderTest) -> None:
    from zlib import crc32

    frame = frame_of("PING")
    t.refuses(patched(frame, "prefix_crc", crc32(frame[:44]), seal=False), E.BAD_PREFIX_CRC)


for _number, _major in ((6, 0), (7, 1), (8, 3), (9, 255)):
    PFX.add(
        _number, f"major version {_major}", "REQ-PFX-4", "talking to another major version",
        partial(_refused, patched(frame_of("PING"), "major", _major), E.BAD_VERSION),
    )  # fmt: skip


@PFX.case(10, "other minor versions are accepted", "REQ-PFX-4", "refusing a newer minor version")
def minor(t: CodecUnderTest) -> None:
    for value in (1, 7, 255):
        t.accepts(patched(frame_of("PING"), "minor", value), frame_of("PING"))


@PFX.case(11, "unregistered types", "REQ-PFX-5", "a default branch for unknown types")
def unknown_type(t: CodecUnderTest) -> None:
    for value in sorted(set(range(256)) - {int(kind) for kind in MessageType}):
        t.refuses(patched(frame_of("PING"), "type", value), E.UNKNOWN_TYPE)


@PFX.case(12, "each flag", "REQ-PFX-6", "flags that are ignored")
def flags(t: CodecUnderTest) -> None:
    for bit in range(8):
        t.refuses(patched(frame_of("PING"), "flags", 1 << bit), E.RESERVED_NOT_ZERO)


@PFX.case(13, "each reserved bit", "REQ-PFX-6", "reserved bits that are ignored")
def reserved(t: CodecUnderTest) -> None:
    for bit in range(16):
        t.refuses(patched(frame_of("PING"), "reserved", 1 << bit), E.RESERVED_NOT_ZERO)


for _number, _field, _value in (
    (14, "control_length", 0),
    (15, "control_length", 4097),
    (16, "control_length", 2**32 - 1),
    (17, "body_count", 33),
    (18, "body_count", 2**16 - 1),
    (19, "body_length", 2**26 + 64),
    (20, "body_length", 2**64 - 64),
):
    PFX.add(
        _number, f"{_field.replace('_', ' ')} {_value}", "REQ-PFX-7", "a size that is believed before it is bounded",
        partial(_refused, patched(frame_of("CONTEXT"), _field, _value), E.LIMIT_EXCEEDED),
    )  # fmt: skip


@PFX.case(21, "a body length that is no multiple of 64", "REQ-PFX-8", "unaligned bodies")
def unaligned(t: CodecUnderTest) -> None:
    frame = frame_of("CONTEXT")
    for delta in (1, 4, 32, 63):
        t.refuses(patched(frame, "body_length", field_of(frame, "body_length") + delta), E.WRONG_SIZE)


@PFX.case(22, "bodies without length, and length without bodies", "REQ-PFX-8", "only one of the two is looked at")
def count_and_length(t: CodecUnderTest) -> None:
    t.refuses(patched(frame_of("PING"), "body_count", 1), E.WRONG_SIZE)
    t.refuses(patched(frame_of("PING"), "body_length", 64), E.WRONG_SIZE)
    t.refuses(patched(frame_of("CONTEXT"), "body_count", 0), E.WRONG_SIZE)


@PFX.case(23, "truncated at every 16th byte", "REQ-FRM-1", "reading past the end of a frame")
def truncated(t: CodecUnderTest) -> None:
    for name in ("PING", "CONTEXT", "ROW"):
        frame = frame_of(name)
        for length in range(PREFIX_BYTES, len(frame), 16):
            t.refuses(frame[:length], E.WRONG_SIZE)


@PFX.case(24, "bytes after the frame", "REQ-FRM-1", "a second frame hidden behind the first")
def trailing(t: CodecUnderTest) -> None:
    t.refuses(frame_of("PING") + b"\0", E.WRONG_SIZE)
    t.refuses(frame_of("PING") + bytes(64), E.WRONG_SIZE)
    t.refuses(frame_of("PING") + frame_of("PING"), E.WRONG_SIZE)


@PFX.case(25, "a control length that lies by one", "REQ-FRM-1", "a frame length that is not recomputed")
def lying_control(t: CodecUnderTest) -> None:
    frame = frame_of("STATS")
    control = field_of(frame, "control_length")
    for delta in (-1, 1):
        inside = aligned(PREFIX_BYTES + control + delta) == aligned(PREFIX_BYTES + control)
        wrong = patched(frame, "control_length", control + delta)
        t.refuses(wrong, E.BAD_CONTROL_CRC if inside else E.WRONG_SIZE)


@PFX.case(26, "each control byte damaged", "REQ-CRC-2", "a control checksum that is not checked, or checked too late")
def control_crc(t: CodecUnderTest) -> None:
    for name in ("PING", "STEP", "HELLO"):
        frame = frame_of(name)
        for offset in range(PREFIX_BYTES, PREFIX_BYTES + field_of(frame, "control_length"), 7):
            t.refuses(flipped(frame, offset, offset % 8), E.BAD_CONTROL_CRC)


@PFX.case(27, "every padding byte after control", "REQ-FRM-3", "left-over memory in padding")
def control_padding(t: CodecUnderTest) -> None:
    frame = frame_of("PING")
    for offset in range(PREFIX_BYTES + field_of(frame, "control_length"), len(frame)):
        t.refuses(flipped(frame, offset, offset % 8), E.BAD_PADDING)


@PFX.case(28, "every padding byte after a body", "REQ-SEC-4", "left-over memory behind a body")
def body_padding(t: CodecUnderTest) -> None:
    frame = frame_of("STEP")
    for offset in range(len(frame) - 16, len(frame)):
        t.refuses(flipped(frame, offset), E.BAD_PADDING)
    context = frame_of("CONTEXT")
    t.refuses(flipped(context, len(context) - 64 - 1), E.BAD_PADDING)


@PFX.case(29, "each body damaged", "REQ-CRC-3", "a body checksum that is not checked")
def body_checksum_wrong(t: CodecUnderTest) -> None:
    frame = frame_of("ROW")
    start = len(frame) - field_of(frame, "body_length")
    for offset in (start, start + 31, start + 64, start + 191, start + 192, start + 319):
        t.refuses(flipped(frame, offset, 3), E.BAD_BODY_CHECKSUM)


@PFX.case(30, "fewer and more descriptors than bodies", "REQ-FRM-4", "a body count that is not compared with control")
def descriptor_count(t: CodecUnderTest) -> None:
    message, key, bodies = examples()["CONTEXT"]
    t.refuses(raw_frame(message.TYPE, control(message), key, bodies[:1]), E.BAD_DESCRIPTOR)
    t.refuses(raw_frame(message.TYPE, control(message), key, (*bodies, bytes(64))), E.BAD_DESCRIPTOR)


@PFX.case(31, "descriptors whose bytes do not sum up to the body length", "REQ-FRM-4", "sizes taken from two places")
def descriptor_sum(t: CodecUnderTest) -> None:
    message, key, bodies = examples()["CONTEXT"]
    described = message.bodies  # type: ignore[attr-defined]
    for body_bytes in (0, 64, 193, 2**20):
        wrong = replace(described[0], body_bytes=body_bytes)
        lied = changed(message, bodies=(wrong, described[1]))
        t.refuses(raw_frame(message.TYPE, control(lied), key, bodies), E.BAD_DESCRIPTOR)


@PFX.case(32, "body checksum kind 0, 3 and 255", "REQ-CRC-4", "a way to switch checksums off")
def no_checksum(t: CodecUnderTest) -> None:
    message, key, bodies = examples()["STEP"]
    body = message.bodies[0]  # type: ignore[attr-defined]
    place = position_of(type(body), "checksum_kind")
    for kind in (0, 3, 255):
        values = list(body.values())
        values[place] = kind
        t.refuses(with_values(message, {1: [values]}, key, bodies), E.BAD_FIELD)


@PFX.case(33, "CRC32C bodies, zero-extended", "REQ-CRC-3", "only one kind of body checksum implemented")
def crc_bodies(t: CodecUnderTest) -> None:
    from ..bodies import describe
    from ..registry import BodyKind, Checksum, Dtype

    message, key, bodies = examples()["STEP"]
    body = describe(BodyKind.TAPS, Dtype.BF16, 1, 24, bodies[0], Checksum.CRC32C)
    good = changed(message, bodies=(body,))
    t.accepts(encode_frame(good, key, bodies))
    wrong = changed(good, bodies=(replace(body, checksum=body.checksum[:4] + b"\1\0\0\0"),))
    t.refuses(encode_frame(wrong, key, bodies), E.BAD_BODY_CHECKSUM)


@PFX.case(34, "empty frames of every type are refused for their fields", "REQ-CAN-4", "types without a field count")
def empty_array(t: CodecUnderTest) -> None:
    for name in examples():
        t.refuses(raw_frame(examples()[name][0].TYPE, b"\x90", KEY), E.BAD_FIELD)


_PADDING = PREFIX_BYTES + field_of(frame_of("CONTEXT"), "control_length")
_PRECEDENCE = (
    (40, "magic before prefix crc", flipped(flipped(frame_of("PING"), 0), 20), E.BAD_MAGIC),
    (41, "size before magic", b"XXXX" + bytes(40), E.WRONG_SIZE),
    (42, "prefix crc before version", patched(frame_of("PING"), "major", 9, seal=False), E.BAD_PREFIX_CRC),
    (43, "version before type", patched(patched(frame_of("PING"), "major", 9), "type", 99), E.BAD_VERSION),
    (44, "type before flags", patched(patched(frame_of("PING"), "type", 99), "flags", 1), E.UNKNOWN_TYPE),
    (
        45,
        "flags before limits",
        patched(patched(frame_of("PING"), "flags", 1), "control_length", 0),
        E.RESERVED_NOT_ZERO,
    ),
    (46, "limits before frame size", patched(frame_of("PING"), "control_length", 5000)[:60], E.LIMIT_EXCEEDED),
    (47, "frame size before control crc", flipped(frame_of("PING"), 49) + b"\0", E.WRONG_SIZE),
    (48, "control crc before decoding", flipped(with_control(frame_of("PING"), b"\xc1"), 48), E.BAD_CONTROL_CRC),
    (49, "decoding before fields", with_control(frame_of("PING"), b"\x91\xcc\x01"), E.NONCANONICAL),
    (50, "fields before padding", flipped(with_control(frame_of("PING"), b"\x91\x01"), 60), E.BAD_FIELD),
    (51, "padding before descriptors", flipped(patched(frame_of("CONTEXT"), "body_count", 1), _PADDING), E.BAD_PADDING),
)
_RULES = {40: "REQ-PFX-2", 41: "REQ-PFX-1", 42: "REQ-PFX-3", 43: "REQ-PFX-4", 44: "REQ-PFX-5", 45: "REQ-PFX-6"} | {
    46: "REQ-PFX-7", 47: "REQ-FRM-1", 48: "REQ-CRC-2", 49: "REQ-CAN-1", 50: "REQ-CAN-4", 51: "REQ-FRM-3",
}  # fmt: skip

for _number, _title, _frame, _code in _PRECEDENCE:
    PFX.add(
        _number,
        f"two faults: {_title}",
        _RULES[_number],
        "checks in another order, so that codes differ between peers",
        partial(_refused, _frame, _code),
    )


def control(message: Message) -> bytes:
    """Canonical control of a message."""
    from ..canonical import encode_canonical

    return encode_canonical(message.values())
