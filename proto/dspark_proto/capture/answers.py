"""What a drafter answered, put together from frames, and the comparison of two answers.

An answer is ACCEPT, REJECT, PONG, STATS, ERROR, or a reply: its ROWs, however they were cut, and the COMPLETION.
The comparison knows what SPEC.md fixes: echoes and sizes MUST be equal; epochs, times, load and text are the sender's
own; the content of rows depends on the model, and is reported apart. Invariants: frames that nobody asked for (credit,
PING, DRAIN) and unusable frames are no answers; nothing is repaired. Called by ``replay``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from ..hello import Accept, Reject
from ..messages import STATUS_OK, Completion, ErrorMessage, Message, Pong, Row, Stats
from ..prefix import Key
from ..registry import MessageType
from .anchors import ANCHORS
from .checks import Examination, examine

_ECHOED: Final[dict[type[Message], tuple[tuple[str, str], ...]]] = {
    Accept: (
        ("wire_version", "REQ-HEL-4"),
        ("compat_hash", "REQ-HEL-2"),
        ("verifier_epoch", "REQ-HEL-10"),
        ("serial", "REQ-HEL-10"),
        ("tap_row_bytes", "REQ-HEL-7"),
    ),
    Reject: (("verifier_epoch", "REQ-HEL-10"), ("serial", "REQ-HEL-10"), ("code", "REQ-HEL-3")),
    Pong: (("nonce", "REQ-PNG-1"),),
    Stats: (("is_report", "REQ-STA-1"),),
    Completion: (
        ("session", "REQ-CMP-1"),
        ("status", "REQ-CMP-4"),
        ("row_count", "REQ-CMP-1"),
        ("reply_bytes", "REQ-CMP-1"),
        ("anchor_position", "REQ-CMP-2"),
        ("context_version", "REQ-CMP-2"),
        ("prefix_digest", "REQ-CMP-2"),
    ),
}
"""Fields that the same request fixes, and the requirement that says so."""

_ROW_FIELDS: Final = ("session", "depth", "support", "representation")
_HELD: Final = ("slots_open", "rounds_unresolved", "credit_outstanding_rows")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. ``frames`` are the bytes, ``last`` the message that ends it, ``block`` the bodies of its ROWs."""

    name: str
    key: Key
    nonce: int
    frames: tuple[bytes, ...] = field(repr=False)
    last: Message
    rows: tuple[Row, ...] = ()
    bodies: tuple[tuple[bytes, ...], ...] = field(default=(), repr=False)

    @property
    def identity(self) -> tuple[str, Key, int]:
        """What the answer answers; a retry has the same identity again."""
        return self.name, self.key, self.nonce

    @property
    def content(self) -> tuple[bytes, ...]:
        """RECORDS, then IDS, then Q of the whole reply, wherever the ROWs were cut."""
        return tuple(b"".join(parts) for parts in zip(*self.bodies, strict=False))

    def __str__(self) -> str:
        if self.name != "reply":
            return self.name if not self.nonce else f"{self.name} with nonce {self.nonce}"
        return f"reply to slot {self.key.slot} generation {self.key.generation} round {self.key.round}"


class AnswerBuilder:
    """Turns the frames of one direction into answers."""

    def __init__(self) -> None:
        self._parts: dict[Key, list[tuple[bytes, Row, tuple[bytes, ...]]]] = {}

    def take(self, frame: bytes) -> Answer | None:
        """The answer that ``frame`` completes; None when it completes none."""
        found = examine(frame)
        message, prefix = found.message, found.prefix
        if found.fault is not None or message is None or prefix is None:
            return None
        if isinstance(message, Row):
            part = frame, message, tuple(bytes(body) for body in found.bodies)
            self._parts.setdefault(prefix.key, []).append(part)
            return None
        if isinstance(message, Completion):
            return self._reply(frame, prefix.key, message)
        return _single(frame, found)

    def _reply(self, frame: bytes, key: Key, completion: Completion) -> Answer:
        parts = self._parts.pop(key, [])
        frames = tuple(part for part, _, _ in parts)
        rows, bodies = tuple(row for _, row, _ in parts), tuple(body for _, _, body in parts)
        return Answer("reply", key, 0, (*frames, frame), completion, rows, bodies)


def _single(frame: bytes, found: Examination) -> Answer | None:
    message, prefix = found.message, found.prefix
    assert prefix is not None
    if isinstance(message, Pong) and message.nonce:
        return Answer("PONG", prefix.key, message.nonce, (frame,), message)
    if isinstance(message, Stats) and not message.is_report:
        return None
    if prefix.type in (MessageType.ACCEPT, MessageType.REJECT, MessageType.STATS, MessageType.ERROR):
        assert message is not None
        return Answer(prefix.type.name, prefix.key, 0, (frame,), message)
    return None


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not the same. ``anchor`` is empty where SPEC.md leaves the freedom."""

    answer: str
    what: str
    anchor: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether a requirement is broken."""
        return bool(self.anchor)

    def __str__(self) -> str:
        return f"{self.answer}: {self.what}" + (f" ({self.anchor})" if self.anchor else " (allowed)")


def compare(expected: Answer, found: Answer, same_rows: bool = False) -> Iterator[Difference]:
    """How ``found`` differs from ``expected``, of the same identity; nothing when the bytes are equal.

    With ``same_rows`` the content of the rows must be equal too: two drafters of one model, one seed and one precision.
    """
    if expected.frames == found.frames:
        return
    name = str(expected)
    for attribute, anchor in _ECHOED.get(type(expected.last), ()):
        before, after = getattr(expected.last, attribute), getattr(found.last, attribute, None)
        if before != after:
            yield Difference(name, f"{attribute} was {before!r}, is {after!r}", anchor)
    if isinstance(expected.last, ErrorMessage):
        yield from _compare_errors(name, expected.last, found.last)
    elif isinstance(expected.last, Stats):
        yield from _compare_stats(name, expected.last, found.last)
    elif isinstance(expected.last, Completion) and expected.last.status == STATUS_OK:
        yield from _compare_rows(name, expected, found, same_rows)


def _compare_errors(name: str, expected: ErrorMessage, found: Message) -> Iterator[Difference]:
    assert isinstance(found, ErrorMessage)
    if found.code is not expected.code:
        yield Difference(name, f"code was {expected.code.name}, is {found.code.name}", ANCHORS[expected.code][0])
    elif (found.scope, found.session) != (expected.scope, expected.session):
        yield Difference(name, "scope or session differ", "REQ-ERR-2")


def _compare_stats(name: str, expected: Stats, found: Message) -> Iterator[Difference]:
    for attribute in _HELD:
        before, after = getattr(expected, attribute), getattr(found, attribute)
        if before != after:
            yield Difference(name, f"{attribute} was {before}, is {after}", "" if before else "REQ-STA-1")


def _compare_rows(name: str, expected: Answer, found: Answer, same_rows: bool) -> Iterator[Difference]:
    shapes = [{tuple(getattr(row, one) for one in _ROW_FIELDS) for row in answer.rows} for answer in (expected, found)]
    if shapes[0] != shapes[1]:
        yield Difference(name, f"session, depth, support or representation: {shapes[0]}, now {shapes[1]}", "REQ-ROW-2")
    elif [len(part) for part in expected.content] != [len(part) for part in found.content]:
        yield Difference(name, "the bodies have other sizes", "REQ-ROW-2")
    elif expected.content != found.content:
        yield Difference(name, "other rows or tokens", "REQ-RNG-1" if same_rows else "")
