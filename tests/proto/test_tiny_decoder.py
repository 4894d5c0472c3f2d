"""The second decoder and the package's codec agree on every vector, and on damaged ones."""

from __future__ import annotations

import ast
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import tiny_decoder
from tiny_decoder import Fault, decode, read_rows

from dspark_proto import RemoteProtocolError, decode_frame
from dspark_proto.checksums import crc32c
from dspark_proto.codec_pipe import answer

VECTORS = Path(__file__).parents[2] / "proto" / "vectors"


def load(suite: str) -> list[dict[str, Any]]:
    vectors: list[dict[str, Any]] = json.loads((VECTORS / f"{suite}.json").read_text())["vectors"]
    return vectors


FRAMES, REFUSALS, ROWS = load("frames"), load("refusals"), load("rows")


def ours(frame: bytes) -> Any:
    """What the package's codec says: the values, or the code."""
    try:
        found = decode_frame(frame)
    except RemoteProtocolError as error:
        return error.code.name
    prefix = found.prefix
    key = [prefix.slot, prefix.generation, prefix.round]
    return prefix.type.name, key, found.message.values(), [bytes(body) for body in found.bodies]


def theirs(frame: bytes) -> Any:
    try:
        found = decode(frame)
    except Fault as fault:
        return str(fault)
    return found["type"], found["key"], found["control"], found["bodies"]


def shown(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return [shown(one) for one in value] if isinstance(value, list) else value


def test_it_imports_nothing_of_the_package() -> None:
    source = Path(tiny_decoder.__file__).read_text()
    imported = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    imported |= {
        name.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for name in node.names
    }
    assert imported == {"__future__", "itertools", "struct", "typing", "xxhash"}


@pytest.mark.parametrize("vector", FRAMES, ids=lambda vector: vector["id"])
def test_positive_vectors(vector: dict[str, Any]) -> None:
    frame = bytes.fromhex(vector["frame_hex"])
    found = decode(frame)
    assert (found["type"], found["key"], shown(found["control"])) == (vector["type"], vector["key"], vector["control"])
    assert [body.hex() for body in found["bodies"]] == vector["bodies_hex"]
    assert theirs(frame) == ours(frame)


@pytest.mark.parametrize("vector", REFUSALS, ids=lambda vector: vector["id"])
def test_negative_vectors(vector: dict[str, Any]) -> None:
    frame = bytes.fromhex(vector["frame_hex"])
    assert theirs(frame) == ours(frame) == vector["error"]


@pytest.mark.parametrize("vector", ROWS, ids=lambda vector: vector["id"])
def test_row_vectors(vector: dict[str, Any]) -> None:
    block, sizes = bytes.fromhex(vector["block_hex"]), (vector["depth"], vector["support"], vector["vocab_size"])
    request = {
        "op": "validate_row",
        "hex": vector["block_hex"],
        **{name: vector[name] for name in ("depth", "support")},
    }
    ours = answer({**request, "vocab_size": vector["vocab_size"]})
    if "value" in vector:
        assert read_rows(block, *sizes) == vector["value"] == ours["value"]
        return
    with pytest.raises(Fault, match=f"^{vector['error']}$"):
        read_rows(block, *sizes)
    assert ours["error_code"] == vector["error"]


def test_digests() -> None:
    for vector in load("digests"):
        assert tiny_decoder.digest(vector["tokens"]).hex() == vector["digest_hex"]


def test_the_crc_is_castagnoli() -> None:
    assert tiny_decoder.crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("seed", range(6))
def test_both_decoders_agree_on_damaged_frames(seed: int) -> None:
    """Bytes of prefix or control are changed, with the crcs made to fit, so that the later checks are reached."""
    chance = random.Random(seed)
    verdicts = set()
    for vector in FRAMES:
        for _ in range(20):
            frame = damaged(bytearray.fromhex(vector["frame_hex"]), chance)
            verdict = ours(frame)
            assert theirs(frame) == verdict, frame.hex()
            verdicts.add(verdict if isinstance(verdict, str) else "accepted")
    assert {"accepted", "BAD_FIELD", "NONCANONICAL", "WRONG_SIZE"} <= verdicts


def damaged(frame: bytearray, chance: random.Random) -> bytes:
    (length,) = struct.unpack_from("<I", frame, 8)
    for _ in range(chance.choice((1, 1, 2))):
        place = chance.choice((chance.randrange(4, 40), chance.randrange(48, 48 + length), 48))
        frame[place] = chance.choice((frame[place] ^ 1 << chance.randrange(8), chance.randrange(256)))
    struct.pack_into("<I", frame, 40, crc32c(bytes(frame[48 : 48 + length])))
    struct.pack_into("<I", frame, 44, crc32c(bytes(frame[:44])))
    return bytes(frame)
