"""Opening transports by name. Unavailable ones are named with the reason, never silently replaced.

Called by `testees` and by the command line.
"""

from __future__ import annotations

from typing import Final

from ..transports import ClientTransport, ServerTransport, opening
from .verdicts import Unreachable

LOOPBACK: Final = {
    "zmq": "tcp://127.0.0.1:0",
    "tcp": "plain+tcp://127.0.0.1:0",
    "ucx": "ucx://127.0.0.1:0",
}
"""Name of a transport -> the address at which a testee of this process listens."""

STREAMS: Final = frozenset({"tcp"})
"""Transports without message borders of their own."""

SCHEMES: Final = ("inproc", *LOOPBACK)
"""``inproc`` is pumped (see `testees.InProcess`); the others are opened here."""


def transport_of(address: str) -> str:
    """The transport that an address belongs to. Raises :class:`Unreachable` for an unknown scheme."""
    scheme = address.partition("://")[0]
    for name, loopback in LOOPBACK.items():
        if loopback.startswith(f"{scheme}://"):
            return name
    raise Unreachable(f"{address}: no transport has the scheme {scheme!r}")


def unavailable(transport: str) -> str:
    """Why a transport cannot be used here; empty when it can."""
    if transport == "inproc":
        return ""
    if transport not in LOOPBACK:
        return "unknown"
    try:
        open_server(LOOPBACK[transport]).close()
    except Exception as error:  # whatever keeps a transport from opening is a reason to report
        return f"{type(error).__name__}: {error}"
    return ""


def open_client(address: str) -> ClientTransport:
    """Connect to a drafter."""
    return opening.open_client(address)


def open_server(address: str) -> ServerTransport:
    """Listen at ``address``; other interfaces than loopback are refused."""
    return opening.open_server(address)
