"""Times between chunks inside and outside of fault windows, and the time until requests speculate again.

A window reaches from a fault's injection to the proof that it is healed; a gap that touches one is inside. A gap lies
between two chunks of a stream that bring tokens, whatever their number, as the client saw them.

Called by `report` with values alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from dspark.chaos.client import Answer

Window = tuple[float, float]


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest rank; None of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def merged(windows: Sequence[Window]) -> list[Window]:
    """The same time as windows that do not overlap, in order."""
    found: list[Window] = []
    for start, end in sorted(windows):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def inter_token_s(answers: Sequence[Answer], windows: Sequence[Window]) -> tuple[list[float], list[float]]:
    """Gaps inside and outside of the windows, in seconds."""
    joined = merged(windows)
    starts = [start for start, _ in joined]
    inside: list[float] = []
    outside: list[float] = []
    for answer in answers:
        for (before, _, _), (after, _, _) in pairwise(answer.arrivals):
            place = bisect_right(starts, after) - 1  # the last window that began before the gap was over
            touches = place >= 0 and joined[place][1] >= before
            (inside if touches else outside).append(after - before)
    return inside, outside


def respeculation_s(answers: Sequence[Answer], loss: float) -> list[float]:
    """For each stream that was under way at `loss`: seconds until it next brought a drafted token.

    A stream that ended without one is left out: it may have had nothing left to draft.
    """
    found = []
    for answer in answers:
        if answer.stream and answer.started < loss and (answer.ended is None or answer.ended > loss):
            later = [at for at, _, drafted in answer.arrivals if at > loss and drafted]
            found += [later[0] - loss] if later else []
    return found
