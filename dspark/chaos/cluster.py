"""The processes of a run: workers, a proxy in front of each, and one endpoint that knows the proxies.

    client --> endpoint (dspark spark --workers-file F) --> proxy i --> worker i (dspark worker)

Invariants: everything listens on loopback; a worker that is started again has the same port, so the endpoint's address
for it, which is its proxy's, never changes; every process is ended by its own id, also after exceptions; the workers
file is replaced whole, never half written.

Called by `run`; `faults` hurts what is here.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dspark.chaos.endpoint_view import EndpointView
from dspark.chaos.pairs import Pair
from dspark.chaos.processes import Child
from dspark.chaos.proxy_handle import ProxyHandle
from dspark.errors import UserError
from dspark.launch import READY_PREFIX, free_port

UP_S = 90.0


@dataclass(eq=False)
class Link:
    """One worker and the proxy in front of it. `version`: which of the pair's drafters it serves."""

    number: int
    worker: Child
    proxy: ProxyHandle
    version: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def address(self) -> str:
        """The worker as the endpoint knows it."""
        return self.proxy.endpoint


@dataclass(eq=False)
class Cluster:
    """Everything that runs. `workers_file` is what the endpoint reads."""

    pair: Pair
    links: list[Link]
    endpoint: Child
    view: EndpointView
    workers_file: Path
    listed: set[int]
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def children(self) -> list[Child]:
        """All processes."""
        return [self.endpoint, *(link.worker for link in self.links), *(link.proxy.child for link in self.links)]

    def list_workers(self, numbers: set[int]) -> None:
        """Write the workers file with these links."""
        with self._writing:
            self.listed = set(numbers)
            _write_workers(self.workers_file, self.pair, [self.links[number] for number in sorted(numbers)])

    def list_worker(self, number: int, present: bool) -> None:
        """Add a link to the workers file, or take it out."""
        self.list_workers(self.listed | {number} if present else self.listed - {number})

    def use_version(self, link: Link, version: int) -> None:
        """What the link's worker will serve when it is started next, and what the workers file says of it."""
        link.version = version
        command = link.worker.command
        command[command.index("--drafter") + 1] = str(self.pair.drafters[version])

    def wait_up(self, timeout_s: float = UP_S) -> None:
        """Until every listed worker serves the endpoint. Raises UserError."""
        until = time.monotonic() + timeout_s
        while (states := [self.view.state(self.links[number].address) for number in self.listed]) != ["up"] * len(
            self.listed
        ):
            if time.monotonic() > until:
                raise UserError(f"the workers are {states} after {timeout_s:.0f} s, not all up: {self.view.workers()}")
            time.sleep(0.1)


def _write_workers(path: Path, pair: Pair, links: list[Link]) -> None:
    lines = [f"{link.address} {pair.drafters[link.version]}\n" for link in links]
    new = path.with_suffix(".new")
    new.write_text("".join(lines), "utf-8")
    os.replace(new, path)


@contextmanager
def running(
    pair: Pair, workers: int, slots: int, seed: int, report: Path, say: Callable[[str], None]
) -> Iterator[Cluster]:
    """All processes up, for the block's duration. `report`: directory for their logs. Raises UserError."""
    with ExitStack() as stack:
        links = []
        for number in range(workers):
            say(f"starting worker {number} and its proxy")
            links.append(_start_link(pair, number, slots, seed, report, stack))
        workers_file = report / "workers.txt"
        _write_workers(workers_file, pair, links)
        say("starting the endpoint")
        endpoint = _start_endpoint(pair, workers_file, slots, report, stack)
        for link in links:
            link.worker.wait_ready()
        url = endpoint.wait_ready().split()[0]
        cluster = Cluster(pair, links, endpoint, EndpointView(url), workers_file, set(range(workers)))
        cluster.wait_up()
        yield cluster


def _start_link(pair: Pair, number: int, slots: int, seed: int, report: Path, stack: ExitStack) -> Link:
    address = f"tcp://127.0.0.1:{free_port()}"
    worker = Child(
        f"worker {number}", _worker_command(pair, address, slots), READY_PREFIX, report / f"worker{number}.log"
    )
    stack.callback(worker.stop)
    worker.start()
    proxy = ProxyHandle(f"proxy {number}", address, seed + number, report / f"proxy{number}.log")
    stack.callback(proxy.child.stop)
    return Link(number, worker, proxy)


def _worker_command(pair: Pair, address: str, slots: int) -> list[str]:
    options: dict[str, object] = {
        "--listen": address,
        "--target": pair.target,
        "--drafter": pair.drafters[0],
        "--slots": slots,
        **_common(pair),
        "--parent-pid": os.getpid(),
    }
    return _command("worker", options)


def _start_endpoint(pair: Pair, workers_file: Path, slots: int, report: Path, stack: ExitStack) -> Child:
    options: dict[str, object] = {
        "--workers-file": workers_file,
        "--target": pair.target,
        "--port": 0,
        "--slots": slots,
        **_common(pair),
        "--draft-deadline-ms": pair.draft_deadline_ms,
        "--speculative-config": json.dumps({"method": "dspark", "model": str(pair.drafters[0])}),
    }
    endpoint = Child("endpoint", _command("spark", options), "ready: ", report / "endpoint.log")
    stack.callback(endpoint.stop)
    endpoint.start()
    return endpoint


def _common(pair: Pair) -> dict[str, object]:
    """One thread each: there are more processes than cores. fp32: the law of the tokens is computed in it."""
    return {"--dtype": "fp32", "--threads": 1, "--max-context": pair.context}


def _command(role: str, options: dict[str, object]) -> list[str]:
    return [sys.executable, "-m", "dspark.cli", role, *(str(part) for option in options.items() for part in option)]
