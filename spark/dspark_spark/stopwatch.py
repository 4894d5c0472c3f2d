"""Where a round's time goes: laps of one turn, and totals since the last `take`.

The engine thread runs it; `take` may come from another thread (the benchmark's).
"""

from __future__ import annotations

import threading
import time


class Stopwatch:
    """begin, lap(name)..., end. Laps of the same name add up. Seconds."""

    def __init__(self) -> None:
        self._last = 0.0
        self._laps: dict[str, float] = {}
        self._lock = threading.Lock()
        self._totals: dict[str, float] = {}
        self._rounds = 0

    def begin(self) -> None:
        self._last = time.perf_counter()
        self._laps = {}

    def lap(self, name: str) -> None:
        """Charge the time since the last call to `name`."""
        now = time.perf_counter()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    def split(self, name: str, seconds: float, *, rest: str) -> None:
        """Charge `seconds` of the time since the last call to `name` and what is left of it to `rest`."""
        waited = time.perf_counter() - self._last
        self._laps[name] = self._laps.get(name, 0.0) + min(seconds, waited)
        self._last += min(seconds, waited)
        self.lap(rest)

    def end(self) -> dict[str, float]:
        """The laps of this turn."""
        with self._lock:
            for name, seconds in self._laps.items():
                self._totals[name] = self._totals.get(name, 0.0) + seconds
            self._rounds += 1
        return self._laps

    def take(self) -> tuple[int, dict[str, float]]:
        """Turns and summed laps since the last take."""
        with self._lock:
            result = (self._rounds, self._totals)
            self._rounds, self._totals = 0, {}
        return result
