"""The exponential function of every softmax: one definition, and the same bits on every machine.

Purpose: weights from shifted logits. ``numpy.exp`` is libm's on one machine and a vector library's on another, and they
differ in the last bit; this one is a fixed sequence of additions and multiplications.

Invariants:

- Every operation is one that IEEE 754 rounds once, and no two of them are fused. So numpy, the C kernel, and all ranks
  of a sharded vocabulary get equal bits.
- Within 1.01 ulp of exp(x) for x in [``LOWEST``, 0]; 0 below. exp(0) is 1, and no result is above it.
- The numpy code here defines the result; ``dspark.native.kernels`` computes the same, faster, where it can.

Called by ``dspark.apportionment`` and ``dspark.processors``, and for sharded rows by ``dspark.target_shards`` and
``dspark.draft_shards``. It never sees a positive argument: every caller has subtracted the maximum.

Source: reduction by multiples of ln 2 in two parts, Cody and Waite, "Software Manual for the Elementary Functions"
(1980); Taylor series up to the 13th power, whose remainder is below 2**-57 at ln(2) / 2.
"""

from __future__ import annotations

from math import factorial

import numpy as np

from dspark.native import kernels
from dspark.row import Float64s

# exp(-708) is about 2**-1021.4: every result is zero or a normal number.
LOWEST = -708.0

_LOG2_E = float.fromhex("0x1.71547652b82fep+0")
# Times an integer below 2**11 the first part is exact; the second is the rest of ln 2.
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
# Added to a number below 2**51 it rounds to an integer, which is in the lowest bits of the sum.
_TO_INTEGER = 1.5 * 2.0**52
_EXPONENT_SHIFT = np.uint64(52)

# Numbers that numpy works on at once: some twenty temporary arrays of them stay in the second-level cache.
_BLOCK = 4096

# Two terms of the Taylor series behind 1 + rest, from the power that is named.
_PAIRS = [(1.0 / factorial(power), 1.0 / factorial(power + 1)) for power in (2, 4, 6, 8, 10, 12)]


def exponentiate(values: Float64s) -> None:
    """Replace values <= 0 of any shape by their exponentials, in place; ``-inf`` becomes 0."""
    if kernels.exponentiate(values):
        return
    flat = values.ravel()
    for start in range(0, flat.size, _BLOCK):
        flat[start : start + _BLOCK] = _exponentials(flat[start : start + _BLOCK])
    values[...] = flat.reshape(values.shape)


def _exponentials(values: Float64s) -> Float64s:
    """x = whole * ln 2 + rest: the series of the rest, with ``whole`` added to its exponent."""
    kept = np.maximum(values, LOWEST)
    shifted = kept * _LOG2_E + _TO_INTEGER
    whole = shifted - _TO_INTEGER
    rest = (kept - whole * _LN2_HIGH) - whole * _LN2_LOW
    square = rest * rest
    fourth = square * square
    from_2, from_4, from_6, from_8, from_10, from_12 = (even + rest * odd for even, odd in _PAIRS)
    upper = (from_6 + square * from_8) + fourth * (from_10 + square * from_12)
    series = 1.0 + (rest + square * ((from_2 + square * from_4) + fourth * upper))
    bits = series.view(np.uint64) + (shifted.view(np.uint64) << _EXPONENT_SHIFT)
    return np.where(values < LOWEST, 0.0, bits.view(np.float64))
