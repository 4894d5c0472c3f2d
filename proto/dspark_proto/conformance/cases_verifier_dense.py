"""ROW for verifiers that ask for dense rows: the harness sends a value for every token, and spoils one thing.

A verifier that opens no session of support 0 where both sides have DENSE_ROWS is UNSUPPORTED. Spec: SPEC.md 7.5, 7.6.
Called by `catalogue`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ..bodies import BodyDescriptor, describe
from ..buffers import Buffer
from ..checksums import body_checksum
from ..frame import encode_frame
from ..messages import StepItem
from ..registry import BodyKind, Capability, Dtype, Representation, SupportPolicy
from ..rows import ReplyLayout
from .as_drafter import HonestReply, VerifierUnderTest
from .blocks import Block, opened, rewritten
from .cases_verifier_reply import split
from .drafted_rows import TOTAL
from .record import Family, Role
from .verdicts import TimedOut, Unsupported

ROW = Family("ROW", Role.VERIFIER)
_NOT_USED = "sessions of dense rows"
_Edit = Callable[[Block, int, int], None]
"""Changes a row of a block; the last number is the row's drafted token."""


def _dense(t: VerifierUnderTest) -> None:
    """Connect, and let the case see STEPs of dense sessions only."""
    accept = t.connect(dense_rows=True)
    if not accept.capabilities & Capability.DENSE_ROWS.mask:
        raise Unsupported(_NOT_USED)
    t.suits = partial(_asks_dense, t)
    try:
        t.answer(t.await_step())
    except TimedOut:
        raise Unsupported(_NOT_USED) from None


def _asks_dense(t: VerifierUnderTest, item: StepItem) -> bool:
    return t.support_of(item) is SupportPolicy.DENSE


def _accepted(spoil: Callable[[HonestReply], Sequence[Buffer]], t: VerifierUnderTest) -> None:
    _dense(t)
    t.accepts(spoil)
    t.serves()


def _refused(
    spoil: Callable[[HonestReply], Sequence[Buffer]], t: VerifierUnderTest, *, may_leave: bool = False
) -> None:
    _dense(t)
    t.serves()
    t.refuses(spoil, may_leave=may_leave)


@ROW.case(400, "dense rows are committed", "REQ-ROW-2", "a verifier that never uses what it asked for")
def right(t: VerifierUnderTest) -> None:
    _dense(t)
    for _ in range(6):
        t.serves()


def _middle_twice(reply: HonestReply) -> Sequence[Buffer]:
    parts = split(reply)
    return [*parts[:2], parts[1], *parts[2:], reply.frames[1]]


ROW.add(401, "dense rows in several ROWs", "REQ-ROW-10", "a reply that must be one frame",
        partial(_accepted, lambda reply: [*split(reply), reply.frames[1]]))  # fmt: skip
ROW.add(
    402, "a ROW of dense rows twice", "REQ-ROW-5", "rows that are appended twice", partial(_accepted, _middle_twice)
)
ROW.add(403, "a gap between ROWs of dense rows", "REQ-ROW-5", "a hole filled with an older reply",
        partial(_refused, lambda reply: [*split(reply)[:1], *split(reply)[2:], reply.frames[1]]))  # fmt: skip
ROW.add(404, "the last of several ROWs of dense rows missing", "REQ-CMP-1", "a hole filled with an older reply",
        partial(_refused, lambda reply: [*split(reply)[:-1], reply.frames[1]]))  # fmt: skip
ROW.add(405, "ROWs of dense rows in another order", "REQ-ROW-5", "rows placed by arrival",
        partial(_refused, lambda reply: [*reversed(split(reply)), reply.frames[1]]))  # fmt: skip


def _retold(reply: HonestReply, width: int, ids: bool = False, support: int = 0) -> Sequence[Buffer]:
    """The reply with dense rows of another width, with a body of ids, or called sparse; checksums right."""
    depth, old = reply.row.depth, reply.row.bodies[-1].entries
    kind, q = reply.row.bodies[0].checksum_kind, reply.bodies[-1]
    rows = [q[row * old * 4 : (row + 1) * old * 4] for row in range(depth)]
    values = b"".join(row[: width * 4].ljust(width * 4, b"\0") for row in rows)
    parts = [reply.bodies[0], *([bytes(len(values))] if ids else []), values]
    bodies = [
        describe(BodyKind.RECORDS, Dtype.BYTES, depth, 16, parts[0], kind),
        *([describe(BodyKind.IDS, Dtype.INT32, depth, width, parts[1], kind)] if ids else []),
        describe(BodyKind.Q, Dtype.FP32, depth, width, values, kind),
    ]
    representation = Representation.SPARSE if support else Representation.DENSE
    row = replace(reply.row, support=support, representation=representation, bodies=tuple(bodies))
    whole = b"".join(parts)
    done = reply.with_completion(reply_bytes=len(whole), reply_checksum=body_checksum(kind, whole))
    return [encode_frame(row, reply.key, parts), done]


def _width(change: int, reply: HonestReply) -> Sequence[Buffer]:
    return _retold(reply, reply.row.bodies[-1].entries + change)


_SHAPES: tuple[tuple[int, str, str, Callable[[HonestReply], Sequence[Buffer]]], ...] = (
    (406, "dense rows that are one value short", "REQ-BOD-1", partial(_width, -1)),
    (407, "dense rows of one value too many", "REQ-BOD-1", partial(_width, 1)),
    (408, "a body of ids beside dense rows", "REQ-BOD-1", partial(lambda reply: _retold(reply, 1000, ids=True))),
    (409, "sparse rows for a session of dense ones", "REQ-ROW-2", lambda reply: _retold(reply, 32, True, 32)),
)
for _number, _title, _anchor, _make in _SHAPES:
    ROW.add(_number, _title, _anchor, "sizes taken from the reply instead of the session", partial(_refused, _make))


def _spoiled(edit: _Edit, seal: bool, reply: HonestReply) -> Sequence[Buffer]:
    """A reply whose last row was changed."""
    block = opened(reply, reply.row.bodies[-1].entries)
    row = block.layout.depth - 1
    edit(block, row, int.from_bytes(block.data[row * 16 : row * 16 + 4], "little"))
    if seal:
        block.seal()
    return rewritten(reply, block)


def _shift(amount: float) -> _Edit:
    return lambda block, row, token: block.set_count(row, token, block.count(row, token) + amount)


def _halved(block: Block, row: int, token: int) -> None:
    block.set_count(row, token, block.count(row, token) - 0.5)
    block.set_count(row, 999, 0.5)


def _emptied(block: Block, row: int, token: int) -> None:
    """The drafted token has no mass, another one has all."""
    block.set_word(row, token, 0)
    block.set_count(row, token - 1, TOTAL)


_RECORDS: tuple[tuple[int, str, str, bool, _Edit], ...] = (
    (420, "entries of a dense row that are its used ones", "REQ-ROW-4", True, lambda b, row, token: b.entries(row, 2)),
    (421, "one entry more than the vocabulary", "REQ-ROW-4", True,
     lambda b, row, token: b.entries(row, b.layout.width + 1)),
    (422, "a token of the vocabulary's size", "REQ-ROW-4", True, lambda b, row, token: b.token(row, b.layout.width)),
    (423, "a row crc that is wrong", "REQ-ROW-3", False, lambda b, row, token: b.crc(row, 0x12345678)),
    (424, "a value that the row crc does not cover", "REQ-ROW-3", False,
     lambda b, row, token: b.set_word(row, 999, 0x33800000)),
)  # fmt: skip
for _number, _title, _anchor, _seal, _edit in _RECORDS:
    ROW.add(_number, f"dense rows: {_title}", _anchor, "trusting a row for its frame's checksum",
            partial(_refused, partial(_spoiled, _edit, _seal)))  # fmt: skip

_VALUES: tuple[tuple[int, str, _Edit], ...] = (
    (430, "a total that is short by one count", _shift(-1)),
    (431, "a total that is one count too high", _shift(1)),
    (432, "-0.0 for a token without mass", lambda b, row, token: b.set_word(row, 999, 1 << 31)),
    (433, "not a number", lambda b, row, token: b.set_word(row, 999, 0x7FC00000)),
    (434, "a drafted token without mass", _emptied),
    (435, "half a count", _halved),
)
for _number, _title, _edit in _VALUES:
    ROW.add(_number, f"dense rows: {_title}", "REQ-ROW-7", "sampling from a q that is no distribution, or repairing it",
            partial(_refused, partial(_spoiled, _edit, True), may_leave=True))  # fmt: skip


def _sparse_size(reply: HonestReply) -> Sequence[Buffer]:
    return [reply.frames[0], reply.with_completion(reply_bytes=ReplyLayout(reply.row.depth, 32).total_bytes)]


ROW.add(440, "reply bytes of sparse rows behind dense ones", "REQ-CMP-1", "two sources for one size",
        partial(_refused, _sparse_size))  # fmt: skip


def _as_dense(reply: HonestReply) -> Sequence[Buffer]:
    """Dense rows with the tokens of a sparse reply."""
    vocab_size, depth = 1000, reply.row.depth
    block = Block(bytearray(ReplyLayout(depth, 0, vocab_size).total_bytes), ReplyLayout(depth, 0, vocab_size), 0)
    for row in range(depth):
        token = int.from_bytes(reply.bodies[0][row * 16 : row * 16 + 4], "little")
        block.token(row, token)
        block.entries(row, vocab_size)
        block.confidence(row, TOTAL)
        block.set_count(row, token, TOTAL)
    block.seal()
    parts = [bytes(block.data[start : start + length]) for start, length in block.layout.spans(0, depth)]
    dense = replace(reply, bodies=(parts[0], parts[1]), row=replace(reply.row, bodies=_describe(reply, parts)))
    return _retold(dense, vocab_size)


def _describe(reply: HonestReply, parts: Sequence[bytes]) -> tuple[BodyDescriptor, ...]:
    kind, depth = reply.row.bodies[0].checksum_kind, reply.row.depth
    records = describe(BodyKind.RECORDS, Dtype.BYTES, depth, 16, parts[0], kind)
    return records, describe(BodyKind.Q, Dtype.FP32, depth, len(parts[1]) // depth // 4, parts[1], kind)


@ROW.case(441, "dense rows where none were agreed on", "REQ-HEL-13", "a capability that is taken and not negotiated")
def not_agreed(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    t.refuses(_as_dense)
