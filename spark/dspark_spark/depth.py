"""How deep to draft in the next round: most expected tokens per second.

Everything that the plan looks at was fixed before the round's first draw: how often drafts of earlier rounds were
accepted, how long earlier steps took, how many requests decode. So its choice is stale by construction, which together
with fresh random numbers in every round keeps the ratio lane exact (see `dspark.admission`); the other lanes need
nothing. What the worker says of the drafts themselves, confidences, decides only in `early_stop`, where a stopping rule
sees them in the order in which they were made.

Because times of this machine enter, the depths of two runs differ: a seeded text of the ratio lane is then no longer
the same twice, its law is. Texts of the match and greedy lanes do not depend on depth.

Acceptance estimates fade towards an optimistic prior, so that a depth that was given up is tried again now and then.

Called by `engine`, from its thread. It never sees a token or a row of the round at hand.

Source: DSpark paper 2607.05147, section 5: throughput, with past rounds in place of confidences.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dspark.admission import FixedBudget, Load, StepCurve, admit, best_budget, expected_tokens, survivals
from dspark.models.target import Segment, TargetModel
from dspark_proto import Lane

KEEP = 0.98
"""What is left of an observation after a turn: half is gone after 34."""
PRIOR_RATE, PRIOR_WEIGHT = 0.8, 4.0
"""Acceptance of a position that nothing is known of, and how many observations that guess is worth."""
LANE_WEIGHT = 8.0
"""How many observations of a request its lane's rate is worth."""
TIME_WEIGHT, SHAPE_WEIGHT = 0.1, 0.02
"""Weight of a new measurement in the running means: of all times, and of one size relative to the others."""


@dataclass
class AcceptanceHistory:
    """How often draft i was accepted when all before it were; old observations fade. Lists of length depth."""

    depth: int
    _taken: list[float] = field(init=False)
    _reached: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._taken, self._reached = [0.0] * self.depth, [0.0] * self.depth

    def fade(self) -> None:
        """One turn has passed."""
        self._taken = [value * KEEP for value in self._taken]
        self._reached = [value * KEEP for value in self._reached]

    def record(self, verified: int, accepted: int) -> None:
        """A round judged `verified` drafts and took the first `accepted`; those behind a rejected one say nothing."""
        for position in range(min(accepted + 1, verified)):
            self._reached[position] += 1
            self._taken[position] += position < accepted

    def rates(self, prior: Sequence[float], weight: float) -> list[float]:
        """Estimated acceptance of each position, given that it is reached; `prior` counts as `weight` observations."""
        counted = zip(self._taken, self._reached, prior, strict=True)
        return [(taken + weight * guess) / (reached + weight) for taken, reached, guess in counted]


class StepTimes:
    """Seconds of a step by its rows: the shape is profiled once, what steps really take keeps it up to date.

    A long context makes steps of every size slower, and only a few sizes occur at a time: so an observation moves the
    whole curve at once, and the place of its own size on the curve slowly.
    """

    def __init__(self, most_rows: int, measure: Callable[[int], float]) -> None:
        self._most_rows = most_rows
        self._profile = StepCurve({rows: measure(rows) for rows in _profile_points(most_rows)})
        self._scale = 0.0
        self._shape = dict.fromkeys(_profile_points(most_rows), 1.0)
        self.curve = self._profile

    def observe(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took `seconds`; larger steps than the profile's are left out."""
        if not 0 < rows <= self._most_rows or seconds <= 0:
            return
        place = self._shape.get(rows, 1.0)
        ratio = seconds / self._profiled(rows)
        self._scale = self._scale or ratio  # the profile ran on an empty context: its scale is a guess
        self._scale += TIME_WEIGHT * (ratio / place - self._scale)
        self._shape[rows] = place + SHAPE_WEIGHT * (ratio / self._scale - place)
        self.curve = StepCurve({n: self._profiled(n) * self._scale * share for n, share in self._shape.items()})

    def _profiled(self, rows: int) -> float:
        return float(self._profile.seconds(rows))


def _profile_points(most_rows: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24 .. and the largest."""
    points = {most_rows}
    base = 1
    while base <= most_rows:
        points |= {base, *([base + base // 2] if base + base // 2 <= most_rows else [])}
        base *= 2
    return sorted(points)


class DepthPlanner:
    """Plans the depths of a turn. depth: the deepest proposal; measure: see `forward_timer`."""

    def __init__(self, depth: int, most_rows: int, measure: Callable[[int], float]) -> None:
        self._depth, self._most_rows, self._measure = depth, most_rows, measure
        self._times: StepTimes | None = None
        self._draft_s: float | None = None
        self._lanes: dict[Lane, AcceptanceHistory] = {}
        self._requests: dict[int, AcceptanceHistory] = {}

    def plan(self, limits: Mapping[int, tuple[Lane, int]], rows: int) -> dict[int, int]:
        """Depth by slot.

        Args:
            limits: every decoding request: its lane, and how many drafts it could take (0 when it cannot draft).
            rows: rows of the step without drafts, those of the decoding requests included.
        """
        self._fade(limits)
        rates = [self._rates(slot, lane)[:limit] for slot, (lane, limit) in limits.items()]
        load = Load(len(limits), rows)
        budget = best_budget([survivals(r) for r in rates], load, self.curve, self._draft_s or 0.0)
        return dict(zip(limits, admit(FixedBudget(budget), rates, load), strict=True))

    @property
    def curve(self) -> StepCurve:
        """Step times as they are known now."""
        return self._step_times().curve

    def expected_tokens(self, slot: int, lane: Lane, depth: int) -> float:
        """Tokens that a round of this depth is expected to commit."""
        return float(expected_tokens(survivals(self._rates(slot, lane)[:depth])))

    def judged(self, slot: int, lane: Lane, verified: int, accepted: int) -> None:
        """The outcome of a request's round."""
        for history in (self._lane(lane), self._request(slot)):
            history.record(verified, accepted)

    def forget(self, slot: int) -> None:
        """The slot's request is over."""
        self._requests.pop(slot, None)

    def timed(self, rows: int, step_s: float, draft_s: float | None) -> None:
        """A turn of decoding requests alone: rows and seconds of its step; seconds of drafting, None without."""
        self._step_times().observe(rows, step_s)
        if draft_s is not None:
            before = draft_s if self._draft_s is None else self._draft_s
            self._draft_s = before + TIME_WEIGHT * (draft_s - before)

    def _step_times(self) -> StepTimes:
        """Profiled when it is first needed, in the thread that runs the model."""
        if self._times is None:
            self._times = StepTimes(self._most_rows, self._measure)
        return self._times

    def _fade(self, limits: Mapping[int, tuple[Lane, int]]) -> None:
        """A turn has passed for these requests and their lanes; a lane that nobody uses remembers."""
        for lane in {lane for lane, _ in limits.values()}:
            self._lane(lane).fade()
        for slot in limits:
            self._request(slot).fade()

    def _rates(self, slot: int, lane: Lane) -> list[float]:
        usual = self._lane(lane).rates([PRIOR_RATE] * self._depth, PRIOR_WEIGHT)
        return self._request(slot).rates(usual, LANE_WEIGHT)

    def _lane(self, lane: Lane) -> AcceptanceHistory:
        return self._lanes.setdefault(lane, AcceptanceHistory(self._depth))

    def _request(self, slot: int) -> AcceptanceHistory:
        return self._requests.setdefault(slot, AcceptanceHistory(self._depth))


def forward_timer(model: TargetModel) -> Callable[[int], float]:
    """Measures one forward pass over `rows` rows in a cache of its own: the faster of two, after one to warm up."""

    def seconds(rows: int) -> float:
        cache = model.new_cache(1, rows)
        times = []
        for _ in range(3):
            started = time.perf_counter()
            result = model.forward(cache, [Segment(0, 0, (0,) * rows)], logit_rows=list(range(rows)))
            result.logits.float().cpu()
            times.append(time.perf_counter() - started)
        return min(times[1:])

    return seconds
