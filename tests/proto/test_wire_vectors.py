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
    ReplyLayout,
    decode_frame,
    encode_frame,
    prefix_digest,
)
from dspark_proto.messages import Row
from dspark_proto.rows import RowRecords, check_reply, write_reply

ROOT = Path(__file__).parents[2] / "proto"


def load(suite: str) -> list[dict[str, Any]]:
    document = json.loads((ROOT / "vectors" / f"{suite}.json").read_text())
    assert (document["suite"], document["wire_version"]) == (suite, "2.0")
    vectors: list[dict[str, Any]] = document["vectors"]
    return vectors


FRAMES, REFUSALS, DIGESTS, ROWS = load("frames"), load("refusals"), load("digests"), load("rows")


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


@pytest.mark.parametrize("vector", ROWS, ids=lambda vector: vector["id"])
def test_reply_block(vector: dict[str, Any]) -> None:
    """Sizes, records and crcs; whether the values are dyadic rows is another layer's question (`test_codec_pipe`)."""
    block = memoryview(bytes.fromhex(vector["block_hex"]))
    support, vocab_size, error = vector["support"], vector["vocab_size"], vector.get("error", "")
    layout = ReplyLayout(vector["depth"], support, 0 if support else vocab_size)
    assert (len(block) == layout.total_bytes) is (error != "WRONG_SIZE")
    if error.startswith("BAD_ROW"):
        with pytest.raises(RemoteProtocolError) as caught:
            check_reply(block, layout, vocab_size)
        assert caught.value.code is ErrorCode[error]
    elif error != "WRONG_SIZE":
        _written_again(block, layout, check_reply(block, layout, vocab_size), vector.get("value"))


def _written_again(
    block: memoryview, layout: ReplyLayout, records: RowRecords, value: dict[str, list[int]] | None
) -> None:
    """The records are those of the vector, and a writer makes the same bytes of them."""
    if value is not None:
        assert records._asdict() == {name: tuple(column) for name, column in value.items()}
    again = memoryview(bytearray(len(block)))
    ids, q = block[layout.ids_offset : layout.q_offset], block[layout.q_offset :]
    write_reply(again, layout, records.tokens, records.entries, ids, q, records.confidences)
    assert again == block


@pytest.mark.parametrize("names", [("ROW-1",), ("ROW-2", "ROW-3")])
def test_rows_of_the_frame_vectors_are_a_reply(names: tuple[str, ...]) -> None:
    rows = [decode_frame(bytes.fromhex(v["frame_hex"])) for v in FRAMES if v["id"] in names]
    message = rows[0].message
    assert isinstance(message, Row)
    layout = ReplyLayout(message.depth, message.support, 0 if message.support else message.bodies[-1].entries)
    block = memoryview(bytearray(layout.total_bytes))
    for row in rows:
        assert isinstance(row.message, Row)
        spans = layout.spans(row.message.first_row, row.message.row_count)
        for (start, length), body in zip(spans, row.bodies, strict=True):
            block[start : start + length] = body
    assert len(check_reply(block, layout, 1000).tokens) == message.depth


def test_every_message_type_has_a_vector() -> None:
    assert {vector["type"] for vector in FRAMES} == {kind.name for kind in MessageType}


def test_each_refusal_names_a_bug_of_its_own() -> None:
    hunted = [vector["hunts"] for vector in REFUSALS]
    assert len(set(hunted)) == len(hunted)
    assert all(len(bug.split()) >= 5 for bug in hunted)


def test_ids_are_unique_and_requirements_exist_in_the_specification() -> None:
    vectors = [*FRAMES, *REFUSALS, *DIGESTS, *ROWS]
    assert len({vector["id"] for vector in vectors}) == len(vectors)
    specification = (ROOT / "SPEC.md").read_text()
    for vector in vectors:
        assert f"{{#{vector['requirement']}}}" in specification, vector["id"]
