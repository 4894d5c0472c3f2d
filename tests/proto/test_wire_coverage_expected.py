"""ROWs that are compared and not decoded, and taps that are checksummed while they are copied: nobody sees it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from wire_pairs import SESSION, Pair, connect, counted, digest_of, reply_arrays, taps

from dspark_proto import (
    Checksum,
    ErrorCode,
    Key,
    LocalProtocolError,
    ProposalReady,
    SupportPolicy,
    decode_frame,
    encode_frame,
)
from dspark_proto.bodies import BodyDescriptor, describe, seal, unsealed
from dspark_proto.events import ProposalReady as Proposal
from dspark_proto.events import make_proposal
from dspark_proto.expected_rows import ExpectedRows
from dspark_proto.frame import encode_sealing_into
from dspark_proto.limits import BODY_BYTES_MAX
from dspark_proto.messages import Row, Step
from dspark_proto.native import codec as found
from dspark_proto.native import maker
from dspark_proto.prefix import make_key, read_prefix, write_prefix
from dspark_proto.registry import BodyKind, Dtype
from dspark_proto.verifier import step_room

codec: Any = found
compiled_only = pytest.mark.skipif(codec is None, reason="the compiled codec is not built, or DSPARK_NATIVE=0")


def asked(**changes: Any) -> tuple[Pair, list[bytes]]:
    """A pair whose verifier waits for a reply, and the reply's frames."""
    pair = connect(**changes)
    pair.open()
    (item,) = pair.step(pair.item())
    return pair, [bytes(frame) for frame in pair.drafter.reply(item, **reply_arrays())]


def outcome(pair: Pair, frames: list[bytes]) -> tuple[Any, ...]:
    """All that anybody can see of what the verifier made of these frames."""
    events = pair.down(*frames)
    slot = pair.verifier._slots[0]
    seen = [
        (event.tokens, event.entries, bytes(event.ids), bytes(event.q)) if isinstance(event, ProposalReady) else event
        for event in events
    ]
    return seen, counted(pair.verifier.counters), slot.state, slot.rows_received, slot.lease is None


def deaf(pair: Pair) -> Pair:
    """The same pair; it expects no ROW, and so decodes each."""
    pair.verifier._slots[0].expected = ExpectedRows.__new__(ExpectedRows)
    pair.verifier._slots[0].expected._rows = {}
    return pair


def test_a_row_with_any_bit_turned_is_met_as_if_it_had_been_decoded() -> None:
    _, (row, completion) = asked()
    assert outcome(asked()[0], [row, completion])[0][0][0] == (7,) * 5
    for index in range(len(row)):
        bent = row[:index] + bytes([row[index] ^ 1 << index % 8]) + row[index + 1 :]
        assert outcome(asked()[0], [bent, completion]) == outcome(deaf(asked()[0]), [bent, completion]), index


def sealed_again(row: bytes, **changes: Any) -> bytes:
    """The ROW with other fields and right checksums."""
    frame = decode_frame(row)
    assert isinstance(frame.message, Row)
    return bytes(encode_frame(replace(frame.message, **changes), frame.prefix.key, frame.bodies))


@pytest.mark.parametrize(
    "changes",
    [{"session": SESSION + 1}, {"epoch": 1}, {"depth": 6}, {"support": 16}, {"first_row": 1}, {"row_count": 4}],
    ids=str,
)
def test_a_row_of_another_control_is_met_as_if_it_had_been_decoded(changes: dict[str, int]) -> None:
    _, (row, completion) = asked()
    other = sealed_again(row, **changes)
    assert outcome(asked()[0], [other, completion]) == outcome(deaf(asked()[0]), [other, completion])
    assert outcome(asked()[0], [other])[1]


def test_a_row_whose_prefix_tells_another_control_crc_is_met_as_if_it_had_been_decoded() -> None:
    _, (row, completion) = asked()
    prefix = read_prefix(memoryview(row))
    bent = bytearray(row)
    write_prefix(memoryview(bent), replace(prefix, control_crc=prefix.control_crc ^ 1))
    seen = outcome(asked()[0], [bytes(bent), completion])
    assert seen == outcome(deaf(asked()[0]), [bytes(bent), completion])
    assert seen[1]["bad_control_crc"] == 1


def test_rows_cut_into_other_frames_are_taken_too() -> None:
    """Our worker sends all rows in one ROW; another one may not."""
    pair, (row, completion) = asked()
    frame = decode_frame(row)
    assert isinstance(frame.message, Row)
    cut = []
    for first, count in ((0, 2), (2, 1), (3, 2)):
        parts = [body[first * len(body) // 5 : (first + count) * len(body) // 5] for body in frame.bodies]
        bodies = tuple(
            describe(one.kind, one.dtype, count, one.entries, part, one.checksum_kind)
            for one, part in zip(frame.message.bodies, parts, strict=True)
        )
        message = replace(frame.message, first_row=first, row_count=count, bodies=bodies)
        cut.append(bytes(encode_frame(message, frame.prefix.key, parts)))
    whole = outcome(asked()[0], [row, completion])
    assert outcome(pair, [*cut, completion]) == whole
    assert whole[1] == {}
    repeated = outcome(asked()[0], [cut[0], cut[0], *cut[1:], completion])
    assert repeated[1] == {"duplicate": 1}
    assert repeated[0] == whole[0]


@compiled_only
def test_what_is_expected_changes_with_layout_session_and_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reply of our worker is compared, and none is decoded: whatever came before it in the slot."""
    pair = connect()
    monkeypatch.setattr("dspark_proto.verifier_inbox.stage_rows", lambda *_: pytest.fail("a ROW was decoded"))
    round_ = 0
    for session, support in ((5, SupportPolicy.K32), (5, SupportPolicy.K16), (6, SupportPolicy.K16)):
        pair.open(session=session, support=support)
        for depth in (5, 2, 5):
            round_ += 1
            (item,) = pair.step(pair.item(round_, session=session, depth=depth))
            (event,) = pair.down(*pair.drafter.reply(item, **reply_arrays(depth, int(support))))
            event.lease.release()
        pair.up(pair.verifier.close(0))
    assert counted(pair.verifier.counters) == {}


def test_another_worker_is_expected_under_its_own_epoch() -> None:
    pair, (row, _) = asked()
    assert not pair.down(row)
    slot = pair.verifier._slots[0]
    assert slot.expected is not None
    layout = pair.verifier._layout(5, SupportPolicy.K32)
    assert slot.expected.belongs_to(layout, SESSION, 200)
    assert not slot.expected.belongs_to(layout, SESSION, 201)
    assert not slot.expected.belongs_to(layout, SESSION + 1, 200)
    assert not slot.expected.belongs_to(replace(layout), SESSION, 200)


@compiled_only
def test_nothing_is_staged_for_places_that_do_not_fit() -> None:
    _, (row, _) = asked()
    frame = decode_frame(row)
    assert isinstance(frame.message, Row)
    expected = ExpectedRows(asked()[0].verifier._layout(5, SupportPolicy.K32), SESSION, 200, Checksum.XXH3_64)
    control, places, _ = expected._rows[0]
    out = bytearray(5 * (16 + 8 * 32))
    assert codec.stage_expected(row, control, places, out)
    assert bytes(out) == b"".join(map(bytes, frame.bodies))
    for index in range(1, 10):
        for value in (len(out) if index % 3 == 0 else places[index] + 1, 2**63, -1):
            bent = (*places[:index], value, *places[index + 1 :])
            assert not codec.stage_expected(row, control, bent, bytearray(len(out))), (index, value)
    for wrong in (
        (places[0] + 1, *places[1:]),
        (0, *places[1:]),
        places[:-1],
        places[:1],
        [*places],
        (*places, 1, 1, 1),
    ):
        assert not codec.stage_expected(row, control, wrong, bytearray(len(out)))
    for frame_bytes in (row[:-64], row + bytes(64), row[:20], b""):
        assert not codec.stage_expected(frame_bytes, control, places, bytearray(len(out)))
    assert not codec.stage_expected(row, control[:-1], places, bytearray(len(out)))
    assert not codec.stage_expected(row, control, places, bytearray(len(out) - 1))


# Taps


def step_values(pair: Pair, count: int) -> tuple[Any, list[bytes]]:
    items, parts = [], []
    for slot in range(count):
        pair.open(slot, session=slot + 1)
        rows = slot + 1
        item = pair.item(slot=slot, session=slot + 1, tap_rows=rows, taps=taps(rows, slot + 3))
        items.append(item)
        parts.append(bytes(item.taps))
    return items, parts


@pytest.mark.parametrize("checksum", [Checksum.CRC32C, Checksum.XXH3_64])
def test_taps_are_sealed_while_they_are_written(checksum: Checksum) -> None:
    pair = connect()
    items, parts = step_values(pair, 4)
    shapes = [
        (BodyKind.TAPS, Dtype.BF16, item.tap_rows, 24, len(part)) for item, part in zip(items, parts, strict=True)
    ]
    open_ones = tuple(unsealed(*shape, checksum) for shape in shapes)
    plain = tuple(describe(*shape[:4], part, checksum) for shape, part in zip(shapes, parts, strict=True))
    out = memoryview(bytearray(4096))
    written = encode_sealing_into(out, Step, Key(1, 2, 3), (tuple(items), open_ones), parts)
    assert out[:written] == encode_frame(Step(tuple(items), plain), Key(1, 2, 3), parts)
    assert open_ones == plain
    assert len({id(one) for one in open_ones} | {id(unsealed(*shapes[0], checksum))}) == 5


def test_sealing_refuses_what_writing_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = connect()
    items, parts = step_values(pair, 1)
    body = (unsealed(BodyKind.TAPS, Dtype.BF16, 1, 24, len(parts[0]), Checksum.XXH3_64),)
    with pytest.raises(LocalProtocolError) as refused:
        encode_sealing_into(memoryview(bytearray(100)), Step, Key(), (tuple(items), body), parts)
    assert refused.value.code is ErrorCode.WRONG_SIZE
    huge = memoryview(bytearray(1)).cast("B").toreadonly()
    with pytest.raises(LocalProtocolError) as refused:
        encode_sealing_into(memoryview(bytearray(100)), Step, Key(), (tuple(items), body), [huge])
    assert refused.value.code is ErrorCode.WRONG_SIZE
    room = memoryview(bytearray(4096))
    assert encode_sealing_into(room, Step, Key(), (tuple(items), body), parts)
    monkeypatch.setattr("dspark_proto.frame.BODY_BYTES_MAX", 63)
    with pytest.raises(LocalProtocolError) as refused:
        encode_sealing_into(room, Step, Key(), (tuple(items), body), parts)
    assert refused.value.code is ErrorCode.LIMIT_EXCEEDED


def test_the_room_of_a_step_is_enough_for_it() -> None:
    for count in range(1, 5):
        pair = connect()
        items, parts = step_values(pair, count)
        room = step_room(items)
        out = memoryview(bytearray(room))
        assert len(pair.verifier.step(items, 0, out)) <= room < sum(map(len, parts)) + 4096 + 64 * (count + 2)


def test_an_unsealed_descriptor_is_a_fresh_one() -> None:
    shape = (BodyKind.TAPS, Dtype.BF16, 1, 24, 48, Checksum.XXH3_64)
    first, second = unsealed(*shape), unsealed(*shape)
    seal(first, taps(1))
    assert first == describe(*shape[:4], taps(1), Checksum.XXH3_64)
    assert second.checksum == bytes(8) == unsealed(*shape).checksum
    with pytest.raises(LocalProtocolError):
        unsealed(BodyKind.TAPS, Dtype.BF16, 1, 24, BODY_BYTES_MAX + 1, Checksum.XXH3_64)


def test_a_retry_without_taps_is_the_same_step() -> None:
    """The first STEP of a slot may bring no taps; sent again it leases nothing."""
    pair = connect()
    pair.open(context_start=3, start_digest=digest_of(1, 2, 3))
    item = pair.item(tap_rows=0, anchor_position=3, prefix_digest=digest_of(1, 2, 3))
    first = bytes(pair.verifier.step([item], 0))
    lease = pair.verifier._slots[0].lease
    assert bytes(pair.verifier.step([item], 5)) == first
    assert pair.verifier._slots[0].lease is lease
    with pytest.raises(LocalProtocolError):
        pair.verifier.step([replace(item, anchor_token=9)], 5)


def test_a_retry_with_other_taps_is_refused() -> None:
    pair = connect()
    pair.open()
    item = pair.item()
    room = memoryview(bytearray(4096))
    first = bytes(pair.verifier.step([item], 0, room))
    assert bytes(pair.verifier.step([item], 0, room)) == first
    with pytest.raises(LocalProtocolError) as refused:
        pair.verifier.step([replace(item, taps=taps(1, 9))], 0, room)
    assert refused.value.code is ErrorCode.ROUND_UNRESOLVED or refused.value.code is ErrorCode.STALE_ROUND


# Records that check nothing


def test_a_made_record_is_the_record() -> None:
    assert make_key(1, 2, 3) == Key(1, 2, 3)
    assert hash(make_key(1, 2, 3)) == hash(Key(1, 2, 3))
    values = range(len(fields(Proposal)))
    assert make_proposal(*values) == Proposal(*values)


@compiled_only
def test_a_record_is_made_from_all_its_values_or_not_at_all() -> None:
    for values in ((), (1, 2), (1, 2, 3, 4)):
        with pytest.raises(TypeError, match="needs 3 values"):
            make_key(*values)
    with pytest.raises(AttributeError):
        codec.Maker(Key, ("slot", "nothing"))
    with pytest.raises(TypeError):
        codec.Maker(Key, ("slot", "__init__"))
    with pytest.raises(TypeError):
        codec.Maker(Key, ["slot"])


def test_without_the_codec_the_class_makes_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark_proto.native.codec", None)
    assert maker(Key) is Key


@compiled_only
def test_descriptors_that_do_not_fit_are_not_sealed() -> None:
    table: Any = Step.TABLE
    pair = connect()
    items, parts = step_values(pair, 2)
    good = tuple(
        unsealed(BodyKind.TAPS, Dtype.BF16, n + 1, 24, len(part), Checksum.XXH3_64) for n, part in enumerate(parts)
    )
    out = bytearray(4096)
    assert table.write(out, (tuple(items), good), 3, 0, 0, 0, parts, True) > 0
    assert table.write(out, (tuple(items), good[:1]), 3, 0, 0, 0, parts, True) == 0
    assert table.write(out, Step(tuple(items), good), 3, 0, 0, 0, parts, True) > 0
    other: Any = BodyDescriptor.TABLE
    assert other.write(out, good[0], 3, 0, 0, 0, (), True) == 0
