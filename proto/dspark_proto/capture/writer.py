"""Writes a `.dspcap` file while frames pass.

Invariants: the file is new (an existing one is never touched) and readable by its owner only, for frames hold what
people typed; every record is one unbuffered write at the end, so that a kill tears at most the last one; above
``max_bytes`` nothing more is recorded and ``dropped`` counts. One thread owns a writer. Called by ``recording``,
``middle`` and the command line.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from ..buffers import Buffer
from .records import (
    NOTE_BYTES_MAX,
    Description,
    Direction,
    EntryKind,
    TransportKind,
    write_entry,
    write_header,
)

CAPTURE_BYTES_MAX: Final = 2**30
_OWNER_ONLY: Final = 0o600


class CaptureWriter:
    """A new capture at ``path``. ``clock`` gives monotonic nanoseconds; times are relative to the creation.

    Raises ``FileExistsError`` when the file exists, :class:`CaptureError` when ``description`` is too long.
    """

    def __init__(
        self,
        path: Path,
        tool: str = "dspark",
        comment: str = "",
        clock: Callable[[], int] = time.monotonic_ns,
        max_bytes: int = CAPTURE_BYTES_MAX,
    ) -> None:
        header = write_header(Description(start_unix_ns=time.time_ns(), tool=tool, comment=comment))
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, _OWNER_ONLY)
        self._clock, self._start_ns = clock, clock()
        self._room_bytes = max_bytes
        self.entries = 0
        self.dropped = 0
        self._append(header)

    def frame(self, direction: Direction, transport: TransportKind, connection: int, frame: Buffer) -> None:
        """Record ``frame`` as it passed, whether or not it is a valid one."""
        self._record(EntryKind.FRAME, direction, transport, connection, frame)

    def note(self, direction: Direction, transport: TransportKind, connection: int, text: str) -> None:
        """Record a remark, for instance an injected fault, beside the frame that it concerns."""
        content = text.encode("ascii", "replace")[:NOTE_BYTES_MAX]
        self._record(EntryKind.NOTE, direction, transport, connection, content)

    def _record(
        self, kind: EntryKind, direction: Direction, transport: TransportKind, connection: int, content: Buffer
    ) -> None:
        entry = write_entry(kind, direction, transport, self._clock() - self._start_ns, connection, content)
        if len(entry) > self._room_bytes:
            self.dropped += 1
            return
        self._append(entry)
        self.entries += 1

    def _append(self, data: bytes) -> None:
        self._room_bytes -= len(data)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
