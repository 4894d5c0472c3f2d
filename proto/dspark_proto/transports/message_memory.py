"""Where libzmq's messages get their memory: kept by the process, not taken from the kernel for each.

libzmq takes each message's memory with ``malloc``, and glibc maps large blocks anew and gives them back at once: the
reply of one dense request then costs 600 page faults, more time than all copies of it. Kept in the heap, the same
memory serves the next round. Invariants: once for a process, and only with glibc; who has set glibc's own variables
keeps what he chose. The price: the process keeps the most that it ever held in blocks below ``KEPT_BYTES``. Called by
``zmq`` when a link is made.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from typing import Final

KEPT_BYTES: Final = 32 * 2**20
"""Blocks up to this size come from the heap: the most that glibc allows."""

_TRIM_BYTES: Final = 256 * 2**20
"""Free memory at the heap's end that is not given back."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_VARIABLES: Final = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


@lru_cache(maxsize=1)
def keep_message_memory() -> bool:
    """Whether this process keeps the memory of messages."""
    if any(name in os.environ for name in _VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))
