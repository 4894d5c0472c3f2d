"""The bytes of a `.dspcap` file: one header, then records, each under its own checksums.

Header: magic 8 B | version u16 | reserved u16 = 0 | description length u32 | description crc32c u32 | crc32c of these
20 bytes u32, then the description: [clock, start in unix ns, roles, tool, comment] in the control profile of frames.
Record: magic 4 B | kind u8 | direction u8 | transport u8 | reserved u8 = 0 | time in ns since the start u64 |
connection u32 | length u32 | content crc32c u32 | crc32c of these 28 bytes u32, then the content.
All integers are little-endian. Invariants: a length is checked against its limit, and by the reader against the bytes
that are left, before anything is read; content is data and is never executed or unpickled. Called by ``writer`` and
``reader``; opens no file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from struct import Struct
from typing import ClassVar, Final

from ..buffers import Buffer
from ..canonical import decode_canonical, encode_canonical
from ..checksums import crc32c
from ..errors import ProtocolError
from ..fields import Field, Record, Text, UInt
from ..limits import CONTROL_BYTES_MAX, FRAME_BYTES_MAX, U32_MAX, U64_MAX

MAGIC: Final = b"DSPCAP\x1a\n"
VERSION: Final = 1
HEADER_BYTES: Final = 24
ENTRY_BYTES: Final = 32
NOTE_BYTES_MAX: Final = 1024

_HEADER: Final = Struct("<8sHHIII")
_ENTRY_MAGIC: Final = b"DREC"
_ENTRY: Final = Struct("<4sBBBBQIIII")
_CRC_BYTES: Final = 4


class CaptureError(ValueError):
    """A file is no capture, or a value does not fit into one; the message is for a person."""


class EntryKind(IntEnum):
    """What an entry holds: a frame as it passed, or a note in printable ASCII."""

    FRAME = 1
    NOTE = 2


class Direction(IntEnum):
    """UP: verifier to drafter. DOWN: drafter to verifier."""

    UP = 1
    DOWN = 2


class TransportKind(IntEnum):
    """What carried the frame."""

    INPROC = 1
    TCP = 2
    ZMQ = 3
    UCX = 4


@dataclass(frozen=True, slots=True)
class Description(Record):
    """Who recorded what, and by which clock; texts are printable ASCII of at most 96 bytes."""

    clock: str = "monotonic"
    start_unix_ns: int = 0
    roles: str = "verifier,drafter"
    tool: str = "dspark"
    comment: str = ""

    NAME: ClassVar[str] = "DESCRIPTION"
    LAYOUT: ClassVar[tuple[Field, ...]] = (
        Text("clock"),
        UInt("start_unix_ns", U64_MAX),
        Text("roles"),
        Text("tool"),
        Text("comment"),
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """One record. ``t_ns`` counts from the start of the capture; ``connection`` is a small number."""

    kind: EntryKind
    direction: Direction
    transport: TransportKind
    t_ns: int
    connection: int
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class EntryHead:
    """A checked record without its content."""

    kind: EntryKind
    direction: Direction
    transport: TransportKind
    t_ns: int
    connection: int
    length: int
    content_crc: int


def write_header(description: Description) -> bytes:
    """Header and description."""
    text = encode_canonical(description.values())
    head = _HEADER.pack(MAGIC, VERSION, 0, len(text), crc32c(text), 0)[:-_CRC_BYTES]
    return head + crc32c(head).to_bytes(_CRC_BYTES, "little") + text


def read_header(head: bytes) -> tuple[int, int]:
    """(length, crc32c) of the description that follows. Raises :class:`CaptureError`."""
    if len(head) != HEADER_BYTES or not head.startswith(MAGIC):
        raise CaptureError("not a capture: the file does not begin with DSPCAP")
    _, version, reserved, length, text_crc, head_crc = _HEADER.unpack(head)
    if head_crc != crc32c(head[:-_CRC_BYTES]):
        raise CaptureError("the header of the capture is damaged")
    if version != VERSION or reserved:
        raise CaptureError(f"capture version {version}; this tool reads version {VERSION}")
    if not 0 < length <= CONTROL_BYTES_MAX:
        raise CaptureError(f"the description claims {length} bytes; at most {CONTROL_BYTES_MAX} are allowed")
    return length, text_crc


def read_description(text: bytes, expected_crc: int) -> Description:
    """The description in ``text``. Raises :class:`CaptureError`."""
    if crc32c(text) != expected_crc:
        raise CaptureError("the description of the capture is damaged")
    try:
        return Description.from_values(decode_canonical(text, "description"))
    except ProtocolError as error:
        raise CaptureError(f"the description of the capture is not readable: {error}") from error


def write_entry(
    kind: EntryKind, direction: Direction, transport: TransportKind, t_ns: int, connection: int, content: Buffer
) -> bytes:
    """Record and content as one string. Raises :class:`CaptureError` when a value has no room."""
    if not (0 <= t_ns <= U64_MAX and 0 <= connection <= U32_MAX and len(content) <= _limit(kind)):
        raise CaptureError(f"{len(content)} bytes at {t_ns} ns on connection {connection} do not fit into a record")
    head = _ENTRY.pack(_ENTRY_MAGIC, kind, direction, transport, 0, t_ns, connection, len(content), crc32c(content), 0)[
        :-_CRC_BYTES
    ]
    return b"".join((head, crc32c(head).to_bytes(_CRC_BYTES, "little"), content))


def read_entry_head(head: bytes) -> EntryHead:
    """The record in 32 bytes. Raises :class:`CaptureError` for damage and for a length above its limit."""
    magic, kind, direction, transport, reserved, t_ns, connection, length, content_crc, crc = _ENTRY.unpack(head)
    if magic != _ENTRY_MAGIC or crc != crc32c(head[:-_CRC_BYTES]) or reserved:
        raise CaptureError("a record is damaged")
    try:
        known = EntryKind(kind), Direction(direction), TransportKind(transport)
    except ValueError as error:
        raise CaptureError(f"a record of an unknown sort: {error}") from error
    if length > _limit(known[0]):
        raise CaptureError(f"a record claims {length} bytes; at most {_limit(known[0])} are allowed")
    return EntryHead(*known, t_ns, connection, length, content_crc)


def _limit(kind: EntryKind) -> int:
    return NOTE_BYTES_MAX if kind is EntryKind.NOTE else FRAME_BYTES_MAX
