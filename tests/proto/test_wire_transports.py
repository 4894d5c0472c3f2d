"""The transport contract on every transport; on ZeroMQ also a peer that is killed and restarted."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from wire_pairs import parameters, reply_arrays, taps

from dspark_proto import (
    Accepted,
    Cause,
    DrafterConnection,
    HelloReceived,
    Lane,
    LocalProtocolError,
    PeerSilent,
    ProposalReady,
    StepArrived,
    StepItem,
    StepTimedOut,
    SupportPolicy,
    VerifierConnection,
    prefix_digest,
)
from dspark_proto.transports import ClientTransport, ServerTransport
from dspark_proto.transports.inproc import InprocServer
from dspark_proto.transports.zmq import PARTS_MAX, QUEUE_MESSAGES, ZmqClient, ZmqServer, is_local

WAIT_MS = 5000
Ends = tuple[ServerTransport, ClientTransport]


def zmq_ends() -> Ends:
    server = ZmqServer()
    return server, ZmqClient(server.endpoint)


def inproc_ends() -> Ends:
    server = InprocServer()
    return server, server.connect()


@pytest.fixture(params=[inproc_ends, zmq_ends], ids=["inproc", "zmq"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    server, client = request.param()
    yield server, client
    client.close()
    server.close()


def test_whole_frames_in_order_both_ways(ends: Ends) -> None:
    server, client = ends
    assert client.send([b"one", bytearray(b"two")], timeout_ms=WAIT_MS)
    assert client.send([memoryview(b"three")], timeout_ms=WAIT_MS)
    arrived = []
    while len(arrived) < 3:
        arrived += server.poll(WAIT_MS)
    assert [bytes(one.frame) for one in arrived] == [b"one", b"two", b"three"]
    assert len({one.peer for one in arrived}) == 1
    assert server.send(arrived[0].peer, [b"answer"])
    assert [bytes(frame) for frame in client.poll(WAIT_MS)] == [b"answer"]


def test_buffers_may_be_reused_when_send_returns(ends: Ends) -> None:
    server, client = ends
    buffer = bytearray(b"a" * 100_000)
    assert client.send([buffer], timeout_ms=WAIT_MS)
    buffer[:] = b"b" * 100_000
    (arrived,) = server.poll(WAIT_MS)
    assert bytes(arrived.frame) == b"a" * 100_000


def test_sending_nothing_and_sending_to_nobody(ends: Ends) -> None:
    server, client = ends
    assert client.send([])
    assert server.send(b"nobody", [b"x"]) is False
    assert client.send([b"x"], timeout_ms=WAIT_MS)
    (arrived,) = server.poll(WAIT_MS)
    assert server.send(arrived.peer, [])


def test_nothing_arrives_when_nothing_was_sent(ends: Ends) -> None:
    server, client = ends
    assert server.poll(1) == []
    assert client.poll(1) == []
    assert server.endpoint


def test_inproc_queues_are_bounded_and_close_disconnects() -> None:
    server = InprocServer()
    client = server.connect()
    assert client.send([b"x"] * 1024)
    assert not client.send([b"x"])
    (peer,) = {one.peer for one in server.poll(0)}
    assert server.send(peer, [b"x"] * 1024)
    assert not server.send(peer, [b"x"])
    server.close()
    assert not client.send([b"x"])


def test_zmq_queues_nothing_for_an_absent_peer() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    client = ZmqClient(f"tcp://127.0.0.1:{port}")
    assert client.send([b"x"]) is False
    assert client.send([b"x"], timeout_ms=20) is False
    client.close()


def test_zmq_queues_are_bounded() -> None:
    server, client = zmq_ends()
    assert client.send([b"hello"], timeout_ms=WAIT_MS)
    big = bytes(2**20)
    sent = 0
    while client.send([big]):
        sent += 1
        assert sent < 4 * QUEUE_MESSAGES
    client.close()
    server.close()


def test_zmq_message_of_too_many_parts_is_dropped_and_counted() -> None:
    server, client = zmq_ends()
    assert client.send([b"x"] * (PARTS_MAX + 1), timeout_ms=WAIT_MS)
    assert client.send([b"y"], timeout_ms=WAIT_MS)
    assert [bytes(one.frame) for one in server.poll(WAIT_MS)] == [b"y"]
    assert server.dropped_messages == 1
    client.close()
    server.close()


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("tcp://127.0.0.1:5555", True),
        ("tcp://localhost:5555", True),
        ("tcp://[::1]:5555", True),
        ("ipc:///run/dspark.sock", True),
        ("inproc://x", True),
        ("tcp://*:5555", False),
        ("tcp://0.0.0.0:5555", False),
        ("tcp://192.168.1.2:5555", False),
        ("tcp://worker.invalid:5555", False),
        ("tcp://:5555", False),
    ],
)
def test_only_loopback_is_local(endpoint: str, local: bool) -> None:
    assert is_local(endpoint) is local
    if not local:
        with pytest.raises(LocalProtocolError, match="allow_remote"):
            ZmqServer(endpoint)


def test_remote_bind_is_possible_when_asked_for() -> None:
    server = ZmqServer("tcp://0.0.0.0:0", allow_remote=True)
    assert server.endpoint.startswith("tcp://0.0.0.0:")
    server.close()


# A worker in its own process, killed in mid-stream


def serve(endpoint: str, ready: Callable[[], None]) -> None:
    """A drafter worker that proposes token 7 for ever."""
    server = ZmqServer(endpoint)
    ready()
    peers: dict[bytes, DrafterConnection] = {}
    while True:
        for arrived in server.poll(100):
            now_ns = time.monotonic_ns()
            drafter = peers.setdefault(arrived.peer, DrafterConnection(parameters(os.getpid())))
            for event in drafter.receive(arrived.frame, now_ns):
                if isinstance(event, HelloReceived):
                    server.send(arrived.peer, [drafter.accept(now_ns)])
                elif isinstance(event, StepArrived):
                    for item in event.items:
                        server.send(arrived.peer, drafter.reply(item, **reply_arrays()))
            server.send(arrived.peer, drafter.frames_to_send())


def start_worker(endpoint: str) -> multiprocessing.Process:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=serve, args=(endpoint, ready.set), daemon=True)
    process.start()
    assert ready.wait(10)
    return process


class Driver:
    """A minimal Spark loop over one connection."""

    def __init__(self, endpoint: str) -> None:
        self.client = ZmqClient(endpoint)
        self.pending: list[object] = []
        self.verifier = VerifierConnection(parameters(1, heartbeat_ms=500, step_deadline_ms=1000))

    def until(self, *kinds: type, seconds: float = 10.0) -> object:
        """The next event of one of ``kinds``."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            while self.pending:
                event = self.pending.pop(0)
                if isinstance(event, kinds):
                    return event
            self.pending += [
                event
                for frame in self.client.poll(10)
                for event in self.verifier.receive(frame, time.monotonic_ns())
            ]
            self.pending += self.verifier.expire(time.monotonic_ns())
            self.client.send(self.verifier.frames_to_send())
        raise AssertionError(f"none of {kinds} in {seconds} s")

    def connect(self) -> None:
        assert self.client.send([self.verifier.hello(time.monotonic_ns())], timeout_ms=WAIT_MS)
        self.until(Accepted)
        self.client.send([self.verifier.open(0, 5, seed=1, support=SupportPolicy.K32, lane=Lane.RATIO)])

    def round(self, round_: int) -> object:
        first = self.verifier.context_end(0)
        item = StepItem(
            5, 0, self.verifier.generation(0), round_, 42, first + 1, prefix_digest([42] * (first + 1)), 5,
            Lane.RATIO, tap_first=first, tap_rows=1, taps=taps(1),
        )  # fmt: skip
        self.client.send([self.verifier.step([item], time.monotonic_ns())])
        return self.until(ProposalReady, StepTimedOut)


def test_sigkill_in_mid_stream_and_recovery_after_restart() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    worker = start_worker(endpoint)
    driver = Driver(endpoint)
    driver.connect()
    for round_ in range(1, 4):
        ready = driver.round(round_)
        assert isinstance(ready, ProposalReady)
        assert ready.tokens == (7,) * 5
        ready.lease.release()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(10)
    assert isinstance(driver.round(4), StepTimedOut)
    assert isinstance(driver.until(PeerSilent), PeerSilent)
    worker = start_worker(endpoint)
    driver.connect()
    again = driver.round(1)
    assert isinstance(again, ProposalReady)
    again.lease.release()
    driver.client.send([driver.verifier.close(0, Cause.FINISHED)])
    driver.client.close()
    worker.kill()
    worker.join(10)
