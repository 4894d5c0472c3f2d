"""Reassembles frames from a byte stream, in one buffer that is reused.

The bytes of a stream are received into the buffer itself and frames are handed out as views of it, so
between the kernel and the connection nothing is copied. The last body of a large frame goes elsewhere when ``place``
says so: what has come of it by then is copied there, and the rest is received there. What is checked, before anything
is sized by it: the whole prefix (magic, crc, version, type, limits) as soon as its 48 bytes are there. Invariants:
memory follows bytes that have arrived, doubling, and never the length that a prefix announces; it never exceeds the
frame limit; a bad prefix ends the stream, for there is no way to find the next frame; nothing but the body's own bytes
goes to its place, and nothing after its frame is whole. Frames are valid until ``recycle``; the frames before a bad
prefix still count. Spec: SPEC.md, section "Plain TCP mapping". Called by ``stream`` for one connection; knows no
socket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ..errors import RemoteProtocolError
from ..limits import PREFIX_BYTES
from ..memory import aligned_memory
from ..placement import Place, PlacedFrame, Received
from ..prefix import frame_bytes
from ..registry import ErrorCode

START_BYTES: Final = 16 * 1024
"""Room for the handshake, for a heartbeat and for most sparse replies."""

HEAD_BYTES: Final = 128 * 1024
"""What is received at most before a frame's length is known: a STEP of a few requests then needs one system call, and
what may have to be moved by ``recycle`` is moved in a few microseconds."""

PLACED_BYTES: Final = 64 * 1024
"""The smallest frame that ``place`` is asked about: a smaller one is copied faster than it is asked."""


class FrameBuffer:
    """One stream's receive buffer. ``grow(bytes)`` says whether the buffer may grow by that much.

    Turns of use: ``recycle``, then ``room`` and ``add`` until frames come, or ``fault`` says why none will. ``place``
    is asked in ``room``, when all frames handed out before have been used.
    """

    def __init__(self, frame_bytes_max: int, grow: Callable[[int], bool], place: Place = lambda prefix: None) -> None:
        self.fault: ErrorCode | None = None
        self._limit = frame_bytes_max
        self._grow = grow
        self._place = place
        self._storage = aligned_memory(START_BYTES)
        self._start = 0
        self._end = 0
        self._frame_bytes = 0
        """Length of the frame at ``_start``; 0 while its prefix is incomplete."""
        self._was_asked = False
        self._memory: memoryview | None = None
        """Where the last body of the frame at ``_start`` goes, if elsewhere; then ``_body`` is where it would begin
        here, and ``_written`` how much of it has come."""
        self._body = self._written = 0

    @property
    def capacity(self) -> int:
        """Bytes of memory held."""
        return len(self._storage)

    @property
    def held(self) -> int:
        """Bytes here of a frame that has begun and not ended."""
        return self._end - self._start

    def recycle(self) -> None:
        """Frames handed out so far are dead; their room is used again."""
        if self._start:
            rest = self.held
            if rest:
                self._storage[:rest] = self._storage[self._start : self._end]
            self._start, self._end = 0, rest

    def room(self) -> memoryview:
        """Where to receive next, after ``recycle``; empty, with ``fault`` set, when the buffer may not grow.

        A large frame is received to its end and no further, so that little is left to move by ``recycle``.
        """
        if self._frame_bytes >= PLACED_BYTES and not self._was_asked:
            self._was_asked = True
            self._ask()
        if self._memory is not None and self._end == self._body:
            return self._memory[self._written :]
        if self._end == len(self._storage):
            self._enlarge()
        if self._memory is not None:
            return self._storage[self._end : self._body]
        return self._storage[self._end : max(self._frame_bytes, START_BYTES) if self._frame_bytes else HEAD_BYTES]

    def _ask(self) -> None:
        """Have the last body of the frame under way placed, and what has come of it copied there."""
        memory = self._place(self._storage[:PREFIX_BYTES].toreadonly())
        if memory is None:
            return
        self._memory, self._body = memory, self._frame_bytes - len(memory)
        self._written = max(0, self._end - self._body)
        memory[: self._written] = self._storage[self._body : self._body + self._written]
        self._end -= self._written

    def _enlarge(self) -> None:
        held = len(self._storage)
        size = min(2 * held, self._frame_bytes)
        if not self._grow(size - held):
            self.fault = ErrorCode.LIMIT_EXCEEDED
            return
        larger = aligned_memory(size)
        larger[:held] = self._storage
        self._storage = larger

    def add(self, count: int) -> list[Received]:
        """``count`` bytes were received into ``room``: the frames that are whole now."""
        if self._memory is not None:
            return self._add_placed(count, self._memory)
        self._end += count
        frames: list[Received] = []
        while self.fault is None and self._end - self._start >= (self._frame_bytes or PREFIX_BYTES):
            if not self._frame_bytes:
                self._frame_bytes = self._next_length()
                continue
            end = self._start + self._frame_bytes
            frames.append(self._storage[self._start : end].toreadonly())
            self._start, self._frame_bytes, self._was_asked = end, 0, False
        return frames

    def _add_placed(self, count: int, memory: memoryview) -> list[Received]:
        """``add`` for a frame whose last body goes to ``memory``, after the bytes before it have come here."""
        if self._end < self._body:
            self._end += count
            return []
        self._written += count
        if self._written < len(memory):
            return []
        self._start, self._frame_bytes, self._was_asked, self._memory = self._end, 0, False, None
        return [PlacedFrame(self._storage[: self._body].toreadonly(), memory)]

    def _next_length(self) -> int:
        """Bytes of the frame at ``_start``; 0, with ``fault`` set, for a prefix that is damaged or too large."""
        try:
            length = frame_bytes(self._storage, self._start, self._end)
        except RemoteProtocolError as error:
            self.fault = error.code
            return 0
        if length > self._limit:
            self.fault = ErrorCode.LIMIT_EXCEEDED
            return 0
        return length
