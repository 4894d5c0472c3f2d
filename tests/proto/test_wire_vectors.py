"""The golden vectors in proto/vectors: other implementations are held to the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark_proto import (
    ErrorCode,
    MessageType,
    RemoteProtocolError,
    decode_frame,
    encode_frame,
    prefix_digest,
)

ROOT = Path(__file__).parents[2] / "proto"


def load(suite: str) -> list[dict[str, Any]]:
    document = json.loads((ROOT / "vectors" / f"{suite}.json").read_text())
    assert (document["suite"], document["wire_version"]) == (suite, "2.0")
    vectors: list[dict[str, Any]] = document["vectors"]
    return vectors


FRAMES, REFUSALS, DIGESTS = load("frames"), load("refusals"), load("digests")


def shown(value: Any) -> Any:
    """A control value as the vectors write it: byte strings as {"hex": ...}."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return [shown(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("vector", FRAMES, ids=lambda vector: vector["id"])
def test_frame_decodes_and_encodes_again(vector: dict[str, Any]) -> None:
    frame = decode_frame(bytes.fromhex(vector["frame_hex"]))
    prefix = frame.prefix
    assert prefix.type.name == vector["type"]
    assert [prefix.slot, prefix.generation, prefix.round] == vector["key"]
    assert shown(frame.message.values()) == vector["control"]
    assert [body.hex() for body in frame.bodies] == vector["bodies_hex"]
    assert encode_frame(frame.message, prefix.key, frame.bodies).hex() == vector["frame_hex"]


@pytest.mark.parametrize("vector", REFUSALS, ids=lambda vector: vector["id"])
def test_refusal(vector: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_frame(bytes.fromhex(vector["frame_hex"]))
    assert caught.value.code is ErrorCode[vector["error"]]
    assert vector["hunts"]


@pytest.mark.parametrize("vector", DIGESTS, ids=lambda vector: vector["id"])
def test_digest(vector: dict[str, Any]) -> None:
    assert prefix_digest(vector["tokens"]).hex() == vector["digest_hex"]


def test_every_message_type_has_a_vector() -> None:
    assert {vector["type"] for vector in FRAMES} == {kind.name for kind in MessageType}


def test_ids_are_unique_and_requirements_exist_in_the_specification() -> None:
    vectors = [*FRAMES, *REFUSALS, *DIGESTS]
    assert len({vector["id"] for vector in vectors}) == len(vectors)
    specification = (ROOT / "SPEC.md").read_text()
    for vector in vectors:
        assert f"{{#{vector['requirement']}}}" in specification, vector["id"]
