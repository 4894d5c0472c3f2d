"""Whether processes keep their memory: resident sizes over time, and how much they grew after a warm-up.

A process that was started again is another one. The warm-up is `WARM_UP_S`, or a third of a longer life: caches are
paged in as requests reach into them. Growth is the slope of the least-squares line through the samples after
the warm-up, times their span; it must stay below `BOUND_MIB`, or `BOUND_SHARE` of the size where that is more. Shorter
lives than `SHORTEST_S` after the warm-up are shown and not judged.

Called by `sampler` and `judge`.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

WARM_UP_S, SHORTEST_S = 45.0, 45.0
BOUND_MIB, BOUND_SHARE = 24.0, 0.05


@dataclass(frozen=True)
class MemoryRow:
    """One process: sizes in MiB, growth over the judged span, slope in MiB a minute; None where it was too short."""

    name: str
    pid: int
    seconds: float
    first_mib: float
    last_mib: float
    slope_mib_min: float | None
    growth_mib: float | None
    bound_mib: float

    @property
    def flat(self) -> bool:
        """Not seen to grow beyond the bound."""
        return self.growth_mib is None or self.growth_mib <= self.bound_mib


@dataclass
class MemoryTable:
    """Samples of every process: seconds, KiB."""

    samples: dict[tuple[str, int], list[tuple[float, int]]] = field(default_factory=dict)

    def add(self, name: str, pid: int, at: float, kib: int) -> None:
        """Take a sample; 0 KiB is a process that is gone."""
        if kib:
            self.samples.setdefault((name, pid), []).append((at, kib))

    def rows(self) -> list[MemoryRow]:
        """One row for each process."""
        return [_row(name, pid, samples) for (name, pid), samples in sorted(self.samples.items())]


def _row(name: str, pid: int, samples: list[tuple[float, int]]) -> MemoryRow:
    start, end = samples[0][0], samples[-1][0]
    warm_up = max(WARM_UP_S, (end - start) / 3)
    warm = [(at, kib / 1024) for at, kib in samples if at - start >= warm_up]
    slope = growth = None
    if warm and end - warm[0][0] >= SHORTEST_S:
        per_second = statistics.linear_regression(*zip(*warm, strict=True)).slope
        slope, growth = per_second * 60, per_second * (end - warm[0][0])
    mean = statistics.fmean(kib for _, kib in samples) / 1024
    bound = max(BOUND_MIB, BOUND_SHARE * mean)
    return MemoryRow(name, pid, end - start, samples[0][1] / 1024, samples[-1][1] / 1024, slope, growth, bound)
