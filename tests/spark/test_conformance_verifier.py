"""The production draft link, driven as the engine drives it, under every case for verifiers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dspark.conformance_verifier import VerifierParts, verifier_peers
from dspark_proto import conformance as harness
from dspark_proto.conformance import Behaviour, CaseResult, Closure, Residue, Role
from dspark_spark.draft_link import DraftLink
from dspark_spark.leases import DraftLease, DraftRequest
from dspark_spark.proposals import Proposal, read_proposal

PARTS = VerifierParts(DraftLink, DraftLease, DraftRequest, read_proposal)


def run(*patterns: str, parts: VerifierParts = PARTS, transport: str = "inproc") -> list[CaseResult]:
    cases = harness.select(Role.VERIFIER, patterns)
    return [r for peer in verifier_peers(parts) for r in peer.run(cases, transport, lambda result: None)]


def failed(results: list[CaseResult]) -> list[str]:
    return [result.case.id for result in results if not result.good]


@pytest.fixture(scope="module")
def results() -> list[CaseResult]:
    return run()


def test_the_link_passes_every_case(results: list[CaseResult]) -> None:
    assert [(r.case.id, r.note, r.expected, r.actual) for r in results if not r.good] == []
    assert {r.case.id for r in results} == {case.id for case in harness.select(Role.VERIFIER)}
    assert {(r.closure, r.residue) for r in results} == {(Closure.CLEAN, Residue.NONE)}


def test_nothing_is_left_out(results: list[CaseResult]) -> None:
    """Dense rows, version 1 and proofs are what the link offers: no case may excuse itself."""
    assert [r.case.id for r in results if r.behaviour is Behaviour.UNSUPPORTED] == []


def test_rows_that_are_no_distribution_end_the_connection_and_nothing_else_does(results: list[CaseResult]) -> None:
    """The link quarantines a worker that lied; that is told, and no fault."""
    told = {r.case.id for r in results if r.behaviour is Behaviour.INFO}
    assert told == {r.case.id for r in results if r.case.anchor == "REQ-ROW-7"}
    assert {r.note for r in results if r.case.id in told} == {"the verifier has left this drafter process"}


def test_the_link_passes_over_a_real_transport() -> None:
    found = run("DSP2-LIV-100", "DSP2-CMP-008", "DSP2-AUT-100", transport="zmq")
    assert failed(found) == []
    assert [(r.case.id, r.transport) for r in found] == [
        ("DSP2-CMP-008", "zmq"),
        ("DSP2-LIV-100", "zmq"),
        ("DSP2-AUT-100", "zmq"),
    ]


def test_what_takes_minutes_or_exact_times_is_left_to_the_run_in_process() -> None:
    (peer, _) = verifier_peers(PARTS)
    everything = peer.cases(harness.all_cases(), "inproc")
    over = peer.cases(harness.all_cases(), "tcp")
    left_out = {case.id for case in everything} - {case.id for case in over}
    losses = {"DSP2-BUF-102", "DSP2-BUF-103", "DSP2-BUF-105"}
    assert left_out == losses | {"DSP2-HEL-137", "DSP2-TMO-104", "DSP2-TMO-107"}


# Planted bugs: the cases must be able to fail on the real link.


def unchecked(event: Any, vocab: int) -> Proposal:
    return Proposal(list(event.tokens), [])


def test_a_verifier_that_does_not_check_rows_is_found() -> None:
    assert failed(run("DSP2-ROW-100", "DSP2-ROW-430", parts=replace(PARTS, read=unchecked))) == [
        "DSP2-ROW-100",
        "DSP2-ROW-430",
    ]


class Leaking:
    """A consumer that keeps what it has read."""

    def __call__(self, event: Any, vocab: int) -> Proposal:
        event.lease.retain()
        return read_proposal(event, vocab)


def test_a_block_that_is_never_released_is_found() -> None:
    assert failed(run("DSP2-BUF-104", parts=replace(PARTS, read=Leaking()))) == ["DSP2-BUF-104"]


def test_a_link_that_does_not_reset_a_lost_generation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftLink, "_renew", lambda self, lease: None)
    assert failed(run("DSP2-TMO-100")) == ["DSP2-TMO-100"]


def test_a_link_that_commits_every_round_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = DraftLink._item

    def committing(self: DraftLink, request: DraftRequest) -> Any:
        item = honest(self, request)
        return replace(item, accepted_count=0) if request.round > 1 else item

    monkeypatch.setattr(DraftLink, "_item", committing)
    assert failed(run("DSP2-CMT-100")) == ["DSP2-CMT-100"]


def test_a_link_that_stays_with_version_1_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = DraftLink._say_hello

    def stubborn(self: DraftLink, now: int) -> None:
        self._version = 1
        honest(self, now)

    monkeypatch.setattr(DraftLink, "_say_hello", stubborn)
    assert failed(run("DSP2-VER-118")) == ["DSP2-VER-118"]


def test_a_link_that_raises_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftLink, "_take", lambda self, event: 1 // 0)
    assert failed(run("DSP2-ROW-300")) == ["DSP2-ROW-300"]
