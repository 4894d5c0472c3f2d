"""Opens the transport that an endpoint names.

Each transport's library is imported when its scheme is used and not before. Invariant: whatever cannot be
opened (a library that is missing, an address that is taken or wrong, a name that does not resolve) is one
:class:`TransportError` whose text says what to change; nothing falls back to another transport. Spec:
SPEC.md, section "Transports". Called by the worker's server and by Spark's draft link.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .base import ClientTransport, ServerTransport, TransportError
from .endpoint import PLAIN_TCP, TLS_TCP, UCX, scheme_of
from .security import NO_SECURITY, Security, check_listen


def open_client(endpoint: str, security: Security = NO_SECURITY) -> ClientTransport:
    """Spark's end of a link to ``endpoint``; the worker may come later. Raises :class:`TransportError`."""
    with _explained(endpoint):
        scheme = scheme_of(endpoint)
        if scheme in (PLAIN_TCP, TLS_TCP):
            from .tcp import TcpClient

            return TcpClient(endpoint, security)
        if scheme == UCX:
            from .ucx import UcxClient

            return UcxClient(endpoint, security)
        from . import zmq as zeromq

        with zeromq.explained(endpoint):
            return zeromq.ZmqClient(endpoint, security)


def open_server(endpoint: str, security: Security = NO_SECURITY) -> ServerTransport:
    """A worker's end, listening on ``endpoint``.

    Raises :class:`TransportError`, or :class:`LocalProtocolError` AUTH_UNSUPPORTED for an address that other
    machines can reach without a secret.
    """
    with _explained(endpoint):
        scheme = scheme_of(endpoint)
        check_listen(endpoint, security)
        if scheme in (PLAIN_TCP, TLS_TCP):
            from .tcp import TcpServer

            return TcpServer(endpoint, security)
        if scheme == UCX:
            from .ucx import UcxServer

            return UcxServer(endpoint, security)
        from . import zmq as zeromq

        with zeromq.explained(endpoint):
            return zeromq.ZmqServer(endpoint, security)


@contextmanager
def _explained(endpoint: str) -> Iterator[None]:
    """A missing library, and what the system says, as :class:`TransportError`."""
    try:
        yield
    except ImportError as error:
        raise TransportError(f"{endpoint}: {error.name} is not installed: {error}") from None
    except OSError as error:
        raise TransportError(f"{endpoint}: {error.strerror or error}") from None
