"""Virtual time: a heap of things to do, and the clock that each process reads.

Invariants: time moves only from one thing to the next; things of one instant happen in the order in which they were
asked for. A process's clock never runs backwards: it may jump ahead, or stand still for a while and lag from then on.
Called by `world`, `network` and `process`.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Act = Callable[[], None]

MS = 1_000_000
"""Nanoseconds in a millisecond."""


class VirtualClock:
    """World time in nanoseconds."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[tuple[int, int, Act]] = []
        self._serial = 0

    def after(self, delay_ns: int, act: Act) -> None:
        """Do `act` when `delay_ns` have passed."""
        self._serial += 1
        heappush(self._heap, (self.now_ns + delay_ns, self._serial, act))

    def step(self) -> bool:
        """Do the next thing; False when there is none."""
        if not self._heap:
            return False
        self.now_ns, _, act = heappop(self._heap)
        act()
        return True


class ProcessClock:
    """What one process believes the time is: a monotonic clock that faults can bend."""

    def __init__(self, world: VirtualClock) -> None:
        self._world = world
        self._offset_ns = 0
        self._stands_until_ns = 0

    def __call__(self) -> int:
        now = self._world.now_ns
        return max(now, self._stands_until_ns) + self._offset_ns

    @property
    def stands(self) -> bool:
        """Whether it stands still now."""
        return self._world.now_ns < self._stands_until_ns

    def jump(self, ns: int) -> None:
        """Run ahead by `ns` at once."""
        self._offset_ns += ns

    def stall(self, ns: int) -> None:
        """Stand still for `ns` of world time, then go on from there."""
        frozen = self()
        self._stands_until_ns = max(self._stands_until_ns, self._world.now_ns) + ns
        self._offset_ns = frozen - self._stands_until_ns
