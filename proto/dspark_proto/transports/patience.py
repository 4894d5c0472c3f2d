"""Whether a wait begins with a spin: looking again and again, without sleeping, for what may come at once.

A thread that sleeps is woken late, and goes on with cold caches; where the other end answers within
microseconds that is a good part of a round. Where it takes milliseconds a spin is CPU time for nothing. So
waits are measured, as by Linux's haltpoll governor: a wait spins only after ``EARNED_WAITS`` in a row that a
spin would have caught, and a single one that took longer, or found nothing, ends that at once. The row is
what keeps short waits inside a long round from counting: parts of one reply often come microseconds apart,
and the next round takes 40 ms; then there is no row, and no spin. Waits for the rest of a frame that has
begun are another kind, with a :class:`Patience` of its own, for they say nothing about the next frame. A look
that found what was already there says nothing either way.

Cost: a wait spins for ``spin_us`` at most, in vain at most once for every ``EARNED_WAITS`` short ones: in the
mean ``spin_us / EARNED_WAITS``, 50 us of CPU time a wait at the worst, and nothing where waits are long.
Every look of ``tcp`` and ``ucx`` is a call that gives the GIL up, so other threads of the process go on.
Invariants: a timeout of 0 is one look; a spin is part of the timeout; a machine with one core never spins,
for the other end would need that core (a process
that is kept on one core of several does: its other end is elsewhere, or else its spins are few, as above).
Called by ``tcp`` and ``ucx`` (not by ``zmq``: its two
threads sleep for themselves, and a spin in front of them gained nothing); one thread; knows no socket.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final, TypeVar

SPIN_US: Final = 400
"""Longest spin, and longest wait that counts as short. The wait for the rows of one request, from a drafter
that answers at once, is 150 to 350 us on loopback; what answers later than this gains little by a wake-up
that it is spared."""

EARNED_WAITS: Final = 8
"""Short waits in a row before the next one spins: more than one reply to a single STEP causes."""

_AT_ONCE_S: Final = 5e-6
"""A wait that takes no longer has not slept: what it found was there."""

Found = TypeVar("Found")


class Patience:
    """The waits of one kind at one end of a link. ``clock`` gives seconds; ``spin_us`` of 0 never spins."""

    def __init__(self, spin_us: int = SPIN_US, clock: Callable[[], float] = time.monotonic) -> None:
        self._bound_s = spin_us / 1e6 if (os.cpu_count() or 1) > 1 else 0.0
        self._clock = clock
        self._row = 0

    @property
    def spin_s(self) -> float:
        """How long the next wait may spin, in seconds."""
        return self._bound_s if self._row >= EARNED_WAITS else 0.0

    def ended(self, waited_s: float, found: bool) -> None:
        """A wait took ``waited_s``, and found something or not."""
        if not found or waited_s > self._bound_s:
            self._row = 0
        elif waited_s > _AT_ONCE_S:
            self._row += 1

    def wait(self, look: Callable[[float], Found], timeout_ms: float) -> Found:
        """What ``look(ms)`` finds: it is called with 0 while a spin lasts, then once with the time that is left.

        ``look`` sleeps until there is something, at most so many milliseconds, and gives something falsy for nothing.
        """
        if timeout_ms <= 0 or not self._bound_s:
            return look(timeout_ms)
        began = now = self._clock()
        spin_ends = began + min(self.spin_s, timeout_ms / 1000)
        found = None
        while now < spin_ends and not (found := look(0)):
            now = self._clock()
        if not found:
            found = look(max(0.0, timeout_ms - (now - began) * 1000))
        self.ended(self._clock() - began, bool(found))
        return found


SLEEP_AT_ONCE: Final = Patience(0)
"""For waits that no round is part of, as for a connection."""
