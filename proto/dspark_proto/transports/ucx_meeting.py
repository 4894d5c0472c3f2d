"""How the two ends of a UCX link meet: over a TCP connection, which then stays as the link's life line.

UCXX's own listener binds every interface, so ours is a plain socket where the configuration says. Each end
sends one fixed-size message: magic, the 64-bit tag that it wants to be sent with, and its UCX address. After
it nothing more is said; the end of the TCP connection ends the link, at once when a process dies. Invariants:
sizes are checked before use; an address is handed to UCX only as bytes; a tag is random, so that a late frame
of an old link matches nothing. Spec: SPEC.md, section "UCX mapping". Called by ``ucx``; does not know UCX.
"""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass
from struct import Struct
from typing import Final

MEETING_BYTES: Final = 4096
MAGIC: Final = b"DSPKUCX2"
_HEAD: Final = Struct("<8sQI")
ADDRESS_BYTES_MAX: Final = MEETING_BYTES - _HEAD.size


@dataclass(frozen=True, slots=True)
class Introduction:
    """What an end says about itself: send to ``address`` with ``tag``."""

    tag: int
    address: bytes

    def encoded(self) -> bytes:
        """The fixed-size message. Raises ValueError for an address that does not fit."""
        if len(self.address) > ADDRESS_BYTES_MAX:
            raise ValueError(f"a UCX address of {len(self.address)} bytes: name fewer transports in UCX_TLS")
        return (_HEAD.pack(MAGIC, self.tag, len(self.address)) + self.address).ljust(MEETING_BYTES, b"\0")

    @staticmethod
    def decoded(message: bytes | bytearray) -> Introduction | None:
        """None for what is no introduction."""
        magic, tag, length = _HEAD.unpack_from(message)
        if magic != MAGIC or not 0 < length <= ADDRESS_BYTES_MAX or any(message[_HEAD.size + length :]):
            return None
        return Introduction(tag, bytes(message[_HEAD.size : _HEAD.size + length]))


class Meeting:
    """One TCP connection on which two ends introduce themselves. ``connected`` must not block."""

    def __init__(self, connected: socket.socket, address: bytes) -> None:
        self.socket = connected
        self.is_closed = False
        self.tag: Final = secrets.randbits(64)
        """What the other end's frames carry."""
        self.peer: Introduction | None = None
        self._heard = bytearray()
        message = Introduction(self.tag, address).encoded()
        try:
            # A fresh connection takes this much at once.
            if connected.send(message) != len(message):
                self.close()
        except OSError:
            self.close()

    def advance(self) -> None:
        """Read the other end's introduction, or notice that the connection has ended."""
        try:
            while not self.is_closed:
                piece = self.socket.recv(MEETING_BYTES + 1 - len(self._heard))
                self._heard += piece
                if not piece or len(self._heard) > MEETING_BYTES:
                    self.close()
                elif len(self._heard) == MEETING_BYTES:
                    self.peer = Introduction.decoded(self._heard)
                    if self.peer is None:
                        self.close()
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def close(self) -> None:
        """End the link."""
        self.is_closed = True
        self.socket.close()
