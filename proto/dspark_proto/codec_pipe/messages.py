"""Messages on the pipe: u32 little-endian length, then one JSON object in UTF-8.

Requests are ``{"op": ..., ...}``; an answer is ``{"ok": true, "value": ..., "canonical_hex": ...}``,
``{"error_code": "BAD_PADDING", "scope": "FRAME"}`` or ``{"unsupported": true}``. Byte strings are lower-case hex;
inside control values they are ``{"hex": "..."}``. Integers go up to 2^64 - 1 and must not pass through a float.
Invariants: a length is held against its limit before anything is read; a nested or huge object cannot end the reader.
Called by both ends; knows no operation.
"""

from __future__ import annotations

import json
from typing import Any, BinaryIO, Final

MESSAGE_BYTES_MAX: Final = 16 * 2**20
LENGTH_BYTES: Final = 4

Object = dict[str, Any]


class PipeError(ValueError):
    """What came over the pipe is no message of this contract."""


def write_message(stream: BinaryIO, message: Object) -> None:
    """Write one message and flush. Raises :class:`PipeError` when it is too long."""
    stream.write(framed(message))
    stream.flush()


def framed(message: Object) -> bytes:
    """The bytes of one message. Raises :class:`PipeError` when it is too long."""
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MESSAGE_BYTES_MAX:
        raise PipeError(f"a message of {len(data)} bytes; at most {MESSAGE_BYTES_MAX} are allowed")
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def message_bytes(length: bytes) -> int:
    """The length that four bytes announce. Raises :class:`PipeError` above the limit."""
    announced = int.from_bytes(length, "little")
    if announced > MESSAGE_BYTES_MAX:
        raise PipeError(f"a message claims {announced} bytes; at most {MESSAGE_BYTES_MAX} are allowed")
    return announced


def parsed(data: bytes) -> Object:
    """The object in ``data``. Raises :class:`PipeError`."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PipeError(f"not JSON in UTF-8: {error}") from error
    if not isinstance(message, dict):
        raise PipeError("not a JSON object")
    return message


def read_message(stream: BinaryIO) -> Object | None:
    """The next message; None at the end of the stream. Raises :class:`PipeError`."""
    length = stream.read(LENGTH_BYTES)
    if not length:
        return None
    wanted = message_bytes(length) if len(length) == LENGTH_BYTES else 0
    data = stream.read(wanted)
    if len(length) < LENGTH_BYTES or len(data) < wanted:
        raise PipeError("the stream ends inside a message")
    return parsed(data)
