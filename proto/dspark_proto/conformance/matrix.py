"""The HTML report: one file, a row for each case, a column for each transport, failures with a hex diff.

Everything that came from the testee is escaped. Called by the command line and by tests.
"""

from __future__ import annotations

from html import escape
from itertools import zip_longest

from .record import Case
from .runner import Report
from .verdicts import Behaviour, CaseResult

_BYTES_PER_LINE = 16
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #1b1f24; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .3rem .6rem;
border-bottom: 1px solid #d8dee4; vertical-align: top; } th { position: sticky; top: 0; background: #fff; }
.good { color: #116329; } .skipped { color: #57606a; } .bad { color: #a40e26; font-weight: 600; }
pre { background: #f6f8fa; padding: .6rem; overflow-x: auto; } mark { background: #ffd7d5; }
summary { cursor: pointer; } .small { color: #57606a; font-size: 13px; }
"""


def as_html(report: Report) -> str:
    """The whole page."""
    transports = report.transports
    cells = {(result.case.id, result.transport): result for result in report.results}
    cases = list({result.case.id: result.case for result in report.results}.values())
    head = "".join(f"<th>{escape(name)}</th>" for name in transports)
    rows = "\n".join(_row(case, [cells.get((case.id, name)) for name in transports]) for case in cases)
    missing = "".join(f"<li>{escape(n)}: {escape(r)}</li>" for n, r in report.unavailable.items())
    unavailable = f"<p>Transports that were not available:</p><ul>{missing}</ul>" if missing else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Wire conformance: {escape(report.testee)}</title>
<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>
<h1>Wire conformance: {escape(report.testee)}</h1>
<p>{len(cases)} cases, {len(report.results)} runs: {len(report.must_failed)} MUST failed,
{len(report.should_failed)} SHOULD failed, {len(report.residue)} left residue.</p>{unavailable}
<table><thead><tr><th>case</th><th>rule</th>{head}</tr></thead><tbody>
{rows}
</tbody></table></body></html>
"""


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
    kind = "skipped" if result.behaviour is Behaviour.UNSUPPORTED else "good" if result.good else "bad"
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
