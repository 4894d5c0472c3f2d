"""How a run ends: nothing held, nothing running, interrupts, exit codes, and start-ups that fail."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dspark import roles
from dspark.chaos import cluster as clusters
from dspark.chaos import command
from dspark.chaos import run as runs
from dspark.chaos.endpoint_view import Metrics
from dspark.chaos.judge import COUNTS
from dspark.chaos.pairs import Pair
from dspark.chaos.processes import StartError, process_state
from dspark.chaos.proxy_handle import ProxyError
from dspark.chaos.quiesce import leaks
from dspark.launch import READY_PREFIX


class StrawProxy:
    """A proxy whose worker reports `slots_open`; None: it is never heard."""

    def __init__(self, slots_open: int | None) -> None:
        self.slots_open = slots_open

    def ask_stats(self) -> None:
        if self.slots_open == -1:
            raise ProxyError("proxy 0 does not answer")

    def counts(self) -> dict[str, Any]:
        return {"reports": int(self.slots_open is not None), "slots_open": self.slots_open or 0}


def held(leases: int = 0, slots_open: int | None = 0, **series: float) -> list[str]:
    view = SimpleNamespace(
        metrics=lambda: Metrics(dict(series)), workers=lambda: {"tcp://p": {"state": "up", "leases": leases}}
    )
    link = SimpleNamespace(proxy=StrawProxy(slots_open), worker=SimpleNamespace(name="worker 0"))
    return leaks(SimpleNamespace(view=view, links=[link]), quiet_s=0)  # type: ignore[arg-type]


def test_what_is_held_after_the_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.chaos.quiesce.STATS_S", 0.0)
    assert held() == []
    assert held(num_requests_running=2.0) == ["num_requests_running is 2"]
    assert held(**{'pool_leases{worker="tcp://p"}': 1.0}) == ["pool_leases is 1"]
    assert held(leases=3) == ["the endpoint has 3 leases at tcp://p"]
    assert held(slots_open=4) == ["worker 0 holds 4 slots open"]
    assert held(slots_open=None) == ["worker 0 does not say what it holds"]
    assert held(slots_open=-1) == ["proxy 0 does not answer"]


def test_series_are_summed_over_the_labels_that_are_not_given() -> None:
    metrics = Metrics({'drops{cause="a",way="x"}': 1.0, 'drops{cause="b",way="x"}': 2.0, "drops_total": 9.0})
    assert metrics.total("drops") == 3.0
    assert metrics.total("drops", cause="b") == 2.0
    assert metrics.total("drops", cause="c") == 0.0
    assert (metrics.has("drops"), metrics.has("drop")) == (True, False)


def test_an_interrupt_under_load_is_gentle_and_the_next_one_is_not() -> None:
    before = signal.getsignal(signal.SIGINT)
    with runs.interruptible() as interrupt:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert not interrupt.asked.is_set()
        interrupt.gentle = True
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.asked.wait(5)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        during = signal.getsignal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before is not during


def test_a_start_that_fails_leaves_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers and proxies are up when the endpoint ends at start."""
    started: list[int] = []
    start = clusters.Child.start

    def start_and_note(child: clusters.Child) -> None:
        start(child)
        started.append(child.pid)

    def straw(role: str, options: dict[str, object]) -> list[str]:
        sleeper = f"print({READY_PREFIX + 'here'!r}, flush=True); import time; time.sleep(600)"
        return [sys.executable, "-c", sleeper if role == "worker" else "print('no such target'); raise SystemExit(2)"]

    monkeypatch.setattr(clusters.Child, "start", start_and_note)
    monkeypatch.setattr(clusters, "_command", straw)
    pair = Pair("t", (tmp_path / "a", tmp_path / "b"), 8, 64, 100)
    with (
        pytest.raises(StartError, match="no such target"),
        clusters.running(pair, 2, 4, 1, tmp_path, lambda text: None),
    ):
        pytest.fail("it cannot have come up")
    assert len(started) == 5
    assert [process_state(pid) for pid in started] == [""] * 5
    lines = (tmp_path / "workers.txt").read_text("utf-8").splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == [str(tmp_path / "a")] * 2


def result(ok: bool) -> dict[str, Any]:
    none = {"n": 0, "p50": None, "p99": None, "max": None}
    return {
        **dict.fromkeys(COUNTS, 0),
        "ok": ok,
        "kinds": {"kill": {"injected": 1, "verified": 1, "window_s_max": None}},
        "inter_token_ms": {"inside": none, "outside": {"n": 2, "p50": 1.5, "p99": 2.5, "max": 3.5}},
        "respeculate_ms": {"kill": none, "kill_all": none, "takeover": none, "endpoint": {"n": 0, "mean_ms": 0.0}},
        "rss": [],
        "law": {"samples": 0, "p": None},
        "alarm": 0.0,
        "problems": [] if ok else ["hung: greedy-0: never ended"],
    }


@pytest.mark.parametrize("ok", [True, False])
def test_the_command_prints_the_result_and_ends_with_its_verdict(
    ok: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[runs.Options] = []

    def run(options: runs.Options, *_: object) -> dict[str, Any]:
        asked.append(options)
        return result(ok)

    monkeypatch.setattr(runs, "run", run)
    monkeypatch.setattr(roles, "prepare_machine", lambda *_: None)  # only before torch is imported
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    printed = CliRunner().invoke(app, ["chaos", "--json", "--soak", "--report", str(tmp_path)])
    assert (printed.exit_code, json.loads(printed.stdout)["ok"]) == (int(not ok), ok)
    text = CliRunner().invoke(app, ["chaos", "--pair", "tiny", "--minutes", "2", "--scenario", "takeover"])
    assert ("PROBLEM hung: greedy-0: never ended" in text.stdout) == (not ok)
    assert text.stdout.splitlines()[-1] == ("all right" if ok else "NOT all right")
    soak, takeover = asked
    assert (soak.seconds, soak.concurrency, soak.fault_every_s, soak.pair) == (1800.0, 16, 10.0, "embedded")
    assert (takeover.seconds, takeover.concurrency, takeover.program) == (120.0, 8, "takeover")


def test_the_document_names_every_key_and_every_kind() -> None:
    from dspark.chaos.faults import FAULTS

    document = (Path(__file__).parents[2] / "docs" / "internals" / "chaos.md").read_text("utf-8")
    assert [name for name in (*FAULTS, *COUNTS, *result(True)) if f"`{name}`" not in document] == []
