"""The other ends of `dspark bench wire`, each in a process of its own: a stub drafter, and a plain socket.

The stub answers every STEP through `DrafterConnection` with rows that were prepared before, so that what it costs is
the wire and not a model. The plain end receives as many bytes as a STEP frame has and sends as many as its replies
have, and nothing else. Both run on other cores than the verifier, for they stand for another machine: where the system
puts both ends of a socket on one core, as it sometimes does, they share its caches and need no wake-up across cores.
Called by `wire_benchmark`; both end when their parent does.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from dspark_proto import (
    Buffer,
    Compatibility,
    DrafterConnection,
    Dtype,
    HelloParameters,
    HelloReceived,
    StepArrived,
    StepItem,
)
from dspark_proto.memory import aligned_memory
from dspark_proto.placement import Place
from dspark_proto.transports import ServerTransport, open_server
from dspark_proto.transports.base import LARGE_SEND_BYTES, PeerFrame

DEPTH = 5
TAP_LAYERS = (10, 21, 32)
TAP_WIDTH = 4096
TOKEN = 7
"""Every drafted token; all mass of every row is on it."""

SIZES = struct.Struct("<QQ")
"""Bytes up and bytes down: what a plain connection says first."""

_POLL_MS = 200
_START_S = 60


def split_cores() -> tuple[list[int], list[int]]:
    """This thread's cores for the verifier and for the other ends; both empty where they cannot be kept apart."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    half = len(cores) // 2
    return (cores[:half], cores[half:]) if half else ([], [])


@contextmanager
def bound_to(cores: list[int]) -> Iterator[None]:
    """Keep this thread, and what it starts, on `cores`, if there are any."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def memory_of(length_bytes: int) -> memoryview:
    """Memory of a plain end: aligned like that of frames, and written, like the rows of the stub."""
    found = aligned_memory(length_bytes)
    found[:] = b"\x5a" * length_bytes
    return found


@dataclass(frozen=True, slots=True)
class Layout:
    """What rows a reply has: `support` entries each; 0 is every value of the vocabulary."""

    name: str
    support: int
    vocab_size: int

    def parameters(self, epoch: int, slots: int) -> HelloParameters:
        """Either side's HELLO."""
        digest = bytes(32)
        compatibility = Compatibility(
            self.vocab_size, digest, "draft", "target", digest, TAP_LAYERS, Dtype.BF16, TAP_WIDTH
        )
        return HelloParameters(
            compatibility,
            epoch,
            max_slots=slots,
            max_depth=DEPTH,
            max_support=self.support or 1,
            max_in_flight=max(2, slots),
            step_deadline_ms=60_000,
            heartbeat_ms=60_000,
            dense_rows=not self.support,
        )

    def rows(self) -> dict[str, Any]:
        """Arguments of `DrafterConnection.reply`."""
        # Written, not only reserved: pages that nobody wrote are all the same one, which is always in the cache.
        q = np.full((DEPTH, self.support or self.vocab_size), 0.0, np.float32)
        ids = np.zeros((DEPTH, self.support), np.int32)
        if self.support:
            ids[:, 0], q[:, 0] = TOKEN, 1.0
        else:
            q[:, TOKEN] = 1.0
        entries = [1 if self.support else self.vocab_size] * DEPTH
        return {
            "tokens": [TOKEN] * DEPTH,
            "entries": entries,
            "ids": ids.data.cast("B") if self.support else b"",
            "q": q.data.cast("B"),
        }


class StubDrafter:
    """Answers every verifier's STEPs. `draft_us` of a reply is the time that the stub took for the STEP before."""

    def __init__(self, layout: Layout, slots: int) -> None:
        self._parameters = layout.parameters(epoch=os.getpid(), slots=slots)
        self._rows: dict[str, Any] = layout.rows()
        self._peers: dict[bytes, DrafterConnection] = {}
        self._took_us = 0

    def turn(self, server: ServerTransport) -> None:
        """Answer what has arrived."""
        arrivals = server.poll(_POLL_MS)
        if not arrivals:
            return
        began = time.perf_counter_ns()
        for arrived in arrivals:
            drafter = self._peers.get(arrived.peer)
            if drafter is None:
                drafter = self._peers[arrived.peer] = DrafterConnection(self._parameters)
            now_ns = time.monotonic_ns()
            for event in drafter.receive(arrived.frame, now_ns):
                if isinstance(event, StepArrived):
                    self._reply(server, arrived.peer, drafter, event.items)
                elif isinstance(event, HelloReceived):
                    server.send(arrived.peer, [drafter.accept(now_ns)])
            server.send(arrived.peer, drafter.frames_to_send())
        self._took_us = (time.perf_counter_ns() - began) // 1000

    def _reply(
        self, server: ServerTransport, peer: bytes, drafter: DrafterConnection, items: tuple[StepItem, ...]
    ) -> None:
        """Answer all items of a STEP in one send, and large replies while they are made, as the worker does."""
        frames: list[Buffer] = []
        waiting_bytes = 0
        for item in items:
            is_large = False
            for frame in drafter.stream_reply(item, **self._rows, draft_us=self._took_us):
                frames.append(frame)
                waiting_bytes += len(frame)
                is_large = is_large or waiting_bytes >= LARGE_SEND_BYTES
                if is_large:
                    self._send(server, peer, frames)
                    frames, waiting_bytes = [], 0
        self._send(server, peer, frames)

    @staticmethod
    def _send(server: ServerTransport, peer: bytes, frames: list[Buffer]) -> None:
        while not server.send(peer, frames, _POLL_MS):
            server.poll(0)


class MemoryServer:
    """The worker's end of a link without a socket; see `MemoryClient`. Implements `ServerTransport`."""

    endpoint = "memory"

    def __init__(self) -> None:
        self.up: list[Buffer] = []
        self.down: list[Buffer] = []

    def send(self, peer: bytes, frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        self.down += frames
        return True

    def poll(self, timeout_ms: int) -> list[PeerFrame]:
        arrived, self.up = self.up, []
        return [PeerFrame(b"verifier", memoryview(frame)) for frame in arrived]

    def close(self) -> None:
        """Nothing is held."""


class MemoryClient:
    """A link to a stub in this thread, which answers inside `poll`: what is left is the protocol's own work.

    Frames are not copied: each end is done with them before the other one writes there again. Implements
    `ClientTransport`.
    """

    place: Place | None = None

    def __init__(self, layout: Layout, slots: int) -> None:
        self._stub, self._server = StubDrafter(layout, slots), MemoryServer()

    def send(self, frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        self._server.up += frames
        return True

    def poll(self, timeout_ms: int) -> list[memoryview]:
        self._stub.turn(self._server)
        arrived, self._server.down = self._server.down, []
        return [memoryview(frame) for frame in arrived]

    def close(self) -> None:
        """Nothing is held."""


def _run_stub(layout: Layout, slots: int, scheme: str, cores: list[int], tell: Connection) -> None:
    _end_with_parent()
    with bound_to(cores):
        server = open_server(f"{scheme}://127.0.0.1:0")
        stub = StubDrafter(layout, slots)
        tell.send_bytes(server.endpoint.encode())
        while True:
            stub.turn(server)


def _run_plain(cores: list[int], tell: Connection) -> None:
    _end_with_parent()
    with bound_to(cores), socket.create_server(("127.0.0.1", 0)) as listener:
        tell.send_bytes(str(listener.getsockname()[1]).encode())
        while True:
            accepted, _ = listener.accept()
            threading.Thread(target=_ping_pong, args=(accepted,), daemon=True).start()


def _ping_pong(accepted: socket.socket) -> None:
    with accepted:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        up, down = SIZES.unpack(receive_exactly(accepted, memoryview(bytearray(SIZES.size))))
        request, reply = memory_of(up), memory_of(down)
        while receive_exactly(accepted, request):
            accepted.sendall(reply)


def receive_exactly(connected: socket.socket, buffer: memoryview) -> memoryview:
    """Fill `buffer`; empty at the end of the stream."""
    filled = 0
    while filled < len(buffer):
        count = connected.recv_into(buffer[filled:])
        if not count:
            return memoryview(b"")
        filled += count
    return buffer


def _end_with_parent() -> None:
    """A thread that ends this process when the benchmark is gone, however it went."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def stub_process(layout: Layout, slots: int, scheme: str, cores: list[int]) -> Iterator[str]:
    """A stub drafter in its own process, on `cores`; gives its endpoint."""
    yield from _process(_run_stub, layout, slots, scheme, cores)


@contextmanager
def plain_process(cores: list[int]) -> Iterator[int]:
    """A plain ping-pong end in its own process, on `cores`; gives its port."""
    for text in _process(_run_plain, cores):
        yield int(text)


def _process(run: Callable[..., None], *arguments: object) -> Iterator[str]:
    """Start `run` in a fresh interpreter and give the text that it tells first."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(*arguments, theirs), daemon=True)
    process.start()
    try:
        if not ours.poll(_START_S):
            raise TimeoutError(f"{run.__name__} did not start")
        yield ours.recv_bytes().decode()
    finally:
        process.kill()
        process.join()
