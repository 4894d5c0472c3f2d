"""One connected, non-blocking stream socket that carries frames, plain or under TLS.

Sending goes straight from the caller's buffers to the kernel; only what a slow peer leaves is copied, into a
bounded queue. Receiving goes into a :class:`FrameBuffer`, whose frames are views, or straight to where that wants
the last body of a frame. Invariants: ``send`` waits for a peer that is taking bytes, never for one that is not; a
fault of the peer, an end of the stream or a reset closes the stream and raises nothing. Spec: SPEC.md, section
"Plain TCP mapping". Called by ``tcp``; knows no addresses and keeps no clock of its own.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from ..buffers import Buffer, byte_view
from ..placement import Received
from .dialer import wait_for
from .frame_buffer import FrameBuffer

STALL_MS: Final = 5
"""How long ``send`` waits for a peer that takes nothing before it copies the rest into the queue."""

PATIENCE_S: Final = 0.05
"""How long one ``send`` waits in all for a peer that does take bytes."""

_VIEWS_MAX: Final = 256
"""Buffers of one system call; the system's own bound is 1,024."""

_RECORD_BYTES: Final = 16 * 1024
"""Largest TLS record."""


class Stream:
    """A plain TCP connection. ``queue_bytes_max`` bounds what is queued behind a frame that is under way."""

    def __init__(self, connected: socket.socket, buffer: FrameBuffer, queue_bytes_max: int) -> None:
        self.socket = connected
        self.buffer = buffer
        self.is_closed = False
        self.is_ready = True
        self.has_pending = False
        """Whether bytes wait above the socket, where its readiness does not show."""
        self._queue_bytes_max = queue_bytes_max
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0

    @property
    def wants_write(self) -> bool:
        """Whether to call ``advance`` when the socket becomes writable."""
        return bool(self._queue)

    def advance(self) -> None:
        """Go on with what waits for the socket."""
        self._flush()

    def send(self, frames: Sequence[Buffer], timeout_ms: int) -> bool:
        """Send or queue all of ``frames``; False, and nothing taken, when closed or when the queue is full."""
        parts = [byte_view(frame) for frame in frames]
        if self._queue:
            self._flush()
        if self._queue and not self._has_room(sum(map(len, parts)), timeout_ms):
            return False
        if self.is_closed or not self.is_ready:
            return False
        rest = parts if self._queue else self._transmit(parts)
        for part in rest:
            self._queue.append(memoryview(bytes(part)))
            self._queued_bytes += len(part)
        return not self.is_closed

    def _has_room(self, wanted_bytes: int, timeout_ms: int) -> bool:
        """Whether the queue can take ``wanted_bytes``, waiting for it to empty."""
        until = time.monotonic() + timeout_ms / 1000
        while self._queue and self._queued_bytes + wanted_bytes > self._queue_bytes_max:
            remaining_ms = (until - time.monotonic()) * 1000
            if remaining_ms <= 0 or not wait_for(self.socket, select.POLLOUT, remaining_ms):
                return False
            self._flush()
        return not self.is_closed

    def _transmit(self, parts: list[memoryview]) -> list[memoryview]:
        """Write ``parts``; what is left when the peer stalls, or when patience ends."""
        until = time.monotonic() + PATIENCE_S
        while parts and not self.is_closed:
            written = self._write(parts)
            if written:
                parts = _after(parts, written)
            elif not self.is_closed and not self._takes_more(until):
                break
        return [] if self.is_closed else parts

    def _takes_more(self, until: float) -> bool:
        """Whether the peer makes room soon."""
        return time.monotonic() <= until and wait_for(self.socket, select.POLLOUT, STALL_MS)

    def _flush(self) -> None:
        while self._queue and not self.is_closed:
            written = self._write([self._queue[0]])
            if not written:
                return
            self._queued_bytes -= written
            rest = _after([self._queue.popleft()], written)
            self._queue.extendleft(rest)

    def receive(self) -> list[Received]:
        """Take what has arrived, up to the end of a frame; frames of the call before are dead."""
        self.buffer.recycle()
        while not self.is_closed:
            room = self.buffer.room()
            count = self._read(room) if room else 0
            if count is None:
                return []
            if count == 0:
                self.close()
                return []
            frames = self.buffer.add(count)
            if self.buffer.fault is not None:
                self.close()
            # Fewer bytes than there was room for: nothing is left, and asking again costs a call and an exception.
            if frames or count < len(room):
                return frames
        return []

    def close(self) -> None:
        """End the stream; what is queued is dropped."""
        self.is_closed = True
        self._queue.clear()
        self._queued_bytes = 0
        self.socket.close()

    def _write(self, parts: Sequence[memoryview]) -> int:
        """Bytes written, 0 when the socket takes none; closes on an error."""
        try:
            return self.socket.sendmsg(parts[:_VIEWS_MAX])
        except BlockingIOError:
            return 0
        except OSError:
            self.close()
            return 0

    def _read(self, room: memoryview) -> int | None:
        """Bytes read, 0 at the end of the stream, None when nothing has arrived."""
        try:
            return self.socket.recv_into(room)
        except BlockingIOError:
            return None
        except OSError:
            return 0


class TlsStream(Stream):
    """A TLS connection over ``connected``; not ready until both sides have proved who they are.

    ``wrap`` puts the socket under TLS without starting the handshake.
    """

    def __init__(
        self,
        connected: socket.socket,
        buffer: FrameBuffer,
        queue_bytes_max: int,
        wrap: Callable[[socket.socket], ssl.SSLSocket],
    ) -> None:
        self._tls = wrap(connected)
        super().__init__(self._tls, buffer, queue_bytes_max)
        self.is_ready = False
        self._handshake_writes = False

    @property
    def wants_write(self) -> bool:
        """Whether to call ``advance`` when the socket becomes writable."""
        return self._handshake_writes or super().wants_write

    def advance(self) -> None:
        """Go on with the handshake, or with the queue."""
        if not self.is_ready and not self.is_closed:
            self._shake_hands()
        if self.is_ready:
            self._flush()

    def _shake_hands(self) -> None:
        self._handshake_writes = False
        try:
            self._tls.do_handshake()
            self.is_ready = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLWantWriteError:
            self._handshake_writes = True
        except OSError:
            self.close()

    def receive(self) -> list[Received]:
        """Take what has arrived, see :meth:`Stream.receive`."""
        self.advance()
        if not self.is_ready:
            return []
        frames = super().receive()
        self.has_pending = not self.is_closed and self._tls.pending() > 0
        return frames

    def send(self, frames: Sequence[Buffer], timeout_ms: int) -> bool:
        """See :meth:`Stream.send`. Small frames share a record, for each record costs a system call."""
        if len(frames) > 1 and sum(map(len, frames)) <= _RECORD_BYTES:
            frames = [b"".join(frames)]
        return super().send(frames, timeout_ms)

    def _write(self, parts: Sequence[memoryview]) -> int:
        """One record at most, so that a write which has to be repeated is repeated with the same bytes."""
        try:
            return self._tls.send(parts[0][:_RECORD_BYTES])
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0
        except OSError:
            self.close()
            return 0

    def _read(self, room: memoryview) -> int | None:
        try:
            return self._tls.recv_into(room)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except OSError:
            return 0


def _after(parts: list[memoryview], written: int) -> list[memoryview]:
    """What is left of ``parts`` after their first ``written`` bytes."""
    for index, part in enumerate(parts):
        if written < len(part):
            return [part[written:], *parts[index + 1 :]]
        written -= len(part)
    return []
