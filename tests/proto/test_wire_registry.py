"""The enumerations, scopes and limits equal proto/registry.toml, in both directions."""

from __future__ import annotations

import tomllib
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

from dspark_proto import limits, registry
from dspark_proto.canonical import ARRAY_LENGTH_MAX
from dspark_proto.drafter_sessions import _SILENT
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
    assert lists == {*ENUMERATIONS, "error", "limit", "reserved"}


def test_reserved_ids_are_not_in_use() -> None:
    for row in TOML["reserved"]:
        assert row["id"] not in {int(member) for member in ENUMERATIONS[row["registry"]]}


def test_limits_equal_their_table() -> None:
    """In both directions; the width of an integer and the prefix's "no slot" are no limits of the protocol."""
    named = {row["name"].upper(): row["value"] for row in TOML["limit"]}
    apart = {"U8_MAX", "U16_MAX", "U32_MAX", "U64_MAX", "SLOT_NONE", "NANOSECONDS_PER_MS"}
    code = {name: value for name, value in vars(limits).items() if name.isupper() and name not in apart}
    assert named == code | {"CONTROL_ARRAY_MAX": ARRAY_LENGTH_MAX}


def test_what_is_only_counted_is_never_told() -> None:
    """`via` in the table is what the drafter does."""
    via = {registry.ErrorCode[row["name"]]: row["via"] for row in TOML["error"]}
    assert {via[code] for code in _SILENT} == {"count"}
    slot_codes = {code for code in registry.ErrorCode if 64 <= code < 96 and via[code] == "count"}
    assert slot_codes == _SILENT | {registry.ErrorCode.LATE}
    assert {via[code] for code in registry.ErrorCode if 70 <= code < 80} == {"ERROR"}
    assert set(via.values()) == {"count", "ERROR", "REJECT", "COMPLETION", "local"}


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
