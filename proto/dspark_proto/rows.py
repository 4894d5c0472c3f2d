"""Layout of a reply's q rows, and the structural checks on them.

A reply of depth d and support s is one contiguous block: RECORDS [d, 16 B], then IDS int32 [d, s], then Q
float32 [d, s] (q = count / 2^24), all little-endian, padding entries zero. A record is token i32 | entries
u32 | row crc32c u32 | reserved u32 = 0; the crc covers the record's first 8 bytes, the row's ids and its q.
The block's size depends on d and s only. Checked here: sizes, reserved bytes, ranges of token and entries,
crcs. Whether the values are a dyadic row (order, sum, support) is semantic and belongs to the sampler's
package, on the views handed out. Spec: SPEC.md, section "Rows". Called by both connections.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import Final

from .buffers import Buffer, byte_view
from .checksums import crc32c
from .errors import LocalProtocolError, RemoteProtocolError
from .limits import DEPTH_MAX, VOCAB_MAX
from .registry import BodyKind, Dtype, ErrorCode

RECORD_BYTES: Final = 16
ENTRY_BYTES: Final = 4

_RECORD: Final = Struct("<iIII")
_CHOSEN: Final = Struct("<iI")


@dataclass(frozen=True, slots=True)
class ReplyLayout:
    """Byte layout of a reply of ``depth`` rows of ``support`` entries."""

    depth: int
    support: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's ids, and of one row's q."""
        return self.support * ENTRY_BYTES

    @property
    def ids_offset(self) -> int:
        """Offset of IDS in the block."""
        return self.depth * RECORD_BYTES

    @property
    def q_offset(self) -> int:
        """Offset of Q in the block."""
        return self.ids_offset + self.depth * self.row_bytes

    @property
    def total_bytes(self) -> int:
        """Size of the block."""
        return self.q_offset + self.depth * self.row_bytes

    def spans(self, first_row: int, row_count: int) -> tuple[tuple[int, int], ...]:
        """(offset, bytes) in the block of the RECORDS, IDS and Q of some rows."""
        row = self.row_bytes
        return (
            (first_row * RECORD_BYTES, row_count * RECORD_BYTES),
            (self.ids_offset + first_row * row, row_count * row),
            (self.q_offset + first_row * row, row_count * row),
        )


@lru_cache(maxsize=DEPTH_MAX * 5)
def body_shapes(row_count: int, support: int) -> tuple[tuple[BodyKind, Dtype, int, int, int], ...]:
    """(kind, dtype, rows, entries, bytes) that the three descriptors of a ROW must show."""
    row_bytes = support * ENTRY_BYTES
    return (
        (BodyKind.RECORDS, Dtype.BYTES, row_count, RECORD_BYTES, row_count * RECORD_BYTES),
        (BodyKind.IDS, Dtype.INT32, row_count, support, row_count * row_bytes),
        (BodyKind.Q, Dtype.FP32, row_count, support, row_count * row_bytes),
    )


def write_reply(
    block: memoryview,
    layout: ReplyLayout,
    tokens: Sequence[int],
    entries: Sequence[int],
    ids: Buffer,
    q: Buffer,
) -> None:
    """Fill ``block`` with a reply: ``ids`` and ``q`` are the raw [depth, support] arrays.

    Raises :class:`LocalProtocolError` WRONG_SIZE or BAD_ROW_RECORD.
    """
    ids_view, q_view = byte_view(ids), byte_view(q)
    body_bytes = layout.depth * layout.row_bytes
    if not len(ids_view) == len(q_view) == body_bytes or not len(tokens) == len(entries) == layout.depth:
        raise LocalProtocolError(
            ErrorCode.WRONG_SIZE,
            "reply",
            f"needs {layout.depth} rows of {layout.support} entries, 4 bytes each",
        )
    if min(tokens) < 0 or max(tokens) > VOCAB_MAX or not 1 <= min(entries) <= max(entries) <= layout.support:
        raise LocalProtocolError(ErrorCode.BAD_ROW_RECORD, "reply", "token or entries out of range")
    block[layout.ids_offset : layout.q_offset] = ids_view
    block[layout.q_offset : layout.total_bytes] = q_view
    chosen = list(zip(tokens, entries, strict=True))
    for row, crc in enumerate(_row_crcs(block, layout, chosen)):
        _RECORD.pack_into(block, row * RECORD_BYTES, *chosen[row], crc, 0)


def check_reply(
    block: memoryview, layout: ReplyLayout, vocab_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(tokens, entries) of a received block.

    Raises :class:`RemoteProtocolError` BAD_ROW_CRC, or BAD_ROW_RECORD for a value out of range.
    """
    records = list(_RECORD.iter_unpack(block[: layout.ids_offset]))
    for (token, count, crc, _), expected in zip(records, _row_crcs(block, layout, records), strict=True):
        if crc != expected:
            raise RemoteProtocolError(ErrorCode.BAD_ROW_CRC, "ROW.records")
        if not 0 <= token < vocab_size or not 1 <= count <= layout.support:
            raise RemoteProtocolError(ErrorCode.BAD_ROW_RECORD, "ROW.records")
    if any(reserved for _, _, _, reserved in records):
        raise RemoteProtocolError(ErrorCode.BAD_ROW_RECORD, "ROW.records")
    return tuple(record[0] for record in records), tuple(record[1] for record in records)


def _row_crcs(block: memoryview, layout: ReplyLayout, chosen: Iterable[tuple[int, ...]]) -> list[int]:
    """CRC32C of each row: (token, entries), then its ids, then its q."""
    width, ids_at, q_at = layout.row_bytes, layout.ids_offset, layout.q_offset
    crcs = []
    for token, count, *_ in chosen:
        crc = crc32c(block[ids_at : ids_at + width], crc32c(_CHOSEN.pack(token, count)))
        crcs.append(crc32c(block[q_at : q_at + width], crc))
        ids_at += width
        q_at += width
    return crcs
