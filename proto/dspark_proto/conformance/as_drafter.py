"""The harness in the drafter's place: `VerifierUnderTest` is what a case for a verifier drives.

A `DrafterConnection` keeps the books: every frame of the testee goes through it, and whatever it refuses is the
testee's fault. Honest answers come from it as well; a case spoils them before they are sent. What the verifier made
of an answer shows in its next message for that slot: a commit, a STEP without one, or a new generation. Called by
the verifier families and by `runner`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from typing import Any

from ..buffers import Buffer
from ..drafter import DrafterConnection
from ..errors import ProtocolError
from ..events import (
    ContextArrived,
    DrafterEvent,
    HelloReceived,
    SlotCancelled,
    SlotClosed,
    SlotCommitted,
    SlotOpened,
    SlotReset,
    StepArrived,
)
from ..frame import Frame, decode_frame, encode_frame
from ..hello import Accept, Hello
from ..limits import NO_COMMIT
from ..messages import Completion, ErrorMessage, Message, Ping, Pong, Row, StepItem
from ..negotiation import HelloParameters, accept_message, common_version, compatibility_of, negotiate
from ..prefix import NO_KEY, Key
from ..registry import ErrorCode, MessageType, Scope, SupportPolicy, WireVersion
from .clock import NS_PER_MS, VirtualClock
from .drafted_rows import TOTAL, DraftedRow, pack
from .facts import Facts
from .links import Link
from .verdicts import Remarks, TimedOut, Unmet, Unsupported

_EPOCHS = count(0x99AABBCCDDEEFF00, 0x10000)
"""Each case is a drafter process of its own: a verifier may have had enough of the one before."""
FAST_MS = 300
REAL_MS = 2000
"""Step deadlines on virtual and on real time: soon, and not too soon for a busy machine."""
QUIET_MS = 100
"""After that long without a frame the verifier has said what it had to say."""
BESIDE_MS = 20
"""How far apart the STEPs of two slots come."""
_HELLO_MS = 15_000
_ATTEMPTS = 4
_TOLERATED = frozenset({ErrorCode.DUPLICATE, ErrorCode.HELLO_REQUIRED})
"""A verifier may retry; and what it sent before it heard of the restart is no fault."""


class Outcome(Enum):
    """What the verifier did with a round."""

    COMMITTED = "committed"
    PASSED_OVER = "passed over"
    NEW_GENERATION = "a new generation"
    CLOSED = "closed"
    LEFT = "a new connection"


@dataclass(frozen=True)
class HonestReply:
    """A right reply: one ROW and the COMPLETION, decoded and as bytes."""

    item: StepItem
    row: Row
    bodies: tuple[bytes, ...]
    completion: Completion
    frames: tuple[bytes, bytes]

    @property
    def key(self) -> Key:
        """Of the round."""
        return Key(self.item.slot, self.item.generation, self.item.round)

    def with_row(self, **changes: Any) -> bytes:
        """The ROW with some fields changed."""
        return bytes(encode_frame(replace(self.row, **changes), self.key, self.bodies))

    def with_completion(self, key: Key | None = None, **changes: Any) -> bytes:
        """The COMPLETION with some fields changed."""
        return bytes(encode_frame(replace(self.completion, **changes), key or self.key))


class VerifierUnderTest(Remarks):
    """See the module."""

    def __init__(self, link: Link, facts: Facts) -> None:
        self.link = link
        self.facts = facts
        self.step_ms = FAST_MS if isinstance(link.clock, VirtualClock) else REAL_MS
        self.epoch = next(_EPOCHS)
        self.left = False
        self.suits: Callable[[StepItem], bool] = lambda item: True
        self.hello: Hello | None = None
        self.hello_frame = b""
        self.grants_credit = True
        self.answers_pings = True
        self.log: list[Frame] = []
        self._book: DrafterConnection | None = None
        self._steps: list[StepItem] = []
        self._outcomes: dict[Key, Outcome] = {}
        self._replied: dict[int, Key] = {}
        self._agreed: dict[str, Any] = {}
        self._heard = False

    # Plain traffic

    def send(self, *frames: Buffer) -> None:
        """Whole frames, in order."""
        self.link.send(*frames)

    def say(self, message: Message, key: Key = NO_KEY) -> None:
        """Encode and send."""
        self.send(encode_frame(message, key))

    def next_raw(self, timeout_ms: int | None = None, what: str = "a frame") -> bytes:
        """The next frame. Raises :class:`TimedOut`."""
        raw = self.link.receive(self.facts.deadline_ms if timeout_ms is None else timeout_ms)
        if raw is None:
            raise TimedOut(f"{what} did not come")
        return raw

    def peers(self) -> int:
        """How many connections have spoken to the harness so far."""
        return len(getattr(self.link, "peers", ()))

    def await_hello(self, timeout_ms: int = _HELLO_MS) -> Hello:
        """The testee's next HELLO; anything before it belongs to the connection that ended."""
        while True:
            raw = self.next_raw(timeout_ms, "HELLO")
            try:
                message = decode_frame(raw).message
            except ProtocolError as error:
                raise Unmet("a well-formed frame", str(error), actual_frame=raw) from None
            if isinstance(message, Hello):
                self.hello, self.hello_frame = message, raw
                self._forget()
                return message

    def _forget(self) -> None:
        self._steps, self._outcomes, self._replied, self.log = [], {}, {}, []
        self.left = False

    def parameters(self, hello: Hello, **changes: Any) -> HelloParameters:
        """The harness's side: compatible with whatever the verifier says it is."""
        facts = replace(self.facts, compatibility=compatibility_of(hello))
        versions = tuple(version for version in WireVersion if version in hello.wire_versions)
        values: dict[str, Any] = {
            "step_deadline_ms": self.step_ms,
            "context_credit_rows": 4096,
            "versions": versions or (WireVersion.V2_0,),
            "authentication": self.facts.authentication,
        }
        return facts.parameters(self.epoch, **(values | changes))

    def accept_for(self, hello: Hello, **changes: Any) -> Accept:
        """A right ACCEPT, for a case to spoil; ``changes`` are capacities of the harness."""
        parameters = self.parameters(hello, **changes)
        return accept_message(parameters, hello, negotiate(parameters, hello, common_version(parameters, hello)))

    def connect(self, before: Callable[[Hello], Sequence[Buffer]] = lambda hello: (), **changes: Any) -> Accept:
        """Answer the testee's HELLO with ACCEPT, after a CHALLENGE where the facts have a secret; ``changes`` are
        capacities of the harness, ``before`` gives frames that are sent just before the ACCEPT.
        """
        hello = self.hello or self.await_hello()
        self._agreed, self._heard, self.left = changes, False, False
        self._book = DrafterConnection(self.parameters(hello, **changes))
        self._greet(self.hello_frame)
        while challenges := self._book.frames_to_send():
            self.send(*challenges)
            self.await_hello()
            self._greet(self.hello_frame)
        frame = bytes(self._book.accept(0))
        self.send(*before(hello), frame)
        message = decode_frame(frame).message
        assert isinstance(message, Accept)
        return message

    def _greet(self, frame: bytes) -> None:
        """Enter a HELLO into the books."""
        for event in self.book.receive(frame, 0):
            if isinstance(event, HelloReceived) and event.code is not None:
                raise Unmet("an acceptable HELLO", event.code.name, actual_frame=frame)

    def restart(self) -> Hello:
        """Behave as a drafter that was restarted: the testee must say HELLO again."""
        self.hello = None
        self.epoch = next(_EPOCHS) if self.left else self.epoch
        self.say(ErrorMessage(ErrorCode.HELLO_REQUIRED, Scope.CONNECTION, 0, "connection"))
        return self.await_hello()

    # The books

    @property
    def book(self) -> DrafterConnection:
        """Of the connection."""
        assert self._book is not None, "connect first"
        return self._book

    def pump(self, timeout_ms: int | None = None, what: str = "a frame") -> Frame:
        """Take one frame into the books; returns it. Raises :class:`Unmet` for a frame that breaks a rule."""
        raw = self.next_raw(timeout_ms, what)
        before = dict(self.book.counters)
        events = self.book.receive(raw, self.link.clock.now_ns())
        for code in ErrorCode:
            if self.book.counters[code.counter] != before[code.counter] and code not in _TOLERATED:
                raise Unmet("a legal frame", f"one that must be refused with {code.name}", actual_frame=raw)
        frame = decode_frame(raw)
        if isinstance(frame.message, Hello):
            self._on_hello(frame.message, raw)
        else:
            self._heard = True
            for event in events:
                self._on(event)
        outgoing = self.book.frames_to_send()
        if not self.answers_pings:
            outgoing = [one for one in outgoing if one[6] != MessageType.PONG]
        if outgoing:
            self.send(*outgoing)
        self.log.append(frame)
        return frame

    def _on_hello(self, hello: Hello, raw: bytes) -> None:
        """The testee begins again. Before it has said anything else, its HELLO crossed our ACCEPT; after that it has
        left, with every round unresolved.
        """
        self.hello, self.hello_frame = hello, raw
        if not self._heard:
            self.connect(**self._agreed)
            return
        self.left = True
        for slot in list(self._replied):
            self._resolve(slot, Outcome.LEFT)
        self._steps = []

    def _again(self) -> None:
        """A testee that has left gets a new process to talk to."""
        if self.left:
            self.epoch = next(_EPOCHS)
            self.connect(**self._agreed)

    def _on(self, event: DrafterEvent) -> None:
        match event:
            case ContextArrived() if self.grants_credit:
                self.book.context_consumed(event.rows)
            case StepArrived():
                for item in event.items:
                    outcome = Outcome.PASSED_OVER if item.accepted_count == NO_COMMIT else Outcome.COMMITTED
                    self._resolve(item.slot, outcome)
                    self._steps.append(item)
            case SlotCommitted():
                self._resolve(event.slot, Outcome.COMMITTED)
            case SlotReset() | SlotCancelled():
                self._resolve(event.slot, Outcome.NEW_GENERATION)
                self.drop_steps(event.slot)
            case SlotClosed():
                self._resolve(event.slot, Outcome.CLOSED)
                self.drop_steps(event.slot)
            case SlotOpened():
                pass

    def _resolve(self, slot: int, outcome: Outcome) -> None:
        key = self._replied.pop(slot, None)
        if key is not None:
            self._outcomes[key] = outcome

    def drop_steps(self, slot: int) -> None:
        """Items of ``slot`` that have not been answered will not be."""
        self._steps = [item for item in self._steps if item.slot != slot]

    def until(self, timeout_ms: int | None, what: str) -> Iterator[None]:
        """Loop until the deadline; a verifier that only sends PINGs does not hold the harness up."""
        limit_ms = self.facts.deadline_ms if timeout_ms is None else timeout_ms
        end_ns = self.link.clock.now_ns() + limit_ms * NS_PER_MS
        while self.link.clock.now_ns() <= end_ns:
            yield
        raise TimedOut(f"{what} did not come")

    def await_step(self, slot: int | None = None) -> StepItem:
        """The next STEP item that has not been answered, of ``slot`` when given, else one that suits the case; others
        get honest replies.
        """
        for _ in self.until(None, "a STEP"):
            for item in self._steps:
                if item.slot == slot or (slot is None and self.suits(item)):
                    self._steps.remove(item)
                    return item
            for item in self._steps:
                self.answer(item)
            self._steps = []
            self.pump(what="a STEP")
        raise AssertionError("the loop ends by a result or by TimedOut")

    def two_steps(self) -> tuple[StepItem, StepItem]:
        """Rounds of two slots that have not been answered. Skips the case on a verifier that has one at a time."""
        for _ in range(_ATTEMPTS):
            first = self.await_step()
            self.drain_frames(BESIDE_MS)
            second = next((item for item in self._steps if item.slot != first.slot), None)
            if second is not None:
                self._steps.remove(second)
                return first, second
            self.answer(first)
        raise Unsupported("rounds of two slots at a time")

    def drain_frames(self, quiet_ms: int) -> None:
        """Take frames until none but heartbeats comes for ``quiet_ms``."""
        clock = self.link.clock
        end_ns = clock.now_ns() + quiet_ms * NS_PER_MS
        try:
            for _ in range(1000):
                frame = self.pump(max(0, end_ns - clock.now_ns()) // NS_PER_MS)
                if not isinstance(frame.message, Ping | Pong):
                    end_ns = clock.now_ns() + quiet_ms * NS_PER_MS
        except TimedOut:
            return

    def watch(self, ms: int) -> None:
        """Take frames for ``ms`` in all, and answer none."""
        end_ns = self.link.clock.now_ns() + ms * NS_PER_MS
        try:
            while (left := (end_ns - self.link.clock.now_ns()) // NS_PER_MS) > 0:
                self.pump(left)
        except TimedOut:
            return

    @property
    def rows_sent(self) -> int:
        """CONTEXT rows of the connection."""
        return self.book._rows_received

    def grant(self) -> None:
        """Use up the context that has arrived, which grants credit."""
        self.take_in()
        self.send(*self.book.frames_to_send())

    def take_in(self, rows: int | None = None) -> int:
        """Use up ``rows`` of the context that has arrived, or all; returns the total of credit, which is not told."""
        if self.left:
            raise Unsupported("patience without credit")
        arrived = self.book._rows_received - self.book._rows_consumed
        self.book.context_consumed(arrived if rows is None else min(rows, arrived))
        return self.book._credit_limit()

    def starve(self, rows: int) -> None:
        """Connect with a credit of ``rows``, grant no more, and let the verifier use it up."""
        self.grants_credit = False
        self.connect(context_credit_rows=rows)
        self.await_context()

    def await_context(self) -> None:
        """Take frames until the verifier has sent what context it can."""
        try:
            for _ in self.until(None, "CONTEXT"):
                if self.rows_sent:
                    break
                self.pump(what="CONTEXT")
        except TimedOut:
            return
        self.drain_frames(QUIET_MS)

    def unbounded_credit(self) -> None:
        """From now on the books take any number of rows; the total that they tell is 2^40."""
        if self.left:
            raise Unsupported("patience without credit")
        self.book._rows_consumed = 2**40 - self.book._terms().context_credit_rows

    def waiting(self) -> list[StepItem]:
        """Items that have not been answered."""
        return list(self._steps)

    def rows_for(self, item: StepItem, shift: int = 0) -> list[DraftedRow]:
        """Honest rows: two entries where the support allows it."""
        vocab_size, support = self._size(item)
        rows = []
        for index in range(item.depth):
            low = (item.anchor_position + index + shift) % (vocab_size - 1)
            one = DraftedRow((low,), (TOTAL,), low)
            two = DraftedRow((low, low + 1), (TOTAL // 4, TOTAL - TOTAL // 4), low + 1)
            rows.append(one if support == 1 else two)
        return rows

    def support_of(self, item: StepItem) -> SupportPolicy:
        """What the item's slot asked for."""
        return self.book._slots[item.slot].support

    def _size(self, item: StepItem) -> tuple[int, int]:
        """Vocabulary size and support of a reply to ``item``."""
        return self.book.parameters.compatibility.vocab_size, int(self.support_of(item))

    def honest(self, item: StepItem, rows: Sequence[DraftedRow] | None = None) -> HonestReply:
        """A right reply to ``item``, booked as sent."""
        vocab_size, support = self._size(item)
        packed = pack(rows or self.rows_for(item), support, vocab_size)
        frames = self.book.reply(item, packed.tokens, packed.entries, packed.ids, packed.q)
        if len(frames) != 2:
            raise Unsupported("the round ended before it was answered")
        self._replied[item.slot] = Key(item.slot, item.generation, item.round)
        row, completion = decode_frame(bytes(frames[0])), decode_frame(bytes(frames[1]))
        assert isinstance(row.message, Row)
        assert isinstance(completion.message, Completion)
        bodies = tuple(bytes(body) for body in row.bodies)
        return HonestReply(item, row.message, bodies, completion.message, (bytes(frames[0]), bytes(frames[1])))

    def answer(self, item: StepItem) -> HonestReply:
        """Send a right reply."""
        reply = self.honest(item)
        self.send(*reply.frames)
        return reply

    # Judging

    def outcome(self, item: StepItem, timeout_ms: int | None = None) -> Outcome:
        """What becomes of an answered round. Rounds of other slots that were asked for before get honest replies: a
        verifier may wait for them before it goes on.
        """
        key = Key(item.slot, item.generation, item.round)
        beside = {one.slot for one in self._steps} - {item.slot}
        what = "the verifier's next message for the slot"
        for _ in self.until(timeout_ms, what):
            if key in self._outcomes:
                break
            for one in [one for one in self._steps if one.slot in beside]:
                beside.discard(one.slot)
                self._steps.remove(one)
                self.answer(one)
            self.pump(timeout_ms, what)
        return self._outcomes[key]

    def lost(self, item: StepItem) -> Outcome:
        """What becomes of a round that gets no whole answer; other slots' rounds may have ended with it."""
        outcome = self.outcome(item, 5 * self.step_ms + self.facts.deadline_ms)
        self.drain_frames(0)
        return outcome

    def attempt(self, spoil: Callable[[HonestReply], Sequence[Buffer]]) -> Outcome:
        """Answer the next round with what ``spoil`` makes of a right reply. A session that ends just then is no
        answer."""
        self._again()
        for _ in range(_ATTEMPTS):
            item = self.await_step()
            self.send(*spoil(self.honest(item)))
            outcome = self.outcome(item)
            if outcome is not Outcome.CLOSED:
                return outcome
        raise Unsupported("sessions that end after one round")

    def accepts(self, spoil: Callable[[HonestReply], Sequence[Buffer]]) -> None:
        """The round must be committed."""
        self._expect(self.attempt(spoil), Outcome.COMMITTED)

    def refuses(self, spoil: Callable[[HonestReply], Sequence[Buffer]], *, may_leave: bool = False) -> None:
        """The round must not be used, and the verifier must go on: another round is answered and committed.

        ``may_leave``: it may also end the connection, and go on with another drafter process.
        """
        leaving = (Outcome.LEFT,) if may_leave else ()
        outcome = self.attempt(spoil)
        self._expect(outcome, Outcome.PASSED_OVER, Outcome.NEW_GENERATION, *leaving)
        if outcome is Outcome.LEFT:
            self.inform("the verifier has left this drafter process")
        self.serves()

    def kills(self, spoil: Callable[[HonestReply], Sequence[Buffer]]) -> None:
        """The generation must end, and the slot must serve again after RESET."""
        for _ in range(_ATTEMPTS):
            item = self.await_step()
            self.send(*spoil(self.honest(item)))
            outcome = self.outcome(item)
            self._expect(outcome, Outcome.NEW_GENERATION, Outcome.CLOSED)
            if outcome is Outcome.NEW_GENERATION:
                break
        self.serves()

    def serves(self) -> None:
        """An honest round is committed."""
        self._expect(self.attempt(lambda reply: reply.frames), Outcome.COMMITTED)

    @staticmethod
    def _expect(outcome: Outcome, *allowed: Outcome) -> None:
        if outcome not in allowed:
            raise Unmet("the round " + " or ".join(one.value for one in allowed), outcome.value)

    def answers(self, nonce: int) -> None:
        """PING must be answered; a testee that has left is given a drafter to talk to first."""
        self.say(Ping(self.epoch, nonce))
        for _ in self.until(None, "a PONG"):
            message = self.pump(what="a PONG").message
            if isinstance(message, Pong) and message.nonce == nonce:
                return
            if self.left:
                self._again()
                self.await_step()
                self.say(Ping(self.epoch, nonce))

    def pong(self, nonce: int) -> Pong:
        """Wait for the PONG with this nonce."""
        for _ in self.until(None, "a PONG"):
            message = self.pump(what="a PONG").message
            if isinstance(message, Pong) and message.nonce == nonce:
                return message
        raise AssertionError("the loop ends by a result or by TimedOut")
