"""Plain TCP and TLS transports: ``plain+tcp://`` and ``tls+tcp://``.

A thread that calls ``poll`` and ``send``, as for every transport, and no asyncio: the engine's round path is a
plain thread that sends a STEP and waits in the socket until the reply comes, and an event loop under it
would add two hand-overs to every round. Frames follow each other on the stream; the prefix says how long each
is. Invariants: nothing is allocated for a length that a prefix merely announces; a bad or oversized prefix
ends that connection, whose bytes are not drained; connections, queues and receive memory are bounded; a
connection that sends no whole frame in time is closed; a client that lost its worker connects again, with
pauses that grow. Frames are views of the connection's receive buffer, and one copy, by the protocol connection
into leased staging, is all that follows; of a large reply a client whose ``place`` is set receives the rows there
itself, and nothing is copied. Spec: SPEC.md, section "Plain TCP mapping".
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from ..buffers import Buffer
from ..placement import Place, Received
from .base import PeerFrame
from .bounds import LinkCounters, LinkLimits
from .dialer import Dialer, listen
from .endpoint import Address, parse_address
from .frame_buffer import START_BYTES, FrameBuffer
from .patience import SLEEP_AT_ONCE, Patience
from .security import NO_SECURITY, Security, check_fits, check_listen
from .stream import Stream, TlsStream
from .tls import client_context, server_context

_ACCEPT_BURST: Final = 16
_READ_WRITE: Final = select.POLLIN | select.POLLOUT
_SWEEP_MS: Final = 500
"""How often deadlines of connections are looked at."""


class TcpClient:
    """One connection to a worker. Implements ``ClientTransport``.

    Raises :class:`TransportError` for an address or files that cannot be used, OSError for a name that does
    not resolve. A worker that is not there yet is no error.
    """

    def __init__(self, endpoint: str, security: Security = NO_SECURITY, limits: LinkLimits | None = None) -> None:
        check_fits(endpoint, security)
        self.endpoint = endpoint
        self.place: Place | None = None
        self._address = parse_address(endpoint)
        self._limits = limits or LinkLimits()
        self._tls = None if security.tls is None else client_context(security.tls)
        self._dialer = Dialer(self._address)
        self._stream: Stream | None = None
        self._waiting = select.poll()
        self._events = 0
        self._for_frames = Patience(self._limits.spin_us)
        self._for_the_rest = Patience(self._limits.spin_us)
        self._is_shut = False

    def send(self, frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        """Send ``frames`` in order, see ``ClientTransport``; waits up to ``timeout_ms`` for the connection."""
        if not frames:
            return True
        until = time.monotonic() + timeout_ms / 1000
        while not self._is_shut:
            stream = self._advance()
            remaining_ms = max(0.0, (until - time.monotonic()) * 1000)
            if stream is not None and stream.is_ready:
                return stream.send(frames, int(remaining_ms))
            if remaining_ms <= 0:
                return False
            self._wait(remaining_ms, SLEEP_AT_ONCE)
        return False

    def poll(self, timeout_ms: int) -> list[Received]:
        """Frames that have arrived, see ``ClientTransport``."""
        until = time.monotonic() + timeout_ms / 1000
        patience = self._for_frames
        while not self._is_shut:
            stream = self._advance()
            remaining_ms = max(0.0, (until - time.monotonic()) * 1000)
            is_due = stream is not None and stream.has_pending
            if (is_due or self._wait(remaining_ms, patience)) and stream is not None:
                stream.advance()
                frames = stream.receive()
                if frames:
                    self._dialer.settle()
                    return frames
                patience = self._for_the_rest
            if remaining_ms <= 0:
                break
        return []

    def close(self) -> None:
        """Drop the connection; no other is made."""
        self._is_shut = True
        self._dialer.close()
        if self._stream is not None:
            self._stream.close()

    def _advance(self) -> Stream | None:
        """The connection, after doing what can be done about one that is missing."""
        stream = self._stream
        if stream is not None and not stream.is_ready and not stream.is_closed:
            stream.advance()
            if not stream.is_ready and self._dialer.is_overdue():
                stream.close()
        if stream is not None and stream.is_closed:
            self._stream = None
            self._dialer.retry_later()
        if self._stream is None:
            self._connect()
        return self._stream

    def _connect(self) -> None:
        connected = self._dialer.advance()
        if connected is None:
            return
        buffer = FrameBuffer(self._limits.frame_bytes_max, lambda _: True, self._placed)
        self._stream = _make_stream(connected, buffer, self._limits, self._tls, self._address.host)
        self._waiting, self._events = select.poll(), 0
        self._stream.advance()

    def _placed(self, prefix: memoryview) -> memoryview | None:
        return None if self.place is None else self.place(prefix)

    def _wait(self, timeout_ms: float, patience: Patience) -> bool:
        """Wait until something can have changed; whether the connection's socket is ready."""
        if self._stream is None:
            self._dialer.wait(timeout_ms)
            return False
        events = _READ_WRITE if self._stream.wants_write else select.POLLIN
        if events != self._events:
            self._waiting.register(self._stream.socket, events)
            self._events = events
        return bool(patience.wait(self._waiting.poll, timeout_ms))


class TcpServer:
    """Listens on ``plain+tcp://`` or ``tls+tcp://``. Implements ``ServerTransport``.

    Raises :class:`LocalProtocolError` AUTH_UNSUPPORTED for an address that other machines can reach without a
    secret, :class:`TransportError` for an address or files that cannot be used, OSError when the address is
    taken.
    """

    def __init__(
        self,
        endpoint: str = "plain+tcp://127.0.0.1:0",
        security: Security = NO_SECURITY,
        limits: LinkLimits | None = None,
    ) -> None:
        check_fits(endpoint, security)
        check_listen(endpoint, security)
        address = parse_address(endpoint)
        self.counters = LinkCounters()
        self._limits = limits or LinkLimits()
        self._tls = None if security.tls is None else server_context(security.tls)
        self._listener = listen(address)
        self._endpoint = str(Address(address.scheme, address.host, self._listener.getsockname()[1]))
        self._waiting = select.poll()
        self._waiting.register(self._listener, select.POLLIN)
        self._peers: dict[bytes, _Peer] = {}
        self._of_descriptor: dict[int, _Peer] = {}
        self._serial = 0
        self._receive_bytes = 0
        self._next_sweep_s = 0.0
        self._for_frames = Patience(self._limits.spin_us)
        self._for_the_rest = Patience(self._limits.spin_us)

    @property
    def endpoint(self) -> str:
        """The bound address."""
        return self._endpoint

    def send(self, peer: bytes, frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        """Send ``frames`` to ``peer``, see ``ServerTransport``."""
        if not frames:
            return True
        found = self._peers.get(peer)
        if found is None:
            return False
        sent = found.stream.send(frames, timeout_ms)
        self._settle(found)
        return sent

    def poll(self, timeout_ms: int) -> list[PeerFrame]:
        """Frames that have arrived, see ``ServerTransport``."""
        until = time.monotonic() + timeout_ms / 1000
        patience = self._for_frames
        while True:
            now = time.monotonic()
            self._sweep(now)
            arrived = self._turn(max(0.0, min((until - now) * 1000, _SWEEP_MS)), patience)
            if arrived or time.monotonic() >= until:
                return arrived
            patience = self._for_the_rest

    def close(self) -> None:
        """Stop listening and drop every connection."""
        for peer in list(self._peers.values()):
            peer.stream.close()
        self._peers.clear()
        self._of_descriptor.clear()
        self._listener.close()

    def _turn(self, timeout_ms: float, patience: Patience) -> list[PeerFrame]:
        """Wait once, then serve every socket that is ready."""
        pending = [peer for peer in self._peers.values() if peer.stream.has_pending]
        arrived: list[PeerFrame] = []
        for descriptor, _ in patience.wait(self._waiting.poll, 0 if pending else timeout_ms):
            peer = self._of_descriptor.get(descriptor)
            if peer is None:
                self._accept()
            elif peer not in pending:
                pending.append(peer)
        for peer in pending:
            arrived += self._serve(peer)
        return arrived

    def _serve(self, peer: _Peer) -> list[PeerFrame]:
        stream = peer.stream
        stream.advance()
        frames = stream.receive()
        if frames:
            peer.heard_s, peer.is_known = time.monotonic(), True
        self.counters.bad_prefixes += stream.buffer.fault is not None
        self._settle(peer)
        # A server's buffers have no place for bodies but themselves.
        return [PeerFrame(peer.name, frame) for frame in frames if isinstance(frame, memoryview)]

    def _settle(self, peer: _Peer) -> None:
        """After any use of a stream: forget it, or wait for what it waits for."""
        if peer.stream.is_closed:
            self._forget(peer)
            return
        events = _READ_WRITE if peer.stream.wants_write else select.POLLIN
        if events != peer.events:
            self._waiting.modify(peer.descriptor, events)
            peer.events = events

    def _forget(self, peer: _Peer) -> None:
        del self._peers[peer.name]
        self._receive_bytes -= peer.stream.buffer.capacity
        # A closed socket does not know its descriptor any more.
        del self._of_descriptor[peer.descriptor]
        self._waiting.unregister(peer.descriptor)

    def _accept(self) -> None:
        for _ in range(_ACCEPT_BURST):
            try:
                accepted, _ = self._listener.accept()
            except OSError:  # none is left, one went away, or the process may open no more files
                return
            if len(self._peers) >= self._limits.connections_max or not self._grow(START_BYTES):
                self.counters.too_many_connections += 1
                accepted.close()
                continue
            accepted.setblocking(False)
            self._admit(accepted)

    def _admit(self, accepted: socket.socket) -> None:
        self._serial += 1
        stream = _make_stream(
            accepted, FrameBuffer(self._limits.frame_bytes_max, self._grow), self._limits, self._tls, None
        )
        peer = _Peer(self._serial.to_bytes(8, "big"), stream, stream.socket.fileno(), time.monotonic())
        self._peers[peer.name] = self._of_descriptor[peer.descriptor] = peer
        self._waiting.register(peer.descriptor, peer.events)

    def _grow(self, size: int) -> bool:
        """Whether the connections may hold ``size`` more bytes of receive memory."""
        if self._receive_bytes + size > self._limits.receive_bytes_max:
            return False
        self._receive_bytes += size
        return True

    def _sweep(self, now: float) -> None:
        """Close the connections that owe a frame."""
        if now < self._next_sweep_s:
            return
        self._next_sweep_s = now + _SWEEP_MS / 1000
        for peer in list(self._peers.values()):
            allowed_ms = self._limits.idle_ms if peer.is_known else self._limits.first_frame_ms
            if (now - peer.heard_s) * 1000 > allowed_ms:
                self.counters.overdue += 1
                peer.stream.close()
                self._forget(peer)


@dataclass(slots=True, eq=False)
class _Peer:
    """One accepted connection; ``is_known`` once a whole frame has come. ``heard_s`` is of the last frame."""

    name: bytes
    stream: Stream
    descriptor: int
    heard_s: float
    is_known: bool = False
    events: int = select.POLLIN


def _make_stream(
    connected: socket.socket,
    buffer: FrameBuffer,
    limits: LinkLimits,
    tls: ssl.SSLContext | None,
    host: str | None,
) -> Stream:
    """The stream over a connected socket; ``host`` is the name that a server's certificate must have."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is None:
        return Stream(connected, buffer, limits.queue_bytes_max)
    wrap = partial(tls.wrap_socket, server_side=host is None, do_handshake_on_connect=False, server_hostname=host)
    return TlsStream(connected, buffer, limits.queue_bytes_max, wrap)
