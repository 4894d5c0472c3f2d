"""Mutations that know offsets only: bits, bytes, cuts, growth, and the fields of the prefix.

Each takes (rng, specimen, pool) and returns a new frame with stale checksums. Called by ``mutator``.
"""

from __future__ import annotations

from random import Random
from struct import calcsize, pack_into
from typing import Final

from .specimens import PREFIX_FIELDS, Pool, Specimen

EDGES: Final = tuple(
    sorted(
        {0, 1, 2, 3, 4, 5, 16, 31, 32, 33, 48, 64, 255, 256, 1000, 1024, 4095, 4096, 4097}
        | {(1 << bits) + step for bits in (7, 8, 15, 16, 24, 26, 31, 32, 63) for step in (-1, 0, 1)}
        | {(1 << 64) - 1}
    )
)
"""Integers next to the protocol's and the encodings' limits."""

_BYTES: Final = (0x00, 0x01, 0x7F, 0x80, 0x90, 0x9F, 0xA0, 0xC0, 0xC1, 0xC3, 0xC7, 0xCB, 0xD6, 0xDD, 0xDF, 0xFF)


def flip_bits(rng: Random, specimen: Specimen, _pool: Pool) -> bytearray:
    """One to four bits, anywhere."""
    frame = bytearray(specimen.frame)
    for _ in range(rng.choice((1, 1, 1, 2, 4)) if frame else 0):
        position = rng.randrange(len(frame) * 8)
        frame[position >> 3] ^= 1 << (position & 7)
    return frame


def set_bytes(rng: Random, specimen: Specimen, _pool: Pool) -> bytearray:
    """A run of up to eight bytes becomes one that msgpack or the prefix gives a meaning."""
    frame = bytearray(specimen.frame)
    at = rng.randrange(len(frame)) if frame else 0
    for index in range(at, min(len(frame), at + rng.choice((1, 1, 2, 8)))):
        frame[index] = rng.choice(_BYTES)
    return frame


def truncate(rng: Random, specimen: Specimen, _pool: Pool) -> bytearray:
    """Cut at a field boundary, or anywhere."""
    at = rng.choice(specimen.boundaries) if rng.random() < 0.7 else rng.randrange(len(specimen.frame) + 1)
    return bytearray(specimen.frame[:at])


def extend(rng: Random, specimen: Specimen, pool: Pool) -> bytearray:
    """Bytes after the end: zeros, noise, or another whole frame."""
    tail = rng.choice((bytes(rng.choice((1, 16, 63, 64, 65))), rng.randbytes(8), rng.choice(pool.all).frame))
    return bytearray(specimen.frame) + tail


def move_slice(rng: Random, specimen: Specimen, _pool: Pool) -> bytearray:
    """Remove, repeat or move a slice between two boundaries."""
    frame = bytearray(specimen.frame)
    start, end = sorted((rng.choice(specimen.boundaries), rng.choice(specimen.boundaries)))
    part = frame[start:end]
    if rng.random() < 0.7:
        del frame[start:end]
    at = rng.choice(specimen.boundaries)
    frame[at:at] = part
    return frame


def splice_frames(rng: Random, specimen: Specimen, pool: Pool) -> bytearray:
    """The start of this frame and the end of another one."""
    other = rng.choice(pool.all)
    return bytearray(specimen.frame[: rng.choice(specimen.boundaries)]) + other.frame[rng.choice(other.boundaries) :]


def prefix_field(rng: Random, specimen: Specimen, pool: Pool) -> bytearray:
    """One or two prefix fields become an edge, a neighbour, or that of another frame."""
    frame = bytearray(specimen.frame)
    for _ in range(rng.choice((1, 1, 2))):
        _name, at, layout = rng.choice(PREFIX_FIELDS)
        if len(frame) >= at + calcsize(layout):
            pack_into(layout, frame, at, _another(rng, frame, at, layout, rng.choice(pool.all).frame))
    return frame


def _another(rng: Random, frame: bytearray, at: int, layout: str, other: bytes) -> int:
    size = calcsize(layout)
    old = int.from_bytes(frame[at : at + size], "little")
    kind = rng.randrange(4)
    if kind == 0 and len(other) >= at + size:
        return int.from_bytes(other[at : at + size], "little")
    if kind == 1:
        return (old + rng.choice((-64, -2, -1, 1, 2, 64))) % (1 << 8 * size)
    if kind == 2:
        return rng.randrange(8)
    return rng.choice(EDGES) % (1 << 8 * size)
