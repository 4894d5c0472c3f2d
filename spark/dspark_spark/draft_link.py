"""The engine's link to its drafter worker: leases, context, proposals, and what happens when the worker is not there.

States: *down* (saying HELLO every `RETRY_S`), *up* (ACCEPT received). Any missed deadline, silence or connection error
brings the link down: the engine goes on target-only in the same step, and the link keeps trying. Coming up again is a
new handshake with a new epoch, so every lease is opened anew and re-seeded from the taps that the engine kept.

Owned by the engine thread; the only blocking call is `await_proposals`, bounded by the step deadline. It never decides
anything about tokens.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark_proto import (
    EMPTY_DIGEST,
    Accepted,
    Cause,
    CreditGranted,
    Draining,
    HelloParameters,
    Lane,
    LocalProtocolError,
    PeerError,
    PeerSilent,
    ProposalReady,
    Rejected,
    Scope,
    SlotFailed,
    StepFailed,
    StepItem,
    StepTimedOut,
    SupportPolicy,
    VerifierConnection,
)
from dspark_proto.transports.zmq import ZmqClient

RETRY_S = 0.5
MICRO = 1_000_000


@dataclass(slots=True)
class DraftLease:
    """One request's share of the worker.

    taps: bf16 [positions, taps * d] of every committed position below `known`, kept by the engine for re-seeding.
    """

    slot: int
    session: int
    seed: int
    lane: Lane
    support: int
    temperature: float
    taps: Tensor
    known: int = 0
    digest: bytes = EMPTY_DIGEST
    open: bool = False


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What one STEP asks: draft `depth` tokens after `anchor_token`, which sits at `anchor_position`."""

    lease: DraftLease
    round: int
    anchor_token: int
    anchor_position: int
    depth: int
    accepted_count: int | None
    commit_token: int


class DraftLink:
    """A `VerifierConnection` over a ZeroMQ client, driven by the engine's clock."""

    def __init__(self, endpoint: str, parameters: HelloParameters, deadline_ms: int) -> None:
        self._endpoint = endpoint
        self._connection = VerifierConnection(parameters)
        self._client = ZmqClient(endpoint)
        self._deadline_ms = deadline_ms
        self._leases: dict[int, DraftLease] = {}
        self._next_hello_ns = 0
        self._draining_until_ns = 0
        self._ready: dict[int, ProposalReady] = {}
        self._waiting: set[int] = set()
        self._quarantined_epoch: int | None = None
        self.up = False
        self.reconnects = 0
        self.generation_bumps = 0
        self.discards: Counter[str] = Counter()
        self.last_error: str | None = None

    @property
    def max_depth(self) -> int:
        negotiated = self._connection.negotiated
        return negotiated.max_depth if self.up and negotiated else 0

    @property
    def drops(self) -> dict[str, int]:
        """Frames dropped by cause since start."""
        return self._connection.counters

    def close(self) -> None:
        """Give every lease back and close the socket."""
        if self.up:
            for lease in list(self._leases.values()):
                self.release(lease)
        self._client.close()

    def wait_up(self, timeout_s: float) -> bool:
        """Wait, from another thread than the engine's, until the worker has accepted."""
        until = time.monotonic() + timeout_s
        while not self.up and time.monotonic() < until:
            time.sleep(0.02)
        return self.up

    def pump(self) -> None:
        """Take what has arrived, let timers run, reconnect when it is time. Never blocks."""
        self._receive(0)
        now = time.monotonic_ns()
        for event in self._connection.expire(now):
            self._on(event)
        self._flush()
        if not self.up and now >= self._next_hello_ns:
            self._next_hello_ns = now + int(RETRY_S * 1e9)
            self._send([self._connection.hello(now)])

    def lease(self, lease: DraftLease) -> None:
        """Take a lease for a request; it is opened at the worker as soon as the link is up."""
        self._leases[lease.slot] = lease
        if self.up:
            self._open(lease)

    def release(self, lease: DraftLease) -> None:
        """The request is over."""
        self._leases.pop(lease.slot, None)
        self._waiting.discard(lease.slot)
        if lease.open and self.up:
            self._send([self._connection.close(lease.slot, Cause.FINISHED)])
        lease.open = False

    def can_draft(self, lease: DraftLease) -> bool:
        """The worker holds this lease and has, or can take with the next STEP, every context row."""
        if not (self.up and lease.open and time.monotonic_ns() >= self._draining_until_ns):
            return False
        return self._feed(lease, keep=self._connection.parameters.max_depth + 1)

    def feed(self, lease: DraftLease) -> None:
        """Send context rows ahead of the first STEP (prefill chunks, re-seeding), as far as credit goes."""
        if self.up and lease.open:
            self._feed(lease, keep=0)

    def _feed(self, lease: DraftLease, keep: int) -> bool:
        """Send all but the last `keep` rows as CONTEXT; True when at most `keep` rows are left for the STEP."""
        end = self._connection.context_end(lease.slot)
        while lease.known - end > keep:
            rows = lease.taps[end : lease.known]
            sent = self._connection.context(lease.slot, end, len(rows), _raw(rows))
            if not sent.rows or not self._send(sent.frames):
                return False
            end += sent.rows
        return True

    def step(self, requests: Sequence[DraftRequest]) -> None:
        """Send one STEP frame for all requests; `can_draft` must have been True for each."""
        items = [self._item(r) for r in requests]
        self._waiting = {r.lease.slot for r in requests}
        self._ready = {}
        if not self._send([self._connection.step(items, time.monotonic_ns())]):
            self._down("send_failed")

    def _item(self, request: DraftRequest) -> StepItem:
        lease = request.lease
        end = self._connection.context_end(lease.slot)
        commit = {} if request.accepted_count is None else {"accepted_count": request.accepted_count}
        return StepItem(
            session=lease.session,
            slot=lease.slot,
            generation=self._connection.generation(lease.slot),
            round=request.round,
            anchor_token=request.anchor_token,
            anchor_position=request.anchor_position,
            prefix_digest=lease.digest,
            depth=request.depth,
            lane=lease.lane,
            commit_token=request.commit_token,
            tap_first=end,
            tap_rows=lease.known - end,
            taps=_raw(lease.taps[end : lease.known]),
            **commit,
        )

    def await_proposals(self) -> dict[int, ProposalReady]:
        """Proposals by slot, once every awaited slot has answered or the deadline is over. Bounded by the deadline."""
        until = time.monotonic() + self._deadline_ms / 1000
        while self._waiting and self.up:
            left = until - time.monotonic()
            self._receive(max(0, int(left * 1000)) if left > 0 else 0)
            for event in self._connection.expire(time.monotonic_ns()):
                self._on(event)
            self._flush()
            if left <= 0 and self._waiting:
                self._down("step_deadline")
        return self._ready

    def invalid(self, reason: str) -> None:
        """A worker sent rows that pass every checksum and are no distribution: quarantine this worker process.

        Routine fallback would make a discard depend on drafted values, so this ends the link until another process
        (another epoch) answers.
        """
        negotiated = self._connection.negotiated
        assert negotiated is not None
        self._quarantined_epoch = negotiated.peer_epoch
        self.last_error = f"the worker is quarantined: it sent an invalid row ({reason}); restart it"
        self.discards["invalid_row"] += 1
        self._down("quarantined")

    def _receive(self, timeout_ms: int) -> None:
        for frame in self._client.poll(timeout_ms):
            for event in self._connection.receive(frame, time.monotonic_ns()):
                self._on(event)
        self._flush()

    def _flush(self) -> None:
        frames = self._connection.frames_to_send()
        if frames:
            self._send(frames)

    def _send(self, frames: list[object]) -> bool:
        return bool(self._client.send(frames))

    def _on(self, event: object) -> None:
        match event:
            case Accepted():
                self._up()
            case Rejected():
                self.last_error = f"worker refused: {event.field}: ours {event.local!r}, theirs {event.peer!r}"
                self._down("rejected")
            case ProposalReady() if event.slot in self._waiting:
                self._waiting.discard(event.slot)
                self._ready[event.slot] = event
            case ProposalReady():
                event.lease.release()
            case StepFailed():
                self._discard(event.slot, "worker_failed", lost=event.needs_reset)
            case StepTimedOut():
                self.generation_bumps += 1
                self._discard(event.slot, "late", lost=True)
            case SlotFailed():
                self._discard(event.slot, "slot_failed", lost=True)
            case PeerSilent():
                self._down("silent")
            case PeerError() if event.scope is Scope.CONNECTION:
                self._down("peer_error")
            case Draining():
                self._draining_until_ns = time.monotonic_ns() + event.deadline_ms * 1_000_000
            case CreditGranted():
                for lease in self._leases.values():
                    self.feed(lease)

    def _discard(self, slot: int, cause: str, *, lost: bool) -> None:
        """This round's proposal is gone; a lost slot is reset and re-seeded."""
        if slot in self._waiting:
            self.discards[cause] += 1
            self._waiting.discard(slot)
        lease = self._leases.get(slot)
        if lost and lease is not None and lease.open:
            self._send([self._connection.reset(slot, Cause.ROUND_TIMED_OUT)])
            self.feed(lease)

    def _up(self) -> None:
        negotiated = self._connection.negotiated
        if negotiated is not None and negotiated.peer_epoch == self._quarantined_epoch:
            self._down("quarantined")
            return
        self.up = True
        self.last_error = None
        self._draining_until_ns = 0
        for lease in self._leases.values():
            self._open(lease)

    def _open(self, lease: DraftLease) -> None:
        negotiated = self._connection.negotiated
        assert negotiated is not None
        if lease.slot >= negotiated.max_slots:
            return  # more requests than the worker takes: this one stays target-only
        try:
            frame = self._connection.open(
                lease.slot,
                lease.session,
                seed=lease.seed,
                support=SupportPolicy(lease.support),
                lane=lease.lane,
                draft_temperature_micro=round(lease.temperature * MICRO),
            )
        except LocalProtocolError as error:
            self.last_error = str(error)
            return
        lease.open = self._send([frame])
        self.feed(lease)

    def _down(self, cause: str) -> None:
        """Discard what was awaited and start over with a new handshake."""
        for _ in self._waiting:
            self.discards[cause] += 1
        self._waiting = set()
        self.reconnects += self.up
        self.generation_bumps += sum(lease.open for lease in self._leases.values())
        self.up = False
        for lease in self._leases.values():
            lease.open = False
        self._next_hello_ns = time.monotonic_ns() + int(RETRY_S * 1e9)


def _raw(rows: Tensor) -> memoryview | bytes:
    """The bytes of bf16 rows, without a copy (numpy has no bf16, so they pass as uint8)."""
    return memoryview(rows.view(torch.uint8).numpy()).cast("B") if len(rows) else b""
