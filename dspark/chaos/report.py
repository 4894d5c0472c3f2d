"""The result of a run as an object and as tables.

Called by `run`; the keys are described in docs/internals/chaos.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dspark.chaos.judge import COUNTS, SHOWN_PROBLEMS, Findings, Verdict
from dspark.chaos.latency import Window, inter_token_s, percentile, respeculation_s
from dspark.chaos.nemesis import Injected

LOSSES = ("kill", "kill_all", "takeover")


def result(
    findings: Findings, verdict: Verdict, facts: Mapping[str, object], server: Mapping[str, float]
) -> dict[str, Any]:
    """Everything. facts: of the run (seed, minutes, ...). server: the endpoint's own re-speculation times."""
    return {
        **verdict.counts,
        "ok": verdict.ok,
        "kinds": _kinds(findings.faults),
        "inter_token_ms": _inter_token(findings),
        "respeculate_ms": _respeculate(findings, server),
        "rss": [_rounded(asdict(row)) for row in findings.memory],
        "law": _rounded(asdict(findings.law)),
        "alarm": findings.alarm,
        **facts,
        "problems": verdict.problems[:SHOWN_PROBLEMS],
    }


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    """Floats to figures that mean something; p keeps its own."""
    return {name: round(v, 3) if isinstance(v, float) and name != "p" else v for name, v in values.items()}


def _kinds(faults: Sequence[Injected]) -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = {}
    for kind in sorted({fault.planned.kind for fault in faults}):
        of_kind = [fault for fault in faults if fault.planned.kind == kind]
        windows = [f.recovered - f.injected for f in of_kind if f.recovered is not None and f.injected is not None]
        table[kind] = {
            "injected": len(of_kind),
            "verified": sum(fault.ok for fault in of_kind),
            "window_s_max": round(max(windows), 1) if windows else None,
        }
    return table


def _windows(faults: Sequence[Injected]) -> list[Window]:
    """A fault that was never shown to be healed lasts for ever."""
    return [(f.injected, f.recovered or float("inf")) for f in faults if f.injected is not None]


def _ms(values: Sequence[float]) -> dict[str, float | int | None]:
    found = {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99), "max": max(values, default=None)}
    return {"n": len(values), **{name: None if v is None else round(1000 * v, 1) for name, v in found.items()}}


def _inter_token(findings: Findings) -> dict[str, Any]:
    streams = [answer for answer in findings.answers if answer.stream]
    inside, outside = inter_token_s(streams, _windows(findings.faults))
    return {"inside": _ms(inside), "outside": _ms(outside)}


def _respeculate(findings: Findings, server: Mapping[str, float]) -> dict[str, Any]:
    times = {
        kind: [
            seconds
            for fault in findings.faults
            if fault.planned.kind == kind and fault.injected is not None
            for seconds in respeculation_s(findings.answers, fault.injected)
        ]
        for kind in LOSSES
    }
    return {**{kind: _ms(values) for kind, values in times.items()}, "endpoint": dict(server)}


def as_json(values: Mapping[str, Any]) -> str:
    """One object."""
    return json.dumps(values, indent=1)


def as_text(values: Mapping[str, Any]) -> str:
    """Tables for people."""
    lines = [f"{name:20} {values[name]:>10,}" for name in COUNTS]
    lines += ["", f"{'fault':16}{'injected':>10}{'verified':>10}{'longest, s':>12}"]
    for kind, row in values["kinds"].items():
        lines.append(f"{kind:16}{row['injected']:>10}{row['verified']:>10}{row['window_s_max'] or '-':>12}")
    lines += ["", f"{'ms':34}{'n':>8}{'p50':>10}{'p99':>10}{'max':>10}"]
    times = {f"inter-token, {where} faults": row for where, row in values["inter_token_ms"].items()}
    times |= {f"speculates again after {kind}": values["respeculate_ms"][kind] for kind in LOSSES}
    for name, row in times.items():
        lines.append(
            f"{name:34}{row['n']:>8}" + "".join(f"{row[k] if row['n'] else '-':>10}" for k in ("p50", "p99", "max"))
        )
    endpoint = values["respeculate_ms"]["endpoint"]
    lines += [f"{'of the affected, at the endpoint':34}{endpoint['n']:>8.0f}  mean {endpoint['mean_ms']} ms"]
    lines += ["", f"{'process':14}{'pid':>9}{'s':>8}{'MiB':>9}{'to':>9}{'MiB/min':>9}"]
    for row in values["rss"]:
        slope = "-" if row["slope_mib_min"] is None else f"{row['slope_mib_min']:.2f}"
        sizes = f"{row['first_mib']:>9.1f}{row['last_mib']:>9.1f}"
        lines.append(f"{row['name']:14}{row['pid']:>9}{row['seconds']:>8.0f}{sizes}{slope:>9}")
    law = values["law"]
    lines += ["", f"law of the ratio lane: {law['samples']} texts, p = {law['p']}; acceptance alarm: {values['alarm']}"]
    lines += [f"PROBLEM {problem}" for problem in values["problems"]]
    return "\n".join([*lines, "all right" if values["ok"] else "NOT all right"])
