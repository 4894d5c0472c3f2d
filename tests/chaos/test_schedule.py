"""The plan of faults: a function of its seed that leaves no kind out."""

from __future__ import annotations

from collections import Counter

from dspark.chaos.faults import FAULTS
from dspark.chaos.programs import PROGRAMS
from dspark.chaos.schedule import FIRST_S, plan

KINDS = list(FAULTS)


def test_the_same_seed_gives_the_same_plan_and_another_seed_another() -> None:
    one, again, other = (plan(KINDS, 2, 600, 10, seed) for seed in (1, 1, 2))
    assert one == again
    assert [(f.kind, f.link) for f in one] != [(f.kind, f.link) for f in other]


def test_faults_come_at_their_times_and_some_on_two_links_at_once() -> None:
    faults = plan(KINDS, 2, 600, 10, 1)
    times = Counter(fault.at_s for fault in faults)
    assert sorted(times) == [FIRST_S + 10 * n for n in range(60)]
    assert set(times.values()) == {1, 2}
    for at_s, count in times.items():
        assert len({fault.link for fault in faults if fault.at_s == at_s}) == count
    assert [fault.number for fault in faults] == list(range(len(faults)))


def test_every_kind_comes_once_before_any_comes_twice() -> None:
    kinds = [fault.kind for fault in plan(KINDS, 2, 600, 10, 3)]
    assert set(kinds[: len(KINDS)]) == set(KINDS)
    assert max(Counter(kinds).values()) - min(Counter(kinds).values()) <= 1


def test_one_worker_is_never_hurt_twice_at_once() -> None:
    faults = plan(KINDS, 1, 300, 10, 1)
    assert max(Counter(fault.at_s for fault in faults).values()) == 1
    assert {fault.link for fault in faults} == {0}


def test_programs_plan_what_their_names_say() -> None:
    made = {name: make(2, 60.0, 10.0, 4) for name, make in PROGRAMS.items()}
    assert (made["mixed"].seconds, made["takeover"].seconds, made["swap"].seconds) == (60.0, None, None)
    assert {fault.kind for fault in made["takeover"].faults} == {"takeover"}
    assert {fault.link for fault in made["takeover"].faults} == {0, 1}
    assert "takeover" not in {fault.kind for fault in PROGRAMS["mixed"](2, 600.0, 10.0, 4).faults}
    assert (made["takeover"].mix.law, made["takeover"].mix.stream) == (0.0, 1.0)
    assert [fault.kind for fault in made["swap"].faults] == ["swap", "swap"]
