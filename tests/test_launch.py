"""The supervised worker process: it starts, comes back when it dies, and never outlives its owner."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark import launch, roles
from dspark.launch import LocalWorker, WorkerStartError
from tests.conftest import TinyPair

PYTHON = sys.executable


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.01)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a Python script in the place of the worker command (starting a real one takes seconds)."""

    def install(text: str) -> None:
        file = tmp_path / "worker.py"
        file.write_text(text)
        runner = tmp_path / "python"
        runner.write_text(f'#!/bin/sh\nexec {PYTHON} {file} "$@"\n')
        runner.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(runner))

    return install


READY = "import time\nprint('loading')\nprint('worker ready tcp://x', flush=True)\ntime.sleep(60)\n"


def supervised(*, restart: bool, log: list[str] | None = None) -> LocalWorker:
    lines = [] if log is None else log
    return LocalWorker(["--slots", "2"], restart=restart, log=lines.append)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_it_is_told_where_to_listen_and_whose_child_it_is(script: Callable[[str], None]) -> None:
    script("import sys\nprint(' '.join(sys.argv[1:]), flush=True)\n" + READY)
    log: list[str] = []
    worker = supervised(restart=False, log=log)
    worker.start()
    worker.wait_ready(20)
    assert log[0] == (
        f"[worker] -m dspark.cli worker --listen {worker.endpoint} --parent-pid {os.getpid()} --slots 2"
    )
    pid = worker.pid
    assert alive(pid)
    worker.stop()
    assert not alive(pid)


@pytest.mark.parametrize("restart", [True, False])
def test_a_worker_that_cannot_start_says_why_at_once(script: Callable[[str], None], restart: bool) -> None:
    script("import sys\nprint('the drafter is not there')\nsys.exit(2)\n")
    worker = supervised(restart=restart)
    worker.start()
    started = time.monotonic()
    with pytest.raises(WorkerStartError, match=r"ended at start:\nthe drafter is not there"):
        worker.wait_ready(60)
    assert time.monotonic() - started < 30
    assert worker.restarts == 0
    worker.stop()


def test_a_worker_that_says_nothing_is_given_up(script: Callable[[str], None]) -> None:
    script("import time\nprint('still loading', flush=True)\ntime.sleep(60)\n")
    log: list[str] = []
    worker = supervised(restart=True, log=log)
    worker.start()
    wait_until(lambda: log)
    with pytest.raises(WorkerStartError, match="not ready after 0 s"):
        worker.wait_ready(0.2)
    worker.stop()


def test_it_comes_back_on_the_same_port_until_it_is_stopped(
    script: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "RESTART_FIRST_S", 0.05)
    script(READY)
    worker = supervised(restart=True)
    worker.start()
    worker.wait_ready(20)
    first, endpoint = worker.pid, worker.endpoint
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: worker.restarts == 1)
    worker.wait_ready(20)  # of the new one
    assert worker.pid != first
    assert alive(worker.pid)
    assert worker.endpoint == endpoint
    last = worker.pid
    worker.stop()
    time.sleep(0.3)
    assert worker.restarts == 1
    assert not alive(last)


def test_stop_during_the_pause_before_a_restart_leaves_no_child(
    script: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "RESTART_FIRST_S", 0.2)
    script(READY)
    worker = supervised(restart=True)
    worker.start()
    worker.wait_ready(20)
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: not alive(worker.pid))
    worker.stop()
    time.sleep(0.6)
    assert worker.restarts == 0
    assert not alive(worker.pid)


def test_a_worker_that_ignores_sigterm_is_killed(
    script: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "STOP_TIMEOUT_S", 0.3)
    script("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY)
    worker = supervised(restart=True)
    worker.start()
    worker.wait_ready(20)
    pid = worker.pid
    worker.stop()
    assert not alive(pid)


def test_several_workers_are_told_apart_and_end_at_the_same_time(
    script: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tiny_pair: TinyPair
) -> None:
    """Each would need a second to drain; asked one after the other, the last would be killed for being late."""
    monkeypatch.setattr(launch, "STOP_TIMEOUT_S", 60.0)
    slow = "import signal, sys, time\nasked = []\n"
    slow += "def end(*_):\n    print('asked', time.monotonic(), flush=True)\n    time.sleep(1)\n"
    slow += "    print('ended', time.monotonic(), flush=True)\n    sys.exit(0)\n"
    script(slow + "signal.signal(signal.SIGTERM, end)\n" + READY)
    log: list[str] = []
    machine = roles.Machine(str(tiny_pair.target), "cpu", "fp32", 1, 2, 128)
    with roles.local_workers(machine, tiny_pair.speculative(), 3, restart=True, log=log.append) as workers:
        for worker in workers:
            worker.wait_ready()
        assert len({worker.endpoint for worker in workers}) == 3
        pids = [worker.pid for worker in workers]
    assert not any(alive(pid) for pid in pids)
    wait_until(lambda: sum(" ended " in line for line in log) == 3)
    said = {kind: [float(x.split()[-1]) for x in log if f" {kind} " in x] for kind in ("asked", "ended")}
    assert max(said["asked"]) < min(said["ended"])
    assert {line.partition("]")[0] for line in log if " asked " in line} == {"[worker 1", "[worker 2", "[worker 3"}
    assert sum(worker.restarts for worker in workers) == 0


def test_without_speculation_there_are_no_workers(tiny_pair: TinyPair) -> None:
    machine = roles.Machine(str(tiny_pair.target), "cpu", "fp32", 1, 2, 128)
    log: list[str] = []
    with roles.local_workers(machine, tiny_pair.speculative(0), 2, restart=True, log=log.append) as workers:
        assert workers == []
    assert "speculation is off" in log[0]


@pytest.mark.parametrize("copy", [True, False])
def test_copying_is_passed_to_the_worker(monkeypatch: pytest.MonkeyPatch, tiny_pair: TinyPair, copy: bool) -> None:
    started: list[list[str]] = []

    class Recorded:
        def __init__(self, arguments: list[str], **_: object) -> None:
            started.append(arguments)

        def start(self) -> None: ...

        def ask_to_stop(self) -> None: ...

        def stop(self) -> None: ...

    monkeypatch.setattr(launch, "LocalWorker", Recorded)
    machine = roles.Machine(str(tiny_pair.target), "cpu", "fp32", 1, 2, 128)
    with roles.local_worker(machine, tiny_pair.speculative(), restart=False, log=lambda text: None, copy=copy):
        pass
    assert ("--no-copy" in started[0]) is not copy
