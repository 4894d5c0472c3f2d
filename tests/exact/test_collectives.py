"""Local groups: order, privacy, failures that end all ranks; and the sum and the choice over parts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.collectives import Group, GroupError, LocalGroup, locate, split_sum

SIZES = [1, 2, 3, 4]
Result = TypeVar("Result")


def run(size: int, work: Callable[[Group], Result]) -> list[Result]:
    """``LocalGroup.run`` under a watchdog: a group that hangs fails its test instead of stopping the suite."""
    outcome: list[list[Result] | BaseException] = []

    def attempt() -> None:
        try:
            outcome.append(LocalGroup(size).run(work))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert outcome, "the group hangs"
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


# --- primitives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_gather_is_in_rank_order_on_every_rank(size: int) -> None:
    gathered = run(size, lambda group: group.all_gather(np.array([group.rank, 10 * group.rank])).tolist())
    assert gathered == [[[rank, 10 * rank] for rank in range(size)]] * size


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_can_be_the_source_of_a_broadcast(size: int) -> None:
    def work(group: Group) -> list[float]:
        mine = np.array([[group.rank + 0.5]])
        return [group.broadcast(mine, source)[0, 0] for source in range(group.size)]

    assert run(size, work) == [[rank + 0.5 for rank in range(size)]] * size


@pytest.mark.parametrize("size", SIZES)
def test_ranks_know_themselves(size: int) -> None:
    assert run(size, lambda group: (group.rank, group.size)) == [(rank, size) for rank in range(size)]


def test_bits_arrive_as_they_were_sent() -> None:
    values = np.array([-0.0, np.inf, -np.inf, np.nan, 5e-324])
    for gathered in run(2, lambda group: group.all_gather(values)):
        assert gathered.view(np.int64).tolist() == [values.view(np.int64).tolist()] * 2


def test_what_a_rank_receives_is_its_own() -> None:
    """Neither a receiver that writes nor a sender that reuses its array at once reaches another rank."""

    def work(group: Group) -> list[list[int]]:
        seen = []
        for turn in range(50):
            mine = np.array([10 * turn + group.rank])
            gathered = group.all_gather(mine)
            mine[0] = -1
            seen.append(gathered[:, 0].tolist())
            gathered[:] = -2
            mine[0] = 10 * turn + group.rank
            received = group.broadcast(mine, turn % 2)
            mine[0] = -3
            seen.append(received.tolist())
            received[:] = -4
        return seen

    wanted = [values for turn in range(0, 500, 10) for values in ([turn, turn + 1], [turn + turn // 10 % 2])]
    assert run(2, work) == [wanted, wanted]


def test_a_long_conversation_stays_in_step() -> None:
    """A fast rank must not overwrite what a slow one has not read."""

    def work(group: Group) -> int:
        state = group.rank
        for turn in range(300):
            if (turn + group.rank) % 3 == 0:
                np.linspace(0, 1, 2000).sum()
            state = int(group.all_gather(np.array([state * 31 + turn])).sum() % 9973)
        return state

    wanted = list(range(4))
    for turn in range(300):
        wanted = [sum(state * 31 + turn for state in wanted) % 9973] * 4
    assert run(4, work) == wanted


# --- failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failing_rank_ends_all(failing: int) -> None:
    turns = [0, 0, 0]

    def work(group: Group) -> None:
        for turn in range(5):
            if turn == 2 and group.rank == failing:
                raise KeyError("boom")
            group.all_gather(np.zeros(1))
            turns[group.rank] += 1

    alive = threading.active_count()
    with pytest.raises(GroupError, match=f"rank {failing} of 3 failed: KeyError: 'boom'") as caught:
        run(3, work)
    assert list(caught.value.failures) == [failing]
    assert isinstance(caught.value.__cause__, KeyError)
    assert turns == [2, 2, 2]
    assert threading.active_count() == alive


def test_a_rank_that_fails_before_its_first_call_ends_all() -> None:
    def work(group: Group) -> None:
        if group.rank == 0:
            raise ZeroDivisionError
        group.broadcast(np.zeros(1), 0)

    with pytest.raises(GroupError, match="rank 0 of 2 failed: ZeroDivisionError"):
        run(2, work)


def test_an_error_that_all_ranks_agree_on_is_reported_from_all() -> None:
    """Repeated, because a rank that wakes late must still see the exchange that was complete."""

    def work(group: Group) -> None:
        total = int(group.all_gather(np.array([group.rank])).sum())
        raise ValueError(f"total {total}")

    for _ in range(100):
        with pytest.raises(GroupError) as caught:
            run(4, work)
        assert [(rank, str(error)) for rank, error in caught.value.failures.items()] == [
            (rank, "total 6") for rank in range(4)
        ]


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_leaves_early_is_an_error_and_no_hang(leaver: int) -> None:
    def work(group: Group) -> None:
        if group.rank != leaver:
            group.all_gather(np.zeros(1))

    with pytest.raises(GroupError, match=f"rank {leaver}: the end"):
        run(2, work)


DIFFERENT_CALLS: list[Callable[[Group], object]] = [
    lambda group: group.all_gather(np.zeros(1)) if group.rank else group.broadcast(np.zeros(1), 0),
    lambda group: group.broadcast(np.zeros(1), group.rank),
    lambda group: group.all_gather(np.zeros(1 + group.rank)),
    lambda group: group.all_gather(np.zeros((2, 1) if group.rank else (1, 2))),
    lambda group: group.all_gather(np.zeros(1) if group.rank else np.zeros(1, dtype=np.int64)),
]


@pytest.mark.parametrize("work", DIFFERENT_CALLS)
def test_different_calls_are_refused_on_all_ranks(work: Callable[[Group], object]) -> None:
    with pytest.raises(GroupError, match=r"different calls: rank 0: .*, rank 1: ") as caught:
        run(2, work)
    assert list(caught.value.failures) == [0, 1]


def test_only_what_a_backend_can_carry_is_exchanged() -> None:
    with pytest.raises(GroupError, match="float32; ranks exchange int64 and float64 only"):
        run(2, lambda group: group.all_gather(np.zeros(1, dtype=np.float32)))  # type: ignore[type-var]


def test_a_group_has_a_rank() -> None:
    with pytest.raises(ValueError, match="size=0"):
        LocalGroup(0)


# --- the sum over parts ------------------------------------------------------------------------------------


def sum_of_parts(values: np.ndarray, bounds: list[int]) -> set[float]:
    ends = [0, *bounds, values.size]
    return set(run(len(ends) - 1, lambda group: split_sum(group, values[ends[group.rank] : ends[group.rank + 1]])))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    length=st.integers(0, 1200) | st.sampled_from([7, 8, 127, 128, 129, 136, 256, 257, 1024]),
    shares=st.lists(st.floats(0, 1), max_size=3),
    seed=st.integers(0, 99),
)
def test_sum_of_parts_is_numpys_sum_of_the_whole(length: int, shares: list[float], seed: int) -> None:
    values = np.exp(np.random.default_rng(seed).standard_normal(length) * 9)
    bounds = sorted(int(share * length) for share in shares)
    assert sum_of_parts(values, bounds) == {float(values.sum())}


@pytest.mark.parametrize("bounds", [[], [64_640], [64_641], [1, 129_279], [0, 0, 129_280], [43_000, 43_001, 90_007]])
def test_sum_of_a_long_row(bounds: list[int]) -> None:
    values = np.exp(np.random.default_rng(5).standard_normal(129_280) * 4)
    assert sum_of_parts(values, bounds) == {float(values.sum())}


def test_sums_added_in_rank_order_would_round_otherwise() -> None:
    """Why the tree of the whole sum is kept: part sums that are simply added differ in half of the cases."""
    rng = np.random.default_rng(6)
    differing = 0
    for _ in range(40):
        values, cut = rng.random(700), int(rng.integers(1, 700))
        differing += values[:cut].sum() + values[cut:].sum() != values.sum()
        assert sum_of_parts(values, [cut]) == {float(values.sum())}
    assert differing > 10


# --- the choice over parts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("totals", [[5], [2, 3], [0, 4, 0, 1], [1, 0, 0], [0, 0, 3]])
def test_every_unit_lies_on_one_rank_and_no_rank_of_mass_zero_is_reached(totals: list[int]) -> None:
    units = [(rank, unit) for rank, total in enumerate(totals) for unit in range(total)]
    assert [locate(totals, chosen) for chosen in range(sum(totals))] == units


@pytest.mark.parametrize("chosen", [-1, 5])
def test_units_outside_the_mass_are_refused(chosen: int) -> None:
    with pytest.raises(ValueError, match=f"unit {chosen} is outside a mass of 5"):
        locate([2, 3], chosen)
