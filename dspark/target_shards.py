"""Target rows when the vocabulary is split over verifier ranks: processors, tickets and the round, shard by shard.

Purpose: every rank holds the logits of a range of ids, and all ranks arrive at one verdict, which is the verdict of
``processors.target_row`` and ``verify.verify_ratio`` on the whole rows, token for token.

Invariants:

- Maximum, normaliser, survivors of top_k and top_p, and leftover are computed from gathered numbers by the same
  arithmetic on all ranks, in the order in which the whole row would be summed. Tickets equal those of the whole row on
  any mixture of machines: ``dspark.exponential`` has the same bits everywhere.
- From tickets on there are only integers: acceptance looks at one broadcast ticket, and one integer W chooses first
  the shard and then the token in it. A shard or token without mass cannot be chosen.
- All ranks hold the same proposal rows, drafted tokens and keys, and call in step. An error that depends on logits
  or tickets is raised on all ranks.

Called by the verifier's ranks. It never decides a depth, never makes a random number, never moves a whole row: top_p
on a flat row is the exception, because all tokens of one logit width can be needed.

Sources: as ``dspark.processors``, ``dspark.tickets`` and ``dspark.verify``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dspark.collectives import Group, locate, split_sum
from dspark.dyadic import Float32s, Float64s, Int64s, Row, RowError, RowFault, cool, top_indices
from dspark.exponential import exponentiate
from dspark.logit_edits import EditState
from dspark.philox import Domain
from dspark.processors import Indices, LogitsError, SamplingPolicy
from dspark.tickets import STANDARD, TOTAL, Grid, ResidualIdentityError, TicketError, accepts
from dspark.verify import Draws, Kind, Verdict

# The bound of ``tickets.tickets_from_weights``: |leftover| <= V + total * 2**-36.
_RELATIVE_SLACK_BITS = 36

# The buckets of ``processors``: sums of the same buckets round as they do there.
_BUCKETS_PER_NAT = 64.0
_LAST_BUCKET = 64 * 64


@dataclass(frozen=True, slots=True)
class Shards:
    """Which ids each rank holds: rank r has [bounds[r], bounds[r + 1]), which may be empty.

    Raises:
        ValueError: the bounds do not ascend from 0.
    """

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        ascending = all(low <= high for low, high in zip(self.bounds, self.bounds[1:], strict=False))
        if len(self.bounds) < 2 or self.bounds[0] != 0 or not ascending:
            raise ValueError(f"bounds {self.bounds} must ascend from 0, one more than there are ranks")

    @classmethod
    def even(cls, vocab: int, ranks: int) -> Shards:
        """Shards whose sizes differ by one at most."""
        return cls(tuple(vocab * rank // ranks for rank in range(ranks + 1)))

    @property
    def vocab(self) -> int:
        return self.bounds[-1]

    def of(self, rank: int) -> range:
        """The ids that a rank holds."""
        return range(self.bounds[rank], self.bounds[rank + 1])

    def owner(self, token: int) -> int:
        """The rank that holds a token. Raises ValueError outside the vocabulary."""
        if not 0 <= token < self.vocab:
            raise ValueError(f"token {token} is outside the vocabulary [0, {self.vocab})")
        return bisect_right(self.bounds, token) - 1


# --- rows --------------------------------------------------------------------------------------------------


def target_part(
    group: Group,
    shards: Shards,
    logits: Float32s,
    policy: SamplingPolicy,
    state: EditState | None = None,
    total: int = TOTAL,
) -> Int64s:
    """Tickets int64[n] of this rank's ids: its slice of ``processors.target_row``.

    Collectives: one for the maximum (the only one at temperature 0), one more with edits, one for top_k, four and one
    per rank for top_p, three for the tickets.

    Args:
        logits: float32[n] of one position, this rank's ids.
        policy, state: as for ``processors.target_row``, equal on all ranks.
        total: what the tickets of all ranks sum to; serving uses ``TOTAL``.

    Raises:
        LogitsError: NaN, +inf, or no finite logit on any rank; on all ranks.
        TicketError: a leftover that normalised FP64 weights cannot leave; on all ranks.
        ValueError: the logits are not those of this rank's ids.
    """
    logits, owner, peak = _edited(group, shards, logits, state)
    tickets = np.zeros(logits.size, dtype=np.int64)
    if policy.temperature == 0:
        if owner == group.rank:
            tickets[logits.argmax()] = total
        return tickets
    scaled = np.subtract(logits, peak, dtype=np.float64)
    if policy.temperature != 1.0:
        cool(scaled, policy.temperature)
    kept = _survivors(group, shards, logits, scaled, policy)
    # In id order, because that is the order in which the weights of the whole row are added.
    kept = np.sort(kept[scaled[kept] > -np.inf])
    weights = scaled[kept]
    exponentiate(weights)
    weights /= split_sum(group, weights)
    tickets[kept] = _tickets(group, weights, total)
    return tickets


def greedy_token(group: Group, shards: Shards, logits: Float32s, state: EditState | None = None) -> int:
    """``processors.greedy_token`` over all shards, on all ranks. Raises LogitsError as ``target_part`` does."""
    logits, owner, _ = _edited(group, shards, logits, state)
    place = int(logits.argmax()) if owner == group.rank else 0
    return _from_owner(group, shards.of(owner).start + place, owner)


def _edited(
    group: Group, shards: Shards, logits: Float32s, state: EditState | None
) -> tuple[Float32s, int, float]:
    """This rank's logits after their edits, the first rank that holds the largest logit, and that logit.

    The row is checked before its edits too: a ban must not hide a failed forward pass. An edit looks at its own id
    alone, so the ids of other ranks may hold anything.
    """
    owner, peak = _peak(group, shards, logits)
    if state is None:
        return logits, owner, peak
    held = slice(shards.bounds[group.rank], shards.bounds[group.rank + 1])
    row = np.zeros(shards.vocab, dtype=np.float32)
    row[held] = logits
    edited = state.edit(row)[held]
    return edited, *_peak(group, shards, edited)


def _peak(group: Group, shards: Shards, logits: Float32s) -> tuple[int, float]:
    """The first rank that holds the largest logit, and that logit."""
    held = shards.of(group.rank)
    if logits.shape != (len(held),):
        raise ValueError(f"rank {group.rank} has logits {list(logits.shape)} for ids {held.start}..{held.stop - 1}")
    mine = np.array([logits.max(initial=-np.inf)], dtype=np.float64)
    peaks = group.all_gather(mine).ravel()
    peak = float(peaks.max())
    if peak == -np.inf:
        raise LogitsError("every target logit is -inf: the processors removed all tokens")
    if not np.isfinite(peak):
        raise LogitsError("target logits hold NaN or +inf: the forward pass failed for this request")
    return int(peaks.argmax()), peak


def _survivors(
    group: Group, shards: Shards, logits: Float32s, scaled: Float64s, policy: SamplingPolicy
) -> Indices:
    """Places in this shard that min_p, then top_k, then top_p leave."""
    survivors = np.arange(logits.size)
    if policy.min_p > 0:
        survivors = np.flatnonzero(scaled >= math.log(policy.min_p))
    if 0 < policy.top_k < shards.vocab:
        survivors = survivors[_top_k(group, logits[survivors], policy.top_k)]
    if policy.top_p < 1:
        survivors = survivors[_nucleus(group, scaled[survivors], policy.top_p)]
    return survivors


def _top_k(group: Group, logits: Float32s, how_many: int) -> Indices:
    """Places of this rank's share of the ``how_many`` largest logits, ties to the lowest id.

    The best of every shard contain the best of all; rank order is id order, so the ties of the gathered candidates
    fall as those of the whole row.
    """
    mine = top_indices(logits, how_many) if logits.size else np.zeros(0, dtype=np.intp)
    padded: Float64s = np.full(how_many, -np.inf)
    padded[: mine.size] = logits[mine]
    chosen = top_indices(group.all_gather(padded).ravel(), how_many) - group.rank * how_many
    return mine[chosen[(chosen >= 0) & (chosen < how_many)]]


def _nucleus(group: Group, logits: Float64s, top_p: float) -> Indices:
    """Places of this rank's share of the nucleus: ``processors`` over all shards, bucket for bucket.

    All ranks know the mass of every bucket, so they find the same edge bucket; its logits and weights are gathered,
    and every rank ranks them all.
    """
    weights = logits.copy()
    exponentiate(weights)
    wanted = top_p * split_sum(group, weights)
    buckets = np.minimum(logits * -_BUCKETS_PER_NAT, _LAST_BUCKET).astype(np.intp)
    reached = _bucket_masses(group, buckets, weights).cumsum()
    # Beyond the last bucket where rounding keeps the sum of the buckets below a top_p near 1: all survive then.
    edge = int(reached.searchsorted(wanted))
    if edge:
        wanted -= reached[edge - 1]
    inside = np.flatnonzero(buckets == edge)
    needed = _shortest_prefix(group, logits[inside], weights[inside], wanted)
    return np.concatenate((np.flatnonzero(buckets < edge), inside[needed]))


def _bucket_masses(group: Group, buckets: Indices, weights: Float64s) -> Float64s:
    """float64[buckets]: the mass of each bucket over all ranks.

    The whole row adds a bucket's weights one after the other in id order, and so do the ranks: each goes on from the
    sums of the one before it. Sums of partial sums would round otherwise.
    """
    masses = np.zeros(_LAST_BUCKET + 1)
    every = np.arange(masses.size)
    for source in range(group.size):
        if source == group.rank:
            masses[:] = np.bincount(np.concatenate((every, buckets)), np.concatenate((masses, weights)))
        masses = group.broadcast(masses, source)
    return masses


def _shortest_prefix(group: Group, logits: Float64s, weights: Float64s, wanted: float) -> Indices:
    """Places, among this rank's tokens of the edge bucket, of those that the mass ``wanted`` needs."""
    sizes = group.all_gather(np.array([logits.size])).ravel()
    padded = np.zeros((2, int(sizes.max())))
    padded[:, : logits.size] = logits, weights
    gathered = group.all_gather(padded)
    used = np.arange(padded.shape[1]) < sizes[:, None]
    all_logits, all_weights = gathered[:, 0][used], gathered[:, 1][used]
    ranked = np.argsort(-all_logits, kind="stable")
    needed = int(all_weights[ranked].cumsum().searchsorted(wanted)) + 1
    places = ranked[:needed] - int(sizes[: group.rank].sum())
    return places[(places >= 0) & (places < logits.size)]


def _tickets(group: Group, weights: Float64s, total: int) -> Int64s:
    """Tickets of this rank's normalised weights; the signed leftover goes to the first of the largest weights."""
    tickets = (weights * float(total)).astype(np.int64)
    heaviest = weights.max(initial=0.0)
    # Nonnegative FP64 numbers order as their bit patterns do, and patterns travel with the integers.
    mine = np.array([tickets.sum(), weights.size, np.float64(heaviest).view(np.int64)])
    gathered = group.all_gather(mine)
    sums, survivors, patterns = gathered.T
    leftover = total - int(sums.sum())
    if abs(leftover) > int(survivors.sum()) + (total >> _RELATIVE_SLACK_BITS):
        raise TicketError(f"target weights leave {leftover} of {total} tickets; normalise them in FP64")
    if patterns.argmax() == group.rank:
        tickets[weights.argmax()] += leftover
    return tickets


# --- round -------------------------------------------------------------------------------------------------


def verify_ratio(
    group: Group,
    shards: Shards,
    tickets_at: Callable[[int], Int64s],
    rows: Sequence[Row],
    tokens: Sequence[int],
    anchor_position: int,
    keys: Draws,
    grid: Grid = STANDARD,
) -> Verdict:
    """``verify.verify_ratio`` over all shards; the same verdict on all ranks.

    One collective per drafted token, and two for the last token.

    Args:
        tickets_at: gives this rank's part of target row i, int64[n]; asked in order, on all ranks alike.
        rows, tokens, anchor_position, keys: as in ``verify.verify_ratio``, equal on all ranks.

    Raises:
        RowError, ResidualIdentityError, TicketError: as there, on all ranks.
        ValueError: rows and tokens do not pair up, or a token is outside the vocabulary.
    """
    if len(rows) != len(tokens):
        raise ValueError(f"{len(rows)} rows for {len(tokens)} drafted tokens; each token needs its own row")
    for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        count = row.count(token)
        if count == 0:
            raise RowError(RowFault.ZERO_AT_TOKEN, f"token {token} has no count in its row")
        position = anchor_position + 1 + index
        tickets = tickets_at(index)
        ticket = ticket_of(group, shards, tickets, token)
        if not accepts(keys.draw64(Domain.ACCEPTANCE, position), count, ticket, grid):
            coin = keys.draw64(Domain.CORRECTION, position)
            return Verdict(index, pick_residual(group, shards, tickets, row, coin, grid), Kind.CORRECTION)
    depth = len(rows)
    tickets = tickets_at(depth)
    coin = keys.draw64(Domain.BONUS, anchor_position + 1 + depth)
    return Verdict(depth, pick(group, shards, tickets, coin, grid), Kind.BONUS)


def sample_target_only(
    group: Group, shards: Shards, tickets: Int64s, position: int, keys: Draws, grid: Grid = STANDARD
) -> int:
    """The token at ``position`` when nothing was drafted; ``tickets`` is this rank's part of the row."""
    return pick(group, shards, tickets, keys.draw64(Domain.TARGET_ONLY, position), grid)


def ticket_of(group: Group, shards: Shards, tickets: Int64s, token: int) -> int:
    """The ticket of one token on all ranks; its owner broadcasts it."""
    owner = shards.owner(token)
    place = token - shards.of(owner).start
    return _from_owner(group, int(tickets[place]) if owner == group.rank else 0, owner)


def pick(group: Group, shards: Shards, masses: Int64s, u64: int, grid: Grid = STANDARD) -> int:
    """``tickets.pick`` over all shards: the token that one bounded integer chooses, on all ranks.

    Args:
        masses: int64[n] of this rank's ids.

    Raises:
        TicketError: the masses of all ranks sum to zero.
    """
    totals = group.all_gather(np.array([masses.sum()])).ravel().tolist()
    return _pick(group, shards, masses, totals, u64, grid)


def pick_residual(group: Group, shards: Shards, tickets: Int64s, row: Row, u64: int, grid: Grid = STANDARD) -> int:
    """The correction: a token from max(a_v - K c_v, 0) over all shards, also outside the support of the row.

    Raises:
        ResidualIdentityError: over all ranks the masses of p above q and of q above p differ.
        TicketError: nothing is left, which no rejection can produce.
    """
    masses, below = _residual(tickets, row, shards.of(group.rank), grid)
    gathered = group.all_gather(np.array([masses.sum(), below]))
    above_q, above_p = gathered.sum(axis=0).tolist()
    if above_q != above_p:
        raise ResidualIdentityError(f"p exceeds q by {above_q} tickets but q exceeds p by {above_p}")
    return _pick(group, shards, masses, gathered[:, 0].tolist(), u64, grid)


def _residual(tickets: Int64s, row: Row, held: range, grid: Grid) -> tuple[Int64s, int]:
    """The residual of this rank's ids, and by how much q exceeds p on them."""
    first, last = row.ids.searchsorted((held.start, held.stop)).tolist()
    places = row.ids[first:last] - held.start
    surplus = tickets[places] - row.counts[first:last] * grid.scale
    masses = tickets.copy()
    masses[places] = np.maximum(surplus, 0)
    return masses, -int(np.minimum(surplus, 0).sum())


def _pick(group: Group, shards: Shards, masses: Int64s, totals: list[int], u64: int, grid: Grid) -> int:
    total = sum(totals)
    if total <= 0:
        raise TicketError("nothing to pick from: the masses sum to zero")
    owner, rest = locate(totals, int(u64) * total // grid.coin)
    place = int(masses.cumsum().searchsorted(rest, side="right")) if owner == group.rank else 0
    return _from_owner(group, shards.of(owner).start + place, owner)


def _from_owner(group: Group, value: int, owner: int) -> int:
    """The integer of rank ``owner``, on all ranks."""
    return int(group.broadcast(np.array([value], dtype=np.int64), owner)[0])
