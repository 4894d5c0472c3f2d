"""Weights in panels: FP32 products of a few rows that run at memory speed and do not depend on the batch.

The native product (`dspark/native/products.c`) reads every weight once per step, and sums each output over k in one
order whatever the number of rows: a request's row is the same bits alone, beside others, and as part of a verify block.
That makes speculation on and off comparable token by token, not only in law.

Called by `linear.Linear`, which owns the choice among products. Without the compiled library `works()` is False.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache

import torch
from torch import Tensor

from dspark.models.decode_library import library

_HUGE_PAGE = 1 << 21
_MADV_HUGEPAGE = 14
_FLOAT_BYTES = 4


@cache
def works() -> bool:
    """True when the native product is there and agrees with torch's."""
    if library() is None:
        return False
    weight = torch.linspace(-1, 1, 37 * 48).reshape(37, 48)
    rows = torch.linspace(-2, 2, 7 * 48).reshape(7, 48)
    return bool(torch.allclose(PanelWeight(weight)(rows), rows @ weight.T, atol=1e-4))


class PanelWeight:
    """``y = x @ weight.T`` for FP32 CPU tensors, x [..., in]; owns a copy of weight [out, in] in panels."""

    def __init__(self, weight: Tensor) -> None:
        native = library()
        assert native is not None
        assert weight.dtype is torch.float32
        assert weight.device.type == "cpu"
        self._native = native
        self.out_features, self.in_features = weight.shape
        self._memory = _huge_pages(native.dspark_packed_size(self.out_features, self.in_features))
        weight = weight.contiguous()
        native.dspark_pack(weight.data_ptr(), self._memory.data_ptr(), self.out_features, self.in_features)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32 or x.shape[-1] != self.in_features:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}, wanted float32 [..., {self.in_features}]")
        x = x.contiguous()
        y = torch.empty((*x.shape[:-1], self.out_features))
        rows = math.prod(x.shape[:-1])
        if rows:
            # Fresh memory each time: a row or six of floats, which malloc hands back from its cache.
            scratch = torch.empty_like(x)
            self._native.dspark_product(
                self._memory.data_ptr(), x.data_ptr(), scratch.data_ptr(), y.data_ptr(),
                rows, self.in_features, self.out_features, torch.get_num_threads(),
            )  # fmt: skip
        return y


def _huge_pages(count: int) -> Tensor:
    """`count` floats, aligned to huge pages when they fill some, which the kernel is then asked for."""
    if count * _FLOAT_BYTES < _HUGE_PAGE:
        return torch.empty(count)
    memory = torch.empty(count + _HUGE_PAGE // _FLOAT_BYTES)
    skip = -memory.data_ptr() % _HUGE_PAGE // _FLOAT_BYTES
    aligned = memory[skip : skip + count]
    if hasattr(libc := ctypes.CDLL(None), "madvise"):
        address, size = ctypes.c_void_p(aligned.data_ptr()), ctypes.c_size_t(count * _FLOAT_BYTES)
        libc.madvise(address, size, _MADV_HUGEPAGE)  # advice: a refusal changes nothing
    return aligned
