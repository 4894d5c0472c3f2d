"""The package's own drafter connection with the proposals of a capture: what a replay without a network runs against.

It has the captured drafter's epoch and terms, and answers each STEP with the rows that the capture holds for its key,
so that every answer can be the same bytes again. Invariants: rows are taken only from replies that a receiver would
have accepted in form; a STEP whose reply the capture lacks stays unanswered. Implements ``replay.Target``. Called by
the command line and by tests.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..buffers import Buffer
from ..drafter import DrafterConnection
from ..errors import RemoteProtocolError
from ..events import ContextArrived, HelloReceived, StepArrived
from ..hello import Accept, Hello
from ..limits import VOCAB_MAX
from ..messages import STATUS_OK, Completion, StepItem
from ..negotiation import HelloParameters, compatibility_of
from ..prefix import Key
from ..registry import Capability, ErrorCode, Representation, WireVersion
from ..rows import ENTRY_BYTES, ReplyLayout, check_reply, implied_entries
from .answers import Answer, AnswerBuilder
from .checks import examine
from .records import CaptureError, Direction, Entry, EntryKind


class OwnDrafter:
    """A :class:`DrafterConnection` that plays the drafter of ``entries`` (one connection of a capture).

    Raises :class:`CaptureError` when the capture has no HELLO with an ACCEPT.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        frames = [entry for entry in entries if entry.kind is EntryKind.FRAME]
        self._drafter = DrafterConnection(_parameters(frames))
        self._replies: dict[Key, Answer] = {}
        builder = AnswerBuilder()
        for entry in frames:
            answer = builder.take(entry.content) if entry.direction is Direction.DOWN else None
            if answer is not None and answer.name == "reply":
                self._replies.setdefault(answer.key, answer)
        self._outbox: list[bytes] = []
        self._now_ns = 0

    def send(self, frame: bytes) -> None:
        """Give the connection one frame and let it answer."""
        self._now_ns += 1
        answers: list[memoryview] = []
        for event in self._drafter.receive(frame, self._now_ns):
            if isinstance(event, HelloReceived):
                answers.append(self._drafter.reject() if event.code else self._drafter.accept(self._now_ns))
            elif isinstance(event, ContextArrived):
                self._drafter.context_consumed(event.rows)
            elif isinstance(event, StepArrived):
                for item in event.items:
                    answers += self._propose(item)
        self._outbox += [bytes(one) for one in (*answers, *self._drafter.frames_to_send())]

    def receive(self, timeout_ms: int) -> list[bytes]:
        """What it has answered; never waits."""
        frames, self._outbox = self._outbox, []
        return frames

    def _propose(self, item: StepItem) -> list[memoryview]:
        answer = self._replies.get(Key(item.slot, item.generation, item.round))
        if answer is None:
            return []
        completion = answer.last
        assert isinstance(completion, Completion)
        if completion.status != STATUS_OK:
            return self._drafter.fail(item, _failure(completion.status))
        layout = _layout(answer)
        if layout is None:
            return []
        try:
            found = check_reply(memoryview(b"".join(answer.content)), layout, VOCAB_MAX)
        except RemoteProtocolError:
            return []
        ids, q = _arrays(answer, layout, found.tokens)
        return self._drafter.reply(item, found.tokens, found.entries, ids, q, completion.draft_us, found.confidences)


def _arrays(answer: Answer, layout: ReplyLayout, tokens: tuple[int, ...]) -> tuple[Buffer, Buffer]:
    """ids and q of a captured reply; those of version 1 are implied."""
    if layout.tokens_only:
        return implied_entries(tokens)
    _, *ids, q = answer.content
    return b"".join(ids), q


def _failure(status: int) -> ErrorCode:
    return ErrorCode(status) if status in list(ErrorCode) else ErrorCode.DRAFT_FAILED


def _layout(answer: Answer) -> ReplyLayout | None:
    """Layout of a whole reply; None when its ROWs are not all there or do not fit each other."""
    if not answer.rows or not answer.content:
        return None
    depth, support = answer.rows[0].depth, answer.rows[0].support
    tokens_only = answer.rows[0].representation is Representation.TOKENS
    layout = ReplyLayout(depth, support, len(answer.content[-1]) // (ENTRY_BYTES * depth), tokens_only)
    sizes = [length for _, length in layout.spans(0, depth)]
    return layout if [len(part) for part in answer.content] == sizes else None


def _versions(accept: Accept) -> tuple[WireVersion, ...]:
    if accept.wire_version not in list(WireVersion):
        raise CaptureError(f"the capture is of wire version {accept.wire_version >> 8}.{accept.wire_version & 255}")
    return (WireVersion(accept.wire_version),)


def _parameters(frames: list[Entry]) -> HelloParameters:
    """The captured drafter's terms, from the first ACCEPT and the last HELLO before it."""
    hello: Hello | None = None
    for entry in frames:
        message = examine(entry.content).message
        if isinstance(message, Hello):
            hello = message
        elif isinstance(message, Accept) and hello is not None:
            return HelloParameters(
                compatibility_of(hello),
                message.epoch,
                message.max_slots,
                message.max_depth,
                message.max_support,
                message.max_in_flight,
                message.context_credit_rows,
                message.heartbeat_ms,
                message.step_deadline_ms,
                1 << (message.checksum_kind - 1),
                bool(message.capabilities & Capability.DENSE_ROWS.mask),
                _versions(message),
            )
    raise CaptureError("the capture has no HELLO that was accepted; it must be recorded from the start")
