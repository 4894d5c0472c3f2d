"""Run a drafter worker as a child process on this machine, and bring it back when it dies.

The child prints one line, `worker ready <endpoint>`, when it listens. Its port is chosen here, before it starts, so
that the verifier can load at the same time, and restarts reuse it, so that the verifier's link finds the new process by
itself.
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


def stop_all(workers: Sequence[LocalWorker]) -> None:
    """Ask all to end, then wait for each: they drain at the same time."""
    for worker in workers:
        worker.ask_to_stop()
    for worker in workers:
        worker.stop()


class LocalWorker:
    """A supervised `dspark worker`. `arguments` are its command-line options without `--listen`; `name` begins the
    lines that it logs.
    """

    def __init__(
        self, arguments: Sequence[str], *, restart: bool, log: Callable[[str], None] = print, name: str = "worker"
    ) -> None:
        self._arguments = list(arguments)
        self._restart = restart
        self._log = log
        self._name = name
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._spawning = threading.Lock()
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._was_ready = False
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
        """Block until the child (the restarted one, after a death) listens. Raises WorkerStartError."""
        until = time.monotonic() + timeout_s
        while not self._ready.wait(0.1):
            process = self._process
            if process is not None and process.poll() is not None and not self._restarts():
                raise self._start_error("ended at start")
            if time.monotonic() > until:
                raise self._start_error(f"was not ready after {timeout_s:.0f} s")

    def _restarts(self) -> bool:
        """A child that has never been ready is not started again: what ended it would end the next one too."""
        return self._restart and self._was_ready

    def _start_error(self, what: str) -> WorkerStartError:
        if self._reader is not None:
            self._reader.join(0.5)  # the last lines say why
        return WorkerStartError(f"the drafter worker {what}:\n" + "\n".join(self._tail[-20:]))

    def stop(self) -> None:
        """Ask the child to end, by its own process id; kill it when it does not."""
        self.ask_to_stop()
        process = self._process
        if process is None or process.poll() is not None:
            return
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def ask_to_stop(self) -> None:
        """Tell the child to end, once, and start it no more; returns at once."""
        with self._spawning:
            asked = self._stopping.is_set()
            self._stopping.set()
        if not asked and self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def _spawn(self) -> None:
        self._ready.clear()
        command = [sys.executable, "-m", "dspark.cli", "worker", "--listen", self.endpoint]
        command += ["--parent-pid", str(os.getpid()), *self._arguments]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), name="worker-output", daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.rstrip()
            if line.startswith(READY_PREFIX):
                self._was_ready = True
                self._ready.set()
            self._tail = [*self._tail[-40:], line]
            self._log(f"[{self._name}] {line}")

    def _watch(self) -> None:
        """Restart the child with a growing pause while it keeps dying."""
        pause = RESTART_FIRST_S
        while not self._stopping.is_set():
            process = self._process
            assert process is not None
            started = time.monotonic()
            code = process.wait()
            if self._stopping.is_set() or not self._restarts():
                return
            pause = RESTART_FIRST_S if time.monotonic() - started > 30 else min(RESTART_MAX_S, pause * 2)
            self._log(f"[{self._name}] ended with code {code}; starting it again in {pause:.1f} s")
            if self._stopping.wait(pause):
                return
            with self._spawning:
                if self._stopping.is_set():
                    return
                self.restarts += 1
                self._spawn()
