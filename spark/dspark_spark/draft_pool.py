"""Many drafter workers behind the one `DraftSource` that the engine knows.

Each request has its lease at one worker and stays there while that worker serves it. New leases go to the least loaded
healthy worker. Health is what the protocol has shown: a handshake that was accepted, rounds that were answered. A lease
leaves its worker when the worker is gone, drains, is quarantined, or, while another healthy worker has room, has lost
this lease's rounds twice in a row or not taken its context for long; it is then opened anew elsewhere, from the taps
that the engine keeps, as far as credit goes. Between two workers the request is target-only, and so it is while no
worker has room.

Members change while the pool runs (`set_members`): a new one joins, a missing one finishes its rounds, hands its leases
over and is closed. The epochs of quarantined worker processes are shared by all links: a process that lied is not
believed at another address either.

No draw is repeated under a used key, whichever workers take part. A draft's key is (seed, reset count, round, choice,
position, domain). A lease that is opened at another worker starts with reset count 0 again, so the reset count does not
tell workers apart; the round does. The engine advances a request's round at every step that the request takes part in,
whatever becomes of the proposal, and `DraftLink` refuses to ask for a round that the lease has asked any worker for
before (`DraftLease.asked_round`). So two STEPs of a request never share a round, and inside one STEP each position is
drawn once. (The match lane's draws are keyed by position alone; they are guesses of the target's own draw and decide
nothing.)

Invariants: a lease moves only between its rounds; every awaited proposal ends as ready or as one count in `discards`;
no call blocks but `collect`, which the links' deadlines bound. Owned by the engine thread, but for `set_members`,
`wait_up` and `workers`. It never decides anything about tokens.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from dspark.philox import Keys
from dspark_proto import ProposalReady
from dspark_spark.draft_link import PROBE_MS, DraftLink
from dspark_spark.leases import NS, DraftLease, DraftRequest, DraftRound, WorkerStatus
from dspark_spark.pool_members import Member, PoolWorker, Seat

SLICE_MS = 2
MOVE_LOSSES = 2
SEED_S = 10.0
"""How long a worker may take until a lease's context is there and a STEP may be sent."""
SEED_ROWS = 2048
"""Context rows of leases that one turn places: a worker that takes over many must still answer in time."""


class DraftPool:
    """A `DraftSource` of any number of workers; `members` may be empty, and change."""

    def __init__(self, members: Sequence[Member], now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Raises TransportError for an address or a key that cannot be used."""
        self.discards: Counter[str] = Counter()
        self.takeovers: Counter[str] = Counter()
        self.respeculations: list[float] = []
        self.trouble: str | None = None
        self.workers: tuple[WorkerStatus, ...] = ()
        self._now_ns = now_ns
        self._quarantine: set[int] = set()
        self._workers: list[PoolWorker] = []
        self._seats: dict[int, Seat] = {}
        self._asked: dict[int, DraftLink] = {}
        self._gone_reconnects = self._gone_bumps = 0
        self._gone_drops: Counter[str] = Counter()
        self._wanted: list[PoolWorker] = []
        self._changing = threading.Lock()
        self._changes: queue.SimpleQueue[list[PoolWorker]] = queue.SimpleQueue()
        self.set_members(members)
        self._adopt()
        self._show()

    # -- from any thread ---------------------------------------------------------------------------------------

    def set_members(self, members: Sequence[Member]) -> None:
        """Use exactly these workers, from the next `pump` on. Raises TransportError, and then nothing changes."""
        with self._changing:
            known = {worker.member.key: worker for worker in self._wanted}
            wanted: list[PoolWorker] = []
            try:
                for member in members:
                    wanted.append(known.get(member.key) or self._worker(member))
            except Exception:
                for worker in wanted:
                    if worker.member.key not in known:
                        worker.link.close()
                raise
            self._wanted = wanted
            self._changes.put(wanted)

    def _worker(self, member: Member) -> PoolWorker:
        link = member.link(self._now_ns, self._quarantine)
        link.discards, link.respeculations = self.discards, self.respeculations
        return PoolWorker(member, link)

    def wait_up(self, timeout_s: float) -> bool:
        """Wait, from another thread than the engine's, until a worker has accepted."""
        until = time.monotonic() + timeout_s
        while not self.up and time.monotonic() < until:
            time.sleep(0.02)
        return self.up

    # -- what it is like ---------------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        """Whether some worker has accepted."""
        return any(worker.link.up for worker in self._workers)

    @property
    def reconnects(self) -> int:
        """How often a link was lost and came back, since start."""
        return self._gone_reconnects + sum(worker.link.reconnects for worker in self._workers)

    @property
    def generation_bumps(self) -> int:
        """Slot generations that went up, since start."""
        return self._gone_bumps + sum(worker.link.generation_bumps for worker in self._workers)

    @property
    def drops(self) -> Counter[str]:
        """Frames dropped by cause since start."""
        total = Counter(self._gone_drops)
        for worker in self._workers:
            total.update(worker.link.drops)
        return total

    @property
    def last_error(self) -> str | None:
        """`trouble`, which its owner sets, or the first worker's that has one."""
        return self.trouble or next((w.link.last_error for w in self._workers if w.link.last_error), None)

    # -- the turn ----------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Take what has arrived on every link, settle what is overdue, move leases, reconnect. Never blocks."""
        self._adopt()
        for worker in self._workers:
            worker.link.listen()
        now = self._now_ns()
        for worker in self._workers:
            worker.judge(now)
        self._vacate_seats(now)
        self._fill_seats(now)
        self._let_go()
        for worker in self._workers:
            worker.link.tend()
        self._show()

    def close(self) -> None:
        """Give every lease back and close the sockets."""
        self._adopt()
        for worker in self._workers:
            worker.link.close()
        self._seats.clear()

    def _adopt(self) -> None:
        """Take over what `set_members` was told last."""
        while not self._changes.empty():
            wanted = self._changes.get()
            for worker in self._workers:
                worker.leaving = worker.leaving or worker not in wanted
            self._workers += [worker for worker in wanted if worker not in self._workers]

    def _let_go(self) -> None:
        """Close the links of workers that are no members any more and whose rounds are over."""
        for worker in [one for one in self._workers if one.leaving]:
            worker.link.retire()
            if worker.link.held:
                continue
            self._workers.remove(worker)
            self._gone_reconnects += worker.link.reconnects
            self._gone_bumps += worker.link.generation_bumps
            self._gone_drops.update(worker.link.drops)
            worker.link.close()

    def _show(self) -> None:
        now = self._now_ns()
        self.workers = tuple(worker.status(now) for worker in self._workers)

    # -- leases ------------------------------------------------------------------------------------------------

    def lease(self, lease: DraftLease) -> None:
        """Take a lease for a request: at the least loaded worker now, or as soon as one has room."""
        seat = self._seats[lease.slot] = Seat(lease)
        self._fill(seat, self._now_ns())

    def release(self, lease: DraftLease) -> None:
        """The request is over."""
        seat = self._seats.pop(lease.slot, None)
        if seat is not None and seat.worker is not None:
            seat.worker.link.release(lease)

    def feed(self, lease: DraftLease) -> None:
        """Send context rows ahead of the first STEP, as far as credit goes."""
        worker = self._seats[lease.slot].worker
        if worker is not None:
            worker.link.feed(lease)

    def depth_limit(self, lease: DraftLease) -> int:
        """Deepest proposal that the lease's worker takes; of a lease without one, that any worker takes."""
        worker = self._seats[lease.slot].worker
        links = [one.link for one in (self._workers if worker is None else [worker])]
        return max((link.depth_limit(lease) for link in links), default=0)

    def refusal(self, lease: DraftLease, asked: Sequence[DraftLease]) -> str:
        """Why no STEP may ask for this lease now, beside those `asked` already; empty when one may."""
        seat = self._seats[lease.slot]
        worker = seat.worker
        if worker is None:
            return "no_lease" if self.up else "worker_down"
        why = worker.link.refusal(lease, [one for one in asked if self._seats[one.slot].worker is worker])
        if why != "no_lease":
            seat.idle_ns = None
        elif seat.idle_ns is None:
            seat.idle_ns = self._now_ns()
        return why

    def _vacate_seats(self, now: int) -> None:
        """Take leases away from workers that cannot serve them any more."""
        for seat in self._seats.values():
            worker = seat.worker
            if worker is None or worker.link.awaits(seat.lease):
                continue
            cause = self._reason_to_go(seat, worker, now)
            if cause:
                worker.link.release(seat.lease)
                seat.worker, seat.cause = None, cause
                if cause in ("late", "refused"):
                    seat.lease.worker_lost(now)

    def _reason_to_go(self, seat: Seat, worker: PoolWorker, now: int) -> str:
        """Why the lease must leave its worker; empty when it stays."""
        state = worker.state(now)
        if state in ("draining", "quarantined"):
            return state
        if not worker.link.up:
            return "worker_down"
        lease = seat.lease
        fails = lease.lost and lease.losses >= MOVE_LOSSES and now >= seat.move_ns
        starves = seat.idle_ns is not None and now - seat.idle_ns >= SEED_S * NS
        if not (fails or starves) or self._best(lease, now, worker) is None:
            return ""
        seat.move_ns = now + lease.pause_ns()
        return "late" if starves or worker.late_rounds else "refused"

    def _fill_seats(self, now: int) -> None:
        """Place leases that wait for a worker, as many as one turn may seed."""
        rows = 0
        for seat in self._seats.values():
            if seat.worker is None and (rows == 0 or rows + seat.lease.known <= SEED_ROWS) and self._fill(seat, now):
                rows += max(1, seat.lease.known)

    def _fill(self, seat: Seat, now: int) -> bool:
        worker = self._best(seat.lease, now, seat.last if seat.cause in ("late", "refused") else None)
        if worker is None:
            return False
        if seat.last not in (None, worker):
            self.takeovers[seat.cause] += 1
        seat.worker = seat.last = worker
        seat.cause, seat.idle_ns = "", None
        worker.link.lease(seat.lease)
        return True

    def _best(self, lease: DraftLease, now: int, but: PoolWorker | None) -> PoolWorker | None:
        """The least loaded worker that can take the lease, the first of equals."""
        able = [worker for worker in self._workers if worker is not but and worker.can_take(lease, now)]
        return min(able, key=lambda worker: worker.load, default=None)

    # -- rounds ------------------------------------------------------------------------------------------------

    def step(self, requests: Sequence[DraftRequest]) -> DraftRound:
        """Ask each request's worker; `refusal` must have been empty for each. One round, whose links answer apart."""
        round_ = DraftRound(0, set())
        groups: dict[DraftLink, list[DraftRequest]] = {}
        for request in requests:
            seat = self._seats[request.lease.slot]
            assert seat.worker is not None
            self._asked[request.lease.slot] = seat.worker.link
            groups.setdefault(seat.worker.link, []).append(request)
        for link, group in groups.items():
            link.step(group, round_)
        return round_

    def collect(self, round_: DraftRound) -> dict[int, ProposalReady]:
        """Proposals by slot, once every awaited slot has answered or its deadline is over.

        All links must answer, so it is no loss to look at one after the other in slices.
        """
        while waiting := [worker.link for worker in self._workers if worker.link.serves(round_)]:
            for link in waiting:
                link.advance(round_, PROBE_MS if len(waiting) == 1 else SLICE_MS)
        return round_.ready

    def proposal_keys(self, request: DraftRequest) -> Keys:
        """The key under which the worker draws what the request's last STEP asked for."""
        return self._asked[request.lease.slot].proposal_keys(request)

    def invalid(self, lease: DraftLease, reason: str, cause: str = "invalid_row") -> None:
        """Who answered the lease's last round sent what passes every checksum and is wrong: quarantine it."""
        self._asked[lease.slot].invalid(lease, reason, cause)

    def distrusts(self, lease: DraftLease) -> bool:
        """Whether the worker process that the lease's last STEP went to has been found out since."""
        return self._asked[lease.slot].distrusts(lease)
