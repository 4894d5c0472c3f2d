"""The closed-form gradient of the draft loss against autograd of the formula as it is written down."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dspark.training.losses import _DraftLoss, block_losses, cross_entropy_weights, position_weights

ROWS, VOCAB = 12, 9


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def problem() -> dict[str, Tensor]:
    """float64 rows: teacher mass outside the draft vocabulary, some labels outside it, some weights zero."""
    g = generator()
    whole = torch.softmax(2 * torch.randn(ROWS, VOCAB + 4, generator=g, dtype=torch.float64), dim=-1)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=g)
    labels[[1, 7]] = -1
    weights = torch.rand(ROWS, generator=g, dtype=torch.float64)
    weights[4] = 0
    return {
        "logits": 2 * torch.randn(ROWS, VOCAB, generator=g, dtype=torch.float64),
        "confidence": torch.randn(ROWS, generator=g, dtype=torch.float64),
        "teacher": whole[:, :VOCAB],
        "labels": labels,
        "weights": weights,
        "ce_weights": torch.tensor([0.1, 0.6] * (ROWS // 2), dtype=torch.float64),
    }


def formula(
    logits: Tensor, confidence: Tensor, teacher: Tensor, labels: Tensor, weights: Tensor, ce_weights: Tensor
) -> Tensor:
    """c CE + (1 - c) L1 + BCE(confidence, 1 - L1 / 2), weighted and summed, for autograd."""
    draft = torch.softmax(logits, dim=-1)
    l1 = (draft - teacher).abs().sum(-1) + (1 - teacher.sum(-1))
    known = labels >= 0
    cross = F.cross_entropy(logits, labels.clamp(min=0), reduction="none") * known
    acceptance = (1 - l1 / 2).detach()
    chance = torch.sigmoid(confidence)
    entropy = -(acceptance * chance.log() + (1 - acceptance) * (1 - chance).log())
    return (weights * (ce_weights * cross + (1 - ce_weights) * l1 + entropy)).sum()


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_loss_and_gradients_equal_autograd(scale: float) -> None:
    p = problem()
    logits, confidence = p["logits"].requires_grad_(), p["confidence"].requires_grad_()
    expected = formula(**p)
    gradients = torch.autograd.grad(scale * expected, (logits, confidence))
    losses = block_losses(**p)
    ours = torch.autograd.grad(scale * losses.loss, (logits, confidence))
    torch.testing.assert_close(losses.loss, expected, rtol=1e-10, atol=1e-12)
    for mine, theirs in zip(ours, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_gradcheck() -> None:
    p = problem()
    outside = 1 - p["teacher"].sum(-1)

    def total(logits: Tensor) -> Tensor:
        apply = cast(Callable[..., tuple[Tensor, Tensor, Tensor]], _DraftLoss.apply)
        return apply(logits, p["teacher"], outside, p["labels"], p["weights"], p["ce_weights"])[0]

    assert torch.autograd.gradcheck(total, (p["logits"].requires_grad_(),))


def test_without_a_confidence_head() -> None:
    p = problem()
    with_head = block_losses(**p)
    without = block_losses(**(p | {"confidence": None}))  # type: ignore[arg-type]
    entropy = F.binary_cross_entropy_with_logits(p["confidence"], with_head.acceptance, reduction="none")
    torch.testing.assert_close(without.loss + (p["weights"] * entropy).sum(), with_head.loss)


def test_acceptance_is_the_overlap_of_draft_and_target() -> None:
    """1 - L1 / 2 = sum of min(p, q) over the draft vocabulary: what can never be drafted is never accepted."""
    p = problem()
    overlap = torch.minimum(torch.softmax(p["logits"], -1), p["teacher"]).sum(-1)
    torch.testing.assert_close(block_losses(**p).acceptance, overlap)


def test_mass_outside_bounds_the_acceptance() -> None:
    p = problem()
    inside = p["teacher"].sum(-1)
    assert (inside < 0.95).any()
    best = block_losses(**(p | {"logits": p["teacher"].log()})).acceptance
    torch.testing.assert_close(best, inside)


def test_a_perfect_draft_has_no_l1_and_full_acceptance() -> None:
    p = problem()
    teacher = torch.softmax(p["logits"], -1)
    losses = block_losses(p["logits"], None, teacher, p["labels"].fill_(-1), p["weights"], p["ce_weights"])
    torch.testing.assert_close(losses.acceptance, torch.ones(ROWS, dtype=torch.float64))
    assert losses.loss.abs() < 1e-12


def test_labels_outside_the_draft_vocabulary_have_no_cross_entropy() -> None:
    losses = block_losses(**problem())
    assert losses.cross_entropy[[1, 7]].tolist() == [0, 0]
    assert (losses.cross_entropy[[0, 2, 3]] > 0).all()
    assert not losses.argmax_hit[[1, 7]].any()


def test_argmax_hits() -> None:
    p = problem()
    labels = p["logits"].argmax(-1)
    labels[3] = (labels[3] + 1) % VOCAB
    assert block_losses(**(p | {"labels": labels})).argmax_hit.tolist() == [i != 3 for i in range(ROWS)]


def test_a_confident_mistake_stays_finite_in_fp32() -> None:
    logits = torch.tensor([[200.0, -200.0]], requires_grad=True)
    teacher, label, share = torch.tensor([[0.0, 1.0]]), torch.tensor([1]), torch.tensor([0.1])
    losses = block_losses(logits, None, teacher, label, torch.ones(1), share)
    (gradient,) = torch.autograd.grad(losses.loss, logits)
    assert losses.loss.isfinite()
    assert gradient.isfinite().all()


def test_position_weights_decay_and_sum_to_one() -> None:
    valid = torch.ones(2, 3, 5, dtype=torch.bool)
    valid[0, 1, 3:] = False
    weights = position_weights(valid).view(2, 3, 5)
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
    assert weights[0, 1, 3:].tolist() == [0, 0]
    assert float(weights[1, 0, 3] / weights[1, 0, 0]) == pytest.approx(math.exp(-3 / 4))


def test_position_weights_of_nothing_are_zero() -> None:
    assert position_weights(torch.zeros(1, 2, 3, dtype=torch.bool)).tolist() == [0] * 6


def test_greedy_answers_weigh_their_labels_more() -> None:
    weights = cross_entropy_weights(torch.tensor([True, False]), torch.ones(2, 3, 2, dtype=torch.bool))
    torch.testing.assert_close(weights, torch.tensor([0.6] * 6 + [0.1] * 6))
