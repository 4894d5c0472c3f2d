"""The parent's side of a proxy process: its commands as methods, its counters as values.

Invariants: one command is under way at a time; a proxy that does not answer (it may be stopped) is a `ProxyError` after
`ANSWER_S`, and its late answer is not taken for the next one's. Called by `cluster` and `faults`.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.chaos.processes import Child
from dspark.chaos.proxy import READY_PREFIX

ANSWER_S = 10.0


class ProxyError(RuntimeError):
    """The proxy did not answer."""


class ProxyHandle:
    """A running proxy in front of `worker`; `endpoint` is where verifiers connect to."""

    def __init__(self, name: str, worker: str, seed: int, log: Path) -> None:
        command = [sys.executable, "-m", "dspark.chaos.proxy", "--worker", worker, "--seed", str(seed)]
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._asking = threading.Lock()
        self._asked = 0
        self.child = Child(name, command, READY_PREFIX, log, self._answers.put)
        self.child.start()
        self.endpoint = self.child.wait_ready()

    def switch_on(self, action: str, p: float, **fields: object) -> None:
        """Hurt frames from now on, each with probability `p`; see `capture.faults.Rule` for the fields."""
        self._ask({"do": "rule", "action": action, "p": p, **fields})

    def clear(self) -> None:
        """Pass every frame from now on."""
        self._ask({"do": "clear"})

    def cut(self, how: str) -> None:
        """Reset or half close the connections that are open; see `relay`."""
        self._ask({"do": "cut", "how": how})

    def ask_stats(self) -> None:
        """Ask the worker what it holds for each connection: `reports` and `slots_open` of later counts."""
        self._ask({"do": "ask"})

    def counts(self) -> dict[str, Any]:
        """All counters; see `proxy`."""
        return self._ask({"do": "counts"})

    def _ask(self, command: Mapping[str, object]) -> dict[str, Any]:
        with self._asking:
            process = self.child.process
            assert process is not None
            assert process.stdin is not None
            self._asked += 1
            try:
                process.stdin.write(json.dumps({"id": self._asked, **command}) + "\n")
                process.stdin.flush()
                while (answer := self._next_answer())["id"] != self._asked:
                    pass
            except (OSError, ValueError, queue.Empty) as error:
                raise ProxyError(f"{self.child.name} does not answer {command}: {error!r}") from error
            return answer

    def _next_answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._answers.get(timeout=ANSWER_S))
        return answer
