"""Attention of decode and verify rows in the native kernel: quick, and the same bits for a row whatever its company.

`attend` stores the new keys and values and mixes the values of every earlier position, like the general path in
`target` does with torch's operators. A verify block of six rows then gives each row what a step of its own would give.
Called by `target.RaggedAttention` when `fits` says so; longer runs of rows (prefill) take torch's kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.models.decode_library import library

MOST_ROWS = 32
"""Rows of one request from which on torch's blocked kernel is quicker."""
_LANES = 8


def fits(rows: int, keys: Tensor, values: Tensor) -> bool:
    """Whether the kernel takes this many new rows into a slot's keys and values [kv_heads, length, head_dim]."""
    return (
        rows <= MOST_ROWS
        and keys.dtype is torch.float32
        and keys.device.type == "cpu"
        and keys.shape[2] % _LANES == 0
        and keys.is_contiguous()
        and values.is_contiguous()
        and library() is not None
    )


def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """q [rows, heads, hd], k and v [rows, kv_heads, hd] at positions start ... -> [rows, heads * hd].

    Rows may lie apart (views of one product's output), heads and dimensions may not.
    """
    native = library()
    assert native is not None
    rows, heads, dim = q.shape
    kv_heads, length, _ = keys.shape
    assert start + rows <= length, f"{rows} rows at {start} do not fit a cache of {length}"
    q, k, v = (_dense_heads(t) for t in (q, k, v))
    # Fresh memory each time: some kilobytes, which malloc hands back from its cache.
    out = torch.empty(rows, heads * dim)
    threads = torch.get_num_threads()
    scratch = torch.empty(threads, start + rows + _LANES)
    native.dspark_attention(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(),
        scratch.data_ptr(), q.stride(0), k.stride(0), v.stride(0),
        rows, heads, kv_heads, dim, length, start, threads,
    )  # fmt: skip
    return out


def _dense_heads(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
