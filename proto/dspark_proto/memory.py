"""Memory of frames and staging: taken once, at addresses that are quick to copy to.

Invariant: zeroed, and with the compiled codec at a multiple of 64, like the frames and bodies within it. A copy between
ends that lie differently in their cache lines takes four to fifteen times as long on some CPUs, the kernel's copies
included, and a large ``bytearray`` always lies 16 bytes beyond. Called by both connections, by ``staging`` and by
whoever receives frames; keeps nothing.
"""

from __future__ import annotations

from .limits import ALIGNMENT_BYTES
from .native import codec


def aligned_memory(length_bytes: int) -> memoryview:
    """New writable memory."""
    if codec is None:
        return memoryview(bytearray(length_bytes))
    storage = memoryview(bytearray(length_bytes + ALIGNMENT_BYTES))
    start = -codec.address(storage) % ALIGNMENT_BYTES
    return storage[start : start + length_bytes]
