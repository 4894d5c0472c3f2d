"""Transports that carry v2 frames. ``open_client`` and ``open_server`` choose by the endpoint's scheme, and
import only the library that it needs; the core needs none of them.
"""

from __future__ import annotations

from .base import ClientTransport, PeerFrame, ServerTransport, TransportError
from .opening import open_client, open_server
from .security import CurveFiles, Security, TlsFiles

__all__ = (
    "ClientTransport",
    "CurveFiles",
    "PeerFrame",
    "Security",
    "ServerTransport",
    "TlsFiles",
    "TransportError",
    "open_client",
    "open_server",
)
