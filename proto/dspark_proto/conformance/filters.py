"""Filters on the frames of a peer: the building blocks of the mutants.

A filter sees each frame on its way in or out, and returns what goes on instead. Frames that do not decode pass as they
are. Called by the mutants of both network roles; holds no bug of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..bodies import describe
from ..checksums import body_checksum
from ..errors import ProtocolError
from ..frame import Frame, decode_frame, encode_frame
from ..hello import Reject
from ..messages import Completion, ErrorMessage, Message, Row, Stats, Step, StepItem
from ..prefix import Key
from ..registry import ErrorCode, Representation
from ..rows import ReplyLayout
from .blocks import Block
from .mutants import Filter, Shell

VOCAB_SIZE = 1000
"""Of the reference peers."""


def read(frame: bytes) -> Frame | None:
    """A frame that decodes."""
    try:
        return decode_frame(frame)
    except ProtocolError:
        return None


def again(frame: Frame, message: Message | None = None, key: Key | None = None) -> bytes:
    """The frame with another message or key."""
    return bytes(encode_frame(message or frame.message, key or frame.prefix.key, frame.bodies))


Edit = Callable[[Shell, Frame], "bytes | list[bytes] | None"]


def on(kind: type[Message], edit: Edit) -> Filter:
    """A filter for one message type; None leaves the frame alone."""

    def passed(shell: Shell, raw: bytes) -> list[bytes]:
        frame = read(raw)
        if frame is None or not isinstance(frame.message, kind):
            return [raw]
        changed = edit(shell, frame)
        return [raw] if changed is None else changed if isinstance(changed, list) else [changed]

    return passed


def fields(kind: type[Message], change: Callable[[Shell, Any], dict[str, Any]]) -> Filter:
    """A filter that changes fields of one message type."""

    def edit(shell: Shell, frame: Frame) -> bytes | None:
        changes = change(shell, frame.message)
        return again(frame, replace(frame.message, **changes)) if changes else None  # type: ignore[type-var]

    return on(kind, edit)


def items(change: Callable[[Shell, StepItem], dict[str, Any]]) -> Filter:
    """A filter that changes the items of a STEP, and the prefix of a single one."""

    def edit(shell: Shell, frame: Frame) -> bytes:
        step = frame.message
        assert isinstance(step, Step)
        fixed = tuple(replace(item, **change(shell, item)) for item in step.items)
        key = Key(fixed[0].slot, fixed[0].generation, fixed[0].round) if len(fixed) == 1 else frame.prefix.key
        return again(frame, replace(step, items=fixed), key)

    return on(Step, edit)


def slot_of(shell: Shell, index: int) -> Any:
    """The ledger entry of a slot in the honest drafter."""
    slots = shell.inner.connection._slots
    return slots[index] if index < len(slots) else None


def block_filter(edit: Callable[[bytearray, ReplyLayout], None]) -> Filter:
    """An outgoing filter that changes the reply's block, all checksums right but the row crc."""

    def passed(shell: Shell, raw: bytes) -> list[bytes]:
        frame = read(raw)
        if frame is None:
            return [raw]
        message = frame.message
        if isinstance(message, Row) and message.representation is not Representation.TOKENS:
            layout = ReplyLayout(message.depth, message.support, VOCAB_SIZE)
            block = bytearray(b"".join(bytes(body) for body in frame.bodies))
            edit(block, layout)
            shell.memory["block"] = block
            parts = [bytes(block[start : start + length]) for start, length in layout.spans(0, layout.depth)]
            described = tuple(
                describe(old.kind, old.dtype, old.rows, old.entries, part, old.checksum_kind)
                for old, part in zip(message.bodies, parts, strict=True)
            )
            return [bytes(encode_frame(replace(message, bodies=described), frame.prefix.key, parts))]
        if isinstance(message, Completion) and "block" in shell.memory:
            kind = shell.inner.connection.negotiated.checksum
            checksum = body_checksum(kind, bytes(shell.memory.pop("block")))
            return [again(frame, replace(message, reply_checksum=checksum))]
        return [raw]

    return passed


def sealing(edit: Callable[[Any], None]) -> Filter:
    """As :func:`block_filter`, with right row crcs."""

    def change(data: bytearray, layout: ReplyLayout) -> None:
        block = Block(data, layout, VOCAB_SIZE)
        edit(block)
        block.seal()

    return block_filter(change)


def counted_as(old: ErrorCode, new: ErrorCode) -> Filter:
    """Faults of one kind are counted and answered under another code."""

    def passed(shell: Shell, raw: bytes) -> list[bytes]:
        frame = read(raw)
        if frame is None:
            return [raw]
        message = frame.message
        if isinstance(message, Stats):
            counters = tuple(replace(c, code=new if c.code is old else c.code) for c in message.counters)
            return [again(frame, replace(message, counters=counters))]
        if isinstance(message, ErrorMessage | Reject) and message.code is old:
            return [again(frame, replace(message, code=new))]
        return [raw]

    return passed
