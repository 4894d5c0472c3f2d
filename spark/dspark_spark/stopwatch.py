"""Where a round's time goes: laps of one turn, and totals since the last `take`."""

from __future__ import annotations

import time
from collections import Counter


class Stopwatch:
    """begin, lap(name)..., end. Laps of the same name add up. Seconds."""

    def __init__(self) -> None:
        self._last = 0.0
        self._laps: dict[str, float] = {}
        self._totals: Counter[str] = Counter()
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
        for name, seconds in self._laps.items():
            self._totals[name] += seconds
        self._rounds += 1
        return self._laps

    def take(self) -> tuple[int, dict[str, float]]:
        """Turns and summed laps since the last take."""
        result = (self._rounds, dict(self._totals))
        self._rounds, self._totals = 0, Counter()
        return result
