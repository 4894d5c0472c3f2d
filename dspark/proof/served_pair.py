"""A tiny pair that really serves: worker process, wire, engine and HTTP endpoint, for the length of a ``with`` block.

Purpose: the real path of Tiers 2 and 3. Part of the composition root: the roles are imported when a pair is served,
not before, and this module and its callers are the only ones in ``dspark.proof`` that know them.

Invariants: loopback only; the worker is a child of this process and ended by its own process id; the endpoint and the
engine end with the block; nothing is left in the file system.

Called by ``tier2`` and ``tier3``.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from dspark import launch, roles
from dspark.proof.observer import Observer

if TYPE_CHECKING:
    from dspark_spark.build import Spark

PROMPT = (3, 14, 15, 92, 65, 35)
SLOTS, CONTEXT, CLIENTS = 8, 256, 8
WAIT_S = 90.0
_LOCAL = "127.0.0.1"


class ServingError(RuntimeError):
    """The real path did not come up, or did not answer."""


@dataclass(frozen=True)
class Pair:
    """Directories of a target and of a drafter that fits it."""

    target: Path
    drafter: Path


@contextmanager
def tiny_pair() -> Iterator[Pair]:
    """A pair of random weights (the same in every run), in a directory of its own."""
    from dspark.proof.tiny_pair import write_drafter, write_target

    with tempfile.TemporaryDirectory(prefix="dspark-prove-") as name:
        target = write_target(Path(name) / "target", scale=0.04)
        yield Pair(target, write_drafter(Path(name) / "drafter", target))


@contextmanager
def worker_process(pair: Pair) -> Iterator[launch.LocalWorker]:
    """A drafter worker that is started again when it dies."""
    options = {"target": pair.target, "drafter": pair.drafter, "dtype": "fp32", "threads": 1, "slots": SLOTS}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    worker = launch.LocalWorker(arguments, restart=True, log=lambda line: None)
    worker.start()
    try:
        worker.wait_ready()
        yield worker
    finally:
        worker.stop()


@dataclass
class Served:
    """A running endpoint with its engine, worker and observer."""

    pair: Pair
    spark: Spark
    worker: launch.LocalWorker
    port: int
    observer: Observer
    _clients: threading.local = field(default_factory=threading.local)

    def complete(self, **fields: object) -> dict[str, Any]:
        """Answer of POST /v1/completions: token ids, and which of them were drafts, under ``dspark`` of the choice."""
        body = {"prompt": list(PROMPT), "ignore_eos": True, "dspark_token_origins": True, **fields}
        connection = self._connection()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
        if response.status != 200:
            raise ServingError(f"HTTP {response.status}: {answer}")
        return answer

    def tokens(self, **fields: object) -> tuple[int, ...]:
        """Token ids of one completion."""
        return tuple(self.complete(**fields)["choices"][0]["dspark"]["token_ids"])

    def many(self, seeds: Sequence[int], **fields: object) -> list[tuple[int, ...]]:
        """Completions of many seeds, ``CLIENTS`` at once."""
        return self.each([{"seed": seed, **fields} for seed in seeds])

    def each(self, bodies: Sequence[Mapping[str, object]]) -> list[tuple[int, ...]]:
        """Completions of many requests, ``CLIENTS`` at once, in their order."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            return list(pool.map(lambda body: self.tokens(**body), bodies))

    def many_in_lane(self, lane: str, seeds: Sequence[int], length: int, top_k: int) -> list[tuple[int, ...]]:
        """The same through the engine alone: the endpoint has no field for the lane."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            return list(pool.map(lambda seed: self._in_lane(lane, seed, length, top_k), seeds))

    def _in_lane(self, lane: str, seed: int, length: int, top_k: int) -> tuple[int, ...]:
        from dspark_spark.api import FINISH_LENGTH, Delta, GenerateRequest, SamplingParams

        deltas: queue.Queue[Delta] = queue.Queue()
        params = SamplingParams(temperature=1.0, top_k=top_k, seed=seed, max_tokens=length, ignore_eos=True)
        name = f"{lane}-{seed}-{time.monotonic_ns()}-{threading.get_ident()}"
        self.spark.engine.submit(GenerateRequest(name, PROMPT, params, lane=lane), deltas.put)
        ids: list[int] = []
        while True:
            delta = deltas.get(timeout=WAIT_S)
            ids += delta.token_ids
            if delta.finish_reason is not None:
                if delta.finish_reason != FINISH_LENGTH:
                    raise ServingError(f"a request of the {lane} lane ended with {delta.finish_reason}: {delta.error}")
                return tuple(ids)

    def _connection(self) -> http.client.HTTPConnection:
        if not hasattr(self._clients, "connection"):
            self._clients.connection = http.client.HTTPConnection(_LOCAL, self.port, timeout=WAIT_S)
        connection: http.client.HTTPConnection = self._clients.connection
        return connection

    def count(self, name: str, **labels: str) -> float:
        """Sum of a series of the engine's metrics over the labels that are not given."""
        lines = self.spark.metrics.render().decode().splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = (line.rpartition(" ") for line in lines if line.partition("{")[0].partition(" ")[0] == f"dspark:{name}")
        return sum(float(value) for series, _, value in found if all(label in series for label in wanted))

    @contextmanager
    def block_rule(self) -> Iterator[None]:
        """Proposals of the ratio lane are judged as blocks. For an engine at rest."""
        engine = self.spark.engine
        drafter = engine.drafter
        assert drafter is not None
        engine.drafter = replace(drafter, rejection_sample_method="block")
        try:
            yield
        finally:
            engine.drafter = drafter

    def wait_up(self) -> None:
        """Until drafts can come. Raises ServingError after ``WAIT_S`` seconds."""
        until = time.monotonic() + WAIT_S
        while not self.link_up:
            if time.monotonic() > until:
                raise ServingError("the worker did not come back")
            time.sleep(0.05)

    @property
    def link_up(self) -> bool:
        return self.spark.engine.link is not None and self.spark.engine.link.up

    def kill_worker(self) -> None:
        """SIGKILL to the worker, by its process id. Its supervisor starts another one."""
        os.kill(self.worker.pid, signal.SIGKILL)

    @contextmanager
    def stutter(self, running_s: float, stopped_s: float) -> Iterator[None]:
        """Stop and continue the worker's process all the time, so that it misses deadlines."""
        done = threading.Event()

        def alternate() -> None:
            while not done.wait(running_s):
                pid = self.worker.pid
                try:
                    os.kill(pid, signal.SIGSTOP)
                    done.wait(stopped_s)
                finally:
                    os.kill(pid, signal.SIGCONT)

        thread = threading.Thread(target=alternate, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


@contextmanager
def serve(
    pair: Pair, worker: launch.LocalWorker, observer: Observer, *, deadline_ms: int, **speculative: object
) -> Iterator[Served]:
    """Engine and endpoint of this process, with the observer between engine and verification.

    speculative: fields of the speculative configuration, e.g. ``draft_temperature``. Proposals are judged token by
    token, unless it says otherwise or inside ``Served.block_rule``.
    """
    usual = {"method": "dspark", "model": str(pair.drafter), "rejection_sample_method": "standard"}
    config = json.dumps({**usual, **speculative})
    machine = roles.Machine(str(pair.target), "cpu", "fp32", 1, SLOTS, CONTEXT)
    with ExitStack() as stack:
        spark = roles.build_spark(machine, config, worker.endpoint, deadline_ms)
        stack.enter_context(_observed(observer))
        stack.callback(spark.engine.stop)
        spark.engine.start()
        served = Served(pair, spark, worker, stack.enter_context(_endpoint(spark)), observer)
        served.wait_up()
        yield served


def _observed(observer: Observer) -> Any:
    from dspark_spark import acceptance

    replaced: dict[str, Any] = {
        "verify_ratio": observer.verify_ratio,
        "verify_block": observer.verify_block,
        "verify_match": observer.verify_match,
        "sample_target_only": observer.sample_target_only,
    }
    return mock.patch.multiple(acceptance, **replaced)


@contextmanager
def _endpoint(spark: Spark) -> Iterator[int]:
    """The HTTP endpoint in a thread; its port."""
    from dspark_spark.async_engine import EngineBridge
    from dspark_spark.http import EndpointSettings, build_app, make_server

    ports: queue.Queue[int] = queue.Queue()
    bridge = EngineBridge(spark.engine, spark.model_name, spark.facts)
    app = build_app(bridge, spark.tokenizer, spark.metrics, EndpointSettings())
    server = make_server(app, _LOCAL, 0, on_listening=ports.put)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield ports.get(timeout=WAIT_S)
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
