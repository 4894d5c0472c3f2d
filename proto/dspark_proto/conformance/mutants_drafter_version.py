"""Drafters with one bug each in how they speak version 1 beside version 2. Called by `mutants_drafter`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

from ..bodies import describe
from ..canonical import decode_canonical
from ..checksums import body_checksum
from ..frame import Frame, encode_frame
from ..hello import Accept, Compatibility, Hello
from ..messages import Completion, Open, Row
from ..negotiation import compatibility_for
from ..registry import Lane, Representation, SupportPolicy, WireVersion
from ..rows import ReplyLayout
from . import repairs
from .blocks import Block
from .drafted_rows import one_hot, pack
from .facts import drafter_parameters, reference_facts
from .filters import VOCAB_SIZE, again, fields, on, read
from .forge import patched
from .mutants import Filter, Shell
from .reference_drafter import ReferenceDrafter

V1, V2 = int(WireVersion.V1_0), int(WireVersion.V2_0)
_GREEDY = 1 << (Lane.GREEDY - 1)
_LAST = {"version": V2}
"""Of the last HELLO at any connection, for the mutant that has one version for all."""


def _tokens_only(shell: Shell) -> bool:
    terms = shell.inner.connection.negotiated
    return terms is not None and terms.tokens_only


def _if_old(changes: Callable[[Accept], dict[str, Any]]) -> Filter:
    """Changes an ACCEPT of version 1."""
    return fields(Accept, lambda shell, accept: changes(accept) if accept.wire_version == V1 else {})


def _keep_capabilities(shell: Shell, frame: Frame) -> None:
    assert isinstance(frame.message, Hello)
    shell.memory["capabilities"] = frame.message.capabilities & 1


def _echo(shell: Shell, accept: Accept) -> dict[str, Any]:
    return {"capabilities": shell.memory["capabilities"]} if accept.wire_version == V1 else {}


def _forced(version: WireVersion) -> dict[str, Any]:
    """Fields of a HELLO that are right for ``version``."""
    compat = compatibility_for(reference_facts().compatibility, version).encoded()
    return {"wire_versions": (int(version),), "compat": compat, "compat_hash": sha256(compat).digest()}


def _overlooked(name: str, right: int) -> Filter:
    """One compatibility field of version 1 is not compared."""

    def change(shell: Shell, hello: Hello) -> dict[str, Any]:
        if hello.wire_versions != (V1,):
            return {}
        found = Compatibility.from_values(decode_canonical(hello.compat, "compat"))
        changes: dict[str, Any] = {name: right}
        compat = replace(found, **changes).encoded()
        return {"compat": compat, "compat_hash": sha256(compat).digest()}

    return fields(Hello, change)


def _by_compat(shell: Shell, hello: Hello) -> dict[str, Any]:
    """The version is that of compat, not the highest of both."""
    old = hello.compat == _forced(WireVersion.V1_0)["compat"] and V1 in hello.wire_versions
    return {"wire_versions": (V1,)} if old else {}


def _sticky(first: WireVersion) -> Filter:
    """Once ``first`` was spoken, it is spoken for ever."""

    def change(shell: Shell, hello: Hello) -> dict[str, Any]:
        shell.memory["stuck"] = shell.memory.get("stuck") or hello.wire_versions == (int(first),)
        if not shell.memory["stuck"] or hello.wire_versions == (int(first),):
            return {}
        size = 16 if first is WireVersion.V1_0 else 16 + 8 * hello.max_support
        return {**_forced(first), "reply_bytes": hello.max_depth * size, "capabilities": 0}

    return fields(Hello, change)


def _note_version(shell: Shell, frame: Frame) -> None:
    assert isinstance(frame.message, Hello)
    _LAST["version"] = max(frame.message.wire_versions)


def _retold(shell: Shell, frame: Frame, block: Block) -> list[bytes]:
    """ROW of version 1 around another block."""
    row, layout = frame.message, block.layout
    assert isinstance(row, Row)
    block.seal()
    kind = row.bodies[0].checksum_kind
    parts = [bytes(block.data[start : start + length]) for start, length in layout.spans(0, layout.depth)]
    shapes = [shape[:4] for shape in layout.shapes(layout.depth)]
    bodies = tuple(describe(*shape, part, kind) for shape, part in zip(shapes, parts, strict=True))
    shell.memory["block"] = bytes(block.data)
    told = replace(row, representation=layout.representation, bodies=bodies)
    return [bytes(encode_frame(told, frame.prefix.key, parts))]


def _changed_rows(change: Callable[[Shell, Frame], Block | None]) -> Filter:
    """Changes the ROWs of version 1, and the COMPLETION behind each."""

    def passed(shell: Shell, raw: bytes) -> list[bytes]:
        frame = read(raw)
        if frame is None:
            return [raw]
        message = frame.message
        if isinstance(message, Row) and message.representation is Representation.TOKENS:
            block = change(shell, frame)
            return [raw] if block is None else _retold(shell, frame, block)
        if isinstance(message, Completion) and "block" in shell.memory:
            block_bytes = shell.memory.pop("block")
            checksum = body_checksum(shell.inner.connection.negotiated.checksum, block_bytes)
            return [again(frame, replace(message, reply_bytes=len(block_bytes), reply_checksum=checksum))]
        return [raw]

    return passed


def _as_sparse(shell: Shell, frame: Frame) -> Block:
    """The tokens with ids and counts."""
    row, records = frame.message, bytes(frame.bodies[0])
    assert isinstance(row, Row)
    tokens = [int.from_bytes(records[at : at + 4], "little") for at in range(0, len(records), 16)]
    packed = pack([one_hot(token) for token in tokens], 1, VOCAB_SIZE)
    return Block(bytearray(records + packed.ids + packed.q), ReplyLayout(row.depth, 1), VOCAB_SIZE)


def _by_last_version(shell: Shell, frame: Frame) -> Block | None:
    return _as_sparse(shell, frame) if _LAST["version"] == V2 else None


def _second_time(shell: Shell, frame: Frame) -> Block | None:
    """A retry has another first token."""
    row, seen = frame.message, shell.memory.setdefault("seen", set())
    assert isinstance(row, Row)
    known = frame.prefix.key in seen
    seen.add(frame.prefix.key)
    layout = ReplyLayout(row.depth, 1, tokens_only=True)
    block = Block(bytearray(frame.bodies[0]), layout, VOCAB_SIZE)
    block.token(0, 500 if known else int.from_bytes(block.data[:4], "little"))
    return block if known else None


def _in_old(changes: dict[str, Any]) -> Filter:
    """OPEN of version 1 is made right."""
    return fields(Open, lambda shell, opened: changes if _tokens_only(shell) else {})


def _temperature(shell: Shell, opened: Open) -> dict[str, Any]:
    greedy = _tokens_only(shell) and opened.lane is Lane.GREEDY
    return {"draft_temperature_micro": 0} if greedy else {}


def _old_prefix(shell: Shell, raw: bytes) -> list[bytes]:
    """On a connection of version 1, frames may have its major too."""
    old = _tokens_only(shell) and repairs.sound(raw) and raw[4] == 1
    return [patched(raw, "major", 2) if old else raw]


def _shelled(incoming: Filter | None = None, outgoing: Filter | None = None) -> Shell:
    return Shell(ReferenceDrafter(drafter_parameters(reference_facts())), incoming, outgoing)


_INCOMING: tuple[tuple[str, str, Filter], ...] = (
    ("v1-any-lanes", "does not compare the lanes of version 1", _overlooked("lanes", _GREEDY)),
    ("v1-any-major", "does not compare the wire major of version 1", _overlooked("wire_major", 1)),
    ("v1-by-compat", "takes the version of compat", fields(Hello, _by_compat)),
    ("v1-any-lane", "drafts in any lane of version 1", _in_old({"lane": Lane.GREEDY})),
    ("v1-any-temperature", "drafts at any temperature of version 1", fields(Open, _temperature)),
    ("v1-any-support", "takes any support in version 1", _in_old({"support": SupportPolicy.K1})),
    ("v1-for-ever", "stays with version 1", _sticky(WireVersion.V1_0)),
    ("v2-for-ever", "stays with version 2", _sticky(WireVersion.V2_0)),
    ("v1-prefix", "takes prefixes of major 1 in version 1", _old_prefix),
)

_OUTGOING: tuple[tuple[str, str, Filter], ...] = (
    ("v1-upgrades", "calls version 1 version 2", _if_old(lambda accept: {"wire_version": V2})),
    (
        "v1-bytes",
        "has reply bytes of version 2 in version 1",
        _if_old(lambda accept: {"reply_bytes": accept.max_depth * (16 + 8 * accept.max_support)}),
    ),
    ("v1-rows", "sends ids and counts in version 1", _changed_rows(_as_sparse)),
    ("v1-redraws", "drafts again on a retry of version 1", _changed_rows(_second_time)),
)

KINDS: tuple[tuple[str, str, Callable[[], Any]], ...] = (
    *((name, bug, partial(_shelled, incoming=change)) for name, bug, change in _INCOMING),
    *((name, bug, partial(_shelled, outgoing=change)) for name, bug, change in _OUTGOING),
    (
        "v1-capabilities",
        "has capabilities in version 1",
        partial(_shelled, on(Hello, _keep_capabilities), fields(Accept, _echo)),
    ),
    (
        "one-version",
        "has one version for all connections",
        partial(_shelled, on(Hello, _note_version), _changed_rows(_by_last_version)),
    ),
)
