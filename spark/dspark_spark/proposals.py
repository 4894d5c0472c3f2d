"""From a completed reply in staging to rows that the sampler may use: validate everything, copy out, audit the draws.

Called by `engine`, which quarantines the worker when one of the two fails.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark.audit import AuditPlan, AuditReport, audit_rows
from dspark.dense import validate_dense_reply
from dspark.dyadic import Row, validate_reply
from dspark.philox import Keys
from dspark_proto import CONFIDENCE_MAX, ProposalReady, SupportPolicy


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted target ids and the row behind each.

    confidences: what the worker's head gave each draft before it was drawn, in [0, 1]; 1 where there is no opinion.
    """

    tokens: list[int]
    rows: list[Row]
    confidences: tuple[float, ...] = ()

    def cut(self, depth: int) -> Proposal:
        """Its first `depth` drafts; the others are as if they had never been drawn."""
        return Proposal(self.tokens[:depth], self.rows[:depth], self.confidences[:depth])


def read_proposal(event: ProposalReady, vocab: int) -> Proposal:
    """Validate a whole reply in one pass. Raises RowError; the staging lease stays the caller's to release."""
    rows = _dense_rows(event, vocab) if event.support == SupportPolicy.DENSE else _sparse_rows(event, vocab)
    return Proposal(list(event.tokens), rows, tuple(units / CONFIDENCE_MAX for units in event.confidences))


def _dense_rows(event: ProposalReady, vocab: int) -> list[Row]:
    q = np.frombuffer(event.q, dtype="<f4").reshape(event.depth, vocab)
    return validate_dense_reply(np.array(event.tokens, dtype=np.int32), q, vocab, event.depth)


def _sparse_rows(event: ProposalReady, vocab: int) -> list[Row]:
    shape = (event.depth, event.support)
    return validate_reply(
        np.array(event.tokens, dtype=np.int32),
        np.array(event.entries, dtype=np.int32),
        np.frombuffer(event.ids, dtype="<i4").reshape(shape),
        np.frombuffer(event.q, dtype="<f4").reshape(shape),
        vocab,
        event.depth,
        event.support,
    )


def audit_proposal(proposal: Proposal, anchor_position: int, keys: Keys, plan: AuditPlan) -> AuditReport:
    """Repeat the draws that the plan wants, before anything of the proposal is judged. keys: the worker's."""
    return audit_rows(proposal.rows, proposal.tokens, anchor_position, keys, plan)
