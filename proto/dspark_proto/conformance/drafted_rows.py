"""Rows of q that the harness and the reference drafter make: who judges them is `codec_pipe.dyadic`.

A row is dyadic when its float32 values are count / 2^24 with integer counts above zero, in ascending order of their
ids, and total exactly 2^24. Spec: SPEC.md, REQ-ROW-1. Called by the reference drafter, by `as_drafter` and by the
mutants; keeps to the standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct

TOTAL = 1 << 24


@dataclass(frozen=True)
class DraftedRow:
    """Ids (ascending) and integer counts of one row, and the token that was drawn from it."""

    ids: tuple[int, ...]
    counts: tuple[int, ...]
    token: int


@dataclass(frozen=True)
class RowArrays:
    """Raw [rows, support] arrays as `DrafterConnection.reply` takes them; dense rows have no ids."""

    tokens: list[int]
    entries: list[int]
    ids: bytes
    q: bytes


def one_hot(token: int) -> DraftedRow:
    """All mass on ``token``."""
    return DraftedRow((token,), (TOTAL,), token)


def pack(rows: Sequence[DraftedRow], support: int, vocab_size: int) -> RowArrays:
    """``rows`` padded with zeros to ``support`` entries each; with support 0 a value for every token."""
    tokens = [row.token for row in rows]
    if support == 0:
        return RowArrays(tokens, [vocab_size] * len(rows), b"", b"".join(_dense(row, vocab_size) for row in rows))
    ids, q = bytearray(), bytearray()
    int_row, float_row = Struct(f"<{support}i"), Struct(f"<{support}f")
    for row in rows:
        padding = [0] * (support - len(row.ids))
        ids += int_row.pack(*row.ids, *padding)
        q += float_row.pack(*[count / TOTAL for count in row.counts], *padding)
    return RowArrays(tokens, [len(row.ids) for row in rows], bytes(ids), bytes(q))


def _dense(row: DraftedRow, vocab_size: int) -> bytes:
    values = [0.0] * vocab_size
    for token, count in zip(row.ids, row.counts, strict=True):
        values[token] = count / TOTAL
    return Struct(f"<{vocab_size}f").pack(*values)
