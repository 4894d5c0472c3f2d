"""ZeroMQ transport: DEALER on the Spark side, ROUTER on the worker side; the default.

One whole v2 frame per message part; a message may carry several. Invariants: bounded queues, bounded part
size and count, LINGER 0, nothing queued for an unconnected peer, no address that other machines reach without
a secret. Receiving does not copy: a frame is a view of libzmq's own message. With CURVE keys both ends prove
who they are and everything is encrypted. Each end belongs to one thread. Spec: SPEC.md, section "ZeroMQ
mapping".
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import zmq

from ..buffers import Buffer
from ..limits import FRAME_BYTES_MAX
from ..placement import Place
from .base import PeerFrame, TransportError
from .curve import CurveGate, connect_curve, serve_curve
from .message_memory import keep_message_memory
from .security import NO_SECURITY, Security, check_fits, check_listen

QUEUE_MESSAGES: Final = 256
PARTS_MAX: Final = 64
LARGE_BYTES: Final = 64 * 1024
RUNS_MAX: Final = 16
"""A message ends with so many bytes, or with a larger share of what is sent, so that a send fills little of a queue:
nobody sees a message before all of it is there, and the other end can take large frames in while others come."""

BURST_MESSAGES: Final = 64
"""Messages that one ``poll`` takes at most, so that a fast peer cannot starve the caller's deadlines."""

_NOW: Final = int(zmq.NOBLOCK)
_NOW_AND_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_READABLE: Final = int(zmq.POLLIN)
"""Plain numbers: combining the library's own flags takes longer than the calls that they are for."""

_HEARTBEAT_MS: Final = 1000
_HEARTBEAT_TIMEOUT_MS: Final = 5000
_HANDSHAKE_MS: Final = 5000
_RECONNECT_MS: Final = 50
_RECONNECT_MAX_MS: Final = 1000


class _Link:
    """Socket options and part-wise reception that both ends share."""

    def __init__(self, kind: int) -> None:
        keep_message_memory()
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._gate: CurveGate | None = None
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._patience_ms = 0
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
        """Send one message; False, and nothing sent, when the queue has no room for it in time."""
        try:
            self._send_now(parts)
        except zmq.Again:
            if timeout_ms <= 0 or not self._socket.poll(timeout_ms, zmq.POLLOUT):
                return False
            return self._send_parts(parts, 0)
        return True

    def _send_now(self, parts: Sequence[Buffer]) -> None:
        """Only the first part can find no room. ``send_multipart`` does the same in twice the time."""
        send = self._socket.send
        for part in parts[:-1]:
            send(part, _NOW_AND_MORE)
        send(parts[-1], _NOW)

    def _receive_messages(self, timeout_ms: int) -> list[list[zmq.Frame]]:
        messages: list[list[zmq.Frame]] = []
        flags = _NOW if self._gate or timeout_ms <= 0 else self._be_patient(timeout_ms)
        if self._gate and not self._answer_until_ready(self._gate, timeout_ms):
            return messages
        try:
            messages.append(self._receive_parts(flags))
            while len(messages) < BURST_MESSAGES and int(self._socket.get(_EVENTS)) & _READABLE:
                messages.append(self._receive_parts(_NOW))
        except zmq.Again:
            pass
        return messages

    def _be_patient(self, timeout_ms: int) -> int:
        """Flags of a call that waits for a message itself. A poll before it makes a small round a third longer."""
        if timeout_ms != self._patience_ms:
            self._socket.setsockopt(zmq.RCVTIMEO, timeout_ms)
            self._patience_ms = timeout_ms
        return 0

    def _answer_until_ready(self, gate: CurveGate, timeout_ms: int) -> bool:
        """Whether a message is there within ``timeout_ms``; clients that knock meanwhile are answered."""
        until = time.monotonic() + timeout_ms / 1000
        while True:
            ready = self._poller.poll(max(0, math.ceil((until - time.monotonic()) * 1000)))
            gate.answer()
            if any(socket is self._socket for socket, _ in ready):
                return True
            if not ready or time.monotonic() >= until:
                return False

    def _receive_parts(self, flags: int) -> list[zmq.Frame]:
        """One message; empty, counted, when it has too many parts to be one of ours."""
        parts = [self._socket.recv(flags, copy=False)]
        count = 1
        while parts[-1].more:
            part = self._socket.recv(_NOW, copy=False)
            count += 1
            parts[PARTS_MAX:] = [part]
        if count <= PARTS_MAX:
            return parts
        self.dropped_messages += 1
        return []

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """Set-up that fails leaves no socket behind."""
        try:
            yield
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """Close the sockets and their context; queued messages are dropped."""
        self._socket.close(0)
        if self._gate is not None:
            self._gate.close()
        self._context.term()


class ZmqClient(_Link):
    """DEALER connected to one worker; reconnects by itself. Implements ``ClientTransport``.

    Raises :class:`TransportError` for keys that cannot be used, ``zmq.ZMQError`` for an address that cannot.
    """

    place: Place | None = None

    def __init__(self, endpoint: str, security: Security = NO_SECURITY) -> None:
        check_fits(endpoint, security)
        super().__init__(zmq.DEALER)
        self.endpoint = endpoint
        with self._closing_on_error():
            if security.curve is not None:
                connect_curve(self._socket, security.curve)
            self._socket.setsockopt(zmq.IMMEDIATE, 1)
            self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
            self._socket.connect(endpoint)

    def send(self, frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        """Send ``frames`` in runs; waits up to ``timeout_ms`` for a connection with room, for each of them."""
        return all(self._send_parts(run, timeout_ms) for run in _runs(frames))

    def poll(self, timeout_ms: int) -> list[memoryview]:
        """Frames that have arrived, waiting up to ``timeout_ms`` for the first."""
        return [part.buffer for parts in self._receive_messages(timeout_ms) for part in parts]


class ZmqServer(_Link):
    """ROUTER bound to ``endpoint`` (``tcp://127.0.0.1:0`` picks a port). Implements ``ServerTransport``.

    Raises :class:`LocalProtocolError` AUTH_UNSUPPORTED for an address that other machines can reach without a
    secret, :class:`TransportError` for keys that cannot be used, ``zmq.ZMQError`` when it cannot bind.
    """

    def __init__(self, endpoint: str = "tcp://127.0.0.1:0", security: Security = NO_SECURITY) -> None:
        check_fits(endpoint, security)
        check_listen(endpoint, security)
        super().__init__(zmq.ROUTER)
        with self._closing_on_error():
            if security.curve is not None:
                self._gate = CurveGate(self._context, security.curve)
                serve_curve(self._socket, security.curve)
                self._poller.register(self._gate.socket, zmq.POLLIN)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
            self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, peer: bytes, frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        """Send ``frames`` to ``peer`` in runs, each after the name in a message."""
        try:
            return all(self._send_parts([peer, *run], timeout_ms) for run in _runs(frames))
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise

    def poll(self, timeout_ms: int) -> list[PeerFrame]:
        """Frames that have arrived, waiting up to ``timeout_ms`` for the first."""
        return [
            PeerFrame(parts[0].bytes, part.buffer) for parts in self._receive_messages(timeout_ms) for part in parts[1:]
        ]


def _runs(frames: Sequence[Buffer]) -> Iterator[Sequence[Buffer]]:
    """``frames`` in runs that fit a message beside a name, each ended by a large frame.

    A queue can be full for any of them: what went before it is sent then, and nothing after it. Half a reply has no
    COMPLETION, so its round ends at the deadline, as it does when nothing was sent.
    """
    share = max(LARGE_BYTES, sum(map(len, frames)) // RUNS_MAX)
    start = held = 0
    for end, frame in enumerate(frames, 1):
        held += len(frame)
        if end - start == PARTS_MAX - 1 or held >= share:
            yield frames[start:end]
            start, held = end, 0
    if start < len(frames):
        yield frames[start:]


@contextmanager
def explained(endpoint: str) -> Iterator[None]:
    """ZeroMQ's own errors as :class:`TransportError`."""
    try:
        yield
    except zmq.ZMQError as error:
        raise TransportError(f"{endpoint}: {error.strerror}") from None
