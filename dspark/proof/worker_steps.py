"""What a worker draws and what a verifier reads, as Tier 0 runs them, and wrong ways to do either.

Purpose: the two places at which the declared q can differ from the law of the draft: the draw, and the reading of a
reply.

Called by Tier 0 and ``mutants``. It never serves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from dspark.dense import validate_dense_reply
from dspark.dyadic import MASS, Float32s, Int32s, Row, RowError, RowFault, allocate, softmax64, validate_reply
from dspark.oracle import Prefix
from dspark.proof.toys import Toy, drawn_from_the_row

ReadSparse = Callable[[Int32s, Int32s, Int32s, Float32s, int, int, int], list[Row]]
ReadDense = Callable[[Int32s, Float32s, int, int], list[Row]]


# --- draws ---------------------------------------------------------------------------------------------------------

_FINER = 64


def from_finer_counts(toy: Toy, prefix: Prefix) -> dict[int, Fraction]:
    """Draws from the weights before they are rounded (to a grid 64 times finer, which is as wrong and still exact)."""
    row = toy.draft(prefix)
    counts = allocate(softmax64(toy.draft_logits(prefix)[row.ids], toy.draft_temperature), toy.grid.mass * _FINER)
    total = toy.grid.mass * _FINER
    return {token: Fraction(count, total) for token, count in zip(row.ids.tolist(), counts.tolist(), strict=True)}


def drawn_again_when_unlikely(toy: Toy, prefix: Prefix) -> dict[int, Fraction]:
    """A retried request is drafted afresh, and it is retried when the draft was not the most likely token."""
    law = drawn_from_the_row(toy, prefix)
    top = max(law, key=lambda token: law[token])
    again = 1 - law[top]
    return {token: share * again + (share if token == top else 0) for token, share in law.items()}


def in_order_of_probability(toy: Toy, prefix: Prefix) -> dict[int, Fraction]:
    """Other numbers draw other tokens, but the law is the row's. (The audit tells such a worker from a sound one.)"""
    law = drawn_from_the_row(toy, prefix)
    return {token: law[token] for token in sorted(law, key=lambda token: -law[token])}


# --- replies -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SparseReply:
    """The arrays of a sparse reply: tokens, entries int32[depth], ids, q [depth, support]."""

    tokens: Int32s
    entries: Int32s
    ids: Int32s
    q: Float32s
    vocab: int

    def read(self, reader: ReadSparse) -> list[Row]:
        return reader(self.tokens, self.entries, self.ids, self.q, self.vocab, *self.q.shape)


def _sparse(token: int, entries: int, ids: list[int], counts: list[int]) -> SparseReply:
    q = np.array([counts], dtype=np.float64) / MASS
    return SparseReply(
        np.array([token], np.int32),
        np.array([entries], np.int32),
        np.array([ids], np.int32),
        q.astype(np.float32),
        8,
    )


_HALF = MASS // 2
SOUND_SPARSE = _sparse(3, 2, [1, 3, 0], [_HALF, _HALF, 0])
FAULTY_SPARSE: dict[RowFault, SparseReply] = {
    RowFault.ZERO_AT_TOKEN: _sparse(2, 2, [1, 3, 0], [_HALF, _HALF, 0]),
    RowFault.ZERO_COUNT: _sparse(3, 3, [1, 3, 5], [_HALF, _HALF, 0]),
    RowFault.WRONG_SUM: _sparse(3, 2, [1, 3, 0], [_HALF, _HALF - 1, 0]),
    RowFault.PADDING: _sparse(3, 2, [1, 3, 4], [_HALF, _HALF, 0]),
    RowFault.ID_RANGE: _sparse(3, 2, [3, 8, 0], [_HALF, _HALF, 0]),
    RowFault.ID_ORDER: _sparse(3, 2, [3, 1, 0], [_HALF, _HALF, 0]),
    RowFault.ENTRIES: _sparse(3, 4, [1, 3, 5], [_HALF, _HALF, 0]),
}


@dataclass(frozen=True)
class DenseReply:
    """The arrays of a dense reply: tokens int32[depth], q float32 [depth, width]."""

    tokens: Int32s
    q: Float32s
    vocab: int

    def read(self, reader: ReadDense) -> list[Row]:
        return reader(self.tokens, self.q, self.vocab, len(self.tokens))


def _dense(token: int, counts: list[int], vocab: int) -> DenseReply:
    q = np.array([counts], dtype=np.float64) / MASS
    return DenseReply(np.array([token], np.int32), q.astype(np.float32), vocab)


SOUND_DENSE = _dense(1, [0, _HALF, _HALF, 0, 0], 4)
FAULTY_DENSE: dict[RowFault, DenseReply] = {
    RowFault.PADDING: _dense(1, [0, _HALF, _HALF, 0, 7], 4),
    RowFault.ZERO_AT_TOKEN: _dense(0, [0, _HALF, _HALF, 0, 0], 4),
    RowFault.WRONG_SUM: _dense(1, [1, _HALF, _HALF, 0, 0], 4),
}


def zero_counts_pass(
    tokens: Int32s, entries: Int32s, ids: Int32s, q: Float32s, vocab: int, depth: int, support: int
) -> list[Row]:
    """Takes a row for granted where a count is zero; such a draft is always accepted."""
    try:
        return validate_reply(tokens, entries, ids, q, vocab, depth, support)
    except RowError as error:
        if error.code not in (RowFault.ZERO_COUNT, RowFault.ZERO_AT_TOKEN):
            raise
        return []


def padding_is_not_read(tokens: Int32s, q: Float32s, vocab: int, depth: int) -> list[Row]:
    """Looks at the columns of the vocabulary alone."""
    return validate_dense_reply(tokens, q[:, :vocab], vocab, depth)
