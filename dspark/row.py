"""One proposal row and the ways in which a row can be wrong.

Purpose: the type that the drafter draws from, the wire carries and the verifier decides with. Sparse and dense rows
are one type: a dense row is a row with many entries, and nothing downstream asks which it was.

Invariants:

- A row has at least one entry, ids strictly ascending (global target ids), counts >= 1, sum = ``MASS``.
- ``q = count / MASS`` is exact in FP32, and so is every partial sum.

Called by everything that makes, reads or uses rows. It never allocates, draws or checks: ``dspark.dyadic`` and
``dspark.dense`` do.

Source: seed document 000 ("Distribution contract and precision").
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Mask = NDArray[np.bool_]

MASS = 1 << 24
SEMANTIC_ID = "dyadic24-standard-v1"


class RowFault(StrEnum):
    """Why a row was refused. The first group arises when a row is made, the second when a reply is read."""

    NOT_FINITE = "not_finite"
    NEGATIVE = "negative"
    ZERO_MASS = "zero_mass"
    LEFTOVER = "leftover"
    TEMPERATURE = "temperature"
    SUPPORT = "support"

    SHAPE = "shape"
    ENTRIES = "entries"
    NEGATIVE_ZERO = "negative_zero"
    SUBNORMAL = "subnormal"
    OVER_ONE = "over_one"
    NOT_DYADIC = "not_dyadic"
    PADDING = "padding"
    ZERO_COUNT = "zero_count"
    WRONG_SUM = "wrong_sum"
    ID_RANGE = "id_range"
    ID_ORDER = "id_order"
    ZERO_AT_TOKEN = "zero_at_token"


class RowError(ValueError):
    """A refused row: ``code`` says why, ``where`` names the field, row and entry."""

    def __init__(self, code: RowFault, where: str) -> None:
        super().__init__(f"{code}: {where}")
        self.code = code
        self.where = where


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One proposal distribution: ``ids`` int32[n] ascending, ``counts`` int64[n] >= 1 with sum ``MASS``.

    Made by the makers and validators of ``dspark.dyadic`` and ``dspark.dense`` only; the arrays are read-only from
    then on, because a q that changes after the draw is the oldest bug of this trade.
    """

    ids: Int32s
    counts: Int64s

    def __post_init__(self) -> None:
        self.ids.setflags(write=False)
        self.counts.setflags(write=False)

    def __len__(self) -> int:
        return self.ids.size

    def count(self, token: int) -> int:
        """Count of a global id, 0 outside the support."""
        place = int(self.ids.searchsorted(token))
        if place < self.ids.size and self.ids[place] == token:
            return int(self.counts[place])
        return 0


def refuse_where(bad: Mask, fault: RowFault, field: str) -> None:
    """Raise for the first place, in row order, at which ``bad`` is true."""
    if bad.any():
        first = np.argwhere(bad)[0].tolist()
        raise RowError(fault, f"{field}{first}")
