"""The drafter's state, one slot per leased request: context keys and values, and how long the context is.

State is keyed by slot and cleared by `open`; the protocol's ledger guarantees that a slot's generation matches before
anything here is called, and nothing is ever addressed by batch row.

Rollback is rewriting: block rows store their keys and values just past the context end, where the next round's context
rows overwrite them before any query can read them (a block attends to [0, context end + block) of its own slot only,
and rewrites the block part itself first).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark.models.drafter import DrafterNetwork


class ContextFullError(RuntimeError):
    """The request has outgrown the slot: the worker must refuse the step, and the verifier goes on target-only."""


class DraftSlots:
    """Context KV of every slot, allocated once: [layers, slots, kv_heads, length + block, head_dim]."""

    def __init__(self, network: DrafterNetwork, slots: int, length: int) -> None:
        c = network.config
        self.network, self.length, self.slots = network, length, slots
        shape = (c.layers, slots, c.kv_heads, length + c.block_size, c.head_dim)
        self._keys = torch.zeros(shape, dtype=network.embed.dtype, device=network.embed.device)
        self._values = torch.zeros_like(self._keys)
        self._ends = [0] * slots

    def open(self, slot: int) -> None:
        """Forget whatever the slot held."""
        self._ends[slot] = 0

    def context_end(self, slot: int) -> int:
        return self._ends[slot]

    @torch.inference_mode()
    def extend(self, slot: int, first: int, taps: Tensor) -> None:
        """Append context rows: taps [rows, taps * d] of positions first .. first + rows. Raises ContextFullError."""
        rows = len(taps)
        if first != self._ends[slot]:
            raise AssertionError(f"context of slot {slot} ends at {self._ends[slot]}, rows start at {first}")
        if first + rows > self.length:
            raise ContextFullError(f"slot {slot}: context {first + rows} is longer than {self.length}")
        context = self.network.context_rows(taps.to(self._keys.dtype))
        positions = torch.arange(first, first + rows, device=self._keys.device)
        for layer in range(self.network.config.layers):
            k, v = self.network.context_kv(layer, context, positions)
            self._keys[layer, slot, :, first : first + rows] = k.transpose(0, 1)
            self._values[layer, slot, :, first : first + rows] = v.transpose(0, 1)
        self._ends[slot] = first + rows

    @torch.inference_mode()
    def hidden(self, slots: Sequence[int], anchors: Sequence[int]) -> Tensor:
        """Backbone of one block per slot: [requests, block, d]. The anchor of each sits at its slot's context end."""
        c = self.network.config
        ids = torch.full((len(slots), c.block_size), c.mask_token_id, device=self._keys.device)
        ids[:, 0] = torch.tensor(list(anchors), device=self._keys.device)
        ends = [self._ends[s] for s in slots]
        positions = torch.tensor(ends, device=self._keys.device)[:, None] + torch.arange(
            c.block_size, device=self._keys.device
        )
        return self.network.backbone(ids, positions, _SlotAttention(self._keys, self._values, slots, ends))


class _SlotAttention:
    """Attention of block rows [requests, block, ...] over their own slots."""

    def __init__(self, keys: Tensor, values: Tensor, slots: Sequence[int], ends: Sequence[int]) -> None:
        self._keys, self._values = keys, values
        self._places = list(zip(slots, ends, strict=True))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        requests, block, heads, head_dim = q.shape
        out = q.new_empty(requests, block, heads * head_dim)
        for i, (slot, end) in enumerate(self._places):
            keys, values = self._keys[layer, slot], self._values[layer, slot]
            keys[:, end : end + block] = k[i].transpose(0, 1)
            values[:, end : end + block] = v[i].transpose(0, 1)
            kv_heads = keys.shape[0]
            rows = q[i].view(block, kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, head_dim)
            seen = slice(0, end + block)
            mixed = F.scaled_dot_product_attention(rows, keys[None, :, seen], values[None, :, seen])
            out[i] = mixed.view(kv_heads, -1, block, head_dim).permute(2, 0, 1, 3).reshape(block, -1)
        return out
