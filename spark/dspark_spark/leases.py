"""What the engine and its draft link hold of drafting: a request's lease, what it asks for in a round, and the round.

Values only; `draft_link` decides when their state changes. `DraftSource` is what the engine needs of a link, or of a
pool of them. Called by `engine`, `sequence` and `draft_link`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from dspark.philox import Keys
from dspark_proto import EMPTY_DIGEST, Lane, ProposalReady

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


@dataclass(slots=True, eq=False)
class DraftRound:
    """What one `step` asked for: slots still awaited, proposals by slot, and the monotonic time of its deadline."""

    until_ns: int
    waiting: set[int]
    ready: dict[int, ProposalReady] = field(default_factory=dict)


class DraftSource(Protocol):
    """Where drafts come from. Owned by the engine thread; only `collect` may block, and no call raises for a worker's
    fault. `discards` counts proposals that were asked for and never became ready, by cause; its owner clears it.
    """

    up: bool
    reconnects: int
    generation_bumps: int
    discards: Counter[str]
    last_error: str | None

    @property
    def drops(self) -> Mapping[str, int]:
        """Frames dropped by cause since start."""

    def pump(self) -> None:
        """Take what has arrived, let timers run, reconnect when it is time. Never blocks."""

    def close(self) -> None:
        """Give every lease back and close the sockets."""

    def wait_up(self, timeout_s: float) -> bool:
        """Wait, from another thread than the engine's, until a worker has accepted."""

    def lease(self, lease: DraftLease) -> None:
        """Take a lease for a request; a worker opens it as soon as one can."""

    def release(self, lease: DraftLease) -> None:
        """The request is over."""

    def feed(self, lease: DraftLease) -> None:
        """Send context rows ahead of the first STEP, as far as credit goes."""

    def depth_limit(self, lease: DraftLease) -> int:
        """Deepest proposal that the lease's worker takes; 0 while it is not there."""

    def refusal(self, lease: DraftLease, asked: Sequence[DraftLease]) -> str:
        """Why no STEP may ask for this lease now, beside those `asked` already; empty when one may."""

    def step(self, requests: Sequence[DraftRequest]) -> DraftRound:
        """Ask for all requests' proposals; `refusal` must have been empty for each."""

    def collect(self, round_: DraftRound) -> dict[int, ProposalReady]:
        """Proposals by slot, once every awaited slot has answered or the round's deadline is over."""

    def proposal_keys(self, request: DraftRequest) -> Keys:
        """The key under which the worker draws what the request's last STEP asked for."""

    def invalid(self, lease: DraftLease, reason: str, cause: str = "invalid_row") -> None:
        """The lease's worker sent what passes every checksum and is wrong: quarantine this worker process."""
