"""The fixed 48-byte prefix of every v2 frame.

Layout, little-endian: magic 4 | major 1 | minor 1 | type 1 | flags 1 | control length u32 | body count u16 |
reserved u16 | body length u64 | generation u64 | slot u32 | round u32 | control crc32c u32 | prefix crc32c
u32. Invariant: a prefix that ``read_prefix`` returns is undamaged and inside the hard limits, so a caller may
drop a stale frame, or size a receive, from it alone, before any control byte is decoded. Spec: SPEC.md,
section "Prefix". Called by ``frame`` and by both connections; never looks at control or bodies.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import Final, Protocol

from .buffers import aligned
from .checksums import crc32c
from .errors import RemoteProtocolError
from .fields import Field, UInt, enum_field, table_of
from .limits import BODY_BYTES_MAX, BODY_COUNT_MAX, CONTROL_BYTES_MAX, PREFIX_BYTES, SLOT_NONE, U32_MAX, U64_MAX
from .native import codec, maker
from .registry import ErrorCode, MessageType

MAGIC: Final = b"DSPK"
MAJOR: Final = 2
MINOR: Final = 0
WIRE_VERSION: Final = MAJOR << 8 | MINOR

_PREFIX: Final = Struct("<4sBBBBIHHQQIIII")
_KEY_OFFSET: Final = 24
_KEY: Final = Struct("<QIII")
"""Generation, slot, round and control crc."""

_CRC_OFFSET: Final = PREFIX_BYTES - 4
_CRC: Final = Struct("<I")
_TYPES: Final[dict[int, MessageType]] = {int(kind): kind for kind in MessageType}


@dataclass(frozen=True, slots=True)
class Key:
    """(slot, generation, round) of a frame; the default belongs to no slot."""

    slot: int = SLOT_NONE
    generation: int = 0
    round: int = 0


NO_KEY: Final = Key()
make_key: Final = maker(Key)


class Keyed(Protocol):
    """What has a key: a :class:`Key`, or the STEP item that a reply answers."""

    @property
    def slot(self) -> int:
        """See :class:`Key`."""

    @property
    def generation(self) -> int:
        """See :class:`Key`."""

    @property
    def round(self) -> int:
        """See :class:`Key`."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A checked prefix. ``body_bytes`` counts the bodies with their padding."""

    type: MessageType
    control_bytes: int
    body_count: int
    body_bytes: int
    generation: int
    slot: int
    round: int
    control_crc: int

    @property
    def frame_bytes(self) -> int:
        """Length of the whole frame."""
        return aligned(PREFIX_BYTES + self.control_bytes) + self.body_bytes

    @property
    def key(self) -> Key:
        """(slot, generation, round)."""
        return Key(self.slot, self.generation, self.round)


_LAYOUT: Final[tuple[Field, ...]] = (
    enum_field("type", MessageType),
    UInt("control_bytes", CONTROL_BYTES_MAX, 1),
    UInt("body_count", BODY_COUNT_MAX),
    UInt("body_bytes", BODY_BYTES_MAX),
    UInt("generation", U64_MAX),
    UInt("slot", U32_MAX),
    UInt("round", U32_MAX),
    UInt("control_crc", U32_MAX),
)
_TABLE: Final = table_of(Prefix, _LAYOUT)


def write_prefix(out: memoryview, prefix: Prefix) -> None:
    """Write ``prefix`` into the first 48 bytes of ``out``."""
    _PREFIX.pack_into(
        out,
        0,
        MAGIC,
        MAJOR,
        MINOR,
        prefix.type,
        0,
        prefix.control_bytes,
        prefix.body_count,
        0,
        prefix.body_bytes,
        prefix.generation,
        prefix.slot,
        prefix.round,
        prefix.control_crc,
        0,
    )
    _CRC.pack_into(out, _CRC_OFFSET, crc32c(out[:_CRC_OFFSET]))


def rewrite_key(frame: memoryview, key: Keyed, control_bytes: int) -> None:
    """Make ``frame``, whose prefix is right in all else, a frame of ``key`` with the control that it has now."""
    if codec is not None and codec.rewrite_key(frame, control_bytes, key.slot, key.generation, key.round):
        return
    control_crc = crc32c(frame[PREFIX_BYTES : PREFIX_BYTES + control_bytes])
    _KEY.pack_into(frame, _KEY_OFFSET, key.generation, key.slot, key.round, control_crc)
    _CRC.pack_into(frame, _CRC_OFFSET, crc32c(frame[:_CRC_OFFSET]))


def read_prefix(view: memoryview) -> Prefix:
    """Check and decode the prefix at the start of ``view``.

    Raises :class:`RemoteProtocolError`, in this order of precedence: WRONG_SIZE, BAD_MAGIC, BAD_PREFIX_CRC,
    BAD_VERSION, UNKNOWN_TYPE, RESERVED_NOT_ZERO, LIMIT_EXCEEDED.
    """
    prefix: Prefix | None = None if _TABLE is None else _TABLE.read_prefix(view)
    return read_prefix_plainly(view) if prefix is None else prefix


def frame_bytes(view: memoryview, start: int, end: int) -> int:
    """Length of the frame at ``start`` of ``view``, of which ``end - start`` bytes are there, from its prefix.

    Raises :class:`RemoteProtocolError` as :func:`read_prefix` does.
    """
    length = 0 if _TABLE is None else _TABLE.frame_bytes(view, start, end)
    return length or read_prefix(view[start:end]).frame_bytes


def read_prefix_plainly(view: memoryview) -> Prefix:
    """:func:`read_prefix` in Python: without the compiled codec, and for what it did not accept."""
    if len(view) < PREFIX_BYTES:
        raise RemoteProtocolError(ErrorCode.WRONG_SIZE, "prefix")
    (
        magic,
        major,
        _minor,
        kind,
        flags,
        control_bytes,
        body_count,
        reserved,
        body_bytes,
        generation,
        slot,
        round_,
        control_crc,
        prefix_crc,
    ) = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise RemoteProtocolError(ErrorCode.BAD_MAGIC, "prefix.magic")
    if prefix_crc != crc32c(view[:_CRC_OFFSET]):
        raise RemoteProtocolError(ErrorCode.BAD_PREFIX_CRC, "prefix")
    if major != MAJOR:
        raise RemoteProtocolError(ErrorCode.BAD_VERSION, "prefix.major")
    if kind not in _TYPES:
        raise RemoteProtocolError(ErrorCode.UNKNOWN_TYPE, "prefix.type")
    if flags or reserved:
        raise RemoteProtocolError(ErrorCode.RESERVED_NOT_ZERO, "prefix.flags")
    _check_limits(control_bytes, body_count, body_bytes)
    return Prefix(_TYPES[kind], control_bytes, body_count, body_bytes, generation, slot, round_, control_crc)


def _check_limits(control_bytes: int, body_count: int, body_bytes: int) -> None:
    if not 0 < control_bytes <= CONTROL_BYTES_MAX:
        raise RemoteProtocolError(ErrorCode.LIMIT_EXCEEDED, "prefix.control_length")
    if body_count > BODY_COUNT_MAX:
        raise RemoteProtocolError(ErrorCode.LIMIT_EXCEEDED, "prefix.body_count")
    if body_bytes > BODY_BYTES_MAX:
        raise RemoteProtocolError(ErrorCode.LIMIT_EXCEEDED, "prefix.body_length")
    if body_bytes != aligned(body_bytes) or bool(body_bytes) != bool(body_count):
        raise RemoteProtocolError(ErrorCode.WRONG_SIZE, "prefix.body_length")
