"""Ids of cases are for ever: none vanishes, none changes its meaning, and new ones are written down."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dspark_proto.conformance import Case, all_cases
from dspark_proto.conformance.case_list import LIST_FILE, as_text, broken_promises, listed, update
from dspark_proto.conformance.record import Level, Role

CASES = all_cases()


def test_no_id_vanished_or_changed_its_meaning() -> None:
    known = listed(LIST_FILE.read_text("utf-8"))
    assert len(known) >= 628
    assert broken_promises(known, CASES) == []


def test_every_case_is_listed() -> None:
    missing = "run python -m dspark_proto.conformance.case_list"
    assert LIST_FILE.read_text("utf-8") == as_text(CASES), missing


@pytest.mark.parametrize(
    "changed",
    [
        [],
        [replace(CASES[0], title="another title")],
        [replace(CASES[0], level=Level.MAY)],
        [replace(CASES[0], role=Role.CODEC)],
        [replace(CASES[0], anchor="REQ-PNG-1")],
        [replace(CASES[0], id="DSP2-ZZZ-999")],
    ],
    ids=["gone", "title", "level", "role", "rule", "id"],
)
def test_a_case_that_is_gone_or_changed_is_named_and_the_list_is_kept(tmp_path: Path, changed: list[Case]) -> None:
    path = tmp_path / "cases.txt"
    update(path, CASES[:2])
    before = path.read_text("utf-8")
    with pytest.raises(ValueError, match=CASES[0].id):
        update(path, [*changed, CASES[1]])
    assert path.read_text("utf-8") == before


def test_new_cases_are_added(tmp_path: Path) -> None:
    path = tmp_path / "cases.txt"
    update(path, CASES[:2])
    update(path, CASES[:3])
    assert list(listed(path.read_text("utf-8"))) == [case.id for case in CASES[:3]]
