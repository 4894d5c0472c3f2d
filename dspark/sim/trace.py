"""What happened in a world, as a hash that must repeat and, on demand, as lines of JSON.

Invariant: an event is made of numbers and fixed names only, so that equal runs give equal hashes in every process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import blake2b
from typing import TextIO

from dspark.sim.clock import VirtualClock

Value = int | str


class Trace:
    """`emit` adds an event at the present virtual time; `listener` also gets what `tell` says."""

    def __init__(self, clock: VirtualClock, lines: TextIO | None = None, world: int = 0) -> None:
        self._clock = clock
        self._hash = blake2b(digest_size=16)
        self._lines = lines
        self._world = world
        self.listener: Callable[[str, tuple[Value, ...]], None] | None = None

    def emit(self, event: str, *values: Value) -> None:
        """Add an event."""
        self._hash.update(f"{self._clock.now_ns} {event} {values}\n".encode())
        if self._lines is not None:
            record = {"world": self._world, "ns": self._clock.now_ns, "event": event, "values": values}
            self._lines.write(json.dumps(record) + "\n")

    @property
    def digest(self) -> str:
        """Hash of everything so far."""
        return self._hash.hexdigest()
