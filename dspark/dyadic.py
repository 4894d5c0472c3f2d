"""Proposal rows q: ``dyadic24-standard-v1``.

Purpose: a drafted token is drawn from integer counts that sum to exactly 2**24, and those counts are what the
wire carries. The receiver therefore holds the very law that the token was drawn from, bit for bit.

Invariants:

- A row has 1..support entries, ids strictly ascending (global target ids), counts >= 1, sum = ``MASS``.
- ``q = count / MASS`` is exact in FP32, and so is every partial sum.
- Ties (support selection, largest remainders) go to the lowest global id.
- What does not fit is refused with a code, never clipped, repaired or renormalised.
- Wire counts are q: nobody recomputes them, because FP64 ``exp`` differs by a ticket between machines.

Called by the drafter worker (``sparse_row``, ``draw``, ``pack_rows``), by the verifier (``validate_reply``)
and by ``dspark.tickets``. It never makes a random number and never sees the target distribution.

Source: seed document 000 ("Distribution contract and precision"); largest remainders in FP64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Mask = NDArray[np.bool_]

MASS = 1 << 24
SEMANTIC_ID = "dyadic24-standard-v1"

# Below this length one stable sort is cheaper than a partition and its two scans.
_SHORT_ROW = 1024

# FP32 bit patterns, compared as unsigned integers.
_SIGN_BIT = 0x80000000
_EXPONENT_BITS = 0x7F800000
_SMALLEST_NORMAL_BITS = 0x00800000
_ONE_BITS = 0x3F800000


class RowFault(StrEnum):
    """Why a row was refused. The first group arises when a row is made, the second when a reply is read."""

    NOT_FINITE = "not_finite"
    NEGATIVE = "negative"
    ZERO_MASS = "zero_mass"
    LEFTOVER = "leftover"
    TEMPERATURE = "temperature"
    SUPPORT = "support"

    SHAPE = "shape"
    ENTRIES = "entries"
    NEGATIVE_ZERO = "negative_zero"
    SUBNORMAL = "subnormal"
    OVER_ONE = "over_one"
    NOT_DYADIC = "not_dyadic"
    PADDING = "padding"
    ZERO_COUNT = "zero_count"
    WRONG_SUM = "wrong_sum"
    ID_RANGE = "id_range"
    ID_ORDER = "id_order"
    ZERO_AT_TOKEN = "zero_at_token"


class RowError(ValueError):
    """A refused row: ``code`` says why, ``where`` names the field, row and entry."""

    def __init__(self, code: RowFault, where: str) -> None:
        super().__init__(f"{code}: {where}")
        self.code = code
        self.where = where


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One proposal distribution: ``ids`` int32[n] ascending, ``counts`` int64[n] >= 1 with sum ``MASS``.

    Made by ``sparse_row``, ``greedy_row`` and ``validate_reply`` only; the arrays are read-only from then on,
    because a q that changes after the draw is the oldest bug of this trade.
    """

    ids: Int32s
    counts: Int64s

    def __post_init__(self) -> None:
        self.ids.setflags(write=False)
        self.counts.setflags(write=False)

    def __len__(self) -> int:
        return self.ids.size

    def count(self, token: int) -> int:
        """Count of a global id, 0 outside the support."""
        place = int(self.ids.searchsorted(token))
        if place < self.ids.size and self.ids[place] == token:
            return int(self.counts[place])
        return 0


def softmax64(logits: NDArray[np.floating], temperature: float = 1.0) -> Float64s:
    """FP64 softmax of finite-or-``-inf`` logits with a finite maximum; temperature > 0.

    The maximum is subtracted before the division, so no temperature can overflow.
    """
    weights: Float64s = np.subtract(logits, logits.max(), dtype=np.float64)
    if temperature != 1.0:
        cool(weights, temperature)
    np.exp(weights, out=weights)
    weights /= weights.sum()
    return weights


def cool(shifted: Float64s, temperature: float) -> None:
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
    scaled = weights * mass
    if not (scaled.size and scaled.min() >= 0 and 0 < scaled.max() <= mass + 1):
        _refuse_weights(weights)
    floors = np.floor(scaled)
    remainders = scaled - floors
    counts = floors.astype(np.int64)
    leftover = mass - int(counts.sum())
    if not 0 <= leftover <= np.count_nonzero(remainders):
        raise RowError(RowFault.LEFTOVER, f"{leftover} of {mass} tickets left over; normalise in FP64")
    if leftover:
        counts[_largest(remainders, leftover)] += 1
    return counts


def _refuse_weights(weights: Float64s) -> NoReturn:
    if not np.isfinite(weights).all():
        raise RowError(RowFault.NOT_FINITE, "draft weights hold NaN or infinity")
    if (weights < 0).any():
        raise RowError(RowFault.NEGATIVE, f"draft weight at index {int(np.argmax(weights < 0))}")
    if not weights.any():
        raise RowError(RowFault.ZERO_MASS, "draft weights are all zero")
    raise RowError(RowFault.LEFTOVER, "a draft weight is above 1; normalise them in FP64")


def _largest(remainders: Float64s, how_many: int) -> NDArray[np.intp]:
    """Indices of the ``how_many`` >= 1 largest values, ties to the lowest index; long rows are not sorted."""
    if remainders.size <= _SHORT_ROW:
        return np.argsort(-remainders, kind="stable")[:how_many]
    cut = remainders.size - how_many
    threshold = np.partition(remainders, cut)[cut]
    above = np.flatnonzero(remainders > threshold)
    ties = np.flatnonzero(remainders == threshold)
    return np.concatenate((above, ties[: how_many - above.size]))


def top_indices(values: NDArray[np.floating], how_many: int) -> NDArray[np.intp]:
    """Ascending indices of the ``how_many`` largest values, ties to the lowest index, ``-inf`` left out."""
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


def sparse_row(logits: Float32s, ids: Int32s | None, temperature: float, support: int) -> Row:
    """The row of the ``support`` most likely draft tokens at the draft temperature.

    Args:
        logits: float32[V_draft], after the Markov bias, before temperature; ``-inf`` masks a token.
        ids: int32[V_draft] global target id of each draft id, strictly ascending; None when they are equal.
        temperature: draft temperature; 0 gives the one-entry row of the lowest-id maximum.
        support: most entries that the row may have (the negotiated support).

    Raises:
        RowError: ``not_finite``, ``zero_mass``, ``temperature`` or ``support``.
    """
    _check_draft(logits, temperature, support)
    if temperature == 0:
        peak = int(logits.argmax())
        return greedy_row(peak if ids is None else int(ids[peak]))
    chosen = top_indices(logits, support)
    counts = allocate(softmax64(logits[chosen], temperature))
    kept = counts > 0
    if not kept.all():
        chosen, counts = chosen[kept], counts[kept]
    return Row(chosen.astype(np.int32) if ids is None else ids[chosen], counts)


def _check_draft(logits: Float32s, temperature: float, support: int) -> None:
    peak = float(logits.max())
    if peak == -math.inf:
        raise RowError(RowFault.ZERO_MASS, "every draft logit is -inf")
    if not math.isfinite(peak):
        raise RowError(RowFault.NOT_FINITE, "draft logits hold NaN or +inf")
    if not 0 <= temperature < math.inf:
        raise RowError(RowFault.TEMPERATURE, f"draft temperature {temperature}; use a finite value >= 0")
    if support < 1:
        raise RowError(RowFault.SUPPORT, f"support {support}; a row needs at least one entry")


def greedy_row(token: int) -> Row:
    """The row of a deterministic drafter: one entry that holds the whole mass."""
    return Row(np.array([token], dtype=np.int32), np.array([MASS], dtype=np.int64))


def draw(row: Row, u24: int) -> int:
    """The token of a 24-bit uniform integer: first cumulative count strictly above it, ids ascending."""
    if not 0 <= u24 < MASS:
        raise ValueError(f"u24={u24} is outside [0, 2**24)")
    return int(row.ids[row.counts.cumsum().searchsorted(u24, side="right")])


def pack_rows(rows: list[Row], support: int, ids_out: Int32s, q_out: Float32s, entries_out: Int32s) -> None:
    """Write rows into preallocated wire arrays; padding is written as zero, so a lease cannot leak old rows.

    Args:
        rows: one row per drafted position, depth rows in all.
        support: negotiated support; the second dimension of the arrays.
        ids_out, q_out: int32 and float32 [depth, support].
        entries_out: int32[depth].

    Raises:
        RowError: ``shape`` when arrays and rows disagree, ``entries`` when a row exceeds the support.
    """
    wanted = (len(rows), support)
    if ids_out.shape != wanted or q_out.shape != wanted or entries_out.shape != wanted[:1]:
        raise RowError(RowFault.SHAPE, f"wire arrays must be [depth, support] = {list(wanted)}")
    ids_out.fill(0)
    q_out.fill(0)
    for index, row in enumerate(rows):
        entries = len(row)
        if entries > support:
            raise RowError(RowFault.ENTRIES, f"row {index} has {entries} entries, support is {support}")
        ids_out[index, :entries] = row.ids
        q_out[index, :entries] = row.counts * (1.0 / MASS)
        entries_out[index] = entries


def validate_reply(
    tokens: Int32s, entries: Int32s, ids: Int32s, q: Float32s, vocab: int, depth: int, support: int
) -> list[Row]:
    """Check a whole reply in one pass and return its rows; nothing of a reply is usable before this returns.

    The rows are copies: the staging memory behind the arguments may be leased again at once.

    Args:
        tokens, entries: int32[depth]; drafted global ids and entry counts.
        ids, q: int32 and float32 [depth, support].
        vocab: target vocabulary size; ids are in [0, vocab).

    Raises:
        RowError: with the first fault found. An intact frame that fails here is a worker bug, not a routine
            miss: a fallback that depends on drafted content is biased, so the caller quarantines the worker.
    """
    _check_arrays(tokens, entries, ids, q, depth, support)
    _refuse_where((entries < 1) | (entries > support), RowFault.ENTRIES, "entries")
    used = np.arange(support) < entries[:, None]
    counts = _counts(q)
    _refuse_where(~used & ((counts | ids) != 0), RowFault.PADDING, "padding")
    _refuse_where(used & (counts == 0), RowFault.ZERO_COUNT, "q")
    _refuse_where(counts.sum(axis=1) != MASS, RowFault.WRONG_SUM, "q")
    _refuse_where((ids < 0) | (ids >= vocab), RowFault.ID_RANGE, "ids")
    _refuse_where(used[:, 1:] & (ids[:, 1:] <= ids[:, :-1]), RowFault.ID_ORDER, "ids")
    drafted = (used & (ids == tokens[:, None])).any(axis=1)
    _refuse_where(~drafted, RowFault.ZERO_AT_TOKEN, "tokens")
    ids = ids.copy()
    return [Row(ids[i, :n], counts[i, :n]) for i, n in enumerate(entries.tolist())]


def _check_arrays(
    tokens: Int32s, entries: Int32s, ids: Int32s, q: Float32s, depth: int, support: int
) -> None:
    wanted = {
        "tokens": (tokens, np.int32, (depth,)),
        "entries": (entries, np.int32, (depth,)),
        "ids": (ids, np.int32, (depth, support)),
        "q": (q, np.float32, (depth, support)),
    }
    for name, (array, dtype, shape) in wanted.items():
        if array.dtype != dtype or array.shape != shape:
            found = f"{name} is {array.dtype}{list(array.shape)}"
            raise RowError(RowFault.SHAPE, f"{found}, wanted {np.dtype(dtype)}{list(shape)}")


def _counts(q: Float32s) -> Int64s:
    """Counts int64 of wire values; two cheap gates here, the diagnosis only when one of them fires."""
    bits = np.ascontiguousarray(q).view(np.uint32)
    if bits.max() > _ONE_BITS:
        _refuse_bits(bits)
    scaled = q * np.float32(MASS)
    counts = scaled.astype(np.int64)
    if (counts != scaled).any():
        _refuse_bits(bits)
    return counts


def _refuse_bits(bits: NDArray[np.uint32]) -> NoReturn:
    """Name the fault of FP32 patterns that are no count / 2**24; as a float, -0.0 would equal 0.0."""
    _refuse_where(bits == _SIGN_BIT, RowFault.NEGATIVE_ZERO, "q")
    _refuse_where((bits & _EXPONENT_BITS) == _EXPONENT_BITS, RowFault.NOT_FINITE, "q")
    _refuse_where(bits > _SIGN_BIT, RowFault.NEGATIVE, "q")
    _refuse_where(bits > _ONE_BITS, RowFault.OVER_ONE, "q")
    _refuse_where((bits < _SMALLEST_NORMAL_BITS) & (bits != 0), RowFault.SUBNORMAL, "q")
    raise RowError(RowFault.NOT_DYADIC, "q holds a value that is no multiple of 2**-24")


def _refuse_where(bad: Mask, fault: RowFault, field: str) -> None:
    if bad.any():
        first = np.argwhere(bad)[0].tolist()
        raise RowError(fault, f"{field}{first}")
