"""The codec pipe: the reference testee is right about every vector, and wrong or dead testees are found out."""

from __future__ import annotations

import io
import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from dspark_proto.codec_pipe import PipeError, Verdict, answer, read_message, run_vectors, write_message
from dspark_proto.codec_pipe.cases import load_cases
from dspark_proto.codec_pipe.dyadic import _count
from dspark_proto.codec_pipe.messages import MESSAGE_BYTES_MAX
from dspark_proto.codec_pipe.runner import differences
from dspark_proto.registry import ErrorCode

PROTO = Path(__file__).parents[2] / "proto"
VECTORS = PROTO / "vectors"
SUITES = sorted(path.stem for path in VECTORS.glob("*.json") if path.stem != "schema")

BENT = """
import sys
from dspark_proto.codec_pipe import answer, read_message, write_message
while (request := read_message(sys.stdin.buffer)) is not None:
    found = answer(request)
    {bend}
    write_message(sys.stdout.buffer, found)
"""


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """A folder with the first vectors of each suite, so that a bent testee is judged quickly."""
    for suite in SUITES:
        document = json.loads((VECTORS / f"{suite}.json").read_text())
        document["vectors"] = document["vectors"][:3] + document["vectors"][-2:]
        (tmp_path / f"{suite}.json").write_text(json.dumps(document))
    return tmp_path


def bent(line: str) -> list[str]:
    return [sys.executable, "-c", BENT.format(bend=line)]


def verdicts(command: list[str], directory: Path, timeout_s: float = 20.0) -> dict[str, Verdict]:
    return {one.case.id: one.verdict for one in run_vectors(command, directory, timeout_s)}


# The reference testee


def test_the_reference_testee_passes_every_vector() -> None:
    judgements = run_vectors([sys.executable, "-m", "dspark_proto.codec_pipe.testee"], VECTORS, 20.0)
    assert [str(one) for one in judgements if one.verdict is not Verdict.PASSED] == []
    assert len(judgements) == len(load_cases(VECTORS)) > 200


def test_every_state_table_of_the_specification_is_in_the_vectors() -> None:
    """The suite was read from SPEC.md's tables; the code's tables answer it (above), so all three agree."""
    text = (PROTO / "SPEC.md").read_text()
    tables = re.findall(r"### 3\.(\d) .*?\n\n(\|.*?)\n\n", text, re.S)
    names = {"1": "verifier", "2": "drafter", "3": "slot"}
    cells = {}
    for number, table in tables:
        head, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        for state, *row in lines:
            for action, following in zip(head[1:], row, strict=True):
                cells[names[number], state.lower(), action] = following.lower()
    vectors = json.loads((VECTORS / "states.json").read_text())["vectors"]
    found = {
        (one["table"], one["state"], one["action"]): one["value"]["state"] if "value" in one else "" for one in vectors
    }
    assert found == cells


# Bent testees


@pytest.mark.parametrize(
    ("line", "caught"),
    [
        ("found.pop('canonical_hex', None)", "HELLO-1/decode"),
        ("'scope' in found and found.update(scope='SLOT')", "PFX-1"),
        ("found.get('error_code') == 'BAD_MAGIC' and found.update(error_code='WRONG_SIZE')", "PFX-2"),
        ("found = {'ok': True, 'value': {}} if 'error_code' in found else found", "PFX-3"),
        ("'key' in (found.get('value') or {}) and found['value'].update(key=[1.0, 1, 0])", "OPEN-1/decode"),
        ("found.get('error_code') == 'NOT_DYADIC' and found.update(error_code='BAD_ROW_RECORD')", "ROWS-46"),
        ("found = {'ok': True} if request['op'] == 'digest' else found", "DIG-2"),
        ("'state' in (found.get('value') or {}) and found['value'].update(state='free')", "STA-VERIFIER-IDLE-HELLO"),
    ],
)
def test_a_bent_testee_is_found_out(few: Path, line: str, caught: str) -> None:
    assert verdicts(bent(line), few)[caught] is Verdict.FAILED


def test_a_failure_names_requirement_and_bug(few: Path) -> None:
    judgements = run_vectors(bent("found = {'ok': True, 'value': {}} if 'error_code' in found else found"), few, 20.0)
    (text,) = [str(one) for one in judgements if one.case.id == "PFX-1"]
    assert text.startswith("PFX-1 failed (REQ-PFX-1): error_code should be 'WRONG_SIZE'")
    assert text.endswith("such a peer reads past a short buffer")


def test_operations_may_be_unsupported(few: Path) -> None:
    found = verdicts(bent("found = found if request['op'] == 'decode' else {'unsupported': True}"), few)
    assert found["HELLO-1/decode"] is Verdict.PASSED
    assert found["HELLO-1/encode"] is found["DIG-1"] is Verdict.UNSUPPORTED


# Dead testees


def test_exit_127_is_unsupported_and_ends_the_run(few: Path) -> None:
    found = verdicts([sys.executable, "-c", "raise SystemExit(127)"], few)
    assert set(found.values()) == {Verdict.UNSUPPORTED}


def test_a_crash_is_told_with_its_last_words_and_the_next_case_goes_on(few: Path) -> None:
    line = "request.get('hex', '').startswith('48545450') and sys.exit('cannot read that magic')"
    judgements = {one.case.id: one for one in run_vectors(bent(line), few, 20.0)}
    assert judgements["PFX-2"].verdict is Verdict.CRASHED
    assert judgements["PFX-2"].detail == "crash: exit code 1: cannot read that magic"
    assert judgements["PFX-3"].verdict is Verdict.PASSED


def test_a_testee_that_never_answers_ends_the_run_after_a_few_cases(few: Path) -> None:
    judgements = run_vectors([sys.executable, "-c", "import sys; sys.stdin.buffer.read()"], few, 0.05)
    assert {one.verdict for one in judgements} == {Verdict.TIMEOUT}
    assert sum(one.detail.startswith("not asked") for one in judgements) == len(judgements) - 3


@pytest.mark.parametrize(
    "output",
    [
        "b'\\xff\\xff\\xff\\xff'",
        "b'\\x02\\0\\0\\0[]'",
        "b'\\x03\\0\\0\\0a:b'",
        "(10**6).to_bytes(4, 'little') + b'[' * 10**6",
    ],
)
def test_nonsense_is_a_failure_not_an_accident(few: Path, output: str) -> None:
    program = f"import sys; sys.stdin.buffer.read(4); sys.stdout.buffer.write({output}); sys.stdout.flush()"
    program += "; sys.stdin.read()"
    (tmp := few / "one").mkdir()
    (tmp / "digests.json").write_text((few / "digests.json").read_text())
    judgements = run_vectors([sys.executable, "-c", program], tmp, 20.0)
    assert {one.verdict for one in judgements} == {Verdict.FAILED}
    assert all(one.detail.startswith("nonsense") for one in judgements)


def test_a_command_that_does_not_exist_is_an_error(few: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run_vectors(["/nonexistent/testee"], few)


def test_an_unknown_suite_is_an_error_not_a_skip(tmp_path: Path) -> None:
    (tmp_path / "new.json").write_text(json.dumps({"suite": "new", "vectors": []}))
    with pytest.raises(ValueError, match="new"):
        load_cases(tmp_path)


# Messages and answers


def test_messages_go_through_a_stream() -> None:
    stream = io.BytesIO()
    sent = [{"op": "decode", "value": 2**64 - 1}, {"unsupported": True}]
    for message in sent:
        write_message(stream, message)
    stream.seek(0)
    assert [read_message(stream), read_message(stream), read_message(stream)] == [*sent, None]


@pytest.mark.parametrize(
    "data",
    [
        b"\x01",
        b"\x05\0\0\0{}",
        b"\x02\0\0\0[]",
        b"\x01\0\0\0{",
        (MESSAGE_BYTES_MAX + 1).to_bytes(4, "little"),
        b"\xff" * 8,
    ],
)
def test_bad_messages_are_refused(data: bytes) -> None:
    with pytest.raises(PipeError):
        read_message(io.BytesIO(data))


def test_a_length_is_checked_before_it_is_read() -> None:
    class Watched(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            assert size is not None
            assert size <= MESSAGE_BYTES_MAX
            return super().read(size)

    with pytest.raises(PipeError, match="at most"):
        read_message(Watched(b"\xff" * 100))


@pytest.mark.parametrize(
    "request_",
    [
        {"op": "decode"}, {"op": "decode", "hex": "xyz"}, {"op": "decode", "hex": 5},
        {"op": "digest", "tokens": [2**40]}, {"op": "digest", "tokens": [-1]},
        {"op": "checksum", "kind": "MD5", "hex": ""},
        {"op": "state_step", "table": "slot", "state": "gone", "action": "open"},
        {"op": "encode", "type": "PING", "control": [1.5, 2], "key": [0, 0, 0], "bodies_hex": []},
        {"op": "encode", "type": "PING", "control": {}, "key": [0, 0], "bodies_hex": []},
        {"op": "validate_row", "hex": "", "depth": "1", "support": 1, "vocab_size": 5},
    ],
)  # fmt: skip
def test_wrong_arguments_are_answered(request_: dict[str, Any]) -> None:
    assert answer(request_)["error_code"] == "BAD_REQUEST"


def test_unknown_operations_are_unsupported() -> None:
    assert answer({"op": "dance"}) == answer({}) == {"unsupported": True}


def test_encode_refuses_what_the_fields_forbid() -> None:
    request = {"op": "encode", "type": "PONG", "control": [1, 1, 1001, 0], "key": [2**32 - 1, 0, 0], "bodies_hex": []}
    assert answer(request)["error_code"] == "BAD_FIELD"


def test_checksums() -> None:
    check = b"123456789".hex()
    assert answer({"op": "checksum", "kind": "CRC32C", "hex": check})["value"] == {"checksum_hex": "839206e300000000"}
    # XXH3-64 of nothing with seed 0, from the algorithm's own test vectors: 0x2D06800538D394C2.
    assert answer({"op": "checksum", "kind": "XXH3_64", "hex": ""})["value"] == {"checksum_hex": "c294d3380580062d"}


def test_differences_do_not_take_a_float_or_bool_for_an_integer() -> None:
    assert differences({"a": 1}, {"a": 1, "b": 2}) == ""
    for wrong in ({"a": 1.0}, {"a": True}, {"a": "1"}, {}, {"a": [1]}):
        assert differences({"a": 1}, wrong).startswith("a should be 1")
    assert differences({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]})


def test_counts_are_read_exactly() -> None:
    for count in (1, 2, 3, 5, 2**23 - 1, 2**23, 2**23 + 1, 2**24 - 1, 2**24):
        (bits,) = struct.unpack("<I", struct.pack("<f", count / 2**24))
        assert _count(bits) == count
    assert _count(0) == 0
    for bits in (0x80000000, 1, 0x7F800000, 0x7FC00000, 0x3F800001, 0x40000000, 0xBF800000, 0x33800001, 0x33000000):
        assert _count(bits) == -1


# The vector files


def test_vector_files_fit_the_schema() -> None:
    schema = json.loads((VECTORS / "schema.json").read_text())
    for suite in SUITES:
        document = json.loads((VECTORS / f"{suite}.json").read_text())
        assert document["suite"] == suite
        assert problem(document, schema, schema) == "", suite


def test_every_negative_vector_hunts_a_bug_and_ids_are_unique() -> None:
    specification = (PROTO / "SPEC.md").read_text()
    seen: set[str] = set()
    for suite in SUITES:
        for vector in json.loads((VECTORS / f"{suite}.json").read_text())["vectors"]:
            assert vector["id"] not in seen
            seen.add(vector["id"])
            assert f"{{#{vector['requirement']}}}" in specification, vector["id"]
            if "error" in vector:
                assert len(vector["hunts"].split()) >= 2, vector["id"]
                assert vector["error"] in {code.name for code in ErrorCode} | {"NOT_DYADIC", "REFUSED"}


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(extra=1),
        lambda document: document["vectors"][0].pop("hunts"),
        lambda document: document["vectors"][0].update(hunts=""),
        lambda document: document["vectors"][0].update(frame_hex="ABC"),
        lambda document: document["vectors"][0].update(requirement="PFX-1"),
        lambda document: document.update(vectors=[]),
        lambda document: document.update(wire_version="2.1"),
    ],
)
def test_the_schema_refuses(change: Any) -> None:
    schema = json.loads((VECTORS / "schema.json").read_text())
    document = json.loads((VECTORS / "refusals.json").read_text())
    change(document)
    assert problem(document, schema, schema)


TYPES: dict[str, Any] = {"object": dict, "array": list, "string": str}


def problem(value: Any, schema: Any, root: Any) -> str:
    """What of ``value`` breaks ``schema``; a keyword that is not known here is an error."""
    if "$ref" in schema:
        return problem(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    assert schema.keys() <= KEYWORDS, schema.keys() - KEYWORDS
    if "oneOf" in schema:
        problems = [problem(value, one, root) for one in schema["oneOf"]]
        return "" if problems.count("") == 1 else f"none or several of: {problems}"
    if "const" in schema and value != schema["const"]:
        return f"is not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        return "is not in the enumeration"
    kind = schema.get("type")
    if kind == "integer":
        within = type(value) is int and schema.get("minimum", value) <= value <= schema.get("maximum", value)
        return "" if within else "is no integer in range"
    if kind and not isinstance(value, TYPES[kind]):
        return f"is no {kind}"
    judges = {"object": object_problem, "array": array_problem, "string": string_problem}
    return judges.get(kind, fine)(value, schema, root)


KEYWORDS = {
    "$schema", "$defs", "title", "description", "oneOf", "const", "enum", "type", "properties", "required",
    "additionalProperties", "items", "minItems", "maxItems", "minLength", "pattern", "minimum", "maximum",
}  # fmt: skip


def fine(_value: Any, _schema: Any, _root: Any) -> str:
    return ""


def object_problem(value: Any, schema: Any, root: Any) -> str:
    properties = schema.get("properties", {})
    missing = set(schema.get("required", ())) - value.keys()
    extra = value.keys() - properties.keys() if schema.get("additionalProperties") is False else set()
    if missing or extra:
        return f"lacks {missing}, has {extra}"
    found = {name: problem(one, properties[name], root) for name, one in value.items() if name in properties}
    return next((f"{name} {text}" for name, text in found.items() if text), "")


def array_problem(value: Any, schema: Any, root: Any) -> str:
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        return "has a wrong number of items"
    found = [problem(one, schema.get("items", {}), root) for one in value]
    return next((f"[{index}] {text}" for index, text in enumerate(found) if text), "")


def string_problem(value: Any, schema: Any, _root: Any) -> str:
    if len(value) < schema.get("minLength", 0):
        return "is too short"
    return "" if re.search(schema.get("pattern", ""), value) else f"does not match {schema['pattern']}"
