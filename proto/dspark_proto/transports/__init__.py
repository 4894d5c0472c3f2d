"""Transports that carry v2 frames. Import the one you use: the core needs none of them."""

from __future__ import annotations

from .base import ClientTransport, PeerFrame, ServerTransport

__all__ = ("ClientTransport", "PeerFrame", "ServerTransport")
