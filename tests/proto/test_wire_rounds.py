"""Rounds and replies: both connections joined in memory, read top to bottom as a protocol."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from wire_pairs import (
    MS,
    SESSION,
    STEP_DEADLINE,
    TAP_WIDTH,
    Pair,
    connect,
    corrupted,
    counted,
    digest_of,
    error_frame,
    forged,
    parameters,
    rebuilt,
    reply_arrays,
    reply_frames,
    taps,
    tokens_bytes,
)

from dspark_proto import (
    NO_COMMIT,
    Cause,
    Checksum,
    Dtype,
    ErrorCode,
    Key,
    Lane,
    LeaseState,
    LocalProtocolError,
    PeerError,
    Scope,
    SlotClosed,
    SlotCommitted,
    SlotFailed,
    SlotReset,
    SlotState,
    StepFailed,
    StepTimedOut,
    SupportPolicy,
    VerifierState,
    decode_frame,
    encode_frame,
)
from dspark_proto.bodies import describe
from dspark_proto.messages import Commit, Completion, Ping, Stats, Step
from dspark_proto.registry import BodyKind


def test_a_request_from_open_to_close(pair: Pair) -> None:
    prompt = (1, 2, 3)
    opened = pair.drafter_events[-1]
    assert (opened.seed, opened.support, opened.lane, opened.generation) == (
        -5,
        SupportPolicy.K32,
        Lane.RATIO,
        1,
    )

    sent = pair.verifier.context(0, 0, 3, taps(3), tokens_bytes(*prompt))
    (context,) = pair.up(*sent.frames)
    assert (context.first_position, context.rows, bytes(context.taps)) == (0, 3, taps(3))
    assert bytes(context.token_ids) == tokens_bytes(*prompt)

    first = pair.item(1, tap_rows=0, anchor_token=4, prefix_digest=digest_of(*prompt))
    (item,) = pair.step(first)
    (ready,) = pair.down(*pair.drafter.reply(item, **reply_arrays(token=9)))
    assert (ready.slot, ready.session, ready.generation, ready.round) == (0, SESSION, 1, 1)
    assert (ready.anchor_position, ready.tokens, ready.entries) == (3, (9,) * 5, (1,) * 5)
    assert len(ready.ids) == len(ready.q) == 5 * 32 * 4
    assert ready.ids.readonly
    assert ready.lease.key == Key(0, 1, 1)
    ready.lease.release()

    second = pair.item(
        2,
        tap_rows=3,
        anchor_token=5,
        prefix_digest=digest_of(*prompt, 4, 9, 9),
        accepted_count=2,
        commit_token=5,
    )
    (item,) = pair.step(second)
    assert (item.accepted_count, item.commit_token, bytes(item.taps)) == (2, 5, taps(3))
    (ready,) = pair.down(*pair.drafter.reply(item, **reply_arrays(token=9)))
    assert ready.anchor_position == 6
    ready.lease.release()

    committed = digest_of(*prompt, 4, 9, 9, 5, *(9,) * 5)
    assert pair.up(pair.verifier.commit(0, 5, 8, committed)) == [
        SlotCommitted(0, SESSION, 1, 2, accepted_count=5, token=8, position=12)
    ]
    assert pair.up(pair.verifier.close(0)) == [SlotClosed(0, SESSION, Cause.FINISHED)]
    assert counted(pair.verifier.counters) == counted(pair.drafter.counters) == {}
    assert pair.verifier.staging is not None
    assert pair.verifier.staging.count(LeaseState.FREE) == 4


def test_several_requests_ride_in_one_step(pair: Pair) -> None:
    pair.open(1, session=78, support=SupportPolicy.K1, lane=Lane.GREEDY)
    items = pair.step(pair.item(1), pair.item(1, slot=1, session=78, depth=2, lane=Lane.GREEDY, tap_rows=0))
    assert [item.slot for item in items] == [0, 1]
    frames = [
        *pair.drafter.reply(items[1], **reply_arrays(2, 1)),
        *pair.drafter.reply(items[0], **reply_arrays()),
    ]
    greedy, ratio = pair.down(*frames)
    assert (greedy.slot, greedy.depth, greedy.support, len(greedy.q)) == (1, 2, 1, 8)
    assert (ratio.slot, ratio.depth, ratio.support) == (0, 5, 32)


def test_step_may_be_encoded_into_a_preallocated_buffer(pair: Pair) -> None:
    out = memoryview(bytearray(4096))
    frame = pair.verifier.step([pair.item(1)], 0, out)
    assert frame.obj is out.obj
    assert pair.up(frame)[0].items[0].round == 1


def test_reply_length_does_not_depend_on_what_was_drafted(pair: Pair) -> None:
    lengths = set()
    for round_, token in enumerate((0, 127, 128, 255, 256, 999)):
        (item,) = pair.step(pair.item(round_))
        frames = pair.drafter.reply(item, **(reply_arrays(token=token) | {"entries": [round_ + 1] * 5}))
        lengths.add((*map(len, frames), decode_frame(frames[0]).prefix.control_bytes))
        pair.down(*frames)[0].lease.release()
    assert len(lengths) == 1


def test_identical_step_again_returns_the_cached_bytes(pair: Pair) -> None:
    item = pair.item(1)
    frame = pair.verifier.step([item], 0)
    assert bytes(pair.verifier.step([item], 5)) == bytes(frame)
    (arrived,) = pair.up(frame)[0].items
    assert pair.up(frame) == []
    assert pair.drafter.frames_to_send() == []
    reply = [bytes(one) for one in pair.drafter.reply(arrived, **reply_arrays())]
    assert pair.up(frame) == []
    assert [bytes(one) for one in pair.drafter.frames_to_send()] == reply
    assert pair.drafter.counters["duplicate"] == 2
    assert pair.verifier.staging is not None
    assert pair.verifier.staging.count(LeaseState.LEASED) == 1


@pytest.mark.parametrize(
    "change", [{"depth": 4}, {"anchor_token": 43}, {"prefix_digest": bytes(8)}, {"taps": taps(1, 2)}]
)
def test_same_key_with_other_content_is_refused_and_nothing_is_redrawn(
    pair: Pair, change: dict[str, Any]
) -> None:
    item = pair.item(1)
    twin = connect()
    twin.open(0)
    other = twin.verifier.step([replace(item, **change)], 0)
    (arrived,) = pair.step(item)
    assert pair.up(other) == []
    (failed,) = pair.settle()
    assert (failed.code, failed.needs_reset) == (ErrorCode.ROUND_KEY_REUSED, True)
    assert pair.drafter.reply(arrived, **reply_arrays()) == []


def test_local_change_under_a_used_key_is_misuse(pair: Pair) -> None:
    item = pair.item(1)
    pair.verifier.step([item], 0)
    with pytest.raises(LocalProtocolError) as caught:
        pair.verifier.step([replace(item, depth=4)], 0)
    assert caught.value.code is ErrorCode.STALE_ROUND


def test_timeout_bumps_the_generation_before_the_lease_can_be_reused(pair: Pair) -> None:
    (item,) = pair.step(pair.item(1))
    late = [bytes(frame) for frame in pair.drafter.reply(item, **reply_arrays())]
    assert pair.verifier.expire(STEP_DEADLINE - 1) == []
    pair.verifier.frames_to_send()
    (event,) = pair.verifier.expire(STEP_DEADLINE)
    assert event == StepTimedOut(0, SESSION, generation=1, new_generation=2, round=1)
    assert pair.verifier.generation(0) == 2
    assert pair.verifier.reset_count(0) == 1
    assert pair.verifier.staging is not None
    assert pair.verifier.staging.count(LeaseState.FREE) == 4
    assert pair.down(*late) == []
    assert counted(pair.verifier.counters) == {"step_timed_out": 1, "late": 2}

    with pytest.raises(LocalProtocolError) as caught:
        pair.verifier.step([pair.item(2)], 0)
    assert caught.value.code is ErrorCode.SLOT_NEEDS_RESET
    assert pair.up(pair.verifier.reset(0, Cause.ROUND_TIMED_OUT, context_start=4)) == [
        SlotReset(0, SESSION, generation=3, cause=Cause.ROUND_TIMED_OUT, context_start=4)
    ]
    assert pair.verifier.reset_count(0) == pair.drafter.reset_count(0) == 2
    assert pair.verifier.context_end(0) == 4
    (item,) = pair.step(pair.item(1))
    assert pair.down(*late) == []
    (ready,) = pair.down(*pair.drafter.reply(item, **reply_arrays()))
    assert (ready.generation, ready.anchor_position) == (3, 5)


def test_direct_transport_keeps_the_block_quarantined_until_it_confirms() -> None:
    pair = connect(direct_receive=True)
    pair.open(0)
    pair.step(pair.item(1))
    pair.verifier.expire(STEP_DEADLINE)
    staging = pair.verifier.staging
    assert staging is not None
    assert staging.count(LeaseState.QUARANTINED) == 1
    pair.up(pair.verifier.reset(0, Cause.ROUND_TIMED_OUT))
    pair.verifier.step([pair.item(1)], 0)
    assert staging.count(LeaseState.FREE) == 2
    pair.verifier.cancel_confirmed(Key(0, 1, 1))
    assert staging.count(LeaseState.FREE) == 3


def test_next_deadline_is_the_earliest(pair: Pair) -> None:
    assert pair.verifier.next_deadline_ns() == 1000 * MS
    pair.now_ns = 100 * MS
    quick = connect(parameters(1, step_deadline_ms=20))
    quick.open(0)
    quick.verifier.step([quick.item(1)], 100 * MS)
    assert quick.verifier.next_deadline_ns() == 120 * MS


def test_replies_to_dead_generations_and_rounds_are_dropped_from_the_prefix(pair: Pair) -> None:
    row, completion = reply_frames(pair)
    row[100] ^= 1  # would be a control fault, were it decoded
    pair.up(pair.verifier.reset(0, Cause.PREEMPTED))
    assert pair.down(row, completion) == []
    assert counted(pair.verifier.counters) == {"stale_generation": 2}
    (item,) = pair.step(pair.item(7))
    frames = [bytes(frame) for frame in pair.drafter.reply(item, **reply_arrays())]
    assert pair.down(*frames)
    assert pair.down(*frames) == []
    assert counted(pair.verifier.counters) == {"stale_generation": 2, "duplicate": 2}
    (item,) = pair.step(pair.item(8))
    assert pair.down(*frames) == []
    assert counted(pair.verifier.counters) == {"stale_generation": 2, "duplicate": 2, "stale_round": 2}
    pair.up(pair.verifier.close(0))
    assert pair.down(*frames) == []
    assert pair.verifier.counters["slot_not_open"] == 2


def test_duplicate_row_does_not_hurt_the_round(pair: Pair) -> None:
    row, completion = reply_frames(pair)
    assert pair.down(row, row) == []
    assert pair.verifier.counters["duplicate"] == 1
    assert len(pair.down(completion)) == 1


@pytest.mark.parametrize(
    ("frame", "offset", "code"),
    [
        (0, 60, ErrorCode.BAD_CONTROL_CRC),
        (0, -1281, ErrorCode.BAD_PADDING),
        (0, -1280, ErrorCode.BAD_BODY_CHECKSUM),
        (1, 60, ErrorCode.BAD_CONTROL_CRC),
        (1, -1, ErrorCode.BAD_PADDING),
    ],
)
def test_corruption_discards_the_whole_proposal_and_the_slot_goes_on(
    pair: Pair, frame: int, offset: int, code: ErrorCode
) -> None:
    frames = reply_frames(pair)
    frames[frame][offset] ^= 0x40
    events = pair.down(*frames)
    assert events == [StepFailed(0, SESSION, 1, 1, code, needs_reset=False)]
    assert pair.verifier.counters[code.counter] == 1
    assert pair.verifier.staging is not None
    assert pair.verifier.staging.count(LeaseState.FREE) == 4
    (item,) = pair.step(pair.item(2, accepted_count=NO_COMMIT))
    (ready,) = pair.down(*pair.drafter.reply(item, **reply_arrays()))
    assert ready.round == 2


def test_damaged_prefix_is_counted_and_the_round_times_out(pair: Pair) -> None:
    row, completion = reply_frames(pair)
    row[25] ^= 1
    assert pair.down(row) == []
    assert pair.verifier.counters["bad_prefix_crc"] == 1
    assert pair.down(completion) == [StepFailed(0, SESSION, 1, 1, ErrorCode.ROWS_MISSING, needs_reset=False)]


def test_truncated_frame(pair: Pair) -> None:
    row, _ = reply_frames(pair)
    (failed,) = pair.down(row[:-64])
    assert failed.code is ErrorCode.WRONG_SIZE
    assert pair.down(b"") == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"anchor_position": 99}, ErrorCode.COMPLETION_MISMATCH),
        ({"context_version": 1}, ErrorCode.COMPLETION_MISMATCH),
        ({"prefix_digest": bytes(8)}, ErrorCode.COMPLETION_MISMATCH),
        ({"row_count": 4}, ErrorCode.ROWS_MISSING),
        ({"reply_bytes": 1359}, ErrorCode.WRONG_SIZE),
        ({"reply_checksum": bytes(8)}, ErrorCode.BAD_REPLY_CHECKSUM),
    ],
)
def test_completion_must_answer_the_step(pair: Pair, changes: dict[str, Any], code: ErrorCode) -> None:
    row, completion = reply_frames(pair)
    (failed,) = pair.down(row, rebuilt(completion, **changes))
    assert (failed.code, failed.needs_reset) == (code, False)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"depth": 4}, ErrorCode.WRONG_SIZE),
        ({"support": 16}, ErrorCode.WRONG_SIZE),
        ({"first_row": 1}, ErrorCode.ROWS_MISSING),
        ({"row_count": 4}, ErrorCode.BAD_DESCRIPTOR),
    ],
)
def test_row_must_fit_the_step(pair: Pair, changes: dict[str, Any], code: ErrorCode) -> None:
    row, _ = reply_frames(pair)
    (failed,) = pair.down(rebuilt(row, **changes))
    assert failed.code is code


@pytest.mark.parametrize(
    ("changes", "counter"), [({"epoch": 9}, "wrong_epoch"), ({"session": 9}, "wrong_session")]
)
def test_reply_of_another_epoch_or_session_is_dropped(
    pair: Pair, changes: dict[str, Any], counter: str
) -> None:
    row, completion = reply_frames(pair)
    assert pair.down(rebuilt(row, **changes), rebuilt(completion, **changes)) == []
    assert pair.verifier.counters[counter] == 2
    assert len(pair.down(row, completion)) == 1


def test_a_row_record_that_passes_its_checksums_is_still_checked(pair: Pair) -> None:
    (item,) = pair.step(pair.item(1))
    frames = pair.drafter.reply(item, **reply_arrays())
    row = decode_frame(frames[0])
    records = bytearray(row.bodies[0])
    records[8] ^= 1
    body = row.message.bodies[0]
    fixed = describe(body.kind, body.dtype, body.rows, body.entries, records, Checksum.XXH3_64)
    message = replace(row.message, bodies=(fixed, *row.message.bodies[1:]))
    (failed,) = pair.down(encode_frame(message, row.prefix.key, [records, *row.bodies[1:]]), frames[1])
    assert failed.code is ErrorCode.BAD_REPLY_CHECKSUM


def test_body_checksum_of_another_kind_than_negotiated(pair: Pair) -> None:
    row, _ = reply_frames(pair)
    bodies = tuple(replace(body, checksum_kind=Checksum.CRC32C) for body in decode_frame(row).message.bodies)
    decoded = decode_frame(row)
    frame = encode_frame(replace(decoded.message, bodies=bodies), decoded.prefix.key, decoded.bodies)
    (failed,) = pair.down(frame)
    assert failed.code is ErrorCode.BAD_DESCRIPTOR


def test_messages_out_of_place_are_counted(pair: Pair) -> None:
    completion = Completion(SESSION, 200, 0, 0, bytes(8), 0, 0, 0, bytes(8))
    assert pair.down(encode_frame(Ping(200, 1), Key(0, 1, 1))) == []
    assert pair.down(encode_frame(completion, Key(99, 1, 1))) == []
    assert pair.down(encode_frame(completion)) == []
    assert pair.down(encode_frame(Commit(1, 0, 0, 0, bytes(8)), Key(0, 1, 1))) == []
    assert pair.down(encode_frame(Stats(200))) == []
    assert counted(pair.verifier.counters) == {"unexpected_message": 4, "slot_out_of_range": 1}
    assert pair.up(encode_frame(completion, Key(0, 1, 1))) == []
    assert counted(pair.drafter.counters) == {"unexpected_message": 1}


def test_a_failed_draft_ends_the_generation(pair: Pair) -> None:
    (item,) = pair.step(pair.item(1))
    events = pair.down(*pair.drafter.fail(item, ErrorCode.DRAFT_NOT_FINITE))
    assert events == [StepFailed(0, SESSION, 1, 1, ErrorCode.DRAFT_NOT_FINITE, needs_reset=True)]
    assert pair.drafter.fail(item) == []
    assert pair.verifier.slot_state(0) is SlotState.DORMANT
    pair.up(pair.verifier.reset(0, Cause.REPLY_REFUSED))
    assert pair.step(pair.item(1))


def test_unknown_status_counts_as_a_failed_draft(pair: Pair) -> None:
    row, completion = reply_frames(pair)
    (failed,) = pair.down(row, rebuilt(completion, status=250))
    assert (failed.code, failed.needs_reset) == (ErrorCode.DRAFT_FAILED, True)


def test_errors_end_what_their_scope_says(pair: Pair) -> None:
    key = Key(0, 1, 1)
    assert pair.down(error_frame(ErrorCode.BAD_FIELD, Scope.FRAME, key)) == [
        PeerError(ErrorCode.BAD_FIELD, Scope.FRAME, "test")
    ]
    pair.step(pair.item(1))
    (failed,) = pair.down(error_frame(ErrorCode.BAD_FIELD, Scope.ROUND, key))
    assert failed == StepFailed(0, SESSION, 1, 1, ErrorCode.BAD_FIELD, needs_reset=False)
    assert isinstance(pair.down(error_frame(ErrorCode.BAD_FIELD, Scope.ROUND, key))[0], PeerError)
    assert pair.down(error_frame(ErrorCode.CONTEXT_GAP, Scope.SLOT, key)) == [
        SlotFailed(0, SESSION, 1, 2, ErrorCode.CONTEXT_GAP)
    ]
    assert pair.down(error_frame(ErrorCode.CONTEXT_GAP, Scope.SLOT, Key(0, 2, 0))) == []
    assert pair.verifier.state is VerifierState.ACTIVE
    assert pair.down(error_frame(ErrorCode.BAD_FIELD, Scope.SLOT))
    (lost,) = pair.down(error_frame(ErrorCode.HELLO_REQUIRED, Scope.CONNECTION, Key(0, 2, 0)))
    assert lost.scope is Scope.CONNECTION
    assert pair.verifier.state is VerifierState.LOST


def test_the_worker_counts_errors_it_is_told(pair: Pair) -> None:
    (event,) = pair.up(error_frame(ErrorCode.BAD_FIELD, Scope.FRAME))
    assert event.code is ErrorCode.BAD_FIELD
    assert pair.drafter.frames_to_send() == []


@pytest.mark.parametrize(
    ("offset", "code"), [(60, ErrorCode.BAD_CONTROL_CRC), (-64, ErrorCode.BAD_BODY_CHECKSUM)]
)
def test_a_step_that_cannot_be_used_fails_the_slot_at_once(pair: Pair, offset: int, code: ErrorCode) -> None:
    frame = pair.verifier.step([pair.item(1)], 0)
    assert pair.up(corrupted(frame, offset)) == []
    (failed,) = pair.settle()
    assert (failed.code, failed.needs_reset) == (code, True)
    assert pair.up(frame) == []
    assert pair.drafter.counters["slot_needs_reset"] == 1
    pair.up(pair.verifier.reset(0, Cause.REPLY_REFUSED))
    assert pair.step(pair.item(1))


def test_one_bad_item_does_not_hurt_its_batch(pair: Pair) -> None:
    pair.open(1, session=78)
    frame = pair.verifier.step([pair.item(1), pair.item(1, slot=1, session=78)], 0)
    (event,) = pair.up(corrupted(frame, -64))
    assert [item.slot for item in event.items] == [0]
    (failed,) = pair.settle()
    assert (failed.slot, failed.code) == (1, ErrorCode.BAD_BODY_CHECKSUM)


def test_a_batch_that_cannot_be_attributed_times_out(pair: Pair) -> None:
    pair.open(1, session=78)
    frame = pair.verifier.step([pair.item(1), pair.item(1, slot=1, session=78)], 0)
    assert pair.up(corrupted(frame, 60)) == []
    assert pair.settle() == []
    assert [type(event) for event in pair.verifier.expire(STEP_DEADLINE)] == [StepTimedOut, StepTimedOut]


def test_lost_context_is_a_gap_that_fails_the_slot(pair: Pair) -> None:
    first, second = (pair.verifier.context(0, position, 1, taps(1)).frames[0] for position in (0, 1))
    assert pair.up(second) == []
    (failed,) = pair.settle()
    assert failed == SlotFailed(0, SESSION, 1, 2, ErrorCode.CONTEXT_GAP)
    assert pair.up(first) == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"depth": 6}, ErrorCode.DEPTH_OUT_OF_RANGE),
        ({"lane": Lane.GREEDY}, ErrorCode.LANE_MISMATCH),
        ({"anchor_token": 1000}, ErrorCode.TOKEN_OUT_OF_RANGE),
        ({"commit_token": 1000}, ErrorCode.TOKEN_OUT_OF_RANGE),
        ({"tap_first": 1}, ErrorCode.CONTEXT_GAP),
        ({"anchor_position": 3}, ErrorCode.ANCHOR_MISMATCH),
        ({"accepted_count": 0}, ErrorCode.COMMIT_MISMATCH),
        ({"taps": taps(1)[:-2]}, ErrorCode.BAD_DESCRIPTOR),
    ],
)
def test_a_step_that_breaks_a_rule_fails_the_slot(
    pair: Pair, changes: dict[str, Any], code: ErrorCode
) -> None:
    assert pair.up(forged(pair, **changes)) == []
    (failed,) = pair.settle()
    assert failed == SlotFailed(0, SESSION, 1, 2, code)
    with pytest.raises(LocalProtocolError):
        pair.verifier.step([replace(pair.item(1), **changes)], 0)


@pytest.mark.parametrize(
    ("changes", "counter"),
    [
        ({"session": 9}, "wrong_session"),
        ({"generation": 7}, "stale_generation"),
        ({"slot": 2}, "slot_not_open"),
    ],
)
def test_a_step_of_someone_else_is_dropped(pair: Pair, changes: dict[str, Any], counter: str) -> None:
    assert pair.up(forged(pair, **changes)) == []
    assert pair.drafter.frames_to_send() == []
    assert counted(pair.drafter.counters) == {counter: 1}


def test_a_step_of_an_older_generation_is_dropped_from_its_batch(pair: Pair) -> None:
    pair.open(1, 78)
    step = decode_frame(pair.verifier.step([pair.item(1), pair.item(1, slot=1, session=78)], 0))
    assert isinstance(step.message, Step)
    first, second = step.message.items
    old = replace(step.message, items=(replace(first, generation=0), second))
    (arrived,) = pair.up(encode_frame(old, bodies=step.bodies))
    assert [item.slot for item in arrived.items] == [1]
    assert counted(pair.drafter.counters) == {"stale_generation": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": BodyKind.TOKENS},
        {"dtype": Dtype.FP32},
        {"dtype": Dtype.FP32, "entries": 3 * TAP_WIDTH // 2},
        {"rows": 2},
        {"entries": 3 * TAP_WIDTH - 1},
        {"entries": 6 * TAP_WIDTH},
    ],
)
def test_taps_of_another_shape_are_refused(pair: Pair, changes: dict[str, Any]) -> None:
    step = decode_frame(pair.verifier.step([pair.item(1)], 0))
    assert isinstance(step.message, Step)
    (body,) = step.message.bodies
    other = replace(step.message, bodies=(replace(body, **changes),))
    assert pair.up(encode_frame(other, step.prefix.key, step.bodies)) == []
    (failed,) = pair.settle()
    assert failed.code is ErrorCode.BAD_DESCRIPTOR
    assert pair.drafter.counters["bad_descriptor"] == 1


def test_slot_out_of_range_is_answered(pair: Pair) -> None:
    assert pair.up(forged(pair, slot=9)) == []
    (error,) = (decode_frame(frame).message for frame in pair.drafter.frames_to_send())
    assert (error.code, error.scope) == (ErrorCode.SLOT_OUT_OF_RANGE, Scope.SESSION)


def test_wrong_digest_is_found_where_the_tokens_are_known(pair: Pair) -> None:
    pair.up(*pair.verifier.context(0, 0, 2, taps(2), tokens_bytes(1, 2)).frames)
    pair.up(pair.verifier.step([pair.item(1, tap_rows=0, prefix_digest=digest_of(1, 3))], 0))
    (failed,) = pair.settle()
    assert failed.code is ErrorCode.DIGEST_MISMATCH


def test_wrong_commit_history_is_found_by_the_digest(pair: Pair) -> None:
    (item,) = pair.step(pair.item(1, tap_rows=0, prefix_digest=digest_of()))
    pair.down(*pair.drafter.reply(item, **reply_arrays(token=9)))[0].lease.release()
    wrong = pair.item(
        2, tap_rows=2, anchor_token=5, accepted_count=1, commit_token=5, prefix_digest=digest_of(42, 8)
    )
    pair.up(pair.verifier.step([wrong], 0))
    (failed,) = pair.settle()
    assert failed.code is ErrorCode.DIGEST_MISMATCH


def test_target_only_tokens_in_between_may_be_streamed_as_context(pair: Pair) -> None:
    (item,) = pair.step(pair.item(1, tap_rows=0, prefix_digest=digest_of()))
    pair.down(*pair.drafter.reply(item, **reply_arrays(token=9)))[0].lease.release()
    pair.up(*pair.verifier.context(0, 0, 3, taps(3), tokens_bytes(42, 9, 5)).frames)
    follow = pair.item(
        2, tap_rows=1, anchor_token=6, accepted_count=1, commit_token=5, prefix_digest=digest_of(42, 9, 5, 6)
    )
    assert pair.step(follow)
    assert pair.verifier.context_end(0) == 4
