"""The worker side of a v2 connection: takes leases, context and STEPs, and answers with whole replies.

Sans-IO: methods return frames to send, ``receive`` (in :class:`DrafterInbox`) returns events, time is an
argument. Invariants: reply memory is preallocated per slot at ACCEPT; the frames of a reply stay cached until
the slot's next round, so a repeated STEP gets identical bytes; of a large reply each ROW can leave before the
next one is filled (``stream_reply``); local misuse raises LocalProtocolError and changes nothing. Spec: SPEC.md,
sections "HELLO", "ROW", "COMPLETION", "DRAIN". Called by the worker's server, one object per peer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from .buffers import Buffer, aligned
from .checksums import NO_CHECKSUM
from .drafter_inbox import DrafterInbox
from .errors import LocalProtocolError
from .events import DrafterEvent, PeerSilent
from .frame import encode_frame, encode_values_into
from .hello import Hello, Reject
from .limits import NANOSECONDS_PER_MS, SILENT_HEARTBEATS_WORKER
from .memory import aligned_memory
from .messages import STATUS_OK, Completion, Drain, StepItem
from .negotiation import accept_message
from .registry import ErrorCode
from .reply_frames import ReplyFrames
from .rows import Columns, ReplyLayout, checked_arrays, fill_reply
from .slots import DrafterSlot, require
from .states import DrafterState, SlotState

_FRAME_ROOM_BYTES: Final = 512
"""Room for prefix and control of a ROW or a COMPLETION, and for the padding of the bodies."""

_CREDIT_STEPS: Final = 4
"""A credit update is sent when this fraction of the window has been consumed since the last one."""


class DrafterConnection(DrafterInbox):
    """One drafter worker's connection to one Spark group."""

    def accept(self, now_ns: int) -> memoryview:
        """Accept the pending HELLO; allocates all reply memory of the connection.

        Raises :class:`LocalProtocolError` INCOMPATIBLE when the HELLO was found unacceptable.
        """
        hello, offer = self._pending_hello(), self._offer
        if offer is None:
            raise LocalProtocolError(ErrorCode.INCOMPATIBLE, "ACCEPT", "reject this HELLO")
        self._move("accept")
        self.negotiated = offer
        frames = 1 + (offer.max_depth if offer.dense_rows else 1)
        stride = aligned(offer.reply_bytes) + frames * _FRAME_ROOM_BYTES
        storage = aligned_memory(stride * offer.max_slots)
        self._slots = tuple(
            DrafterSlot(index, reply_storage=storage[index * stride : (index + 1) * stride])
            for index in range(offer.max_slots)
        )
        self._rows_received = self._rows_consumed = 0
        self._announced_credit = offer.context_credit_rows
        self._heard_ns = now_ns
        message = accept_message(self.parameters, hello, offer)
        authentication = self.parameters.authentication
        if authentication is not None:
            message = authentication.sealed(message, hello, self._proof_nonce)
        return encode_frame(message)

    def reject(self, code: ErrorCode | None = None) -> memoryview:
        """Refuse the pending HELLO, naming the first difference; ``code`` is for a reason of the worker's
        own.
        """
        hello = self._pending_hello()
        reason, field, ours, theirs = code or ErrorCode.INCOMPATIBLE, "", "", ""
        if self._refusal is not None:
            found, mismatch = self._refusal
            reason, field, ours, theirs = code or found, mismatch.field, mismatch.local, mismatch.peer
        self._move("reject")
        return encode_frame(Reject(self.parameters.epoch, hello.epoch, hello.serial, reason, field, ours, theirs))

    def _pending_hello(self) -> Hello:
        hello = self._hello
        if self.state is not DrafterState.HELLO_RECEIVED or hello is None:
            raise LocalProtocolError(ErrorCode.HELLO_REQUIRED, "HELLO", "wait for HelloReceived")
        return hello

    def reply(
        self,
        item: StepItem,
        tokens: Sequence[int],
        entries: Sequence[int],
        ids: Buffer,
        q: Buffer,
        draft_us: int = 0,
        confidences: Sequence[int] | None = None,
    ) -> list[memoryview]:
        """The frames that answer ``item``: a ROW with all positions (several when they are large), and the
        COMPLETION.

        ``tokens``, ``entries`` and ``confidences`` are [depth]; ``ids`` int32 and ``q`` float32 are raw
        little-endian [depth, support] with zeros beyond ``entries``; ``draft_us`` is how long drafting took.
        Dense rows: ``ids`` is empty, ``q`` [depth, vocabulary size], every ``entries`` the vocabulary size.
        Version 1: rows of one entry, the token; they are checked to be that, and only the tokens travel.
        ``confidences[i]`` is a guess in units of 2^-24 that draft i is accepted when all before it are; it
        must have been made before ``tokens[i]`` was drawn. None: no opinion.
        The frames stay valid until the slot's next round. An empty
        list means that the item's key died meanwhile (counted): drop the work.
        """
        return list(self.stream_reply(item, tokens, entries, ids, q, draft_us, confidences))

    def stream_reply(
        self,
        item: StepItem,
        tokens: Sequence[int],
        entries: Sequence[int],
        ids: Buffer,
        q: Buffer,
        draft_us: int = 0,
        confidences: Sequence[int] | None = None,
    ) -> Iterator[memoryview]:
        """The frames of :meth:`reply` one by one, so that a large ROW can leave while the next one is filled.

        Everything is checked here, before there is a frame; the arrays must stay as they are until the last one. A
        reply of several ROWs is answered with its COMPLETION: before that a repeated STEP gets nothing, as before any
        reply, and whoever stops may answer ``item`` again, or ``fail`` it. When its key dies, the frames end, counted.
        """
        slot = self._awaiting(item)
        if slot is None:
            return iter(())
        rows = slot.reply_rows.get(item.depth)
        if rows is None or rows is not slot.stored_rows:
            rows = self._stored_rows(slot, item.depth)
        layout, vocab_size = rows.layout, self._terms().vocab_size
        columns: Columns = (tokens, entries, layout.certain if confidences is None else confidences)
        if rows.only is not None:
            checksum = fill_reply(rows.frames[0], rows.only, ids, q, layout, item, columns, vocab_size)
            if checksum is not None:
                return iter(self._completed(slot, item, rows, tokens, checksum, draft_us))
        ids_view, q_view, columns = checked_arrays(layout, tokens, entries, ids, q, confidences)
        rows.fill(0, item, ids_view, q_view, columns)
        if max(tokens) >= vocab_size:
            raise LocalProtocolError(ErrorCode.TOKEN_OUT_OF_RANGE, "reply.tokens", "use global token ids")
        if rows.only is not None:
            return iter(self._completed(slot, item, rows, tokens, rows.checksum(), draft_us))
        Completion(*self._completion(item, layout, NO_CHECKSUM, draft_us))  # what is wrong with it is told now
        return self._row_by_row(slot, item, rows, ids_view, q_view, columns, draft_us)

    def _row_by_row(
        self,
        slot: DrafterSlot,
        item: StepItem,
        rows: ReplyFrames,
        ids: memoryview,
        q: memoryview,
        columns: Columns,
        draft_us: int,
    ) -> Iterator[memoryview]:
        """The frames of a reply of several ROWs, the first of them filled.

        Each time that the caller asks for one the slot, and its storage, may be another round's.
        """
        for index in range(len(rows.frames)):
            if self._awaiting(item) is not slot:
                return
            yield rows.fill(index, item, ids, q, columns) if index else rows.frames[0]
        if self._awaiting(item) is slot:
            yield self._completed(slot, item, rows, columns[0], rows.checksum(), draft_us)[-1]

    def _completed(
        self,
        slot: DrafterSlot,
        item: StepItem,
        rows: ReplyFrames,
        tokens: Sequence[int],
        checksum: bytes,
        draft_us: int,
    ) -> tuple[memoryview, ...]:
        """All frames of the slot's reply, whose ROWs are filled; its round is answered."""
        rest, values = rows.rest, self._completion(item, rows.layout, checksum, draft_us)
        frame = rest[: encode_values_into(rest, Completion, item, values)]
        slot.move("reply", "reply")
        slot.replied, slot.drafted = True, tuple(tokens)
        slot.reply_frames = (*rows.frames, frame)
        return slot.reply_frames

    def _completion(
        self, item: StepItem, layout: ReplyLayout, checksum: bytes, draft_us: int
    ) -> tuple[int, int, int, int, bytes, int, int, int, bytes, int]:
        """The values of the :class:`Completion` of a reply."""
        return (
            item.session,
            self.parameters.epoch,
            item.anchor_position,
            item.context_version,
            item.prefix_digest,
            STATUS_OK,
            layout.depth,
            layout.total_bytes,
            checksum,
            draft_us,
        )

    def _stored_rows(self, slot: DrafterSlot, depth: int) -> ReplyFrames:
        """The session's ROW frames of a depth, in place in the slot's storage."""
        found = slot.reply_rows.get(depth)
        if found is None:
            layout, checksum = self._layout(depth, slot.support), self._terms().checksum
            found = ReplyFrames(slot.reply_storage, layout, slot.session, self.parameters.epoch, checksum)
            slot.reply_rows[depth] = found
        else:
            found.restore()
        slot.stored_rows = found
        return found

    def fail(self, item: StepItem, code: ErrorCode = ErrorCode.DRAFT_FAILED) -> list[memoryview]:
        """Answer ``item`` with a failure; the slot then waits for a reset. Empty when the key died."""
        slot = self._awaiting(item)
        if slot is None:
            return []
        reply = Completion(
            item.session,
            self.parameters.epoch,
            item.anchor_position,
            item.context_version,
            item.prefix_digest,
            status=int(code),
            row_count=0,
            reply_bytes=0,
            reply_checksum=NO_CHECKSUM,
        )
        frame = encode_frame(reply, slot.key)
        slot.move("fail", "fail")
        self._count(code)
        return [frame]

    def _awaiting(self, item: StepItem) -> DrafterSlot | None:
        """The slot whose unresolved round ``item`` is; None, counted, when the round died."""
        slot = self._slots[item.slot] if item.slot < len(self._slots) else None
        if slot is not None and slot.session == item.session and slot.generation == item.generation:
            if slot.state is SlotState.AWAITING and slot.round == item.round:
                return slot
            if slot.state is not SlotState.DORMANT:
                raise LocalProtocolError(ErrorCode.DUPLICATE, "reply.round", "answer each item once")
        self._count(ErrorCode.STALE_GENERATION)
        return None

    def context_consumed(self, rows: int) -> None:
        """``rows`` context rows have been taken in: grants credit, announced by a PONG in the outbox."""
        outstanding = self._rows_received - self._rows_consumed
        require(
            0 <= rows <= outstanding,
            ErrorCode.CREDIT_EXCEEDED,
            "context_consumed.rows",
            "at most the arrived rows",
        )
        self._rows_consumed += rows
        window = self._terms().context_credit_rows
        if (self._credit_limit() - self._announced_credit) * _CREDIT_STEPS >= window:
            self._queue(self._pong(0))

    def drain(self, deadline_ms: int) -> memoryview:
        """Announce that this worker leaves: new sessions are refused, open slots go on."""
        message = Drain(self.parameters.epoch, deadline_ms)
        self._move("drain")
        return encode_frame(message)

    def next_deadline_ns(self) -> int | None:
        """When the verifier counts as vanished; None without a connection."""
        if self.state not in (DrafterState.ACTIVE, DrafterState.DRAINING):
            return None
        return self._heard_ns + self._terms().heartbeat_ms * SILENT_HEARTBEATS_WORKER * NANOSECONDS_PER_MS

    def expire(self, now_ns: int) -> list[DrafterEvent]:
        """Free everything of a verifier that has been silent for too long."""
        deadline_ns = self.next_deadline_ns()
        if deadline_ns is None or now_ns < deadline_ns:
            return []
        self._count(ErrorCode.PEER_SILENT)
        events = self._retire_slots()
        self._move("lose")
        return [*events, PeerSilent(now_ns - self._heard_ns)]

    def reset_count(self, slot: int) -> int:
        """Generations since OPEN: the generation field of the random number key."""
        return self._slot(slot).reset_count
