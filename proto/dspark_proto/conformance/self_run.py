"""`run --self`: the reference peers, in process and over every transport that is available here.

Called by the command line and by tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from .as_codec import ReferenceCodec
from .catalogue import all_cases
from .doors import SCHEMES, unavailable
from .facts import REFERENCE_SECRET, reference_facts
from .record import Case, Role
from .runner import Report, merged, run, run_codec
from .selftest import reference_factory
from .testees import InProcess, Served, Testee
from .verdicts import CaseResult

QUIET_MS = 10
"""How long the harness listens after a PONG on a real transport."""

PEERS = ((Role.DRAFTER, b""), (Role.DRAFTER, REFERENCE_SECRET), (Role.VERIFIER, b""))
"""Role and secret of each peer; the cases of AUT are for the one with a secret."""


def run_self(
    cases: Iterable[Case] | None = None,
    transports: Iterable[str] = SCHEMES,
    on_result: Callable[[CaseResult], None] = lambda result: None,
) -> Report:
    """All reference peers on all ``transports``; cases with the tag ``slow`` run in process only."""
    chosen = list(all_cases() if cases is None else cases)
    parts = [run_codec(ReferenceCodec(), chosen)]
    missing: dict[str, str] = {}
    for transport in transports:
        reason = unavailable(transport)
        if reason:
            missing[transport] = reason
            continue
        quick = [case for case in chosen if transport == "inproc" or "slow" not in case.tags]
        for role, secret in PEERS:
            mine = [case for case in quick if case.role is role and case.needs_secret == bool(secret)]
            parts.append(_run_role(transport, role, secret, mine, on_result))
    return merged("reference peers", parts, missing)


def _run_role(
    transport: str, role: Role, secret: bytes, cases: list[Case], on_result: Callable[[CaseResult], None]
) -> list[CaseResult]:
    if not cases:
        return []
    testee = _testee(transport, role, secret)
    try:
        return run(testee, cases, on_result)
    finally:
        testee.close()


def _testee(transport: str, role: Role, secret: bytes) -> Testee:
    facts = reference_facts(secret)
    make = reference_factory(role, facts)
    if transport == "inproc":
        return InProcess(role, facts, make)
    return Served(transport, role, replace(facts, quiet_ms=QUIET_MS), make)
