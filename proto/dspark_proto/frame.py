"""Whole frames: prefix, canonical control, 64-byte aligned bodies.

A frame is prefix and control, zero-padded together to a multiple of 64 bytes, then each body, zero-padded to
a multiple of 64 bytes; so every body starts aligned within the frame. Trust flows prefix -> control ->
bodies: each part is checked before the next is sized. Encoding writes into one preallocated buffer; decoding
returns views into the received one. Spec: SPEC.md, section "Framing". Called by both connections; knows no
connection state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

from .bodies import BodyDescriptor, seal
from .buffers import ZEROS, Buffer, aligned, byte_view
from .canonical import decode_canonical, encode_canonical
from .checksums import BODY_CHECKSUMS, crc32c
from .errors import LocalProtocolError, RemoteProtocolError
from .hello import Accept, Challenge, Hello, Reject
from .limits import ALIGNMENT_BYTES, BODY_BYTES_MAX, PREFIX_BYTES
from .messages import (
    Cancel,
    Close,
    Commit,
    Completion,
    Context,
    Drain,
    ErrorMessage,
    Message,
    Open,
    Ping,
    Pong,
    Reset,
    Row,
    Stats,
    Step,
)
from .prefix import NO_KEY, Key, Keyed, Prefix, read_prefix, write_prefix
from .registry import ErrorCode, MessageType

MESSAGES: Final[dict[MessageType, type[Message]]] = {
    kind.TYPE: kind
    for kind in (
        Hello, Accept, Reject, Challenge, Open, Context, Step, Row, Completion, Commit, Reset, Cancel, Close,
        Ping, Pong, Drain, ErrorMessage, Stats,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Frame:
    """A decoded frame; ``bodies`` are views into the buffer that it was decoded from."""

    prefix: Prefix
    message: Message
    bodies: tuple[memoryview, ...]


def descriptors_of(message: Message) -> tuple[BodyDescriptor, ...]:
    """The body descriptors of ``message``; empty for messages that have no body."""
    bodies: tuple[BodyDescriptor, ...] = getattr(message, "bodies", ())
    return bodies


def encode_frame(message: Message, key: Key = NO_KEY, bodies: Sequence[Buffer] = ()) -> memoryview:
    """A newly allocated frame, which the caller owns."""
    control = encode_canonical(message.values())
    sizes = _body_sizes(message, bodies)
    out = memoryview(bytearray(aligned(PREFIX_BYTES + len(control)) + sum(map(aligned, sizes))))
    _write(out, message, key, control, bodies, sizes)
    return out


def encode_frame_into(out: memoryview, message: Message, key: Keyed = NO_KEY, bodies: Sequence[Buffer] = ()) -> int:
    """Write a frame into the writable ``out`` and return its length.

    Raises :class:`LocalProtocolError` WRONG_SIZE when ``out`` is too small or a body differs from its
    descriptor, LIMIT_EXCEEDED when the bodies are over their limit.
    """
    sizes = _body_sizes(message, bodies)
    table = message.TABLE
    if table is not None:
        written = table.write(out, message, message.TYPE, key.slot, key.generation, key.round, bodies)
        if written:
            return written
    control = encode_canonical(message.values())
    length = aligned(PREFIX_BYTES + len(control)) + sum(map(aligned, sizes))
    if length > len(out):
        raise LocalProtocolError(ErrorCode.WRONG_SIZE, message.NAME, f"the buffer needs {length} bytes")
    _write(out, message, key, control, bodies, sizes)
    return length


def encode_values_into(out: memoryview, kind: type[Message], key: Keyed, values: tuple[object, ...]) -> int:
    """:func:`encode_frame_into` of ``kind(*values)``, which has no bodies, without making the record."""
    table = kind.TABLE
    written = table.write(out, values, kind.TYPE, key.slot, key.generation, key.round, ()) if table else 0
    return written or encode_frame_into(out, kind(*values), key)


def encode_sealing_into(
    out: memoryview, kind: type[Message], key: Key, values: tuple[object, ...], bodies: Sequence[Buffer]
) -> int:
    """:func:`encode_frame_into` of ``kind(*values)``, whose descriptors, the last value, are unsealed: they get the
    checksums of the bodies, which the compiled codec computes while it copies.
    """
    table = kind.TABLE
    if table is not None and sum(map(len, bodies)) <= BODY_BYTES_MAX - len(bodies) * ALIGNMENT_BYTES:
        written = table.write(out, values, kind.TYPE, key.slot, key.generation, key.round, bodies, True)
        if written:
            return written
    for descriptor, body in zip(cast("tuple[BodyDescriptor, ...]", values[-1]), bodies, strict=True):
        seal(descriptor, body)
    return encode_frame_into(out, kind(*values), key, bodies)


def _body_sizes(message: Message, bodies: Sequence[Buffer]) -> list[int]:
    described = descriptors_of(message)
    if not described and not bodies:
        return []
    sizes = [body.body_bytes for body in described]
    if sizes != [len(body) for body in bodies]:
        raise LocalProtocolError(ErrorCode.WRONG_SIZE, f"{message.NAME}.bodies", "bodies differ from descriptors")
    if sum(map(aligned, sizes)) > BODY_BYTES_MAX:
        raise LocalProtocolError(ErrorCode.LIMIT_EXCEEDED, f"{message.NAME}.bodies", "send fewer rows")
    return sizes


def _write(
    out: memoryview, message: Message, key: Keyed, control: bytes, bodies: Sequence[Buffer], sizes: list[int]
) -> None:
    body_bytes = sum(map(aligned, sizes))
    prefix = Prefix(
        message.TYPE,
        len(control),
        len(bodies),
        body_bytes,
        key.generation,
        key.slot,
        key.round,
        crc32c(control),
    )
    write_prefix(out, prefix)
    end = _write_padded(out, PREFIX_BYTES, control)
    for body in bodies:
        end = _write_padded(out, end, body)


def _write_padded(out: memoryview, start: int, part: Buffer) -> int:
    """Copy ``part`` to ``out[start:]``, zero up to the next alignment and return that position."""
    end = start + len(part)
    padded_end = aligned(end)
    out[start:end] = part
    out[end:padded_end] = ZEROS[: padded_end - end]
    return padded_end


def decode_control(prefix: Prefix, view: memoryview, absent_bytes: int = 0) -> Message:
    """The message in the control block of ``view``, a received frame that is whole but for its last ``absent_bytes``.

    Raises :class:`RemoteProtocolError`, in this order: WRONG_SIZE, BAD_CONTROL_CRC, NONCANONICAL, BAD_FIELD,
    BAD_PADDING, BAD_DESCRIPTOR.
    """
    table = MESSAGES[prefix.type].TABLE
    if table is not None:
        message: Message | None = table.read(
            view, prefix.control_bytes, prefix.control_crc, prefix.body_count, prefix.body_bytes, absent_bytes
        )
        if message is not None:
            if message.RELATED:
                _check_relations(message)
            return message
    return decode_control_plainly(prefix, view, absent_bytes)


def _check_relations(message: Message) -> None:
    try:
        message.check_relations()
    except LocalProtocolError as error:
        error.as_remote()


def decode_control_plainly(prefix: Prefix, view: memoryview, absent_bytes: int = 0) -> Message:
    """:func:`decode_control` in Python: without the compiled codec, and for what it did not accept."""
    if len(view) + absent_bytes != prefix.frame_bytes:
        raise RemoteProtocolError(ErrorCode.WRONG_SIZE, "frame")
    end = PREFIX_BYTES + prefix.control_bytes
    control = view[PREFIX_BYTES:end]
    if crc32c(control) != prefix.control_crc:
        raise RemoteProtocolError(ErrorCode.BAD_CONTROL_CRC, "control")
    try:
        message = MESSAGES[prefix.type].from_values(decode_canonical(control))
    except LocalProtocolError as error:
        error.as_remote()
    _check_zero(view, end, aligned(end))
    _check_descriptors(prefix, message)
    return message


def _check_descriptors(prefix: Prefix, message: Message) -> None:
    bodies = descriptors_of(message)
    if len(bodies) != prefix.body_count or sum(aligned(body.body_bytes) for body in bodies) != prefix.body_bytes:
        raise RemoteProtocolError(ErrorCode.BAD_DESCRIPTOR, f"{message.NAME}.bodies")


def body_views(prefix: Prefix, message: Message, view: memoryview) -> list[memoryview]:
    """Unchecked views of the bodies with their padding; ``check_body`` must accept each before use."""
    views = []
    start = len(view) - prefix.body_bytes
    for descriptor in descriptors_of(message):
        end = start + aligned(descriptor.body_bytes)
        views.append(view[start:end])
        start = end
    return views


def check_body(descriptor: BodyDescriptor, padded: memoryview) -> memoryview:
    """The body without its padding.

    Raises :class:`RemoteProtocolError` BAD_PADDING or BAD_BODY_CHECKSUM.
    """
    length = descriptor.body_bytes
    table = BodyDescriptor.TABLE
    if table is not None and table.is_sound(descriptor, padded):
        return padded[:length]
    if length == len(padded):
        body = padded
    else:
        if padded[length:] != ZEROS[: len(padded) - length]:
            raise RemoteProtocolError(ErrorCode.BAD_PADDING, "padding")
        body = padded[:length]
    if BODY_CHECKSUMS[descriptor.checksum_kind](body) != descriptor.checksum:
        raise RemoteProtocolError(ErrorCode.BAD_BODY_CHECKSUM, "body")
    return body


def checked_bodies(prefix: Prefix, message: Message, view: memoryview) -> tuple[memoryview, ...]:
    """Views of all bodies, checked."""
    return tuple(map(check_body, descriptors_of(message), body_views(prefix, message, view)))


def decode_frame(buffer: Buffer) -> Frame:
    """Decode one whole frame without any connection state, for tools and tests."""
    view = byte_view(buffer)
    prefix = read_prefix(view)
    message = decode_control(prefix, view)
    return Frame(prefix, message, checked_bodies(prefix, message, view))


def _check_zero(view: memoryview, start: int, end: int) -> None:
    if view[start:end] != ZEROS[: end - start]:
        raise RemoteProtocolError(ErrorCode.BAD_PADDING, "padding")
