"""In-process transport: two queues, no sockets; for tests, demonstrations and the simulator.

It keeps the contract of ``base`` (whole frames, order, copies on send) and is single-threaded: ``poll`` never
waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from ..buffers import Buffer
from ..placement import Place
from .base import PeerFrame

QUEUE_FRAMES: Final = 1024


class InprocServer:
    """A worker's end. ``connect`` makes the ends of new peers. Implements ``ServerTransport``."""

    def __init__(self) -> None:
        self._arrived: deque[PeerFrame] = deque()
        self._clients: dict[bytes, InprocClient] = {}
        self._serial = 0

    @property
    def endpoint(self) -> str:
        """A name for logs."""
        return "inproc"

    def connect(self) -> InprocClient:
        """A client end with a peer name that has not been used before."""
        self._serial += 1
        client = InprocClient(self, self._serial.to_bytes(4, "big"))
        self._clients[client.peer] = client
        return client

    def send(self, peer: bytes, frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        """Queue copies of ``frames`` for ``peer``; False when it is gone or has no room."""
        client = self._clients.get(peer)
        return client is not None and client.deliver(frames)

    def poll(self, timeout_ms: int) -> list[PeerFrame]:
        """Frames that have arrived."""
        frames, self._arrived = list(self._arrived), deque()
        return frames

    def close(self) -> None:
        """Disconnect every client and drop what is queued."""
        self._clients.clear()
        self._arrived.clear()

    def deliver(self, client: InprocClient, frames: Sequence[Buffer]) -> bool:
        """Called by a client's ``send``."""
        if client.peer not in self._clients or len(self._arrived) + len(frames) > QUEUE_FRAMES:
            return False
        self._arrived.extend(PeerFrame(client.peer, memoryview(bytes(frame))) for frame in frames)
        return True

    def forget(self, client: InprocClient) -> None:
        """Called by a client's ``close``."""
        self._clients.pop(client.peer, None)


class InprocClient:
    """Spark's end. Implements ``ClientTransport``."""

    place: Place | None = None

    def __init__(self, server: InprocServer, peer: bytes) -> None:
        self.peer = peer
        self._server = server
        self._arrived: deque[memoryview] = deque()

    def send(self, frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        """Queue copies of ``frames``; False when the server is gone or has no room."""
        return self._server.deliver(self, frames)

    def poll(self, timeout_ms: int) -> list[memoryview]:
        """Frames that have arrived."""
        frames, self._arrived = list(self._arrived), deque()
        return frames

    def close(self) -> None:
        """Leave the server."""
        self._server.forget(self)

    def deliver(self, frames: Sequence[Buffer]) -> bool:
        """Called by the server's ``send``."""
        if len(self._arrived) + len(frames) > QUEUE_FRAMES:
            return False
        self._arrived.extend(memoryview(bytes(frame)) for frame in frames)
        return True
