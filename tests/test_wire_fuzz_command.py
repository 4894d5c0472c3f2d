"""`dspark fuzz`: what it prints, saves, repeats, shares among jobs, and keeps when it is interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dspark import wire_fuzz
from dspark_proto import DrafterConnection, MessageType

KEYS = {
    "frames", "mutated", "accepted", "refused", "by_code", "escapes", "seconds", "frames_per_s", "peak_traced_bytes",
    "traced_frames", "max_frame_us", "trials", "by_mutation", "seed", "jobs", "interrupted", "findings",
}  # fmt: skip


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.callback()(lambda: None)
    wire_fuzz.register(app)
    return app


def run(app: typer.Typer, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["fuzz", *arguments], catch_exceptions=False)


@pytest.fixture
def fragile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that chokes on any PONG."""
    receive = DrafterConnection.receive

    def chokes(connection: DrafterConnection, frame: Any, now_ns: int) -> Any:
        if len(frame) > 6 and frame[6] == MessageType.PONG:
            raise IndexError("planted")
        return receive(connection, frame, now_ns)

    monkeypatch.setattr(DrafterConnection, "receive", chokes)


def test_json_has_the_documented_keys_and_adds_up(app: typer.Typer, tmp_path: Path) -> None:
    result = run(app, "--frames", "600", "--seed", "3", "--json", "--out", str(tmp_path / "none"))
    assert result.exit_code == 0
    values = json.loads(result.stdout)
    assert set(values) == KEYS
    assert values["accepted"] + values["refused"] == values["frames"] >= 600
    assert (values["escapes"], values["findings"], values["interrupted"]) == (0, [], False)
    assert values["peak_traced_bytes"] > 0
    assert values["max_frame_us"] > 0
    assert not (tmp_path / "none").exists()


def test_the_table_names_figures_and_codes(app: typer.Typer, tmp_path: Path) -> None:
    result = run(app, "--frames", "256", "--out", str(tmp_path))
    words = result.stdout.split()
    assert {"frames", "accepted", "refused", "escapes", "peak_traced_bytes", "bad_prefix_crc"} <= set(words)
    document = (Path(__file__).parent.parent / "docs" / "internals" / "fuzzing.md").read_text("utf-8")
    assert [key for key in KEYS if f"`{key}`" not in document] == []


@pytest.mark.usefixtures("fragile")
def test_an_escape_is_saved_and_its_command_runs_it_again(app: typer.Typer, tmp_path: Path) -> None:
    result = run(app, "--frames", "1500", "--seed", "1", "--json", "--out", str(tmp_path))
    assert result.exit_code == 1
    values = json.loads(result.stdout)
    assert values["escapes"] >= len(values["findings"]) >= 1
    for finding in values["findings"]:
        path = Path(finding["file"])
        saved = json.loads(path.read_text("utf-8"))
        assert path.parent == tmp_path
        assert (saved["kind"], saved["seed"]) == ("exception", 1)
        assert all(bytes.fromhex(frame) for turn in saved["deliveries"] for _, frame in turn)
        assert f"dspark fuzz --replay {path}" in result.stderr
        again = run(app, "--replay", str(path))
        assert again.exit_code == 1
        assert "IndexError" in again.stdout
    run(app, "--frames", "1500", "--seed", "1", "--json", "--out", str(tmp_path))
    assert len(list(tmp_path.iterdir())) == len(values["findings"])


def test_a_repaired_finding_holds_and_another_file_is_refused(app: typer.Typer, tmp_path: Path) -> None:
    finding = {"kind": "exception", "detail": "x", "seed": 1, "batch": 2, "stage": "open", "deliveries": [[]]}
    finding["terms"] = "v2"
    path = wire_fuzz.save(finding, tmp_path)
    held = run(app, "--replay", str(path))
    assert (held.exit_code, held.stdout.strip()) == (0, "the connections hold")
    for content in ("[]", "{}", "no json", json.dumps(finding | {"stage": "elsewhere"})):
        path.write_text(content, "utf-8")
        assert run(app, "--replay", str(path)).exit_code == 2


def test_findings_do_not_overwrite_each_other(tmp_path: Path) -> None:
    first = {"kind": "exception", "seed": 1, "batch": 2, "detail": "a"}
    paths = [wire_fuzz.save(one, tmp_path) for one in (first, first | {"detail": "b"}, first)]
    assert paths[0] == paths[2] != paths[1]


def test_jobs_share_the_batches_of_one_campaign(app: typer.Typer, tmp_path: Path) -> None:
    """Two jobs that run two batches each find what one job finds in four."""
    one = json.loads(run(app, "--frames", "1000", "--seed", "4", "--json", "--out", str(tmp_path)).stdout)
    two = json.loads(
        run(app, "--frames", "1000", "--seed", "4", "--jobs", "2", "--json", "--out", str(tmp_path)).stdout
    )
    assert (two["jobs"], one["jobs"]) == (2, 1)
    exact = ("frames", "mutated", "accepted", "refused", "by_code", "by_mutation", "trials", "traced_frames", "escapes")
    assert [two[key] for key in exact] == [one[key] for key in exact]


def report(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = dict.fromkeys(KEYS, 1) | {"by_code": {"a": 1}, "by_mutation": {}, "findings": []}
    return values | {"interrupted": False} | changes


def test_results_are_merged_by_sum_maximum_and_kind() -> None:
    same = {"kind": "memory", "detail": "x", "batch": 1}
    total = wire_fuzz.merged(
        [
            report(by_code={"a": 1, "b": 5}, findings=[same], max_frame_us=7, escapes=2),
            report(by_code={"a": 2}, findings=[same | {"batch": 2}, same | {"detail": "y"}], interrupted=True),
        ],
        seconds=4.0,
    )
    assert list(total["by_code"].items()) == [("b", 5), ("a", 3)]
    assert (total["frames"], total["escapes"], total["max_frame_us"], total["frames_per_s"]) == (2, 3, 7, 0.5)
    assert sorted(one["detail"] for one in total["findings"]) == ["x", "y"]
    assert total["interrupted"]


def test_a_job_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(wire_fuzz, "_start_job", dies)
    with pytest.raises(RuntimeError, match=r"exit codes \[3, 3\]"):
        wire_fuzz.run_jobs(wire_fuzz.Share(1, 10), 2, wire_fuzz.Stop())


def test_minutes_end_a_run(app: typer.Typer, tmp_path: Path) -> None:
    result = run(app, "--frames", "100000000", "--minutes", "0", "--json", "--out", str(tmp_path))
    assert json.loads(result.stdout)["frames"] == 0


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_interrupt_keeps_the_summary(jobs: str, tmp_path: Path) -> None:
    code = "import sys, typer; from dspark.wire_fuzz import fuzz; typer.run(fuzz)"
    arguments = ["--frames", "100000000", "--jobs", jobs, "--json", "--out", str(tmp_path)]
    child = subprocess.Popen(
        [sys.executable, "-c", _READY + code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stderr is not None
    assert child.stderr.readline() == "running\n"
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=120)
    values = json.loads(output)
    assert (values["interrupted"], values["jobs"]) == (True, int(jobs))
    assert 0 < values["frames"] < 100_000_000
    assert child.returncode == 0


_READY = """
import sys
from dspark import wire_fuzz
def say(frames, *_):
    if frames:
        print("running", file=sys.stderr, flush=True)
wire_fuzz._show_progress = say
sys.stderr.isatty = lambda: True
"""
