"""What a testee is made of when it lives in this process: a sans-IO machine, and a host that puts it on a transport.

A machine serves one connection. Hosts own a transport end, keep one machine per peer, and run in the caller's thread
(`turn`) or in one of their own (`ThreadedHost`). The reference machines are in `reference_drafter` and
`reference_verifier`; mutants wrap them. Called by `testees`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from ..buffers import Buffer
from ..transports import ClientTransport, ServerTransport
from .clock import Clock


class PeerMachine(Protocol):
    """One protocol peer without sockets or clock. Frames are whole; every method returns frames to send."""

    def start(self, now_ns: int) -> list[bytes]:
        """What the peer says first; a drafter says nothing."""

    def receive(self, frame: bytes, now_ns: int) -> list[bytes]:
        """One received frame."""

    def expire(self, now_ns: int) -> list[bytes]:
        """Deadlines up to now."""

    def held(self) -> dict[str, int]:
        """What the peer holds that should be zero or constant when idle; empty when it does not tell."""


class Host(Protocol):
    """Machines on a transport end."""

    def turn(self, now_ns: int, wait_ms: int) -> bool:
        """Take what has arrived, let timers run, send; whether anything was received or sent."""

    def close(self) -> None:
        """Close the transport end."""


class Guarded:
    """A machine that may crash, as a process may: from then on it says nothing. ``crash`` tells why."""

    def __init__(self, machine: PeerMachine) -> None:
        self._machine = machine
        self.crash = ""

    def _tried(self, action: Callable[[], list[bytes]]) -> list[bytes]:
        if self.crash:
            return []
        try:
            return action()
        except Exception as error:  # whatever it was, this peer is gone and the run goes on
            self.crash = f"{type(error).__name__}: {error}"
            return []

    def start(self, now_ns: int) -> list[bytes]:
        """See :class:`PeerMachine`."""
        return self._tried(lambda: self._machine.start(now_ns))

    def receive(self, frame: bytes, now_ns: int) -> list[bytes]:
        """See :class:`PeerMachine`."""
        return self._tried(lambda: self._machine.receive(frame, now_ns))

    def expire(self, now_ns: int) -> list[bytes]:
        """See :class:`PeerMachine`."""
        return self._tried(lambda: self._machine.expire(now_ns))

    def held(self) -> dict[str, int]:
        """See :class:`PeerMachine`; a crash is something that is left behind."""
        return {"crash": 1} if self.crash else self._machine.held()


class DrafterHost:
    """Serves drafter machines, one per connecting peer."""

    def __init__(self, server: ServerTransport, make: Callable[[], PeerMachine]) -> None:
        self._server = server
        self._make = make
        self._machines: dict[bytes, PeerMachine] = {}

    def turn(self, now_ns: int, wait_ms: int) -> bool:
        """See :class:`Host`."""
        busy = False
        for arrived in self._server.poll(wait_ms):
            busy = True
            machine = self._machines.get(arrived.peer)
            if machine is None:
                machine = self._machines[arrived.peer] = Guarded(self._make())
            self._send(arrived.peer, machine.receive(bytes(arrived.frame), now_ns))
        for peer, machine in self._machines.items():
            busy |= self._send(peer, machine.expire(now_ns))
        return busy

    def _send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        return bool(frames) and self._server.send(peer, frames)

    def close(self) -> None:
        """Stop listening."""
        self._server.close()


class VerifierHost:
    """One verifier machine that connects to a drafter."""

    def __init__(self, client: ClientTransport, machine: PeerMachine) -> None:
        self._client = client
        self._machine = Guarded(machine)
        self._unsent: list[bytes] | None = None

    def turn(self, now_ns: int, wait_ms: int) -> bool:
        """See :class:`Host`. What the transport does not take is offered again: the peer may still be connecting."""
        if self._unsent is None:
            self._unsent = self._machine.start(now_ns)
        outgoing, self._unsent = self._unsent, []
        for frame in self._client.poll(0 if outgoing else wait_ms):
            outgoing += self._machine.receive(bytes(frame), now_ns)
        outgoing += self._machine.expire(now_ns)
        if outgoing and not self._client.send(outgoing, wait_ms):
            self._unsent = outgoing
            return False
        return bool(outgoing)

    def held(self) -> dict[str, int]:
        """What the machine holds."""
        return self._machine.held()

    def close(self) -> None:
        """Leave the drafter."""
        self._client.close()


class ThreadedHost:
    """A host that turns in its own thread until it is closed."""

    def __init__(self, make: Callable[[], Host], clock: Clock) -> None:
        self._make = make
        self._clock = clock
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        host = self._make()
        try:
            while not self._stopped.is_set():
                host.turn(self._clock.now_ns(), 5)
        finally:
            host.close()

    def close(self) -> None:
        """Stop the thread; the transport end is closed by it."""
        self._stopped.set()
        self._thread.join()
