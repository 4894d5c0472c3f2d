"""Ledger events of a production connection, by comparing its ledger before and after each call.

The connections know nothing of it. Invariant: one call of the connection, or one release of a lease, between two
calls of ``events``: more than that and steps in between are missed. Reads private state and changes nothing.
Called by the simulator and by ``slot_ledger`` after each call of a connection.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Final

from dspark_proto import DrafterConnection, VerifierConnection
from dspark_proto.limits import NO_COMMIT
from dspark_proto.negotiation import Negotiated
from dspark_proto.prefix import NO_KEY, Key
from dspark_proto.slots import DrafterSlot, Slot, VerifierSlot
from dspark_proto.staging import Lease, LeaseState, Staging
from dspark_proto.states import SlotState, VerifierState

from .ledger_events import Event, Kind

_FREE, _READY, _AWAITING, _DORMANT = SlotState.FREE, SlotState.READY, SlotState.AWAITING, SlotState.DORMANT

_L = LeaseState

Origin = Callable[[VerifierSlot], tuple[int, int, Hashable]]
"""Under which (generation, round, epoch) the reply that a slot just accepted was drawn."""

Drawn = Callable[[DrafterSlot], tuple[Hashable, Hashable]]
"""(session, random number key) of the reply that a slot just made."""


class _SlotWatch:
    """One slot, as it was."""

    __slots__ = ("committed", "generation", "round", "slot", "state")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.keep()

    def keep(self) -> None:
        slot = self.slot
        self.state, self.generation, self.round = slot.state, slot.generation, slot.round
        self.committed = slot.committed

    def changed(self) -> bool:
        slot = self.slot
        return (
            self.state is not slot.state
            or self.generation != slot.generation
            or self.round != slot.round
            or self.committed is not slot.committed
        )

    def moves(self) -> Iterator[tuple[Kind, int]]:
        """(what happened, round it concerns); a reply is ACCEPTED on either side."""
        slot, was = self.slot, self.state
        if slot.state is _FREE and was is not _FREE:
            yield Kind.CLOSED, 0
        elif slot.state is _DORMANT and (was is not _DORMANT or self.generation != slot.generation):
            yield Kind.KILLED, 0
        elif self.generation != slot.generation and slot.state is not _FREE:
            yield (Kind.OPENED if was is _FREE else Kind.RESET), 0
            self.round = -1
        if slot.state is _AWAITING and (was is not _AWAITING or self.round != slot.round):
            if slot.item is not None and slot.item.accepted_count != NO_COMMIT:
                yield Kind.COMMITTED, self.round
            yield Kind.STEPPED, slot.round
        elif slot.state is _READY and was is _AWAITING and self.generation == slot.generation:
            yield (Kind.ACCEPTED if slot.replied else Kind.DISCARDED), slot.round
        elif slot.committed and not self.committed:
            yield Kind.COMMITTED, slot.round


class VerifierWatch:
    """``place`` names the ledger in the events; ``origin`` tells what each accepted reply really is."""

    def __init__(self, connection: VerifierConnection, place: Hashable, origin: Origin | None = None) -> None:
        self._connection, self._place = connection, place
        self._origin = origin or self._as_the_ledger_says
        self._slots = [_SlotWatch(slot) for slot in connection._slots]
        self._terms: Negotiated | None = None
        self._lost = False
        self._staging: Staging | None = None
        self._first_block = 0
        self._blocks: list[tuple[LeaseState, Key, int]] = []

    def events(self) -> list[Event]:
        """What has happened since the last call."""
        found: list[Event] = []
        for watch in self._slots:
            if watch.changed():
                found += [self._event(watch, kind, round_) for kind, round_ in watch.moves()]
                watch.keep()
        self._add_blocks(found)
        lost = self._connection.state is VerifierState.LOST
        if lost and not self._lost:
            found.append(Event(Kind.LOST, self._place))
        if self._connection.negotiated is not self._terms:
            self._terms = self._connection.negotiated
            assert self._terms is not None
            found.append(Event(Kind.CONNECTED, self._place, value=self._terms.peer_epoch))
        self._lost = lost
        return found

    def _event(self, watch: _SlotWatch, kind: Kind, round_: int) -> Event:
        slot = watch.slot
        assert isinstance(slot, VerifierSlot)
        if kind is Kind.ACCEPTED:
            return Event(kind, self._place, slot.index, *self._origin(slot))
        expired = slot.expired
        if kind is Kind.KILLED and expired is not None and expired.generation == watch.generation:
            kind, round_ = Kind.TIMED_OUT, expired.round
        session = slot.session if kind is Kind.OPENED else 0
        return Event(kind, self._place, slot.index, slot.generation, round_, session)

    def _as_the_ledger_says(self, slot: VerifierSlot) -> tuple[int, int, Hashable]:
        terms = self._connection.negotiated
        return slot.generation, slot.round, terms.peer_epoch if terms else None

    def _add_blocks(self, found: list[Event]) -> None:
        staging = self._connection.staging
        if staging is None:
            return
        if staging is not self._staging:
            self._first_block += len(self._blocks)
            self._staging, self._blocks = staging, [_EMPTY] * len(staging.leases)
        for index, lease in enumerate(staging.leases):
            was, now = self._blocks[index], _block(lease)
            if was != now:
                self._blocks[index] = now
                found += self._block_events(self._first_block + index, was, now)

    def _block_events(
        self, index: int, was: tuple[LeaseState, Key, int], now: tuple[LeaseState, Key, int]
    ) -> Iterator[Event]:
        if was[:2] != now[:2]:
            for kind in _BLOCK_MOVES.get((was[0], now[0]), (_ENTERED[now[0]],)):
                key = now[1] if kind is Kind.LEASED else was[1]
                yield Event(kind, self._place, *_numbers(key), index)
        if _L.FILLED in (was[0], now[0]):
            more = max(now[2], 1) - max(was[2], 1)
            kind = Kind.RETAINED if more > 0 else Kind.RELEASED
            yield from [Event(kind, self._place, *_numbers(was[1]), index)] * abs(more)


class DrafterWatch:
    """The worker's side; ``drawn`` tells the random number key of each reply that was made."""

    def __init__(self, connection: DrafterConnection, place: Hashable, drawn: Drawn | None = None) -> None:
        self._connection, self._place = connection, place
        self._drawn = drawn or _session_key
        self._source: tuple[DrafterSlot, ...] = ()
        self._slots: list[_SlotWatch] = []

    def events(self) -> list[Event]:
        """What has happened since the last call."""
        found: list[Event] = []
        if self._connection._slots is not self._source:
            found += [
                Event(Kind.RETIRED, self._place, watch.slot.index, watch.generation)
                for watch in self._slots
                if watch.state is not _FREE
            ]
            self._source = self._connection._slots
            self._slots = [_SlotWatch(slot) for slot in self._source]
            terms = self._connection.negotiated
            if terms is not None:
                found.append(Event(Kind.CONNECTED, self._place, value=terms.peer_epoch))
        for watch in self._slots:
            if watch.changed():
                found += [self._event(watch, kind, round_) for kind, round_ in watch.moves()]
                watch.keep()
        return found

    def _event(self, watch: _SlotWatch, kind: Kind, round_: int) -> Event:
        slot = watch.slot
        assert isinstance(slot, DrafterSlot)
        if kind is Kind.ACCEPTED:
            return Event(Kind.DREW, self._place, slot.index, slot.generation, round_, self._drawn(slot))
        if kind is Kind.KILLED and slot.generation == watch.generation:
            kind = Kind.FAILED
        session = slot.session if kind is Kind.OPENED else 0
        return Event(kind, self._place, slot.index, slot.generation, round_, session)


def _session_key(slot: DrafterSlot) -> tuple[Hashable, Hashable]:
    return slot.session, (slot.reset_count, slot.round)


def _numbers(key: Key) -> tuple[int, int, int]:
    return key.slot, key.generation, key.round


def _block(lease: Lease) -> tuple[LeaseState, Key, int]:
    return lease.state, lease.key or NO_KEY, lease.consumers


_EMPTY: Final = (_L.FREE, NO_KEY, 0)
_BLOCK_MOVES: Final = {
    (_L.FREE, _L.LEASED): (Kind.LEASED,),
    (_L.LEASED, _L.FILLED): (Kind.FILLED,),
    (_L.LEASED, _L.FREE): (Kind.ABANDONED,),
    (_L.LEASED, _L.LEASED): (Kind.ABANDONED, Kind.LEASED),
    (_L.LEASED, _L.QUARANTINED): (Kind.QUARANTINED,),
    (_L.FILLED, _L.FREE): (Kind.RELEASED,),
    (_L.QUARANTINED, _L.FREE): (Kind.LIFTED,),
}
"""The moves that can occur in one call; any other is reported as the state that it ends in, to be judged."""

_ENTERED: Final = {
    _L.FREE: Kind.ABANDONED,
    _L.LEASED: Kind.LEASED,
    _L.FILLED: Kind.FILLED,
    _L.QUARANTINED: Kind.QUARANTINED,
}
