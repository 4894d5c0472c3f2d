"""Frames and captures in plain English.

A frame is explained in the order in which a receiver trusts it: prefix, control, bodies, then remarks about meaning;
behind the first fault nothing is decoded, and the fault is named with its code, its scope and the requirement that it
breaks. Invariants: any bytes can be explained; output is printable ASCII whatever was received. Called by the command
line and by tests; changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from ..buffers import Buffer
from ..limits import SLOT_NONE
from .checks import Examination, Verdict, examine, unchecked_fields
from .contents import body_lines, field_lines, remarks
from .reader import CaptureReader
from .records import Direction, Entry, EntryKind

_ARROWS: Final = {Direction.UP: "V -> D", Direction.DOWN: "D -> V"}
_HEX_SHOWN: Final = 32
_NS_PER_MS: Final = 1e6


def explain_frame(frame: Buffer, all_checks: bool = False) -> list[str]:
    """Lines that say what ``frame`` is; with ``all_checks`` also every check that passed."""
    found = examine(frame)
    lines = [headline(found), *_prefix_lines(found, frame)]
    if found.message is not None:
        lines += [f"  control  {line}" for line in field_lines(found.message)]
    if found.message is not None and found.fault is None:
        lines += [f"  body     {line}" for line in body_lines(found.message, found.bodies)]
        lines += [f"  remark   {line}" for line in remarks(found.message, found.bodies)]
    return [*lines, *_check_lines(found, all_checks)]


def headline(found: Examination) -> str:
    """`STEP slot 1 generation 1 round 1, 256 bytes`, or what stopped a receiver."""
    if found.prefix is None:
        assert found.fault is not None
        return f"unusable frame ({found.fault.code.name}), {found.length} bytes"
    prefix = found.prefix
    key = "no key"
    if prefix.slot != SLOT_NONE:
        key = f"slot {prefix.slot} generation {prefix.generation} round {prefix.round}"
    refused = f", refused: {found.fault.code.name}" if found.fault else ""
    return f"{prefix.type.name} {key}, {found.length} bytes{refused}"


def _prefix_lines(found: Examination, frame: Buffer) -> list[str]:
    prefix = found.prefix
    if prefix is not None:
        return [
            f"  prefix   control {prefix.control_bytes} B, bodies {prefix.body_count} in {prefix.body_bytes} B, "
            f"control crc {prefix.control_crc:08x}"
        ]
    fields = ", ".join(f"{name} {value}" for name, value in unchecked_fields(frame).items())
    lines = [f"  untrusted {fields}"] if fields else []
    return [*lines, f"  bytes    {bytes(frame[:_HEX_SHOWN]).hex(' ')}"]


def _check_lines(found: Examination, all_checks: bool) -> list[str]:
    passed = sum(check.verdict is Verdict.PASSED for check in found.checks)
    lines = []
    if all_checks:
        lines = [
            f"  check    {check.verdict.value:11} {check.rung.title} ({check.rung.anchor})" for check in found.checks
        ]
    if found.fault is None:
        return [*lines, f"  checks   {passed} of {len(found.checks)} passed"]
    fault = found.fault
    return [
        *lines,
        f"  checks   {passed} passed, then {fault.code.name} at {fault.where}: breaks {fault.anchor}",
        f"           a receiver stops here and drops the {fault.scope.name.lower()}",
    ]


def explain_capture(reader: CaptureReader, brief: bool = False, all_checks: bool = False) -> Iterator[str]:
    """Lines about a whole capture: who made it, every record, and a census; ``brief`` gives a line per record."""
    description = reader.description
    yield f"capture by {description.tool}, clock {description.clock}, roles {description.roles}"
    if description.comment:
        yield f"comment: {description.comment}"
    census: Counter[str] = Counter()
    for number, entry in enumerate(reader, 1):
        head, *rest = _entry_lines(entry, all_checks)
        yield f"#{number} {entry.t_ns / _NS_PER_MS:.3f} ms {_place(entry)}  {head}"
        if not brief:
            yield from rest
        census[_sort(entry)] += 1
    yield "totals: " + (", ".join(f"{count} {name}" for name, count in sorted(census.items())) or "no record")
    if reader.ending:
        yield f"the capture ends early: {reader.ending}"


def _place(entry: Entry) -> str:
    return f"{entry.transport.name.lower()} #{entry.connection} {_ARROWS[entry.direction]}"


def _entry_lines(entry: Entry, all_checks: bool) -> list[str]:
    if entry.kind is EntryKind.NOTE:
        return ["note: " + "".join(c if c.isascii() and c.isprintable() else "?" for c in _text(entry))]
    return explain_frame(entry.content, all_checks)


def _text(entry: Entry) -> str:
    return entry.content.decode("ascii", "replace")


def _sort(entry: Entry) -> str:
    if entry.kind is EntryKind.NOTE:
        return "notes"
    found = examine(entry.content)
    if found.fault is not None:
        return f"refused with {found.fault.code.name}"
    assert found.prefix is not None
    return found.prefix.type.name
