"""What a dense decoder is made of, whatever file it came from.

`DecoderConfig` describes the Llama and Qwen3 dense families: the same block, with or without per-head q/k norms,
with or without tied embeddings. It is built from a Hugging Face ``config.json`` here and from GGUF metadata in
`gguf_source`. Fields that would change the arithmetic and that this project does not implement are refused by name:
a model that loads and computes something else is worse than one that does not load.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.errors import UserError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")


class ModelConfigError(UserError):
    """A model directory or file describes something that cannot be served; the text names the field and the remedy."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a dense decoder. `max_context` is in tokens; `rope_theta` is the rotary base."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    rope_theta: float
    max_context: int
    tied_embeddings: bool
    qk_norm: bool
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelConfigError(
                f"num_attention_heads {self.heads} is not a multiple of num_key_value_heads {self.kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelConfigError(f"head_dim {self.head_dim} is odd: rotary embedding needs pairs")


def read_json(file: Path) -> dict[str, Any]:
    """The object in a model's JSON file. Raises ModelConfigError that names the file."""
    try:
        raw = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelConfigError(f"{file} cannot be read as JSON ({error}): fetch the file again") from None
    if not isinstance(raw, dict):
        raise ModelConfigError(f"{file} holds no JSON object: fetch the file again")
    return raw


def integer(raw: Mapping[str, Any], field: str) -> int:
    """An integer field. KeyError when it is missing, ModelConfigError that names it when it is something else."""
    value = raw[field]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelConfigError(f"{field} must be an integer, it is {value!r}")
    return value


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    for field in ("attention_bias", "mlp_bias"):
        if raw.get(field):
            raise ModelConfigError(f"{field} true is not supported: use a checkpoint without biases")
    if raw.get("quantization_config"):
        # Its tensors would convert to a float dtype without their scales and load as noise.
        raise ModelConfigError("quantization_config is not supported: use a bf16, fp16 or fp32 checkpoint")
    if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ()):
        raise ModelConfigError("sliding-window layers are not supported in the target: use a full-attention model")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelConfigError(f"hidden_act {raw['hidden_act']!r} is not supported: only silu is")


def _rope_theta(raw: Mapping[str, Any]) -> float:
    rope = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    # Older configs spell the field `type`.
    for kind in (rope.get("rope_type"), scaling.get("rope_type"), scaling.get("type")):
        if kind not in (None, "default"):
            raise ModelConfigError(f"rope_type {kind!r} is not supported: only unscaled rotary embedding is")
    if (rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelConfigError("partial_rotary_factor is not supported: only rotary embedding of whole heads is")
    return float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list | tuple) else (int(value),)


def merged_ids(known: tuple[int, ...], value: Any) -> tuple[int, ...]:
    """`known` and then the ids of a JSON field (a number, a list, or nothing) that are not among them."""
    return tuple(dict.fromkeys((*known, *_ids(value))))


def from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a Hugging Face ``config.json`` of the Llama or Qwen3 dense family.

    Raises ModelConfigError naming the field when it is missing or asks for something that is not implemented.
    """
    architecture = (raw.get("architectures") or ["?"])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ModelConfigError(
            f"architectures {architecture!r} is not supported: the target must be one of {SUPPORTED_ARCHITECTURES}"
        )
    _refuse_unsupported(raw)
    try:
        heads, hidden = integer(raw, "num_attention_heads"), integer(raw, "hidden_size")
        if heads < 1:
            raise ModelConfigError(f"num_attention_heads {heads} must be positive")
        return DecoderConfig(
            vocab_size=integer(raw, "vocab_size"),
            hidden_size=hidden,
            layers=integer(raw, "num_hidden_layers"),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            intermediate_size=integer(raw, "intermediate_size"),
            rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(raw),
            max_context=int(raw.get("max_position_embeddings", 2048)),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            bos_id=raw.get("bos_token_id"),
            eos_ids=_ids(raw.get("eos_token_id")),
        )
    except KeyError as missing:
        raise ModelConfigError(f"config.json lacks the field {missing}: is this a complete model directory?") from None
