"""A weight matrix in the form in which this machine multiplies it fastest.

On CPUs in fp32 that is the native product of `panels`: six verify rows cost little more than one, which is what
speculation lives on. Without the compiled library oneDNN's blocked layout comes next; torch exposes it through the two
operators that its own compiler emits, which are probed once and checked against the plain product. Everything else
(bf16, CUDA) takes the plain product. Called by the target and the drafter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark.models import panels


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
    """``y = x @ weight.T`` for x [..., in] and weight [out, in]; owns the (possibly re-laid-out) weight."""

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._product = _fastest_product(weight)

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)


def _fastest_product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    if weight.device.type == "cpu" and weight.dtype is torch.float32:
        if panels.works():
            return panels.PanelWeight(weight)
        if packed_fp32_works():
            return _blocked(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()))
    weight = weight.contiguous()
    return lambda x: F.linear(x, weight)


def _blocked(weight: Tensor) -> Callable[[Tensor], Tensor]:
    product = torch.ops.mkldnn._linear_pointwise
    return lambda x: product(x, weight, None, "none", [], "")
