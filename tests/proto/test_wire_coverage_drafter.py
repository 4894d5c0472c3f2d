"""Frames that a drafter rarely sees: of the wrong direction, with a key too many, with something else than a list."""

from __future__ import annotations

from dataclasses import replace

import pytest
from wire_pairs import SESSION, Pair, connect, counted, reply_arrays

from dspark_proto import ErrorCode, Key, MessageType, decode_frame, encode_canonical, encode_frame, read_prefix
from dspark_proto.checksums import crc32c
from dspark_proto.messages import Drain, Ping, Pong
from dspark_proto.prefix import Prefix, write_prefix


@pytest.fixture
def pair() -> Pair:
    pair = connect()
    pair.open()
    return pair


def raw(kind: MessageType, values: list[object], key: Key) -> bytearray:
    """A frame without bodies whose control no message class would make."""
    control = encode_canonical(values)  # type: ignore[arg-type]
    frame = bytearray(48 + len(control) + -(48 + len(control)) % 64)
    prefix = Prefix(kind, len(control), 0, 0, key.generation, key.slot, key.round, crc32c(control))
    write_prefix(memoryview(frame), prefix)
    frame[48 : 48 + len(control)] = control
    return frame


@pytest.mark.parametrize(
    "kind", [MessageType.ACCEPT, MessageType.ROW, MessageType.DRAIN, MessageType.CHALLENGE], ids=lambda kind: kind.name
)
def test_a_message_of_the_other_direction_is_counted_and_nothing_else(pair: Pair, kind: MessageType) -> None:
    assert pair.up(raw(kind, [1], Key(0, 1, 0))) == []
    assert pair.drafter.frames_to_send() == []
    assert counted(pair.drafter.counters) == {"unexpected_message": 1}
    assert len(pair.step(pair.item(1))) == 1


def test_so_it_is_before_hello(pair: Pair) -> None:
    fresh = Pair(pair.verifier, type(pair.drafter)(pair.drafter.parameters))
    assert fresh.up(encode_frame(Drain(100, 5))) == []
    assert fresh.drafter.frames_to_send() == []
    assert counted(fresh.drafter.counters) == {"unexpected_message": 1}


@pytest.mark.parametrize(
    "items", [7, [[SESSION] * 14] * 33, [7], b"items"], ids=["a number", "33 items", "a number in a list", "bytes"]
)
def test_items_that_are_no_list_of_items_fail_the_slot(pair: Pair, items: object) -> None:
    key = Key(0, pair.verifier.generation(0), 1)
    assert pair.up(raw(MessageType.STEP, [items, []], key)) == []
    (refusal,) = pair.drafter.frames_to_send()
    error = decode_frame(refusal)
    assert error.prefix.key == key
    assert (error.message.code, error.message.session) == (ErrorCode.BAD_FIELD, SESSION)
    assert counted(pair.drafter.counters) == {"bad_field": 1}


def test_a_key_that_a_ping_should_not_have(pair: Pair) -> None:
    """A drafter overlooks it, a verifier drops the frame (REQ-PFX-10)."""
    key = Key(0, pair.verifier.generation(0), 0)
    pair.up(encode_frame(Ping(100, 9), key))
    (answer,) = pair.drafter.frames_to_send()
    pong = decode_frame(answer)
    assert isinstance(pong.message, Pong)
    assert (pong.message.nonce, pong.prefix.key) == (9, Key())
    assert pair.down(encode_frame(Pong(200, 9, 0, 4096), key)) == []
    assert counted(pair.verifier.counters) == {"unexpected_message": 1}


def test_a_row_without_a_key_is_dropped_by_a_verifier(pair: Pair) -> None:
    frame = raw(MessageType.ROW, [1], Key())
    assert read_prefix(memoryview(frame)).type is MessageType.ROW
    assert pair.down(frame) == []
    assert counted(pair.verifier.counters) == {"unexpected_message": 1}


def test_an_error_that_cannot_be_read_is_not_answered(pair: Pair) -> None:
    key = Key(0, pair.verifier.generation(0), 0)
    assert pair.up(raw(MessageType.ERROR, [1, 1, SESSION], key)) == []
    assert pair.drafter.frames_to_send() == []
    assert counted(pair.drafter.counters) == {"bad_field": 1}
    assert len(pair.step(pair.item(1))) == 1, "the slot of its key lives"


def test_a_context_without_bodies_fails_the_slot(pair: Pair) -> None:
    key = Key(0, pair.verifier.generation(0), 0)
    assert pair.up(raw(MessageType.CONTEXT, [SESSION, 0, 1, []], key)) == []
    (refusal,) = pair.drafter.frames_to_send()
    assert decode_frame(refusal).message.code is ErrorCode.BAD_DESCRIPTOR


def item_values(pair: Pair, slot: int, round_: int, **changes: int) -> list[object]:
    """A STEP item without taps, as control values."""
    item = replace(pair.item(round_, slot, tap_rows=0), **changes)
    return item.values()


def test_two_items_of_one_slot_are_one_bad_field(pair: Pair) -> None:
    items = [item_values(pair, 0, round_) for round_ in (1, 2)]
    assert pair.up(raw(MessageType.STEP, [items, []], Key())) == []
    assert pair.drafter.frames_to_send() == []
    assert counted(pair.drafter.counters) == {"bad_field": 1}
    assert len(pair.step(pair.item(1))) == 1


def test_a_stale_item_of_a_batch_is_counted_and_the_other_is_drafted(pair: Pair) -> None:
    pair.open(slot=1)
    stale = item_values(pair, 0, 1, generation=pair.verifier.generation(0) + 1)
    (arrived,) = pair.up(raw(MessageType.STEP, [[stale, item_values(pair, 1, 1)], []], Key()))
    assert [item.slot for item in arrived.items] == [1]
    assert pair.drafter.frames_to_send() == []
    assert counted(pair.drafter.counters) == {"stale_generation": 1}


def test_a_second_round_while_one_is_drafted_fails_the_slot(pair: Pair) -> None:
    (item,) = pair.step(pair.item(1))
    second = item_values(pair, 0, 2, generation=item.generation)
    key = Key(0, item.generation, 2)
    assert pair.up(raw(MessageType.STEP, [[second], []], key)) == []
    (refusal,) = pair.drafter.frames_to_send()
    assert decode_frame(refusal).message.code is ErrorCode.ROUND_UNRESOLVED
    assert pair.drafter.reply(item, **reply_arrays()) == [], "the first round is dead too"


def test_a_single_item_needs_its_key_in_the_prefix(pair: Pair) -> None:
    item = item_values(pair, 0, 1)
    assert pair.up(raw(MessageType.STEP, [[item], []], Key())) == []
    assert pair.drafter.frames_to_send() == []
    assert counted(pair.drafter.counters) == {"bad_field": 1}


def test_an_item_whose_taps_do_not_come_fails_the_slot(pair: Pair) -> None:
    item = item_values(pair, 0, 1, tap_rows=1, anchor_position=1)
    assert pair.up(raw(MessageType.STEP, [[item], []], Key(0, pair.verifier.generation(0), 1))) == []
    (refusal,) = pair.drafter.frames_to_send()
    assert decode_frame(refusal).message.code is ErrorCode.BAD_DESCRIPTOR
