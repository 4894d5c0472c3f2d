"""One group or two: measured, with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from dspark_spark.group_choice import (
    FEWEST,
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MARGIN,
    TRIAL_CYCLES,
    WINDOW,
    GroupChoice,
    Trials,
)


class Machine:
    """A choice with a clock of its own. cost: seconds of a turn by (groups, requests verified)."""

    def __init__(self, cost: Callable[[int, int], float], wait: float = 0.2, fixed: int | None = None) -> None:
        self.now = 0.0
        self.cost, self.wait = cost, wait
        self.choice = GroupChoice(fixed, lambda: self.now)

    def turn(self, requests: int, *, usual: bool = True, extra: float = 0.0) -> int:
        groups = self.choice.choose(requests)
        seconds = self.cost(groups, requests) / groups + extra
        self.now += seconds
        self.choice.turned(requests // groups, requests / groups, self.wait * seconds, usual=usual)
        return groups

    def turns(self, count: int, requests: int = 8) -> list[int]:
        return [self.turn(requests) for _ in range(count)]


def faster(share: float) -> Callable[[int, int], float]:
    """Two groups take this much of the time of one."""
    return lambda groups, requests: 0.1 * requests * (share if groups == 2 else 1)


def test_two_groups_are_tried_and_kept_where_they_are_faster() -> None:
    machine = Machine(faster(0.8))
    used = machine.turns(WINDOW + 2 * (WINDOW + 1))
    assert used[:WINDOW] == [1] * WINDOW
    assert set(used[WINDOW:]) == {2}
    assert machine.choice.settled(8) == 2
    assert machine.turns(FIRST_PAUSE) == [2] * FIRST_PAUSE


@pytest.mark.parametrize("share", [1.5, 1.0, 1 - MARGIN / 2])
def test_one_group_stays_where_two_are_not_better_by_the_margin(share: float) -> None:
    machine = Machine(faster(share))
    used = machine.turns(2000)
    assert machine.choice.settled(8) == 1
    assert 0 < used.count(2) < 200


def test_a_clear_loss_ends_a_trial_at_once_and_pauses_double() -> None:
    machine = Machine(faster(1.3))
    used = machine.turns(3000)
    trials = [i for i in range(1, len(used)) if (used[i - 1], used[i]) == (1, 2)]
    assert all(used[i : i + 2 * (1 + FEWEST) + 1].count(2) == 2 * (1 + FEWEST) for i in trials)
    gaps = [b - a for a, b in pairwise(trials)]
    assert gaps[0] < gaps[1] < gaps[2] < gaps[3]
    assert abs(gaps[-1] - gaps[-2]) <= 2
    assert LONGEST_PAUSE <= gaps[-1] < LONGEST_PAUSE + 20
    assert used.count(2) / len(used) < 0.03


def test_the_choice_follows_the_link() -> None:
    machine = Machine(faster(0.7))
    machine.turns(100)
    assert machine.choice.settled(8) == 2
    machine.cost = faster(0.99)  # hardly better any more, but not worse
    machine.turns(60 + 4 * LONGEST_PAUSE)
    assert machine.choice.settled(8) == 2
    machine.cost = faster(1.05)
    machine.turns(4 * LONGEST_PAUSE)
    assert machine.choice.settled(8) == 1


def test_where_nothing_is_waited_for_nothing_is_tried() -> None:
    machine = Machine(faster(0.5), wait=MARGIN / 2)
    assert set(machine.turns(1000)) == {1}
    machine.wait = 0.3
    assert 2 in machine.turns(20)


def test_sizes_are_compared_with_themselves() -> None:
    """Requests come and go: without two groups being better, more requests are cheaper per token."""

    def cost(groups: int, requests: int) -> float:
        return (1.0 + 0.01 * requests) * (1.02 if groups == 2 else 1)

    machine = Machine(cost)
    used = []
    for i in range(4000):
        used.append(machine.turn(4 + 2 * (i // 9 % 2)))  # 4 and 6 requests, of one range
    assert machine.choice.settled(4) == machine.choice.settled(6) == 1
    assert used.count(2) / len(used) < 0.05


def test_ranges_of_sizes_choose_for_themselves() -> None:
    machine = Machine(lambda groups, requests: 1.0 if groups == 1 else (0.7 if requests >= 8 else 1.4))
    for requests in (2, 8, 2, 8):
        machine.turns(60, requests)
    assert [machine.choice.settled(n) for n in (1, 2, 3, 8, 15)] == [1, 1, 1, 2, 2]


def test_a_trial_among_sizes_that_nobody_knows_ends() -> None:
    trials = Trials()
    for _ in range(WINDOW):
        trials.observe(8, 1.0, 0.5)
    assert trials.trying
    for i in range(TRIAL_CYCLES):
        assert trials.trying
        trials.observe(9 + i % 4, 0.1, 0.5)
    assert not trials.trying
    assert trials.groups == 1


def test_turns_with_prefill_or_after_a_change_are_left_out() -> None:
    machine = Machine(faster(0.8))
    for i in range(400):
        machine.turn(8, usual=bool(i % 3), extra=0.0 if i % 3 else 50.0)  # every third turn computes a prompt
    assert machine.choice.settled(8) == 1  # no two turns of two groups in a row could be compared
    spikes = Machine(faster(0.8))
    for i in range(400):
        spikes.turn(8, usual=bool(i % 5), extra=0.0 if i % 5 else 50.0)
    assert spikes.choice.settled(8) == 2


def test_single_and_undrafted_requests_are_one_group() -> None:
    for fixed in (None, 1, 2):
        machine = Machine(faster(0.5), fixed=fixed)
        assert {machine.turn(n) for n in (0, 1) * 50} == {1}
    assert set(Machine(faster(0.5), fixed=1).turns(50)) == {1}
    assert set(Machine(faster(5.0), fixed=2).turns(50)) == {2}


def test_forgetting_starts_over() -> None:
    machine = Machine(faster(0.8))
    machine.turns(60)
    assert machine.choice.settled(8) == 2
    machine.choice.forget()
    assert machine.choice.settled(8) == 1
    assert machine.turns(WINDOW) == [1] * WINDOW
