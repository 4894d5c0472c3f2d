"""Reads a `.dspcap` file, record by record.

Invariants: the file is foreign data; a length is held against its limit and against the bytes that are left before
anything of that size is read. Reading stops at the first record that is not whole: after a kill that is the torn tail,
which is normal, anything else is damage; ``ending`` says which. Called by ``explain``, ``replay`` and the command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from ..checksums import crc32c
from .records import (
    ENTRY_BYTES,
    HEADER_BYTES,
    CaptureError,
    Entry,
    EntryKind,
    read_description,
    read_entry_head,
    read_header,
)


class CaptureReader:
    """An open capture. Iterating yields :class:`Entry` objects once, in the order in which they were written.

    ``ending`` is empty until the end, and then too when the file ends after a whole record. Raises
    :class:`CaptureError` when the file is no capture, ``OSError`` when it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._size = path.stat().st_size
        self._file = path.open("rb")
        self.ending = ""
        try:
            length, crc = read_header(self._file.read(HEADER_BYTES))
            self.description = read_description(self._file.read(length), crc)
        except CaptureError:
            self._file.close()
            raise

    def __iter__(self) -> Iterator[Entry]:
        while not self.ending:
            entry = self._next()
            if entry is None:
                return
            yield entry

    def _next(self) -> Entry | None:
        start = self._file.tell()
        left = self._size - start
        if left < ENTRY_BYTES:
            self.ending = f"a torn record of {left} bytes at offset {start}" if left else ""
            return None
        try:
            head = read_entry_head(self._file.read(ENTRY_BYTES))
        except CaptureError as error:
            self.ending = f"{error} at offset {start}"
            return None
        if head.length > left - ENTRY_BYTES:
            self.ending = f"a torn record of {left} bytes at offset {start}"
            return None
        content = self._file.read(head.length)
        if crc32c(content) != head.content_crc:
            self.ending = f"the content of a record is damaged at offset {start}"
            return None
        return Entry(head.kind, head.direction, head.transport, head.t_ns, head.connection, content)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_frames(path: Path) -> list[Entry]:
    """All frames of a small capture, notes left out. Raises as :class:`CaptureReader`."""
    with CaptureReader(path) as reader:
        return [entry for entry in reader if entry.kind is EntryKind.FRAME]
