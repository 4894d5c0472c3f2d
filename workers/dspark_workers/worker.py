"""The drafter worker: v2 events in, drafts out.

`Worker` owns the drafter's state and one `DrafterConnection` per verifier; it is driven by `server.serve` (sockets) or
by a test (frames in memory). Turn order: take every frame that has arrived, extend contexts, then draft all pending
steps of all verifiers as one batch, then reply. Slots of different verifiers share one pool of `DraftSlots`.

A malformed frame, a full context or a failing request is answered or dropped per slot; nothing here ends the worker.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import singledispatchmethod

import numpy as np
import torch
from torch import Tensor

from dspark.dyadic import RowError, pack_rows
from dspark.models.drafter import DrafterNetwork
from dspark.philox import Keys
from dspark_proto import (
    ContextArrived,
    DrafterConnection,
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
from dspark_proto.transports.base import PeerFrame
from dspark_workers.chain import DraftPolicy, MarkovChain, Proposal
from dspark_workers.slots import ContextFullError, DraftSlots

MICRO = 1_000_000


@dataclass(slots=True)
class Lease:
    """What a live wire slot maps to: the state slot that it owns, and how its request drafts."""

    state_slot: int
    policy: DraftPolicy
    seed: int
    choice: int


@dataclass(slots=True)
class Peer:
    """One verifier: its connection, its leases by wire slot, and the reply arrays that its steps are packed into."""

    name: bytes
    connection: DrafterConnection
    leases: dict[int, Lease] = field(default_factory=dict)


@dataclass(slots=True)
class WorkerCounters:
    """Totals since start; `draft_ns` is time inside drafting, link excluded."""

    rounds: int = 0
    drafted_tokens: int = 0
    context_rows: int = 0
    draft_ns: int = 0
    failed_steps: int = 0


class Worker:
    """Drafts for any number of verifiers. Single-threaded; `now_ns` comes from the caller."""

    def __init__(
        self, network: DrafterNetwork, draft_ids: Tensor, parameters: HelloParameters, *, slots: int, length: int
    ) -> None:
        self.parameters = parameters
        self.counters = WorkerCounters()
        self.peers: dict[bytes, Peer] = {}
        self._state = DraftSlots(network, slots, length)
        self._chain = MarkovChain(network, draft_ids)
        self._network = network
        self._free = list(range(slots))
        self._pending: list[tuple[Peer, StepItem]] = []
        self._started_ns = 0
        self._outbox: list[tuple[bytes, list[object]]] = []
        depth, support = parameters.max_depth, parameters.max_support
        # Flat, so that any [depth, support] of a reply is one contiguous view: replies allocate nothing.
        self._ids = np.zeros(depth * support, dtype=np.int32)
        self._q = np.zeros(depth * support, dtype=np.float32)
        self._entries = np.zeros(depth, dtype=np.int32)

    def receive(self, arrivals: Iterable[PeerFrame], now_ns: int) -> None:
        """Feed frames; steps wait until `draft_pending`."""
        for arrival in arrivals:
            peer = self.peers.get(arrival.peer)
            if peer is None:
                peer = self.peers[arrival.peer] = Peer(arrival.peer, DrafterConnection(self.parameters))
            for event in peer.connection.receive(arrival.frame, now_ns):
                self._on(event, peer, now_ns)
            self._send(peer, peer.connection.frames_to_send())

    def expire(self, now_ns: int) -> None:
        """Let the connections' timers run."""
        for peer in list(self.peers.values()):
            for event in peer.connection.expire(now_ns):
                self._on(event, peer, now_ns)
            self._send(peer, peer.connection.frames_to_send())

    def draft_pending(self) -> None:
        """Draft every step that has arrived, as one batch, and queue the replies."""
        pending, self._pending = self._pending, []
        live = [(p, i) for p, i in pending if i.slot in p.leases]
        if not live:
            return
        hidden = self._state.hidden(
            [p.leases[i.slot].state_slot for p, i in live], [i.anchor_token for _, i in live]
        )
        for row, (peer, item) in enumerate(live):
            self._answer(peer, item, hidden[row, : item.depth])
        self.counters.draft_ns += self._elapsed_ns()

    def _elapsed_ns(self) -> int:
        """Since the first pending step arrived: context rows, backbone and sampling, no link."""
        return time.perf_counter_ns() - self._started_ns

    def outbox(self) -> list[tuple[bytes, list[object]]]:
        """Frames to send, per verifier, in order; emptied by the call."""
        out, self._outbox = self._outbox, []
        return out

    def drain(self, deadline_ms: int, now_ns: int) -> None:
        """Tell every verifier that this worker is about to leave."""
        for peer in self.peers.values():
            if peer.leases:
                self._send(peer, [peer.connection.drain(deadline_ms, now_ns)])

    def _send(self, peer: Peer, frames: list[object]) -> None:
        if frames:
            self._outbox.append((peer.name, frames))

    def _answer(self, peer: Peer, item: StepItem, hidden: Tensor) -> None:
        try:
            proposal = self._draft(peer, item, hidden)
        except RowError as error:
            # A row that cannot be formed is a fault of this worker: say so, never send a repaired one.
            self.counters.failed_steps += 1
            self._send(peer, peer.connection.fail(item, ErrorCode.DRAFT_FAILED))
            print(f"dspark worker: slot {item.slot} round {item.round}: {error}", flush=True)
            return
        support = peer.leases[item.slot].policy.support
        cells = item.depth * support
        ids = self._ids[:cells].reshape(item.depth, support)
        q = self._q[:cells].reshape(item.depth, support)
        entries = self._entries[: item.depth]
        pack_rows(proposal.rows, support, ids, q, entries)
        frames = peer.connection.reply(
            item,
            proposal.tokens,
            entries.tolist(),
            memoryview(ids).cast("B"),
            memoryview(q).cast("B"),
            draft_us=self._elapsed_ns() // 1000,
        )
        self.counters.rounds += 1
        self.counters.drafted_tokens += item.depth
        self._send(peer, frames)

    @torch.inference_mode()
    def _draft(self, peer: Peer, item: StepItem, hidden: Tensor) -> Proposal:
        lease = peer.leases[item.slot]
        keys = Keys(
            seed=lease.seed,
            generation=peer.connection.reset_count(item.slot),
            round=item.round,
            choice=lease.choice,
        )
        base = self._network.base_logits(hidden)
        return self._chain.sample(
            base, item.anchor_token, item.anchor_position, item.depth, lease.policy, keys
        )

    @singledispatchmethod
    def _on(self, event: object, peer: Peer, now_ns: int) -> None:
        """Events that need no action here (commits, peer errors) are counted by the connection itself."""

    @_on.register
    def _(self, event: HelloReceived, peer: Peer, now_ns: int) -> None:
        self._release_all(peer)
        if event.mismatch is None:
            self._send(peer, [peer.connection.accept(now_ns)])
        else:
            print(f"dspark worker: refused a verifier: {event.mismatch}", flush=True)
            self._send(peer, [peer.connection.reject(now_ns)])

    @_on.register
    def _(self, event: SlotOpened, peer: Peer, now_ns: int) -> None:
        if event.slot in peer.leases:
            self._release(peer, event.slot)
        if not self._free:
            return  # its first step is refused below; the verifier goes on target-only
        policy = DraftPolicy(event.draft_temperature_micro / MICRO, int(event.support))
        seed = event.seed - (1 << 64) if event.seed >= 1 << 63 else event.seed
        lease = Lease(self._free.pop(), policy, seed, event.choice)
        self._state.open(lease.state_slot)
        peer.leases[event.slot] = lease

    @_on.register
    def _(self, event: ContextArrived, peer: Peer, now_ns: int) -> None:
        peer.connection.context_consumed(event.rows)
        self._extend(peer, event.slot, event.first_position, event.rows, event.taps)

    @_on.register
    def _(self, event: StepArrived, peer: Peer, now_ns: int) -> None:
        if not self._pending:
            self._started_ns = time.perf_counter_ns()
        for item in event.items:
            usable = item.tap_rows == 0 or self._extend(peer, item.slot, item.tap_first, item.tap_rows, item.taps)
            if usable and item.slot in peer.leases:
                self._pending.append((peer, item))
            else:
                self.counters.failed_steps += 1
                self._send(peer, peer.connection.fail(item, ErrorCode.DRAFT_FAILED))

    @_on.register
    def _(self, event: SlotReset, peer: Peer, now_ns: int) -> None:
        if event.slot in peer.leases:
            self._state.open(peer.leases[event.slot].state_slot)

    @_on.register
    def _(self, event: PeerSilent, peer: Peer, now_ns: int) -> None:
        # A verifier that comes back is a new connection with a new name; this one's leases are free again.
        self._release_all(peer)
        self.peers.pop(peer.name, None)

    @_on.register(SlotClosed)
    @_on.register(SlotCancelled)
    def _(self, event: SlotClosed | SlotCancelled, peer: Peer, now_ns: int) -> None:
        self._release(peer, event.slot)

    def _extend(self, peer: Peer, slot: int, first: int, rows: int, taps: object) -> bool:
        """Append context rows; a slot that cannot take them is given up (its steps are refused)."""
        lease = peer.leases.get(slot)
        if lease is None:
            return False
        values = torch.frombuffer(taps, dtype=torch.bfloat16).view(rows, -1)  # type: ignore[call-overload]
        try:
            self._state.extend(lease.state_slot, first, values)
        except ContextFullError as error:
            print(f"dspark worker: {error}", flush=True)
            self._release(peer, slot)
            return False
        self.counters.context_rows += rows
        return True

    def _release(self, peer: Peer, slot: int) -> None:
        lease = peer.leases.pop(slot, None)
        if lease is not None:
            self._free.append(lease.state_slot)

    def _release_all(self, peer: Peer) -> None:
        for slot in list(peer.leases):
            self._release(peer, slot)
