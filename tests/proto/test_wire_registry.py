"""The enumerations, scopes and limits equal proto/registry.toml, in both directions."""

from __future__ import annotations

import tomllib
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

from dspark_proto import limits, registry
from dspark_proto.frame import MESSAGES
from dspark_proto.prefix import MAGIC, MAJOR, MINOR
from dspark_proto.states import DRAFTER_RECEIVES, VERIFIER_RECEIVES

TOML = tomllib.loads((Path(__file__).parents[2] / "proto" / "registry.toml").read_text())
ENUMERATIONS: dict[str, type[IntEnum]] = {
    "message": registry.MessageType,
    "version": registry.WireVersion,
    "scope": registry.Scope,
    "checksum": registry.Checksum,
    "semantic": registry.SemanticId,
    "verifier": registry.VerifierId,
    "rng": registry.RngAbi,
    "precision": registry.Precision,
    "draft_layout": registry.DraftLayout,
    "lane": registry.Lane,
    "support": registry.SupportPolicy,
    "representation": registry.Representation,
    "capability": registry.Capability,
    "dtype": registry.Dtype,
    "body": registry.BodyKind,
    "cause": registry.Cause,
}


@pytest.mark.parametrize("table", ENUMERATIONS)
def test_enumeration_equals_its_table(table: str) -> None:
    assert {row["name"]: row["id"] for row in TOML[table]} == {m.name: int(m) for m in ENUMERATIONS[table]}


def test_error_codes_and_scopes_equal_their_table() -> None:
    rows = {row["name"]: (row["code"], row["scope"]) for row in TOML["error"]}
    assert rows == {code.name: (int(code), registry.SCOPES[code].name) for code in registry.ErrorCode}


def test_capability_bits_are_the_ids_of_the_table() -> None:
    assert {row["name"]: 1 << (row["id"] - 1) for row in TOML["capability"]} == {
        one.name: one.mask for one in registry.Capability
    }


def test_every_list_in_the_toml_is_compared() -> None:
    lists = {name for name, value in TOML.items() if isinstance(value, list)}
    assert lists == {*ENUMERATIONS, "error", "reserved"}


def test_reserved_ids_are_not_in_use() -> None:
    for row in TOML["reserved"]:
        assert row["id"] not in {int(member) for member in ENUMERATIONS[row["registry"]]}


@pytest.mark.parametrize("name", TOML["limits"])
def test_limit(name: str) -> None:
    assert getattr(limits, name.upper()) == TOML["limits"][name]


def test_protocol_constants() -> None:
    assert (TOML["magic"].encode(), TOML["major"], TOML["minor"]) == (MAGIC, MAJOR, MINOR)


def _receivers(row: dict[str, Any]) -> tuple[bool, bool]:
    kind = registry.MessageType[row["name"]]
    return kind in DRAFTER_RECEIVES, kind in VERIFIER_RECEIVES


@pytest.mark.parametrize("row", TOML["message"], ids=lambda row: row["name"])
def test_direction_says_who_receives(row: dict[str, Any]) -> None:
    expected = {"V->D": (True, False), "D->V": (False, True), "both": (True, True)}[row["direction"]]
    assert _receivers(row) == expected


def test_every_message_type_has_a_class() -> None:
    assert set(MESSAGES) == set(registry.MessageType)
