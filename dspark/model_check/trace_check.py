"""Replays a trace of ledger events and names the first one that no correct ledger could log.

What is judged: generations only grow; a round is used once per generation and one is unresolved at most; a reply
is accepted once, and only under the generation, round and epoch that it was drawn under; a commit is reported at
most once and only of an accepted round; nothing is drawn twice under one random number key; a block is leased,
written and read only by its key; a step is resolved only after every other rank has applied that same decision.
Slots and blocks move by the production tables, so the two cannot drift. Streaming: memory is bounded by open
slots, blocks, groups and sessions. Called by the simulator, by tests, and as the monitor of ``slot_ledger``; it
never looks at a connection.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, TypeAlias, cast

from dspark_proto.staging import LEASE, LeaseState
from dspark_proto.states import SLOT, SlotState

from .ledger_events import Event, Kind

_FREE, _READY, _AWAITING = SlotState.FREE, SlotState.READY, SlotState.AWAITING
_NEVER: Final = (-1, -1, -1)

Frozen: TypeAlias = tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]
"""Places, groups and used random number keys."""


@dataclass(frozen=True, slots=True)
class TraceError:
    """Event number ``index`` (from 0) is impossible."""

    index: int
    event: Event
    reason: str

    def __str__(self) -> str:
        return f"event {self.index}, {self.event.kind.name} {tuple(self.event[1:])}: {self.reason}"


@dataclass(slots=True)
class SlotRecord:
    """What the events so far say of a slot."""

    state: SlotState = _FREE
    generation: int = 0
    round: int = -1
    replied: bool = False
    committed: bool = False


@dataclass(slots=True)
class BlockRecord:
    """What the events so far say of a staging block; ``key`` is (slot, generation, round)."""

    state: LeaseState = LeaseState.FREE
    key: tuple[int, int, int] = _NEVER
    consumers: int = 0


@dataclass(slots=True)
class PlaceRecord:
    """One side of a connection; ``epoch`` is the peer's, None while there is no connection."""

    epoch: Hashable = None
    slots: dict[int, SlotRecord] = field(default_factory=dict)
    blocks: dict[Hashable, BlockRecord] = field(default_factory=dict)


@dataclass(slots=True)
class GroupRecord:
    """A group of ranks: what each rank applied of step ``resolved`` + 1."""

    epoch: int = 0
    ranks: int = 1
    resolved: int = 0
    applied: dict[int, Hashable] = field(default_factory=dict)


class TraceChecker:
    """Feed it every event; the first impossible one is the end, later answers mean nothing."""

    def __init__(self) -> None:
        self.places: dict[Hashable, PlaceRecord] = {}
        self.groups: dict[Hashable, GroupRecord] = {}
        self.drawn: dict[Hashable, set[Hashable]] = {}
        rules: dict[int, Callable[[Event], str]] = {
            **dict.fromkeys(_RENEWALS, self._renewed),
            **dict.fromkeys(_SAME_GENERATION, self._ended_here),
            **dict.fromkeys(_BLOCK_ACTIONS, self._block_moved),
            Kind.CONNECTED: self._connected,
            Kind.LOST: self._lost,
            Kind.OPENED: self._opened,
            Kind.STEPPED: self._stepped,
            Kind.ACCEPTED: self._accepted,
            Kind.DREW: self._drew,
            Kind.DISCARDED: self._discarded,
            Kind.TIMED_OUT: self._timed_out,
            Kind.COMMITTED: self._committed,
            Kind.ENDED: self._ended,
            Kind.RESTARTED: self._restarted,
            Kind.LEASED: self._leased,
            Kind.RETAINED: self._retained,
            Kind.RELEASED: self._released,
            Kind.WROTE: self._wrote,
            Kind.READ: self._read,
            Kind.FORMED: self._formed,
            Kind.APPLIED: self._applied,
            Kind.RESOLVED: self._resolved,
        }
        self._rules = [rules.get(number, _unknown) for number in range(max(Kind) + 1)]

    def feed(self, event: Event) -> str:
        """Why ``event`` is impossible after all events before it; "" when it is possible."""
        return self._rules[event[0]](event)

    def freeze(self) -> Frozen:
        """All that the checker remembers, as a hashable value."""
        places = tuple(
            (name, place.epoch, _frozen(place.slots, _slot_values), _frozen(place.blocks, _block_values))
            for name, place in self.places.items()
        )
        groups = tuple(
            (name, group.epoch, group.ranks, group.resolved, tuple(sorted(group.applied.items())))
            for name, group in self.groups.items()
        )
        return places, groups, tuple((session, frozenset(keys)) for session, keys in self.drawn.items())

    def thaw(self, frozen: Frozen) -> None:
        """Go back to what :meth:`freeze` returned."""
        places, groups, drawn = frozen
        self.places = {
            name: PlaceRecord(epoch, {i: SlotRecord(*v) for i, v in slots}, {i: BlockRecord(*v) for i, v in blocks})
            for name, epoch, slots, blocks in places
        }
        self.groups = {
            name: GroupRecord(epoch, ranks, resolved, dict(applied)) for name, epoch, ranks, resolved, applied in groups
        }
        self.drawn = {session: set(keys) for session, keys in drawn}

    def _place(self, event: Event) -> PlaceRecord:
        place = self.places.get(event[1])
        if place is None:
            place = self.places[event[1]] = PlaceRecord()
        return place

    def _slot(self, event: Event) -> SlotRecord:
        slots = self._place(event).slots
        slot = slots.get(event[2])
        if slot is None:
            slot = slots[event[2]] = SlotRecord()
        return slot

    def _block(self, event: Event) -> BlockRecord:
        blocks = self._place(event).blocks
        block = blocks.get(event[5])
        if block is None:
            block = blocks[event[5]] = BlockRecord()
        return block

    # Connections

    def _connected(self, event: Event) -> str:
        place = self._place(event)
        place.epoch = event.value
        alive = [index for index, slot in place.slots.items() if slot.state is not _FREE]
        return f"slot {alive[0]} outlived its connection" if alive else ""

    def _lost(self, event: Event) -> str:
        self._place(event).epoch = None
        return ""

    def _restarted(self, event: Event) -> str:
        self.places.pop(event.place, None)
        return ""

    # Slots

    def _opened(self, event: Event) -> str:
        slot = self._slot(event)
        if event.generation <= slot.generation:
            return f"generation {slot.generation} is used up"
        return _move(slot, "open") or _begin(slot, event.generation)

    def _renewed(self, event: Event) -> str:
        slot = self._slot(event)
        if event.generation <= slot.generation:
            return f"the generation stays {slot.generation}: the dead one's replies would be taken for current"
        return _move(slot, _RENEWALS[event.kind]) or _begin(slot, event.generation)

    def _timed_out(self, event: Event) -> str:
        slot = self._slot(event)
        if slot.state is not _AWAITING or event.round != slot.round:
            return "no such round was unresolved"
        return self._renewed(event)

    def _ended_here(self, event: Event) -> str:
        slot = self._slot(event)
        if event.generation != slot.generation:
            return f"the generation is {slot.generation}"
        return _move(slot, _SAME_GENERATION[event.kind])

    def _stepped(self, event: Event) -> str:
        slot = self._slot(event)
        if slot.state is not _READY:
            return f"the slot is {slot.state.value}: a second unresolved round, or no lease"
        if event.generation != slot.generation or event.round <= slot.round:
            return f"the slot is at generation {slot.generation}, round {slot.round}"
        slot.round, slot.replied, slot.committed = event.round, False, False
        return _move(slot, "step")

    def _accepted(self, event: Event) -> str:
        slot = self._slot(event)
        if event.generation != slot.generation or event.round != slot.round:
            return f"a stale reply: the slot is at generation {slot.generation}, round {slot.round}"
        if event.value != self._place(event).epoch:
            return f"a stale reply: the epoch is {self._place(event).epoch}"
        if slot.state is not _AWAITING:
            return "a second reply to a resolved round"
        slot.replied = True
        return _move(slot, "reply")

    def _drew(self, event: Event) -> str:
        slot = self._slot(event)
        if slot.state is not _AWAITING or (event.generation, event.round) != (slot.generation, slot.round):
            return f"drawn for a dead round: the slot is at generation {slot.generation}, round {slot.round}"
        session, key = cast(tuple[Hashable, Hashable], event.value)
        used = self.drawn.setdefault(session, set())
        if key in used:
            return "a second draw under one random number key"
        used.add(key)
        slot.replied = True
        return _move(slot, "reply")

    def _discarded(self, event: Event) -> str:
        slot = self._slot(event)
        if (event.generation, event.round) != (slot.generation, slot.round):
            return f"the slot is at generation {slot.generation}, round {slot.round}"
        return _move(slot, "discard")

    def _committed(self, event: Event) -> str:
        slot = self._slot(event)
        if (event.generation, event.round) != (slot.generation, slot.round) or not slot.replied:
            return "no such round was accepted"
        if slot.committed:
            return "the round's commit was reported before"
        slot.committed = True
        return _move(slot, "commit")

    def _ended(self, event: Event) -> str:
        self.drawn.pop(event.value, None)
        return ""

    # Staging

    def _leased(self, event: Event) -> str:
        block = self._block(event)
        if block.state is not LeaseState.FREE:
            return f"the block is {block.state.value} for {block.key}"
        block.state, block.key, block.consumers = LeaseState.LEASED, event[2:5], 0
        return ""

    def _block_moved(self, event: Event) -> str:
        block = self._block(event)
        following = LEASE[block.state].get(_BLOCK_ACTIONS[event.kind])
        if following is None or block.key != event[2:5]:
            return f"the block is {block.state.value} for {block.key}"
        block.state, block.consumers = following, 1
        return ""

    def _retained(self, event: Event) -> str:
        block = self._block(event)
        block.consumers += 1
        return self._read(event)

    def _released(self, event: Event) -> str:
        block = self._block(event)
        reason = self._read(event)
        block.consumers -= 1
        if block.consumers == 0 and not reason:
            block.state = LEASE[block.state]["drain"]
        return reason

    def _wrote(self, event: Event) -> str:
        block = self._block(event)
        written = block.state is LeaseState.LEASED or block.state is LeaseState.QUARANTINED
        if not written or block.key != event[2:5]:
            return f"a write into memory that is {block.state.value} for {block.key}"
        return ""

    def _read(self, event: Event) -> str:
        block = self._block(event)
        if block.state is not LeaseState.FILLED or block.key != event[2:5]:
            return f"a consumer of memory that is {block.state.value} for {block.key}"
        return ""

    # Ranks

    def _formed(self, event: Event) -> str:
        group = self.groups.setdefault(event.place, GroupRecord())
        if event.generation <= group.epoch:
            return f"epoch {group.epoch} was formed before"
        self.groups[event.place] = GroupRecord(event.generation, cast(int, event.value))
        return ""

    def _applied(self, event: Event) -> str:
        group = self.groups.setdefault(event.place, GroupRecord())
        if event.generation < group.epoch or event.round <= group.resolved:
            return ""  # a rank that has not heard yet; nobody waits for it
        if event.generation > group.epoch or event.round != group.resolved + 1:
            return f"the group is at epoch {group.epoch}, step {group.resolved + 1}"
        if any(decision != event.value for decision in group.applied.values()):
            return "two ranks applied different decisions"
        group.applied[event.slot] = event.value
        return ""

    def _resolved(self, event: Event) -> str:
        group = self.groups.setdefault(event.place, GroupRecord())
        if (event.generation, event.round) != (group.epoch, group.resolved + 1):
            return f"the group is at epoch {group.epoch}, step {group.resolved + 1}"
        if any(group.applied.get(rank) != event.value for rank in range(1, group.ranks)):
            return f"a half commit: only {sorted(group.applied)} of {group.ranks - 1} other ranks have applied it"
        group.resolved, group.applied = event.round, {}
        return ""


_RENEWALS: Final = {Kind.TIMED_OUT: "fail", Kind.KILLED: "cancel", Kind.RESET: "reset", Kind.CLOSED: "close"}
_SAME_GENERATION: Final = {Kind.FAILED: "fail", Kind.RETIRED: "close"}
_BLOCK_ACTIONS: Final = {
    Kind.FILLED: "fill",
    Kind.ABANDONED: "abandon",
    Kind.QUARANTINED: "quarantine",
    Kind.LIFTED: "lift",
}


_slot_values: Final = attrgetter("state", "generation", "round", "replied", "committed")
_block_values: Final = attrgetter("state", "key", "consumers")


def _frozen(records: Mapping[Any, Any], values: attrgetter[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple((index, values(record)) for index, record in records.items())


def check_trace(events: Iterable[Event]) -> TraceError | None:
    """The first impossible event, or None."""
    feed = TraceChecker().feed
    for index, event in enumerate(events):
        reason = feed(event)
        if reason:
            return TraceError(index, event, reason)
    return None


def _move(slot: SlotRecord, action: str) -> str:
    following = SLOT[slot.state].get(action)
    if following is None:
        return f"{action} is not possible while the slot is {slot.state.value}"
    slot.state = following
    return ""


def _begin(slot: SlotRecord, generation: int) -> str:
    slot.generation, slot.round, slot.replied, slot.committed = generation, -1, False, False
    return ""


def _unknown(_event: Event) -> str:
    return "not an event of the vocabulary"
