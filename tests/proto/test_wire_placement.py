"""Rows that a transport receives straight into leased staging: the same events, errors and counters as of any others,
and a block that is not leased again while somebody may write into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_wire_dense import LARGE, dense_arrays, dense_pair, offers
from wire_pairs import MS, STEP_DEADLINE, Pair, connect, corrupted, counted, parameters, rebuilt, reply_arrays

from dspark_proto import (
    Cause,
    Checksum,
    DrafterConnection,
    ErrorCode,
    HelloReceived,
    Key,
    LeaseState,
    ProposalReady,
    StepFailed,
    SupportPolicy,
    decode_frame,
    encode_frame,
    read_prefix,
)
from dspark_proto.checksums import body_checksum
from dspark_proto.limits import PREFIX_BYTES
from dspark_proto.messages import Completion, Row
from dspark_proto.placement import PlacedFrame

FREE, LEASED, QUARANTINED = LeaseState.FREE, LeaseState.LEASED, LeaseState.QUARANTINED


def prefix_of(frame: Any) -> memoryview:
    """What a transport asks with."""
    return memoryview(bytes(frame))[:PREFIX_BYTES]


def written(frame: Any, memory: memoryview) -> PlacedFrame:
    """What a transport hands out that has received the last body of ``frame`` into ``memory``."""
    whole = memoryview(bytes(frame))
    memory[:] = whole[len(whole) - len(memory) :]
    return PlacedFrame(whole[: len(whole) - len(memory)], memory)


def placed(pair: Pair, frame: Any) -> list[Any]:
    """Deliver a frame as a transport does that asks where it belongs; it must belong somewhere."""
    memory = pair.verifier.place(prefix_of(frame))
    assert memory is not None
    return pair.verifier.receive(written(frame, memory), pair.now_ns)


def large_reply(pair: Pair, round_: int = 1, **changes: Any) -> tuple[list[bytes], dict[str, Any]]:
    """The frames of a dense reply, and its arrays."""
    arrays = dense_arrays(5, LARGE) | changes
    (item,) = pair.step(pair.item(round_))
    return [bytes(frame) for frame in pair.drafter.reply(item, **arrays)], arrays


@pytest.fixture
def pair() -> Pair:
    return dense_pair(LARGE)


def blocks(pair: Pair, state: LeaseState) -> int:
    assert pair.verifier.staging is not None
    return pair.verifier.staging.count(state)


def test_a_placed_frame_has_the_bytes_and_the_length_of_the_frame(pair: Pair) -> None:
    (row, *_), _ = large_reply(pair)
    frame = written(row, memoryview(bytearray(2 * 4 * LARGE)))
    assert (bytes(frame), len(frame)) == (row, len(row))


def test_rows_are_staged_without_a_copy(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    (*rows, completion), arrays = large_reply(pair)
    monkeypatch.setattr("dspark_proto.verifier_inbox.stage_rows", None)
    monkeypatch.setattr("dspark_proto.verifier_inbox.VerifierInbox._takes_expected_rows", None)
    assert [event for row in rows for event in placed(pair, row)] == []
    (ready,) = pair.down(completion)
    assert isinstance(ready, ProposalReady)
    assert (ready.tokens, ready.q, ready.confidences) == ((7,) * 5, arrays["q"], tuple(arrays["confidences"]))
    assert counted(pair.verifier.counters) == {}
    ready.lease.release()


def test_the_place_of_rows_is_their_span_of_the_leased_block(pair: Pair) -> None:
    (first, second, *_), _ = large_reply(pair)
    placed(pair, first)
    memory = pair.verifier.place(prefix_of(second))
    assert memory is not None
    memory[:] = b"\x11" * len(memory)
    (lease,) = [one for one in pair.verifier.staging.leases if one.state is LEASED]  # type: ignore[union-attr]
    assert lease.layout is not None
    start, length = lease.layout.spans(2, 2)[-1]
    assert lease.block[start : start + length] == b"\x11" * length
    assert lease.block[:start].tobytes().count(b"\x11" * 64) == 0


def test_placed_and_other_rows_may_take_turns(pair: Pair) -> None:
    for round_, pattern in enumerate(((True, False, True), (False, True, False), (True, True, False)), 1):
        (*rows, completion), arrays = large_reply(pair, round_, **dense_arrays(5, LARGE, token=round_))
        for is_placed, row in zip(pattern, rows, strict=True):
            assert (placed if is_placed else Pair.down)(pair, row) == []
        (ready,) = pair.down(completion)
        assert (ready.tokens, ready.q) == ((round_,) * 5, arrays["q"])
        ready.lease.release()


def test_sparse_rows_can_be_placed_too() -> None:
    pair = connect()
    pair.open()
    (item,) = pair.step(pair.item(1, depth=2))
    row, completion = pair.drafter.reply(item, **reply_arrays(2))
    assert placed(pair, row) == []
    (ready,) = pair.down(completion)
    assert (ready.tokens, ready.ids, ready.q) == ((7, 7), reply_arrays(2)["ids"], reply_arrays(2)["q"])


def test_a_body_that_brings_padding_has_no_place() -> None:
    """Nothing but the body's own bytes may land in the block."""
    pair = dense_pair(1001)
    (item,) = pair.step(pair.item(1, depth=1))
    row, _ = pair.drafter.reply(item, **dense_arrays(1, 1001))
    assert pair.verifier.place(prefix_of(row)) is None


# -- what has no place -----------------------------------------------------------------------------------------


def test_only_rows_have_a_place(pair: Pair) -> None:
    (*_, completion), _ = large_reply(pair)
    step = pair.verifier.step([pair.verifier._slots[0].item], 0)  # type: ignore[list-item]
    for frame in (completion, step, pair.verifier.ping(0)):
        assert pair.verifier.place(prefix_of(frame)) is None
    assert pair.verifier.place(memoryview(bytes(64))) is None
    assert counted(pair.verifier.counters) == {}


STALE: dict[str, Callable[[bytes], Any]] = {
    "another generation": lambda row: rebuilt(bytearray(row), Key(0, 9, 1)),
    "another round": lambda row: rebuilt(bytearray(row), Key(0, 1, 9)),
    "no such slot": lambda row: rebuilt(bytearray(row), Key(9, 1, 1)),
    "a slot that is free": lambda row: rebuilt(bytearray(row), Key(1, 1, 1)),
    "a damaged prefix": lambda row: corrupted(memoryview(row), 20),
    "bodies of another size": lambda row: with_another_body(row),
}
"""What is seen in a prefix."""

UNFIT: dict[str, Callable[[bytes], Any]] = {
    "another session": lambda row: rebuilt(bytearray(row), session=9),
    "another process": lambda row: rebuilt(bytearray(row), epoch=9),
    "another depth": lambda row: rebuilt(bytearray(row), depth=4),
    "another support": lambda row: rebuilt(bytearray(row), support=8),
    "a gap": lambda row: rebuilt(bytearray(row), first_row=1),
    "too many rows": lambda row: rebuilt(bytearray(row), first_row=4),
    "other bodies": lambda row: rebuilt(bytearray(row), row_count=1),
    "a damaged control": lambda row: corrupted(memoryview(row), PREFIX_BYTES + 2),
    "a checksum of another kind": lambda row: with_another_kind(row),
}
"""What is only seen when the frame is whole."""


def with_another_kind(row: bytes) -> memoryview:
    decoded = decode_frame(row)
    assert isinstance(decoded.message, Row)
    bodies = tuple(
        replace(described, checksum_kind=Checksum.CRC32C, checksum=body_checksum(Checksum.CRC32C, body))
        for described, body in zip(decoded.message.bodies, decoded.bodies, strict=True)
    )
    return encode_frame(replace(decoded.message, bodies=bodies), decoded.prefix.key, decoded.bodies)


def with_another_body(row: bytes) -> memoryview:
    decoded = decode_frame(row)
    assert isinstance(decoded.message, Row)
    records, q = decoded.bodies[0], bytes(decoded.bodies[1]) + bytes(64)
    described = replace(decoded.message.bodies[1], body_bytes=len(q), checksum=body_checksum(Checksum.XXH3_64, q))
    message = replace(decoded.message, bodies=(decoded.message.bodies[0], described))
    return encode_frame(message, decoded.prefix.key, (records, q))


@pytest.mark.parametrize("change", [*STALE.values(), *UNFIT.values()], ids=[*STALE, *UNFIT])
def test_a_row_that_is_refused_is_refused_in_the_same_way_however_it_comes(change: Callable[[bytes], Any]) -> None:
    """Where the prefix does not tell, its body lands in the block, and is not counted: the right rows replace it."""
    outcomes = []
    for deliver in (as_a_transport, Pair.down):
        pair = dense_pair(LARGE)
        (*rows, completion), arrays = large_reply(pair)
        events = deliver(pair, change(rows[0]))
        outcomes.append((events, counted(pair.verifier.counters), blocks(pair, FREE)))
        if not events:
            for row in rows:
                assert as_a_transport(pair, row) == []
            (ready,) = pair.down(completion)
            assert ready.q == arrays["q"]
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0][1]) == 1


def as_a_transport(pair: Pair, frame: Any) -> list[Any]:
    """Deliver a frame as a transport does: placed if that is possible."""
    before = dict(pair.verifier.counters)
    memory = pair.verifier.place(prefix_of(frame))
    assert pair.verifier.counters == before
    return pair.verifier.receive(frame if memory is None else written(frame, memory), pair.now_ns)


@pytest.mark.parametrize("change", STALE.values(), ids=STALE)
def test_what_does_not_fit_by_its_prefix_has_no_place(pair: Pair, change: Callable[[bytes], Any]) -> None:
    (row, *_), _ = large_reply(pair)
    assert pair.verifier.place(prefix_of(change(row))) is None


def test_rows_that_were_staged_already_do_not_harm_the_next_ones(pair: Pair) -> None:
    """A retry brings all rows again. Those of the first ROW land where the second ROW belongs, which replaces them."""
    (*rows, completion), arrays = large_reply(pair, **varied())
    for row in (rows[0], rows[0], rows[1], rows[0], rows[2], rows[1]):
        assert as_a_transport(pair, row) == []
    assert counted(pair.verifier.counters) == {"duplicate": 3}
    (ready,) = pair.down(completion)
    assert ready.q == arrays["q"]


def varied() -> dict[str, Any]:
    """A reply whose rows differ."""
    arrays = dense_arrays(5, LARGE)
    q = bytearray(arrays["q"])
    for row in range(5):
        q[row * 4 * LARGE : row * 4 * LARGE + 4] = bytes([row] * 3) + b"\x3c"
    return arrays | {"q": memoryview(q)}


def test_rows_beyond_the_last_have_no_place(pair: Pair) -> None:
    rows = large_reply(pair)[0][:-1]
    for row in rows:
        placed(pair, row)
    for row in rows:
        assert pair.verifier.place(prefix_of(row)) is None


def test_rows_of_which_several_numbers_have_one_size_have_no_place() -> None:
    """13 to 16 rows of one entry fill as many bytes, padding included."""
    pair = connect(parameters(100, max_depth=16), parameters(200, max_depth=16))
    pair.open(support=SupportPolicy.K1)
    (item,) = pair.step(pair.item(1, depth=16))
    row, completion = pair.drafter.reply(item, **reply_arrays(16, 1))
    parts = [part_of(row, 0, 13), part_of(row, 13, 3)]
    assert read_prefix(memoryview(parts[0])).body_bytes == read_prefix(row).body_bytes
    assert pair.verifier.place(prefix_of(parts[0])) is None
    (ready,) = pair.down(*parts, completion)
    assert ready.tokens == (7,) * 16


# -- faults of placed frames -----------------------------------------------------------------------------------


def start_of(row: bytes) -> int:
    """Where the bodies begin."""
    return len(row) - read_prefix(memoryview(row)).body_bytes


def padding_of_records(row: bytes) -> int:
    return start_of(row) + 2 * 16


DAMAGES: dict[str, tuple[Callable[[bytes], bytearray], ErrorCode]] = {
    "the placed body": (lambda row: corrupted(memoryview(row), len(row) - 5), ErrorCode.BAD_BODY_CHECKSUM),
    "the records": (lambda row: corrupted(memoryview(row), start_of(row)), ErrorCode.BAD_BODY_CHECKSUM),
    "padding of the records": (
        lambda row: corrupted(memoryview(row), padding_of_records(row)),
        ErrorCode.BAD_PADDING,
    ),
}


@pytest.mark.parametrize(("damage", "code"), DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("deliver", [placed, Pair.down], ids=["placed", "whole"])
def test_damage_discards_the_reply_as_of_any_frame(
    pair: Pair, deliver: Callable[[Pair, Any], list[Any]], damage: Callable[[bytes], bytearray], code: ErrorCode
) -> None:
    (first, second, *_), _ = large_reply(pair)
    assert deliver(pair, first) == []
    (failed,) = deliver(pair, damage(second))
    assert (failed.code, failed.needs_reset) == (code, False)
    assert counted(pair.verifier.counters) == {code.counter: 1}
    assert blocks(pair, FREE) == 4
    assert len(pair.step(pair.item(2))) == 1


@pytest.mark.parametrize("deliver", [placed, Pair.down], ids=["placed", "whole"])
@pytest.mark.parametrize(
    ("offset", "value", "code"),
    [(8, 1, ErrorCode.BAD_ROW_CRC), (0, 0x7F, ErrorCode.BAD_ROW_CRC), (None, 0, ErrorCode.BAD_REPLY_CHECKSUM)],
)
def test_a_reply_is_checked_as_a_whole_however_it_came(
    pair: Pair, deliver: Callable[[Pair, Any], list[Any]], offset: int | None, value: int, code: ErrorCode
) -> None:
    """Rows under a right body checksum whose own crc is wrong, and rows that are not those of the reply's checksum."""
    (*rows, completion), _ = large_reply(pair)
    changed = [bytearray(row) for row in rows]
    if offset is not None:
        changed[1] = with_record_byte(rows[1], offset, value)
    whole = [decode_frame(row).bodies for row in changed]
    block = b"".join(body for part in range(2) for bodies in whole for body in [bodies[part]])
    checksum = bytes(8) if offset is None else body_checksum(Checksum.XXH3_64, block)
    for row in changed:
        assert deliver(pair, row) == []
    (failed,) = pair.down(with_checksum(completion, checksum))
    assert (failed.code, failed.needs_reset) == (code, False)
    assert counted(pair.verifier.counters) == {code.counter: 1}


@pytest.mark.parametrize("deliver", [placed, Pair.down], ids=["placed", "whole"])
def test_a_record_out_of_range_is_refused_however_it_came(
    pair: Pair, deliver: Callable[[Pair, Any], list[Any]]
) -> None:
    """The worker's vocabulary seems to be larger than what was agreed on."""
    (*rows, completion), _ = large_reply(pair)
    pair.verifier.negotiated = replace(pair.verifier._terms(), vocab_size=5)
    for row in rows:
        assert deliver(pair, row) == []
    (failed,) = pair.down(completion)
    assert failed.code is ErrorCode.BAD_ROW_RECORD


def test_rows_that_were_found_sound_in_the_round_before_do_not_count(pair: Pair) -> None:
    (*rows, completion), _ = large_reply(pair)
    for row in rows:
        placed(pair, row)
    (ready,) = pair.down(completion)
    ready.lease.release()
    (*rows, completion), _ = large_reply(pair, 2)
    damaged = [bytes(with_record_byte(rows[0], 8, 1)), *rows[1:]]
    block = b"".join(decode_frame(row).bodies[part] for part in range(2) for row in damaged)
    assert pair.down(*damaged) == []
    (failed,) = pair.down(with_checksum(completion, body_checksum(Checksum.XXH3_64, block)))
    assert failed.code is ErrorCode.BAD_ROW_CRC


def with_record_byte(row: bytes, offset: int, value: int) -> bytearray:
    decoded = decode_frame(row)
    assert isinstance(decoded.message, Row)
    records = bytearray(decoded.bodies[0])
    records[offset] ^= value
    described = replace(decoded.message.bodies[0], checksum=body_checksum(Checksum.XXH3_64, records))
    message = replace(decoded.message, bodies=(described, *decoded.message.bodies[1:]))
    return bytearray(encode_frame(message, decoded.prefix.key, (records, *decoded.bodies[1:])))


def with_checksum(completion: bytes, checksum: bytes) -> memoryview:
    decoded = decode_frame(completion)
    assert isinstance(decoded.message, Completion)
    return encode_frame(replace(decoded.message, reply_checksum=checksum), decoded.prefix.key)


@pytest.mark.parametrize("fault", ["other memory", "not asked", "another frame"])
def test_a_frame_that_is_not_where_it_belongs_lacks_its_body(pair: Pair, fault: str) -> None:
    (first, *_), _ = large_reply(pair)
    memory = pair.verifier.place(prefix_of(first))
    assert memory is not None
    frame = written(first, memory)
    if fault == "other memory":
        frame = PlacedFrame(frame.head, memoryview(bytearray(memory)))
    elif fault == "not asked":
        pair.verifier._write = None
    else:
        frame = PlacedFrame(memoryview(bytes(rebuilt(bytearray(first), first_row=2)))[: len(frame.head)], memory)
    (failed,) = pair.verifier.receive(frame, 0)
    assert (failed.code, blocks(pair, FREE)) == (ErrorCode.WRONG_SIZE, 4)


# -- rounds that die while their rows are under way --------------------------------------------------------------


def late(pair: Pair) -> None:
    pair.verifier.expire(STEP_DEADLINE)
    pair.up(pair.verifier.reset(0, Cause.ROUND_TIMED_OUT))


def cancelled(pair: Pair) -> None:
    pair.up(pair.verifier.cancel(0, Cause.CLIENT_GONE))
    pair.up(pair.verifier.reset(0, Cause.CLIENT_GONE))


def renewed(pair: Pair) -> None:
    pair.up(pair.verifier.reset(0, Cause.CLIENT_GONE))


def closed(pair: Pair) -> None:
    pair.up(pair.verifier.close(0))
    pair.open(0, support=SupportPolicy.DENSE)


DEATHS = {"late": late, "cancelled": cancelled, "reset": renewed, "closed": closed}


@pytest.mark.parametrize("die", DEATHS.values(), ids=DEATHS)
def test_a_dead_rounds_block_is_kept_until_the_write_has_ended(pair: Pair, die: Callable[[Pair], None]) -> None:
    (first, *_), _ = large_reply(pair)
    memory = pair.verifier.place(prefix_of(first))
    assert memory is not None
    die(pair)
    assert (blocks(pair, QUARANTINED), blocks(pair, FREE)) == (1, 3)
    before = sum(pair.verifier.counters.values())
    (*rows, completion), arrays = large_reply(pair, 1, **dense_arrays(5, LARGE, token=9))
    assert blocks(pair, FREE) == 2
    # The transport goes on writing into memory that nobody else has, then its frame is whole, and stale.
    assert pair.verifier.receive(written(first, memory), 0) == []
    assert sum(pair.verifier.counters.values()) == before + 1
    assert (blocks(pair, QUARANTINED), blocks(pair, FREE)) == (0, 3)
    for row in rows:
        assert placed(pair, row) == []
    (ready,) = pair.down(completion)
    assert (ready.tokens, ready.q) == ((9,) * 5, arrays["q"])


def test_a_block_that_nobody_writes_into_is_free_at_once(pair: Pair) -> None:
    (first, *_), _ = large_reply(pair)
    placed(pair, first)
    late(pair)
    assert blocks(pair, FREE) == 4


def test_another_rounds_block_is_free_at_once() -> None:
    pair = dense_pair(LARGE)
    pair.open(1, session=78, support=SupportPolicy.DENSE)
    (first, *_), _ = large_reply(pair)
    pair.step(pair.item(1, slot=1, session=78))
    assert pair.verifier.place(prefix_of(first)) is not None
    pair.up(pair.verifier.cancel(1, Cause.CLIENT_GONE))
    assert (blocks(pair, LEASED), blocks(pair, FREE)) == (1, 3)


def test_what_comes_next_confirms_that_a_cut_off_write_has_ended(pair: Pair) -> None:
    """The stream broke inside the frame; the first frame of the next one says so, and no block is lost."""
    for epoch in (201, 202, 203):
        (first, *_), _ = large_reply(pair)
        assert pair.verifier.place(prefix_of(first)) is not None
        pair.drafter = DrafterConnection(offers(epoch, LARGE))
        (received,) = pair.up(pair.verifier.hello(pair.now_ns))
        assert isinstance(received, HelloReceived)
        assert (blocks(pair, QUARANTINED), blocks(pair, FREE)) == (1, 3)
        pair.down(pair.drafter.accept(pair.now_ns))
        assert (blocks(pair, QUARANTINED), blocks(pair, FREE)) == (0, 4)
        pair.open(0, support=SupportPolicy.DENSE)
    assert counted(pair.verifier.counters) == {}


def test_a_question_about_the_next_frame_confirms_it_too(pair: Pair) -> None:
    (first, *_), _ = large_reply(pair)
    assert pair.verifier.place(prefix_of(first)) is not None
    late(pair)
    assert pair.verifier.place(prefix_of(first)) is None
    assert blocks(pair, FREE) == 4


def test_an_end_does_not_free_what_was_confirmed_and_leased_again(pair: Pair) -> None:
    (first, *_), _ = large_reply(pair)
    memory = pair.verifier.place(prefix_of(first))
    assert memory is not None
    pair.verifier._direct_receive = True
    late(pair)
    pair.verifier.cancel_confirmed(Key(0, 1, 1))
    large_reply(pair)
    pair.verifier.cancel(0, Cause.CLIENT_GONE)
    assert blocks(pair, QUARANTINED) == 1
    pair.verifier.receive(written(first, memory), 0)
    assert blocks(pair, QUARANTINED) == 1


def test_a_silent_peer_holds_one_block_and_the_deadline_ends_the_round(pair: Pair) -> None:
    (first, *_), _ = large_reply(pair)
    assert pair.verifier.place(prefix_of(first)) is not None
    (timed_out,) = pair.verifier.expire(STEP_DEADLINE + MS)
    assert timed_out.round == 1
    assert blocks(pair, QUARANTINED) == 1


# -- any order of events ----------------------------------------------------------------------------------------


def outcome(events: list[Any]) -> list[Any]:
    """What a caller sees of events, without the memory."""
    return [
        (event.tokens, event.entries, event.confidences, bytes(event.ids), bytes(event.q))
        if isinstance(event, ProposalReady)
        else event
        for event in events
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["row", "again", "damage", "completion", "late", "cancel", "next"]), st.booleans()),
        max_size=14,
    )
)
def test_placed_frames_make_the_same_events_and_counters(acts: list[tuple[str, bool]]) -> None:
    """One pair gets some frames placed, the other gets the same ones whole."""
    pairs = [dense_pair(1008) for _ in range(2)]
    for pair in pairs:
        pair.round, pair.next, pair.frames = 0, 0, []  # type: ignore[attr-defined]
    for act, place in acts:
        seen = [outcome(turn(pair, act, place and index == 0)) for index, pair in enumerate(pairs)]
        assert seen[0] == seen[1]
        assert pairs[0].verifier.counters == pairs[1].verifier.counters
        assert pairs[0].verifier._slots[0].state is pairs[1].verifier._slots[0].state
        assert {blocks(pair, QUARANTINED) for pair in pairs} == {0}
        assert blocks(pairs[0], FREE) == blocks(pairs[1], FREE)


def turn(pair: Any, act: str, place: bool) -> list[Any]:
    """One event at a pair whose worker sends each row by itself."""
    if act == "next" or not pair.frames:
        if pair.verifier.slot_state(0).value != "ready":
            return []
        pair.round += 1
        (item,) = pair.step(pair.item(pair.round, depth=3))
        row, completion = pair.drafter.reply(item, **dense_arrays(3, 1008))
        pair.frames, pair.next = [*(part_of(row, index, 1) for index in range(3)), bytes(completion)], 0
        return []
    if act == "late":
        return pair.verifier.expire(STEP_DEADLINE)
    if act == "cancel":
        pair.up(pair.verifier.reset(0, Cause.CLIENT_GONE))
        pair.round, pair.frames = 0, []
        return []
    at = {"again": max(0, pair.next - 1), "completion": 3}.get(act, min(pair.next, 3))
    frame = pair.frames[at]
    if act == "damage":
        frame = bytes(corrupted(memoryview(frame), len(frame) - 3))
    pair.next = max(pair.next, at + 1)
    memory = pair.verifier.place(prefix_of(frame)) if place else None
    events = pair.verifier.receive(frame if memory is None else written(frame, memory), 0)
    for event in events:
        if isinstance(event, ProposalReady):
            continue
        assert isinstance(event, StepFailed)
    return events


def part_of(row: Any, first: int, count: int) -> bytes:
    """A ROW of some of the rows of a ROW that has all."""
    decoded = decode_frame(bytes(row))
    assert isinstance(decoded.message, Row)
    depth = decoded.message.row_count
    parts = [bytes(body[first * len(body) // depth : (first + count) * len(body) // depth]) for body in decoded.bodies]
    bodies = tuple(
        replace(body, rows=count, body_bytes=len(part), checksum=body_checksum(Checksum.XXH3_64, part))
        for body, part in zip(decoded.message.bodies, parts, strict=True)
    )
    message = replace(decoded.message, first_row=first, row_count=count, bodies=bodies)
    return bytes(encode_frame(message, decoded.prefix.key, parts))
