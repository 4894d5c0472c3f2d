"""HELLO, ACCEPT, REJECT: the compatibility hash, the minimum rule, bounds, and reconnection."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from wire_pairs import MS, Pair, compatibility, connect, parameters, reply_arrays

from dspark_proto import (
    Accepted,
    Checksum,
    DrafterConnection,
    DrafterState,
    DraftLayout,
    Dtype,
    ErrorCode,
    HelloReceived,
    LocalProtocolError,
    PeerSilent,
    Rejected,
    SlotClosed,
    SlotState,
    StepFailed,
    VerifierConnection,
    VerifierState,
    decode_frame,
    encode_frame,
)
from dspark_proto.hello import Accept, Hello
from dspark_proto.limits import HANDSHAKE_DEADLINE_MS
from dspark_proto.messages import Ping


def joined(verifier: Any = None, drafter: Any = None) -> Pair:
    return Pair(
        VerifierConnection(verifier or parameters(100)), DrafterConnection(drafter or parameters(200))
    )


def hello(pair: Pair, **changes: Any) -> HelloReceived:
    """Send the verifier's HELLO with some fields changed; returns the drafter's event."""
    message = decode_frame(pair.verifier.hello(pair.now_ns)).message
    (event,) = pair.up(encode_frame(replace(message, **changes)))
    return event


def test_minimum_rule_and_exact_sizes() -> None:
    offer = parameters(100, max_slots=3, max_depth=7, heartbeat_ms=500)
    answer = parameters(200, max_slots=9, max_depth=4, step_deadline_ms=50, context_credit_rows=10)
    pair = connect(offer, answer)
    terms = pair.verifier.negotiated
    assert terms is not None
    assert pair.drafter.negotiated == replace(terms, peer_epoch=100)
    assert (terms.max_slots, terms.max_depth, terms.max_support, terms.max_in_flight) == (3, 4, 32, 4)
    assert (terms.heartbeat_ms, terms.step_deadline_ms, terms.context_credit_rows) == (500, 50, 10)
    assert terms.checksum is Checksum.XXH3_64
    assert terms.tap_row_bytes == 48
    assert terms.reply_bytes == 4 * (16 + 8 * 32)
    assert pair.verifier.staging is not None
    assert [len(lease.storage) for lease in pair.verifier.staging.leases] == [terms.reply_bytes] * 4


def test_nothing_is_allocated_before_accept() -> None:
    asked: list[int] = []
    verifier = VerifierConnection(parameters(100), allocate=lambda n: (asked.append(n), bytearray(n))[1])
    pair = Pair(verifier, DrafterConnection(parameters(200)))
    pair.up(verifier.hello(0))
    assert asked == []
    assert verifier.staging is None
    pair.down(pair.drafter.accept(0))
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("vocab_size", 999, ("1000", "999")),
        ("token_map_hash", bytes(32), (sha256(b"map").hexdigest()[:96], "00" * 32)),
        ("draft_identity", "other", ("draft@1234", "other")),
        ("target_identity", "other", ("target@5678", "other")),
        ("tokenizer_hash", bytes(32), (sha256(b"tokenizer").hexdigest(), "00" * 32)),
        ("tap_layers", (1, 2, 3), ("2,14,26", "1,2,3")),
        ("tap_dtype", Dtype.FP32, ("1", "2")),
        ("tap_width", 16, ("8", "16")),
        ("draft_layout", DraftLayout.ADAPTED, ("1", "2")),
        ("lanes", 1, ("7", "1")),
        ("wire_major", 3, ("2", "3")),
    ],
)
def test_reject_names_the_first_differing_field_and_both_values(
    field: str, value: Any, shown: tuple[str, str]
) -> None:
    pair = joined(verifier=parameters(100, compatibility(**{field: value})))
    (event,) = pair.up(pair.verifier.hello(0))
    assert event.code is ErrorCode.INCOMPATIBLE
    assert event.mismatch.field == field
    with pytest.raises(LocalProtocolError) as caught:
        pair.drafter.accept(0)
    assert caught.value.code is ErrorCode.INCOMPATIBLE
    assert pair.down(pair.drafter.reject()) == [
        Rejected(ErrorCode.INCOMPATIBLE, field, local=shown[1], peer=shown[0])
    ]
    assert pair.verifier.state is VerifierState.IDLE
    assert pair.drafter.state is DrafterState.AWAITING_HELLO
    assert pair.drafter.counters["incompatible"] == 1


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"compat_hash": bytes(32)}, ErrorCode.BAD_FIELD),
        ({"compat": b"\x90", "compat_hash": sha256(b"\x90").digest()}, ErrorCode.BAD_FIELD),
        ({"compat": b"junk", "compat_hash": sha256(b"junk").digest()}, ErrorCode.NONCANONICAL),
        ({"wire_versions": (0x0300, 0x0100)}, ErrorCode.BAD_VERSION),
        ({"checksums": 4}, ErrorCode.NO_COMMON_CHECKSUM),
        ({"reply_bytes": 1}, ErrorCode.BAD_NEGOTIATION),
        ({"auth": b"secret"}, ErrorCode.AUTH_UNSUPPORTED),
    ],
)
def test_hello_that_cannot_be_accepted(changes: dict[str, Any], code: ErrorCode) -> None:
    pair = joined()
    assert hello(pair, **changes).code is code
    (event,) = pair.down(pair.drafter.reject())
    assert event.code is code
    assert pair.drafter.counters[code.counter] == 1


def test_same_hash_with_other_contents_is_a_lie() -> None:
    pair = joined()
    other = compatibility(vocab_size=5).encoded()
    assert hello(pair, compat=other).code is ErrorCode.BAD_FIELD


def test_worker_may_refuse_for_its_own_reason() -> None:
    pair = joined()
    pair.up(pair.verifier.hello(0))
    assert pair.down(pair.drafter.reject(ErrorCode.DRAINING)) == [Rejected(ErrorCode.DRAINING, "", "", "")]


def test_unknown_capability_and_version_bits_are_ignored() -> None:
    pair = joined()
    assert hello(pair, capabilities=2**63, wire_versions=(0x0900, 0x0200), checksums=0b1111_1101).code is None
    assert pair.drafter.accept(0)
    assert pair.drafter.negotiated is not None
    assert pair.drafter.negotiated.checksum is Checksum.CRC32C


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"max_depth": 6}, ErrorCode.BAD_NEGOTIATION),
        ({"heartbeat_ms": 600_000}, ErrorCode.BAD_NEGOTIATION),
        ({"reply_bytes": 8}, ErrorCode.BAD_NEGOTIATION),
        ({"tap_row_bytes": 8}, ErrorCode.BAD_NEGOTIATION),
        ({"compat_hash": bytes(32)}, ErrorCode.INCOMPATIBLE),
        ({"wire_version": 0x0300}, ErrorCode.BAD_VERSION),
    ],
)
def test_accept_that_exceeds_the_offer_is_refused(changes: dict[str, Any], code: ErrorCode) -> None:
    pair = joined()
    pair.up(pair.verifier.hello(0))
    accept = decode_frame(pair.drafter.accept(0)).message
    assert isinstance(accept, Accept)
    (event,) = pair.down(encode_frame(replace(accept, **changes)))
    assert event.code is code
    assert pair.verifier.staging is None
    assert pair.verifier.state is VerifierState.IDLE


def test_accept_with_a_checksum_that_was_not_offered() -> None:
    pair = joined(verifier=parameters(100, checksums=1))
    pair.up(pair.verifier.hello(0))
    accept = decode_frame(pair.drafter.accept(0)).message
    (event,) = pair.down(encode_frame(replace(accept, checksum_kind=Checksum.XXH3_64)))
    assert event.code is ErrorCode.NO_COMMON_CHECKSUM


def test_accept_of_an_older_hello_is_dropped() -> None:
    pair = joined()
    pair.up(pair.verifier.hello(0))
    old = bytes(pair.drafter.accept(0))
    pair.up(pair.verifier.hello(0))
    assert pair.down(old) == []
    assert pair.verifier.counters["stale_hello"] == 1
    (event,) = pair.down(pair.drafter.accept(0))
    assert isinstance(event, Accepted)
    assert pair.down(old) == []
    assert pair.verifier.counters["unexpected_message"] == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"max_slots": 0},
        {"max_slots": 1025},
        {"max_depth": 33},
        {"max_support": 257},
        {"max_in_flight": 1},
        {"heartbeat_ms": 0},
        {"heartbeat_ms": -1},
        {"step_deadline_ms": 600_001},
        {"context_credit_rows": 0},
        {"checksums": 0},
        {"epoch": -1},
    ],
)
def test_parameters_out_of_range_are_refused_at_once(changes: dict[str, Any]) -> None:
    fields = {"epoch": 1} | changes
    with pytest.raises(LocalProtocolError) as caught:
        parameters(**fields)
    assert next(iter(changes)) in caught.value.where


@pytest.mark.parametrize(
    "changes",
    [
        {"tap_dtype": Dtype.INT32},
        {"tap_layers": ()},
        {"tap_layers": tuple(range(17))},
        {"tap_layers": [1]},
        {"draft_identity": "x" * 97},
        {"token_map_hash": b"short"},
        {"vocab_size": 0},
        {"lanes": 8},
    ],
)
def test_compatibility_out_of_range(changes: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        compatibility(**changes)


def test_unanswered_hello_times_out_and_may_be_repeated() -> None:
    pair = joined()
    pair.verifier.hello(5)
    deadline = pair.verifier.next_deadline_ns()
    assert deadline == 5 + HANDSHAKE_DEADLINE_MS * MS
    assert pair.verifier.expire(deadline - 1) == []
    assert pair.verifier.expire(deadline) == [PeerSilent(deadline - 5)]
    assert pair.verifier.state is VerifierState.LOST
    assert pair.verifier.next_deadline_ns() is None
    assert pair.verifier.expire(deadline) == []
    pair.up(pair.verifier.hello(0))
    assert isinstance(pair.down(pair.drafter.accept(0))[0], Accepted)


def test_a_new_hello_kills_every_slot_on_both_sides() -> None:
    pair = connect()
    pair.open(0)
    pair.open(1, session=78)
    (item,) = pair.step(pair.item(1))
    generation = pair.verifier.generation(0)
    frame = pair.verifier.hello(pair.now_ns)
    events = pair.up(frame)
    assert [type(event) for event in events] == [SlotClosed, SlotClosed, HelloReceived]
    assert events[0].cause is None
    pair.down(pair.drafter.accept(0))
    assert pair.verifier.slot_state(0) is SlotState.FREE
    assert pair.drafter.reply(item, **reply_arrays()) == []
    pair.open(0)
    assert pair.verifier.generation(0) > generation + 1


def test_a_restarted_worker_asks_for_hello_once_and_drafting_resumes() -> None:
    pair = connect()
    pair.open(0)
    pair.drafter = DrafterConnection(parameters(201))
    step = pair.verifier.step([pair.item(1)], 0)
    assert pair.up(step) == []
    assert pair.up(encode_frame(Ping(100, 1))) == []
    assert pair.drafter.counters["hello_required"] == 2
    failed, error = pair.settle()
    assert isinstance(failed, StepFailed)
    assert failed.needs_reset
    assert error.code is ErrorCode.HELLO_REQUIRED
    assert pair.verifier.state is VerifierState.LOST
    pair.up(pair.verifier.hello(0))
    (accepted,) = pair.down(pair.drafter.accept(0))
    assert accepted.negotiated.peer_epoch == 201
    pair.open(0)
    (item,) = pair.step(pair.item(1))
    (ready,) = pair.down(*pair.drafter.reply(item, **reply_arrays()))
    assert ready.tokens == (7,) * 5


def test_reconnect_keeps_staging_that_is_still_consumed() -> None:
    pair = connect()
    pair.open(0)
    (item,) = pair.step(pair.item(1))
    (ready,) = pair.down(*pair.drafter.reply(item, **reply_arrays()))
    staging = pair.verifier.staging
    pair.up(pair.verifier.hello(0))
    pair.down(pair.drafter.accept(0))
    assert pair.verifier.staging is staging
    assert ready.q[:4] == b"\x00\x00\x80\x3f"
    ready.lease.release()


def test_drafter_refuses_calls_out_of_order() -> None:
    drafter = DrafterConnection(parameters(200))
    for call in (lambda: drafter.accept(0), drafter.reject, lambda: drafter.drain(10)):
        with pytest.raises(LocalProtocolError):
            call()
    assert drafter.state is DrafterState.AWAITING_HELLO


def test_verifier_refuses_everything_before_hello() -> None:
    verifier = VerifierConnection(parameters(100))
    for call in (
        verifier.stats,
        lambda: verifier.ping(0),
        lambda: verifier.close(0),
        lambda: verifier.generation(0),
    ):
        with pytest.raises(LocalProtocolError) as caught:
            call()
        assert caught.value.code is ErrorCode.HELLO_REQUIRED


def test_hello_is_one_frame_below_four_kilobytes() -> None:
    frame = VerifierConnection(parameters(100)).hello(0)
    assert len(frame) <= 4096
    assert isinstance(decode_frame(frame).message, Hello)
