"""Target logits processors: from raw logits to the row that is sampled and verified.

Purpose: define p. The verifier, the target-only path and the logprobs all go through this one function, so
speculation on and off can differ in nothing.

Invariants:

- Order: (edits of logits) -> temperature -> top_k -> top_p. top_p sees the row that top_k left, renormalised.
- Ties are kept in ascending id order; at least one token always survives.
- Temperature 0 is the one-hot row of the lowest-id maximum.
- NaN, +inf and all -inf rows are refused: the request fails, the engine does not.

Called by the verifier's engine, once per verified row. It never draws and never keeps state between rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.dyadic import Float32s, Float64s, Int64s, cool, softmax64, top_indices
from dspark.tickets import one_hot_tickets, target_tickets, tickets_from_weights

Indices = NDArray[np.intp]

# Width and range of the buckets of top_p; 64 nats below the maximum a weight is 1e-28.
_BUCKETS_PER_NAT = 64.0
_LAST_BUCKET = 64 * 64


class PolicyError(ValueError):
    """A sampling parameter outside its range; the message names the field."""


class LogitsError(ValueError):
    """Target logits that define no distribution."""


@dataclass(frozen=True, slots=True)
class SamplingPolicy:
    """How target rows are processed.

    Fields:
        temperature: finite, >= 0; 0 is greedy.
        top_k: most tokens that survive; 0 switches it off.
        top_p: keep the smallest most-likely set whose mass reaches this, in [0, 1]; 1 switches it off.

    Raises:
        PolicyError: a value out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise PolicyError(f"temperature={self.temperature} must be a finite number >= 0")
        if self.top_k < 0:
            raise PolicyError(f"top_k={self.top_k} must be >= 0 (0 switches it off)")
        if not 0 <= self.top_p <= 1:
            raise PolicyError(f"top_p={self.top_p} must be in [0, 1] (1 switches it off)")

    @property
    def truncates(self) -> bool:
        """Whether top_k or top_p may remove tokens."""
        return self.top_k > 0 or self.top_p < 1


def process(logits: Float32s, policy: SamplingPolicy) -> Float64s:
    """Processed FP64 logits[V], shifted so that the maximum is 0; removed tokens are ``-inf``.

    Args:
        logits: float32[V] of one position, as the target's head gives them.

    Raises:
        LogitsError: NaN, +inf, or no finite logit.
    """
    # Processors that edit logits (bias, penalties, banned ids, grammar) belong here, before temperature.
    peak = _checked_peak(logits)
    if policy.temperature == 0:
        return _keep(np.zeros(logits.size), np.flatnonzero(logits == peak)[:1])
    # Shift before dividing: a tiny temperature would overflow otherwise.
    scaled = np.subtract(logits, peak, dtype=np.float64)
    if policy.temperature != 1.0:
        cool(scaled, policy.temperature)
    survivors = _survivors(logits, scaled, policy)
    return scaled if survivors is None else _keep(scaled, survivors)


def target_row(logits: Float32s, policy: SamplingPolicy) -> Int64s:
    """Tickets int64[V] of one position: the p of acceptance, residual, bonus and target-only sampling.

    Equal, ticket for ticket, to ``target_tickets(process(logits, policy))``; rows that lose no token skip the
    intermediate array, because fresh memory costs as much as the exponentials.
    """
    _checked_peak(logits)
    if policy.temperature == 0:
        return one_hot_tickets(logits.size, int(logits.argmax()))
    if policy.truncates or logits.min() == -np.inf:
        return target_tickets(process(logits, policy))
    return tickets_from_weights(softmax64(logits, policy.temperature))


def _checked_peak(logits: Float32s) -> np.floating:
    peak: np.floating = logits.max()
    if peak == -np.inf:
        raise LogitsError("every target logit is -inf: the processors removed all tokens")
    if not np.isfinite(peak):
        raise LogitsError("target logits hold NaN or +inf: the forward pass failed for this request")
    return peak


def _survivors(logits: Float32s, scaled: Float64s, policy: SamplingPolicy) -> Indices | None:
    """Ids that top_k, then top_p leave; None when neither is on. Temperature keeps the order top_k needs."""
    survivors: Indices | None = None
    if 0 < policy.top_k < logits.size:
        survivors = top_indices(logits, policy.top_k)
    if policy.top_p < 1:
        if survivors is None:
            return _nucleus(scaled, policy.top_p)
        survivors = survivors[_nucleus(scaled[survivors], policy.top_p)]
    return survivors


def _keep(logits: Float64s, survivors: Indices) -> Float64s:
    kept = np.full(logits.size, -np.inf)
    kept[survivors] = logits[survivors]
    return kept


def _nucleus(logits: Float64s, top_p: float) -> Indices:
    """Indices of the shortest prefix, in (logit descending, id ascending) order, whose mass reaches top_p.

    Buckets of equal logit width find where the mass is reached in one pass; only that bucket is sorted. A
    full sort of 49,152 logits would cost more than the rest of the row.
    """
    weights = np.exp(logits)
    wanted = top_p * weights.sum()
    depths = logits * -_BUCKETS_PER_NAT
    buckets = np.minimum(depths, _LAST_BUCKET, out=depths).astype(np.intp)
    reached = np.bincount(buckets, weights=weights).cumsum()
    edge = min(int(reached.searchsorted(wanted)), reached.size - 1)
    if edge:
        wanted -= reached[edge - 1]
    inside = np.flatnonzero(buckets == edge)
    ranked = inside[np.argsort(-logits[inside], kind="stable")]
    needed = int(weights[ranked].cumsum().searchsorted(wanted)) + 1
    return np.concatenate((np.flatnonzero(buckets < edge), ranked[:needed]))
