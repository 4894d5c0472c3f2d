"""The receiving half of the Spark side: frames and time in, events out.

Invariants: no fault of the peer leaves ``receive``; every drop is counted by cause; a stale frame is dropped
from its prefix alone; a refused reply discards the whole proposal; a dead round's generation is bumped before
its staging can be leased again. Spec: SPEC.md, sections "ROW", "COMPLETION", "Generations". Base class of
``VerifierConnection``, which adds what Spark asks for; used by nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final

from .buffers import Buffer
from .errors import RemoteProtocolError
from .events import (
    Accepted,
    CreditGranted,
    Draining,
    PeerError,
    PeerSilent,
    PongReceived,
    Rejected,
    SlotFailed,
    StatsReceived,
    StepFailed,
    StepTimedOut,
    VerifierEvent,
)
from .hello import Accept, Challenge, Hello, Reject
from .limits import NANOSECONDS_PER_MS, SILENT_HEARTBEATS, SLOT_NONE, U64_MAX
from .memory import aligned_memory
from .messages import STATUS_OK, Completion, Drain, ErrorMessage, Message, Ping, Pong, Row, Stats
from .negotiation import HelloParameters, Negotiated, accepted_terms
from .peer import Peer
from .placement import PlacedFrame, Write
from .prefix import Prefix, read_prefix
from .registry import ErrorCode, MessageType, Scope, WireVersion
from .replies import finish_reply, memory_of_rows, stage_placed_rows, stage_rows
from .slots import VerifierSlot
from .staging import LeaseState, Staging
from .states import VERIFIER_CONNECTION, VERIFIER_RECEIVES, SlotState, VerifierState

_DROPPED: Final = frozenset({ErrorCode.WRONG_EPOCH, ErrorCode.WRONG_SESSION, ErrorCode.DUPLICATE})
"""Faults of a reply frame that only drop the frame; every other fault discards the whole proposal."""

_WHILE_ACTIVE: Final = frozenset(kind for kind, states in VERIFIER_RECEIVES.items() if VerifierState.ACTIVE in states)
"""A row of the table by itself: hashing a state takes longer than reading a prefix."""


class VerifierInbox(Peer):
    """State, staging and reception of a Spark-side connection."""

    def __init__(
        self,
        parameters: HelloParameters,
        allocate: Callable[[int], Buffer] = aligned_memory,
        direct_receive: bool = False,
    ) -> None:
        super().__init__(parameters)
        self.state = VerifierState.IDLE
        self.staging: Staging | None = None
        self._allocate = allocate
        self._direct_receive = direct_receive
        self._write: Write | None = None
        self._slots = tuple(VerifierSlot(index) for index in range(parameters.max_slots))
        self._serial = 0
        self._version: WireVersion = parameters.versions[0]
        self._hello: Hello | None = None
        self._drafter_nonce = b""
        self._hello_deadline_ns = 0
        self._last_ping_ns = 0
        self._unanswered_ns: int | None = None
        self._ping_nonce = 0
        self._rows_sent = 0
        self._credit_limit = 0

    def receive(self, frame: Buffer | PlacedFrame, now_ns: int) -> list[VerifierEvent]:
        """Take one whole received frame. Never raises for what the peer sent.

        A placed frame must lie where :meth:`place` said; without that it is a frame that lacks a body.
        """
        written = None
        if self._write is not None or isinstance(frame, PlacedFrame):
            written, frame = self._written(frame)
        opened = self._open_frame(frame, now_ns)
        if opened is None:
            return []
        prefix, view = opened
        self._unanswered_ns = None
        active = self.state is VerifierState.ACTIVE and prefix.type in _WHILE_ACTIVE
        if not active and self.state not in VERIFIER_RECEIVES.get(prefix.type, frozenset()):
            self._count(ErrorCode.UNEXPECTED_MESSAGE)
            return []
        if prefix.slot != SLOT_NONE:
            return self._receive_for_slot(prefix, view, written)
        return self._receive_for_connection(prefix, view, now_ns)

    def place(self, view: memoryview) -> memoryview | None:
        """Where the last body of the frame under way, whose prefix ``view`` is, shall be received.

        That is memory of the block that its round has leased, as long as that body; it is asked for by a transport that
        keeps to ``placement``. None, and nothing is counted, unless the frame can be the ROW that its slot waits for,
        as far as its key and size tell: then it is to be received whole, as any other.
        """
        self._end_write()
        try:
            prefix = read_prefix(view)
            slot = self._admit(prefix)
        except RemoteProtocolError:
            return None
        memory = memory_of_rows(slot, prefix) if prefix.type is MessageType.ROW else None
        if memory is not None:
            assert slot.lease is not None
            self._write = Write(bytes(view), slot.lease.key, slot.lease, memory)
        return memory

    def _written(self, frame: Buffer | PlacedFrame) -> tuple[Write | None, Buffer]:
        """The write that ``frame`` ends, if it is of that write, and the frame or what is not yet staged of it."""
        write = self._end_write()
        if not isinstance(frame, PlacedFrame):
            return None, frame
        return write if write is not None and write.made(frame) else None, frame.head

    def _end_write(self) -> Write | None:
        """A transport that hands something out, or asks, writes nothing any more: the write that is over, if any."""
        write, self._write = self._write, None
        if write is not None:
            write.end()
        return write

    def _receive_for_connection(self, prefix: Prefix, view: memoryview, now_ns: int) -> list[VerifierEvent]:
        handler = self._HANDLERS.get(prefix.type)
        try:
            if handler is None:
                raise RemoteProtocolError(ErrorCode.UNEXPECTED_MESSAGE, "prefix.slot")
            return handler(self, self._decode(prefix, view), now_ns)
        except RemoteProtocolError as error:
            self._count(error.code)
            return []

    def next_deadline_ns(self) -> int | None:
        """When ``expire`` has something to do; None when nothing is pending."""
        if self.state in (VerifierState.HELLO_SENT, VerifierState.PROOF_SENT):
            return self._hello_deadline_ns
        if self.state not in (VerifierState.ACTIVE, VerifierState.DRAINING):
            return None
        rounds = [slot.deadline_ns for slot in self._slots if slot.state is SlotState.AWAITING]
        return min([self._last_ping_ns + self._heartbeat_ns(), self._silence_ends_ns(), *rounds])

    def expire(self, now_ns: int) -> list[VerifierEvent]:
        """Act on every deadline up to ``now_ns``. Feed everything received to ``receive`` first."""
        if self.state in (VerifierState.HELLO_SENT, VerifierState.PROOF_SENT):
            return self._check_handshake(now_ns)
        if self.state not in (VerifierState.ACTIVE, VerifierState.DRAINING):
            return []
        overdue = [slot for slot in self._slots if slot.state is SlotState.AWAITING and slot.deadline_ns <= now_ns]
        events: list[VerifierEvent] = [self._time_out(slot) for slot in overdue]
        return events + self._check_liveness(now_ns)

    # Connection messages

    def _on_accept(self, message: Message, now_ns: int) -> list[VerifierEvent]:
        assert isinstance(message, Accept)
        self._check_hello_echo(message.verifier_epoch, message.serial)
        try:
            self._check_proof(message)
            self.negotiated = accepted_terms(self.parameters, message, self._version)
        except RemoteProtocolError as error:
            self._count(error.code)
            self._move("reject")
            return [Rejected(error.code, error.where, "", "")]
        self._move("accept")
        self._prepare(self.negotiated)
        self._last_ping_ns = now_ns
        return [Accepted(self.negotiated)]

    def _check_proof(self, accept: Accept) -> None:
        """With a secret, nobody but a drafter that was challenged by our nonce, and holds it too, is believed."""
        authentication = self.parameters.authentication
        if authentication is None:
            if accept.auth:
                raise RemoteProtocolError(ErrorCode.AUTH_UNSUPPORTED, "ACCEPT.auth")
            return
        hello = self._hello if self.state is VerifierState.PROOF_SENT else None
        if hello is None or not authentication.drafter_is_genuine(accept, hello, self._drafter_nonce):
            raise RemoteProtocolError(ErrorCode.AUTH_FAILED, "ACCEPT.auth")

    def _on_challenge(self, message: Message, _now_ns: int) -> list[VerifierEvent]:
        assert isinstance(message, Challenge)
        self._check_hello_echo(message.verifier_epoch, message.serial)
        authentication, hello = self.parameters.authentication, self._hello
        if authentication is None or hello is None:
            raise RemoteProtocolError(ErrorCode.UNEXPECTED_MESSAGE, "CHALLENGE")
        self._move("challenge")
        self._drafter_nonce = message.nonce
        self._queue(authentication.proven(hello, message.nonce))
        return []

    def _prepare(self, terms: Negotiated) -> None:
        """Take all staging of the connection, once; blocks that are still consumed outlive a reconnect."""
        self._credit_limit, self._rows_sent = terms.context_credit_rows, 0
        wanted = (terms.max_in_flight, terms.reply_bytes)
        kept = self.staging
        if kept is None or (len(kept.leases), len(kept.leases[0].storage)) != wanted:
            self.staging = Staging(*wanted, self._allocate)

    def _on_reject(self, message: Message, _now_ns: int) -> list[VerifierEvent]:
        assert isinstance(message, Reject)
        self._check_hello_echo(message.verifier_epoch, message.serial)
        self._move("reject")
        return [Rejected(message.code, message.field, message.verifier_value, message.drafter_value)]

    def _check_hello_echo(self, epoch: int, serial: int) -> None:
        if (epoch, serial) != (self.parameters.epoch, self._serial):
            raise RemoteProtocolError(ErrorCode.STALE_HELLO, "ACCEPT.serial")

    def _check_epoch(self, epoch: int) -> None:
        if self.negotiated is None or epoch != self.negotiated.peer_epoch:
            raise RemoteProtocolError(ErrorCode.WRONG_EPOCH, "epoch")

    def _on_ping(self, message: Message, _now_ns: int) -> list[VerifierEvent]:
        assert isinstance(message, Ping)
        self._check_epoch(message.epoch)
        self._queue(Pong(self.parameters.epoch, message.nonce, 0, 0))
        return []

    def _on_pong(self, message: Message, _now_ns: int) -> list[VerifierEvent]:
        assert isinstance(message, Pong)
        self._check_epoch(message.epoch)
        events: list[VerifierEvent] = []
        if message.credit_limit > self._credit_limit:
            events.append(CreditGranted(message.credit_limit - self._credit_limit))
            self._credit_limit = message.credit_limit
        if message.nonce:
            events.append(PongReceived(message.nonce, message.load_permille))
        return events

    def _on_drain(self, message: Message, _now_ns: int) -> list[VerifierEvent]:
        assert isinstance(message, Drain)
        self._check_epoch(message.epoch)
        self._move("drain")
        return [Draining(message.deadline_ms)]

    def _on_stats(self, message: Message, _now_ns: int) -> list[VerifierEvent]:
        assert isinstance(message, Stats)
        self._check_epoch(message.epoch)
        if not message.is_report:
            raise RemoteProtocolError(ErrorCode.UNEXPECTED_MESSAGE, "STATS.is_report")
        return [StatsReceived(message)]

    def _on_error(self, message: Message, _now_ns: int) -> list[VerifierEvent]:
        assert isinstance(message, ErrorMessage)
        self._count(message.code)
        event = PeerError(message.code, message.scope, message.where)
        if message.scope is not Scope.CONNECTION:
            return [event]
        return [*self._lose(message.code), event]

    # Slot messages

    def _receive_for_slot(self, prefix: Prefix, view: memoryview, written: Write | None) -> list[VerifierEvent]:
        try:
            slot = self._admit(prefix)
        except RemoteProtocolError as error:
            self._count(error.code)
            return []
        if written is None and prefix.type is MessageType.ROW and self._takes_expected_rows(slot, view):
            return []
        try:
            if written is not None:
                return self._on_placed_row(slot, prefix, view, written.memory)
            message = self._decode(prefix, view)
            return self._SLOT_HANDLERS[prefix.type](self, slot, prefix, message, view)
        except RemoteProtocolError as error:
            self._count(error.code)
            if error.code in _DROPPED or not self._answers(slot, prefix):
                return []
            return [self._end_round(slot, error)]

    def _admit(self, prefix: Prefix) -> VerifierSlot:
        """The live slot of a reply, from the prefix alone."""
        if prefix.type not in self._SLOT_HANDLERS:
            raise RemoteProtocolError(ErrorCode.UNEXPECTED_MESSAGE, "prefix.slot")
        if self.negotiated is None or prefix.slot >= self.negotiated.max_slots:
            raise RemoteProtocolError(ErrorCode.SLOT_OUT_OF_RANGE, "prefix.slot")
        slot = self._slots[prefix.slot]
        if slot.expired is not None and slot.expired == prefix.key:
            raise RemoteProtocolError(ErrorCode.LATE, "prefix.round")
        if slot.state is SlotState.FREE:
            raise RemoteProtocolError(ErrorCode.SLOT_NOT_OPEN, "prefix.slot")
        if slot.generation != prefix.generation:
            raise RemoteProtocolError(ErrorCode.STALE_GENERATION, "prefix.generation")
        answers = slot.state is SlotState.AWAITING and slot.round == prefix.round
        if not answers and prefix.type is not MessageType.ERROR:
            resolved = prefix.round == slot.round
            raise RemoteProtocolError(ErrorCode.DUPLICATE if resolved else ErrorCode.STALE_ROUND, "prefix.round")
        return slot

    @staticmethod
    def _takes_expected_rows(slot: VerifierSlot, view: memoryview) -> bool:
        """Whether the admitted ROW was the expected one; if not, it is to be decoded."""
        expected, lease = slot.expected, slot.lease
        assert expected is not None
        assert lease is not None
        taken = expected.take(view, slot.rows_received, lease.storage)
        slot.rows_received += taken
        return taken > 0

    @staticmethod
    def _answers(slot: VerifierSlot, prefix: Prefix) -> bool:
        return slot.state is SlotState.AWAITING and slot.round == prefix.round

    def _on_row(self, slot: VerifierSlot, _prefix: Prefix, message: Message, view: memoryview) -> list[VerifierEvent]:
        assert isinstance(message, Row)
        self._check_reply_owner(slot, message.session, message.epoch)
        stage_rows(slot, message, view)
        return []

    def _on_placed_row(
        self, slot: VerifierSlot, prefix: Prefix, head: memoryview, body: memoryview
    ) -> list[VerifierEvent]:
        """:meth:`_on_row` where the last body of the frame is in its place."""
        message = self._decode(prefix, head, len(body))
        assert isinstance(message, Row)
        self._check_reply_owner(slot, message.session, message.epoch)
        stage_placed_rows(slot, message, head, body, self._terms().vocab_size)
        return []

    def _on_completion(
        self, slot: VerifierSlot, _prefix: Prefix, message: Message, _view: memoryview
    ) -> list[VerifierEvent]:
        assert isinstance(message, Completion)
        self._check_reply_owner(slot, message.session, message.epoch)
        if message.status != STATUS_OK:
            error = RemoteProtocolError(_status_code(message.status), "COMPLETION.status", scope=Scope.SLOT)
            self._count(error.code)
            return [self._end_round(slot, error)]
        assert self.negotiated is not None
        proposal = finish_reply(slot, message, self.negotiated)
        slot.move("reply", "COMPLETION")
        slot.replied, slot.lease = True, None
        return [proposal]

    def _on_slot_error(
        self, slot: VerifierSlot, prefix: Prefix, message: Message, _view: memoryview
    ) -> list[VerifierEvent]:
        assert isinstance(message, ErrorMessage)
        if message.scope is Scope.CONNECTION:
            return self._on_error(message, 0)
        if message.scope is Scope.FRAME or (message.scope is Scope.ROUND and not self._answers(slot, prefix)):
            self._count(message.code)
            return [PeerError(message.code, message.scope, message.where)]
        error = RemoteProtocolError(message.code, message.where, scope=message.scope)
        self._count(message.code)
        if slot.state is SlotState.AWAITING:
            return [self._end_round(slot, error)]
        return self._fail_idle(slot, message.code)

    def _check_reply_owner(self, slot: VerifierSlot, session: int, epoch: int) -> None:
        if self.negotiated is None or epoch != self.negotiated.peer_epoch:
            raise RemoteProtocolError(ErrorCode.WRONG_EPOCH, "epoch")
        if session != slot.session:
            raise RemoteProtocolError(ErrorCode.WRONG_SESSION, "session")

    # Ends of rounds, slots and connections

    def _end_round(self, slot: VerifierSlot, error: RemoteProtocolError) -> StepFailed:
        """Discard the whole proposal; the slot goes on unless the error's scope is the slot or wider."""
        generation, round_ = slot.generation, slot.round
        fatal = error.scope >= Scope.SLOT
        if fatal:
            self._kill_generation(slot)
        else:
            slot.move("discard", "ROW")
            self._drop_lease(slot)
        return StepFailed(slot.index, slot.session, generation, round_, error.code, fatal)

    def _fail_idle(self, slot: VerifierSlot, code: ErrorCode) -> list[VerifierEvent]:
        if slot.state is SlotState.DORMANT:
            return []
        generation = slot.generation
        self._kill_generation(slot)
        return [SlotFailed(slot.index, slot.session, generation, slot.generation, code)]

    def _time_out(self, slot: VerifierSlot) -> StepTimedOut:
        self._count(ErrorCode.STEP_TIMED_OUT)
        dead = slot.key
        self._kill_generation(slot)
        slot.expired = dead
        return StepTimedOut(slot.index, slot.session, dead.generation, slot.generation, dead.round)

    def _kill_generation(self, slot: VerifierSlot) -> None:
        """Bump the generation, and only then let go of the staging."""
        slot.move("fail", "slot")
        slot.begin(slot.generation + 1, 0)
        self._drop_lease(slot)

    def _drop_lease(self, slot: VerifierSlot) -> None:
        lease, slot.lease = slot.lease, None
        if lease is None or lease.state is not LeaseState.LEASED:
            return
        if self._direct_receive or (self._write is not None and self._write.lease is lease):
            lease.quarantine()
        else:
            lease.abandon()

    def _lose(self, code: ErrorCode) -> list[VerifierEvent]:
        """The connection is gone: every slot is free, every unresolved round failed."""
        self._move("lose")
        return self._retire_slots(code)

    def _retire_slots(self, code: ErrorCode) -> list[VerifierEvent]:
        events: list[VerifierEvent] = []
        for slot in self._slots:
            if slot.state is SlotState.FREE:
                continue
            if slot.state is SlotState.AWAITING:
                events.append(StepFailed(slot.index, slot.session, slot.generation, slot.round, code, True))
            slot.move("close", "slot")
            slot.begin(slot.generation + 1, 0)
            self._drop_lease(slot)
        return events

    def _check_handshake(self, now_ns: int) -> list[VerifierEvent]:
        if now_ns < self._hello_deadline_ns:
            return []
        self._count(ErrorCode.PEER_SILENT)
        self._move("lose")
        return [PeerSilent(now_ns - self._heard_ns)]

    def _check_liveness(self, now_ns: int) -> list[VerifierEvent]:
        if now_ns >= self._silence_ends_ns():
            self._count(ErrorCode.PEER_SILENT)
            return [*self._lose(ErrorCode.PEER_SILENT), PeerSilent(now_ns - self._heard_ns)]
        if now_ns - self._last_ping_ns >= self._heartbeat_ns():
            self._queue(self._next_ping(now_ns))
        return []

    def _next_ping(self, now_ns: int) -> Ping:
        self._ping_nonce += 1
        self._last_ping_ns = now_ns
        if self._unanswered_ns is None:
            self._unanswered_ns = now_ns
        return Ping(self.parameters.epoch, self._ping_nonce)

    def _heartbeat_ns(self) -> int:
        return self._terms().heartbeat_ms * NANOSECONDS_PER_MS

    def _silence_ends_ns(self) -> int:
        """When an unanswered PING proves silence; a stall of our own thread, without a PING, does not."""
        if self._unanswered_ns is None:
            return U64_MAX
        return self._unanswered_ns + SILENT_HEARTBEATS * self._heartbeat_ns()

    def _move(self, action: str) -> None:
        self.state = VERIFIER_CONNECTION[self.state][action]

    _HANDLERS: ClassVar[dict[MessageType, Callable[[VerifierInbox, Message, int], list[VerifierEvent]]]] = {
        MessageType.ACCEPT: _on_accept,
        MessageType.REJECT: _on_reject,
        MessageType.CHALLENGE: _on_challenge,
        MessageType.PING: _on_ping,
        MessageType.PONG: _on_pong,
        MessageType.DRAIN: _on_drain,
        MessageType.STATS: _on_stats,
        MessageType.ERROR: _on_error,
    }

    _SLOT_HANDLERS: ClassVar[
        dict[
            MessageType,
            Callable[[VerifierInbox, VerifierSlot, Prefix, Message, memoryview], list[VerifierEvent]],
        ]
    ] = {
        MessageType.ROW: _on_row,
        MessageType.COMPLETION: _on_completion,
        MessageType.ERROR: _on_slot_error,
    }


def _status_code(status: int) -> ErrorCode:
    try:
        return ErrorCode(status)
    except ValueError:
        return ErrorCode.DRAFT_FAILED
