"""VER for drafters that speak version 1 too: whom they take, with which terms, and what their rounds look like.

The facts say whether a drafter does; one that does not is UNSUPPORTED here. Spec: SPEC.md 6, 7.9, 16. Called by
`catalogue`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

from ..frame import encode_frame
from ..hello import Accept, Hello
from ..messages import Ping
from ..negotiation import compatibility_for, hello_message
from ..registry import ErrorCode, Lane, SupportPolicy, WireVersion
from .as_verifier import DrafterUnderTest
from .forge import patched
from .judging import same
from .record import Family, Role
from .verdicts import Unmet

VER = Family("VER", Role.DRAFTER)
E = ErrorCode
V1, V2 = WireVersion.V1_0, WireVersion.V2_0


def _offer(t: DrafterUnderTest, **changes: Any) -> Hello:
    """A HELLO of version 1; ``changes`` are fields of the message."""
    t.require(t.facts.version_1, "version 1")
    t.serial += 1
    return replace(hello_message(t.parameters(), t.serial, V1), **changes)


def _version_one(t: DrafterUnderTest, **changes: Any) -> Accept:
    accept = t.greet(_offer(t, **changes))
    same("ACCEPT version", hex(V1), hex(accept.wire_version))
    return accept


def _compat(t: DrafterUnderTest, **changes: Any) -> dict[str, Any]:
    """Fields of a HELLO whose compatibility is version 1's but for ``changes``."""
    encoded = replace(compatibility_for(t.facts.compatibility, V1), **changes).encoded()
    return {"compat": encoded, "compat_hash": sha256(encoded).digest()}


@VER.case(10, "HELLO of version 1 gets version 1", "REQ-HEL-15", "a silent upgrade")
def accepted(t: DrafterUnderTest) -> None:
    hello = _offer(t)
    accept = t.greet(hello)
    same("ACCEPT version", hex(V1), hex(accept.wire_version))
    same("compatibility hash", hello.compat_hash.hex(), accept.compat_hash.hex())
    t.open()
    t.round()


@VER.case(11, "reply bytes of version 1", "REQ-ONE-1", "reply memory for rows that never come")
def reply_bytes(t: DrafterUnderTest) -> None:
    accept = _version_one(t)
    same("reply bytes", 16 * accept.max_depth, accept.reply_bytes)
    same("tap row bytes", t.facts.compatibility.tap_row_bytes, accept.tap_row_bytes)


@VER.case(12, "capabilities of a HELLO of version 1 are ignored", "REQ-ONE-1", "dense rows where there are no rows")
def capabilities(t: DrafterUnderTest) -> None:
    same("capabilities", 0, _version_one(t, capabilities=1 | 1 << 40).capabilities)
    t.open()
    t.round()


def _incompatible(field: str, changes: dict[str, Any], versions: tuple[int, ...], t: DrafterUnderTest) -> None:
    hello = _offer(t, wire_versions=versions, **_compat(t, **changes))
    same("the field that differs", field, t.rejected(hello, E.INCOMPATIBLE).field)
    _version_one(t)


for _number, _title, _anchor, _bug, _field, _changes, _versions in (
    (13, "compat of version 1 with every lane", "REQ-ONE-1", "lanes that version 1 does not have", "lanes",
     {"lanes": 0b111}, (V1,)),
    (14, "compat of version 1 with wire major 2", "REQ-ONE-1", "a major that nobody compares", "wire_major",
     {"wire_major": 2}, (V1,)),
    (15, "compat of version 1 where both versions are listed", "REQ-HEL-15", "a downgrade by compat", "lanes",
     {}, (V1, V2)),
):  # fmt: skip
    VER.add(_number, _title, _anchor, _bug, partial(_incompatible, _field, _changes, tuple(map(int, _versions))))


@VER.case(16, "rounds of version 1 are records alone", "REQ-ONE-3", "rows in a version that has none")
def rounds(t: DrafterUnderTest) -> None:
    _version_one(t)
    t.open()
    for accept in (0, 2, 5, 1):
        t.round(accept=accept)
    t.commit(accepted=1)
    t.round(accept=None, tap_rows=0)


@VER.case(17, "a retry in version 1", "REQ-STP-7", "drafts that are made again")
def retry(t: DrafterUnderTest) -> None:
    _version_one(t)
    t.open()
    item = t.item()
    t.step(item)
    first = t.reply(item)
    t.send(t.step_frame(item))
    t.same_bytes(first.frames, t.reply(item).frames)


def _refused_open(code: ErrorCode, changes: tuple[dict[str, Any], ...], t: DrafterUnderTest) -> None:
    _version_one(t)
    for one in changes:
        message, key = t.open_message(**one)
        t.refuses(code, encode_frame(message, key), key)
    t.holds_nothing()
    t.open()
    t.round()


_LANES = tuple({"lane": lane, "draft_temperature_micro": 0} for lane in (Lane.RATIO, Lane.MATCH))
_SUPPORTS = tuple({"support": support} for support in (SupportPolicy.K16, SupportPolicy.DENSE))
for _number, _title, _code, _opened in (
    (18, "another lane than greedy", E.LANE_MISMATCH, _LANES),
    (19, "a draft temperature", E.LANE_MISMATCH, ({"draft_temperature_micro": 1},)),
    (20, "another support than 1", E.SUPPORT_OUT_OF_RANGE, _SUPPORTS),
):
    VER.add(_number, f"OPEN of version 1 with {_title}", "REQ-ONE-2", "a sampled request in the greedy exchange",
            partial(_refused_open, _code, _opened))  # fmt: skip


@VER.case(21, "version 2 after version 1", "REQ-VER-2", "a downgrade that lasts for ever")
def upgraded(t: DrafterUnderTest) -> None:
    _version_one(t)
    t.open()
    t.round()
    same("ACCEPT version", hex(V2), hex(t.hello().wire_version))
    t.open()
    t.round()


@VER.case(22, "version 1 after version 2", "REQ-VER-2", "an upgrade that lasts for ever")
def downgraded(t: DrafterUnderTest) -> None:
    t.require(t.facts.version_1, "version 1")
    t.hello()
    t.open()
    t.round()
    _version_one(t)
    t.open()
    t.round()


@VER.case(23, "two verifiers of two versions", "REQ-VER-2", "one version for all connections")
def both(t: DrafterUnderTest) -> None:
    _version_one(t)
    t.open()
    t.round()
    other = t.second()
    other.epoch ^= 0xFF
    other.hello()
    other.open()
    for accept in (0, 2):
        other.round(accept=accept)
        t.round(accept=accept)
    other.close()


@VER.case(24, "the prefix of version 1 is version 2's", "REQ-VER-2", "two frame layouts")
def one_prefix(t: DrafterUnderTest) -> None:
    _version_one(t)
    ping = bytes(encode_frame(Ping(t.epoch, 1)))
    t.drops(E.BAD_VERSION, patched(ping, "major", 1))
    if t.barrier():
        raise Unmet("PONG alone", "other frames")
