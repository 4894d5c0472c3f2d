"""Bounds of the transports that keep their own queues, and counts of what ran into them.

Called by ``tcp`` and ``ucx``; ZeroMQ has options of its own for the same things.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..limits import FRAME_BYTES_MAX
from .patience import SPIN_US


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Bounds of a server and, where they apply, of a client.

    ``receive_bytes_max`` covers all connections together, ``queue_bytes_max`` what waits for one slow peer
    (beyond a single frame). A connection must bring its first whole frame within ``first_frame_ms``, and
    another at least every ``idle_ms``. ``spin_us`` is the longest spin before a sleep, 0 for none (see ``patience``).
    """

    frame_bytes_max: int = FRAME_BYTES_MAX
    connections_max: int = 64
    receive_bytes_max: int = 4 * FRAME_BYTES_MAX
    queue_bytes_max: int = 4 * 2**20
    first_frame_ms: int = 5_000
    idle_ms: int = 600_000
    spin_us: int = SPIN_US


@dataclass(slots=True)
class LinkCounters:
    """What a server has refused or ended since it started, by cause."""

    too_many_connections: int = 0
    bad_prefixes: int = 0
    overdue: int = 0
