"""Frames that the codec would not write: one field wrong, everything around it right.

Layout constants are SPEC.md 4.1, written out here once more, so that a slip in the codec's own table is found.
Called by the families and by the mutants; never used to judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from struct import Struct
from typing import Any, Final

from ..bodies import BodyDescriptor
from ..buffers import Buffer, aligned
from ..canonical import Value, encode_canonical
from ..checksums import crc32c
from ..messages import Message
from ..prefix import NO_KEY, Key
from ..registry import MessageType

NEWER_TYPE: Final = max(MessageType) + 1
"""A message type that this version does not have."""

PREFIX: Final = Struct("<4sBBBBIHHQQIIII")
PREFIX_BYTES: Final = 48
CRC_AT: Final = 44
OFFSETS: Final = {
    "magic": (0, 4),
    "major": (4, 1),
    "minor": (5, 1),
    "type": (6, 1),
    "flags": (7, 1),
    "control_length": (8, 4),
    "body_count": (12, 2),
    "reserved": (14, 2),
    "body_length": (16, 8),
    "generation": (24, 8),
    "slot": (32, 4),
    "round": (36, 4),
    "control_crc": (40, 4),
    "prefix_crc": (44, 4),
}


def raw_frame(kind: int, control: bytes, key: Key = NO_KEY, bodies: Sequence[Buffer] = ()) -> bytes:
    """A frame of any type around any control bytes, with right lengths and crcs."""
    body_length = sum(aligned(len(body)) for body in bodies)
    head = PREFIX.pack(
        b"DSPK", 2, 0, kind, 0, len(control), len(bodies), 0, body_length,
        key.generation, key.slot, key.round, crc32c(control), 0,
    )  # fmt: skip
    return b"".join([sealed_prefix(head), control, _padding(PREFIX_BYTES + len(control))]) + b"".join(
        bytes(body) + _padding(len(body)) for body in bodies
    )


def _padding(length: int) -> bytes:
    return bytes(aligned(length) - length)


def sealed_prefix(head: bytes) -> bytes:
    """The 48 bytes with a right prefix crc."""
    return head[:CRC_AT] + crc32c(head[:CRC_AT]).to_bytes(4, "little")


def patched(frame: Buffer, field: str, value: int | bytes, *, seal: bool = True) -> bytes:
    """``frame`` with one prefix field changed; ``seal`` makes the prefix crc right again."""
    offset, size = OFFSETS[field]
    raw = value if isinstance(value, bytes) else value.to_bytes(size, "little")
    out = bytes(frame[:offset]) + raw + bytes(frame[offset + size :])
    return sealed_prefix(out) + out[PREFIX_BYTES:] if seal else out


def field_of(frame: Buffer, field: str) -> int:
    """A prefix field."""
    offset, size = OFFSETS[field]
    return int.from_bytes(bytes(frame[offset : offset + size]), "little")


def flipped(frame: Buffer, offset: int, bit: int = 0) -> bytes:
    """``frame`` with one bit turned, crcs left as they are. Negative offsets count from the end."""
    out = bytearray(frame)
    out[offset] ^= 1 << bit
    return bytes(out)


def control_of(frame: Buffer) -> bytes:
    """The control bytes."""
    return bytes(frame[PREFIX_BYTES : PREFIX_BYTES + field_of(frame, "control_length")])


def bodies_of(frame: Buffer) -> bytes:
    """All bodies with their padding."""
    return bytes(frame[aligned(PREFIX_BYTES + field_of(frame, "control_length")) :])


def with_control(frame: Buffer, control: bytes) -> bytes:
    """``frame`` around other control bytes, lengths and crcs right."""
    head = patched(patched(frame, "control_length", len(control)), "control_crc", crc32c(control))[:PREFIX_BYTES]
    return head + control + _padding(PREFIX_BYTES + len(control)) + bodies_of(frame)


def with_values(message: Message, changes: dict[int, Value], key: Key = NO_KEY, bodies: Sequence[Buffer] = ()) -> bytes:
    """The frame of ``message`` with some wire values replaced by position, without any range check."""
    values = list(message.values())
    for position, value in changes.items():
        values[position] = value
    return raw_frame(message.TYPE, encode_canonical(values), key, bodies)


def changed(message: Any, **changes: Any) -> Any:
    """A record of any class with some fields changed."""
    return replace(message, **changes)


def position_of(record: type[Message] | type[BodyDescriptor], name: str) -> int:
    """Where a named field stands in a record's values."""
    return [field.name for field in record.LAYOUT].index(name)
