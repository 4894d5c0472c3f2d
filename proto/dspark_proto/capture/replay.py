"""Replays the verifier's side of a capture, and compares what comes back with what came back then.

The verifier's frames name only its own epoch, so they can be sent again as they are: to an address, or to this
package's own drafter connection, which then gives the captured proposals (``OwnDrafter``). Invariants: a frame is sent
when the capture has seen all answers that precede it, or when they did not come in time; a STEP that repeats earlier
bytes must get the bytes of the first reply again (REQ-STP-7), whatever the capture holds; all else is compared as
``answers`` says. Called by the command line and by tests; draws no random number.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from ..hello import Hello
from ..messages import Step
from ..prefix import Key
from ..transports.base import ClientTransport
from .answers import Answer, AnswerBuilder, Difference, compare
from .checks import examine
from .records import Direction, Entry, EntryKind

_POLL_MS: Final = 10
_LINGER_MS: Final = 50
Identity = tuple[str, Key, int]


class Target(Protocol):
    """A drafter that is replayed against."""

    def send(self, frame: bytes) -> None:
        """Give it one frame."""

    def receive(self, timeout_ms: int) -> list[bytes]:
        """What it has sent, waiting up to ``timeout_ms`` for the first frame."""


class LiveDrafter:
    """A drafter behind a transport. ``connect_ms`` bounds the wait for its connection."""

    def __init__(self, client: ClientTransport, connect_ms: int = 5000) -> None:
        self._client, self._connect_ms = client, connect_ms

    def send(self, frame: bytes) -> None:
        """Send ``frame``. Raises ``ConnectionError`` when nobody takes it in time."""
        if not self._client.send([frame], self._connect_ms):
            raise ConnectionError("no drafter took the frame in time")

    def receive(self, timeout_ms: int) -> list[bytes]:
        """What has arrived."""
        return [bytes(frame) for frame in self._client.poll(timeout_ms)]


@dataclass(slots=True)
class Report:
    """Outcome of a replay: frames sent, answers found byte-identical, equal in all that is fixed, and differences."""

    sent: int = 0
    identical: int = 0
    equivalent: int = 0
    retries: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def faults(self) -> list[Difference]:
        """Differences that break a requirement."""
        return [one for one in self.differences if one.is_fault]


def replay(entries: Iterable[Entry], target: Target, timeout_ms: int = 2000, same_rows: bool = False) -> Report:
    """Replay the verifier's frames among ``entries``, of one connection, against ``target``."""
    run = _Run(target, timeout_ms, same_rows)
    captured = AnswerBuilder()
    for entry in entries:
        if entry.kind is not EntryKind.FRAME:
            continue
        if entry.direction is Direction.UP:
            run.send(entry.content)
        elif (answer := captured.take(entry.content)) is not None:
            run.expect(answer)
    run.finish()
    return run.report


def connection_entries(entries: Sequence[Entry], connection: int | None = None) -> list[Entry]:
    """The entries of one connection: ``connection``, or that of the first frame."""
    frames = [entry for entry in entries if entry.kind is EntryKind.FRAME]
    chosen = frames[0].connection if connection is None and frames else connection
    return [entry for entry in entries if entry.connection == chosen]


class _Run:
    """One replay: what was sent, what was answered, what is still unmatched."""

    def __init__(self, target: Target, timeout_ms: int, same_rows: bool) -> None:
        self._target, self._timeout_ms, self._same_rows = target, timeout_ms, same_rows
        self._builder = AnswerBuilder()
        self._unmatched: dict[Identity, list[Answer]] = defaultdict(list)
        self._first_replies: dict[Key, Answer] = {}
        self._steps: Counter[bytes] = Counter()
        self._retried: Counter[Key] = Counter()
        self.report = Report()

    def send(self, frame: bytes) -> None:
        """Send one of the verifier's frames and take what has come meanwhile."""
        self._note_retry(frame)
        self._target.send(frame)
        self.report.sent += 1
        self._collect(0)

    def _note_retry(self, frame: bytes) -> None:
        message = examine(frame).message
        if isinstance(message, Hello):
            self._first_replies.clear()
            self._steps.clear()
        elif isinstance(message, Step):
            if self._steps[frame]:
                self._retried.update(Key(item.slot, item.generation, item.round) for item in message.items)
            self._steps[frame] += 1

    def expect(self, expected: Answer) -> None:
        """Wait for the answer of this identity and compare it."""
        waiting = self._unmatched[expected.identity]
        until = time.monotonic() + self._timeout_ms / 1000
        while not waiting and time.monotonic() < until:
            self._collect(_POLL_MS)
        if not waiting:
            self._differ(Difference(str(expected), "did not come", "REQ-LIF-1"))
            return
        found = waiting.pop(0)
        differences = list(compare(expected, found, self._same_rows))
        self.report.differences += differences
        if expected.frames == found.frames:
            self.report.identical += 1
        elif not any(one.is_fault for one in differences):
            self.report.equivalent += 1

    def finish(self) -> None:
        """Take stragglers; an answer that the capture does not have is a difference, a refusal is a fault."""
        self._collect(_LINGER_MS)
        for answers in self._unmatched.values():
            for answer in answers:
                self._differ(Difference(str(answer), "is not in the capture", _unasked(answer)))

    def _collect(self, timeout_ms: int) -> None:
        for frame in self._target.receive(timeout_ms):
            answer = self._builder.take(frame)
            if answer is not None:
                self._unmatched[answer.identity].append(answer)
                self._check_retry(answer)

    def _check_retry(self, answer: Answer) -> None:
        """A reply to a repeated STEP is the first reply again, byte for byte."""
        if answer.name != "reply":
            return
        first = self._first_replies.setdefault(answer.key, answer)
        if first is not answer and self._retried[answer.key]:
            self.report.retries += 1
            if first.frames != answer.frames:
                self._differ(Difference(str(answer), "the retry got other bytes", "REQ-STP-7"))

    def _differ(self, difference: Difference) -> None:
        self.report.differences.append(difference)


def _unasked(answer: Answer) -> str:
    return "REQ-ERR-2" if answer.name in ("ERROR", "REJECT") else ""
