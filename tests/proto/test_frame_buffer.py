"""Frames out of a byte stream: cut anywhere, checked before memory is taken, and never more memory than allowed."""

from __future__ import annotations

import ctypes

import pytest
from transport_ends import context_frame, ping

from dspark_proto import ErrorCode
from dspark_proto.limits import FRAME_BYTES_MAX
from dspark_proto.native import codec
from dspark_proto.prefix import PREFIX_BYTES, Prefix, write_prefix
from dspark_proto.registry import MessageType
from dspark_proto.transports.frame_buffer import HEAD_BYTES, START_BYTES, FrameBuffer


class Budget:
    """Grants growth up to ``bytes`` and records it."""

    def __init__(self, bytes_: int = 2**40) -> None:
        self.left = bytes_
        self.granted = 0

    def __call__(self, size: int) -> bool:
        if size > self.left:
            return False
        self.left -= size
        self.granted += size
        return True


def feed(buffer: FrameBuffer, data: bytes, step: int) -> list[bytes]:
    """Pour ``data`` in pieces of at most ``step`` bytes; copies of the frames."""
    frames, view = [], memoryview(data)
    while view and buffer.fault is None:
        buffer.recycle()
        room = buffer.room()
        count = min(step, len(room), len(view))
        room[:count] = view[:count]
        view = view[count:]
        frames += [bytes(frame) for frame in buffer.add(count)]
    return frames


@pytest.mark.parametrize("step", [1, 47, 48, 49, 63, 64, 1000, START_BYTES, 2**20])
def test_frames_are_whole_however_the_stream_is_cut(step: int) -> None:
    frames = [ping(1), bytes(context_frame(2 * START_BYTES)), ping(2), bytes(context_frame(64)), ping(3)]
    buffer = FrameBuffer(FRAME_BYTES_MAX, Budget())
    assert feed(buffer, b"".join(frames), step) == frames
    assert (buffer.fault, buffer.held) == (None, 0)


def test_frames_stay_valid_until_recycle_and_are_read_only() -> None:
    buffer = FrameBuffer(FRAME_BYTES_MAX, Budget())
    buffer.room()[:128] = ping(1) + ping(2)
    frames = buffer.add(128)
    assert [bytes(frame) for frame in frames] == [ping(1), ping(2)]
    assert all(frame.readonly for frame in frames)
    buffer.recycle()
    buffer.room()[:64] = ping(3)
    assert [bytes(frame) for frame in buffer.add(64)] == [ping(3)]


def test_memory_follows_the_bytes_that_arrive() -> None:
    """A prefix that announces 8 MiB takes no memory; doubling does, as the bytes come."""
    frame = bytes(context_frame(8 * 2**20))
    budget = Budget()
    buffer = FrameBuffer(FRAME_BYTES_MAX, budget)
    feed(buffer, frame[: PREFIX_BYTES + 100], 64)
    assert (buffer.capacity, budget.granted) == (START_BYTES, 0)
    feed(buffer, frame[PREFIX_BYTES + 100 : 300_000], 4096)
    assert 300_000 <= buffer.capacity <= 600_000
    assert feed(buffer, frame[300_000:], 2**20) == [frame]
    assert buffer.capacity == len(frame) == START_BYTES + budget.granted
    held = budget.granted
    assert feed(buffer, frame * 3, 2**20) == [frame] * 3
    assert budget.granted == held


def test_a_small_frame_after_a_large_one_does_not_read_into_the_next_large_one() -> None:
    large = bytes(context_frame(2**20))
    buffer = FrameBuffer(FRAME_BYTES_MAX, Budget())
    assert feed(buffer, large, 2**20) == [large]
    buffer.recycle()
    assert len(buffer.room()) == HEAD_BYTES


def test_growth_that_is_not_granted_ends_the_stream() -> None:
    buffer = FrameBuffer(FRAME_BYTES_MAX, Budget(START_BYTES))
    assert feed(buffer, bytes(context_frame(2**20)), 4096) == []
    assert buffer.fault is ErrorCode.LIMIT_EXCEEDED
    assert buffer.capacity == 2 * START_BYTES


def test_a_frame_over_the_limit_is_refused_from_its_prefix() -> None:
    frame = bytes(context_frame(4096))
    assert feed(FrameBuffer(len(frame), Budget()), frame, 64) == [frame]
    buffer = FrameBuffer(len(frame) - 1, Budget())
    assert feed(buffer, frame[:PREFIX_BYTES], PREFIX_BYTES) == []
    assert buffer.fault is ErrorCode.LIMIT_EXCEEDED


def announced(**changes: int) -> bytes:
    """A prefix with a valid crc that announces what it likes."""
    fields = {"control_bytes": 10, "body_count": 0, "body_bytes": 0, "generation": 0, "slot": 0, "round": 0}
    out = bytearray(PREFIX_BYTES)
    write_prefix(memoryview(out), Prefix(MessageType.PING, control_crc=0, **(fields | changes)))
    return bytes(out)


@pytest.mark.parametrize(
    ("prefix", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost:7777\r\nAccept: */*\r\n\r\n", ErrorCode.BAD_MAGIC),
        (b"\x16\x03\x01" + bytes(60), ErrorCode.BAD_MAGIC),
        (bytes(48), ErrorCode.BAD_MAGIC),
        (announced()[:47] + b"\xff", ErrorCode.BAD_PREFIX_CRC),
        (announced(control_bytes=4097), ErrorCode.LIMIT_EXCEEDED),
        (announced(body_count=33, body_bytes=64), ErrorCode.LIMIT_EXCEEDED),
        (announced(body_count=1, body_bytes=2**63), ErrorCode.LIMIT_EXCEEDED),
        (announced(body_count=1, body_bytes=65), ErrorCode.WRONG_SIZE),
    ],
)
def test_a_bad_prefix_ends_the_stream_after_the_frames_before_it(prefix: bytes, code: ErrorCode) -> None:
    budget = Budget()
    buffer = FrameBuffer(FRAME_BYTES_MAX, budget)
    assert feed(buffer, ping(1) + prefix + ping(2), 10_000) == [ping(1)]
    assert buffer.fault is code
    assert budget.granted == 0


@pytest.mark.skipif(codec is None, reason="memory is aligned by the compiled codec alone")
def test_a_frame_lies_where_the_kernel_copies_fast() -> None:
    frame = context_frame(100_000)
    buffer = FrameBuffer(FRAME_BYTES_MAX, Budget())
    addresses, left = [], len(frame)
    while left:
        buffer.recycle()
        room = buffer.room()
        addresses.append(ctypes.addressof(ctypes.c_char.from_buffer(room)))
        count = min(len(room), left)
        room[:count] = frame[len(frame) - left :][:count]
        left -= count
        buffer.add(count)
    assert len(addresses) > 2
    assert {address % 64 for address in addresses} == {0}
