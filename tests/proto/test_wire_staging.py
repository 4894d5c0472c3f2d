"""Leases, reply layout, row crcs and the prefix digest."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest
import xxhash
from wire_pairs import VOCAB, connect, reply_arrays

from dspark_proto import (
    CONFIDENCE_MAX,
    EMPTY_DIGEST,
    Dtype,
    ErrorCode,
    Key,
    LeaseState,
    LocalProtocolError,
    RemoteProtocolError,
    ReplyLayout,
    Staging,
    crc32c,
    extend_digest,
    prefix_digest,
)
from dspark_proto.memory import aligned_memory
from dspark_proto.native import codec
from dspark_proto.registry import BodyKind
from dspark_proto.rows import check_reply, write_reply

KEY = Key(1, 2, 3)
LAYOUT = ReplyLayout(2, 4)


def misplaced(view: memoryview) -> int:
    """Bytes beyond a multiple of 64; without the compiled codec nobody looks."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % 64 if codec else 0


@pytest.mark.parametrize("size", [1, 63, 64, 4096, 200_000])
def test_memory_of_frames_is_zeroed_and_begins_at_a_multiple_of_64(size: int) -> None:
    memory = aligned_memory(size)
    assert (misplaced(memory), len(memory), memory.readonly) == (0, size, False)
    assert bytes(memory) == bytes(size)


def test_staging_and_replies_lie_in_such_memory() -> None:
    pair = connect()
    pair.open(0, 77)
    assert pair.verifier.staging is not None
    assert {misplaced(lease.storage) for lease in pair.verifier.staging.leases} == {0}
    (item,) = pair.step(pair.item())
    assert [misplaced(frame) for frame in pair.drafter.reply(item, **reply_arrays())] == [0, 0]


def test_layout_is_exact_and_contiguous() -> None:
    layout = ReplyLayout(5, 32)
    assert (layout.ids_offset, layout.q_offset, layout.total_bytes) == (80, 720, 1360)
    assert layout.spans(0, 5) == ((0, 80), (80, 640), (720, 640))
    assert layout.spans(2, 1) == ((32, 16), (336, 128), (976, 128))


def test_staging_allocates_once_and_aligns_blocks() -> None:
    asked: list[int] = []

    def allocate(length: int) -> bytearray:
        asked.append(length)
        return bytearray(length)

    staging = Staging(3, 100, allocate)
    assert asked == [3 * 128]
    assert [len(lease.storage) for lease in staging.leases] == [100] * 3


def test_a_lease_lives_until_its_last_consumer_is_done() -> None:
    staging = Staging(1, 1360)
    lease = staging.take(KEY, LAYOUT)
    assert len(lease.block) == LAYOUT.total_bytes
    lease.fill()
    lease.retain()
    lease.release()
    assert lease.state is LeaseState.FILLED
    with pytest.raises(LocalProtocolError) as caught:
        staging.take(KEY, LAYOUT)
    assert caught.value.code is ErrorCode.STAGING_EXHAUSTED
    lease.release()
    assert lease.state is LeaseState.FREE
    assert lease.key is None
    staging.take(KEY, LAYOUT)


def test_a_quarantined_block_is_not_leased_until_the_cancellation_is_confirmed() -> None:
    staging = Staging(1, 1360)
    staging.take(KEY, LAYOUT).quarantine()
    with pytest.raises(LocalProtocolError):
        staging.take(KEY, LAYOUT)
    with pytest.raises(LocalProtocolError):
        staging.lift_quarantine(Key(1, 2, 4))
    staging.lift_quarantine(KEY)
    assert staging.count(LeaseState.FREE) == 1


@pytest.mark.parametrize("action", ["fill", "release", "abandon", "quarantine", "lift", "retain"])
def test_a_free_lease_refuses_everything_but_take(action: str) -> None:
    lease = Staging(1, 1360).leases[0]
    with pytest.raises(LocalProtocolError):
        getattr(lease, action)()
    with pytest.raises(LocalProtocolError):
        _ = lease.block
    assert lease.state is LeaseState.FREE


def written(depth: int = 5, support: int = 32, **more: Any) -> tuple[memoryview, ReplyLayout]:
    layout = ReplyLayout(depth, support)
    block = memoryview(bytearray(layout.total_bytes))
    write_reply(block, layout, **(reply_arrays(depth, support) | more))
    return block, layout


def dense(**changes: Any) -> tuple[memoryview, ReplyLayout]:
    """Two dense rows over ten tokens: all mass on 3, on 9."""
    layout = ReplyLayout(2, 0, 10)
    block = memoryview(bytearray(layout.total_bytes))
    q = struct.pack("<20f", *(1.0 if place in (3, 19) else 0.0 for place in range(20)))
    reply = {"tokens": [3, 9], "entries": [10, 10], "ids": b"", "q": q, "confidences": [2**24, 7]}
    write_reply(block, layout, **(reply | changes))
    return block, layout


def test_arrays_may_be_passed_as_views_of_their_own_type() -> None:
    layout = ReplyLayout(5, 32)
    block = memoryview(bytearray(layout.total_bytes))
    arrays = reply_arrays()
    arrays["ids"] = arrays["ids"].cast("i")
    arrays["q"] = arrays["q"].cast("f")
    write_reply(block, layout, **arrays)
    assert block == written()[0]


def test_reply_round_trip() -> None:
    block, layout = written()
    assert check_reply(block, layout, VOCAB) == ((7,) * 5, (1,) * 5, (CONFIDENCE_MAX,) * 5)
    token, entries, _, confidence = struct.unpack_from("<iIII", block, 0)
    assert (token, entries, confidence) == (7, 1, 2**24)
    assert struct.unpack_from("<f", block, layout.q_offset) == (1.0,)


@pytest.mark.parametrize("offset", [0, 4, 8, 12, 80, 719, 720, 1359])
def test_any_damaged_byte_of_a_row_is_found(offset: int) -> None:
    block, layout = written()
    block[offset] ^= 0x10
    with pytest.raises(RemoteProtocolError) as caught:
        check_reply(block, layout, VOCAB)
    assert caught.value.code is ErrorCode.BAD_ROW_CRC


def test_confidences_travel_in_the_records() -> None:
    block, layout = written(confidences=[0, 1, 2**23, 2**24 - 1, 2**24])
    assert check_reply(block, layout, VOCAB).confidences == (0, 1, 2**23, 2**24 - 1, 2**24)


def test_the_row_crc_covers_the_record_without_it_then_ids_then_q() -> None:
    block, _ = written(depth=1, support=4, confidences=[5])
    record, body = bytes(block[:16]), bytes(block[16:])
    assert struct.unpack_from("<I", record, 8) == (crc32c(record[:8] + record[12:] + body),)


def test_a_confidence_above_one_is_refused_though_its_crc_is_right() -> None:
    block, layout = written(depth=1, support=4)
    struct.pack_into("<I", block, 12, 2**24 + 1)
    struct.pack_into("<I", block, 8, crc32c(bytes(block[:8]) + bytes(block[12:])))
    with pytest.raises(RemoteProtocolError) as caught:
        check_reply(block, layout, VOCAB)
    assert caught.value.code is ErrorCode.BAD_ROW_RECORD


def test_dense_layout_has_no_ids() -> None:
    layout = ReplyLayout(3, 0, 10)
    assert (layout.ids_offset, layout.q_offset, layout.total_bytes) == (48, 48, 48 + 3 * 40)
    assert layout.spans(1, 2) == ((16, 32), (48 + 40, 80))
    assert [shape[0] for shape in layout.shapes(2)] == [BodyKind.RECORDS, BodyKind.Q]
    assert layout.shapes(2)[1] == (BodyKind.Q, Dtype.FP32, 2, 10, 80)


def test_dense_reply_round_trip() -> None:
    block, layout = dense()
    assert check_reply(block, layout, 10) == ((3, 9), (10, 10), (2**24, 7))
    assert struct.unpack_from("<10f", block, layout.q_offset) == (0, 0, 0, 1, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("offset", [0, 4, 8, 12, 32, 71, 111])
def test_any_damaged_byte_of_a_dense_row_is_found(offset: int) -> None:
    block, layout = dense()
    block[offset] ^= 0x10
    with pytest.raises(RemoteProtocolError) as caught:
        check_reply(block, layout, 10)
    assert caught.value.code is ErrorCode.BAD_ROW_CRC


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"entries": [10, 1]}, ErrorCode.BAD_ROW_RECORD),
        ({"entries": [10, 11]}, ErrorCode.BAD_ROW_RECORD),
        ({"ids": bytes(80)}, ErrorCode.WRONG_SIZE),
        ({"q": bytes(76)}, ErrorCode.WRONG_SIZE),
    ],
)
def test_a_dense_reply_has_a_value_for_every_token_and_no_ids(change: dict[str, Any], code: ErrorCode) -> None:
    with pytest.raises(LocalProtocolError) as caught:
        dense(**change)
    assert caught.value.code is code


def test_token_outside_the_vocabulary() -> None:
    block, layout = written()
    with pytest.raises(RemoteProtocolError) as caught:
        check_reply(block, layout, 7)
    assert caught.value.code is ErrorCode.BAD_ROW_RECORD


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"entries": [1, 1, 1, 1, 0]}, ErrorCode.BAD_ROW_RECORD),
        ({"entries": [1, 1, 1, 1, 33]}, ErrorCode.BAD_ROW_RECORD),
        ({"tokens": [-1, 1, 1, 1, 1]}, ErrorCode.BAD_ROW_RECORD),
        ({"tokens": [1]}, ErrorCode.WRONG_SIZE),
        ({"confidences": [0, 0, 0, 0, -1]}, ErrorCode.BAD_ROW_RECORD),
        ({"confidences": [0, 0, 0, 0, 2**24 + 1]}, ErrorCode.BAD_ROW_RECORD),
        ({"confidences": [0, 0, 0, 0]}, ErrorCode.WRONG_SIZE),
        ({"ids": bytes(636)}, ErrorCode.WRONG_SIZE),
    ],
)
def test_write_reply_refuses_what_a_reader_would(change: dict[str, object], code: ErrorCode) -> None:
    layout = ReplyLayout(5, 32)
    with pytest.raises(LocalProtocolError) as caught:
        write_reply(memoryview(bytearray(layout.total_bytes)), layout, **(reply_arrays() | change))
    assert caught.value.code is code


def test_digest_is_the_chain_of_the_specification() -> None:
    first = xxhash.xxh3_64_intdigest(bytes(8) + struct.pack("<I", 11)).to_bytes(8, "little")
    second = xxhash.xxh3_64_intdigest(first + struct.pack("<I", 12)).to_bytes(8, "little")
    assert prefix_digest([11, 12]) == second
    assert extend_digest(first, 12) == second
    assert prefix_digest([12], first) == second
    assert prefix_digest([]) == EMPTY_DIGEST
    assert prefix_digest([12, 11]) != second
