"""Slots, commits, context credit and heartbeats: both connections joined in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from wire_pairs import (
    MS,
    SESSION,
    Pair,
    compatibility,
    connect,
    counted,
    digest_of,
    parameters,
    reply_arrays,
    taps,
)

from dspark_proto import (
    Cause,
    CreditGranted,
    DrafterState,
    Draining,
    ErrorCode,
    Key,
    Lane,
    LeaseState,
    LocalProtocolError,
    PeerSilent,
    PongReceived,
    SlotCancelled,
    SlotClosed,
    SlotCommitted,
    SlotState,
    StatsReceived,
    StepTimedOut,
    SupportPolicy,
    VerifierState,
    decode_frame,
    encode_frame,
)
from dspark_proto.messages import Commit, Context, Ping, Pong


@pytest.mark.parametrize(
    "changes",
    [
        {"accepted_count": 6, "commit_token": 5},
        {"accepted_count": 1, "commit_token": 6},
        {"accepted_count": 2, "commit_token": 5},
    ],
)
def test_commit_that_does_not_fit_is_misuse(pair: Pair, changes: dict[str, Any]) -> None:
    (item,) = pair.step(pair.item(1))
    pair.down(*pair.drafter.reply(item, **reply_arrays()))
    with pytest.raises(LocalProtocolError) as caught:
        pair.verifier.step([pair.item(2, tap_rows=2, anchor_token=5, **changes)], 0)
    assert caught.value.code is ErrorCode.COMMIT_MISMATCH


def test_commit_is_reported_once_and_its_repetition_ignored(pair: Pair) -> None:
    (item,) = pair.step(pair.item(1, tap_rows=0, prefix_digest=digest_of()))
    pair.down(*pair.drafter.reply(item, **reply_arrays(token=9)))
    frame = pair.verifier.commit(0, 1, 5, digest_of(42, 9))
    assert pair.up(frame) == [SlotCommitted(0, SESSION, 1, 1, 1, 5, 2)]
    assert pair.up(frame) == []
    assert counted(pair.drafter.counters) == {"duplicate": 1}
    with pytest.raises(LocalProtocolError):
        pair.verifier.commit(0, 1, 5, digest_of(42, 9))
    (item,) = pair.step(pair.item(2, tap_rows=2, anchor_token=5, prefix_digest=digest_of(42, 9)))
    assert pair.drafter.frames_to_send() == []


def test_commit_is_accepted_where_the_tokens_are_unknown(pair: Pair) -> None:
    pair.up(*pair.verifier.context(0, 0, 2, taps(2)).frames)
    (item,) = pair.step(pair.item(1, tap_rows=0, prefix_digest=b"unknown!"))
    pair.down(*pair.drafter.reply(item, **reply_arrays(token=9)))[0].lease.release()
    pair.up(*pair.verifier.context(0, 2, 3, taps(3)).frames)
    (committed,) = pair.up(pair.verifier.commit(0, 1, 5, b"unknown?"))
    assert (committed.token, committed.position) == (5, 4)
    (item,) = pair.step(pair.item(2, tap_rows=1, anchor_token=6, prefix_digest=b"unknown!"))
    pair.down(*pair.drafter.reply(item, **reply_arrays()))
    wrong = pair.item(3, tap_rows=1, prefix_digest=b"unknown!")
    pair.up(pair.verifier.step([wrong], 0))
    (failed,) = pair.settle()
    assert failed.code is ErrorCode.DIGEST_MISMATCH


@pytest.mark.parametrize(
    ("changes", "round_", "code"),
    [
        ({"position": 3}, 1, ErrorCode.COMMIT_MISMATCH),
        ({"token": 1000}, 1, ErrorCode.TOKEN_OUT_OF_RANGE),
        ({"prefix_digest": bytes(8)}, 1, ErrorCode.DIGEST_MISMATCH),
        ({"accepted_count": 6, "position": 7}, 1, ErrorCode.COMMIT_MISMATCH),
        ({}, 2, ErrorCode.STALE_ROUND),
    ],
)
def test_commit_faults(pair: Pair, changes: dict[str, Any], round_: int, code: ErrorCode) -> None:
    (item,) = pair.step(pair.item(1, tap_rows=0, prefix_digest=digest_of()))
    pair.down(*pair.drafter.reply(item, **reply_arrays(token=9)))
    message = replace(Commit(SESSION, 1, 5, 2, digest_of(42, 9)), **changes)
    assert pair.up(encode_frame(message, Key(0, 1, round_))) == []
    assert counted(pair.drafter.counters) == {code.counter: 1}


def test_cancel_leaves_the_slot_dormant_until_reset(pair: Pair) -> None:
    (item,) = pair.step(pair.item(1))
    assert pair.up(pair.verifier.cancel(0, Cause.CLIENT_GONE)) == [SlotCancelled(0, SESSION, 2, Cause.CLIENT_GONE)]
    assert pair.drafter.reply(item, **reply_arrays()) == []
    assert pair.drafter.counters["stale_generation"] == 1
    with pytest.raises(LocalProtocolError):
        pair.verifier.context(0, 0, 1, taps(1))
    pair.up(pair.verifier.reset(0, Cause.PREEMPTED))
    assert pair.step(pair.item(1))


def test_open_on_a_live_slot_is_refused_and_the_slot_survives(pair: Pair) -> None:
    with pytest.raises(LocalProtocolError) as caught:
        pair.open(0)
    assert caught.value.code is ErrorCode.SLOT_BUSY
    twin = connect()
    twin.open(0)
    twin.up(twin.verifier.close(0))
    foreign = twin.verifier.open(0, 99, seed=0, support=SupportPolicy.K1, lane=Lane.MATCH)
    assert pair.up(foreign) == []
    assert pair.drafter.counters["slot_busy"] == 1
    assert pair.settle() == []
    assert pair.step(pair.item(1))


@pytest.mark.parametrize(
    "changes",
    [{"support": SupportPolicy.K256}, {"seed": 2**63}, {"choice": 256}, {"draft_temperature_micro": -1}],
)
def test_open_out_of_range_changes_nothing(changes: dict[str, Any]) -> None:
    pair = connect()
    with pytest.raises(LocalProtocolError):
        pair.open(0, **changes)
    assert pair.verifier.slot_state(0) is SlotState.FREE


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_only_negotiated_lanes_may_be_opened(lanes: int) -> None:
    compat = compatibility(lanes=lanes)
    pair = connect(parameters(1, compat), parameters(2, compat))
    for lane in Lane:
        if 1 << (lane - 1) != lanes:
            with pytest.raises(LocalProtocolError) as caught:
                pair.open(0, lane=lane)
            assert caught.value.code is ErrorCode.LANE_MISMATCH


def test_close_with_a_round_in_flight_frees_everything(pair: Pair) -> None:
    (item,) = pair.step(pair.item(1))
    pair.up(pair.verifier.close(0, Cause.CLIENT_GONE))
    assert pair.drafter.reply(item, **reply_arrays()) == []
    assert pair.verifier.staging is not None
    assert pair.verifier.staging.count(LeaseState.FREE) == 4
    pair.open(0, session=5)
    assert pair.verifier.generation(0) == 3


def test_stale_reset_is_dropped(pair: Pair) -> None:
    first = pair.verifier.reset(0, Cause.PREEMPTED)
    pair.up(pair.verifier.reset(0, Cause.PREEMPTED))
    assert pair.up(first) == []
    assert counted(pair.drafter.counters) == {"stale_generation": 1}


def test_misuse_of_slots(pair: Pair) -> None:
    calls = [
        (lambda: pair.verifier.reset(1, Cause.PREEMPTED), ErrorCode.SLOT_NOT_OPEN),
        (lambda: pair.verifier.cancel(4, Cause.PREEMPTED), ErrorCode.SLOT_OUT_OF_RANGE),
        (lambda: pair.verifier.commit(0, 0, 0, bytes(8)), ErrorCode.COMMIT_MISMATCH),
        (lambda: pair.verifier.step([pair.item(1), pair.item(2)], 0), ErrorCode.ROUND_UNRESOLVED),
        (lambda: pair.verifier.step([pair.item(1, session=9)], 0), ErrorCode.WRONG_SESSION),
        (lambda: pair.verifier.step([pair.item(1, taps=b"")], 0), ErrorCode.WRONG_SIZE),
        (lambda: pair.verifier.context(0, 1, 1, taps(1)), ErrorCode.CONTEXT_GAP),
        (lambda: pair.verifier.context(0, 0, 2, taps(1)), ErrorCode.WRONG_SIZE),
        (lambda: pair.verifier.context(0, 0, 1, taps(1), b"x"), ErrorCode.WRONG_SIZE),
    ]
    for call, code in calls:
        with pytest.raises(LocalProtocolError) as caught:
            call()
        assert caught.value.code is code
    assert pair.step(pair.item(1))
    with pytest.raises(LocalProtocolError) as caught:
        pair.verifier.context(0, 1, 1, taps(1))
    assert caught.value.code is ErrorCode.ROUND_UNRESOLVED


def test_a_failing_item_leaves_the_whole_batch_unsent(pair: Pair) -> None:
    pair.open(1, session=78)
    with pytest.raises(LocalProtocolError):
        pair.verifier.step([pair.item(1), pair.item(1, slot=1, session=78, depth=6)], 0)
    assert pair.verifier.slot_state(0) is SlotState.READY
    assert pair.verifier.staging is not None
    assert pair.verifier.staging.count(LeaseState.FREE) == 4


def test_staging_bounds_the_rounds_in_flight() -> None:
    pair = connect(parameters(1, max_in_flight=2))
    for slot in range(3):
        pair.open(slot, session=slot)
    pair.step(*(pair.item(1, slot=slot, session=slot) for slot in range(2)))
    with pytest.raises(LocalProtocolError) as caught:
        pair.verifier.step([pair.item(1, slot=2, session=2)], 0)
    assert caught.value.code is ErrorCode.STAGING_EXHAUSTED


def test_reply_misuse_changes_nothing(pair: Pair) -> None:
    (item,) = pair.step(pair.item(1))
    for changes in ({"tokens": [7]}, {"q": b""}, {"tokens": [1000] * 5}):
        with pytest.raises(LocalProtocolError):
            pair.drafter.reply(item, **(reply_arrays() | changes))
    assert pair.drafter.reply(item, **reply_arrays())
    with pytest.raises(LocalProtocolError) as caught:
        pair.drafter.reply(item, **reply_arrays())
    assert caught.value.code is ErrorCode.DUPLICATE


def test_context_is_chunked_and_waits_for_credit() -> None:
    pair = connect(parameters(1, context_credit_rows=8))
    pair.open(0)
    sent = pair.verifier.context(0, 0, 20, taps(20))
    assert sent.rows == 8
    assert pair.verifier.context(0, 8, 12, taps(12)).rows == 0
    pair.up(*sent.frames)
    pair.drafter.context_consumed(1)
    assert pair.settle() == []
    pair.drafter.context_consumed(3)
    assert pair.settle() == [CreditGranted(4)]
    assert pair.verifier.context(0, 8, 12, taps(12)).rows == 4
    with pytest.raises(LocalProtocolError):
        pair.drafter.context_consumed(5)


def test_large_context_is_sent_in_bounded_frames() -> None:
    compat = compatibility(tap_width=4096)
    pair = connect(parameters(1, compat), parameters(2, compat))
    pair.open(0)
    rows, width = 100, compat.tap_row_bytes
    sent = pair.verifier.context(0, 0, rows, bytes(rows * width))
    assert [decode_frame(frame).message.rows for frame in sent.frames] == [42, 42, 16]
    assert [event.first_position for event in pair.up(*sent.frames)] == [0, 42, 84]


def test_more_context_than_credit_is_refused(pair: Pair) -> None:
    greedy = connect(parameters(1), parameters(2, context_credit_rows=2))
    greedy.open(0)
    assert greedy.up(*pair.verifier.context(0, 0, 3, taps(3)).frames) == []
    assert greedy.drafter.counters["credit_exceeded"] == 1


@pytest.mark.parametrize("fault", ["a gap", "a damaged body", "another session"])
def test_credit_of_refused_context_comes_back(fault: str) -> None:
    """The verifier has counted the rows: without them its window would be smaller for ever."""
    pair = connect(parameters(1, context_credit_rows=8))
    pair.open(0)
    sent = pair.verifier.context(0, 0, 8, taps(8)).frames[0]
    frame = decode_frame(sent)
    message: Any = frame.message
    assert isinstance(message, Context)
    changed = {"a gap": {"first_position": 3}, "another session": {"session": SESSION + 1}}.get(fault, {})
    refused = bytearray(encode_frame(replace(message, **changed), frame.prefix.key, frame.bodies))
    refused[-9] ^= fault == "a damaged body"
    assert pair.up(refused) == []
    codes = {"a gap": "context_gap", "a damaged body": "bad_body_checksum", "another session": "wrong_session"}
    assert pair.drafter.counters[codes[fault]] == 1
    pair.up(encode_frame(Ping(1, 9)))
    pongs = [decode_frame(one).message for one in pair.drafter.frames_to_send()]
    assert [one.credit_limit for one in pongs if isinstance(one, Pong)] == [16]


def test_heartbeat_pings_and_load(pair: Pair) -> None:
    pair.drafter.load_permille = 250
    assert pair.verifier.expire(1000 * MS) == []
    assert pair.settle() == [PongReceived(1, 250)]
    pair.up(pair.verifier.ping(1001 * MS))
    assert pair.settle() == [PongReceived(2, 250)]
    assert pair.down(encode_frame(Ping(200, 9))) == []
    (pong,) = pair.verifier.frames_to_send()
    assert decode_frame(pong).message == Pong(100, 9, 0, 0)
    assert pair.up(pong) == []


def test_heartbeat_of_another_epoch(pair: Pair) -> None:
    assert pair.down(encode_frame(Pong(1, 1, 0, 0))) == []
    assert pair.up(encode_frame(Ping(1, 1))) == []
    assert (pair.verifier.counters["wrong_epoch"], pair.drafter.counters["wrong_epoch"]) == (1, 1)


def test_a_silent_worker_is_found_by_unanswered_pings(pair: Pair) -> None:
    pair.step(pair.item(1))
    assert pair.verifier.expire(1 * MS) == []
    (timed_out,) = pair.verifier.expire(1000 * MS)
    assert isinstance(timed_out, StepTimedOut)
    assert pair.verifier.expire(3999 * MS) == []
    assert pair.verifier.expire(4000 * MS) == [PeerSilent(4000 * MS)]
    assert pair.verifier.state is VerifierState.LOST
    assert pair.verifier.slot_state(0) is SlotState.FREE


def test_a_stall_of_our_own_thread_is_not_silence(pair: Pair) -> None:
    pair.verifier.expire(1000 * MS)
    up = pair.verifier.frames_to_send()
    pair.now_ns = 60_000 * MS
    pair.up(*up)
    pair.down(*pair.drafter.frames_to_send())
    assert pair.verifier.expire(60_000 * MS) == []


def test_worker_frees_the_slots_of_a_vanished_verifier(pair: Pair) -> None:
    deadline = pair.drafter.next_deadline_ns()
    assert deadline == 60 * 1000 * MS
    assert pair.drafter.expire(deadline - 1) == []
    assert pair.drafter.expire(deadline) == [SlotClosed(0, SESSION, None), PeerSilent(deadline)]
    assert pair.drafter.state is DrafterState.LOST
    assert pair.drafter.next_deadline_ns() is None
    assert pair.drafter.expire(deadline) == []


def test_drain_refuses_sessions_and_finishes_rounds(pair: Pair) -> None:
    assert pair.down(pair.drafter.drain(500)) == [Draining(500)]
    (item,) = pair.step(pair.item(1))
    assert pair.down(*pair.drafter.reply(item, **reply_arrays()))
    with pytest.raises(LocalProtocolError) as caught:
        pair.open(1)
    assert caught.value.code is ErrorCode.DRAINING
    other = connect()
    assert pair.up(other.verifier.open(1, 5, seed=0, support=SupportPolicy.K1, lane=Lane.MATCH)) == []
    assert pair.drafter.counters["draining"] == 1


def test_stats_show_what_the_worker_holds(pair: Pair) -> None:
    pair.open(1, session=78)
    items = pair.step(pair.item(1), pair.item(1, slot=1, session=78))
    pair.drafter.reply(items[0], **reply_arrays())
    pair.up(encode_frame(Ping(1, 1)))
    pair.up(pair.verifier.stats())
    (event,) = pair.settle()
    assert isinstance(event, StatsReceived)
    stats = event.stats
    assert (stats.slots_open, stats.rounds_unresolved, stats.replies_cached) == (2, 1, 1)
    assert [(one.code, one.count) for one in stats.counters] == [(ErrorCode.WRONG_EPOCH, 1)]
