"""ROW and CMP for verifiers: the harness drafts, and spoils one thing in a reply whose checksums are otherwise right.

A refused proposal shows as a round that is not committed; then the verifier must go on. Spec: SPEC.md 7.5, 7.6.
Called by `catalogue`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..bodies import describe
from ..buffers import Buffer
from ..frame import decode_frame, encode_frame
from ..messages import Row
from ..prefix import Key
from ..registry import Checksum, ErrorCode
from .as_drafter import HonestReply, VerifierUnderTest
from .blocks import Block, layout_of, opened, rewritten
from .drafted_rows import TOTAL
from .forge import changed, field_of, flipped, patched, position_of, with_values
from .record import Family, Role

ROW = Family("ROW", Role.VERIFIER)
CMP = Family("CMP", Role.VERIFIER)
E = ErrorCode

_Edit = Callable[[Block, int], None]


def spoiled(edit: _Edit, last: bool, seal: bool, t: VerifierUnderTest) -> Callable[[HonestReply], Sequence[Buffer]]:
    """A reply in which ``edit`` changed the first or the last row."""

    def spoil(reply: HonestReply) -> Sequence[Buffer]:
        block = opened(reply, t.book.parameters.compatibility.vocab_size)
        edit(block, block.layout.depth - 1 if last else 0)
        if seal:
            block.seal()
        return rewritten(reply, block)

    return spoil


def _refused(edit: _Edit, last: bool, seal: bool, t: VerifierUnderTest, *, may_leave: bool = False) -> None:
    t.connect()
    t.serves()
    t.refuses(spoiled(edit, last, seal, t), may_leave=may_leave)


def _swap_ids(block: Block, row: int) -> None:
    one, two = block.id(row, 0), block.id(row, 1)
    block.set_id(row, 0, two)
    block.set_id(row, 1, one)


def _big_endian(block: Block, row: int) -> None:
    for column in range(2):
        block.set_word(row, column, int.from_bytes(block.word(row, column).to_bytes(4, "little"), "big"))


def _third(block: Block, row: int, identifier: int, word: int) -> None:
    """An entry beyond the two: counted as padding, or claimed by ``entries``."""
    block.set_id(row, 2, identifier)
    block.set_word(row, 2, word)


def _zero_entry(block: Block, row: int) -> None:
    """A third entry without mass."""
    _third(block, row, block.id(row, 1) + 1, 0)
    block.entries(row, 3)


def _zero_at_token(block: Block, row: int) -> None:
    """The drafted token has no mass; the other entry has it all."""
    block.set_count(row, 0, TOTAL)
    block.set_word(row, 1, 0)


def _everything_zero(block: Block, row: int) -> None:
    block.set_word(row, 0, 0)
    block.set_word(row, 1, 0)


def _half_counts(block: Block, row: int) -> None:
    block.set_count(row, 0, block.count(row, 0) - 0.5)
    block.set_count(row, 1, block.count(row, 1) + 0.5)


def _shift(amount: float) -> _Edit:
    return lambda block, row: block.set_count(row, 0, block.count(row, 0) + amount)


_DYADIC: tuple[tuple[int, str, _Edit], ...] = (
    (100, "a total that is short by one count", _shift(-1)),
    (101, "a total that is one count too high", _shift(1)),
    (102, "a total of 0", _everything_zero),
    (103, "a total of twice 2^24", lambda block, row: block.set_count(row, 0, 2 * TOTAL - block.count(row, 1))),
    (104, "counts that are no integers but total 2^24", _half_counts),
    (105, "a value that is one bit off", lambda block, row: block.set_word(row, 0, block.word(row, 0) ^ 1)),
    (106, "a negative value", lambda block, row: block.set_word(row, 0, block.word(row, 0) | 1 << 31)),
    (107, "-0.0 as padding", lambda block, row: block.set_word(row, 2, 1 << 31)),
    (108, "not a number", lambda block, row: block.set_word(row, 0, 0x7FC00000)),
    (109, "a signalling not a number", lambda block, row: block.set_word(row, 0, 0x7F800001)),
    (110, "infinity", lambda block, row: block.set_word(row, 0, 0x7F800000)),
    (111, "minus infinity", lambda block, row: block.set_word(row, 0, 0xFF800000)),
    (112, "a subnormal value", lambda block, row: block.set_word(row, 0, 1)),
    (113, "ids that are not ascending", _swap_ids),
    (114, "an id twice", lambda block, row: block.set_id(row, 0, block.id(row, 1))),
    (115, "an id of the vocabulary's size", lambda block, row: block.set_id(row, 1, block.vocab_size)),
    (116, "the largest id", lambda block, row: block.set_id(row, 1, 2**31 - 1)),
    (117, "a negative id", lambda block, row: block.set_id(row, 0, -1)),
    (118, "the smallest id", lambda block, row: block.set_id(row, 0, -(2**31))),
    (119, "an id in the padding", lambda block, row: block.set_id(row, 2, 5)),
    (120, "a value in the padding", lambda block, row: _third(block, row, 0, 0x33800000)),
    (121, "an entry without mass", _zero_entry),
    (122, "a drafted token without mass", _zero_at_token),
    (123, "a drafted token that is not in the row", lambda block, row: block.token(row, (block.id(row, 1) + 1) % 90)),
    (124, "entries that hide one", lambda block, row: block.entries(row, 1)),
    (125, "entries that claim padding", lambda block, row: block.entries(row, 3)),
    (126, "big-endian values", _big_endian),
)
for _number, _title, _edit in _DYADIC:
    for _last in (False, True):
        ROW.add(
            _number + (50 if _last else 0), f"{_title}, in the {'last' if _last else 'first'} row", "REQ-ROW-7",
            "sampling from a q that is no distribution, or repairing it",
            partial(_refused, _edit, _last, True, may_leave=True),
        )  # fmt: skip


def _exchange(block: Block, row: int) -> None:
    """Both values, exchanged."""
    first = block.count(row, 0)
    block.set_count(row, 0, block.count(row, 1))
    block.set_count(row, 1, first)


_RECORDS: tuple[tuple[int, str, str, bool, _Edit], ...] = (
    (201, "no entries", "REQ-ROW-4", True, lambda block, row: block.entries(row, 0)),
    (
        202,
        "more entries than the support",
        "REQ-ROW-4",
        True,
        lambda block, row: block.entries(row, block.layout.support + 1),
    ),
    (203, "2^32 - 1 entries", "REQ-SEC-3", True, lambda block, row: block.entries(row, 2**32 - 1)),
    (204, "a token of the vocabulary's size", "REQ-ROW-4", True, lambda block, row: block.token(row, block.vocab_size)),
    (205, "a negative token", "REQ-SEC-3", True, lambda block, row: block.token(row, -1)),
    (206, "a confidence above 1", "REQ-ROW-4", True, lambda block, row: block.confidence(row, TOTAL + 1)),
    (207, "a row crc that is wrong", "REQ-ROW-3", False, lambda block, row: block.crc(row, 0x12345678)),
    (208, "ids that the row crc does not cover", "REQ-ROW-3", False, _swap_ids),
    (
        209,
        "values that the row crc does not cover",
        "REQ-ROW-3",
        False,
        _exchange,
    ),
    (
        210,
        "a token that the row crc does not cover",
        "REQ-ROW-3",
        False,
        lambda block, row: block.token(row, block.id(row, 0)),
    ),
)
for _number, _title, _anchor, _seal, _edit in _RECORDS:
    for _last in (False, True):
        ROW.add(
            _number + (20 if _last else 0), f"{_title}, in the {'last' if _last else 'first'} row", _anchor,
            "trusting a row for its frame's checksum", partial(_refused, _edit, _last, _seal),
        )  # fmt: skip


def _accepted(spoil: Callable[[HonestReply], Sequence[Buffer]], t: VerifierUnderTest) -> None:
    t.connect()
    t.accepts(spoil)
    t.serves()


def _rejected(spoil: Callable[[HonestReply], Sequence[Buffer]], t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    t.refuses(spoil)


@ROW.case(300, "a right reply is committed", "REQ-CMP-3", "a verifier that never uses its drafter")
def right(t: VerifierUnderTest) -> None:
    t.connect()
    for _ in range(8):
        t.serves()


def split(reply: HonestReply) -> list[bytes]:
    """The ROW cut into one ROW for each row."""
    layout = layout_of(reply.row, reply.row.bodies[-1].entries)
    data = b"".join(reply.bodies)
    frames = []
    for index in range(layout.depth):
        bodies = [data[start : start + length] for start, length in layout.spans(index, 1)]
        described = tuple(
            describe(old.kind, old.dtype, 1, old.entries, body, old.checksum_kind)
            for old, body in zip(reply.row.bodies, bodies, strict=True)
        )
        row = replace(reply.row, first_row=index, row_count=1, bodies=described)
        frames.append(bytes(encode_frame(row, reply.key, bodies)))
    return frames


ROW.add(301, "one ROW for each row", "REQ-ROW-5", "a reply that must be one frame",
        partial(_accepted, lambda reply: [*split(reply), reply.frames[1]]))  # fmt: skip
ROW.add(302, "a ROW twice", "REQ-ROW-5", "rows that are appended twice",
        partial(_accepted, lambda reply: [reply.frames[0], *reply.frames]))  # fmt: skip
ROW.add(
    303,
    "a ROW of the middle twice",
    "REQ-ROW-5",
    "rows that are appended twice",
    partial(_accepted, lambda reply: [*split(reply)[:2], split(reply)[1], *split(reply)[2:], reply.frames[1]]),
)
ROW.add(304, "rows in another order", "REQ-ROW-5", "rows placed by arrival",
        partial(_rejected, lambda reply: [*reversed(split(reply)), reply.frames[1]]))  # fmt: skip
ROW.add(305, "a row missing", "REQ-ROW-5", "a hole filled with an older reply",
        partial(_rejected, lambda reply: [*split(reply)[:-1], reply.frames[1]]))  # fmt: skip
ROW.add(306, "the first row missing", "REQ-ROW-5", "a hole filled with an older reply",
        partial(_rejected, lambda reply: [*split(reply)[1:], reply.frames[1]]))  # fmt: skip


def _row_fields(changes: dict[str, Any], reply: HonestReply) -> Sequence[Buffer]:
    return [reply.with_row(**changes), reply.frames[1]]


for _number, _title, _anchor, _changes in (
    (310, "a ROW of another depth", "REQ-ROW-2", {"depth": 1}),
    (311, "a ROW of another support", "REQ-ROW-2", {"support": 16}),
    (312, "more rows than the bodies hold", "REQ-BOD-1", {"row_count": 6}),
    (313, "a first row beyond the depth", "REQ-ROW-5", {"first_row": 31}),
):
    ROW.add(_number, _title, _anchor, "sizes taken from the reply instead of the STEP",
            partial(_rejected, partial(_row_fields, _changes)))  # fmt: skip


def _raw_row(name: str, value: Any, reply: HonestReply) -> Sequence[Buffer]:
    return [with_values(reply.row, {position_of(Row, name): value}, reply.key, reply.bodies), reply.frames[1]]


ROW.add(314, "an unknown representation", "REQ-VER-1", "an unknown id that falls through to a default",
        partial(_rejected, partial(_raw_row, "representation", 9)))  # fmt: skip
ROW.add(315, "depth 0 in a ROW", "REQ-LIM-1", "a division by a count of the peer",
        partial(_rejected, partial(_raw_row, "depth", 0)))  # fmt: skip


def _spoiled_frame(spoil: Callable[[bytes], bytes], reply: HonestReply) -> Sequence[Buffer]:
    return [spoil(reply.frames[0]), reply.frames[1]]


def _body_start(frame: bytes) -> int:
    return len(frame) - field_of(frame, "body_length")


_DAMAGED: tuple[tuple[int, str, str, Callable[[bytes], bytes]], ...] = (
    (320, "a damaged record", "REQ-CRC-3", lambda frame: flipped(frame, _body_start(frame) + 1)),
    (
        321,
        "a damaged value in the last body",
        "REQ-CRC-3",
        lambda frame: flipped(frame, _body_start(frame) + field_of(frame, "body_length") - 64),
    ),
    (
        322,
        "damaged control",
        "REQ-CRC-2",
        lambda frame: patched(frame, "control_crc", field_of(frame, "control_crc") ^ 1),
    ),
    (
        323,
        "padding that is not zero",
        "REQ-FRM-3",
        lambda frame: flipped(frame, 48 + field_of(frame, "control_length")),
    ),
    (324, "a damaged prefix", "REQ-PFX-3", lambda frame: flipped(frame, 45)),
    (325, "a frame cut short", "REQ-FRM-1", lambda frame: frame[:-64]),
    (326, "a frame with bytes after it", "REQ-FRM-1", lambda frame: frame + bytes(64)),
    (327, "a set flag", "REQ-PFX-6", lambda frame: patched(frame, "flags", 1)),
    (328, "another major version", "REQ-PFX-4", lambda frame: patched(frame, "major", 3)),
)
for _number, _title, _anchor, _damage in _DAMAGED:
    ROW.add(_number, f"a ROW with {_title}", _anchor, "using bytes that were damaged on the way",
            partial(_rejected, partial(_spoiled_frame, _damage)))  # fmt: skip


def _other_row(reply: HonestReply, **changes: Any) -> bytes:
    """A ROW with other, right rows and some fields changed: nothing of it may be used."""
    block = opened(reply, 1000)
    for row in range(block.layout.depth):
        block.token(row, block.id(row, 0))
    block.seal()
    moved = decode_frame(rewritten(reply, block)[0])
    return bytes(encode_frame(changed(moved.message, **changes), reply.key, moved.bodies))


def _descriptor(changes: dict[str, Any], reply: HonestReply) -> Sequence[Buffer]:
    """The Q descriptor changed."""
    *others, q = reply.row.bodies
    return [reply.with_row(bodies=(*others, replace(q, **changes))), reply.frames[1]]


@ROW.case(330, "a body under the other checksum", "REQ-BOD-2", "a checksum kind that the peer chooses per frame")
def other_checksum(t: VerifierUnderTest) -> None:
    accept = t.connect()
    other = Checksum.CRC32C if accept.checksum_kind is Checksum.XXH3_64 else Checksum.XXH3_64
    t.serves()

    def spoil(reply: HonestReply) -> Sequence[Buffer]:
        bodies = tuple(
            describe(old.kind, old.dtype, old.rows, old.entries, body, other)
            for old, body in zip(reply.row.bodies, reply.bodies, strict=True)
        )
        return [reply.with_row(bodies=bodies), reply.frames[1]]

    t.refuses(spoil)


ROW.add(331, "a descriptor of other entries", "REQ-BOD-1", "two sources for one size",
        partial(_rejected, partial(_descriptor, {"entries": 1})))  # fmt: skip
ROW.add(332, "a ROW of another epoch is dropped", "REQ-EPO-1", "rows of another process",
        partial(_accepted, lambda reply: [_other_row(reply, epoch=reply.row.epoch ^ 1), *reply.frames]))  # fmt: skip
ROW.add(
    333,
    "a ROW of another session is dropped",
    "REQ-ERR-2",
    "rows of another request",
    partial(_accepted, lambda reply: [_other_row(reply, session=reply.row.session ^ 1), *reply.frames]),
)


def _completion(changes: dict[str, Any], reply: HonestReply) -> Sequence[Buffer]:
    return [reply.frames[0], reply.with_completion(**changes)]


def _off(name: str, amount: int, reply: HonestReply) -> Sequence[Buffer]:
    return _completion({name: max(0, getattr(reply.completion, name) + amount)}, reply)


_BELIEVED = "a reply that is believed to answer another STEP"
CMP.add(1, "another position", "REQ-CMP-2", _BELIEVED, partial(_rejected, partial(_off, "anchor_position", 1)))
CMP.add(2, "another context version", "REQ-CMP-2", _BELIEVED, partial(_rejected, partial(_off, "context_version", 1)))
CMP.add(
    3, "another digest", "REQ-CMP-2", _BELIEVED, partial(_rejected, partial(_completion, {"prefix_digest": b"\1" * 8}))
)
CMP.add(4, "a row count below the depth", "REQ-CMP-1", _BELIEVED, partial(_rejected, partial(_off, "row_count", -1)))
CMP.add(5, "a row count above the depth", "REQ-CMP-1", _BELIEVED, partial(_rejected, partial(_off, "row_count", 1)))
CMP.add(6, "reply bytes 4 too few", "REQ-CMP-1", _BELIEVED, partial(_rejected, partial(_off, "reply_bytes", -4)))
CMP.add(7, "reply bytes 4 too many", "REQ-CMP-1", _BELIEVED, partial(_rejected, partial(_off, "reply_bytes", 4)))
CMP.add(8, "another reply checksum", "REQ-CMP-1", "a reply that changed on its way into staging",
        partial(_rejected, partial(_completion, {"reply_checksum": bytes(8)})))  # fmt: skip
CMP.add(9, "COMPLETION without rows", "REQ-CMP-1", "the rows of the round before",
        partial(_rejected, lambda reply: [reply.frames[1]]))  # fmt: skip
CMP.add(10, "COMPLETION before ROW", "REQ-CMP-1", "rows that are used before they are complete",
        partial(_rejected, lambda reply: [reply.frames[1], reply.frames[0]]))  # fmt: skip
CMP.add(11, "COMPLETION twice", "REQ-GEN-2", "a round that is used twice",
        partial(_accepted, lambda reply: [*reply.frames, reply.frames[1]]))  # fmt: skip
CMP.add(12, "the whole reply twice", "REQ-GEN-2", "a round that is used twice",
        partial(_accepted, lambda reply: [*reply.frames, *reply.frames]))  # fmt: skip
CMP.add(
    13,
    "COMPLETION of another epoch is dropped",
    "REQ-EPO-1",
    "an end that another process declared",
    partial(
        _accepted,
        lambda reply: [
            reply.frames[0],
            reply.with_completion(epoch=reply.completion.epoch ^ 1, reply_checksum=bytes(8)),
            reply.frames[1],
        ],
    ),
)
CMP.add(
    14,
    "COMPLETION of another session is dropped",
    "REQ-ERR-2",
    "an end that another request declared",
    partial(
        _accepted,
        lambda reply: [
            reply.frames[0],
            reply.with_completion(session=reply.completion.session ^ 1, reply_checksum=bytes(8)),
            reply.frames[1],
        ],
    ),
)
CMP.add(15, "any draft time", "REQ-CMP-5", "a measurement that decides",
        partial(_accepted, partial(_completion, {"draft_us": 2**32 - 1})))  # fmt: skip
CMP.add(16, "damaged COMPLETION control", "REQ-CRC-2", "using bytes that were damaged on the way",
        partial(_rejected, lambda reply: [reply.frames[0], flipped(reply.frames[1], 52)]))  # fmt: skip
CMP.add(
    17,
    "COMPLETION under the key of another slot",
    "REQ-GEN-2",
    _BELIEVED,
    partial(
        _accepted,
        lambda reply: [
            reply.frames[0],
            reply.with_completion(
                Key(1000 + reply.key.slot, reply.key.generation, reply.key.round), reply_checksum=bytes(8)
            ),
            reply.frames[1],
        ],
    ),
)
CMP.add(18, "a body behind COMPLETION", "REQ-FRM-4", "bytes that nobody looks at",
        partial(_rejected, lambda reply: [
            reply.frames[0],
            patched(patched(reply.frames[1], "body_count", 1), "body_length", 64) + bytes(64),
        ]))  # fmt: skip


def _status(status: int, t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    t.kills(lambda reply: [reply.with_completion(status=status, row_count=0, reply_bytes=0, reply_checksum=bytes(8))])


for _number, _title, _value in (
    (30, "DRAFT_FAILED", 102),
    (31, "DRAFT_NOT_FINITE", 103),
    (32, "an unknown status", 200),
    (33, "status 255", 255),
):
    CMP.add(_number, f"COMPLETION with {_title} ends the generation", "REQ-CMP-4",
            "a failed round that is used, or retried in the same generation", partial(_status, _value))  # fmt: skip


@CMP.case(34, "a failed round whose rows came too", "REQ-CMP-4", "rows of a failed round that are used")
def failed_with_rows(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    t.kills(lambda reply: [reply.frames[0], reply.with_completion(status=102)])


ROW.add(
    334,
    "a descriptor with another checksum",
    "REQ-CRC-3",
    "a body checksum that is not compared",
    partial(_rejected, partial(_descriptor, {"checksum": bytes(8)})),
)
