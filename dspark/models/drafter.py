"""The DSpark drafter network: taps to context rows, a parallel block, a Markov head sampled left to right.

    context  H = hidden_norm(fc(taps))                                one row per committed position below the anchor
    block    [anchor, mask, mask, ...] at positions n, n+1, ...       the anchor sits at its own true position
    layer    q from the block; k, v from [H ; block]                  H gets no input norm; the block is bidirectional
    heads    U = lm_head(norm(h)); row j drafts the token after it    the anchor row already drafts the first token
    Markov   logits_j = U_j + W2 W1[prev]                             prev in target ids, starting with the anchor
    conf.    c_j = sigmoid(w . [h_j ; W1[prev]])                      sees x_<j only

Source: the DSpark paper (arXiv 2607.05147) and its published Qwen3 checkpoints. The same code trains (weights are
parameters, plain products) and serves (weights in the machine's fastest layout): the caller passes the `linear`
factory and the attention. Draft ids index lm_head and W2; `d2t` turns them into target ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from dspark.models import drafter_config
from dspark.models.config import ModelConfigError
from dspark.models.drafter_config import DrafterConfig
from dspark.models.linear import Linear
from dspark.models.rope import RopeTable, rotate

EMBED = "embed_tokens.weight"
_Product = Callable[[Tensor], Tensor]


class BlockAttention(Protocol):
    """Attention of block rows over context and block. q [..., heads, hd], k and v [..., kv_heads, hd]."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class _DraftLayer:
    """Weights of one draft layer; k and v are separate from q because context rows need them alone."""

    def __init__(self, prefix: str, weights: Mapping[str, Tensor], linear: Callable[[Tensor], _Product]) -> None:
        def get(name: str) -> Tensor:
            return weights[f"{prefix}{name}.weight"]

        self.input_norm = get("input_layernorm")
        self.post_norm = get("post_attention_layernorm")
        self.q = linear(get("self_attn.q_proj"))
        self.k = linear(get("self_attn.k_proj"))
        self.v = linear(get("self_attn.v_proj"))
        self.out = linear(get("self_attn.o_proj"))
        self.gate = linear(get("mlp.gate_proj"))
        self.up = linear(get("mlp.up_proj"))
        self.down = linear(get("mlp.down_proj"))
        self.q_norm = get("self_attn.q_norm")
        self.k_norm = get("self_attn.k_norm")


class DrafterNetwork:
    """The network without any state: contexts and caches belong to the caller.

    weights: native names (``layers.0.self_attn.q_proj.weight``, ``fc.weight``, ``markov_head.markov_w1.weight`` ...)
    plus ``embed_tokens.weight``, the target's. Raises ModelConfigError for a missing tensor or a wrong shape.
    """

    def __init__(
        self,
        config: DrafterConfig,
        weights: Mapping[str, Tensor],
        *,
        linear: Callable[[Tensor], _Product] = Linear,
        max_positions: int | None = None,
    ) -> None:
        self.config = config
        check_shapes(config, weights, embedding=True)
        self.embed = weights[EMBED]
        self.norm = weights["norm.weight"]
        self.hidden_norm = weights["hidden_norm.weight"]
        self._fc = linear(weights["fc.weight"])
        self._layers = [_DraftLayer(f"layers.{i}.", weights, linear) for i in range(config.layers)]
        self._lm_head = linear(weights["lm_head.weight"])
        self.markov_w1 = weights["markov_head.markov_w1.weight"]
        self._markov_w2 = linear(weights["markov_head.markov_w2.weight"])
        self._confidence_weight = weights.get("confidence_head.proj.weight")
        self._confidence_bias = weights.get("confidence_head.proj.bias")
        length = min(config.max_context, max_positions or config.max_context) + config.block_size
        self._rope = RopeTable(
            config.head_dim, config.rope_theta, length, self.embed.device, self.embed.dtype
        )

    def context_rows(self, taps: Tensor) -> Tensor:
        """taps [..., taps * d] -> H_ctx [..., d]."""
        c = self.config
        return F.rms_norm(self._fc(taps), (c.hidden_size,), self.hidden_norm, c.rms_eps)

    def context_kv(self, layer: int, context: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (normed, rotated) and values [..., kv_heads, hd] of context rows [..., d] at int64 positions [...]."""
        weights = self._layers[layer]
        return self._kv(weights, context, *self._rope.at(positions))

    def _kv(self, layer: _DraftLayer, rows: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        c = self.config
        shape = (*rows.shape[:-1], c.kv_heads, c.head_dim)
        k = F.rms_norm(layer.k(rows).view(shape), (c.head_dim,), layer.k_norm, c.rms_eps)
        return rotate(k, cos, sin), layer.v(rows).view(shape)

    def backbone(self, ids: Tensor, positions: Tensor, attention: BlockAttention) -> Tensor:
        """Block ids and positions, both int64 [...], to normed hidden rows [..., d]."""
        c = self.config
        cos, sin = self._rope.at(positions)
        x = self.embed[ids]
        for index, layer in enumerate(self._layers):
            h = F.rms_norm(x, (c.hidden_size,), layer.input_norm, c.rms_eps)
            q = layer.q(h).view(*h.shape[:-1], c.heads, c.head_dim)
            q = rotate(F.rms_norm(q, (c.head_dim,), layer.q_norm, c.rms_eps), cos, sin)
            k, v = self._kv(layer, h, cos, sin)
            x = x + layer.out(attention(index, q, k, v))
            h = F.rms_norm(x, (c.hidden_size,), layer.post_norm, c.rms_eps)
            x = x + layer.down(F.silu(layer.gate(h)) * layer.up(h))
        return F.rms_norm(x, (c.hidden_size,), self.norm, c.rms_eps)

    def base_logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., d] -> U [..., draft vocab], before the Markov bias and before temperature."""
        return self._lm_head(hidden)

    def markov_bias(self, previous: Tensor) -> Tensor:
        """Bias [..., draft vocab] for previous tokens (target ids, int64 [...])."""
        return self._markov_w2(self.markov_w1[previous])

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """Logit of the confidence that the draft at this row is accepted [...]; None without a confidence head."""
        if self._confidence_weight is None:
            return None
        features = hidden
        if self.config.confidence_with_markov:
            features = torch.cat([hidden, self.markov_w1[previous]], dim=-1)
        return F.linear(features, self._confidence_weight, self._confidence_bias).squeeze(-1)


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a native checkpoint (without the shared embedding) and its shape."""
    c = config
    q_rows, kv_rows = c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (c.hidden_size, c.tap_width),
        "hidden_norm.weight": (c.hidden_size,),
        "norm.weight": (c.hidden_size,),
        "lm_head.weight": (c.draft_vocab_size, c.hidden_size),
        "markov_head.markov_w1.weight": (c.vocab_size, c.markov_rank),
        "markov_head.markov_w2.weight": (c.draft_vocab_size, c.markov_rank),
    }
    for i in range(c.layers):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (c.hidden_size,),
            f"layers.{i}.post_attention_layernorm.weight": (c.hidden_size,),
            f"layers.{i}.self_attn.q_proj.weight": (q_rows, c.hidden_size),
            f"layers.{i}.self_attn.k_proj.weight": (kv_rows, c.hidden_size),
            f"layers.{i}.self_attn.v_proj.weight": (kv_rows, c.hidden_size),
            f"layers.{i}.self_attn.o_proj.weight": (c.hidden_size, q_rows),
            f"layers.{i}.self_attn.q_norm.weight": (c.head_dim,),
            f"layers.{i}.self_attn.k_norm.weight": (c.head_dim,),
            f"layers.{i}.mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
            f"layers.{i}.mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
            f"layers.{i}.mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
        }
    if c.confidence_head:
        width = c.hidden_size + (c.markov_rank if c.confidence_with_markov else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return shapes


def check_shapes(config: DrafterConfig, weights: Mapping[str, Tensor], *, embedding: bool) -> None:
    """Raise ModelConfigError naming the first tensor that is missing or has another shape than the config says."""
    shapes = expected_shapes(config)
    if embedding:
        shapes[EMBED] = (config.vocab_size, config.hidden_size)
    for name, shape in shapes.items():
        if name not in weights:
            raise ModelConfigError(f"the drafter checkpoint lacks the tensor {name}")
        if tuple(weights[name].shape) != shape:
            raise ModelConfigError(f"{name} has shape {tuple(weights[name].shape)}, config.json implies {shape}")


class DrafterCheckpoint:
    """A drafter directory in the native layout: config, tensors, and the draft-to-target vocabulary map.

    `draft_ids`: int64 [draft vocab], strictly increasing target ids (on disk: `d2t`, the offset to add to a draft id).
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = drafter_config.read(directory)
        file = directory / "model.safetensors"
        if not file.is_file():
            raise ModelConfigError(f"{directory} has no model.safetensors")
        self.tensors = load_file(str(file))
        self.draft_ids = self._draft_ids()

    def _draft_ids(self) -> Tensor:
        c = self.config
        offsets = self.tensors.pop("d2t", None)
        self.tensors.pop("t2d", None)
        identity = torch.arange(c.draft_vocab_size)
        if offsets is None:
            if c.draft_vocab_size != c.vocab_size:
                raise ModelConfigError("draft_vocab_size is reduced but the checkpoint has no d2t tensor")
            return identity
        if tuple(offsets.shape) != (c.draft_vocab_size,):
            raise ModelConfigError(f"d2t has shape {tuple(offsets.shape)}, draft_vocab_size is {c.draft_vocab_size}")
        ids = identity + offsets.to(torch.int64)
        if bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= c.vocab_size:
            raise ModelConfigError("d2t is not an offset to strictly increasing target ids inside the vocabulary")
        return ids

    def network(
        self, embedding: Tensor, *, device: str = "cpu", dtype: torch.dtype = torch.float32,
        max_positions: int | None = None,
    ) -> DrafterNetwork:  # fmt: skip
        """Build the network for serving; `embedding` is the target's, used unless the checkpoint brings its own."""
        weights = {EMBED: embedding} | self.tensors
        placed = {name: t.to(device=device, dtype=dtype) for name, t in weights.items()}
        return DrafterNetwork(self.config, placed, max_positions=max_positions)
