"""Adaptive depth: planned from earlier rounds and measured times alone, and it follows both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from dspark.models.target import Segment
from dspark_proto import Lane
from dspark_spark.depth import (
    KEEP,
    LANE_WEIGHT,
    PRIOR_RATE,
    PRIOR_WEIGHT,
    AcceptanceHistory,
    DepthPlanner,
    StepTimes,
    _profile_points,
    forward_timer,
)
from tests.conftest import TinyPair
from tests.rig import Parts, Rig, build_rig, load_parts

PROMPT = [3, 14, 15, 92, 65, 35]
DEPTH = 4


def flat(_rows: int) -> float:
    """Rows that cost nothing: memory-bound."""
    return 0.010


def steep(rows: int) -> float:
    """Every row costs a whole step: compute-bound."""
    return 0.010 * rows


def planner(measure: Callable[[int], float], slots: int = 2) -> DepthPlanner:
    return DepthPlanner(DEPTH, slots * (DEPTH + 1), measure)


def after(measure: Callable[[int], float], accepted: int, rounds: int = 60, lane: Lane = Lane.RATIO) -> DepthPlanner:
    made = planner(measure)
    for _ in range(rounds):
        made.plan({0: (lane, DEPTH)}, 1)
        made.judged(0, lane, DEPTH, accepted)
    return made


# -- statistics ------------------------------------------------------------------------------------------------


def test_a_rejected_draft_says_nothing_of_those_behind_it() -> None:
    history = AcceptanceHistory(3)
    for accepted in (0, 1, 1, 3):
        history.record(3, accepted)
    assert history.rates([0.5, 0.5, 0.5], 0.0 + 1e-12) == pytest.approx([3 / 4, 1 / 3, 1.0])
    history.record(1, 1)  # a shallow round
    assert history.rates([0, 0, 0], 1e-12) == pytest.approx([4 / 5, 1 / 3, 1.0])


def test_estimates_start_at_the_prior_and_fade_back_to_it() -> None:
    history = AcceptanceHistory(2)
    assert history.rates([0.8, 0.3], 4.0) == [0.8, 0.3]
    for _ in range(50):
        history.record(2, 0)
    low = history.rates([0.8, 0.8], 4.0)[0]
    assert low == pytest.approx(4 * 0.8 / 54)
    for _ in range(400):
        history.fade()
    assert history.rates([0.8, 0.8], 4.0)[0] == pytest.approx((4 * 0.8) / (50 * KEEP**400 + 4))
    assert history.rates([0.8, 0.8], 4.0)[0] > 0.79


def test_a_request_starts_with_what_its_lane_has_seen() -> None:
    made = after(flat, accepted=1)
    rates = made._rates(5, Lane.RATIO)
    assert rates[0] > 0.95
    assert rates[1] < 0.1
    assert rates[3] == pytest.approx(PRIOR_RATE)  # never reached
    assert made._rates(5, Lane.GREEDY) == pytest.approx([PRIOR_RATE] * DEPTH)
    made.judged(5, Lane.RATIO, 1, 0)
    assert made._rates(5, Lane.RATIO)[0] < rates[0] * LANE_WEIGHT / (LANE_WEIGHT + 0.5)
    made.forget(5)
    assert made._rates(5, Lane.RATIO)[0] > made._rates(0, Lane.RATIO)[0] * 0.9
    assert PRIOR_WEIGHT > 0


# -- times -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "points"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 3, 4, 6]), (20, [1, 2, 3, 4, 6, 8, 12, 16, 20])]
)
def test_profiled_points(most: int, points: list[int]) -> None:
    assert _profile_points(most) == points


def test_times_follow_what_steps_took() -> None:
    times = StepTimes(12, lambda rows: 0.010 + 0.001 * rows)
    for _ in range(100):
        times.observe(5, 0.045)  # three times what the profile says, as in a long context
    assert times.curve.seconds(5) == pytest.approx(0.045, rel=0.01)
    assert times.curve.seconds(1) == pytest.approx(0.033, rel=0.01)  # which was not seen, and is slower as well
    assert times.curve.seconds(12) == pytest.approx(0.066, rel=0.01)
    for _ in range(400):
        times.observe(5, 0.045)
        times.observe(8, 0.090)  # a size that is slower than its place in the profile
    # The sizes between them were never seen, so both are pulled towards those a little.
    assert times.curve.seconds(8) == pytest.approx(0.090, rel=0.12)
    assert times.curve.seconds(5) == pytest.approx(0.045, rel=0.12)
    before = times.curve
    for rows, seconds in ((13, 1.0), (0, 1.0), (5, 0.0)):  # larger than the profile, and no measurements
        times.observe(rows, seconds)
    assert times.curve is before


def test_the_timer_runs_the_model_on_a_cache_of_its_own(tiny_pair: TinyPair) -> None:
    parts = load_parts(tiny_pair.target, tiny_pair.drafter)
    cache = parts.model.new_cache(1, 16)
    parts.model.forward(cache, [Segment(0, 0, PROMPT)], logit_rows=[5])
    before = cache.keys.clone()
    measure = forward_timer(parts.model)
    assert 0 < measure(1) < 10
    assert 0 < measure(8) < 10
    assert bool((cache.keys == before).all())


# -- plans -----------------------------------------------------------------------------------------------------


def test_free_rows_are_filled_and_dear_ones_are_not() -> None:
    assert planner(flat).plan({0: (Lane.RATIO, DEPTH), 1: (Lane.RATIO, 2)}, 2) == {0: DEPTH, 1: 2}
    assert planner(steep).plan({0: (Lane.RATIO, DEPTH), 1: (Lane.RATIO, 2)}, 2) == {0: 0, 1: 0}


def test_depth_follows_the_acceptance_of_past_rounds() -> None:
    def measure(rows: int) -> float:
        return 0.010 + 0.001 * rows

    depths = [after(measure, accepted).plan({0: (Lane.RATIO, DEPTH)}, 1)[0] for accepted in (0, 1, 2, DEPTH)]
    assert all(a <= b for a, b in pairwise(depths))
    assert depths[0] < depths[-1] == DEPTH


def test_the_budget_goes_to_the_requests_whose_drafts_survive() -> None:
    def measure(rows: int) -> float:
        return 0.010 + 0.004 * rows

    made = planner(measure)
    for _ in range(60):
        made.plan({0: (Lane.RATIO, DEPTH), 1: (Lane.RATIO, DEPTH)}, 2)
        made.judged(0, Lane.RATIO, DEPTH, DEPTH)
        made.judged(1, Lane.RATIO, DEPTH, 0)
    planned = made.plan({0: (Lane.RATIO, DEPTH), 1: (Lane.RATIO, DEPTH)}, 2)
    assert planned[0] > planned[1]


def test_a_slow_drafter_is_not_asked_and_is_tried_again_when_it_is_quick() -> None:
    made = after(flat, accepted=DEPTH)
    for _ in range(200):
        made.timed(5, 0.010, 0.200)
    assert made.plan({0: (Lane.RATIO, DEPTH)}, 1) == {0: 0}
    for _ in range(200):
        made.timed(5, 0.010, 0.001)
    assert made.plan({0: (Lane.RATIO, DEPTH)}, 1) == {0: DEPTH}


def test_a_depth_that_was_given_up_is_tried_again() -> None:
    def measure(rows: int) -> float:
        return 0.010 + 0.004 * rows

    made = after(measure, accepted=0)
    depths = [made.plan({0: (Lane.RATIO, DEPTH)}, 1)[0] for _ in range(400)]
    assert depths[0] == 0 < depths[-1]


def test_a_lane_that_nobody_uses_remembers() -> None:
    made = after(flat, accepted=0)
    known = made._rates(9, Lane.RATIO)[0]
    for _ in range(300):
        made.plan({1: (Lane.GREEDY, DEPTH)}, 1)
    assert made._rates(9, Lane.RATIO)[0] == known < 0.1


def test_requests_that_cannot_draft_get_nothing() -> None:
    assert planner(flat).plan({0: (Lane.RATIO, 0), 3: (Lane.GREEDY, 1)}, 2) == {0: 0, 3: 1}
    assert planner(flat).plan({}, 0) == {}


# -- in the engine ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts(tiny_pair: TinyPair) -> Parts:
    return load_parts(tiny_pair.target, tiny_pair.drafter)


def adaptive(parts: Parts, measure: Callable[[int], float], monkeypatch: pytest.MonkeyPatch) -> Rig:
    """An engine whose clock is `measure`; what its steps really take is left out."""
    monkeypatch.setattr("dspark_spark.engine.forward_timer", lambda model: measure)
    monkeypatch.setattr(DepthPlanner, "timed", lambda *_: None)
    settings = replace(build_rig(parts).engine.settings, adaptive_depth=True)
    return build_rig(parts, settings=settings)


def test_without_the_option_depths_are_full(parts: Parts) -> None:
    rig = build_rig(parts)
    assert rig.engine._planner is None
    stats = rig.answer(PROMPT, max_tokens=60).last.stats
    assert stats.drafted > (DEPTH - 1) * stats.rounds


def test_where_rows_are_dear_nothing_is_drafted(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = adaptive(parts, steep, monkeypatch)
    plain = build_rig(parts).answer(PROMPT, max_tokens=40)
    reader = rig.answer(PROMPT, max_tokens=40)
    assert reader.ids == plain.ids
    assert reader.last.stats.drafted == 0
    assert rig.labelled("target_only_steps_total") == {"adaptive_depth": 38, "budget": 1}
    rig.check_idle()


def test_depth_falls_with_acceptance_in_the_middle_of_a_request(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(rows: int) -> float:
        return 0.010 + 0.003 * rows

    rig = adaptive(parts, measure, monkeypatch)
    asked: list[int] = []
    step = rig.link.step

    def spy(requests: Any) -> Any:
        asked.extend(r.depth for r in requests)
        return step(requests)

    monkeypatch.setattr(rig.link, "step", spy)
    reader = rig.answer(PROMPT, temperature=1.0, seed=3, max_tokens=150)
    assert asked[0] == max(asked) > 1
    assert sum(asked[-20:]) / 20 < asked[0] / 2
    assert reader.last.stats.accepted < 0.6 * reader.last.stats.verified
    assert not rig.engine._planner._requests  # type: ignore[union-attr]
    rig.check_books()
    rig.check_idle()


def test_the_engine_measures_itself(parts: Parts) -> None:
    settings = replace(build_rig(parts).engine.settings, adaptive_depth=True)
    rig = build_rig(parts, settings=settings)
    readers = [rig.ask(PROMPT[i:], max_tokens=30) for i in range(3)]
    rig.finish(*readers)
    made = rig.engine._planner
    assert made is not None
    assert made._times is not None
    assert made._draft_s is None or made._draft_s > 0
    assert set(made._times._shape) >= set(_profile_points(4 * (DEPTH + 1)))
    assert made._times._scale > 0
    rig.check_idle()


def test_the_plan_is_made_before_anything_is_drawn(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every turn: plan, then STEP; and no outcome of a round is recorded between the two."""
    rig = adaptive(parts, flat, monkeypatch)
    events: list[str] = []
    for owner, name in ((DepthPlanner, "plan"), (DepthPlanner, "judged"), (type(rig.link), "step")):
        original = getattr(owner, name)

        def note(self: Any, *arguments: Any, original: Any = original, name: str = name) -> Any:
            events.append(name)
            return original(self, *arguments)

        monkeypatch.setattr(owner, name, note)
    readers = [rig.ask(PROMPT[i:], temperature=1.0, seed=i, max_tokens=30) for i in range(2)]
    turns = 0
    while not all(reader.finish for reader in readers):
        turns += rig.engine.turn()
    rounds = [i for i, event in enumerate(events) if event == "step"]
    assert len(rounds) > 3
    assert all(events[i - 1] == "plan" and events[i + 1] == "judged" for i in rounds)
    assert events.count("plan") == turns - 1  # one for all requests in each turn but that of the prompts
