"""Many drafter blocks of known texts in one pass: what training and measurements need, and serving never does.

Every block sees the context rows below its own anchor and its own rows; blocks of one text share the context.
"""

from __future__ import annotations

import torch
from torch import Tensor


class PackedBlockAttention:
    """Attention of packed blocks (S sequences, A blocks of B rows) over context rows below the anchor and own block.

    Shapes in: q [S, A, B, heads, hd], k and v [S, A, B, kv, hd]. Context keys and values [S, N, kv, hd] per layer.
    """

    def __init__(self, context: list[tuple[Tensor, Tensor]], anchors: Tensor) -> None:
        self._context = context
        length = context[0][0].shape[1]
        visible = torch.arange(length)[None, None, :] < anchors[:, :, None]
        # One mask row per block, broadcast over kv heads and the block's query rows: [S, 1, A, 1, N].
        self._mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))[:, None, :, None, :]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context_k, context_v = self._context[layer]
        s, a, b, heads, hd = q.shape
        kv = k.shape[3]
        rows = b * (heads // kv)
        q = q.view(s, a, b, kv, heads // kv, hd).permute(0, 3, 1, 2, 4, 5).reshape(s, kv, a, rows, hd)
        q = q * hd**-0.5
        n = context_k.shape[1]
        far = (q.reshape(s, kv, a * rows, hd) @ context_k.permute(0, 2, 3, 1)).view(s, kv, a, rows, n)
        near = q @ k.permute(0, 3, 1, 4, 2)
        weights = torch.softmax(torch.cat([far + self._mask, near], dim=-1), dim=-1)
        far, near = torch.split(weights, [n, b], dim=-1)
        out = (far.reshape(s, kv, a * rows, n) @ context_v.transpose(1, 2)).view(s, kv, a, rows, hd)
        out = out + near @ v.permute(0, 3, 1, 2, 4)
        out = out.view(s, kv, a, b, heads // kv, hd).permute(0, 2, 3, 1, 4, 5)
        return out.reshape(s, a, b, heads * hd)
