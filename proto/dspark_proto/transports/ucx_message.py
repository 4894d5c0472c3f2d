"""How frames share the messages of the UCX transport: several small ones behind each other, or one large one.

Every tagged message costs both ends 20 to 50 us, whatever is in it, so the frames of a reply travel together; a large
frame has a message of its own, so that the other end can take it in while the next one comes. Invariants: frames keep
their order, and none is cut; the receiver finds them by their prefixes, and judges nothing else. Spec: SPEC.md,
section "UCX mapping". Called by ``ucx_link``; does not know UCX.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ..errors import RemoteProtocolError
from ..prefix import frame_bytes

MESSAGE_BYTES: Final = 64 * 1024
"""A message takes frames up to this size in all, or one larger frame."""


def messages_of(frames: Sequence[memoryview]) -> Iterator[Sequence[memoryview]]:
    """``frames`` (at least one) in runs, each of which is a message."""
    start = held = 0
    for end, frame in enumerate(frames):
        if held and held + len(frame) > MESSAGE_BYTES:
            yield frames[start:end]
            start, held = end, 0
        held += len(frame)
    yield frames[start:]


def write_message(out: memoryview, frames: Sequence[memoryview]) -> None:
    """Copy ``frames`` behind each other to the beginning of ``out``, which is large enough."""
    start = 0
    for frame in frames:
        end = start + len(frame)
        out[start:end] = frame
        start = end


def frames_of(message: memoryview) -> Iterator[memoryview]:
    """The frames of a message. What is left without a whole frame is given as one, for the connection to judge."""
    start, size = 0, len(message)
    while start < size:
        try:
            end = min(size, start + frame_bytes(message, start, size))
        except RemoteProtocolError:
            end = size
        yield message[start:end]
        start = end
