"""A simulated process: it can be paused as by SIGSTOP, killed and started again.

Invariants: a paused process does nothing, and what reached it meanwhile happens in order when it goes on; a timer of a
dead incarnation never fires. Base class of `worker`, `spark` and `ranks`.
"""

from __future__ import annotations

from collections.abc import Callable

from dspark.sim.clock import Act, ProcessClock, VirtualClock


class Process:
    """`clock` is what the process reads; `world_clock` is what the simulator knows."""

    def __init__(self, name: str, world_clock: VirtualClock) -> None:
        self.name = name
        self.clock = ProcessClock(world_clock)
        self.alive = True
        self.incarnation = 0
        self.on_held: Callable[[], None] | None = None
        self._world_clock = world_clock
        self._paused = False
        self._held: list[Act] = []

    def run(self, act: Act) -> None:
        """Do `act` now, or when the pause is over."""
        if not self._paused:
            act()
            return
        self._held.append(act)
        if self.on_held is not None:
            self.on_held()

    def after(self, delay_ns: int, act: Act) -> None:
        """A timer of this incarnation."""
        incarnation = self.incarnation
        self._world_clock.after(delay_ns, lambda: self._fire(incarnation, act))

    def _fire(self, incarnation: int, act: Act) -> None:
        if incarnation == self.incarnation:
            self.run(act)

    @property
    def paused(self) -> bool:
        return self._paused

    def pause(self, on_held: Callable[[], None]) -> None:
        """Stop; `on_held` is told of everything that has to wait."""
        self._paused, self.on_held = True, on_held

    def resume(self) -> None:
        """Go on with what has waited."""
        self._paused, self.on_held = False, None
        held, self._held = self._held, []
        for number, act in enumerate(held):
            if self._paused:
                self._held += held[number:]
                return
            act()

    def kill(self) -> None:
        """The process is gone, with all that it knew."""
        self.alive = False
        self.incarnation += 1
        self._paused, self.on_held, self._held = False, None, []
