"""Dense proposal rows: one FP32 value for every token of the vocabulary.

Purpose: rows whose support is the whole draft vocabulary, and their place on the wire: float32 [depth, width] with
q(v) = count / 2**24 at column v. A dense row is a ``Row`` like any other, with many entries, so that drawing,
acceptance and residual know nothing of this module.

Invariants:

- Columns from the vocabulary size up to ``width`` are padding: written as zero, and refused when they are not.
- A column of zero is a token without a count. The zero is +0.0 and nothing else.
- ``dense_row(logits, ...)`` is ``sparse_row`` with a support of all draft tokens, count for count.
- As in ``dspark.dyadic``: counts are q, nobody recomputes or repairs them.

Called by the drafter worker (``dense_row``, ``pack_dense_rows``) and the verifier (``validate_dense_reply``). It never
makes a random number and never sees the target distribution.

Source: seed document 000 ("Distribution contract and precision"; "Dense padding beyond vocabulary is always zero").
"""

from __future__ import annotations

import numpy as np

from dspark.apportionment import allocate, softmax64
from dspark.dyadic import check_array, check_draft, greedy_row, wire_counts
from dspark.native import kernels
from dspark.row import MASS, Float32s, Int32s, Int64s, Row, RowError, RowFault, refuse_where


def dense_row(logits: Float32s, ids: Int32s | None, temperature: float, vocab: int) -> Row:
    """The row of all draft tokens at the draft temperature; tokens that get no ticket are left out.

    Args:
        logits: float32[V_draft], after the Markov bias, before temperature; ``-inf`` masks a token.
        ids: int32[V_draft] global target id of each draft id, strictly ascending; None when they are equal.
        temperature: draft temperature; 0 gives the one-entry row of the lowest-id maximum.
        vocab: target vocabulary size. The columns of a padded head are not tokens: cut them off before.

    Raises:
        RowError: ``not_finite``, ``zero_mass``, ``temperature``, or ``id_range`` for a draft id beyond the vocabulary.
    """
    last = logits.size - 1 if ids is None else int(ids[-1])
    if last >= vocab:
        raise RowError(RowFault.ID_RANGE, f"draft id {last} for a vocabulary of {vocab}")
    check_draft(logits, temperature)
    if temperature == 0:
        peak = int(logits.argmax())
        return greedy_row(peak if ids is None else int(ids[peak]))
    survivors = None if logits.min() > -np.inf else np.flatnonzero(logits > -np.inf).astype(np.int32)
    weights = softmax64(logits if survivors is None else logits[survivors], temperature)
    places, counts = _nonzero(allocate(weights))
    chosen = places if survivors is None else survivors[places]
    return Row(chosen if ids is None else ids[chosen], counts)


def _nonzero(counts: Int64s) -> tuple[Int32s, Int64s]:
    """Places int32 and values int64 of the nonzero counts, which are consumed."""
    kept = kernels.drop_zeros(counts)
    if kept is not None:
        return kept
    places = np.flatnonzero(counts)
    return places.astype(np.int32), counts[places]


def pack_dense_rows(rows: list[Row], vocab: int, q_out: Float32s) -> None:
    """Write rows into a preallocated wire array float32 [depth, width]; what no row names is written as zero.

    Args:
        rows: one row per drafted position, depth rows in all.
        vocab: target vocabulary size, at most the width.

    Raises:
        RowError: ``shape`` when array and rows disagree, ``id_range`` when a row names a token of the padding.
    """
    if q_out.dtype != np.float32 or q_out.ndim != 2 or len(q_out) != len(rows) or q_out.shape[1] < vocab:
        found = f"{q_out.dtype}{list(q_out.shape)}"
        raise RowError(RowFault.SHAPE, f"q is {found}, wanted float32 [depth, width] = [{len(rows)}, {vocab} or more]")
    for row, row_q in zip(rows, q_out, strict=True):
        if row.ids[-1] >= vocab:
            raise RowError(RowFault.ID_RANGE, f"a row names token {row.ids[-1]}, the vocabulary is {vocab}")
        if not kernels.write_dense_row(row.ids, row.counts, vocab, row_q):
            row_q.fill(0)
            row_q[row.ids] = row.counts * (1.0 / MASS)


def validate_dense_reply(tokens: Int32s, q: Float32s, vocab: int, depth: int) -> list[Row]:
    """Check a whole dense reply and return its rows; nothing of a reply is usable before this returns.

    The rows are copies: the staging memory behind the arguments may be leased again at once.

    Args:
        tokens: int32[depth]; drafted global ids.
        q: float32 [depth, width], width >= vocab.
        vocab: target vocabulary size.

    Raises:
        RowError: with the first fault found. As with sparse replies, an intact frame that fails here is a worker
            bug, not a routine miss.
    """
    if q.ndim != 2 or q.shape[1] < vocab:
        raise RowError(RowFault.SHAPE, f"q is {q.dtype}{list(q.shape)}, wanted [{depth}, {vocab} or more]")
    check_array("tokens", tokens, np.int32, (depth,))
    check_array("q", q, np.float32, (depth, q.shape[1]))
    rows: list[Row] = []
    for row_q, token in zip(q, tokens.tolist(), strict=True):
        read = kernels.dense_row(row_q, vocab, token)
        if read is None:
            return _read_rows(tokens, q, vocab)
        rows.append(Row(*read))
    return rows


def _read_rows(tokens: Int32s, q: Float32s, vocab: int) -> list[Row]:
    counts = wire_counts(q)
    columns = np.arange(q.shape[1])
    refuse_where((counts != 0) & (columns >= vocab), RowFault.PADDING, "padding")
    refuse_where(counts.sum(axis=1) != MASS, RowFault.WRONG_SUM, "q")
    # Compared, not indexed: -1 would name the last column.
    drafted = ((columns == tokens[:, np.newaxis]) & (counts > 0)).any(axis=1)
    refuse_where(~drafted, RowFault.ZERO_AT_TOKEN, "tokens")
    return [_row(row_counts) for row_counts in counts]


def _row(counts: Int64s) -> Row:
    ids = np.flatnonzero(counts)
    return Row(ids.astype(np.int32), counts[ids])
