"""A child process with a name, a line that says that it is ready, and a log of what it printed.

Invariants: a child is started in a session of its own, so that an interrupt of the terminal reaches the parent alone;
every signal goes to the process id that `Popen` gave; `stop` ends the child whatever state it is in.

Called by `cluster`, `proxy_handle` and `faults`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dspark.errors import UserError

TAIL_LINES = 30
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


class StartError(UserError):
    """A child ended, or said nothing, before it was ready; the text holds its last lines."""


class Child:
    """One process at a time: after it has ended, `start` starts its successor with the same command."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        ready_prefix: str,
        log: Path,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        """`on_line` gets every line but the ready one; `log` is appended to."""
        self.name, self.command = name, list(command)
        self._prefix, self._log, self._on_line = ready_prefix, log, on_line
        self._ready = threading.Event()
        self._ready_text = ""
        self._tail: list[str] = []
        self._reader: threading.Thread | None = None
        self.process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Spawn; returns at once."""
        self._ready.clear()
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(
            target=self._read, args=(self.process,), name=f"{self.name}-output", daemon=True
        )
        self._reader.start()

    def wait_ready(self, timeout_s: float = 120.0) -> str:
        """What follows the prefix on the ready line. Raises StartError."""
        until = time.monotonic() + timeout_s
        while not self._ready.wait(0.05):
            if self.process is not None and self.process.poll() is not None:
                raise self._start_error("ended at start")
            if time.monotonic() > until:
                raise self._start_error(f"was not ready after {timeout_s:.0f} s")
        return self._ready_text

    def _start_error(self, what: str) -> StartError:
        if self._reader is not None:
            self._reader.join(0.5)  # the last lines say why
        return StartError(f"{self.name} {what}:\n" + "\n".join(self._tail[-TAIL_LINES:]))

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with self._log.open("a", encoding="utf-8") as log:
            for raw in process.stdout:
                line = raw.rstrip()
                if line.startswith(self._prefix):
                    self._ready_text = line.removeprefix(self._prefix)
                    self._ready.set()
                elif self._on_line is not None:
                    self._on_line(line)
                    continue
                log.write(line + "\n")
                log.flush()
                self._tail = [*self._tail[1 - TAIL_LINES :], line]

    def signal(self, number: int) -> None:
        """Send a signal to the process, by its id; harmless when it has ended."""
        if self.process is not None:
            self.process.send_signal(number)

    def ended(self, timeout_s: float) -> int | None:
        """The exit status once the process has ended and was waited for; None when it still runs."""
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, patience_s: float = 10.0) -> None:
        """End it: ask, then kill. A stopped process is continued first, for it would not hear."""
        process = self.process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGCONT)
        process.terminate()
        if self.ended(patience_s) is None:
            process.kill()
            process.wait()


def process_state(pid: int) -> str:
    """Linux's letter for a process: R or S alive, T stopped, Z ended; '' when there is none."""
    fields = _stat_fields(pid)
    return fields[0] if fields else ""


def rss_kib(pid: int) -> int:
    """Resident memory in KiB; 0 when there is no such process."""
    fields = _stat_fields(pid)
    return int(fields[21]) * PAGE_KIB if fields else 0


def _stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (proc(5), field 3)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
