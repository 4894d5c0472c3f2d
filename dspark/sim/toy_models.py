"""A toy target and a toy drafter: tables of rows, and which row follows which tokens.

The rows are made once per world, as the integers that production code uses: tickets with sum 2^60 and counts with sum
2^24. A target row depends on the token before it and its position. A draft row also depends on a checksum over every
tap row behind the anchor, so that a worker with another context drafts visibly otherwise. Called by `worker` and
`spark`; the oracle reads the same tables, for they are the models, and computes everything else itself.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from random import Random
from struct import Struct

import numpy as np

from dspark.dyadic import MASS, Int64s, Row
from dspark.tickets import TOTAL

ROWS = 64
TAP_LAYERS, TAP_WIDTH = (1,), 8
TAP_ROW_BYTES = len(TAP_LAYERS) * TAP_WIDTH * 2

_TAPS = Struct("<IIII")
_WORD = 0xFFFFFFFF


def tap_row(session: int, position: int, token: int) -> bytes:
    """The taps of one position, 8 values of 16 bits: who, where and what, and a mix of them."""
    mixed = (session * 0x9E3779B1 ^ position * 0x85EBCA77 ^ token * 0xC2B2AE3D) & _WORD
    return _TAPS.pack(session & _WORD, position, token, mixed)


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One row of the drafter, ready for use: values for the oracle, a `Row` for the worker, bytes for the wire.

    ids_bytes and q_bytes have `support` entries; dense_bytes has one value per token of the vocabulary.
    """

    ids: tuple[int, ...]
    counts: tuple[int, ...]
    row: Row
    ids_bytes: bytes
    q_bytes: bytes
    dense_bytes: bytes


class ToyModels:
    """`tickets[i]` and `masses[i]` are the same target row, as array and as list; `drafts[i]` guesses it."""

    def __init__(self, rng: Random, vocab: int, support: int) -> None:
        self.vocab = vocab
        self.masses = [_scaled(_weights(rng, vocab), TOTAL) for _ in range(ROWS)]
        self.tickets: list[Int64s] = [np.array(row, dtype=np.int64) for row in self.masses]
        for row in self.tickets:
            row.setflags(write=False)
        self.best = [row.index(max(row)) for row in self.masses]
        self.drafts = [_draft_row(rng, row, support) for row in self.masses]
        self.one_hot = [_one_hot(token, vocab) for token in range(vocab)]

    def target_index(self, previous: int, position: int) -> int:
        """Which target row predicts `position` after the token `previous`."""
        return ((previous * 0x9E3779B1 + position * 0x85EBCA77) >> 7) % ROWS

    def draft_index(self, context: int, previous: int, position: int) -> int:
        """Which draft row the worker uses; mostly the one that guesses the target's row."""
        if context % 4:
            return self.target_index(previous, position)
        return (context + previous * 31 + position * 17) % ROWS


def _weights(rng: Random, vocab: int) -> list[int]:
    """Uneven, a few of them zero."""
    weights = [0 if rng.random() < 0.1 else 1 + int(rng.random() ** 6 * 2**30) for _ in range(vocab)]
    weights[rng.randrange(vocab)] += 1
    return weights


def _scaled(weights: list[int], total: int) -> list[int]:
    """The weights scaled to sum `total`; what is left over goes to the first maximum."""
    mass = sum(weights)
    row = [weight * total // mass for weight in weights]
    row[row.index(max(row))] += total - sum(row)
    return row


def _draft_row(rng: Random, masses: list[int], support: int) -> DraftRow:
    """A blurred copy of a target row with at most `support` entries (all for 0)."""
    blurred = [mass + rng.randrange(TOTAL // (2 * len(masses))) for mass in masses]
    limit = support or len(masses)
    ids = sorted(sorted(range(len(masses)), key=lambda token: (-blurred[token], token))[:limit])
    counts = [count for count in _scaled([blurred[token] for token in ids], MASS - len(ids))]
    counts = [count + 1 for count in counts]
    return made_row(ids, counts, support, len(masses))


def made_row(ids: list[int], counts: list[int], support: int, vocab: int) -> DraftRow:
    """The row of these counts in every form."""
    row = Row(np.array(ids, dtype=np.int32), np.array(counts, dtype=np.int64))
    padding = [0] * ((support or len(ids)) - len(ids))
    dense = array("f", [0.0] * vocab)
    for token, count in zip(ids, counts, strict=True):
        dense[token] = count / MASS
    return DraftRow(
        tuple(ids),
        tuple(counts),
        row,
        array("i", [*ids, *padding]).tobytes(),
        array("f", [*(count / MASS for count in counts), *padding]).tobytes(),
        dense.tobytes(),
    )


def _one_hot(token: int, vocab: int) -> DraftRow:
    return made_row([token], [MASS], 1, vocab)
