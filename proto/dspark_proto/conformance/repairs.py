"""How a careless peer overlooks a fault: each repair makes one kind of fault good before honest code sees the frame.

A mutant is an honest peer behind a repair: exactly as if it did not check for that fault. Repairs take any bytes and
change only what their fault is. Called by the mutants; never by a case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack  # type: ignore[import-untyped]  # ships no annotations

from ..bodies import BodyDescriptor
from ..buffers import aligned
from ..canonical import encode_canonical
from ..checksums import body_checksum, crc32c
from ..fields import Bin, Choice, Field, Records, Text, UInt, UInts
from ..frame import MESSAGES
from ..prefix import Key
from ..registry import Checksum, MessageType
from .forge import PREFIX_BYTES, control_of, field_of, patched, raw_frame, sealed_prefix, with_control

Repair = Callable[[bytes], bytes]
_TYPES = {int(kind) for kind in MessageType}


def sound(frame: bytes) -> bool:
    """Long enough, right magic, right prefix crc: other repairs may look at its fields."""
    return len(frame) >= PREFIX_BYTES and frame[:4] == b"DSPK" and sealed_prefix(frame) == frame[:PREFIX_BYTES]


def any_magic(frame: bytes) -> bytes:
    """The magic is not compared."""
    return patched(frame, "magic", b"DSPK") if len(frame) >= PREFIX_BYTES else frame


def prefix_crc(frame: bytes) -> bytes:
    """The prefix crc is not compared."""
    if len(frame) < PREFIX_BYTES or frame[:4] != b"DSPK":
        return frame
    return sealed_prefix(frame) + frame[PREFIX_BYTES:]


def any_major(frame: bytes) -> bytes:
    """The major version is not compared."""
    return patched(frame, "major", 2) if sound(frame) else frame


def known_type(frame: bytes) -> bytes:
    """An unknown type is taken for PING."""
    return patched(frame, "type", MessageType.PING) if sound(frame) and frame[6] not in _TYPES else frame


def no_flags(frame: bytes) -> bytes:
    """Flags are ignored."""
    return patched(frame, "flags", 0) if sound(frame) else frame


def no_reserved(frame: bytes) -> bytes:
    """The reserved field is ignored."""
    return patched(frame, "reserved", 0) if sound(frame) else frame


def true_lengths(frame: bytes) -> bytes:
    """Lengths of the prefix are not believed: they are taken from the frame."""
    if not sound(frame):
        return frame
    control = field_of(frame, "control_length")
    rest = len(frame) - aligned(PREFIX_BYTES + min(control or 1, 4096))
    fixed = patched(frame, "control_length", min(control, 4096) or 1)
    fixed = patched(fixed, "body_length", max(0, rest // 64 * 64))
    return patched(fixed, "body_count", min(field_of(frame, "body_count"), 32) if rest >= 64 else 0)


def exact_size(frame: bytes) -> bytes:
    """Missing bytes are taken for zero, and bytes after the frame are ignored."""
    if not sound(frame):
        return frame
    body, control = field_of(frame, "body_length"), field_of(frame, "control_length")
    if body > 2**20 or control > 4096:
        return frame
    total = aligned(PREFIX_BYTES + control) + body
    return frame[:total] + bytes(max(0, total - len(frame)))


def control_crc(frame: bytes) -> bytes:
    """The control crc is not compared."""
    return patched(frame, "control_crc", crc32c(control_of(frame))) if sound(frame) else frame


def padding(frame: bytes) -> bytes:
    """Padding is not looked at."""
    if not sound(frame) or field_of(frame, "control_length") > 4096:
        return frame
    out = bytearray(frame)
    end = PREFIX_BYTES + field_of(frame, "control_length")
    out[end : aligned(end)] = bytes(len(out[end : aligned(end)]))
    start = aligned(end)
    for described in described_bodies(frame):
        stop = start + described[4]
        out[stop : start + aligned(described[4])] = bytes(len(out[stop : start + aligned(described[4])]))
        start += aligned(described[4])
    return bytes(out)


def values_of(frame: bytes) -> list[Any] | None:
    """The wire values of control, decoded loosely."""
    try:
        values = msgpack.unpackb(control_of(frame), raw=False, strict_map_key=False)
    except Exception:  # a repair leaves alone what it cannot read
        return None
    return values if isinstance(values, list) else None


def described_bodies(frame: bytes) -> list[list[Any]]:
    """The descriptors of a frame, as wire values; none where they are not whole."""
    values = values_of(frame) if frame[6] in (17, 18, 19) else None
    found = values[-1] if values and isinstance(values[-1], list) else []
    whole = [one for one in found if isinstance(one, list) and len(one) == 7 and isinstance(one[4], int)]
    return whole if len(whole) == len(found) and all(one[4] < 2**24 for one in whole) else []


def redescribed(frame: bytes, kind: int | None = None) -> bytes:
    """Body checksums are not compared; with ``kind`` the kind neither."""
    if not sound(frame) or not (bodies := described_bodies(frame)):
        return frame
    values = values_of(frame)
    assert values is not None
    start = aligned(PREFIX_BYTES + field_of(frame, "control_length"))
    fresh = []
    for body in bodies:
        chosen = kind or body[5]
        if chosen not in (1, 2):
            return frame
        data = frame[start : start + body[4]]
        fresh.append([*body[:5], chosen, body_checksum(Checksum(chosen), data)])
        start += aligned(body[4])
    return with_control(frame, _encoded([*values[:-1], fresh])) if fresh != bodies else frame


def reencoded(frame: bytes) -> bytes:
    """Any msgpack of the right values will do."""
    if not sound(frame) or crc32c(control_of(frame)) != field_of(frame, "control_crc"):
        return frame
    values = values_of(frame)
    if values is None:
        try:
            unpacker = msgpack.Unpacker(raw=False, strict_map_key=False)
            unpacker.feed(control_of(frame))
            values = unpacker.unpack()
        except Exception:  # a repair leaves alone what it cannot read
            return frame
    plain = _plain(values)
    return with_control(frame, encode_canonical(plain)) if isinstance(plain, list) else frame


def _encoded(values: list[Any]) -> bytes:
    """Wire values, whatever they are."""
    return encode_canonical(values)


def _plain(value: Any) -> Any:
    """Maps become lists, floats and booleans integers, nil 0."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return [_plain(one) for pair in value.items() for one in pair]
    if value is None or isinstance(value, bool | float):
        return int(value) if value and value == value else 0
    return value if isinstance(value, int | str | bytes) else 0


def clamped(frame: bytes) -> bytes:
    """Fields out of range, of another type, missing or too many are taken for the nearest value."""
    if not sound(frame) or frame[6] not in _TYPES or crc32c(control_of(frame)) != field_of(frame, "control_crc"):
        return frame
    values = values_of(frame)
    if values is None or encode_canonical(values) != control_of(frame):
        return frame
    layout = MESSAGES[MessageType(frame[6])].LAYOUT
    filled = [*values, *[None] * len(layout)][: len(layout)]
    fixed = [_nearest(field, value) for field, value in zip(layout, filled, strict=True)]
    return with_control(frame, encode_canonical(fixed)) if fixed != values else frame


def _nearest(field: Field, value: Any) -> Any:
    match field:
        case UInt():
            number = value if isinstance(value, int) else field.minimum
            return max(field.minimum, min(field.maximum, number))
        case Choice():
            known = [int(member) for member in field.members]
            return value if value in known else known[0]
        case Bin():
            raw = value if isinstance(value, bytes) else b""
            return raw[: field.maximum] + bytes(max(0, field.minimum - len(raw)))
        case Text():
            text = value if isinstance(value, str) else ""
            return "".join(one for one in text if " " <= one <= "~")[: field.maximum]
        case UInts():
            numbers = value if isinstance(value, list) else []
            return (numbers or [0x0200] * field.minimum_count)[: field.maximum_count]
        case Records():
            return _nearest_records(field, value)
    return value


def _nearest_records(field: Records, value: Any) -> Any:
    rows = value if isinstance(value, list) else []
    fixed = []
    for row in (rows or [[]] * field.minimum_count)[: field.maximum_count]:
        layout = field.item.LAYOUT
        filled = [*(row if isinstance(row, list) else []), *[None] * len(layout)][: len(layout)]
        fixed.append([_nearest(one, part) for one, part in zip(layout, filled, strict=True)])
    return fixed


def with_key(frame: bytes, key: Key) -> bytes:
    """The frame under another key, prefix only."""
    moved = patched(patched(frame, "slot", key.slot), "generation", key.generation)
    return patched(moved, "round", key.round)


def counted_bodies(frame: bytes) -> bytes:
    """The number and sizes of bodies are taken from the prefix, whatever the descriptors say."""
    if not sound(frame) or frame[6] not in (17, 18, 19):
        return frame
    values = values_of(frame)
    bodies = described_bodies(frame)
    if values is None or not bodies:
        return frame
    total = field_of(frame, "body_length")
    if len(bodies) == field_of(frame, "body_count") and sum(aligned(one[4]) for one in bodies) == total:
        return frame
    body = bytes(frame[len(frame) - total :])[: bodies[0][4]]
    described = [[*bodies[0][:4], len(body), bodies[0][5], body_checksum(Checksum(bodies[0][5]), body)]]
    assert len(BodyDescriptor.LAYOUT) == len(described[0])
    return raw_frame(frame[6], _encoded([*values[:-1], described]), key_of(frame), [body])


def key_of(frame: bytes) -> Key:
    """The prefix's key."""
    return Key(field_of(frame, "slot"), field_of(frame, "generation"), field_of(frame, "round"))
