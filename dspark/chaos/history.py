"""The history of a run: one JSON object a line for every request, fault and sample, in the order in which they ended.

Times are seconds since the history began. Thread-safe; every line is whole, also when the run is interrupted. Called by
`run`; read by people.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from dspark.chaos.client import Answer
from dspark.chaos.nemesis import Injected


class History:
    """Appends to `path`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._lock = threading.Lock()
        self.started = time.monotonic()

    def write(self, event: str, **fields: Any) -> None:
        """One line."""
        line = json.dumps({"at": self.since(time.monotonic()), "event": event, **fields})
        with self._lock:
            if not self._file.closed:
                self._file.write(line + "\n")
                self._file.flush()

    def since(self, at: float | None) -> float | None:
        """Seconds since the start, of a monotonic time."""
        return None if at is None else round(at - self.started, 4)

    def answer(self, answer: Answer) -> None:
        """A request that ended."""
        self.write(
            "request",
            case=answer.case.key,
            seed=answer.case.seed,
            stream=answer.stream,
            started=self.since(answer.started),
            ended=self.since(answer.ended),
            cancelled=answer.cancelled,
            error=answer.error,
            finish_reason=answer.finish_reason,
            usage=answer.usage,
            ids=answer.ids,
            chunks=[(self.since(at), tokens, drafted) for at, tokens, drafted in answer.arrivals],
        )

    def fault(self, fault: Injected) -> None:
        """A fault that was healed, or could not be."""
        times = {name: self.since(getattr(fault, name)) for name in ("injected", "verified", "healed", "recovered")}
        planned = fault.planned
        self.write(
            "fault", kind=planned.kind, link=planned.link, planned=planned.at_s, **times, ok=fault.ok,
            problem=fault.problem, evidence=fault.evidence,
        )  # fmt: skip

    def close(self) -> None:
        """End the file; what is written later is ignored."""
        with self._lock:
            self._file.close()
