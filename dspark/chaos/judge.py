"""What was wrong with a run: answers against their undisturbed texts, faults against their evidence, and the rest.

Pure: takes what was recorded, decides, changes nothing. Every count that must be zero has its problems in words, so
that a failed run says why. Called by `report` and tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dspark.chaos.catalogue import LAW_PROMPT, Lane
from dspark.chaos.client import Answer
from dspark.chaos.law import LawOutcome
from dspark.chaos.memory import MemoryRow
from dspark.chaos.nemesis import Injected

SHOWN_PROBLEMS = 20


@dataclass(frozen=True)
class Reference:
    """What a case answers when nothing is disturbed."""

    ids: tuple[int, ...]
    text: str
    prompt_tokens: int


@dataclass(frozen=True)
class Findings:
    """All that is judged. leaks: what was still held after the end, in words.

    alarm: highest value of the acceptance alarm, None when the endpoint never reported one. deadline_s: of a request.
    """

    answers: Sequence[Answer]
    references: Mapping[str, Reference]
    deadline_s: float
    faults: Sequence[Injected]
    leaks: Sequence[str]
    memory: Sequence[MemoryRow]
    law: LawOutcome
    alarm: float | None


@dataclass
class Verdict:
    """Counts of what must be zero, requests by how they ended, and every problem in words."""

    counts: dict[str, int]
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing was wrong."""
        return not self.problems

    def note(self, count: str, problem: str, by: int = 1) -> None:
        """One more of a kind."""
        self.counts[count] += by
        self.problems.append(f"{count}: {problem}")


COUNTS = (
    "requests", "completed", "cancelled", "failed", "wrong_tokens", "wrong_usage", "hung", "bad_200", "leaked",
    "faults", "faults_unverified",
)  # fmt: skip


def judge(findings: Findings) -> Verdict:
    """Everything that was wrong."""
    verdict = Verdict(dict.fromkeys(COUNTS, 0))
    for answer in findings.answers:
        verdict.counts["requests"] += 1
        _judge_answer(answer, findings, verdict)
    for fault in findings.faults:
        verdict.counts["faults"] += 1
        if not fault.ok:
            verdict.note("faults_unverified", f"{fault.planned.kind} on link {fault.planned.link}: {fault.problem}")
    for leak in findings.leaks:
        verdict.note("leaked", leak)
    _judge_whole(findings, verdict)
    return verdict


def _judge_answer(answer: Answer, findings: Findings, verdict: Verdict) -> None:
    name = f"{answer.case.key}{' (stream)' if answer.stream else ''}"
    took = None if answer.ended is None else answer.ended - answer.started
    if took is None or took > findings.deadline_s:
        verdict.note("hung", f"{name}: {'never ended' if took is None else f'took {took:.1f} s'}")
    elif answer.error is not None:
        verdict.note("failed", f"{name}: {answer.error}")
    elif answer.cancelled:
        verdict.counts["cancelled"] += 1
        _judge_tokens(answer, findings.references, verdict, name)
    elif not answer.ids or answer.finish_reason is None:
        verdict.note("bad_200", f"{name}: {len(answer.ids)} tokens, finish reason {answer.finish_reason}")
    else:
        verdict.counts["completed"] += 1
        _judge_tokens(answer, findings.references, verdict, name)
        _judge_usage(answer, findings.references, verdict, name)


def _judge_tokens(answer: Answer, references: Mapping[str, Reference], verdict: Verdict, name: str) -> None:
    """The whole text, or the beginning of it when the client left."""
    if answer.case.lane is Lane.LAW:
        if len(answer.ids) != answer.case.max_tokens and not answer.cancelled:
            verdict.note("wrong_tokens", f"{name}: {len(answer.ids)} tokens, not {answer.case.max_tokens}")
        return
    right = references[answer.case.key]
    expected = right.ids[: len(answer.ids)] if answer.cancelled else right.ids
    wrong = sum(seen != due for seen, due in zip(answer.ids, expected, strict=False))
    wrong += abs(len(answer.ids) - len(expected))
    if wrong:
        verdict.note("wrong_tokens", f"{name}: {wrong} of {len(expected)} tokens", wrong)
    elif not answer.cancelled and answer.text != right.text:
        verdict.note("wrong_tokens", f"{name}: the tokens are right, the text is not")


def _judge_usage(answer: Answer, references: Mapping[str, Reference], verdict: Verdict, name: str) -> None:
    law = answer.case.lane is Lane.LAW
    prompt = len(LAW_PROMPT) if law else references[answer.case.key].prompt_tokens
    expected = (prompt, len(answer.ids), prompt + len(answer.ids))
    if answer.usage != expected:
        verdict.note("wrong_usage", f"{name}: {answer.usage}, not {expected}")


def _judge_whole(findings: Findings, verdict: Verdict) -> None:
    """What no single answer shows."""
    if findings.law.broken:
        detail = findings.law.impossible or f"p = {findings.law.p}"
        verdict.note("wrong_tokens", f"first tokens of the ratio lane do not follow the law: {detail}")
    for row in findings.memory:
        if not row.flat:
            verdict.problems.append(
                f"memory: {row.name} (pid {row.pid}) grew by {row.growth_mib:.1f} MiB, bound {row.bound_mib:.1f} MiB"
            )
    if findings.alarm != 0:
        verdict.problems.append(f"alarm: the acceptance alarm was {findings.alarm}, not 0")
    if not sum(drafted for answer in findings.answers for _, _, drafted in answer.arrivals):
        verdict.problems.append("nothing that was answered had been drafted: the run shows nothing")
    if not findings.faults:
        verdict.problems.append("no fault was injected: the run shows nothing")
