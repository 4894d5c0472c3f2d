"""A drafter worker: production `DrafterConnection`s, one per Spark group, and a toy drafter behind them.

Rows come from a table, chosen by everything that the worker was told (tap rows, anchor, drafts); tokens are drawn from
them with the production keys and the production draw. Invariants: a reply is a function of what arrived; a new
incarnation knows nothing and has a new epoch. A *lie* is what a broken or dishonest worker sends under right checksums.
Called by `world`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from zlib import crc32

from dspark.dyadic import draw
from dspark.philox import Domain, Keys
from dspark.sim.clock import MS, VirtualClock
from dspark.sim.faults import Fault
from dspark.sim.ledger import Drafted, Ledger
from dspark.sim.process import Process
from dspark.sim.toy_models import DraftRow, ToyModels
from dspark.sim.watch import ModelWatch
from dspark_proto import (
    ContextArrived,
    DrafterConnection,
    DrafterState,
    ErrorCode,
    HelloParameters,
    HelloReceived,
    Lane,
    LocalProtocolError,
    SlotClosed,
    SlotOpened,
    SlotReset,
    SlotState,
    StepArrived,
    StepItem,
    SupportPolicy,
)

Send = Callable[[int, list[bytes]], None]
"""Sends frames to a group."""


@dataclass(slots=True)
class ToySlot:
    """What the drafter keeps of one lease; `context` is a checksum over all tap rows so far."""

    seed: int
    choice: int
    support: SupportPolicy
    lane: Lane
    session: int
    context: int = 0


@dataclass(slots=True)
class Draft:
    """One proposal: the drafted tokens, the row behind each, and the row that is sent for it."""

    tokens: list[int]
    sent: list[DraftRow]


class ToyWorker(Process):
    """Worker number `index` of a world."""

    def __init__(
        self, index: int, clock: VirtualClock, rng: Random, parameters: HelloParameters, models: ToyModels,
        ledger: Ledger, send: Send, draft_us: tuple[int, int],
    ) -> None:  # fmt: skip
        super().__init__(f"w{index}", clock)
        self.index = index
        self.peers: dict[int, DrafterConnection] = {}
        self.slots: dict[tuple[int, int], ToySlot] = {}
        self.lie: Fault | None = None
        self.watch: ModelWatch | None = None
        self.death: Fault | None = None
        self._unread: list[Fault] = []
        self._rng, self._models, self._ledger, self._send = rng, models, ledger, send
        self._parameters, self._draft_us = parameters, draft_us
        self._step_ns = parameters.heartbeat_ms * MS
        self.start()

    def start(self) -> None:
        """A new incarnation: a new epoch, and nothing else."""
        self.alive = True
        if self.watch is not None:
            for group in self.peers:
                self.watch.restarted(f"w{self.index}<g{group}")
        self.peers, self.slots, self.lie, self._unread = {}, {}, None, []
        self._parameters = replace(self._parameters, epoch=(self.index + 1) * 1_000_000 + self.incarnation)
        self.after(self._step_ns, self._tick)

    @property
    def epoch(self) -> int:
        return self._parameters.epoch

    def receive(self, group: int, frames: list[bytes], fault: Fault | None) -> None:
        """Frames from a group arrive."""
        if self.death is not None:
            self.death.hit()
        if fault is not None:
            fault.injected = self.alive
            self._unread.append(fault)
        if self.alive:
            self.run(lambda: self._take(group, frames, fault))

    def kill(self) -> None:
        """All that has not been read is lost, damaged frames too."""
        super().kill()
        for fault in self._unread:
            fault.injected = False

    def drain(self, deadline_ms: int) -> bool:
        """Announce to every group that this worker leaves; False when nobody is connected."""
        told = False
        for group, connection in self.peers.items():
            if connection.state is DrafterState.ACTIVE:
                self._reply(group, [connection.drain(deadline_ms)])
                told = True
        return told

    @property
    def open_slots(self) -> dict[int, int]:
        """Slots that each group holds, where it holds any, by the connections' own ledgers."""
        held = {g: sum(s.state is not SlotState.FREE for s in peer._slots) for g, peer in self.peers.items()}
        return {group: count for group, count in held.items() if count}

    def _take(self, group: int, frames: list[bytes], fault: Fault | None) -> None:
        connection = self.peers.get(group)
        if connection is None:
            connection = self.peers[group] = DrafterConnection(self._parameters)
            if self.watch is not None:
                self.watch.drafter(connection, f"w{self.index}<g{group}")
        before = sum(connection.counters.values()) if fault else 0
        for frame in frames:
            for event in connection.receive(frame, self.clock()):
                self._on(group, connection, event)
        self._reply(group, connection.frames_to_send())
        if fault is not None:
            self._unread.remove(fault)
            fault.verified = sum(connection.counters.values()) > before
            if not fault.verified:
                self._ledger.accepted_damage(fault)

    def _reply(self, group: int, frames: list[memoryview]) -> None:
        if frames:
            self._send(group, [bytes(frame) for frame in frames])

    def _tick(self) -> None:
        for group, connection in self.peers.items():
            for event in connection.expire(self.clock()):
                self._on(group, connection, event)
            self._reply(group, connection.frames_to_send())
        self.after(self._step_ns, self._tick)

    def _on(self, group: int, connection: DrafterConnection, event: object) -> None:
        match event:
            case StepArrived():
                self._begin(group, connection, event.items)
            case ContextArrived():
                slot = self.slots[group, event.slot]
                slot.context = crc32(event.taps, slot.context)
                connection.context_consumed(event.rows)
            case SlotOpened():
                self.slots[group, event.slot] = ToySlot(
                    event.seed, event.choice, event.support, event.lane, event.session
                )
            case SlotReset():
                self.slots[group, event.slot].context = 0
            case SlotClosed():
                self.slots.pop((group, event.slot), None)
            case HelloReceived():
                for key in [key for key in self.slots if key[0] == group]:
                    del self.slots[key]
                accepted = event.code is None
                self._reply(group, [connection.accept(self.clock()) if accepted else connection.reject()])

    # Drafting

    def _begin(self, group: int, connection: DrafterConnection, items: tuple[StepItem, ...]) -> None:
        work = []
        for item in items:
            slot = self.slots[group, item.slot]
            slot.context = crc32(item.taps, slot.context)
            work.append((item, slot.context))
        pause = self._rng.randint(*self._draft_us) * 1000
        self.after(pause, lambda: self._answer(group, connection, work))

    def _answer(self, group: int, connection: DrafterConnection, work: list[tuple[StepItem, int]]) -> None:
        frames: list[memoryview] = []
        if self.peers.get(group) is not connection:
            return
        for item, context in work:
            slot = self.slots.get((group, item.slot))
            if slot is not None and slot.session == item.session:
                frames += self._drafted(group, connection, item, slot, context)
        self._reply(group, frames)

    def _drafted(
        self, group: int, connection: DrafterConnection, item: StepItem, slot: ToySlot, context: int
    ) -> list[memoryview]:
        """The frames that answer one item; a drafter's failure answers too."""
        try:
            keys = Keys(slot.seed, connection.reset_count(item.slot), item.round, slot.choice)
            draft = self._draft(item, slot, context, keys)
            drawn = Drafted(keys, self.epoch, item.generation, item.anchor_position, context, tuple(draft.tokens))
            if self.lie is not None:
                self._tell_a_lie(self.lie, item, slot, draft, keys)
            frames = connection.reply(item, draft.tokens, *self._packed(draft.sent, slot.support))
            if frames:
                self._ledger.drafted(item.session, drawn)
            return frames
        except (LocalProtocolError, ValueError):
            return connection.fail(item, ErrorCode.DRAFT_FAILED)

    def _draft(self, item: StepItem, slot: ToySlot, context: int, keys: Keys) -> Draft:
        draft = Draft([], [])
        previous = item.anchor_token
        for position in range(item.anchor_position + 1, item.anchor_position + 1 + item.depth):
            row = self._models.drafts[self._models.draft_index(context, previous, position)]
            if slot.lane is Lane.GREEDY:
                previous = row.ids[row.counts.index(max(row.counts))]
            else:
                previous = draw(row.row, keys.draw24(Domain.PROPOSAL, position))
            draft.tokens.append(previous)
            draft.sent.append(row if slot.lane is Lane.RATIO else self._models.one_hot[previous])
        return draft

    def _packed(self, rows: list[DraftRow], support: SupportPolicy) -> tuple[list[int], bytes, bytes]:
        """Entries, ids and q of a reply."""
        if support is SupportPolicy.DENSE:
            return [self._models.vocab] * len(rows), b"", b"".join(row.dense_bytes for row in rows)
        ids = b"".join(row.ids_bytes for row in rows)
        return [len(row.ids) for row in rows], ids, b"".join(row.q_bytes for row in rows)

    def _tell_a_lie(self, fault: Fault, item: StepItem, slot: ToySlot, draft: Draft, keys: Keys) -> None:
        """Send what no checksum finds: a token that is not the draw, a draw of another round, a row that is none."""
        truth = list(draft.tokens)
        row, kind = draft.sent[0], fault.amount % 3
        if slot.lane is not Lane.RATIO:
            return  # ids alone: whatever is sent is a guess
        if kind == 0 and len(row.ids) > 1:
            draft.tokens[0] = next(token for token in row.ids if token != truth[0])
        elif kind == 1:
            old = replace(keys, round=max(0, item.round - 1))
            draft.tokens[:] = self._draft(item, slot, slot.context, old).tokens
            draft.sent[:] = self._draft(item, slot, slot.context, old).sent
        elif kind == 2 and row.counts[0] > 1:
            nothing = bytes(len(row.dense_bytes))
            draft.sent[0] = replace(row, q_bytes=bytes(4) + row.q_bytes[4:], dense_bytes=nothing)
        if draft.tokens != truth or draft.sent[0] is not row:
            self._ledger.lied(item.session, item.round, fault)
