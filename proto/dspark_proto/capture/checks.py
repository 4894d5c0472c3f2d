"""The checks of one frame in order of trust, and where a receiver stops.

The codec is the judge; this module only says which of its checks passed, which one failed and which were not reached,
so a tool cannot disagree with the connections. Invariants: nothing behind the first fault is decoded; of an
unchecked prefix only ``unchecked_fields`` speaks, for a person to look at. Spec: SPEC.md, sections "Prefix" and "Whole
frame". Called by ``explain``, ``middle`` and ``replay``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from struct import Struct
from typing import Final

from ..buffers import Buffer, byte_view
from ..errors import RemoteProtocolError
from ..frame import body_views, check_body, decode_control, descriptors_of
from ..limits import PREFIX_BYTES
from ..messages import Message
from ..prefix import Prefix, read_prefix
from ..registry import ErrorCode, Scope

_PREFIX: Final = Struct("<4sBBBBIHHQQIIII")


class Stage(StrEnum):
    """Part of a frame that a check looks at."""

    PREFIX = "prefix"
    CONTROL = "control"
    BODIES = "bodies"


class Verdict(StrEnum):
    """Outcome of one check."""

    PASSED = "passed"
    FAILED = "FAILED"
    NOT_REACHED = "not reached"


@dataclass(frozen=True, slots=True)
class Rung:
    """One check of the ladder: what must hold, its requirement, and the codec's words for its failure."""

    title: str
    anchor: str
    stage: Stage
    code: ErrorCode
    where: str = ""
    """When not empty, the ``where`` of the codec's error; it tells two checks of one code apart."""


LADDER: Final = (
    Rung("48 bytes are there", "REQ-PFX-1", Stage.PREFIX, ErrorCode.WRONG_SIZE, "prefix"),
    Rung("magic is DSPK", "REQ-PFX-2", Stage.PREFIX, ErrorCode.BAD_MAGIC),
    Rung("prefix crc", "REQ-PFX-3", Stage.PREFIX, ErrorCode.BAD_PREFIX_CRC),
    Rung("major version is 2", "REQ-PFX-4", Stage.PREFIX, ErrorCode.BAD_VERSION),
    Rung("type is registered", "REQ-PFX-5", Stage.PREFIX, ErrorCode.UNKNOWN_TYPE),
    Rung("flags and reserved are 0", "REQ-PFX-6", Stage.PREFIX, ErrorCode.RESERVED_NOT_ZERO),
    Rung("lengths and counts are within limits", "REQ-PFX-7", Stage.PREFIX, ErrorCode.LIMIT_EXCEEDED),
    Rung("body length fits the body count", "REQ-PFX-8", Stage.PREFIX, ErrorCode.WRONG_SIZE, "prefix.body_length"),
    Rung("the frame has the length that its prefix says", "REQ-FRM-1", Stage.CONTROL, ErrorCode.WRONG_SIZE),
    Rung("control crc", "REQ-CRC-2", Stage.CONTROL, ErrorCode.BAD_CONTROL_CRC),
    Rung("control is canonical", "REQ-CAN-1", Stage.CONTROL, ErrorCode.NONCANONICAL),
    Rung("fields have their types and ranges", "REQ-CAN-4", Stage.CONTROL, ErrorCode.BAD_FIELD),
    Rung("padding after control is zero", "REQ-FRM-3", Stage.CONTROL, ErrorCode.BAD_PADDING),
    Rung("descriptors describe the bodies", "REQ-FRM-4", Stage.CONTROL, ErrorCode.BAD_DESCRIPTOR),
    Rung("padding after bodies is zero", "REQ-FRM-3", Stage.BODIES, ErrorCode.BAD_PADDING),
    Rung("body checksums", "REQ-CRC-3", Stage.BODIES, ErrorCode.BAD_BODY_CHECKSUM),
)


@dataclass(frozen=True, slots=True)
class Check:
    """One rung and its outcome."""

    rung: Rung
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Fault:
    """The first fault of a frame: the codec's code and place, and the requirement that is broken."""

    code: ErrorCode
    where: str
    scope: Scope
    anchor: str


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found in a frame, as far as it can be trusted: None and () where it cannot."""

    length: int
    prefix: Prefix | None
    message: Message | None
    bodies: tuple[memoryview, ...] = field(repr=False)
    fault: Fault | None
    checks: tuple[Check, ...]


def examine(frame: Buffer) -> Examination:
    """Run every check on ``frame``. Never raises for its bytes."""
    view = byte_view(frame)
    prefix: Prefix | None = None
    message: Message | None = None
    bodies: list[memoryview] = []
    stage = Stage.PREFIX
    try:
        prefix = read_prefix(view)
        stage = Stage.CONTROL
        message = decode_control(prefix, view)
        stage = Stage.BODIES
        padded = body_views(prefix, message, view)
        bodies.extend(check_body(*one) for one in zip(descriptors_of(message), padded, strict=True))
    except RemoteProtocolError as error:
        rung = _rung_of(stage, error)
        fault = Fault(error.code, error.where, error.scope, rung.anchor)
        return Examination(len(view), prefix, message, (), fault, _verdicts(rung))
    return Examination(len(view), prefix, message, tuple(bodies), None, _verdicts(None))


def unchecked_fields(frame: Buffer) -> dict[str, int | str]:
    """The prefix fields of a frame whose prefix may be damaged; empty below 48 bytes."""
    if len(frame) < PREFIX_BYTES:
        return {}
    names = (
        "magic", "major", "minor", "type", "flags", "control_bytes", "body_count", "reserved", "body_bytes",
        "generation", "slot", "round", "control_crc", "prefix_crc",
    )  # fmt: skip
    magic, *numbers = _PREFIX.unpack_from(frame)
    return dict(zip(names, (magic.hex(), *numbers), strict=True))


def _rung_of(stage: Stage, error: RemoteProtocolError) -> Rung:
    for rung in LADDER:
        if (rung.stage, rung.code) == (stage, error.code) and rung.where in ("", error.where):
            return rung
    raise AssertionError(f"the codec has a check without a rung: {error}")


def _verdicts(failed: Rung | None) -> tuple[Check, ...]:
    if failed is None:
        return tuple(Check(rung, Verdict.PASSED) for rung in LADDER)
    at = LADDER.index(failed)
    outcomes = [Verdict.PASSED] * at + [Verdict.FAILED] + [Verdict.NOT_REACHED] * (len(LADDER) - at - 1)
    return tuple(map(Check, LADDER, outcomes))
