"""The harness on its own peers: honest ones pass every case, faulty ones are found, and every rule it cites exists.

The whole gallery is run by `dspark conformance selftest`; here are all decoders, and one case for each of some peers.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dspark_proto import ErrorCode, ProposalReady, Scope
from dspark_proto.codec_pipe.dyadic import row_fault
from dspark_proto.conformance import (
    Behaviour,
    Closure,
    CodecAnswer,
    ReferenceCodec,
    Residue,
    Role,
    Unreachable,
    all_cases,
    finds,
    gallery,
    reference_peers,
    run,
    run_codec,
    run_self,
    select,
)
from dspark_proto.conformance.examples import examples
from dspark_proto.conformance.facts import reference_facts, verifier_parameters
from dspark_proto.conformance.filters import counted_as, fields, on
from dspark_proto.conformance.mutants import Filter, Shell
from dspark_proto.conformance.record import Case, Level, Script
from dspark_proto.conformance.reference_verifier import ReferenceVerifier
from dspark_proto.conformance.requirements import REQUIREMENTS
from dspark_proto.conformance.runner import run_case
from dspark_proto.conformance.selftest import reference_factory, reference_results, run_selftest
from dspark_proto.conformance.testees import InProcess
from dspark_proto.conformance.verdicts import Unmet
from dspark_proto.messages import ErrorMessage
from dspark_proto.registry import MessageType

SPEC = (Path(__file__).resolve().parents[2] / "proto" / "SPEC.md").read_text("utf-8")
MUTANTS = {mutant.name: mutant for mutant in gallery()}
CASES = {case.id: case for case in all_cases()}


def test_honest_peers_pass_every_case() -> None:
    results = reference_results(all_cases())
    assert [(r.case.id, r.behaviour, r.note) for r in results if r.behaviour is not Behaviour.PASS or not r.good] == []
    network = [r for r in results if r.case.role is not Role.CODEC]
    assert {(r.closure, r.residue) for r in network} == {
        (Closure.CLEAN, Residue.NONE),
        (Closure.RIGHT_CODE, Residue.NONE),
    }
    assert len(results) == len(all_cases()) >= 250


def test_every_rule_that_a_case_cites_stands_in_the_standard() -> None:
    anchors = set(re.findall(r"\{#(REQ-[A-Z]+-\d+)\}", SPEC))
    assert set(REQUIREMENTS) <= anchors
    assert {case.anchor for case in all_cases()} <= anchors


def test_the_families_and_levels_are_all_there() -> None:
    families = Counter((case.family, case.role) for case in all_cases())
    for name in ("PFX", "HEL", "STP", "ROW", "CMT", "GEN", "TMO", "VER", "TRN"):
        assert {(name, Role.DRAFTER), (name, Role.VERIFIER)} <= set(families), name
    others = {("CAN", Role.CODEC), ("BUF", Role.VERIFIER), ("CMP", Role.VERIFIER), ("TPR", Role.VERIFIER)}
    assert others | {
        ("SEC", Role.DRAFTER),
        ("RNG", Role.DRAFTER),
        ("AUT", Role.DRAFTER),
        ("AUT", Role.VERIFIER),
    } <= set(families)
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
    ("verifier-half-seal", "DSP2-AUT-104"),
    ("verifier-own-seal", "DSP2-AUT-105"),
    ("verifier-open-terms", "DSP2-AUT-106"),
    ("verifier-unchallenged", "DSP2-AUT-109"),
    ("verifier-old-seal", "DSP2-AUT-110"),
    ("verifier-answers-twice", "DSP2-AUT-112"),
    ("verifier-answers-anyway", "DSP2-AUT-120"),
    ("verifier-any-version", "DSP2-VER-116"),
    ("verifier-v1-for-ever", "DSP2-VER-118"),
    ("verifier-v1-eager", "DSP2-VER-119"),
    ("verifier-v1-sampled", "DSP2-VER-111"),
    ("verifier-dense-in-one", "DSP2-ROW-401"),
    ("verifier-refunds", "DSP2-CTX-104"),
    ("verifier-credit-early", "DSP2-CTX-110"),
    ("verifier-completes", "DSP2-CMT-103"),
    ("verifier-last-wins", "DSP2-CMT-111"),
    ("verifier-errors-by-session", "DSP2-STP-107"),
    ("verifier-one-deadline", "DSP2-STP-109"),
    ("verifier-begins-again", "DSP2-TRN-105"),
    ("verifier-rounds-modulo-4", "DSP2-TRN-109"),
    ("verifier-pongs-only", "DSP2-TMO-106"),
    ("verifier-each-commits", "DSP2-TPR-102"),
    ("verifier-each-resets", "DSP2-TPR-103"),
    ("drafter-refused-credit", "DSP2-CTX-014"),
    ("drafter-junk-lives", "DSP2-TMO-006"),
    ("drafter-ends-all", "DSP2-TMO-011"),
    ("drafter-offered-interval", "DSP2-TMO-013"),
    ("drafter-v1-by-compat", "DSP2-VER-015"),
    ("drafter-v1-redraws", "DSP2-VER-017"),
    ("drafter-v1-for-ever", "DSP2-VER-021"),
    ("drafter-one-version", "DSP2-VER-023"),
    ("drafter-dense-sum", "DSP2-ROW-020"),
    ("drafter-dense-named", "DSP2-ROW-025"),
    ("drafter-dense-unasked", "DSP2-OPN-020"),
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


def test_a_drafter_is_judged_by_the_versions_that_it_says_it_speaks() -> None:
    new = replace(reference_facts(), version_1=False)
    old = [case for case in select(Role.DRAFTER, ["VER"]) if 10 <= int(case.id[-3:]) < 25]
    testee = InProcess(Role.DRAFTER, new, reference_factory(Role.DRAFTER, new))
    assert {run_case(testee, case).behaviour for case in old} == {Behaviour.UNSUPPORTED}
    assert run_case(testee, CASES["DSP2-VER-001"]).good
    silent = InProcess(Role.DRAFTER, new, reference_factory(Role.DRAFTER, reference_facts()))
    result = run_case(silent, CASES["DSP2-VER-001"])
    assert (result.closure, result.expected, result.actual) == (
        Closure.WRONG_CODE,
        "REJECT BAD_VERSION",
        "REJECT INCOMPATIBLE",
    )


def test_a_testee_without_a_secret_is_not_judged_by_the_cases_of_it() -> None:
    testee = InProcess(Role.DRAFTER, reference_facts(), MUTANTS["drafter-leaks"].machine)
    results = [run_case(testee, case) for case in select(Role.DRAFTER, ["AUT"])]
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


def answering(change: Filter) -> InProcess:
    """A reference drafter whose answers pass a filter."""
    facts = reference_facts()
    make = reference_factory(Role.DRAFTER, facts)
    return InProcess(Role.DRAFTER, facts, lambda: Shell(make(), outgoing=change))


def test_a_refusal_with_the_right_code_is_told_from_one_with_another() -> None:
    case = CASES["DSP2-CTX-003"]
    assert run_case(answering(lambda shell, raw: [raw]), case).closure is Closure.RIGHT_CODE
    other = run_case(answering(counted_as(ErrorCode.CONTEXT_GAP, ErrorCode.ANCHOR_MISMATCH)), case)
    assert (other.behaviour, other.closure, other.must_failed) == (Behaviour.PASS, Closure.WRONG_CODE, True)
    assert (other.expected, other.actual) == ("ERROR CONTEXT_GAP", "ERROR ANCHOR_MISMATCH")
    silent = run_case(answering(on(ErrorMessage, lambda shell, frame: [])), case)
    assert silent.behaviour is not Behaviour.PASS


@pytest.mark.parametrize("name", ["DSP2-PFX-003", "DSP2-CAN-020"])
def test_a_decoder_that_refuses_with_another_code_is_told_from_one_that_accepts(name: str) -> None:
    class Other(ReferenceCodec):
        def decode(self, frame: bytes) -> CodecAnswer:
            answer = super().decode(frame)
            return answer if answer.code is None else CodecAnswer(ErrorCode.DRAINING)

    class Blind(ReferenceCodec):
        def decode(self, frame: bytes) -> CodecAnswer:
            return CodecAnswer(None, frame)

    verdicts = [
        (result.behaviour, result.closure)
        for codec in (ReferenceCodec(), Other(), Blind())
        for result in run_codec(codec, [CASES[name]])
    ]
    assert verdicts == [
        (Behaviour.PASS, Closure.RIGHT_CODE),
        (Behaviour.PASS, Closure.WRONG_CODE),
        (Behaviour.FAIL, Closure.NOT_JUDGED),
    ]


def test_an_error_of_a_wider_scope_than_needed_is_tolerated_and_told() -> None:
    wider = fields(ErrorMessage, lambda shell, error: {"scope": Scope.SESSION})
    result = run_case(answering(wider), CASES["DSP2-CTX-003"])
    assert result.behaviour is Behaviour.PASS_NONSTRICT
    assert result.good
    assert result.note == "ERROR CONTEXT_GAP has scope SESSION where SLOT is enough"


def test_a_verifier_that_leaves_a_lying_drafter_is_told_and_not_failed() -> None:
    class Leaving(ReferenceVerifier):
        def _judge(self, proposal: ProposalReady) -> None:
            before = self.connection.staging
            layout = proposal.lease.layout
            assert before is not None
            assert layout is not None
            lied = row_fault(proposal.lease.block, layout, 1000)
            super()._judge(proposal)
            if lied:
                self._sessions, self._hello_again_ns = [], 0

    facts = reference_facts()
    testee = InProcess(Role.VERIFIER, facts, lambda: Leaving(verifier_parameters(facts)))
    result = run_case(testee, CASES["DSP2-ROW-100"])
    assert (result.behaviour, result.closure) == (Behaviour.INFO, Closure.CLEAN)
    assert run_case(testee, CASES["DSP2-CMP-008"]).behaviour is Behaviour.PASS


def test_peers_run_where_they_are_told_to() -> None:
    (drafter, *_) = reference_peers()
    inside = replace(drafter, name="inside", transports=("inproc",))
    beside = replace(drafter, name="beside", skips=frozenset({"slow", "here"}))
    cases = [CASES["DSP2-LIV-001"], replace(CASES["DSP2-LIV-002"], tags=("here",))]
    report = run_self(cases, ["inproc", "tcp"], peers=[inside, beside])
    assert sorted((r.testee, r.transport, r.case.id) for r in report.results) == [
        ("beside", "inproc", "DSP2-LIV-001"),
        ("beside", "inproc", "DSP2-LIV-002"),
        ("beside", "tcp", "DSP2-LIV-001"),
        ("inside", "inproc", "DSP2-LIV-001"),
        ("inside", "inproc", "DSP2-LIV-002"),
    ]


def test_a_verifier_that_goes_silent_between_cases_fails_the_cases_and_not_the_run() -> None:
    lives: list[int] = []

    def machine() -> Any:
        lives.append(1)
        honest = reference_factory(Role.VERIFIER, reference_facts())()
        return honest if len(lives) == 1 else Shell(honest, outgoing=lambda shell, raw: [])

    testee = InProcess(Role.VERIFIER, reference_facts(), machine)
    first, second = run(testee, [CASES["DSP2-LIV-100"], CASES["DSP2-LIV-101"]])
    assert (first.behaviour, second.behaviour) == (Behaviour.PASS, Behaviour.TIMEOUT)
    with pytest.raises(Unreachable, match="no HELLO"):
        run(testee, [CASES["DSP2-LIV-100"]])


def test_a_failure_names_what_was_expected() -> None:
    def picky(t: object) -> None:
        raise Unmet("this", "that", b"\x01", b"\x02")

    result = run_case(InProcess(Role.DRAFTER, reference_facts(), MUTANTS["drafter-no-commit"].machine), scripted(picky))
    assert (result.expected, result.actual) == ("this", "that")
    assert (result.expected_frame, result.actual_frame) == (b"\x01", b"\x02")
