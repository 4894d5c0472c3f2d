"""The worker process: load the drafter, listen, turn the loop until told to stop.

SIGTERM drains (verifiers are told, running steps are answered) and ends; a second one ends at once. The loop sleeps in
the socket, so an idle worker costs nothing.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dspark.errors import UserError
from dspark.identity import compatibility
from dspark.models.drafter import DrafterCheckpoint
from dspark.models.source import load_embedding, open_target
from dspark_proto import HelloParameters, LocalProtocolError, WireVersion
from dspark_proto.auth import Authentication
from dspark_proto.limits import DEADLINE_MS_MAX, IN_FLIGHT_MIN
from dspark_proto.transports import Security, ServerTransport, TransportError, open_server
from dspark_workers.worker import Worker

IDLE_POLL_MS = 200
DRAIN_MS = 3000
"""How long verifiers have to finish rounds and move their leases; a worker without leases ends at once."""
MAX_SUPPORT = 256


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How to start a worker. `length` bounds a request's context in tokens; `slots` how many requests it serves;
    `copy` lets it continue what a text has said before. `security` protects the link; an address that other machines
    can reach needs a secret, CURVE keys or TLS certificates. `allow_v1` serves verifiers of wire version 1 too, which
    draft greedily and take tokens without rows.
    """

    endpoint: str
    target: str
    drafter: Path
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    slots: int = 16
    length: int = 2048
    threads: int = 2
    security: Security = field(default_factory=Security)
    parent_pid: int | None = None
    copy: bool = True
    allow_v1: bool = False


def build(settings: WorkerSettings) -> Worker:
    """Load the checkpoint and the target's embedding. Raises ModelConfigError before anything listens."""
    torch.set_num_threads(settings.threads)
    source = open_target(settings.target)
    checkpoint = DrafterCheckpoint(settings.drafter)
    checkpoint.config.check_target(source.config)
    versions = (WireVersion.V2_0, WireVersion.V1_0)
    parameters = HelloParameters(
        compatibility(source, source.tokenizer(), settings.drafter, checkpoint.config),
        epoch=secrets.randbits(64),
        max_slots=settings.slots,
        max_depth=checkpoint.config.block_size,
        max_support=MAX_SUPPORT,
        max_in_flight=max(IN_FLIGHT_MIN, settings.slots),
        dense_rows=True,
        # The verifier's deadline counts: a bound of ours would shorten it without anybody asking.
        step_deadline_ms=DEADLINE_MS_MAX,
        versions=versions if settings.allow_v1 else versions[:1],
        authentication=_authentication(settings),
    )
    length = min(settings.length, checkpoint.config.max_context)
    network = checkpoint.network(
        load_embedding(source), device=settings.device, dtype=settings.dtype, max_positions=length
    )
    return Worker(
        network, checkpoint.draft_ids, parameters, slots=settings.slots, length=length, copy=settings.copy
    )


def _authentication(settings: WorkerSettings) -> Authentication | None:
    try:
        return settings.security.authentication(settings.endpoint)
    except TransportError as error:
        raise UserError(f"--secret-file: {error}") from None


def serve(settings: WorkerSettings, on_ready: Callable[[str], None]) -> None:
    """Run until SIGTERM or SIGINT (or until the parent process, when given, is gone)."""
    worker = build(settings)
    stop = threading.Event()
    abort = threading.Event()

    def ask_to_stop(_number: int, _frame: object) -> None:
        (abort if stop.is_set() else stop).set()

    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGINT, ask_to_stop)
    server = _listen(settings)
    try:
        on_ready(server.endpoint)
        while not stop.is_set() and _parent_lives(settings.parent_pid):
            turn(worker, server, IDLE_POLL_MS)
        _drain(worker, server, abort)
    finally:
        server.close()


def _listen(settings: WorkerSettings) -> ServerTransport:
    try:
        return open_server(settings.endpoint, settings.security)
    except LocalProtocolError:
        remedy = "not a loopback address: give a --secret-file, --curve-* keys (tcp://) or --tls-* files (tls+tcp://)"
        raise UserError(f"--listen {settings.endpoint}: {remedy}") from None
    except TransportError as error:
        raise UserError(f"--listen {error}") from None


def turn(worker: Worker, server: ServerTransport, timeout_ms: int) -> None:
    """One turn: receive, extend, draft, reply; large replies leave while drafting goes on."""
    out_of_reach: set[bytes] = set()
    worker.receive(server.poll(timeout_ms), time.monotonic_ns())
    for _pause in worker.drafting():
        _send(worker, server, out_of_reach)
    worker.expire(time.monotonic_ns())
    _send(worker, server, out_of_reach)


def _send(worker: Worker, server: ServerTransport, out_of_reach: set[bytes]) -> None:
    """Send what the worker has. A peer that a send did not reach gets no more in this turn: nothing follows a gap.

    Its replies are kept whole by the connection, for the STEP to be repeated.
    """
    for peer, frames in worker.outbox():
        if peer in out_of_reach or not server.send(peer, frames):
            worker.counters.unsent_messages += 1
            out_of_reach.add(peer)


def _drain(worker: Worker, server: ServerTransport, abort: threading.Event) -> None:
    worker.drain(DRAIN_MS)
    until = time.monotonic() + DRAIN_MS / 1000
    turn(worker, server, 0)
    while time.monotonic() < until and not abort.is_set() and any(p.leases for p in worker.peers.values()):
        turn(worker, server, 20)


def _parent_lives(pid: int | None) -> bool:
    """A worker started by `dspark serve` must not outlive it, even after SIGKILL."""
    return pid is None or os.getppid() == pid
