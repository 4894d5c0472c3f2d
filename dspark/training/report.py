"""The training report: one HTML page with its plots inside (loss, acceptance per position, confidence calibration)."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark.errors import UserError
from dspark.models.drafter_config import DrafterConfig

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>DSpark drafter: training report</title>
<style>body{{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}}img{{max-width:100%}}
table{{border-collapse:collapse}}td,th{{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #ccc}}</style>
<h1>DSpark drafter: training report</h1>
<p>Held-out figures under teacher forcing: acceptance at T = 1 is the mean of 1 - L1/2 given that all earlier positions
were accepted; at T = 0 the share of drafts that equal the target's greedy token.</p>
{table}<h2>Loss</h2>{loss}<h2>Tokens per step, held out</h2>{tokens}
<h2>Acceptance per position, held out</h2>{positions}
<h2>Confidence against acceptance, held out</h2>{calibration}<h2>Configuration</h2><pre>{config}</pre></html>"""


def write_report(path: Path, log: Sequence[dict[str, Any]], config: DrafterConfig) -> Path:
    """Write the page. `log` entries are those of `Trainer`; needs matplotlib (the `train` extra)."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("the training report needs matplotlib: pip install 'dspark[train]', then run again") from None
    matplotlib.use("Agg")
    figures = {
        "loss": _lines(log, {"training loss": "loss"}, "loss"),
        "tokens": _lines(log, {"T = 1": "tokens_per_step_t1", "T = 0": "tokens_per_step_t0"}, "tokens per step"),
        "positions": _positions(log[-1]),
        "calibration": _calibration(log[-1]),
    }
    page = _PAGE.format(
        table=_table(log[-1]), config=html.escape(json.dumps(config.to_json(), indent=1)), **figures
    )
    path.write_text(page, "utf-8")
    return path


def _image(figure: Any, label: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(label)}" src="data:image/png;base64,{data}">'


def _lines(log: Sequence[dict[str, Any]], series: dict[str, str], label: str) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2))
    axes = figure.subplots()
    for name, key in series.items():
        axes.plot([e["step"] for e in log], [e[key] for e in log], marker=".", label=name)
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend()
    return _image(figure, label)


def _positions(entry: dict[str, Any]) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2))
    axes = figure.subplots()
    for offset, (name, key) in enumerate((("T = 1", "accept_t1"), ("T = 0", "accept_t0"))):
        values = entry[key]
        axes.bar([i + 1 + 0.38 * offset for i in range(len(values))], values, width=0.36, label=name)
    axes.set_xlabel("position in the block")
    axes.set_ylabel("acceptance, given the earlier ones")
    axes.set_ylim(0, 1)
    axes.legend()
    return _image(figure, "acceptance per position")


def _calibration(entry: dict[str, Any]) -> str:
    from matplotlib.figure import Figure

    confidence, acceptance = entry["calibration"]
    used = [i for i, n in enumerate(entry["counts"]) if n > 0]
    figure = Figure(figsize=(4.5, 4))
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="gray", linewidth=1)
    axes.plot([confidence[i] for i in used], [acceptance[i] for i in used], marker="o")
    axes.set_xlabel("mean confidence of the bin")
    axes.set_ylabel("mean acceptance of the bin")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    return _image(figure, "calibration of the confidence head")


def _table(entry: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{name}</th>"
        + "".join(f"<td>{v:.3f}</td>" for v in entry[f"accept_{lane}"])
        + f"<td>{entry[f'tokens_per_step_{lane}']:.3f}</td></tr>"
        for name, lane in (("T = 1", "t1"), ("T = 0", "t0"))
    )
    heads = "".join(f"<th>{i + 1}</th>" for i in range(len(entry["accept_t1"])))
    return f"<table><tr><th>position</th>{heads}<th>tokens per step</th></tr>{rows}</table>"
