"""Transports that record what passes: each wraps another one and keeps its contract.

Invariants: a frame is recorded after the wrapped transport has taken it, and before a received one is handed on, so
the capture has the order that this process saw; nothing is changed, delayed or checked. A server numbers its peers in
the order of their first frame. Implements ``ClientTransport`` and ``ServerTransport`` of ``transports.base``. Called
by whoever wants a capture of a live connection.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..buffers import Buffer
from ..placement import Place, PlacedFrame, Received
from ..transports.base import ClientTransport, PeerFrame, ServerTransport
from .records import Direction, TransportKind
from .writer import CaptureWriter


class RecordingClient:
    """Spark's end of ``inner``, recorded as connection ``connection``."""

    def __init__(
        self, inner: ClientTransport, writer: CaptureWriter, transport: TransportKind, connection: int = 0
    ) -> None:
        self._inner, self._writer = inner, writer
        self._transport, self._connection = transport, connection

    @property
    def place(self) -> Place | None:
        """That of the inner transport."""
        return self._inner.place

    @place.setter
    def place(self, place: Place | None) -> None:
        self._inner.place = place

    def send(self, frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        """Send ``frames``; they are recorded when the inner transport has taken them."""
        sent = self._inner.send(frames, timeout_ms)
        if sent:
            for frame in frames:
                self._writer.frame(Direction.UP, self._transport, self._connection, frame)
        return sent

    def poll(self, timeout_ms: int) -> Sequence[Received]:
        """Frames that have arrived, recorded."""
        frames = self._inner.poll(timeout_ms)
        for frame in frames:
            whole = bytes(frame) if isinstance(frame, PlacedFrame) else frame
            self._writer.frame(Direction.DOWN, self._transport, self._connection, whole)
        return frames

    def close(self) -> None:
        """Close the inner transport; the writer stays open."""
        self._inner.close()


class RecordingServer:
    """A worker's end of ``inner``, recorded; ``connections`` maps peers to their numbers in the capture."""

    def __init__(self, inner: ServerTransport, writer: CaptureWriter, transport: TransportKind) -> None:
        self._inner, self._writer, self._transport = inner, writer, transport
        self.connections: dict[bytes, int] = {}

    @property
    def endpoint(self) -> str:
        """The inner transport's address."""
        return self._inner.endpoint

    def send(self, peer: bytes, frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        """Send ``frames`` to ``peer``; they are recorded when the inner transport has taken them."""
        sent = self._inner.send(peer, frames, timeout_ms)
        if sent:
            for frame in frames:
                self._writer.frame(Direction.DOWN, self._transport, self._number(peer), frame)
        return sent

    def poll(self, timeout_ms: int) -> list[PeerFrame]:
        """Frames that have arrived, recorded."""
        arrived = self._inner.poll(timeout_ms)
        for one in arrived:
            self._writer.frame(Direction.UP, self._transport, self._number(one.peer), one.frame)
        return arrived

    def close(self) -> None:
        """Close the inner transport; the writer stays open."""
        self._inner.close()

    def _number(self, peer: bytes) -> int:
        return self.connections.setdefault(peer, len(self.connections))
