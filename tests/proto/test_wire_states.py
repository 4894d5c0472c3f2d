"""The state tables of the code, and the tables and diagrams of SPEC.md, are the same and complete."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from dspark_proto.states import DRAFTER_CONNECTION, SLOT, VERIFIER_CONNECTION

SPECIFICATION = (Path(__file__).parents[2] / "proto" / "SPEC.md").read_text()


def table_after(heading: str) -> dict[str, dict[str, str]]:
    """state -> action -> next state, from the first Markdown table after ``heading``."""
    lines = SPECIFICATION.split(heading)[1].splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    actions = rows[0][1:]
    return {
        state: {action: following for action, following in zip(actions, cells, strict=True) if following}
        for state, *cells in rows[2:]
    }


def names(table: Mapping[Any, Mapping[str, Enum]]) -> dict[str, dict[str, str]]:
    return {state.name: {action: following.name for action, following in row.items()} for state, row in table.items()}


@pytest.mark.parametrize(
    ("heading", "table"),
    [
        ("### 3.1", VERIFIER_CONNECTION),
        ("### 3.2", DRAFTER_CONNECTION),
        ("### 3.3", SLOT),
    ],
)
def test_specification_shows_the_table(heading: str, table: Mapping[Any, Mapping[str, Enum]]) -> None:
    assert table_after(heading) == names(table)


def arrows_after(heading: str) -> dict[str, dict[str, str]]:
    """state -> action -> next state, from the first Mermaid diagram after ``heading``."""
    diagram = SPECIFICATION.split(heading)[1].split("```mermaid")[1].split("```")[0]
    found: dict[str, dict[str, str]] = {}
    for state, following, actions in re.findall(r"^    (\w+) --> (\w+): (.*)$", diagram, re.M):
        for action in actions.split(", "):
            assert action not in found.setdefault(state, {}), "two arrows of one action"
            found[state][action] = following
    return found


@pytest.mark.parametrize(
    ("heading", "table"),
    [("### 3.1", VERIFIER_CONNECTION), ("### 3.2", DRAFTER_CONNECTION), ("### 3.3", SLOT)],
)
def test_specification_draws_every_entry(heading: str, table: Mapping[Any, Mapping[str, Enum]]) -> None:
    assert arrows_after(heading) == names(table)
    first = next(iter(table))
    assert f"[*] --> {first.name}" in SPECIFICATION.split(heading)[1].split("\n### ")[0]


@pytest.mark.parametrize("table", [VERIFIER_CONNECTION, DRAFTER_CONNECTION, SLOT])
def test_every_state_has_a_row_and_is_reachable(table: Mapping[Any, Mapping[str, Enum]]) -> None:
    first = next(iter(table))
    assert set(table) == set(type(first))
    reached = {first}
    while grown := {following for state in reached for following in table[state].values()} - reached:
        reached |= grown
    assert reached == set(table)
