"""What a DSpark drafter checkpoint says about itself, in the native Qwen3 layout.

Source of the field names and rules: the published ``Qwen3DSparkModel`` checkpoints and their loaders. The writers of
such files copy the target's whole config and override some fields, so fields not named here are noise and are not
obeyed. A wrong guess about a convention does not crash a drafter, it halves its acceptance; so anything ambiguous is
refused with the field's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.models.config import DecoderConfig, ModelConfigError, integer, read_json

ARCHITECTURE = "Qwen3DSparkModel"
MAX_BLOCK = 32


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Sizes and conventions of a drafter.

    target_layer_ids: zero-based indices of the target layers whose outputs are the taps, strictly increasing.
    block_size: positions per block; the anchor row predicts the first draft, so it is also the largest depth.
    draft_vocab_size: rows of lm_head and of Markov W2; `vocab_size` is the target's and indexes W1 and the embedding.
    """

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    rms_eps: float
    rope_theta: float
    max_context: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int
    block_size: int
    markov_rank: int
    confidence_head: bool
    confidence_with_markov: bool

    def __post_init__(self) -> None:
        taps = self.target_layer_ids
        if not taps or list(taps) != sorted(set(taps)):
            raise ModelConfigError(f"target_layer_ids {list(taps)} must be a non-empty strictly increasing list")
        if taps[0] < 0 or taps[-1] >= self.num_target_layers - 1:
            raise ModelConfigError(
                f"target_layer_ids {list(taps)} must lie in [0, {self.num_target_layers - 2}]: "
                "the last layer's output is normed in some loaders and is refused"
            )
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ModelConfigError(
                f"num_attention_heads {self.heads} is not a multiple of num_key_value_heads {self.kv_heads}"
            )
        if not 1 <= self.block_size <= MAX_BLOCK:
            raise ModelConfigError(f"block_size {self.block_size} must lie in [1, {MAX_BLOCK}]")
        if self.markov_rank < 1:
            raise ModelConfigError(f"markov_rank {self.markov_rank} must be positive")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ModelConfigError(f"mask_token_id {self.mask_token_id} is outside the vocabulary {self.vocab_size}")
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ModelConfigError(f"draft_vocab_size {self.draft_vocab_size} must lie in [1, {self.vocab_size}]")

    @property
    def tap_width(self) -> int:
        """Features of one row of concatenated taps."""
        return len(self.target_layer_ids) * self.hidden_size

    def to_json(self) -> dict[str, Any]:
        """The native config.json."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "max_position_embeddings": self.max_context,
            "rms_norm_eps": self.rms_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "layer_types": ["full_attention"] * self.layers,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "num_target_layers": self.num_target_layers,
            "target_layer_ids": list(self.target_layer_ids),
            "mask_token_id": self.mask_token_id,
            "block_size": self.block_size,
            "sample_from_anchor": True,
            "markov_rank": self.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": self.confidence_head,
            "confidence_head_with_markov": self.confidence_with_markov,
            "dtype": "bfloat16",
        }

    def check_target(self, target: DecoderConfig) -> None:
        """Refuse a target that this drafter was not made for. Raises ModelConfigError naming the field."""
        for name, mine, theirs in (
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("num_target_layers", self.num_target_layers, target.layers),
        ):
            if mine != theirs:
                raise ModelConfigError(
                    f"the drafter's {name} is {mine}, the target's is {theirs}: use a drafter trained for this target"
                )


_REFUSED_LAYOUTS = (
    ("transformer_layer_config", "the Speculators layout"),
    ("dflash_config", "the SpecForge layout"),
    ("dspark_target_layer_ids", "the DeepSeek-V4 layout"),
)


def _refuse_other_layouts(raw: Mapping[str, Any]) -> None:
    architecture = (raw.get("architectures") or ["?"])[0]
    for field, layout in _REFUSED_LAYOUTS:
        if field in raw:
            raise ModelConfigError(f"config.json has {field}: {layout} is not supported, only {ARCHITECTURE} is")
    if architecture != ARCHITECTURE:
        raise ModelConfigError(f"architectures {architecture!r} is not supported: only {ARCHITECTURE} is")
    if raw.get("sample_from_anchor", True) is not True:
        raise ModelConfigError("sample_from_anchor false (the 1+N layout) is not supported: only anchor-first blocks")
    if raw.get("markov_head_type", "vanilla") != "vanilla":
        raise ModelConfigError(f"markov_head_type {raw['markov_head_type']!r} is not supported: only vanilla is")
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        raise ModelConfigError("layer_types other than full_attention are not supported in the drafter")
    if raw.get("attention_bias"):
        raise ModelConfigError("attention_bias true is not supported in the drafter: its biases would be left out")


def from_json(raw: Mapping[str, Any]) -> DrafterConfig:
    """Read a native config.json. Raises ModelConfigError naming the missing or refused field."""
    _refuse_other_layouts(raw)
    try:
        rope = raw.get("rope_parameters") or {}
        return DrafterConfig(
            hidden_size=integer(raw, "hidden_size"),
            layers=integer(raw, "num_hidden_layers"),
            heads=integer(raw, "num_attention_heads"),
            kv_heads=integer(raw, "num_key_value_heads"),
            head_dim=integer(raw, "head_dim"),
            intermediate_size=integer(raw, "intermediate_size"),
            vocab_size=integer(raw, "vocab_size"),
            draft_vocab_size=int(raw.get("draft_vocab_size") or raw["vocab_size"]),
            rms_eps=float(raw["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta") or raw["rope_theta"]),
            max_context=integer(raw, "max_position_embeddings"),
            target_layer_ids=tuple(int(i) for i in raw["target_layer_ids"]),
            num_target_layers=integer(raw, "num_target_layers"),
            mask_token_id=integer(raw, "mask_token_id"),
            block_size=integer(raw, "block_size"),
            markov_rank=integer(raw, "markov_rank"),
            confidence_head=bool(raw.get("enable_confidence_head", True)),
            confidence_with_markov=bool(raw.get("confidence_head_with_markov", True)),
        )
    except KeyError as missing:
        raise ModelConfigError(f"the drafter's config.json lacks the field {missing}") from None


def read(directory: Path) -> DrafterConfig:
    """The config of a drafter directory."""
    file = directory / "config.json"
    if not file.is_file():
        raise ModelConfigError(f"{directory} has no config.json: give a drafter directory written by `dspark train`")
    return from_json(read_json(file))
