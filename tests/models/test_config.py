"""What a target's config.json may say, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dspark.models.config import ModelConfigError, from_hf, read_json
from dspark.proof.tiny_pair import hf_config


def without(field: str) -> dict[str, Any]:
    return {k: v for k, v in hf_config().items() if k != field}


def test_every_field_is_read() -> None:
    config = from_hf(hf_config(eos_token_id=[7, 8], num_key_value_heads=1, rope_theta=5e5))
    assert (config.vocab_size, config.hidden_size, config.layers, config.heads) == (288, 64, 4, 4)
    assert (config.kv_heads, config.head_dim, config.intermediate_size) == (1, 16, 96)
    assert (config.rms_eps, config.rope_theta, config.max_context) == (1e-5, 5e5, 512)
    assert (config.tied_embeddings, config.qk_norm) == (False, False)
    assert (config.bos_id, config.eos_ids) == (256, (7, 8))


def test_defaults_are_those_of_the_family() -> None:
    optional = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "eos_token_id")
    config = from_hf({k: v for k, v in hf_config().items() if k not in optional})
    assert (config.kv_heads, config.head_dim) == (4, 16)
    assert (config.rms_eps, config.rope_theta, config.tied_embeddings) == (1e-6, 10000.0, False)
    assert config.eos_ids == ()


def test_qwen3_has_head_norms() -> None:
    assert from_hf(hf_config("Qwen3ForCausalLM", use_sliding_window=False, sliding_window=None)).qk_norm


def test_rope_parameters_win_over_the_old_field() -> None:
    assert from_hf(hf_config(rope_parameters={"rope_type": "default", "rope_theta": 1e6})).rope_theta == 1e6


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, r"architectures 'MixtralForCausalLM'.*LlamaForCausalLM"),
        ({"architectures": []}, "architectures"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"vocab_size": None}, "vocab_size must be an integer, it is None"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers must be an integer, it is '4'"),
    ],
)
def test_refusals_name_the_field(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelConfigError, match=named):
        from_hf(hf_config() | changes)


@pytest.mark.parametrize(
    "field", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
)
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ModelConfigError, match=f"lacks the field '{field}'"):
        from_hf(without(field))


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_broken_json_names_the_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ModelConfigError, match=r"config\.json.*fetch the file again"):
        read_json(file)
