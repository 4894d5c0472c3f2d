"""Body descriptors: what a frame's bodies hold, under the control checksum.

Spec: SPEC.md, section "Bodies". Called by ``messages``, ``frame`` and both connections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from .buffers import Buffer
from .checksums import BODY_CHECKSUM_BYTES, NO_CHECKSUM, body_checksum
from .fields import Field, Record, UInt, compiled, enum_field, fixed_bin
from .limits import BODY_BYTES_MAX, CONTEXT_CHUNK_ROWS_MAX
from .registry import BodyKind, Checksum, Dtype


@compiled
@dataclass(frozen=True, slots=True)
class BodyDescriptor(Record):
    """What one body holds; it is under the control checksum, so a body is trusted through it."""

    kind: BodyKind
    dtype: Dtype
    rows: int
    entries: int
    body_bytes: int
    checksum_kind: Checksum
    checksum: bytes

    NAME: ClassVar[str] = "BODY"
    LAYOUT: ClassVar[tuple[Field, ...]] = (
        enum_field("kind", BodyKind),
        enum_field("dtype", Dtype),
        UInt("rows", CONTEXT_CHUNK_ROWS_MAX),
        UInt("entries", BODY_BYTES_MAX),
        UInt("body_bytes", BODY_BYTES_MAX),
        enum_field("checksum_kind", Checksum),
        fixed_bin("checksum", BODY_CHECKSUM_BYTES),
    )

    @property
    def shape(self) -> tuple[BodyKind, Dtype, int, int, int]:
        """Everything but the checksum."""
        return self.kind, self.dtype, self.rows, self.entries, self.body_bytes


def have_shapes(bodies: Sequence[BodyDescriptor], shapes: Sequence[tuple[BodyKind, Dtype, int, int, int]]) -> bool:
    """Whether the bodies are exactly those of ``shapes``."""
    if len(bodies) != len(shapes):
        return False
    for body, (kind, dtype, rows, entries, body_bytes) in zip(bodies, shapes, strict=True):
        if (
            body.kind is not kind
            or body.dtype is not dtype
            or body.rows != rows
            or body.entries != entries
            or body.body_bytes != body_bytes
        ):
            return False
    return True


def describe(kind: BodyKind, dtype: Dtype, rows: int, entries: int, body: Buffer, checksum: Checksum) -> BodyDescriptor:
    """Descriptor of a body of ``rows`` rows with ``entries`` elements each."""
    return BodyDescriptor(kind, dtype, rows, entries, len(body), checksum, body_checksum(checksum, body))


def unsealed(kind: BodyKind, dtype: Dtype, rows: int, entries: int, length: int, checksum: Checksum) -> BodyDescriptor:
    """Descriptor of a body of ``length`` bytes, still without its checksum: see :func:`seal`. Nobody else has it."""
    found = _blank(kind, dtype, rows, entries, length, checksum)
    table = BodyDescriptor.TABLE
    twin: BodyDescriptor = replace(found) if table is None else table.twin(found)
    return twin


@lru_cache(maxsize=64)
def _blank(kind: BodyKind, dtype: Dtype, rows: int, entries: int, length: int, checksum: Checksum) -> BodyDescriptor:
    """Made once, with all its fields checked; later ones are copies."""
    return BodyDescriptor(kind, dtype, rows, entries, length, checksum, NO_CHECKSUM)


def seal(descriptor: BodyDescriptor, body: Buffer) -> None:
    """Give an unsealed descriptor its body's checksum."""
    object.__setattr__(descriptor, "checksum", body_checksum(descriptor.checksum_kind, body))
