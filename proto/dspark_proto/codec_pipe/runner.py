"""Feeds the golden vectors to a testee and judges its answers.

Invariants: an answer passes only when every expected key has exactly the expected value (other keys are the testee's
own business); an operation that the testee does not support is no failure, and so is a whole testee that exits with
127; after a few requests in a row without an answer the rest is not asked, so that a dead testee ends the run. Called
by the command line and by the conformance harness.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from .cases import PipeCase, load_cases
from .messages import Object
from .process import Failure, PipeProcess, TesteeError

SILENT_REQUESTS_MAX: Final = 3
_SHOWN: Final = 160


class Verdict(StrEnum):
    """What one answer was worth."""

    PASSED = "passed"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"
    TIMEOUT = "timeout"
    CRASHED = "crashed"


_VERDICTS: Final = {
    Failure.TIMEOUT: Verdict.TIMEOUT,
    Failure.CRASH: Verdict.CRASHED,
    Failure.NONSENSE: Verdict.FAILED,
    Failure.UNSUPPORTED: Verdict.UNSUPPORTED,
}


@dataclass(frozen=True, slots=True)
class Judgement:
    """One case and its verdict; ``detail`` says what was wrong, or which requirement a failure breaks."""

    case: PipeCase
    verdict: Verdict
    detail: str = ""

    def __str__(self) -> str:
        text = f"{self.case.id} {self.verdict.value}"
        if self.verdict is Verdict.PASSED:
            return text
        hunts = f"; such a peer {self.case.hunts}" if self.case.hunts and self.verdict is Verdict.FAILED else ""
        return f"{text} ({self.case.requirement}): {self.detail}{hunts}"


def run_vectors(command: Sequence[str], directory: Path, timeout_s: float = 5.0) -> list[Judgement]:
    """The verdict on every vector of ``directory``, from the testee that ``command`` starts.

    Raises ``OSError`` when the command cannot be started, ``ValueError`` for a vector file that is not known.
    """
    return list(judge(command, load_cases(directory), timeout_s))


def judge(command: Sequence[str], cases: Iterable[PipeCase], timeout_s: float) -> Iterator[Judgement]:
    """The verdict on each of ``cases``, as it becomes known."""
    silent = 0
    gone: Judgement | None = None
    with PipeProcess(command) as testee:
        for case in cases:
            if gone is not None:
                yield Judgement(case, gone.verdict, "not asked: " + gone.detail)
                continue
            found = _ask(testee, case, timeout_s)
            yield found
            silent = silent + 1 if found.verdict in (Verdict.TIMEOUT, Verdict.CRASHED) else 0
            exited = found.verdict is Verdict.UNSUPPORTED and found.detail != _UNSUPPORTED
            if exited or silent >= SILENT_REQUESTS_MAX:
                gone = found


_UNSUPPORTED: Final = "the testee does not know the operation"


def _ask(testee: PipeProcess, case: PipeCase, timeout_s: float) -> Judgement:
    try:
        answer = testee.ask(case.request, timeout_s)
    except TesteeError as error:
        return Judgement(case, _VERDICTS[error.failure], str(error))
    if answer.get("unsupported"):
        return Judgement(case, Verdict.UNSUPPORTED, _UNSUPPORTED)
    wrong = differences(case.expected, answer)
    return Judgement(case, Verdict.FAILED if wrong else Verdict.PASSED, wrong)


def differences(expected: Object, answer: Object) -> str:
    """What is wrong with ``answer``, in words; empty when every expected key is exactly there."""
    for name, value in expected.items():
        if name not in answer or not _same(value, answer[name]):
            got = _short(answer[name]) if name in answer else _short(answer)
            return f"{name} should be {_short(value)}, the answer was {got}"
    return ""


def _same(expected: Any, found: Any) -> bool:
    """Equality that does not take 1.0 or true for 1."""
    if type(expected) is not type(found):
        return False
    if isinstance(expected, dict):
        return expected.keys() <= found.keys() and all(_same(one, found[name]) for name, one in expected.items())
    if isinstance(expected, list):
        return len(expected) == len(found) and all(map(_same, expected, found))
    return bool(expected == found)


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
