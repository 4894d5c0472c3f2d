"""A run from its first process to its verdict.

Order: the law of the ratio lane, the processes, the undisturbed text of every case (one request at a time, in the same
processes), then load, faults and samples together; at the end faults are healed, requests waited for, and what is still
held is looked for. An interrupt ends the load early and keeps the summary.

Invariants: what was started is ended, whatever happens; the history is whole at every moment.

Called by `command`.
"""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from dspark.chaos import report as reports
from dspark.chaos.catalogue import Case, Lane, fixed_cases
from dspark.chaos.client import Answer, Client
from dspark.chaos.cluster import Cluster, running
from dspark.chaos.faults import FAULTS, Fault
from dspark.chaos.history import History
from dspark.chaos.judge import Findings, Reference, judge
from dspark.chaos.law import Law, exact_law, judge_law
from dspark.chaos.load import Load
from dspark.chaos.nemesis import Nemesis
from dspark.chaos.pairs import PAIRS
from dspark.chaos.programs import LEAD_S, PROGRAMS, Program
from dspark.chaos.quiesce import leaks
from dspark.chaos.sampler import Sampler
from dspark.chaos.schedule import Planned
from dspark.errors import UserError

Say = Callable[[str], None]
HISTORY, RESULT = "history.ndjson", "result.json"


@dataclass(frozen=True)
class Options:
    """What to run. seconds and fault_every_s hold for the mixed program. deadline_s: of one request, from its start.

    report: directory for history, result and the logs of all processes.
    """

    seconds: float
    seed: int
    concurrency: int
    fault_every_s: float
    pair: str
    workers: int
    report: Path
    deadline_s: float
    program: str = "mixed"


class Interrupt:
    """Set by SIGINT or SIGTERM while the load runs; before and after that they raise KeyboardInterrupt."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.gentle = False

    def ask(self, *_: object) -> None:
        """Signal handler; the second one does not wait."""
        if not self.gentle or self.asked.is_set():
            raise KeyboardInterrupt
        self.asked.set()


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Signals go to the `Interrupt` for the block's duration."""
    interrupt = Interrupt()
    before = {number: signal.signal(number, interrupt.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(options: Options, interrupt: Interrupt, say: Say) -> dict[str, Any]:
    """The result object; it is also in the report directory. Raises UserError when the processes do not come up."""
    options.report.mkdir(parents=True, exist_ok=True)
    program = PROGRAMS[options.program](options.workers, options.seconds, options.fault_every_s, options.seed)
    history = History(options.report / HISTORY)
    with tempfile.TemporaryDirectory(prefix="dspark-chaos-") as directory, closing(history):
        say(f"preparing the {options.pair} pair")
        pair = PAIRS[options.pair](Path(directory))
        law = exact_law(pair.target)
        slots = min(options.concurrency, 16)
        with running(pair, options.workers, slots, options.seed, options.report, say) as cluster:
            values = _Run(options, program, cluster, history, law, say).go(interrupt)
    (options.report / RESULT).write_text(reports.as_json(values) + "\n", "utf-8")
    return values


class _Run:
    """The part of a run that has all processes up."""

    def __init__(
        self, options: Options, program: Program, cluster: Cluster, history: History, law: Law, say: Say
    ) -> None:
        self._options, self._program, self._cluster, self._history = options, program, cluster, history
        self._law, self._say = law, say
        self._cases = fixed_cases(cluster.pair.max_tokens)
        self._model = cluster.view.model()

    def go(self, interrupt: Interrupt) -> dict[str, Any]:
        """Undisturbed texts, chaos, verdict."""
        self._say(f"recording {len(self._cases)} undisturbed texts")
        references = record(self._client(), self._cases)
        for key, reference in references.items():
            self._history.write("reference", case=key, ids=reference.ids, prompt_tokens=reference.prompt_tokens)
        load = Load(
            self._client, self._cases, self._options.concurrency, self._options.seed, self._history.answer,
            self._program.mix,
        )  # fmt: skip
        nemesis = Nemesis(self._program.faults, lambda planned: self._fault(planned, load), self._announce, self._ended)
        sampler = Sampler(self._cluster, self._history)
        before, started = self._cluster.view.metrics(), time.monotonic()
        interrupt.gentle = True
        sampler.start()
        load.start()
        nemesis.start()
        self._wait(interrupt, nemesis)
        self._say("healing what is left, then waiting for the last requests")
        nemesis.finish()
        load.finish(self._options.deadline_s)
        minutes = (time.monotonic() - started) / 60
        held = leaks(self._cluster)
        sampler.finish()
        findings = self._findings(load, nemesis, sampler, references, held)
        after = self._cluster.view.metrics()
        name = "request_respeculate_seconds"
        count, total = (after.total(f"{name}_{part}") - before.total(f"{name}_{part}") for part in ("count", "sum"))
        server = {"n": count, "mean_ms": round(1000 * total / count, 1) if count else 0.0}
        skipped = len(self._program.faults) - len(nemesis.injected)
        facts = {
            **self._facts(),
            "faults_skipped": skipped,
            "minutes": round(minutes, 2),
            "interrupted": interrupt.asked.is_set(),
        }
        return reports.result(findings, judge(findings), facts, server)

    def _client(self) -> Client:
        return Client(self._cluster.view.url, self._model, self._options.deadline_s)

    def _fault(self, planned: Planned, load: Load) -> Fault:
        link = self._cluster.links[planned.link]
        return FAULTS[planned.kind](self._cluster, link, load, Random(planned.draw))

    def _announce(self, fault: Any) -> None:
        planned = fault.planned
        self._history.write("inject", kind=planned.kind, link=planned.link, number=planned.number)

    def _ended(self, fault: Any) -> None:
        self._history.fault(fault)
        planned, state = fault.planned, "verified" if fault.ok else f"NOT verified: {fault.problem}"
        self._say(f"fault {planned.number}: {planned.kind} on link {planned.link}: {state}")

    def _wait(self, interrupt: Interrupt, nemesis: Nemesis) -> None:
        """Until the time is over, or the plan, or somebody interrupts."""
        if self._program.seconds is not None:
            interrupt.asked.wait(self._program.seconds)
            return
        while not nemesis.done and not interrupt.asked.wait(0.2):
            pass
        interrupt.asked.wait(LEAD_S)

    def _findings(
        self, load: Load, nemesis: Nemesis, sampler: Sampler, references: dict[str, Reference], held: Sequence[str]
    ) -> Findings:
        whole = [a for a in load.answers if a.case.lane is Lane.LAW and len(a.ids) == a.case.max_tokens]
        return Findings(
            answers=load.answers,
            references=references,
            deadline_s=self._options.deadline_s,
            faults=nemesis.injected,
            leaks=held,
            memory=sampler.memory.rows(),
            law=judge_law(whole, self._law),
            alarm=sampler.alarm,
        )

    def _facts(self) -> dict[str, object]:
        options = self._options
        return {
            "program": options.program,
            "pair": options.pair,
            "seed": options.seed,
            "workers": options.workers,
            "concurrency": options.concurrency,
            "report": str(options.report),
        }


def record(client: Client, cases: Sequence[Case]) -> dict[str, Reference]:
    """What each case answers when nothing else goes on. Raises UserError when a request fails."""
    references = {}
    for case in cases:
        answer = Answer(case, False, time.monotonic())
        client.ask(case, answer)
        if answer.error is not None or answer.usage is None or not answer.ids:
            raise UserError(f"the undisturbed request {case.key} failed: {answer.error or 'it was empty'}")
        references[case.key] = Reference(tuple(answer.ids), answer.text, answer.usage[0])
    return references
