"""What a pool knows of its workers and of its requests: members, workers with their rest, seats.

Values and small rules; `draft_pool` decides who moves where. Called by `draft_pool`; `build` makes members.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dspark_proto import HelloParameters
from dspark_proto.transports.base import ClientTransport
from dspark_spark.draft_link import DraftLink
from dspark_spark.leases import NS, DraftLease, WorkerState, WorkerStatus

LATE_ROUNDS = 2
"""Late rounds in a row after which a worker rests."""
REST_S, REST_MAX_S = 1.0, 5.0


@dataclass(frozen=True, slots=True)
class Member:
    """A worker that the pool is to use, and how to reach it.

    address: names it, also in metrics. parameters: HELLO, for the drafter checkpoint that this worker serves; the same
    address with another `drafter` (a label, such as its directory) is another member. connect: opens the transport.
    """

    address: str
    parameters: HelloParameters
    deadline_ms: int
    connect: Callable[[], ClientTransport]
    drafter: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What makes two members the same one."""
        return self.address, self.drafter

    def link(self, now_ns: Callable[[], int] = time.monotonic_ns, quarantine: set[int] | None = None) -> DraftLink:
        """Open the transport, and a link on it. Raises TransportError."""
        return DraftLink(self.address, self.parameters, self.deadline_ms, self.connect(), now_ns, quarantine)


@dataclass(slots=True, eq=False)
class PoolWorker:
    """A member, its link, and its health. leaving: it is no member any more, and goes when its rounds are over."""

    member: Member
    link: DraftLink
    leaving: bool = False
    rest_until_ns: int = 0
    late_rounds: int = 0

    def judge(self, now: int) -> None:
        """Rest after late rounds, ever longer; healthy again with the first round that is answered."""
        late, self.late_rounds = self.late_rounds, self.link.late_rounds
        if self.late_rounds < LATE_ROUNDS:
            self.rest_until_ns = 0
        elif self.late_rounds > late:
            rest_s = min(REST_MAX_S, REST_S * 2 ** min(16, self.late_rounds - LATE_ROUNDS))
            self.rest_until_ns = now + int(rest_s * NS)

    def can_take(self, lease: DraftLease, now: int) -> bool:
        """Whether the lease may go there: it is up and healthy, has room, and speaks what the lease needs."""
        fit = not self.leaving and now >= self.rest_until_ns
        return fit and self.link.room > 0 and self.link.takes(lease)

    @property
    def load(self) -> float:
        """Share of it that this pool holds, and that its other verifiers hold."""
        return self.link.held / max(1, self.link.capacity) + self.link.others_load

    def state(self, now: int) -> WorkerState:
        state = self.link.state
        if self.leaving:
            return "draining"
        return "late" if state == "up" and now < self.rest_until_ns else state

    def status(self, now: int) -> WorkerStatus:
        return WorkerStatus(self.member.address, self.state(now), self.link.held, self.link.last_error)


@dataclass(slots=True, eq=False)
class Seat:
    """A request's place in the pool.

    worker: who drafts for it now, None while it waits for room. last: who did before, and `cause`, why it left.
    idle_ns: since when its worker has not been ready for a STEP. move_ns: not to be moved for its own losses before.
    """

    lease: DraftLease
    worker: PoolWorker | None = None
    last: PoolWorker | None = None
    cause: str = ""
    idle_ns: int | None = None
    move_ns: int = 0
