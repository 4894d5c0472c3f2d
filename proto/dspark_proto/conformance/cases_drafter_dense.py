"""ROW, OPN and HEL for drafters that offer dense rows: a value for every token, and what was agreed on before them.

A drafter without DENSE_ROWS is UNSUPPORTED, but for the last two. Spec: SPEC.md 6, 7.1, 7.5. Called by `catalogue`.
"""

from __future__ import annotations

from dataclasses import replace

from ..frame import encode_frame
from ..messages import Row
from ..negotiation import hello_message
from ..registry import Capability, ErrorCode, Lane, Representation, SupportPolicy
from .as_verifier import DrafterUnderTest
from .record import Family, Role
from .verdicts import Unmet

ROW = Family("ROW", Role.DRAFTER)
OPN = Family("OPN", Role.DRAFTER)
HEL = Family("HEL", Role.DRAFTER)
E = ErrorCode
DENSE = Capability.DENSE_ROWS.mask


def _dense(t: DrafterUnderTest) -> None:
    """Connect with dense rows; skips the case where the drafter has none."""
    offer = hello_message(replace(t.parameters(), dense_rows=True), 0)
    accept = t.hello(capabilities=DENSE, reply_bytes=offer.reply_bytes)
    t.require(bool(accept.capabilities & DENSE), "dense rows")


def _wide(t: DrafterUnderTest) -> int:
    return t.facts.compatibility.vocab_size


@ROW.case(20, "dense rows have a value for every token", "REQ-ROW-2", "rows of the used tokens alone, or with ids")
def dense(t: DrafterUnderTest) -> None:
    _dense(t)
    t.open(support=SupportPolicy.DENSE)
    for accepted in range(3):
        reply = t.round(accept=accepted)
        if set(reply.entries) != {_wide(t)}:
            raise Unmet(f"{_wide(t)} entries in each row", str(reply.entries))


@ROW.case(21, "a retry of dense rows has the same bytes", "REQ-STP-7", "a second draw under one key")
def retried(t: DrafterUnderTest) -> None:
    _dense(t)
    t.open(support=SupportPolicy.DENSE)
    item = t.item()
    t.step(item)
    first = t.reply(item)
    t.send(t.step_frame(item))
    t.same_bytes(first.frames, t.reply(item).frames)


@ROW.case(22, "dense and sparse sessions beside each other", "REQ-ROW-2", "one size for all sessions of a connection")
def mixed(t: DrafterUnderTest) -> None:
    _dense(t)
    t.require(t.terms.max_slots > 1, "two slots")
    t.open(support=SupportPolicy.DENSE)
    t.open(1)
    t.round()
    t.round(1)
    t.round(accept=1)


@ROW.case(23, "dense rows of a greedy request have one count", "REQ-ROW-6", "greedy drafts with a distribution")
def greedy(t: DrafterUnderTest) -> None:
    _dense(t)
    t.require(bool(t.facts.compatibility.lanes & 1 << (Lane.GREEDY - 1)), "the greedy lane")
    t.open(support=SupportPolicy.DENSE, lane=Lane.GREEDY)
    t.round()


@ROW.case(24, "dense frames of one size, whatever is drafted", "REQ-SEC-5", "lengths that tell what was drafted")
def constant(t: DrafterUnderTest) -> None:
    _dense(t)
    t.open(support=SupportPolicy.DENSE)
    sizes = {tuple(len(raw) for raw in t.round(accept=n % 3).frames) for n in range(4)}
    if len(sizes) != 1:
        raise Unmet("one size of replies", str(sorted(sizes)))


@ROW.case(25, "dense rows are called dense", "REQ-VER-1", "a representation that does not fit the bodies")
def named(t: DrafterUnderTest) -> None:
    _dense(t)
    t.open(support=SupportPolicy.DENSE)
    item = t.item()
    t.step(item)
    frame, raw = t.expect(Row)
    row = frame.message
    assert isinstance(row, Row)
    if (row.representation, row.support) != (Representation.DENSE, 0):
        raise Unmet("representation DENSE and support 0", f"{row.representation.name}, {row.support}", actual_frame=raw)
    while isinstance(frame.message, Row):
        frame, _ = t.next("COMPLETION")


@HEL.case(70, "reply bytes of dense rows", "REQ-HEL-7", "staging of sparse rows for dense ones")
def sizes(t: DrafterUnderTest) -> None:
    _dense(t)
    terms = t.terms
    wanted = terms.max_depth * (16 + max(8 * terms.max_support, 4 * _wide(t)))
    if terms.reply_bytes != wanted:
        raise Unmet(f"{wanted} reply bytes", str(terms.reply_bytes))


@HEL.case(71, "dense rows that are not asked for", "REQ-HEL-13", "a capability that only one side has")
def not_asked(t: DrafterUnderTest) -> None:
    accept = t.hello()
    if accept.capabilities:
        raise Unmet("no capabilities", f"{accept.capabilities:#x}")
    t.open()
    t.round()


@OPN.case(20, "OPEN of dense rows without the capability", "REQ-OPN-4", "rows of a size that nobody has memory for")
def without(t: DrafterUnderTest) -> None:
    t.hello()
    message, key = t.open_message(support=SupportPolicy.DENSE)
    t.refuses(E.SUPPORT_OUT_OF_RANGE, encode_frame(message, key), key)
    t.open()
    t.round()
