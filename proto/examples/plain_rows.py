"""Rows and draws of proto/SPEC.md in plain Python: integer counts of total 2^24, and the tokens drawn from them.

Sections 7.5 and 10 of the specification, and nothing of this package. Invariant: the counts that are drawn from are the
counts that travel. Used by `plain_peer`.
"""

from __future__ import annotations

import struct
from collections import Counter

from crc32c import crc32c

MASS = 2**24
Row = list[tuple[int, int]]


def philox(counter: list[int], seed: int) -> int:
    """First word of Philox4x32-10, without its low eight bits: a uniform integer below 2^24."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & 0xFFFFFFFF, (low >> 32) ^ c3 ^ k1, low & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0 >> 8


def allocate(seen: Counter[int], support: int) -> list[tuple[int, int]]:
    """Counts of total 2^24 for the most frequent followers, ids ascending; leftovers to the largest remainders."""
    kept = sorted(sorted(seen.items(), key=lambda pair: (-pair[1], pair[0]))[:support])
    total = sum(count for _, count in kept)
    row = [[token, *divmod(count * MASS, total)] for token, count in kept]
    left = MASS - sum(one[1] for one in row)
    for one in sorted(row, key=lambda one: (-one[2], one[0]))[:left]:
        one[1] += 1
    return [(token, count) for token, count, _ in row]


def draw(row: list[tuple[int, int]], uniform: int) -> int:
    """The first token whose cumulative count is above ``uniform``."""
    reached = 0
    for token, count in row:
        reached += count
        if reached > uniform:
            return token
    raise AssertionError("the counts of a row sum to 2^24")


def pack_rows(drafts: list[tuple[int, Row]], support: int) -> tuple[bytes, bytes, bytes]:
    """RECORDS, IDS and Q of a reply; the confidence of every row is 2^24, "no opinion"."""
    records, ids, q = [], [], []
    for token, row in drafts:
        padding = bytes(4 * (support - len(row)))
        ids.append(b"".join(struct.pack("<i", one) for one, _ in row) + padding)
        q.append(b"".join(struct.pack("<f", count / MASS) for _, count in row) + padding)
        crc = crc32c(struct.pack("<iII", token, len(row), MASS) + ids[-1] + q[-1])
        records.append(struct.pack("<iIII", token, len(row), crc, MASS))
    return b"".join(records), b"".join(ids), b"".join(q)
