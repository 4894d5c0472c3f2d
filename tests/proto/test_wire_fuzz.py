"""Damaged, held back, repeated, forged frames: receive() never raises, nothing wrong is accepted, nothing leaks.

Small and the same on every run; `dspark fuzz` and `atheris_frames.py` are for length. What the fuzzer itself can see
is tested in `test_wire_fuzz_oracle.py`.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from wire_pairs import Pair, connect, parameters, reply_arrays, taps

from dspark_proto import (
    Cause,
    LeaseState,
    ProposalReady,
    RemoteProtocolError,
    SlotState,
    crc32c,
    decode_frame,
    encode_frame,
)
from dspark_proto.messages import Ping, Pong, Stats

FEW = settings(max_examples=100, deadline=None, database=None, derandomize=True)


@cache
def frames() -> tuple[bytes, ...]:
    """One good frame of most kinds."""
    pair = connect()
    pair.open(0)
    verifier, drafter = pair.verifier, pair.drafter
    context = verifier.context(0, 0, 2, taps(2), bytes(8)).frames[0]
    pair.up(context)
    step = verifier.step([pair.item(1, tap_rows=1, prefix_digest=b"12345678")], 0)
    drafter._slots[0].digest = None
    (arrived,) = pair.up(step)
    reply = [bytes(frame) for frame in drafter.reply(arrived.items[0], **reply_arrays())]
    rest = [verifier.reset(0, Cause.PREEMPTED), verifier.cancel(0, Cause.PREEMPTED), verifier.close(0)]
    other = [encode_frame(Ping(100, 1)), encode_frame(Pong(200, 1, 0, 1)), encode_frame(Stats(200, 1))]
    return tuple(bytes(one) for one in (context, step, *reply, *rest, *other, drafter.drain(1), verifier.hello(0)))


def refuse_or_equal(frame: bytes, original: bytes) -> None:
    try:
        decoded = decode_frame(frame)
    except RemoteProtocolError:
        return
    assert (decoded.message, decoded.bodies) == (
        decode_frame(original).message,
        decode_frame(original).bodies,
    )


@FEW
@given(st.integers(0, len(frames()) - 1), st.data())
def test_a_flipped_bit_is_refused(index: int, data: st.DataObject) -> None:
    original = frames()[index]
    position = data.draw(st.integers(0, len(original) * 8 - 1))
    damaged = bytearray(original)
    damaged[position // 8] ^= 1 << position % 8
    try:
        decode_frame(damaged)
    except RemoteProtocolError:
        return
    raise AssertionError("damage was not found")


@FEW
@given(st.integers(0, len(frames()) - 1), st.integers(0, 4000), st.binary(max_size=16))
def test_a_truncated_or_extended_frame_is_refused(index: int, cut: int, tail: bytes) -> None:
    original = frames()[index]
    refuse_or_equal(original[:cut] + tail, original)


@FEW
@given(st.integers(0, len(frames()) - 1), st.integers(0, 2000), st.binary(min_size=1, max_size=8))
def test_a_rewritten_control_with_right_checksums_is_accepted_or_refused_in_order(
    index: int, offset: int, patch: bytes
) -> None:
    original = frames()[index]
    (control_bytes,) = struct.unpack_from("<I", original, 8)
    damaged = bytearray(original)
    at = 48 + offset % control_bytes
    damaged[at : at + len(patch)] = patch
    damaged = damaged[: len(original)]
    struct.pack_into("<I", damaged, 40, crc32c(bytes(damaged[48 : 48 + control_bytes])))
    struct.pack_into("<I", damaged, 44, crc32c(bytes(damaged[:44])))
    with suppress(RemoteProtocolError):
        decode_frame(damaged)
    pair = connect()
    pair.open(0)
    pair.up(damaged)
    pair.down(damaged)


@FEW
@given(
    st.integers(0, len(frames()) - 1),
    st.sampled_from([0, 1, 3, 4, 2**31, 2**32 - 1]),
    st.sampled_from([0, 1, 2, 2**63, 2**64 - 1]),
    st.sampled_from([0, 1, 2**32 - 1]),
    st.booleans(),
)
def test_any_key_on_any_frame_is_handled(index: int, slot: int, generation: int, round_: int, damage: bool) -> None:
    frame = bytearray(frames()[index])
    struct.pack_into("<QII", frame, 24, generation, slot, round_)
    struct.pack_into("<I", frame, 44, crc32c(bytes(frame[:44])))
    if damage:
        frame[48] ^= 1
    pair = connect()
    pair.open(0)
    pair.verifier.step([pair.item(1)], 0)
    pair.up(frame)
    pair.down(frame)
    pair.settle()


@FEW
@given(st.binary(max_size=300))
def test_arbitrary_bytes_never_raise(noise: bytes) -> None:
    pair = connect()
    assert pair.up(noise) == pair.down(noise) == []


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["ok", "drop", "dup", "flip", "hold"]), st.integers(0, 10**6)), max_size=30))
def test_rounds_over_a_bad_link_are_all_or_nothing(script: list[tuple[str, int]]) -> None:
    """Whatever happens to a reply, what is consumed is exactly what was drafted, and nothing leaks."""
    pair = connect(parameters(100, step_deadline_ms=1))
    pair.open(0)
    held: list[bytes] = []
    for round_, (fate, noise) in enumerate(script, 1):
        if pair.verifier.slot_state(0) is SlotState.DORMANT:
            pair.up(pair.verifier.reset(0, Cause.ROUND_TIMED_OUT))
        (item,) = pair.step(pair.item(round_))
        reply = [bytes(frame) for frame in pair.drafter.reply(item, **reply_arrays(token=round_))]
        for frame in delivered(reply, fate, noise, held):
            for event in pair.verifier.receive(frame, pair.now_ns):
                if isinstance(event, ProposalReady):
                    assert (event.round, event.tokens) == (round_, (round_,) * 5)
                    assert bytes(event.ids[:4]) == round_.to_bytes(4, "little")
                    event.lease.release()
        pair.now_ns += 1_000_000
        pair.verifier.expire(pair.now_ns)
        settle_quietly(pair)
    assert pair.verifier.staging is not None
    assert pair.verifier.staging.count(LeaseState.FREE) == len(pair.verifier.staging.leases)


def delivered(reply: list[bytes], fate: str, noise: int, held: list[bytes]) -> list[bytes]:
    """What of ``reply`` and of frames held back earlier arrives now."""
    if fate == "drop":
        return reply[: noise % 2]
    if fate == "dup":
        return [*reply, *held, *reply]
    if fate == "hold":
        held.extend(reply)
        return []
    if fate == "flip":
        damaged = bytearray(reply[noise % 2])
        damaged[noise % len(damaged)] ^= 1 << noise % 8
        return [bytes(damaged) if index == noise % 2 else frame for index, frame in enumerate(reply)]
    return [*held, *reply]


def settle_quietly(pair: Pair) -> None:
    pair.verifier.frames_to_send()
    pair.drafter.frames_to_send()
