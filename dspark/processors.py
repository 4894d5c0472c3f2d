"""Target logits processors: from raw logits to the row that is sampled and verified.

Purpose: define p. The verifier, the target-only path and the logprobs all go through this one function, so
speculation on and off can differ in nothing.

Invariants:

- Order: logit_bias -> penalties -> bans (min_tokens, bad words, allowed ids, grammar) -> temperature -> min_p ->
  top_k -> top_p. The first three are ``dspark.logit_edits``; each of the others sees what the ones before it left,
  and top_p sees it renormalised.
- Ties are kept in ascending id order; at least one token always survives.
- Temperature 0 is the one-hot row of the lowest-id maximum of the edited logits.
- NaN, +inf and all -inf rows are refused: the request fails, the engine does not.

Called by the verifier's engine, once per verified row. It never draws and never keeps state between rows.

Sources: vLLM's sampler for the order; Nguyen et al. 2407.01082 for min_p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.dyadic import Float32s, Float64s, Int64s, cool, softmax64, top_indices
from dspark.exponential import exponentiate
from dspark.logit_edits import EditState, PolicyError
from dspark.native import kernels
from dspark.tickets import one_hot_tickets, target_tickets, tickets_from_weights

__all__ = ["LogitsError", "PolicyError", "SamplingPolicy", "greedy_token", "process", "target_row"]

Indices = NDArray[np.intp]
Values = NDArray[np.floating]

# Width and range of the buckets of top_p; 64 nats below the maximum a weight is 1e-28.
_BUCKETS_PER_NAT = 64.0
_LAST_BUCKET = 64 * 64


class LogitsError(ValueError):
    """Target logits that define no distribution."""


@dataclass(frozen=True, slots=True)
class SamplingPolicy:
    """How target rows are processed once their logits are edited.

    Fields:
        temperature: finite, >= 0; 0 is greedy.
        top_k: most tokens that survive; 0 switches it off.
        top_p: keep the smallest most-likely set whose mass reaches this, in [0, 1]; 1 switches it off.
        min_p: keep tokens whose probability is at least this share of the largest one, in [0, 1]; 0 switches it off.

    Raises:
        PolicyError: a value out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise PolicyError(f"temperature={self.temperature} must be a finite number >= 0")
        if self.top_k < 0:
            raise PolicyError(f"top_k={self.top_k} must be >= 0 (0 switches it off)")
        if not 0 <= self.top_p <= 1:
            raise PolicyError(f"top_p={self.top_p} must be in [0, 1] (1 switches it off)")
        if not 0 <= self.min_p <= 1:
            raise PolicyError(f"min_p={self.min_p} must be in [0, 1] (0 switches it off)")

    @property
    def truncates(self) -> bool:
        """Whether min_p, top_k or top_p may remove tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def process(logits: Float32s, policy: SamplingPolicy, state: EditState | None = None) -> Float64s:
    """Processed FP64 logits[V], shifted so that the maximum is 0; removed tokens are ``-inf``.

    Args:
        logits: float32[V] of one position, as the target's head gives them.
        state: the edits of this position; None without any.

    Raises:
        LogitsError: NaN, +inf, or no finite logit.
    """
    logits = _edited(logits, state)
    peak = _checked_peak(logits)
    if policy.temperature == 0:
        return _keep(np.zeros(logits.size), np.flatnonzero(logits == peak)[:1])
    # Shift before dividing: a tiny temperature would overflow otherwise.
    scaled = np.subtract(logits, peak, dtype=np.float64)
    if policy.temperature != 1.0:
        cool(scaled, policy.temperature)
    survivors = _survivors(logits, scaled, policy)
    return scaled if survivors is None else _keep(scaled, survivors)


def target_row(logits: Float32s, policy: SamplingPolicy, state: EditState | None = None) -> Int64s:
    """Tickets int64[V] of one position: the p of acceptance, residual, bonus and target-only sampling.

    Equal, ticket for ticket, to ``target_tickets(process(logits, policy, state))``; rows that min_p, top_k and top_p
    leave alone are made in C where it is there, and without the intermediate array where it is not.

    Raises:
        LogitsError: NaN, +inf, or no finite logit.
    """
    if policy.temperature == 0:
        return one_hot_tickets(logits.size, greedy_token(logits, state))
    logits = _edited(logits, state)
    tickets = None if policy.truncates else kernels.target_row(logits, policy.temperature)
    if tickets is not None:
        return tickets
    _checked_peak(logits)
    if policy.truncates or logits.min() == -np.inf:
        return target_tickets(process(logits, policy))
    return tickets_from_weights(softmax64(logits, policy.temperature))


def greedy_token(logits: Float32s, state: EditState | None = None) -> int:
    """The lowest-id maximum of the edited logits: the token of temperature 0. Raises LogitsError."""
    logits = _edited(logits, state)
    _checked_peak(logits)
    return int(logits.argmax())


def _edited(logits: Float32s, state: EditState | None) -> Float32s:
    """The row after its edits. It is checked before them too: a ban must not hide a failed forward pass."""
    if state is None:
        return logits
    _checked_peak(logits)
    return state.edit(logits)


def _checked_peak(logits: Float32s) -> np.floating:
    peak: np.floating = logits.max()
    if peak == -np.inf:
        raise LogitsError("every target logit is -inf: the processors removed all tokens")
    if not np.isfinite(peak):
        raise LogitsError("target logits hold NaN or +inf: the forward pass failed, or a penalty went beyond FP32")
    return peak


def _survivors(logits: Float32s, scaled: Float64s, policy: SamplingPolicy) -> Indices | None:
    """Ids that min_p, then top_k, then top_p leave; None when none is on. Temperature keeps the order top_k needs."""
    survivors: Indices | None = None
    if policy.min_p > 0:
        survivors = np.flatnonzero(scaled >= math.log(policy.min_p))
    if 0 < policy.top_k < logits.size:
        survivors = _narrowed(survivors, top_indices(_among(survivors, logits), policy.top_k))
    if policy.top_p < 1:
        survivors = _narrowed(survivors, _nucleus(_among(survivors, scaled), policy.top_p))
    return survivors


def _among(survivors: Indices | None, values: Values) -> Values:
    return values if survivors is None else values[survivors]


def _narrowed(survivors: Indices | None, chosen: Indices) -> Indices:
    """Ids of the survivors that were chosen by their place among the survivors."""
    return chosen if survivors is None else survivors[chosen]


def _keep(logits: Float64s, survivors: Indices) -> Float64s:
    kept = np.full(logits.size, -np.inf)
    kept[survivors] = logits[survivors]
    return kept


def _nucleus(logits: Values, top_p: float) -> Indices:
    """Indices of the shortest prefix, in (logit descending, id ascending) order, whose mass reaches top_p.

    Buckets of equal logit width find where the mass is reached in one pass; only that bucket is sorted. A
    full sort of 49,152 logits would cost more than the rest of the row.
    """
    weights = np.array(logits, dtype=np.float64)
    exponentiate(weights)
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
