"""SPEC.md against the code: generated parts, field tables, requirements, key words and the round in bytes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from dspark.philox import Domain, Keys
from dspark_proto.bodies import BodyDescriptor
from dspark_proto.conformance.requirements import REQUIREMENTS as COPY
from dspark_proto.digest import prefix_digest
from dspark_proto.fields import Record
from dspark_proto.frame import MESSAGES, decode_frame
from dspark_proto.hello import Compatibility
from dspark_proto.messages import StatsCounter, StepItem
from dspark_proto.registry import ErrorCode
from dspark_proto.standard import SPECIFICATION, generated, requirements, written
from dspark_proto.standard.__main__ import main
from dspark_proto.standard.document import PARTS
from dspark_proto.standard.fields import kind_of
from dspark_proto.standard.matrix import CASES, REASONS, cases_by_requirement, matrix, shortened
from dspark_proto.standard.worked_round import conversation, hex_lines

TEXT = SPECIFICATION.read_text("utf-8")
REQUIREMENTS = requirements(TEXT)
RECORDS: dict[str, type[Record]] = {kind.name: record for kind, record in MESSAGES.items()} | {
    "BODY": BodyDescriptor,
    "ITEM": StepItem,
    "COUNTER": StatsCounter,
    "compat": Compatibility,
}
ROOT = Path(__file__).parents[2]


def prose() -> str:
    """Everything that a person wrote, without the generated parts."""
    text = TEXT
    for part in generated(TEXT).values():
        text = text.replace(part, "")
    return text


# What is generated


def test_generated_parts_are_up_to_date() -> None:
    """Run `python -m dspark_proto.standard --write` when this fails."""
    now, wanted = generated(TEXT), generated(written(TEXT))
    assert [name for name in wanted if now[name] != wanted[name]] == []
    assert set(now) == set(PARTS)


def test_the_command_finds_and_repairs_a_stale_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy, fresh = tmp_path / "SPEC.md", written(TEXT)
    copy.write_text(fresh.replace("| 83 | DUPLICATE |", "| 84 | DUPLICATE |"))
    assert main([], copy) == 1
    assert "--write" in capsys.readouterr().err
    assert main(["--write"], copy) == 0
    assert copy.read_text() == fresh
    assert main([], copy) == 0


def test_prose_survives_writing() -> None:
    changed = TEXT.replace("## 1. Terms", "## 1. Terms, changed")
    assert written(changed).replace("## 1. Terms, changed", "## 1. Terms") == written(TEXT)


def test_a_marker_that_nothing_belongs_to_is_an_error() -> None:
    with pytest.raises(KeyError):
        written("<!-- generated: nothing-of-ours -->\n<!-- end -->")


# Requirements


def test_requirements_are_unique_list_items() -> None:
    anchors = [one.anchor for one in REQUIREMENTS]
    assert len(set(anchors)) == len(anchors) > 150
    mentioned = set(re.findall(r"\{#(REQ-[A-Z]+-\d+)\}", TEXT)) - {"REQ-ABC-1"}
    assert mentioned == set(anchors), "an anchor that starts no list item is no requirement"


def test_requirements_know_their_section_and_whole_sentence() -> None:
    found = {one.anchor: one for one in REQUIREMENTS}
    assert found["REQ-ZMQ-2"].section == "14"
    assert found["REQ-AUT-1"].section == "6.1"
    assert found["REQ-FRM-2"].sentence == (
        "Each body starts at a multiple of 64 from the frame's start and is followed by zeros to the next one."
    )
    assert found["REQ-PFX-8"].sentence.endswith("WRONG_SIZE.")


def test_every_must_of_the_prose_stands_in_a_requirement() -> None:
    """A key word outside a list item with an anchor would be a rule that nobody can cite."""
    text = prose()
    inside = " ".join(one.sentence for one in REQUIREMENTS)
    for word in ("MUST", "SHOULD"):
        head = len(re.findall(rf"\b{word}\b", text.split("## 1. Terms")[0]))
        rest = len(re.findall(rf"\b{word}\b", text)) - head
        apart = {"MUST": 2, "SHOULD": 1}[word]
        assert rest - len(re.findall(rf"\b{word}\b", inside)) == apart, word


def test_the_sentences_become_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--requirements"]) == 0
    module = ast.parse(capsys.readouterr().out)
    (assignment,) = (node for node in module.body if isinstance(node, ast.AnnAssign))
    assert assignment.value is not None
    assert ast.literal_eval(assignment.value) == {one.anchor: one.sentence for one in REQUIREMENTS}


def test_requirements_that_are_cited_exist() -> None:
    anchors = {one.anchor for one in REQUIREMENTS}
    assert set(re.findall(r"REQ-[A-Z]{3}-\d+", TEXT)) - anchors == {"REQ-ABC-1"}


def test_error_codes_that_are_cited_exist_and_all_are_explained() -> None:
    names = {code.name for code in ErrorCode}
    text = prose()
    cited = {name for name in names if re.search(rf"\b{name}\b", text)}
    only_in_the_table = names - cited
    assert only_in_the_table == {"BAD_MAGIC", "STAGING_EXHAUSTED", "DRAFT_NOT_FINITE"} - cited
    for word in set(re.findall(r"\b(?:BAD|STALE|WRONG|SLOT|AUTH)_[A-Z_]+\b", text)):
        assert word in names, word


def test_links_inside_the_document_lead_somewhere() -> None:
    headings = re.findall(r"^#{2,4} (.*)$", TEXT, re.M)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    targets = re.findall(r"\]\(#([^)]+)\)", TEXT)
    assert len(targets) >= 18
    assert set(targets) <= anchors


# The compliance matrix


def test_every_requirement_has_a_case_or_a_reason() -> None:
    cases = cases_by_requirement(CASES.read_text("utf-8"))
    anchors = [one.anchor for one in REQUIREMENTS]
    assert set(cases) <= set(anchors)
    assert set(REASONS) <= set(anchors)
    assert [one for one in anchors if one not in cases and len(REASONS.get(one, "").split()) < 4] == []


def test_files_that_a_reason_names_exist() -> None:
    for reason in REASONS.values():
        for path in re.findall(r"(?:tests|proto)/\S+\.(?:py|json)", reason):
            assert (ROOT / path).is_file(), path


def test_case_numbers_are_shortened_to_runs() -> None:
    cases = ["DSP2-ROW-103", "DSP2-ROW-101", "DSP2-ROW-102", "DSP2-ROW-201", "DSP2-CAN-007"]
    assert shortened(cases) == "DSP2-CAN-007; DSP2-ROW-101 .. 103, 201"


def test_the_matrix_shows_cases_before_reasons() -> None:
    line = "DSP2-XYZ-001  drafter   MUST    REQ-SEC-1   a title with words"
    shown = matrix({"REQ-SEC-1": "15", "REQ-SEC-2": "15"}, line)
    assert "| REQ-SEC-1 | 15 | DSP2-XYZ-001 |" in shown
    assert f"| REQ-SEC-2 | 15 | none: {REASONS['REQ-SEC-2']} |" in shown
    assert shown.startswith("2 requirements; 1 of them have cases, 1 in all.")


# Fields


def field_table(name: str) -> list[tuple[str, str]]:
    """(field, kind) of the table whose head names ``name``."""
    (table,) = re.findall(rf"^\| {name} \| kind \| meaning \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", TEXT, re.M)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [(field.strip("`"), kind) for field, kind, _ in rows]


@pytest.mark.parametrize("name", RECORDS)
def test_field_table_equals_the_layout(name: str) -> None:
    assert field_table(name) == [(field.name, kind_of(field)) for field in RECORDS[name].LAYOUT]


def test_every_id_kind_has_its_registry_in_the_document() -> None:
    kinds = set(re.findall(r"\| id \((\w+)\) \|", TEXT))
    titles = set(re.findall(r"^\*\*(\w+): ", generated(TEXT)["ids"], re.M))
    assert kinds - titles - {"registry"} == {"ErrorCode", "Scope"}, "these two are in section 12"


def test_kinds_show_range_length_and_registry() -> None:
    shown = {field.name: kind_of(field) for field in MESSAGES[MESSAGES_BY_NAME["HELLO"]].LAYOUT}
    assert shown["wire_versions"] == "list of 1 .. 8 uint 0 .. 2^16 - 1"
    assert (shown["compat"], shown["compat_hash"]) == ("bin 1 .. 1,024", "bin 32")
    assert kind_of(BodyDescriptor.LAYOUT[0]) == "id (BodyKind)"


MESSAGES_BY_NAME = {kind.name: kind for kind in MESSAGES}


# The round in bytes


def shown_frames() -> list[bytes]:
    """The frames of section 17, read back from their hex dumps."""
    frames = []
    for block in re.findall(r"```text\nprefix: .*?```", generated(TEXT)["worked-round"], re.S):
        frame = bytearray()
        for line in block.split("\n\n")[1].splitlines()[:-1]:
            if re.fullmatch(r"[0-9a-f]{4}", line):
                frame += bytes(int(line, 16) - len(frame))
            elif line != "*":
                offset, data = line.split("  ")
                frame += bytes(int(offset, 16) - len(frame))
                frame += bytes.fromhex(data)
        frames.append(bytes(frame))
    return frames


def test_the_bytes_of_section_17_are_the_frames_of_the_connections() -> None:
    frames = shown_frames()
    assert frames == [frame for _, frame in conversation()]
    names = ["HELLO", "ACCEPT", "OPEN", "CONTEXT", "STEP", "ROW", "COMPLETION", "STEP"]
    assert [decode_frame(frame).prefix.type.name for frame in frames] == names


def test_the_drafts_of_section_17_are_drawn_as_section_10_says() -> None:
    keys = Keys(-1, 0, 1, 0)
    assert keys.words(Domain.PROPOSAL, 4) == (616752442, 1912704175, 3886998619, 335860284)
    assert keys.draw24(Domain.PROPOSAL, 4) == 2409189 < 12_582_912
    for figure in ("616752442, 1912704175, 3886998619, 335860284", "u = 2409189"):
        assert figure in prose()


def test_digests_and_proof_parts_that_the_text_quotes() -> None:
    assert f"`{prefix_digest([5, 6, 7]).hex()}`" in prose()
    first = (16).to_bytes(4, "little") + b"dspark2 verifier"
    assert f"`{first[:14].hex(' ')} ...`" in prose()


def test_hex_lines_leave_out_repeated_zeros_only() -> None:
    frame = bytes(range(1, 17)) + bytes(48) + b"\1" + bytes(15)
    assert hex_lines(frame) == [
        "0000  01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f 10",
        f"0010  {' '.join(['00'] * 16)}",
        "*",
        f"0040  01 {' '.join(['00'] * 15)}",
        "0050",
    ]


def test_the_harness_has_the_standards_sentences() -> None:
    assert {one.anchor: one.sentence for one in REQUIREMENTS} == COPY
