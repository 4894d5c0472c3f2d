"""What the fuzzer looks at between two frames: the ledgers of a connection, as plain values.

Reads the connections' slots directly, for an observation through their calls would change what it observes.
Called by ``trial``; changes nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..drafter import DrafterConnection
from ..negotiation import Negotiated
from ..staging import LeaseState
from ..verifier import VerifierConnection


class Observation(NamedTuple):
    """State, terms, ledger of each slot, and the rest that a frame may change."""

    state: Any
    terms: Negotiated | None
    slots: tuple[tuple[Any, ...], ...]
    rest: tuple[int, ...]


def observe(connection: VerifierConnection | DrafterConnection) -> Observation:
    """The ledgers of ``connection``; equal observations mean that nothing has changed."""
    if isinstance(connection, VerifierConnection):
        rows = tuple([(*_ledger(slot), slot.rows_received) for slot in connection._slots])
        return Observation(connection.state, connection.negotiated, rows, (connection._credit_limit,))
    ledgers = tuple([(*_ledger(slot), len(slot.reply_frames)) for slot in connection._slots])
    return Observation(connection.state, connection.negotiated, ledgers, (connection._rows_received,))


def _ledger(slot: Any) -> tuple[Any, ...]:
    return (
        slot.state,
        slot.session,
        slot.generation,
        slot.round,
        slot.context_end,
        slot.replied,
        slot.committed,
    )


def blocks_taken(connection: VerifierConnection) -> int:
    """Staging blocks that are not free."""
    staging = connection.staging
    return 0 if staging is None else len(staging.leases) - staging.count(LeaseState.FREE)
