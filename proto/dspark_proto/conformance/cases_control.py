"""CAN: the control profile. Every legal msgpack encoding that is not the one legal encoding here, and every field's
range.

Spec: SPEC.md 5. Called by `catalogue`.
"""

from __future__ import annotations

import struct
from functools import partial

from ..canonical import Value
from ..fields import Bin, Choice, Records, Text, UInt
from ..messages import Message
from ..registry import ErrorCode
from .as_codec import CodecUnderTest
from .examples import examples, frame_of
from .forge import control_of, position_of, with_control, with_values
from .record import Family, Role

CAN = Family("CAN", Role.CODEC)
E = ErrorCode
_LONG = "accepting a longer encoding of the same value"
_TYPE = "a type outside the profile"


def _ping(control: bytes, *codes: ErrorCode) -> partial[None]:
    return partial(_control, "PING", control, codes or (E.NONCANONICAL,))


def _control(name: str, control: bytes, codes: tuple[ErrorCode, ...], t: CodecUnderTest) -> None:
    t.refuses(with_control(frame_of(name), control), *codes)


_FORMS = (
    (1, "uint8 for a small number", b"\x92\xcc\x01\x02", _LONG),
    (2, "uint16 for a small number", b"\x92\xcd\x00\x01\x02", _LONG),
    (3, "uint32 for a small number", b"\x92\xce\x00\x00\x00\x01\x02", _LONG),
    (4, "uint64 for a small number", b"\x92\xcf" + bytes(7) + b"\x01\x02", _LONG),
    (5, "uint16 for 200", b"\x92\xcd\x00\xc8\x02", _LONG),
    (6, "uint32 for 300", b"\x92\xce\x00\x00\x01\x2c\x02", _LONG),
    (7, "uint64 for 2^20", b"\x92\xcf" + (2**20).to_bytes(8, "big") + b"\x02", _LONG),
    (8, "int8 for a positive number", b"\x92\xd0\x01\x02", _LONG),
    (9, "int16 for a positive number", b"\x92\xd1\x01\x2c\x02", _LONG),
    (10, "int32 for a positive number", b"\x92\xd2\x00\x01\x00\x00\x02", _LONG),
    (11, "int64 for a positive number", b"\x92\xd3" + (2**40).to_bytes(8, "big") + b"\x02", _LONG),
    (12, "array16 for two fields", b"\xdc\x00\x02\x01\x02", _LONG),
    (13, "array32 for two fields", b"\xdd\x00\x00\x00\x02\x01\x02", _LONG),
    (14, "a map at the top", b"\x81\x01\x02", _TYPE),
    (15, "a map as a field", b"\x92\x80\x02", _TYPE),
    (16, "a map with a key twice", b"\x82\x01\x02\x01\x03", _TYPE),
    (17, "nil", b"\x92\xc0\x02", _TYPE),
    (18, "false for 0", b"\x92\xc2\x02", _TYPE),
    (19, "true for 1", b"\x92\xc3\x02", _TYPE),
    (20, "float32 for an integer", b"\x92\xca" + struct.pack(">f", 1.0) + b"\x02", _TYPE),
    (21, "float64 for an integer", b"\x92\xcb" + struct.pack(">d", 1.0) + b"\x02", _TYPE),
    (22, "float64 -0.0", b"\x92\xcb" + struct.pack(">d", -0.0) + b"\x02", _TYPE),
    (23, "float64 not a number", b"\x92\xcb" + struct.pack(">d", float("nan")) + b"\x02", _TYPE),
    (24, "a fixed extension", b"\x92\xd4\x05\x01\x02", _TYPE),
    (25, "an extension of 8 bits of length", b"\x92\xc7\x01\x05\x01\x02", _TYPE),
    (26, "a timestamp", b"\x92\xd6\xff\x00\x00\x00\x00\x02", _TYPE),
    (27, "the byte that msgpack never uses", b"\x92\xc1\x02", _TYPE),
    (28, "a byte after the array", b"\x92\x01\x02\x00", "reading one object and ignoring the rest"),
    (29, "a second array after the first", b"\x92\x01\x02\x92\x01\x02", "reading one object and ignoring the rest"),
    (30, "an array that promises more than there is", b"\x93\x01\x02", "reading past the end"),
    (31, "an integer cut short", b"\x92\x01\xcd\x01", "reading past the end"),
    (32, "a lone array header", b"\x92", "reading past the end"),
    (33, "an array of 2^32 - 1", b"\xdd\xff\xff\xff\xff", "allocating what a header promises"),
    (34, "a map of 2^32 - 1", b"\xdf\xff\xff\xff\xff", "allocating what a header promises"),
    (35, "a bin of 2^32 - 1 bytes", b"\x92\xc6\xff\xff\xff\xff\x02", "allocating what a header promises"),
    (36, "a string of 2^32 - 1 bytes", b"\x92\xdb\xff\xff\xff\xff\x02", "allocating what a header promises"),
    (37, "an integer at the top", b"\x01", _TYPE),
    (38, "a string at the top", b"\xa2ab", _TYPE),
    (39, "a bin at the top", b"\xc4\x02ab", _TYPE),
    (40, "1,000 nested arrays", b"\x91" * 1000 + b"\x01", "recursion that the peer controls"),
    (41, "4,000 nested arrays", b"\x91" * 4000 + b"\x01", "recursion that the peer controls"),
    (42, "a fourth level of arrays", b"\x92\x91\x91\x91\x01\x02", "no limit of depth"),
)  # fmt: skip
for _number, _title, _bytes, _bug in _FORMS:
    _anchor = "REQ-CAN-2" if _number in (40, 41, 42) else "REQ-LIM-1" if 33 <= _number <= 36 else "REQ-CAN-1"
    CAN.add(_number, _title, _anchor, _bug, _ping(_bytes))


def _reform(name: str, old: bytes, new: bytes, codes: tuple[ErrorCode, ...], t: CodecUnderTest) -> None:
    """Replace one encoded value of an example by another encoding."""
    control = control_of(frame_of(name))
    assert control.count(old) == 1, (name, control.hex())
    t.refuses(with_control(frame_of(name), control.replace(old, new)), *codes)


_DIGEST = b"\xc4\x08" + bytes(range(8))
_TEXT = b"\xaeSTEP.tap_first"
_STRINGS = (
    (
        50,
        "bin16 for 8 bytes",
        "COMMIT",
        _DIGEST,
        b"\xc5\x00\x08" + bytes(range(8)),
        (E.NONCANONICAL,),
        "REQ-CAN-1",
        _LONG,
    ),
    (
        51,
        "bin32 for 8 bytes",
        "COMMIT",
        _DIGEST,
        b"\xc6\x00\x00\x00\x08" + bytes(range(8)),
        (E.NONCANONICAL,),
        "REQ-CAN-1",
        _LONG,
    ),
    (52, "str8 for a short string", "ERROR", _TEXT, b"\xd9\x0e" + _TEXT[1:], (E.NONCANONICAL,), "REQ-CAN-1", _LONG),
    (
        53,
        "str16 for a short string",
        "ERROR",
        _TEXT,
        b"\xda\x00\x0e" + _TEXT[1:],
        (E.NONCANONICAL,),
        "REQ-CAN-1",
        _LONG,
    ),
    (
        54,
        "str32 for a short string",
        "ERROR",
        _TEXT,
        b"\xdb\x00\x00\x00\x0e" + _TEXT[1:],
        (E.NONCANONICAL,),
        "REQ-CAN-1",
        _LONG,
    ),
    (
        55,
        "a string that is not UTF-8",
        "ERROR",
        _TEXT,
        b"\xa2\xff\xfe",
        (E.NONCANONICAL, E.BAD_FIELD),
        "REQ-CAN-1",
        _TYPE,
    ),
    (
        56,
        "a string that is not ASCII",
        "ERROR",
        _TEXT,
        b"\xa2\xc3\xa9",
        (E.NONCANONICAL, E.BAD_FIELD),
        "REQ-CAN-5",
        "text that a terminal interprets",
    ),
    (
        57,
        "a control character in a string",
        "ERROR",
        _TEXT,
        b"\xa2\x1b[",
        (E.NONCANONICAL, E.BAD_FIELD),
        "REQ-CAN-5",
        "text that a terminal interprets",
    ),
    (
        58,
        "a string of 97 bytes",
        "ERROR",
        _TEXT,
        b"\xd9\x61" + b"x" * 97,
        (E.BAD_FIELD,),
        "REQ-CAN-5",
        "text without a limit",
    ),
    (
        59,
        "bytes where text is due",
        "ERROR",
        _TEXT,
        b"\xc4\x0e" + _TEXT[1:],
        (E.BAD_FIELD,),
        "REQ-CAN-4",
        "bytes and text confused",
    ),
    (
        60,
        "text where bytes are due",
        "COMMIT",
        _DIGEST,
        b"\xa812345678",
        (E.BAD_FIELD,),
        "REQ-CAN-4",
        "bytes and text confused",
    ),
    (
        61,
        "a digest of 7 bytes",
        "COMMIT",
        _DIGEST,
        b"\xc4\x07" + bytes(7),
        (E.BAD_FIELD,),
        "REQ-CAN-3",
        "a digest of another length",
    ),
    (
        62,
        "a digest of 9 bytes",
        "COMMIT",
        _DIGEST,
        b"\xc4\x09" + bytes(9),
        (E.BAD_FIELD,),
        "REQ-CAN-3",
        "a digest of another length",
    ),
    (
        63,
        "a digest as an array of bytes",
        "COMMIT",
        _DIGEST,
        b"\x98" + bytes(range(8)),
        (E.BAD_FIELD,),
        "REQ-CAN-3",
        "bytes and arrays confused",
    ),
    (
        64,
        "a negative number",
        "COMMIT",
        b"\x2a",
        b"\xff",
        (E.NONCANONICAL, E.BAD_FIELD),
        "REQ-CAN-1",
        "signed integers",
    ),
)
for _number, _title, _name, _old, _new, _codes, _anchor, _bug in _STRINGS:
    CAN.add(_number, _title, _anchor, _bug, partial(_reform, _name, _old, _new, _codes))


@CAN.case(65, "the largest numbers of each width", "REQ-CAN-1", "a width that is not implemented")
def widths(t: CodecUnderTest) -> None:
    message, key, _ = examples()["PING"]
    for value in (0, 127, 128, 255, 256, 2**16 - 1, 2**16, 2**32 - 1, 2**32, 2**63, 2**64 - 1):
        t.accepts(with_values(message, {1: value}, key))


@CAN.case(66, "text of 0, 31, 32 and 96 bytes", "REQ-CAN-5", "a string form that is not implemented")
def texts(t: CodecUnderTest) -> None:
    message, key, _ = examples()["ERROR"]
    for length in (0, 31, 32, 96):
        t.accepts(with_values(message, {3: "~" * length}, key))


def _count(name: str, t: CodecUnderTest) -> None:
    """One field less, one more."""
    message, key, bodies = examples()[name]
    values = message.values()
    less, more = list(values[:-1]), [*values, 0]
    from ..canonical import encode_canonical
    from .forge import raw_frame

    for wrong in (less, more):
        t.refuses(raw_frame(message.TYPE, encode_canonical(wrong), key, bodies), E.BAD_FIELD)


def _types(name: str, t: CodecUnderTest) -> None:
    """Each field with a value of another type."""
    message, key, bodies = examples()[name]
    for position, field in enumerate(message.LAYOUT):
        wrong: Value = b"x" if isinstance(field, UInt | Choice) else 7
        t.refuses(with_values(message, {position: wrong}, key, bodies), E.BAD_FIELD)


def _out_of_range(message: Message) -> list[tuple[int, Value]]:
    """For each bounded field, values just outside."""
    found: list[tuple[int, Value]] = []
    for position, field in enumerate(message.LAYOUT):
        match field:
            case UInt():
                found += [(position, field.maximum + 1)] if field.maximum < 2**64 - 1 else []
                found += [(position, field.minimum - 1)] if field.minimum > 0 else []
            case Choice():
                known = {int(member) for member in field.members}
                found.append((position, next(i for i in range(200, 256) if i not in known)))
            case Bin():
                found.append((position, bytes(field.maximum + 1)))
                found += [(position, bytes(field.minimum - 1))] if field.minimum > 0 else []
            case Text():
                found.append((position, "x" * (field.maximum + 1)))
            case Records():
                found += [(position, [])] if field.minimum_count > 0 else []
    return found


def _ranges(name: str, t: CodecUnderTest) -> None:
    message, key, bodies = examples()[name]
    for position, value in _out_of_range(message):
        t.refuses(with_values(message, {position: value}, key, bodies), E.BAD_FIELD)


for _name in examples():
    _type = int(examples()[_name][0].TYPE)
    CAN.add(
        300 + _type,
        f"{_name}: a field less, a field more",
        "REQ-CAN-4",
        "fields counted from one end only",
        partial(_count, _name),
    )
    CAN.add(
        400 + _type,
        f"{_name}: each field of another type",
        "REQ-CAN-4",
        "a field whose type is not checked",
        partial(_types, _name),
    )
    if _out_of_range(examples()[_name][0]):
        CAN.add(
            500 + _type,
            f"{_name}: each field just outside its range",
            "REQ-LIM-1",
            "a limit that is checked after use, or never",
            partial(_ranges, _name),
        )


@CAN.case(160, "STEP item: each field outside its range", "REQ-LIM-1", "limits of nested records not checked")
def item_ranges(t: CodecUnderTest) -> None:
    message, key, bodies = examples()["STEP"]
    item = message.items[0]  # type: ignore[attr-defined]
    for position, field in enumerate(item.LAYOUT):
        values = list(item.values())
        match field:
            case UInt():
                values[position] = field.maximum + 1 if field.maximum < 2**64 - 1 else b"x"
            case Choice():
                values[position] = 200
            case _:
                values[position] = bytes(9)
        t.refuses(with_values(message, {0: [values]}, key, bodies), E.BAD_FIELD)


@CAN.case(161, "descriptor: each field outside its range", "REQ-BOD-1", "limits of descriptors not checked")
def descriptor_ranges(t: CodecUnderTest) -> None:
    message, key, bodies = examples()["STEP"]
    body = message.bodies[0]  # type: ignore[attr-defined]
    for position, field in enumerate(body.LAYOUT):
        values = list(body.values())
        values[position] = (
            field.maximum + 1 if isinstance(field, UInt) else 200 if isinstance(field, Choice) else bytes(7)
        )
        t.refuses(with_values(message, {1: [values]}, key, bodies), E.BAD_FIELD)


@CAN.case(162, "STEP with 33 items", "REQ-LIM-1", "a list without a limit")
def many_items(t: CodecUnderTest) -> None:
    message, key, bodies = examples()["STEP"]
    items = [item.values() for item in message.items] * 33  # type: ignore[attr-defined]
    t.refuses(with_values(message, {0: items}, key, bodies), E.BAD_FIELD, E.LIMIT_EXCEEDED)


@CAN.case(163, "HELLO with no and with 9 wire versions", "REQ-LIM-1", "a list without a limit")
def many_versions(t: CodecUnderTest) -> None:
    message, key, _ = examples()["HELLO"]
    place = position_of(type(message), "wire_versions")
    for versions in ([], [0x0200] * 9):
        t.refuses(with_values(message, {place: list(versions)}, key), E.BAD_FIELD)


@CAN.case(164, "STATS with 129 counters", "REQ-LIM-1", "a list without a limit")
def many_counters(t: CodecUnderTest) -> None:
    message, key, _ = examples()["STATS"]
    place = position_of(type(message), "counters")
    t.refuses(with_values(message, {place: [[1, 1]] * 129}, key), E.BAD_FIELD, E.NONCANONICAL)
