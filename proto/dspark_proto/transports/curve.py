"""CURVE on ZeroMQ: key files, socket options, and the list of clients that a worker admits.

Both ends prove that they hold their secret keys, and everything is encrypted. Invariants: a worker admits the
public keys of its list and nobody else; the secret key's file is closed to others. A key is 40 characters of
Z85, as ZeroMQ prints them. Spec: SPEC.md, section "ZeroMQ mapping" (RFC 26 CurveZMQ, RFC 27 ZAP). Called by
``zmq``, whose thread also answers the authentication requests.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

from .base import TransportError
from .security import CurveFiles, read_private

_KEY_CHARACTERS: Final = 40
_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"
_ZAP_PARTS: Final = 7
"""version, request id, domain, address, identity, mechanism, client key"""


def serve_curve(socket: zmq.Socket[bytes], files: CurveFiles) -> None:
    """Make a bound-to-be socket a CURVE server. Raises :class:`TransportError` for keys it cannot use."""
    secret = _secret_key(files.secret_key)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, "dspark")


def connect_curve(socket: zmq.Socket[bytes], files: CurveFiles) -> None:
    """Make a connecting-to-be socket a CURVE client of the one worker whose key ``files.peers`` holds.

    Raises :class:`TransportError` for keys it cannot use.
    """
    keys = _public_keys(files.peers)
    if len(keys) != 1:
        raise TransportError(f"{files.peers}: holds {len(keys)} keys: give the worker's public key alone")
    secret = _secret_key(files.secret_key)
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys[0])
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))


class CurveGate:
    """Answers ZeroMQ's authentication requests (ZAP) from a list of public keys, read once.

    ``socket`` becomes readable when there is something to answer. Raises :class:`TransportError` for a list
    that cannot be used.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], files: CurveFiles) -> None:
        self._allowed = frozenset(z85.decode(key) for key in _public_keys(files.peers))
        self.refused = 0
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(_ZAP_ENDPOINT)

    def answer(self) -> None:
        """Answer every request that has arrived."""
        while True:
            try:
                route, empty, *request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart([route, empty, *self._verdict(request)], zmq.NOBLOCK)

    def _verdict(self, request: list[bytes]) -> list[bytes]:
        allowed = (
            len(request) == _ZAP_PARTS
            and request[0] == _ZAP_VERSION
            and request[5] == b"CURVE"
            and request[6] in self._allowed
        )
        self.refused += not allowed
        status, text = (b"200", b"OK") if allowed else (b"400", b"key not allowed")
        return [_ZAP_VERSION, request[1] if len(request) > 1 else b"", status, text, b"", b""]

    def close(self) -> None:
        """Stop answering."""
        self.socket.close(0)


def write_curve_keys(path: Path) -> Path:
    """Make a new key pair: the secret key in ``path``, the public one in the returned ``path.pub``.

    Raises :class:`TransportError` when a file is there already or cannot be written.
    """
    public, secret = zmq.curve_keypair()
    public_path = path.with_name(path.name + ".pub")
    for file, key, mode in ((path, secret, 0o600), (public_path, public, 0o644)):
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except OSError as error:
            raise TransportError(f"{file}: {error.strerror}") from None
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(key + b"\n")
    return public_path


def _secret_key(path: Path) -> bytes:
    return _checked_key(path, read_private(path).strip())


def _public_keys(path: Path) -> list[bytes]:
    """The keys of a list; empty lines and what follows a '# ' do not count ('#' alone may be part of a key)."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TransportError(f"{path}: {error.strerror}") from None
    words = [line.split() for line in lines]
    keys = [_checked_key(path, found[0]) for found in words if found and found[0] != b"#"]
    if not keys:
        raise TransportError(f"{path}: holds no key: write one public key a line into it")
    return keys


def _checked_key(path: Path, key: bytes) -> bytes:
    try:
        if len(key) == _KEY_CHARACTERS:
            z85.decode(key)
            return key
    except (KeyError, ValueError, OverflowError):
        pass
    raise TransportError(f"{path}: no CURVE key: it has {_KEY_CHARACTERS} characters of Z85")
