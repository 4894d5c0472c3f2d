"""`dspark conformance`: list, show, run and selftest, the report files, and every exit code."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from dspark import conformance
from dspark.cli import app
from dspark.wrong_usage import USAGE
from dspark_proto.conformance import (
    ExitCode,
    InProcess,
    Mutant,
    Role,
    all_cases,
    facts_to_json,
    gallery,
    links,
    reference_facts,
    reference_peers,
    select,
)
from dspark_proto.conformance.mutants import Shell
from dspark_proto.conformance.report import SCHEMA_FILE
from dspark_proto.transports import opening

RUN = CliRunner()
QUICK = ("--self", "--transport", "inproc", "--case", "LIV")
MUTANTS = {mutant.name: mutant for mutant in gallery()}


def run(*words: str) -> tuple[int, str]:
    result = RUN.invoke(app, ["conformance", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def judged(name: str, options: conformance.RunOptions) -> tuple[ExitCode, str]:
    """Exit code and output of a run against a peer with a planted bug."""
    mutant: Mutant = MUTANTS[name]
    said: list[str] = []
    testee = InProcess(mutant.role, reference_facts(), mutant.machine)
    return conformance.run_testee(testee, name, options, said.append), "\n".join(said)


def test_list_shows_every_case_and_json_is_one_object_a_line() -> None:
    code, text = run("list")
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()] == [case.id for case in all_cases()]
    code, text = run("list", "--case", "ROW", "--json")
    found = [json.loads(line) for line in text.splitlines()]
    assert code == 0
    assert [one["id"] for one in found] == [case.id for case in select(patterns=["ROW"])]
    assert set(found[0]) == {"id", "title", "anchor", "level", "role", "bug"}


def test_show_says_rule_and_bug() -> None:
    code, text = run("show", "DSP2-ROW-100")
    (case,) = select(patterns=["DSP2-ROW-100"])
    assert code == 0
    assert all(part in text for part in (case.id, case.title, case.anchor, case.requirement, case.bug, "verifier"))


def test_run_self_passes_and_counts() -> None:
    code, text = run("run", *QUICK, "--json")
    found = json.loads(text)
    assert code == 0
    assert found["failed"] == []
    assert found["cases"] == len(select(patterns=["LIV"]))
    assert (found["must_failed"], found["should_failed"], found["residue"]) == (0, 0, 0)


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Types, enumerations, required and unknown properties: what the report's schema says."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int}
    right = isinstance(value, kinds[schema["type"]]) if "type" in schema else True
    right = right and ("enum" not in schema or value in schema["enum"])
    right = right and ("const" not in schema or value == schema["const"])
    right = right and ("pattern" not in schema or re.search(schema["pattern"], value) is not None)
    if isinstance(value, dict):
        properties, extra = schema.get("properties", {}), schema.get("additionalProperties", {})
        known = extra is not False or set(value) <= set(properties)
        right = right and known and set(schema.get("required", ())) <= set(value)
        return right and all(fits(one, properties.get(name, extra or {})) for name, one in value.items())
    return right and all(fits(one, schema.get("items", {})) for one in (value if isinstance(value, list) else ()))


def test_run_own_asks_the_reference_peers_in_process_and_ours_everywhere() -> None:
    said: list[str] = []
    (ours, *_) = reference_peers()
    options = conformance.RunOptions(("DSP2-LIV-001", "DSP2-LIV-100"), ("inproc", "tcp"), as_json=True)
    code = conformance.run_own(lambda: [replace(ours, name="ours")], options, said.append)
    found = json.loads(said[0])
    assert code is ExitCode.PASSED
    assert (found["cases"], found["runs"], found["transports"]) == (2, 4, ["inproc", "tcp"])
    assert {name: found[name] for name in ("must_failed", "residue")} == {"must_failed": 0, "residue": 0}


def test_peers_are_not_made_for_wrong_options() -> None:
    def never() -> list[Any]:
        raise AssertionError

    for options in (conformance.RunOptions(transports=("pigeon",)), conformance.RunOptions(cases=("NOPE",))):
        with pytest.raises(conformance.UserError):
            conformance.run_own(never, options, lambda text: None)
    with pytest.raises(conformance.UserError, match="for a drafter"):
        conformance.run_peers(never, Role.DRAFTER, conformance.RunOptions(("BUF",)), lambda text: None)


def test_run_peers_asks_one_role_in_process() -> None:
    said: list[str] = []
    mine = [peer for peer in reference_peers() if peer.role is Role.VERIFIER]
    options = conformance.RunOptions(("DSP2-AUT-100", "DSP2-LIV-100"), as_json=True)
    assert conformance.run_peers(lambda: mine, Role.VERIFIER, options, said.append) is ExitCode.PASSED
    found = json.loads(said[0])
    assert (found["testee"], found["cases"], found["unsupported"], found["failed"]) == ("own verifier", 2, 0, [])


def test_report_writes_three_files_and_the_json_fits_its_schema(tmp_path: Path) -> None:
    code, _ = run("run", *QUICK, "--report", str(tmp_path / "new" / "out"))
    out = tmp_path / "new" / "out"
    assert code == 0
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "report.json", "report.xml"]
    found, schema = json.loads((out / "report.json").read_text("utf-8")), json.loads(SCHEMA_FILE.read_text("utf-8"))
    assert fits(found, schema)
    assert not fits({**found, "results": "none"}, schema)
    assert not fits({name: value for name, value in found.items() if name != "results"}, schema)
    ids = {case.id for case in select(patterns=["LIV"])}
    assert {one["id"] for one in found["results"]} == ids
    suites = ElementTree.fromstring((out / "report.xml").read_text("utf-8"))
    assert sum(1 for _ in suites.iter("testcase")) == len(found["results"]) >= len(ids)
    assert all(name in (out / "report.html").read_text("utf-8") for name in ids)


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["--nonsense"],
        ["run"],
        ["run", "--self", "--worker"],
        ["run", "--nonsense"],
        ["run", "--self", "--case"],
        ["run", "--self", "--case", "NOPE"],
        ["run", "--self", "--transport", "pigeon"],
        ["run", *QUICK, "--known-failures", "/nowhere/at-all"],
        ["run", "--drafter", "tcp://127.0.0.1:7777"],
        ["run", "--drafter", "tcp://127.0.0.1:7777", "--facts", "/nowhere/at-all"],
        ["selftest", "--case", "NOPE"],
        ["list", "--case", "NOPE"],
        ["show"],
        ["show", "DSP2-NOT-000"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_5_and_says_why(words: list[str]) -> None:
    code, text = run(*words)
    assert code == USAGE == ExitCode.USAGE
    assert text.strip()
    assert "Traceback" not in text


def test_wrong_usage_of_other_commands_is_not_changed() -> None:
    assert RUN.invoke(app, ["doctor", "--nonsense"]).exit_code == 2


def test_wrong_known_failures_are_named_before_any_case_runs(tmp_path: Path) -> None:
    path = tmp_path / "known.txt"
    path.write_text("DSP2-LIV-001\nnonsense\n")
    code, text = run("run", *QUICK, "--known-failures", str(path))
    assert code == USAGE
    assert "line 2" in text
    assert "MUST failed" not in text


def test_a_broken_must_exits_with_1_until_it_is_known(tmp_path: Path) -> None:
    options = conformance.RunOptions(cases=("DSP2-LIV-001", "DSP2-LIV-007"), as_json=True)
    code, text = judged("drafter-small-nonce", options)
    assert code is ExitCode.MUST_FAILED
    assert json.loads(text)["failed"] == ["DSP2-LIV-001 inproc"]
    known = tmp_path / "known.txt"
    known.write_text("DSP2-LIV-001  # counts its nonces\n")
    excused = conformance.RunOptions(options.cases, known_failures=known)
    assert judged("drafter-small-nonce", excused)[0] is ExitCode.PASSED


def test_a_known_failure_that_passes_exits_with_7(tmp_path: Path) -> None:
    known = tmp_path / "known.txt"
    known.write_text("DSP2-LIV-001 inproc\n")
    assert run("run", *QUICK, "--known-failures", str(known))[0] == ExitCode.KNOWN_FAILURES_OUTDATED
    known.write_text("DSP2-LIV-001 zmq\n")
    assert run("run", *QUICK, "--known-failures", str(known))[0] == 0


def test_a_broken_should_counts_with_strict_only() -> None:
    cases = ("DSP2-TMO-105",)
    assert judged("verifier-no-pings", conformance.RunOptions(cases))[0] is ExitCode.PASSED
    assert judged("verifier-no-pings", conformance.RunOptions(cases, strict=True))[0] is ExitCode.SHOULD_FAILED


def test_what_is_left_behind_exits_with_3() -> None:
    code, text = judged("drafter-leaks", conformance.RunOptions(("DSP2-STP-001",)))
    assert code is ExitCode.RESIDUE
    assert "1 left residue" in text


def test_nobody_there_exits_with_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SEND_MS", 100)
    facts = tmp_path / "facts.json"
    facts.write_text(facts_to_json(reference_facts()))
    words = ("--facts", str(facts), "--case", "LIV")
    code, text = run("run", "--drafter", "tcp://127.0.0.1:1", *words)
    assert code == ExitCode.UNREACHABLE
    assert "tcp://127.0.0.1:1: the testee takes no frames" in text
    assert run("run", "--drafter", "carrier-pigeon://loft", *words)[0] == USAGE
    assert run("run", "--listen", "carrier-pigeon://loft")[0] == USAGE


def test_a_drafter_that_does_not_answer_hello_exits_with_4() -> None:
    said: list[str] = []
    deaf = MUTANTS["drafter-leaks"].machine
    testee = InProcess(Role.DRAFTER, reference_facts(), lambda: Shell(deaf(), lambda shell, frame: []))
    code = conformance.run_testee(testee, "deaf", conformance.RunOptions(("LIV",)), said.append)
    assert (code, said) == (ExitCode.UNREACHABLE, ["deaf: no answer to HELLO in 5000 ms"])


def test_a_run_that_could_judge_nothing_has_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(address: str, *_: object) -> None:
        raise OSError("no library")

    monkeypatch.setattr(opening, "open_server", broken)
    code, text = run("run", "--self", "--transport", "zmq", "--case", "DSP2-LIV-001")
    assert code == ExitCode.UNREACHABLE
    assert "no library" in text


def test_selftest_finds_planted_bugs() -> None:
    code, text = run("selftest", "--case", "DSP2-LIV-006", "--json")
    found = json.loads(text)
    assert (found["cases"], found["idle"], found["wrong"]) == (1, [], [])
    assert "drafter-deaf-while-drafting" not in found["survivors"]
    assert "drafter-no-prefix-crc" in found["survivors"]
    assert code == ExitCode.SELF_CHECK_FAILED, "one case alone does not find every mutant"


def test_a_testee_is_closed_also_after_wrong_usage() -> None:
    closed: list[str] = []

    class Watched(InProcess):
        def close(self) -> None:
            closed.append(self.role)

    testee = Watched(Role.DRAFTER, reference_facts(), MUTANTS["drafter-leaks"].machine)
    with pytest.raises(conformance.UserError, match="for a drafter"):
        conformance.run_testee(testee, "x", conformance.RunOptions(("BUF",)), lambda text: None)
    assert closed == [Role.DRAFTER]
