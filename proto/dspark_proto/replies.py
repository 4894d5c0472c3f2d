"""Assembling a reply: ROW bodies into leased staging, then COMPLETION makes them a proposal.

Invariant: no row is visible to anyone before the whole reply has been validated. Body checksums are checked
on the received bytes; the reply checksum and the row crcs are checked again on the staged copy, so damage on
the way into staging is found too. Spec: SPEC.md, sections "ROW" and "COMPLETION". Called by
``VerifierConnection`` only.
"""

from __future__ import annotations

from .bodies import have_shapes
from .checksums import body_checksum
from .errors import RemoteProtocolError
from .events import ProposalReady
from .frame import checked_bodies
from .messages import Completion, Row
from .negotiation import Negotiated
from .prefix import Prefix
from .registry import ErrorCode
from .rows import ReplyLayout, check_reply, implied_entries
from .slots import VerifierSlot
from .staging import Lease


def stage_rows(slot: VerifierSlot, prefix: Prefix, row: Row, view: memoryview) -> None:
    """Copy the bodies of ``row`` into the slot's lease.

    Raises :class:`RemoteProtocolError`: DUPLICATE for rows that are staged already, ROWS_MISSING for a gap,
    BAD_DESCRIPTOR, BAD_PADDING or BAD_BODY_CHECKSUM.
    """
    layout, lease = _leased(slot)
    if row.depth != layout.depth or row.support != layout.support or row.representation is not layout.representation:
        raise RemoteProtocolError(ErrorCode.WRONG_SIZE, "ROW.depth")
    if row.first_row < slot.rows_received:
        raise RemoteProtocolError(ErrorCode.DUPLICATE, "ROW.first_row")
    if row.first_row > slot.rows_received or row.first_row + row.row_count > layout.depth:
        raise RemoteProtocolError(ErrorCode.ROWS_MISSING, "ROW.first_row")
    if not have_shapes(row.bodies, layout.shapes(row.row_count)):
        raise RemoteProtocolError(ErrorCode.BAD_DESCRIPTOR, "ROW.bodies")
    bodies = checked_bodies(prefix, row, view)
    storage = lease.storage
    for (start, length), body in zip(layout.spans(row.first_row, row.row_count), bodies, strict=True):
        storage[start : start + length] = body
    slot.rows_received += row.row_count


def finish_reply(slot: VerifierSlot, completion: Completion, terms: Negotiated) -> ProposalReady:
    """The proposal that ``completion`` closes; the lease is filled.

    Raises :class:`RemoteProtocolError`: the worker's own status, COMPLETION_MISMATCH, ROWS_MISSING,
    WRONG_SIZE, BAD_REPLY_CHECKSUM, BAD_ROW_CRC or BAD_ROW_RECORD.
    """
    layout, lease = _leased(slot)
    _check_completion(slot, completion, layout)
    block = lease.block
    if body_checksum(terms.checksum, block) != completion.reply_checksum:
        raise RemoteProtocolError(ErrorCode.BAD_REPLY_CHECKSUM, "COMPLETION.reply_checksum")
    records = check_reply(block, layout, terms.vocab_size)
    lease.fill()
    sealed = block.toreadonly()
    stored = sealed[layout.ids_offset : layout.q_offset], sealed[layout.q_offset :]
    ids, q = implied_entries(records.tokens) if layout.tokens_only else stored
    return ProposalReady(
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
