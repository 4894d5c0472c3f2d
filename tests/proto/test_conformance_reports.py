"""Reports, exit codes and known failures of the conformance harness."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from dspark_proto.conformance import (
    ExitCode,
    Report,
    as_html,
    as_junit,
    as_object,
    exit_code,
    read_known_failures,
    summary,
)
from dspark_proto.conformance.facts import facts_from_file, facts_to_json, reference_facts
from dspark_proto.conformance.matrix import hex_lines
from dspark_proto.conformance.record import Case, Level, Role
from dspark_proto.conformance.report import SCHEMA_FILE
from dspark_proto.conformance.verdicts import Behaviour, CaseResult, Closure, Residue

HOSTILE = "<script>alert(1)</script>\x1b[31m"


def result(
    number: int = 1,
    level: Level = Level.MUST,
    behaviour: Behaviour = Behaviour.PASS,
    closure: Closure = Closure.CLEAN,
    residue: Residue = Residue.NONE,
    **changes: Any,
) -> CaseResult:
    case = Case(f"DSP2-TST-{number:03d}", f"case {number}", "REQ-PNG-1", level, Role.DRAFTER, "a bug", lambda t: None)
    return CaseResult(case, "inproc", behaviour, closure, residue, **changes)


PASSED = result(1)
BROKEN = result(2, behaviour=Behaviour.FAIL, note=HOSTILE, expected_frame=b"\x01\x02", actual_frame=b"\x01\x03")
SOFT = result(3, level=Level.SHOULD, behaviour=Behaviour.TIMEOUT)
LEAKED = result(4, residue=Residue.LEAKED)
SKIPPED = result(5, behaviour=Behaviour.UNSUPPORTED, note="no second slot")
HUNG = result(6, closure=Closure.HUNG)
TOLERATED = result(7, behaviour=Behaviour.PASS_NONSTRICT, note="a wider scope")
TOLD = result(8, behaviour=Behaviour.INFO, note="the verifier has left")
OTHER_CODE = result(9, closure=Closure.WRONG_CODE)
REFUSED = result(10, closure=Closure.RIGHT_CODE)


def report(*results: CaseResult) -> Report:
    return Report("a peer & co", results, {"ucx": "library missing"})


@pytest.mark.parametrize(
    ("results", "strict", "code"),
    [
        ((PASSED, SKIPPED), True, ExitCode.PASSED),
        ((PASSED, BROKEN, LEAKED), False, ExitCode.MUST_FAILED),
        ((PASSED, HUNG), False, ExitCode.MUST_FAILED),
        ((PASSED, SOFT), False, ExitCode.PASSED),
        ((PASSED, SOFT), True, ExitCode.SHOULD_FAILED),
        ((PASSED, LEAKED, SOFT), True, ExitCode.RESIDUE),
        ((TOLERATED, TOLD, REFUSED), True, ExitCode.PASSED),
        ((PASSED, OTHER_CODE), False, ExitCode.MUST_FAILED),
    ],
)
def test_exit_codes(results: tuple[CaseResult, ...], strict: bool, code: ExitCode) -> None:
    assert exit_code(report(*results), strict=strict) is code


def test_exit_codes_have_the_documented_numbers() -> None:
    assert [code.value for code in ExitCode] == list(range(8))
    assert ExitCode.KNOWN_FAILURES_OUTDATED == 7


def test_known_failures_excuse_and_must_not_outlive_their_failure() -> None:
    known = read_known_failures("# a comment\nDSP2-TST-002 inproc  # why\n\nDSP2-TST-004\n")
    assert exit_code(report(PASSED, BROKEN, LEAKED), known) is ExitCode.PASSED
    assert exit_code(report(PASSED, result(2), LEAKED), known) is ExitCode.KNOWN_FAILURES_OUTDATED
    assert exit_code(report(PASSED), known) is ExitCode.PASSED, "a case that did not run proves nothing"
    elsewhere = read_known_failures("DSP2-TST-002 zmq")
    assert exit_code(report(BROKEN), elsewhere) is ExitCode.MUST_FAILED


@pytest.mark.parametrize("text", ["nonsense", "DSP2-TST-001 inproc zmq"])
def test_a_wrong_known_failure_line_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        read_known_failures(text)


def check(value: Any, schema: dict[str, Any], path: str = "report") -> None:
    """As much of JSON Schema as the report's schema uses."""
    if "const" in schema:
        assert value == schema["const"], path
    if "enum" in schema:
        assert value in schema["enum"], path
    kinds = {"object": dict, "array": list, "string": str, "integer": int}
    if "type" in schema:
        assert isinstance(value, kinds[schema["type"]]), path
    if "pattern" in schema:
        assert re.search(schema["pattern"], value), path
    if "minimum" in schema:
        assert value >= schema["minimum"], path
    if isinstance(value, dict):
        assert set(schema.get("required", [])) <= set(value), path
        for name, one in value.items():
            extra = schema.get("additionalProperties", True)
            assert name in schema.get("properties", {}) or extra is not False, f"{path}.{name}"
            check(
                one, schema.get("properties", {}).get(name, extra if isinstance(extra, dict) else {}), f"{path}.{name}"
            )
    for index, one in enumerate(value if isinstance(value, list) else []):
        check(one, schema.get("items", {}), f"{path}[{index}]")


def test_the_json_report_keeps_its_schema() -> None:
    schema = json.loads(SCHEMA_FILE.read_text("utf-8"))
    found = json.loads(json.dumps(as_object(report(PASSED, BROKEN, SOFT, LEAKED, SKIPPED))))
    check(found, schema)
    assert (found["cases"], found["must_failed"], found["should_failed"], found["residue"]) == (5, 1, 1, 1)
    assert found["unavailable"] == {"ucx": "library missing"}
    assert found["results"][1]["actual_hex"] == "0103"
    for verdict, column in (("behaviour", Behaviour), ("closure", Closure), ("residue", Residue)):
        listed = schema["properties"]["results"]["items"]["properties"][verdict]["enum"]
        assert listed == [member.value for member in column]


def test_junit_counts_failures_and_survives_hostile_text() -> None:
    root = ElementTree.fromstring(as_junit(report(PASSED, BROKEN, SKIPPED)))
    (suite,) = root
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    (failure,) = suite.iter("failure")
    assert "<script>" in (failure.text or "")


def test_html_escapes_and_marks_the_bytes_that_differ() -> None:
    page = as_html(report(PASSED, BROKEN))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "<mark>03</mark>" in page
    assert "<mark>01</mark>" not in page
    assert "library missing" in page


def order(page: str) -> list[str]:
    return re.findall(r"<tr><td>(DSP2-TST-\d+)", page)


def test_html_shows_failures_first_then_what_is_not_offered_then_remarks() -> None:
    page = as_html(report(PASSED, TOLD, SKIPPED, REFUSED, TOLERATED, OTHER_CODE, LEAKED))
    assert order(page) == [one.case.id for one in (OTHER_CODE, LEAKED, SKIPPED, TOLD, TOLERATED, PASSED, REFUSED)]
    assert "1 not supported" in page
    assert "2 passed with a remark" in page
    kinds = dict(re.findall(r'(DSP2-TST-\d+)<br>.*?<td class="(\w+)">', page))
    assert [kinds[one.case.id] for one in (OTHER_CODE, SKIPPED, TOLD, PASSED)] == ["bad", "skipped", "noted", "good"]


def test_testees_of_one_run_have_columns_and_suites_of_their_own() -> None:
    ours, theirs = replace(PASSED, testee="own worker"), replace(BROKEN, case=PASSED.case, testee="theirs")
    page = as_html(report(ours, theirs))
    assert re.findall(r"<th>(.*?)</th>", page) == ["case", "rule", "own worker inproc", "theirs inproc"]
    assert order(page) == [PASSED.case.id]
    suites = [suite.get("name") for suite in ElementTree.fromstring(as_junit(report(ours, theirs)))]
    assert suites == ["own-worker.drafter.inproc", "theirs.drafter.inproc"]
    assert "DSP2-TST-001 [theirs inproc] FAIL" in summary(report(ours, theirs))
    assert [one["testee"] for one in as_object(report(ours, theirs))["results"]] == ["own worker", "theirs"]


def test_hex_lines() -> None:
    lines = hex_lines(bytes(range(17)), b"")
    assert lines.splitlines()[1] == "0010  10"
    assert "<mark>" not in lines
    assert hex_lines(b"\x01\x02", b"\x01") == "0000  01 <mark>02</mark>"


def test_the_summary_names_rule_and_reason() -> None:
    text = summary(report(PASSED, BROKEN))
    assert "REQ-PNG-1 (MUST): PING MUST be answered" in text
    assert "1 MUST failed" in text
    assert "DSP2-TST-001" not in text


def test_facts_survive_a_file(tmp_path: Any) -> None:
    path = tmp_path / "facts.json"
    path.write_text(facts_to_json(reference_facts()))
    assert facts_from_file(path) == reference_facts()
    secret = replace(reference_facts(bytes(range(20))), binding="tcp")
    path.write_text(facts_to_json(secret))
    assert facts_from_file(path) == secret
    assert "secret" not in repr(secret)
    path.write_text(facts_to_json(reference_facts()).replace('"vocab_size": 1000', '"vocab_size": 0'))
    with pytest.raises(ValueError, match="vocab_size"):
        facts_from_file(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="not a facts file"):
        facts_from_file(path)
