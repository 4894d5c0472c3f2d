"""Mutations of the control block: types, lengths, encodings, fields, descriptors, and blocks made to hurt.

Each takes (rng, specimen, pool) and returns a new frame whose lengths are right unless the lie is about them;
checksums are stale. Called by ``mutator`` for specimens with elements.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from ..limits import CONTROL_BYTES_MAX, PREFIX_BYTES
from .byte_mutations import EDGES
from .encoding import Element, assemble, header_forms, uint_forms
from .specimens import Pool, Specimen

_FOREIGN: Final = (
    b"\xc0",
    b"\xc1",
    b"\xc2",
    b"\xc3",
    b"\xca\x7f\xc0\x00\x00",
    b"\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00",
    b"\xff",
    b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00",
    b"\x80",
    b"\x81\xa1a\x01",
    b"\x81\x90\x01",
    b"\xd4\x01\x00",
    b"\xd6\xff\x00\x00\x00\x00",
    b"\xd7\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xc7\x00\x05",
    b"\xa1a",
    b"\xa1\x00",
    b"\xa2\xc3\xa9",
    b"\xa1\xff",
    b"\xd9\x61" + b"a" * 97,
    b"\xc4\x00",
    b"\xc4\x01a",
    b"\x90",
    b"\x91\x90",
    b"\x91\x91\x91\x90",
    b"\x92\x01\x02",
)
"""Encoded values that some field has no use for: other types, extensions, bad text, wrong nesting."""


def _replace(specimen: Specimen, start: int, end: int, value: bytes) -> bytearray:
    """The frame with ``control[start:end]`` replaced."""
    control = specimen.control
    return assemble(specimen.frame[:PREFIX_BYTES], control[:start] + value + control[end:], specimen.bodies)


def _pick(rng: Random, specimen: Specimen, *kinds: str) -> Element:
    """A random element of ``kinds``; the outer array when there is none."""
    fitting = [one for one in specimen.elements if one.kind in kinds]
    return rng.choice(fitting) if fitting else specimen.elements[0]


def wrong_type(rng: Random, specimen: Specimen, _pool: Pool) -> bytearray:
    """A value becomes one of another type."""
    old = rng.choice(specimen.elements)
    return _replace(specimen, old.start, old.end, rng.choice(_FOREIGN))


def edge_integer(rng: Random, specimen: Specimen, _pool: Pool) -> bytearray:
    """An integer becomes an edge or a neighbour."""
    old = _pick(rng, specimen, "int")
    value = rng.choice(EDGES) if rng.random() < 0.6 else max(0, old.size + rng.choice((-2, -1, 1, 2)))
    return _replace(specimen, old.start, old.end, uint_forms(min(value, (1 << 64) - 1))[0])


def overlong(rng: Random, specimen: Specimen, _pool: Pool) -> bytearray:
    """The same value in a longer form."""
    old = rng.choice(specimen.elements)
    forms = uint_forms(old.size) if old.kind == "int" else header_forms(old.kind, old.size)
    return _replace(specimen, old.start, old.content, rng.choice(forms[1:] or forms))


def length_lie(rng: Random, specimen: Specimen, _pool: Pool) -> bytearray:
    """The header of a string or array says another length; the content stays."""
    old = _pick(rng, specimen, "bin", "str", "array")
    lies = (old.size + 1, max(0, old.size - 1), 0, 0xFF, 0xFFFF, 0xFFFF_FFFF, 4095, 4096)
    return _replace(specimen, old.start, old.content, header_forms(old.kind, rng.choice(lies))[0])


def resize_bytes(rng: Random, specimen: Specimen, _pool: Pool) -> bytearray:
    """A byte or text string grows or shrinks, its header with it."""
    old = _pick(rng, specimen, "bin", "str")
    if old.kind == "array":
        return edge_integer(rng, specimen, _pool)
    size = max(0, rng.choice((0, old.size - 1, old.size + 1, old.size * 2, 64, 65, 96, 97, 1024, 1025)))
    content = (specimen.control[old.content : old.end] + b"a" * size)[:size]
    return _replace(specimen, old.start, old.end, header_forms(old.kind, size)[0] + content)


def rearrange(rng: Random, specimen: Specimen, _pool: Pool) -> bytearray:
    """Fields of one array are removed, repeated or swapped; the array's count follows or not."""
    array = _pick(rng, specimen, "array")
    index = specimen.elements.index(array)
    control = specimen.control
    parts = [control[one.start : one.end] for one in specimen.elements if one.parent == index]
    if not parts:
        return wrong_type(rng, specimen, _pool)
    at = rng.randrange(len(parts))
    action = rng.randrange(4)
    if action == 0:
        del parts[at]
    elif action == 1:
        parts[at:at] = [parts[at]]
    elif action == 2:
        other = rng.randrange(len(parts))
        parts[at], parts[other] = parts[other], parts[at]
    else:
        parts[at:at] = [parts[at]] * rng.choice((2, 15, 16, 31, 32, 33, 127, 128))
    count = len(parts) if rng.random() < 0.8 else array.size
    return _replace(specimen, array.start, array.end, header_forms("array", count)[0] + b"".join(parts))


def transplant(rng: Random, specimen: Specimen, pool: Pool) -> bytearray:
    """A value is taken from another frame: from the same place of a frame of the same type, or any."""
    index = rng.randrange(len(specimen.elements))
    old = specimen.elements[index]
    same = pool.by_type.get(specimen.type)
    donor = rng.choice(same if same and rng.random() < 0.7 else pool.apart)
    new = donor.elements[index] if len(donor.elements) > index else rng.choice(donor.elements)
    return _replace(specimen, old.start, old.end, donor.control[new.start : new.end])


def foreign_control(rng: Random, specimen: Specimen, pool: Pool) -> bytearray:
    """The whole control of another frame under this prefix, with this frame's bodies or the other's."""
    donor = rng.choice(pool.apart)
    bodies = donor.bodies if rng.random() < 0.5 else specimen.bodies
    return assemble(specimen.frame[:PREFIX_BYTES], donor.control, bodies)


def _nested_arrays(rng: Random) -> bytes:
    """Arrays in arrays, each said to hold as much as a block may have values."""
    count = rng.choice((1, 15, 127, 128, 129, 1024, 2048, 4095))
    header = rng.choice(header_forms("array", count))
    return header * ((CONTROL_BYTES_MAX - 1) // len(header))


def _many_small(rng: Random) -> bytes:
    value = rng.choice((b"\x90", b"\x80", b"\xa0", b"\xa2xy", b"\xcd\x12\x34", b"\xc4\x01\xfe", b"\x91\x90", b"\xc0"))
    count = (CONTROL_BYTES_MAX - 8) // len(value)
    return header_forms("array", count)[0] + value * count


def _declared_huge(rng: Random) -> bytes:
    code = rng.choice((b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9", b"\xdc", b"\xde", b"\xc5", b"\xda", b"\xc8"))
    return code + rng.choice((b"\xff" * 5, b"\x00\x00\x0f\xff\x01", b"\x0f\xff\x01")) + bytes(rng.choice((0, 64, 4000)))


def _noise(rng: Random) -> bytes:
    return rng.randbytes(rng.choice((1, 16, 300, CONTROL_BYTES_MAX)))


_BOMBS: Final[tuple[Callable[[Random], bytes], ...]] = (_nested_arrays, _many_small, _declared_huge, _noise)


def bomb(rng: Random, specimen: Specimen, _pool: Pool) -> bytearray:
    """A control block made to cost memory or time: nesting, many values, huge declared lengths, noise."""
    control = rng.choice(_BOMBS)(rng)[:CONTROL_BYTES_MAX]
    if specimen.elements and rng.random() < 0.5:
        outer = specimen.elements[0]
        control = (specimen.control[: outer.content] + control)[:CONTROL_BYTES_MAX]
    return assemble(specimen.frame[:PREFIX_BYTES], control, specimen.bodies)
