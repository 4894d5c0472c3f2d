"""Proposal rows q: ``dyadic24-standard-v1``.

Purpose: a drafted token is drawn from integer counts that sum to exactly 2**24, and those counts are what the
wire carries. The receiver therefore holds the very law that the token was drawn from, bit for bit.

Invariants:

- A row has 1..support entries, ids strictly ascending (global target ids), counts >= 1, sum = ``MASS``.
- Ties (support selection, largest remainders) go to the lowest global id.
- What does not fit is refused with a code, never clipped, repaired or renormalised.
- Wire counts are q: nobody recomputes them, because another drafter's FP64 may differ by a ticket.

Called by the drafter worker (``sparse_row``, ``sparse_rows``, ``draw``, ``pack_rows``), by the verifier
(``validate_reply``) and by ``dspark.tickets``. It never makes a random number and never sees the target distribution.
The row type is ``dspark.row``'s, the numbers behind it are ``dspark.apportionment``'s; both are names of this module
too. Rows over the whole vocabulary are made and read by ``dspark.dense``.

Source: seed document 000 ("Distribution contract and precision"); largest remainders in FP64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from dspark.apportionment import (
    allocate,
    allocate_rows,
    cool,
    softmax64,
    softmax64_rows,
    top_indices,
    top_indices_rows,
)
from dspark.native import kernels
from dspark.row import (
    MASS,
    SEMANTIC_ID,
    Float32s,
    Float64s,
    Int32s,
    Int64s,
    Mask,
    Row,
    RowError,
    RowFault,
    refuse_where,
)

__all__ = [
    "MASS",
    "SEMANTIC_ID",
    "Float32s",
    "Float64s",
    "Int32s",
    "Int64s",
    "Mask",
    "Row",
    "RowError",
    "RowFault",
    "allocate",
    "check_array",
    "check_draft",
    "cool",
    "draw",
    "greedy_row",
    "pack_rows",
    "softmax64",
    "sparse_row",
    "sparse_rows",
    "top_indices",
    "validate_reply",
    "wire_counts",
]

# From this length on one early-ending scan beats a cumulative sum of everything.
_LONG_ROW = 512

# FP32 bit patterns, compared as unsigned integers.
_SIGN_BIT = 0x80000000
_EXPONENT_BITS = 0x7F800000
_SMALLEST_NORMAL_BITS = 0x00800000
_ONE_BITS = 0x3F800000


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
    check_draft(logits, temperature)
    _check_support(support)
    if temperature == 0:
        peak = int(logits.argmax())
        return greedy_row(peak if ids is None else int(ids[peak]))
    chosen = top_indices(logits, support)
    counts = allocate(softmax64(logits[chosen], temperature))
    kept = counts > 0
    if not kept.all():
        chosen, counts = chosen[kept], counts[kept]
    return Row(chosen.astype(np.int32) if ids is None else ids[chosen], counts)


def sparse_rows(
    logits: Float32s, ids: Int32s | None, temperatures: Float64s | Sequence[float], support: int
) -> list[Row]:
    """``sparse_row`` of every row of logits float32[rows, V_draft], count for count, in a few passes over all.

    Args:
        ids, support: as for ``sparse_row``.
        temperatures: draft temperature of each row.

    Raises:
        RowError: as ``sparse_row``, for the first row at fault; ``shape`` when logits and temperatures disagree.
    """
    cooling = np.asarray(temperatures, dtype=np.float64)
    if logits.ndim != 2 or cooling.shape != logits.shape[:1]:
        raise RowError(RowFault.SHAPE, f"logits {list(logits.shape)} for {list(cooling.shape)} temperatures")
    _check_support(support)
    for row_logits, temperature in zip(logits, cooling.tolist(), strict=True):
        check_draft(row_logits, temperature)
    places, found = top_indices_rows(logits, support)
    # Summation order depends on the length: a row with masked tokens inside its support is made alone.
    together = (found == places.shape[1]) & (cooling > 0)
    chosen = np.flatnonzero(together)
    made = iter(_rows_at(logits, ids, cooling[chosen], chosen, places[chosen]))
    return [
        next(made) if batched else sparse_row(logits[index], ids, float(cooling[index]), support)
        for index, batched in enumerate(together.tolist())
    ]


def _rows_at(
    logits: Float32s, ids: Int32s | None, temperatures: Float64s, chosen: NDArray[np.intp], places: Int64s
) -> list[Row]:
    """Rows of logits[chosen], each over its own places int64[chosen, support]."""
    weights = softmax64_rows(logits[chosen[:, np.newaxis], places], temperatures)
    counts = allocate_rows(weights)
    tokens = places.astype(np.int32) if ids is None else ids[places]
    if counts.all():
        return [Row(row_tokens, row_counts) for row_tokens, row_counts in zip(tokens, counts, strict=True)]
    kept = counts > 0
    return [Row(tokens[index][kept[index]], counts[index][kept[index]]) for index in range(len(chosen))]


def check_draft(logits: Float32s, temperature: float) -> None:
    """Refuse draft logits float32[V_draft] or a draft temperature that define no row.

    Raises:
        RowError: ``not_finite``, ``zero_mass`` or ``temperature``.
    """
    peak = float(logits.max())
    if peak == -math.inf:
        raise RowError(RowFault.ZERO_MASS, "every draft logit is -inf")
    if not math.isfinite(peak):
        raise RowError(RowFault.NOT_FINITE, "draft logits hold NaN or +inf")
    if not 0 <= temperature < math.inf:
        raise RowError(RowFault.TEMPERATURE, f"draft temperature {temperature}; use a finite value >= 0")


def _check_support(support: int) -> None:
    if support < 1:
        raise RowError(RowFault.SUPPORT, f"support {support}; a row needs at least one entry")


def greedy_row(token: int) -> Row:
    """The row of a deterministic drafter: one entry that holds the whole mass."""
    return Row(np.array([token], dtype=np.int32), np.array([MASS], dtype=np.int64))


def draw(row: Row, u24: int) -> int:
    """The token of a 24-bit uniform integer: first cumulative count strictly above it, ids ascending."""
    if not 0 <= u24 < MASS:
        raise ValueError(f"u24={u24} is outside [0, 2**24)")
    place = kernels.draw(row.counts, u24) if len(row) >= _LONG_ROW else None
    if place is None:
        place = int(row.counts.cumsum().searchsorted(u24, side="right"))
    return int(row.ids[place])


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
    read = kernels.sparse_reply(tokens, entries, ids, q, vocab)
    ids, counts = _read_reply(tokens, entries, ids, q, vocab) if read is None else read
    return [Row(ids[i, :n], counts[i, :n]) for i, n in enumerate(entries.tolist())]


def _read_reply(
    tokens: Int32s, entries: Int32s, ids: Int32s, q: Float32s, vocab: int
) -> tuple[Int32s, Int64s]:
    """Copies of ids and counts [depth, support] of a reply without fault."""
    support = ids.shape[1]
    refuse_where((entries < 1) | (entries > support), RowFault.ENTRIES, "entries")
    used = np.arange(support) < entries[:, None]
    counts = wire_counts(q)
    refuse_where(~used & ((counts | ids) != 0), RowFault.PADDING, "padding")
    refuse_where(used & (counts == 0), RowFault.ZERO_COUNT, "q")
    refuse_where(counts.sum(axis=1) != MASS, RowFault.WRONG_SUM, "q")
    refuse_where((ids < 0) | (ids >= vocab), RowFault.ID_RANGE, "ids")
    refuse_where(used[:, 1:] & (ids[:, 1:] <= ids[:, :-1]), RowFault.ID_ORDER, "ids")
    drafted = (used & (ids == tokens[:, None])).any(axis=1)
    refuse_where(~drafted, RowFault.ZERO_AT_TOKEN, "tokens")
    return ids.copy(), counts


def _check_arrays(
    tokens: Int32s, entries: Int32s, ids: Int32s, q: Float32s, depth: int, support: int
) -> None:
    check_array("tokens", tokens, np.int32, (depth,))
    check_array("entries", entries, np.int32, (depth,))
    check_array("ids", ids, np.int32, (depth, support))
    check_array("q", q, np.float32, (depth, support))


def check_array(name: str, array: NDArray[Any], dtype: type, shape: tuple[int, ...]) -> None:
    """Refuse an array of a reply that is not what was negotiated.

    Raises:
        RowError: ``shape``.
    """
    if array.dtype != dtype or array.shape != shape:
        found = f"{name} is {array.dtype}{list(array.shape)}"
        raise RowError(RowFault.SHAPE, f"{found}, wanted {np.dtype(dtype)}{list(shape)}")


def wire_counts(q: Float32s) -> Int64s:
    """Counts int64 of wire values; three cheap gates here, the diagnosis only when one of them fires.

    Raises:
        RowError: ``negative_zero``, ``not_finite``, ``negative``, ``over_one``, ``subnormal`` or ``not_dyadic``.
    """
    bits = np.ascontiguousarray(q).view(np.uint32)
    if bits.max(initial=0) > _ONE_BITS:
        _refuse_bits(bits)
    scaled = q * np.float32(MASS)
    counts = scaled.astype(np.int64)
    # Bits, not values, decide what is zero: a thread may flush subnormals to zero (torch can switch that on).
    if (counts != scaled).any() or np.count_nonzero(counts) != np.count_nonzero(bits):
        _refuse_bits(bits)
    return counts


def _refuse_bits(bits: NDArray[np.uint32]) -> NoReturn:
    """Name the fault of FP32 patterns that are no count / 2**24; as a float, -0.0 would equal 0.0."""
    refuse_where(bits == _SIGN_BIT, RowFault.NEGATIVE_ZERO, "q")
    refuse_where((bits & _EXPONENT_BITS) == _EXPONENT_BITS, RowFault.NOT_FINITE, "q")
    refuse_where(bits > _SIGN_BIT, RowFault.NEGATIVE, "q")
    refuse_where(bits > _ONE_BITS, RowFault.OVER_ONE, "q")
    refuse_where((bits < _SMALLEST_NORMAL_BITS) & (bits != 0), RowFault.SUBNORMAL, "q")
    raise RowError(RowFault.NOT_DYADIC, "q holds a value that is no multiple of 2**-24")
