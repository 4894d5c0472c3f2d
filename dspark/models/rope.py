"""Rotary position embedding, half-split ("neox") form, as the Llama and Qwen3 families use it."""

from __future__ import annotations

import torch
from torch import Tensor


class RopeTable:
    """cos and sin for positions [0, length), each [length, head_dim]; sin carries the sign of the rotated half."""

    def __init__(self, head_dim: int, theta: float, length: int, device: torch.device, dtype: torch.dtype) -> None:
        frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency[None, :]
        cos, sin = angle.cos(), angle.sin()
        self.cos = torch.cat([cos, cos], dim=-1).to(device=device, dtype=dtype)
        self.sin = torch.cat([-sin, sin], dim=-1).to(device=device, dtype=dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows for int64 positions [...], shaped [..., 1, head_dim] so that they broadcast over heads."""
        return self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotation to x [..., heads, head_dim]."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
