"""The two protocol error classes, in the manner of h11.

``LocalProtocolError``: this process asked for something that the protocol forbids; it is raised to the
caller. ``RemoteProtocolError``: the peer's bytes are wrong; the codec raises it and the connections turn it
into a counter and an event, so it never leaves ``receive()``. Both carry a registry code, where, and scope.
"""

from __future__ import annotations

from typing import NoReturn

from .registry import SCOPES, ErrorCode, Scope


class ProtocolError(Exception):
    """A rule of SPEC.md was broken.

    ``code`` is the registry code, ``where`` a message or field path such as ``"STEP.depth"``, ``scope`` what
    the error ends (see :class:`Scope`), ``remedy`` a sentence for a person; only ``code``, ``where`` and
    ``scope`` may travel to the peer.
    """

    def __init__(self, code: ErrorCode, where: str, remedy: str = "", scope: Scope | None = None) -> None:
        self.code = code
        self.where = where
        self.remedy = remedy
        self.scope = SCOPES[code] if scope is None else scope
        super().__init__(f"{code.name} at {where}" + (f": {remedy}" if remedy else ""))


class LocalProtocolError(ProtocolError):
    """The local caller misused the connection; nothing was sent and no state changed."""

    def as_remote(self) -> NoReturn:
        """Re-raise as the peer's fault: the same check failed on received data."""
        raise RemoteProtocolError(self.code, self.where, self.remedy, self.scope) from self


class RemoteProtocolError(ProtocolError):
    """Received bytes break the protocol."""
