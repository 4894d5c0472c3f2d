"""The transport contract, on every transport; and a worker that is killed and restarted."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import zmq
from transport_ends import (
    KINDS,
    SOCKETS,
    Kind,
    context_frame,
    copies,
    free_port,
    ping,
    receive_down,
    send_up,
    wait_until,
)
from wire_pairs import parameters, reply_arrays, taps

from dspark_proto import (
    Accepted,
    Buffer,
    Cause,
    DrafterConnection,
    HelloReceived,
    Lane,
    PeerSilent,
    ProposalReady,
    StepArrived,
    StepItem,
    StepTimedOut,
    SupportPolicy,
    VerifierConnection,
    prefix_digest,
)
from dspark_proto.transports import ClientTransport, ServerTransport, open_client, open_server
from dspark_proto.transports.inproc import QUEUE_FRAMES, InprocServer
from dspark_proto.transports.zmq import LARGE_BYTES, PARTS_MAX, ZmqClient, ZmqServer, _runs
from tests.link_keys import Keys, make_keys

BIG_BYTES = 8 * 2**20


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys"))


@dataclass
class Ends:
    """A server with one client, and what is needed for more."""

    kind: Kind
    keys: Keys
    server: ServerTransport
    client: ClientTransport

    def another(self) -> ClientTransport:
        return self.kind.client(self.keys, self.server)

    def up(self, *frames: Buffer) -> list[tuple[bytes, bytes]]:
        return send_up(self.server, self.client, *frames)

    def down(self, count: int) -> list[bytes]:
        return receive_down(self.server, self.client, count)


def open_ends(kind: Kind, keys: Keys) -> Iterator[Ends]:
    server = kind.server(keys)
    client = kind.client(keys, server)
    yield Ends(kind, keys, server, client)
    client.close()
    server.close()


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def ends(request: pytest.FixtureRequest, keys: Keys) -> Iterator[Ends]:
    yield from open_ends(request.param, keys)


@pytest.fixture(params=SOCKETS, ids=lambda kind: kind.name)
def socket_ends(request: pytest.FixtureRequest, keys: Keys) -> Iterator[Ends]:
    yield from open_ends(request.param, keys)


def test_whole_frames_in_order_both_ways(ends: Ends) -> None:
    arrived = ends.up(ping(1), bytearray(ping(2)))
    arrived += ends.up(memoryview(ping(3)))
    assert [frame for _, frame in arrived] == [ping(1), ping(2), ping(3)]
    assert len({peer for peer, _ in arrived}) == 1
    assert ends.server.send(arrived[0][0], [ping(4), context_frame(640), ping(5)])
    assert ends.down(3) == [ping(4), context_frame(640), ping(5)]


def test_many_frames_of_mixed_sizes_stay_whole_and_in_order(ends: Ends) -> None:
    frames = [context_frame(64 * (1 + number * 37 % 700), fill=number) for number in range(60)]
    arrived = [frame for first in range(0, 60, 6) for _, frame in ends.up(*frames[first : first + 6])]
    assert arrived == frames


def test_buffers_may_be_reused_when_send_returns(ends: Ends) -> None:
    (peer, _), *_ = ends.up(ping(1))
    frame = bytearray(context_frame(BIG_BYTES, fill=1))
    expected = bytes(frame)
    assert ends.client.send([frame])
    frame[:] = bytes(len(frame))
    arrived: list[tuple[bytes, bytes]] = []
    wait_until(lambda: arrived.extend(copies(ends.server.poll(10))) or ends.client.poll(0) or arrived)
    assert arrived == [(peer, expected)]


def test_a_received_frame_lives_until_the_next_poll(ends: Ends) -> None:
    """Other use of the transport leaves it alone."""
    (peer, _), *_ = ends.up(ping(1))
    assert ends.client.send([ping(2), ping(3)], 1000)
    arrived = []
    wait_until(lambda: arrived.extend(ends.server.poll(10)) or arrived)
    before = copies(arrived)
    assert ends.client.send([context_frame(64_000, fill=9)], 1000)
    assert ends.server.send(peer, [ping(4)])
    ends.client.poll(1000)
    assert copies(arrived) == before


def test_frames_of_eight_mebibytes_in_both_directions(ends: Ends) -> None:
    (peer, _), *_ = ends.up(ping(1))
    frame = context_frame(BIG_BYTES)
    for _ in range(2):
        assert ends.up(frame) == [(peer, bytes(frame))]
        assert ends.server.send(peer, [frame])
        assert ends.down(1) == [frame]


def test_sending_nothing_and_sending_to_nobody(ends: Ends) -> None:
    assert ends.client.send([])
    assert ends.server.send(b"nobody", [ping(1)]) is False
    ((peer, _),) = ends.up(ping(1))
    assert ends.server.send(peer, [])
    assert ends.server.poll(1) == []
    assert ends.client.poll(1) == []
    assert ends.server.endpoint


def test_two_clients_are_two_peers(ends: Ends) -> None:
    other = ends.another()
    ((first, _),) = ends.up(ping(1))
    ((second, frame),) = send_up(ends.server, other, ping(2))
    assert first != second
    assert frame == ping(2)
    assert ends.server.send(second, [ping(22)])
    assert ends.server.send(first, [ping(11)])
    assert ends.down(1) == [ping(11)]
    assert receive_down(ends.server, other, 1) == [ping(22)]
    other.close()


def test_a_client_that_left_is_absent_and_harms_nobody(ends: Ends) -> None:
    other = ends.another()
    ((gone, _),) = send_up(ends.server, other, ping(1))
    other.close()
    wait_until(lambda: not ends.server.send(gone, [ping(2)]) or ends.server.poll(1))
    wait_until(lambda: not ends.server.send(gone, [ping(2)]))
    ((peer, _),) = ends.up(ping(3))
    assert peer != gone


def test_a_server_that_left_is_absent(ends: Ends) -> None:
    ends.up(ping(1))
    ends.server.close()
    wait_until(lambda: not ends.client.send([ping(2)]) or ends.client.poll(1))
    wait_until(lambda: not ends.client.send([ping(2)]))
    assert ends.client.poll(1) == []


def test_queues_are_bounded(socket_ends: Ends) -> None:
    """A server that takes nothing: sending ends with False, and what was taken arrives whole."""
    ends = socket_ends
    ends.up(ping(1))
    frame = context_frame(2**18)
    sent = 0
    while ends.client.send([frame]):
        sent += 1
        assert sent < 1024
    arrived: list[tuple[bytes, bytes]] = []
    wait_until(lambda: arrived.extend(copies(ends.server.poll(10))) or ends.client.poll(0) or len(arrived) >= sent)
    assert [one for _, one in arrived] == [frame] * sent
    assert ends.client.send([frame], 1000)


def test_nothing_is_queued_for_an_absent_peer(socket_ends: Ends) -> None:
    ends = socket_ends
    endpoint = ends.server.endpoint.rpartition(":")[0] + f":{free_port()}"
    client = open_client(endpoint, ends.kind.client_security(ends.keys))
    assert client.send([ping(1)]) is False
    assert client.send([ping(1)], 60) is False
    assert client.poll(1) == []
    client.close()


@pytest.mark.parametrize("kind", SOCKETS, ids=lambda kind: kind.name)
def test_a_client_finds_its_worker_again(kind: Kind, keys: Keys) -> None:
    """Started before its worker, and again after the worker's restart; each connection is another peer."""
    port = free_port()
    first = kind.server(keys, port)
    client = kind.client(keys, first)
    ((_, frame),) = send_up(first, client, ping(1))
    assert frame == ping(1)
    first.close()
    wait_until(lambda: not client.send([ping(2)]) or client.poll(1))
    second = kind.server(keys, port)
    arrived = send_up(second, client, ping(3))
    assert arrived[-1][1] == ping(3)
    assert second.send(arrived[-1][0], [ping(4)])
    assert receive_down(second, client, 1) == [ping(4)]
    client.close()
    second.close()


def test_inproc_queues_are_bounded_and_close_disconnects() -> None:
    server = InprocServer()
    client = server.connect()
    assert client.send([b"x"] * QUEUE_FRAMES)
    assert not client.send([b"x"])
    (peer,) = {one.peer for one in server.poll(0)}
    assert server.send(peer, [b"x"] * QUEUE_FRAMES)
    assert not server.send(peer, [b"x"])
    server.close()
    assert not client.send([b"x"])


def test_zmq_message_of_too_many_parts_is_dropped_and_counted() -> None:
    server = ZmqServer()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(server.endpoint)
        stranger.send_multipart([b"x"] * (PARTS_MAX + 1))
        stranger.send_multipart([b"y"])
        until = time.monotonic() + 5
        arrived: list[bytes] = []
        while not arrived and time.monotonic() < until:
            arrived = [bytes(one.frame) for one in server.poll(100)]
    assert arrived == [b"y"]
    assert server.dropped_messages == 1
    server.close()


def test_zmq_waits_in_the_receiving_call_as_long_as_it_was_told() -> None:
    client = ZmqClient("tcp://127.0.0.1:9")
    try:
        for timeout_ms in (5, 7, 7, 6):
            assert client._be_patient(timeout_ms) == 0
            assert client._socket.getsockopt(zmq.RCVTIMEO) == timeout_ms
            assert client.poll(timeout_ms) == []
    finally:
        client.close()


def test_zmq_sends_many_frames_in_messages_that_the_other_end_takes() -> None:
    server = ZmqServer()
    client = ZmqClient(server.endpoint)
    frames = [b"%d" % i for i in range(2 * PARTS_MAX + 3)]
    assert client.send(frames, timeout_ms=1000)
    arrived, until = [], time.monotonic() + 5
    while len(arrived) < len(frames) and time.monotonic() < until:
        arrived += server.poll(100)
    assert [bytes(one.frame) for one in arrived] == frames
    assert server.send(arrived[0].peer, frames)
    back: list[bytes] = []
    while len(back) < len(frames) and time.monotonic() < until:
        back += [bytes(frame) for frame in client.poll(100)]
    assert back == frames
    assert server.dropped_messages == 0
    client.close()
    server.close()


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([64] * 5, [5]),
        ([LARGE_BYTES], [1]),
        ([64, LARGE_BYTES, 64, 64], [2, 2]),
        ([LARGE_BYTES] * 5 + [64], [1] * 5 + [1]),
        ([LARGE_BYTES] * 64, [4] * 16),
        ([10] * 130, [63, 63, 4]),
        ([], []),
    ],
)
def test_zmq_ends_a_message_with_a_large_frame(sizes: list[int], parts: list[int]) -> None:
    frames = [bytes(size) for size in sizes]
    runs = list(_runs(frames))
    assert [len(run) for run in runs] == parts
    assert [id(frame) for run in runs for frame in run] == [id(frame) for frame in frames]


FAULTS = """
import resource, sys
from dspark_proto.transports.zmq import ZmqClient, ZmqServer
server = ZmqServer()
client = ZmqClient(server.endpoint)
frames, faults = [bytes(600_000)] * 4, []
for _ in range(16):
    assert client.send(frames, timeout_ms=5000)
    arrived = 0
    while arrived < len(frames):
        arrived += len(server.poll(5000))
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print((faults[-1] - faults[-9]) // 8)
"""


def faults_of_a_round(**variables: str) -> int:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    command = [sys.executable, "-c", FAULTS]
    return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="no glibc")
def test_zmq_messages_get_the_memory_of_the_round_before_unless_the_environment_says_otherwise() -> None:
    """Four frames of 600,000 bytes are 586 pages, there and back."""
    assert faults_of_a_round() < 200
    assert faults_of_a_round(MALLOC_MMAP_THRESHOLD_="131072") > 500


# A worker in its own process, killed in mid-stream


def serve(name: str, keys: Keys, port: int, ready: Callable[[], None]) -> None:
    """A drafter worker that proposes token 7 for ever."""
    kind = next(one for one in KINDS if one.name == name)
    server = open_server(f"{kind.scheme}://127.0.0.1:{port}", kind.server_security(keys))
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


def start_worker(kind: Kind, keys: Keys, port: int) -> multiprocessing.Process:
    # A fresh interpreter for UCX, whose threads and locks do not survive a fork.
    context = multiprocessing.get_context("spawn" if kind.scheme == "ucx" else "fork")
    ready = context.Event()
    process = context.Process(target=serve, args=(kind.name, keys, port, ready.set), daemon=True)
    process.start()
    assert ready.wait(20)
    return process


class Driver:
    """A minimal Spark loop over one connection."""

    def __init__(self, client: ClientTransport) -> None:
        self.client = client
        self.pending: list[object] = []
        self.verifier = VerifierConnection(parameters(1, heartbeat_ms=300, step_deadline_ms=600))

    def until(self, *kinds: type, seconds: float = 10.0) -> object:
        """The next event of one of ``kinds``."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            while self.pending:
                event = self.pending.pop(0)
                if isinstance(event, kinds):
                    return event
            self.pending += [
                event for frame in self.client.poll(10) for event in self.verifier.receive(frame, time.monotonic_ns())
            ]
            self.pending += self.verifier.expire(time.monotonic_ns())
            self.client.send(self.verifier.frames_to_send())
        raise AssertionError(f"none of {kinds} in {seconds} s")

    def connect(self) -> None:
        wait_until(lambda: self.client.send([self.verifier.hello(time.monotonic_ns())], 100))
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


@pytest.mark.parametrize("kind", SOCKETS, ids=lambda kind: kind.name)
def test_sigkill_in_mid_stream_and_recovery_after_restart(kind: Kind, keys: Keys) -> None:
    kind.server(keys).close()  # where it cannot be opened, skip before a process is started
    port = free_port()
    worker = start_worker(kind, keys, port)
    driver = Driver(open_client(f"{kind.scheme}://127.0.0.1:{port}", kind.client_security(keys)))
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
    worker = start_worker(kind, keys, port)
    driver.connect()
    again = driver.round(1)
    assert isinstance(again, ProposalReady)
    again.lease.release()
    driver.client.send([driver.verifier.close(0, Cause.FINISHED)])
    driver.client.close()
    worker.kill()
    worker.join(10)
