"""From a completed reply in staging to rows that the sampler may use: validate everything, copy out, audit the draws.

Called by `engine`, which quarantines the worker when one of the two fails.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark.audit import AuditPlan, AuditReport, audit_rows
from dspark.dyadic import Row, validate_reply
from dspark.philox import Keys
from dspark_proto import ProposalReady


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted target ids and the row behind each."""

    tokens: list[int]
    rows: list[Row]


def read_proposal(event: ProposalReady, vocab: int) -> Proposal:
    """Validate a whole reply in one pass. Raises RowError; the staging lease stays the caller's to release."""
    shape = (event.depth, event.support)
    rows = validate_reply(
        np.array(event.tokens, dtype=np.int32),
        np.array(event.entries, dtype=np.int32),
        np.frombuffer(event.ids, dtype="<i4").reshape(shape),
        np.frombuffer(event.q, dtype="<f4").reshape(shape),
        vocab,
        event.depth,
        event.support,
    )
    return Proposal(list(event.tokens), rows)


def audit_proposal(proposal: Proposal, anchor_position: int, keys: Keys, plan: AuditPlan) -> AuditReport:
    """Repeat the draws that the plan wants, before anything of the proposal is judged. keys: the worker's."""
    return audit_rows(proposal.rows, proposal.tokens, anchor_position, keys, plan)
