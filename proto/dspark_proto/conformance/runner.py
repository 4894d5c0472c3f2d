"""Runs cases against testees and collects the three verdicts of each.

Nothing that a testee sends ends the run: an unforeseen exception of the harness is the verdict ERROR. Called by
`selftest`, by the command line and by tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import RemoteProtocolError
from ..frame import encode_frame
from ..negotiation import hello_message
from .as_codec import Codec, CodecUnderTest
from .as_drafter import VerifierUnderTest
from .as_verifier import DrafterUnderTest
from .record import Case, Level, Role
from .testees import Testee
from .verdicts import (
    Behaviour,
    CaseResult,
    Closure,
    Remarks,
    Residue,
    TimedOut,
    Unmet,
    Unreachable,
    Unsupported,
    WrongCode,
)

FRAME_BYTES_SHOWN = 1024


@dataclass(frozen=True)
class Report:
    """All results of a run. ``unavailable`` names transports that could not be used, with the reason."""

    testee: str
    results: tuple[CaseResult, ...]
    unavailable: dict[str, str] = field(default_factory=dict)

    @property
    def transports(self) -> tuple[str, ...]:
        """Those that results exist for."""
        return tuple(dict.fromkeys(result.transport for result in self.results))

    @property
    def must_failed(self) -> tuple[CaseResult, ...]:
        """Broken MUSTs."""
        return tuple(result for result in self.results if result.must_failed)

    @property
    def should_failed(self) -> tuple[CaseResult, ...]:
        """Broken SHOULDs."""
        return tuple(r for r in self.results if r.failed and r.case.level is Level.SHOULD)

    @property
    def residue(self) -> tuple[CaseResult, ...]:
        """Cases that left something behind."""
        return tuple(result for result in self.results if result.residue is Residue.LEAKED)


@dataclass
class _Findings:
    """What has been found of one case so far."""

    behaviour: Behaviour = Behaviour.PASS
    closure: Closure = Closure.NOT_JUDGED
    residue: Residue = Residue.NOT_JUDGED
    note: str = ""
    fault: Unmet | None = None
    code: Closure | None = None

    def result(self, case: Case, transport: str) -> CaseResult:
        fault = self.fault
        stood = self.closure in (Closure.CLEAN, Closure.NOT_JUDGED)
        return CaseResult(
            case,
            transport,
            self.behaviour,
            self.code if stood and self.code else self.closure,
            self.residue,
            self.note,
            fault.expected if fault else "",
            fault.actual if fault else "",
            fault.expected_frame[:FRAME_BYTES_SHOWN] if fault else b"",
            fault.actual_frame[:FRAME_BYTES_SHOWN] if fault else b"",
        )


def run(
    testee: Testee, cases: Iterable[Case], on_result: Callable[[CaseResult], None] = lambda result: None
) -> list[CaseResult]:
    """Run the cases of the testee's role, one after the other. Raises `Unreachable` when nobody is there at all."""
    results: list[CaseResult] = []
    for case in [case for case in cases if case.role is testee.role]:
        try:
            results.append(run_case(testee, case))
        except Unreachable as reason:
            if not results:
                raise
            results.append(_Findings(Behaviour.TIMEOUT, note=str(reason)).result(case, testee.transport))
        on_result(results[-1])
    return results


def reach(testee: Testee) -> None:
    """A drafter must answer a first HELLO with anything. Raises `Unreachable`."""
    link = testee.connect()
    try:
        link.send(encode_frame(hello_message(testee.facts.parameters(1), 1)))
        if link.receive(testee.facts.deadline_ms) is None:
            raise Unreachable(f"no answer to HELLO in {testee.facts.deadline_ms} ms")
    finally:
        link.close()


def run_codec(codec: Codec, cases: Iterable[Case], transport: str = "none") -> list[CaseResult]:
    """Run the codec cases."""
    results = []
    for case in cases:
        if case.role is Role.CODEC:
            findings = _Findings()
            _script(case, CodecUnderTest(codec), findings)
            results.append(findings.result(case, transport))
    return results


def run_case(testee: Testee, case: Case) -> CaseResult:
    """One case on a fresh connection."""
    if case.needs_secret and not testee.facts.secret:
        nothing = _Findings(Behaviour.UNSUPPORTED, note="the testee does not offer a secret")
        return nothing.result(case, testee.transport)
    if testee.role is Role.DRAFTER:
        return _run_drafter_case(testee, case)
    return _run_verifier_case(testee, case)


def _script(case: Case, handle: Remarks, findings: _Findings) -> None:
    try:
        case.script(handle)
        findings.behaviour, findings.note = handle.behaviour, handle.note
        findings.code = Closure.RIGHT_CODE if handle.refused else None
    except WrongCode as fault:
        findings.code, findings.fault, findings.note = Closure.WRONG_CODE, fault, str(fault)
    except Unmet as fault:
        findings.behaviour, findings.fault, findings.note = Behaviour.FAIL, fault, str(fault)
    except TimedOut as fault:
        findings.behaviour, findings.note = Behaviour.TIMEOUT, str(fault)
    except Unsupported as reason:
        findings.behaviour, findings.note = Behaviour.UNSUPPORTED, f"the testee does not offer {reason}"
    except Unreachable as reason:
        findings.behaviour, findings.note = Behaviour.FAIL, str(reason)
    except RemoteProtocolError as fault:
        findings.behaviour, findings.note = Behaviour.FAIL, f"the testee's bytes: {fault}"
    except Exception as fault:  # a bug of the harness must not hide the other results
        findings.behaviour, findings.note = Behaviour.ERROR, f"harness: {type(fault).__name__}: {fault}"


def _run_drafter_case(testee: Testee, case: Case) -> CaseResult:
    handle = DrafterUnderTest(testee.connect(), testee.facts, testee.another)
    findings = _Findings()
    try:
        _script(case, handle, findings)
        _close_drafter(handle, findings)
    finally:
        for link in (handle.link, *handle.opened):
            link.close()
    return findings.result(case, testee.transport)


def _close_drafter(handle: DrafterUnderTest, findings: _Findings) -> None:
    """The drafter must still answer; after all sessions have ended it must hold nothing."""
    try:
        if handle.accept is None:
            handle.hello()
        handle.barrier()
        findings.closure = Closure.CLEAN
        for slot in list(handle.slots):
            handle.close(slot)
        handle.barrier()
        handle.holds_nothing()
        findings.residue = Residue.NONE
    except (TimedOut, Unreachable) as fault:
        findings.closure = Closure.HUNG
        findings.note = findings.note or str(fault)
    except Unmet as fault:
        after = findings.closure is Closure.CLEAN
        findings.residue = Residue.LEAKED if after and findings.fault is None else Residue.NOT_JUDGED
        findings.closure = findings.closure if after else Closure.UNCLEAN
        findings.note = findings.note or str(fault)


def _run_verifier_case(testee: Testee, case: Case) -> CaseResult:
    handle = VerifierUnderTest(testee.connect(), testee.facts)
    findings = _Findings()
    try:
        _begin(handle)
        _script(case, handle, findings)
        _close_verifier(handle, findings)
    except TimedOut as fault:
        raise Unreachable(f"no HELLO from the verifier: {fault}") from None
    finally:
        handle.link.close()
    return findings.result(case, testee.transport)


def _begin(handle: VerifierUnderTest) -> None:
    """A verifier of an earlier case is told that its drafter was restarted."""
    if getattr(handle.link, "peer", None) is None:
        handle.await_hello()
    else:
        handle.restart()


def _close_verifier(handle: VerifierUnderTest, findings: _Findings) -> None:
    """The verifier must still answer PING, and own no staging beyond its unresolved rounds."""
    if findings.behaviour not in (Behaviour.PASS, Behaviour.PASS_NONSTRICT, Behaviour.INFO):
        return
    try:
        handle.answers(31337)
        findings.closure = Closure.CLEAN
        held = handle.link.held()
        if held:
            findings.residue = Residue.LEAKED if any(held.values()) else Residue.NONE
            findings.note = f"held: {held}" if any(held.values()) else findings.note
    except AssertionError:
        findings.closure = Closure.NOT_JUDGED
    except (TimedOut, Unreachable) as fault:
        findings.closure = Closure.HUNG
        findings.note = findings.note or str(fault)
    except Unmet as fault:
        findings.closure = Closure.UNCLEAN
        findings.note = findings.note or str(fault)


def merged(testee: str, parts: Sequence[list[CaseResult]], unavailable: dict[str, str]) -> Report:
    """One report of several runs."""
    return Report(testee, tuple(result for part in parts for result in part), unavailable)
