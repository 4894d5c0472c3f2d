"""The workers file: which workers a pool is to use, in a text file that may be edited while it runs.

    # comments and empty lines are skipped
    tcp://10.0.0.7:7777
    tcp://10.0.0.8:7777 checkpoints/v2

One worker a line: its address, and the drafter directory that it serves when that is not the one of
`--speculative-config`; a relative directory is relative to the file. The file is looked at once a second, and a change
counts when two looks in a row find it: an editor may truncate a file before it writes it. What it says holds as a whole
or not at all: a file that cannot be used changes nothing, and is reported once.

Called by `build` (first reading) and, in a thread of its own, by `WorkersWatch`. It never touches the pool but through
`apply`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark.errors import UserError

PERIOD_S = 1.0
BYTES_MAX = 65536
WORKERS_MAX = 64


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """A worker's address, and its drafter directory, None for the configured one."""

    address: str
    drafter: Path | None = None


def read(path: Path) -> bytes:
    """The file's bytes. Raises UserError when it cannot be read or is too large."""
    try:
        with path.open("rb") as file:
            raw = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise UserError(f"--workers-file {path}: {error.strerror}: write one worker address a line into it") from None
    if len(raw) > BYTES_MAX:
        raise UserError(f"--workers-file {path}: more than {BYTES_MAX} bytes: write one worker address a line into it")
    return raw


def parse(raw: bytes, path: Path) -> tuple[WorkerLine, ...]:
    """The workers of a file, in order. Raises UserError that names the line and the remedy."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--workers-file {path}: byte {error.start} is no UTF-8: save it as a text file") from None
    found: dict[str, WorkerLine] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split(maxsplit=1)
        if not words:
            continue
        where = f"--workers-file {path}: line {number}"
        address = words[0]
        if "://" not in address:
            raise UserError(f"{where}: {address!r} is no address: write tcp://HOST:PORT [DRAFTER_DIRECTORY]")
        if address in found:
            raise UserError(f"{where}: {address} is there twice: keep one of the lines")
        drafter = path.parent / Path(words[1].strip()).expanduser() if len(words) > 1 else None
        found[address] = WorkerLine(address, drafter)
    if len(found) > WORKERS_MAX:
        raise UserError(f"--workers-file {path}: {len(found)} workers: name at most {WORKERS_MAX}")
    return tuple(found.values())


class WorkersWatch:
    """Looks at the file again and again; `apply` gets what it says when it has changed, `report` what is wrong with it.

    apply: may raise UserError, and then has changed nothing. report: gets a text, or None when all is well again.
    """

    def __init__(
        self,
        path: Path,
        seen: bytes,
        apply: Callable[[Sequence[WorkerLine]], None],
        report: Callable[[str | None], None],
        period_s: float = PERIOD_S,
    ) -> None:
        """`seen`: what the file held when it was read first."""
        self._path, self._apply, self._report = path, apply, report
        self._seen: bytes | str = seen
        self._found: bytes | str = seen
        self._period_s = period_s
        self._trouble: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look every `period_s` seconds, in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="workers-file", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Safe to call twice, and on a watch that was never started."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(10)

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self.look()

    def look(self) -> None:
        """Read the file; what two looks in a row have found is applied, or reported, once."""
        try:
            found: bytes | str = read(self._path)
        except UserError as error:
            found = str(error)
        if found != self._found:
            self._found = found  # perhaps half written
        elif found != self._seen:
            self._seen = found
            self._take(found)

    def _take(self, found: bytes | str) -> None:
        try:
            if isinstance(found, str):
                raise UserError(found)
            self._apply(parse(found, self._path))
        except UserError as error:
            self._tell(str(error))
        else:
            self._tell(None)

    def _tell(self, trouble: str | None) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            self._report(trouble)
