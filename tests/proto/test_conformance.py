"""The harness on its own peers: honest ones pass every case, faulty ones are found, and every rule it cites exists.

The whole gallery is run by `dspark conformance selftest`; here are all decoders, and one case for each of some peers.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from dspark_proto.conformance import Behaviour, Closure, Residue, Role, all_cases, finds, gallery, run_self, select
from dspark_proto.conformance.examples import examples
from dspark_proto.conformance.facts import reference_facts
from dspark_proto.conformance.record import Case, Level, Script
from dspark_proto.conformance.requirements import REQUIREMENTS
from dspark_proto.conformance.runner import run_case
from dspark_proto.conformance.selftest import reference_results, run_selftest
from dspark_proto.conformance.testees import InProcess
from dspark_proto.conformance.verdicts import Unmet
from dspark_proto.registry import MessageType

SPEC = (Path(__file__).resolve().parents[2] / "proto" / "SPEC.md").read_text("utf-8")
MUTANTS = {mutant.name: mutant for mutant in gallery()}
CASES = {case.id: case for case in all_cases()}


def test_honest_peers_pass_every_case() -> None:
    results = reference_results(all_cases())
    assert [(r.case.id, r.behaviour, r.note) for r in results if r.behaviour is not Behaviour.PASS or not r.good] == []
    network = [r for r in results if r.case.role is not Role.CODEC]
    assert {(r.closure, r.residue) for r in network} == {(Closure.CLEAN, Residue.NONE)}
    assert len(results) == len(all_cases()) >= 250


def test_every_rule_that_a_case_cites_stands_in_the_standard() -> None:
    anchors = set(re.findall(r"\{#(REQ-[A-Z]+-\d+)\}", SPEC))
    assert set(REQUIREMENTS) <= anchors
    assert {case.anchor for case in all_cases()} <= anchors


def test_the_families_and_levels_are_all_there() -> None:
    families = Counter((case.family, case.role) for case in all_cases())
    for name in ("PFX", "HEL", "STP", "ROW", "CMT", "GEN", "TMO", "VER", "TRN"):
        assert {(name, Role.DRAFTER), (name, Role.VERIFIER)} <= set(families), name
    others = {("CAN", Role.CODEC), ("BUF", Role.VERIFIER), ("CMP", Role.VERIFIER), ("SEC", Role.DRAFTER)}
    assert others | {("RNG", Role.DRAFTER), ("AUT", Role.DRAFTER)} <= set(families)
    assert {case.level for case in all_cases()} >= {Level.MUST, Level.SHOULD}
    assert all(case.bug and case.title for case in all_cases())


def test_examples_cover_every_message_type() -> None:
    assert {message.TYPE for message, _, _ in examples().values()} == set(MessageType)


def test_cases_are_chosen_by_family_and_pattern() -> None:
    assert {case.family for case in select(patterns=["ROW"])} == {"ROW"}
    assert [case.id for case in select(patterns=["DSP2-LIV-00[12]"])] == ["DSP2-LIV-001", "DSP2-LIV-002"]
    assert not set(select(Role.VERIFIER)) & set(select(Role.DRAFTER))
    assert len(select(exclude=["ROW"])) == len(all_cases()) - len(select(patterns=["ROW"]))


def test_every_faulty_decoder_is_found_and_no_decoder_case_is_idle() -> None:
    found = run_selftest(select(Role.CODEC), [mutant for mutant in gallery() if mutant.role is Role.CODEC])
    assert [mutant.name for mutant in found.survivors] == []
    assert [case.id for case in found.idle] == []
    assert found.holds


PAIRS = (
    ("drafter-no-prefix-crc", "DSP2-PFX-113"),
    ("drafter-padding", "DSP2-PFX-122"),
    ("drafter-any-compat", "DSP2-HEL-011"),
    ("drafter-wrong-nonce", "DSP2-LIV-001"),
    ("drafter-error-for-error", "DSP2-LIV-011"),
    ("drafter-redraws", "DSP2-STP-021"),
    ("drafter-leaks", "DSP2-GEN-016"),
    ("drafter-any-generation", "DSP2-GEN-014"),
    ("drafter-row-not-dyadic", "DSP2-ROW-001"),
    ("drafter-no-digest", "DSP2-CTX-020"),
    ("drafter-draws-by-slot", "DSP2-RNG-001"),
    ("drafter-completion-first", "DSP2-STP-001"),
    ("drafter-third-position", "DSP2-CMT-001"),
    ("drafter-dormant-close", "DSP2-GEN-011"),
    ("drafter-one-seal", "DSP2-AUT-001"),
    ("drafter-optional-proof", "DSP2-AUT-002"),
    ("drafter-generation-wraps", "DSP2-GEN-019"),
    ("drafter-half-proof", "DSP2-AUT-004"),
    ("drafter-keeps-challenge", "DSP2-AUT-005"),
    ("drafter-own-proof", "DSP2-AUT-007"),
    ("drafter-any-hello", "DSP2-AUT-008"),
    ("verifier-any-row", "DSP2-ROW-100"),
    ("verifier-no-row-crc", "DSP2-ROW-207"),
    ("verifier-no-reply-checksum", "DSP2-CMP-008"),
    ("verifier-by-slot", "DSP2-GEN-106"),
    ("verifier-leaks-refused", "DSP2-BUF-100"),
    ("verifier-no-deadlines", "DSP2-TMO-100"),
    ("verifier-believing", "DSP2-HEL-112"),
    ("verifier-old-generations", "DSP2-GEN-107"),
    ("verifier-more-credit", "DSP2-CTX-100"),
    ("verifier-impatient", "DSP2-STP-101"),
    ("verifier-by-session", "DSP2-GEN-105"),
    ("verifier-by-arrival", "DSP2-TRN-101"),
    ("verifier-more-rounds", "DSP2-HEL-105"),
)


@pytest.mark.parametrize(("mutant", "case"), PAIRS)
def test_a_planted_bug_is_found(mutant: str, case: str) -> None:
    assert finds(CASES[case], MUTANTS[mutant])


def test_a_case_is_vouched_for_by_a_specific_mutant_only() -> None:
    (case,) = select(patterns=["DSP2-LIV-001"])
    dead, specific = MUTANTS["drafter-pong-epoch"], MUTANTS["drafter-small-nonce"]
    found = run_selftest([case], [dead])
    assert (found.idle, found.survivors, found.dead) == ((case,), (), (dead,))
    assert not found.holds
    found = run_selftest([case], [dead, specific])
    assert (found.idle, found.survivors) == ((), ())
    assert found.holds


def test_a_testee_without_a_secret_is_not_judged_by_the_cases_of_it() -> None:
    testee = InProcess(Role.DRAFTER, reference_facts(), MUTANTS["drafter-leaks"].machine)
    results = [run_case(testee, case) for case in select(patterns=["AUT"])]
    assert {result.behaviour for result in results} == {Behaviour.UNSUPPORTED}
    assert finds(CASES["DSP2-AUT-003"], MUTANTS["drafter-leaks"]) is False


OVER_A_TRANSPORT = (
    "HEL-001",
    "AUT-001",
    "AUT-005",
    "STP-021",
    "CMT-003",
    "LIV-001",
    "TRN-001",
    "ROW-300",
    "ROW-100",
    "GEN-106",
    "LIV-100",
)


@pytest.mark.parametrize("transport", ["zmq", "tcp"])
def test_cases_run_over_real_transports(transport: str) -> None:
    report = run_self([CASES[f"DSP2-{name}"] for name in OVER_A_TRANSPORT], [transport])
    assert report.unavailable == {}
    assert [(r.case.id, r.behaviour, r.closure, r.note) for r in report.results if not r.good] == []
    assert report.transports == (transport,)


def test_an_unknown_transport_is_reported_and_not_replaced() -> None:
    report = run_self(select(patterns=["DSP2-LIV-001"]), ["inproc", "carrier-pigeon"])
    assert report.unavailable == {"carrier-pigeon": "unknown"}
    assert report.transports == ("inproc",)


def scripted(script: Script) -> Case:
    return Case("DSP2-TST-001", "a test", "REQ-PNG-1", Level.MUST, Role.DRAFTER, "none", script)


def test_a_bug_of_the_harness_is_an_error_and_not_a_verdict_on_the_testee() -> None:
    testee = InProcess(Role.DRAFTER, reference_facts(), MUTANTS["drafter-no-commit"].machine)

    def broken(t: object) -> None:
        raise KeyError("planted")

    assert run_case(testee, scripted(broken)).behaviour is Behaviour.ERROR


def test_what_a_testee_left_behind_is_residue() -> None:
    testee = InProcess(Role.DRAFTER, reference_facts(), MUTANTS["drafter-leaks"].machine)
    result = run_case(testee, scripted(lambda t: (t.hello(), t.open(), t.round())))
    assert result.behaviour is Behaviour.PASS
    assert result.residue is Residue.LEAKED
    assert not result.good


def test_a_dead_testee_is_hung() -> None:
    testee = InProcess(Role.DRAFTER, reference_facts(), MUTANTS["drafter-dies-short"].machine)
    result = run_case(testee, scripted(lambda t: (t.hello(), t.send(b"short"))))
    assert result.closure is Closure.HUNG
    assert result.must_failed


def test_a_failure_names_what_was_expected() -> None:
    def picky(t: object) -> None:
        raise Unmet("this", "that", b"\x01", b"\x02")

    result = run_case(InProcess(Role.DRAFTER, reference_facts(), MUTANTS["drafter-no-commit"].machine), scripted(picky))
    assert (result.expected, result.actual) == ("this", "that")
    assert (result.expected_frame, result.actual_frame) == (b"\x01", b"\x02")
