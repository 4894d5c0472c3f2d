"""Children: ready lines, deaths, stopped processes; and the endings that must come whatever state a child is in."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from dspark.chaos.processes import Child, StartError, process_state, rss_kib
from tests.e2e.test_faults import wait_until

SLEEPER = "print('hello'); print('ready now', flush=True); import time; time.sleep(600)"


def child(tmp_path: Path, code: str = SLEEPER) -> Child:
    return Child("straw", [sys.executable, "-c", code], "ready ", tmp_path / "straw.log")


def test_a_child_says_when_it_is_ready_and_its_successor_does_so_again(tmp_path: Path) -> None:
    straw = child(tmp_path)
    straw.start()
    try:
        assert straw.wait_ready(20) == "now"
        first = straw.pid
        assert process_state(first) in ("S", "R")
        assert rss_kib(first) > 1000
        assert os.getsid(first) == first  # an interrupt of the terminal does not reach it
        assert straw.ended(0) is None
        straw.signal(signal.SIGKILL)
        assert straw.ended(20) == -signal.SIGKILL
        assert (process_state(first), rss_kib(first)) == ("", 0)
        straw.start()
        assert straw.wait_ready(20) == "now"
        assert straw.pid != first
    finally:
        straw.stop()
    assert straw.ended(0) == -signal.SIGTERM
    assert (tmp_path / "straw.log").read_text("utf-8") == "hello\nready now\n" * 2


def test_a_child_that_ends_at_start_is_reported_with_its_last_words(tmp_path: Path) -> None:
    straw = child(tmp_path, "print('no such model'); raise SystemExit(2)")
    straw.start()
    with pytest.raises(StartError, match=r"(?s)straw ended at start.*no such model"):
        straw.wait_ready(20)
    straw.stop()


def test_stopped_and_deaf_children_are_ended_too(tmp_path: Path) -> None:
    straw = child(tmp_path)
    straw.start()
    straw.wait_ready(20)
    straw.signal(signal.SIGSTOP)
    wait_until(lambda: process_state(straw.pid) == "T", 10)
    straw.stop()
    assert straw.ended(0) == -signal.SIGTERM
    deaf = child(tmp_path, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + SLEEPER)
    deaf.start()
    deaf.wait_ready(20)
    deaf.stop(patience_s=0.1)
    assert deaf.ended(0) == -signal.SIGKILL
