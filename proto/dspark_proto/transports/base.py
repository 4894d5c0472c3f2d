"""The adapter interface between the sans-IO connections and a real transport.

Contract of every transport: a frame arrives whole or not at all; frames of one sender stay in order; ``send``
has copied or transmitted every byte when it returns, so the caller may reuse the buffers at once; a frame that
``poll`` returns is valid until the next ``poll`` of the same object; nothing is queued for a peer that is not
connected, and no queue is unbounded. A transport checks no protocol rule beyond the prefix and keeps no
protocol state. Each object belongs to one thread, which may block in ``poll``. A client whose ``place`` is set may
receive the last body of a large frame where that says, see ``placement``. Spec: SPEC.md, section "Transports".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from ..buffers import Buffer
from ..placement import Place, Received

LARGE_SEND_BYTES: Final = 256 * 1024
"""So many bytes are worth a ``send`` of their own, and so is what follows them in the same reply: they travel while the
rest is made. Smaller replies are sent together."""


class TransportError(Exception):
    """A transport cannot be opened as configured; the text names what to change."""


@dataclass(frozen=True, slots=True)
class PeerFrame:
    """A frame and who sent it. ``peer`` is opaque, and new for every connection of a peer."""

    peer: bytes
    frame: memoryview = field(repr=False)


class ClientTransport(Protocol):
    """Spark's end: one connection to one worker."""

    place: Place | None
    """Set it to ``VerifierConnection.place`` to have large replies received in place; a transport that cannot do that
    takes no notice. It asks during ``poll``, so all frames of the ``poll`` before must have been used by then."""

    def send(self, frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        """Send ``frames`` in order. False when the peer is absent or its queue full: nothing was sent, or, where the
        list takes several messages (ZeroMQ), the first of them. Nothing ever follows a gap; a caller gives the list up.
        """

    def poll(self, timeout_ms: int) -> Sequence[Received]:
        """Frames that have arrived, waiting up to ``timeout_ms`` for the first; valid until the next call."""

    def close(self) -> None:
        """Drop the connection and everything queued."""


class ServerTransport(Protocol):
    """A worker's end: many verifiers."""

    @property
    def endpoint(self) -> str:
        """The bound address."""

    def send(self, peer: bytes, frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        """Send ``frames`` to ``peer`` in order. False as of :meth:`ClientTransport.send`."""

    def poll(self, timeout_ms: int) -> list[PeerFrame]:
        """Frames that have arrived, waiting up to ``timeout_ms`` for the first; valid until the next call."""

    def close(self) -> None:
        """Stop listening and drop everything queued."""
