"""How a role is placed on a machine: threads, waits, dtype; and when that may be decided."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark import placement

CPU_QUOTA = placement.cpu_quota
CORES = len(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def no_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine's container allows."""
    monkeypatch.setattr(placement, "cpu_quota", lambda: None)


@pytest.mark.parametrize(
    ("argument", "environment", "threads"),
    [
        (3, {}, 3),
        (3, {"OMP_NUM_THREADS": "7"}, 3),  # what the user typed wins
        (None, {"OMP_NUM_THREADS": "7"}, 7),
        (None, {"OMP_NUM_THREADS": "0"}, min(16, CORES)),
        (None, {"OMP_NUM_THREADS": "many"}, min(16, CORES)),
        (None, {}, min(16, CORES)),
    ],
)
def test_threads(argument: int | None, environment: dict[str, str], threads: int) -> None:
    chosen = placement.choose(argument, environment)
    assert chosen.threads == threads
    assert len(chosen.cores) == CORES


def test_big_machines_do_not_get_a_thread_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(96)))
    assert placement.choose(None, {}).threads == 16


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000\n", None), ("150000 100000\n", 1), ("400000 100000\n", 4), ("5000 100000\n", 1), ("odd", None)],
)
def test_the_quota_of_a_container(text: str, cores: int | None, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert CPU_QUOTA(tmp_path / "cpu.max") == cores
    assert CPU_QUOTA(tmp_path / "absent") is None


def test_a_quota_limits_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    monkeypatch.setattr(placement, "cpu_quota", lambda: 3)
    assert placement.choose(None, {}).threads == 3
    assert placement.choose(5, {}).threads == 5


def test_roles_wait_passively() -> None:
    environment = placement.Placement(2, (0, 1)).environment()
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["OMP_NUM_THREADS"] == "2"


def test_prepare_after_torch_is_refused() -> None:
    import torch  # noqa: F401

    with pytest.raises(RuntimeError, match="after torch was imported"):
        placement.prepare(placement.choose())


def test_prepare_reaches_torch() -> None:
    code = (
        "from dspark import placement; placement.prepare(placement.Placement(1, (0,)));"
        "import torch; print(torch.get_num_threads())"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "1"


def test_dtype_follows_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, expected in ((frozenset({"avx2"}), "fp32"), (frozenset({"avx512_bf16"}), "bf16")):
        monkeypatch.setattr(placement, "cpu_flags", lambda flags=flags: flags)
        assert placement.choose_dtype("auto", "cpu") == expected
        assert placement.choose_dtype("auto", "cuda:0") == "bf16"
        assert placement.choose_dtype("fp32", "cuda") == "fp32"
