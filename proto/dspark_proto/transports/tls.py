"""TLS contexts of the ``tls+tcp`` transport: version 1.3, and both ends prove who they are.

Invariants: an end is trusted when the private CA has signed its certificate, and nothing else is trusted; a
verifier also checks that the certificate names the host that it connects to; the private key's file is closed
to others. Spec: SPEC.md, section "TLS mapping". Called by ``tcp``; opens no connection.
"""

from __future__ import annotations

import ssl

from .base import TransportError
from .security import TlsFiles, read_private


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """The worker's context. Raises :class:`TransportError` naming the file that cannot be used."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, files)
    context.num_tickets = 0  # no resumption: every connection proves itself
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """The verifier's context. Raises :class:`TransportError` naming the file that cannot be used."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, files)
    context.check_hostname = True
    return context


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    read_private(files.key)  # its mode; the ssl module wants the path
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(files.ca)
    except OSError as error:
        raise TransportError(f"{files.ca}: no CA certificate in PEM form: {error}") from None
    try:
        context.load_cert_chain(files.certificate, files.key)
    except OSError as error:
        raise TransportError(
            f"{files.certificate}, {files.key}: no certificate with its key in PEM form: {error}"
        ) from None
    return context
