"""What the fuzzer has found in the connections, each as its smallest frame."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest
from wire_pairs import SESSION, Pair, counted, reply_frames

from dspark_proto import (
    Cause,
    DrafterState,
    ErrorCode,
    Key,
    LocalProtocolError,
    RemoteProtocolError,
    Scope,
    SlotState,
    StepFailed,
    decode_canonical,
    decode_frame,
    encode_frame,
)
from dspark_proto.drafter import DrafterConnection
from dspark_proto.fuzzing import TRACED_BYTES_MAX, specimen_of
from dspark_proto.fuzzing.conversation import recorded
from dspark_proto.fuzzing.encoding import Seal, assemble, header_forms, seal
from dspark_proto.fuzzing.pair import Pair as FuzzedPair
from dspark_proto.fuzzing.pair import Side, Terms, hello_parameters
from dspark_proto.limits import CONTROL_BYTES_MAX, GENERATION_MAX
from dspark_proto.messages import Close, Completion, ErrorMessage, Open, Reset
from dspark_proto.registry import Lane, SupportPolicy


@pytest.mark.parametrize("count", [128, 129, 2048, 4095])
def test_nested_arrays_cost_little_before_they_are_refused(count: int) -> None:
    """msgpack allocates an array when it reads its header: 1,024 nested ones of 4,095 values took 33 MB."""
    header = header_forms("array", count)[0]
    control = header * (CONTROL_BYTES_MAX // len(header))
    tracemalloc.start()
    with pytest.raises(RemoteProtocolError) as caught:
        decode_canonical(control)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.code is ErrorCode.NONCANONICAL
    assert peak < TRACED_BYTES_MAX


def error_frame(key: Key | None = None) -> memoryview:
    message = ErrorMessage(ErrorCode.DRAFT_FAILED, Scope.SLOT, SESSION, "test")
    return encode_frame(message) if key is None else encode_frame(message, key)


def test_a_malformed_error_for_a_live_slot_is_counted_and_not_answered(pair: Pair) -> None:
    good = specimen_of(Side.DRAFTER, bytes(error_frame(Key(0, 1, 0))))
    bad = seal(assemble(good.frame[:48], good.control + b"\x00", b""), Seal.FULL)
    assert pair.up(bad) == []
    assert counted(pair.drafter.counters) == {"noncanonical": 1}
    assert pair.drafter.frames_to_send() == []


def test_an_error_before_hello_is_counted_and_not_answered() -> None:
    drafter = DrafterConnection(hello_parameters(1))
    assert drafter.receive(error_frame(), 0) == []
    assert counted(drafter.counters) == {"hello_required": 1}
    assert drafter.frames_to_send() == []
    assert drafter.state is DrafterState.AWAITING_HELLO


OPEN = Open(5, 0, 0, SupportPolicy.K32, Lane.RATIO, 0, 0, bytes(8), 0, 0, 0)


@pytest.mark.parametrize(
    ("message", "slot"), [(OPEN, 1), (Reset(SESSION, Cause.PREEMPTED), 0), (Close(SESSION, Cause.FINISHED), 0)]
)
@pytest.mark.parametrize("generation", [GENERATION_MAX + 1, 2**64 - 1])
def test_a_generation_above_its_limit_is_refused(
    pair: Pair, message: Open | Reset | Close, slot: int, generation: int
) -> None:
    """It was taken, and the slot could never be reset, closed or opened again on this connection."""
    assert pair.up(encode_frame(message, Key(slot, generation))) == []
    assert counted(pair.drafter.counters) == {"generation_exhausted": 1}
    pair.verifier.close(0)
    (closed,) = pair.up(encode_frame(Close(SESSION, Cause.FINISHED), Key(0, GENERATION_MAX)))
    assert closed.session == SESSION


@pytest.mark.parametrize("code", [ErrorCode.DUPLICATE, ErrorCode.WRONG_EPOCH, ErrorCode.WRONG_SESSION, ErrorCode.LATE])
def test_a_completion_with_any_status_ends_the_round(pair: Pair, code: ErrorCode) -> None:
    """Statuses that are also reasons to drop a frame left the round to its deadline (REQ-CMP-4)."""
    _, frame = reply_frames(pair)
    decoded = decode_frame(frame)
    assert isinstance(decoded.message, Completion)
    failed = replace(decoded.message, status=int(code), row_count=0, reply_bytes=0)
    (event,) = pair.down(encode_frame(failed, decoded.prefix.key))
    assert isinstance(event, StepFailed)
    assert (event.code, event.needs_reset) == (code, True)
    assert pair.verifier.slot_state(0) is SlotState.DORMANT


def test_a_hello_that_is_challenged_takes_the_place_of_one_that_waits_for_its_answer() -> None:
    """The worker may not answer the older one any more; the fuzzer's caller did, and called it an escape."""
    opening, _, proof = recorded(terms=Terms.SECRET)[:3]
    pair = FuzzedPair(terms=Terms.SECRET)
    pair.deliver(proof.to, proof.frame)
    assert pair.drafter.state is DrafterState.HELLO_RECEIVED
    pair.deliver(opening.to, opening.frame)
    assert pair.drafter.state is DrafterState.CHALLENGED
    with pytest.raises(LocalProtocolError):
        pair.drafter.reject()
    (challenge,) = pair.sent()
    assert challenge.to is Side.VERIFIER
    assert pair.drafter.state is DrafterState.CHALLENGED
