"""Frames out of a byte stream: cut anywhere, checked before memory is taken, and never more memory than allowed."""

from __future__ import annotations

import ctypes

import pytest
from transport_ends import context_frame, ping

from dspark_proto import ErrorCode
from dspark_proto.limits import FRAME_BYTES_MAX
from dspark_proto.native import codec
from dspark_proto.placement import PlacedFrame
from dspark_proto.prefix import PREFIX_BYTES, Prefix, write_prefix
from dspark_proto.registry import MessageType
from dspark_proto.transports import frame_buffer
from dspark_proto.transports.frame_buffer import HEAD_BYTES, PLACED_BYTES, START_BYTES, FrameBuffer


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
        assert room or buffer.fault
        count = min(step, len(room), len(view))
        room[:count] = view[:count]
        view = view[count:]
        frames += [bytes(frame) for frame in buffer.add(count)]
    return frames


class Staging:
    """Places the last body of frames, up to ``body_bytes`` of it, in memory of their own, between two guards."""

    def __init__(self, body_bytes: int, refuses: tuple[int, ...] = ()) -> None:
        self.memories: list[memoryview] = []
        self.prefixes: list[bytes] = []
        self._body_bytes, self._refuses = body_bytes, refuses
        self._guarded: list[bytearray] = []

    def __call__(self, prefix: memoryview) -> memoryview | None:
        assert prefix.readonly
        self.prefixes.append(bytes(prefix))
        if len(self.prefixes) in self._refuses:
            return None
        self._guarded.append(bytearray(b"\xee" * (self._body_bytes + 128)))
        self.memories.append(memoryview(self._guarded[-1])[64:-64])
        return self.memories[-1]

    @property
    def is_intact(self) -> bool:
        """Whether nothing was written beside the memories."""
        return all(one[:64] == one[-64:] == b"\xee" * 64 for one in self._guarded)


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


# -- bodies that go elsewhere ------------------------------------------------------------------------------------


def body_frame(body_bytes: int, fill: int = 7, first: int = 0) -> bytes:
    """A frame whose last body has ``body_bytes``, behind one of ``first`` bytes if that is not 0."""
    frame = bytes(context_frame(body_bytes + first, fill))
    head = frame[: len(frame) - body_bytes - first]
    return head + bytes([fill + 1]) * first + bytes([fill]) * body_bytes


@pytest.fixture
def small_frames_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_buffer, "PLACED_BYTES", 256)


@pytest.mark.parametrize("first", [0, 192])
@pytest.mark.usefixtures("small_frames_too")
def test_a_placed_frame_may_be_cut_anywhere(first: int) -> None:
    """Any two cuts, between and inside prefix, control, the bodies before the last, the last, and the next frame."""
    frame = body_frame(320, first=first)
    stream, placed = ping(1) + frame + ping(2), 0
    for one in range(1, len(stream)):
        for two in {one, min(one + 1, len(stream)), (one + len(stream)) // 2, len(stream) - 1}:
            staging = Staging(320)
            buffer = FrameBuffer(FRAME_BYTES_MAX, Budget(), staging)
            assert feed_in(buffer, [stream[:one], stream[one:two], stream[two:]]) == [ping(1), frame, ping(2)]
            assert (buffer.fault, buffer.held, staging.is_intact) == (None, 0, True)
            assert len(staging.prefixes) == len(staging.memories) <= 1
            placed += len(staging.memories)
            assert all(bytes(memory) == frame[-320:] for memory in staging.memories)
    assert placed > len(stream)


def feed_in(buffer: FrameBuffer, pieces: list[bytes]) -> list[bytes]:
    """Pour pieces that arrive by themselves, each received in as many parts as there is room for."""
    frames = []
    for piece in pieces:
        frames += feed(buffer, piece, 2**20)
    return frames


@pytest.mark.parametrize("step", [1, 63, 64, 1000, START_BYTES, 2**20])
def test_placed_frames_and_others_follow_each_other(step: int) -> None:
    large = [body_frame(PLACED_BYTES, fill, first) for fill, first in ((1, 0), (3, 0), (5, 20_032), (8, 0))]
    frames = [ping(1), large[0], large[1], ping(2), large[2], ping(3), ping(4), large[3]]
    staging = Staging(PLACED_BYTES, refuses=(2,))
    buffer = FrameBuffer(FRAME_BYTES_MAX, Budget(), staging)
    assert feed(buffer, b"".join(frames), step) == frames
    assert [bytes(memory)[:1] for memory in staging.memories][:1] == [b"\x01"]
    assert staging.is_intact
    assert len(staging.prefixes) > len(staging.memories)


def test_a_placed_frame_is_handed_out_in_two_parts() -> None:
    frame = body_frame(PLACED_BYTES)
    staging = Staging(PLACED_BYTES)
    buffer = FrameBuffer(FRAME_BYTES_MAX, Budget(), staging)
    view, left = memoryview(frame), len(frame)
    placed: list[object] = []
    while left:
        buffer.recycle()
        room = buffer.room()
        count = min(len(room), left)
        room[:count] = view[len(frame) - left :][:count]
        left -= count
        placed += buffer.add(count)
    (only,) = placed
    assert isinstance(only, PlacedFrame)
    assert only.body is staging.memories[0]
    assert (bytes(only), len(only), only.head.readonly) == (frame, len(frame), True)
    assert staging.prefixes == [frame[:PREFIX_BYTES]]
    assert buffer.capacity == START_BYTES


def test_the_rest_of_a_placed_body_is_received_where_it_belongs_and_no_further() -> None:
    frame = body_frame(PLACED_BYTES)
    staging = Staging(PLACED_BYTES)
    buffer = FrameBuffer(FRAME_BYTES_MAX, Budget(), staging)
    head = len(frame) - PLACED_BYTES
    buffer.room()[: head + 100] = frame[: head + 100]
    assert buffer.add(head + 100) == []
    room = buffer.room()
    assert len(room) == PLACED_BYTES - 100
    room[:] = b"\x55" * len(room)
    assert bytes(staging.memories[0]) == frame[head : head + 100] + b"\x55" * len(room)
    assert buffer.room() == room
    assert len(staging.prefixes) == 1


def test_nobody_is_asked_about_a_small_frame_or_before_its_prefix_is_there() -> None:
    staging = Staging(PLACED_BYTES - 64)
    buffer = FrameBuffer(FRAME_BYTES_MAX, Budget(), staging)
    small = bytes(context_frame(PLACED_BYTES - 256))
    assert len(small) < PLACED_BYTES
    assert feed(buffer, small, 4096) == [small]
    assert staging.prefixes == []
    large = body_frame(PLACED_BYTES - 64)
    feed(buffer, large[: PREFIX_BYTES - 1], 4096)
    assert buffer.room()
    assert staging.prefixes == []


def test_who_is_asked_has_had_the_frames_before() -> None:
    """The place of a ROW depends on the ROW before it, which may come in the same read."""
    staging = Staging(PLACED_BYTES)
    buffer = FrameBuffer(FRAME_BYTES_MAX, Budget(), staging)
    arrived = ping(1) + body_frame(PLACED_BYTES)[:1000]
    buffer.room()[: len(arrived)] = arrived
    assert [bytes(frame) for frame in buffer.add(len(arrived))] == [ping(1)]
    assert staging.prefixes == []
    buffer.recycle()
    buffer.room()
    assert len(staging.prefixes) == 1
