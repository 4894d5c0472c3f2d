"""A testee process: started, asked one thing at a time with a deadline, and ended by its own process id.

Invariants: a testee that hangs, floods, dies or talks nonsense costs one request and is started anew for the next; at
most one message, and a bounded tail of stderr, is held of what it sends. Called by ``runner``; judges nothing.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Sequence
from enum import StrEnum
from types import TracebackType
from typing import Final, Self

from .messages import LENGTH_BYTES, Object, PipeError, framed, message_bytes, parsed

UNSUPPORTED_EXIT: Final = 127
_STDERR_TAIL_BYTES: Final = 400
_CHUNK_BYTES: Final = 65536


class Failure(StrEnum):
    """Why a request got no answer."""

    TIMEOUT = "timeout"
    CRASH = "crash"
    UNSUPPORTED = "unsupported"
    NONSENSE = "nonsense"


class TesteeError(Exception):
    """The testee did not answer; ``failure`` says how, the text adds its exit code or last words."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(f"{failure.value}: {detail}")
        self.failure = failure


class PipeProcess:
    """A testee that is started when it is first asked. ``command`` is run without a shell.

    Raises ``OSError`` from ``ask`` when the command cannot be started.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `close`

    def ask(self, request: Object, timeout_s: float) -> Object:
        """The answer to ``request``. Raises :class:`TesteeError`; the process is gone then."""
        until = time.monotonic() + timeout_s
        try:
            process = self._running()
            self._write(process, framed(request), until)
            length = message_bytes(self._read(process, LENGTH_BYTES, until))
            return parsed(self._read(process, length, until))
        except PipeError as error:
            self.stop()
            raise TesteeError(Failure.NONSENSE, str(error)) from error
        except TesteeError:
            self.stop()
            raise

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._stderr.seek(0)
            self._stderr.truncate()
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                bufsize=0,
            )
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
        return self._process

    def _write(self, process: subprocess.Popen[bytes], data: bytes, until: float) -> None:
        assert process.stdin is not None
        rest = memoryview(data)
        while rest:
            self._wait(process, process.stdin.fileno(), selectors.EVENT_WRITE, until)
            try:
                rest = rest[os.write(process.stdin.fileno(), rest) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._died(process) from None

    def _read(self, process: subprocess.Popen[bytes], wanted: int, until: float) -> bytes:
        """Exactly ``wanted`` bytes; they are gathered as they come, not allocated as announced."""
        assert process.stdout is not None
        data = bytearray()
        while len(data) < wanted:
            self._wait(process, process.stdout.fileno(), selectors.EVENT_READ, until)
            chunk = os.read(process.stdout.fileno(), min(_CHUNK_BYTES, wanted - len(data)))
            if not chunk:
                raise self._died(process)
            data += chunk
        return bytes(data)

    @staticmethod
    def _wait(process: subprocess.Popen[bytes], descriptor: int, event: int, until: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, event)
            if not selector.select(max(0.0, until - time.monotonic())):
                raise TesteeError(Failure.TIMEOUT, f"process {process.pid} did not answer in time")

    def _died(self, process: subprocess.Popen[bytes]) -> TesteeError:
        """What a closed pipe means: the exit code, once the process is gone."""
        try:
            code = process.wait(1.0)
        except subprocess.TimeoutExpired:
            return TesteeError(Failure.CRASH, "it closed its pipe")
        if code == UNSUPPORTED_EXIT:
            return TesteeError(Failure.UNSUPPORTED, f"exit code {code}")
        return TesteeError(Failure.CRASH, f"exit code {code}{self._last_words()}")

    def _last_words(self) -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _STDERR_TAIL_BYTES))
        text = self._stderr.read().decode("ascii", "replace").strip()
        return f": {text}" if text else ""

    def stop(self) -> None:
        """End the process, if it runs."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

    def close(self) -> None:
        """End the process and forget its last words."""
        self.stop()
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
