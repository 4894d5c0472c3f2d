"""Addresses: which scheme names which transport, and which addresses other machines can reach.

``tcp://host:port`` and ``ipc://path`` are ZeroMQ's own addresses, as everywhere else where ZeroMQ is used;
``plain+tcp://``, ``tls+tcp://`` and ``ucx://`` name the others. One scheme is one transport: nothing is
negotiated and nothing falls back. Spec: SPEC.md, section "Transports". Called by every transport and by
``opening``; resolves no name and opens nothing.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from .base import TransportError

ZEROMQ_TCP: Final = "tcp"
ZEROMQ_IPC: Final = "ipc"
PLAIN_TCP: Final = "plain+tcp"
TLS_TCP: Final = "tls+tcp"
UCX: Final = "ucx"
SCHEMES: Final = (ZEROMQ_TCP, ZEROMQ_IPC, PLAIN_TCP, TLS_TCP, UCX)

_PORT_MAX: Final = 2**16 - 1


@dataclass(frozen=True, slots=True)
class Address:
    """``host`` without brackets; ``port`` 0 means "a free one" when listening. Text: ``scheme://host:port``."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def scheme_of(endpoint: str) -> str:
    """The scheme of ``endpoint``. Raises :class:`TransportError` for one that no transport has."""
    scheme, separator, _ = endpoint.partition("://")
    if not separator or scheme not in SCHEMES:
        raise TransportError(f"{endpoint}: give one of " + ", ".join(f"{one}://" for one in SCHEMES))
    return scheme


def parse_address(endpoint: str) -> Address:
    """Split a ``scheme://host:port``. Raises :class:`TransportError` naming what is missing."""
    scheme = scheme_of(endpoint)
    try:
        parts = urlsplit(endpoint)
        port = parts.port
    except ValueError:
        port = None
    if port is None or not 0 <= port <= _PORT_MAX or not parts.hostname or parts.path:
        raise TransportError(f"{endpoint}: give {scheme}://host:port")
    return Address(scheme, parts.hostname, port)


def is_local(endpoint: str) -> bool:
    """Whether ``endpoint`` can be reached from this machine only."""
    address = urlsplit(endpoint)
    if address.scheme in ("ipc", "inproc"):
        return True
    host = address.hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
