"""The harness's end of a connection to the testee, the same for every transport and both roles.

`receive` waits on the harness's clock. With a pumped link the testee lives in this process and turns whenever the
harness waits, on virtual time; else it is a peer on the other side of a real transport. Called by the handles
(`as_verifier`, `as_drafter`); knows no message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from ..buffers import Buffer, byte_view
from ..errors import RemoteProtocolError
from ..prefix import read_prefix
from ..transports import ClientTransport, ServerTransport
from .clock import NS_PER_MS, Clock
from .peers import Host
from .verdicts import Unreachable, Unsupported

SEND_MS = 5000
_TICK_MS = 5
_TICK_MAX_MS = 160
_POLL_MS = 20


class Link(Protocol):
    """One connection to the testee."""

    @property
    def clock(self) -> Clock:
        """The time of both ends, or the machine's."""

    def send(self, *frames: Buffer) -> None:
        """Send whole frames in order. Raises :class:`Unreachable`."""

    def receive(self, timeout_ms: int) -> bytes | None:
        """The next frame, or None when none came in time."""

    def held(self) -> dict[str, int]:
        """What an in-process testee holds beyond what it should; empty when it cannot be asked."""

    def close(self) -> None:
        """End the connection."""


def fits_a_stream(frame: Buffer) -> bool:
    """Whether a stream transport can carry ``frame``: there its own prefix is all that tells where it ends."""
    try:
        return read_prefix(byte_view(frame)).frame_bytes == len(frame)
    except RemoteProtocolError:
        return False


class _Waiting:
    """Frames that have arrived and have not been asked for. ``stream``: frames with a wrong prefix cannot be sent."""

    stream = False

    def check(self, frames: Sequence[Buffer]) -> None:
        """Raise :class:`Unsupported` for a frame that a stream cannot carry."""
        if self.stream and not all(fits_a_stream(frame) for frame in frames):
            raise Unsupported("a transport that carries frames with a wrong prefix")

    def __init__(self, clock: Clock, host: Host | None) -> None:
        self.clock = clock
        self._host = host
        self._arrived: deque[bytes] = deque()

    def _turn(self) -> bool:
        """Let an in-process testee work; whether it did anything."""
        return self._host is not None and self._host.turn(self.clock.now_ns(), 0)

    def _wait(self, timeout_ms: int, poll: Callable[[int], list[bytes]]) -> bytes | None:
        end_ns = self.clock.now_ns() + timeout_ms * NS_PER_MS
        tick_ms = _TICK_MS
        while not self._arrived:
            busy = self._turn()
            self._arrived.extend(poll(0 if self._host else _POLL_MS))
            if self._arrived:
                break
            if self.clock.now_ns() >= end_ns:
                return None
            if self._host is not None and not busy:
                self.clock.pass_ms(min(tick_ms, max(1, (end_ns - self.clock.now_ns()) // NS_PER_MS)))
                tick_ms = min(2 * tick_ms, _TICK_MAX_MS)
        return self._arrived.popleft()


class ClientLink(_Waiting):
    """To a drafter: the harness connects."""

    def __init__(self, client: ClientTransport, clock: Clock, host: Host | None = None) -> None:
        super().__init__(clock, host)
        self._client = client

    def send(self, *frames: Buffer) -> None:
        """See :class:`Link`."""
        self.check(frames)
        if not self._client.send(list(frames), SEND_MS):
            raise Unreachable("the testee takes no frames")

    def receive(self, timeout_ms: int) -> bytes | None:
        """See :class:`Link`."""
        return self._wait(timeout_ms, lambda wait: [bytes(frame) for frame in self._client.poll(wait)])

    def held(self) -> dict[str, int]:
        """A drafter is asked by STATS."""
        return {}

    def close(self) -> None:
        """Leave the testee."""
        self._client.close()


class ServerLink(_Waiting):
    """To a verifier: it connects to the harness. The newest of the ``peers`` that spoke is the testee."""

    def __init__(
        self,
        server: ServerTransport,
        clock: Clock,
        host: Host | None = None,
        held: Callable[[], dict[str, int]] = dict,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(clock, host)
        self._server = server
        self._held = held
        self._close = close
        self.peer: bytes | None = None
        self.peers: set[bytes] = set()

    def send(self, *frames: Buffer) -> None:
        """See :class:`Link`."""
        self.check(frames)
        if self.peer is None or not self._server.send(self.peer, list(frames), SEND_MS):
            raise Unreachable("the testee takes no frames")

    def receive(self, timeout_ms: int) -> bytes | None:
        """See :class:`Link`."""
        return self._wait(timeout_ms, self._poll)

    def _poll(self, wait_ms: int) -> list[bytes]:
        arrived = self._server.poll(wait_ms)
        if arrived:
            self.peer = arrived[-1].peer
            self.peers.update(one.peer for one in arrived)
        return [bytes(one.frame) for one in arrived if one.peer == self.peer]

    def held(self) -> dict[str, int]:
        """See :class:`Link`."""
        return self._held()

    def close(self) -> None:
        """End what belongs to this case only."""
        self._close()


def joined(frames: Sequence[bytes]) -> bytes:
    """Frames one after the other, for a hex dump."""
    return b"".join(frames)
