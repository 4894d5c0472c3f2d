"""A production verifier and drafter whose whole state can be taken out as a value, and put back.

That is what lets a search run the very classes that serve. One slot, depth 1, rows of one entry, staging that a
transport writes into itself. Only what a frame or a call can change is part of the value: counters, clocks and
the handshake are not. Reads and writes private state. Called by ``slot_ledger`` only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Final, NamedTuple

from dspark_proto import (
    Compatibility,
    DrafterConnection,
    Dtype,
    HelloParameters,
    StepItem,
    VerifierConnection,
)
from dspark_proto.negotiation import Negotiated
from dspark_proto.slots import DrafterSlot, Slot, VerifierSlot
from dspark_proto.staging import Lease

from .ledger_events import Event
from .ledger_watch import DrafterWatch, Origin, VerifierWatch

VERIFIER, WORKER = "verifier", "worker"
EPOCHS: Final = (200, 201)
"""Process epochs of the worker, before and after its restart."""

TAP_ROW_BYTES: Final = 4
_HASH: Final = bytes(32)
_COMPATIBILITY: Final = Compatibility(128, _HASH, "draft@1", "target@1", _HASH, (0,), Dtype.BF16, 2)
_QUIET_MS: Final = 600_000
STEP_DEADLINE_NS: Final = 1_000_000_000


def _parameters(epoch: int) -> HelloParameters:
    return HelloParameters(
        _COMPATIBILITY, epoch, max_slots=1, max_depth=1, max_support=1, max_in_flight=2, heartbeat_ms=_QUIET_MS
    )


_LEFT_OUT: Final = frozenset(("index", "lease", "reply_storage", "reply_rows", "stored_rows"))
"""What never changes, is saved in another form, or says what lies in reply memory, which is not rolled back."""

_VERIFIER_FIELDS: Final = [f.name for f in fields(VerifierSlot) if f.name not in _LEFT_OUT]
_DRAFTER_FIELDS: Final = [f.name for f in fields(DrafterSlot) if f.name not in _LEFT_OUT]
_verifier_slot: Final = attrgetter(*_VERIFIER_FIELDS)
_drafter_slot: Final = attrgetter(*_DRAFTER_FIELDS)


class FrozenPair(NamedTuple):
    """Everything that the two sides remember."""

    verifier_state: Any
    peer_epoch: int
    verifier_slot: tuple[Any, ...]
    lease: int | None
    leases: tuple[tuple[Any, ...], ...]
    worker: int
    drafter_slot: tuple[Any, ...]

    def slot(self, name: str) -> Any:
        """A field of the verifier's slot."""
        return self.verifier_slot[_VERIFIER_FIELDS.index(name)]


class LivePair:
    """The connections themselves. ``worker`` is the epoch of the worker process that lives."""

    def __init__(self, verifier: type[VerifierConnection], drafter: type[DrafterConnection], origin: Origin) -> None:
        self.verifier = verifier(_parameters(100), direct_receive=True)
        self._drafter = drafter
        self._drafters: dict[int, DrafterConnection] = {}
        self._watches: dict[int, DrafterWatch] = {}
        self._terms: dict[int, Negotiated] = {}
        self._verifier_watch = VerifierWatch(self.verifier, VERIFIER, origin)
        self.worker = EPOCHS[0]
        self.restart(EPOCHS[0])

    @property
    def drafter(self) -> DrafterConnection:
        """The living worker's side."""
        return self._drafters[self.worker]

    @property
    def slot(self) -> VerifierSlot:
        """The verifier's only slot."""
        return self.verifier._slots[0]

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The verifier's staging blocks."""
        assert self.verifier.staging is not None
        return self.verifier.staging.leases

    def connect(self) -> None:
        """HELLO and ACCEPT, undisturbed."""
        self.drafter.receive(self.verifier.hello(0), 0)
        self.verifier.receive(self.drafter.accept(0), 0)
        assert self.verifier.negotiated is not None
        self.verifier.negotiated = self._terms.setdefault(self.worker, self.verifier.negotiated)

    def restart(self, epoch: int) -> None:
        """A worker process that remembers nothing takes the place of the living one."""
        self.worker = epoch
        self._drafters[epoch] = self._drafter(_parameters(epoch))
        self._watches[epoch] = DrafterWatch(self.drafter, WORKER)

    def reply(self, item: StepItem, token: int) -> list[bytes]:
        """The worker's frames for ``item``, the draft being ``token``."""
        q, ids = memoryview(array("f", [1.0])).cast("B"), memoryview(array("i", [token])).cast("B")
        return [bytes(frame) for frame in self.drafter.reply(item, [token], [1], ids, q)]

    def save(self) -> FrozenPair:
        """The present state as a value."""
        slot, staging, terms = self.slot, self.verifier.staging, self.verifier.negotiated
        assert staging is not None
        assert terms is not None
        held = slot.lease
        drafter_slot = self.drafter._slots[0]
        drafter_slot.reply_frames = tuple(bytes(frame) for frame in drafter_slot.reply_frames)  # type: ignore[misc]
        return FrozenPair(
            self.verifier.state,
            terms.peer_epoch,
            _verifier_slot(slot),
            None if held is None else staging.leases.index(held),
            tuple(_frozen_lease(lease, lease is held and slot.rows_received > 0) for lease in staging.leases),
            self.worker,
            _drafter_slot(drafter_slot),
        )

    def load(self, frozen: FrozenPair) -> None:
        """Put ``frozen`` back; the watches take it as what was."""
        verifier, staging = self.verifier, self.verifier.staging
        assert staging is not None
        verifier.state, verifier.negotiated = frozen.verifier_state, self._terms[frozen.peer_epoch]
        _fill(self.slot, _VERIFIER_FIELDS, frozen.verifier_slot)
        self.slot.lease = None if frozen.lease is None else staging.leases[frozen.lease]
        for lease, (state, key, layout, consumers, content) in zip(staging.leases, frozen.leases, strict=True):
            lease.state, lease.key, lease.layout, lease.consumers = state, key, layout, consumers
            lease.storage[: len(content)] = content
        self.worker = frozen.worker
        _fill(self.drafter._slots[0], _DRAFTER_FIELDS, frozen.drafter_slot)
        verifier.frames_to_send()
        self.drafter.frames_to_send()
        self.events()

    def events(self) -> list[Event]:
        """What the ledgers of both sides have gone through since the last call."""
        return self._verifier_watch.events() + self._watches[self.worker].events()


def _frozen_lease(lease: Lease, with_rows: bool) -> tuple[Any, ...]:
    content = bytes(lease.storage) if with_rows else b""
    return lease.state, lease.key, lease.layout, lease.consumers, content


def _fill(slot: Slot, names: Sequence[str], values: Sequence[Any]) -> None:
    for name, value in zip(names, values, strict=True):
        setattr(slot, name, value)
