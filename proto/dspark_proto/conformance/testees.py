"""Testees: how the harness gets a fresh connection to one, for each case.

`InProcess` pumps a machine on virtual time, `Served` runs one in a thread behind a real transport, `RemoteDrafter` and
`RemoteVerifier` are somebody else's processes. Called by `runner`, `selftest` and the command line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..transports import ClientTransport
from ..transports.inproc import InprocServer
from .clock import RealClock, VirtualClock
from .doors import LOOPBACK, STREAMS, open_client, open_server, transport_of
from .facts import Facts
from .links import ClientLink, Link, ServerLink
from .peers import DrafterHost, Host, PeerMachine, ThreadedHost, VerifierHost
from .record import Role

MachineFactory = Callable[[], PeerMachine]


class Testee(Protocol):
    """A network peer under test."""

    @property
    def role(self) -> Role:
        """What it plays."""

    @property
    def transport(self) -> str:
        """Scheme, for reports."""

    @property
    def facts(self) -> Facts:
        """What the harness knows of it."""

    def connect(self) -> Link:
        """A connection for one case. Raises `Unreachable`."""

    def another(self) -> Link | None:
        """A second connection beside the last one; None when the testee has only one (a verifier)."""

    def close(self) -> None:
        """End everything that the harness started."""


class InProcess:
    """A machine in this process, on virtual time; each case gets a new one."""

    transport = "inproc"

    def __init__(self, role: Role, facts: Facts, make: MachineFactory) -> None:
        self.role = role
        self.facts = facts
        self._make = make
        self._server = InprocServer()
        self._clock = VirtualClock()
        self._host: Host | None = None

    def connect(self) -> Link:
        """See :class:`Testee`."""
        self._server, self._clock = InprocServer(), VirtualClock()
        if self.role is Role.DRAFTER:
            self._host = DrafterHost(self._server, self._make)
            return ClientLink(self._server.connect(), self._clock, self._host)
        host = VerifierHost(self._server.connect(), self._make())
        return ServerLink(self._server, self._clock, host, host.held)

    def another(self) -> Link | None:
        """See :class:`Testee`."""
        if self.role is Role.VERIFIER:
            return None
        return ClientLink(self._server.connect(), self._clock, self._host)

    def close(self) -> None:
        """Nothing outlives a case."""


class RemoteDrafter:
    """A drafter that listens at ``address``; each case is a new connection."""

    role = Role.DRAFTER

    def __init__(self, address: str, facts: Facts) -> None:
        self.transport = transport_of(address)
        self.facts = facts
        self._address = address

    def connect(self) -> Link:
        """See :class:`Testee`."""
        link = ClientLink(open_client(self._address), RealClock())
        link.stream = self.transport in STREAMS
        return link

    def another(self) -> Link | None:
        """See :class:`Testee`."""
        return self.connect()

    def close(self) -> None:
        """It is not ours."""


class RemoteVerifier:
    """A verifier that connects to the harness, which listens at ``address``. Cases share the connection: between them
    the harness behaves as a drafter that has been restarted, and the verifier says HELLO again.
    """

    role = Role.VERIFIER

    def __init__(self, address: str, facts: Facts) -> None:
        self.transport = transport_of(address)
        self.facts = facts
        self._server = open_server(address)
        self._link = ServerLink(self._server, RealClock())
        self._link.stream = self.transport in STREAMS

    @property
    def endpoint(self) -> str:
        """Where the verifier must connect to."""
        return self._server.endpoint

    def connect(self) -> Link:
        """See :class:`Testee`."""
        return self._link

    def another(self) -> Link | None:
        """A verifier has one connection."""
        return None

    def close(self) -> None:
        """Stop listening."""
        self._server.close()


class ServedDrafter(RemoteDrafter):
    """Drafter machines of this process in a thread of their own, behind a real transport on loopback."""

    def __init__(self, transport: str, facts: Facts, make: MachineFactory) -> None:
        server = open_server(LOOPBACK[transport])
        super().__init__(server.endpoint, facts)
        self._host = ThreadedHost(lambda: DrafterHost(server, make), RealClock())

    def close(self) -> None:
        """End the thread."""
        self._host.close()


class ServedVerifier(RemoteVerifier):
    """A verifier of this process in a thread of its own, behind a real transport on loopback; each case gets a new one.

    ``put`` puts it on its end of the transport.
    """

    def __init__(self, transport: str, facts: Facts, put: Callable[[ClientTransport], Host]) -> None:
        super().__init__(LOOPBACK[transport], facts)
        self._put = put
        self._host: ThreadedHost | None = None

    def connect(self) -> Link:
        """See :class:`Testee`."""
        self._end()
        self._link.peer = None
        self._host = ThreadedHost(lambda: self._put(open_client(self.endpoint)), RealClock())
        return super().connect()

    def _end(self) -> None:
        if self._host is not None:
            self._host.close()

    def close(self) -> None:
        """End the thread, then the harness's end."""
        self._end()
        super().close()
