"""CRC32C and XXH3-64 as the protocol uses them.

Checksums find transport damage; they do not authenticate a peer. A body checksum is always 8 bytes, so that
the size of a control block never depends on its value. Spec: SPEC.md, section "Checksums".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import xxhash
from crc32c import crc32c

from .buffers import Buffer
from .registry import Checksum

__all__ = ("BODY_CHECKSUM_BYTES", "NO_CHECKSUM", "body_checksum", "crc32c", "xxh3_64_bytes")

BODY_CHECKSUM_BYTES: Final = 8
NO_CHECKSUM: Final = bytes(BODY_CHECKSUM_BYTES)


def _crc32c_bytes(data: Buffer) -> bytes:
    return crc32c(data).to_bytes(BODY_CHECKSUM_BYTES, "little")


def xxh3_64_bytes(data: Buffer) -> bytes:
    """XXH3-64 (seed 0) of ``data`` as 8 little-endian bytes."""
    return xxhash.xxh3_64_intdigest(data).to_bytes(BODY_CHECKSUM_BYTES, "little")


_BODY_CHECKSUMS: Final[dict[Checksum, Callable[[Buffer], bytes]]] = {
    Checksum.CRC32C: _crc32c_bytes,
    Checksum.XXH3_64: xxh3_64_bytes,
}


def body_checksum(kind: Checksum, data: Buffer) -> bytes:
    """Checksum of one body (without its padding), 8 bytes, little-endian, zero-extended."""
    return _BODY_CHECKSUMS[kind](data)
