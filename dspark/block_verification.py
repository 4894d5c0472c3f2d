"""Block verification: the ``ratio`` lane's other rule, which judges a proposal as a whole.

Purpose: token verification throws a draft away for its own ratio p/q alone. Over a whole proposal the target is just
as well served by weighing prefixes: a draft that q overrates is paid for by one before it that q underrates. The
committed tokens follow the same law, and more of them come from a round.

The rule, in the integers of ``dspark.tickets`` (N tickets of p, M counts of q, K = N / M):

- The weight of a prefix is w_0 = N and w_(i+1) = min(N, floor(w_i a / (K c))) for the token behind it, with a its
  tickets and c its counts. Read w/N as "this much of the prefix's own probability under q may be kept".
- Let A_i = sum of K c_v w_(i+1)(v) over row i's support: what may still be kept by going on. With R_i = w_i N - A_i,
  a prefix of i drafts is the longest kept with chance R_i / (R_i + N^2 - w_i N), the whole proposal with w_depth / N;
  prefixes are tried from the longest down, each with a number of its own, and 0 drafts always are.
- The token behind the kept prefix has mass w_i a_v - K c_v w_(i+1)(v), over the whole vocabulary.

Why it is exact, for any floor: call P_i the chance that at least i drafts are kept, given the first i. From the
longest down, P_i = A_i/N^2 + (1 - A_i/N^2) R_i / (R_i + N^2 - w_i N) = w_i / N. So a prefix x is drafted and kept
with chance q(x) w_i / N, and going on to v has q(x) K c_v w_(i+1)(v) / N^2 by a draft plus
q(x) (w_i a_v - K c_v w_(i+1)(v)) / N^2 by the correction: together q(x) w_i / N times a_v / N, which is p. Nothing
in it asks w for more than K c w' <= w a, and a floor keeps that.

Invariants:

- No float, and no integer above 2^120: w, a <= 2^60, and K c w' <= w a.
- The chance of i drafts is at most w_i / N; so a prefix whose number is not below that needs no sum.
- Numbers of a round are fresh (the round is in the key): a later draft has a say in an earlier one's fate, so
  numbers that an earlier round has used would bias it.
- One draft is judged as in ``verify.verify_ratio``, up to the floor: within 2^-60.

Called by the verifier's engine for the ``ratio`` lane. It needs every row of the proposal before it decides, where
``verify_ratio`` stops at the first rejection.

Source: Sun et al., "Block verification accelerates speculative decoding" (2403.10444); the integer form and the proof
for it are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from dspark.dyadic import Int64s, Row, RowError, RowFault
from dspark.native import kernels
from dspark.philox import Domain
from dspark.tickets import STANDARD, Grid, ResidualIdentityError, TicketError, pick
from dspark.verify import Draws, Kind, Verdict

__all__ = ["verify_block"]


@dataclass(frozen=True)
class Branch:
    """What may follow a prefix of drafts: the prefix's weight, and the target and proposal rows behind it."""

    weight: int
    tickets: Int64s
    row: Row
    grid: Grid

    def extended(self, token: int) -> int:
        """The weight of the prefix with a drafted token behind it. Raises RowError ``zero_at_token``."""
        count = self.row.count(token)
        if count == 0:
            raise RowError(RowFault.ZERO_AT_TOKEN, f"token {token} has no count in its row")
        return self._weight_with(int(self.tickets[token]), count)

    def keeps(self, u64: int) -> bool:
        """Whether one number keeps this prefix, given that no longer one was kept."""
        n, total, coin = self.grid.total, self.grid.total**2, self.grid.coin
        if u64 * n >= self.weight * coin:
            return False  # the chance is at most w / N: no need for the sum
        stays = self.weight * n - self._going_on
        return u64 * (total - self._going_on) < stays * coin

    def correction(self, u64: int) -> int:
        """The token that one number chooses among the masses w a - K c w', ids ascending.

        Raises:
            ResidualIdentityError: p or q has a wrong total.
        """
        cumulative = self.tickets.cumsum()
        if int(cumulative[-1]) != self.grid.total or int(self.row.counts.sum()) != self.grid.mass:
            raise ResidualIdentityError(f"p holds {cumulative[-1]} tickets and q {self.row.counts.sum()} counts")
        mass = self.weight * self.grid.total - self._going_on
        if mass <= 0:
            raise TicketError("nothing to pick from: every draft behind this prefix is kept")
        chosen = u64 * mass // self.grid.coin
        # Outside the support masses are w a: there the cumulative tickets serve, less what supported ids below gave.
        given = 0
        ids = self.row.ids
        for token, share, ticket, below in zip(
            ids.tolist(), self._shares, self.tickets[ids].tolist(), cumulative[ids].tolist(), strict=True
        ):
            above = self.weight * below - given
            if chosen < above - self.weight * ticket:
                break
            if chosen < above - share:
                return int(token)
            given += share
        return int(cumulative.searchsorted((chosen + given) // self.weight, side="right"))

    def _weight_with(self, ticket: int, count: int) -> int:
        return min(self.grid.total, self.weight * ticket // (self.grid.scale * count))

    @cached_property
    def _shares(self) -> list[int]:
        """K c w' of every supported token: what is kept by going on to it."""
        if self._native_shares is not None:
            return [low | high << 64 for low, high in self._native_shares[:-1].tolist()]
        scale = self.grid.scale
        pairs = zip(self.tickets[self.row.ids].tolist(), self.row.counts.tolist(), strict=True)
        return [scale * count * self._weight_with(ticket, count) for ticket, count in pairs]

    @cached_property
    def _going_on(self) -> int:
        if self._native_shares is not None:
            low, high = self._native_shares[-1].tolist()
            return int(low | high << 64)
        return sum(self._shares)

    @cached_property
    def _native_shares(self) -> kernels.Uint64s | None:
        """The shares and their sum in two words each; None where Python's integers have to do it."""
        if self.grid != STANDARD:
            return None
        return kernels.block_shares(self.tickets, self.row.ids, self.row.counts, self.weight)


def verify_block(
    tickets_at: Callable[[int], Int64s],
    rows: Sequence[Row],
    tokens: Sequence[int],
    anchor_position: int,
    keys: Draws,
    grid: Grid = STANDARD,
) -> Verdict:
    """Judge a proposal as a whole; arguments and result as ``verify.verify_ratio`` has them.

    Raises:
        RowError: ``zero_at_token`` when a drafted token has no count.
        ResidualIdentityError: p or q has a wrong total.
    """
    if len(rows) != len(tokens):
        raise ValueError(f"{len(rows)} rows for {len(tokens)} drafted tokens; each token needs its own row")
    depth, branches, weight = len(rows), [], grid.total
    for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        branches.append(Branch(weight, tickets_at(index), row, grid))
        weight = branches[-1].extended(token)
        if weight == 0:
            break  # nothing longer can be kept, so the rows behind it need not be made
    else:
        if _whole(weight, anchor_position + depth, keys, grid, depth):
            coin = keys.draw64(Domain.BONUS, anchor_position + 1 + depth)
            return Verdict(depth, pick(tickets_at(depth), coin, grid), Kind.BONUS)
    kept = _longest(branches, anchor_position, keys)
    coin = keys.draw64(Domain.CORRECTION, anchor_position + 1 + kept)
    return Verdict(kept, branches[kept].correction(coin), Kind.CORRECTION)


def _whole(weight: int, last_position: int, keys: Draws, grid: Grid, depth: int) -> bool:
    """Whether the whole proposal is kept, which has chance w / N; no drafts are always kept."""
    return depth == 0 or keys.draw64(Domain.ACCEPTANCE, last_position) * grid.total < weight * grid.coin


def _longest(branches: Sequence[Branch], anchor_position: int, keys: Draws) -> int:
    """The longest prefix that its number keeps, short of the whole; prefix i has the number of draft i's position."""
    for kept in range(len(branches) - 1, 0, -1):
        if branches[kept].keeps(keys.draw64(Domain.ACCEPTANCE, anchor_position + kept)):
            return kept
    return 0
