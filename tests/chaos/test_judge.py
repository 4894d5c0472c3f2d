"""The judge of a chaos run: a run that is right is all right, and each planted fault fails it under its own name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from dspark.chaos.catalogue import LAW_PROMPT, LAW_TOKENS, Case, Lane, law_case
from dspark.chaos.client import Answer
from dspark.chaos.judge import COUNTS, Findings, Reference, judge
from dspark.chaos.law import LawOutcome, judge_law
from dspark.chaos.memory import MemoryRow, MemoryTable
from dspark.chaos.nemesis import Injected
from dspark.chaos.schedule import Planned

GREEDY = Case("greedy-0", Lane.GREEDY, "abc", 4)
MATCH = Case("match-0", Lane.MATCH, "abc", 4, seed=7)
REFERENCES = {"greedy-0": Reference((5, 6, 7, 8), "text", 3), "match-0": Reference((1, 2, 3, 4), "other", 3)}
DEADLINE_S = 30.0


def answered(case: Case, **changes: object) -> Answer:
    """A right answer, but for `changes`."""
    answer = Answer(case, True, 100.0, 101.0, finish_reason="length")
    if case.lane is Lane.LAW:
        answer.ids, answer.text, prompt = [9] * case.max_tokens, "law", len(LAW_PROMPT)
    else:
        right = REFERENCES[case.key]
        answer.ids, answer.text, prompt = list(right.ids), right.text, right.prompt_tokens
    answer.arrivals = [(100.2, 1, 0), (100.9, len(answer.ids) - 1, 2)]
    answer.usage = (prompt, len(answer.ids), prompt + len(answer.ids))
    for name, value in changes.items():
        setattr(answer, name, value)
    return answer


def fault(**changes: object) -> Injected:
    record = Injected(Planned(0, 3.0, "kill", 1, 0), 100.0, 101.0, 102.0, 103.0)
    for name, value in changes.items():
        setattr(record, name, value)
    return record


def findings(*more: Answer, **changes: object) -> Findings:
    right = [answered(GREEDY), answered(MATCH), answered(law_case(1))]
    flat = MemoryRow("endpoint", 7, 600.0, 100.0, 101.0, 0.1, 1.0, 24.0)
    found = Findings([*right, *more], REFERENCES, DEADLINE_S, [fault()], [], [flat], LawOutcome(400, 9.0, 8, 0.3), 0.0)
    return replace(found, **changes)  # type: ignore[arg-type]


def test_a_run_without_a_fault_of_ours_is_all_right() -> None:
    verdict = judge(findings(answered(GREEDY, cancelled=True, ids=[5, 6], finish_reason=None, usage=None)))
    assert verdict.ok, verdict.problems
    expected = {"requests": 4, "completed": 3, "cancelled": 1, "faults": 1}
    assert verdict.counts == dict.fromkeys(COUNTS, 0) | expected


PLANTED: dict[str, tuple[str, int, Callable[[], Findings]]] = {
    "another token": ("wrong_tokens", 1, lambda: findings(answered(GREEDY, ids=[5, 6, 9, 8]))),
    "another sampled token": ("wrong_tokens", 2, lambda: findings(answered(MATCH, ids=[1, 2, 4, 3]))),
    "a lost token": (
        "wrong_tokens", 1, lambda: findings(answered(GREEDY, ids=[5, 6, 7], usage=(3, 3, 6))),
    ),
    "a token too many": (
        "wrong_tokens", 1, lambda: findings(answered(GREEDY, ids=[5, 6, 7, 8, 8], usage=(3, 5, 8))),
    ),
    "another text": ("wrong_tokens", 1, lambda: findings(answered(GREEDY, text="texd"))),
    "a wrong beginning of a text that was left": (
        "wrong_tokens", 1, lambda: findings(answered(GREEDY, cancelled=True, ids=[5, 7], finish_reason=None)),
    ),
    "a short text of the ratio lane": (
        "wrong_tokens", 1, lambda: findings(answered(law_case(2), ids=[9] * LAW_TOKENS, usage=(6, 3, 9))),
    ),
    "a broken law": ("wrong_tokens", 1, lambda: findings(law=LawOutcome(400, 99.0, 8, 1e-9))),
    "an impossible text": ("wrong_tokens", 1, lambda: findings(law=LawOutcome(400, impossible="(1, 2, 3)"))),
    "a request that never ends": ("hung", 1, lambda: findings(answered(GREEDY, ended=None))),
    "a request past its deadline": ("hung", 1, lambda: findings(answered(GREEDY, ended=100.0 + DEADLINE_S + 1))),
    "an empty 200": ("bad_200", 1, lambda: findings(answered(GREEDY, ids=[], text="", usage=(3, 0, 3)))),
    "a 200 that breaks off": ("bad_200", 1, lambda: findings(answered(GREEDY, finish_reason=None))),
    "an error": ("failed", 1, lambda: findings(answered(GREEDY, error="APIError: 500"))),
    "a wrong completion count": ("wrong_usage", 1, lambda: findings(answered(GREEDY, usage=(3, 5, 8)))),
    "a wrong prompt count": ("wrong_usage", 1, lambda: findings(answered(law_case(2), usage=(7, 4, 11)))),
    "a wrong total": ("wrong_usage", 1, lambda: findings(answered(GREEDY, usage=(3, 4, 8)))),
    "no usage": ("wrong_usage", 1, lambda: findings(answered(GREEDY, usage=None))),
    "a lease": ("leaked", 1, lambda: findings(leaks=["worker 0 holds 1 slots open"])),
    "a fault that missed": ("faults_unverified", 1, lambda: findings(faults=[fault(problem="not in state T")])),
    "a fault without proof of healing": ("faults_unverified", 1, lambda: findings(faults=[fault(recovered=None)])),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_each_planted_fault_fails_the_run_under_its_name(name: str) -> None:
    count, number, make = PLANTED[name]
    verdict = judge(make())
    assert not verdict.ok
    zero = set(COUNTS) - {"requests", "completed", "cancelled", "faults"}
    assert {key: value for key, value in verdict.counts.items() if key in zero and value} == {count: number}
    assert [problem.partition(":")[0] for problem in verdict.problems] == [count]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"alarm": 1.0}, "alarm"),
        ({"alarm": None}, "alarm"),
        ({"faults": []}, "no fault"),
        ({"memory": [MemoryRow("endpoint", 7, 600.0, 100.0, 160.0, 6.0, 60.0, 24.0)]}, "memory"),
        ({"answers": [answered(GREEDY, arrivals=[(100.5, 4, 0)])]}, "nothing"),
    ],
)
def test_what_no_single_answer_shows_fails_the_run_too(changes: dict[str, object], word: str) -> None:
    (problem,) = judge(findings(**changes)).problems
    assert problem.startswith(word)


def law_answers(texts: dict[tuple[int, ...], int]) -> list[Answer]:
    return [answered(law_case(1), ids=[*text, 9]) for text, count in texts.items() for _ in range(count)]


def test_the_law_is_held_to_at_its_level_and_silent_on_few_texts() -> None:
    law = {(1, 1, 1): 0.5, (1, 1, 2): 0.3, (2, 2, 2): 0.2}
    right = judge_law(law_answers({(1, 1, 1): 100, (1, 1, 2): 60, (2, 2, 2): 40}), law)
    assert (right.broken, right.samples, right.p) == (False, 200, 1.0)
    assert judge_law(law_answers({(1, 1, 1): 140, (1, 1, 2): 30, (2, 2, 2): 30}), law).broken
    impossible = judge_law(law_answers({(1, 1, 1): 100, (3, 3, 3): 1}), law)
    assert impossible.broken
    assert impossible.impossible is not None
    few = judge_law(law_answers({(1, 1, 1): 4}), law)
    assert (few.broken, few.p) == (False, None)


def table(slope_kib_s: float, seconds: int) -> MemoryRow:
    samples = MemoryTable()
    for second in range(seconds):
        warm = min(second, seconds // 4) * 1000  # every process grows at first
        samples.add("endpoint", 1, float(second), round(200_000 + warm + slope_kib_s * second))
    samples.add("endpoint", 1, float(seconds), 0)
    (row,) = samples.rows()
    return row


def test_memory_is_judged_by_its_growth_after_the_warm_up() -> None:
    flat, leaking, short = table(0.0, 600), table(100.0, 600), table(5000.0, 60)
    assert flat.flat
    assert flat.growth_mib == pytest.approx(0.0, abs=0.01)
    assert not leaking.flat
    assert leaking.slope_mib_min == pytest.approx(100 * 60 / 1024, rel=0.01)
    assert leaking.growth_mib == pytest.approx(100 * 400 / 1024, rel=0.02)
    assert (short.growth_mib, short.flat) == (None, True)


def test_a_process_that_was_started_again_is_another_one() -> None:
    samples = MemoryTable()
    for pid in (1, 2):
        samples.add("worker 0", pid, 10.0 * pid, 1024 * pid)
    assert [(row.pid, row.first_mib) for row in samples.rows()] == [(1, 1.0), (2, 2.0)]
