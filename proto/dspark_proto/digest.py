"""The incremental prefix digest: which committed tokens a STEP stands on, in O(1) per token.

digest_0 = 8 zero bytes; digest_(i+1) = XXH3-64(digest_i || token_i as u32 LE), little-endian. In a STEP it
covers every position before the anchor. It detects a peer with another history, not an attacker. Spec:
SPEC.md, section "Prefix digest".
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Final

from .checksums import xxh3_64_bytes
from .native import codec

DIGEST_BYTES: Final = 8
EMPTY_DIGEST: Final = bytes(DIGEST_BYTES)

pack_token: Final = Struct("<I").pack


def extend_digest(digest: bytes, token: int) -> bytes:
    """``digest`` of a prefix, extended by one token id (0 .. 2^32 - 1)."""
    return xxh3_64_bytes(digest + pack_token(token))


def prefix_digest(tokens: Iterable[int], start: bytes = EMPTY_DIGEST) -> bytes:
    """Digest of ``tokens`` after a prefix whose digest is ``start``."""
    digest = None if codec is None else codec.prefix_digest(start, tokens)
    return prefix_digest_plainly(tokens, start) if digest is None else digest


def prefix_digest_plainly(tokens: Iterable[int], start: bytes) -> bytes:
    """:func:`prefix_digest` with the checksum wheel."""
    digest = start
    for token in tokens:
        digest = xxh3_64_bytes(digest + pack_token(token))
    return digest
