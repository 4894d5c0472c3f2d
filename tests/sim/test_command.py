"""`dspark sim`: figures, exit codes, traces, and what it says of a failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dspark.sim import campaign, command, plants

app = typer.Typer()
command.register(app)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_a_clean_run_prints_its_figures_and_exits_with_zero() -> None:
    code, out, _ = run("--rounds", "200", "--seed", "11", "--json")
    figures = json.loads(out)
    assert code == 0
    assert figures["rounds"] >= 200
    assert figures["wrong_tokens"] == figures["leaked"] == 0
    code, out, _ = run("--rounds", "200", "--seed", "11")
    assert code == 0
    assert f"{figures['rounds']:,}" in out
    assert figures["trace_hash"] in out


def test_a_log_file_gets_a_line_of_progress_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    show, tally = command.Progress(), campaign.Tally()
    for second in range(0, 130, 5):
        show(tally, float(second))
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_failure_is_shrunk_and_shown_with_its_command() -> None:
    asked = ("--seed", "1", "--rounds", "60", "--kinds", "corrupt", "--plant", "no-body-checksum", "--json")
    code, out, err = run(*asked)
    failure = json.loads(out)["failures"][0]
    assert code == 1
    assert failure["kind"] == "corrupt_accepted"
    shown = next(line for line in err.splitlines() if "dspark sim --seed" in line).split()
    code, out, _ = run(*shown[2:], "--json")
    assert code == 1
    assert json.loads(out)["failures"][0]["kind"] == "corrupt_accepted"
    assert json.loads(out)["faults"] <= len(shown[shown.index("--faults") + 1].split(",")) < 10


def test_a_trace_is_one_event_a_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.ndjson"
    run("--seed", "11", "--world", "1", "--rounds", "50", "--faults", "none", "--trace", str(path))
    events = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert {"open", "commit", "heal"} <= {event["event"] for event in events}
    times = [event["ns"] for event in events]
    assert times == sorted(times)


def test_wrong_names_are_refused() -> None:
    assert run("--plant", "nothing")[0] == 2
    assert run("--kinds", "nothing")[0] == 2
    assert run("--faults", "one")[0] == 2
    code, out, _ = run("--plant", "list")
    assert code == 0
    assert all(name in out for name in plants.PLANTS)
