"""Layout of a reply's q rows, and the structural checks on them.

A reply of depth d is one contiguous block, all little-endian, padding entries zero. Sparse rows of support s:
RECORDS [d, 16 B], then IDS int32 [d, s], then Q float32 [d, s] (q = count / 2^24). Dense rows (support 0) of
vocabulary size v: RECORDS, then Q float32 [d, v], no ids. Version 1 has RECORDS alone: each row is one entry of
count 2^24, the record's token. A record is token i32 | entries u32 | row crc32c u32 |
confidence u32 (units of 2^-24); the crc covers the record without itself, then the row's ids, then its q.
The block's size depends on depth, support and vocabulary only. Checked here: sizes, ranges of token, entries and
confidence, crcs. Whether the values are a dyadic row (order, sum, support) is semantic and belongs to the sampler's
package, on the views handed out. Spec: SPEC.md, section "ROW". Called by both connections.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from struct import Struct, pack
from typing import Final, NamedTuple, TypeAlias

from .buffers import Buffer, aligned, byte_view
from .checksums import body_checksum, crc32c
from .errors import LocalProtocolError, RemoteProtocolError
from .limits import CONFIDENCE_MAX, DEPTH_MAX, ROW_CHUNK_BYTES, U32_MAX, VOCAB_MAX
from .native import Blank, RowShape, codec
from .prefix import Keyed
from .registry import BodyKind, Checksum, Dtype, ErrorCode, Representation

RECORD_BYTES: Final = 16
ENTRY_BYTES: Final = 4

_RECORD: Final = Struct("<iIII")
_UNDER_CRC: Final = Struct("<iII")
_ONE: Final = pack("<f", 1.0)
_NO_OPINION: Final = (CONFIDENCE_MAX,)

_ROW_BYTES_MAX: Final = U32_MAX if codec is not None and codec.CPU_CRC else 4096
"""Bytes of q from which on the checksum wheel beats a compiled codec that does not use the CPU's crc32 instruction."""

Columns: TypeAlias = tuple[Sequence[int], ...]
"""Tokens, entries and confidences of some rows, in this order."""

BodyShape: TypeAlias = tuple[BodyKind, Dtype, int, int, int]
"""(kind, dtype, rows, entries, bytes) of a body, as its descriptor must show it."""


class RowRecords(NamedTuple):
    """What the records of a reply say, each [depth]; ``confidences`` in units of 2^-24."""

    tokens: tuple[int, ...]
    entries: tuple[int, ...]
    confidences: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReplyLayout:
    """Byte layout of a reply of ``depth`` rows of ``support`` entries; with support 0, of ``vocab_size`` values.

    ``tokens_only``, with support 1: ids and values are implied and take no bytes. What follows from these is computed
    once, for every frame of a reply asks for it: ``width`` (values in one row's q), bytes of one row's ids and of its
    q, offsets of IDS and Q in the block, the block's size, and ``certain``, the confidences of a worker that has no
    opinion. A connection keeps its layouts (``Peer``).
    """

    depth: int
    support: int
    vocab_size: int = 0
    tokens_only: bool = False
    representation: Representation = field(init=False, repr=False, compare=False)
    width: int = field(init=False, repr=False, compare=False)
    ids_row_bytes: int = field(init=False, repr=False, compare=False)
    row_bytes: int = field(init=False, repr=False, compare=False)
    ids_offset: int = field(init=False, repr=False, compare=False)
    q_offset: int = field(init=False, repr=False, compare=False)
    total_bytes: int = field(init=False, repr=False, compare=False)
    shape: RowShape = field(init=False, repr=False, compare=False)
    certain: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        width = self.support or self.vocab_size
        sparse = Representation.SPARSE if self.support else Representation.DENSE
        ids_row = 0 if self.tokens_only else self.support * ENTRY_BYTES
        row = 0 if self.tokens_only else width * ENTRY_BYTES
        ids_at = self.depth * RECORD_BYTES
        q_at = ids_at + self.depth * ids_row
        for name, value in (
            ("representation", Representation.TOKENS if self.tokens_only else sparse),
            ("width", width),
            ("ids_row_bytes", ids_row),
            ("row_bytes", row),
            ("ids_offset", ids_at),
            ("q_offset", q_at),
            ("total_bytes", q_at + self.depth * row),
            ("shape", (self.depth, ids_row, row, 1 if self.support else width, width)),
            ("certain", _NO_OPINION * self.depth),
        ):
            object.__setattr__(self, name, value)

    @property
    def rows_per_frame(self) -> int:
        """Rows that one ROW carries: as many as fit its chunk, at least one."""
        return max(1, ROW_CHUNK_BYTES // (RECORD_BYTES + self.ids_row_bytes + self.row_bytes))

    def spans(self, first_row: int, row_count: int) -> tuple[tuple[int, int], ...]:
        """(offset, bytes) in the block of some rows, one for each body of a ROW."""
        ids, q = self.ids_row_bytes, self.row_bytes
        records = (first_row * RECORD_BYTES, row_count * RECORD_BYTES)
        if self.tokens_only:
            return (records,)
        q_span = (self.q_offset + first_row * q, row_count * q)
        if not self.support:
            return records, q_span
        return records, (self.ids_offset + first_row * ids, row_count * ids), q_span

    def shapes(self, row_count: int) -> tuple[BodyShape, ...]:
        """What the descriptors of a ROW of ``row_count`` rows must show."""
        shapes = body_shapes(row_count, self.support, self.vocab_size)
        return shapes[:1] if self.tokens_only else shapes

    def body_bytes(self, row_count: int) -> int:
        """Bytes of the bodies of a ROW of ``row_count`` rows, padding included."""
        return sum(aligned(length) for *_, length in self.shapes(row_count))


@lru_cache(maxsize=DEPTH_MAX * 6)
def body_shapes(row_count: int, support: int, vocab_size: int = 0) -> tuple[BodyShape, ...]:
    """The shapes of the bodies of a ROW: RECORDS, IDS and Q; of dense rows (support 0) RECORDS and Q."""
    records = BodyKind.RECORDS, Dtype.BYTES, row_count, RECORD_BYTES, row_count * RECORD_BYTES
    width = support or vocab_size
    q = BodyKind.Q, Dtype.FP32, row_count, width, row_count * width * ENTRY_BYTES
    if not support:
        return records, q
    return records, (BodyKind.IDS, Dtype.INT32, row_count, support, row_count * support * ENTRY_BYTES), q


def write_reply(
    block: memoryview,
    layout: ReplyLayout,
    tokens: Sequence[int],
    entries: Sequence[int],
    ids: Buffer,
    q: Buffer,
    confidences: Sequence[int] | None = None,
) -> None:
    """Fill ``block`` with a reply: ``ids`` and ``q`` are the raw arrays, ``confidences`` None for no opinion.

    Where ids and values are implied, the arrays must be what is implied. Raises :class:`LocalProtocolError`
    WRONG_SIZE or BAD_ROW_RECORD.
    """
    ids_view, q_view, columns = checked_arrays(layout, tokens, entries, ids, q, confidences)
    records, ids_part = block[: layout.ids_offset], block[layout.ids_offset : layout.q_offset]
    q_part = block[layout.q_offset : layout.total_bytes]
    ids_part[:], q_part[:] = ids_view, q_view
    write_records(records, ids_part, q_part, layout, columns)


def checked_arrays(
    layout: ReplyLayout,
    tokens: Sequence[int],
    entries: Sequence[int],
    ids: Buffer,
    q: Buffer,
    confidences: Sequence[int] | None,
) -> tuple[memoryview, memoryview, Columns]:
    """What travels of the arrays of a reply, as bytes, and the three columns of its records; all of the right size.

    Raises :class:`LocalProtocolError` WRONG_SIZE, or BAD_ROW_RECORD for arrays that are not what is implied.
    """
    ids_view, q_view = byte_view(ids), byte_view(q)
    if layout.tokens_only:
        _check_implied(tokens, ids_view, q_view)
        ids_view = q_view = ids_view[:0]
    columns = (tokens, entries, layout.certain if confidences is None else confidences)
    _check_sizes(layout, len(ids_view), len(q_view), columns)
    return ids_view, q_view, columns


def write_records(records: memoryview, ids: memoryview, q: memoryview, layout: ReplyLayout, columns: Columns) -> None:
    """Write the records of some rows of a reply into ``records``; their ids and q are in place.

    Raises :class:`LocalProtocolError` BAD_ROW_RECORD.
    """
    count = len(columns[0])
    if (
        codec is not None
        and layout.row_bytes <= _ROW_BYTES_MAX
        and codec.write_records(records, ids, q, layout.shape, count, *columns)
    ):
        return
    check_columns(layout, columns)
    rows = list(zip(*columns, strict=True))
    for index, crc in enumerate(_row_crcs(ids, q, layout, rows)):
        token, entries, confidence = rows[index]
        _RECORD.pack_into(records, index * RECORD_BYTES, token, entries, crc, confidence)


def check_columns(layout: ReplyLayout, columns: Columns) -> None:
    """Raise :class:`LocalProtocolError` BAD_ROW_RECORD for a value that no record may have."""
    if not all(_in_range(layout, VOCAB_MAX + 1, *row) for row in zip(*columns, strict=True)):
        raise LocalProtocolError(ErrorCode.BAD_ROW_RECORD, "reply", "token, entries or confidence out of range")


def fill_reply(
    frame: memoryview,
    blank: Blank,
    ids: Buffer,
    q: Buffer,
    layout: ReplyLayout,
    key: Keyed,
    columns: Columns,
    vocab_size: int,
) -> bytes | None:
    """:func:`fill_rows` with a whole reply of arrays that nothing has been checked of; its checksum, or None."""
    if codec is None or layout.row_bytes > _ROW_BYTES_MAX or layout.tokens_only:
        return None
    slot, generation, round_ = key.slot, key.generation, key.round
    return codec.fill_reply(frame, blank, ids, q, layout.shape, columns, slot, generation, round_, vocab_size)


def fill_rows(
    frame: memoryview, blank: Blank, ids: memoryview, q: memoryview, layout: ReplyLayout, key: Keyed, columns: Columns
) -> bool:
    """Write the blank's rows of a reply into its ROW frame under ``key``, where the compiled codec can."""
    return (
        codec is not None
        and layout.row_bytes <= _ROW_BYTES_MAX
        and codec.fill_rows(frame, blank, ids, q, layout.shape, columns, key.slot, key.generation, key.round)
    )


def implied_entries(tokens: Sequence[int]) -> tuple[memoryview, memoryview]:
    """The ids int32 [depth, 1] and q float32 [depth, 1] of rows that have no more than their token."""
    depth = len(tokens)
    return memoryview(pack(f"<{depth}i", *tokens)), memoryview(_ONE * depth)


def _check_implied(tokens: Sequence[int], ids: memoryview, q: memoryview) -> None:
    if max(tokens, default=0) > VOCAB_MAX or min(tokens, default=0) < 0 or (ids, q) != implied_entries(tokens):
        raise LocalProtocolError(ErrorCode.BAD_ROW_RECORD, "reply", "version 1 has rows of one entry: the token")


def _check_sizes(layout: ReplyLayout, ids_bytes: int, q_bytes: int, columns: tuple[Sequence[int], ...]) -> None:
    expected = layout.depth * layout.ids_row_bytes, layout.depth * layout.row_bytes
    if (ids_bytes, q_bytes) != expected or [len(column) for column in columns] != [layout.depth] * 3:
        raise LocalProtocolError(
            ErrorCode.WRONG_SIZE,
            "reply",
            f"needs {layout.depth} rows: {expected[0]} bytes of ids, {expected[1]} of q",
        )


def _in_range(layout: ReplyLayout, vocab_size: int, token: int, entries: int, confidence: int) -> bool:
    """The ranges of a record; a dense row names as many entries as it has values."""
    least = 1 if layout.support else layout.width
    return 0 <= token < vocab_size and least <= entries <= layout.width and 0 <= confidence <= CONFIDENCE_MAX


def check_reply(block: memoryview, layout: ReplyLayout, vocab_size: int) -> RowRecords:
    """The records of a received block.

    Raises :class:`RemoteProtocolError` BAD_ROW_CRC, or BAD_ROW_RECORD for a value out of range.
    """
    if codec is not None and layout.row_bytes <= _ROW_BYTES_MAX:
        columns = codec.check_rows(block, layout.shape, vocab_size)
        if columns is not None:
            return RowRecords(*columns)
    return check_reply_plainly(block, layout, vocab_size)


def placed_rows_are_sound(
    block: memoryview, layout: ReplyLayout, vocab_size: int, first: int, rows: int, kind: Checksum, checksum: bytes
) -> bool:
    """Whether these rows of a block are what :func:`check_reply` accepts, and their q has this body checksum.

    False also where the compiled codec is not there to find out in one pass.
    """
    return (
        codec is not None
        and layout.row_bytes <= _ROW_BYTES_MAX
        and codec.check_placed(block, layout.shape, vocab_size, first, rows, kind, checksum)
    )


def check_whole_reply(
    block: memoryview, layout: ReplyLayout, vocab_size: int, kind: Checksum, checksum: bytes, rows_are_sound: bool
) -> RowRecords:
    """The records of a received block that must have this checksum; its rows may have been found sound already.

    Raises :class:`RemoteProtocolError` BAD_REPLY_CHECKSUM, or as :func:`check_reply` does.
    """
    if rows_are_sound:
        if body_checksum(kind, block) != checksum:
            raise RemoteProtocolError(ErrorCode.BAD_REPLY_CHECKSUM, "COMPLETION.reply_checksum")
        tokens, entries, _, confidences = zip(*_RECORD.iter_unpack(block[: layout.ids_offset]), strict=True)
        return RowRecords(tokens, entries, confidences)
    if codec is not None and layout.row_bytes <= _ROW_BYTES_MAX:
        columns = codec.check_rows(block, layout.shape, vocab_size, kind, checksum)
        if columns is not None:
            return RowRecords(*columns)
    if body_checksum(kind, block) != checksum:
        raise RemoteProtocolError(ErrorCode.BAD_REPLY_CHECKSUM, "COMPLETION.reply_checksum")
    return check_reply(block, layout, vocab_size)


def check_reply_plainly(block: memoryview, layout: ReplyLayout, vocab_size: int) -> RowRecords:
    """:func:`check_reply` in Python: large rows, no compiled codec, and what it did not accept."""
    found = list(_RECORD.iter_unpack(block[: layout.ids_offset]))
    records = [(token, count, confidence) for token, count, _, confidence in found]
    crcs = _row_crcs(block[layout.ids_offset : layout.q_offset], block[layout.q_offset :], layout, records)
    for (_, _, crc, _), record, expected in zip(found, records, crcs, strict=True):
        if crc != expected:
            raise RemoteProtocolError(ErrorCode.BAD_ROW_CRC, "ROW.records")
        if not _in_range(layout, vocab_size, *record):
            raise RemoteProtocolError(ErrorCode.BAD_ROW_RECORD, "ROW.records")
    return RowRecords(*zip(*records, strict=True))


def _row_crcs(
    ids: memoryview, q: memoryview, layout: ReplyLayout, records: Iterable[tuple[int, int, int]]
) -> list[int]:
    """CRC32C of each row: (token, entries, confidence), then its ids, then its q."""
    ids_at = q_at = 0
    crcs = []
    for record in records:
        crc = crc32c(ids[ids_at : ids_at + layout.ids_row_bytes], crc32c(_UNDER_CRC.pack(*record)))
        crcs.append(crc32c(q[q_at : q_at + layout.row_bytes], crc))
        ids_at += layout.ids_row_bytes
        q_at += layout.row_bytes
    return crcs
