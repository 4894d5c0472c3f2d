"""UCX transport, for RDMA networks: ``ucx://host:port``. Needs the package ``ucxx`` and the setting ``UCX_TLS``.

The ends meet over TCP at the endpoint's address (see ``ucx_meeting``), and frames go through UCX (see
``ucx_link``). Invariants: no transport but those that ``UCX_TLS`` names is used, and nothing falls back; a
link ends when the TCP connection or UCX's endpoint does, and its late frames match no other; connections,
queues and receive memory are bounded. A peer that is stopped, but not dead, shows only in the protocol's
heartbeats. The meeting is not encrypted and UCX does not authenticate: it belongs on an isolated network.
Spec: SPEC.md, section "UCX mapping".
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..buffers import Buffer
from ..placement import Place
from .base import PeerFrame
from .bounds import LinkCounters, LinkLimits
from .dialer import Dialer, listen
from .endpoint import Address, parse_address
from .patience import SLEEP_AT_ONCE, Patience
from .security import NO_SECURITY, Security, check_fits, check_listen
from .ucx_link import UcxLink, UcxPeer
from .ucx_meeting import Meeting

_TURN_MS: Final = 500.0
"""Longest sleep, and how often the meeting sockets and deadlines are looked at while frames come without a pause."""


class UcxClient:
    """One link to a worker. Implements ``ClientTransport``.

    Raises :class:`TransportError` for an address or a ``UCX_TLS`` that cannot be used, OSError for a name that
    does not resolve. A worker that is not there yet is no error.
    """

    place: Place | None = None

    def __init__(self, endpoint: str, security: Security = NO_SECURITY, limits: LinkLimits | None = None) -> None:
        check_fits(endpoint, security)
        self.endpoint = endpoint
        self._dialer = Dialer(parse_address(endpoint))
        limits = limits or LinkLimits()
        self._link = UcxLink(limits)
        self._for_frames = Patience(limits.spin_us)
        self._for_the_rest = Patience(limits.spin_us)
        self._meeting: Meeting | None = None
        self._peer: UcxPeer | None = None
        self._descriptor = 0
        self._next_look_s = 0.0
        self._is_shut = False

    def send(self, frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        """Send copies of ``frames`` in order, see ``ClientTransport``."""
        if not frames:
            return True
        until = time.monotonic() + timeout_ms / 1000
        self._link.listen()
        while not self._is_shut:
            peer = self._advance()
            remaining_ms = max(0.0, (until - time.monotonic()) * 1000)
            if peer is not None and peer.endpoint is not None:
                return self._link.send(peer, frames, int(remaining_ms))
            if remaining_ms <= 0:
                return False
            self._wait(remaining_ms, SLEEP_AT_ONCE)
        return False

    def poll(self, timeout_ms: int) -> list[memoryview]:
        """Frames that have arrived, see ``ClientTransport``."""
        until = time.monotonic() + timeout_ms / 1000
        patience = self._for_frames
        while not self._is_shut:
            frames = [frame for _, frame in self._link.arrived()]
            self._advance()
            if frames:
                self._dialer.settle()
                return frames
            remaining_ms = (until - time.monotonic()) * 1000
            if remaining_ms <= 0:
                self._link.listen()
                break
            self._wait(remaining_ms, patience)
            patience = self._for_the_rest
        return []

    def close(self) -> None:
        """End the link; no other is made."""
        self._is_shut = True
        self._dialer.close()
        self._drop()

    def _advance(self) -> UcxPeer | None:
        """The link, after doing what can be done about one that is missing."""
        if self._meeting is not None and self._peer is not None:
            self._attend(self._meeting, self._peer)
        if self._meeting is None:
            connected = self._dialer.advance()
            if connected is not None:
                self._descriptor = connected.fileno()
                self._link.watch(self._descriptor)
                self._meeting = Meeting(connected, self._link.address)
                self._peer = self._link.attach(self._meeting.tag)
        return self._peer

    def _attend(self, meeting: Meeting, peer: UcxPeer) -> None:
        """Finish the meeting, or end a link that is lost; a socket that says nothing is read twice a second."""
        now = time.monotonic()
        if peer.endpoint is None or self._link.is_called or now >= self._next_look_s:
            self._link.is_called, self._next_look_s = False, now + _TURN_MS / 1000
            meeting.advance()
            if peer.endpoint is None and meeting.peer is not None and not meeting.is_closed:
                self._link.connect(peer, meeting.peer)
        overdue = peer.endpoint is None and self._dialer.is_overdue()
        if meeting.is_closed or overdue or self._link.is_lost(peer):
            self._drop()
            self._dialer.retry_later()

    def _drop(self) -> None:
        if self._meeting is not None:
            self._link.unwatch(self._descriptor)
            self._meeting.close()
        if self._peer is not None:
            self._link.detach(self._peer)
        self._meeting = self._peer = None

    def _wait(self, timeout_ms: float, patience: Patience) -> None:
        if self._meeting is None:
            self._dialer.wait(min(timeout_ms, _TURN_MS))
        else:
            patience.wait(self._link.look, min(timeout_ms, _TURN_MS))


class UcxServer:
    """Listens on ``ucx://``. Implements ``ServerTransport``.

    Raises :class:`LocalProtocolError` AUTH_UNSUPPORTED for an address that other machines can reach without a
    secret, :class:`TransportError` for an address or a ``UCX_TLS`` that cannot be used, OSError when the
    address is taken.
    """

    def __init__(
        self,
        endpoint: str = "ucx://127.0.0.1:0",
        security: Security = NO_SECURITY,
        limits: LinkLimits | None = None,
    ) -> None:
        check_fits(endpoint, security)
        check_listen(endpoint, security)
        address = parse_address(endpoint)
        self.counters = LinkCounters()
        self._limits = limits or LinkLimits()
        self._link = UcxLink(self._limits)
        self._listener = listen(address)
        self._endpoint = str(Address(address.scheme, address.host, self._listener.getsockname()[1]))
        self._link.watch(self._listener.fileno())
        self._guests: dict[bytes, _Guest] = {}
        self._of_tag: dict[int, _Guest] = {}
        self._serial = 0
        self._next_look_s = 0.0
        self._for_frames = Patience(self._limits.spin_us)
        self._for_the_rest = Patience(self._limits.spin_us)

    @property
    def endpoint(self) -> str:
        """The bound address."""
        return self._endpoint

    def send(self, peer: bytes, frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        """Send copies of ``frames`` to ``peer``, see ``ServerTransport``."""
        if not frames:
            return True
        guest = self._guests.get(peer)
        if guest is None:
            return False
        self._link.listen()
        if self._link.is_called:
            self._look_around(time.monotonic())
        return not self._link.is_lost(guest.peer) and self._link.send(guest.peer, frames, timeout_ms)

    def poll(self, timeout_ms: int) -> list[PeerFrame]:
        """Frames that have arrived, see ``ServerTransport``."""
        until = time.monotonic() + timeout_ms / 1000
        patience = self._for_frames
        while True:
            frames = [self._heard(self._of_tag[peer.tag], frame) for peer, frame in self._link.arrived()]
            now = time.monotonic()
            if self._link.is_called or now >= self._next_look_s:
                self._look_around(now)
            remaining_ms = (until - now) * 1000
            if frames:
                return frames
            if remaining_ms <= 0:
                self._link.listen()
                return frames
            patience.wait(self._link.look, min(remaining_ms, _TURN_MS))
            patience = self._for_the_rest

    def close(self) -> None:
        """Stop listening and end every link."""
        for guest in list(self._guests.values()):
            self._forget(guest)
        self._listener.close()

    def _heard(self, guest: _Guest, frame: memoryview) -> PeerFrame:
        guest.heard_s, guest.is_known = time.monotonic(), True
        return PeerFrame(guest.name, frame)

    def _look_around(self, now: float) -> None:
        """Look at the sockets, which say little, and at the deadlines."""
        self._link.is_called, self._next_look_s = False, now + _TURN_MS / 1000
        self._accept()
        for guest in list(self._guests.values()):
            self._attend(guest)

    def _accept(self) -> None:
        try:
            while True:
                accepted, _ = self._listener.accept()
                if len(self._guests) >= self._limits.connections_max:
                    self.counters.too_many_connections += 1
                    accepted.close()
                    continue
                accepted.setblocking(False)
                self._admit(accepted)
        except OSError:  # none is left, one went away, or the process may open no more files
            pass

    def _admit(self, accepted: socket.socket) -> None:
        descriptor = accepted.fileno()
        self._link.watch(descriptor)
        meeting = Meeting(accepted, self._link.address)
        self._serial += 1
        name = self._serial.to_bytes(8, "big")
        guest = _Guest(name, meeting, descriptor, self._link.attach(meeting.tag), time.monotonic())
        self._guests[name] = self._of_tag[meeting.tag] = guest

    def _attend(self, guest: _Guest) -> None:
        """Finish the meeting, or end a link that is lost or owes a frame."""
        guest.meeting.advance()
        if guest.peer.endpoint is None and guest.meeting.peer is not None and not guest.meeting.is_closed:
            self._link.connect(guest.peer, guest.meeting.peer)
        allowed_ms = self._limits.idle_ms if guest.is_known else self._limits.first_frame_ms
        overdue = (time.monotonic() - guest.heard_s) * 1000 > allowed_ms
        self.counters.overdue += overdue
        if overdue or guest.meeting.is_closed or self._link.is_lost(guest.peer):
            self._forget(guest)

    def _forget(self, guest: _Guest) -> None:
        del self._guests[guest.name], self._of_tag[guest.meeting.tag]
        self._link.unwatch(guest.descriptor)
        guest.meeting.close()
        self._link.detach(guest.peer)


@dataclass(slots=True, eq=False)
class _Guest:
    """One accepted link; ``is_known`` once a whole frame has come. ``heard_s`` is of the last frame."""

    name: bytes
    meeting: Meeting
    descriptor: int
    peer: UcxPeer
    heard_s: float
    is_known: bool = False
