"""`dspark bench overlap` on the tiny pair: its relay, every figure that it promises, and figures that agree."""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from dspark import roles
from dspark.launch import LocalWorker
from dspark.link_delay import CHUNK_BYTES, READY_PREFIX, DelayedLink, Relay
from dspark_spark import overlap_benchmark
from dspark_spark.overlap_benchmark import ARRANGEMENTS, Answers, Cell, OverlapOptions
from tests.conftest import TinyPair


class FarEnd:
    """An echo server; it counts what it got and waits for the end of the stream."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with self._server.accept()[0] as peer:
            while data := peer.recv(65536):
                peer.sendall(data)
            self.ended.set()

    def close(self) -> None:
        self._server.close()
        self._thread.join(10)


@pytest.fixture
def far() -> Iterator[FarEnd]:
    end = FarEnd()
    yield end
    end.close()


def connect(endpoint: str) -> socket.socket:
    host, _, port = endpoint.rpartition("://")[2].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def exchange(end: socket.socket, data: bytes) -> tuple[bytes, float]:
    """What comes back, and the seconds until all of it has."""
    started = time.perf_counter()
    threading.Thread(target=end.sendall, args=(data,), daemon=True).start()
    received = b""
    while len(received) < len(data):
        received += end.recv(1 << 20)
    return received, time.perf_counter() - started


def test_bytes_pass_unchanged_and_late(far: FarEnd) -> None:
    """The delay can be changed while bytes pass. Only lower bounds: how late a busy machine is, nobody knows."""
    payload = bytes(range(256)) * (5 * CHUNK_BYTES // 256) + b"end"
    with DelayedLink(f"tcp://127.0.0.1:{far.port}") as link, connect(link.endpoint) as end:
        assert link.endpoint.startswith("tcp://127.0.0.1:")
        assert exchange(end, payload)[0] == payload
        link.delay(80.0)
        time.sleep(0.3)  # until it has been read
        received, seconds = exchange(end, b"late")
        assert received == b"late"
        assert seconds >= 0.080
        assert exchange(end, payload)[0] == payload
        end.shutdown(socket.SHUT_WR)
        assert far.ended.wait(10)  # the end of the stream passes too
        assert end.recv(1) == b""


def test_half_of_the_delay_in_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that stands still: nothing leaves before it is due, in order, also when the delay shrinks."""
    now = 100.0
    monkeypatch.setattr("dspark.link_delay.time.perf_counter", lambda: now)
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = Relay(("127.0.0.1", server.getsockname()[1]), delay_ms=20.0)
        near = socket.create_connection(("127.0.0.1", relay.port))
        relay.turn()
        far = server.accept()[0]
        far.setblocking(False)
        near.sendall(b"a")
        monkeypatch.setattr("dspark.link_delay.select.select", _at_once(len(relay._lanes)))
        _turn_until(relay, lambda: len(relay._lanes[0].chunks) == 1)
        assert relay._lanes[0].chunks[0] == (pytest.approx(100.010), b"a")
        relay.delay_ms = 0.0
        near.sendall(b"b")
        _turn_until(relay, lambda: len(relay._lanes[0].chunks) == 2)
        assert [due for due, _ in relay._lanes[0].chunks] == pytest.approx([100.010, 100.010])
        with pytest.raises(BlockingIOError):
            far.recv(1)
        now = 100.0101
        relay.turn()
        far.setblocking(True)
        far.settimeout(10)
        assert _read(far, 2) == b"ab"
        for one in (near, far):
            one.close()
        _turn_until(relay, lambda: not relay._lanes)
        relay.close()


def _at_once(_lanes: int) -> object:
    """A select that waits a millisecond at most."""
    import select

    original = select.select
    return lambda r, w, x, wait: original(r, w, x, 0.001)


def _turn_until(relay: Relay, condition: object) -> None:
    for _ in range(5000):
        if condition():  # type: ignore[operator]
            return
        relay.turn()
    raise AssertionError("it never happened")


def _read(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += end.recv(size)
    return data


def test_a_far_end_that_is_not_there_is_a_closed_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with DelayedLink(f"tcp://127.0.0.1:{port}") as link, connect(link.endpoint) as end:
        assert end.recv(1) == b""
        with connect(link.endpoint) as again:  # the relay lives on
            assert again.recv(1) == b""


def test_the_relay_ends_with_its_starter() -> None:
    relay = subprocess.Popen(
        [sys.executable, "-m", "dspark.link_delay", "127.0.0.1:9"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert relay.stdout is not None
    assert relay.stdin is not None
    assert relay.stdout.readline().startswith(READY_PREFIX)
    relay.stdin.close()
    assert relay.wait(20) == 0
    relay.stdout.close()


def test_the_hop_is_measured() -> None:
    assert overlap_benchmark.relay_hop_us() > 0


def test_two_delays(tiny_pair: TinyPair, tiny_worker: LocalWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap_benchmark, "WARM_UPS", 1)
    machine = roles.Machine(str(tiny_pair.target), "cpu", "fp32", 1, 4, 256)
    log: list[str] = []
    options = OverlapOptions(delays_ms=(0.0, 5.0), concurrency=(1, 3), repetitions=1, max_tokens=10)
    engines = []

    def build(endpoint: str) -> roles.Spark:
        assert endpoint != tiny_worker.endpoint
        engines.append(roles.build_spark(machine, tiny_pair.speculative(), endpoint, 5000))
        return engines[0]

    result = overlap_benchmark.run(build, tiny_worker.endpoint, options, log.append)
    assert json.loads(overlap_benchmark.as_json(result)) == result
    places = [f"{delay}ms_n{n}" for delay in (0, 5) for n in (1, 3)]
    for place in places:
        rates = [result[f"tok_s_{name}_{place}"] for name in ARRANGEMENTS]
        assert all(rate > 0 for rate in rates)  # type: ignore[operator]
        assert result[f"groups_chosen_{place}"] in (1, 2)
        for name in ("2_groups", "auto"):
            low, high = result[f"speedup_range_{name}_{place}"]  # type: ignore[misc]
            assert low <= result[f"speedup_{name}_{place}"] <= high  # type: ignore[operator]
    assert {f"speedup_{name}_{delay}ms" for name in ("2_groups", "auto") for delay in (0, 5)} <= set(result)
    assert [line.partition(":")[0] for line in log] == [f"{delay} ms, {n} requests" for delay in (0, 5) for n in (1, 3)]
    table = overlap_benchmark.as_table(result).splitlines()
    assert [line.split()[:2] for line in table[-4:]] == [["0", "1"], ["0", "3"], ["5", "1"], ["5", "3"]]
    assert not engines[0].engine.alive


def test_ratios_are_taken_inside_a_repetition() -> None:
    cell = Cell(0.0, 4)
    cell.rates = {"1_group": [10.0, 20.0], "2_groups": [15.0, 20.0], "auto": [20.0, 10.0]}
    assert cell.ratios("2_groups") == [1.5, 1.0]
    assert statistics.median(cell.ratios("auto")) == 1.25
    assert Answers(2.0, [(1, 2, 3), (4, 5, 6)]).tok_s == 3.0


def test_another_text_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace
    from typing import Any, cast

    answers = iter([Answers(1.0, [(1, 2)]), Answers(1.0, [(1, 3)])])
    monkeypatch.setattr(overlap_benchmark, "_answer", lambda *_: next(answers))
    groups = SimpleNamespace(fixed=1, forget=lambda: None)
    spark = cast(Any, SimpleNamespace(engine=SimpleNamespace(groups=groups)))
    link = cast(Any, SimpleNamespace(delay=lambda ms: None))
    with pytest.raises(RuntimeError, match="another text"):
        overlap_benchmark._measure(spark, link, Cell(0.0, 1), OverlapOptions(), lambda text: None)
