"""Replies that leave row by row: the frames of ``reply``, checked before the first, answered with the last."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from wire_pairs import SESSION, Pair, compatibility, connect, counted, parameters, reply_arrays

from dspark_proto import (
    Cause,
    ErrorCode,
    Lane,
    LocalProtocolError,
    ProposalReady,
    StepFailed,
    StepItem,
    SupportPolicy,
    WireVersion,
)
from dspark_proto.limits import VOCAB_MAX

VOCAB = 100_000
"""Two dense rows fit one ROW, and three do not: a reply of five has three ROWs."""


def dense_pair() -> Pair:
    """Connected, with slot 0 open for dense rows in the ratio lane."""
    sides = (parameters(epoch, compatibility(vocab_size=VOCAB), dense_rows=True) for epoch in (100, 200))
    pair = connect(*sides)
    pair.open(0, support=SupportPolicy.DENSE)
    return pair


def arrays(token: int = 7) -> dict[str, Any]:
    """A dense reply of five rows with all mass on one token."""
    q = array("f", bytes(4 * 5 * VOCAB))
    q[token::VOCAB] = array("f", [1.0] * 5)
    return {"tokens": [token] * 5, "entries": [VOCAB] * 5, "ids": b"", "q": memoryview(q).cast("B")}


def started(pair: Pair, round_: int = 1, token: int = 7) -> tuple[StepItem, Iterator[memoryview]]:
    """A STEP, and the frames that answer it, none of them taken."""
    (item,) = pair.step(pair.item(round_))
    return item, pair.drafter.stream_reply(item, **arrays(token))


def repeated(pair: Pair, item: StepItem) -> list[bytes]:
    """What a repetition of the STEP is answered with at once."""
    assert pair.up(pair.verifier.step([item], 0)) == []
    return [bytes(frame) for frame in pair.drafter.frames_to_send()]


def sparse_pair(support: SupportPolicy) -> Pair:
    pair = connect()
    pair.open(0, support=support)
    return pair


def v1_pair() -> Pair:
    pair = connect(*(parameters(epoch, versions=(WireVersion.V1_0,)) for epoch in (100, 200)))
    pair.open(0, support=SupportPolicy.K1, lane=Lane.GREEDY)
    return pair


@pytest.mark.parametrize(
    ("make", "lane", "reply"),
    [
        (dense_pair, Lane.RATIO, arrays()),
        (lambda: sparse_pair(SupportPolicy.K32), Lane.RATIO, reply_arrays()),
        (lambda: sparse_pair(SupportPolicy.K1), Lane.RATIO, reply_arrays(5, 1)),
        (v1_pair, Lane.GREEDY, reply_arrays(5, 1)),
    ],
)
def test_the_frames_are_those_of_a_reply(make: Any, lane: Lane, reply: dict[str, Any]) -> None:
    whole, streamed = make(), make()
    for confidences in (None, [2**23, 0, 1, 2, 2**24]):
        more = {"draft_us": 300, "confidences": confidences}
        round_ = 1 if confidences is None else 2
        (item,) = whole.step(whole.item(round_, lane=lane))
        expected = [bytes(frame) for frame in whole.drafter.reply(item, **reply, **more)]
        (item,) = streamed.step(streamed.item(round_, lane=lane))
        frames = [bytes(frame) for frame in streamed.drafter.stream_reply(item, **reply, **more)]
        assert frames == expected
        for pair in (whole, streamed):
            (ready,) = pair.down(*frames)
            ready.lease.release()


def test_a_row_leaves_before_the_next_is_filled() -> None:
    pair = dense_pair()
    _, frames = started(pair)
    before = list(frames)
    pair.down(*before)[0].lease.release()
    old = [bytes(frame) for frame in before]
    _, frames = started(pair, 2, token=8)
    for index in range(3):
        frame = next(frames)
        assert bytes(frame) == bytes(before[index]) != old[index]
        # The frames lie where those of the round before were: what was not filled yet is still theirs.
        assert [bytes(one) for one in before[index + 1 : 3]] == old[index + 1 : 3]
        assert pair.down(frame) == []
    (ready,) = pair.down(*frames)
    assert (ready.tokens, ready.q) == ((8,) * 5, arrays(8)["q"])
    ready.lease.release()


def test_a_round_is_answered_with_its_completion() -> None:
    pair = dense_pair()
    item = pair.item(1)
    (arrived,) = pair.step(item)
    frames = pair.drafter.stream_reply(arrived, **arrays())
    sent = []
    for _ in range(3):
        sent.append(bytes(next(frames)))
        assert repeated(pair, item) == []
    sent.append(bytes(next(frames)))
    assert repeated(pair, item) == sent
    assert list(frames) == []
    with pytest.raises(LocalProtocolError) as caught:
        pair.drafter.stream_reply(arrived, **arrays())
    assert caught.value.code is ErrorCode.DUPLICATE


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"tokens": [7, 7, 7, 7, VOCAB]}, ErrorCode.TOKEN_OUT_OF_RANGE),
        ({"tokens": [7, 7, 7, 7, VOCAB_MAX + 1]}, ErrorCode.BAD_ROW_RECORD),
        ({"tokens": [7, 7, 7, 7, -1]}, ErrorCode.BAD_ROW_RECORD),
        ({"entries": [VOCAB] * 4 + [1]}, ErrorCode.BAD_ROW_RECORD),
        ({"confidences": [0, 0, 0, 0, 2**24 + 1]}, ErrorCode.BAD_ROW_RECORD),
        ({"draft_us": -1}, ErrorCode.BAD_FIELD),
        ({"draft_us": 2**32}, ErrorCode.BAD_FIELD),
        ({"tokens": [7] * 4}, ErrorCode.WRONG_SIZE),
        ({"q": bytes(4 * 5 * VOCAB - 1)}, ErrorCode.WRONG_SIZE),
        ({"ids": bytes(20)}, ErrorCode.WRONG_SIZE),
    ],
)
def test_everything_is_checked_before_the_first_frame(change: dict[str, Any], code: ErrorCode) -> None:
    pair = dense_pair()
    (item,) = pair.step(pair.item(1))
    with pytest.raises(LocalProtocolError) as caught:
        pair.drafter.stream_reply(item, **(arrays() | change))
    assert caught.value.code is code
    (ready,) = pair.down(*pair.drafter.stream_reply(item, **arrays()))
    ready.lease.release()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"tokens": [7, 7, 7, 7, 1000]}, ErrorCode.TOKEN_OUT_OF_RANGE),
        ({"tokens": [7, 7, 7, 7, VOCAB_MAX + 1]}, ErrorCode.BAD_ROW_RECORD),
        ({"entries": [1, 1, 1, 1, 0]}, ErrorCode.BAD_ROW_RECORD),
        ({"draft_us": 2**32}, ErrorCode.BAD_FIELD),
        ({"tokens": [7] * 6}, ErrorCode.WRONG_SIZE),
        ({"ids": bytes(639)}, ErrorCode.WRONG_SIZE),
    ],
)
def test_what_is_wrong_with_a_small_reply_is_told_as_before(change: dict[str, Any], code: ErrorCode) -> None:
    pair = sparse_pair(SupportPolicy.K32)
    (item,) = pair.step(pair.item(1))
    with pytest.raises(LocalProtocolError) as caught:
        pair.drafter.reply(item, **(reply_arrays() | change))
    assert caught.value.code is code
    (ready,) = pair.down(*pair.drafter.reply(item, **reply_arrays()))
    ready.lease.release()


def test_a_stream_that_was_given_up_leaves_the_round_open() -> None:
    """The rest of the rows may be those of a new answer only if they are the same: nothing is mixed."""
    pair = dense_pair()
    item = pair.item(1)
    (arrived,) = pair.step(item)
    frames = pair.drafter.stream_reply(arrived, **arrays())
    pair.down(next(frames))
    del frames
    assert repeated(pair, item) == []
    assert pair.drafter.counters["duplicate"] == 1
    (ready,) = pair.down(*pair.drafter.reply(arrived, **arrays()))
    assert (ready.tokens, ready.q) == ((7,) * 5, arrays()["q"])
    assert pair.verifier.counters["duplicate"] == 1
    ready.lease.release()

    item, frames = started(pair, 2)
    pair.down(next(frames))
    assert pair.down(*pair.drafter.reply(item, **arrays(8))) == [
        StepFailed(0, SESSION, 1, 2, ErrorCode.BAD_REPLY_CHECKSUM, needs_reset=False)
    ]


def test_a_stream_that_was_given_up_may_be_failed() -> None:
    pair = dense_pair()
    item, frames = started(pair)
    pair.down(next(frames))
    (failed,) = pair.down(*pair.drafter.fail(item))
    assert (failed.code, failed.needs_reset) == (ErrorCode.DRAFT_FAILED, True)
    assert list(frames) == []
    assert counted(pair.drafter.counters) == {"draft_failed": 1, "stale_generation": 1}


@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_the_frames_end_when_the_round_dies(taken: int) -> None:
    """Whatever follows in the slot keeps its own frames."""
    pair = dense_pair()
    _, frames = started(pair)
    for _ in range(taken):
        next(frames)
    pair.up(pair.verifier.reset(0, Cause.ROUND_TIMED_OUT))
    (item,) = pair.step(pair.item(1))
    answer = pair.drafter.reply(item, **arrays(9))
    kept = [bytes(frame) for frame in answer]
    assert list(frames) == []
    assert pair.drafter.counters["stale_generation"] == 1
    assert [bytes(frame) for frame in answer] == kept
    (ready,) = pair.down(*kept)
    assert ready.tokens == (9,) * 5
    ready.lease.release()


def test_the_frames_end_when_the_connection_is_another() -> None:
    pair = dense_pair()
    _, frames = started(pair)
    next(frames)
    pair.up(pair.verifier.hello(0))
    assert list(frames) == []
    pair.down(pair.drafter.accept(0))
    pair.open(0, support=SupportPolicy.DENSE)
    (item,) = pair.step(pair.item(1))
    (ready,) = pair.down(*pair.drafter.reply(item, **arrays()))
    ready.lease.release()


def test_of_two_streams_for_one_round_the_second_is_too_late() -> None:
    pair = dense_pair()
    item, first = started(pair)
    next(first)
    answer = [bytes(frame) for frame in pair.drafter.reply(item, **arrays())]
    with pytest.raises(LocalProtocolError) as caught:
        next(first)
    assert caught.value.code is ErrorCode.DUPLICATE
    (ready,) = pair.down(*answer)
    assert isinstance(ready, ProposalReady)
    ready.lease.release()


def test_a_session_gets_rows_of_its_own() -> None:
    """The frames of a slot carry the session and the support that it was opened with."""
    pair = connect()
    for session, support in ((77, SupportPolicy.K32), (78, SupportPolicy.K32), (79, SupportPolicy.K16)):
        pair.open(0, session, support=support)
        (item,) = pair.step(pair.item(1, session=session))
        (ready,) = pair.down(*pair.drafter.reply(item, **reply_arrays(5, int(support))))
        assert (ready.session, ready.support) == (session, int(support))
        ready.lease.release()
        pair.up(pair.verifier.close(0))


def test_nothing_answers_a_round_that_is_over() -> None:
    pair = dense_pair()
    item, _ = started(pair)
    pair.up(pair.verifier.cancel(0, Cause.PREEMPTED))
    assert list(pair.drafter.stream_reply(item, **arrays())) == []
    assert pair.drafter.counters["stale_generation"] == 1
