"""The sequential part of a draft: one token after the other, each drawn from the row that goes on the wire.

The backbone gives base logits for all positions at once; the Markov head makes position j depend on the token drawn at
j - 1, so rows are built left to right. The draw uses the proposal domain of the request's key and integer counts only:
whoever holds the row and the key can repeat it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.dyadic import Row, draw, greedy_row, sparse_row
from dspark.models.drafter import DrafterNetwork
from dspark.philox import Domain, Keys


@dataclass(frozen=True, slots=True)
class DraftPolicy:
    """How one request drafts, fixed when its slot is opened. temperature 0 is greedy (one-entry rows)."""

    temperature: float
    support: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens (target ids) and the row that each was drawn from."""

    tokens: list[int]
    rows: list[Row]


class MarkovChain:
    """Samples drafts for one request at a time. `draft_ids`: target id of every draft id, ascending, int32."""

    def __init__(self, network: DrafterNetwork, draft_ids: Tensor) -> None:
        self._network = network
        self._ids = draft_ids.to(torch.int32).cpu().numpy()

    @torch.inference_mode()
    def sample(
        self, base: Tensor, anchor: int, anchor_position: int, depth: int, policy: DraftPolicy, keys: Keys
    ) -> Proposal:
        """base logits [depth, draft vocab] of one block -> `depth` tokens after `anchor`."""
        tokens: list[int] = []
        rows: list[Row] = []
        previous = anchor
        for j in range(depth):
            bias = self._network.markov_bias(torch.tensor([previous], device=base.device))
            logits = (base[j] + bias[0]).float().cpu().numpy()
            row = self._row(logits, policy)
            word = keys.draw24(Domain.PROPOSAL, anchor_position + 1 + j)
            previous = draw(row, word)
            tokens.append(previous)
            rows.append(row)
        return Proposal(tokens, rows)

    def _row(self, logits: np.ndarray, policy: DraftPolicy) -> Row:
        if policy.temperature == 0:
            return greedy_row(int(self._ids[int(logits.argmax())]))
        return sparse_row(logits, self._ids, policy.temperature, policy.support)
