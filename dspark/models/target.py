"""The target network: one compact decoder for the Llama and Qwen3 dense families.

A forward pass takes *segments*: for each request the slot that owns its KV rows, the position of its first new token
and the new tokens (a prefill chunk, one decode token, or anchor + drafts to verify). All segments share the matrix
products; attention runs per segment, so a request's arithmetic does not depend on who else is in the batch beyond the
product's own blocking. Taps (outputs of chosen layers, which the drafter conditions on) are captured in the same pass.

KV rows past the committed length of a slot are garbage by contract: the next pass over those positions rewrites them
before any query can see them (causal masks stop at the segment's own rows). That is the whole rollback.

Layer indices of taps are zero-based indices of the layer whose *output* is tapped (the native DSpark convention).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark.models import decode_attention
from dspark.models.config import DecoderConfig, ModelConfigError
from dspark.models.linear import Linear
from dspark.models.rope import RopeTable, rotate


@dataclass(frozen=True, slots=True)
class Segment:
    """New tokens of one request: they get KV rows [start, start + len(tokens)) of `slot`."""

    slot: int
    start: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """logits [rows, vocab] for the rows asked for; taps [all rows, taps * hidden] in bf16 or None; hidden [rows, d]."""

    logits: Tensor
    taps: Tensor | None
    hidden: Tensor


class KVCache:
    """Keys and values of every slot, allocated once: [layers, slots, kv_heads, length, head_dim] each."""

    def __init__(
        self, config: DecoderConfig, slots: int, length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (config.layers, slots, config.kv_heads, length, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.slots, self.length = slots, length


class Attention(Protocol):
    """Stores new k and v, then attends. q [rows, heads, hd]; k, v [rows, kv_heads, hd] -> [rows, heads * hd]."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class RaggedAttention:
    """Attention of segments of different lengths over their own slots."""

    def __init__(self, cache: KVCache, segments: Sequence[Segment]) -> None:
        self._cache = cache
        self._segments = segments
        self._native = [decode_attention.fits(len(s.tokens), cache.keys[0, 0], cache.values[0, 0]) for s in segments]
        self._masks = [None if n else self._mask(s) for n, s in zip(self._native, segments, strict=True)]

    def _mask(self, segment: Segment) -> Tensor | None:
        """Causal mask [n, start + n]: row i sees positions <= start + i. None where every row sees everything."""
        n = len(segment.tokens)
        if n == 1:
            return None
        total = segment.start + n
        mask = torch.ones(n, total, dtype=torch.bool, device=self._cache.keys.device)
        return mask.tril(segment.start)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outputs, row = [], 0
        for segment, mask, native in zip(self._segments, self._masks, self._native, strict=True):
            n = len(segment.tokens)
            rows = slice(row, row + n)
            keys, values = self._cache.keys[layer, segment.slot], self._cache.values[layer, segment.slot]
            if native:
                outputs.append(decode_attention.attend(q[rows], k[rows], v[rows], keys, values, segment.start))
            else:
                outputs.append(self._attend(keys, values, segment, mask, q[rows], k[rows], v[rows]))
            row += n
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(
        self, keys: Tensor, values: Tensor, segment: Segment, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        n, end = len(segment.tokens), segment.start + len(segment.tokens)
        keys[:, segment.start : end] = k.transpose(0, 1)
        values[:, segment.start : end] = v.transpose(0, 1)
        kv_heads, head_dim = keys.shape[0], keys.shape[2]
        groups = q.shape[1] // kv_heads
        # Query heads of one kv head become extra rows: one product per kv head instead of repeated keys.
        q = q.reshape(n, kv_heads, groups, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, groups * n, head_dim)
        if mask is not None:
            mask = mask.repeat(groups, 1)
        out = F.scaled_dot_product_attention(q, keys[None, :, :end], values[None, :, :end], attn_mask=mask)
        return out.reshape(kv_heads, groups, n, head_dim).permute(2, 0, 1, 3).reshape(n, -1)


class LockstepAttention:
    """One new token for every slot at once, at its own position: the training corpus is generated this way.

    positions: int64 [slots]; `span` is the largest position + 1, so that unused cache rows cost nothing.
    """

    def __init__(self, cache: KVCache, positions: Tensor, span: int) -> None:
        self._cache = cache
        self._positions = positions
        self._rows = torch.arange(cache.slots, device=positions.device)
        self._span = span
        hidden = torch.arange(span, device=positions.device)[None, :] > positions[:, None]
        # In the cache's dtype: a wider mask would promote the weights, and bf16 values could not be mixed with them.
        mask = torch.zeros(cache.slots, 1, 1, span, device=positions.device, dtype=cache.keys.dtype)
        self._mask = mask.masked_fill_(hidden[:, None, None, :], float("-inf"))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._rows, :, self._positions] = k
        values[self._rows, :, self._positions] = v
        slots, kv_heads, head_dim = k.shape
        q = q.reshape(slots, kv_heads, -1, head_dim)
        scores = torch.matmul(q, keys[:, :, : self._span].transpose(-1, -2)) * head_dim**-0.5
        weights = torch.softmax(scores + self._mask, dim=-1)
        return torch.matmul(weights, values[:, :, : self._span]).reshape(slots, -1)


class _Layer:
    """Weights of one decoder block."""

    def __init__(self, prefix: str, weights: Mapping[str, Tensor], config: DecoderConfig) -> None:
        def get(name: str) -> Tensor:
            return weights[f"{prefix}{name}.weight"]

        self.input_norm = get("input_layernorm")
        self.post_norm = get("post_attention_layernorm")
        self.qkv = Linear(
            torch.cat([get("self_attn.q_proj"), get("self_attn.k_proj"), get("self_attn.v_proj")])
        )
        self.out = Linear(get("self_attn.o_proj"))
        self.gate_up = Linear(torch.cat([get("mlp.gate_proj"), get("mlp.up_proj")]))
        self.down = Linear(get("mlp.down_proj"))
        self.q_norm = get("self_attn.q_norm") if config.qk_norm else None
        self.k_norm = get("self_attn.k_norm") if config.qk_norm else None


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint (Hugging Face names) and its shape."""
    c = config
    q_rows, kv_rows = c.heads * c.head_dim, c.kv_heads * c.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (c.hidden_size,),
        "post_attention_layernorm": (c.hidden_size,),
        "self_attn.q_proj": (q_rows, c.hidden_size),
        "self_attn.k_proj": (kv_rows, c.hidden_size),
        "self_attn.v_proj": (kv_rows, c.hidden_size),
        "self_attn.o_proj": (c.hidden_size, q_rows),
        "mlp.gate_proj": (c.intermediate_size, c.hidden_size),
        "mlp.up_proj": (c.intermediate_size, c.hidden_size),
        "mlp.down_proj": (c.hidden_size, c.intermediate_size),
    }
    if c.qk_norm:
        layer |= {"self_attn.q_norm": (c.head_dim,), "self_attn.k_norm": (c.head_dim,)}
    shapes = {f"model.layers.{i}.{n}.weight": shape for i in range(c.layers) for n, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size), "model.norm.weight": (c.hidden_size,)}
    return shapes if c.tied_embeddings else shapes | {"lm_head.weight": (c.vocab_size, c.hidden_size)}


def check_shapes(config: DecoderConfig, weights: Mapping[str, Tensor]) -> None:
    """Raise ModelConfigError for the first tensor that is missing, misshapen, or left over.

    A tensor that is left over (a bias, a further layer) would be left out of the arithmetic without a sign. A head
    beside tied embeddings and stored rotary frequencies are copies.
    """
    shapes = expected_shapes(config)
    for name, shape in shapes.items():
        if name not in weights:
            raise ModelConfigError(f"the checkpoint lacks the tensor {name}")
        if tuple(weights[name].shape) != shape:
            raise ModelConfigError(f"{name} has shape {tuple(weights[name].shape)}, the config implies {shape}")
    for name in weights:
        if name not in shapes and name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
            raise ModelConfigError(f"the checkpoint has the tensor {name}, which the config does not imply")


class TargetModel:
    """A loaded target. Not thread-safe: the engine thread owns it.

    weights: Hugging Face names of the Llama family (``model.layers.0.self_attn.q_proj.weight`` ...), any float dtype.
    Raises ModelConfigError naming a tensor that is missing, has another shape, or has no place in this network.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_positions: int | None = None,
    ) -> None:
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        check_shapes(config, weights)
        weights = {name: t.to(device=self.device, dtype=dtype) for name, t in weights.items()}
        self.embed = weights["model.embed_tokens.weight"]
        self.norm = weights["model.norm.weight"]
        self._layers = [_Layer(f"model.layers.{i}.", weights, config) for i in range(config.layers)]
        self.lm_head = Linear(self.embed if config.tied_embeddings else weights["lm_head.weight"])
        length = min(config.max_context, max_positions or config.max_context)
        self._rope = RopeTable(config.head_dim, config.rope_theta, length, self.device, dtype)

    def new_cache(self, slots: int, length: int) -> KVCache:
        return KVCache(self.config, slots, length, self.device, self.dtype)

    @torch.inference_mode()
    def forward(
        self,
        cache: KVCache,
        segments: Sequence[Segment],
        *,
        tap_layers: Sequence[int] = (),
        logit_rows: Sequence[int] | None = None,
    ) -> ForwardResult:
        """Run all segments in one pass.

        logit_rows: indices into the concatenated rows whose logits are wanted, in that order; None is every row.
        """
        tokens = [t for s in segments for t in s.tokens]
        places = [s.start + i for s in segments for i in range(len(s.tokens))]
        ids = torch.tensor(tokens, device=self.device)
        positions = torch.tensor(places, device=self.device)
        x, taps = self.run_layers(ids, positions, RaggedAttention(cache, segments), tap_layers)
        if logit_rows is not None and list(logit_rows) != list(range(len(tokens))):
            x = x[torch.tensor(list(logit_rows), device=self.device, dtype=torch.int64)]
        hidden = F.rms_norm(x, (self.config.hidden_size,), self.norm, self.config.rms_eps)
        return ForwardResult(self.lm_head(hidden), taps, hidden)

    def run_layers(
        self, ids: Tensor, positions: Tensor, attention: Attention, tap_layers: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Embedding and every block: the residual stream [rows, d] before the final norm, and the taps."""
        cos, sin = self._rope.at(positions)
        x = self.embed[ids]
        taps = []
        for index, layer in enumerate(self._layers):
            x = self._block(index, layer, x, cos, sin, attention)
            if index in tap_layers:
                taps.append(x.to(torch.bfloat16))
        return x, torch.cat(taps, dim=-1) if taps else None

    def _block(
        self, index: int, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention
    ) -> Tensor:
        c = self.config
        rows = x.shape[0]
        h = F.rms_norm(x, (c.hidden_size,), layer.input_norm, c.rms_eps)
        qkv = layer.qkv(h).view(rows, c.heads + 2 * c.kv_heads, c.head_dim)
        q, k, v = torch.split(qkv, [c.heads, c.kv_heads, c.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = F.rms_norm(q, (c.head_dim,), layer.q_norm, c.rms_eps)
            k = F.rms_norm(k, (c.head_dim,), layer.k_norm, c.rms_eps)
            qk = rotate(torch.cat([q, k], dim=1), cos, sin)
        else:
            qk = rotate(qkv[:, : c.heads + c.kv_heads], cos, sin)
        x = x + layer.out(attention(index, qk[:, : c.heads], qk[:, c.heads :], v))
        h = F.rms_norm(x, (c.hidden_size,), layer.post_norm, c.rms_eps)
        gate, up = torch.split(layer.gate_up(h), c.intermediate_size, dim=-1)
        return x + layer.down(F.silu(gate) * up)
