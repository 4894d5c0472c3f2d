"""One short run on real processes: a tiny pair, two workers behind proxies, faults of different kinds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dspark.chaos import run as runs
from dspark.chaos.judge import COUNTS
from dspark.chaos.load import Mix
from dspark.chaos.pairs import PAIRS, tiny_pair
from dspark.chaos.processes import process_state
from dspark.chaos.programs import PROGRAMS, Program
from dspark.chaos.report import as_text
from dspark.chaos.schedule import Planned

KINDS = ("kill", "corrupt", "reset", "stop_proxy")


def four_faults(_links: int, _seconds: float, _every_s: float, _seed: int) -> Program:
    """One worker is killed while the other one's link is hurt in three ways."""
    return Program([Planned(n, 1.0, kind, min(n, 1), n) for n, kind in enumerate(KINDS)], Mix(law=0.5), None)


def test_a_short_run_on_real_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROGRAMS, "mixed", four_faults)
    monkeypatch.setitem(PAIRS, "tiny", lambda directory: replace(tiny_pair(directory), max_tokens=40))
    monkeypatch.setattr(runs, "LEAD_S", 0.5)
    options = runs.Options(0.0, 1, 2, 0.0, "tiny", 2, tmp_path, 120.0)
    values = runs.run(options, runs.Interrupt(), lambda text: None)
    assert values["problems"] == []
    assert values["ok"]
    assert {name: values[name] for name in COUNTS if name not in ("requests", "completed", "cancelled")} == {
        **dict.fromkeys(COUNTS[3:], 0), "faults": 4,
    }  # fmt: skip
    assert values["requests"] == values["completed"] + values["cancelled"] > 0
    assert {kind: row["verified"] for kind, row in values["kinds"].items()} == dict.fromkeys(KINDS, 1)
    assert values["inter_token_ms"]["inside"]["n"] > 0
    assert values["law"]["samples"] > 0
    assert all(process_state(row["pid"]) == "" for row in values["rss"])
    history = [json.loads(line) for line in (tmp_path / runs.HISTORY).read_text("utf-8").splitlines()]
    assert sum(event["event"] == "request" for event in history) == values["requests"]
    faults = [event for event in history if event["event"] == "fault"]
    assert sorted(event["kind"] for event in faults) == sorted(KINDS)
    assert all(event["injected"] <= event["verified"] <= event["healed"] <= event["recovered"] for event in faults)
    assert json.loads((tmp_path / runs.RESULT).read_text("utf-8")) == values
    assert {*KINDS, "wrong_tokens", "endpoint"} <= set(as_text(values).split())
