"""The compiled codec and Python: the same bytes, the same records, the same refusals, whatever comes in."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest
from wire_pairs import Pair, connect, parameters, reply_arrays, taps

from dspark_proto import (
    Cause,
    ErrorCode,
    Key,
    Lane,
    LocalProtocolError,
    RemoteProtocolError,
    ReplyLayout,
    StepItem,
    SupportPolicy,
    WireVersion,
    crc32c,
    decode_canonical,
    decode_frame,
    encode_frame,
    encode_frame_into,
    native,
    read_prefix,
)
from dspark_proto.bodies import BodyDescriptor
from dspark_proto.fields import Bin, Choice, Field, Record, Records, UInt
from dspark_proto.frame import MESSAGES, decode_control_plainly, encode_values_into
from dspark_proto.limits import PREFIX_BYTES, VOCAB_MAX
from dspark_proto.messages import Completion, Message, Ping, Reset, Row, Step
from dspark_proto.prefix import _TABLE, Prefix, frame_bytes, read_prefix_plainly, rewrite_key, write_prefix
from dspark_proto.registry import MessageType
from dspark_proto.rows import check_reply_plainly, write_reply

codec: Any = native.codec
built = pytest.mark.skipif(codec is None, reason="the compiled codec is not built, or DSPARK_NATIVE=0")
COMPILED = [kind for kind in (*MESSAGES.values(), StepItem, BodyDescriptor) if kind.TABLE is not None]
LAYOUT = ReplyLayout(3, 4)
TELLING = (0, 1, 2, 15, 0x7F, 0x80, 0x90, 0x93, 0xC4, 0xCC, 0xCD, 0xCE, 0xCF, 0xDC, 255)
"""Bytes with a meaning in msgpack, and edges of numbers."""


def transcript() -> list[bytes]:
    """A session's frames in both directions: rounds of several depths and widths, context, and the end."""
    pair, frames = connect(), []
    for slot, support in ((0, SupportPolicy.K32), (1, SupportPolicy.K16)):
        pair.open(slot, 77 + slot, support=support)
        frames += pair.verifier.context(slot, 0, 2, taps(2), bytes(8)).frames
        pair.up(*frames[-1:])
    for slot in pair.drafter._slots:
        slot.digest = None
    for round_, depth in enumerate((5, 3, 5, 1), 1):
        items = [pair.item(round_, slot, 77 + slot, depth=depth) for slot in (0, 1)]
        frames.append(pair.verifier.step(items, 0))
        frames += [frame for item in arrivals(pair, frames[-1]) for frame in answers(pair, item, depth)]
    frames += [pair.verifier.reset(0, Cause.PREEMPTED), pair.verifier.cancel(1, Cause.FINISHED), pair.verifier.close(1)]
    return [bytes(frame) for frame in frames]


def arrivals(pair: Pair, frame: memoryview) -> list[StepItem]:
    return [item for event in pair.up(frame) for item in event.items]


def answers(pair: Pair, item: StepItem, depth: int) -> list[bytes]:
    """Copies of the item's reply, which the verifier takes and releases."""
    support = int(pair.drafter._slots[item.slot].support)
    frames = [bytes(frame) for frame in pair.drafter.reply(item, **reply_arrays(depth, support), draft_us=300)]
    (ready,) = pair.down(*frames)
    assert (ready.tokens, len(ready.ids)) == ((7,) * depth, depth * support * 4)
    ready.lease.release()
    return frames


def digest_of_transcript() -> str:
    return hashlib.sha256(b"".join(transcript())).hexdigest()


def refusal(check: Callable[[], object]) -> ErrorCode | None:
    try:
        check()
    except (LocalProtocolError, RemoteProtocolError) as error:
        return error.code
    return None


# Which of the two is used


def in_python(expression: str) -> str:
    """What ``expression``, of this module, prints where the environment forbids the compiled codec."""
    paths = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    environment = {**os.environ, native.VARIABLE: "0", "PYTHONPATH": paths}
    command = [sys.executable, "-c", f"import test_wire_native as t; print({expression})"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_without_the_codec_the_frames_are_the_same() -> None:
    assert in_python("(t.codec, t.digest_of_transcript())") == str((None, digest_of_transcript()))


@built
def test_a_codec_of_another_interface_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.found() is codec
    monkeypatch.setattr(codec, "INTERFACE", native.INTERFACE + 1)
    assert native.found() is None


@built
def test_records_of_the_round_path_are_compiled() -> None:
    assert {Step, StepItem, Row, Completion, BodyDescriptor, Ping} <= set(COMPILED)


# Fields


def suspects(field: Field) -> Iterator[object]:
    """Valid and invalid values of a field."""
    yield from (None, True, 1.0, "1", b"", (), [], -1, 0, 1, 2**64 - 1, 2**64)
    if isinstance(field, UInt):
        yield from (field.minimum - 1, field.minimum, field.maximum, field.maximum + 1, Lane.RATIO)
    elif isinstance(field, Choice):
        yield from (*field.members, int(next(iter(field.members))), Cause.SHUTDOWN)
    elif isinstance(field, Bin):
        yield from (bytes(field.minimum), bytes(field.maximum), bytes(field.maximum + 1), bytearray(field.minimum))
    elif isinstance(field, Records):
        good = specimen(field.item)
        yield from ((good,) * count for count in (field.minimum_count, field.maximum_count, field.maximum_count + 1))
        yield from ([good], (good, None), (tuple(good.values()),))


def specimen(kind: type[Record]) -> Record:
    """A valid record."""
    return kind(*[good_value(field) for field in kind.LAYOUT])


def good_value(field: Any) -> object:
    if isinstance(field, UInt):
        return field.minimum
    if isinstance(field, Choice):
        return next(iter(field.members))
    return bytes(field.minimum) if isinstance(field, Bin) else (specimen(field.item),) * field.minimum_count


def unchecked(record: Record, name: str, value: object) -> Record:
    twin = object.__new__(type(record))
    for one in fields(record):  # type: ignore[arg-type]
        object.__setattr__(twin, one.name, value if one.name == name else getattr(record, one.name))
    return twin


@built
@pytest.mark.parametrize("kind", COMPILED, ids=lambda kind: kind.__name__)
def test_a_field_is_valid_in_both_or_in_neither(kind: type[Record]) -> None:
    good = specimen(kind)
    assert kind.TABLE is not None
    assert kind.TABLE.holds(good)
    for field in kind.LAYOUT:
        for value in suspects(field):
            record = unchecked(good, field.name, value)
            valid = refusal(record._check_fields) is None
            assert kind.TABLE.holds(record) == valid, (field.name, value)
            if issubclass(kind, Message) and kind is not Step:
                out, parts = memoryview(bytearray(2**16)), tuple(getattr(record, one.name) for one in kind.LAYOUT)
                written = [kind.TABLE.write(out, one, 1, 0, 0, 0, ()) > 0 for one in (record, parts)]
                assert written == [valid, valid], (field.name, value)


@built
def test_an_invalid_record_is_still_refused_with_its_reason() -> None:
    with pytest.raises(LocalProtocolError, match=r"BAD_FIELD at PING.nonce: must be an int"):
        Ping(1, True)
    with pytest.raises(LocalProtocolError, match=r"BAD_FIELD at STEP.items: a slot has two items"):
        Step((specimen(StepItem), specimen(StepItem)), ())  # type: ignore[arg-type]


def test_other_taps_leave_the_item_as_it_was() -> None:
    item = StepItem(1, 2, 3, 4, 5, 6, bytes(8), 5, Lane.MATCH, 7, 2, 9, 10, 1, b"old")
    other = item.with_taps(b"new")
    assert (item.taps, other.taps, other) == (b"old", b"new", item)
    assert item.TABLE is None or item.TABLE.twin(item).taps == b""


# Frames


def sealed(frame: bytearray) -> bytearray:
    """The frame with the crcs that its control and prefix have now."""
    end = PREFIX_BYTES + int.from_bytes(frame[8:12], "little")
    frame[40:44] = crc32c(bytes(frame[PREFIX_BYTES:end])).to_bytes(4, "little")
    frame[44:48] = crc32c(bytes(frame[:44])).to_bytes(4, "little")
    return frame


def bent(frame: bytes, chance: random.Random) -> bytearray:
    """One or two bytes of the head set to telling values; nearly always with right crcs."""
    copy = bytearray(frame)
    end = min(len(copy), 256)
    for _ in range(chance.randint(1, 2)):
        copy[chance.randrange(end)] = chance.choice(
            (0, 1, 2, 15, 0x7F, 0x80, 0x90, 0x93, 0xC4, 0xCC, 0xCD, 0xCF, 0xDC, 255)
        )
    if chance.random() < 0.05:
        del copy[chance.randrange(PREFIX_BYTES, len(copy)) :]
    return sealed(copy) if chance.random() < 0.95 else copy


@built
def test_bent_frames_are_read_alike() -> None:
    chance, frames, accepted = random.Random(5), transcript(), 0
    for turn in range(6000):
        frame = memoryview(bytes(bent(frames[turn % len(frames)], chance)))
        found = _TABLE.read_prefix(frame)  # type: ignore[union-attr]
        assert (found is None) == (refusal(partial(read_prefix_plainly, frame)) is not None)
        if found is None:
            continue
        assert found == read_prefix_plainly(frame)
        table = MESSAGES[found.type].TABLE
        if table is None:
            continue
        numbers = found.control_bytes, found.control_crc, found.body_count, found.body_bytes
        message = table.read(frame, *numbers)
        if refusal(partial(decode_control_plainly, found, frame)) is None:
            plain = decode_control_plainly(found, frame)
            assert (message, type(message)) == (plain, type(plain))
            assert [type(value) for value in message.values()] == [type(value) for value in plain.values()]
            accepted += 1
        else:
            # What only the relation of fields forbids is found behind the table.
            assert message is None or refusal(message.check_relations) is ErrorCode.BAD_FIELD
    assert 300 < accepted < 5000


@built
@pytest.mark.parametrize(
    "control",
    [
        b"\x92\x05\xcc\x06",
        b"\x92\x05\xcd\x00\x80",
        b"\x92\x05\xce\x00\x00\xff\xff",
        b"\x92\x05\xcf\x00\x00\x00\x00\xff\xff\xff\xff",
        b"\x92\x05\xd0\x06",
        b"\xdc\x00\x02\x05\x06",
        b"\xdd\x00\x00\x00\x02\x05\x06",
        b"\x92\x05\x06\x00",
        b"\x92\x05",
        b"\x92\x05\xcf\x00",
        b"\x92\x05\xc3",
        b"\x92\x05\xc4\x01\x06",
        b"\x92\x05\x91\x06",
        b"\x93\x05\x06\x06",
        b"\x05",
    ],
)
def test_only_the_shortest_form_of_the_right_kind_is_read(control: bytes) -> None:
    frame = bytearray(64 + 64 * (len(control) > 16))
    write_prefix(memoryview(frame), Prefix(MessageType.PING, len(control), 0, 0, 0, 0, 0, crc32c(control)))
    frame[PREFIX_BYTES : PREFIX_BYTES + len(control)] = control
    prefix = read_prefix(memoryview(frame))
    assert Ping.TABLE is not None
    assert Ping.TABLE.read(memoryview(frame), prefix.control_bytes, prefix.control_crc, 0, 0) is None
    assert refusal(lambda: decode_control_plainly(prefix, memoryview(frame))) is not None


@built
@pytest.mark.parametrize("length", [7, 8, 9])
def test_bytes_have_the_length_that_the_field_says(length: int) -> None:
    control = b"\x94\x05\x01\x00\xc4" + bytes([length] + [1] * length)
    frame = memoryview(sealed(bytearray(encode_frame(Ping(5, 6))[:PREFIX_BYTES]) + control + bytes(16 - len(control))))
    frame[8], frame[6] = len(control), MessageType.RESET
    prefix = read_prefix(memoryview(sealed(bytearray(frame))))
    assert Reset.TABLE is not None
    found = Reset.TABLE.read(frame, len(control), prefix.control_crc, 0, 0)
    assert (found is None) == (refusal(lambda: decode_control_plainly(prefix, frame)) is not None) == (length != 8)


def test_a_step_with_two_items_of_a_slot_is_refused() -> None:
    twice = unchecked(specimen(Step), "items", (specimen(StepItem),) * 2)
    assert refusal(lambda: decode_frame(encode_frame(twice))) is ErrorCode.BAD_FIELD  # type: ignore[arg-type]


@built
def test_a_frame_cut_anywhere_is_not_read_and_one_without_room_not_written() -> None:
    frame = transcript()[2]
    prefix, table = read_prefix(memoryview(frame)), Step.TABLE
    assert table is not None
    numbers = prefix.control_bytes, prefix.control_crc, prefix.body_count, prefix.body_bytes
    step = table.read(frame, *numbers)
    assert step == decode_control_plainly(prefix, memoryview(frame))
    assert all(table.read(frame[:end], *numbers) is None for end in range(len(frame)))
    assert all(_TABLE.read_prefix(frame[:end]) is None for end in range(PREFIX_BYTES))  # type: ignore[union-attr]
    bodies = [bytes(body.body_bytes) for body in step.bodies]
    for room in range(len(frame) + 64):
        out = memoryview(bytearray(room))
        assert table.write(out, step, 18, 0, 1, 2, bodies) == (len(frame) if room >= len(frame) else 0)


@built
def test_frames_are_written_alike() -> None:
    """``encode_frame`` is Python alone; ``encode_frame_into`` is not."""
    for frame in transcript():
        view = memoryview(frame)
        prefix = read_prefix(view)
        message = decode_control_plainly(prefix, view)
        sizes = [body.body_bytes for body in getattr(message, "bodies", ())]
        bodies = [bytes([9]) * size for size in sizes]
        expected = encode_frame(message, prefix.key, bodies)
        for again in (bodies, tuple(map(memoryview, bodies))):
            out = memoryview(bytearray([255]) * (len(expected) + 100))
            assert out[: encode_frame_into(out, message, prefix.key, again)] == expected
        if not sizes:
            values = tuple(getattr(message, field.name) for field in message.LAYOUT)
            out = memoryview(bytearray([255]) * (len(expected) + 100))
            assert out[: encode_values_into(out, type(message), prefix.key, values)] == expected
    assert msgpack.unpackb(decode_canonical(b"\x91\xc4\x01\x05")[0]) == 5


def test_values_that_make_no_record_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match=r"BAD_FIELD at PING.epoch"):
        encode_values_into(memoryview(bytearray(64)), Ping, Key(), (-1, 2))


def test_a_key_is_rewritten_as_a_whole_prefix_would_be() -> None:
    frame = memoryview(bytearray(encode_frame(Ping(5, 6), Key(1, 2, 3))))
    frame[PREFIX_BYTES + 2] = 7
    rewrite_key(frame, Key(2**32 - 1, 2**63, 2**32 - 2), 3)
    assert frame == encode_frame(Ping(5, 7), Key(2**32 - 1, 2**63, 2**32 - 2))


def lengths(frame: bytes, start: int, end: int) -> tuple[int, int | ErrorCode]:
    """What the compiled codec says of a frame's length, and what ``frame_bytes`` does, or why not."""
    try:
        whole: int | ErrorCode = frame_bytes(memoryview(frame), start, end)
    except RemoteProtocolError as error:
        whole = error.code
    return _TABLE.frame_bytes(frame, start, end), whole  # type: ignore[union-attr]


@built
def test_the_length_of_a_frame_is_that_of_its_prefix_and_nothing_for_a_bad_one() -> None:
    frames = transcript()[:12]
    stream, start = b"".join(frames), 0
    for frame in frames:
        assert lengths(stream, start, start + PREFIX_BYTES) == (len(frame), len(frame))
        assert lengths(stream, start, len(stream)) == (len(frame), len(frame))
        for end in (start, start + 1, start + PREFIX_BYTES - 1):
            assert lengths(stream, start, end) == (0, ErrorCode.WRONG_SIZE)
        start += len(frame)
    prefix = frames[0][:PREFIX_BYTES]
    for index in range(PREFIX_BYTES):
        for value in {prefix[index] ^ 1, 0, 255} - {prefix[index]}:
            damaged = prefix[:index] + bytes([value]) + prefix[index + 1 :]
            assert lengths(damaged, 0, PREFIX_BYTES) == (0, refusal(partial(read_prefix_plainly, memoryview(damaged))))
    for start, end in ((1, 0), (0, PREFIX_BYTES + 1), (2**63, 2**63), (-1, PREFIX_BYTES), (2**64, 2**65)):
        assert _TABLE.frame_bytes(prefix, start, end) == 0  # type: ignore[union-attr]


@built
def test_the_length_of_a_frame_is_refused_for_every_number_that_a_prefix_may_not_have() -> None:
    good = Prefix(MessageType.STEP, 100, 1, 128, 5, 6, 7, 8)
    out = memoryview(bytearray(PREFIX_BYTES))
    for change, code in (
        ({"type": 99}, ErrorCode.UNKNOWN_TYPE),
        ({"control_bytes": 0}, ErrorCode.LIMIT_EXCEEDED),
        ({"control_bytes": 4097}, ErrorCode.LIMIT_EXCEEDED),
        ({"body_count": 33}, ErrorCode.LIMIT_EXCEEDED),
        ({"body_bytes": 2**63}, ErrorCode.LIMIT_EXCEEDED),
        ({"body_bytes": 129}, ErrorCode.WRONG_SIZE),
        ({"body_bytes": 0}, ErrorCode.WRONG_SIZE),
        ({"body_count": 0}, ErrorCode.WRONG_SIZE),
    ):
        write_prefix(out, replace(good, **change))
        assert lengths(bytes(out), 0, PREFIX_BYTES) == (0, code), change
    write_prefix(out, good)
    assert lengths(bytes(out), 0, PREFIX_BYTES) == (192 + 128, 192 + 128)


# Rows


def rows_block(**changes: Any) -> memoryview:
    block = memoryview(bytearray(LAYOUT.total_bytes))
    columns = {"tokens": [0, 5, VOCAB_MAX], "entries": [1, 4, 2], "confidences": [0, 7, 2**24]}
    arrays = {"ids": bytes(range(48)), "q": bytes(range(100, 148))}
    write_reply(block, LAYOUT, **(columns | arrays | changes))
    return block


@built
def test_rows_are_checked_alike() -> None:
    block = rows_block()
    assert codec.check_rows(block, LAYOUT.shape, VOCAB_MAX + 1) == check_reply_plainly(block, LAYOUT, VOCAB_MAX + 1)
    for vocabulary in (0, 6, VOCAB_MAX):
        assert codec.check_rows(block, LAYOUT.shape, vocabulary) is None
        assert refusal(partial(check_reply_plainly, block, LAYOUT, vocabulary)) is ErrorCode.BAD_ROW_RECORD
    for index in range(len(block)):
        damaged = bytearray(block)
        damaged[index] ^= 0x10
        assert codec.check_rows(damaged, LAYOUT.shape, VOCAB_MAX + 1) is None
    for length in range(len(block)):
        assert codec.check_rows(block[:length], LAYOUT.shape, VOCAB_MAX + 1) is None


@built
@pytest.mark.parametrize(
    "change",
    [
        {"tokens": [0, -1, 2]},
        {"tokens": [0, 1, VOCAB_MAX + 1]},
        {"entries": [1, 0, 1]},
        {"entries": [1, 5, 1]},
        {"confidences": [0, 0, 2**24 + 1]},
        {"confidences": [-1, 0, 0]},
    ],
)
def test_rows_out_of_range_are_not_written(change: dict[str, list[int]]) -> None:
    columns = {"tokens": [0, 1, 2], "entries": [1, 1, 1], "confidences": [0, 0, 0]} | change
    records = bytearray(48)
    assert not codec.write_records(records, bytes(48), bytes(48), LAYOUT.shape, 3, *columns.values())
    assert records == bytes(48)
    assert refusal(lambda: rows_block(**change)) is ErrorCode.BAD_ROW_RECORD


@built
def test_rows_are_written_alike_in_parts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    native_block = bytes(rows_block())
    monkeypatch.setattr("dspark_proto.rows.codec", None)
    assert bytes(rows_block()) == native_block
    records = bytearray(16)
    ids, q = native_block[48 + 16 : 48 + 32], native_block[96 + 16 : 96 + 32]
    assert codec.write_records(records, ids, q, LAYOUT.shape, 1, (5,), [4], (7,))
    assert records == native_block[16:32]


# Replies that are filled again


@pytest.mark.parametrize("dense", [False, True])
def test_replies_of_changing_depth_and_session_are_whole_frames(dense: bool) -> None:
    """Every byte of a frame that was filled again is what encoding it from scratch gives, padding included."""
    shape = {"dense_rows": True, "max_support": 1} if dense else {}
    pair = connect(parameters(epoch=100, **shape), parameters(epoch=200, **shape))
    support = SupportPolicy.DENSE if dense else SupportPolicy.K16
    for session in (77, 2**40):
        pair.open(0, session, support=support)
        pair.drafter._slots[0].digest = None
        for round_, depth in enumerate((5, 2, 5, 2, 1, 5, 5), 1):
            (item,) = pair.step(pair.item(round_, session=session, depth=depth))
            arrays = reply_arrays(depth, 1000 if dense else 16, token=round_)
            if dense:
                arrays |= {"ids": b"", "entries": [1000] * depth}
            frames = pair.drafter.reply(item, **arrays)
            for frame in frames:
                prefix = read_prefix(frame)
                message = decode_control_plainly(prefix, frame)
                start, bodies = len(frame) - prefix.body_bytes, []
                for body in getattr(message, "bodies", ()):
                    bodies.append(frame[start : start + body.body_bytes])
                    start += -(-body.body_bytes // 64) * 64
                assert frame == encode_frame(message, Key(0, item.generation, round_), bodies)
            (ready,) = pair.down(*frames)
            assert (ready.tokens, bytes(ready.q)) == ((round_,) * depth, bytes(arrays["q"]))
            ready.lease.release()
        pair.up(pair.verifier.close(0))


def test_a_reconnect_in_another_version_has_layouts_of_its_own() -> None:
    both = (WireVersion.V2_0, WireVersion.V1_0)
    pair = connect(parameters(epoch=100, versions=both), parameters(epoch=200, versions=both))
    for version, widest in ((WireVersion.V2_0, 3), (WireVersion.V1_0, 1)):
        pair.up(pair.verifier.hello(0, version))
        pair.down(pair.drafter.accept(0))
        pair.open(0, support=SupportPolicy.K1, lane=Lane.GREEDY)
        pair.drafter._slots[0].digest = None
        (item,) = pair.step(pair.item(1, lane=Lane.GREEDY))
        frames = pair.drafter.reply(item, **reply_arrays(5, 1))
        (ready,) = pair.down(*frames)
        assert (ready.tokens, len(decode_frame(frames[0]).bodies)) == ((7,) * 5, widest)
        ready.lease.release()
