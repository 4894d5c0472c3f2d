"""Proposal rows when the draft vocabulary is split over worker ranks: ``dspark.dyadic``, shard by shard.

Purpose: leader and peers each hold the logits of a range of ids and arrive at one row q and one drafted token, count
for count those of the whole row.

Invariants:

- Rank order is id order: the ids of a rank are ascending and below those of the next rank. A shard may be empty or
  wholly masked by ``-inf``.
- Sparse: the best ``support`` of every shard contain the best ``support`` of all. The leader runs
  ``dyadic.sparse_row`` on them, so selection, ties, normaliser and counts are those of the whole row by construction,
  and nobody else computes a count.
- Dense: maximum and normaliser come from ``collectives`` and are the same bits on all ranks and in the whole row; from
  there on each rank counts its own ids and all coordination is in integers. Counts equal those of the whole row on any
  mixture of machines: ``dspark.exponential`` has the same bits everywhere.
- The leader owns the uniform integer. A refused row is refused on all ranks alike, before anything is broadcast.

Called by the drafter worker's ranks, all of them, in step. It never sees the target and keeps nothing between calls.

Source: as ``dspark.dyadic``; the threshold is a radix selection over the bit patterns of the remainders.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.collectives import Group, locate, split_sum
from dspark.dyadic import (
    MASS,
    Float32s,
    Float64s,
    Int32s,
    Int64s,
    Row,
    RowError,
    RowFault,
    check_draft,
    cool,
    draw,
    sparse_row,
    top_indices,
)
from dspark.exponential import exponentiate

LEADER = 0

# Patterns of FP64 numbers in [0, 1) have 62 bits: six digits of eleven, highest first.
_DIGIT_BITS = 11
_DIGITS = 1 << _DIGIT_BITS
_SHIFTS = range(55, -1, -_DIGIT_BITS)


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A drafted token and the row that it was drawn from, on every rank."""

    token: int
    row: Row


@dataclass(frozen=True, slots=True, eq=False)
class RowPart:
    """This rank's part of a dense row: ``ids`` int32[n] ascending, ``counts`` int64[n] >= 1; n may be 0."""

    ids: Int32s
    counts: Int64s

    def __post_init__(self) -> None:
        self.ids.setflags(write=False)
        self.counts.setflags(write=False)


def propose_sparse(
    group: Group, logits: Float32s, ids: Int32s, temperature: float, support: int, u24: int
) -> Proposal:
    """The row of the ``support`` most likely draft tokens over all shards, and the token that ``u24`` draws from it.

    Two collectives of constant size: 2 x support numbers from every rank, and the row from the leader.

    Args:
        logits: float32[n] of this shard, after the Markov bias; ``-inf`` masks a token.
        ids: int32[n] global target ids of this shard.
        temperature, support: equal on all ranks.
        u24: 24-bit uniform integer of the proposal domain; only the leader's is used.

    Raises:
        RowError: ``not_finite``, ``zero_mass``, ``temperature`` or ``support``, on all ranks.
        ValueError: the shards are not in id order.
    """
    if support < 1:
        raise RowError(RowFault.SUPPORT, f"support {support}; a row needs at least one entry")
    candidates = group.all_gather(_candidates(logits, ids, support))
    check_draft(candidates[:, 0].astype(np.float32), temperature)
    used = candidates[:, 0] > -np.inf
    best, best_ids = candidates[:, 0][used].astype(np.float32), candidates[:, 1][used].astype(np.int32)
    if (best_ids[1:] <= best_ids[:-1]).any():
        raise ValueError("ids must ascend within a shard and from rank to rank")
    message = np.zeros(2 + 2 * support, dtype=np.int64)
    if group.rank == LEADER:
        row = sparse_row(best, best_ids, temperature, support)
        _write(message, row, draw(row, u24), support)
    return _read(group.broadcast(message, LEADER), support)


def _candidates(logits: Float32s, ids: Int32s, support: int) -> Float64s:
    """float64[2, support]: logits and ids of this shard's best tokens, ids ascending; ``-inf`` is padding.

    Both are exact in FP64. A NaN would not survive a selection, so it travels alone and every rank refuses it.
    """
    packed = np.full((2, support), -np.inf)
    if logits.size == 0:
        return packed
    peak = int(logits.argmax())
    chosen = np.array([peak]) if np.isnan(logits[peak]) else top_indices(logits, support)
    packed[0, : chosen.size] = logits[chosen]
    packed[1, : chosen.size] = ids[chosen]
    return packed


def _write(message: Int64s, row: Row, token: int, support: int) -> None:
    message[:2] = token, len(row)
    message[2 : 2 + len(row)] = row.ids
    message[2 + support : 2 + support + len(row)] = row.counts


def _read(message: Int64s, support: int) -> Proposal:
    token, entries = message[:2].tolist()
    ids, counts = message[2 : 2 + entries], message[2 + support : 2 + support + entries]
    return Proposal(token, Row(ids.astype(np.int32), counts.copy()))


def dense_part(group: Group, logits: Float32s, ids: Int32s, temperature: float, mass: int = MASS) -> RowPart:
    """This rank's part of the row over all tokens that are not masked: its range of ``dense.dense_row``.

    At most ten collectives (one at temperature 0), the largest of them 2,048 counts from every rank.

    Args:
        logits, ids, temperature: as in ``propose_sparse``.
        mass: what the counts of all ranks sum to; serving uses ``MASS``.

    Raises:
        RowError: ``not_finite``, ``zero_mass``, ``temperature`` or ``leftover``, on all ranks.
    """
    peaks = group.all_gather(np.array([logits.max(initial=-np.inf)], dtype=np.float64)).ravel()
    # Of the peaks of all shards, so that all ranks refuse the row or none does.
    check_draft(peaks.astype(np.float32), temperature)
    if temperature == 0:
        places = np.array([int(logits.argmax())] if peaks.argmax() == group.rank else [], dtype=np.intp)
        return RowPart(ids[places], np.full(places.size, mass))
    places = np.flatnonzero(logits > -np.inf)
    weights = np.subtract(logits[places], peaks.max(), dtype=np.float64)
    if temperature != 1.0:
        cool(weights, temperature)
    exponentiate(weights)
    weights /= split_sum(group, weights)
    counts = _allocate(group, weights, mass)
    return RowPart(ids[places[counts > 0]], counts[counts > 0])


def _allocate(group: Group, weights: Float64s, mass: int) -> Int64s:
    """Counts of this rank's weights; over all ranks floor, then largest remainders, ties to the lowest id."""
    scaled = weights * mass
    floors = np.floor(scaled)
    remainders = scaled - floors
    counts = floors.astype(np.int64)
    mine = np.array([counts.sum(), np.count_nonzero(remainders)])
    floor_sum, nonzero = group.all_gather(mine).sum(axis=0).tolist()
    leftover = mass - floor_sum
    if not 0 <= leftover <= nonzero:
        raise RowError(RowFault.LEFTOVER, f"{leftover} of {mass} tickets left over; normalise in FP64")
    if leftover:
        counts[_largest(group, remainders, leftover)] += 1
    return counts


def _largest(group: Group, remainders: Float64s, how_many: int) -> NDArray[np.intp]:
    """Indices of this rank's share of the ``how_many`` >= 1 largest remainders of all ranks, ties to the lowest id.

    Nonnegative FP64 numbers order as their bit patterns do. Each of six rounds gathers how many patterns have which
    next digit and so fixes one digit of the threshold, whatever the row looks like: six gathers of 2,048 counts
    instead of the remainders themselves, of which half the vocabulary can be needed. The last round also tells how
    many ties the lower ranks have.
    """
    patterns = remainders.view(np.int64)
    threshold, wanted = 0, how_many
    for shift in _SHIFTS:
        # Patterns that share the digits found so far give a digit in range, and no others do.
        digits = (patterns >> shift) - (threshold << _DIGIT_BITS)
        inside = digits[(digits >= 0) & (digits < _DIGITS)]
        counts = group.all_gather(np.bincount(inside, minlength=_DIGITS))
        from_top = counts.sum(axis=0)[::-1].cumsum()
        place = int(from_top.searchsorted(wanted))
        wanted -= int(from_top[place - 1]) if place else 0
        digit = _DIGITS - 1 - place
        threshold = (threshold << _DIGIT_BITS) | digit
    ties_below = int(counts[: group.rank, digit].sum())
    ties = np.flatnonzero(patterns == threshold)[: max(wanted - ties_below, 0)]
    return np.concatenate((np.flatnonzero(patterns > threshold), ties))


def draw_dense(group: Group, part: RowPart, u24: int) -> int:
    """The token of a dense row, on all ranks: ``dyadic.draw`` over the parts in rank order. Three collectives.

    Args:
        u24: uniform integer in [0, mass); only the leader's is used.

    Raises:
        ValueError: the leader's integer lies outside the mass, on all ranks.
    """
    totals = group.all_gather(np.array([part.counts.sum()])).ravel().tolist()
    chosen = int(group.broadcast(np.array([u24]), LEADER)[0])
    owner, rest = locate(totals, chosen)
    token = part.ids[part.counts.cumsum().searchsorted(rest, side="right")] if owner == group.rank else 0
    return int(group.broadcast(np.array([token], dtype=np.int64), owner)[0])
