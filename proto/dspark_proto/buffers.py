"""Byte buffers: the type that the core accepts and hands out, and the 64-byte alignment arithmetic."""

from __future__ import annotations

from typing import Final, TypeAlias

from .limits import ALIGNMENT_BYTES

Buffer: TypeAlias = bytes | bytearray | memoryview
"""A C-contiguous byte buffer. numpy arrays and tensors pass as ``memoryview(array).cast("B")``."""

ZEROS: Final = bytes(ALIGNMENT_BYTES)


def byte_view(buffer: Buffer) -> memoryview:
    """``buffer`` as a flat view of unsigned bytes, without a copy.

    Raises ``TypeError`` when the buffer is not C-contiguous.
    """
    view = buffer if type(buffer) is memoryview else memoryview(buffer)
    if view.format == "B" and view.ndim == 1:
        return view
    return view.cast("B")


def aligned(length_bytes: int) -> int:
    """``length_bytes`` rounded up to the protocol's 64-byte alignment."""
    return (length_bytes + ALIGNMENT_BYTES - 1) & -ALIGNMENT_BYTES
