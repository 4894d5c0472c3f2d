"""The command line of wire conformance: which testee, which cases, which reports, which exit code.

The cases and the judging are in `dspark_proto.conformance`, which needs no torch; here are the parts that touch
files and the terminal, and the hook that makes the product's own worker a testee. Called by `cli`, which hands in
the worker class.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from dspark.errors import UserError
from dspark_proto import HelloParameters
from dspark_proto.conformance import (
    Case,
    ExitCode,
    Facts,
    InProcess,
    KnownFailures,
    RemoteDrafter,
    RemoteVerifier,
    Report,
    Role,
    Testee,
    Unreachable,
    all_cases,
    as_html,
    as_junit,
    as_object,
    exit_code,
    facts_from_file,
    merged,
    reach,
    read_known_failures,
    reference_facts,
    run,
    run_self,
    run_selftest,
    select,
    summary,
)
from dspark_proto.conformance.doors import SCHEMES
from dspark_proto.transports import PeerFrame

WORKER_EPOCH = 77
_PEER = b"harness"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """`cases`: ids or families, empty for all. `report`: directory for report.json, report.xml and report.html."""

    cases: tuple[str, ...] = ()
    transports: tuple[str, ...] = ()
    known_failures: Path | None = None
    strict: bool = False
    as_json: bool = False
    report: Path | None = None


Say = Callable[[str], None]


def run_reference(options: RunOptions, say: Say) -> ExitCode:
    """`run --self`: the reference peers on every transport."""
    known, cases = _known(options.known_failures), _chosen(options.cases)
    unknown = [name for name in options.transports if name not in SCHEMES]
    if unknown:
        raise UserError(f"--transport {unknown[0]}: use {', '.join(SCHEMES)}")
    report = run_self(cases, options.transports) if options.transports else run_self(cases)
    return finish(report, known, options, say)


def run_testee(testee: Testee, name: str, options: RunOptions, say: Say) -> ExitCode:
    """Cases of the testee's role; the testee is closed at the end."""
    try:
        known, cases = _known(options.known_failures), _chosen(options.cases, testee.role)
        if testee.role is Role.DRAFTER:
            reach(testee)
        results = run(testee, cases)
    except Unreachable as error:
        say(f"{name}: {error}")
        return ExitCode.UNREACHABLE
    finally:
        testee.close()
    return finish(merged(name, [results], {}), known, options, say)


def _chosen(patterns: tuple[str, ...], role: Role | None = None) -> tuple[Case, ...]:
    """The cases that `patterns` name. Raises `UserError` for a pattern that names none."""
    for pattern in patterns:
        if not select(role, [pattern]):
            whose = "" if role is None else f" for a {role}"
            raise UserError(f"--case {pattern}: no such case{whose} (dspark conformance list shows all)")
    return select(role, patterns)


def remote_drafter(address: str, facts: Path | None) -> Testee:
    """A drafter that listens at `address`; its facts come from a file."""
    if facts is None:
        raise UserError("--facts: a drafter is asked with its own identities: give its facts file (see the guide)")
    try:
        return RemoteDrafter(address, _facts(facts))
    except Unreachable as error:
        raise UserError(f"--drafter {error}") from None


def remote_verifier(listen: str, facts: Path | None, say: Say) -> Testee:
    """A verifier that will connect to `listen`; it tells its identities itself."""
    known = replace(_facts(facts) if facts else reference_facts(), quiet_ms=20)
    try:
        testee = RemoteVerifier(listen, known)
    except (Unreachable, OSError, ValueError) as error:
        raise UserError(f"--listen {listen}: {error}") from None
    say(f"listening at {testee.endpoint}: start the verifier now")
    return testee


def _facts(path: Path) -> Facts:
    try:
        return facts_from_file(path)
    except ValueError as error:
        raise UserError(f"--facts {error}") from None


def _known(path: Path | None) -> KnownFailures | None:
    if path is None:
        return None
    try:
        return read_known_failures(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--known-failures {path}: {error}") from None


def finish(report: Report, known: KnownFailures | None, options: RunOptions, say: Say) -> ExitCode:
    """Print, write the report files, and decide the exit code. A run that could judge nothing has not passed."""
    if options.report is not None:
        options.report.mkdir(parents=True, exist_ok=True)
        files = {"json": json.dumps(as_object(report), indent=1), "xml": as_junit(report), "html": as_html(report)}
        for ending, text in files.items():
            (options.report / f"report.{ending}").write_text(text, "utf-8")
    say(json.dumps(_short(report)) if options.as_json else summary(report))
    return exit_code(report, known, strict=options.strict) if report.results else ExitCode.UNREACHABLE


def _short(report: Report) -> dict[str, Any]:
    found = as_object(report)
    del found["results"]
    return {**found, "failed": sorted({f"{r.case.id} {r.transport}" for r in report.results if not r.good})}


def selftest(cases: tuple[str, ...], *, as_json: bool, say: Say) -> ExitCode:
    """Planted bugs against the cases; see `dspark_proto.conformance.selftest`."""
    found = run_selftest(_chosen(cases))
    killed = len(found.mutants) - len(found.survivors)
    idle, survivors, wrong = (
        [case.id for case in found.idle],
        [mutant.name for mutant in found.survivors],
        [result.case.id for result in found.wrong],
    )
    counts = {
        "cases": len(found.cases),
        "mutants": len(found.mutants),
        "mutants_killed": killed,
        "idle_cases": len(idle),
    }
    if as_json:
        dead = [mutant.name for mutant in found.dead]
        say(json.dumps({**counts, "idle": idle, "survivors": survivors, "dead": dead, "wrong": wrong}))
    else:
        say(f"{len(found.cases)} cases, {killed} of {len(found.mutants)} mutants found")
        lists = {
            "cases that found no mutant": idle,
            "mutants that were not found": survivors,
            "cases that honest peers fail": wrong,
        }
        for name, ids in lists.items():
            say(f"{name}: {' '.join(ids) or 'none'}")
    return ExitCode.PASSED if found.holds else ExitCode.SELF_CHECK_FAILED


def list_cases(patterns: tuple[str, ...], *, as_json: bool, say: Say) -> None:
    """Id, level, role, rule and title of each case."""
    for case in _chosen(patterns):
        if as_json:
            values = (case.id, case.title, case.anchor, case.level.value, case.role.value, case.bug)
            say(json.dumps(dict(zip(("id", "title", "anchor", "level", "role", "bug"), values, strict=True))))
        else:
            say(f"{case.id}  {case.level:<6}  {case.role:<8}  {case.anchor:<10}  {case.title}")


def show(identity: str, say: Say) -> None:
    """What a case checks, and why."""
    found = next((case for case in all_cases() if case.id == identity), None)
    if found is None:
        raise UserError(f"{identity}: no such case (dspark conformance list shows all)")
    say(f"{found.id}: {found.title}\nfor a {found.role.value}, {found.level.value}")
    say(f"{found.anchor}: {found.requirement}\nhunts: {found.bug}")


class WorkerLike(Protocol):
    """What the harness needs of `dspark_workers.worker.Worker`."""

    def receive(self, arrivals: Any, now_ns: int) -> None: ...
    def draft_pending(self) -> None: ...
    def expire(self, now_ns: int) -> None: ...
    def outbox(self) -> Any: ...


class WorkerMachine:
    """The product's worker as a testee of this process."""

    def __init__(self, worker: WorkerLike) -> None:
        self._worker = worker

    def start(self, now_ns: int) -> list[bytes]:
        """A drafter waits."""
        return []

    def receive(self, frame: bytes, now_ns: int) -> list[bytes]:
        """One frame; drafts wait for `expire`."""
        self._worker.receive([PeerFrame(_PEER, memoryview(frame))], now_ns)
        return self._sent()

    def expire(self, now_ns: int) -> list[bytes]:
        """Draft, and let timers run."""
        self._worker.draft_pending()
        self._worker.expire(now_ns)
        return self._sent()

    def held(self) -> dict[str, int]:
        """STATS tells."""
        return {}

    def _sent(self) -> list[bytes]:
        return [bytes(frame) for _, frames in self._worker.outbox() for frame in frames]


def tiny_worker(worker_class: Callable[..., WorkerLike]) -> Testee:
    """`run --worker`: the real worker with a tiny drafter, in this process, on virtual time."""
    from dspark.identity import compatibility
    from dspark.models.drafter import DrafterCheckpoint
    from dspark.models.source import load_embedding, open_target
    from dspark.proof.tiny_pair import write_drafter, write_target

    with tempfile.TemporaryDirectory(prefix="dspark-conformance-") as folder:
        root = Path(folder)
        target = write_target(root / "target", scale=0.04)
        drafter = write_drafter(root / "drafter", target)
        source, checkpoint = open_target(str(target)), DrafterCheckpoint(drafter)
        network = checkpoint.network(load_embedding(source), max_positions=512)
        identity = compatibility(source, source.tokenizer(), drafter, checkpoint.config)
    depth = checkpoint.config.block_size

    def make() -> WorkerMachine:
        parameters = HelloParameters(identity, WORKER_EPOCH, max_slots=4, max_depth=depth, max_in_flight=4)
        return WorkerMachine(worker_class(network, checkpoint.draft_ids, parameters, slots=4, length=512))

    return InProcess(Role.DRAFTER, Facts(identity), make)
