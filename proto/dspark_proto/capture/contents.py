"""What is inside a frame, in words: control fields by name, bodies in a line each, and faults of meaning.

Bodies are summarised, never dumped; text from the peer is printable ASCII by the codec's own rule. ``remarks`` finds
what no check of a frame's form finds: a damaged or impossible row, and what a refusal in the frame means. Invariant:
only an examined, faultless frame comes here. Called by ``explain``; judges no connection state.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from hashlib import sha256
from struct import iter_unpack
from typing import Final

from ..bodies import BodyDescriptor
from ..codec_pipe.dyadic import read_rows, row_fault
from ..errors import RemoteProtocolError
from ..fields import Record
from ..hello import Hello
from ..limits import CONFIDENCE_MAX, VOCAB_MAX
from ..messages import STATUS_OK, Completion, ErrorMessage, Message, Row, Step
from ..negotiation import compatibility_of
from ..registry import BodyKind, ErrorCode, Representation
from ..rows import ENTRY_BYTES, ReplyLayout, check_reply
from .anchors import ANCHORS, in_words

_SHOWN: Final = 4
_INT: Final = "<i"
_BODIES: Final = "bodies"


def field_lines(message: Message) -> Iterator[str]:
    """One line per control field; nested records get one line each. Descriptors are left to ``body_lines``."""
    for field in message.LAYOUT:
        value = getattr(message, field.name)
        if field.name == _BODIES:
            continue
        if isinstance(value, tuple) and value and isinstance(value[0], Record):
            for index, record in enumerate(value):
                yield f"{field.name}[{index}]: " + ", ".join(_pairs(record))
        else:
            yield f"{field.name} = {shown(value)}"
    if isinstance(message, Hello):
        yield from _compat_lines(message)


def shown(value: object) -> str:
    """A field value: registry names with their ids, byte strings in hex, the rest as Python writes it."""
    if isinstance(value, IntEnum):
        return f"{value.name} ({int(value)})"
    if isinstance(value, bytes):
        return value.hex() or "(empty)"
    return repr(value)


def _pairs(record: Record) -> Iterator[str]:
    for field in record.LAYOUT:
        yield f"{field.name} {shown(getattr(record, field.name))}"


def _compat_lines(hello: Hello) -> Iterator[str]:
    try:
        compatibility = compatibility_of(hello)
    except RemoteProtocolError as error:
        yield f"compat is not readable: {error.code.name} at {error.where}"
        return
    yield from (f"compat.{pair}" for pair in _pairs(compatibility))


def body_lines(message: Message, bodies: tuple[memoryview, ...]) -> Iterator[str]:
    """One line per body: its descriptor, a digest, and the first values of those that a person can read."""
    descriptors: tuple[BodyDescriptor, ...] = getattr(message, _BODIES, ())
    for descriptor, body in zip(descriptors, bodies, strict=True):
        shape = f"{descriptor.kind.name} {descriptor.dtype.name} [{descriptor.rows}, {descriptor.entries}]"
        digest = sha256(body).hexdigest()[:12]
        line = f"{shape} {len(body)} bytes, {descriptor.checksum_kind.name} ok, sha256 {digest}"
        if descriptor.kind is BodyKind.TOKENS:
            line += f", first {[value for (value,) in iter_unpack(_INT, body[: _SHOWN * 4])]}"
        yield line
    layout = _layout(message, bodies) if isinstance(message, Row) else None
    if isinstance(message, Row) and layout is not None and _record_fault(layout, bodies) is None:
        yield from _row_lines(message.first_row, layout, bodies)


def _layout(row: Row, bodies: tuple[memoryview, ...]) -> ReplyLayout | None:
    """Layout of the block that the bodies of ``row`` make up; None when they are not those of its rows."""
    tokens_only = row.representation is Representation.TOKENS
    values = len(bodies[-1]) // (row.row_count * ENTRY_BYTES) if bodies else 0
    layout = ReplyLayout(row.row_count, row.support, values, tokens_only)
    spans = [length for _, length in layout.spans(0, row.row_count)]
    return layout if [len(body) for body in bodies] == spans and layout.width else None


def _row_lines(first_row: int, layout: ReplyLayout, bodies: tuple[memoryview, ...]) -> Iterator[str]:
    records = check_reply(memoryview(b"".join(bodies)), layout, VOCAB_MAX)
    for index, one in enumerate(read_rows(b"".join(bodies), layout)):
        held = [(token, count) for token, count in zip(one.ids, one.counts, strict=True) if count]
        pairs = ", ".join(f"{token}:{count}" for token, count in held[:_SHOWN])
        more = ", ..." if len(held) > _SHOWN else ""
        sure = records.confidences[index] / CONFIDENCE_MAX
        yield (
            f"row {first_row + index}: token {one.token}, confidence {sure:.3f}, {len(held)} entries, "
            f"id:count {pairs}{more}"
        )


def remarks(message: Message, bodies: tuple[memoryview, ...]) -> Iterator[str]:
    """What a receiver that knows the connection would refuse, or what a refusal in this frame means."""
    if isinstance(message, Row):
        yield from _row_remarks(message, bodies)
    elif isinstance(message, ErrorMessage):
        yield f"refusal {in_words(message.code)}, ends the {message.scope.name}"
    elif isinstance(message, Completion) and message.status != STATUS_OK:
        yield f"the draft failed: {_status_words(message.status)}"
    elif isinstance(message, Step) and len({item.slot for item in message.items}) != len(message.items):
        yield "two items of one slot (REQ-STP-3)"


def _row_remarks(row: Row, bodies: tuple[memoryview, ...]) -> Iterator[str]:
    layout = _layout(row, bodies)
    if layout is None:
        yield f"the bodies are not those of {row.row_count} rows: {in_words(ErrorCode.BAD_DESCRIPTOR)}"
        return
    record_fault = _record_fault(layout, bodies)
    if record_fault is not None:
        yield f"a row is refused: {in_words(record_fault)}"
        return
    fault = row_fault(b"".join(bodies), layout, VOCAB_MAX)
    if fault:
        yield f"a row is not dyadic (REQ-ROW-7): {fault}"


def _record_fault(layout: ReplyLayout, bodies: tuple[memoryview, ...]) -> ErrorCode | None:
    try:
        check_reply(memoryview(b"".join(bodies)), layout, VOCAB_MAX)
    except RemoteProtocolError as error:
        return error.code
    return None


def _status_words(status: int) -> str:
    known = status in ANCHORS
    return in_words(ErrorCode(status)) if known else f"status {status}, which is not registered"
