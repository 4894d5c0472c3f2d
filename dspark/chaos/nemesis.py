"""Carries out a plan: each fault in a thread of its own, inject / verify / heal / verify healed, all of it on record.

Invariants: a fault waits for the links that it needs, and starts only while the run goes on; what was started is healed
before `finish` returns, whatever failed; a step that raises makes the fault unverified and never ends the nemesis.

Called by `run` and `scenarios`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from dspark.chaos.faults import Fault
from dspark.chaos.schedule import Planned


@dataclass(eq=False)
class Injected:
    """What became of a planned fault. Times are monotonic seconds, None for steps that did not come about."""

    planned: Planned
    injected: float | None = None
    verified: float | None = None
    healed: float | None = None
    recovered: float | None = None
    evidence: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None

    @property
    def ok(self) -> bool:
        """Shown to have taken effect, and shown to be healed."""
        return self.problem is None and self.recovered is not None


Observer = Callable[[Injected], None]


class Nemesis:
    """`make` turns a planned fault into one; `on_inject` is called just before a fault, `on_end` after its healing."""

    def __init__(
        self, faults: Sequence[Planned], make: Callable[[Planned], Fault], on_inject: Observer, on_end: Observer
    ) -> None:
        self.injected: list[Injected] = []
        self._make, self._on_inject, self._on_end = make, on_inject, on_end
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(fault,), daemon=True) for fault in faults]

    def start(self) -> None:
        """Begin the plan now."""
        self._started = time.monotonic()
        for thread in self._threads:
            thread.start()

    @property
    def done(self) -> bool:
        """The whole plan was carried out."""
        return not any(thread.is_alive() for thread in self._threads)

    def finish(self) -> None:
        """Start nothing more, and wait until everything is healed."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, planned: Planned) -> None:
        if self._over.wait(max(0.0, self._started + planned.at_s - time.monotonic())):
            return
        fault = self._make(planned)
        with ExitStack() as stack:
            for link in fault.links:
                stack.enter_context(link.lock)
            if self._over.is_set():
                return
            record = Injected(planned)
            self.injected.append(record)
            self._carry_out(fault, record)
            self._on_end(record)

    def _carry_out(self, fault: Fault, record: Injected) -> None:
        self._on_inject(record)
        try:
            fault.prepare()
            record.injected = time.monotonic()
            record.evidence["injected"] = fault.inject()
            record.evidence["verified"] = fault.verify()
            record.verified = time.monotonic()
            self._over.wait(fault.hold_s())
        except Exception as error:  # a missed fault is a finding of the run
            record.problem = f"{type(error).__name__}: {error}"
        try:
            fault.heal()
            record.healed = time.monotonic()
            record.evidence["recovered"] = fault.verify_healed()
            record.recovered = time.monotonic()
        except Exception as error:
            record.problem = f"{record.problem or ''} healing: {type(error).__name__}: {error}".strip()
