"""The sequential part of a draft: one token after the other, each drawn from the row that goes on the wire.

The backbone gives base logits for all positions at once; the Markov head makes position j depend on the token drawn at
j - 1, so rows are built left to right. The draw uses the proposal domain of the request's key and integer counts only:
whoever holds the row and the key can repeat it. Where only ids are wanted (every lane but ratio), the row of the draw
stays here and a one-entry row of the drafted token is sent: a true statement about it, whatever law it came from.

Each position's confidence is read from the head before its token is drawn, and from nothing that the draw decides: the
verifier may stop a round at it (`dspark.admission`).

Where the request's text repeats itself, the token that followed before gets a bonus in the logits (`history`): at
temperature 0 it is taken, above it is only made likelier, because a sampled text repeats itself less.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.dense import dense_row
from dspark.dyadic import Row, draw, greedy_row, sparse_row
from dspark.models.drafter import DrafterNetwork
from dspark.philox import Domain, Keys
from dspark_proto import CONFIDENCE_MAX, Lane, SupportPolicy
from dspark_workers.history import TokenHistory

GREEDY_COPY_BIAS = 30.0
SAMPLED_COPY_BIAS = {2: 1.0, 3: 3.0}
"""Added to the logit of a repetition's next token, by the length of the match, before the draft temperature (chosen on
held-out texts)."""
MATCH_SUPPORT = 64
"""Entries of the row behind an ids-only draft; it does not travel."""


@dataclass(frozen=True, slots=True)
class DraftPolicy:
    """How one request drafts, fixed when its slot is opened.

    temperature: 0 is greedy (one-entry rows). support: entries of a row at most; 0 for rows over the whole draft
    vocabulary. lane: what the rows are for.
    """

    temperature: float
    support: int
    lane: Lane

    @property
    def ids_only(self) -> bool:
        """One-entry rows of tokens that are drawn: only the ratio lane looks at rows."""
        return self.lane is not Lane.RATIO


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens (target ids), the row that each was drawn from, and its confidence in units of 2^-24."""

    tokens: list[int]
    rows: list[Row]
    confidences: list[int]


class MarkovChain:
    """Samples drafts for one request at a time. `draft_ids`: target id of every draft id, ascending, int32."""

    def __init__(self, network: DrafterNetwork, draft_ids: Tensor) -> None:
        self._network = network
        self._ids = draft_ids.to(torch.int32).cpu().numpy()

    @torch.inference_mode()
    def sample(
        self,
        base: Tensor,
        anchor: int,
        anchor_position: int,
        policy: DraftPolicy,
        keys: Keys,
        history: TokenHistory | None = None,
        *,
        hidden: Tensor | None = None,
    ) -> Proposal:
        """base logits [depth, draft vocab] of one block -> `depth` tokens after `anchor`.

        hidden: the rows [depth, d] that the logits were made from, for the confidence head; None is no opinion.

        Raises ValueError for a confidence that is not a number, and RowError for logits that give no row.
        """
        text = [*(history.tail(anchor_position) if history else ()), anchor]
        tokens: list[int] = []
        rows: list[Row] = []
        confidences: list[int] = []
        for j in range(len(base)):
            previous = torch.tensor([text[-1]], device=base.device)
            confidences.append(self._confidence(hidden, j, previous))
            logits = (base[j] + self._network.markov_bias(previous)[0]).float().cpu().numpy()
            if history is not None:
                self._favour(logits, history.continuation(text), policy)
            word = keys.draw24(Domain.PROPOSAL, anchor_position + 1 + j)
            row = self._row(logits, policy, word)
            tokens.append(draw(row, word))
            text.append(tokens[-1])
            rows.append(row)
        return Proposal(tokens, rows, confidences)

    def _confidence(self, hidden: Tensor | None, position: int, previous: Tensor) -> int:
        """Of the draft at `position`, from its hidden row and the token before it; certain without a head."""
        logit = None if hidden is None else self._network.confidence_logits(hidden[position : position + 1], previous)
        if logit is None:
            return CONFIDENCE_MAX
        return round(float(torch.sigmoid(logit.float())) * CONFIDENCE_MAX)

    def _favour(self, logits: np.ndarray, match: tuple[int, int] | None, policy: DraftPolicy) -> None:
        """Add the copy bias to the next token of a repetition, where the draft vocabulary has it."""
        if match is None:
            return
        token, length = match
        place = int(self._ids.searchsorted(token))
        if place < len(self._ids) and self._ids[place] == token:
            logits[place] += SAMPLED_COPY_BIAS[length] if policy.temperature > 0 else GREEDY_COPY_BIAS

    def _row(self, logits: np.ndarray, policy: DraftPolicy, word: int) -> Row:
        """The row to send; the drafted token is its draw under `word`."""
        if policy.temperature == 0:
            return greedy_row(int(self._ids[int(logits.argmax())]))
        if policy.ids_only:
            return greedy_row(draw(sparse_row(logits, self._ids, policy.temperature, MATCH_SUPPORT), word))
        if policy.support == SupportPolicy.DENSE:
            return dense_row(logits, self._ids, policy.temperature, self._network.config.vocab_size)
        return sparse_row(logits, self._ids, policy.temperature, policy.support)
