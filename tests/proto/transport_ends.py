"""Both ends of every transport, on loopback, with keys of their own: for the tests of the transports."""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from wire_pairs import parameters

from dspark_proto import Buffer, encode_frame
from dspark_proto.bodies import describe
from dspark_proto.messages import Context, Ping
from dspark_proto.registry import BodyKind, Checksum, Dtype
from dspark_proto.transports import (
    ClientTransport,
    PeerFrame,
    Security,
    ServerTransport,
    open_client,
    open_server,
)
from dspark_proto.transports.inproc import InprocServer
from tests.link_keys import Keys

WAIT_S = 10.0
EPOCH = parameters(1).epoch

@dataclass(frozen=True)
class Kind:
    """A transport with its protection: how to open a server at a port, and a client of it."""

    name: str
    scheme: str
    server_security: Callable[[Keys], Security] = lambda keys: Security()
    client_security: Callable[[Keys], Security] = lambda keys: Security()

    def server(self, keys: Keys, port: int = 0) -> ServerTransport:
        if self.scheme == "inproc":
            return InprocServer()
        if self.scheme == "ucx" and importlib.util.find_spec("ucxx") is None:
            pytest.skip("ucxx is not installed: pip install 'dspark[ucx]'")
        os.environ.setdefault("UCX_TLS", "tcp,self")
        return open_server(f"{self.scheme}://127.0.0.1:{port}", self.server_security(keys))

    def client(self, keys: Keys, server: ServerTransport) -> ClientTransport:
        if isinstance(server, InprocServer):
            return server.connect()
        return open_client(server.endpoint, self.client_security(keys))


KINDS = (
    Kind("inproc", "inproc"),
    Kind("tcp", "plain+tcp"),
    Kind("tls", "tls+tcp", lambda keys: keys.tls_of("worker"), lambda keys: keys.tls_of("spark")),
    Kind("zmq", "tcp"),
    Kind(
        "zmq+curve", "tcp",
        lambda keys: keys.curve_of("worker", "allowed"), lambda keys: keys.curve_of("spark", "worker.pub"),
    ),
    Kind("ucx", "ucx"),
)  # fmt: skip
SOCKETS = tuple(kind for kind in KINDS if kind.scheme != "inproc")


def ping(number: int) -> bytes:
    """A small whole frame that shows its number."""
    return bytes(encode_frame(Ping(EPOCH, number)))


def context_frame(body_bytes: int, fill: int = 7) -> memoryview:
    """A whole frame with a body of ``body_bytes`` (a multiple of 64)."""
    body = bytes([fill]) * body_bytes
    taps = describe(BodyKind.TAPS, Dtype.BF16, 32, body_bytes // 64, body, Checksum.XXH3_64)
    return encode_frame(Context(1, 0, 32, (taps,)), bodies=[body])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def send_up(server: ServerTransport, client: ClientTransport, *frames: Buffer) -> list[tuple[bytes, bytes]]:
    """Send ``frames``, turning both ends until all have arrived: (peer, copy of the frame) of each."""
    arrived: list[tuple[bytes, bytes]] = []
    sent, until = False, time.monotonic() + WAIT_S
    while len(arrived) < len(frames):
        assert time.monotonic() < until, f"{len(arrived)} of {len(frames)} frames arrived"
        if not sent:
            sent = client.send(frames, 10)
        arrived += copies(server.poll(10))
        client.poll(0)
    return arrived


def receive_down(server: ServerTransport, client: ClientTransport, count: int) -> list[bytes]:
    """``count`` frames that the server has sent, turning both ends."""
    arrived: list[bytes] = []
    until = time.monotonic() + WAIT_S
    while len(arrived) < count:
        assert time.monotonic() < until, f"{len(arrived)} of {count} frames arrived"
        arrived += [bytes(frame) for frame in client.poll(10)]
        server.poll(0)
    return arrived


def copies(frames: list[PeerFrame]) -> list[tuple[bytes, bytes]]:
    return [(one.peer, bytes(one.frame)) for one in frames]


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until, "it never came"
