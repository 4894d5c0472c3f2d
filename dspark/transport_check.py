"""Which transports work on this machine: a small frame around the loopback interface, and the reason where it fails.

Called by `dspark doctor`. Needs no model; makes keys for CURVE in a directory of its own and removes them.
"""

from __future__ import annotations

import importlib.util
import os
import ssl
import tempfile
import time
from pathlib import Path

from dspark_proto import encode_frame
from dspark_proto.messages import Ping
from dspark_proto.transports import (
    ClientTransport,
    CurveFiles,
    Security,
    ServerTransport,
    TransportError,
    open_client,
    open_server,
)

WORKS = "works"
_WAIT_S = 3.0


def examine() -> dict[str, str]:
    """Transport -> "works", or why it does not."""
    return {
        "zmq (tcp://)": round_trip("tcp://127.0.0.1:0"),
        "zmq with CURVE keys (tcp://)": _curve_round_trip(),
        "plain tcp (plain+tcp://)": round_trip("plain+tcp://127.0.0.1:0"),
        "tls 1.3 (tls+tcp://)": f"{ssl.OPENSSL_VERSION} has it; needs your certificates"
        if ssl.HAS_TLSv1_3
        else f"{ssl.OPENSSL_VERSION} has no TLS 1.3",
        "ucx (ucx://)": _ucx(),
    }


def round_trip(endpoint: str, worker: Security | None = None, verifier: Security | None = None) -> str:
    """Send a frame there and back between two ends in this process."""
    try:
        server = open_server(endpoint, worker or Security())
        try:
            client = open_client(server.endpoint, verifier or Security())
            try:
                return _exchange(server, client)
            finally:
                client.close()
        finally:
            server.close()
    except TransportError as error:
        return str(error)


def _exchange(server: ServerTransport, client: ClientTransport) -> str:
    """Both ends in turn, until the frame is back."""
    ping = encode_frame(Ping(1, 1))
    sent, until = False, time.monotonic() + _WAIT_S
    while time.monotonic() < until:
        sent = sent or client.send([ping], 10)
        for arrived in server.poll(5):
            server.send(arrived.peer, [arrived.frame])
        if any(bytes(frame) == bytes(ping) for frame in client.poll(5)):
            return WORKS
    return f"a frame did not come back within {_WAIT_S:.0f} s"


def _curve_round_trip() -> str:
    import zmq

    from dspark_proto.transports.curve import write_curve_keys

    if not zmq.has("curve"):
        return "this build of ZeroMQ has no CURVE: install pyzmq from its wheel"
    with tempfile.TemporaryDirectory() as directory:
        worker, verifier = Path(directory) / "worker", Path(directory) / "verifier"
        worker_public, verifier_public = write_curve_keys(worker), write_curve_keys(verifier)
        return round_trip(
            "tcp://127.0.0.1:0",
            Security(curve=CurveFiles(worker, verifier_public)),
            Security(curve=CurveFiles(verifier, worker_public)),
        )


def _ucx() -> str:
    """UCX works only with the transports that UCX_TLS names, so the answer names them."""
    if importlib.util.find_spec("ucxx") is None:
        return "ucxx is not installed: pip install 'dspark[ucx]'"
    answer = round_trip("ucx://127.0.0.1:0")
    named = os.environ.get("UCX_TLS")
    return f"{answer} with UCX_TLS={named}; {_verbs()}" if named else answer


def _verbs() -> str:
    """Whether the installed libucx has InfiniBand and RoCE: the wheel's modules say so."""
    found = importlib.util.find_spec("libucx")
    roots = [Path(place) for place in (found.submodule_search_locations or [])] if found else []
    modules = [module for root in roots for module in root.rglob("libuct_ib*.so*")]
    return "libucx has InfiniBand and RoCE" if modules else "this libucx has no InfiniBand and no RoCE"
