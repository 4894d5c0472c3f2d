"""Good frames taken apart: what the mutations need to know about where things are.

A frame whose control cannot be taken apart (the golden refusals) has no elements and is only bent bytewise.
Called by ``mutator`` and ``campaign``, which draws from a :class:`Pool`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from struct import unpack_from
from typing import Final

from ..bodies import BodyDescriptor
from ..errors import RemoteProtocolError
from ..frame import decode_frame, descriptors_of
from ..limits import PREFIX_BYTES
from ..registry import MessageType
from .encoding import BODY_LENGTH_AT, CONTROL_LENGTH_AT, Element, scan
from .pair import Parcel, Side

_TYPE_AT: Final = 6

PREFIX_FIELDS: Final[tuple[tuple[str, int, str], ...]] = (
    ("magic", 0, "<I"),
    ("major", 4, "<B"),
    ("minor", 5, "<B"),
    ("type", 6, "<B"),
    ("flags", 7, "<B"),
    ("control_length", 8, "<I"),
    ("body_count", 12, "<H"),
    ("reserved", 14, "<H"),
    ("body_length", 16, "<Q"),
    ("generation", 24, "<Q"),
    ("slot", 32, "<I"),
    ("round", 36, "<I"),
    ("control_crc", 40, "<I"),
    ("prefix_crc", 44, "<I"),
)
"""(name, offset, struct format) of every prefix field. SPEC.md, section "Prefix"."""


def type_of(frame: bytes) -> int:
    """The id of the message type in a frame's prefix; 0, which is no type, when it is too short for one."""
    return frame[_TYPE_AT] if len(frame) > _TYPE_AT else 0


@dataclass(frozen=True)
class Specimen:
    """One frame. ``to`` is who would receive it; ``elements`` are those of its control block, outer first."""

    to: Side
    frame: bytes
    elements: tuple[Element, ...]
    descriptors: tuple[BodyDescriptor, ...]

    @property
    def type(self) -> int:
        """The message type's id; 0 when the frame is too short for one."""
        return type_of(self.frame)

    @cached_property
    def control(self) -> bytes:
        """The control block."""
        return self.frame[PREFIX_BYTES : PREFIX_BYTES + self._declared(CONTROL_LENGTH_AT, 4)]

    @cached_property
    def bodies(self) -> bytes:
        """All bodies with their padding."""
        length = self._declared(BODY_LENGTH_AT, 8)
        return self.frame[max(0, len(self.frame) - length) :] if length else b""

    def _declared(self, at: int, size: int) -> int:
        """A length in the prefix; 0 when there is no whole prefix."""
        return int.from_bytes(self.frame[at : at + size], "little") if len(self.frame) >= PREFIX_BYTES else 0

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        """Offsets at which a field, an element, a body or padding begins."""
        inside = {PREFIX_BYTES + at for one in self.elements for at in (one.start, one.content, one.end)}
        prefix = {at for _, at, _ in PREFIX_FIELDS} | {PREFIX_BYTES}
        bodies = {len(self.frame) - len(self.bodies), len(self.frame) - 1}
        return tuple(sorted(at for at in inside | prefix | bodies if 0 <= at <= len(self.frame)))

    @cached_property
    def descriptor_elements(self) -> tuple[int, ...]:
        """Indices of the elements that are body descriptors, in order."""
        if not self.descriptors:
            return ()
        last_list = max(index for index, one in enumerate(self.elements) if one.parent == 0)
        return tuple(index for index, one in enumerate(self.elements) if one.parent == last_list)


def specimen_of(to: Side, frame: bytes) -> Specimen:
    """Take ``frame`` apart as far as that goes."""
    try:
        message = decode_frame(frame).message
        (length,) = unpack_from("<I", frame, CONTROL_LENGTH_AT)
        elements = scan(frame[PREFIX_BYTES : PREFIX_BYTES + length])
    except (RemoteProtocolError, ValueError):
        return Specimen(to, frame, (), ())
    return Specimen(to, frame, elements, descriptors_of(message))


class Pool:
    """All specimens; those that could be taken apart (``apart``), and these by message type."""

    def __init__(self, found: Iterable[Specimen]) -> None:
        self.all = tuple(found)
        self.apart = tuple(one for one in self.all if one.elements)
        self.by_type: dict[int, list[Specimen]] = {}
        for one in self.apart:
            self.by_type.setdefault(one.type, []).append(one)
        self.by_side = {side: tuple(one for one in self.all if one.to is side) for side in Side}


_TO_VERIFIER: Final = frozenset(
    {
        MessageType.ACCEPT,
        MessageType.REJECT,
        MessageType.CHALLENGE,
        MessageType.ROW,
        MessageType.COMPLETION,
        MessageType.DRAIN,
    }
)


def golden(vectors: Path) -> list[Specimen]:
    """The frames of ``frames.json`` and ``refusals.json`` in ``vectors``."""
    frames = []
    for suite in ("frames", "refusals"):
        document = json.loads((vectors / f"{suite}.json").read_text("utf-8"))
        frames += [bytes.fromhex(vector["frame_hex"]) for vector in document["vectors"]]
    return [specimen_of(_receiver(frame), frame) for frame in frames]


def _receiver(frame: bytes) -> Side:
    return Side.VERIFIER if type_of(frame) in _TO_VERIFIER else Side.DRAFTER


def specimens(parcels: Iterable[Parcel]) -> list[Specimen]:
    """Specimens of recorded frames."""
    return [specimen_of(parcel.to, parcel.frame) for parcel in parcels]
