"""A careless encoder: msgpack in any legal or illegal length form, and frames with or without right checksums.

The counterpart of ``canonical`` and ``frame``, which can only write what is right. Source: the msgpack
specification (formats), SPEC.md sections "Framing" and "Checksums". Called by the mutations.
"""

from __future__ import annotations

from enum import IntEnum
from struct import pack, pack_into, unpack_from
from typing import Final, NamedTuple

from ..buffers import aligned
from ..checksums import crc32c
from ..limits import PREFIX_BYTES

CONTROL_LENGTH_AT: Final = 8
BODY_COUNT_AT: Final = 12
BODY_LENGTH_AT: Final = 16
CONTROL_CRC_AT: Final = 40
PREFIX_CRC_AT: Final = 44


class Seal(IntEnum):
    """Which checksums are made right after a mutation. FULL includes PREFIX."""

    NONE = 0
    PREFIX = 1
    FULL = 2


class Element(NamedTuple):
    """One value in a control block: header ``start..content``, value up to ``end``.

    ``parent`` is the index of the enclosing array's element, -1 for the outer one; ``size`` is the number of
    children, the length, or the integer's value.
    """

    kind: str
    start: int
    content: int
    end: int
    parent: int
    size: int


def uint_forms(value: int) -> list[bytes]:
    """Every msgpack encoding of ``value`` (0 .. 2^64 - 1), the shortest first."""
    forms = [bytes([value])] if value < 0x80 else []
    for width, code, layout in ((1, 0xCC, ">BB"), (2, 0xCD, ">BH"), (4, 0xCE, ">BI"), (8, 0xCF, ">BQ")):
        if value < 1 << 8 * width:
            forms.append(pack(layout, code, value))
    return forms


_LONG: Final = {
    "bin": ((1, 0xC4), (2, 0xC5), (4, 0xC6)),
    "str": ((1, 0xD9), (2, 0xDA), (4, 0xDB)),
    "array": ((2, 0xDC), (4, 0xDD)),
}
_WIDE: Final = {
    **{code: (kind, width) for kind, forms in _LONG.items() for width, code in forms},
    **{0xCC: ("int", 1), 0xCD: ("int", 2), 0xCE: ("int", 4), 0xCF: ("int", 8)},
}
_FIX: Final = {"str": (0xA0, 32), "array": (0x90, 16)}


def header_forms(kind: str, count: int) -> list[bytes]:
    """Every msgpack header of a ``bin``, ``str`` or ``array`` of ``count``, the shortest first."""
    base, room = _FIX.get(kind, (0, 0))
    forms = [bytes([base | count])] if count < room else []
    return forms + [
        bytes([code]) + count.to_bytes(width, "big") for width, code in _LONG[kind] if count < 1 << 8 * width
    ]


def scan(control: bytes) -> tuple[Element, ...]:
    """The elements of a block, outer first. Raises ``ValueError`` for types outside the profile."""
    found: list[Element] = []
    if _scan(control, 0, -1, found) != len(control):
        raise ValueError("bytes after the outer value")
    return tuple(found)


def _scan(control: bytes, at: int, parent: int, found: list[Element]) -> int:
    kind, content, count = _header(control, at)
    index = len(found)
    found.append(Element(kind, at, content, content, parent, count))
    end = content
    if kind == "array":
        for _ in range(count):
            end = _scan(control, end, index, found)
    elif kind != "int":
        end += count
    if end > len(control):
        raise ValueError("a value is cut off")
    found[index] = found[index]._replace(end=end)
    return end


def _header(control: bytes, at: int) -> tuple[str, int, int]:
    """(kind, offset of the content, count) of the value at ``at``."""
    first = control[at] if at < len(control) else 0xC1
    if first < 0x80:
        return "int", at + 1, first
    for kind, (base, room) in _FIX.items():
        if base <= first < base + room:
            return kind, at + 1, first - base
    if first not in _WIDE:
        raise ValueError("a type outside the profile")
    kind, width = _WIDE[first]
    content = at + 1 + width
    return kind, content, int.from_bytes(control[at + 1 : content], "big")


def assemble(prefix: bytes, control: bytes, bodies: bytes) -> bytearray:
    """A frame with ``prefix`` (48 B) whose control length and body length are right; checksums are stale."""
    frame = bytearray(aligned(PREFIX_BYTES + len(control)) + len(bodies))
    frame[:PREFIX_BYTES] = prefix
    frame[PREFIX_BYTES : PREFIX_BYTES + len(control)] = control
    frame[len(frame) - len(bodies) :] = bodies
    pack_into("<I", frame, CONTROL_LENGTH_AT, len(control))
    pack_into("<Q", frame, BODY_LENGTH_AT, len(bodies))
    return frame


def seal(frame: bytearray, level: Seal) -> bytearray:
    """Make the checksums of ``level`` right in place, by the lengths that the prefix declares."""
    if len(frame) < PREFIX_BYTES or level is Seal.NONE:
        return frame
    if level is Seal.FULL:
        (length,) = unpack_from("<I", frame, CONTROL_LENGTH_AT)
        control = frame[PREFIX_BYTES : PREFIX_BYTES + length]
        pack_into("<I", frame, CONTROL_CRC_AT, crc32c(bytes(control)))
    pack_into("<I", frame, PREFIX_CRC_AT, crc32c(bytes(frame[:PREFIX_CRC_AT])))
    return frame
