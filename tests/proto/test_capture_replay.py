"""Replay: the verifier's side of a capture against our own drafter, and against drafters that answer otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from wire_pairs import VOCAB, Pair, connect, reply_arrays, taps, tokens_bytes

from dspark_proto import Cause, ErrorCode, decode_frame, encode_frame
from dspark_proto.capture import (
    CaptureError,
    CaptureWriter,
    Direction,
    Entry,
    OwnDrafter,
    Report,
    TransportKind,
    connection_entries,
    read_frames,
    replay,
)
from dspark_proto.messages import Completion, Message, Pong, Row, Stats

UP, DOWN, KIND = Direction.UP, Direction.DOWN, TransportKind.INPROC


class Recorded(Pair):
    """A pair whose frames are captured."""

    writer: CaptureWriter

    def up(self, *frames: Any) -> list[Any]:
        for frame in frames:
            self.writer.frame(UP, KIND, 0, frame)
        return super().up(*frames)

    def down(self, *frames: Any) -> list[Any]:
        for frame in frames:
            self.writer.frame(DOWN, KIND, 0, frame)
        return super().down(*frames)


def record(path: Path) -> list[Entry]:
    """HELLO, a session with context, three rounds, one of them retried and one failed, a refusal, STATS, CLOSE."""
    joined = connect()
    with CaptureWriter(path) as writer:
        pair = Recorded(joined.verifier, joined.drafter)
        pair.writer = writer
        pair.up(pair.verifier.hello(0))
        pair.down(pair.drafter.accept(0))
        pair.open(0)
        pair.up(*pair.verifier.context(0, 0, 2, taps(2), tokens_bytes(42, 42)).frames)
        pair.drafter.context_consumed(2)
        pair.settle()
        first = pair.verifier.step([pair.item(1)], 0)
        (item,) = pair.up(first)[0].items
        pair.down(*pair.drafter.reply(item, **reply_arrays(token=3), draft_us=77))
        pair.up(first)
        pair.settle()
        (item,) = pair.step(pair.item(2))
        pair.down(*pair.drafter.reply(item, **reply_arrays(token=4)))
        (item,) = pair.step(pair.item(3))
        pair.down(*pair.drafter.fail(item, ErrorCode.DRAFT_NOT_FINITE))
        pair.up(pair.verifier.reset(0, Cause.REPLY_REFUSED))
        pair.up(pair.verifier.ping(0))
        pair.settle()
        pair.up(pair.verifier.close(0), pair.verifier.stats())
        pair.settle()
    return read_frames(path)


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> list[Entry]:
    return record(tmp_path_factory.mktemp("capture") / "a.dspcap")


class Otherwise:
    """Our own drafter behind a change of its answers: ``change`` returns the message to send instead, or None."""

    def __init__(self, entries: list[Entry], change: Callable[[Message, int], Message | None]) -> None:
        self._inner, self._change = OwnDrafter(entries), change
        self._count = 0

    def send(self, frame: bytes) -> None:
        self._inner.send(frame)

    def receive(self, timeout_ms: int) -> list[bytes]:
        frames = []
        for frame in self._inner.receive(timeout_ms):
            decoded = decode_frame(frame)
            self._count += 1
            message = self._change(decoded.message, self._count)
            if message is not None:
                frames.append(bytes(encode_frame(message, decoded.prefix.key, decoded.bodies)))
        return frames


def run(entries: list[Entry], change: Callable[[Message, int], Message | None], same_rows: bool = False) -> Report:
    return replay(entries, Otherwise(entries, change), timeout_ms=30, same_rows=same_rows)


def test_our_own_drafter_answers_byte_for_byte_again(entries: list[Entry]) -> None:
    report = replay(entries, OwnDrafter(entries), timeout_ms=30)
    assert report.differences == []
    # ACCEPT, three replies and one retry, PONG, STATS
    assert (report.identical, report.equivalent, report.retries) == (7, 0, 1)
    assert report.sent == sum(entry.direction is UP for entry in entries)


def test_what_the_sender_is_free_in_is_no_difference(entries: list[Entry]) -> None:
    def change(message: Message, _count: int) -> Message | None:
        if isinstance(message, Completion):
            return replace(message, draft_us=5)
        return replace(message, load_permille=900) if isinstance(message, Pong) else message

    report = run(entries, change)
    assert report.differences == []
    assert (report.identical, report.equivalent) == (2, 5)


@pytest.mark.parametrize(
    ("kind", "changes", "anchor"),
    [
        (Completion, {"anchor_position": 9}, "REQ-CMP-2"),
        (Completion, {"prefix_digest": b"12345678"}, "REQ-CMP-2"),
        (Completion, {"context_version": 3}, "REQ-CMP-2"),
        (Completion, {"status": int(ErrorCode.DRAFT_FAILED)}, "REQ-CMP-4"),
        (Row, {"session": 5}, "REQ-ROW-2"),
        (Pong, {"nonce": 77}, "REQ-LIF-1"),
        (Stats, {"slots_open": 1}, "REQ-STA-1"),
        (Stats, {"credit_outstanding_rows": 4}, "REQ-STA-1"),
    ],
)
def test_a_wrong_echo_is_a_fault(entries: list[Entry], kind: type, changes: dict[str, Any], anchor: str) -> None:
    report = run(entries, lambda message, _: replace(message, **changes) if isinstance(message, kind) else message)
    assert anchor in {one.anchor for one in report.faults}


def test_a_retry_with_other_bytes_is_a_fault(entries: list[Entry]) -> None:
    def change(message: Message, count: int) -> Message | None:
        return replace(message, draft_us=count) if isinstance(message, Completion) else message

    report = run(entries, change)
    assert [one.anchor for one in report.faults] == ["REQ-STP-7"]
    assert report.retries == 1


def test_an_answer_that_does_not_come_is_a_fault(entries: list[Entry]) -> None:
    report = run(entries, lambda message, _: None if isinstance(message, Pong) else message)
    assert [(one.answer, one.anchor) for one in report.faults] == [("PONG with nonce 1", "REQ-LIF-1")]


def test_other_rows_are_allowed_unless_they_must_be_the_same(entries: list[Entry]) -> None:
    class OtherModel(Otherwise):
        def receive(self, timeout_ms: int) -> list[bytes]:
            return [self._other(frame) for frame in self._inner.receive(timeout_ms)]

        @staticmethod
        def _other(frame: bytes) -> bytes:
            decoded = decode_frame(frame)
            if not isinstance(decoded.message, Row):
                return frame
            from dspark_proto.checksums import body_checksum

            bodies = [bytes(decoded.bodies[0]), bytes(decoded.bodies[1]), b"\x01" * len(decoded.bodies[2])]
            described = tuple(
                replace(one, checksum=body_checksum(one.checksum_kind, body))
                for one, body in zip(decoded.message.bodies, bodies, strict=True)
            )
            return bytes(encode_frame(replace(decoded.message, bodies=described), decoded.prefix.key, bodies))

    def keep(message: Message, _count: int) -> Message:
        return message

    report = replay(entries, OtherModel(entries, keep), timeout_ms=30)
    assert report.faults == []
    assert {one.what for one in report.differences} == {"other rows or tokens"}
    strict = replay(entries, OtherModel(entries, keep), timeout_ms=30, same_rows=True)
    assert {one.anchor for one in strict.faults} == {"REQ-RNG-1"}


def test_a_refusal_that_the_capture_does_not_have_is_a_fault(entries: list[Entry]) -> None:
    """Without the CONTEXT the first STEP has a gap: ERROR instead of a reply."""
    frames = [
        one for one in entries if not (one.direction is UP and decode_frame(one.content).message.NAME == "CONTEXT")
    ]
    report = replay(frames, OwnDrafter(frames), timeout_ms=30)
    assert {one.answer for one in report.faults if one.anchor == "REQ-ERR-2"} == {"ERROR"}
    assert any(one.what == "did not come" for one in report.faults)


def test_rows_may_be_cut_otherwise(entries: list[Entry]) -> None:
    """A reply in one ROW per position is the same reply."""
    from dspark_proto.bodies import describe
    from dspark_proto.rows import ReplyLayout

    def cut(frame: bytes) -> list[bytes]:
        decoded = decode_frame(frame)
        message = decoded.message
        if not isinstance(message, Row):
            return [frame]
        layout = ReplyLayout(message.depth, message.support, VOCAB)
        block, frames = b"".join(decoded.bodies), []
        for first in range(message.depth):
            bodies = [block[start : start + length] for start, length in layout.spans(first, 1)]
            described = tuple(
                describe(old.kind, old.dtype, 1, old.entries, body, old.checksum_kind)
                for old, body in zip(message.bodies, bodies, strict=True)
            )
            row = replace(message, first_row=first, row_count=1, bodies=described)
            frames.append(bytes(encode_frame(row, decoded.prefix.key, bodies)))
        return frames

    class OneByOne(OwnDrafter):
        def receive(self, timeout_ms: int) -> list[bytes]:
            return [part for frame in super().receive(timeout_ms) for part in cut(frame)]

    report = replay(entries, OneByOne(entries), timeout_ms=30, same_rows=True)
    assert report.differences == []
    assert report.equivalent == 3


def test_a_capture_without_a_beginning_cannot_play_the_drafter(entries: list[Entry]) -> None:
    with pytest.raises(CaptureError, match="from the start"):
        OwnDrafter(entries[2:])


def test_damaged_answers_in_a_capture_are_left_out(entries: list[Entry]) -> None:
    """A capture may hold what a man in the middle has spoilt: the replay goes on and says what is missing."""
    spoilt = []
    for entry in entries:
        content = bytearray(entry.content)
        if entry.direction is DOWN and decode_frame(entry.content).message.NAME == "ROW":
            content[-1] ^= 1
        spoilt.append(replace(entry, content=bytes(content)))
    report = replay(spoilt, OwnDrafter(spoilt), timeout_ms=30)
    missing = [one.answer for one in report.faults if one.what == "did not come"]
    assert missing == [f"reply to slot 0 generation 1 round {number}" for number in (1, 1, 2, 3)]


def test_connections_are_told_apart(entries: list[Entry]) -> None:
    other = [replace(one, connection=3) for one in entries[:2]]
    mixed = [*entries[:4], *other, *entries[4:]]
    assert connection_entries(mixed) == entries
    assert connection_entries(mixed, 3) == other
    assert connection_entries([], None) == []
