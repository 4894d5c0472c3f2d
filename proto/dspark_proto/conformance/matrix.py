"""The HTML report: one file, a row for each case, a column for each testee and transport, failures with a hex diff.

Failures come first, then what a testee does not offer, then what passed with a remark, then the rest. Everything that
came from the testee is escaped. Called by the command line and by tests.
"""

from __future__ import annotations

from html import escape
from itertools import zip_longest

from .record import Case
from .report import where
from .runner import Report
from .verdicts import Behaviour, CaseResult

_BYTES_PER_LINE = 16
BAD, SKIPPED, NOTED, GOOD = range(4)
_KINDS = ("bad", "skipped", "noted", "good")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #1b1f24; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .3rem .6rem;
border-bottom: 1px solid #d8dee4; vertical-align: top; } th { position: sticky; top: 0; background: #fff; }
.good { color: #116329; } .noted { color: #7d4e00; } .skipped { color: #57606a; }
.bad { color: #a40e26; font-weight: 600; }
td:first-child { white-space: nowrap; }
pre { background: #f6f8fa; padding: .6rem; overflow-x: auto; } mark { background: #ffd7d5; }
summary { cursor: pointer; } .small { color: #57606a; font-size: 13px; }
"""


def as_html(report: Report) -> str:
    """The whole page."""
    columns = list(dict.fromkeys(where(result) for result in report.results))
    cells = {(result.case.id, where(result)): result for result in report.results}
    cases = _ordered(report)
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    rows = "\n".join(_row(case, [cells.get((case.id, name)) for name in columns]) for case in cases)
    missing = "".join(f"<li>{escape(n)}: {escape(r)}</li>" for n, r in report.unavailable.items())
    unavailable = f"<p>Transports that were not available:</p><ul>{missing}</ul>" if missing else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Wire conformance: {escape(report.testee)}</title>
<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>
<h1>Wire conformance: {escape(report.testee)}</h1>
<p>{len(cases)} cases, {len(report.results)} runs: {len(report.must_failed)} MUST failed,
{len(report.should_failed)} SHOULD failed, {len(report.residue)} left residue, {_count(report, SKIPPED)} not supported
by the testee, {_count(report, NOTED)} passed with a remark.</p>{unavailable}
<table><thead><tr><th>case</th><th>rule</th>{head}</tr></thead><tbody>
{rows}
</tbody></table></body></html>
"""


def _standing(result: CaseResult) -> int:
    """Where a result stands: the lower, the earlier it is shown."""
    if not result.good:
        return BAD
    if result.behaviour is Behaviour.UNSUPPORTED:
        return SKIPPED
    return GOOD if result.behaviour is Behaviour.PASS else NOTED


def _ordered(report: Report) -> list[Case]:
    """Cases by their worst result."""
    cases = {result.case.id: result.case for result in report.results}
    worst: dict[str, int] = {}
    for result in report.results:
        worst[result.case.id] = min(worst.get(result.case.id, GOOD), _standing(result))
    return sorted(cases.values(), key=lambda case: worst[case.id])


def _count(report: Report, standing: int) -> int:
    return sum(_standing(result) == standing for result in report.results)


def _row(case: Case, results: list[CaseResult | None]) -> str:
    name = f'{escape(case.id)}<br><span class="small">{escape(case.role.value)}, {case.level.value}</span>'
    rule = (
        f'{escape(case.title)}<br><span class="small">{escape(case.anchor)}: {escape(case.requirement)}<br>'
        f"hunts: {escape(case.bug)}</span>"
    )
    return f"<tr><td>{name}</td><td>{rule}</td>{''.join(map(_cell, results))}</tr>"


def _cell(result: CaseResult | None) -> str:
    if result is None:
        return "<td></td>"
    kind = _KINDS[_standing(result)]
    text = (
        f"{result.behaviour.value}<br><span class='small'>{result.closure.value}, residue {result.residue.value}</span>"
    )
    if not result.note:
        return f'<td class="{kind}">{text}</td>'
    details = f"<details><summary>why</summary>{escape(result.note)}{_diff(result)}</details>"
    return f'<td class="{kind}">{text}{details}</td>'


def _diff(result: CaseResult) -> str:
    if not result.expected_frame and not result.actual_frame:
        return ""
    parts = []
    if result.expected_frame:
        parts.append(f"expected<pre>{hex_lines(result.expected_frame, result.actual_frame)}</pre>")
    if result.actual_frame:
        parts.append(f"actual<pre>{hex_lines(result.actual_frame, result.expected_frame)}</pre>")
    return "<br>" + "".join(parts)


def hex_lines(frame: bytes, other: bytes) -> str:
    """A hex dump in which the bytes that differ from ``other`` are marked; nothing is marked against nothing."""
    lines = []
    for start in range(0, len(frame), _BYTES_PER_LINE):
        ours, theirs = frame[start : start + _BYTES_PER_LINE], other[start : start + _BYTES_PER_LINE]
        cells = [
            f"<mark>{byte:02x}</mark>" if other and byte != partner else f"{byte:02x}"
            for byte, partner in zip_longest(ours, theirs[: len(ours)])
        ]
        lines.append(f"{start:04x}  {' '.join(cells)}")
    return "\n".join(lines)
