"""A man in the middle: passes frames between verifiers and a drafter, records them, and does harm by rule.

Each verifier that speaks gets its own connection to the drafter, so that routing ids stay apart. Invariants: without
rules every frame is delivered unchanged and in order; a delay holds up the frames behind it, only ``reorder`` changes
their order; at most one rule is applied to a frame, the first that chooses it; every injected fault is counted, logged
and noted in the capture with what was changed; queues and the number of connections are bounded; nothing is decoded
beyond what ``checks`` decodes. One thread owns it. Called by the command line and by tests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from ..transports.base import ClientTransport, ServerTransport
from .checks import examine
from .faults import Outcome, Rule, apply, subject
from .records import Direction, TransportKind
from .writer import CaptureWriter

LANE_FRAMES_MAX: Final = 1024
CONNECTIONS_MAX: Final = 256
UNDELIVERABLE_AFTER_NS: Final = 2_000_000_000
HELD_BACK_NS: Final = 50_000_000
"""A held back frame goes on after this time even when nothing overtook it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One injected fault."""

    number: int
    direction: Direction
    connection: int
    rule: str
    subject: str
    what: str

    def __str__(self) -> str:
        way = self.direction.name.lower()
        return f"fault {self.number}: {self.rule} {way} connection {self.connection}: {self.subject}: {self.what}"


@dataclass(slots=True)
class _Waiting:
    frame: bytes
    due_ns: int
    behind: int = 0


@dataclass(slots=True)
class _Lane:
    """One direction of one connection: what waits to be delivered, and what is held back."""

    queue: deque[_Waiting] = field(default_factory=deque)
    aside: list[_Waiting] = field(default_factory=list)


@dataclass(slots=True)
class _Connection:
    number: int
    peer: bytes
    client: ClientTransport
    lanes: dict[Direction, _Lane] = field(default_factory=lambda: {way: _Lane() for way in Direction})


class Middle:
    """Listens on ``server`` and calls ``connect`` for the drafter's side of every new verifier.

    ``faults`` counts what was injected; ``passed`` and ``undeliverable`` count frames. ``log`` gets a
    :class:`Fault` as it happens.
    """

    def __init__(
        self,
        server: ServerTransport,
        connect: Callable[[], ClientTransport],
        rules: Sequence[Rule] = (),
        seed: int = 0,
        writer: CaptureWriter | None = None,
        transport: TransportKind = TransportKind.ZMQ,
        log: Callable[[Fault], None] = lambda fault: None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._server, self._connect = server, connect
        self._rules, self._random = tuple(rules), Random(seed)
        self._writer, self._transport = writer, transport
        self._log, self._clock = log, clock
        self._connections: dict[bytes, _Connection] = {}
        self.faults = self.passed = self.undeliverable = 0

    @property
    def endpoint(self) -> str:
        """Where verifiers connect to."""
        return self._server.endpoint

    def turn(self, timeout_ms: int = 1) -> None:
        """Take what has arrived on both sides, waiting up to ``timeout_ms`` for a verifier, and deliver."""
        for arrived in self._server.poll(timeout_ms):
            connection = self._connection(arrived.peer)
            if connection is None:
                self.undeliverable += 1
            else:
                self._take(connection, Direction.UP, bytes(arrived.frame))
        for connection in self._connections.values():
            for frame in connection.client.poll(0):
                self._take(connection, Direction.DOWN, bytes(frame))
            for direction in Direction:
                self._deliver(connection, direction)

    def close(self) -> None:
        """Close every connection and the listening side."""
        for connection in self._connections.values():
            connection.client.close()
        self._connections.clear()
        self._server.close()

    def _connection(self, peer: bytes) -> _Connection | None:
        known = self._connections.get(peer)
        if known is None and len(self._connections) < CONNECTIONS_MAX:
            known = _Connection(len(self._connections), peer, self._connect())
            self._connections[peer] = known
        return known

    def _take(self, connection: _Connection, direction: Direction, frame: bytes) -> None:
        outcome = self._harm(connection, direction, frame)
        lane = connection.lanes[direction]
        due_ns = self._clock() + outcome.delay_ns
        for one in outcome.frames:
            if len(lane.queue) + len(lane.aside) >= LANE_FRAMES_MAX:
                self.undeliverable += 1
            elif outcome.behind:
                lane.aside.append(_Waiting(one, due_ns + HELD_BACK_NS, outcome.behind))
            else:
                lane.queue.append(_Waiting(one, due_ns))

    def _harm(self, connection: _Connection, direction: Direction, frame: bytes) -> Outcome:
        found = examine(frame)
        for rule in self._rules:
            if not rule.chooses(found, direction, connection.number, self._random):
                continue
            outcome = apply(rule, frame, found, self._random)
            if outcome is not None:
                self.faults += 1
                self._report(
                    Fault(self.faults, direction, connection.number, rule.action.value, subject(found), outcome.what)
                )
                return outcome
        return Outcome((frame,))

    def _report(self, fault: Fault) -> None:
        self._log(fault)
        if self._writer is not None:
            self._writer.note(fault.direction, self._transport, fault.connection, str(fault))

    def _deliver(self, connection: _Connection, direction: Direction) -> None:
        """Send what is due, in order; a frame that nobody takes is tried again, and given up in the end."""
        lane, now_ns = connection.lanes[direction], self._clock()
        self._release(lane, 0, now_ns)
        while lane.queue and lane.queue[0].due_ns <= now_ns:
            waiting = lane.queue[0]
            if not self._send(connection, direction, waiting.frame):
                if now_ns - waiting.due_ns < UNDELIVERABLE_AFTER_NS:
                    return
                self.undeliverable += 1
            lane.queue.popleft()
            self._release(lane, 1, now_ns)

    @staticmethod
    def _release(lane: _Lane, passed: int, now_ns: int) -> None:
        """Let go of held back frames that were overtaken often enough, or that waited long enough."""
        for waiting in reversed(list(lane.aside)):
            waiting.behind -= passed
            if waiting.behind <= 0 or waiting.due_ns <= now_ns:
                lane.aside.remove(waiting)
                lane.queue.appendleft(_Waiting(waiting.frame, now_ns))

    def _send(self, connection: _Connection, direction: Direction, frame: bytes) -> bool:
        if direction is Direction.UP:
            sent = connection.client.send([frame])
        else:
            sent = self._server.send(connection.peer, [frame])
        if sent:
            self.passed += 1
            if self._writer is not None:
                self._writer.frame(direction, self._transport, connection.number, frame)
        return sent
