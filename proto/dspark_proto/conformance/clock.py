"""The harness's clock: real for peers over a network, virtual for peers in this process.

Called by `links`; time reaches the sans-IO peers as nanoseconds only.
"""

from __future__ import annotations

import time
from typing import Protocol

NS_PER_MS = 1_000_000


class Clock(Protocol):
    """Monotonic time that can be waited on."""

    def now_ns(self) -> int:
        """Nanoseconds since some start."""

    def pass_ms(self, ms: float) -> None:
        """Let ``ms`` milliseconds go by."""


class RealClock:
    """The machine's monotonic clock."""

    def now_ns(self) -> int:
        """Nanoseconds since some start."""
        return time.monotonic_ns()

    def pass_ms(self, ms: float) -> None:
        """Sleep."""
        time.sleep(ms / 1000)


class VirtualClock:
    """Time that stands still until somebody waits."""

    def __init__(self) -> None:
        self._now_ns = 0

    def now_ns(self) -> int:
        """Nanoseconds since the clock was made."""
        return self._now_ns

    def pass_ms(self, ms: float) -> None:
        """Move on at once."""
        self._now_ns += int(ms * NS_PER_MS)
