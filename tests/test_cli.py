"""The command line as a user meets it: help that answers at once, and mistakes that get one clear line."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dspark import __version__, cli, doctor, placement, transport_check
from dspark.doctor import Report
from dspark_spark.build import SparkSettings
from tests.conftest import TinyPair

COMMANDS = [
    ["serve"], ["spark"], ["worker"], ["chat"], ["train"], ["doctor"], ["prove"], ["keys"],
    ["bench"], ["bench", "spec"], ["bench", "rows"], ["bench", "wire"], ["bench", "acceptance"],
]  # fmt: skip

# Runs main() for several command lines in one process (each start costs a second), and reports on each.
SCRIPT = """
import contextlib, io, json, sys
from dspark import cli, placement
if sys.argv[1] == "no-prepare":
    placement.prepare = lambda chosen: None  # torch stays imported from one command line to the next
for arguments in json.loads(sys.argv[2]):
    sys.argv = ["dspark", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
            status = 0
        except SystemExit as end:
            status = end.code or 0
    seen = {"status": status, "out": out.getvalue(), "err": err.getvalue(), "torch": "torch" in sys.modules}
    print(json.dumps(seen), flush=True)
"""


def run(*lines: list[str], mode: str = "as-is") -> list[dict[str, Any]]:
    command = [sys.executable, "-c", SCRIPT, mode, json.dumps(lines)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
    return [json.loads(line) for line in shown.stdout.splitlines()]


def walk(command: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    children = getattr(command, "commands", {})
    return [(path, command), *(pair for name, child in children.items() for pair in walk(child, (*path, name)))]


@pytest.mark.parametrize(
    "role", [["serve", "--no-restart-worker"], ["spark", "--worker", "tcp://127.0.0.1:9", "--allow-v1"]]
)
def test_options_of_the_engine_reach_its_settings(
    monkeypatch: pytest.MonkeyPatch, tiny_pair: TinyPair, role: list[str]
) -> None:
    """Every one differs from its default: an option that is dropped on the way changes nothing that anybody sees."""
    seen: list[SparkSettings] = []

    def build(settings: SparkSettings) -> Any:
        seen.append(settings)
        raise typer.Exit(7)

    monkeypatch.setattr(placement, "prepare", lambda chosen: None)
    monkeypatch.setattr("dspark_spark.build.build", build)
    monkeypatch.setattr(cli.roles, "local_workers", lambda *_, **__: contextlib.nullcontext([]))
    options = {
        "target": tiny_pair.target, "speculative-config": tiny_pair.speculative(3), "threads": 1, "slots": 3,
        "max-context": 96, "draft-deadline-ms": 77, "audit-rate": 0.5, "request-groups": 2,
    }  # fmt: skip
    typed = [f"--{name}={value}" for name, value in options.items()]
    assert CliRunner().invoke(cli.app, [*role, "--adaptive-depth", *typed]).exit_code == 7
    (settings,) = seen
    engine = settings.engine
    assert (settings.target, settings.draft_deadline_ms, settings.threads) == (str(tiny_pair.target), 77, 1)
    assert settings.speculative is not None
    assert settings.speculative.num_speculative_tokens == 3
    assert settings.allow_v1 == ("--allow-v1" in role)
    assert (engine.slots, engine.max_context, engine.threads) == (3, 96, 1)
    assert (engine.audit_rate, engine.adaptive_depth, engine.request_groups) == (0.5, True, 2)


def test_every_command_and_every_option_says_what_it_is_for() -> None:
    found = walk(typer.main.get_command(cli.app))
    assert {path for path, _ in found} >= {tuple(c) for c in COMMANDS}
    for path, command in found:
        assert len(command.help or "") > 20, path
        for parameter in command.params:
            if not parameter.hidden:
                assert len(parameter.help or "") > 8, (path, parameter.name)


def test_help_and_version_answer_without_torch() -> None:
    answers = run(["--help"], *[[*c, "--help"] for c in COMMANDS], ["--version"])
    assert [a["status"] for a in answers] == [0] * len(answers)
    assert not any(a["torch"] for a in answers)
    assert all("Usage" in a["out"] for a in answers[:-1])
    assert answers[-1]["out"].strip() == f"dspark {__version__}"


def test_wrong_options_are_refused_before_anything_is_loaded() -> None:
    cases = [
        (["serve", "--dtype", "fp8"], "--dtype"),
        (["worker", "--device", "tpu"], "--device"),
        (["serve", "--port", "70000"], "--port"),
        (["serve", "--slots", "0"], "--slots"),
        (["serve", "--nonsense"], "--nonsense"),
        (["spark"], "--workers-file"),
        (["spark", "--worker", "tcp://127.0.0.1:9", "--workers-file", "/nonexistent"], "not both"),
        (["serve", "--workers", "0"], "--workers"),
        (["serve", "--workers", "17"], "--workers"),
        (["frobnicate"], "frobnicate"),
        (["serve", "--api-key-file", "/nonexistent/keys"], "/nonexistent/keys"),
    ]
    for (arguments, words), answer in zip(cases, run(*[a for a, _ in cases]), strict=True):
        assert answer["status"] == 2, arguments
        assert words in answer["err"], arguments
        assert "Traceback" not in answer["err"]
        assert not answer["torch"]


def test_what_does_not_fit_is_one_line_with_a_remedy(tiny_pair: TinyPair) -> None:
    target = ["--target", str(tiny_pair.target), "--dtype", "fp32"]
    drafter = ["--drafter", str(tiny_pair.drafter)]
    spec = ["--speculative-config"]
    cases = [
        (["serve", "--target", "/nonexistent"], ["--target", "/nonexistent"]),
        (["serve", *spec, "{"], ["--speculative-config"]),
        (["serve", *spec, '{"method": "eagle"}'], ["--speculative-config: method"]),
        (["serve", *target, *spec, '{"method": "dspark"}'], ["model", "dspark train"]),
        (["serve", *target, *spec, tiny_pair.speculative(9)], ["num_speculative_tokens 9", "block_size"]),
        (["serve", *target, *spec, tiny_pair.speculative(2), "--device", "cuda:77"], ["--device cuda:77", "cpu"]),
        (["spark", "--worker", "nowhere", *target, *spec, tiny_pair.speculative(2), "--max-context", "256"],
         ["--worker nowhere", "tcp://"]),
        (["spark", "--worker", "tls+tcp://127.0.0.1:9", *target, *spec, tiny_pair.speculative(2),
          "--max-context", "256"],
         ["--worker", "TLS certificates"]),
        (["spark", "--worker", "tcp://127.0.0.1:9", "--worker", "tcp://127.0.0.1:9", *target, *spec,
          tiny_pair.speculative(2), "--max-context", "256"],
         ["--worker", "twice"]),
        (["spark", "--worker", "tcp://127.0.0.1:9", "--worker", "nowhere", *target, *spec,
          tiny_pair.speculative(2), "--max-context", "256"],
         ["--worker nowhere", "tcp://"]),
        (["spark", "--workers-file", "/nonexistent/workers", *target, *spec, tiny_pair.speculative(2),
          "--max-context", "256"],
         ["--workers-file /nonexistent/workers", "No such file", "one worker address a line"]),
        (["spark", "--workers-file", str(tiny_pair.target / "config.json"), *target, *spec,
          tiny_pair.speculative(2), "--max-context", "256"],
         ["--workers-file", "line 1", "is no address", "tcp://HOST:PORT"]),
        (["spark", "--worker", "tcp://127.0.0.1:9", "--curve-secret-key", "/a", *target, *spec,
          tiny_pair.speculative(2)],
         ["--curve-", "public keys"]),
        (["spark", "--worker", "tcp://127.0.0.1:9", *target, *spec, tiny_pair.speculative(2)],
         ["--max-context 2048", "512"]),
        (["worker", *target, "--drafter", "/nonexistent"], ["/nonexistent", "config.json"]),
        (["worker", *target, *drafter, "--listen", "tcp://0.0.0.0:0"], ["--secret-file", "--curve-", "--tls-"]),
        (["worker", *target, *drafter, "--listen", "plain+tcp://0.0.0.0:0"], ["--listen", "tls+tcp://"]),
        (["worker", *target, *drafter, "--listen", "http://127.0.0.1:0"], ["http://127.0.0.1:0", "tls+tcp://"]),
        (["worker", *target, *drafter, "--secret-file", "/nonexistent"], ["--secret-file", "No such file"]),
        (["worker", *target, *drafter, "--listen", "tls+tcp://127.0.0.1:0"], ["--listen", "TLS certificates"]),
        (["worker", *target, *drafter, "--curve-secret-key", "/nonexistent"], ["--curve-", "public keys"]),
        (["worker", *target, *drafter, "--tls-ca", "/a", "--tls-key", "/b"], ["--tls-certificate"]),
        (["worker", *target, *drafter, "--curve-secret-key", "/nonexistent", "--curve-clients", "/nonexistent"],
         ["/nonexistent", "No such file"]),
        (["worker", *target, *drafter, "--listen", "tcp://127.0.0.1:x"], ["--listen tcp://127.0.0.1:x"]),
    ]  # fmt: skip
    answers = run(*[a for a, _ in cases], mode="no-prepare")
    for (arguments, words), answer in zip(cases, answers, strict=True):
        assert answer["status"] == 2, (arguments, answer)
        message = answer["err"].strip()
        assert message.startswith("dspark: ")
        assert message.count("\n") == 0, message
        assert all(word in message for word in words), (arguments, message)


def test_keys_are_made_once(tmp_path: Path) -> None:
    line = ["keys", str(tmp_path / "worker")]
    made, again = run(line, line)
    assert made["status"] == 0
    assert f"{tmp_path}/worker.pub" in made["out"]
    assert not made["torch"]
    assert stat.S_IMODE((tmp_path / "worker").stat().st_mode) == 0o600
    assert again["status"] == 2
    assert again["err"] == f"dspark: {tmp_path}/worker: File exists\n"


def test_bench_without_speculation_has_nothing_to_compare(tiny_pair: TinyPair) -> None:
    line = ["bench", "spec", "--target", str(tiny_pair.target), "--speculative-config", tiny_pair.speculative(0)]
    (answer,) = run(line, mode="no-prepare")
    assert answer["status"] == 2
    assert "nothing to compare" in answer["err"]


def test_chat_without_an_endpoint_ends_with_status_1() -> None:
    (answer,) = run(["chat", "--url", "http://127.0.0.1:9", "--prompt", "hi"])
    assert answer["status"] == 1
    assert "dspark serve" in " ".join(answer["out"].split())
    assert not answer["torch"]


def test_doctor_reports_this_machine() -> None:
    (answer,) = run(["doctor", "--json"])
    assert answer["status"] == 0
    report = json.loads(answer["out"])
    assert report["usable"] is True
    assert report["choices"]["threads_per_role"] == placement.choose().threads
    assert report["choices"]["dtype"] == placement.choose_dtype("auto", "cpu")
    assert "PASSIVE" in report["choices"]["waiting"]
    assert report["facts"]["dspark"] == __version__
    works = [name for name, answer in report["transports"].items() if answer == "works"]
    assert works == ["zmq (tcp://)", "zmq with CURVE keys (tcp://)", "plain tcp (plain+tcp://)"]
    assert set(report["transports"]) - set(works) == {"tls 1.3 (tls+tcp://)", "ucx (ucx://)"}
    assert set(report["facts"]) >= {
        "torch", "cores", "memory_gib", "native_bf16", "cuda_devices", "row_kernels", "decode_kernels"
    }  # fmt: skip


def test_doctor_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "prepare", lambda chosen: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        report = Report()
        doctor._check_port(report, taken.getsockname()[1])
    assert "is taken" in report.findings[0]
    text = doctor.as_text(doctor.examine())
    assert text.startswith("this machine\n")
    assert "what dspark chooses" in text
    assert "threads per role" in text
    assert "transports, tried on loopback" in text


def test_doctor_says_why_a_transport_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ucxx" else find(name))
    assert transport_check._ucx() == "ucxx is not installed: pip install 'dspark[ucx]'"
    monkeypatch.setattr(transport_check, "_WAIT_S", 0.0)
    assert "did not come back" in transport_check.round_trip("plain+tcp://127.0.0.1:0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert "in use" in transport_check.round_trip(address)
        report = Report()
        monkeypatch.setattr(transport_check, "examine", lambda: {"zmq": transport_check.round_trip(address)})
        doctor._check_transports(report)
    assert not report.usable
    assert "the default transport does not work" in report.findings[0]


def test_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "prepare", lambda chosen: None)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "zmq" else find(name))
    report = doctor.examine()
    assert not report.usable
    assert any(finding.startswith("zmq is not installed") for finding in report.findings)
    assert "  - zmq is not installed" in doctor.as_text(report)
