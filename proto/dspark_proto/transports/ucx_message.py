"""How frames share the messages of the UCX transport: several small ones behind each other, or one large one.

Every tagged message costs both ends 20 to 50 us, whatever is in it, so the frames of a reply travel together; a large
frame has a message of its own, so that the other end can take it in while the next one comes. A head says how long
each frame is, because a frame that is damaged must not take its neighbours with it. Invariants: frames keep their
order, and none is cut; sizes are checked before they are used; frames begin where their own sizes, multiples of 64, put
them. Spec: SPEC.md, section "UCX mapping". Called by ``ucx_link``; does not know UCX.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Final

from ..buffers import aligned

MESSAGE_BYTES: Final = 64 * 1024
"""A message takes frames up to this size in all, or one larger frame."""

FRAMES_MAX: Final = 255
HEAD_BYTES_MAX: Final = 1024
"""Head of a message with the most frames."""

_COUNT: Final = Struct("<I")
_HEADS: Final = tuple(Struct(f"<{count + 1}I") for count in range(FRAMES_MAX + 1))


def messages_of(frames: Sequence[memoryview]) -> Iterator[Sequence[memoryview]]:
    """``frames`` (at least one) in runs, each of which is a message."""
    start = held = 0
    for end, frame in enumerate(frames):
        if end > start and (held + len(frame) > MESSAGE_BYTES or end - start == FRAMES_MAX):
            yield frames[start:end]
            start, held = end, 0
        held += len(frame)
    yield frames[start:]


def message_bytes(frames: Sequence[memoryview]) -> int:
    """Length of the message with ``frames``."""
    return _head_bytes(len(frames)) + sum(map(len, frames))


def write_message(out: memoryview, frames: Sequence[memoryview]) -> None:
    """Write the message with ``frames`` to the beginning of ``out``, which is large enough."""
    start = _head_bytes(len(frames))
    out[:start] = _HEADS[len(frames)].pack(len(frames), *map(len, frames)).ljust(start, b"\0")
    for frame in frames:
        end = start + len(frame)
        out[start:end] = frame
        start = end


def frames_of(message: memoryview, frame_bytes_max: int) -> list[memoryview] | None:
    """The frames of a message; None for what is no message, or has a frame above the limit."""
    count = _COUNT.unpack_from(message)[0] if len(message) >= _COUNT.size else 0
    start = _head_bytes(count)
    if not 0 < count <= FRAMES_MAX or len(message) < start:
        return None
    head = _HEADS[count]
    _, *sizes = head.unpack_from(message)
    if start + sum(sizes) != len(message) or max(sizes) > frame_bytes_max or any(message[head.size : start]):
        return None
    frames = []
    for size in sizes:
        frames.append(message[start : start + size])
        start += size
    return frames


def _head_bytes(count: int) -> int:
    """Count and sizes, padded so that frames are aligned as the message is."""
    return aligned(4 * (count + 1))
