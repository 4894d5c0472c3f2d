"""ZeroMQ transport: DEALER on the Spark side, ROUTER on the worker side; the default.

One whole v2 frame per message part; a message may carry several. Invariants: bounded queues, bounded part
size and count, LINGER 0, nothing queued for an unconnected peer, loopback unless the caller says otherwise.
Receiving does not copy: a frame is a view of libzmq's own message. Each end belongs to one thread. Spec:
SPEC.md, section "ZeroMQ mapping".
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import zmq

from ..buffers import Buffer
from ..errors import LocalProtocolError
from ..limits import FRAME_BYTES_MAX
from ..registry import ErrorCode
from .base import PeerFrame

QUEUE_MESSAGES: Final = 256
PARTS_MAX: Final = 64
BURST_MESSAGES: Final = 64
"""Messages that one ``poll`` takes at most, so that a fast peer cannot starve the caller's deadlines."""

_HEARTBEAT_MS: Final = 1000
_HEARTBEAT_TIMEOUT_MS: Final = 5000
_HANDSHAKE_MS: Final = 5000
_RECONNECT_MS: Final = 50
_RECONNECT_MAX_MS: Final = 1000


class _Link:
    """Socket options and part-wise reception that both ends share."""

    def __init__(self, kind: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self.dropped_messages = 0
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, QUEUE_MESSAGES),
            (zmq.RCVHWM, QUEUE_MESSAGES),
            (zmq.MAXMSGSIZE, FRAME_BYTES_MAX),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS),
        ):
            self._socket.setsockopt(option, value)

    def _send_parts(self, parts: Sequence[Buffer], timeout_ms: int) -> bool:
        if timeout_ms and not self._socket.poll(timeout_ms, zmq.POLLOUT):
            return False
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return False
        return True

    def _receive_messages(self, timeout_ms: int) -> list[list[zmq.Frame]]:
        messages: list[list[zmq.Frame]] = []
        if not self._socket.poll(timeout_ms, zmq.POLLIN):
            return messages
        for _ in range(BURST_MESSAGES):
            try:
                messages.append(self._receive_parts())
            except zmq.Again:
                break
        return messages

    def _receive_parts(self) -> list[zmq.Frame]:
        """One message; empty, counted, when it has too many parts to be one of ours."""
        parts = [self._socket.recv(zmq.NOBLOCK, copy=False)]
        count = 1
        while parts[-1].more:
            part = self._socket.recv(zmq.NOBLOCK, copy=False)
            count += 1
            parts[PARTS_MAX:] = [part]
        if count <= PARTS_MAX:
            return parts
        self.dropped_messages += 1
        return []

    def close(self) -> None:
        """Close the socket and its context; queued messages are dropped."""
        self._socket.close(0)
        self._context.term()


class ZmqClient(_Link):
    """DEALER connected to one worker; reconnects by itself. Implements ``ClientTransport``."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(zmq.DEALER)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self.endpoint = endpoint
        self._socket.connect(endpoint)

    def send(self, frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        """Send ``frames`` as one message; waits up to ``timeout_ms`` for a connection with room."""
        return not frames or self._send_parts(frames, timeout_ms)

    def poll(self, timeout_ms: int) -> list[memoryview]:
        """Frames that have arrived, waiting up to ``timeout_ms`` for the first."""
        return [part.buffer for parts in self._receive_messages(timeout_ms) for part in parts]


class ZmqServer(_Link):
    """ROUTER bound to ``endpoint`` (``tcp://127.0.0.1:0`` picks a port). Implements ``ServerTransport``.

    Raises :class:`LocalProtocolError` when the address is not loopback and ``allow_remote`` is not set: this
    transport authenticates nobody yet.
    """

    def __init__(self, endpoint: str = "tcp://127.0.0.1:0", allow_remote: bool = False) -> None:
        if not allow_remote and not is_local(endpoint):
            raise LocalProtocolError(
                ErrorCode.AUTH_UNSUPPORTED,
                "endpoint",
                f"{endpoint} is not loopback; pass allow_remote=True to expose it",
            )
        super().__init__(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, peer: bytes, frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        """Send ``frames`` to ``peer`` as one message."""
        if not frames:
            return True
        try:
            return self._send_parts([peer, *frames], timeout_ms)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise

    def poll(self, timeout_ms: int) -> list[PeerFrame]:
        """Frames that have arrived, waiting up to ``timeout_ms`` for the first."""
        return [
            PeerFrame(parts[0].bytes, part.buffer)
            for parts in self._receive_messages(timeout_ms)
            for part in parts[1:]
        ]


def is_local(endpoint: str) -> bool:
    """Whether ``endpoint`` can be reached from this machine only."""
    address = urlsplit(endpoint)
    if address.scheme in ("ipc", "inproc"):
        return True
    host = address.hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
