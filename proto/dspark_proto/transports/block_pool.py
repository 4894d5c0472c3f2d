"""Memory for transfers that outlive a call, taken once and used again.

Invariants: blocks have power-of-two sizes and are never freed, so that a steady state allocates nothing and a
library that registers memory registers each once; all blocks together stay below a limit; a block whose
transfer was never confirmed to have ended is not used again. Called by ``ucx_link``.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from ..memory import aligned_memory

SMALLEST_BYTES: Final = 4096


class BlockPool:
    """Blocks of up to ``limit_bytes`` in all, quarantined ones included."""

    def __init__(self, limit_bytes: int) -> None:
        self._left = limit_bytes
        self._free: defaultdict[int, list[memoryview]] = defaultdict(list)
        self._quarantined: list[memoryview] = []

    @property
    def quarantined(self) -> int:
        """Blocks that are lost, because something may still write into them."""
        return len(self._quarantined)

    def take(self, size: int) -> memoryview | None:
        """A block of at least ``size`` bytes; None when the limit does not allow another."""
        wanted = max(SMALLEST_BYTES, 1 << (size - 1).bit_length())
        if self._free[wanted]:
            return self._free[wanted].pop()
        if wanted > self._left:
            return None
        self._left -= wanted
        return aligned_memory(wanted)

    def give(self, block: memoryview) -> None:
        """The block's transfer has ended."""
        self._free[len(block)].append(block)

    def quarantine(self, block: memoryview) -> None:
        """The block's transfer may never end: keep the memory, and never use it again."""
        self._quarantined.append(block)
