"""The drafter checkpoint and the network's heads. (Blocks against the training path: tests/workers/test_slots.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from dspark.models.config import ModelConfigError, from_hf
from dspark.models.drafter import EMBED, DrafterCheckpoint, DrafterNetwork, check_shapes, expected_shapes
from dspark.proof.tiny_pair import draft_ids, drafter_config, drafter_weights, hf_config, target_weights
from dspark.training.export import write_checkpoint
from dspark_workers.slots import DraftSlots

TARGET = from_hf(hf_config())
EMBEDDING = target_weights(TARGET)["model.embed_tokens.weight"]


def write(directory: Path, **changes: object) -> Path:
    config = drafter_config(TARGET, **changes)
    write_checkpoint(directory, config, drafter_weights(config), draft_ids(config), "# card\n")
    return directory


def rewrite(directory: Path, **tensors: Tensor | None) -> Path:
    """Replace (or with None remove) tensors of a written checkpoint."""
    file = str(directory / "model.safetensors")
    kept = load_file(file) | {name: t for name, t in tensors.items() if t is not None}
    save_file({n: t for n, t in kept.items() if tensors.get(n, t) is not None}, file)
    return directory


def test_a_written_checkpoint_comes_back(tmp_path: Path) -> None:
    config = drafter_config(TARGET)
    checkpoint = DrafterCheckpoint(write(tmp_path))
    assert checkpoint.config == config
    assert torch.equal(checkpoint.draft_ids, draft_ids(config))
    weights = drafter_weights(config)
    assert checkpoint.tensors.keys() == weights.keys()
    assert all(torch.equal(checkpoint.tensors[n], weights[n].bfloat16()) for n in weights)


def test_the_file_holds_offsets_and_no_embedding(tmp_path: Path) -> None:
    tensors = load_file(str(write(tmp_path) / "model.safetensors"))
    ids = draft_ids(drafter_config(TARGET))
    assert torch.equal(tensors["d2t"], ids - torch.arange(len(ids)))
    assert EMBED not in tensors


def test_a_whole_vocabulary_needs_no_map(tmp_path: Path) -> None:
    config = drafter_config(TARGET, draft_vocab_size=TARGET.vocab_size)
    size = write_checkpoint(tmp_path, config, drafter_weights(config), torch.arange(TARGET.vocab_size), "")
    assert size == (tmp_path / "model.safetensors").stat().st_size
    assert "d2t" not in load_file(str(tmp_path / "model.safetensors"))
    assert torch.equal(DrafterCheckpoint(tmp_path).draft_ids, torch.arange(TARGET.vocab_size))


def test_t2d_is_ignored(tmp_path: Path) -> None:
    checkpoint = DrafterCheckpoint(rewrite(write(tmp_path), t2d=torch.ones(288, dtype=torch.bool)))
    assert "t2d" not in checkpoint.tensors


IDS = draft_ids(drafter_config(TARGET))
OFFSETS = IDS - torch.arange(len(IDS))


@pytest.mark.parametrize(
    ("d2t", "named"),
    [
        (None, "draft_vocab_size is reduced but the checkpoint has no d2t"),
        (OFFSETS[:-1], r"d2t has shape \(191,\), draft_vocab_size is 192"),
        (IDS, "d2t is not an offset"),  # target ids themselves, a common mix-up
        (OFFSETS - 1, "d2t is not an offset"),
        (OFFSETS + 2, "d2t is not an offset"),
        (torch.where(torch.arange(192) == 5, OFFSETS[5] - 1, OFFSETS), "strictly increasing"),
    ],
)
def test_a_wrong_map_is_refused(tmp_path: Path, d2t: Tensor | None, named: str) -> None:
    with pytest.raises(ModelConfigError, match=named):
        DrafterCheckpoint(rewrite(write(tmp_path), d2t=d2t))


def test_missing_files_are_named(tmp_path: Path) -> None:
    (write(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(ModelConfigError, match=r"has no model\.safetensors"):
        DrafterCheckpoint(tmp_path)
    with pytest.raises(ModelConfigError, match=r"has no config\.json"):
        DrafterCheckpoint(tmp_path / "elsewhere")


def test_shapes_are_checked_by_name() -> None:
    config = drafter_config(TARGET)
    weights = drafter_weights(config)
    check_shapes(config, weights, embedding=False)
    with pytest.raises(ModelConfigError, match=r"lacks the tensor embed_tokens\.weight"):
        check_shapes(config, weights, embedding=True)
    for name, shape in expected_shapes(config).items():
        wrong = weights | {name: torch.zeros(*shape[:-1], shape[-1] + 1)}
        with pytest.raises(ModelConfigError, match=rf"^{name} has shape .*, config\.json implies"):
            check_shapes(config, wrong, embedding=False)
        fewer = {n: t for n, t in weights.items() if n != name}
        with pytest.raises(ModelConfigError, match=f"lacks the tensor {name}$"):
            check_shapes(config, fewer, embedding=False)


def test_the_network_of_a_checkpoint_uses_the_targets_embedding(tmp_path: Path) -> None:
    network = DrafterCheckpoint(write(tmp_path)).network(EMBEDDING)
    assert torch.equal(network.embed, EMBEDDING)
    own = DrafterCheckpoint(rewrite(tmp_path, **{EMBED: EMBEDDING * 2})).network(EMBEDDING)
    assert torch.equal(own.embed, EMBEDDING * 2)
    with pytest.raises(ModelConfigError, match=r"embed_tokens\.weight has shape \(287, 64\)"):
        DrafterCheckpoint(write(tmp_path)).network(EMBEDDING[1:])


def network(**changes: object) -> tuple[DrafterNetwork, dict[str, Tensor]]:
    config = drafter_config(TARGET, **changes)
    weights = drafter_weights(config) | {EMBED: EMBEDDING}
    return DrafterNetwork(config, weights), weights


def sample(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(8))


def test_the_markov_bias_is_indexed_by_target_ids() -> None:
    ours, weights = network()
    previous = torch.tensor([[287, 0], [200, 3]])
    w1, w2 = weights["markov_head.markov_w1.weight"], weights["markov_head.markov_w2.weight"]
    expected = torch.stack([torch.stack([w2 @ w1[int(t)] for t in row]) for row in previous])
    assert expected.shape == (2, 2, 192)
    torch.testing.assert_close(ours.markov_bias(previous), expected, rtol=1e-5, atol=1e-5)


def test_context_rows_are_the_normed_projection_of_the_taps() -> None:
    ours, weights = network()
    taps = sample(5, 128)
    projected = taps @ weights["fc.weight"].T
    expected = projected / (projected.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weights["hidden_norm.weight"]
    torch.testing.assert_close(ours.context_rows(taps), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("with_markov", [True, False])
def test_the_confidence_head(with_markov: bool) -> None:
    ours, weights = network(confidence_with_markov=with_markov)
    hidden, previous = sample(6, 64), torch.tensor([0, 1, 2, 100, 287, 5])
    features = torch.cat([hidden, weights["markov_head.markov_w1.weight"][previous]], -1) if with_markov else hidden
    expected = features @ weights["confidence_head.proj.weight"][0] + weights["confidence_head.proj.bias"]
    confidence = ours.confidence_logits(hidden, previous)
    assert confidence is not None
    torch.testing.assert_close(confidence, expected, rtol=1e-4, atol=1e-5)


def test_no_confidence_head() -> None:
    ours, weights = network(confidence_head=False)
    assert not any("confidence" in name for name in weights)
    assert ours.confidence_logits(sample(2, 64), torch.tensor([0, 1])) is None


def test_base_logits_are_rows_of_the_draft_vocabulary() -> None:
    ours, weights = network()
    hidden = sample(3, 64)
    expected = F.linear(hidden, weights["lm_head.weight"])
    torch.testing.assert_close(ours.base_logits(hidden), expected, rtol=1e-4, atol=1e-5)


def test_positions_reach_a_block_past_the_context() -> None:
    ours, _ = network(max_context=40)
    context = sample(1, 64)
    ours.context_kv(0, context, torch.tensor([40 + 4 - 1]))
    with pytest.raises(IndexError):
        ours.context_kv(0, context, torch.tensor([40 + 4]))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned(x: Tensor, position: int) -> Tensor:
    """One head vector rotated to its position: pair (j, j + half) by the angle position * theta^(-2j / size)."""
    half = len(x) // 2
    out = x.clone()
    for j in range(half):
        angle = torch.tensor(position * 10000.0 ** (-2 * j / len(x)), dtype=torch.float64)
        out[j] = x[j] * angle.cos() - x[j + half] * angle.sin()
        out[j + half] = x[j + half] * angle.cos() + x[j] * angle.sin()
    return out


def heads_of(rows: Tensor, norm: Tensor | None, positions: list[int]) -> Tensor:
    """[rows, heads, 16]; with a norm also normed and rotated."""
    split = rows.view(len(rows), -1, 16)
    if norm is None:
        return split
    placed = zip(split, positions, strict=True)
    return torch.stack([torch.stack([turned(rms(head, norm), p) for head in row]) for row, p in placed])


def reference_block(weights: dict[str, Tensor], taps: Tensor, anchor: int) -> Tensor:
    """One block by the design's own words, row by row in float64: hidden rows [block, d] after the final norm.

    Context rows take no input norm; the block is not causal; the anchor sits at its own position.
    """
    w = {name.removesuffix(".weight"): t.double() for name, t in weights.items()}
    context = rms(taps.double() @ w["fc"].T, w["hidden_norm"])
    x = w["embed_tokens"][torch.tensor([anchor, 287, 287, 287])]
    positions = list(range(len(context) + 4))
    for i in range(2):
        layer = {n.removeprefix(f"layers.{i}."): t for n, t in w.items() if n.startswith(f"layers.{i}.")}
        h = rms(x, layer["input_layernorm"])
        rows = torch.cat([context, h])
        q = heads_of(h @ layer["self_attn.q_proj"].T, layer["self_attn.q_norm"], positions[len(context) :])
        k = heads_of(rows @ layer["self_attn.k_proj"].T, layer["self_attn.k_norm"], positions)
        v = heads_of(rows @ layer["self_attn.v_proj"].T, None, positions)
        mixed = torch.zeros_like(q)
        for row in range(4):
            for head in range(4):
                scores = k[:, head // 2] @ q[row, head] / 16**0.5
                mixed[row, head] = torch.softmax(scores, 0) @ v[:, head // 2]
        x = x + mixed.reshape(4, 64) @ layer["self_attn.o_proj"].T
        h = rms(x, layer["post_attention_layernorm"])
        gate, up = h @ layer["mlp.gate_proj"].T, h @ layer["mlp.up_proj"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ layer["mlp.down_proj"].T
    return rms(x, w["norm"])


@pytest.mark.parametrize("context", [1, 6])
def test_a_block_equals_the_formula(context: int) -> None:
    ours, weights = network()
    taps = sample(context, 128)
    state = DraftSlots(ours, 1, 16)
    state.extend(0, 0, taps)
    expected = reference_block(weights, taps, 77)
    torch.testing.assert_close(state.hidden([0], [77])[0].double(), expected, rtol=1e-4, atol=1e-4)
