"""What the engine and its draft link hold of drafting: a request's lease, what it asks for in a round, and the round.

Values only; `draft_link` and `draft_pool` decide when their state changes. `DraftSource` is what the engine needs of a
link, or of a pool of them. Called by `engine`, `sequence`, `draft_link` and `draft_pool`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from dspark.philox import Keys
from dspark_proto import EMPTY_DIGEST, Lane, ProposalReady

LOSS_PAUSE_S, LOSS_PAUSE_MAX_S = 0.2, 2.0
NS = 1_000_000_000

WorkerState = Literal["connecting", "up", "late", "draining", "quarantined"]
"""late: it is up, but its rounds keep timing out, so that it rests and gets no new leases."""


@dataclass(slots=True)
class DraftLease:
    """One request's share of a worker.

    slot: the engine's slot, by which rounds and replies name the request; `wire` is the slot of the worker's connection
    that the link has given it, None without one. seed: signed 64-bit. support: entries per row, 0 for dense rows.
    taps: bf16 [positions, taps * d] of every committed position below `known`, kept by the engine for re-seeding;
    tokens: the request's own list of committed tokens, at least as long. The rest belongs to the link: `open` while the
    worker holds the slot; `lost` when its generation died and a reset is due at `retry_ns`; no STEP before `ready_ns`;
    `losses` in a row; `replied` when the outcome of the last round may be committed with the next STEP; `misfit` when
    the agreed version has no place for the lease; `asked_round`, the last round that any worker was asked to draft;
    `asked_ns`, when the oldest round without an answer was asked for; `lost_ns`, since when a lost worker has cost the
    request its proposals.
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
    misfit: bool = False
    wire: int | None = None
    asked_round: int = -1
    asked_ns: int | None = None
    lost_ns: int | None = None

    def worker_lost(self, now: int) -> None:
        """Its worker is gone: from here, or from the round that was not answered, until the next proposal."""
        if self.lost_ns is None:
            self.lost_ns = now if self.asked_ns is None else self.asked_ns

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


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as operators see it: how many requests it drafts for, and what went wrong last."""

    address: str
    state: WorkerState
    leases: int
    last_error: str | None


class DraftSource(Protocol):
    """Where drafts come from. Owned by the engine thread; only `collect` may block, and no call raises for a worker's
    fault. Three totals are cleared by who reads them: `discards`, proposals that were asked for and never became ready,
    by cause; `takeovers`, leases that went to another worker, by cause; `respeculations`, for each request whose worker
    was lost, the seconds from then to its next proposal.
    """

    discards: Counter[str]
    takeovers: Counter[str]
    respeculations: list[float]

    @property
    def up(self) -> bool:
        """Whether some worker has accepted."""

    @property
    def reconnects(self) -> int:
        """How often a link was lost and came back, since start."""

    @property
    def generation_bumps(self) -> int:
        """Slot generations that went up, since start."""

    @property
    def last_error(self) -> str | None:
        """What a person should know, None when all is well."""

    @property
    def workers(self) -> tuple[WorkerStatus, ...]:
        """All workers; may be read from any thread."""

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

    def distrusts(self, lease: DraftLease) -> bool:
        """Whether the worker process that the lease's last STEP went to has been found out since."""
