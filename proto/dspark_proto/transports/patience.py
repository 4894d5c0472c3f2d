"""Whether a wait begins with a spin: looking again and again, without sleeping, for what may come at once.

A thread that sleeps is woken up late, and on a cold core; where the other end answers within microseconds that is a large
part of a round. Where it takes milliseconds, a spin is CPU time for nothing. So waits are measured, and a wait spins only
after ``EARNED_WAITS`` in a row that a spin would have caught (the idea of Linux's haltpoll governor, with a budget that
is all or nothing). One wait that took longer, or ended with nothing, ends spinning at once. The row is what keeps short
waits inside a long round from counting: the parts of one reply often come microseconds apart, and the next round takes
40 ms; then there is no row, and no spin. A look that found what was already there says nothing either way.

Cost: a wait spins for at most ``spin_us``, once for every ``EARNED_WAITS`` short waits in vain at the most, so in the mean
``spin_us / EARNED_WAITS`` of CPU time a wait, and nothing where waits are long. Each look is a system call that gives
the GIL up, so other threads of the process go on; what the call may sleep is the caller's timeout, less the spin.
Invariants: a timeout of 0 is one look; a machine with one core never spins, for the other end, or the thread that
brings its bytes, would need that core. Called by ``tcp``, ``zmq`` and ``ucx``; one thread; knows no socket.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final, TypeVar

SPIN_US: Final = int(os.environ.get("SPIN_US","200"))
"""Longest spin, and longest wait that counts as short: a few times what a sleep costs (20 to 60 us until the thread runs
again), so what is spent in vain is of the size of what is gained; the value of Linux's ``guest_halt_poll_ns``."""

EARNED_WAITS: Final = 8
"""Short waits in a row before the next one spins: more than one reply to a single STEP causes."""

_AT_ONCE_S: Final = 5e-6
"""A wait that takes no longer has not slept: what it found was there."""

Found = TypeVar("Found")


class Patience:
    """The waits of one kind at one end of a link. ``spin_us`` of 0 never spins."""

    def __init__(self, spin_us: int = SPIN_US, clock: Callable[[], float] = time.monotonic) -> None:
        self._spin_s = spin_us / 1e6 if (os.cpu_count() or 1) > 1 else 0.0
        self._clock = clock
        self._row = 0

    @property
    def spin_s(self) -> float:
        """How long the next wait may spin, in seconds."""
        return self._spin_s if self._row >= EARNED_WAITS else 0.0

    def ended(self, waited_s: float, found: bool) -> None:
        """A wait took ``waited_s``, and found something or not."""
        if not found or waited_s > self._spin_s:
            self._row = 0
        elif waited_s > _AT_ONCE_S:
            self._row += 1

    def wait(self, look: Callable[[float], Found], timeout_ms: float) -> Found:
        """What ``look(ms)`` finds: it is called with 0 while a spin lasts, then once with the time that is left.

        ``look`` sleeps until there is something, at most so many milliseconds, and gives something falsy for nothing.
        """
        if timeout_ms <= 0 or not self._spin_s:
            return look(timeout_ms)
        began = self._clock()
        spin_ends = began + min(self.spin_s, timeout_ms / 1000)
        while (now := self._clock()) < spin_ends:
            if found := look(0):
                break
        else:
            found = look(max(0.0, timeout_ms - (now - began) * 1000))
        self.ended(self._clock() - began, bool(found))
        return found
