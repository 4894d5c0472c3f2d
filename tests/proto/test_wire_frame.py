"""Prefix, control profile, descriptors, padding: what a receiver accepts, and the one code for each fault."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgpack
import pytest

from dspark_proto import (
    Checksum,
    ErrorCode,
    Key,
    LocalProtocolError,
    RemoteProtocolError,
    crc32c,
    decode_canonical,
    decode_frame,
    encode_canonical,
    encode_frame,
    encode_frame_into,
    read_prefix,
)
from dspark_proto.bodies import describe
from dspark_proto.checksums import body_checksum
from dspark_proto.messages import Cancel, Context, ErrorMessage, Ping, Step, StepItem
from dspark_proto.prefix import frame_bytes, rewrite_key
from dspark_proto.registry import BodyKind, Cause, Dtype, Lane, MessageType, Scope

KEY = Key(3, 9, 4)
PING = encode_frame(Ping(5, 6))
BODY = bytes(range(96))
CONTEXT = Context(1, 0, 2, (describe(BodyKind.TAPS, Dtype.BF16, 2, 24, BODY, Checksum.XXH3_64),))
FRAME = encode_frame(CONTEXT, KEY, [BODY])


def refused(frame: bytes | bytearray | memoryview) -> ErrorCode:
    """The code with which a frame is refused."""
    with pytest.raises(RemoteProtocolError) as caught:
        decode_frame(frame)
    return caught.value.code


def patched(frame: memoryview, offset: int, fmt: str, value: int | bytes, fix_crc: bool = True) -> bytearray:
    """A copy with one prefix field changed, with a right prefix crc unless told otherwise."""
    copy = bytearray(frame)
    struct.pack_into(fmt, copy, offset, value)
    if fix_crc:
        struct.pack_into("<I", copy, 44, crc32c(bytes(copy[:44])))
    return copy


def with_control(control: bytes) -> bytearray:
    """A PING frame with another control block, all checksums right."""
    frame = bytearray(-(-(48 + len(control)) // 64) * 64)
    struct.pack_into(
        "<4sBBBBIHHQQIII",
        frame,
        0,
        b"DSPK",
        2,
        0,
        32,
        0,
        len(control),
        0,
        0,
        0,
        0,
        2**32 - 1,
        0,
        crc32c(control),
    )
    struct.pack_into("<I", frame, 44, crc32c(bytes(frame[:44])))
    frame[48 : 48 + len(control)] = control
    return frame


def test_crc32c_check_value() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_body_checksums_have_one_size() -> None:
    assert body_checksum(Checksum.CRC32C, b"123456789") == bytes.fromhex("839206e300000000")
    assert len(body_checksum(Checksum.XXH3_64, b"")) == 8


def test_round_trip_without_copies() -> None:
    frame = decode_frame(FRAME)
    assert frame.message == CONTEXT
    assert frame.prefix.key == KEY
    assert frame.prefix.type is MessageType.CONTEXT
    assert frame.bodies[0] == BODY
    assert frame.bodies[0].obj is FRAME.obj


def test_frame_layout_is_64_byte_aligned() -> None:
    prefix = read_prefix(FRAME)
    assert prefix.body_bytes == 128
    assert prefix.frame_bytes == len(FRAME)
    body_at = len(FRAME) - 128
    assert body_at % 64 == 0
    assert FRAME[body_at : body_at + 96] == BODY
    assert FRAME[body_at + 96 :] == bytes(32)


def test_encode_into_a_preallocated_buffer_clears_old_bytes() -> None:
    out = memoryview(bytearray(b"\xff" * 1024))
    length = encode_frame_into(out, CONTEXT, KEY, [BODY])
    assert out[:length] == FRAME
    assert out[length:] == b"\xff" * (1024 - length)


def test_encode_into_a_small_buffer_is_refused() -> None:
    with pytest.raises(LocalProtocolError) as caught:
        encode_frame_into(memoryview(bytearray(64)), CONTEXT, KEY, [BODY])
    assert caught.value.code is ErrorCode.WRONG_SIZE


def test_body_that_differs_from_its_descriptor_is_refused() -> None:
    with pytest.raises(LocalProtocolError) as caught:
        encode_frame(CONTEXT, KEY, [BODY[:-1]])
    assert caught.value.code is ErrorCode.WRONG_SIZE


def test_the_largest_step_fits_the_control_limit() -> None:
    items = tuple(
        StepItem(
            2**64 - 1, 1023 - i, 2**62, 2**32 - 1, 2**31 - 1, 2**31 - 1, bytes(8), 32, Lane.RATIO, tap_rows=4096
        )
        for i in range(32)
    )
    body = describe(BodyKind.TAPS, Dtype.BF16, 4096, 2**26, b"", Checksum.XXH3_64)
    frame = encode_frame(Step(items, (body,) * 32), bodies=[b""] * 32)
    (control_bytes,) = struct.unpack_from("<I", frame, 8)
    assert 2048 < control_bytes <= 4096


def test_more_body_bytes_than_the_limit_are_refused_before_sending() -> None:
    huge = bytes(2**25)
    body = describe(BodyKind.TAPS, Dtype.BF16, 1, 2**24, huge, Checksum.XXH3_64)
    with pytest.raises(LocalProtocolError) as caught:
        encode_frame(Context(1, 0, 1, (body,) * 3), KEY, [huge] * 3)
    assert caught.value.code is ErrorCode.LIMIT_EXCEEDED


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (PING[:47], ErrorCode.WRONG_SIZE),
        (patched(PING, 0, "<4s", b"HTTP", fix_crc=False), ErrorCode.BAD_MAGIC),
        (patched(PING, 24, "<Q", 1, fix_crc=False), ErrorCode.BAD_PREFIX_CRC),
        (patched(PING, 4, "<B", 1), ErrorCode.BAD_VERSION),
        (patched(PING, 4, "<B", 3), ErrorCode.BAD_VERSION),
        (patched(PING, 6, "<B", 99), ErrorCode.UNKNOWN_TYPE),
        (patched(PING, 7, "<B", 1), ErrorCode.RESERVED_NOT_ZERO),
        (patched(PING, 14, "<H", 1), ErrorCode.RESERVED_NOT_ZERO),
        (patched(PING, 8, "<I", 0), ErrorCode.LIMIT_EXCEEDED),
        (patched(PING, 8, "<I", 4097), ErrorCode.LIMIT_EXCEEDED),
        (patched(FRAME, 12, "<H", 33), ErrorCode.LIMIT_EXCEEDED),
        (patched(FRAME, 16, "<Q", 2**63), ErrorCode.LIMIT_EXCEEDED),
        (patched(FRAME, 16, "<Q", 96), ErrorCode.WRONG_SIZE),
        (patched(PING, 12, "<H", 1), ErrorCode.WRONG_SIZE),
        (patched(PING, 8, "<I", 2), ErrorCode.BAD_CONTROL_CRC),
        (patched(FRAME, 12, "<H", 2), ErrorCode.BAD_DESCRIPTOR),
        (bytes(PING) + bytes(64), ErrorCode.WRONG_SIZE),
        (FRAME[:-64], ErrorCode.WRONG_SIZE),
    ],
)  # fmt: skip
def test_prefix_faults(frame: bytes | bytearray | memoryview, code: ErrorCode) -> None:
    assert refused(frame) is code


def test_a_minor_version_of_the_same_major_is_accepted() -> None:
    assert decode_frame(patched(PING, 5, "<B", 7)).message == Ping(5, 6)


def flip(frame: memoryview, offset: int) -> bytearray:
    copy = bytearray(frame)
    copy[offset] ^= 1
    return copy


@pytest.mark.parametrize(
    ("offset", "code"),
    [
        (50, ErrorCode.BAD_CONTROL_CRC),
        (len(FRAME) - 129, ErrorCode.BAD_PADDING),
        (len(FRAME) - 128, ErrorCode.BAD_BODY_CHECKSUM),
        (len(FRAME) - 1, ErrorCode.BAD_PADDING),
    ],
)
def test_damage_after_the_prefix(offset: int, code: ErrorCode) -> None:
    assert refused(flip(FRAME, offset)) is code


NONCANONICAL: dict[str, bytes] = {
    "overlong uint8": b"\x92\xcc\x05\x06",
    "overlong uint16": b"\x92\xcd\x00\x05\x06",
    "overlong uint32": b"\x92\xce\x00\x00\x00\x05\x06",
    "overlong uint64": b"\x92\xcf" + bytes(7) + b"\x05\x06",
    "signed form of a positive int": b"\x92\xd0\x05\x06",
    "array16 for two items": b"\xdc\x00\x02\x05\x06",
    "array32 for two items": b"\xdd\x00\x00\x00\x02\x05\x06",
    "bin16 for short bytes": b"\x91\xc5\x00\x01a",
    "str8 for a short string": b"\x91\xd9\x01a",
    "nil": b"\x92\xc0\x06",
    "bool": b"\x92\xc3\x06",
    "float": b"\x92\xcb" + struct.pack(">d", 5.0) + b"\x06",
    "map": msgpack.packb([{1: 2}]),
    "bare integer": b"\x05",
    "timestamp": msgpack.packb([msgpack.Timestamp(1)]),
    "extension": msgpack.packb([msgpack.ExtType(5, b"x")]),
    "invalid utf-8": b"\x91\xa1\xff",
    "trailing byte": b"\x92\x05\x06\x00",
    "truncated": b"\x92\x05",
    "reserved byte": b"\x92\xc1\x06",
    "four arrays deep": msgpack.packb([[[[1]]]]),
    "very deep": b"\x91" * 4000 + b"\x01",
    "array bomb": b"\xdd\xff\xff\xff\xff",
    "bin bomb": b"\x91\xc6\xff\xff\xff\xff",
}  # fmt: skip


@pytest.mark.parametrize("name", NONCANONICAL)
def test_noncanonical_control(name: str) -> None:
    assert refused(with_control(NONCANONICAL[name])) is ErrorCode.NONCANONICAL


def test_the_canonical_form_itself_is_accepted() -> None:
    assert decode_frame(with_control(b"\x92\x05\x06")).message == Ping(5, 6)


def test_negative_integers_are_canonical_but_out_of_range() -> None:
    assert refused(with_control(b"\x92\xff\x06")) is ErrorCode.BAD_FIELD


def test_three_arrays_deep_is_the_profile() -> None:
    values: list[object] = [[[1, b"a", "b"]]]
    assert decode_canonical(encode_canonical(values)) == values


@pytest.mark.parametrize("values", [[5], [5, 6, 7], [5, b"6"], [5, 2**64 - 1, 0], [[5], 6], ["5", 6]])
def test_wrong_fields(values: list[object]) -> None:
    assert refused(with_control(msgpack.packb(values))) is ErrorCode.BAD_FIELD


@pytest.mark.parametrize(
    "build",
    [
        lambda: Ping(2**64, 0),
        lambda: Ping(True, 0),
        lambda: Ping(-1, 0),
        lambda: Cancel(1, 1),
        lambda: ErrorMessage(ErrorCode.LATE, Scope.SLOT, 1, "x" * 97),
        lambda: ErrorMessage(ErrorCode.LATE, Scope.SLOT, 1, "caf\u00e9"),
        lambda: ErrorMessage(ErrorCode.LATE, Scope.SLOT, 1, "a\nb"),
        lambda: StepItem(1, 0, 1, 1, 1, 1, bytes(7), 5, Lane.RATIO),
        lambda: StepItem(1, 1024, 1, 1, 1, 1, bytes(8), 5, Lane.RATIO),
        lambda: StepItem(1, 0, 1, 1, 1, 1, bytes(8), 0, Lane.RATIO),
        lambda: Step((), ()),
        lambda: Step((Ping(1, 1),), ()),
        lambda: Context(1, 0, 0, ()),
    ],
)
def test_a_message_out_of_range_cannot_exist(build: Callable[[], object]) -> None:
    with pytest.raises(LocalProtocolError) as caught:
        build()
    assert caught.value.code is ErrorCode.BAD_FIELD
    assert caught.value.where
    assert caught.value.remedy


def test_unknown_enumeration_member_on_the_wire() -> None:
    cancel = encode_frame(Cancel(1, Cause.FINISHED), KEY)
    assert refused(replace_control(cancel, [1, 99])) is ErrorCode.BAD_FIELD
    assert refused(replace_control(cancel, [1, b"x"])) is ErrorCode.BAD_FIELD


def replace_control(frame: memoryview, values: list[object]) -> bytearray:
    """``frame`` with other control values, checksums right; for frames without bodies."""
    control = msgpack.packb(values)
    copy = bytearray(-(-(48 + len(control)) // 64) * 64)
    copy[:48] = frame[:48]
    copy[48 : 48 + len(control)] = control
    struct.pack_into("<I", copy, 8, len(control))
    struct.pack_into("<I", copy, 40, crc32c(control))
    struct.pack_into("<I", copy, 44, crc32c(bytes(copy[:44])))
    return copy


def test_a_step_with_two_items_for_a_slot_is_refused() -> None:
    """A repeated item would resend a cached reply once per repetition."""
    item = StepItem(1, 3, 1, 1, 0, 0, bytes(8), 1, Lane.GREEDY)
    with pytest.raises(LocalProtocolError) as caught:
        Step((item, item), ())
    assert (caught.value.code, caught.value.where) == (ErrorCode.BAD_FIELD, "STEP.items")


def test_a_frame_among_others_says_how_long_it_is() -> None:
    stream = memoryview(bytes(PING) + bytes(FRAME))
    start, end = len(PING), len(PING) + 48
    assert [frame_bytes(stream, 0, end), frame_bytes(stream, start, end)] == [len(PING), len(FRAME)]
    with pytest.raises(RemoteProtocolError) as caught:
        frame_bytes(stream, start, end - 1)
    assert caught.value.code is ErrorCode.WRONG_SIZE


def test_a_frame_under_another_key_is_what_encoding_it_gives() -> None:
    frame = memoryview(bytearray(FRAME))
    rewrite_key(frame, Key(2**32 - 1, 2**63, 2**32 - 2), read_prefix(FRAME).control_bytes)
    assert frame == encode_frame(CONTEXT, Key(2**32 - 1, 2**63, 2**32 - 2), [BODY])
