"""Assembling a reply: ROW bodies into leased staging, then COMPLETION makes them a proposal.

Invariant: no row is visible to anyone before the whole reply has been validated. Body checksums are checked
on the received bytes, and in place where a transport has received a body straight into the block; the reply
checksum and the row crcs are checked on what is staged, so damage on the way into staging is found too.
Spec: SPEC.md, sections "ROW" and "COMPLETION". Called by ``VerifierConnection`` only.
"""

from __future__ import annotations

from typing import TypeAlias

from .bodies import BodyDescriptor, have_shapes
from .buffers import aligned
from .errors import RemoteProtocolError
from .events import ProposalReady, make_proposal
from .frame import check_body
from .limits import ALIGNMENT_BYTES
from .messages import Completion, Row
from .negotiation import Negotiated
from .prefix import Prefix
from .registry import ErrorCode
from .rows import RECORD_BYTES, ReplyLayout, check_whole_reply, implied_entries, placed_rows_are_sound
from .slots import VerifierSlot
from .staging import Lease

Spans: TypeAlias = tuple[tuple[int, int], ...]
"""(offset, bytes) in the slot's block of each body of a ROW."""


def stage_rows(slot: VerifierSlot, row: Row, view: memoryview) -> None:
    """Copy the bodies of ``row``, which end ``view``, into the slot's lease.

    Raises :class:`RemoteProtocolError` as :func:`expected_spans` does, BAD_PADDING or BAD_BODY_CHECKSUM.
    """
    lease = _leased(slot)[1]
    _stage_bodies(row.bodies, view, lease.storage, expected_spans(slot, row))
    slot.rows_received += row.row_count


def stage_placed_rows(slot: VerifierSlot, row: Row, head: memoryview, body: memoryview, vocab_size: int) -> None:
    """:func:`stage_rows` where the last body is at its span of the slot's lease, and ``head`` ends before it.

    These bytes are not moved any more, so the rows' own crcs are checked with the body's checksum, while they are in
    the cache; what is wrong with a row, if something is, is said at the end of the reply, as it is of any other.
    """
    layout, lease = _leased(slot)
    spans, last = expected_spans(slot, row), row.bodies[-1]
    _stage_bodies(row.bodies[:-1], head, lease.storage, spans[:-1])
    if placed_rows_are_sound(
        lease.block, layout, vocab_size, row.first_row, row.row_count, last.checksum_kind, last.checksum
    ):
        slot.rows_sound += row.row_count
    else:
        check_body(last, body)
    slot.rows_received += row.row_count


def memory_of_rows(slot: VerifierSlot, prefix: Prefix) -> memoryview | None:
    """Where the last body belongs of the next rows that the slot waits for, as many as make a ROW with this prefix.

    None where no number of rows does, where the body would bring padding, and for rows so small that several numbers of
    them have bodies of one size. So a ROW of that prefix which :func:`stage_placed_rows` accepts has these rows.
    """
    layout, lease = _leased(slot)
    if layout.row_bytes < ALIGNMENT_BYTES:
        return None
    count = prefix.body_bytes // (RECORD_BYTES + layout.ids_row_bytes + layout.row_bytes)
    if not 0 < count <= layout.depth - slot.rows_received or layout.body_bytes(count) != prefix.body_bytes:
        return None
    start, length = layout.spans(slot.rows_received, count)[-1]
    return lease.storage[start : start + length] if length == aligned(length) else None


def expected_spans(slot: VerifierSlot, row: Row) -> Spans:
    """Where the bodies of ``row`` belong, which must be the next that the slot waits for.

    Raises :class:`RemoteProtocolError`: WRONG_SIZE for another layout, DUPLICATE for rows that are staged already,
    ROWS_MISSING for a gap, BAD_DESCRIPTOR.
    """
    layout = _leased(slot)[0]
    if row.depth != layout.depth or row.support != layout.support or row.representation is not layout.representation:
        raise RemoteProtocolError(ErrorCode.WRONG_SIZE, "ROW.depth")
    if row.first_row < slot.rows_received:
        raise RemoteProtocolError(ErrorCode.DUPLICATE, "ROW.first_row")
    if row.first_row > slot.rows_received or row.first_row + row.row_count > layout.depth:
        raise RemoteProtocolError(ErrorCode.ROWS_MISSING, "ROW.first_row")
    if not have_shapes(row.bodies, layout.shapes(row.row_count)):
        raise RemoteProtocolError(ErrorCode.BAD_DESCRIPTOR, "ROW.bodies")
    return layout.spans(row.first_row, row.row_count)


def _stage_bodies(bodies: tuple[BodyDescriptor, ...], view: memoryview, storage: memoryview, spans: Spans) -> None:
    """Check the bodies, which end ``view``, and copy them to their spans; the compiled codec does both in one pass.

    It may have copied some of a ROW that then turns out to be damaged: nobody looks at rows that do not count yet.
    """
    table = BodyDescriptor.TABLE
    if table is not None and table.stage(view, bodies, storage, spans):
        return
    begin = len(view) - sum([aligned(length) for _, length in spans])
    for (start, length), body in zip(spans, bodies, strict=True):
        end = begin + aligned(length)
        storage[start : start + length] = check_body(body, view[begin:end])
        begin = end


def finish_reply(slot: VerifierSlot, completion: Completion, terms: Negotiated) -> ProposalReady:
    """The proposal that ``completion`` closes; the lease is filled.

    Raises :class:`RemoteProtocolError`: the worker's own status, COMPLETION_MISMATCH, ROWS_MISSING,
    WRONG_SIZE, BAD_REPLY_CHECKSUM, BAD_ROW_CRC or BAD_ROW_RECORD.
    """
    layout, lease = _leased(slot)
    _check_completion(slot, completion, layout)
    block = lease.storage[: layout.total_bytes]
    all_sound = slot.rows_sound == layout.depth
    records = check_whole_reply(block, layout, terms.vocab_size, terms.checksum, completion.reply_checksum, all_sound)
    lease.fill()
    sealed = block.toreadonly()
    stored = sealed[layout.ids_offset : layout.q_offset], sealed[layout.q_offset :]
    ids, q = implied_entries(records.tokens) if layout.tokens_only else stored
    proposal: ProposalReady = make_proposal(
        slot.index,
        slot.session,
        slot.generation,
        slot.round,
        completion.anchor_position,
        layout.depth,
        layout.support,
        records.tokens,
        records.entries,
        records.confidences,
        ids,
        q,
        lease,
        completion.draft_us,
    )
    return proposal


def _leased(slot: VerifierSlot) -> tuple[ReplyLayout, Lease]:
    """The lease that every AWAITING slot holds."""
    lease = slot.lease
    assert lease is not None
    assert lease.layout is not None
    return lease.layout, lease


def _check_completion(slot: VerifierSlot, completion: Completion, layout: ReplyLayout) -> None:
    item = slot.item
    if (
        item is None
        or completion.anchor_position != item.anchor_position
        or completion.context_version != item.context_version
        or completion.prefix_digest != item.prefix_digest
    ):
        raise RemoteProtocolError(ErrorCode.COMPLETION_MISMATCH, "COMPLETION.anchor_position")
    if completion.row_count != layout.depth or slot.rows_received != layout.depth:
        raise RemoteProtocolError(ErrorCode.ROWS_MISSING, "COMPLETION.row_count")
    if completion.reply_bytes != layout.total_bytes:
        raise RemoteProtocolError(ErrorCode.WRONG_SIZE, "COMPLETION.reply_bytes")
