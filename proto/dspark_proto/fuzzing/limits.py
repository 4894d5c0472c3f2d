"""What one frame may cost, and how much a connection may answer to it.

The memory ceiling is what decoding a control block can need at worst before it is refused: msgpack opens
1,024 nested arrays of at most 128 entries, 1 KiB each, and 4,096 one-byte values cost some 72 bytes each.
Everything else is views of the frame. Called by ``trial``.
"""

from __future__ import annotations

from typing import Final

from ..limits import STEP_ITEMS_MAX

TRACED_BYTES_MAX: Final = 1536 * 1024
"""Bytes that one frame may have allocated at its worst moment, beyond its own length."""

RETAINED_BYTES_MAX: Final = 256 * 1024
"""Bytes that a connection may hold more after a batch than before it."""

FRAME_CPU_NS_MAX: Final = 250_000_000
"""Processor time of one frame: four hundred times the usual, so that only a runaway is reported."""

ANSWERS_MAX: Final = 2 * STEP_ITEMS_MAX + 2
"""Frames that a connection may answer to one frame: two per item of a STEP, and what it says by itself."""
