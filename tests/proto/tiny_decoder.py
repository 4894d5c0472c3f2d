"""A second decoder of v2 frames, written from proto/SPEC.md alone: it imports nothing of the package.

Only struct, xxhash (for XXH3-64 and the test of body checksums) and what is below: its own CRC32C table, its own subset
of msgpack, its own tables of fields. `decode` returns a plain dictionary or raises `Fault` with the code's name;
`read_rows` does the same for a block of q rows. The golden vectors hold it and the package's codec to each other.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any

import xxhash

U8, U16, U32, U64 = 2**8 - 1, 2**16 - 1, 2**32 - 1, 2**64 - 1
INT31, MIB64 = 2**31 - 1, 2**26
PREFIX = struct.Struct("<4sBBBBIHHQQIIII")

# A field is (lowest, highest) for an unsigned integer, a set of ids, ("bin", least, most), ("text", most), or
# ("list", least, most, fields of an item), where an item of one field stands for itself.
SESSION = EPOCH = NONCE = (0, U64)
DIGEST = ("bin", 8, 8)
HASH = ("bin", 32, 32)
TEXT = ("text", 96)
CAUSE, LANE, SUPPORT, CHECKSUM = set(range(1, 8)), {1, 2, 3}, {0, 1, 16, 32, 64, 256}, {1, 2}
CODES = {*range(1, 14), *range(32, 44), *range(64, 86), *range(96, 104)}
CAPACITIES = [(1, 1024), (1, 32), (1, 256), (2, 1024), (1, 2**24), (1, 600_000), (1, 600_000)]
BODY = [{1, 2, 3, 4, 5}, {0, 1, 2, 3}, (0, 4096), (0, MIB64), (0, MIB64), CHECKSUM, DIGEST]
BODIES = ("list", 0, 32, BODY)
ITEM = [
    SESSION, (0, 1023), (0, 2**63 - 1), (0, U32), (0, INT31), (0, INT31), DIGEST, (1, 32), LANE, (0, U32), (0, 255),
    (0, INT31), (0, INT31), (0, 4096),
]  # fmt: skip
MESSAGES: dict[int, tuple[str, list[Any]]] = {
    1: ("HELLO", [("list", 1, 8, [(0, U16)]), HASH, ("bin", 1, 1024), EPOCH, (0, U32), *CAPACITIES, (1, U16), (0, U32),
                  (0, U64), ("bin", 0, 64)]),
    2: ("ACCEPT", [(0, U16), HASH, EPOCH, EPOCH, (0, U32), *CAPACITIES, CHECKSUM, (0, U32), (0, U32), (0, U64),
                   ("bin", 0, 32)]),
    3: ("REJECT", [EPOCH, EPOCH, (0, U32), CODES, TEXT, TEXT, TEXT]),
    4: ("CHALLENGE", [EPOCH, EPOCH, (0, U32), HASH]),
    16: ("OPEN", [SESSION, (0, U64), (0, 100_000_000), SUPPORT, LANE, (0, 255), (0, INT31), DIGEST, *[(0, U32)] * 3]),
    17: ("CONTEXT", [SESSION, (0, INT31), (1, 4096), BODIES]),
    18: ("STEP", [("list", 1, 32, ITEM), BODIES]),
    19: ("ROW", [SESSION, EPOCH, (0, 31), (1, 32), (1, 32), (0, 256), {1, 2, 3}, BODIES]),
    20: ("COMPLETION", [SESSION, EPOCH, (0, INT31), (0, U32), DIGEST, (0, U8), (0, 32), (0, U32), DIGEST, (0, U32)]),
    21: ("COMMIT", [SESSION, (0, 32), (0, INT31), (0, INT31), DIGEST]),
    22: ("RESET", [SESSION, CAUSE, (0, INT31), DIGEST]),
    23: ("CANCEL", [SESSION, CAUSE]),
    24: ("CLOSE", [SESSION, CAUSE]),
    32: ("PING", [EPOCH, NONCE]),
    33: ("PONG", [EPOCH, NONCE, (0, 1000), (0, U64)]),
    34: ("DRAIN", [EPOCH, (1, 600_000)]),
    35: ("ERROR", [CODES, {1, 2, 3, 4, 5}, SESSION, TEXT]),
    36: ("STATS", [EPOCH, (0, 1), (0, 1024), (0, 1024), (0, 1024), (0, U64), ("list", 0, 128, [CODES, (0, U64)])]),
}  # fmt: skip


HEADS = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4,
         0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}  # fmt: skip


class Fault(Exception):
    """The name of the code with which a receiver refuses."""


def need(holds: bool, code: str) -> None:
    if not holds:
        raise Fault(code)


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


CRC_TABLE = _table()


def crc32c(data: bytes) -> int:
    crc = U32
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ U32


def align(length: int) -> int:
    return (length + 63) // 64 * 64


class Reader:
    """msgpack as the control profile allows it: the head byte decides, and only shortest forms pass."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, length: int) -> bytes:
        need(self.at + length <= len(self.data), "NONCANONICAL")
        self.at += length
        return self.data[self.at - length : self.at]

    def number(self, head: int, least: list[int]) -> int:
        """A big-endian number of the head's size; ``least`` is the first value that needs that size."""
        size = HEADS[head]
        value = int.from_bytes(self.take(size), "big")
        need(value >= least[size.bit_length() - 1], "NONCANONICAL")
        return value

    def value(self, depth: int) -> Any:
        head = self.take(1)[0]
        if head <= 0x7F:
            return head
        if head >= 0xE0:
            return head - 256
        if head in (0xCC, 0xCD, 0xCE, 0xCF):
            return self.number(head, [128, 2**8, 2**16, 2**32])
        if head in (0xD0, 0xD1, 0xD2, 0xD3):
            return self.negative(head)
        if head in (0xC4, 0xC5, 0xC6):
            return self.take(self.number(head, [0, 2**8, 2**16]))
        if 0xA0 <= head <= 0xBF or head in (0xD9, 0xDA, 0xDB):
            return self.text(head & 31 if head <= 0xBF else self.number(head, [32, 2**8, 2**16]))
        if 0x90 <= head <= 0x9F or head in (0xDC, 0xDD):
            need(depth > 0, "NONCANONICAL")
            length = head & 15 if head <= 0x9F else self.number(head, [0, 16, 2**16])
            need(length <= len(self.data) - self.at, "NONCANONICAL")
            return [self.value(depth - 1) for _ in range(length)]
        raise Fault("NONCANONICAL")

    def negative(self, head: int) -> int:
        """A negative number is canonical in its shortest form; no field takes it."""
        size = HEADS[head]
        value = int.from_bytes(self.take(size), "big", signed=True)
        need(value < [-32, -(2**7), -(2**15), -(2**31)][size.bit_length() - 1], "NONCANONICAL")
        return value

    def text(self, length: int) -> str:
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise Fault("NONCANONICAL") from None


def fits(value: Any, rule: Any) -> bool:
    if isinstance(rule, set):
        return type(value) is int and value in rule
    if rule[0] == "bin":
        return isinstance(value, bytes) and rule[1] <= len(value) <= rule[2]
    if rule[0] == "text":
        return isinstance(value, str) and len(value) <= rule[1] and all(" " <= one <= "~" for one in value)
    if rule[0] == "list":
        _, least, most, item = rule
        if not isinstance(value, list) or not least <= len(value) <= most:
            return False
        return all(fits(one, item[0]) if len(item) == 1 else fit_all(one, item) for one in value)
    return type(value) is int and rule[0] <= value <= rule[1]


def fit_all(values: Any, rules: list[Any]) -> bool:
    return isinstance(values, list) and len(values) == len(rules) and all(map(fits, values, rules))


def decode(frame: bytes) -> dict[str, Any]:
    """{type, key, control, bodies} of a whole frame, in the order of the specification. Raises Fault."""
    need(len(frame) >= 48, "WRONG_SIZE")
    (magic, major, _, kind, flags, length, count, reserved, body_bytes, generation, slot, round_, control_crc,
     prefix_crc) = PREFIX.unpack_from(frame)  # fmt: skip
    need(magic == b"DSPK", "BAD_MAGIC")
    need(prefix_crc == crc32c(frame[:44]), "BAD_PREFIX_CRC")
    need(major == 2, "BAD_VERSION")
    need(kind in MESSAGES, "UNKNOWN_TYPE")
    need(flags == 0 and reserved == 0, "RESERVED_NOT_ZERO")
    need(1 <= length <= 4096 and count <= 32 and body_bytes <= MIB64, "LIMIT_EXCEEDED")
    need(body_bytes % 64 == 0 and (body_bytes == 0) == (count == 0), "WRONG_SIZE")
    need(len(frame) == align(48 + length) + body_bytes, "WRONG_SIZE")
    packed = frame[48 : 48 + length]
    need(crc32c(packed) == control_crc, "BAD_CONTROL_CRC")
    reader = Reader(packed)
    control = reader.value(3)
    need(isinstance(control, list) and reader.at == len(packed), "NONCANONICAL")
    name, rules = MESSAGES[kind]
    need(fit_all(control, rules), "BAD_FIELD")
    need(not any(frame[48 + length : align(48 + length)]), "BAD_PADDING")
    described = control[-1] if rules[-1] is BODIES else []
    sizes = [one[4] for one in described]
    need(len(sizes) == count and sum(map(align, sizes)) == body_bytes, "BAD_DESCRIPTOR")
    bodies, at = [], align(48 + length)
    for one in described:
        body, end = frame[at : at + one[4]], at + align(one[4])
        need(not any(frame[at + one[4] : end]), "BAD_PADDING")
        need(body_checksum(one[5], body) == one[6], "BAD_BODY_CHECKSUM")
        bodies.append(body)
        at = end
    return {"type": name, "key": [slot, generation, round_], "control": control, "bodies": bodies}


def body_checksum(kind: int, body: bytes) -> bytes:
    value = crc32c(body) if kind == 1 else xxhash.xxh3_64_intdigest(body)
    return value.to_bytes(8, "little")


def digest(tokens: list[int]) -> bytes:
    value = bytes(8)
    for token in tokens:
        value = body_checksum(2, value + struct.pack("<I", token))
    return value


def read_rows(block: bytes, depth: int, support: int, vocab_size: int) -> dict[str, list[int]]:
    """{tokens, entries, confidences} of a whole reply. Raises Fault with the code, or NOT_DYADIC."""
    ids_row, q_row = 4 * support, 4 * (support or vocab_size)
    need(len(block) == depth * (16 + ids_row + q_row), "WRONG_SIZE")
    rows = []
    for index in range(depth):
        token, entries, crc, confidence = struct.unpack_from("<iIII", block, 16 * index)
        ids_at = 16 * depth + ids_row * index
        ids = block[ids_at : ids_at + ids_row]
        q_at = 16 * depth + ids_row * depth + q_row * index
        q = block[q_at : q_at + q_row]
        need(crc == crc32c(struct.pack("<iII", token, entries, confidence) + ids + q), "BAD_ROW_CRC")
        need(0 <= token < vocab_size and confidence <= 2**24, "BAD_ROW_RECORD")
        need(1 <= entries <= support if support else entries == vocab_size, "BAD_ROW_RECORD")
        rows.append((token, entries, confidence, ids, q))
    for token, entries, _, ids, q in rows:
        need(is_dyadic(token, entries, ids, q), "NOT_DYADIC")
        need(all(value < vocab_size for (value,) in struct.iter_unpack("<i", ids)), "NOT_DYADIC")
    return {
        "tokens": [row[0] for row in rows],
        "entries": [row[1] for row in rows],
        "confidences": [row[2] for row in rows],
    }


def is_dyadic(token: int, entries: int, ids: bytes, q: bytes) -> bool:
    """REQ-ROW-1 and REQ-ROW-7 in floats: every product below is exact, or not equal to an integer."""
    names = [value for (value,) in struct.iter_unpack("<i", ids)] or list(range(entries))
    values = [value for (value,) in struct.iter_unpack("<f", q)]
    counts = [value * 2.0**24 for value in values[:entries]]
    whole = all(0 <= count <= 2**24 and count == int(count) and str(count)[0] != "-" for count in counts)
    if not whole or sum(counts) != 2**24 or any(ids[4 * entries :]) or any(q[4 * entries :]):
        return False
    ascending = all(low < high for low, high in pairwise(names[:entries])) and names[0] >= 0
    mass = dict(zip(names, counts, strict=False))
    return ascending and mass.get(token, 0) > 0 and (not ids or 0 not in counts)
