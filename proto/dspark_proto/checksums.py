"""CRC32C and XXH3-64 as the protocol uses them.

Checksums find transport damage; they do not authenticate a peer. A body checksum is always 8 bytes, so that
the size of a control block never depends on its value. Spec: SPEC.md, section "Checksums".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import xxhash
from crc32c import crc32c

from .buffers import Buffer
from .native import codec
from .registry import Checksum

__all__ = (
    "BODY_CHECKSUMS",
    "BODY_CHECKSUM_BYTES",
    "NO_CHECKSUM",
    "body_checksum",
    "crc32c",
    "pieces_checksum",
    "xxh3_64_bytes",
)

BODY_CHECKSUM_BYTES: Final = 8
NO_CHECKSUM: Final = bytes(BODY_CHECKSUM_BYTES)


def _crc32c_bytes(data: Buffer) -> bytes:
    return crc32c(data).to_bytes(BODY_CHECKSUM_BYTES, "little")


def xxh3_64_bytes(data: Buffer) -> bytes:
    """XXH3-64 (seed 0) of ``data`` as 8 little-endian bytes."""
    return xxhash.xxh3_64_intdigest(data).to_bytes(BODY_CHECKSUM_BYTES, "little")


def _crc32c_of_pieces(pieces: Sequence[Buffer]) -> bytes:
    crc = 0
    for piece in pieces:
        crc = crc32c(piece, crc)
    return crc.to_bytes(BODY_CHECKSUM_BYTES, "little")


def _xxh3_64_of_pieces(pieces: Sequence[Buffer]) -> bytes:
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest().to_bytes(BODY_CHECKSUM_BYTES, "little")


BODY_CHECKSUMS: Final[dict[Checksum, Callable[[Buffer], bytes]]] = {
    Checksum.CRC32C: _crc32c_bytes,
    Checksum.XXH3_64: xxh3_64_bytes,
}
"""The functions behind :func:`body_checksum`."""


def body_checksum(kind: Checksum, data: Buffer) -> bytes:
    """Checksum of one body (without its padding), 8 bytes, little-endian, zero-extended."""
    return BODY_CHECKSUMS[kind](data)


_PIECES_CHECKSUMS: Final[dict[Checksum, Callable[[Sequence[Buffer]], bytes]]] = {
    Checksum.CRC32C: _crc32c_of_pieces,
    Checksum.XXH3_64: _xxh3_64_of_pieces,
}


def pieces_checksum(kind: Checksum, pieces: Sequence[Buffer]) -> bytes:
    """:func:`body_checksum` of bytes that lie in several places, a list or tuple."""
    if codec is not None:
        return codec.checksum(kind, pieces)
    return pieces_checksum_plainly(kind, pieces)


def pieces_checksum_plainly(kind: Checksum, pieces: Sequence[Buffer]) -> bytes:
    """:func:`pieces_checksum` with the checksum wheels."""
    return _PIECES_CHECKSUMS[kind](pieces)
