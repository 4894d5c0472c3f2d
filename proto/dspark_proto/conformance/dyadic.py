"""Rows of q as the wire carries them: made for honest replies, and judged when a testee sent them.

A row is dyadic when its float32 values are count / 2^24 with integer counts above zero, in ascending order of their
ids, and total exactly 2^24. Spec: SPEC.md, REQ-ROW-1 and REQ-ROW-7. Called by the reference peers and by the
handles; keeps to the standard library, so it is slow and independent of the sampler's kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct

from ..buffers import Buffer

TOTAL = 1 << 24


@dataclass(frozen=True)
class DraftedRow:
    """Ids (ascending) and integer counts of one row, and the token that was drawn from it."""

    ids: tuple[int, ...]
    counts: tuple[int, ...]
    token: int


@dataclass(frozen=True)
class RowArrays:
    """Raw [rows, support] arrays as `DrafterConnection.reply` takes them."""

    tokens: list[int]
    entries: list[int]
    ids: bytes
    q: bytes


def one_hot(token: int) -> DraftedRow:
    """All mass on ``token``."""
    return DraftedRow((token,), (TOTAL,), token)


def pack(rows: Sequence[DraftedRow], support: int) -> RowArrays:
    """``rows`` padded with zeros to ``support`` entries each."""
    ids, q = bytearray(), bytearray()
    int_row, float_row = Struct(f"<{support}i"), Struct(f"<{support}f")
    for row in rows:
        padding = [0] * (support - len(row.ids))
        ids += int_row.pack(*row.ids, *padding)
        q += float_row.pack(*[count / TOTAL for count in row.counts], *padding)
    return RowArrays([row.token for row in rows], [len(row.ids) for row in rows], bytes(ids), bytes(q))


def dense_row_fault(token: int, q: Buffer) -> str:
    """Why a dense row (a value for every token) is not dyadic; empty when it is."""
    width = len(q) // 4
    words = Struct(f"<{width}I").unpack(q)
    used = [index for index, word in enumerate(words) if word]
    if token not in used:
        return "the drafted token has no count"
    ids = Struct(f"<{len(used)}i").pack(*used)
    values = Struct(f"<{len(used)}I").pack(*[words[index] for index in used])
    return row_fault(token, len(used), ids, values, width)


def row_fault(token: int, entries: int, ids: Buffer, q: Buffer, vocab_size: int) -> str:
    """Why a sparse row is not dyadic; empty when it is. ``ids`` and ``q`` are the raw, padded arrays of one row."""
    support = len(ids) // 4
    all_ids = Struct(f"<{support}i").unpack(ids)
    words = Struct(f"<{support}I").unpack(q)
    values = Struct(f"<{support}f").unpack(q)
    if any(all_ids[entries:]) or any(words[entries:]):
        return "padding entries are not zero"
    used = all_ids[:entries]
    if used[0] < 0 or used[-1] >= vocab_size or any(a >= b for a, b in pairwise(used)):
        return "ids are not ascending token ids"
    if any(word >> 31 for word in words[:entries]):
        return "a value is negative or -0.0"
    if any(value != value or value > 1.0 for value in values[:entries]):
        return "a value is not in 0..1"
    counts = [value * TOTAL for value in values[:entries]]
    if any(count != int(count) or count == 0 for count in counts):
        return "a count is zero or not an integer"
    if sum(int(count) for count in counts) != TOTAL:
        return "the counts do not total 2^24"
    return "" if token in used else "the drafted token is not in the row"
