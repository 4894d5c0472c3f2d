"""Captures: the file, the recording transports, and the explanation of frames."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from wire_pairs import Pair, reply_arrays, reply_frames

from dspark_proto import ErrorCode, RemoteProtocolError, decode_frame, encode_frame
from dspark_proto.capture import (
    CaptureError,
    CaptureReader,
    CaptureWriter,
    Direction,
    Entry,
    EntryKind,
    RecordingClient,
    RecordingServer,
    TransportKind,
    examine,
    explain_capture,
    explain_frame,
    read_frames,
)
from dspark_proto.capture.anchors import ANCHORS
from dspark_proto.capture.checks import LADDER, Verdict
from dspark_proto.capture.records import ENTRY_BYTES, HEADER_BYTES, NOTE_BYTES_MAX
from dspark_proto.checksums import body_checksum, crc32c
from dspark_proto.limits import FRAME_BYTES_MAX
from dspark_proto.messages import ErrorMessage, Ping
from dspark_proto.registry import Scope
from dspark_proto.transports.inproc import InprocServer

PROTO = Path(__file__).parents[2] / "proto"
ZMQ, UP, DOWN = TransportKind.ZMQ, Direction.UP, Direction.DOWN


def load(suite: str) -> list[dict[str, Any]]:
    vectors: list[dict[str, Any]] = json.loads((PROTO / "vectors" / f"{suite}.json").read_text())["vectors"]
    return vectors


def written(path: Path, frames: int = 3) -> list[bytes]:
    """A capture of ``frames`` PINGs; returns them."""
    pings = [bytes(encode_frame(Ping(1, nonce))) for nonce in range(1, frames + 1)]
    ticks = iter(range(100, 10_000, 7))
    with CaptureWriter(path, tool="test", comment="three pings", clock=lambda: next(ticks)) as writer:
        for index, ping in enumerate(pings):
            writer.frame(UP if index % 2 == 0 else DOWN, ZMQ, index, ping)
    return pings


def entries_of(path: Path) -> tuple[list[Entry], str]:
    with CaptureReader(path) as reader:
        return list(reader), reader.ending


# The file


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.dspcap"
    pings = written(path)
    with CaptureReader(path) as reader:
        entries = list(reader)
        assert (reader.description.tool, reader.description.comment, reader.ending) == ("test", "three pings", "")
    assert [entry.content for entry in entries] == pings
    assert [(entry.direction, entry.connection) for entry in entries] == [(UP, 0), (DOWN, 1), (UP, 2)]
    assert [entry.t_ns for entry in entries] == [7, 14, 21]
    assert {(entry.kind, entry.transport) for entry in entries} == {(EntryKind.FRAME, ZMQ)}
    assert path.stat().st_mode & 0o077 == 0, "others must not read what people typed"


def test_an_existing_file_is_never_touched(tmp_path: Path) -> None:
    path = tmp_path / "a.dspcap"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        CaptureWriter(path)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("kept", [0, 1, ENTRY_BYTES - 1, ENTRY_BYTES, ENTRY_BYTES + 1, ENTRY_BYTES + 63])
def test_a_torn_tail_costs_the_last_record_only(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "a.dspcap"
    pings = written(path)
    whole = path.read_bytes()
    last = len(whole) - ENTRY_BYTES - len(pings[2])
    path.write_bytes(whole[: last + kept])
    entries, ending = entries_of(path)
    assert [entry.content for entry in entries] == pings[:2]
    assert ending == ("" if kept == 0 else f"a torn record of {kept} bytes at offset {last}")


@pytest.mark.parametrize("place", [0, 5, 8, 20, 28, ENTRY_BYTES + 3])
def test_damage_ends_the_reading_there(tmp_path: Path, place: int) -> None:
    path = tmp_path / "a.dspcap"
    pings = written(path)
    damaged = bytearray(path.read_bytes())
    second = len(damaged) - 2 * (ENTRY_BYTES + len(pings[1]))
    damaged[second + place] ^= 1
    path.write_bytes(damaged)
    entries, ending = entries_of(path)
    assert [entry.content for entry in entries] == pings[:1]
    assert "damaged" in ending
    assert str(second) in ending


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [(24 - 4, FRAME_BYTES_MAX + 1, "at most"), (24 - 4, 2**32 - 1, "at most"), (4, 9, "unknown sort")],
)
def test_a_length_or_sort_out_of_range_is_refused_before_it_is_read(
    tmp_path: Path, field: int, value: int, words: str
) -> None:
    """The record's own crc fits: only the limit stands between the length and an allocation."""
    path = tmp_path / "a.dspcap"
    written(path, frames=1)
    data = bytearray(path.read_bytes())
    start = len(data) - ENTRY_BYTES - 64
    struct.pack_into("<I" if value > 255 else "<B", data, start + field, value)
    struct.pack_into("<I", data, start + 28, crc32c(bytes(data[start : start + 28])))
    path.write_bytes(data)
    entries, ending = entries_of(path)
    assert entries == []
    assert words in ending


@pytest.mark.parametrize(
    ("place", "words"), [(0, "DSPCAP"), (8, "damaged"), (12, "damaged"), (HEADER_BYTES + 2, "description")]
)
def test_a_damaged_header_is_refused(tmp_path: Path, place: int, words: str) -> None:
    path = tmp_path / "a.dspcap"
    written(path)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(CaptureError, match=words):
        CaptureReader(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.dspcap"
    for content in (b"", b"DSPCAP", os.urandom(200)):
        path.write_bytes(content)
        with pytest.raises(CaptureError):
            CaptureReader(path)


def test_a_full_capture_drops_and_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.dspcap"
    ping = bytes(encode_frame(Ping(1, 1)))
    with CaptureWriter(path, max_bytes=400) as writer:
        for _ in range(5):
            writer.frame(UP, ZMQ, 0, ping)
        assert (writer.entries, writer.dropped) == (3, 2)
    assert path.stat().st_size <= 400
    assert len(read_frames(path)) == 3


def test_notes_are_bounded_ascii_and_no_frames(tmp_path: Path) -> None:
    path = tmp_path / "a.dspcap"
    with CaptureWriter(path) as writer:
        writer.note(UP, ZMQ, 1, "caf\u00e9" + "x" * 5000)
    (entry,), _ = entries_of(path)
    assert entry.content == b"caf?" + b"x" * (NOTE_BYTES_MAX - 4)
    assert read_frames(path) == []


# Recording transports


def test_recording_transports_change_nothing_and_keep_the_order(tmp_path: Path) -> None:
    path = tmp_path / "a.dspcap"
    inner = InprocServer()
    with CaptureWriter(path) as writer:
        server = RecordingServer(inner, writer, TransportKind.INPROC)
        clients = [inner.connect(), inner.connect()]
        clients[1].send([b"second"])
        clients[0].send([b"first", memoryview(b"more")])
        arrived = server.poll(0)
        assert [bytes(one.frame) for one in arrived] == [b"second", b"first", b"more"]
        assert server.send(arrived[0].peer, [b"answer"])
        assert clients[1].poll(0) == [b"answer"]
        clients[0].close()
        assert not server.send(arrived[1].peer, [b"lost"])
        assert server.endpoint == "inproc"
    recorded = [(entry.connection, entry.direction, entry.content) for entry in read_frames(path)]
    assert recorded == [(0, UP, b"second"), (1, UP, b"first"), (1, UP, b"more"), (0, DOWN, b"answer")]


def test_a_recording_client_records_what_was_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.dspcap"
    inner = InprocServer()
    with CaptureWriter(path) as writer:
        client = RecordingClient(inner.connect(), writer, TransportKind.INPROC, connection=4)
        assert client.send([b"hello"])
        (arrived,) = inner.poll(0)
        inner.send(arrived.peer, [b"answer"])
        assert client.poll(0) == [b"answer"]
        client.close()
        assert not client.send([b"nobody"])
    entries = [(entry.connection, entry.direction, entry.content) for entry in read_frames(path)]
    assert entries == [(4, UP, b"hello"), (4, DOWN, b"answer")]


# Explanations


@pytest.mark.parametrize("vector", load("refusals"), ids=lambda vector: vector["id"])
def test_the_first_failed_check_is_the_codecs_refusal(vector: dict[str, Any]) -> None:
    frame = bytes.fromhex(vector["frame_hex"])
    with pytest.raises(RemoteProtocolError) as caught:
        decode_frame(frame)
    found = examine(frame)
    assert found.fault is not None
    assert (found.fault.code, found.fault.where) == (caught.value.code, caught.value.where)
    verdicts = [check.verdict for check in found.checks]
    at = verdicts.index(Verdict.FAILED)
    assert found.checks[at].rung.code is caught.value.code
    assert set(verdicts[:at]) <= {Verdict.PASSED}
    assert set(verdicts[at + 1 :]) <= {Verdict.NOT_REACHED}
    text = "\n".join(explain_frame(frame))
    assert vector["error"] in text
    assert "a receiver stops here" in text
    anchor = found.fault.anchor
    assert anchor == vector["requirement"] or (anchor, vector["requirement"]) in ALSO


ALSO = {("REQ-CAN-1", "REQ-CAN-2")}
"""Where one check of the codec serves two requirements: (the check's, the vector's)."""


@pytest.mark.parametrize("vector", load("frames"), ids=lambda vector: vector["id"])
def test_good_frames_are_explained_with_their_fields(vector: dict[str, Any]) -> None:
    frame = bytes.fromhex(vector["frame_hex"])
    lines = explain_frame(frame, all_checks=True)
    text = "\n".join(lines)
    assert lines[0].startswith(vector["type"])
    assert lines[-1] == f"  checks   {len(LADDER)} of {len(LADDER)} passed"
    assert all(rung.anchor in text for rung in LADDER)
    for field in decode_frame(frame).message.LAYOUT:
        assert field.name == "bodies" or field.name in text
    assert text.isascii()


def test_explanations_survive_any_bytes() -> None:
    frame = bytes.fromhex(load("frames")[5]["frame_hex"])
    for cut in range(0, len(frame), 13):
        assert explain_frame(frame[:cut])
    for place in range(0, len(frame), 11):
        damaged = bytearray(frame)
        damaged[place] ^= 0x40
        assert all(line.isprintable() and line.isascii() for line in explain_frame(damaged))


def test_rows_are_summarised_and_bad_ones_are_named(pair: Pair) -> None:
    row, completion = reply_frames(pair)
    text = "\n".join(explain_frame(row))
    assert "row 4: token 7, confidence 1.000, 1 entries, id:count 7:16777216" in text
    assert "remark" not in text
    assert "draft_us = 0" in "\n".join(explain_frame(completion))
    assert "BAD_ROW_CRC (REQ-ROW-3)" in "\n".join(explain_frame(with_body(row, 0, 0, 8)))
    spoilt = with_body(row, 2, 0, 0x3F)
    assert "BAD_ROW_CRC" in "\n".join(explain_frame(spoilt))


def test_a_row_that_is_no_distribution_is_remarked(pair: Pair) -> None:
    (item,) = pair.step(pair.item(1))
    arrays = reply_arrays()
    q = bytearray(arrays["q"])
    q[0:4] = struct.pack("<f", 0.5)
    row, _ = pair.drafter.reply(item, **(arrays | {"q": bytes(q)}))
    text = "\n".join(explain_frame(row))
    assert "not dyadic (REQ-ROW-7): row 0: the counts do not sum to 2^24" in text


def with_body(frame: bytearray, body: int, place: int, value: int) -> bytes:
    """``frame`` with one byte of a body changed and the body checksum made to fit."""
    decoded = decode_frame(frame)
    bodies = [bytearray(one) for one in decoded.bodies]
    bodies[body][place] = value
    described = [
        replace(one, checksum=body_checksum(one.checksum_kind, bytes(data)))
        for one, data in zip(decoded.message.bodies, bodies, strict=True)  # type: ignore[attr-defined]
    ]
    message = replace(decoded.message, bodies=tuple(described))  # type: ignore[call-arg]
    return bytes(encode_frame(message, decoded.prefix.key, bodies))


def test_refusals_are_traced_to_requirements() -> None:
    refusal = ErrorMessage(ErrorCode.CONTEXT_GAP, Scope.SLOT, 6, "CONTEXT.first_position")
    text = "\n".join(explain_frame(encode_frame(refusal)))
    assert "refusal CONTEXT_GAP (REQ-CTX-2, REQ-STP-4), ends the SLOT" in text


def test_every_code_has_anchors_that_the_specification_has() -> None:
    specification = (PROTO / "SPEC.md").read_text()
    assert ANCHORS.keys() == set(ErrorCode)
    for anchor in {one for anchors in ANCHORS.values() for one in anchors} | {rung.anchor for rung in LADDER}:
        assert f"{{#{anchor}}}" in specification, anchor


def test_a_whole_capture_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "a.dspcap"
    with CaptureWriter(path, comment="for a test") as writer:
        writer.frame(UP, ZMQ, 0, encode_frame(Ping(1, 1)))
        writer.frame(DOWN, ZMQ, 0, b"DSPK but not a frame")
        writer.note(DOWN, ZMQ, 0, "fault 1: cut")
    path.write_bytes(path.read_bytes() + b"torn")
    with CaptureReader(path) as reader:
        lines = list(explain_capture(reader, brief=True))
    assert lines[1] == "comment: for a test"
    assert "zmq #0 V -> D  PING no key, 64 bytes" in lines[2]
    assert "D -> V  unusable frame (WRONG_SIZE), 20 bytes" in lines[3]
    assert lines[4].endswith("note: fault 1: cut")
    assert lines[5] == "totals: 1 PING, 1 notes, 1 refused with WRONG_SIZE"
    assert lines[6].startswith("the capture ends early: a torn record of 4 bytes")
