"""The compiled codec's work on bodies: checksums as the wheels give, and nothing staged or filled that is not right."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import crc32c
import pytest
import xxhash
from wire_pairs import connect, reply_arrays

from dspark_proto import Checksum, Dtype, ErrorCode, Key, LocalProtocolError, ReplyLayout, SupportPolicy
from dspark_proto.bodies import BodyDescriptor, describe
from dspark_proto.buffers import aligned
from dspark_proto.checksums import body_checksum, pieces_checksum, pieces_checksum_plainly
from dspark_proto.digest import prefix_digest, prefix_digest_plainly
from dspark_proto.native import codec as found
from dspark_proto.registry import BodyKind
from dspark_proto.reply_frames import ReplyFrames
from dspark_proto.rows import fill_reply

codec: Any = found
pytestmark = pytest.mark.skipif(codec is None, reason="the compiled codec is not built, or DSPARK_NATIVE=0")
DATA = random.Random(4).randbytes(20_000)
KINDS = (Checksum.CRC32C, Checksum.XXH3_64)
LAYOUT = ReplyLayout(3, 4)
COLUMNS = ([0, 5, 9], [1, 4, 2], (0, 7, 2**24))
KEY = Key(1, 2**40, 3)


# Checksums


def test_checksums_of_every_length_are_the_wheels() -> None:
    for length in (*range(1100), 3071, 3072, 3073, 4096, 8191, 8192, 20_000):
        piece = DATA[:length]
        assert codec.checksum(1, [piece]) == crc32c.crc32c(piece).to_bytes(8, "little"), length
        assert codec.checksum(2, [piece]) == xxhash.xxh3_64_intdigest(piece).to_bytes(8, "little"), length


@pytest.mark.parametrize("kind", KINDS)
def test_checksums_of_pieces_are_those_of_the_whole(kind: Checksum) -> None:
    draw = random.Random(5)
    for limit in [300] * 500 + [3000] * 500 + [12_000] * 300:
        length = draw.randrange(limit)
        cuts = [0, *sorted(draw.randrange(length + 1) for _ in range(draw.randrange(6))), length]
        pieces = [DATA[start:end] for start, end in pairwise(cuts)]
        whole = body_checksum(kind, DATA[:length])
        assert pieces_checksum(kind, pieces) == pieces_checksum_plainly(kind, pieces) == whole, cuts


def test_a_checksum_of_no_known_kind_is_none() -> None:
    assert [codec.checksum(kind, [b"1"]) for kind in (0, 3, 2**64, -1)] == [None] * 4


# Bodies that arrive


def padded(body: bytes) -> bytes:
    return body.ljust(aligned(len(body)), b"\0")


def described(body: bytes, checksum: Checksum = Checksum.XXH3_64) -> BodyDescriptor:
    return describe(BodyKind.RECORDS, Dtype.BYTES, 1, len(body), body, checksum)


@pytest.mark.parametrize("checksum", KINDS)
def test_a_body_is_sound_when_every_byte_of_it_is(checksum: Checksum) -> None:
    table: Any = BodyDescriptor.TABLE
    body = DATA[:200]
    descriptor, good = described(body, checksum), padded(body)
    assert table.is_sound(descriptor, good)
    for index in range(len(good)):
        assert not table.is_sound(descriptor, good[:index] + bytes([good[index] ^ 1]) + good[index + 1 :]), index
    for wrong in (good[:-64], good + bytes(64), good[:-1], b""):
        assert not table.is_sound(descriptor, wrong)
    assert not table.is_sound(described(body, KINDS[checksum is KINDS[0]]), padded(DATA[1:201]))
    assert not table.is_sound("no descriptor", good)


BODIES = (DATA[:48], DATA[100:148], DATA[1000:8001])
HEAD = bytes(128)
FRAME = HEAD + b"".join(map(padded, BODIES))
DESCRIPTORS = tuple(map(described, BODIES))
SPANS = ((0, 48), (48, 48), (96, 7001))


def staged(frame: bytes = FRAME, descriptors: Any = DESCRIPTORS, spans: Any = SPANS, size: int = 7097) -> bytes | None:
    table: Any = BodyDescriptor.TABLE
    out = bytearray(size)
    return bytes(out) if table.stage(frame, descriptors, out, spans) else None


def test_sound_bodies_are_staged_where_they_belong() -> None:
    assert staged() == b"".join(BODIES)
    turned = staged(spans=((7049, 48), (0, 48), (48, 7001)))
    assert turned == BODIES[1] + BODIES[2] + BODIES[0]


def test_a_frame_with_one_wrong_byte_in_its_bodies_is_not_staged() -> None:
    for index in (*range(128, 400), *range(len(FRAME) - 100, len(FRAME))):
        assert staged(FRAME[:index] + bytes([FRAME[index] ^ 0x80]) + FRAME[index + 1 :]) is None, index


@pytest.mark.parametrize(
    "change",
    [
        {"size": 7096},
        {"spans": ((0, 48), (48, 48), (97, 7001))},
        {"spans": ((0, 48), (48, 48), (2**63, 7001))},
        {"spans": ((0, 48), (48, 48), (-1, 7001))},
        {"spans": ((0, 48), (48, 49), (96, 7001))},
        {"spans": SPANS[:2]},
        {"spans": [*SPANS]},
        {"spans": (*SPANS[:2], [96, 7001])},
        {"spans": (*SPANS[:2], (96, 7001, 0))},
        {"descriptors": (*DESCRIPTORS[:2], "no descriptor")},
        {"frame": FRAME[200:]},
        {"frame": b""},
    ],
)
def test_nothing_is_staged_beyond_the_memory_that_is_there(change: dict[str, Any]) -> None:
    assert staged(**change) is None


# Replies that leave


def frames_of(layout: ReplyLayout = LAYOUT) -> ReplyFrames:
    return ReplyFrames(memoryview(bytearray(layout.total_bytes + 4096)), layout, 77, 200, Checksum.XXH3_64)


def filled(frames: ReplyFrames, layout: ReplyLayout, **changes: Any) -> list[bytes]:
    arrays = {"ids": DATA[: layout.depth * layout.ids_row_bytes], "q": (DATA * 3)[: layout.depth * layout.row_bytes]}
    ids, q = (memoryview(part) for part in (arrays | changes).values())
    entries = [1, 1, 1] if layout.tokens_only else [4000] * 3 if not layout.support else COLUMNS[1]
    columns = tuple(column[: layout.depth] for column in (COLUMNS[0], entries, COLUMNS[2]))
    return [bytes(frames.fill(i, KEY, ids, q, columns)) for i in range(len(frames.frames))] + [frames.checksum()]


@pytest.mark.parametrize(
    "layout", [LAYOUT, ReplyLayout(1, 4), ReplyLayout(3, 0, 4000), ReplyLayout(3, 1, tokens_only=True)]
)
def test_replies_are_filled_alike_in_both(layout: ReplyLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    native = filled(frames_of(layout), layout)
    monkeypatch.setattr("dspark_proto.rows.codec", None)
    monkeypatch.setattr("dspark_proto.checksums.codec", None)
    assert filled(frames_of(layout), layout) == native


def fill(blank: Any = None, frame: Any = None, **changes: Any) -> tuple[bool, bool]:
    """Whether the rows were filled, and whether the frame has changed."""
    one = frames_of()._rows[0]
    target = one.frame if frame is None else frame
    before = bytes(target)
    arguments = {"ids": DATA[:48], "q": DATA[:48], "shape": LAYOUT.shape, "columns": COLUMNS}
    arguments |= {"slot": 1, "generation": 2, "round": 3} | changes
    done = codec.fill_rows(target, one.plan if blank is None else blank, *arguments.values())
    return done, bytes(target) != before


PLAN = frames_of()._rows[0].plan


def planned(index: int, value: int) -> tuple[int, ...]:
    return (*PLAN[:index], value, *PLAN[index + 1 :])


@pytest.mark.parametrize(
    "change",
    [
        *({"columns": tuple(columns)} for columns in (
            ([0, 5, -1], *COLUMNS[1:]),
            ([0, 5, 2**31], *COLUMNS[1:]),
            (COLUMNS[0], [1, 0, 2], COLUMNS[2]),
            (COLUMNS[0], [1, 5, 2], COLUMNS[2]),
            (*COLUMNS[:2], (0, 0, 2**24 + 1)),
            (*COLUMNS[:2], (0, 0)),
            COLUMNS[:2],
        )),
        {"columns": list(COLUMNS)},
        {"ids": DATA[:47]},
        {"q": DATA[:52]},
        {"shape": (3, 16, 20, 1, 4)},
        {"slot": 2**32},
        {"generation": -1},
        {"round": 2**32},
        *({"blank": planned(*place)} for place in (
            (0, PLAN[0] + 64), (0, 2**20), (1, 1), (2, 4), (2, 0), (3, 3), (4, 2), (4, 4), (5, PLAN[5] + 64),
            (6, PLAN[0] + 48 - 7), (7, PLAN[7] - 64), (9, 2**31), (10, 2**40),
        )),
        {"blank": PLAN[:-1]},
        {"blank": (*PLAN, 1)},
        {"blank": list(PLAN)},
        {"frame": bytearray(64)},
        {"frame": bytearray(len(frames_of()._rows[0].frame) + 64)},
    ],
)  # fmt: skip
def test_what_does_not_fit_its_frame_is_not_filled(change: dict[str, Any]) -> None:
    assert fill() == (True, True)
    assert fill(**change) == (False, False)


# Whole replies, and digests


def filled_whole(frames: ReplyFrames, layout: ReplyLayout, vocab_size: int = 2**31, **changes: Any) -> Any:
    """The reply of ``filled`` in one pass: its frame and its checksum, or None."""
    arrays = {"ids": DATA[: layout.depth * layout.ids_row_bytes], "q": (DATA * 3)[: layout.depth * layout.row_bytes]}
    arrays |= {"columns": tuple(column[: layout.depth] for column in (COLUMNS[0], COLUMNS[1], COLUMNS[2]))} | changes
    before = bytes(frames.frames[0])
    checksum = fill_reply(frames.frames[0], frames.only, **arrays, layout=layout, key=KEY, vocab_size=vocab_size)
    if checksum is None:
        assert bytes(frames.frames[0]) == before
        return None
    return [bytes(frames.frames[0]), checksum]


@pytest.mark.parametrize("layout", [LAYOUT, ReplyLayout(1, 4), ReplyLayout(3, 16)])
def test_a_reply_in_one_pass_is_the_same_reply(layout: ReplyLayout) -> None:
    expected = filled(frames_of(layout), layout)
    assert filled_whole(frames_of(layout), layout) == expected
    q = memoryview((DATA * 3)[: layout.depth * layout.row_bytes]).cast("f")
    assert filled_whole(frames_of(layout), layout, q=q) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 9},
        {"vocab_size": 2**31 + 1},
        {"vocab_size": -1},
        {"columns": ([0, 5, -1], *COLUMNS[1:])},
        {"columns": (COLUMNS[0], [1, 0, 2], COLUMNS[2])},
        {"columns": ([0, 5], *COLUMNS[1:])},
        {"columns": ((token for token in COLUMNS[0]), *COLUMNS[1:])},
        {"columns": ([0, 5, True], *COLUMNS[1:])},
        {"ids": DATA[:47]},
        {"ids": b""},
        {"q": DATA[:52]},
        {"q": memoryview(DATA[:96])[::2]},
        {"q": "text"},
    ],
)
def test_a_reply_with_something_wrong_is_left_to_python(change: dict[str, Any]) -> None:
    assert filled_whole(frames_of(), LAYOUT) is not None
    assert filled_whole(frames_of(), LAYOUT, **change) is None


def test_rows_of_a_part_are_no_whole_reply() -> None:
    layout = ReplyLayout(5, 0, 100_000)
    frames = frames_of(layout)
    assert frames.only is None
    one = frames._rows[0]
    columns = ([1] * 5, [100_000] * 5, (0,) * 5)
    whole = bytes(5 * 400_000)
    assert codec.fill_reply(one.frame, one.plan, b"", whole, layout.shape, columns, 1, 2, 3, 2**31) is None
    assert codec.fill_rows(one.frame, one.plan, b"", whole, layout.shape, columns, 1, 2, 3)


def test_rows_without_values_are_left_to_python() -> None:
    """What version 1 implies is checked before it is left out."""
    layout = ReplyLayout(3, 1, tokens_only=True)
    frames = frames_of(layout)
    assert filled_whole(frames, layout, columns=(COLUMNS[0], [1] * 3, COLUMNS[2])) is None


def test_digests_of_tokens_are_alike_in_both() -> None:
    draw = random.Random(6)
    for count in range(40):
        tokens = [draw.choice((0, 1, 2**31, 2**32 - 1, draw.randrange(2**32))) for _ in range(count)]
        start = draw.randbytes(8)
        expected = prefix_digest_plainly(tokens, start)
        assert codec.prefix_digest(start, tokens) == codec.prefix_digest(start, tuple(tokens)) == expected
        assert prefix_digest(iter(tokens), start) == expected


@pytest.mark.parametrize(
    ("start", "tokens"),
    [
        (bytes(7), [1]),
        (bytes(9), [1]),
        (bytearray(8), [1]),
        (bytes(8), [2**32]),
        (bytes(8), [-1]),
        (bytes(8), [1.0]),
        (bytes(8), [True]),
        (bytes(8), iter([1])),
        (bytes(8), range(2)),
    ],
)
def test_what_the_codec_cannot_digest_is_left_to_python(start: Any, tokens: Any) -> None:
    assert codec.prefix_digest(start, tokens) is None


def test_a_reply_that_is_refused_names_its_reason_as_before() -> None:
    pair = connect()
    pair.open(0, 77, support=SupportPolicy.K16)
    (item,) = pair.step(pair.item())
    for change in ({"entries": [0] * 5}, {"tokens": [2**31] * 5}, {"confidences": [2**24 + 1] * 5}):
        with pytest.raises(LocalProtocolError) as caught:
            pair.drafter.reply(item, **(reply_arrays(5, 16) | change))
        assert caught.value.code is ErrorCode.BAD_ROW_RECORD
