"""VER for verifiers that speak version 1 too: when they may ask for it, and what its rounds look like.

A verifier without version 1 is UNSUPPORTED by all but two. Spec: SPEC.md 6, 7.9, 16. Called by `catalogue`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..bodies import describe
from ..buffers import Buffer
from ..checksums import body_checksum
from ..frame import encode_frame
from ..hello import Accept, Hello, Reject
from ..messages import Open
from ..negotiation import hello_message
from ..prefix import NO_KEY
from ..registry import ErrorCode, Lane, Representation, SupportPolicy, WireVersion
from ..rows import ReplyLayout
from .as_drafter import HonestReply, VerifierUnderTest
from .blocks import Block, opened, rewritten
from .cases_verifier_hello import no_session
from .drafted_rows import one_hot, pack
from .forge import raw_frame
from .record import Family, Role
from .verdicts import TimedOut, Unmet, Unsupported

VER = Family("VER", Role.VERIFIER)
E = ErrorCode
V1, V2 = int(WireVersion.V1_0), int(WireVersion.V2_0)
_NOT_OFFERED = "version 1"


def _reject(t: VerifierUnderTest, code: ErrorCode) -> None:
    hello = t.hello or t.await_hello()
    t.hello = None
    t.say(Reject(t.epoch, hello.epoch, hello.serial, code, "HELLO.wire_versions", "", ""))


def _version_one(t: VerifierUnderTest) -> Hello:
    """The HELLO of version 1 that follows a refusal of version 2."""
    _reject(t, E.BAD_VERSION)
    try:
        hello = t.await_hello(t.facts.deadline_ms)
    except TimedOut:
        raise Unsupported(_NOT_OFFERED) from None
    if V1 not in hello.wire_versions:
        raise Unsupported(_NOT_OFFERED)
    return hello


@VER.case(110, "HELLO of version 1 is right", "REQ-ONE-1", "lanes, major or sizes of version 2 in a HELLO of version 1")
def right_hello(t: VerifierUnderTest) -> None:
    hello = _version_one(t)
    wanted = hello_message(t.parameters(hello), hello.serial, WireVersion.V1_0, hello.auth)
    if (hello.compat, hello.compat_hash) != (wanted.compat, wanted.compat_hash):
        raise Unmet("wire major 1 and the greedy lane alone", hello.compat.hex(), actual_frame=t.hello_frame)
    if hello.reply_bytes != 16 * hello.max_depth:
        raise Unmet(f"{16 * hello.max_depth} reply bytes", str(hello.reply_bytes), actual_frame=t.hello_frame)
    t.connect()
    t.serves()


@VER.case(111, "rounds of version 1", "REQ-ONE-2", "a sampled request, or rows, for a drafter that has none")
def rounds(t: VerifierUnderTest) -> None:
    _version_one(t)
    t.connect()
    for _ in range(6):
        t.serves()
    opened_as = [frame.message for frame in t.log if isinstance(frame.message, Open)]
    wanted = (Lane.GREEDY, 0, SupportPolicy.K1)
    for one in opened_as:
        found = (one.lane, one.draft_temperature_micro, one.support)
        if found != wanted:
            raise Unmet("OPEN of lane greedy, temperature 0 and support 1", str(found))


def _refused(spoil: Callable[[HonestReply], Sequence[Buffer]], t: VerifierUnderTest) -> None:
    _version_one(t)
    t.connect()
    t.serves()
    t.refuses(spoil)


def _as_sparse(reply: HonestReply) -> Sequence[Buffer]:
    """The same tokens with ids and counts, all checksums right."""
    layout = ReplyLayout(reply.row.depth, 1)
    records = reply.bodies[0]
    tokens = [int.from_bytes(records[at : at + 4], "little") for at in range(0, len(records), 16)]
    packed = pack([one_hot(token) for token in tokens], 1, 0)
    block = Block(bytearray(records + packed.ids + packed.q), layout, 0)
    block.seal()
    return _retold(reply, block, Representation.SPARSE)


def as_tokens(reply: HonestReply) -> Sequence[Buffer]:
    """The records of a reply alone, all checksums right."""
    layout = ReplyLayout(reply.row.depth, 1, tokens_only=True)
    block = Block(bytearray(reply.bodies[0]), layout, 0)
    for row in range(layout.depth):
        block.entries(row, 1)
    block.seal()
    return _retold(reply, block, Representation.TOKENS)


def _retold(reply: HonestReply, block: Block, representation: Representation) -> Sequence[Buffer]:
    """A reply of another representation."""
    kind, layout = reply.row.bodies[0].checksum_kind, block.layout
    parts = [bytes(block.data[start : start + length]) for start, length in layout.spans(0, layout.depth)]
    shapes = [shape[:4] for shape in layout.shapes(layout.depth)]
    bodies = tuple(describe(*shape, part, kind) for shape, part in zip(shapes, parts, strict=True))
    row = replace(reply.row, support=1, representation=representation, bodies=bodies)
    checksum = body_checksum(kind, bytes(block.data))
    done = reply.with_completion(reply_bytes=layout.total_bytes, reply_checksum=checksum)
    return [encode_frame(row, reply.key, parts), done]


def _two_entries(reply: HonestReply) -> Sequence[Buffer]:
    block = opened(reply, 0)
    block.entries(0, 2)
    block.seal()
    return rewritten(reply, block)


def _no_entries(reply: HonestReply) -> Sequence[Buffer]:
    block = opened(reply, 0)
    block.entries(block.layout.depth - 1, 0)
    block.seal()
    return rewritten(reply, block)


def _old_size(reply: HonestReply) -> Sequence[Buffer]:
    return [reply.frames[0], reply.with_completion(reply_bytes=ReplyLayout(reply.row.depth, 1).total_bytes)]


_REPLIES: tuple[tuple[int, str, str, str, Callable[[HonestReply], Sequence[Buffer]]], ...] = (
    (112, "sparse rows in version 1", "REQ-ONE-4", "rows of a version that was not agreed on", _as_sparse),
    (113, "two entries in a row of version 1", "REQ-ONE-3", "a record whose entries nobody looks at", _two_entries),
    (114, "no entries in a row of version 1", "REQ-ONE-3", "a record whose entries nobody looks at", _no_entries),
    (115, "reply bytes of version 2 in version 1", "REQ-ONE-3", "two sources for one size", _old_size),
)
for _number, _title, _anchor, _bug, _spoil in _REPLIES:
    VER.add(_number, _title, _anchor, _bug, partial(_refused, _spoil))


def _bad_accept(change: Callable[[Accept, Hello], dict[str, Any]], t: VerifierUnderTest) -> None:
    hello = _version_one(t)
    accept = t.accept_for(hello)
    t.say(replace(accept, **change(accept, hello)), NO_KEY)
    no_session(t)
    t.restart()
    t.connect()
    t.serves()


VER.add(116, "ACCEPT of version 2 for a HELLO of version 1", "REQ-HEL-15", "a silent upgrade",
        partial(_bad_accept, lambda accept, hello: {"wire_version": V2}))  # fmt: skip
VER.add(117, "ACCEPT of version 1 with a capability", "REQ-HEL-13", "dense rows where there are no rows",
        partial(_bad_accept, lambda accept, hello: {"capabilities": 1}))  # fmt: skip


@VER.case(118, "version 2 is asked for again after version 1", "REQ-HEL-16", "a downgrade that lasts for ever")
def again(t: VerifierUnderTest) -> None:
    _version_one(t)
    t.connect()
    t.serves()
    hello = t.restart()
    if V2 not in hello.wire_versions:
        raise Unmet("HELLO of version 2 for another process", f"{hello.wire_versions}", actual_frame=t.hello_frame)
    t.connect()
    t.serves()


@VER.case(119, "a refusal for another reason is no reason for version 1", "REQ-HEL-16", "a downgrade by any fault")
def other_reasons(t: VerifierUnderTest) -> None:
    for code in (E.INCOMPATIBLE, E.NO_COMMON_CHECKSUM, E.BAD_NEGOTIATION):
        _reject(t, code)
        hello = t.await_hello()
        if V2 not in hello.wire_versions:
            raise Unmet(f"HELLO of version 2 after REJECT {code.name}", f"{hello.wire_versions}")
    t.connect()
    t.serves()


@VER.case(120, "rows of tokens alone in version 2", "REQ-ONE-4", "a q that nobody sent")
def tokens_only(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    t.refuses(as_tokens)


@VER.case(121, "frames of version 1 have the same prefix", "REQ-VER-2", "two layouts for one connection")
def one_prefix(t: VerifierUnderTest) -> None:
    _version_one(t)
    t.connect()
    t.accepts(lambda reply: [reply.frames[0], raw_frame(99, b"\x90"), reply.frames[1]])
    t.serves()
