"""The shipped target, SmolLM2-135M-Instruct from its GGUF, against independent paths: weights, logits, greedy text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.models.config import DecoderConfig
from dspark.models.source import GgufSource, load_embedding
from dspark.models.target import Segment, TargetModel
from dspark.models.tokenizer import ChatTokenizer
from dspark_spark.held_out import PROMPTS

NEW_TOKENS = 64


@dataclass(frozen=True)
class Greedy:
    """Both networks on the dequantised weights; ten prompts and what ours answered to them in one ragged batch."""

    ours: TargetModel
    theirs: LlamaForCausalLM
    prompts: list[list[int]]
    answers: list[list[int]]


def llama_config(c: DecoderConfig) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        intermediate_size=c.intermediate_size,
        rms_norm_eps=c.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        max_position_embeddings=c.max_context,
        tie_word_embeddings=c.tied_embeddings,
    )


def load_theirs(config: DecoderConfig, weights: dict[str, Tensor]) -> LlamaForCausalLM:
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(config))
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    # Buffers are no part of the state: the rotary frequencies are computed anew.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return cast(LlamaForCausalLM, model.train(False))


def greedy(model: TargetModel, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy continuations of all prompts at once; ends of text are ignored."""
    cache = model.new_cache(len(prompts), max(map(len, prompts)) + count)
    segments = [Segment(slot, 0, prompt) for slot, prompt in enumerate(prompts)]
    last = torch.tensor([len(p) for p in prompts]).cumsum(0) - 1
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(count):
        chosen = model.forward(cache, segments, logit_rows=last.tolist()).logits.argmax(-1).tolist()
        for answer, token in zip(answers, chosen, strict=True):
            answer.append(token)
        segments = [Segment(s.slot, s.start + len(s.tokens), [t]) for s, t in zip(segments, chosen, strict=True)]
        last = torch.arange(len(prompts))
    return answers


@pytest.fixture(scope="module")
def answered(embedded: GgufSource, embedded_tokenizer: ChatTokenizer) -> Greedy:
    weights = dict(embedded.weights())
    ours = TargetModel(embedded.config, weights, max_positions=512)
    prompts = [
        embedded_tokenizer.encode(embedded_tokenizer.apply_chat_template([{"role": "user", "content": text}]))
        for text in PROMPTS[:10]
    ]
    return Greedy(ours, load_theirs(embedded.config, weights), prompts, greedy(ours, prompts, NEW_TOKENS))


def test_64_greedy_tokens_of_10_prompts_equal_transformers(answered: Greedy) -> None:
    """Our answer is transformers' greedy answer when each of its tokens is the argmax after the ones before it."""
    assert len({tuple(a) for a in answered.answers}) == 10
    for prompt, answer in zip(answered.prompts, answered.answers, strict=True):
        with torch.inference_mode():
            logits = answered.theirs(torch.tensor([prompt + answer])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


def test_logits_are_close_to_transformers(answered: Greedy) -> None:
    tokens = answered.prompts[0] + answered.answers[0]
    with torch.inference_mode():
        expected = answered.theirs(torch.tensor([tokens])).logits[0]
    logits = answered.ours.forward(answered.ours.new_cache(1, len(tokens)), [Segment(0, 0, tokens)]).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=5e-4)  # they span about 70


def test_an_answer_makes_sense(answered: Greedy, embedded_tokenizer: ChatTokenizer) -> None:
    text = embedded_tokenizer.decode(answered.answers[0])
    assert "sky" in text
    assert "blue" in text


def q4_1(raw: np.ndarray, columns: int) -> np.ndarray:
    """Q4_1 by its definition: per 32 weights an fp16 scale, an fp16 minimum, 16 bytes of low then high nibbles."""
    blocks = raw.reshape(-1, 20)
    scale = blocks[:, 0:2].copy().view(np.float16).astype(np.float32)
    minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    return (nibbles * scale + minimum).reshape(-1, columns)


@pytest.fixture(scope="module")
def raw(embedded: GgufSource) -> dict[str, np.ndarray]:
    """Tensor name -> quantised bytes."""
    return {t.name: t.data for t in gguf.GGUFReader(str(embedded.path)).tensors}


def test_q_and_k_rows_are_dequantised_and_in_half_split_order(
    embedded: GgufSource, raw: dict[str, np.ndarray]
) -> None:
    """Row by row from the raw bytes: rotary pair j of a head lies at rows 2j and 2j + 1 there, at j and j + 32 here."""
    names = {f"model.layers.3.self_attn.{n}_proj.weight": f"blk.3.attn_{n}.weight" for n in "qk"}
    weights = dict(embedded.weights(frozenset(names)))
    assert weights.keys() == names.keys()
    for name, theirs in names.items():
        interleaved = torch.from_numpy(q4_1(raw[theirs], 576))
        heads = range(len(interleaved) // 64)
        order = [head * 64 + 2 * pair + half for head in heads for half in (0, 1) for pair in range(32)]
        torch.testing.assert_close(weights[name], interleaved[order], rtol=0, atol=1e-6)


def test_other_matrices_keep_their_rows(embedded: GgufSource, raw: dict[str, np.ndarray]) -> None:
    name = "model.layers.29.mlp.down_proj.weight"
    ((_, value),) = embedded.weights(frozenset({name}))
    expected = q4_1(raw["blk.29.ffn_down.weight"], 1536)
    torch.testing.assert_close(value, torch.from_numpy(expected), rtol=0, atol=1e-6)


def test_the_embedding_is_dequantised(embedded: GgufSource, raw: dict[str, np.ndarray]) -> None:
    """Q8_0: per 32 weights an fp16 scale and 32 signed bytes."""
    blocks = raw["token_embd.weight"].reshape(-1, 34)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    expected = (blocks[:, 2:].view(np.int8) * scale).reshape(-1, 576)
    torch.testing.assert_close(load_embedding(embedded), torch.from_numpy(expected), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_every_tensor_equals_the_gguf_loader_of_transformers(embedded: GgufSource) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        skeleton = LlamaForCausalLM(llama_config(embedded.config))
    read = cast(Callable[..., dict[str, dict[str, np.ndarray]]], load_gguf_checkpoint)
    loaded = read(str(embedded.path), return_tensors=True, model_to_load=skeleton)["tensors"]
    ours = dict(embedded.weights())
    assert ours.keys() == loaded.keys()
    assert [name for name, value in ours.items() if not torch.equal(value, torch.as_tensor(loaded[name]))] == []
