"""The link to one drafter worker: leases, context, proposals, and what happens when the worker is not there.

States: *down* (saying HELLO, rarely) and *up* (ACCEPT received). Silence, a connection error, a full socket or a frame
that our own protocol side refuses bring the link down: the engine goes on target-only in the same step, and the link
keeps trying. Coming up again is a new handshake, so every lease is opened anew and re-seeded from the taps that the
engine kept. A handshake asks for the first version of the parameters, and for the next one only after a worker has
refused the version before; a lease that the agreed version has no place for stays closed: its request is target-only.
A round that is late or fails loses only its slot: the slot is reset and re-seeded, at once the first time, after a
growing pause when it keeps happening, so that a slow worker does not cost a deadline per token. A worker that drains
finishes the rounds under way, gets its slots back, and is left.

The engine names a request by its own slot. On the wire each lease takes the lowest slot that is free there, so that a
worker with fewer slots than the engine is used whole; a lease that finds none waits until one is given back.

Several rounds may be under way, for different slots: each `step` gives one, and `collect` waits for it alone. While it
waits it pings now and then: a worker that was killed is noticed by a send that fails, long before the deadline.

Invariants: every awaited proposal ends as ready or as one count in `discards`; no round of a lease is asked for twice,
which keeps every draw under a key of its own (see `draft_pool`); no call blocks but `collect` and `advance`, which the
round's deadline bounds; nothing that a worker sends, or fails to send, raises here.

Owned by the engine thread. It never decides anything about tokens.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dspark.philox import Keys
from dspark_proto import (
    Accepted,
    Cause,
    CreditGranted,
    Draining,
    ErrorCode,
    LeaseState,
    LocalProtocolError,
    PeerError,
    PeerSilent,
    PongReceived,
    ProposalReady,
    Rejected,
    Scope,
    SlotFailed,
    StepFailed,
    StepItem,
    StepTimedOut,
    SupportPolicy,
    VerifierEvent,
    VerifierState,
)
from dspark_proto.limits import NO_COMMIT, SILENT_HEARTBEATS, STEP_ITEMS_MAX
from dspark_proto.memory import aligned_memory
from dspark_proto.verifier import step_room
from dspark_spark.leases import NS, DraftLease, DraftRequest, DraftRound
from dspark_spark.link_state import MICRO, LinkState

RETRY_S, RETRY_MAX_S = 0.5, 2.0
QUARANTINE_MAX_S = 60.0
PROBE_MS = 50
NS_PER_MS = 1_000_000
READS_MAX = 64
"""Reads of the transport in one turn: a large reply comes in several, and must not be late once it is there."""


class DraftLink(LinkState):
    """A `VerifierConnection` over a client transport (ZeroMQ by default). A `DraftSource` of one worker."""

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

    def close(self) -> None:
        """Give every lease back and close the socket."""
        for lease in list(self._leases.values()):
            self.release(lease)
        self._client.close()

    def pump(self) -> None:
        """Take what has arrived, let timers run, leave a draining worker, reconnect when it is time. Never blocks."""
        self.listen()
        self.tend()

    def listen(self) -> None:
        """The first half of `pump`: what has arrived, what is overdue, and the end of a worker that drains."""
        for _ in range(READS_MAX):
            if not self._receive(0):
                break
        self._expire()
        now = self._now_ns()
        if any(now >= round_.until_ns for round_ in self._rounds.values()):
            self._miss("step_deadline")
        if self._starves:
            self._starvations += 1
            self._down("no_credit")
        if self._leaves_ns is not None and not self._rounds:
            self._leave(self._leaves_ns)

    def tend(self) -> None:
        """The second half of `pump`: renew lost slots, open leases that found no room, reconnect."""
        now = self._now_ns()
        self._revive(now)
        if self.room and len(self._by_wire) < len(self._leases):
            for lease in [one for one in self._leases.values() if one.wire is None]:
                self._open(lease)
        if not self.up and now >= self._next_hello_ns:
            self._say_hello(now)

    def retire(self) -> None:
        """Leave the worker as if it drained: rounds under way finish, then `listen` gives its slots back."""
        if self.up and self._leaves_ns is None:
            self._leaves_ns = self._now_ns()

    # -- leases and context ------------------------------------------------------------------------------------

    def lease(self, lease: DraftLease) -> None:
        """Take a lease for a request; it is opened at the worker as soon as the link is up."""
        self._leases[lease.slot] = lease
        lease.ready_ns = 0
        self._open(lease)

    def release(self, lease: DraftLease) -> None:
        """The request is over."""
        self._leases.pop(lease.slot, None)
        self._forget(lease.slot)
        self._close(lease, Cause.FINISHED)

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
        wire = _wire(lease)
        end = self._connection.context_end(wire)
        while lease.known - end > keep:
            rows = lease.taps[end : lease.known]
            ids = array("i", lease.tokens[end : lease.known])
            try:
                sent = self._connection.context(wire, end, len(rows), _raw(rows), memoryview(ids).cast("B"))
            except LocalProtocolError as error:
                return self._refused(error)
            if not sent.rows:
                return self._starve()
            # One frame a message: a message has a bounded number of parts.
            if not all(self._send([frame]) for frame in sent.frames):
                return False
            end += sent.rows
            if lease.known - end <= keep:
                self._starved_ns = None
        return True

    def _starve(self) -> bool:
        """No credit. That of a CONTEXT which was lost never comes back: a link that gets too little starts over.

        A worker process that is only slow is given twice the time after each new start.
        """
        now, negotiated = self._now_ns(), self._connection.negotiated
        assert negotiated is not None
        if self._starved_ns is None:
            self._starved_ns, self._granted = now, 0
        patience_ms = SILENT_HEARTBEATS * negotiated.heartbeat_ms * 2 ** min(8, self._starvations)
        if now - self._starved_ns <= patience_ms * NS_PER_MS:
            return False
        # `listen` acts on it: nobody who asks whether a STEP may go expects the link to end in the answer.
        self._starves = self._granted < negotiated.context_credit_rows
        self._starved_ns = None
        return False

    def _open(self, lease: DraftLease) -> None:
        """Give the lease the lowest free slot of the wire; without one it is target-only until there is one."""
        if not self.room or lease.misfit:
            return
        wire = next(slot for slot in range(self.capacity) if slot not in self._by_wire)
        lease.replied = False
        try:
            frame = self._connection.open(
                wire,
                lease.session,
                seed=lease.seed,
                support=SupportPolicy(lease.support),
                lane=lease.lane,
                draft_temperature_micro=round(lease.temperature * MICRO),
            )
        except LocalProtocolError as error:
            # The worker negotiated less than this lease needs (support, lane): the request stays target-only.
            self.last_error, lease.misfit = str(error), True
            return
        lease.wire, self._by_wire[wire] = wire, lease
        lease.open = True
        if self._send([frame]):
            self.feed(lease)

    def _close(self, lease: DraftLease, cause: Cause) -> None:
        """Give the lease's slot back; another lease may take it at once, in its next generation."""
        if lease.open and self.up:
            self._tell(self._connection.close, lease.wire, cause)
        self._vacate(lease)

    def _vacate(self, lease: DraftLease) -> None:
        if lease.wire is not None:
            del self._by_wire[lease.wire]
        lease.wire = None
        lease.open = lease.lost = lease.replied = lease.misfit = False

    def _lose(self, wire: int) -> None:
        """The slot's generation is dead; `_revive` resets it when its pause is over."""
        lease = self._by_wire.get(wire)
        if lease is None:
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
            if self._tell(self._connection.reset, lease.wire, Cause.ROUND_TIMED_OUT):
                self.feed(lease)
            return
        self._close(lease, Cause.ROUND_TIMED_OUT)
        self._open(lease)

    # -- rounds ------------------------------------------------------------------------------------------------

    def step(self, requests: Sequence[DraftRequest], shared: DraftRound | None = None) -> DraftRound:
        """Ask for all requests' proposals; `refusal` must have been empty for each. Give the round to `collect`.

        shared: a round that other links serve too; it is given back with these requests added.
        """
        now = self._now_ns()
        round_ = shared or DraftRound(0, set())
        round_.until_ns = max(round_.until_ns, now + self._deadline_ms * NS_PER_MS)
        self._probed_ns = now
        fresh = [r for r in requests if self._await(r, round_)]
        for start in range(0, len(fresh), STEP_ITEMS_MAX):
            if self.up:
                items = [self._item(r) for r in fresh[start : start + STEP_ITEMS_MAX]]
                self._tell(self._connection.step, items, now, self._memory_for(items))
        if not self.up:
            self._discard_rounds("send_failed")
        return round_

    def _memory_for(self, items: Sequence[StepItem]) -> memoryview:
        """Memory of a STEP frame, the same for every round: a send is done with it when it returns."""
        room = step_room(items)
        if len(self._step_memory) < room:
            self._step_memory = aligned_memory(2 * room)
        return self._step_memory

    def _await(self, request: DraftRequest, round_: DraftRound) -> bool:
        """Expect the request's proposal, unless its round was asked for before: its keys are used, at any worker."""
        lease = request.lease
        if request.round <= lease.asked_round:
            self.discards["round_used"] += 1
            return False
        lease.asked_round = request.round
        if lease.asked_ns is None:
            lease.asked_ns = self._probed_ns
        self._rounds[lease.slot] = round_
        round_.waiting.add(lease.slot)
        return True

    def _item(self, request: DraftRequest) -> StepItem:
        lease = request.lease
        wire = _wire(lease)
        end = self._connection.context_end(wire)
        self._resets[lease.slot] = self._connection.reset_count(wire)
        self._asked_epochs[lease.slot] = self._epoch()
        accepted = request.accepted_count if lease.replied else None
        lease.replied = False
        return StepItem(
            session=lease.session,
            slot=wire,
            generation=self._connection.generation(wire),
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
        while self.serves(round_):
            self.advance(round_, PROBE_MS)
        self._revive(self._now_ns())
        return round_.ready

    def advance(self, round_: DraftRound, limit_ms: int) -> None:
        """Take what comes for a round that waits: sleep until then, but not past its deadline or `limit_ms`."""
        now = self._now_ns()
        self._receive(self._wait_ms(min(round_.until_ns, now + limit_ms * NS_PER_MS), now))
        self._expire()
        if not self.serves(round_):
            return
        if now >= round_.until_ns:
            self._miss("step_deadline")
        elif now - self._probed_ns >= PROBE_MS * NS_PER_MS:
            self._probed_ns = now
            self._tell(self._connection.ping, now)

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
        epoch = self._asked_epochs[lease.slot]
        assert epoch is not None
        self._quarantine.add(epoch)
        self.discards[cause] += 1
        if epoch != self._epoch():
            return  # its successor is there already
        self._quarantines += self.up
        self.last_error = f"the worker is quarantined: {cause.replace('_', ' ')} ({reason}); restart it"
        self._down("quarantined")
        self._next_hello_ns = self._now_ns() + _pause_ns(self._quarantines, QUARANTINE_MAX_S)

    def distrusts(self, lease: DraftLease) -> bool:
        """Whether the worker process that the lease's last STEP went to has been found out since."""
        return self._asked_epochs[lease.slot] in self._quarantine

    # -- frames and events -------------------------------------------------------------------------------------

    def _receive(self, timeout_ms: int) -> bool:
        """Whether anything had arrived."""
        frames = self._client.poll(timeout_ms)
        for frame in frames:
            for event in self._connection.receive(frame, self._now_ns()):
                self._on(event)
        self._flush()
        return bool(frames)

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
            case ProposalReady():
                self._take(event)
            case (StepFailed() | SlotFailed()) if event.code is ErrorCode.SLOT_BUSY:
                # The worker holds the slot for a request that is over: a CLOSE was lost. HELLO frees every slot.
                self._down("slot_busy")
            case StepFailed():
                self._discard(event.slot, event.code.counter)
                if event.needs_reset:
                    self._lose(event.slot)
            case StepTimedOut():
                self._count_late(event.slot)
                self._discard(event.slot, "late")
                self._lose(event.slot)
            case SlotFailed():
                self._lose(event.slot)
            case PongReceived():
                # What we hold ourselves is known better than a PONG that may be a second old.
                own = len(self._by_wire) / max(1, self.capacity)
                self.others_load = max(0.0, event.load_permille / 1000 - own)
            case CreditGranted():
                self._granted += event.rows
            case PeerSilent():
                self._down("silent")
            case PeerError() if event.scope is Scope.CONNECTION:
                self._down("peer_error")
            case Draining():
                self._leaves_ns = self._now_ns() + event.deadline_ms * NS_PER_MS

    def _take(self, event: ProposalReady) -> None:
        lease = self._by_wire.get(event.slot)
        round_ = None if lease is None else self._forget(lease.slot)
        if lease is None or round_ is None:
            event.lease.release()
            return
        round_.ready[lease.slot] = event
        lease.losses, lease.replied = 0, True
        if lease.lost_ns is not None:
            self.respeculations.append((self._now_ns() - lease.lost_ns) / NS)
        lease.asked_ns = lease.lost_ns = None
        self.late_rounds, self._answered = 0, True

    def _discard(self, wire: int, cause: str) -> None:
        """This round's proposal is gone."""
        lease = self._by_wire.get(wire)
        if lease is not None and self._forget(lease.slot) is not None:
            self.discards[cause] += 1

    def _discard_rounds(self, cause: str) -> None:
        for slot in list(self._rounds):
            self._forget(slot)
            self.discards[cause] += 1

    def _count_late(self, wire: int) -> None:
        """One more late round, however many requests waited in it."""
        lease = self._by_wire.get(wire)
        round_ = None if lease is None else self._rounds.get(lease.slot)
        if round_ is not None and round_ not in self._late:
            self._late.add(round_)
            self.late_rounds += 1

    def _miss(self, cause: str) -> None:
        """A round is over its deadline, and the connection has not said so."""
        for lease in list(self._by_wire.values()):
            if lease.wire is not None:
                self._count_late(lease.wire)
        self._down(cause)

    def _forget(self, slot: int) -> DraftRound | None:
        """The round that awaited the slot's proposal, which it does no more."""
        round_ = self._rounds.pop(slot, None)
        if round_ is not None:
            round_.waiting.discard(slot)
        if not self._rounds:
            self._late.clear()
        return round_

    # -- up and down -------------------------------------------------------------------------------------------

    def _say_hello(self, now: int) -> None:
        """Not every turn: each HELLO makes the answer to the one before it stale."""
        version = self._connection.parameters.versions[self._version]
        sent = self._client.send([self._connection.hello(now, version)])
        self._next_hello_ns = now + _pause_ns(self._hellos_unanswered, RETRY_MAX_S)
        self._hellos_unanswered += sent

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
        epoch = self._epoch()
        if epoch in self._quarantine:
            return  # still the process that lied: the link stays down and asks again, rarely
        if epoch != self._last_epoch:
            self.late_rounds, self._starvations, self._last_epoch = 0, 0, epoch
        self.up = True
        self.reconnects += self._was_up
        self._was_up = True
        self.last_error = None
        self._leaves_ns, self._has_left, self._answered = None, False, False
        self._hellos_unanswered, self.others_load, self._starved_ns = 0, 0.0, None
        for lease in self._leases.values():
            self._open(lease)

    def _leave(self, until_ns: int) -> None:
        """The worker drains: give it back what it holds, so that it can end, and look for its successor after that."""
        for lease in self._leases.values():
            self._close(lease, Cause.SHUTDOWN)
        self._down("draining")
        self._next_hello_ns, self._has_left = until_ns, True

    def _down(self, cause: str) -> None:
        """Discard what was awaited; the next handshake starts over. Harmless when the link is down already."""
        self._discard_rounds(cause)
        if self.up:
            self.generation_bumps += len(self._by_wire)
            self._fruitless = 0 if self._answered else self._fruitless + 1
            self._next_hello_ns = self._now_ns() + _pause_ns(self._fruitless, RETRY_MAX_S)
            self.last_error = self.last_error or f"the link to {self.address} went down: {cause}"
        self.up = self._starves = False
        self._leaves_ns = None
        for lease in self._leases.values():
            if lease.wire is not None:
                lease.worker_lost(self._now_ns())
            self._vacate(lease)
            lease.losses = lease.ready_ns = 0


def _wire(lease: DraftLease) -> int:
    """The slot of a lease that is open."""
    assert lease.wire is not None
    return lease.wire


def _pause_ns(failures: int, longest_s: float) -> int:
    """`RETRY_S`, doubled with every failure in a row."""
    return int(NS * min(longest_s, RETRY_S * 2 ** min(8, failures)))


def _raw(rows: Tensor) -> memoryview | bytes:
    """The bytes of bf16 rows, without a copy (numpy has no bf16, so they pass as uint8)."""
    return rows.view(torch.uint8).numpy().data.cast("B") if len(rows) else b""
