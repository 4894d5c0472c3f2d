"""The serving drafter computes what the training drafter was trained to compute, whatever its cache held before."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from dspark.models.config import from_hf
from dspark.models.drafter import EMBED, DrafterNetwork
from dspark.models.packed_blocks import PackedBlockAttention
from dspark.proof.tiny_pair import drafter_config, drafter_weights, hf_config, target_weights
from dspark.training.dataset import Batch
from dspark_workers.slots import ContextFullError, DraftSlots

TARGET = from_hf(hf_config())
CONFIG = drafter_config(TARGET)
WEIGHTS = drafter_weights(CONFIG) | {EMBED: target_weights(TARGET)["model.embed_tokens.weight"]}


def serving(slots: int = 3, length: int = 32) -> DraftSlots:
    return DraftSlots(DrafterNetwork(CONFIG, WEIGHTS), slots, length)


def training_hidden(taps: torch.Tensor, anchors: list[int], tokens: list[int]) -> torch.Tensor:
    """Hidden rows of blocks [A, B, d] by the training path, all anchors of one sequence at once."""
    network = DrafterNetwork(CONFIG, WEIGHTS, linear=lambda w: lambda x: F.linear(x, w))
    batch = Batch(taps[None], torch.tensor([anchors]), *[torch.empty(0)] * 5)
    context = network.context_rows(batch.taps)
    places = torch.arange(len(taps))[None]
    kv = [network.context_kv(i, context, places) for i in range(CONFIG.layers)]
    positions = batch.anchors[:, :, None] + torch.arange(CONFIG.block_size)
    ids = torch.full(positions.shape, CONFIG.mask_token_id)
    ids[0, :, 0] = torch.tensor(tokens)
    return network.backbone(ids, positions, PackedBlockAttention(kv, batch.anchors))[0]


def test_serving_blocks_equal_training_blocks() -> None:
    taps = torch.randn(20, CONFIG.tap_width, generator=torch.Generator().manual_seed(3))
    anchors, tokens = [1, 7, 8, 19], [5, 17, 200, 31]
    expected = training_hidden(taps, anchors, tokens)
    state = serving()
    for expected_block, anchor, token in zip(expected, anchors, tokens, strict=True):
        state.open(1)
        state.extend(1, 0, taps[:anchor])
        torch.testing.assert_close(state.hidden([1], [token])[0], expected_block, atol=2e-5, rtol=1e-4)


def test_the_anchor_row_sits_at_its_own_position() -> None:
    """Shifting the anchor by one must change the block: a drafter seeded one position early loses its acceptance."""
    taps = torch.randn(9, CONFIG.tap_width, generator=torch.Generator().manual_seed(4))
    right, early = training_hidden(taps, [8], [5]), training_hidden(taps, [7], [5])
    assert not torch.allclose(right, early, atol=1e-3)


def test_rejected_block_rows_are_rewritten_before_they_are_read() -> None:
    taps = torch.randn(12, CONFIG.tap_width, generator=torch.Generator().manual_seed(5))
    state = serving()
    state.open(0)
    state.extend(0, 0, taps[:4])
    state.hidden([0], [9])  # leaves block rows at positions 4..7
    state.extend(0, 4, taps[4:6])  # two of them were accepted
    again = state.hidden([0], [10])
    fresh = serving()
    fresh.open(2)
    fresh.extend(2, 0, taps[:6])
    torch.testing.assert_close(again, fresh.hidden([2], [10]))


def test_a_reopened_slot_remembers_nothing() -> None:
    taps = torch.randn(8, CONFIG.tap_width, generator=torch.Generator().manual_seed(6))
    state = serving()
    state.open(0)
    state.extend(0, 0, 100 * torch.ones(20, CONFIG.tap_width))
    state.open(0)
    state.extend(0, 0, taps)
    fresh = serving()
    fresh.extend(0, 0, taps)
    torch.testing.assert_close(state.hidden([0], [1]), fresh.hidden([0], [1]))


def test_a_batch_equals_its_requests_one_by_one() -> None:
    taps = torch.randn(16, CONFIG.tap_width, generator=torch.Generator().manual_seed(7))
    state = serving()
    for slot, end in ((0, 3), (1, 16), (2, 9)):
        state.open(slot)
        state.extend(slot, 0, taps[:end])
    together = state.hidden([2, 0, 1], [4, 5, 6])
    for row, (slot, anchor) in enumerate(((2, 4), (0, 5), (1, 6))):
        torch.testing.assert_close(together[row], state.hidden([slot], [anchor])[0], atol=2e-5, rtol=1e-4)


def test_a_full_slot_refuses_more_context() -> None:
    state = serving(length=8)
    state.extend(0, 0, torch.zeros(8, CONFIG.tap_width))
    with pytest.raises(ContextFullError, match="longer than 8"):
        state.extend(0, 8, torch.zeros(1, CONFIG.tap_width))
    assert state.context_end(0) == 8
    assert state.hidden([0], [1]).isfinite().all()


def test_a_gap_in_the_context_is_refused() -> None:
    with pytest.raises(AssertionError, match="ends at 0"):
        serving().extend(0, 2, torch.zeros(1, CONFIG.tap_width))
