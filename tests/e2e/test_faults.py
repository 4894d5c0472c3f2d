"""Real processes, real signals, the official client: a worker that dies, stalls or talks nonsense costs speed alone.

The engine runs in this process and is slowed down by `Pace`, so that faults land in the middle of a stream.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zmq
from openai import OpenAI

from dspark import roles
from dspark.launch import LocalWorker, stop_all
from dspark.proof.tiny_pair import write_drafter
from dspark_spark.build import Spark
from dspark_spark.engine import Engine
from tests.conftest import RunningEndpoint, TinyPair, run_endpoint, worker_arguments

PROMPT = [3, 14, 15, 92, 65, 35]
TOKENS = 240
DEADLINE_MS = 300
BUILD = roles.build_spark


@dataclass
class Pace:
    """Makes each turn of an engine take at least `seconds`."""

    engine: Engine
    seconds: float = 0.0

    def __post_init__(self) -> None:
        turn = self.engine.turn

        def paced() -> bool:
            time.sleep(self.seconds)
            return turn()

        self.engine.turn = paced  # type: ignore[method-assign]


@dataclass
class Stream:
    """A greedy stream of the official client, read in a thread; `arrivals` are the times of its chunks."""

    url: str
    prompt: list[int] = field(default_factory=lambda: PROMPT)
    ids: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    error: Exception | None = None

    def start(self) -> Stream:
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()
        return self

    def _read(self) -> None:
        client = OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=120, max_retries=0)
        extra = {"ignore_eos": True, "dspark_token_origins": True}
        try:
            for chunk in client.completions.create(
                model="target", prompt=self.prompt, max_tokens=TOKENS, temperature=0, stream=True, extra_body=extra
            ):
                origins: Any = (chunk.choices[0].model_extra or {}).get("dspark") if chunk.choices else None
                if origins:
                    self.ids += origins["token_ids"]
                    self.from_draft += origins["from_draft"]
                    self.arrivals.append(time.monotonic())
        except Exception as error:
            self.error = error

    def result(self) -> list[int]:
        self.thread.join(120)
        assert self.error is None, self.error
        assert not self.thread.is_alive()
        return self.ids


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.02)


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url + "/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return {n: float(v) for n, _, v in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


def total(url: str, name: str) -> float:
    return sum(v for n, v in metrics(url).items() if n.partition("{")[0] == f"dspark:{name}")


def process_state(pid: int) -> str:
    """Linux's letter for a process: T stopped, Z ended; '' when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def gone(pid: int) -> bool:
    return process_state(pid) in ("", "Z")


@pytest.fixture(scope="module")
def worker(tiny_pair: TinyPair) -> Iterator[LocalWorker]:
    """A worker for these tests alone, which is started again when it dies."""
    worker = LocalWorker(worker_arguments(tiny_pair), restart=True, log=lambda line: None)
    worker.start()
    worker.wait_ready()
    yield worker
    worker.stop()


@pytest.fixture(scope="module")
def endpoint(tiny_pair: TinyPair, worker: LocalWorker) -> Iterator[RunningEndpoint]:
    def build_hasty(machine: roles.Machine, speculative: str, worker: str | None, _deadline_ms: int) -> Spark:
        return BUILD(machine, speculative, worker, DEADLINE_MS)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roles, "build_spark", build_hasty)
        yield from run_endpoint(tiny_pair, worker.endpoint, tiny_pair.speculative())


@pytest.fixture(scope="module")
def pace(endpoint: RunningEndpoint) -> Pace:
    return Pace(endpoint.spark.engine)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def undisturbed(endpoint: RunningEndpoint, pace: Pace) -> list[int]:
    ids = Stream(endpoint.url).start().result()
    assert len(ids) == TOKENS
    return ids


def test_a_killed_worker_is_survived_and_its_successor_used_in_one_stream(
    endpoint: RunningEndpoint, worker: LocalWorker, pace: Pace, undisturbed: list[int]
) -> None:
    url, before = endpoint.url, metrics(endpoint.url)
    pace.seconds = 0.02
    stream = Stream(url).start()
    wait_until(lambda: sum(stream.from_draft) > 5)
    victim = worker.pid
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: gone(victim), 10)
    wait_until(lambda: metrics(url)["dspark:worker_up"] == 0, 10)
    pace.seconds = 0.3  # the new process needs seconds to load: the stream must still run then
    wait_until(lambda: metrics(url)["dspark:worker_up"] == 1)
    assert stream.thread.is_alive()
    resumed_at = len(stream.ids)
    pace.seconds = 0.0
    assert stream.result() == undisturbed
    assert sum(stream.from_draft[resumed_at:]) > 0
    assert (worker.restarts, worker.pid != victim) == (1, True)
    after = metrics(url)
    down = 'dspark:target_only_steps_total{reason="worker_down"}'
    assert after[down] > before.get(down, 0)
    assert after["dspark:worker_reconnects_total"] == before["dspark:worker_reconnects_total"] + 1
    discards = {n: v for n, v in after.items() if n.startswith("dspark:proposal_discards_total{") and v}
    assert sum(discards.values()) >= 1
    assert after["dspark:residual_identity_failures_total"] == 0


def test_a_stopped_worker_is_waited_for_no_longer_than_the_deadline(
    endpoint: RunningEndpoint, worker: LocalWorker, pace: Pace, undisturbed: list[int]
) -> None:
    url = endpoint.url
    wait_until(lambda: metrics(url)["dspark:worker_up"] == 1)
    late = 'dspark:proposal_discards_total{reason="late"}'
    before = metrics(url)
    pace.seconds = 0.02
    stream = Stream(url).start()
    wait_until(lambda: sum(stream.from_draft) > 5)
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: process_state(worker.pid) == "T", 5)
        stopped = time.monotonic()
        wait_until(lambda: metrics(url).get(late, 0) > before.get(late, 0), 10)
        pace.seconds = 0.1
        wait_until(lambda: metrics(url)["dspark:worker_up"] == 0, 20)  # three heartbeats without an answer
        assert stream.thread.is_alive()
    finally:
        os.kill(worker.pid, signal.SIGCONT)
    wait_until(lambda: metrics(url)["dspark:worker_up"] == 1, 20)
    resumed_at = len(stream.ids)
    pace.seconds = 0.0
    assert stream.result() == undisturbed
    assert sum(stream.from_draft[resumed_at:]) > 0
    during = [t for t in stream.arrivals if t > stopped]
    gaps = [b - a for a, b in pairwise(during)]
    assert max(gaps) < DEADLINE_MS / 1000 + 2.0  # the deadline, and a crowded machine
    timed_out = 'dspark:wire_drops_total{cause="step_timed_out"}'
    assert metrics(url)[timed_out] > before.get(timed_out, 0)
    assert total(url, "worker_reconnects_total") == before["dspark:worker_reconnects_total"] + 1


def test_nonsense_on_the_workers_port_harms_nobody(
    endpoint: RunningEndpoint, worker: LocalWorker, pace: Pace, undisturbed: list[int]
) -> None:
    wait_until(lambda: metrics(endpoint.url)["dspark:worker_up"] == 1)
    pid, reconnects = worker.pid, total(endpoint.url, "worker_reconnects_total")
    pace.seconds = 0.01
    stream = Stream(endpoint.url).start()
    host, port = worker.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 50)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 1000
        dealer.connect(worker.endpoint)
        for i in range(60):
            dealer.send_multipart([b"DSPK" + bytes([2, 0, i]) + os.urandom(90), b"", os.urandom(i)])
        dealer.send_multipart([b"x"] * 500)
    pace.seconds = 0.0
    assert stream.result() == undisturbed
    assert sum(stream.from_draft) > 0
    assert (worker.pid, gone(pid)) == (pid, False)
    assert total(endpoint.url, "worker_reconnects_total") == reconnects


# -- several workers -------------------------------------------------------------------------------------------


@dataclass
class Pool:
    """A rank that follows a workers file, and the processes that the file may name."""

    endpoint: RunningEndpoint
    pace: Pace
    file: Path
    workers: dict[str, LocalWorker]

    def version(self) -> dict[str, dict[str, Any]]:
        """What /version says of each worker, by address."""
        with urllib.request.urlopen(self.endpoint.url + "/version", timeout=10) as response:
            return {one["address"]: one for one in json.load(response)["engine"]["workers"]}

    def streams(self) -> list[Stream]:
        streams = [Stream(self.endpoint.url, [*PROMPT, i]).start() for i in range(4)]
        wait_until(lambda: all(sum(stream.from_draft) > 5 for stream in streams))
        return streams


@pytest.fixture(scope="module")
def pool(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    root = tmp_path_factory.mktemp("pool")
    second = TinyPair(tiny_pair.target, write_drafter(root / "v2", tiny_pair.target, seed=8))
    pairs = {"a": tiny_pair, "b": tiny_pair, "v2": second}
    workers = {name: LocalWorker(worker_arguments(pair), restart=False, log=lambda line: None)
               for name, pair in pairs.items()}  # fmt: skip
    file = root / "workers"
    file.write_text("".join(f"{workers[name].endpoint}\n" for name in "ab"))

    def build_pool(machine: roles.Machine, speculative: str, worker: str | None, _deadline_ms: int) -> Spark:
        return BUILD(machine, speculative, worker, 5000, workers_file=file)

    for worker in workers.values():
        worker.start()
    try:
        for worker in workers.values():
            worker.wait_ready()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(roles, "build_spark", build_pool)
            for endpoint in run_endpoint(tiny_pair, None, tiny_pair.speculative()):
                yield Pool(endpoint, Pace(endpoint.spark.engine), file, workers)  # type: ignore[attr-defined]
    finally:
        stop_all(list(workers.values()))


def test_a_rolling_swap_by_file_edit_and_a_killed_worker_are_noticed_by_no_stream(pool: Pool) -> None:
    """Four streams each time: undisturbed, over a swap of b for another checkpoint, and over a's death."""
    url, v2 = pool.endpoint.url, pool.workers["v2"].endpoint
    a, b = pool.workers["a"].endpoint, pool.workers["b"].endpoint
    wait_until(lambda: metrics(url)['dspark:pool_workers{state="up"}'] == 2)
    undisturbed = [stream.result() for stream in pool.streams()]
    watch = pool.endpoint.spark.watch  # type: ignore[attr-defined]
    watch.start()

    pool.pace.seconds = 0.05
    streams = pool.streams()
    shares = [one["leases"] for one in pool.version().values()]
    assert sum(shares) == 4
    assert min(shares) > 0  # equal shares are for a worker that is equally quick: under load one may be slower
    pool.file.write_text(f"{a}\n{v2} v2  # the new checkpoint\n")
    wait_until(lambda: set(pool.version()) == {a, v2} and pool.version()[v2]["state"] == "up")
    assert all(stream.thread.is_alive() for stream in streams)
    wait_until(lambda: sum(one["leases"] for one in pool.version().values()) == 4)
    marks = [len(stream.ids) for stream in streams]
    pool.pace.seconds = 0.0
    assert [stream.result() for stream in streams] == undisturbed
    assert all(sum(s.from_draft[mark:]) > 0 for s, mark in zip(streams, marks, strict=True))
    after = metrics(url)
    assert after['dspark:lease_takeovers_total{cause="draining"}'] == 2
    assert [name for name, count in after.items() if "proposal_discards" in name and count] == []

    pool.pace.seconds = 0.05
    streams = pool.streams()
    assert sorted(one["leases"] for one in pool.version().values()) == [2, 2]
    os.kill(pool.workers["a"].pid, signal.SIGKILL)
    wait_until(lambda: metrics(url)["dspark:request_respeculate_seconds_count"] == 2)
    assert {address: one["leases"] for address, one in pool.version().items()} == {a: 0, v2: 4}
    assert all(stream.thread.is_alive() for stream in streams)
    marks = [len(stream.ids) for stream in streams]
    pool.pace.seconds = 0.0
    assert [stream.result() for stream in streams] == undisturbed
    assert all(sum(s.from_draft[mark:]) > 0 for s, mark in zip(streams, marks, strict=True))
    after = metrics(url)
    assert after['dspark:lease_takeovers_total{cause="worker_down"}'] == 2
    print("seconds until two requests speculated again:", after["dspark:request_respeculate_seconds_sum"])
    assert b not in pool.version()
    watch.stop()


# -- `dspark serve` as a process -------------------------------------------------------------------------------


@dataclass
class Serve:
    """A `dspark serve` process, ready."""

    process: subprocess.Popen[str]
    ready: str
    lines: list[str]

    @property
    def url(self) -> str:
        return self.ready.split()[1]

    def workers(self) -> list[int]:
        pid = self.process.pid
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8")
        return [int(child) for child in text.split()]


def serve(pair: TinyPair, speculative: str, workers: int = 1) -> Serve:
    command = [sys.executable, "-m", "dspark.cli", "serve", "--port", "0", "--target", str(pair.target)]
    command += ["--speculative-config", speculative, "--dtype", "fp32", "--threads", "1", "--max-context", "256"]
    command += ["--workers", str(workers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("ready: "):
            # Somebody must keep reading, as a terminal would.
            threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True).start()
            return Serve(process, line, lines)
    raise AssertionError("".join(lines))


def end(running: Serve) -> None:
    if running.process.poll() is None:
        running.process.kill()
    running.process.wait(10)


def test_serve_says_how_to_use_it_and_sigterm_ends_it_with_its_workers(tiny_pair: TinyPair) -> None:
    running = serve(tiny_pair, tiny_pair.speculative(), workers=2)
    try:
        workers = running.workers()
        assert len(workers) == 2
        assert shutil.which("curl"), "the ready line is a curl command"
        _, _, command = running.ready.partition("try: ")
        shown = subprocess.run(["sh", "-c", command.replace("curl ", "curl -sS ", 1)], capture_output=True, text=True)
        assert shown.returncode == 0, shown.stderr
        assert "data: [DONE]" in shown.stdout
        client = OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        answer = client.completions.create(
            model="target", prompt="abc", temperature=0, max_tokens=60, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 60
        assert total(running.url, "spec_decode_num_accepted_tokens_total") > 0
        wait_until(lambda: metrics(running.url)['dspark:pool_workers{state="up"}'] == 2)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(30) == 0
        wait_until(lambda: all(gone(worker) for worker in workers), 5)
        assert "Traceback" not in "".join(running.lines)
    finally:
        end(running)


def test_a_killed_serve_does_not_leave_its_worker_behind(tiny_pair: TinyPair) -> None:
    running = serve(tiny_pair, tiny_pair.speculative())
    try:
        (worker,) = running.workers()
        assert not gone(worker)
        running.process.kill()
        assert running.process.wait(10) == -signal.SIGKILL
        wait_until(lambda: gone(worker), 10)
    finally:
        end(running)


def test_zero_speculative_tokens_start_no_worker_and_read_no_drafter(tiny_pair: TinyPair) -> None:
    running = serve(tiny_pair, '{"method": "dspark", "model": "/nonexistent", "num_speculative_tokens": 0}')
    try:
        assert running.workers() == []
        assert any("speculation is off" in line for line in running.lines)
        client = OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        answer = client.completions.create(
            model="target", prompt=PROMPT, temperature=0, max_tokens=9, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 9
        assert total(running.url, "spec_decode_num_draft_tokens_total") == 0
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(30) == 0
    finally:
        end(running)
