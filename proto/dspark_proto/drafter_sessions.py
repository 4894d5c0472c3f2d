"""The slots of the worker side: OPEN, CONTEXT, STEP, COMMIT, RESET, CANCEL and CLOSE.

Invariants: a stale frame is dropped from its prefix alone; a frame that a slot needed and that cannot be used
fails the slot, loudly, until RESET or CLOSE; nothing is redrawn under a used key; a STEP's prefix digest is
checked wherever the tokens are known. Spec: SPEC.md, sections "OPEN" to "CLOSE". Base class of
``DrafterInbox``.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import ClassVar, Final

from .bodies import BodyDescriptor
from .buffers import aligned
from .digest import prefix_digest
from .errors import ProtocolError, RemoteProtocolError
from .events import (
    ContextArrived,
    DrafterEvent,
    SlotCancelled,
    SlotClosed,
    SlotCommitted,
    SlotOpened,
    SlotReset,
    make_step_arrived,
)
from .frame import check_body, checked_bodies
from .limits import GENERATION_MAX, NO_COMMIT, SLOT_NONE
from .messages import Cancel, Close, Commit, Context, ErrorMessage, Message, Open, Reset, Step, StepItem
from .negotiation import HelloParameters, Negotiated
from .peer import Peer
from .prefix import NO_KEY, Key, Prefix
from .registry import DTYPE_BYTES, BodyKind, Dtype, ErrorCode, MessageType, Scope
from .slots import DrafterSlot, check_commit, check_context, check_owner, check_session, check_step, require
from .states import SLOT, DrafterState, SlotState

_TOKEN: Final = Struct("<I")
_SIGN: Final = 1 << 63
_NO_TAPS: Final = memoryview(b"")
_NO_KEY: Final = (NO_KEY.slot, NO_KEY.generation, NO_KEY.round)

_SILENT: Final = frozenset(
    {
        ErrorCode.STALE_GENERATION,
        ErrorCode.STALE_ROUND,
        ErrorCode.SLOT_NOT_OPEN,
        ErrorCode.WRONG_SESSION,
        ErrorCode.SLOT_NEEDS_RESET,
        ErrorCode.DUPLICATE,
    }
)
"""Dropped and counted without an ERROR: the sender has moved on, or has been told already."""

_NEW_GENERATION: Final = frozenset({MessageType.OPEN, MessageType.RESET, MessageType.CANCEL, MessageType.CLOSE})
"""Messages whose prefix carries a generation above the slot's; the others carry the current one."""


class DrafterSessions(Peer):
    """The slot ledger of one connection, and how its messages move it."""

    def __init__(self, parameters: HelloParameters) -> None:
        super().__init__(parameters)
        self.state = DrafterState.AWAITING_HELLO
        self._slots: tuple[DrafterSlot, ...] = ()
        self._rows_received = 0
        self._rows_consumed = 0

    def _admit(self, prefix: Prefix) -> DrafterSlot:
        """The slot of a frame that names one, with the generation rule applied, from the prefix alone."""
        slot = self._slot(prefix.slot)
        if prefix.type in _NEW_GENERATION:
            require(prefix.generation <= GENERATION_MAX, ErrorCode.GENERATION_EXHAUSTED, "prefix.generation")
            fresh = prefix.generation > slot.generation
        else:
            if slot.state is SlotState.FREE:
                raise RemoteProtocolError(ErrorCode.SLOT_NOT_OPEN, "prefix.slot")
            fresh = prefix.generation == slot.generation
        if not fresh:
            raise RemoteProtocolError(ErrorCode.STALE_GENERATION, "prefix.generation")
        return slot

    def _slot(self, index: int) -> DrafterSlot:
        if index >= len(self._slots):
            raise RemoteProtocolError(ErrorCode.SLOT_OUT_OF_RANGE, "prefix.slot")
        return self._slots[index]

    def _refuse(self, error: ProtocolError, key: Key) -> None:
        """Count a refusal; unless the sender has moved on, tell it, and fail the slot that lost something."""
        self._count(error.code)
        if error.code in _SILENT or key.slot == SLOT_NONE:
            return
        scope = Scope.SLOT if error.scope < Scope.SLOT else error.scope
        session = 0
        if key.slot < len(self._slots):
            slot = self._slots[key.slot]
            session = slot.session
            if scope is Scope.SLOT and slot.generation == key.generation and "fail" in SLOT[slot.state]:
                slot.move("fail", "slot")
        self._queue(ErrorMessage(error.code, scope, session, error.where), key)

    def _credit_limit(self) -> int:
        return self._terms().context_credit_rows + self._rows_consumed

    def _on_open(self, slot: DrafterSlot, prefix: Prefix, message: Message, _view: memoryview) -> list[DrafterEvent]:
        assert isinstance(message, Open)
        terms = self._terms()
        require(self.state is not DrafterState.DRAINING, ErrorCode.DRAINING, "OPEN")
        allowed = terms.takes_lane(message.lane, message.draft_temperature_micro)
        require(allowed, ErrorCode.LANE_MISMATCH, "OPEN.lane")
        require(terms.takes(message.support), ErrorCode.SUPPORT_OUT_OF_RANGE, "OPEN.support")
        require(slot.state is SlotState.FREE, ErrorCode.SLOT_BUSY, "OPEN.slot")
        slot.move("open", "OPEN")
        _begin(slot, prefix.generation, message.context_start, message.start_digest)
        slot.session, slot.opened_generation = message.session, prefix.generation
        slot.support, slot.lane = message.support, message.lane
        slot.reply_rows, slot.stored_rows = {}, None  # they carry the session, and rows of its support
        seed = (message.seed ^ _SIGN) - _SIGN
        return [
            SlotOpened(
                slot.index,
                message.session,
                prefix.generation,
                seed,
                message.draft_temperature_micro,
                message.support,
                message.lane,
                message.choice,
                message.context_start,
                message.processor_version,
                message.grammar_version,
                message.stop_version,
            )
        ]

    def _on_context(self, slot: DrafterSlot, prefix: Prefix, message: Message, view: memoryview) -> list[DrafterEvent]:
        assert isinstance(message, Context)
        try:
            return self._take_context(slot, prefix, message, view)
        except ProtocolError:
            # The verifier has counted these rows as sent: without them its window would be smaller for ever.
            self._rows_received += message.rows
            self._rows_consumed += message.rows
            raise

    def _take_context(
        self, slot: DrafterSlot, prefix: Prefix, message: Context, view: memoryview
    ) -> list[DrafterEvent]:
        check_owner(slot, message.session, prefix.generation, "CONTEXT")
        check_context(slot, message.first_position)
        credit = self._credit_limit() - self._rows_received
        require(message.rows <= credit, ErrorCode.CREDIT_EXCEEDED, "CONTEXT.rows")
        with_tokens = len(message.bodies) == 2
        shapes = self._context_shapes(message.rows, with_tokens)
        require(tuple(one.shape for one in message.bodies) == shapes, ErrorCode.BAD_DESCRIPTOR, "CONTEXT.bodies")
        bodies = checked_bodies(prefix, message, view)
        token_ids = bodies[1] if with_tokens else None
        slot.digest = _extended(slot.digest, token_ids)
        slot.known_tokens = ()
        slot.context_end += message.rows
        self._rows_received += message.rows
        return [
            ContextArrived(
                slot.index,
                slot.session,
                slot.generation,
                message.first_position,
                message.rows,
                bodies[0],
                token_ids,
            )
        ]

    def _context_shapes(self, rows: int, with_tokens: bool) -> tuple[tuple[BodyKind, Dtype, int, int, int], ...]:
        taps = self._tap_shape(rows)
        return (taps, (BodyKind.TOKENS, Dtype.INT32, rows, 1, rows * _TOKEN.size)) if with_tokens else (taps,)

    def _tap_shape(self, rows: int) -> tuple[BodyKind, Dtype, int, int, int]:
        terms = self._terms()
        entries = terms.tap_row_bytes // DTYPE_BYTES[terms.tap_dtype]
        return BodyKind.TAPS, terms.tap_dtype, rows, entries, rows * terms.tap_row_bytes

    def _on_commit(self, slot: DrafterSlot, prefix: Prefix, message: Message, _view: memoryview) -> list[DrafterEvent]:
        assert isinstance(message, Commit)
        check_owner(slot, message.session, prefix.generation, "COMMIT")
        last = slot.item
        if slot.committed and slot.known_tokens[1:] == (
            *slot.drafted[: message.accepted_count],
            message.token,
        ):
            raise RemoteProtocolError(ErrorCode.DUPLICATE, "COMMIT")
        check_commit(slot, message.accepted_count, message.token, None)
        assert last is not None
        require(prefix.round == slot.round, ErrorCode.STALE_ROUND, "prefix.round")
        position = last.anchor_position + message.accepted_count + 1
        require(message.position == position, ErrorCode.COMMIT_MISMATCH, "COMMIT.position")
        require(message.token < self._terms().vocab_size, ErrorCode.TOKEN_OUT_OF_RANGE, "COMMIT.token")
        if slot.known_tokens:
            survivors = (last.anchor_token, *slot.drafted[: message.accepted_count])
            self._check_digest(slot, survivors, message.prefix_digest, "COMMIT.prefix_digest")
            slot.known_tokens = (*survivors, message.token)
        slot.move("commit", "COMMIT")
        slot.committed = True
        return [
            SlotCommitted(
                slot.index,
                slot.session,
                slot.generation,
                slot.round,
                message.accepted_count,
                message.token,
                position,
            )
        ]

    @staticmethod
    def _check_digest(slot: DrafterSlot, tokens: tuple[int, ...], digest: bytes, where: str) -> None:
        """Where the tokens since ``slot.digest`` are known, ``digest`` must be their extension of it."""
        if slot.digest is not None and prefix_digest(tokens, slot.digest) != digest:
            raise RemoteProtocolError(ErrorCode.DIGEST_MISMATCH, where)

    def _on_reset(self, slot: DrafterSlot, prefix: Prefix, message: Message, _view: memoryview) -> list[DrafterEvent]:
        assert isinstance(message, Reset)
        check_session(slot, message.session, "RESET")
        slot.move("reset", "RESET")
        _begin(slot, prefix.generation, message.context_start, message.start_digest)
        return [SlotReset(slot.index, slot.session, slot.generation, message.cause, message.context_start)]

    def _on_cancel(self, slot: DrafterSlot, prefix: Prefix, message: Message, _view: memoryview) -> list[DrafterEvent]:
        assert isinstance(message, Cancel)
        check_session(slot, message.session, "CANCEL")
        slot.move("cancel", "CANCEL")
        _begin(slot, prefix.generation, 0, b"")
        return [SlotCancelled(slot.index, slot.session, slot.generation, message.cause)]

    def _on_close(self, slot: DrafterSlot, prefix: Prefix, message: Message, _view: memoryview) -> list[DrafterEvent]:
        assert isinstance(message, Close)
        check_session(slot, message.session, "CLOSE")
        slot.move("close", "CLOSE")
        _begin(slot, prefix.generation, 0, b"")
        return [SlotClosed(slot.index, message.session, message.cause)]

    # STEP

    def _on_step(self, prefix: Prefix, message: Message, view: memoryview) -> list[DrafterEvent]:
        assert isinstance(message, Step)
        first = message.items[0]
        key = (first.slot, first.generation, first.round) if len(message.items) == 1 else _NO_KEY
        if (prefix.slot, prefix.generation, prefix.round) != key:
            raise RemoteProtocolError(ErrorCode.BAD_FIELD, "STEP.items")
        if len(message.bodies) != sum([item.tap_rows > 0 for item in message.items]):
            raise RemoteProtocolError(ErrorCode.BAD_DESCRIPTOR, "STEP.bodies")
        bodies = iter(message.bodies)
        start = len(view) - prefix.body_bytes
        arrived = []
        for item in message.items:
            body = None
            if item.tap_rows:
                descriptor = next(bodies)
                end = start + aligned(descriptor.body_bytes)
                body, start = (descriptor, view[start:end]), end
            try:
                taken = self._take_item(item, body)
            except ProtocolError as error:
                self._refuse(error, Key(item.slot, item.generation, item.round))
            else:
                if taken is not None:
                    arrived.append(taken)
        return [make_step_arrived(tuple(arrived))] if arrived else []

    def _take_item(self, item: StepItem, body: tuple[BodyDescriptor, memoryview] | None) -> StepItem | None:
        """Start the item's round; None when it repeats the last one, whose reply is then sent again."""
        slot = self._slot(item.slot)
        # A slot that is ready for its owner needs no second look.
        if slot.state is not SlotState.READY or slot.session != item.session or slot.generation != item.generation:
            check_owner(slot, item.session, item.generation, "STEP")
        checksum = body[0].checksum if body else b""
        if slot.item is not None and item.round == slot.round:
            require(slot.is_retry(item, checksum), ErrorCode.ROUND_KEY_REUSED, "STEP.round")
            self._count(ErrorCode.DUPLICATE)
            self._outbox.extend(slot.reply_frames)
            return None
        terms = self._terms()
        check_step(slot, item, terms)
        taps = _NO_TAPS
        if body:
            if not _are_taps(body[0], item.tap_rows, terms):
                raise RemoteProtocolError(ErrorCode.BAD_DESCRIPTOR, "STEP.bodies")
            taps = check_body(*body)
        self._follow(slot, item)
        slot.start_round(item, checksum)
        slot.reply_frames = ()
        return item.with_taps(taps)

    def _follow(self, slot: DrafterSlot, item: StepItem) -> None:
        """Check the item's prefix digest as far as the tokens are known, then adopt it."""
        known = slot.known_tokens
        if known and item.accepted_count != NO_COMMIT:
            known = (*known[:1], *slot.drafted[: item.accepted_count], item.commit_token)
        if len(known) >= item.tap_rows:
            self._check_digest(slot, known[: item.tap_rows], item.prefix_digest, "STEP.prefix_digest")
        slot.digest = item.prefix_digest
        slot.known_tokens = (item.anchor_token,)

    _SLOT_HANDLERS: ClassVar[
        dict[
            MessageType,
            Callable[[DrafterSessions, DrafterSlot, Prefix, Message, memoryview], list[DrafterEvent]],
        ]
    ] = {
        MessageType.OPEN: _on_open,
        MessageType.CONTEXT: _on_context,
        MessageType.COMMIT: _on_commit,
        MessageType.RESET: _on_reset,
        MessageType.CANCEL: _on_cancel,
        MessageType.CLOSE: _on_close,
    }


def _are_taps(body: BodyDescriptor, rows: int, terms: Negotiated) -> bool:
    """Whether the body has the shape of ``rows`` tap rows."""
    return (
        body.kind is BodyKind.TAPS
        and body.dtype is terms.tap_dtype
        and body.rows == rows
        and body.entries * DTYPE_BYTES[body.dtype] == terms.tap_row_bytes
        and body.body_bytes == rows * terms.tap_row_bytes
    )


def _begin(slot: DrafterSlot, generation: int, context_start: int, digest: bytes) -> None:
    """Forget everything of older generations, cached replies included."""
    slot.begin(generation, context_start)
    slot.digest = digest
    slot.known_tokens = slot.drafted = ()
    slot.reply_frames = ()


def _extended(digest: bytes | None, token_ids: memoryview | None) -> bytes | None:
    if digest is None or token_ids is None:
        return None
    return prefix_digest((token for (token,) in _TOKEN.iter_unpack(token_ids)), digest)
