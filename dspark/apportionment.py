"""From logits to integer counts: FP64 softmax, largest remainders, and the choice of a support.

Purpose: the numbers behind a proposal row, one row or many at a time.

Invariants:

- Weights are FP64: FP32 softmax weights leave an impossible leftover in some rows.
- Ties (support selection, largest remainders) go to the lowest index, and index order is id order.
- Many rows at once give, count for count, what each row gives alone.
- The numpy code here defines the result; ``dspark.native.kernels`` computes the same, faster, where it can.

Called by ``dspark.dyadic``, ``dspark.dense``, and for the target by ``dspark.processors`` and ``dspark.tickets``.

Source: largest remainders in FP64, seed document 000 ("Distribution contract and precision").
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from dspark.exponential import exponentiate
from dspark.native import kernels
from dspark.row import MASS, Float64s, Int64s, RowError, RowFault

# Below this length one stable sort is cheaper than a partition and its two scans.
_SHORT_ROW = 1024


def softmax64(logits: NDArray[np.floating], temperature: float = 1.0) -> Float64s:
    """FP64 softmax of finite-or-``-inf`` logits with a finite maximum; temperature > 0.

    The maximum is subtracted before the division, so no temperature can overflow.
    """
    weights: Float64s = np.subtract(logits, logits.max(), dtype=np.float64)
    if temperature != 1.0:
        cool(weights, temperature)
    exponentiate(weights)
    weights /= weights.sum()
    return weights


def softmax64_rows(logits: NDArray[np.floating], temperatures: Float64s) -> Float64s:
    """``softmax64`` of every row of logits[rows, n] at its own temperature > 0, bit for bit."""
    weights: Float64s = np.subtract(logits, logits.max(axis=1, keepdims=True), dtype=np.float64)
    cool(weights, temperatures[:, np.newaxis])
    exponentiate(weights)
    weights /= weights.sum(axis=1, keepdims=True)
    return weights


def cool(shifted: Float64s, temperature: float | Float64s) -> None:
    """Divide logits whose maximum is 0 by a positive temperature, in place; overflow is a true ``-inf``."""
    with np.errstate(over="ignore"):
        np.divide(shifted, temperature, out=shifted)


def allocate(weights: Float64s, mass: int = MASS) -> Int64s:
    """Integer counts int64[n] with sum ``mass`` for normalised FP64 weights: floor, then largest remainders.

    Index order must be id order. With |sum(w) - 1| * mass < 1 the leftover R satisfies 0 <= R <= number of
    nonzero remainders; anything else proves that the weights were not a normalised FP64 row.

    Raises:
        RowError: ``not_finite``, ``negative``, ``zero_mass`` or ``leftover``.
    """
    counts: Int64s = allocate_rows(weights[np.newaxis], mass)[0]
    return counts


def allocate_rows(weights: Float64s, mass: int = MASS) -> Int64s:
    """``allocate`` of every row of weights[rows, n]: counts int64[rows, n]. Raises as it does, for the first row."""
    counts = kernels.allocate(weights, mass)
    return _allocate_rows(weights, mass) if counts is None else counts


def _allocate_rows(weights: Float64s, mass: int) -> Int64s:
    scaled = weights * mass
    lowest, highest = scaled.min(axis=1, initial=0), scaled.max(axis=1, initial=0)
    fine = (lowest >= 0) & (highest > 0) & (highest <= mass + 1)
    if not fine.all():
        _refuse_weights(weights[fine.argmin()])
    floors = np.floor(scaled)
    remainders = scaled - floors
    counts = floors.astype(np.int64)
    leftovers = mass - counts.sum(axis=1)
    bad = (leftovers < 0) | (leftovers > np.count_nonzero(remainders, axis=1))
    if bad.any():
        raise RowError(
            RowFault.LEFTOVER, f"{leftovers[bad.argmax()]} of {mass} tickets left over; normalise in FP64"
        )
    _raise_largest(counts, remainders, leftovers)
    return counts


def _refuse_weights(weights: Float64s) -> NoReturn:
    if not np.isfinite(weights).all():
        raise RowError(RowFault.NOT_FINITE, "draft weights hold NaN or infinity")
    if (weights < 0).any():
        raise RowError(RowFault.NEGATIVE, f"draft weight at index {int(np.argmax(weights < 0))}")
    if not weights.any():
        raise RowError(RowFault.ZERO_MASS, "draft weights are all zero")
    raise RowError(RowFault.LEFTOVER, "a draft weight is above 1; normalise them in FP64")


def _raise_largest(counts: Int64s, remainders: Float64s, leftovers: Int64s) -> None:
    """One more ticket to the ``leftovers`` largest remainders of each row; long rows are not sorted."""
    if counts.shape[1] <= _SHORT_ROW:
        order = np.argsort(-remainders, axis=1, kind="stable")
        row, rank = np.nonzero(np.arange(counts.shape[1]) < leftovers[:, np.newaxis])
        counts[row, order[row, rank]] += 1
        return
    for row_counts, row_remainders, leftover in zip(counts, remainders, leftovers.tolist(), strict=True):
        if leftover:
            row_counts[_largest(row_remainders, leftover)] += 1


def _largest(remainders: Float64s, how_many: int) -> NDArray[np.intp]:
    """Indices of the ``how_many`` >= 1 largest values, ties to the lowest index."""
    cut = remainders.size - how_many
    threshold = np.partition(remainders, cut)[cut]
    above = np.flatnonzero(remainders > threshold)
    ties = np.flatnonzero(remainders == threshold)
    return np.concatenate((above, ties[: how_many - above.size]))


def top_indices(values: NDArray[np.floating], how_many: int) -> NDArray[np.intp]:
    """Ascending indices of the ``how_many`` largest values, ties to the lowest index, ``-inf`` left out."""
    places, found = top_indices_rows(values[np.newaxis], how_many)
    return places[0, : found[0]].astype(np.intp, copy=False)


def top_indices_rows(values: NDArray[np.floating], how_many: int) -> tuple[Int64s, Int64s]:
    """``top_indices`` of every row of values[rows, n].

    Returns:
        places int64[rows, min(how_many, n)], and how many of each row's places are set: fewer only where
        ``-inf`` leaves fewer.
    """
    chosen = kernels.top(values, how_many)
    if chosen is not None:
        return chosen
    places = np.zeros((values.shape[0], min(how_many, values.shape[1])), dtype=np.int64)
    found = np.zeros(values.shape[0], dtype=np.int64)
    for row, row_values in enumerate(values):
        indices = _top_indices(row_values, how_many)
        places[row, : indices.size], found[row] = indices, indices.size
    return places, found


def _top_indices(values: NDArray[np.floating], how_many: int) -> NDArray[np.intp]:
    if how_many >= values.size:
        return np.flatnonzero(values > -np.inf)
    cut = values.size - how_many
    threshold = np.partition(values, cut)[cut]
    if threshold == -np.inf:
        return np.flatnonzero(values > threshold)
    chosen = np.flatnonzero(values >= threshold)
    surplus = chosen.size - how_many
    if surplus:
        last_ties = np.flatnonzero(values[chosen] == threshold)[-surplus:]
        chosen = np.delete(chosen, last_ties)
    return chosen
