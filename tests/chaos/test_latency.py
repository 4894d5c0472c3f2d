"""Gaps inside and outside of fault windows, and the time until requests speculate again."""

from __future__ import annotations

from dspark.chaos.catalogue import Case, Lane
from dspark.chaos.client import Answer
from dspark.chaos.latency import inter_token_s, merged, percentile, respeculation_s

CASE = Case("greedy-0", Lane.GREEDY, "abc", 4)


def stream(*arrivals: tuple[float, int, int], started: float = 0.0, ended: float | None = 9.0) -> Answer:
    return Answer(CASE, True, started, ended, arrivals=list(arrivals))


def test_gaps_that_touch_a_window_are_inside() -> None:
    answer = stream(*((at, 1, 0) for at in (0.0, 1.0, 2.5, 4.0, 4.5)))
    inside, outside = inter_token_s([answer], [(2.0, 3.0), (2.2, 2.4)])
    assert (inside, outside) == ([1.5, 1.5], [1.0, 0.5])
    assert inter_token_s([answer], []) == ([], [1.0, 1.5, 1.5, 0.5])
    assert inter_token_s([answer], [(0.0, float("inf"))])[1] == []


def test_windows_are_joined_where_they_overlap() -> None:
    assert merged([(5.0, 6.0), (0.0, 3.0), (1.0, 2.0), (3.0, 4.0)]) == [(0.0, 4.0), (5.0, 6.0)]


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([], 0.5)) == (51.0, 100.0, None)


def test_a_stream_speculates_again_with_its_next_drafted_token() -> None:
    lost = stream((1.0, 2, 1), (3.0, 1, 0), (5.5, 3, 2), (6.0, 2, 1))
    later = stream((4.0, 2, 1), started=3.5)
    before = stream((1.0, 2, 1), ended=1.5)
    never = stream((1.0, 2, 1), (4.0, 1, 0))
    assert respeculation_s([lost, later, before, never], 2.0) == [3.5]
    whole = Answer(CASE, False, 0.0, 9.0, arrivals=[(5.0, 4, 3)])
    assert respeculation_s([whole], 2.0) == []
