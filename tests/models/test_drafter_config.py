"""The drafter's config.json: what is read, and every refusal with the field's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark.models.config import ModelConfigError, from_hf
from dspark.models.drafter_config import DrafterConfig, from_json, read
from dspark.proof.tiny_pair import drafter_config, hf_config

TARGET = from_hf(hf_config())


def native(**changes: Any) -> dict[str, Any]:
    return drafter_config(TARGET).to_json() | changes


def without(field: str) -> dict[str, Any]:
    return {k: v for k, v in native().items() if k != field}


def test_round_trip() -> None:
    config = drafter_config(TARGET, confidence_with_markov=False, block_size=7)
    assert from_json(json.loads(json.dumps(config.to_json()))) == config
    assert config.tap_width == 2 * 64


def test_a_published_config_is_read() -> None:
    """Shape of the published 4B drafter, with fields that its writer inherited from the target."""
    config = from_json(
        {
            "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 5,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728,
            "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06,
            "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "layer_types": ["full_attention"] * 5,
            "tie_word_embeddings": False, "num_target_layers": 36, "target_layer_ids": [1, 9, 17, 25, 33],
            "mask_token_id": 151669, "block_size": 7, "num_anchors": 512, "markov_rank": 256,
            "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
            "partial_rotary_factor": 0.5, "num_experts": 128,
        }
    )  # fmt: skip
    assert (config.block_size, config.target_layer_ids, config.markov_rank) == (7, (1, 9, 17, 25, 33), 256)
    assert (config.draft_vocab_size, config.rope_theta, config.tap_width) == (151936, 1e6, 12800)
    assert config.confidence_head
    assert config.confidence_with_markov


def test_optional_fields() -> None:
    raw = without("draft_vocab_size")
    for field in ("enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor", "markov_head_type"):
        del raw[field]
    config = from_json(raw)
    assert config.draft_vocab_size == config.vocab_size
    assert config.confidence_head
    assert config.confidence_with_markov


def test_the_old_rope_field() -> None:
    assert from_json(without("rope_parameters") | {"rope_theta": 5000.0}).rope_theta == 5000.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"transformer_layer_config": {}}, "transformer_layer_config: the Speculators layout"),
        ({"dflash_config": {}}, "dflash_config: the SpecForge layout"),
        ({"dspark_target_layer_ids": [40]}, "dspark_target_layer_ids: the DeepSeek-V4 layout"),
        ({"architectures": ["Gemma4DSparkModel"]}, "architectures 'Gemma4DSparkModel'"),
        ({"architectures": None}, "architectures"),
        ({"sample_from_anchor": False}, "sample_from_anchor false"),
        ({"sample_from_anchor": None}, "sample_from_anchor"),
        ({"markov_head_type": "gated"}, "markov_head_type 'gated'"),
        ({"markov_head_type": "rnn"}, "markov_head_type 'rnn'"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ({"attention_bias": True}, "attention_bias"),
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"target_layer_ids": [2, 0]}, r"target_layer_ids \[2, 0\] must be .* increasing"),
        ({"target_layer_ids": [1, 1]}, "target_layer_ids"),
        ({"target_layer_ids": [-1, 1]}, "target_layer_ids"),
        ({"target_layer_ids": [0, 3]}, r"target_layer_ids \[0, 3\] must lie in \[0, 2\]: the last layer"),
        ({"target_layer_ids": [0, 9]}, "target_layer_ids"),
        ({"block_size": 0}, "block_size 0"),
        ({"block_size": 33}, "block_size 33"),
        ({"markov_rank": 0}, "markov_rank 0"),
        ({"mask_token_id": 288}, "mask_token_id 288"),
        ({"mask_token_id": -1}, "mask_token_id -1"),
        ({"mask_token_id": None}, "mask_token_id must be an integer"),
        ({"draft_vocab_size": 289}, "draft_vocab_size 289"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"hidden_size": "64"}, "hidden_size must be an integer"),
    ],
)
def test_refusals_name_the_field(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelConfigError, match=named):
        from_json(native(**changes))


@pytest.mark.parametrize(
    "field",
    [
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "vocab_size", "rms_norm_eps", "max_position_embeddings", "target_layer_ids",
        "num_target_layers", "mask_token_id", "block_size", "markov_rank",
    ],
)  # fmt: skip
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ModelConfigError, match=f"lacks the field '{field}'"):
        from_json(without(field))


def test_a_missing_rope_theta_is_named() -> None:
    with pytest.raises(ModelConfigError, match="rope_theta"):
        from_json(without("rope_parameters"))


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_target_layers"])
def test_another_target_is_refused(field: str) -> None:
    names = {"num_target_layers": "num_hidden_layers"}
    other = from_hf(hf_config() | {names.get(field, field): 320})
    config = drafter_config(TARGET)
    config.check_target(TARGET)
    with pytest.raises(ModelConfigError, match=f"the drafter's {field} is .*, the target's is 320"):
        config.check_target(other)


def test_read_names_the_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"has no config\.json.*dspark train"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("not json")
    with pytest.raises(ModelConfigError, match=r"config\.json cannot be read as JSON"):
        read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(native()))
    assert isinstance(read(tmp_path), DrafterConfig)
