"""A weight matrix in the form in which this machine multiplies it fastest.

On x86 CPUs in fp32, oneDNN's blocked weight layout makes a product with 1..16 rows two to four times faster than the
row-major one: six verify rows then cost little more than one, which is what speculation lives on. torch exposes that
layout through the two operators that its own compiler emits; they are probed once and checked against the plain
product, and everything else (bf16, CUDA, other CPUs) takes the plain product. Called by the target and the drafter.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F


@cache
def packed_fp32_works() -> bool:
    """True when the blocked fp32 product exists in this torch and agrees with the plain one."""
    ops = torch.ops.mkldnn
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not (available and hasattr(ops, "_linear_pointwise")):
        return False
    weight = torch.linspace(-1, 1, 64 * 48).reshape(64, 48)
    rows = torch.linspace(-2, 2, 3 * 48).reshape(3, 48)
    try:
        packed = ops._reorder_linear_weight(weight)
        product = ops._linear_pointwise(rows, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return bool(torch.allclose(product, rows @ weight.T, atol=1e-4))


class Linear:
    """``y = x @ weight.T`` for x [rows, in] and weight [out, in]; owns the (possibly re-laid-out) weight."""

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = weight.device.type == "cpu" and weight.dtype is torch.float32 and packed_fp32_works()
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self._packed else weight.contiguous()
        )

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
            return out
        return F.linear(x, self._weight)
