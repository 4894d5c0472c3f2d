"""What protects a link: the secrets' files, how they are read, and who may listen where.

Invariants: secrets come from files that nobody but their owner can read, never from arguments or the
environment; an empty or short secret is an error; an address that other machines can reach is bound only
with a protection that this transport really has. Spec: SPEC.md, section "Security considerations". Called by
the transports, before a socket exists, and by the command line.
"""

from __future__ import annotations

import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..auth import Authentication
from ..errors import LocalProtocolError
from ..limits import AUTH_NONCE_BYTES, AUTH_SECRET_BYTES_MIN
from ..registry import ErrorCode
from .base import TransportError
from .endpoint import PLAIN_TCP, TLS_TCP, UCX, ZEROMQ_TCP, is_local, scheme_of

SECRET_BYTES_MAX: Final = 4096
_FILE_BYTES_MAX: Final = 2**16

_REMEDIES: Final = {
    ZEROMQ_TCP: "give CURVE keys or a secret file",
    PLAIN_TCP: "give a secret file, or use tls+tcp:// with certificates",
    TLS_TCP: "give the TLS certificates",
    UCX: "give a secret file",
}


@dataclass(frozen=True, slots=True)
class CurveFiles:
    """CURVE keys of one ZeroMQ end.

    ``secret_key`` holds this end's secret key. ``peers`` holds public keys, one a line: for a worker those of
    the verifiers that may connect, for a verifier the worker's.
    """

    secret_key: Path
    peers: Path


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one TLS end: the private CA that signs every end, and this end's certificate and key."""

    ca: Path
    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Security:
    """What protects the link. ``psk_file`` holds the secret that authenticates HELLO, on any transport; the
    connection on the link must then have :meth:`authentication`, for the transport itself does not see HELLO.
    """

    psk_file: Path | None = None
    curve: CurveFiles | None = None
    tls: TlsFiles | None = None

    def psk(self) -> bytes | None:
        """The shared secret, None without one. Raises :class:`TransportError`, see :func:`read_secret`."""
        return None if self.psk_file is None else read_secret(self.psk_file)

    def authentication(self, endpoint: str) -> Authentication | None:
        """For :class:`HelloParameters`: proofs with the secret, bound to the scheme of ``endpoint``; None without
        one. Raises :class:`TransportError`, see :func:`read_secret`.
        """
        secret = self.psk()
        if secret is None:
            return None
        return Authentication(secret, lambda: secrets.token_bytes(AUTH_NONCE_BYTES), scheme_of(endpoint).encode())


NO_SECURITY: Final = Security()


def check_listen(endpoint: str, security: Security) -> None:
    """Refuse to listen where other machines can connect without proving who they are.

    Raises :class:`LocalProtocolError` AUTH_UNSUPPORTED naming the remedy.
    """
    if is_local(endpoint):
        return
    scheme = scheme_of(endpoint)
    protected = {ZEROMQ_TCP: security.curve, TLS_TCP: security.tls}.get(scheme) or security.psk_file
    if protected is None:
        raise LocalProtocolError(
            ErrorCode.AUTH_UNSUPPORTED,
            "endpoint",
            f"{endpoint} can be reached from other machines: {_REMEDIES[scheme]}",
        )


def check_fits(endpoint: str, security: Security) -> None:
    """Refuse keys that the endpoint's transport would ignore, and TLS without certificates.

    Raises :class:`TransportError`.
    """
    scheme = endpoint.partition("://")[0]
    if security.curve is not None and scheme != ZEROMQ_TCP:
        raise TransportError(f"{endpoint}: CURVE keys are for {ZEROMQ_TCP}://, which is ZeroMQ")
    if security.tls is not None and scheme != TLS_TCP:
        raise TransportError(f"{endpoint}: TLS certificates are for {TLS_TCP}://")
    if security.tls is None and scheme == TLS_TCP:
        raise TransportError(f"{endpoint}: give the TLS certificates (CA, certificate and key)")


def read_private(path: Path) -> bytes:
    """The contents of a file that only its owner may read.

    Raises :class:`TransportError` when it is missing, no regular file, open to others, or too large.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise TransportError(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise TransportError(f"{path}: not a regular file")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise TransportError(f"{path}: others may read it (mode {stat.S_IMODE(mode):o}): chmod 600 {path}")
    if len(content) > _FILE_BYTES_MAX:
        raise TransportError(f"{path}: larger than {_FILE_BYTES_MAX} bytes")
    return content


def read_secret(path: Path) -> bytes:
    """A shared secret of 16 to 4,096 bytes; white space around it does not count.

    Raises :class:`TransportError` for a file that :func:`read_private` refuses, or a secret of another size.
    """
    secret = read_private(path).strip()
    if not AUTH_SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise TransportError(
            f"{path}: the secret has {len(secret)} bytes, not {AUTH_SECRET_BYTES_MIN} to {SECRET_BYTES_MAX}"
        )
    return secret
