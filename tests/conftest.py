"""Fixtures that more than one folder uses. Every server listens on loopback and is ended by its own process id."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dspark.launch import LocalWorker
from dspark.proof.tiny_pair import write_drafter, write_target

torch.set_num_threads(1)


@dataclass(frozen=True)
class TinyPair:
    """A random target directory and a drafter directory that fits it."""

    target: Path
    drafter: Path

    def speculative(self, depth: int | None = None, **fields: object) -> str:
        import json

        value: dict[str, object] = {"method": "dspark", "model": str(self.drafter), **fields}
        if depth is not None:
            value["num_speculative_tokens"] = depth
        return json.dumps(value)


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    root = tmp_path_factory.mktemp("tiny")
    target = write_target(root / "target", scale=0.04)
    return TinyPair(target, write_drafter(root / "drafter", target))


def worker_arguments(pair: TinyPair, **options: object) -> list[str]:
    values = {"target": pair.target, "drafter": pair.drafter, "dtype": "fp32", "threads": 1, "slots": 4, **options}
    return [text for name, value in values.items() for text in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="session")
def tiny_worker(tiny_pair: TinyPair) -> Iterator[LocalWorker]:
    """One worker process for every test that does not hurt it."""
    worker = LocalWorker(worker_arguments(tiny_pair), restart=False, log=lambda line: None)
    worker.start()
    worker.wait_ready()
    yield worker
    worker.stop()


@dataclass
class RunningEndpoint:
    """An endpoint served from this process, with its engine at hand."""

    url: str
    spark: object


@pytest.fixture(scope="module")
def tiny_endpoint(tiny_pair: TinyPair, tiny_worker: LocalWorker) -> Iterator[RunningEndpoint]:
    """Spark rank and endpoint in this process (so that tests may plant bugs), worker in its own."""
    yield from run_endpoint(tiny_pair, tiny_worker.endpoint, tiny_pair.speculative())


def run_endpoint(pair: TinyPair, worker: str | None, speculative: str) -> Iterator[RunningEndpoint]:
    from dspark import roles
    from dspark_spark.async_engine import EngineBridge
    from dspark_spark.http import EndpointSettings, build_app, make_server

    machine = roles.Machine(str(pair.target), "cpu", "fp32", 1, 4, 256)
    spark = roles.build_spark(machine, speculative, worker, 2000)
    bridge = EngineBridge(spark.engine, spark.model_name, spark.facts)
    listening = threading.Event()
    port: list[int] = []

    def on_listening(bound: int) -> None:
        port.append(bound)
        listening.set()

    app = build_app(bridge, spark.tokenizer, spark.metrics, EndpointSettings())
    server = make_server(app, "127.0.0.1", 0, on_listening=on_listening)
    spark.engine.start()
    if spark.engine.link is not None:
        assert spark.engine.link.wait_up(20), spark.engine.link.last_error
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert listening.wait(20)
    yield RunningEndpoint(f"http://127.0.0.1:{port[0]}", spark)
    server.should_exit = True
    thread.join(20)
    spark.engine.stop()
