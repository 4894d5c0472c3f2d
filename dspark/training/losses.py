"""The DSpark losses and their figures.

    loss = c * CE(label) + (1 - c) * sum_v |p_draft - p_target| + 1.0 * BCE(confidence, 1 - L1 / 2)

each position weighted by exp(-j / 4) and the sum divided by the sum of the weights. c is 0.1 on sampled answers
(DeepSpec's published recipe) and 0.6 on greedy ones: there the label is the target's argmax, and whether the draft's
argmax equals it is all that counts. The teacher's row is known on the draft vocabulary only through its log-sum-exp;
target mass outside the draft vocabulary can never be drafted, so it is a constant of the L1 term and lowers the best
reachable acceptance.

Logits are the big tensors here [rows, draft vocab]. The gradient of CE + L1 has a closed form, so it is computed in the
forward pass, in place, instead of letting autograd keep half a dozen tensors of that size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CE_WEIGHT_SAMPLED = 0.1
CE_WEIGHT_GREEDY = 0.6
CONFIDENCE_WEIGHT = 1.0
DECAY = 4.0


@dataclass(frozen=True, slots=True)
class BlockLosses:
    """loss is a scalar with a gradient; the rest are detached, per row [rows]."""

    loss: Tensor
    cross_entropy: Tensor
    acceptance: Tensor
    argmax_hit: Tensor


class _DraftLoss(torch.autograd.Function):
    """sum_r w_r (c_r * CE_r + (1 - c_r) * L1_r) with its gradient with respect to the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        teacher: Tensor,
        outside: Tensor,
        labels: Tensor,
        weights: Tensor,
        ce_weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        known = labels >= 0
        index = labels.clamp(min=0)[:, None]
        draft = torch.softmax(logits, dim=-1)
        label_probability = draft.gather(1, index).squeeze(1)
        cross_entropy = -label_probability.clamp(min=1e-20).log() * known
        difference = draft - teacher
        l1 = difference.abs().sum(dim=-1) + outside
        signs = difference.sign_()
        mean_sign = (signs * draft).sum(dim=-1, keepdim=True)
        gradient = signs.sub_(mean_sign).mul_(draft).mul_((1 - ce_weights)[:, None])
        known_weights = (known * ce_weights)[:, None]
        gradient.addcmul_(draft, known_weights).scatter_add_(1, index, -known_weights)
        ctx.save_for_backward(gradient.mul_(weights[:, None]))
        total = (weights * (ce_weights * cross_entropy + (1 - ce_weights) * l1)).sum()
        ctx.mark_non_differentiable(cross_entropy, l1)
        return total, cross_entropy, l1

    @staticmethod
    def backward(ctx: Any, total: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * total if float(total) != 1.0 else gradient, None, None, None, None, None


def position_weights(valid: Tensor) -> Tensor:
    """Decay weights exp(-j / DECAY) of valid [S, A, B] rows, flattened and normalised to sum one."""
    decay = torch.exp(-torch.arange(valid.shape[-1], dtype=torch.float32) / DECAY)
    weights = (valid.float() * decay).flatten()
    return weights / weights.sum().clamp(min=1e-9)


def cross_entropy_weights(greedy: Tensor, valid: Tensor) -> Tensor:
    """The share of CE per row, flattened: greedy [S] says which sequences were answered at temperature 0."""
    per_sequence = torch.where(greedy, CE_WEIGHT_GREEDY, CE_WEIGHT_SAMPLED)
    return per_sequence[:, None, None].expand(valid.shape).reshape(-1)


def block_losses(
    logits: Tensor,
    confidence: Tensor | None,
    teacher: Tensor,
    labels: Tensor,
    weights: Tensor,
    ce_weights: Tensor,
) -> BlockLosses:
    """Losses of rows of blocks.

    logits [rows, Vd] after the Markov bias; confidence logits [rows]; teacher probabilities [rows, Vd] (their sum may
    be below one); labels int64 [rows] as draft ids, -1 where the label is outside the draft vocabulary; weights and
    ce_weights [rows].
    """
    outside = (1.0 - teacher.sum(dim=-1)).clamp(min=0)
    total, cross_entropy, l1 = _DraftLoss.apply(  # type: ignore[no-untyped-call]
        logits, teacher, outside, labels, weights, ce_weights
    )
    acceptance = (1.0 - 0.5 * l1).clamp(0, 1)
    if confidence is not None:
        entropy = F.binary_cross_entropy_with_logits(confidence, acceptance, reduction="none")
        total = total + CONFIDENCE_WEIGHT * (weights * entropy).sum()
    hit = logits.detach().argmax(dim=-1) == labels
    return BlockLosses(total, cross_entropy, acceptance, hit)
