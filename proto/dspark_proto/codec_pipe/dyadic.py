"""Whether the q rows of a reply are rows at all: REQ-ROW-1, REQ-ROW-2 and REQ-ROW-7 in plain Python.

A sparse row has 1 to support entries, ids strictly ascending and below the vocabulary size, each q = count / 2^24 with
an integer count of at least 1, total exactly 2^24, the drafted token among them, and zeros beyond. A dense row has a q
for every token instead, of which all but the drafted one may be zero. Invariants: values are compared as integers,
never as floats with a tolerance; nothing is repaired. For tools and small replies; the serving path has its own,
vectorised check. Called by ``answers`` and by ``capture.contents``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct, unpack_from
from typing import Final

from ..buffers import Buffer
from ..rows import ENTRY_BYTES, RECORD_BYTES, ReplyLayout

MASS: Final = 2**24
NEGATIVE_ZERO: Final = 0x8000_0000
_PAIR: Final = Struct("<iI")
"""First two fields of a record: token, entries."""


@dataclass(frozen=True, slots=True)
class ReadRow:
    """One q row: the drafted token, ids ascending, counts of total 2^24 (-1 where q is no multiple of 2^-24)."""

    token: int
    ids: Sequence[int]
    counts: tuple[int, ...]


def read_rows(block: Buffer, layout: ReplyLayout) -> Iterator[ReadRow]:
    """The rows of a whole block (RECORDS, IDS, Q) whose records have been checked."""
    for index in range(layout.depth):
        token, entries = _PAIR.unpack_from(block, index * RECORD_BYTES)
        if layout.tokens_only:
            yield ReadRow(token, (token,), (MASS,))
            continue
        _, *ids_span, (q_at, _) = layout.spans(index, 1)
        ids: Sequence[int] = unpack_from(f"<{entries}i", block, ids_span[0][0]) if ids_span else range(entries)
        yield ReadRow(token, ids, tuple(map(_count, unpack_from(f"<{entries}I", block, q_at))))


def row_fault(block: Buffer, layout: ReplyLayout, vocab_size: int) -> str:
    """What is wrong with the first bad row, in constant words; empty when all rows are dyadic.

    ``block`` is a whole reply whose records are in range: entries are 1 to support.
    """
    for index, row in enumerate(read_rows(block, layout)):
        fault = _padding_fault(block, layout, index, len(row.ids)) or _fault(row, vocab_size, bool(layout.support))
        if fault:
            return f"row {index}: {fault}"
    return ""


def _fault(row: ReadRow, vocab_size: int, sparse: bool) -> str:
    if any(not 0 <= token < vocab_size for token in row.ids):
        return "an id is not below the vocabulary size"
    if any(left >= right for left, right in pairwise(row.ids)):
        return "ids are not strictly ascending"
    if any(count < 0 for count in row.counts):
        return "a q is not a multiple of 2^-24 between 0 and 1"
    if sparse and 0 in row.counts:
        return "an entry has count 0"
    if sum(row.counts) != MASS:
        return "the counts do not sum to 2^24"
    drafted = row.token in row.ids and row.counts[row.ids.index(row.token)]
    return "" if drafted else "the drafted token has count 0"


def _padding_fault(block: Buffer, layout: ReplyLayout, index: int, entries: int) -> str:
    """Padding entries are zero in every bit."""
    used = entries * ENTRY_BYTES
    for offset, length in layout.spans(index, 1)[1:]:
        if any(memoryview(block)[offset + used : offset + length]):
            return "an entry beyond the row's entries is not zero"
    return ""


def _count(bits: int) -> int:
    """q * 2^24 of an FP32 bit pattern; -1 when that is no integer in 0 .. 2^24, or -0.0."""
    exponent, fraction = bits >> 23, bits & 0x7F_FFFF
    if bits == 0:
        return 0
    # A normal number is (2^23 + fraction) * 2^(exponent - 150); times 2^24 the last factor is 2^(exponent - 126).
    shift = exponent - 126
    if bits >= NEGATIVE_ZERO or exponent == 0 or shift > 1:
        return -1
    scaled = (1 << 23) + fraction
    if shift >= 0:
        count = scaled << shift
    else:
        count = scaled >> -shift
        if count << -shift != scaled:
            return -1
    return count if count <= MASS else -1
