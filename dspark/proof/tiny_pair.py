"""Tiny models made on the fly: a random Llama or Qwen3 target, a drafter that fits it, a byte tokenizer.

Purpose: a real pair, small enough that its exact laws can be computed, for ``dspark prove`` and for tests.

Called by ``served_pair`` and by tests. The drafter is good on purpose and never perfect.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from dspark.models.config import DecoderConfig, from_hf
from dspark.models.drafter import expected_shapes
from dspark.models.drafter_config import DrafterConfig
from dspark.models.source import load_target, open_target
from dspark.models.target import Segment
from dspark.training.export import write_checkpoint

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ("<|mask|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")


def hf_config(architecture: str = "LlamaForCausalLM", **changes: object) -> dict[str, object]:
    """config.json of a tiny target."""
    return {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": 288,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        **changes,
    }


def target_weights(config: DecoderConfig, seed: int = 0, scale: float = 0.08) -> dict[str, Tensor]:
    """Random weights with Hugging Face names; norms near one."""
    g = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=g) * scale

    c = config
    weights = {
        "model.embed_tokens.weight": torch.randn(c.vocab_size, c.hidden_size, generator=g) * 0.5,
        "model.norm.weight": 1 + 0.1 * torch.randn(c.hidden_size, generator=g),
    }
    for i in range(c.layers):
        p = f"model.layers.{i}."
        weights |= {
            p + "input_layernorm.weight": 1 + 0.1 * torch.randn(c.hidden_size, generator=g),
            p + "post_attention_layernorm.weight": 1 + 0.1 * torch.randn(c.hidden_size, generator=g),
            p + "self_attn.q_proj.weight": matrix(c.heads * c.head_dim, c.hidden_size),
            p + "self_attn.k_proj.weight": matrix(c.kv_heads * c.head_dim, c.hidden_size),
            p + "self_attn.v_proj.weight": matrix(c.kv_heads * c.head_dim, c.hidden_size),
            p + "self_attn.o_proj.weight": matrix(c.hidden_size, c.heads * c.head_dim),
            p + "mlp.gate_proj.weight": matrix(c.intermediate_size, c.hidden_size),
            p + "mlp.up_proj.weight": matrix(c.intermediate_size, c.hidden_size),
            p + "mlp.down_proj.weight": matrix(c.hidden_size, c.intermediate_size),
        }
        if c.qk_norm:
            weights |= {
                p + "self_attn.q_norm.weight": 1 + 0.1 * torch.randn(c.head_dim, generator=g),
                p + "self_attn.k_norm.weight": 1 + 0.1 * torch.randn(c.head_dim, generator=g),
            }
    if not c.tied_embeddings:
        # Logits with a spread of about three: a few likely tokens, none certain.
        weights["lm_head.weight"] = torch.randn(c.vocab_size, c.hidden_size, generator=g) * 0.4
    return weights


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """256 byte tokens, then the specials, then filler tokens up to `vocab_size`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    filler = [f"<|extra{i}|>" for i in range(vocab_size - len(alphabet) - len(SPECIALS))]
    tokenizer.add_special_tokens([*SPECIALS, *filler])
    return tokenizer


def write_target(directory: Path, seed: int = 0, scale: float = 0.08, **changes: object) -> Path:
    """A target directory: config.json, model.safetensors, tokenizer.json, tokenizer_config.json."""
    raw = hf_config(**changes)  # type: ignore[arg-type]
    config = from_hf(raw)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(target_weights(config, seed, scale), str(directory / "model.safetensors"), metadata={"format": "pt"})
    byte_tokenizer(config.vocab_size).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHAT_TEMPLATE, "bos_token": "<|mask|>", "eos_token": "<|end|>"})
    )
    return directory


def drafter_config(target: DecoderConfig, **changes: object) -> DrafterConfig:
    """A drafter for a tiny target; the draft vocabulary misses every third token."""
    values: dict[str, object] = {
        "hidden_size": target.hidden_size,
        "layers": 2,
        "heads": target.heads,
        "kv_heads": target.kv_heads,
        "head_dim": target.head_dim,
        "intermediate_size": target.intermediate_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size - target.vocab_size // 3,
        "rms_eps": target.rms_eps,
        "rope_theta": target.rope_theta,
        "max_context": target.max_context,
        "target_layer_ids": (0, 2),
        "num_target_layers": target.layers,
        "mask_token_id": target.vocab_size - 1,
        "block_size": 4,
        "markov_rank": 8,
        "confidence_head": True,
        "confidence_with_markov": True,
        **changes,
    }
    return DrafterConfig(**values)  # type: ignore[arg-type]


def draft_ids(config: DrafterConfig) -> Tensor:
    """Target ids of the draft vocabulary: all but every third, cut to size."""
    kept = [t for t in range(config.vocab_size) if t % 3 != 2]
    return torch.tensor(kept[: config.draft_vocab_size])


def drafter_weights(config: DrafterConfig, seed: int = 1) -> dict[str, Tensor]:
    """Random drafter weights with native names (without the shared embedding)."""
    g = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(config).items():
        noise = torch.randn(shape, generator=g)
        weights[name] = 1 + 0.1 * noise if name.endswith("norm.weight") else 0.2 * noise
    return weights


def write_drafter(directory: Path, target: Path, seed: int = 1, **changes: object) -> Path:
    """A drafter directory for a tiny target whose drafts are often, and not always, right.

    The Markov head is the target's own bigram table (hidden row of a lone token times the output embedding), the rest
    is small noise: good where the target's next token depends on the last one most.
    """
    source = open_target(str(target))
    config = drafter_config(source.config, markov_rank=source.config.hidden_size, **changes)
    weights = drafter_weights(config, seed)
    ids = draft_ids(config)
    model = load_target(source, device="cpu", dtype=torch.float32)
    lone = [Segment(token, 0, [token]) for token in range(config.vocab_size)]
    hidden = model.forward(model.new_cache(config.vocab_size, 1), lone).hidden
    weights["markov_head.markov_w1.weight"] = hidden
    weights["markov_head.markov_w2.weight"] = dict(source.weights())["lm_head.weight"][ids]
    weights["lm_head.weight"] = weights["lm_head.weight"] * 0.05
    write_checkpoint(directory, config, weights, ids, "# tiny\n")
    return directory
