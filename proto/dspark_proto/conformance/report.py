"""Reports of a run: JSON (the source of truth, see `report.schema.json`), JUnit XML, and what the process exits with.

Called by the command line and by tests; judges nothing but the exit code. The HTML page is in `matrix`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape, quoteattr

from .runner import Report
from .verdicts import Behaviour, CaseResult

FORMAT: Final = "dspark-conformance-report"
FORMAT_VERSION: Final = 1
SCHEMA_FILE: Final = Path(__file__).with_name("report.schema.json")


class ExitCode(IntEnum):
    """What `dspark conformance` exits with. 127 is reserved for testees that do not support a case."""

    PASSED = 0
    MUST_FAILED = 1
    SHOULD_FAILED = 2
    RESIDUE = 3
    UNREACHABLE = 4
    USAGE = 5
    SELF_CHECK_FAILED = 6
    KNOWN_FAILURES_OUTDATED = 7


@dataclass(frozen=True)
class KnownFailures:
    """Failures that are expected, by case id and transport; ``*`` stands for every transport."""

    entries: frozenset[tuple[str, str]]

    def covers(self, result: CaseResult) -> bool:
        """Whether this result may fail."""
        return not {(result.case.id, result.transport), (result.case.id, "*")}.isdisjoint(self.entries)

    def outdated(self, results: Iterable[CaseResult]) -> list[str]:
        """Entries whose case was run and did not fail: they must be taken off the list."""
        seen = list(results)
        old = []
        for case, transport in sorted(self.entries):
            matching = [r for r in seen if r.case.id == case and transport in ("*", r.transport)]
            if matching and all(result.good for result in matching):
                old.append(f"{case} {transport}")
        return old


def read_known_failures(text: str) -> KnownFailures:
    """One entry a line: a case id and, if it fails on one transport only, its name; ``#`` begins a comment.

    Raises ``ValueError`` for a line that is neither.
    """
    entries = set()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 2 or not words[0].startswith("DSP2-"):
            raise ValueError(f"line {number}: give a case id and, if needed, a transport")
        entries.add((words[0], words[1] if len(words) == 2 else "*"))
    return KnownFailures(frozenset(entries))


def exit_code(report: Report, known: KnownFailures | None = None, *, strict: bool = False) -> ExitCode:
    """The first that applies: a MUST failed, an entry of the known failures is outdated, residue, a SHOULD failed."""
    listed = known or KnownFailures(frozenset())
    if any(not listed.covers(result) for result in report.must_failed):
        return ExitCode.MUST_FAILED
    if listed.outdated(report.results):
        return ExitCode.KNOWN_FAILURES_OUTDATED
    if any(not listed.covers(result) for result in report.residue):
        return ExitCode.RESIDUE
    if strict and any(not listed.covers(result) for result in report.should_failed):
        return ExitCode.SHOULD_FAILED
    return ExitCode.PASSED


def as_object(report: Report) -> dict[str, Any]:
    """The JSON report."""
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "wire_version": "2.0",
        "testee": report.testee,
        "cases": len({result.case.id for result in report.results}),
        "runs": len(report.results),
        "must_failed": len(report.must_failed),
        "should_failed": len(report.should_failed),
        "residue": len(report.residue),
        "unsupported": sum(r.behaviour is Behaviour.UNSUPPORTED for r in report.results),
        "transports": list(report.transports),
        "unavailable": dict(report.unavailable),
        "behaviour": dict(Counter(result.behaviour.value for result in report.results)),
        "results": [_result(result) for result in report.results],
    }


def _result(result: CaseResult) -> dict[str, Any]:
    case = result.case
    return {
        "id": case.id,
        "title": case.title,
        "requirement": case.requirement,
        "anchor": case.anchor,
        "level": case.level.value,
        "role": case.role.value,
        "tags": list(case.tags),
        "bug": case.bug,
        "testee": result.testee,
        "transport": result.transport,
        "behaviour": result.behaviour.value,
        "closure": result.closure.value,
        "residue": result.residue.value,
        "note": result.note,
        "expected": result.expected,
        "actual": result.actual,
        "expected_hex": result.expected_frame.hex(),
        "actual_hex": result.actual_frame.hex(),
    }


def as_junit(report: Report) -> str:
    """JUnit XML: a suite for each testee, role and transport, a test for each case."""
    suites: dict[str, list[CaseResult]] = {}
    for result in report.results:
        parts = (result.testee.replace(" ", "-"), result.case.role.value, result.transport)
        suites.setdefault(".".join(part for part in parts if part), []).append(result)
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', f"<testsuites name={quoteattr(report.testee)}>"]
    for name, results in suites.items():
        failures = sum(not result.good for result in results)
        skipped = sum(result.behaviour is Behaviour.UNSUPPORTED for result in results)
        head = f'tests="{len(results)}" failures="{failures}" skipped="{skipped}"'
        lines.append(f"  <testsuite name={quoteattr(name)} {head}>")
        lines += [_junit_case(name, result) for result in results]
        lines.append("  </testsuite>")
    return "\n".join([*lines, "</testsuites>", ""])


def _junit_case(suite: str, result: CaseResult) -> str:
    head = f"    <testcase classname={quoteattr(suite)} name={quoteattr(f'{result.case.id} {result.case.title}')}"
    if result.behaviour is Behaviour.UNSUPPORTED:
        return f"{head}><skipped message={quoteattr(_printable(result.note))}/></testcase>"
    if result.good:
        return f"{head}/>"
    verdict = f"{result.behaviour.value}, {result.closure.value}, residue {result.residue.value}"
    text = f"{result.case.requirement}\n{result.note}"
    return f"{head}><failure message={quoteattr(verdict)}>{escape(_printable(text))}</failure></testcase>"


def _printable(text: str) -> str:
    """XML cannot hold most control characters."""
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


def where(result: CaseResult) -> str:
    """Testee and transport of a result."""
    return f"{result.testee} {result.transport}".strip()


def summary(report: Report) -> str:
    """A few lines for a terminal: what failed, and the sentence of the standard that it breaks."""
    lines = [
        f"{result.case.id} [{where(result)}] {result.behaviour.value}, {result.closure.value}, residue "
        f"{result.residue.value}: {result.case.title}\n    {result.case.anchor} ({result.case.level.value}): "
        f"{result.case.requirement}\n    {result.note}"
        for result in report.results
        if not result.good
    ]
    skipped = sum(result.behaviour is Behaviour.UNSUPPORTED for result in report.results)
    lines += [f"transport {name} not available: {reason}" for name, reason in report.unavailable.items()]
    lines.append(
        f"{len(report.results)} runs on {', '.join(report.transports) or 'no transport'}: "
        f"{len(report.must_failed)} MUST failed, {len(report.should_failed)} SHOULD failed, "
        f"{len(report.residue)} left residue, {skipped} not supported by the testee"
    )
    return "\n".join(lines)
