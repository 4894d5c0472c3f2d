"""Admission: how many drafts of each request are verified in a round.

Purpose: a longer round costs verify rows and may bring tokens; which drafts to verify may depend on what is known, and
in the ``ratio`` lane only on what was fixed *before* the draft in question was drawn. That is built into the interface
here: a stopping rule gets a value object without the draft, a free rule gets everything and is refused in that lane.

Invariants:

- ``ratio`` lane: "draft k is verified" is decided from history, load and c_1 .. c_k (confidences of x_<k), for k = 1,
  2, ...; a refusal ends the request's round. No candidate is looked at before the one in front of it was admitted.
- Candidates are tried by survival, ties by (position, request): an order that no drafted value can change.
- Whatever depends on this round's draws otherwise (a budget, a step curve, a statistic) is fixed before them.
- ``match`` and ``greedy`` lanes: any rule is exact, because drafts do not decide which tokens are committed.

Called by the verifier's engine (``best_budget`` and the budget rule, over statistics of past rounds) and by the proofs.
It never draws, never sees a row, and keeps no state.

Sources: DSpark paper 2607.05147, section 5 (survival, throughput, algorithm 1) and appendix A (the counterexample).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from operator import mul
from typing import Protocol, TypeAlias

from dspark_proto import Lane

Number: TypeAlias = float | Fraction
"""Serving uses floats; proofs pass fractions through the same code."""


@dataclass(frozen=True, slots=True)
class Load:
    """The step that is being filled, before any draft.

    requests: decoding requests; each brings one token whatever happens. rows: rows of the forward pass without drafts
    (anchors and prefill), at least ``requests``.
    """

    requests: int
    rows: int


@dataclass(frozen=True, slots=True)
class PastRound:
    """Outcome of an earlier round of a request: drafts verified, drafts accepted."""

    verified: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Visible:
    """All that a stopping rule may look at when it decides on one draft.

    request, position: which draft; positions count from 1. confidences: c_1 .. c_position of this request, each a
    function of the drafts before it. survival: their product. history: earlier rounds of this request, oldest first.
    load: the step without drafts. admitted: drafts taken so far, over all requests. expected: sum of their survivals.
    """

    request: int
    position: int
    confidences: tuple[Number, ...]
    survival: Number
    history: tuple[PastRound, ...]
    load: Load
    admitted: int
    expected: Number


class StoppingRule(Protocol):
    """A rule for the ``ratio`` lane. It must be a function of its argument and of what was fixed before the round."""

    def admits(self, visible: Visible) -> bool:
        """Whether this draft is verified; False ends the round of its request."""
        ...


@dataclass(frozen=True, slots=True)
class Drafted:
    """A proposal with its drafts, for rules of the lanes whose output does not depend on drafts."""

    tokens: tuple[int, ...]
    confidences: tuple[Number, ...]
    history: tuple[PastRound, ...]
    load: Load


class FreeRule(Protocol):
    """A rule for the ``match`` and ``greedy`` lanes; it may read the drafts."""

    def depth(self, drafted: Drafted) -> int:
        """How many of the drafts are verified; cut to what there is."""
        ...


class StepCurve:
    """Seconds that one step of B rows takes, from measured points; SPS(B) is one over that.

    Monotone: points that fall with B are noise and are pooled (least squares). Linear between points; below the first
    as the first; beyond the last, every row costs what a row of the last point cost on average.

    Raises:
        ValueError: no point, a row count below 1, or a time that is not positive.
    """

    def __init__(self, seconds: Mapping[int, Number]) -> None:
        if not seconds or min(seconds) < 1 or not min(seconds.values()) > 0:
            raise ValueError("a step curve needs points (rows >= 1, seconds > 0)")
        self._rows = sorted(seconds)
        self._seconds = _non_decreasing([seconds[rows] for rows in self._rows])

    def seconds(self, rows: int) -> Number:
        """Time of one step of ``rows`` rows."""
        place = bisect_left(self._rows, rows)
        if place == len(self._rows):
            return self._seconds[-1] * rows / self._rows[-1]
        if place == 0 or self._rows[place] == rows:
            return self._seconds[place]
        left, right = self._rows[place - 1], self._rows[place]
        below, above = self._seconds[place - 1], self._seconds[place]
        return below + (above - below) * (rows - left) / (right - left)

    def steps_per_second(self, rows: int) -> Number:
        """SPS(rows)."""
        return 1 / self.seconds(rows)


def _non_decreasing(values: Sequence[Number]) -> list[Number]:
    """The closest non-decreasing sequence (pool adjacent violators, equal weights)."""
    pools: list[tuple[Number, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            total, size = pools.pop()
            pools[-1] = (pools[-1][0] + total, pools[-1][1] + size)
    return [total / size for total, size in pools for _ in range(size)]


@dataclass(frozen=True, slots=True)
class FixedDepth:
    """Verify ``depth`` drafts of every request."""

    depth: int

    def admits(self, visible: Visible) -> bool:
        return visible.position <= self.depth


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """The ``budget`` drafts of highest survival over all requests; the budget was fixed before the draws."""

    budget: int

    def admits(self, visible: Visible) -> bool:
        return visible.admitted < self.budget


@dataclass(frozen=True, slots=True)
class EarlyStop:
    """DSpark algorithm 1: admit while the expected throughput Theta = tokens * SPS(rows) improves.

    The first draft that does not improve it ends everything: those behind it have lower survival at the same cost. A
    search past that point for a better Theta looks at confidences that encode the draft it decides on (appendix A).
    """

    curve: StepCurve

    def admits(self, visible: Visible) -> bool:
        tokens, rows = visible.load.requests + visible.expected, visible.load.rows + visible.admitted
        now = tokens * self.curve.steps_per_second(rows)
        then = (tokens + visible.survival) * self.curve.steps_per_second(rows + 1)
        return then > now


def admit(
    rule: StoppingRule,
    confidences: Sequence[Sequence[Number]],
    load: Load,
    histories: Sequence[tuple[PastRound, ...]] = (),
) -> list[int]:
    """Depth of every request under a stopping rule: candidates by survival, each with what is visible to it.

    A request's next candidate comes up when the one before it has been admitted; a refused one ends its request.

    Args:
        confidences: per request, c_1 .. c_k of its drafted positions, in [0, 1]; c_i computed from x_<i and nothing
            later. Those behind a refused candidate are not read.
        histories: earlier rounds per request; none when empty.

    Raises:
        ValueError: a confidence outside [0, 1].
    """
    depths = [0] * len(confidences)
    admitted = 0
    expected: Number = 0
    frontier = [_candidate(confidences, request, 0, 1) for request in range(len(confidences)) if confidences[request]]
    heapq.heapify(frontier)
    while frontier:
        negative, position, request = heapq.heappop(frontier)
        survival = -negative
        seen = tuple(confidences[request][:position])
        past = histories[request] if histories else ()
        if not rule.admits(Visible(request, position, seen, survival, past, load, admitted, expected)):
            continue
        depths[request] = position
        admitted, expected = admitted + 1, expected + survival
        if position < len(confidences[request]):
            heapq.heappush(frontier, _candidate(confidences, request, position, survival))
    return depths


def _candidate(
    confidences: Sequence[Sequence[Number]], request: int, position: int, survival: Number
) -> tuple[Number, int, int]:
    """Sort key of a request's draft ``position`` + 1: survival descending, then position, then request."""
    confidence = confidences[request][position]
    if not 0 <= confidence <= 1:
        raise ValueError(f"confidence {confidence} of request {request}, position {position + 1}, is not in [0, 1]")
    return -(survival * confidence), position + 1, request


def free_depth(rule: FreeRule, drafted: Drafted, lane: Lane) -> int:
    """Depth under a rule that may read the drafts.

    Raises:
        ValueError: in the ``ratio`` lane, where such a rule changes the law of the text.
    """
    if lane is Lane.RATIO:
        raise ValueError("a rule that reads drafts is biased in the ratio lane; use a stopping rule")
    return max(0, min(rule.depth(drafted), len(drafted.tokens)))


def survivals(confidences: Iterable[Number]) -> list[Number]:
    """a_k = c_1 * .. * c_k: the chance that draft k is accepted together with all before it."""
    return list(accumulate(confidences, mul))


def expected_tokens(survivals: Iterable[Number]) -> Number:
    """Tokens that one request's round is expected to commit: the drafts that survive, and the one that always comes."""
    return 1 + sum(survivals)


def best_budget(
    survivals: Iterable[Sequence[Number]], load: Load, curve: StepCurve, draft_seconds: Number = 0
) -> int:
    """Number of drafts, over all requests, with the highest expected tokens per second; the smallest of equals.

    This searches everywhere, so it may only see what was fixed before the round: statistics of past rounds. It is then
    the budget of ``FixedBudget``.

    Args:
        survivals: per request, estimated a_1 >= a_2 >= .. of as many drafts as it could take.
        draft_seconds: what asking for drafts costs a step, however many.
    """
    ranked = sorted((share for request in survivals for share in request), reverse=True)
    tokens: Number = load.requests
    best, fastest = 0, tokens / curve.seconds(load.rows)
    for budget, share in enumerate(ranked, start=1):
        tokens += share
        speed = tokens / (curve.seconds(load.rows + budget) + draft_seconds)
        if speed > fastest:
            best, fastest = budget, speed
    return best
