"""From a completed reply in staging to rows that the sampler may use: validate everything, then copy out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark.dyadic import Row, validate_reply
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
