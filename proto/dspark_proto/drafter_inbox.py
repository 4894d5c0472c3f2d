"""The receiving half of the worker side: frames in, events and automatic answers out.

Invariants: no fault of the peer leaves ``receive``; a new HELLO kills every slot; with a secret, nothing of a
HELLO is looked at, or told, before it is proven; CHALLENGE, PING, STATS and repeated STEPs are answered without
the caller. Spec: SPEC.md, sections "HELLO, ACCEPT, REJECT", "Authentication", "PING, PONG", "STATS".
Base class of ``DrafterConnection``, which adds what a worker answers; slot messages are in
``DrafterSessions``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final

from .buffers import Buffer
from .drafter_sessions import DrafterSessions
from .errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from .events import DrafterEvent, HelloReceived, PeerError, SlotClosed
from .hello import Challenge, Hello
from .limits import AUTH_NONCE_BYTES, SLOT_NONE
from .messages import ErrorMessage, Message, Ping, Pong, Stats, StatsCounter
from .negotiation import (
    HelloParameters,
    Mismatch,
    Negotiated,
    common_version,
    compatibility_for,
    first_mismatch,
    negotiate,
)
from .prefix import Prefix
from .registry import ErrorCode, MessageType, Scope
from .slots import require
from .states import DRAFTER_CONNECTION, DRAFTER_RECEIVES, DrafterState, SlotState

_WHILE_ACTIVE: Final = frozenset(kind for kind, states in DRAFTER_RECEIVES.items() if DrafterState.ACTIVE in states)
"""A row of the table by itself: hashing a state takes longer than reading a prefix."""


class DrafterInbox(DrafterSessions):
    """State and reception of a worker-side connection. ``load_permille`` is reported in every PONG."""

    def __init__(self, parameters: HelloParameters) -> None:
        super().__init__(parameters)
        self.load_permille = 0
        self._hello: Hello | None = None
        self._refusal: tuple[ErrorCode, Mismatch] | None = None
        self._offer: Negotiated | None = None
        self._challenge: tuple[Hello, bytes] | None = None
        self._proof_nonce = b""
        self._told_hello_required = False
        self._announced_credit = 0

    def receive(self, buffer: Buffer, now_ns: int) -> list[DrafterEvent]:
        """Take one whole received frame. Never raises for what the peer sent."""
        opened = self._open_frame(buffer, now_ns)
        if opened is None:
            return []
        prefix, view = opened
        kind = prefix.type
        if self.state is not DrafterState.ACTIVE or kind not in _WHILE_ACTIVE:
            allowed = DRAFTER_RECEIVES.get(kind, frozenset())
            if self.state not in allowed:
                self._refuse_early(kind, known=bool(allowed))
                return []
        try:
            handler = self._SLOT_HANDLERS.get(kind)
            if handler is not None:
                return handler(self, self._admit(prefix), prefix, self._decode(prefix, view), view)
            if kind is MessageType.STEP and prefix.slot != SLOT_NONE:
                self._admit(prefix)
            return self._HANDLERS[kind](self, prefix, self._decode(prefix, view), view)
        except ProtocolError as error:
            if prefix.type is MessageType.ERROR:
                self._count(error.code)
            else:
                self._refuse(error, prefix.key)
            return []

    def _refuse_early(self, kind: MessageType, known: bool) -> None:
        """A frame before HELLO, for instance from a verifier that has not noticed a restart: tell it once."""
        if not known:
            self._count(ErrorCode.UNEXPECTED_MESSAGE)
            return
        self._count(ErrorCode.HELLO_REQUIRED)
        greeting = self.state in (DrafterState.HELLO_RECEIVED, DrafterState.CHALLENGED)
        if not greeting and not self._told_hello_required and kind is not MessageType.ERROR:
            self._told_hello_required = True
            self._queue(ErrorMessage(ErrorCode.HELLO_REQUIRED, Scope.CONNECTION, 0, "connection"))

    # Connection messages

    def _on_hello(self, _prefix: Prefix, message: Message, _view: memoryview) -> list[DrafterEvent]:
        assert isinstance(message, Hello)
        events = self._retire_slots()
        self._move("hello")
        self._hello, self._refusal, self._offer = message, None, None
        self._told_hello_required = False
        try:
            if not self._authenticate(message):
                return list(events)
            version = common_version(self.parameters, message)
            mismatch = first_mismatch(compatibility_for(self.parameters.compatibility, version), message)
            if mismatch is None:
                self._offer = negotiate(self.parameters, message, version)
                return [*events, HelloReceived(None, None, self._offer)]
            code = ErrorCode.INCOMPATIBLE
        except RemoteProtocolError as error:
            code, mismatch = error.code, Mismatch(error.where, "", "")
        self._count(code)
        self._refusal = code, mismatch
        return [*events, HelloReceived(code, mismatch, None)]

    def _authenticate(self, hello: Hello) -> bool:
        """Whether ``hello`` may be looked at; False when it has been challenged instead.

        A challenge serves one proof, whatever comes of it. Raises :class:`RemoteProtocolError` AUTH_UNSUPPORTED,
        AUTH_REQUIRED or AUTH_FAILED.
        """
        challenge, self._challenge = self._challenge, None
        self._proof_nonce = b""
        authentication = self.parameters.authentication
        if authentication is None:
            if hello.auth:
                raise RemoteProtocolError(ErrorCode.AUTH_UNSUPPORTED, "HELLO.auth")
            return True
        if not hello.auth:
            raise RemoteProtocolError(ErrorCode.AUTH_REQUIRED, "HELLO.auth")
        if len(hello.auth) == AUTH_NONCE_BYTES:
            self._challenge = hello, authentication.nonce()
            self._move("challenge")
            self._queue(Challenge(self.parameters.epoch, hello.epoch, hello.serial, self._challenge[1]))
            return False
        if challenge is None or not authentication.verifier_is_genuine(hello, *challenge):
            raise RemoteProtocolError(ErrorCode.AUTH_FAILED, "HELLO.auth")
        self._proof_nonce = challenge[1]
        return True

    def _retire_slots(self) -> list[DrafterEvent]:
        """Close every slot: cached replies, keys and generations of the old connection are dead."""
        live = [slot for slot in self._slots if slot.state is not SlotState.FREE]
        self._slots, self.negotiated = (), None
        return [SlotClosed(slot.index, slot.session, None) for slot in live]

    def _on_ping(self, _prefix: Prefix, message: Message, _view: memoryview) -> list[DrafterEvent]:
        assert isinstance(message, Ping)
        self._check_epoch(message.epoch)
        self._queue(self._pong(message.nonce))
        return []

    def _pong(self, nonce: int) -> Pong:
        self._announced_credit = self._credit_limit()
        return Pong(self.parameters.epoch, nonce, self.load_permille, self._announced_credit)

    def _on_pong(self, _prefix: Prefix, message: Message, _view: memoryview) -> list[DrafterEvent]:
        assert isinstance(message, Pong)
        self._check_epoch(message.epoch)
        return []

    def _on_error(self, _prefix: Prefix, message: Message, _view: memoryview) -> list[DrafterEvent]:
        assert isinstance(message, ErrorMessage)
        self._count(message.code)
        return [PeerError(message.code, message.scope, message.where)]

    def _on_stats(self, _prefix: Prefix, message: Message, _view: memoryview) -> list[DrafterEvent]:
        assert isinstance(message, Stats)
        self._check_epoch(message.epoch)
        require(not message.is_report, ErrorCode.UNEXPECTED_MESSAGE, "STATS.is_report")
        counted = ((code, self.counters[code.counter]) for code in ErrorCode)
        self._queue(
            Stats(
                self.parameters.epoch,
                is_report=1,
                slots_open=sum(slot.state is not SlotState.FREE for slot in self._slots),
                rounds_unresolved=sum(slot.state is SlotState.AWAITING for slot in self._slots),
                replies_cached=sum(bool(slot.reply_frames) for slot in self._slots),
                credit_outstanding_rows=self._rows_received - self._rows_consumed,
                counters=tuple(StatsCounter(code, count) for code, count in counted if count),
            )
        )
        return []

    def _check_epoch(self, epoch: int) -> None:
        require(epoch == self._terms().peer_epoch, ErrorCode.WRONG_EPOCH, "epoch")

    def _move(self, action: str) -> None:
        following = DRAFTER_CONNECTION[self.state].get(action)
        if following is None:
            raise LocalProtocolError(ErrorCode.UNEXPECTED_MESSAGE, action, f"the connection is {self.state.value}")
        self.state = following

    _HANDLERS: ClassVar[
        dict[MessageType, Callable[[DrafterInbox, Prefix, Message, memoryview], list[DrafterEvent]]]
    ] = {
        MessageType.HELLO: _on_hello,
        MessageType.STEP: DrafterSessions._on_step,
        MessageType.PING: _on_ping,
        MessageType.PONG: _on_pong,
        MessageType.ERROR: _on_error,
        MessageType.STATS: _on_stats,
    }
