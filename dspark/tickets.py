"""Target rows as integer tickets: acceptance, residual and choice without a float in any decision.

Purpose: the target distribution after all processors becomes integers a_v that sum to 2**60. From there on a
round is integer arithmetic, so two ranks, two machines and the oracle cannot disagree.

Invariants:

- a_v >= 0, sum a_v = ``TOTAL``, a_v = 0 for every removed token; total variation to FP64 softmax is at most
  V / TOTAL.
- Acceptance is the strict test ``U * c * K < a * 2**64``, K = TOTAL / MASS. ``<=`` would emit removed tokens.
- The residual covers the whole vocabulary, also outside a sparse support, and its two sides agree exactly.
- A token of mass zero cannot be picked.

Called by ``dspark.verify`` and ``dspark.processors``. It never makes a random number and never knows a lane.

Sources: Leviathan et al. 2211.17192 and Chen et al. 2302.01318 for the rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dspark.dyadic import MASS, Float64s, Int64s, Row, softmax64

TOTAL = 1 << 60

# FP64 normalisation is off by about 2**-52 of the total; 2**-36 leaves room for summation order.
_RELATIVE_SLACK_BITS = 36


class TicketError(ValueError):
    """A target row or a mass vector that cannot be a distribution."""


class ResidualIdentityError(RuntimeError):
    """sum (a - Kc)+ differs from sum (Kc - a)+: the total of p or of q is wrong. Never continue from here."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The integers that a decision is made in: mass of q, total of p, and number of coin values.

    Serving uses ``STANDARD`` and nothing else. Small grids make exact enumeration of this code possible.
    """

    mass: int
    total: int
    coin: int

    def __post_init__(self) -> None:
        if self.total % self.mass:
            raise ValueError(f"total {self.total} must be a multiple of mass {self.mass}")

    @property
    def scale(self) -> int:
        """K: how many target tickets one proposal count is worth."""
        return self.total // self.mass


STANDARD = Grid(mass=MASS, total=TOTAL, coin=1 << 64)


def target_tickets(logits: Float64s, total: int = TOTAL) -> Int64s:
    """Tickets int64[V] of processed FP64 logits[V]; ``-inf`` marks a removed token.

    Removed tokens take no part in any sum, so the row does not depend on how many there are.

    Raises:
        TicketError: NaN, +inf, no survivor, or a leftover that normalised FP64 weights cannot leave.
    """
    if logits.size == 0 or not math.isfinite(float(logits.max())):
        raise TicketError("target logits hold NaN or +inf, or remove every token")
    if logits.min() > -np.inf:
        return tickets_from_weights(softmax64(logits), total)
    survivors = np.flatnonzero(logits > -np.inf)
    tickets = np.zeros(logits.size, dtype=np.int64)
    tickets[survivors] = tickets_from_weights(softmax64(logits[survivors]), total)
    return tickets


def tickets_from_weights(weights: Float64s, total: int = TOTAL) -> Int64s:
    """Tickets int64[V] of normalised FP64 weights: floor, and the signed leftover to the lowest-id maximum.

    The leftover is often negative after top-k or a mask: at 2**60 the rounding of the normalisation is
    hundreds of tickets and few fractional parts offset it. The maximum holds at least total / V: it stays
    positive.

    Raises:
        TicketError: |leftover| > V + total * 2**-36, or a weight that is NaN, infinite or negative.
    """
    tickets = _floors(weights, total)
    leftover = total - int(tickets.sum())
    if abs(leftover) > weights.size + (total >> _RELATIVE_SLACK_BITS):
        raise TicketError(f"target weights leave {leftover} of {total} tickets; normalise them in FP64")
    tickets[weights.argmax()] += leftover
    return tickets


def _floors(weights: Float64s, total: int) -> Int64s:
    # The bound on the maximum also catches NaN, and keeps the conversion inside int64.
    if weights.size == 0 or not (weights.min() >= 0 and weights.max() <= 2):
        raise TicketError("target weights must be finite, nonnegative and normalised")
    tickets = np.empty(weights.size, dtype=np.int64)
    np.multiply(weights, float(total), out=tickets, casting="unsafe", dtype=np.float64)
    return tickets


def one_hot_tickets(vocab: int, token: int) -> Int64s:
    """The row of temperature 0: tickets int64[vocab] with the whole total on one token."""
    tickets = np.zeros(vocab, dtype=np.int64)
    tickets[token] = TOTAL
    return tickets


def accepts(u64: int, count: int, ticket: int, grid: Grid = STANDARD) -> bool:
    """Whether a drafted token with ``count`` of q and ``ticket`` of p survives the coin; min(1, p/q) exactly.

    ``int`` first: the products need about 124 bits and numpy scalars would wrap in silence.
    """
    return int(u64) * int(count) * grid.scale < int(ticket) * grid.coin


def residual(tickets: Int64s, row: Row, grid: Grid = STANDARD) -> Int64s:
    """max(a_v - K c_v, 0) for every token of the vocabulary, int64[V].

    Raises:
        ResidualIdentityError: the masses of p above q and of q above p differ.
    """
    masses = tickets.copy()
    surplus = tickets[row.ids] - row.counts * grid.scale
    masses[row.ids] = np.maximum(surplus, 0)
    above = int(masses.sum())
    below = -int(np.minimum(surplus, 0).sum())
    if above != below:
        raise ResidualIdentityError(f"p exceeds q by {above} tickets but q exceeds p by {below}")
    return masses


def pick(masses: Int64s, u64: int, grid: Grid = STANDARD) -> int:
    """The token id that one bounded integer chooses: W = U * total >> 64 against the CDF, ids ascending.

    A strictly-greater search never reaches a token of mass zero; a probability is off by less than 2**-64.

    Raises:
        TicketError: the masses sum to zero, which no rejection can produce in exact arithmetic.
    """
    cumulative = masses.cumsum()
    total = int(cumulative[-1])
    if total <= 0:
        raise TicketError("nothing to pick from: the masses sum to zero")
    chosen = int(u64) * total // grid.coin
    return int(cumulative.searchsorted(chosen, side="right"))
