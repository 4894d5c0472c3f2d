"""The drafter worker: v2 events in, drafts out.

`Worker` owns the drafter's state and one `DrafterConnection` per verifier; it is driven by `server.serve` (sockets) or
by a test (frames in memory). Turn order: take every frame that has arrived, extend contexts, then draft all pending
steps of all verifiers as one batch, then reply. Slots of different verifiers share one pool of `DraftSlots`. What there
is to send waits in the outbox, for the end of the turn, or for a pause of `drafting` when it has become large.

Invariants: every step that arrives is answered, with a proposal or with a failure; a request that fails, or finds no
state slot, costs itself only; verifiers that are gone leave nothing behind. No frame and no failing request ends the
worker: what it cannot do it refuses, and counts. A worker that drains finishes what is open and takes nothing new.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import singledispatchmethod

import numpy as np
import torch
from torch import Tensor

from dspark.dense import pack_dense_rows
from dspark.dyadic import Row, pack_rows
from dspark.models.drafter import DrafterNetwork
from dspark.philox import Keys
from dspark_proto import (
    NO_COMMIT,
    Buffer,
    ContextArrived,
    DrafterConnection,
    DrafterState,
    ErrorCode,
    HelloParameters,
    HelloReceived,
    PeerSilent,
    SlotCancelled,
    SlotClosed,
    SlotOpened,
    SlotReset,
    StepArrived,
    StepItem,
)
from dspark_proto.transports.base import LARGE_SEND_BYTES, PeerFrame
from dspark_workers.chain import DraftPolicy, MarkovChain, Proposal
from dspark_workers.history import TokenHistory
from dspark_workers.slots import ContextFullError, DraftSlots

MICRO = 1_000_000
STRANGER_NS = 60_000_000_000
"""A peer that holds no accepted connection is forgotten after this time without a frame."""
STALE_NS = 5_000_000_000
"""A verifier silent for this long (it pings every second) loses its state slots when another one needs them."""


@dataclass(slots=True)
class Lease:
    """What a live wire slot maps to: how its request drafts, its text, and the state slot that it owns, if it has one.

    history: the committed tokens, None when copying is off. drafted: position of the first draft of the last round, and
    its drafts. Without a state slot (none was free, or the context outgrew it) steps are refused; RESET tries again.
    """

    policy: DraftPolicy
    seed: int
    choice: int
    history: TokenHistory | None = None
    state_slot: int | None = None
    drafted: tuple[int, list[int]] = (0, [])


@dataclass(slots=True)
class Peer:
    """One verifier: its connection, its leases by wire slot, and when it was heard last."""

    name: bytes
    connection: DrafterConnection
    heard_ns: int
    leases: dict[int, Lease] = field(default_factory=dict)


@dataclass(slots=True)
class WorkerCounters:
    """Totals since start; `draft_ns` is time inside drafting, link excluded."""

    rounds: int = 0
    drafted_tokens: int = 0
    context_rows: int = 0
    draft_ns: int = 0
    failed_steps: int = 0
    stolen_slots: int = 0
    unsent_messages: int = 0


class Worker:
    """Drafts for any number of verifiers. Single-threaded; `now_ns` comes from the caller."""

    def __init__(
        self,
        network: DrafterNetwork,
        draft_ids: Tensor,
        parameters: HelloParameters,
        *,
        slots: int,
        length: int,
        copy: bool = True,
    ) -> None:
        """`copy`: continue what a request's text has said before (see `history`)."""
        self.parameters = parameters
        self.counters = WorkerCounters()
        self.peers: dict[bytes, Peer] = {}
        self._state = DraftSlots(network, slots, length)
        self._chain = MarkovChain(network, draft_ids)
        self._copy = copy
        self._network = network
        self._free = list(range(slots))
        self._pending: list[tuple[Peer, StepItem]] = []
        self._started_ns = 0
        self._draining = False
        self._outbox: list[tuple[bytes, list[memoryview]]] = []
        self._outbox_bytes = 0
        depth, support = parameters.max_depth, parameters.max_support
        self._vocab = parameters.compatibility.vocab_size
        width = max(support, self._vocab) if parameters.dense_rows else support
        # Flat, so that any [depth, width] of a reply is one contiguous view: replies allocate nothing.
        self._ids = np.zeros(depth * support, dtype=np.int32)
        self._q = np.zeros(depth * width, dtype=np.float32)
        self._entries = np.zeros(depth, dtype=np.int32)

    @property
    def free_slots(self) -> int:
        """State slots that no request holds."""
        return len(self._free)

    def receive(self, arrivals: Iterable[PeerFrame], now_ns: int) -> None:
        """Feed frames; steps wait until `draft_pending`."""
        for arrival in arrivals:
            peer = self.peers.get(arrival.peer)
            if peer is None:
                peer = Peer(arrival.peer, DrafterConnection(self.parameters), now_ns)
                self.peers[arrival.peer] = peer
            peer.heard_ns = now_ns
            # All verifiers' slots count: each of them compares workers by it, and sees only its own leases.
            peer.connection.load_permille = 1000 * (self._state.slots - len(self._free)) // self._state.slots
            for event in peer.connection.receive(arrival.frame, now_ns):
                self._on(event, peer, now_ns)
            self._send(peer, peer.connection.frames_to_send())

    def expire(self, now_ns: int) -> None:
        """Let the connections' timers run, and forget peers that never became, or no longer are, verifiers."""
        for peer in list(self.peers.values()):
            for event in peer.connection.expire(now_ns):
                self._on(event, peer, now_ns)
            self._send(peer, peer.connection.frames_to_send())
            accepted = peer.connection.state in (DrafterState.ACTIVE, DrafterState.DRAINING)
            if not accepted and now_ns - peer.heard_ns >= STRANGER_NS:
                self._forget(peer)

    def draft_pending(self) -> None:
        """Draft every step that has arrived, as one batch, and queue the replies."""
        for _pause in self.drafting():
            pass

    def drafting(self) -> Iterator[None]:
        """`draft_pending`, with a pause each time that the outbox holds enough for a send of its own.

        Whoever empties it then has large replies travel while the rest of them, and other steps' drafts, are made.
        """
        pending, self._pending = self._pending, []
        live = [(p, i, s) for p, i in pending if (s := self._state_slot(p, i.slot)) is not None]
        if not live:
            return
        try:
            hidden = self._state.hidden([s for *_, s in live], [i.anchor_token for _, i, _ in live])
        except Exception:  # whatever it was, the verifiers must hear of it: see the invariants
            for peer, item, _ in live:
                self._fail(peer, item)
        else:
            for row, (peer, item, _) in enumerate(live):
                for _pause in self._answer(peer, item, hidden[row, : item.depth]):
                    paused_ns = time.perf_counter_ns()
                    yield
                    self._started_ns += time.perf_counter_ns() - paused_ns
        self.counters.draft_ns += self._elapsed_ns()

    def outbox(self) -> list[tuple[bytes, list[memoryview]]]:
        """Frames to send, per verifier, in order; emptied by the call. They are valid until the next turn."""
        out, self._outbox, self._outbox_bytes = self._outbox, [], 0
        return out

    def drain(self, deadline_ms: int) -> None:
        """Tell every verifier that this worker is about to leave, and take no new one; open slots go on."""
        self._draining = True
        for peer in self.peers.values():
            if peer.connection.state is DrafterState.ACTIVE:
                self._send(peer, [peer.connection.drain(deadline_ms)])

    def _elapsed_ns(self) -> int:
        """Since the first pending step arrived: context rows, backbone and sampling, no link."""
        return time.perf_counter_ns() - self._started_ns

    def _send(self, peer: Peer, frames: Sequence[memoryview]) -> None:
        """Put frames into the outbox; those of a verifier that follow each other leave in one send."""
        if not frames:
            return
        self._outbox_bytes += sum(map(len, frames))
        if self._outbox and self._outbox[-1][0] == peer.name:
            self._outbox[-1][1].extend(frames)
        else:
            self._outbox.append((peer.name, list(frames)))

    # -- drafting ----------------------------------------------------------------------------------------------

    def _answer(self, peer: Peer, item: StepItem, hidden: Tensor) -> Iterator[None]:
        """Reply to one step, see `drafting`; whatever fails in it fails it alone, and is never repaired."""
        is_large = False
        try:
            for frame in self._reply(peer, item, self._draft(peer, item, hidden)):
                self._send(peer, (frame,))
                # What follows in a reply that has left in part, its COMPLETION too, does not wait for the next reply.
                is_large = is_large or self._outbox_bytes >= LARGE_SEND_BYTES
                if is_large:
                    yield
        except Exception:  # a row that cannot be formed, a product that overflows: the others still get theirs
            self._fail(peer, item)
            return
        self.counters.rounds += 1
        self.counters.drafted_tokens += item.depth

    def _fail(self, peer: Peer, item: StepItem) -> None:
        """Refuse a step because of the exception at hand."""
        _log(f"slot {item.slot} round {item.round}:\n{traceback.format_exc()}")
        self._refuse(peer, item)

    def _refuse(self, peer: Peer, item: StepItem) -> None:
        self.counters.failed_steps += 1
        self._send(peer, peer.connection.fail(item, ErrorCode.DRAFT_FAILED))

    @torch.inference_mode()
    def _draft(self, peer: Peer, item: StepItem, hidden: Tensor) -> Proposal:
        lease = peer.leases[item.slot]
        # No two draws share a key: rounds of a request only grow, and a lost generation raises the reset count.
        keys = Keys(
            seed=lease.seed,
            generation=peer.connection.reset_count(item.slot),
            round=item.round,
            choice=lease.choice,
        )
        base = self._network.base_logits(hidden)
        _tell(lease, item)
        proposal = self._chain.sample(
            base, item.anchor_token, item.anchor_position, lease.policy, keys, lease.history, hidden=hidden
        )
        lease.drafted = (item.anchor_position + 1, proposal.tokens)
        return proposal

    def _reply(self, peer: Peer, item: StepItem, proposal: Proposal) -> Iterator[memoryview]:
        support = peer.leases[item.slot].policy.support
        entries, ids, q = self._pack(proposal.rows, support) if support else self._pack_dense(proposal.rows)
        return peer.connection.stream_reply(
            item,
            proposal.tokens,
            entries,
            ids,
            q,
            draft_us=self._elapsed_ns() // 1000,
            confidences=proposal.confidences,
        )

    def _pack(self, rows: list[Row], support: int) -> tuple[list[int], Buffer, Buffer]:
        """Entries, ids and q of a sparse reply."""
        depth = len(rows)
        ids = self._ids[: depth * support].reshape(depth, support)
        q = self._q[: depth * support].reshape(depth, support)
        entries = self._entries[:depth]
        pack_rows(rows, support, ids, q, entries)
        return entries.tolist(), ids.data.cast("B"), q.data.cast("B")

    def _pack_dense(self, rows: list[Row]) -> tuple[list[int], Buffer, Buffer]:
        """Entries, ids (none) and q of a dense reply."""
        q = self._q[: len(rows) * self._vocab].reshape(len(rows), self._vocab)
        pack_dense_rows(rows, self._vocab, q)
        return [self._vocab] * len(rows), b"", q.data.cast("B")

    # -- events ------------------------------------------------------------------------------------------------

    @singledispatchmethod
    def _on(self, event: object, peer: Peer, now_ns: int) -> None:
        """Events that need no action here (commits, peer errors) are counted by the connection itself."""

    @_on.register
    def _(self, event: HelloReceived, peer: Peer, now_ns: int) -> None:
        self._release_all(peer)
        if self._draining:
            self._send(peer, [peer.connection.reject(ErrorCode.DRAINING)])
        elif event.code is None:
            self._send(peer, [peer.connection.accept(now_ns)])
        else:
            _log(f"refused a verifier: {event.code.counter}: {event.mismatch}")
            self._send(peer, [peer.connection.reject()])

    @_on.register
    def _(self, event: SlotOpened, peer: Peer, now_ns: int) -> None:
        self._release(peer, event.slot)
        policy = DraftPolicy(event.draft_temperature_micro / MICRO, int(event.support), event.lane)
        peer.leases[event.slot] = Lease(policy, event.seed, event.choice)
        self._place(peer, event.slot, event.context_start, now_ns)

    @_on.register
    def _(self, event: SlotReset, peer: Peer, now_ns: int) -> None:
        self._place(peer, event.slot, event.context_start, now_ns)

    @_on.register
    def _(self, event: ContextArrived, peer: Peer, now_ns: int) -> None:
        peer.connection.context_consumed(event.rows)
        lease = peer.leases.get(event.slot)
        if lease is not None and lease.history is not None and event.token_ids is not None:
            lease.history.record(event.first_position, np.frombuffer(event.token_ids, dtype="<i4").tolist())
        self._extend(peer, event.slot, event.first_position, event.rows, event.taps)

    @_on.register
    def _(self, event: StepArrived, peer: Peer, now_ns: int) -> None:
        if not self._pending:
            self._started_ns = time.perf_counter_ns()
        for item in event.items:
            if self._extend(peer, item.slot, item.tap_first, item.tap_rows, item.taps):
                self._pending.append((peer, item))
            else:
                self._refuse(peer, item)

    @_on.register
    def _(self, event: SlotCancelled, peer: Peer, now_ns: int) -> None:
        # The slot stays leased and may be reset; its state is free for others until then.
        if event.slot in peer.leases:
            self._vacate(peer.leases[event.slot])

    @_on.register
    def _(self, event: SlotClosed, peer: Peer, now_ns: int) -> None:
        self._release(peer, event.slot)

    @_on.register
    def _(self, event: PeerSilent, peer: Peer, now_ns: int) -> None:
        # A verifier that comes back is a new connection with a new name; this one's leases are free again.
        self._forget(peer)

    # -- state slots -------------------------------------------------------------------------------------------

    def _state_slot(self, peer: Peer, slot: int) -> int | None:
        lease = peer.leases.get(slot)
        return None if lease is None else lease.state_slot

    def _place(self, peer: Peer, slot: int, context_start: int, now_ns: int) -> None:
        """Give the lease an empty state slot, if there is one; else its steps are refused until the next RESET."""
        lease = peer.leases.get(slot)
        if lease is None:
            return
        lease.history, lease.drafted = TokenHistory() if self._copy else None, (0, [])
        if context_start:
            lease.history = None  # it would be as long as the positions that are missing
            self._vacate(lease)  # a context that does not start at 0 is beyond this worker: it keeps whole contexts
            return
        if lease.state_slot is None:
            if not self._free:
                self._steal(now_ns)
            lease.state_slot = self._free.pop() if self._free else None
        if lease.state_slot is not None:
            self._state.open(lease.state_slot)

    def _steal(self, now_ns: int) -> None:
        """Take the state slots of the verifier that has been silent longest; it can RESET if it ever comes back."""
        holders = [p for p in self.peers.values() if any(x.state_slot is not None for x in p.leases.values())]
        victim = min(holders, key=lambda p: p.heard_ns, default=None)
        if victim is None or now_ns - victim.heard_ns < STALE_NS:
            return
        for lease in victim.leases.values():
            self.counters.stolen_slots += lease.state_slot is not None
            self._vacate(lease)

    def _extend(self, peer: Peer, slot: int, first: int, rows: int, taps: Buffer) -> bool:
        """Append context rows; a slot that cannot take them is given up (its steps are refused until RESET)."""
        lease = peer.leases.get(slot)
        if lease is None or lease.state_slot is None:
            return False
        if rows == 0:
            return True
        try:
            # A copy: torch wants memory that it might write to, and received frames are read-only.
            values = torch.frombuffer(bytearray(taps), dtype=torch.bfloat16).view(rows, -1)
            self._state.extend(lease.state_slot, first, values)
        except ContextFullError as error:
            _log(str(error))
        except Exception:  # see the invariants: a failing request costs itself only
            _log(f"context of slot {slot}:\n{traceback.format_exc()}")
        else:
            self.counters.context_rows += rows
            return True
        self._vacate(lease)
        return False

    def _vacate(self, lease: Lease) -> None:
        if lease.state_slot is not None:
            self._free.append(lease.state_slot)
            lease.state_slot = None

    def _release(self, peer: Peer, slot: int) -> None:
        lease = peer.leases.pop(slot, None)
        if lease is not None:
            self._vacate(lease)

    def _release_all(self, peer: Peer) -> None:
        for slot in list(peer.leases):
            self._release(peer, slot)

    def _forget(self, peer: Peer) -> None:
        self._release_all(peer)
        self.peers.pop(peer.name, None)


def _tell(lease: Lease, item: StepItem) -> None:
    """Put what the STEP says about the text into the lease's history: surviving drafts, and the anchor."""
    if lease.history is None:
        return
    if item.accepted_count != NO_COMMIT:
        first, drafts = lease.drafted
        lease.history.record(first, drafts[: item.accepted_count])
    lease.history.record(item.anchor_position, [item.anchor_token])


def _log(text: str) -> None:
    """Standard error: standard output belongs to whoever runs the worker."""
    print(f"dspark worker: {text}", file=sys.stderr, flush=True)
