"""Feeds what a world's production connections do to the model's trace checker, event by event.

The connections of a watched world get their public calls wrapped: after each, the ledger is compared with what it was.
Every event must be one that the model of slots, blocks and ranks allows. Called by `world`, for a share of the worlds,
because comparing costs more than the calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dspark.model_check.ledger_events import Event, Kind
from dspark.model_check.ledger_watch import DrafterWatch, VerifierWatch
from dspark.model_check.trace_check import TraceChecker
from dspark.sim.ledger import Ledger
from dspark_proto import DrafterConnection, VerifierConnection
from dspark_proto.slots import VerifierSlot

_VERIFIER = (
    "hello", "open", "context", "step", "commit", "reset", "cancel", "close", "receive", "expire",
    "cancel_confirmed",
)  # fmt: skip
_DRAFTER = ("accept", "reject", "reply", "fail", "receive", "expire")


class ModelWatch:
    """One checker for a whole world; the first event that the model forbids is a violation."""

    def __init__(self, ledger: Ledger) -> None:
        self.events = 0
        self._checker = TraceChecker()
        self._ledger = ledger
        self._over = False

    def feed(self, event: Event) -> None:
        """Check one event."""
        self.events += 1
        reason = "" if self._over else self._checker.feed(event)
        if reason:
            self._over = True
            self._ledger.violate("model_violations", f"{event.kind.name} {tuple(event[1:])}: {reason}")

    def verifier(self, connection: VerifierConnection, place: str) -> Callable[[], None]:
        """Watch a connection; call the result after each release of one of its leases."""

        def origin(slot: VerifierSlot) -> tuple[int, int, int | None]:
            drawn = self._ledger.drawn_in(slot.session, slot.round, slot.generation)
            epoch = connection.negotiated.peer_epoch if connection.negotiated else None
            if drawn is None:
                return slot.generation, slot.round, epoch
            return drawn.generation, slot.round, drawn.epoch

        watch = VerifierWatch(connection, place, origin)
        return self._wrap(connection, _VERIFIER, watch.events)

    def drafter(self, connection: DrafterConnection, place: str) -> None:
        """Watch a worker's side of a connection."""
        self._wrap(connection, _DRAFTER, DrafterWatch(connection, place).events)

    def restarted(self, place: str) -> None:
        """The process behind a ledger has been replaced."""
        self.feed(Event(Kind.RESTARTED, place))

    def ended(self, session: int) -> None:
        """No key of this session is used any more."""
        self.feed(Event(Kind.ENDED, "", value=session))

    def formed(self, place: str, epoch: int, ranks: int) -> None:
        """A group of ranks begins an epoch."""
        self.feed(Event(Kind.FORMED, place, generation=epoch, value=ranks))

    def applied(self, place: str, rank: int, epoch: int, sequence: int, digest: int) -> None:
        """A rank has committed a decision."""
        self.feed(Event(Kind.APPLIED, place, rank, epoch, sequence, digest))

    def resolved(self, place: str, epoch: int, sequence: int, digest: int) -> None:
        """Rank 0 has committed a decision."""
        self.feed(Event(Kind.RESOLVED, place, 0, epoch, sequence, digest))

    def _wrap(self, connection: Any, names: tuple[str, ...], events: Callable[[], list[Event]]) -> Callable[[], None]:
        def look() -> None:
            for event in events():
                self.feed(event)

        for name in names:
            setattr(connection, name, _followed(getattr(connection, name), look))
        return look


def _followed(call: Callable[..., Any], look: Callable[[], None]) -> Callable[..., Any]:
    """`call`, and a look at the ledger after it."""

    def wrapped(*arguments: Any, **named: Any) -> Any:
        try:
            return call(*arguments, **named)
        finally:
            look()

    return wrapped
