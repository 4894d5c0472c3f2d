"""The target network against transformers on the same weights, and against itself however the tokens are fed."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from dspark.models.config import ModelConfigError, from_hf
from dspark.models.source import load_target
from dspark.models.target import KVCache, LockstepAttention, RaggedAttention, Segment, TargetModel
from dspark.proof.tiny_pair import hf_config, target_weights
from tests.models.conftest import Pair

LENGTH = 64


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(288), k=length)


def assert_near(ours: Tensor, expected: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(ours, expected, rtol=atol, atol=atol)


def run(
    model: TargetModel, tokens: list[int], cache: KVCache | None = None, start: int = 0, slot: int = 0
) -> Tensor:
    """Logits of every row of one segment."""
    cache = cache or model.new_cache(1, LENGTH)
    return model.forward(cache, [Segment(slot, start, tokens)]).logits


def test_logits_equal_transformers_at_every_position(pair: Pair) -> None:
    tokens = text(40)
    expected = pair.their_logits(tokens)
    assert expected.std() > 0.5  # flat logits would be equal for any reason
    assert_near(run(pair.ours, tokens), expected)


def test_taps_equal_the_hidden_states_of_transformers(pair: Pair) -> None:
    """The tap of layer i is the output of layer i: transformers' hidden_states[i + 1]. Rounded to bf16 once."""
    tokens, layers = text(24), (0, 1, 2)
    with torch.inference_mode():
        states = pair.theirs(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    result = pair.ours.forward(pair.ours.new_cache(1, LENGTH), [Segment(0, 0, tokens)], tap_layers=layers)
    assert result.taps is not None
    assert result.taps.dtype is torch.bfloat16
    expected = torch.cat([states[i + 1][0] for i in layers], dim=-1)
    torch.testing.assert_close(result.taps.float(), expected, rtol=2**-8, atol=1e-4)


def test_taps_do_not_change_the_logits(llama: Pair) -> None:
    tokens = text(9)
    tapped = llama.ours.forward(llama.ours.new_cache(1, LENGTH), [Segment(0, 0, tokens)], tap_layers=(0, 2))
    assert torch.equal(tapped.logits, run(llama.ours, tokens))


@pytest.mark.parametrize("chunks", [(1, 39), (16, 16, 8), (7, 1, 1, 31)])
def test_chunked_prefill_equals_one_pass(pair: Pair, chunks: tuple[int, ...]) -> None:
    tokens = text(40, seed=1)
    cache, rows, start = pair.ours.new_cache(1, LENGTH), [], 0
    for size in chunks:
        rows.append(run(pair.ours, tokens[start : start + size], cache, start))
        start += size
    assert_near(torch.cat(rows), run(pair.ours, tokens))


def test_ragged_batch_equals_each_alone(pair: Pair) -> None:
    """Prefill chunk, one decode token and a verify run together, in slots that are not in order."""
    model = pair.ours
    lengths, new = {3: 12, 0: 31, 2: 5}, {3: 20, 0: 1, 2: 6}
    tokens = {slot: text(lengths[slot] + new[slot], seed=slot) for slot in lengths}
    cache = model.new_cache(4, LENGTH)
    for slot, committed in lengths.items():
        run(model, tokens[slot][:committed], cache, slot=slot)
    segments = [Segment(slot, lengths[slot], tokens[slot][lengths[slot] :]) for slot in lengths]
    together = model.forward(cache, segments, tap_layers=(1,))
    assert together.taps is not None
    row = 0
    for slot in lengths:
        alone = model.forward(model.new_cache(1, LENGTH), [Segment(0, 0, tokens[slot])], tap_layers=(1,))
        assert alone.taps is not None
        rows = slice(row, row + new[slot])
        assert_near(together.logits[rows], alone.logits[lengths[slot] :])
        torch.testing.assert_close(together.taps[rows], alone.taps[lengths[slot] :], rtol=2**-7, atol=1e-3)
        row += new[slot]


@pytest.mark.parametrize("depth", [1, 4, 7])
def test_verify_width_equals_one_by_one(pair: Pair, depth: int) -> None:
    tokens = text(10 + depth + 1, seed=depth)
    cache = pair.ours.new_cache(2, LENGTH)
    for slot in (0, 1):
        run(pair.ours, tokens[:10], cache, slot=slot)
    verified = run(pair.ours, tokens[10:], cache, start=10, slot=0)
    single = [run(pair.ours, [token], cache, start=10 + i, slot=1) for i, token in enumerate(tokens[10:])]
    assert_near(verified, torch.cat(single))


def test_rejected_rows_are_never_read(pair: Pair) -> None:
    """Rollback is forgetting: rows past the committed length, even NaN, do not reach a later pass."""
    tokens, committed = text(20, seed=9), 11
    cache = pair.ours.new_cache(2, LENGTH)
    run(pair.ours, tokens[:committed], cache)
    run(pair.ours, text(6, seed=10), cache, start=committed)  # drafts that were all rejected
    cache.keys[:, :, :, committed + 6 :] = float("nan")
    cache.values[:, :, :, committed + 6 :] = float("nan")
    cache.keys[:, 1], cache.values[:, 1] = float("nan"), float("nan")  # another slot
    again = run(pair.ours, tokens[committed:], cache, start=committed)
    assert_near(again, run(pair.ours, tokens)[committed:])


def test_logit_rows_select_and_order_rows(llama: Pair) -> None:
    tokens = text(6)
    whole = run(llama.ours, tokens)
    for rows in ([5], [1, 3], [5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5], []):
        part = llama.ours.forward(llama.ours.new_cache(1, LENGTH), [Segment(0, 0, tokens)], logit_rows=rows)
        assert_near(part.logits, whole[rows])


def test_tied_head_is_the_embedding(llama: Pair) -> None:
    weights = dict(llama.source.weights())
    tied = from_hf(hf_config(tie_word_embeddings=True))
    head = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    tokens = text(8)
    expected = run(TargetModel(llama.source.config, head), tokens)
    assert torch.equal(run(TargetModel(tied, weights), tokens), expected)
    assert not torch.allclose(run(llama.ours, tokens), expected, atol=0.1)


def test_bf16_runs_and_is_close(pair: Pair) -> None:
    tokens = text(30, seed=2)
    cpu = load_target(pair.source, device="cpu", dtype=torch.bfloat16)
    result = cpu.forward(cpu.new_cache(1, LENGTH), [Segment(0, 0, tokens)], tap_layers=(1,))
    assert result.logits.dtype is torch.bfloat16
    expected = run(pair.ours, tokens)
    error = (result.logits.float() - expected).pow(2).mean().sqrt() / expected.std()
    assert 0 < error < 0.03  # relative root mean square: bf16 has eight bits


def test_a_missing_tensor_is_named() -> None:
    config = from_hf(hf_config())
    weights = target_weights(config)
    del weights["model.layers.2.mlp.up_proj.weight"]
    with pytest.raises(ModelConfigError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        TargetModel(config, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lockstep_equals_ragged_step_by_step(pair: Pair, dtype: torch.dtype) -> None:
    """Rows at positions of their own, one of them restarted in the middle as a finished corpus row is."""
    model = load_target(pair.source, device="cpu", dtype=dtype)
    lockstep, ragged = model.new_cache(3, LENGTH), model.new_cache(3, LENGTH)
    tokens = [text(30, seed=20 + slot) for slot in range(3)]
    positions = torch.tensor([0, 5, 2])
    for slot, start in enumerate(positions.tolist()):
        for cache in (lockstep, ragged):
            if start:
                run(model, tokens[slot][:start], cache, slot=slot)
    for step in range(12):
        if step == 6:
            positions[1] = 3
        inputs = [tokens[slot][p] for slot, p in enumerate(positions.tolist())]
        segments = [Segment(slot, p, [inputs[slot]]) for slot, p in enumerate(positions.tolist())]
        with torch.inference_mode():
            attention = LockstepAttention(lockstep, positions, int(positions.max()) + 1)
            ours, _ = model.run_layers(torch.tensor(inputs), positions, attention, ())
            expected, _ = model.run_layers(torch.tensor(inputs), positions, RaggedAttention(ragged, segments), ())
        assert_near(ours, expected, 1e-4 if dtype is torch.float32 else 0.05 * float(expected.std()))
        positions += 1
