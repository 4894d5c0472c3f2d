"""Once a second: the memory of every process, the acceptance alarm, and counters for the history.

A reading that fails (an endpoint that is busy) is left out. Runs in a thread of its own. Called by `run`.
"""

from __future__ import annotations

import threading
import time

from dspark.chaos.cluster import Cluster
from dspark.chaos.history import History
from dspark.chaos.memory import MemoryTable
from dspark.chaos.processes import rss_kib

EVERY_S = 1.0


class Sampler:
    """`memory` holds what was seen; `alarm` the highest value of the acceptance alarm, None before the first."""

    def __init__(self, cluster: Cluster, history: History) -> None:
        self.memory = MemoryTable()
        self.alarm: float | None = None
        self._cluster, self._history = cluster, history
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def finish(self) -> None:
        """End, after a last sample."""
        self._over.set()
        self._thread.join()
        self._sample()

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            self._sample()

    def _sample(self) -> None:
        at = time.monotonic()
        sizes = {child.name: (child.pid, rss_kib(child.pid)) for child in self._cluster.children()}
        for name, (pid, kib) in sizes.items():
            self.memory.add(name, pid, at, kib)
        try:
            metrics = self._cluster.view.metrics()
        except (OSError, ValueError):
            return
        if metrics.has("alarm"):
            self.alarm = max(self.alarm or 0.0, metrics.total("alarm"))
        self._history.write(
            "sample", running=metrics.total("num_requests_running"), alarm=metrics.total("alarm"),
            trouble=metrics.trouble(), rss_kib={name: kib for name, (_, kib) in sizes.items()},
        )  # fmt: skip
