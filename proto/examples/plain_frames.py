"""Frames of proto/SPEC.md in plain Python: prefix, control and bodies, checked in the order of trust.

Sections 4 and 5 of the specification, and nothing of this package: it needs msgpack, xxhash and crc32c. Invariant:
what is returned has passed every check before it; ``Refused`` carries the code of the first that failed. Used by
`plain_peer`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgpack
import xxhash
from crc32c import crc32c

Key = tuple[int, int, int]
PREFIX = struct.Struct("<4sBBBBIHHQQIIII")
HELLO, ACCEPT, REJECT, OPEN, CONTEXT, STEP, ROW, COMPLETION = 1, 2, 3, 16, 17, 18, 19, 20
COMMIT, RESET, CANCEL, CLOSE, PING, PONG, ERROR, STATS = 21, 22, 23, 24, 32, 33, 35, 36
TYPES = {HELLO, ACCEPT, REJECT, 4, *range(OPEN, CLOSE + 1), PING, PONG, 34, ERROR, STATS}
NO_KEY = (2**32 - 1, 0, 0)
# Fields of the messages that a drafter takes: u unsigned integer, b byte string, s text, l list.
FIELDS = {
    HELLO: "lbbuuuuuuuuuuuub", OPEN: "uuuuuuubuuu", CONTEXT: "uuul", STEP: "ll", COMMIT: "uuuub", RESET: "uuub",
    CANCEL: "uu", CLOSE: "uu", PING: "uu", PONG: "uuuu", ERROR: "uuus", STATS: "uuuuuul",
}  # fmt: skip
BODY_FIELDS = "uuuuuub"
KINDS = {int: "u", bytes: "b", str: "s", list: "l"}


class Refused(Exception):
    """A received frame breaks a rule; the text is the code's name."""


def require(holds: bool, code: str) -> None:
    if not holds:
        raise Refused(code)


def aligned(length: int) -> int:
    return -(-length // 64) * 64


def fits(values: Any, kinds: str) -> bool:
    """Whether a list has these sorts of fields; integers are unsigned 64-bit, as no msgpack form is longer."""
    if not isinstance(values, list) or [KINDS.get(type(value)) for value in values] != list(kinds):
        return False
    return all(value >= 0 for value in values if isinstance(value, int))


def pack(values: list[Any]) -> bytes:
    return msgpack.packb(values, use_bin_type=True)


def unpack(data: bytes) -> Any:
    """The one legal encoding, or NONCANONICAL: decode, encode again, compare."""
    try:
        values = msgpack.unpackb(data, raw=False)
    except Exception:
        raise Refused("NONCANONICAL") from None
    require(isinstance(values, list) and plain(values, 3) and pack(values) == data, "NONCANONICAL")
    return values


def plain(values: list[Any], depth: int) -> bool:
    """Whether values are integers, byte strings and texts, in at most ``depth`` nested lists."""
    nested = [one for one in values if type(one) is list]
    flat = all(type(one) in (int, bytes, str, list) for one in values)
    return flat and (not nested or (depth > 1 and all(plain(one, depth - 1) for one in nested)))


def checksum(kind: int, data: bytes) -> bytes:
    return (xxhash.xxh3_64_intdigest(data) if kind == 2 else crc32c(data)).to_bytes(8, "little")


def encode(kind: int, key: Key, control: list[Any], bodies: tuple[bytes, ...] = ()) -> bytes:
    slot, generation, round_ = key
    packed = pack(control)
    parts = [body + bytes(aligned(len(body)) - len(body)) for body in bodies]
    head = PREFIX.pack(b"DSPK", 2, 0, kind, 0, len(packed), len(bodies), 0, sum(map(len, parts)), generation, slot,
                       round_, crc32c(packed), 0)[:44]  # fmt: skip
    start = head + struct.pack("<I", crc32c(head)) + packed
    return b"".join((start, bytes(aligned(len(start)) - len(start)), *parts))


def read_prefix(frame: bytes) -> tuple[int, Key, int, int, int, int]:
    """(type, key, control length, control crc, body count, body length), in the order of section 4.1."""
    require(len(frame) >= 48, "WRONG_SIZE")
    (magic, major, _, kind, flags, length, bodies, reserved, body_bytes, generation, slot, round_, control_crc,
     prefix_crc) = PREFIX.unpack_from(frame)  # fmt: skip
    require(magic == b"DSPK", "BAD_MAGIC")
    require(prefix_crc == crc32c(frame[:44]), "BAD_PREFIX_CRC")
    require(major == 2, "BAD_VERSION")
    require(kind in TYPES, "UNKNOWN_TYPE")
    require(not flags and not reserved, "RESERVED_NOT_ZERO")
    require(0 < length <= 4096 and bodies <= 32 and body_bytes <= 2**26, "LIMIT_EXCEEDED")
    require(body_bytes % 64 == 0 and bool(body_bytes) == bool(bodies), "WRONG_SIZE")
    return kind, (slot, generation, round_), length, control_crc, bodies, body_bytes


def read_control(frame: bytes) -> list[Any]:
    kind, _, length, control_crc, count, body_bytes = read_prefix(frame)
    require(len(frame) == aligned(48 + length) + body_bytes, "WRONG_SIZE")
    packed = frame[48 : 48 + length]
    require(crc32c(packed) == control_crc, "BAD_CONTROL_CRC")
    control: list[Any] = unpack(packed)
    require(fits(control, FIELDS.get(kind, "")), "BAD_FIELD")
    require(not any(frame[48 + length : aligned(48 + length)]), "BAD_PADDING")
    described = control[-1] if kind in (CONTEXT, STEP) else []
    require(all(fits(one, BODY_FIELDS) for one in described), "BAD_FIELD")
    sizes = [one[4] for one in described]
    require(len(sizes) == count and sum(map(aligned, sizes)) == body_bytes, "BAD_DESCRIPTOR")
    return control


def read_bodies(
    frame: bytes, described: list[list[Any]], expected: Sequence[tuple[int, ...]], kind: int
) -> list[bytes]:
    """The bodies, when their descriptors are exactly the ``expected`` (kind, dtype, rows, entries, bytes)."""
    require([tuple(one[:5]) for one in described] == expected, "BAD_DESCRIPTOR")
    require(all(one[5] == kind for one in described), "BAD_DESCRIPTOR")
    bodies, start = [], aligned(48 + int.from_bytes(frame[8:12], "little"))
    for one in described:
        body, end = frame[start : start + one[4]], start + aligned(one[4])
        require(not any(frame[start + one[4] : end]), "BAD_PADDING")
        require(checksum(kind, body) == one[6], "BAD_BODY_CHECKSUM")
        bodies.append(body)
        start = end
    return bodies
