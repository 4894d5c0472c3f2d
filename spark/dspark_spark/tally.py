"""Counts of one turn of the engine, and how the draft link's totals become metrics.

Called by `engine` once per turn. Invariant: drafts asked for = proposals verified + proposals discarded by cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from dspark_spark.leases import DraftSource, WorkerStatus
from dspark_spark.metrics import Metrics, RoundRecord


@dataclass
class Tally:
    """What happened in one turn."""

    drafts: int = 0
    drafted: int = 0
    verified: int = 0
    per_position: list[int] = field(default_factory=list)
    target_only: Counter[str] = field(default_factory=Counter)
    discards: Counter[str] = field(default_factory=Counter)
    identity_failures: int = 0

    def asked(self, depth: int) -> None:
        """A proposal was asked for."""
        self.drafts += 1
        self.drafted += depth

    def judged(self, depth: int, accepted: int) -> None:
        """A proposal was verified, and its first `accepted` tokens taken."""
        self.verified += depth
        self.per_position += [0] * (accepted - len(self.per_position))
        for position in range(accepted):
            self.per_position[position] += 1

    def record(self, stage_seconds: Mapping[str, float]) -> RoundRecord:
        return RoundRecord(
            drafts=self.drafts,
            drafted_tokens=self.drafted,
            verified_tokens=self.verified,
            accepted_per_position=tuple(self.per_position),
            discards=self.discards,
            target_only=self.target_only,
            residual_identity_failures=self.identity_failures,
            stage_seconds=stage_seconds,
        )


class LinkReporter:
    """Publishes what changed on the link since the last call."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._reconnects = 0
        self._bumps = 0
        self._drops: dict[str, int] = {}
        self._workers: tuple[WorkerStatus, ...] = ()

    def publish(self, link: DraftSource) -> None:
        self._metrics.set_worker_up(link.up)
        for _ in range(link.reconnects - self._reconnects):
            self._metrics.record_worker_reconnect()
        if link.generation_bumps > self._bumps:
            self._metrics.record_generation_bump(link.generation_bumps - self._bumps)
        self._reconnects, self._bumps = link.reconnects, link.generation_bumps
        for cause, count in link.drops.items():
            new = count - self._drops.get(cause, 0)
            if new:
                self._metrics.record_wire_drop(cause, new)
                self._drops[cause] = count
        self._publish_pool(link)

    def _publish_pool(self, link: DraftSource) -> None:
        workers = link.workers
        if workers != self._workers:
            self._workers = workers
            self._metrics.set_pool(workers)
        for cause, count in link.takeovers.items():
            self._metrics.record_takeover(cause, count)
        for seconds in link.respeculations:
            self._metrics.record_respeculation(seconds)
        link.takeovers.clear()
        link.respeculations.clear()
