"""Plain TCP and TLS with peers that do not keep the rules: garbage, silence, floods, resets, half-closed streams."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator

import pytest
from transport_ends import context_frame, copies, ping, receive_down, send_up, wait_until

from dspark_proto.transports import stream as streams
from dspark_proto.transports.bounds import LinkLimits
from dspark_proto.transports.endpoint import parse_address
from dspark_proto.transports.frame_buffer import START_BYTES
from dspark_proto.transports.tcp import TcpClient, TcpServer
from tests.link_keys import Keys, make_keys

LIMITS = LinkLimits(
    frame_bytes_max=2**20, connections_max=3, receive_bytes_max=2**20 + 4 * START_BYTES, queue_bytes_max=2**18,
    first_frame_ms=300, idle_ms=1500,
)  # fmt: skip


@pytest.fixture
def server() -> Iterator[TcpServer]:
    opened = TcpServer(limits=LIMITS)
    yield opened
    opened.close()


def raw(server: TcpServer) -> socket.socket:
    address = parse_address(server.endpoint)
    connected = socket.create_connection((address.host, address.port), timeout=5)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


def frames_of(server: TcpServer, count: int) -> list[tuple[bytes, bytes]]:
    arrived: list[tuple[bytes, bytes]] = []
    wait_until(lambda: arrived.extend(copies(server.poll(20))) or len(arrived) >= count)
    return arrived


def is_closed(peer: socket.socket) -> bool:
    """Whether the other end has closed or reset the connection."""
    if not select.select([peer], [], [], 0)[0]:
        return False
    try:
        return peer.recv(1) == b""
    except ConnectionError:
        return True


def turned_until_closed(server: TcpServer, peer: socket.socket) -> list[tuple[bytes, bytes]]:
    arrived: list[tuple[bytes, bytes]] = []
    wait_until(lambda: arrived.extend(copies(server.poll(10))) or is_closed(peer))
    return arrived


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n" * 4, b"\x00" * 48, ping(1)[:-70] + b"x" * 200])
def test_garbage_closes_that_connection_and_no_other(server: TcpServer, garbage: bytes) -> None:
    client = TcpClient(server.endpoint)
    send_up(server, client, ping(1))
    with raw(server) as stranger:
        stranger.sendall(garbage)
        assert turned_until_closed(server, stranger) == []
    assert server.counters.bad_prefixes == 1
    ((_, frame),) = send_up(server, client, ping(2))
    assert frame == ping(2)
    client.close()


def test_frames_before_garbage_are_delivered_and_those_after_it_are_not(server: TcpServer) -> None:
    with raw(server) as peer:
        peer.sendall(ping(1) + bytes(64) + ping(2))
        arrived = turned_until_closed(server, peer)
    assert [frame for _, frame in arrived] == [ping(1)]


def test_an_oversized_frame_is_refused_and_not_drained(server: TcpServer) -> None:
    with raw(server) as peer:
        peer.sendall(bytes(context_frame(2**21)[:100]))
        assert turned_until_closed(server, peer) == []
    assert server.counters.bad_prefixes == 1


def test_receive_memory_of_all_connections_is_bounded(server: TcpServer) -> None:
    """One large frame fits, the second one beside it does not, and ends its own connection only."""
    first, second = raw(server), raw(server)
    frame = bytes(context_frame(2**20 - 4096))
    first.sendall(frame[:700_000])
    wait_until(lambda: not server.poll(10) and server._receive_bytes > 700_000)
    second.sendall(ping(1))
    frames_of(server, 1)
    second.setblocking(False)
    view = memoryview(frame)
    while view and not is_closed(second):
        try:
            view = view[second.send(view[:65536]) :]
        except BlockingIOError:
            pass
        except ConnectionError:
            break
        server.poll(1)
    turned_until_closed(server, second)
    first.sendall(frame[700_000:])
    assert [one for _, one in frames_of(server, 1)] == [frame]
    assert server._receive_bytes <= LIMITS.receive_bytes_max
    first.close()
    second.close()
    wait_until(lambda: not server.poll(10) and not server._peers)
    assert server._receive_bytes == 0


@pytest.mark.parametrize("dribble", [b"", ping(1)[:30]])
def test_a_connection_that_sends_no_whole_frame_in_time_is_closed(server: TcpServer, dribble: bytes) -> None:
    with raw(server) as loris:
        loris.sendall(dribble)
        assert turned_until_closed(server, loris) == []
    assert server.counters.overdue == 1


def test_a_known_peer_may_be_silent_for_longer_but_not_for_ever(server: TcpServer) -> None:
    with raw(server) as peer:
        peer.sendall(ping(1))
        frames_of(server, 1)
        began = time.monotonic()
        turned_until_closed(server, peer)
        assert time.monotonic() - began >= LIMITS.idle_ms / 1000 - 0.2
    assert server.counters.overdue == 1


def test_connections_are_bounded_and_a_place_is_free_again(server: TcpServer) -> None:
    held = [raw(server) for _ in range(LIMITS.connections_max)]
    for number, peer in enumerate(held):
        peer.sendall(ping(number))
    frames_of(server, len(held))
    with raw(server) as rejected:
        turned_until_closed(server, rejected)
    assert server.counters.too_many_connections == 1
    held.pop().close()
    wait_until(lambda: not server.poll(10) and len(server._peers) < LIMITS.connections_max)
    held.append(raw(server))
    held[-1].sendall(ping(9))
    assert frames_of(server, 1)[0][1] == ping(9)
    for peer in held:
        peer.close()


def test_a_half_closed_stream_counts_as_gone_after_its_last_frame(server: TcpServer) -> None:
    with raw(server) as peer:
        peer.sendall(ping(1))
        peer.shutdown(socket.SHUT_WR)
        ((name, frame),) = frames_of(server, 1)
        assert frame == ping(1)
        turned_until_closed(server, peer)
        assert server.send(name, [ping(2)]) is False


def test_a_stream_that_ends_inside_a_frame_delivers_nothing(server: TcpServer) -> None:
    with raw(server) as peer:
        peer.sendall(ping(1) + ping(2)[:50])
        ((name, _),) = frames_of(server, 1)
    wait_until(lambda: not server.poll(10) and not server._peers)
    assert server.send(name, [ping(3)]) is False


def test_a_reset_is_an_absent_peer(server: TcpServer) -> None:
    peer = raw(server)
    peer.sendall(ping(1))
    ((name, _),) = frames_of(server, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    wait_until(lambda: server.send(name, [ping(2)]) is False)
    assert server.poll(1) == []


def test_a_peer_that_takes_nothing_costs_no_wait_and_bounded_memory(
    server: TcpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue takes one frame beyond the kernel's buffers, then nothing, at once; then all arrives in order."""
    waits = []
    wait = streams.wait_for
    monkeypatch.setattr(streams, "wait_for", lambda *seen: waits.append(seen[2]) or wait(*seen))
    peer = raw(server)
    peer.sendall(ping(1))
    ((name, _),) = frames_of(server, 1)
    frame = context_frame(2**17)
    sent = 0
    while server.send(name, [frame]):
        sent += 1
        assert sent < 512
    stream = server._peers[name].stream
    assert 0 < stream._queued_bytes <= LIMITS.queue_bytes_max
    waits.clear()
    assert not server.send(name, [frame])
    assert waits == []
    got = bytearray()
    peer.settimeout(0.01)
    while len(got) < sent * len(frame):
        server.poll(0)
        with contextlib.suppress(TimeoutError):
            got += peer.recv(2**20)
    assert got == bytes(frame) * sent
    assert server.send(name, [frame])
    peer.close()


def test_a_client_leaves_a_worker_that_talks_garbage_and_comes_back() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = TcpClient(f"plain+tcp://127.0.0.1:{listener.getsockname()[1]}")
        assert client.send([ping(1)], 1000)
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3)
            wait_until(lambda: client.poll(10) == [] and is_closed_after_reading(accepted))
        listener.settimeout(0.01)
        again = accept_while(listener, lambda: client.poll(10))
        with again:
            again.sendall(ping(2))
            got: list[bytes] = []
            wait_until(lambda: got.extend(bytes(f) for f in client.poll(10)) or got)
            assert got == [ping(2)]
        client.close()


def is_closed_after_reading(peer: socket.socket) -> bool:
    peer.settimeout(0.01)
    try:
        return peer.recv(4096) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def accept_while(listener: socket.socket, turn: Callable[[], object]) -> socket.socket:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        turn()
        try:
            return listener.accept()[0]
        except TimeoutError:
            pass
    raise AssertionError("nobody came back")


def test_attempts_to_connect_get_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that accepts and hangs up is not hammered: only a frame resets the pause."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.01)
        client = TcpClient(f"plain+tcp://127.0.0.1:{listener.getsockname()[1]}")
        pauses = []
        for _ in range(4):
            accept_while(listener, lambda: client.poll(5)).close()
            pauses.append(client._dialer.pause_s)
        assert pauses == sorted(pauses)
        assert pauses[-1] >= 4 * pauses[0]
        accepted = accept_while(listener, lambda: client.poll(5))
        accepted.sendall(ping(1))
        wait_until(lambda: client.poll(10))
        assert client._dialer.pause_s == pauses[0]
        accepted.close()
        client.close()


def test_a_socket_that_met_itself_is_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """On loopback, connecting to a free port from the same port succeeds."""
    with socket.socket() as alone:
        alone.bind(("127.0.0.1", 0))
        port = alone.getsockname()[1]
    made = socket.socket

    def bound(*arguments: int) -> socket.socket:
        one = made(*arguments)
        one.bind(("127.0.0.1", port))
        return one

    client = TcpClient(f"plain+tcp://127.0.0.1:{port}")
    monkeypatch.setattr("dspark_proto.transports.dialer.socket.socket", bound)
    first_pause = client._dialer.pause_s
    wait_until(lambda: client._advance() or client._dialer.pause_s > first_pause)
    assert client._stream is None
    client.close()


# TLS


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys"))


def test_tls_is_1_3_and_both_ends_show_certificates(keys: Keys) -> None:
    server = TcpServer("tls+tcp://127.0.0.1:0", keys.tls_of("worker"))
    client = TcpClient(server.endpoint, keys.tls_of("spark"))
    ((name, _),) = send_up(server, client, ping(1))
    inside = server._peers[name].stream.socket
    assert isinstance(inside, ssl.SSLSocket)
    assert inside.version() == "TLSv1.3"
    subject = dict(pair for part in inside.getpeercert()["subject"] for pair in part)  # type: ignore[index]
    assert subject["commonName"] == "spark"
    client.close()
    server.close()


def test_frames_that_share_a_tls_record_all_arrive(keys: Keys) -> None:
    """What the TLS layer has decrypted already does not show on the socket: the frames behind a large one."""
    server = TcpServer("tls+tcp://127.0.0.1:0", keys.tls_of("worker"))
    client = TcpClient(server.endpoint, keys.tls_of("spark"))
    ((name, _),) = send_up(server, client, ping(1))
    large = bytes(context_frame(START_BYTES))
    assert client.send([large + ping(2) + ping(3)])
    assert [frame for _, frame in frames_of(server, 3)] == [large, ping(2), ping(3)]
    assert server.send(name, [large + ping(4)])
    assert receive_down(server, client, 2) == [large, ping(4)]
    client.close()
    server.close()


def test_a_plain_stranger_gets_nothing_from_a_tls_worker(keys: Keys) -> None:
    server = TcpServer("tls+tcp://127.0.0.1:0", keys.tls_of("worker"), LIMITS)
    with raw(server) as stranger:
        stranger.sendall(ping(1))
        assert turned_until_closed(server, stranger) == []
    with raw(server) as silent:
        assert turned_until_closed(server, silent) == []
    assert server.counters.overdue == 1
    server.close()
