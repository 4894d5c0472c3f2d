"""Connects to a worker's TCP address again and again, without blocking, with pauses that grow.

Invariants: a name is resolved once, at construction; attempts get rarer, up to one a second, until the caller
says that a connection has proved itself; no call but ``wait`` sleeps. Called by the clients of ``tcp`` and
``ucx``; sends nothing.
"""

from __future__ import annotations

import select
import socket
import time
from typing import Final

from .endpoint import Address

_PAUSE_S: Final = 0.05
_PAUSE_MAX_S: Final = 1.0
_ATTEMPT_S: Final = 5.0


class Dialer:
    """Makes connected, non-blocking sockets to ``address``. Raises OSError for a name that does not resolve."""

    def __init__(self, address: Address) -> None:
        self.pause_s = _PAUSE_S
        self._targets = resolve(address)
        self._connecting: socket.socket | None = None
        self._next_attempt_s = 0.0
        self._attempt_ends_s = 0.0
        self._attempts = 0

    def advance(self) -> socket.socket | None:
        """Go on with the attempt, or begin one that is due; the socket once it is connected, the caller's then."""
        now = time.monotonic()
        if self._connecting is None and now >= self._next_attempt_s:
            self._begin(now)
        return None if self._connecting is None else self._finish(self._connecting, now)

    def is_overdue(self) -> bool:
        """Whether what the last connection began with has taken too long."""
        return time.monotonic() >= self._attempt_ends_s

    def retry_later(self) -> None:
        """The attempt, or the connection that it made, has failed."""
        self.close()
        self._next_attempt_s = time.monotonic() + self.pause_s
        self.pause_s = min(_PAUSE_MAX_S, 2 * self.pause_s)

    def settle(self) -> None:
        """The connection has proved itself: the next failure is a first one."""
        self.pause_s = _PAUSE_S

    def wait(self, timeout_ms: float) -> None:
        """Sleep until ``advance`` has something to do."""
        if self._connecting is not None:
            wait_for(self._connecting, select.POLLOUT, timeout_ms)
            return
        time.sleep(min(timeout_ms / 1000, max(0.0, self._next_attempt_s - time.monotonic())))

    def close(self) -> None:
        """Give the attempt up."""
        if self._connecting is not None:
            self._connecting.close()
            self._connecting = None

    def _begin(self, now: float) -> None:
        family, target = self._targets[self._attempts % len(self._targets)]
        self._attempts += 1
        self._attempt_ends_s = now + _ATTEMPT_S
        self._connecting = socket.socket(family, socket.SOCK_STREAM)
        self._connecting.setblocking(False)
        try:
            self._connecting.connect(target)
        except BlockingIOError:
            pass
        except OSError:
            self.retry_later()

    def _finish(self, connecting: socket.socket, now: float) -> socket.socket | None:
        if not wait_for(connecting, select.POLLOUT, 0):
            if now >= self._attempt_ends_s:
                self.retry_later()
            return None
        failed = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed or connecting.getsockname() == connecting.getpeername():
            self.retry_later()  # nobody listens; on loopback, a socket can even meet itself
            return None
        self._connecting = None
        return connecting


def resolve(address: Address) -> list[tuple[int, tuple[object, ...]]]:
    """(family, socket address) of every address of the host. Raises OSError."""
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return [(family, target) for family, _, _, _, target in found]


def listen(address: Address) -> socket.socket:
    """A non-blocking listener. Raises OSError when the address cannot be bound."""
    family, target = resolve(address)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen()
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def wait_for(one: socket.socket, events: int, timeout_ms: float) -> bool:
    """Whether the socket is ready, or broken, within ``timeout_ms``."""
    waiting = select.poll()
    waiting.register(one, events)
    return bool(waiting.poll(timeout_ms))
