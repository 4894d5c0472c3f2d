"""The Spark side of a v2 connection: asks for proposals, and never trusts the answers.

Sans-IO: methods return frames to send, ``receive`` and ``expire`` (in :class:`VerifierInbox`) return events,
time is an argument. Invariant: local misuse raises LocalProtocolError and changes nothing. Spec: SPEC.md,
sections "OPEN" to "CLOSE". Called by the Spark engine's worker pool client, from one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .bodies import BodyDescriptor, describe, seal, unsealed
from .buffers import Buffer, aligned, byte_view
from .digest import EMPTY_DIGEST
from .errors import LocalProtocolError
from .expected_rows import ExpectedRows
from .frame import encode_frame, encode_sealing_into
from .limits import (
    CONTEXT_CHUNK_BYTES,
    CONTEXT_CHUNK_ROWS_MAX,
    CONTROL_BYTES_MAX,
    HANDSHAKE_DEADLINE_MS,
    NANOSECONDS_PER_MS,
    PREFIX_BYTES,
    U64_MAX,
)
from .messages import Cancel, Close, Commit, Context, Open, Reset, Stats, Step, StepItem
from .negotiation import Negotiated, hello_message
from .prefix import NO_KEY, Key, make_key
from .registry import DTYPE_BYTES, BodyKind, Cause, Dtype, ErrorCode, Lane, SupportPolicy, WireVersion
from .rows import ReplyLayout
from .slots import (
    VerifierSlot,
    check_commit,
    check_context,
    check_owner,
    check_session,
    check_step,
    check_taps,
    require,
)
from .staging import LeaseState, Staging
from .states import SlotState, VerifierState
from .verifier_inbox import VerifierInbox

_TOKEN_BYTES = DTYPE_BYTES[Dtype.INT32]


@dataclass(frozen=True, slots=True)
class ContextSend:
    """Frames of one ``context`` call, and how many of the offered rows they carry (bounded by credit)."""

    frames: tuple[memoryview, ...]
    rows: int


class VerifierConnection(VerifierInbox):
    """One Spark group's connection to one drafter worker.

    ``allocate(bytes)`` provides staging memory once per accepted connection. A transport writes into leased staging
    where :meth:`place` lets it: then the block of a round that dies meanwhile stays quarantined until the transport is
    heard of again. ``direct_receive`` says that it writes without asking, at any time: then every dead round's block is
    quarantined until :meth:`cancel_confirmed`.
    """

    def hello(self, now_ns: int, version: WireVersion | None = None) -> memoryview:
        """Ask for a connection; also after LOST. Every slot is free afterwards, without further events.

        ``version``: one of the parameters' versions, the first by default. Nothing is tried by itself: after
        ``Rejected`` with BAD_VERSION it is the caller who may name another. With a secret, the connection answers
        the worker's CHALLENGE by itself (see ``frames_to_send``).
        """
        version = version or self.parameters.versions[0]
        known = version in self.parameters.versions
        require(known, ErrorCode.BAD_VERSION, "HELLO.wire_versions", "not one of the parameters' versions")
        authentication = self.parameters.authentication
        nonce = b"" if authentication is None else authentication.nonce()
        self._retire_slots(ErrorCode.HELLO_REQUIRED)
        self._serial += 1
        self._hello_deadline_ns = now_ns + HANDSHAKE_DEADLINE_MS * NANOSECONDS_PER_MS
        self._unanswered_ns = None
        self._heard_ns = now_ns
        self._move("hello")
        self._version, self._drafter_nonce = version, b""
        self._hello = hello_message(self.parameters, self._serial, version, nonce)
        return encode_frame(self._hello)

    def open(
        self,
        slot: int,
        session: int,
        *,
        seed: int,
        support: SupportPolicy,
        lane: Lane,
        draft_temperature_micro: int = 0,
        choice: int = 0,
        context_start: int = 0,
        start_digest: bytes = EMPTY_DIGEST,
        processor_version: int = 0,
        grammar_version: int = 0,
        stop_version: int = 0,
    ) -> memoryview:
        """Lease ``slot`` to ``session`` with a new generation (see :meth:`generation`).

        ``seed`` is a signed 64-bit integer. ``context_start`` is the first position whose taps will be sent
        and ``start_digest`` the prefix digest before it.
        """
        terms = self._active()
        require(self.state is not VerifierState.DRAINING, ErrorCode.DRAINING, "OPEN", "use another worker")
        target = self._slot(slot)
        allowed = terms.takes_lane(lane, draft_temperature_micro)
        require(allowed, ErrorCode.LANE_MISMATCH, "OPEN.lane", "not negotiated")
        require(
            terms.takes(support),
            ErrorCode.SUPPORT_OUT_OF_RANGE,
            "OPEN.support",
            "use a smaller policy; dense rows only where both sides offer them",
        )
        require(-(2**63) <= seed < 2**63, ErrorCode.BAD_FIELD, "OPEN.seed", "must be a signed 64-bit integer")
        generation = target.next_generation()
        message = Open(
            session,
            seed & U64_MAX,
            draft_temperature_micro,
            support,
            lane,
            choice,
            context_start,
            start_digest,
            processor_version,
            grammar_version,
            stop_version,
        )
        target.move("open", "OPEN")
        target.begin(generation, context_start)
        target.session, target.opened_generation = session, generation
        target.support, target.lane = support, lane
        return encode_frame(message, Key(slot, generation))

    def context(
        self, slot: int, first_position: int, rows: int, taps: Buffer, token_ids: Buffer | None = None
    ) -> ContextSend:
        """Send target taps of committed positions, chunked, as far as the worker's credit allows.

        ``taps`` is raw [rows, tap layers * tap width] of the negotiated dtype, ``token_ids`` raw int32
        [rows]. Offer the remaining rows again after a ``CreditGranted`` event.
        """
        terms = self._active()
        target = self._slot(slot)
        check_session(target, target.session, "CONTEXT")
        check_owner(target, target.session, target.generation, "CONTEXT")
        check_context(target, first_position)
        taps_view = byte_view(taps)
        check_taps(taps_view, rows, terms, "CONTEXT")
        tokens_view = None if token_ids is None else byte_view(token_ids)
        if tokens_view is not None:
            require(
                len(tokens_view) == rows * _TOKEN_BYTES,
                ErrorCode.WRONG_SIZE,
                "CONTEXT.token_ids",
                "int32 [rows]",
            )
        allowed = min(rows, self._credit_limit - self._rows_sent)
        chunk = max(1, min(CONTEXT_CHUNK_ROWS_MAX, CONTEXT_CHUNK_BYTES // terms.tap_row_bytes))
        frames = [
            self._context_frame(target, start, min(chunk, allowed - start), taps_view, tokens_view)
            for start in range(0, allowed, chunk)
        ]
        self._rows_sent += allowed
        target.context_end += allowed
        return ContextSend(tuple(frames), allowed)

    def _context_frame(
        self, slot: VerifierSlot, start: int, rows: int, taps: memoryview, token_ids: memoryview | None
    ) -> memoryview:
        terms = self._terms()
        width = terms.tap_row_bytes
        parts = [taps[start * width : (start + rows) * width]]
        entries = width // DTYPE_BYTES[terms.tap_dtype]
        bodies = [describe(BodyKind.TAPS, terms.tap_dtype, rows, entries, parts[0], terms.checksum)]
        if token_ids is not None:
            parts.append(token_ids[start * _TOKEN_BYTES : (start + rows) * _TOKEN_BYTES])
            bodies.append(describe(BodyKind.TOKENS, Dtype.INT32, rows, 1, parts[1], terms.checksum))
        message = Context(slot.session, slot.context_end + start, rows, tuple(bodies))
        return encode_frame(message, Key(slot.index, slot.generation), parts)

    def step(self, items: Sequence[StepItem], now_ns: int, out: memoryview | None = None) -> memoryview:
        """Ask for one proposal per item, in one frame; leases staging and starts the step deadlines.

        An item that repeats its slot's unresolved one is a retry: same bytes, same lease, same deadline. The
        frame is written to ``out`` when given, else to new memory; the return value is the frame. When a
        check fails, nothing has changed for any item.
        """
        terms = self._active()
        slots = [self._slot(item.slot) for item in items]
        if len(slots) > 1 and len({slot.index for slot in slots}) < len(slots):
            raise LocalProtocolError(ErrorCode.ROUND_UNRESOLVED, "STEP.items", "twice")
        bodies = [_unsealed_taps(item, terms) for item in items]
        fresh = []
        for slot, item, body in zip(slots, items, bodies, strict=True):
            if slot.state is SlotState.AWAITING and _is_retry(slot, item, body):
                continue
            check_owner(slot, item.session, item.generation, "STEP")
            check_step(slot, item, terms)
            fresh.append((slot, item, body))
        pool = self._pool()
        free = pool.count(LeaseState.FREE)
        require(len(fresh) <= free, ErrorCode.STAGING_EXHAUSTED, "STEP", "release consumed proposals")
        frame = _step_frame(items, bodies, out)
        deadline_ns = now_ns + terms.step_deadline_ms * NANOSECONDS_PER_MS
        for slot, item, body in fresh:
            slot.start_round(item, body.checksum if body else b"")
            layout = self._layout(item.depth, slot.support)
            slot.lease = pool.take(slot.key, layout)
            slot.expected = _expected(slot, layout, terms)
            slot.rows_received = slot.rows_sound = 0
            slot.deadline_ns = deadline_ns
        return frame

    def commit(self, slot: int, accepted_count: int, token: int, prefix_digest: bytes) -> memoryview:
        """Report what survived of the last round when no STEP follows soon; at most once per round.

        ``token`` is the correction or bonus; ``prefix_digest`` covers every position before it.
        """
        self._active()
        target = self._slot(slot)
        check_session(target, target.session, "COMMIT")
        check_commit(target, accepted_count, token, None)
        last = target.item
        assert last is not None
        position = last.anchor_position + accepted_count + 1
        message = Commit(target.session, accepted_count, token, position, prefix_digest)
        target.move("commit", "COMMIT")
        target.committed = True
        return encode_frame(message, target.key)

    def reset(self, slot: int, cause: Cause, context_start: int = 0, start_digest: bytes = EMPTY_DIGEST) -> memoryview:
        """Start a new generation of the slot's session with an empty context at ``context_start``."""
        self._active()
        target = self._slot(slot)
        check_session(target, target.session, "RESET")
        message = Reset(target.session, cause, context_start, start_digest)
        return self._renew(target, message, "reset", context_start)

    def cancel(self, slot: int, cause: Cause) -> memoryview:
        """Stop the slot's round and kill its generation; the slot is dormant until ``reset`` or ``close``."""
        self._active()
        target = self._slot(slot)
        check_session(target, target.session, "CANCEL")
        return self._renew(target, Cancel(target.session, cause), "cancel", 0)

    def _renew(self, slot: VerifierSlot, message: Reset | Cancel, action: str, context_start: int) -> memoryview:
        generation = slot.next_generation()
        slot.move(action, message.NAME)
        slot.begin(generation, context_start)
        self._drop_lease(slot)
        return encode_frame(message, Key(slot.index, generation))

    def close(self, slot: int, cause: Cause = Cause.FINISHED) -> memoryview:
        """End the session's lease on the slot. The slot may be opened again at once."""
        self._active()
        target = self._slot(slot)
        check_session(target, target.session, "CLOSE")
        generation = target.next_generation()
        target.move("close", "CLOSE")
        target.begin(generation, 0)
        self._drop_lease(target)
        return encode_frame(Close(target.session, cause), Key(slot, generation))

    def ping(self, now_ns: int) -> memoryview:
        """A PING outside the automatic heartbeat."""
        self._active()
        return encode_frame(self._next_ping(now_ns))

    def stats(self) -> memoryview:
        """Ask the worker what it holds for this connection."""
        self._active()
        return encode_frame(Stats(self.parameters.epoch))

    def cancel_confirmed(self, key: Key) -> None:
        """The direct transport will not write for ``key`` any more: its staging may be leased again."""
        self._pool().lift_quarantine(key)

    def generation(self, slot: int) -> int:
        """Current generation of ``slot``, to put into STEP items."""
        return self._slot(slot).generation

    def reset_count(self, slot: int) -> int:
        """Generations since OPEN: the generation field of the random number key."""
        return self._slot(slot).reset_count

    def context_end(self, slot: int) -> int:
        """First position whose taps the worker does not have yet."""
        return self._slot(slot).context_end

    def slot_state(self, slot: int) -> SlotState:
        """State of ``slot``."""
        return self._slot(slot).state

    def _active(self) -> Negotiated:
        if self.state not in (VerifierState.ACTIVE, VerifierState.DRAINING):
            raise LocalProtocolError(ErrorCode.HELLO_REQUIRED, "connection", "complete HELLO first")
        return self._terms()

    def _pool(self) -> Staging:
        assert self.staging is not None
        return self.staging

    def _slot(self, index: int) -> VerifierSlot:
        limit = self._terms().max_slots
        if not 0 <= index < limit:
            raise LocalProtocolError(ErrorCode.SLOT_OUT_OF_RANGE, "slot", f"must be in 0..{limit - 1}")
        return self._slots[index]


def _unsealed_taps(item: StepItem, terms: Negotiated) -> BodyDescriptor | None:
    check_taps(item.taps, item.tap_rows, terms, "STEP")
    if not item.tap_rows:
        return None
    entries = terms.tap_row_bytes // DTYPE_BYTES[terms.tap_dtype]
    return unsealed(BodyKind.TAPS, terms.tap_dtype, item.tap_rows, entries, len(item.taps), terms.checksum)


def step_room(items: Sequence[StepItem]) -> int:
    """Bytes that hold the frame of ``items``: what ``out`` of :meth:`VerifierConnection.step` needs at most."""
    return aligned(PREFIX_BYTES + CONTROL_BYTES_MAX) + sum([aligned(len(item.taps)) for item in items])


def _expected(slot: VerifierSlot, layout: ReplyLayout, terms: Negotiated) -> ExpectedRows:
    """The ROWs of a round of the slot: those of the round before, mostly."""
    known = slot.expected
    if known is None or not known.belongs_to(layout, slot.session, terms.peer_epoch):
        return ExpectedRows(layout, slot.session, terms.peer_epoch, terms.checksum)
    return known


def _is_retry(slot: VerifierSlot, item: StepItem, body: BodyDescriptor | None) -> bool:
    """Whether ``item`` repeats the slot's unresolved one, taps included."""
    if body is not None:
        seal(body, item.taps)
    return slot.is_retry(item, body.checksum if body else b"")


def _step_frame(
    items: Sequence[StepItem], bodies: Sequence[BodyDescriptor | None], out: memoryview | None
) -> memoryview:
    """The frame; seals the bodies' descriptors."""
    described = tuple([body for body in bodies if body is not None])
    taps = [item.taps for item in items if item.tap_rows]
    key = make_key(items[0].slot, items[0].generation, items[0].round) if len(items) == 1 else NO_KEY
    if out is not None:
        return out[: encode_sealing_into(out, Step, key, (tuple(items), described), taps)]
    for body, its_taps in zip(described, taps, strict=True):
        seal(body, its_taps)
    return encode_frame(Step(tuple(items), described), key, taps)
