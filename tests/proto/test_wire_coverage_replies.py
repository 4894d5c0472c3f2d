"""Replies whose storage is used again, replies under CRC32C, and the choice between the compiled codec and Python."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from wire_pairs import Pair, connect, counted, parameters, reply_arrays

from dspark_proto import Checksum, ErrorCode, ProposalReady, SupportPolicy, decode_frame, encode_frame, native
from dspark_proto.checksums import body_checksum
from dspark_proto.fields import table_of
from dspark_proto.hello import Hello, Reject


def proposal(pair: Pair, round_: int, depth: int, token: int) -> tuple[list[bytes], ProposalReady]:
    """The frames of a reply, and what the verifier made of them."""
    (item,) = pair.step(pair.item(round_, depth=depth))
    frames = [bytes(frame) for frame in pair.drafter.reply(item, **reply_arrays(depth, token=token))]
    (event,) = pair.down(*frames)
    assert isinstance(event, ProposalReady)
    event.lease.release()
    return frames, event


def test_depths_take_turns_in_one_slots_storage() -> None:
    """What a deeper or shallower reply left behind is in no frame of the next one."""
    pair = connect()
    pair.open()
    for round_, (depth, token) in enumerate([(5, 7), (2, 8), (5, 9), (1, 10), (2, 11), (5, 12)], 1):
        frames, event = proposal(pair, round_, depth, token)
        assert event.tokens == (token,) * depth
        fresh = connect()
        fresh.open()
        for earlier in range(1, round_):
            (item,) = fresh.step(fresh.item(earlier, depth=3))
            fresh.down(*fresh.drafter.reply(item, **reply_arrays(3)))[0].lease.release()
        assert frames == proposal(fresh, round_, depth, token)[0]
    assert counted(pair.verifier.counters) == counted(pair.drafter.counters) == {}


def test_supports_take_turns_in_one_slots_storage() -> None:
    pair = connect()
    for session, support in enumerate((SupportPolicy.K32, SupportPolicy.K16, SupportPolicy.K32), 1):
        pair.open(session=session, support=support)
        (item,) = pair.step(pair.item(1, session=session))
        (event,) = pair.down(*pair.drafter.reply(item, **reply_arrays(support=int(support), token=session)))
        assert (event.tokens, event.support) == ((session,) * 5, support)
        event.lease.release()
        pair.up(pair.verifier.close(0))


def test_a_reply_under_crc32c() -> None:
    """Where one side knows CRC32C alone, descriptors and the reply's checksum have it."""
    pair = connect(parameters(epoch=100, checksums=1 << (Checksum.CRC32C - 1)))
    pair.open()
    frames, event = proposal(pair, 1, 5, 7)
    row, completion = map(decode_frame, frames)
    assert {body.checksum_kind for body in row.message.bodies} == {Checksum.CRC32C}
    whole = b"".join(row.bodies)
    assert completion.message.reply_checksum == body_checksum(Checksum.CRC32C, whole)
    assert completion.message.reply_checksum[4:] == bytes(4)
    assert event.tokens == (7,) * 5


def test_a_damaged_reply_under_crc32c_is_refused() -> None:
    pair = connect(parameters(epoch=100, checksums=1 << (Checksum.CRC32C - 1)))
    pair.open()
    (item,) = pair.step(pair.item(1))
    row, _ = (bytearray(frame) for frame in pair.drafter.reply(item, **reply_arrays()))
    row[-1 - 64] ^= 1
    (event,) = pair.down(row)
    assert event.code is ErrorCode.BAD_BODY_CHECKSUM


def test_a_row_without_one_of_its_bodies_discards_the_round() -> None:
    pair = connect()
    pair.open()
    (item,) = pair.step(pair.item(1))
    row = decode_frame(bytes(pair.drafter.reply(item, **reply_arrays())[0]))
    fewer = replace(row.message, bodies=row.message.bodies[:2])
    (event,) = pair.down(encode_frame(fewer, row.prefix.key, row.bodies[:2]))
    assert (event.code, event.needs_reset) == (ErrorCode.BAD_DESCRIPTOR, False)
    assert len(pair.step(pair.item(2))) == 1


# Which codec


def test_python_is_forced_by_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dspark_proto._codec", SimpleNamespace(INTERFACE=native.INTERFACE))
    monkeypatch.delattr("dspark_proto._codec", raising=False)
    monkeypatch.setenv(native.VARIABLE, "1")
    assert native.found() is sys.modules["dspark_proto._codec"]
    monkeypatch.setenv(native.VARIABLE, "0")
    assert native.found() is None


def test_without_the_extension_or_with_an_older_one_python_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.VARIABLE, raising=False)
    monkeypatch.delattr("dspark_proto._codec", raising=False)
    monkeypatch.setitem(sys.modules, "dspark_proto._codec", None)
    assert native.found() is None
    monkeypatch.setitem(sys.modules, "dspark_proto._codec", SimpleNamespace(INTERFACE=native.INTERFACE - 1))
    assert native.found() is None


def test_a_record_with_kinds_that_the_compiled_codec_lacks_has_no_table() -> None:
    """Text and lists of numbers: HELLO and its kin, which are not on the round path."""
    for record in (Hello, Reject):
        assert table_of(record, record.LAYOUT) is None
        assert record.TABLE is None
