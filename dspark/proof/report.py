"""The report of a proof: a markdown summary, and a page of HTML that needs no other file.

Invariants: both show the same figures, all from ``Proof``; plots are in the page where matplotlib is installed (the
extra ``train``) and left out where it is not.

Called by the command line after ``prove.run``.
"""

from __future__ import annotations

import base64
import html
import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark.proof.verdicts import ALPHA, Proof

MARKDOWN, PAGE = "losslessness.md", "losslessness.html"
Rows = list[tuple[str, ...]]
Table = tuple[str, tuple[str, ...], Rows]
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{border:1px solid #ccc;padding:.25rem .6rem;text-align:left;"
    "vertical-align:top}th{background:#f3f3f3}h1 small{font-weight:400;color:#666}img{max-width:100%}"
)


def write(proof: Proof, directory: Path) -> list[Path]:
    """Write both files, and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    markdown, page = directory / MARKDOWN, directory / PAGE
    markdown.write_text(as_markdown(proof), "utf-8")
    page.write_text(as_page(proof), "utf-8")
    return [markdown, page]


def as_text(proof: Proof) -> str:
    """A short summary for the terminal."""
    lines = [f"tier {t.tier}  {t.title:<34}{t.passed:>5} passed {t.failed:>4} failed {t.seconds:>8.1f} s"
             for t in proof.tiers]  # fmt: skip
    if proof.mutants:
        killed = len(proof.mutants) - len(proof.survivors)
        lines.append(f"zoo     {killed} of {len(proof.mutants)} mutants caught, "
                     f"{len(proof.flagged)} of {len(proof.equivalents)} equivalents flagged")  # fmt: skip
    lines += [f"  - {problem}" for problem in proof.problems()]
    return "\n".join([*lines, f"{_verdict(proof)} ({proof.seconds:.0f} s)"])


def _verdict(proof: Proof) -> str:
    if proof.planted is not None:
        caught = "was caught" if proof.failed else "WAS NOT CAUGHT"
        return f"planted mutant {proof.planted} {caught}"
    return "lossless: everything holds" if proof.holds else "NOT PROVED: see the problems above"


# --- tables ----------------------------------------------------------------------------------------------------------


def _tables(proof: Proof) -> list[Table]:
    yes_no = {True: "yes", False: "no", None: "no law"}
    tiers: Rows = [(t.tier, t.title, str(t.passed + t.failed), str(t.cases), str(t.failed), f"{t.seconds:.1f}")
             for t in proof.tiers]  # fmt: skip
    mutants: Rows = [
        (r.mutant.name, r.mutant.bug, r.killed_by or "SURVIVED", f"{r.claims_failed} of {r.claims}", r.finding,
         yes_no[r.first_token])
        for r in proof.mutants
    ]  # fmt: skip
    equivalents: Rows = [(r.mutant.name, r.mutant.bug, r.killed_by or "not flagged") for r in proof.equivalents]
    facts: Rows = [(fact.tier, fact.name, "holds" if fact.holds else "FAILS", fact.detail) for fact in proof.facts]
    rates: Rows = [(str(r.place), str(r.drafts), f"{r.seen:.4f}", f"{r.expected:.4f}") for r in proof.rates]
    found: list[Table] = [
        ("Tiers", ("tier", "what", "claims", "cases", "failed", "seconds"), tiers),
        ("Tests", ("tier", "test", "samples", "statistic", "df", "p", "Holm threshold", "result"), _test_rows(proof)),
        ("Facts", ("tier", "fact", "result", "detail"), facts),
        ("Acceptance against sum min(p, q)", ("draft", "reached", "accepted", "sum min(p, q)"), rates),
        ("Mutants", ("mutant", "mistake", "caught by", "claims that fail", "finding", "seen by first token"), mutants),
        ("Equivalents", ("name", "why", "result"), equivalents),
        ("Problems", ("problem",), [(problem,) for problem in proof.problems()]),
    ]
    return [table for table in found if table[2]]


def _test_rows(proof: Proof) -> Rows:
    rows: Rows = []
    for test in proof.tests:
        trial, outcome = test.trial, test.trial.outcome
        statistic = f"{outcome.kind} = {outcome.statistic:.2f}" if outcome else trial.error
        df = str(outcome.df) if outcome and outcome.df else ""
        result = "passed" if test.passed else "FAILED"
        rows.append((trial.tier, trial.name, str(trial.samples), statistic, df, f"{trial.p:.3g}",
                     f"{test.threshold:.3g}", result))  # fmt: skip
    return rows


def _intro(proof: Proof) -> list[str]:
    return [
        f"**{_verdict(proof)}.**",
        f"`dspark {proof.version}`, `dspark prove{' --quick' if proof.mode == 'quick' else ''} --seed {proof.seed}`, "
        f"{proof.seconds:.0f} s. Tiers 0 and 1 compare fractions and integers with `==`; the tests of Tiers 2 and 3 "
        f"were fixed before the run and are judged together, by Holm's rule, at {ALPHA:g}.",
        "A mutant is the sampler with one deliberate mistake: a suite that does not catch all of them proves nothing. "
        "Equivalents are other code with the same law, and must not be caught.",
    ]


def as_markdown(proof: Proof) -> str:
    """The summary as markdown."""
    parts = ["# Losslessness", *_intro(proof)]
    for title, head, rows in _tables(proof):
        lines = [_markdown_row(head), _markdown_row(["---"] * len(head)), *map(_markdown_row, rows)]
        parts += [f"## {title}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def as_page(proof: Proof) -> str:
    """The report as one HTML page, plots inside."""
    intro = "".join(f"<p>{html.escape(text).replace('**', '').replace('`', '')}</p>" for text in _intro(proof))
    tables = "".join(_html_table(*table) for table in _tables(proof))
    plots = "".join(f'<img alt="{name}" src="data:image/png;base64,{data}">' for name, data in _plots(proof))
    title = "Losslessness of dspark"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title} <small>{html.escape(proof.version)}</small></h1>{intro}{plots}{tables}</html>\n"
    )


def _html_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<h2>{html.escape(title)}</h2><table>{row(head, 'th')}{''.join(row(r, 'td') for r in rows)}</table>"


# --- plots -----------------------------------------------------------------------------------------------------------


def _plots(proof: Proof) -> list[tuple[str, str]]:
    """(what it shows, PNG in base64), none without matplotlib or without figures."""
    if importlib.util.find_spec("matplotlib") is None or not proof.tests:
        return []
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _plot_p_values(left, [test.trial.p for test in proof.tests])
    _plot_rates(right, proof)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    name = "p-values of all tests in order, and acceptance against sum min(p, q)"
    return [(name, base64.b64encode(buffer.getvalue()).decode())]


def _plot_p_values(axes: Any, p_values: list[float]) -> None:
    """Ordered p-values against the uniform distribution that they have when everything is exact."""
    count = len(p_values)
    axes.plot([0, 1], [0, 1], color="#999", linewidth=1)
    axes.plot([(rank + 0.5) / count for rank in range(count)], sorted(p_values), "o", color="#1f6feb", markersize=4)
    axes.set(title="p-values of all tests", xlabel="expected quantile", ylabel="p-value", xlim=(0, 1), ylim=(0, 1))


def _plot_rates(axes: Any, proof: Proof) -> None:
    places = [rate.place for rate in proof.rates]
    spread = [2 * (r.expected * (1 - r.expected) / r.drafts) ** 0.5 for r in proof.rates]
    axes.errorbar(places, [rate.seen for rate in proof.rates], yerr=spread, fmt="o", color="#1f6feb", label="accepted")
    axes.plot(places, [rate.expected for rate in proof.rates], "_", color="#d1242f", markersize=18,
              label="sum min(p, q)")  # fmt: skip
    axes.set(title="acceptance by place in the round", xlabel="draft", xticks=places, ylim=(0, 1))
    axes.legend()
