"""The engine's link to its drafter worker: leases, context, proposals, and what happens when the worker is not there.

States: *down* (saying HELLO, rarely) and *up* (ACCEPT received). Silence, a connection error, a full socket or a frame
that our own protocol side refuses bring the link down: the engine goes on target-only in the same step, and the link
keeps trying. Coming up again is a new handshake, so every lease is opened anew and re-seeded from the taps that the
engine kept. A handshake asks for the first version of the parameters, and for the next one only after a worker has
refused the version before; a lease that the agreed version has no place for stays closed: its request is target-only.
A round that is late or fails loses only its slot: the slot is reset and re-seeded, at once the first time, after a
growing pause when it keeps happening, so that a slow worker does not cost a deadline per token.

Several rounds may be under way, for different slots: each `step` gives one, and `collect` waits for it alone.

Invariants: every awaited proposal ends as ready or as one count in `discards`; no call blocks but `collect`, which the
round's deadline bounds; nothing that a worker sends, or fails to send, raises here.

Owned by the engine thread. It never decides anything about tokens.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dspark.philox import Keys
from dspark_proto import (
    Accepted,
    Cause,
    Draining,
    ErrorCode,
    HelloParameters,
    LeaseState,
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
    VerifierEvent,
    VerifierState,
)
from dspark_proto.limits import NO_COMMIT, STEP_ITEMS_MAX
from dspark_proto.transports.base import ClientTransport
from dspark_proto.transports.zmq import ZmqClient
from dspark_spark.leases import NS, DraftLease, DraftRequest, DraftRound

RETRY_S, RETRY_MAX_S = 0.5, 2.0
MICRO = 1_000_000
NS_PER_MS = 1_000_000


class DraftLink:
    """A `VerifierConnection` over a client transport (ZeroMQ by default). A `DraftSource` of one worker."""

    def __init__(
        self,
        endpoint: str,
        parameters: HelloParameters,
        deadline_ms: int,
        client: ClientTransport | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`now_ns` is the clock of every deadline and pause; a simulation gives its own, with its own client."""
        self.up = False
        self.reconnects = 0
        self.generation_bumps = 0
        self.discards: Counter[str] = Counter()
        self.last_error: str | None = None
        self._endpoint = endpoint
        self._connection = VerifierConnection(parameters)
        self._client = client or ZmqClient(endpoint)
        self._deadline_ms = deadline_ms
        self._leases: dict[int, DraftLease] = {}
        self._now_ns = now_ns
        self._rounds: dict[int, DraftRound] = {}
        self._resets: dict[int, int] = {}
        self._next_hello_ns = 0
        self._hellos_unanswered = 0
        self._was_up = False
        self._version = 0
        self._leaves_ns: int | None = None
        self._quarantined_epoch: int | None = None

    def depth_limit(self, lease: DraftLease) -> int:
        """Deepest proposal that the lease's worker takes; 0 while it is not there."""
        negotiated = self._connection.negotiated
        return negotiated.max_depth if self.up and negotiated else 0

    def refusal(self, lease: DraftLease, asked: Sequence[DraftLease]) -> str:
        """Why no STEP may ask for this lease now, beside those `asked` already; empty when one may.

        May send context, as far as credit goes.
        """
        if not self.up:
            return "worker_down"
        if not self.can_draft(lease):
            return "no_lease"
        staging = self._connection.staging
        return "" if staging is not None and len(asked) < staging.count(LeaseState.FREE) else "in_flight_limit"

    @property
    def drops(self) -> dict[str, int]:
        """Frames dropped by cause since start."""
        return self._connection.counters

    def close(self) -> None:
        """Give every lease back and close the socket."""
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
        """Take what has arrived, let timers run, leave a draining worker, reconnect when it is time. Never blocks."""
        self._receive(0)
        self._expire()
        now = self._now_ns()
        if any(now >= round_.until_ns for round_ in self._rounds.values()):
            self._down("step_deadline")
        if self._leaves_ns is not None:
            self._leave(self._leaves_ns)
        self._revive(now)
        if not self.up and now >= self._next_hello_ns:
            self._say_hello(now)

    # -- leases and context ------------------------------------------------------------------------------------

    def lease(self, lease: DraftLease) -> None:
        """Take a lease for a request; it is opened at the worker as soon as the link is up."""
        self._leases[lease.slot] = lease
        self._open(lease)

    def release(self, lease: DraftLease) -> None:
        """The request is over."""
        self._leases.pop(lease.slot, None)
        self._forget(lease.slot)
        if lease.open and self.up:
            self._tell(self._connection.close, lease.slot, Cause.FINISHED)
        lease.open = lease.lost = False

    def can_draft(self, lease: DraftLease) -> bool:
        """The worker holds this lease and has, or can take with the next STEP, every context row."""
        if not (self.up and lease.open) or lease.lost or self._leaves_ns is not None:
            return False
        if self._now_ns() < lease.ready_ns:
            return False
        return self._feed(lease, keep=self._connection.parameters.max_depth + 1)

    def feed(self, lease: DraftLease) -> None:
        """Send context rows ahead of the first STEP (prefill chunks, re-seeding), as far as credit goes.

        What is left goes before a later STEP, when the worker has granted more.
        """
        if self.up and lease.open and not lease.lost:
            self._feed(lease, keep=0)

    def _feed(self, lease: DraftLease, keep: int) -> bool:
        """Send all but the last `keep` rows as CONTEXT; True when at most `keep` rows are left for the STEP."""
        end = self._connection.context_end(lease.slot)
        while lease.known - end > keep:
            rows = lease.taps[end : lease.known]
            ids = array("i", lease.tokens[end : lease.known])
            try:
                sent = self._connection.context(lease.slot, end, len(rows), _raw(rows), memoryview(ids).cast("B"))
            except LocalProtocolError as error:
                return self._refused(error)
            # One frame a message: a message has a bounded number of parts.
            if not sent.rows or not all(self._send([frame]) for frame in sent.frames):
                return False
            end += sent.rows
        return True

    def _open(self, lease: DraftLease) -> None:
        negotiated = self._connection.negotiated
        if not self.up or self._leaves_ns is not None or negotiated is None:
            return
        if lease.slot >= negotiated.max_slots:
            return  # more requests than the worker takes: this one stays target-only
        lease.replied = False
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
            # The worker negotiated less than this lease needs (support, lane): the request stays target-only.
            self.last_error = str(error)
            return
        lease.open = self._send([frame])
        self.feed(lease)

    def _lose(self, slot: int) -> None:
        """The slot's generation is dead; `_revive` resets it when its pause is over."""
        lease = self._leases.get(slot)
        if lease is None or not lease.open:
            return
        self.generation_bumps += 1
        lease.lost, lease.replied = True, False
        lease.losses += 1
        lease.retry_ns = self._now_ns() + lease.pause_ns()

    def _revive(self, now: int) -> None:
        """Renew and re-seed lost slots that are due; each then rests once more while the worker takes the context."""
        for lease in self._leases.values():
            if self.up and lease.lost and now >= lease.retry_ns:
                lease.lost = False
                lease.ready_ns = now + lease.pause_ns()
                self._renew(lease)

    def _renew(self, lease: DraftLease) -> None:
        """A new generation; after a second loss a new OPEN, for a worker that never got the first knows no RESET."""
        if lease.losses < 2:
            if self._tell(self._connection.reset, lease.slot, Cause.ROUND_TIMED_OUT):
                self.feed(lease)
        elif self._tell(self._connection.close, lease.slot, Cause.ROUND_TIMED_OUT):
            self._open(lease)

    # -- rounds ------------------------------------------------------------------------------------------------

    def step(self, requests: Sequence[DraftRequest]) -> DraftRound:
        """Ask for all requests' proposals; `refusal` must have been empty for each. Give the round to `collect`."""
        now = self._now_ns()
        round_ = DraftRound(now + self._deadline_ms * NS_PER_MS, {r.lease.slot for r in requests})
        self._rounds |= dict.fromkeys(round_.waiting, round_)
        for start in range(0, len(requests), STEP_ITEMS_MAX):
            if self.up:
                items = [self._item(r) for r in requests[start : start + STEP_ITEMS_MAX]]
                self._tell(self._connection.step, items, now)
        if not self.up:
            self._discard_rounds("send_failed")
        return round_

    def _item(self, request: DraftRequest) -> StepItem:
        lease = request.lease
        end = self._connection.context_end(lease.slot)
        self._resets[lease.slot] = self._connection.reset_count(lease.slot)
        accepted = request.accepted_count if lease.replied else None
        lease.replied = False
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
            accepted_count=NO_COMMIT if accepted is None else accepted,
            commit_token=request.commit_token,
            tap_first=end,
            tap_rows=lease.known - end,
            taps=_raw(lease.taps[end : lease.known]),
        )

    def proposal_keys(self, request: DraftRequest) -> Keys:
        """The key under which the worker draws what this STEP asked for; OPEN and RESET told it all but the round."""
        return Keys(request.lease.seed, generation=self._resets[request.lease.slot], round=request.round)

    def collect(self, round_: DraftRound) -> dict[int, ProposalReady]:
        """Proposals by slot, once every awaited slot has answered or the round's deadline is over."""
        while round_.waiting:
            now = self._now_ns()
            self._receive(self._wait_ms(round_.until_ns, now))
            self._expire()
            if round_.waiting and now >= round_.until_ns:
                self._down("step_deadline")
        self._revive(self._now_ns())
        return round_.ready

    def _wait_ms(self, until: int, now: int) -> int:
        """How long to sleep in the socket: to the deadline, but not past the connection's own timers (heartbeats)."""
        timer = self._connection.next_deadline_ns()
        return max(0, math.ceil((min(until, timer or until) - now) / 1e6))

    def invalid(self, lease: DraftLease, reason: str, cause: str = "invalid_row") -> None:
        """The lease's worker sent what passes every checksum and is wrong: quarantine this worker process.

        cause: "invalid_row" for rows that are no distribution, "audit_failed" for a token that is not its row's draw.
        Routine fallback would make a discard depend on drafted values, so this ends the link until another process
        (another epoch) answers.
        """
        negotiated = self._connection.negotiated
        assert negotiated is not None
        self._quarantined_epoch = negotiated.peer_epoch
        self.last_error = f"the worker is quarantined: {cause.replace('_', ' ')} ({reason}); restart it"
        self.discards[cause] += 1
        self._down("quarantined")

    # -- frames and events -------------------------------------------------------------------------------------

    def _receive(self, timeout_ms: int) -> None:
        for frame in self._client.poll(timeout_ms):
            for event in self._connection.receive(frame, self._now_ns()):
                self._on(event)
        self._flush()

    def _expire(self) -> None:
        for event in self._connection.expire(self._now_ns()):
            self._on(event)
        self._flush()

    def _flush(self) -> None:
        frames = self._connection.frames_to_send()
        if frames and self.up:
            self._send(frames)
        elif frames and self._connection.state is VerifierState.PROOF_SENT:
            self._client.send(frames)
            # Time for the answer: another HELLO would void the proof that has just been sent.
            self._next_hello_ns = self._now_ns() + int(RETRY_MAX_S * NS)

    def _send(self, frames: Sequence[memoryview]) -> bool:
        """Send, or go down: what a slot was told must have left, or the two ledgers would differ."""
        if self.up and self._client.send(frames):
            return True
        self._down("send_failed")
        return False

    def _tell(self, make: Callable[..., memoryview], *arguments: object) -> bool:
        """Build a frame and send it; False, and down, when either fails."""
        try:
            frame = make(*arguments)
        except LocalProtocolError as error:
            return self._refused(error)
        return self._send([frame])

    def _refused(self, error: LocalProtocolError) -> bool:
        """Our own side refused a frame: the two ledgers differ, which calls for a fresh start and not a dead engine."""
        self.last_error = f"the link started over: {error}"
        self._down("refused_locally")
        return False

    def _on(self, event: VerifierEvent) -> None:
        match event:
            case Accepted():
                self._accepted()
            case Rejected():
                self._rejected(event)
            case ProposalReady() if event.slot in self._rounds:
                self._take(event)
            case ProposalReady():
                event.lease.release()
            case StepFailed():
                self._discard(event.slot, event.code.counter)
                if event.needs_reset:
                    self._lose(event.slot)
            case StepTimedOut():
                self._discard(event.slot, "late")
                self._lose(event.slot)
            case SlotFailed():
                self._lose(event.slot)
            case PeerSilent():
                self._down("silent")
            case PeerError() if event.scope is Scope.CONNECTION:
                self._down("peer_error")
            case Draining():
                self._leaves_ns = self._now_ns() + event.deadline_ms * NS_PER_MS

    def _take(self, event: ProposalReady) -> None:
        round_ = self._forget(event.slot)
        assert round_ is not None
        round_.ready[event.slot] = event
        lease = self._leases[event.slot]
        lease.losses, lease.replied = 0, True

    def _discard(self, slot: int, cause: str) -> None:
        """This round's proposal is gone."""
        if self._forget(slot) is not None:
            self.discards[cause] += 1

    def _discard_rounds(self, cause: str) -> None:
        for slot in list(self._rounds):
            self._discard(slot, cause)

    def _forget(self, slot: int) -> DraftRound | None:
        """The round that awaited the slot's proposal, which it does no more."""
        round_ = self._rounds.pop(slot, None)
        if round_ is not None:
            round_.waiting.discard(slot)
        return round_

    # -- up and down -------------------------------------------------------------------------------------------

    def _say_hello(self, now: int) -> None:
        """Not every turn: each HELLO makes the answer to the one before it stale."""
        version = self._connection.parameters.versions[self._version]
        sent = self._client.send([self._connection.hello(now, version)])
        pause_s = min(RETRY_MAX_S, RETRY_S * 2 ** min(8, self._hellos_unanswered))
        self._hellos_unanswered += sent
        self._next_hello_ns = now + int(pause_s * NS)

    def _rejected(self, event: Rejected) -> None:
        """No connection. Only a refused version, and a configuration that allows another one, is a reason to go on."""
        values = f": ours {event.local!r}, theirs {event.peer!r}" if event.local or event.peer else ""
        self.last_error = f"the worker refused: {event.code.counter}: {event.field}{values}"
        following = self._version + 1
        if event.code is ErrorCode.BAD_VERSION and following < len(self._connection.parameters.versions):
            self._version, self._next_hello_ns = following, 0
        else:
            self._version = 0

    def _accepted(self) -> None:
        self._version = 0
        negotiated = self._connection.negotiated
        if negotiated is None or negotiated.peer_epoch == self._quarantined_epoch:
            return  # still the process that lied: the link stays down and asks again, rarely
        self.up = True
        self.reconnects += self._was_up
        self._was_up = True
        self.last_error = None
        self._leaves_ns, self._hellos_unanswered = None, 0
        for lease in self._leases.values():
            self._open(lease)

    def _leave(self, until_ns: int) -> None:
        """The worker drains: give it back what it holds, so that it can end, and look for its successor after that."""
        for lease in self._leases.values():
            if lease.open and self.up:
                self._tell(self._connection.close, lease.slot, Cause.SHUTDOWN)
                lease.open = False
        self._down("draining")
        self._next_hello_ns = until_ns

    def _down(self, cause: str) -> None:
        """Discard what was awaited; the next handshake starts over. Harmless when the link is down already."""
        self._discard_rounds(cause)
        if self.up:
            self.generation_bumps += sum(lease.open for lease in self._leases.values())
            self._next_hello_ns = self._now_ns() + int(RETRY_S * NS)
            self.last_error = self.last_error or f"the link to {self._endpoint} went down: {cause}"
        self.up = False
        self._leaves_ns = None
        for lease in self._leases.values():
            lease.open = lease.lost = lease.replied = False
            lease.losses = lease.ready_ns = 0


def _raw(rows: Tensor) -> memoryview | bytes:
    """The bytes of bf16 rows, without a copy (numpy has no bf16, so they pass as uint8)."""
    return rows.view(torch.uint8).numpy().data.cast("B") if len(rows) else b""
