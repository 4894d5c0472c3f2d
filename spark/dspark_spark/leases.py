"""What the engine and its draft link hold of one request's drafting: the lease, and the request of one round.

Values only; `draft_link` decides when their state changes. Called by `engine`, `sequence` and `draft_link`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dspark_proto import EMPTY_DIGEST, Lane

LOSS_PAUSE_S, LOSS_PAUSE_MAX_S = 0.2, 5.0
NS = 1_000_000_000


@dataclass(slots=True)
class DraftLease:
    """One request's share of the worker.

    seed: signed 64-bit. support: entries per row, 0 for dense rows. taps: bf16 [positions, taps * d] of every committed
    position below `known`, kept by the engine for re-seeding; tokens: the request's own list of committed tokens, at
    least as long. The rest belongs to the link: `open` while the worker holds the slot; `lost` when its generation died
    and a reset is due at `retry_ns`; no STEP before `ready_ns`; `losses` in a row; `replied` when the outcome of the
    last round may be committed with the next STEP.
    """

    slot: int
    session: int
    seed: int
    lane: Lane
    support: int
    temperature: float
    taps: Tensor
    tokens: Sequence[int]
    known: int = 0
    digest: bytes = EMPTY_DIGEST
    open: bool = False
    lost: bool = False
    losses: int = 0
    retry_ns: int = 0
    ready_ns: int = 0
    replied: bool = False

    def pause_ns(self) -> int:
        """How long to leave the slot alone: nothing after one loss, then doubling."""
        return int(NS * min(LOSS_PAUSE_MAX_S, LOSS_PAUSE_S * (2 ** min(16, max(0, self.losses - 1)) - 1)))


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What one STEP asks: draft `depth` tokens after `anchor_token`, which sits at `anchor_position`.

    accepted_count: drafts of the previous round that were committed, None when that round had no proposal.
    """

    lease: DraftLease
    round: int
    anchor_token: int
    anchor_position: int
    depth: int
    accepted_count: int | None
    commit_token: int
