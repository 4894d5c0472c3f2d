"""The harness in the verifier's place: `DrafterUnderTest` is what a case for a drafter drives.

Helpers do the legal thing and judge the answer by the standard; a case deviates where it wants to. "Nothing came" is
proved by a PING, which must be answered at once and in order, not by waiting. STATS shows under which code a frame was
dropped. Called by the drafter families and by `runner`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from secrets import token_bytes
from typing import Any

from ..auth import Authentication
from ..bodies import describe
from ..buffers import Buffer
from ..digest import prefix_digest
from ..errors import ProtocolError
from ..frame import Frame, decode_frame, encode_frame
from ..hello import Accept, Challenge, Hello, Reject
from ..limits import AUTH_NONCE_BYTES, NO_COMMIT
from ..messages import (
    STATUS_OK,
    Cancel,
    Close,
    Commit,
    Completion,
    Context,
    ErrorMessage,
    Message,
    Open,
    Ping,
    Pong,
    Reset,
    Row,
    Stats,
    Step,
    StepItem,
)
from ..negotiation import HelloParameters, hello_message
from ..prefix import NO_KEY, Key
from ..registry import (
    DTYPE_BYTES,
    BodyKind,
    Cause,
    Checksum,
    Dtype,
    ErrorCode,
    Lane,
    Scope,
    SupportPolicy,
    WireVersion,
)
from .clock import NS_PER_MS
from .facts import Facts
from .judging import Reply, SlotBook, judged, same, shown
from .links import Link, joined
from .verdicts import Remarks, TimedOut, Unmet, Unsupported, WrongCode

EPOCH = 0x1122334455667788
SESSION = 1000
PROMPT = 4


class DrafterUnderTest(Remarks):
    """See the module."""

    def __init__(self, link: Link, facts: Facts, another: Callable[[], Link | None] = lambda: None) -> None:
        self.link = link
        self.facts = facts
        self.opened: list[Link] = []
        self._another = another
        self.epoch = EPOCH
        self.serial = 0
        self.accept: Accept | None = None
        self.slots: dict[int, SlotBook] = {}
        self.credit_limit = 0
        self._nonce = 1000
        self._generation = 0
        self._sessions = SESSION

    # Plain traffic

    def send(self, *frames: Buffer) -> None:
        """Whole frames, in order."""
        self.link.send(*frames)

    def say(self, message: Message, key: Key = NO_KEY, bodies: Sequence[Buffer] = ()) -> bytes:
        """Encode and send; returns the frame."""
        frame = bytes(encode_frame(message, key, bodies))
        self.send(frame)
        return frame

    def next_raw(self, timeout_ms: int | None = None, what: str = "an answer") -> bytes:
        """The next frame as bytes. Raises :class:`TimedOut`."""
        frame = self.link.receive(self.facts.deadline_ms if timeout_ms is None else timeout_ms)
        if frame is None:
            raise TimedOut(f"{what} did not come")
        return frame

    def next(self, what: str = "an answer") -> tuple[Frame, bytes]:
        """The next frame that is not housekeeping: PINGs are answered, credit is noted."""
        end_ns = self.link.clock.now_ns() + self.facts.deadline_ms * NS_PER_MS
        while self.link.clock.now_ns() <= end_ns:
            raw = self.next_raw(what=what)
            frame = self._decoded(raw)
            message = frame.message
            if isinstance(message, Ping):
                self.say(Pong(self.epoch, message.nonce, 0, 0))
            elif isinstance(message, Pong) and message.nonce == 0:
                self._note_credit(message)
            else:
                return frame, raw
        raise TimedOut(f"{what} did not come")

    def _decoded(self, raw: bytes) -> Frame:
        try:
            return decode_frame(raw)
        except ProtocolError as error:
            raise Unmet("a well-formed frame", str(error), actual_frame=raw) from None

    def _note_credit(self, pong: Pong) -> None:
        if pong.credit_limit < self.credit_limit:
            raise Unmet(f"credit that only grows, at least {self.credit_limit}", str(pong.credit_limit))
        self.credit_limit = pong.credit_limit

    def expect(self, kind: type[Message], what: str = "") -> tuple[Frame, bytes]:
        """The next frame must be of ``kind``."""
        frame, raw = self.next(what or kind.NAME)
        if not isinstance(frame.message, kind):
            raise Unmet(what or kind.NAME, shown(frame), actual_frame=raw)
        return frame, raw

    # HELLO

    def offer(self, **changes: Any) -> Hello:
        """A HELLO that the testee should like; ``changes`` are fields of the message."""
        self.serial += 1
        return replace(hello_message(self.parameters(), self.serial), **changes)

    def parameters(self) -> HelloParameters:
        """What the harness offers."""
        return self.facts.parameters(self.epoch)

    def answer_to(self, hello: Hello | bytes) -> Accept | Reject:
        """Send a HELLO, with a proof where the facts have a secret, and take what comes; every older slot is dead.

        A HELLO that is given as bytes goes out as it is.
        """
        self.slots = {}
        if self.facts.secret and isinstance(hello, Hello) and not hello.auth:
            return self._proven_answer(replace(hello, auth=token_bytes(AUTH_NONCE_BYTES)))
        self.send(hello if isinstance(hello, bytes) else encode_frame(hello))
        frame, raw = self.next("ACCEPT or REJECT")
        message = frame.message
        if not isinstance(message, Accept | Reject):
            raise Unmet("ACCEPT or REJECT", shown(frame), actual_frame=raw)
        return message

    @property
    def authentication(self) -> Authentication:
        """Of the facts. Skips the case on a testee without a secret."""
        found = self.facts.authentication
        if found is None:
            raise Unsupported("a secret")
        return found

    def challenged(self, hello: Hello) -> bytes:
        """Send a HELLO that asks for a CHALLENGE; returns its nonce."""
        self.send(encode_frame(hello))
        frame, raw = self.expect(Challenge)
        challenge = frame.message
        assert isinstance(challenge, Challenge)
        same("CHALLENGE echo", (hello.epoch, hello.serial), (challenge.verifier_epoch, challenge.serial), raw)
        return challenge.nonce

    def _proven_answer(self, hello: Hello) -> Accept | Reject:
        """The whole of SPEC.md 6.1, the drafter's proof checked."""
        nonce = self.challenged(hello)
        answer = self.answer_to(bytes(encode_frame(self.authentication.proven(hello, nonce))))
        if isinstance(answer, Accept) and not self.authentication.drafter_is_genuine(answer, hello, nonce):
            raise Unmet("the drafter's proof in ACCEPT", answer.auth.hex() or "no proof")
        return answer

    def hello(self, **changes: Any) -> Accept:
        """Connect."""
        return self.greet(self.offer(**changes))

    def greet(self, hello: Hello) -> Accept:
        """Connect with this HELLO."""
        answer = self.answer_to(hello)
        if not isinstance(answer, Accept):
            raise Unmet("ACCEPT", f"REJECT {answer.code.name} for {answer.field or 'no field'}")
        self.check_echo(hello, answer)
        self.accept = answer
        self.credit_limit = answer.context_credit_rows
        return answer

    def rejected(self, hello: Hello, code: ErrorCode) -> Reject:
        """The testee must REJECT with ``code``."""
        answer = self.answer_to(hello)
        if not isinstance(answer, Reject):
            raise Unmet(f"REJECT {code.name}", "ACCEPT")
        if answer.code is not code:
            raise WrongCode(f"REJECT {code.name}", f"REJECT {answer.code.name}")
        self.check_echo(hello, answer)
        self.refused = True
        return answer

    @staticmethod
    def check_echo(hello: Hello, answer: Accept | Reject) -> None:
        """The answer names its HELLO."""
        if (answer.verifier_epoch, answer.serial) != (hello.epoch, hello.serial):
            raise Unmet(f"the HELLO's epoch and serial {hello.serial}", f"{answer.verifier_epoch}, {answer.serial}")

    @property
    def terms(self) -> Accept:
        """Of the connection."""
        assert self.accept is not None, "say HELLO first"
        return self.accept

    # Slots

    def open_message(self, slot: int = 0, **changes: Any) -> tuple[Open, Key]:
        """An OPEN in the ratio lane with a fresh session and generation."""
        self._generation += 1
        self._sessions += 1
        tokens_only = self.terms.wire_version == WireVersion.V1_0
        lanes = 1 << (Lane.GREEDY - 1) if tokens_only else self.facts.compatibility.lanes
        lane = changes.pop("lane", None) or next(lane for lane in Lane if lanes & 1 << (lane - 1))
        most = SupportPolicy.K1 if tokens_only else self.terms.max_support
        values: dict[str, Any] = {
            "session": self._sessions,
            "seed": 2**64 - 5,
            "draft_temperature_micro": 1_000_000 if lane is Lane.RATIO else 0,
            "support": max(policy for policy in SupportPolicy if 0 < policy <= most),
            "lane": lane,
            "choice": 0,
            "context_start": 0,
            "start_digest": bytes(8),
            "processor_version": 0,
            "grammar_version": 0,
            "stop_version": 0,
        }
        return Open(**(values | changes)), Key(slot, self._generation)

    def open(self, slot: int = 0, *, prompt: int = PROMPT, **changes: Any) -> SlotBook:
        """OPEN a slot and give it ``prompt`` rows of context."""
        message, key = self.open_message(slot, **changes)
        self.say(message, key)
        book = SlotBook(slot, message.session, key.generation, message.support, message.lane)
        book.start = book.end = message.context_start
        book.start_digest = message.start_digest
        self.slots[slot] = book
        if prompt:
            self.context(slot, prompt)
        return book

    def token_at(self, book: SlotBook, position: int) -> int:
        """The token at ``position``, invented where nothing was decided."""
        return book.tokens.setdefault(position, (3 + 7 * position) % min(97, self.facts.compatibility.vocab_size))

    def digest(self, book: SlotBook, end: int) -> bytes:
        """Of every position before ``end``."""
        return prefix_digest([self.token_at(book, p) for p in range(book.start, end)], book.start_digest)

    def taps(self, rows: int, fill: int = 1) -> bytes:
        """Raw tap rows: small, finite numbers."""
        return bytes([fill]) * (rows * self.terms.tap_row_bytes)

    def context_frame(self, slot: int, rows: int, *, tokens: bool = True, fill: int = 1, **changes: Any) -> bytes:
        """A CONTEXT that continues the slot's context; the book is not touched."""
        book = self.slots[slot]
        bodies: list[bytes] = [self.taps(rows, fill)]
        descriptors = [self.describe_taps(bodies[0], rows)]
        if tokens:
            ids = [self.token_at(book, book.end + row) for row in range(rows)]
            bodies.append(b"".join(token.to_bytes(4, "little") for token in ids))
            descriptors.append(describe(BodyKind.TOKENS, Dtype.INT32, rows, 1, bodies[1], self.terms.checksum_kind))
        values: dict[str, Any] = {
            "session": book.session,
            "first_position": book.end,
            "rows": rows,
            "bodies": tuple(descriptors),
        }
        key = changes.pop("key", Key(slot, book.generation))
        return bytes(encode_frame(Context(**(values | changes)), key, bodies))

    def context(self, slot: int = 0, rows: int = 1, **changes: Any) -> None:
        """Send CONTEXT."""
        self.send(self.context_frame(slot, rows, **changes))
        self.slots[slot].end += rows

    def describe_taps(self, taps: Buffer, rows: int, checksum: Checksum | None = None) -> Any:
        """Descriptor of a TAPS body."""
        dtype = self.facts.compatibility.tap_dtype
        entries = self.terms.tap_row_bytes // DTYPE_BYTES[dtype]
        return describe(BodyKind.TAPS, dtype, rows, entries, taps, checksum or self.terms.checksum_kind)

    def item(self, slot: int = 0, *, accept: int | None = 0, fill: int = 1, **changes: Any) -> StepItem:
        """The next STEP item of a slot. ``accept``: how many drafts of the last reply to commit, None for no commit."""
        book = self.slots[slot]
        accepted, token, rows = NO_COMMIT, 0, 1
        if book.reply is not None and accept is not None:
            last = book.reply.item
            accepted = min(accept, last.depth)
            for index in range(accepted):
                book.tokens[last.anchor_position + 1 + index] = book.reply.tokens[index]
            token = self.token_at(book, last.anchor_position + 1 + accepted)
            rows = accepted + 1
        rows = changes.pop("tap_rows", rows)
        anchor = book.end + rows
        values: dict[str, Any] = {
            "session": book.session,
            "slot": slot,
            "generation": book.generation,
            "round": book.round + 1,
            "anchor_token": self.token_at(book, anchor),
            "anchor_position": anchor,
            "prefix_digest": self.digest(book, anchor),
            "depth": self.terms.max_depth,
            "lane": book.lane,
            "accepted_count": accepted,
            "commit_token": token,
            "tap_first": book.end,
            "tap_rows": rows,
            "taps": self.taps(rows, fill),
        }
        return StepItem(**(values | changes))

    def step_frame(self, *items: StepItem) -> bytes:
        """The STEP of these items; the books are not touched."""
        taps = [item.taps for item in items if item.tap_rows]
        described = tuple(self.describe_taps(item.taps, item.tap_rows) for item in items if item.tap_rows)
        key = Key(items[0].slot, items[0].generation, items[0].round) if len(items) == 1 else NO_KEY
        return bytes(encode_frame(Step(items, described), key, taps))

    def step(self, *items: StepItem) -> bytes:
        """Send a STEP and book it."""
        frame = self.step_frame(*items)
        self.send(frame)
        for item in items:
            book = self.slots[item.slot]
            book.round, book.end, book.reply = item.round, item.anchor_position, None
        return frame

    def round(self, slot: int = 0, **changes: Any) -> Reply:
        """A whole legal round."""
        item = self.item(slot, **changes)
        self.step(item)
        return self.reply(item)

    # Judging replies

    def reply(self, item: StepItem) -> Reply:
        """The reply to ``item``, every rule of ROW and COMPLETION checked."""
        (found,) = self.replies(item)
        return found

    def drafted(self, item: StepItem) -> bool:
        """Whether ``item`` was answered by a proposal; a COMPLETION with an error code is the other answer."""
        frame, raw = self.next("the reply to a STEP")
        if isinstance(frame.message, Completion) and frame.message.status != STATUS_OK:
            return False
        if not isinstance(frame.message, Row):
            raise Unmet("ROW or COMPLETION", shown(frame), actual_frame=raw)
        while not isinstance(frame.message, Completion):
            frame, raw = self.next("COMPLETION")
        return True

    def replies(self, *items: StepItem) -> list[Reply]:
        """The replies to all ``items``, in the order of the items; other frames are a fault."""
        wanted = {Key(item.slot, item.generation, item.round): item for item in items}
        rows: dict[Key, list[tuple[Frame, bytes]]] = {key: [] for key in wanted}
        done: dict[Key, Reply] = {}
        while len(done) < len(wanted):
            frame, raw = self.next("the reply to a STEP")
            key = frame.prefix.key
            if key not in wanted or key in done or not isinstance(frame.message, Row | Completion):
                raise Unmet(f"ROW or COMPLETION of {sorted(map(str, wanted))}", shown(frame), actual_frame=raw)
            rows[key].append((frame, raw))
            if isinstance(frame.message, Completion):
                done[key] = judged(self.facts, self.terms, self.slots[key.slot], wanted[key], rows[key])
                self.slots[key.slot].reply = done[key]
        return [done[key] for key in wanted]

    # Ends and probes

    def commit(self, slot: int = 0, accepted: int = 0, **changes: Any) -> bytes:
        """Commit the last reply by message; returns the frame."""
        book = self.slots[slot]
        assert book.reply is not None
        last = book.reply.item
        for index in range(accepted):
            book.tokens[last.anchor_position + 1 + index] = book.reply.tokens[index]
        position = last.anchor_position + accepted + 1
        values: dict[str, Any] = {
            "session": book.session,
            "accepted_count": accepted,
            "token": self.token_at(book, position),
            "position": position,
            "prefix_digest": self.digest(book, position),
        }
        key = changes.pop("key", book.key)
        return self.say(Commit(**(values | changes)), key)

    def reset(self, slot: int = 0, *, prompt: int = PROMPT, cause: Cause = Cause.ROUND_TIMED_OUT) -> SlotBook:
        """RESET to a new generation, with a new prompt."""
        book = self.slots[slot]
        self._generation += 1
        self.say(Reset(book.session, cause), Key(slot, self._generation))
        fresh = SlotBook(slot, book.session, self._generation, book.support, book.lane)
        self.slots[slot] = fresh
        if prompt:
            self.context(slot, prompt)
        return fresh

    def cancel(self, slot: int = 0) -> None:
        """CANCEL."""
        book = self.slots[slot]
        book.generation = self.new_generation()
        self.say(Cancel(book.session, Cause.CLIENT_GONE), Key(slot, book.generation))

    def new_generation(self) -> int:
        """A generation above every earlier one."""
        self._generation += 1
        return self._generation

    def close(self, slot: int = 0) -> None:
        """CLOSE a session."""
        book = self.slots.pop(slot)
        self._generation += 1
        self.say(Close(book.session, Cause.FINISHED), Key(slot, self._generation))

    def barrier(self) -> list[tuple[Frame, bytes]]:
        """PING, and everything that came before its PONG, credit updates left out."""
        self._nonce += 1
        self.say(Ping(self.epoch, self._nonce))
        before: list[tuple[Frame, bytes]] = []
        while True:
            frame, raw = self.next("a PONG")
            message = frame.message
            if isinstance(message, Pong):
                same("PONG nonce", self._nonce, message.nonce, raw)
                same("PONG epoch", self.terms.epoch, message.epoch, raw)
                self._note_credit(message)
                return before + self._stragglers()
            before.append((frame, raw))

    def _stragglers(self) -> list[tuple[Frame, bytes]]:
        """Frames that a testee with work in the background may still send."""
        late: list[tuple[Frame, bytes]] = []
        if not self.facts.quiet_ms:
            return late
        while (raw := self.link.receive(self.facts.quiet_ms)) is not None:
            late.append((self._decoded(raw), raw))
        return late

    def silence(self) -> None:
        """The testee must have sent nothing."""
        for frame, raw in self.barrier():
            raise Unmet("no frame", shown(frame), actual_frame=raw)

    def stats(self) -> Stats:
        """What the testee holds."""
        self.say(Stats(self.epoch))
        frame, raw = self.expect(Stats, "a STATS report")
        report = frame.message
        assert isinstance(report, Stats)
        same("STATS epoch", self.terms.epoch, report.epoch, raw)
        same("STATS is report", 1, report.is_report, raw)
        return report

    def holds_nothing(self) -> None:
        """STATS must show no slot, round, reply or credit."""
        report = self.stats()
        held = (report.slots_open, report.rounds_unresolved, report.replies_cached, report.credit_outstanding_rows)
        same("slots, rounds, replies and credit held", (0, 0, 0, 0), held)

    def counters(self) -> dict[ErrorCode, int]:
        """Drops and refusals by code."""
        return {counter.code: counter.count for counter in self.stats().counters}

    def drops(self, code: ErrorCode, *frames: Buffer) -> None:
        """``frames`` must be dropped: counted under ``code``, answered by nothing."""
        before = self.counters()
        self.send(*frames)
        self.silence()
        self._counted(code, before, len(frames))

    def _counted(self, code: ErrorCode, before: dict[ErrorCode, int], times: int) -> None:
        after = self.counters()
        grown = {c.name: n - before.get(c, 0) for c, n in after.items() if n != before.get(c, 0)}
        if len(grown) == 1 and grown.get(code.name) is None and set(grown.values()) == {times}:
            raise WrongCode(f"{times} counted as {code.name}", f"{times} as {next(iter(grown))}")
        same("counters that grew", {code.name: times}, grown)
        self.refused = True

    def refuses(self, code: ErrorCode, frame: Buffer, key: Key, scope: Scope = Scope.SLOT) -> None:
        """``frame`` must be answered by ERROR with that code, key and at least that scope, and counted."""
        before = self.counters()
        self.send(frame)
        self.told(code, key, scope)
        self.silence()
        self._counted(code, before, 1)

    def told(self, code: ErrorCode, key: Key, scope: Scope = Scope.SLOT) -> None:
        """The next frame must be this ERROR."""
        frame, raw = self.expect(ErrorMessage, f"ERROR {code.name}")
        error = frame.message
        assert isinstance(error, ErrorMessage)
        if error.code is not code:
            raise WrongCode(f"ERROR {code.name}", f"ERROR {error.code.name}", actual_frame=raw)
        same("ERROR key", key, frame.prefix.key, raw)
        if error.scope < scope:
            raise Unmet(f"scope {scope.name} or wider", error.scope.name, actual_frame=raw)
        if error.scope > scope:
            self.tolerate(f"ERROR {code.name} has scope {error.scope.name} where {scope.name} is enough")
        self.refused = True

    def alive(self, slot: int = 0) -> None:
        """The slot still drafts; its last round is not committed."""
        self.round(slot, accept=None)

    def is_dead(self, slot: int = 0) -> None:
        """The slot's generation must be dead: a STEP is dropped until RESET, which revives it."""
        self.drops(ErrorCode.SLOT_NEEDS_RESET, self.step_frame(self.item(slot, accept=None)))
        self.reset(slot)
        self.alive(slot)

    def wait(self, ms: int) -> None:
        """Say nothing for ``ms``; what arrives meanwhile must be housekeeping."""
        end_ns = self.link.clock.now_ns() + ms * NS_PER_MS
        while (left := (end_ns - self.link.clock.now_ns()) // NS_PER_MS) > 0:
            raw = self.link.receive(left)
            if raw is not None and not isinstance(self._decoded(raw).message, Ping | Pong):
                raise Unmet("no frame", shown(self._decoded(raw)), actual_frame=raw)

    def second(self) -> DrafterUnderTest:
        """Another verifier beside this one."""
        link = self._another()
        if link is None:
            raise Unsupported("a second connection")
        self.opened.append(link)
        return DrafterUnderTest(link, self.facts)

    def require(self, condition: bool, what: str) -> None:
        """Skip the case on a testee that does not offer ``what``."""
        if not condition:
            raise Unsupported(what)

    def same_bytes(self, expected: Sequence[bytes], actual: Sequence[bytes]) -> None:
        """Two replies must be equal to the last byte."""
        if tuple(expected) != tuple(actual):
            raise Unmet("the identical bytes", "other bytes", joined(expected), joined(actual))
