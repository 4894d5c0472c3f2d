"""Dense rows and confidences: negotiated in HELLO, asked for in OPEN, carried by one or several ROWs."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest
from wire_pairs import SESSION, Pair, compatibility, connect, parameters, reply_arrays

from dspark_proto import (
    CONFIDENCE_MAX,
    Accepted,
    Capability,
    DrafterConnection,
    ErrorCode,
    HelloParameters,
    HelloReceived,
    Key,
    Lane,
    LeaseState,
    LocalProtocolError,
    MessageType,
    Rejected,
    SlotOpened,
    StepFailed,
    SupportPolicy,
    VerifierConnection,
    decode_frame,
    encode_frame,
)
from dspark_proto.hello import Accept, Hello
from dspark_proto.limits import BODY_BYTES_MAX, ROW_CHUNK_BYTES
from dspark_proto.messages import Open, Row
from dspark_proto.registry import Representation

LARGE = 100_000
"""A vocabulary of which two dense rows fit one ROW, and three do not."""


def offers(epoch: int, vocab_size: int = 1000, **changes: Any) -> HelloParameters:
    fields = {"dense_rows": True} | changes
    return parameters(epoch, compatibility(vocab_size=vocab_size), **fields)


def dense_pair(vocab_size: int = 1000) -> Pair:
    """Connected, with slot 0 open for dense rows in the ratio lane."""
    pair = connect(offers(100, vocab_size), offers(200, vocab_size))
    pair.open(0, support=SupportPolicy.DENSE)
    return pair


def dense_arrays(depth: int = 5, vocab_size: int = 1000, token: int = 7) -> dict[str, Any]:
    """Arguments of ``DrafterConnection.reply``: rows with three quarters of the mass on one token."""
    q = array("f", bytes(4 * depth * vocab_size))
    for row in range(depth):
        q[row * vocab_size + token] = 0.75
        q[row * vocab_size + vocab_size - 1] = 0.25
    return {
        "tokens": [token] * depth,
        "entries": [vocab_size] * depth,
        "ids": b"",
        "q": memoryview(q).cast("B"),
        "confidences": [CONFIDENCE_MAX - row for row in range(depth)],
    }


# -- negotiation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("able", [False, True])
def test_dense_rows_need_both_sides(asked: bool, able: bool) -> None:
    pair = connect(offers(100, dense_rows=asked), offers(200, dense_rows=able))
    terms = pair.verifier.negotiated
    assert terms is not None
    assert pair.drafter.negotiated == replace(terms, peer_epoch=100)
    assert terms.dense_rows is (asked and able)
    assert terms.reply_bytes == 5 * (16 + (4 * 1000 if asked and able else 8 * 32))
    assert pair.verifier.staging is not None
    assert [len(lease.storage) for lease in pair.verifier.staging.leases] == [terms.reply_bytes] * 4


def test_reply_bytes_are_those_of_the_larger_rows() -> None:
    assert offers(1, vocab_size=40, max_support=256).reply_bytes == 5 * (16 + 8 * 256)
    assert offers(1, vocab_size=40, max_support=16).reply_bytes == 5 * (16 + 4 * 40)
    assert parameters(1).reply_bytes == 5 * (16 + 8 * 32)


def test_dense_rows_are_off_unless_asked_for() -> None:
    hello = decode_frame(VerifierConnection(parameters(100)).hello(0)).message
    assert isinstance(hello, Hello)
    assert hello.capabilities == 0
    assert connect().verifier.negotiated.dense_rows is False  # type: ignore[union-attr]


def test_unknown_capability_bits_are_ignored_and_not_echoed() -> None:
    pair = Pair(VerifierConnection(offers(100)), DrafterConnection(offers(200)))
    hello = decode_frame(pair.verifier.hello(0)).message
    (event,) = pair.up(encode_frame(replace(hello, capabilities=2**63 | Capability.DENSE_ROWS.mask)))
    assert isinstance(event, HelloReceived)
    assert event.code is None
    accept = pair.drafter.accept(0)
    message = decode_frame(accept).message
    assert isinstance(message, Accept)
    assert message.capabilities == Capability.DENSE_ROWS.mask
    assert isinstance(pair.down(accept)[0], Accepted)


@pytest.mark.parametrize("capabilities", [Capability.DENSE_ROWS.mask, 2])
def test_an_accept_with_a_capability_that_was_not_offered_is_refused(capabilities: int) -> None:
    pair = Pair(VerifierConnection(parameters(100)), DrafterConnection(parameters(200)))
    pair.up(pair.verifier.hello(0))
    accept = replace(decode_frame(pair.drafter.accept(0)).message, capabilities=capabilities)
    (event,) = pair.down(encode_frame(accept))
    assert event == Rejected(ErrorCode.BAD_NEGOTIATION, "ACCEPT.capabilities", "", "")
    assert pair.verifier.staging is None


@pytest.mark.parametrize("reply_bytes", [5 * (16 + 8 * 32), 5 * (16 + 4 * 1000) + 1])
def test_a_hello_with_another_size_than_its_own_terms_is_refused(reply_bytes: int) -> None:
    pair = Pair(VerifierConnection(offers(100)), DrafterConnection(offers(200)))
    hello = replace(decode_frame(pair.verifier.hello(0)).message, reply_bytes=reply_bytes)
    (event,) = pair.up(encode_frame(hello))
    assert event.code is ErrorCode.BAD_NEGOTIATION


def test_a_row_must_fit_one_frame() -> None:
    largest = (BODY_BYTES_MAX - 64) // 4
    assert offers(1, vocab_size=largest).dense_rows
    with pytest.raises(LocalProtocolError) as caught:
        offers(1, vocab_size=largest + 1)
    assert caught.value.code is ErrorCode.LIMIT_EXCEEDED
    assert offers(1, vocab_size=largest + 1, dense_rows=False)


# -- OPEN ------------------------------------------------------------------------------------------------------


def test_opened_slots_know_policy_and_lane() -> None:
    pair = dense_pair()
    opened = pair.drafter_events[-1]
    assert isinstance(opened, SlotOpened)
    assert (opened.support, opened.lane) == (SupportPolicy.DENSE, Lane.RATIO)


def test_open_asks_for_dense_rows_only_where_both_offer_them() -> None:
    pair = connect(offers(100), offers(200, dense_rows=False))
    with pytest.raises(LocalProtocolError) as caught:
        pair.open(0, support=SupportPolicy.DENSE)
    assert caught.value.code is ErrorCode.SUPPORT_OUT_OF_RANGE
    opening = pair.verifier.open(0, SESSION, seed=1, support=SupportPolicy.K1, lane=Lane.RATIO)
    frame = decode_frame(opening)
    assert isinstance(frame.message, Open)
    forged = encode_frame(replace(frame.message, support=SupportPolicy.DENSE), frame.prefix.key)
    assert pair.up(forged) == []
    assert pair.drafter.counters["support_out_of_range"] == 1
    assert pair.up(opening)


# -- replies ---------------------------------------------------------------------------------------------------


def test_a_dense_reply_is_a_proposal() -> None:
    pair = dense_pair()
    (item,) = pair.step(pair.item(1, depth=3))
    arrays = dense_arrays(3)
    row, completion = pair.drafter.reply(item, **arrays)
    (ready,) = pair.down(row, completion)
    assert (ready.depth, ready.support, ready.tokens, ready.entries) == (3, 0, (7,) * 3, (1000,) * 3)
    assert ready.confidences == (CONFIDENCE_MAX, CONFIDENCE_MAX - 1, CONFIDENCE_MAX - 2)
    assert (len(ready.ids), ready.q) == (0, arrays["q"])
    message = decode_frame(row).message
    assert isinstance(message, Row)
    assert (message.support, message.representation, len(message.bodies)) == (0, Representation.DENSE, 2)
    ready.lease.release()


def test_large_replies_travel_in_several_rows_and_may_come_in_any_division() -> None:
    pair = dense_pair(LARGE)
    arrays = dense_arrays(5, LARGE, token=99)
    (item,) = pair.step(pair.item(1))
    *rows, completion = pair.drafter.reply(item, **arrays)
    messages = [decode_frame(row).message for row in rows]
    assert [(m.first_row, m.row_count) for m in messages] == [(0, 2), (2, 2), (4, 1)]  # type: ignore[attr-defined]
    assert max(map(len, rows)) <= ROW_CHUNK_BYTES + 512
    (ready,) = pair.down(*rows, completion)
    assert ready.tokens == (99,) * 5
    assert ready.q == arrays["q"]
    ready.lease.release()


def test_rows_above_the_chunk_travel_one_by_one() -> None:
    vocab_size = ROW_CHUNK_BYTES // 4 + 1
    pair = dense_pair(vocab_size)
    arrays = dense_arrays(5, vocab_size)
    (item,) = pair.step(pair.item(1))
    frames = pair.drafter.reply(item, **arrays)
    assert len(frames) == 6
    (ready,) = pair.down(*frames)
    assert ready.q == arrays["q"]


def test_a_retry_gets_all_rows_again() -> None:
    pair = dense_pair(LARGE)
    item = pair.item(1)
    (arrived,) = pair.step(item)
    sent = [bytes(frame) for frame in pair.drafter.reply(arrived, **dense_arrays(5, LARGE))]
    assert pair.up(pair.verifier.step([item], 0)) == []
    again = [bytes(frame) for frame in pair.drafter.frames_to_send()]
    assert again == sent
    assert len(sent) == 4


def test_a_lost_row_discards_the_proposal() -> None:
    pair = dense_pair(LARGE)
    (item,) = pair.step(pair.item(1))
    first, _, last, completion = pair.drafter.reply(item, **dense_arrays(5, LARGE))
    assert pair.down(first, last, completion) == [
        StepFailed(0, SESSION, 1, 1, ErrorCode.ROWS_MISSING, needs_reset=False)
    ]
    assert pair.verifier.counters["duplicate"] == 1
    assert pair.verifier.staging is not None
    assert pair.verifier.staging.count(LeaseState.FREE) == 4


def test_the_lengths_of_a_dense_reply_do_not_depend_on_what_was_drafted() -> None:
    pair = dense_pair()
    lengths = set()
    for round_, token in enumerate((0, 127, 128, 998)):
        (item,) = pair.step(pair.item(round_))
        arrays = dense_arrays(token=token) | {"confidences": [token] * 5}
        frames = pair.drafter.reply(item, **arrays)
        lengths.add(tuple(map(len, frames)))
        pair.down(*frames)[0].lease.release()
    assert len(lengths) == 1


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"representation": Representation.SPARSE}, ErrorCode.WRONG_SIZE),
        ({"support": 1}, ErrorCode.WRONG_SIZE),
        ({"depth": 4}, ErrorCode.WRONG_SIZE),
    ],
)
def test_a_dense_row_must_say_so(changes: dict[str, Any], code: ErrorCode) -> None:
    pair = dense_pair()
    (item,) = pair.step(pair.item(1))
    row = decode_frame(pair.drafter.reply(item, **dense_arrays())[0])
    (failed,) = pair.down(encode_frame(replace(row.message, **changes), row.prefix.key, row.bodies))
    assert failed.code is code


def test_sparse_rows_are_no_answer_to_a_dense_step() -> None:
    dense, sparse = dense_pair(), connect(offers(100), offers(200))
    sparse.open(0, support=SupportPolicy.K32)
    (item,) = sparse.step(sparse.item(1))
    dense.step(dense.item(1))
    frames = sparse.drafter.reply(item, **reply_arrays())
    (failed,) = dense.down(*frames)
    assert (failed.code, failed.needs_reset) == (ErrorCode.WRONG_SIZE, False)


def test_sparse_and_dense_slots_share_a_connection() -> None:
    pair = dense_pair()
    pair.open(1, session=78, support=SupportPolicy.K32)
    items = pair.step(pair.item(1), pair.item(1, slot=1, session=78))
    frames = [
        *pair.drafter.reply(items[1], **reply_arrays()),
        *pair.drafter.reply(items[0], **dense_arrays()),
    ]
    sparse, dense = pair.down(*frames)
    assert (sparse.slot, sparse.support, len(sparse.ids), len(sparse.q)) == (1, 32, 640, 640)
    assert (dense.slot, dense.support, len(dense.ids), len(dense.q)) == (0, 0, 0, 20_000)


def test_arguments_that_are_no_dense_reply_are_refused_and_the_round_goes_on() -> None:
    pair = dense_pair()
    (item,) = pair.step(pair.item(1))
    for change in ({"ids": bytes(20_000)}, {"q": bytes(16)}, {"entries": [2] * 5}, {"tokens": [1000] * 5}):
        with pytest.raises(LocalProtocolError):
            pair.drafter.reply(item, **(dense_arrays() | change))
    assert pair.down(*pair.drafter.reply(item, **dense_arrays()))


# -- confidences -----------------------------------------------------------------------------------------------


def test_a_worker_without_an_opinion_says_that_it_is_certain(pair: Pair) -> None:
    (item,) = pair.step(pair.item(1))
    (ready,) = pair.down(*pair.drafter.reply(item, **reply_arrays()))
    assert ready.confidences == (CONFIDENCE_MAX,) * 5


def test_confidences_arrive_as_they_were_sent(pair: Pair) -> None:
    (item,) = pair.step(pair.item(1))
    confidences = [0, 1, 2**23, 2**24 - 1, 2**24]
    (ready,) = pair.down(*pair.drafter.reply(item, **reply_arrays(), confidences=confidences))
    assert ready.confidences == tuple(confidences)


@pytest.mark.parametrize("value", [-1, 2**24 + 1])
def test_a_confidence_out_of_range_is_not_sent(pair: Pair, value: int) -> None:
    (item,) = pair.step(pair.item(1))
    with pytest.raises(LocalProtocolError) as caught:
        pair.drafter.reply(item, **reply_arrays(), confidences=[value] * 5)
    assert caught.value.code is ErrorCode.BAD_ROW_RECORD
    assert pair.drafter.reply(item, **reply_arrays())


def test_the_key_of_every_row_frame_is_that_of_the_step() -> None:
    pair = dense_pair(LARGE)
    (item,) = pair.step(pair.item(1))
    frames = [decode_frame(frame) for frame in pair.drafter.reply(item, **dense_arrays(5, LARGE))]
    assert {frame.prefix.key for frame in frames} == {Key(0, 1, 1)}
    assert [frame.prefix.type for frame in frames] == [MessageType.ROW] * 3 + [MessageType.COMPLETION]
