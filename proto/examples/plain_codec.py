"""Frames of proto/SPEC.md in plain Python: how to write a codec that shares no code with this package.

Sections 4 and 5 of the specification: prefix, control and bodies, each checked before the next one is looked at; the
first fault decides. Ids and codes come from the registry, which is data. Used by `plain_peer`; run by itself it
answers the codec pipe: `dspark conformance codec "python proto/examples/plain_codec.py"`.
"""

from __future__ import annotations

import json
import struct
import sys
import tomllib
from pathlib import Path

import msgpack
import xxhash
from crc32c import crc32c

REGISTRY = tomllib.loads((Path(__file__).parents[1] / "registry.toml").read_text())
TYPES = {row["name"]: row["id"] for row in REGISTRY["message"]}
NAMES = {number: name for name, number in TYPES.items()}
CODES = {row["name"]: row["code"] for row in REGISTRY["error"]}
NO_KEY = (2**32 - 1, 0, 0)
PREFIX = struct.Struct("<4sBBBBIHHQQIIII")


class Refused(Exception):
    """A received frame breaks a rule; the text is the code's name."""


def require(holds, code):
    if not holds:
        raise Refused(code)


# Fields: each check says whether a decoded value is right.


def uint(high, low=0):
    return lambda value: type(value) is int and low <= value <= high


def one_of(registry):
    return lambda value: type(value) is int and value in {row.get("id", row.get("code")) for row in REGISTRY[registry]}


def binary(low, high=None):
    return lambda value: type(value) is bytes and low <= len(value) <= (high or low)


def text(value):
    return type(value) is str and len(value) <= 96 and value.isascii() and (value == "" or value.isprintable())


def many(low, high, check):
    return lambda value: type(value) is list and low <= len(value) <= high and all(map(check, value))


def record(*checks):
    return lambda value: (
        type(value) is list and len(value) == len(checks) and all(c(one) for c, one in zip(checks, value, strict=True))
    )


# fmt: off
U8, U16, U32, U64, MS = uint(2**8 - 1), uint(2**16 - 1), uint(2**32 - 1), uint(2**64 - 1), uint(600_000, 1)
TOKEN = POSITION = uint(2**31 - 1)
SESSION, EPOCH, HASH, DIGEST, CODE, CAUSE = U64, U64, binary(32), binary(8), one_of("error"), one_of("cause")
CAPACITIES = uint(1024, 1), uint(32, 1), uint(256, 1), uint(1024, 2), uint(2**24, 1), MS, MS
BODY = record(one_of("body"), one_of("dtype"), uint(4096), uint(2**26), uint(2**26), one_of("checksum"), DIGEST)
BODIES = many(0, 32, BODY)
ITEM = record(SESSION, uint(1023), uint(2**63 - 1), U32, TOKEN, POSITION, DIGEST, uint(32, 1), one_of("lane"), U32, U8,
              TOKEN, POSITION, uint(4096))
COMPAT = {
    "vocab_size": uint(2**31 - 1, 1), "token_map_hash": HASH, "draft_identity": text, "target_identity": text,
    "tokenizer_hash": HASH, "tap_layers": many(1, 16, U16), "tap_dtype": uint(2, 1), "tap_width": uint(65536, 1),
    "draft_layout": one_of("draft_layout"), "semantic_id": one_of("semantic"), "verifier_id": one_of("verifier"),
    "rng_abi": one_of("rng"), "precision": one_of("precision"), "lanes": uint(7, 1), "wire_major": U16,
}
FIELDS = {
    "HELLO": record(many(1, 8, U16), HASH, binary(1, 1024), EPOCH, U32, *CAPACITIES, uint(2**16 - 1, 1), U32, U64,
                    binary(0, 64)),
    "ACCEPT": record(U16, HASH, EPOCH, EPOCH, U32, *CAPACITIES, one_of("checksum"), U32, U32, U64, binary(0, 32)),
    "REJECT": record(EPOCH, EPOCH, U32, CODE, text, text, text),
    "CHALLENGE": record(EPOCH, EPOCH, U32, HASH),
    "OPEN": record(SESSION, U64, uint(100_000_000), one_of("support"), one_of("lane"), U8, POSITION, DIGEST, U32, U32,
                   U32),
    "CONTEXT": record(SESSION, POSITION, uint(4096, 1), BODIES),
    "STEP": record(many(1, 32, ITEM), BODIES),
    "ROW": record(SESSION, EPOCH, uint(31), uint(32, 1), uint(32, 1), uint(256), one_of("representation"), BODIES),
    "COMPLETION": record(SESSION, EPOCH, POSITION, U32, DIGEST, U8, uint(32), U32, DIGEST, U32),
    "COMMIT": record(SESSION, uint(32), TOKEN, POSITION, DIGEST),
    "RESET": record(SESSION, CAUSE, POSITION, DIGEST),
    "CANCEL": record(SESSION, CAUSE),
    "CLOSE": record(SESSION, CAUSE),
    "PING": record(EPOCH, U64),
    "PONG": record(EPOCH, U64, uint(1000), U64),
    "DRAIN": record(EPOCH, MS),
    "ERROR": record(CODE, one_of("scope"), SESSION, text),
    "STATS": record(EPOCH, uint(1), uint(1024), uint(1024), uint(1024), U64, many(0, 128, record(CODE, U64))),
}
# fmt: on


def aligned(length):
    return -(-length // 64) * 64


def pack(values):
    return msgpack.packb(values, use_bin_type=True)


def unpack(data):
    """The one legal encoding, or NONCANONICAL: decode, encode again, compare."""
    try:
        values = msgpack.unpackb(data, max_array_len=128, max_map_len=0, max_ext_len=0)
    except Exception:
        raise Refused("NONCANONICAL") from None
    require(type(values) is list and plain(values, 3) and pack(values) == data, "NONCANONICAL")
    return values


def plain(values, depth):
    """Whether all values are integers, byte strings, texts, or lists of such, at most `depth` lists deep."""
    return depth > 0 and all(
        plain(one, depth - 1) if type(one) is list else type(one) in (int, bytes, str) for one in values
    )


def checksum(kind, data):
    return (xxhash.xxh3_64_intdigest(data) if kind == 2 else crc32c(data)).to_bytes(8, "little")


def encode(name, key, control, bodies=()):
    slot, generation, round_ = key
    packed, padded = pack(control), [body + bytes(aligned(len(body)) - len(body)) for body in bodies]
    sizes = len(packed), len(bodies), 0, sum(map(len, padded))
    head = PREFIX.pack(b"DSPK", 2, 0, TYPES[name], 0, *sizes, generation, slot, round_, crc32c(packed), 0)[:44]
    start = head + struct.pack("<I", crc32c(head)) + packed
    return b"".join((start, bytes(aligned(len(start)) - len(start)), *padded))


def read_prefix(frame):
    """Section 4.1: the name of the message, its key, and what the later checks need."""
    require(len(frame) >= 48, "WRONG_SIZE")
    magic, major, _, kind, flags, length, count, reserved, size, generation, slot, round_, control_crc, prefix_crc = (
        PREFIX.unpack_from(frame)
    )
    require(magic == b"DSPK", "BAD_MAGIC")
    require(prefix_crc == crc32c(frame[:44]), "BAD_PREFIX_CRC")
    require(major == 2, "BAD_VERSION")
    require(kind in NAMES, "UNKNOWN_TYPE")
    require(not flags and not reserved, "RESERVED_NOT_ZERO")
    require(0 < length <= 4096 and count <= 32 and size <= 2**26, "LIMIT_EXCEEDED")
    require(size % 64 == 0 and bool(size) == bool(count), "WRONG_SIZE")
    return NAMES[kind], (slot, generation, round_), (length, count, size, control_crc)


def read_control(frame, name, rest):
    length, count, size, control_crc = rest
    require(len(frame) == aligned(48 + length) + size, "WRONG_SIZE")
    packed = frame[48 : 48 + length]
    require(crc32c(packed) == control_crc, "BAD_CONTROL_CRC")
    control = unpack(packed)
    require(FIELDS[name](control), "BAD_FIELD")
    require(name != "STEP" or len({item[1] for item in control[0]}) == len(control[0]), "BAD_FIELD")
    require(not any(frame[48 + length : aligned(48 + length)]), "BAD_PADDING")
    sizes = [body[4] for body in control[-1]] if name in ("CONTEXT", "STEP", "ROW") else []
    require(len(sizes) == count and sum(map(aligned, sizes)) == size, "BAD_DESCRIPTOR")
    return control


def read_bodies(frame, described):
    """Yields each body of the descriptors when it is asked for, so that its shape is checked before its bytes."""
    start = len(frame) - sum(aligned(one[4]) for one in described)
    for *_, size, kind, expected in described:
        body, end = frame[start : start + size], start + aligned(size)
        require(not any(frame[start + size : end]), "BAD_PADDING")
        require(checksum(kind, body) == expected, "BAD_BODY_CHECKSUM")
        yield body
        start = end


def decode(frame):
    """A whole frame: (name, key, control, bodies). Raises `Refused`."""
    name, key, rest = read_prefix(frame)
    control = read_control(frame, name, rest)
    return name, key, control, list(read_bodies(frame, control[-1] if rest[1] else []))


def extend(digest, tokens):
    """The prefix digest (7.3) of a longer prefix."""
    for token in tokens:
        digest = checksum(2, digest + struct.pack("<I", token))
    return digest


def as_json(value):
    if type(value) is bytes:
        return {"hex": value.hex()}
    return [as_json(one) for one in value] if type(value) is list else value


def from_json(value):
    if type(value) is dict:
        return bytes.fromhex(value["hex"])
    return [from_json(one) for one in value] if type(value) is list else value


def answer(asked):
    """What the codec pipe asks (docs/guides/implement-a-peer.md, step 2)."""
    data, operation = bytes.fromhex(asked.get("hex", "")), asked["op"]
    if operation == "decode":
        name, key, control, bodies = decode(data)
        value = {"type": name, "key": key, "control": as_json(control), "bodies_hex": [body.hex() for body in bodies]}
        return {"ok": True, "value": value, "canonical_hex": encode(name, key, control, bodies).hex()}
    if operation == "encode":
        bodies = [bytes.fromhex(body) for body in asked["bodies_hex"]]
        frame = encode(asked["type"], asked["key"], from_json(asked["control"]), bodies)
        return {"ok": True, "canonical_hex": frame.hex()}
    if operation == "checksum":
        kind = {row["name"]: row["id"] for row in REGISTRY["checksum"]}[asked["kind"]]
        return {"ok": True, "value": {"checksum_hex": checksum(kind, data).hex()}}
    if operation == "digest":
        digest = extend(bytes.fromhex(asked.get("start_hex", "00" * 8)), asked["tokens"])
        return {"ok": True, "value": {"digest_hex": digest.hex()}}
    return {"unsupported": True}


def pipe(source, sink):
    """Length (u32) and JSON, in and out, until the input ends."""
    while len(length := source.read(4)) == 4:
        try:
            found = answer(json.loads(source.read(int.from_bytes(length, "little"))))
        except Refused as refusal:
            (scope,) = (row["scope"] for row in REGISTRY["error"] if row["name"] == str(refusal))
            found = {"error_code": str(refusal), "scope": scope}
        data = json.dumps(found).encode()
        sink.write(len(data).to_bytes(4, "little") + data)
        sink.flush()


if __name__ == "__main__":
    pipe(sys.stdin.buffer, sys.stdout.buffer)
