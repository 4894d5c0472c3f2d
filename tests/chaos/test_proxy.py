"""The proxy process between a verifier and a drafter that echoes: frames pass, are hurt on command, connections end."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from dspark.chaos import proxy_handle
from dspark.chaos.processes import process_state
from dspark.chaos.proxy_handle import ProxyError, ProxyHandle
from dspark.chaos.relay import Relay
from dspark.wire_benchmark_peers import Layout
from dspark_proto import VerifierConnection
from dspark_proto.frame import encode_frame
from dspark_proto.messages import Ping, Stats
from dspark_proto.transports import ClientTransport, open_client, open_server
from tests.e2e.test_faults import wait_until

EPOCH = 77


class Echo:
    """A worker's end that sends back what comes, and reports two open slots when it is asked for STATS."""

    def __init__(self) -> None:
        self._server = open_server("tcp://127.0.0.1:0")
        self.endpoint = self._server.endpoint
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asked = bytes(encode_frame(Stats(EPOCH)))
        report = encode_frame(Stats(EPOCH, is_report=1, slots_open=2))
        while not self._over.is_set():
            for arrived in self._server.poll(10):
                frame = bytes(arrived.frame)
                self._server.send(arrived.peer, [report if frame == asked else frame])
        self._server.close()

    def close(self) -> None:
        self._over.set()
        self._thread.join(10)


@pytest.fixture(scope="module")
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.close()


@pytest.fixture(scope="module")
def proxy(echo: Echo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyHandle]:
    proxy = ProxyHandle("proxy 0", echo.endpoint, 1, tmp_path_factory.mktemp("proxy") / "log")
    yield proxy
    proxy.child.stop()
    assert process_state(proxy.child.pid) == ""


@pytest.fixture
def client(proxy: ProxyHandle) -> Iterator[ClientTransport]:
    client = open_client(proxy.endpoint)
    wait_until(lambda: client.send([ping(0)]), 20)
    assert echoed(client, 1) == [ping(0)]
    yield client
    client.close()
    proxy.clear()


def ping(nonce: int) -> bytes:
    return bytes(encode_frame(Ping(EPOCH, nonce)))


def echoed(client: ClientTransport, count: int, patience: int = 200) -> list[bytes]:
    """`count` frames, or those that came until it was quiet for long."""
    frames: list[bytes] = []
    for _ in range(patience):
        frames += [bytes(frame) for frame in client.poll(20)]
        if len(frames) >= count:
            break
    return frames


def test_frames_pass_unchanged_and_in_order(client: ClientTransport) -> None:
    sent = [ping(n) for n in range(1, 41)]
    assert client.send(sent)
    assert echoed(client, 40) == sent


def test_rules_are_switched_on_and_off_and_counted(proxy: ProxyHandle, client: ClientTransport) -> None:
    before = proxy.counts()["harmed"].get("duplicate", 0)
    proxy.switch_on("duplicate", 1.0, copies=3, dir="down")
    client.send([ping(1)])
    assert echoed(client, 3) == [ping(1)] * 3
    assert proxy.counts()["harmed"]["duplicate"] == before + 1
    proxy.clear()
    proxy.switch_on("corrupt", 1.0, dir="up")
    client.send([ping(2)])
    (damaged,) = echoed(client, 1)
    assert len(damaged) == len(ping(2))
    assert damaged != ping(2)
    proxy.clear()
    proxy.switch_on("drop", 1.0)
    client.send([ping(3)])
    assert echoed(client, 1, patience=5) == []
    proxy.clear()
    client.send([ping(4)])
    assert echoed(client, 1) == [ping(4)]


@pytest.mark.parametrize("how", ["reset", "half_close"])
def test_a_cut_ends_connections_and_the_verifier_comes_back(
    proxy: ProxyHandle, client: ClientTransport, how: str
) -> None:
    before = proxy.counts()
    proxy.cut(how)
    wait_until(lambda: proxy.counts()["accepted"] > before["accepted"], 20)
    assert proxy.counts()["cut"][how] >= before["cut"][how] + 1

    def answered() -> bool:
        client.send([ping(9)])
        return bool(echoed(client, 1, patience=5))

    wait_until(answered, 20)


def test_a_stopped_proxy_is_an_error_and_its_late_answer_is_not_the_next_ones(
    proxy: ProxyHandle, client: ClientTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(proxy_handle, "ANSWER_S", 0.2)
        proxy.child.signal(signal.SIGSTOP)
        try:
            wait_until(lambda: process_state(proxy.child.pid) == "T", 10)
            with pytest.raises(ProxyError, match="does not answer"):
                proxy.counts()
        finally:
            proxy.child.signal(signal.SIGCONT)
    before = proxy.counts()["passed"]
    client.send([ping(1)])
    assert echoed(client, 1) == [ping(1)]
    assert proxy.counts()["passed"] == before + 2


def relayed() -> tuple[Relay, socket.socket, socket.socket]:
    """A relay, the socket that connected to it, and the far end of that connection."""
    with socket.create_server(("127.0.0.1", 0)) as far_end:
        relay = Relay(far_end.getsockname()[1])
        near = socket.create_connection(("127.0.0.1", relay.port), timeout=10)
        far, _ = far_end.accept()
        far.settimeout(10)
    near.sendall(b"up")
    assert far.recv(10) == b"up"
    far.sendall(b"down")
    assert near.recv(10) == b"down"
    return relay, near, far


def test_a_reset_is_a_reset() -> None:
    relay, near, far = relayed()
    with near, far:
        assert relay.cut("reset") == 1
        with pytest.raises(ConnectionResetError):
            near.recv(10)
        assert far.recv(10) == b""
    relay.close()


def test_a_half_closed_connection_goes_on_the_other_way() -> None:
    relay, near, far = relayed()
    with near, far:
        assert relay.cut("half_close") == 1
        assert near.recv(10) == b""
        near.sendall(b"still here")
        assert far.recv(10) == b"still here"
        near.close()
        assert far.recv(10) == b""
    relay.close()


def test_the_worker_is_asked_over_the_verifiers_own_connection(proxy: ProxyHandle, client: ClientTransport) -> None:
    hello = bytes(VerifierConnection(Layout("one", 1, 300).parameters(EPOCH, 2)).hello(0))
    client.send([hello])
    assert echoed(client, 1) == [hello]
    proxy.ask_stats()
    wait_until(lambda: proxy.counts()["reports"] == 1, 10)
    assert proxy.counts()["slots_open"] == 2
    client.send([ping(5)])
    assert echoed(client, 1) == [ping(5)]
