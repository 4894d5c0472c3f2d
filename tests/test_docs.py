"""Every command in a ```sh block of the documents is run here, on the tiny pair and on free ports.

A new command without a runner fails `test_every_documented_command_has_a_runner`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import RunningEndpoint, TinyPair

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DSPARK = [sys.executable, "-m", "dspark.cli"]


def documented() -> list[str]:
    blocks = [b for d in DOCUMENTS for b in re.findall(r"```sh\n(.*?)```", d.read_text("utf-8"), re.S)]
    return sorted({line.strip() for block in blocks for line in block.splitlines() if line.strip()})


def command_of(line: str) -> str:
    """`dspark bench spec`, `make serve`, ...: the words before the first option."""
    words = [w.removeprefix(".venv/bin/") for w in shlex.split(line)]
    plain = words[: next((i for i, w in enumerate(words) if w.startswith("-")), len(words))]
    return " ".join(plain)


def options_of(line: str) -> list[str]:
    return shlex.split(line)[len(command_of(line).split()) :]


def replaced(line: str, **values: object) -> list[str]:
    """The documented command with some option values replaced (None drops the option) and others added."""
    words, options = command_of(line).split()[1:], options_of(line)
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if flag in options:
            at = options.index(flag)
            del options[at : at + 2]
        if value is not None:
            options += [flag, str(value)]
    return [*DSPARK, *words, *options]


def until_ready(command: list[str], prefix: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith(prefix):
            return process, line
    raise AssertionError("".join(seen))


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)


def run_make(line: str, pair: TinyPair, endpoint: RunningEndpoint, tmp: Path) -> None:
    """Make's own logic, without the set-up: what would be run, with the documented variables."""
    words = [*shlex.split(line), "--dry-run", "--assume-old=.venv/.ready", "PORT=8123", "SPEC=3", "DTYPE=fp32"]
    # The tests themselves run under make: its variables would make the inner one chatty.
    clean = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    printed = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT, env=clean).stdout
    if "serve" in line:
        assert "dspark serve --port 8123 --dtype fp32" in printed
        assert json.loads(shlex.split(printed.strip().splitlines()[-1])[-1]) == {
            "method": "dspark",
            "num_speculative_tokens": 3,
        }
    else:
        assert "-m pytest" in printed


def run_chat(line: str, pair: TinyPair, endpoint: RunningEndpoint, tmp: Path) -> None:
    command = replaced(line, url=endpoint.url, prompt="hello", max_tokens=12)
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=ROOT)
    assert "draft tokens accepted" in result.stdout


def run_doctor(line: str, pair: TinyPair, endpoint: RunningEndpoint, tmp: Path) -> None:
    result = subprocess.run(replaced(line), capture_output=True, text=True, timeout=120, check=True, cwd=ROOT)
    assert "threads per role" in result.stdout


def run_serve(line: str, pair: TinyPair, endpoint: RunningEndpoint, tmp: Path) -> None:
    options = options_of(line)
    given = json.loads(options[options.index("--speculative-config") + 1]) if "--speculative-config" in options else {}
    config = {"method": "dspark", **given, "model": str(pair.drafter), "num_speculative_tokens": 3}
    command = replaced(
        line, target=pair.target, port=0, threads=1, max_context=128, speculative_config=json.dumps(config)
    )
    process, ready = until_ready(command, "ready: ")
    try:
        url = ready.split()[1]
        with urllib.request.urlopen(f"{url}/ready", timeout=20) as response:
            engine = json.load(response)["engine"]
        assert engine["worker"] == "up"
        assert len(engine["workers"]) == int(options[options.index("--workers") + 1] if "--workers" in options else 1)
    finally:
        end(process)


def run_worker(line: str, pair: TinyPair, endpoint: RunningEndpoint, tmp: Path) -> None:
    command = replaced(line, listen="tcp://127.0.0.1:0", target=pair.target, drafter=pair.drafter, threads=1)
    process, ready = until_ready(command, "worker ready ")
    end(process)
    assert ready.split()[-1].startswith("tcp://127.0.0.1:")
    assert process.returncode == 0


def run_spark(line: str, pair: TinyPair, endpoint: RunningEndpoint, tmp: Path) -> None:
    workers = tmp / "workers.txt"
    workers.write_text("tcp://127.0.0.1:9\n", "utf-8")
    named = {"workers_file": workers} if "--workers-file" in line else {"worker": "tcp://127.0.0.1:9"}
    command = replaced(
        line, **named, target=pair.target, port=0, threads=1, max_context=128, speculative_config=pair.speculative()
    )
    process, ready = until_ready(command, "ready: ")
    end(process)
    assert "http://127.0.0.1:" in ready


def run_train(line: str, pair: TinyPair, endpoint: RunningEndpoint, tmp: Path) -> None:
    command = replaced(
        line, target=pair.target, output=tmp / "run", tokens=1000, blocks=400, draft_vocab=192, rows=8, threads=1
    )
    subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, cwd=ROOT)
    assert (tmp / "run" / "checkpoint" / "model.safetensors").is_file()
    assert "data:image/png" in (tmp / "run" / "report.html").read_text()


def run_bench(line: str, pair: TinyPair, endpoint: RunningEndpoint, tmp: Path) -> None:
    command = replaced(
        line, target=pair.target, speculative_config=pair.speculative(), prompts=2, max_tokens=12, max_context=256,
        threads=1,
    )  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, cwd=ROOT)
    assert "tokens per step" in result.stdout


def run_bench_rows(line: str, pair: TinyPair, endpoint: RunningEndpoint, tmp: Path) -> None:
    result = subprocess.run(
        replaced(line, rounds=2), capture_output=True, text=True, timeout=300, check=True, cwd=ROOT
    )
    assert "dense validate" in result.stdout


def run_bench_acceptance(line: str, pair: TinyPair, endpoint: RunningEndpoint, tmp: Path) -> None:
    command = replaced(
        line, target=pair.target, speculative_config=pair.speculative(), prompts=1, max_tokens=12, threads=1
    )
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, cwd=ROOT)
    assert "accepted per position" in result.stdout


def run_bench_wire(line: str, pair: TinyPair, endpoint: RunningEndpoint, tmp: Path) -> None:
    command = replaced(line, turns=8, transports="zmq")
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, cwd=ROOT)
    assert "zmq" in result.stdout


def run_fuzz(line: str, pair: TinyPair, endpoint: RunningEndpoint, tmp: Path) -> None:
    command = replaced(line, frames=400, out=tmp / "findings")
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, cwd=ROOT)
    assert "escapes" in result.stdout


def run_sim(line: str, pair: TinyPair, endpoint: RunningEndpoint, tmp: Path) -> None:
    result = subprocess.run(replaced(line, rounds=300), capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert result.returncode == 0
    assert "wrong" in result.stdout


def run_conformance(line: str, pair: TinyPair, endpoint: RunningEndpoint, tmp: Path) -> None:
    small = {"run": ["--transport", "inproc", "--case", "LIV"], "selftest": ["--case", "PFX"]}
    command = [*replaced(line), *small.get(line.split()[2], [])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    expected = {"list": "DSP2-", "show": "hunts:", "run": '"must_failed": 0', "selftest": '"mutants_killed"'}
    assert expected[line.split()[2]] in result.stdout


RUNNERS: dict[str, Callable[[str, TinyPair, RunningEndpoint, Path], None]] = {
    "make serve": run_make,
    "make test": run_make,
    "dspark chat": run_chat,
    "dspark doctor": run_doctor,
    "dspark serve": run_serve,
    "dspark worker": run_worker,
    "dspark spark": run_spark,
    "dspark train": run_train,
    "dspark bench spec": run_bench,
    "dspark bench rows": run_bench_rows,
    "dspark bench acceptance": run_bench_acceptance,
    "dspark bench wire": run_bench_wire,
    "dspark fuzz": run_fuzz,
    "dspark sim": run_sim,
    "dspark conformance list": run_conformance,
    "dspark conformance show DSP2-ROW-100": run_conformance,
    "dspark conformance run": run_conformance,
    "dspark conformance selftest": run_conformance,
}


def test_every_documented_command_has_a_runner() -> None:
    commands = {command_of(line) for line in documented()}
    assert commands - RUNNERS.keys() == set()
    assert RUNNERS.keys() - commands == set(), "a runner for a command that no document mentions"


@pytest.mark.parametrize("line", documented())
def test_documented_command(line: str, tiny_pair: TinyPair, tiny_endpoint: RunningEndpoint, tmp_path: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    RUNNERS[command_of(line)](line, tiny_pair, tiny_endpoint, tmp_path)
