"""Judging a drafter's reply by the standard: every rule of ROW and COMPLETION, on the bytes that came.

Called by `as_verifier`; sends nothing. Spec: SPEC.md 7.5, 7.6.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..checksums import body_checksum
from ..codec_pipe.dyadic import read_rows, row_fault
from ..errors import ProtocolError
from ..frame import Frame
from ..hello import Accept
from ..messages import STATUS_OK, Completion, ErrorMessage, Row, StepItem
from ..prefix import Key
from ..registry import Lane, SupportPolicy, WireVersion
from ..rows import ReplyLayout, check_reply
from .facts import Facts
from .verdicts import Unmet


@dataclass(frozen=True)
class Reply:
    """A whole, judged proposal. ``frames`` are its bytes as they came; ``block`` is RECORDS, IDS and Q."""

    item: StepItem
    tokens: tuple[int, ...]
    entries: tuple[int, ...]
    block: bytes = field(repr=False)
    frames: tuple[bytes, ...] = field(repr=False)
    completion: Completion = field(repr=False)


@dataclass
class SlotBook:
    """What the harness knows of one slot. ``tokens`` are by position; ``end`` is the context's end."""

    index: int
    session: int
    generation: int
    support: SupportPolicy
    lane: Lane
    tokens: dict[int, int] = field(default_factory=dict)
    end: int = 0
    round: int = 0
    reply: Reply | None = None
    start_digest: bytes = bytes(8)
    start: int = 0

    @property
    def key(self) -> Key:
        """Of the last round."""
        return Key(self.index, self.generation, self.round)


def shown(frame: Frame) -> str:
    """A frame in a few words."""
    message = frame.message
    if isinstance(message, ErrorMessage):
        return f"ERROR {message.code.name} scope {message.scope.name} at {message.where!r}"
    return f"{message.NAME} {frame.prefix.key}"


def same(what: str, expected: Any, actual: Any, frame: bytes = b"") -> None:
    """Raise :class:`Unmet` unless both are equal."""
    if expected != actual:
        raise Unmet(f"{what} {expected}", str(actual), actual_frame=frame)


def judged(facts: Facts, terms: Accept, book: SlotBook, item: StepItem, frames: list[tuple[Frame, bytes]]) -> Reply:
    """The reply that ``frames`` (ROWs, then COMPLETION) make; raises :class:`Unmet` for the first broken rule."""
    completion = frames[-1][0].message
    assert isinstance(completion, Completion)
    if completion.status != STATUS_OK:
        raise Unmet("a proposal", f"COMPLETION with status {completion.status}", actual_frame=frames[-1][1])
    tokens_only = terms.wire_version == WireVersion.V1_0
    layout = ReplyLayout(item.depth, int(book.support), facts.compatibility.vocab_size, tokens_only)
    block = memoryview(bytearray(layout.total_bytes))
    received = 0
    for frame, raw in frames[:-1]:
        _check_row(terms, frame, raw, item, layout, received)
        row = frame.message
        assert isinstance(row, Row)
        for (start, length), body in zip(layout.spans(row.first_row, row.row_count), frame.bodies, strict=True):
            block[start : start + length] = body
        received += row.row_count
    _check_completion(terms, completion, item, layout, received, bytes(block))
    tokens, entries = _check_values(facts, block, layout, book)
    return Reply(item, tokens, entries, bytes(block), tuple(raw for _, raw in frames), completion)


def _check_row(terms: Accept, frame: Frame, raw: bytes, item: StepItem, layout: ReplyLayout, received: int) -> None:
    row = frame.message
    assert isinstance(row, Row)
    same("ROW session", item.session, row.session, raw)
    same("ROW epoch", terms.epoch, row.epoch, raw)
    same("ROW first row", received, row.first_row, raw)
    same("ROW depth and support", (layout.depth, layout.support), (row.depth, row.support), raw)
    same("ROW representation", layout.representation, row.representation, raw)
    shapes = tuple(body.shape for body in row.bodies)
    same("ROW descriptors", layout.shapes(row.row_count), shapes, raw)
    kinds = {body.checksum_kind for body in row.bodies}
    same("ROW checksum kinds", {terms.checksum_kind}, kinds, raw)


def _check_completion(
    terms: Accept, completion: Completion, item: StepItem, layout: ReplyLayout, received: int, block: bytes
) -> None:
    same("rows before COMPLETION", item.depth, received)
    same("COMPLETION row count", item.depth, completion.row_count)
    same("COMPLETION reply bytes", layout.total_bytes, completion.reply_bytes)
    same("COMPLETION session", item.session, completion.session)
    same("COMPLETION epoch", terms.epoch, completion.epoch)
    same("COMPLETION anchor position", item.anchor_position, completion.anchor_position)
    same("COMPLETION context version", item.context_version, completion.context_version)
    same("COMPLETION prefix digest", item.prefix_digest.hex(), completion.prefix_digest.hex())
    checksum = body_checksum(terms.checksum_kind, block).hex()
    same("COMPLETION reply checksum", checksum, completion.reply_checksum.hex())


def _check_values(
    facts: Facts, block: memoryview, layout: ReplyLayout, book: SlotBook
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    vocab_size = facts.compatibility.vocab_size
    try:
        records = check_reply(block, layout, vocab_size)
    except ProtocolError as error:
        raise Unmet("right row records", str(error), actual_frame=bytes(block)) from None
    fault = row_fault(block, layout, vocab_size)
    if fault:
        raise Unmet("dyadic rows", fault, actual_frame=bytes(block[layout.ids_offset :]))
    for row in read_rows(block, layout):
        used = sum(count > 0 for count in row.counts)
        if book.lane is not Lane.RATIO and used != 1:
            raise Unmet(f"rows of one count in lane {book.lane.name}", f"{used} counts")
    return records.tokens, records.entries
