"""The command line of wire conformance: which testee, which cases, which reports, which exit code.

The cases and the judging are in `dspark_proto.conformance`, which needs no torch; here are the parts that touch
files and the terminal. Our own peers are testees in `conformance_worker` and `conformance_verifier`. Called by `cli`,
which hands in their classes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dspark.errors import UserError
from dspark_proto.conformance import (
    Case,
    ExitCode,
    Facts,
    KnownFailures,
    Peer,
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
    reference_peers,
    run,
    run_self,
    run_selftest,
    select,
    summary,
)
from dspark_proto.conformance.doors import SCHEMES
from dspark_proto.conformance.report import where


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


def run_own(own: Callable[[], Sequence[Peer]], options: RunOptions, say: Say) -> ExitCode:
    """`run --self`: our worker and our verifier on every transport, and the reference peers in process.

    The reference peers are made of the same core as ours; over a transport they would show nothing that ours do not.
    ``own`` makes our peers, once the options are known to be right.
    """
    known, cases = _known(options.known_failures), _chosen(options.cases)
    transports = _transports(options)
    peers = [*(replace(peer, transports=("inproc",)) for peer in reference_peers()), *own()]
    return finish(run_self(cases, transports, peers=peers, name="own peers"), known, options, say)


def run_peers(own: Callable[[], Sequence[Peer]], role: Role, options: RunOptions, say: Say) -> ExitCode:
    """`run --worker` and `run --verifier`: our peers of one role in process, without a secret and with one."""
    known, cases = _known(options.known_failures), _chosen(options.cases, role)
    results = [peer.run(cases, "inproc", lambda result: None) for peer in own()]
    return finish(merged(f"own {role}", results, {}), known, options, say)


def _transports(options: RunOptions) -> tuple[str, ...]:
    unknown = [name for name in options.transports if name not in SCHEMES]
    if unknown:
        raise UserError(f"--transport {unknown[0]}: use {', '.join(SCHEMES)}")
    return options.transports or SCHEMES


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
    return {**found, "failed": sorted({f"{r.case.id} {where(r)}" for r in report.results if not r.good})}


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
