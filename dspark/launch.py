"""Run a drafter worker as a child process on this machine, and bring it back when it dies.

The child prints one line, `worker ready <endpoint>`, when it listens. Its port is chosen here, before it starts, so that
the verifier can load at the same time, and restarts reuse it, so that the verifier's link finds the new process by itself.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from dspark.errors import UserError

READY_PREFIX = "worker ready "
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0
RESTART_FIRST_S, RESTART_MAX_S = 0.5, 10.0


class WorkerStartError(UserError):
    """The worker ended, or said nothing, before it was ready; the text holds its last output."""


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class LocalWorker:
    """A supervised `dspark worker`. `arguments` are its command-line options without `--listen`."""

    def __init__(self, arguments: Sequence[str], *, restart: bool, log: Callable[[str], None] = print) -> None:
        self._arguments = list(arguments)
        self._restart = restart
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._tail: list[str] = []
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.restarts = 0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Spawn the child; returns at once (see `wait_ready`)."""
        self._spawn()
        threading.Thread(target=self._watch, name="worker-supervisor", daemon=True).start()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Block until the child listens. Raises WorkerStartError."""
        until = time.monotonic() + timeout_s
        while not self._ready.wait(0.1):
            process = self._process
            if process is not None and process.poll() is not None and not self._restart:
                raise WorkerStartError("the drafter worker ended at start:\n" + "\n".join(self._tail[-20:]))
            if time.monotonic() > until:
                raise WorkerStartError(
                    f"the drafter worker was not ready after {timeout_s:.0f} s:\n" + "\n".join(self._tail[-20:])
                )

    def stop(self) -> None:
        """Ask the child to end, by its own process id; kill it when it does not."""
        self._stopping.set()
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _spawn(self) -> None:
        command = [sys.executable, "-m", "dspark.cli", "worker", "--listen", self.endpoint]
        command += ["--parent-pid", str(os.getpid()), *self._arguments]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        threading.Thread(target=self._read, args=(self._process,), name="worker-output", daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.rstrip()
            if line.startswith(READY_PREFIX):
                self._ready.set()
            self._tail = [*self._tail[-40:], line]
            self._log(f"[worker] {line}")

    def _watch(self) -> None:
        """Restart the child with a growing pause while it keeps dying."""
        pause = RESTART_FIRST_S
        while not self._stopping.is_set():
            process = self._process
            assert process is not None
            started = time.monotonic()
            code = process.wait()
            if self._stopping.is_set() or not self._restart:
                return
            pause = RESTART_FIRST_S if time.monotonic() - started > 30 else min(RESTART_MAX_S, pause * 2)
            self._log(f"[worker] ended with code {code}; starting it again in {pause:.1f} s")
            if self._stopping.wait(pause):
                return
            self.restarts += 1
            self._spawn()
