"""Mutations of bodies and of what describes them, under checksums that are right.

Each takes (rng, specimen, pool) and returns a new frame, prefix and control checksums stale. SPEC.md, section
"Bodies". Called by ``mutator`` for specimens with bodies.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from struct import pack_into
from typing import Final

from ..bodies import BodyDescriptor
from ..buffers import aligned
from ..checksums import body_checksum
from ..limits import PREFIX_BYTES
from .byte_mutations import EDGES
from .encoding import BODY_COUNT_AT, assemble, header_forms, uint_forms
from .specimens import Pool, Specimen

_LENGTH_FIELD: Final = 4
_CHECKSUM_FIELD: Final = 6


def _spans(descriptors: Sequence[BodyDescriptor]) -> list[tuple[int, int]]:
    """(start, length) of each body, counted from the first one."""
    spans, start = [], 0
    for one in descriptors:
        spans.append((start, one.body_bytes))
        start += aligned(one.body_bytes)
    return spans


def _with_fields(specimen: Specimen, which: int, changes: dict[int, bytes]) -> bytes:
    """The control block with encoded fields of descriptor ``which`` replaced."""
    parent = specimen.descriptor_elements[which]
    fields = [one for one in specimen.elements if one.parent == parent]
    control = specimen.control
    for number in sorted(changes, reverse=True):
        field = fields[number]
        control = control[: field.start] + changes[number] + control[field.end :]
    return control


def _checksum_field(descriptor: BodyDescriptor, body: bytes) -> bytes:
    return header_forms("bin", 8)[0] + body_checksum(descriptor.checksum_kind, body)


def changed_body(rng: Random, specimen: Specimen, _pool: Pool) -> bytearray:
    """Bytes of a body change, and its checksum with them."""
    which = rng.randrange(len(specimen.descriptors))
    start, length = _spans(specimen.descriptors)[which]
    bodies = bytearray(specimen.bodies)
    for _ in range(rng.choice((1, 4, 16)) if length else 0):
        bodies[start + rng.randrange(length)] = rng.randrange(256)
    checksum = _checksum_field(specimen.descriptors[which], bytes(bodies[start : start + length]))
    control = _with_fields(specimen, which, {_CHECKSUM_FIELD: checksum})
    return assemble(specimen.frame[:PREFIX_BYTES], control, bytes(bodies))


def resized_body(rng: Random, specimen: Specimen, _pool: Pool) -> bytearray:
    """A body grows or shrinks; its descriptor follows in length and checksum, or not."""
    which = rng.randrange(len(specimen.descriptors))
    start, length = _spans(specimen.descriptors)[which]
    size = max(0, rng.choice((0, 1, length - 1, length + 1, length - 64, length + 64, length * 2)))
    body = (specimen.bodies[start : start + length] + rng.randbytes(8) + bytes(size))[:size]
    control = specimen.control
    if rng.random() < 0.7:
        checksum = _checksum_field(specimen.descriptors[which], body)
        changes = {_LENGTH_FIELD: uint_forms(size)[0], _CHECKSUM_FIELD: checksum}
        control = _with_fields(specimen, which, changes)
    padded = body + bytes(aligned(size) - size)
    rest = specimen.bodies[start + aligned(length) :]
    return assemble(specimen.frame[:PREFIX_BYTES], control, specimen.bodies[:start] + padded + rest)


def descriptor_lie(rng: Random, specimen: Specimen, _pool: Pool) -> bytearray:
    """Fields of a descriptor, or the prefix's count of bodies, are untrue."""
    which = rng.randrange(len(specimen.descriptors))
    length = specimen.descriptors[which].body_bytes
    values = (0, 1, 2, 3, length, length + 1, max(0, length - 1), 2 * length, *rng.sample(EDGES, 3))
    fields = rng.sample(range(_CHECKSUM_FIELD), rng.choice((1, 1, 2, 3)))
    control = _with_fields(specimen, which, {one: uint_forms(rng.choice(values))[0] for one in fields})
    frame = assemble(specimen.frame[:PREFIX_BYTES], control, specimen.bodies)
    if rng.random() < 0.2:
        pack_into("<H", frame, BODY_COUNT_AT, rng.choice((0, 1, 2, 3, 4, 32, 33, 65535)))
    return frame


def padding_set(rng: Random, specimen: Specimen, _pool: Pool) -> bytearray:
    """A byte of the padding after control or after a body is not zero."""
    frame = bytearray(specimen.frame)
    base = len(frame) - len(specimen.bodies)
    gaps = [(PREFIX_BYTES + len(specimen.control), base)]
    gaps += [(base + at + length, base + at + aligned(length)) for at, length in _spans(specimen.descriptors)]
    start, end = rng.choice([gap for gap in gaps if gap[0] < gap[1]] or [(len(frame) - 1, len(frame))])
    frame[rng.randrange(start, end)] = rng.randrange(1, 256)
    return frame
