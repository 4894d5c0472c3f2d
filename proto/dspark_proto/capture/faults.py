"""Faults that the man in the middle injects, and the rules that choose the frames.

A rule is `ACTION,key=value,...`. Actions: delay (ms), drop, duplicate (copies), reorder (behind: how many later frames
overtake), corrupt (where: prefix, control, body or any; fix=1 recomputes the checksums over the damage), truncate
(keep bytes). Keys that choose: dir=up|down, type=ROW, slot, conn, nth, every, p. Invariants: chance comes from one
seeded generator, so a seed repeats a run on the same frames; a fault says in words what it changed; a rule that cannot
apply to a frame (no such part) leaves it alone and is not counted. Called by ``middle``; sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from struct import pack_into
from typing import Final

from ..buffers import aligned
from ..checksums import body_checksum, crc32c
from ..frame import descriptors_of, encode_frame
from ..limits import PREFIX_BYTES, SLOT_NONE
from ..prefix import Key
from ..registry import MessageType
from .checks import Examination
from .records import Direction

_CONTROL_CRC_AT: Final = 40
_PREFIX_CRC_AT: Final = 44
_MAGIC_BYTES: Final = 4
_NS_PER_MS: Final = 1_000_000


class RuleError(ValueError):
    """A rule cannot be read; the message says what to write instead."""


class Action(StrEnum):
    """What is done to a frame."""

    DELAY = "delay"
    DROP = "drop"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    CORRUPT = "corrupt"
    TRUNCATE = "truncate"


_FIXABLE: Final = ("prefix", "control", "body")
_PARTS: Final = ("any", *_FIXABLE)
_INTEGERS: Final = ("slot", "conn", "nth", "every", "ms", "copies", "behind", "keep", "fix")


@dataclass(slots=True)
class Rule:
    """One rule and how many frames it has seen. None means "any"."""

    action: Action
    direction: Direction | None = None
    type: MessageType | None = None
    slot: int | None = None
    conn: int | None = None
    nth: int | None = None
    every: int | None = None
    p: float = 1.0
    ms: int = 20
    copies: int = 2
    behind: int = 1
    where: str = "any"
    fix: int = 0
    keep: int | None = None
    seen: int = field(default=0, init=False)

    def chooses(self, found: Examination, direction: Direction, connection: int, random: Random) -> bool:
        """Whether the rule takes this frame; counts the frames that fit its keys."""
        prefix = found.prefix
        fits = (
            self.direction in (None, direction)
            and self.conn in (None, connection)
            and (self.type is None or (prefix is not None and prefix.type is self.type))
            and (self.slot is None or (prefix is not None and prefix.slot == self.slot))
        )
        if not fits:
            return False
        self.seen += 1
        if self.nth is not None and self.seen != self.nth:
            return False
        if self.every is not None and self.seen % self.every:
            return False
        return self.p >= 1.0 or random.random() < self.p


def parse_rule(text: str) -> Rule:
    """The rule in ``text``. Raises :class:`RuleError`."""
    name, *pairs = text.strip().split(",")
    if name not in list(Action):
        raise RuleError(f"{text!r}: begin with one of {', '.join(Action)}")
    rule = Rule(Action(name))
    for pair in pairs:
        key, separator, value = pair.strip().partition("=")
        if not separator:
            raise RuleError(f"{text!r}: write {key}=value")
        _set(rule, key, value, text)
    return rule


def _set(rule: Rule, key: str, value: str, text: str) -> None:
    try:
        if key == "dir":
            rule.direction = Direction[value.upper()]
        elif key == "type":
            rule.type = MessageType[value.upper()]
        elif key == "p":
            rule.p = float(value)
        elif key == "where" and value in _PARTS:
            rule.where = value
        elif key in _INTEGERS:
            setattr(rule, key, _whole(value, minimum=1 if key in ("nth", "every", "copies", "behind") else 0))
        else:
            raise RuleError(f"{text!r}: {key}={value} is not known")
    except (KeyError, ValueError) as error:
        raise RuleError(f"{text!r}: {key}={value} is not usable") from error


def _whole(value: str, minimum: int) -> int:
    number = int(value)
    if number < minimum:
        raise ValueError(value)
    return number


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of one frame: these frames are delivered, so much later, or behind so many others."""

    frames: tuple[bytes, ...]
    what: str = ""
    delay_ns: int = 0
    behind: int = 0


def apply(rule: Rule, frame: bytes, found: Examination, random: Random) -> Outcome | None:
    """What ``rule`` makes of ``frame``; None when the frame has no part that the rule could hurt."""
    match rule.action:
        case Action.DROP:
            return Outcome((), "dropped")
        case Action.DELAY:
            return Outcome((frame,), f"delayed by {rule.ms} ms", delay_ns=rule.ms * _NS_PER_MS)
        case Action.DUPLICATE:
            return Outcome((frame,) * rule.copies, f"sent {rule.copies} times")
        case Action.REORDER:
            return Outcome((frame,), f"held back behind {rule.behind} later frames", behind=rule.behind)
        case Action.TRUNCATE:
            return _truncate(rule, frame, random)
        case Action.CORRUPT:
            return _corrupt(rule, frame, found, random)


def _truncate(rule: Rule, frame: bytes, random: Random) -> Outcome | None:
    keep = random.randrange(len(frame)) if rule.keep is None and frame else rule.keep or 0
    if keep >= len(frame):
        return None
    return Outcome((frame[:keep],), f"cut from {len(frame)} to {keep} bytes")


def _corrupt(rule: Rule, frame: bytes, found: Examination, random: Random) -> Outcome | None:
    parts = _parts(frame, found)
    names = [name for name, places in parts.items() if places and rule.where in ("any", name)]
    if not names:
        return None
    name = random.choice(names)
    place, bit = random.choice(parts[name]), random.randrange(8)
    damaged = bytearray(frame)
    damaged[place] ^= 1 << bit
    text = f"bit {bit} of byte {place} ({name}) flipped"
    if rule.fix and name in _FIXABLE and found.fault is None:
        damaged, text = _fixed(damaged, found, name), text + ", checksums made to fit"
    return Outcome((bytes(damaged),), text)


def _parts(frame: bytes, found: Examination) -> dict[str, range]:
    """Bytes that may be flipped, by part; magic, crcs and padding are left alone, for their loss hides the rest."""
    prefix = found.prefix
    if prefix is None or found.fault is not None:
        return {"frame": range(len(frame))}
    parts = {
        "prefix": range(_MAGIC_BYTES, _CONTROL_CRC_AT),
        "control": range(PREFIX_BYTES, PREFIX_BYTES + prefix.control_bytes),
    }
    largest = max(_body_ranges(found), key=len, default=range(0))
    return parts | {"body": largest}


def _body_ranges(found: Examination) -> list[range]:
    """Where each body lies in the frame, without its padding."""
    assert found.prefix is not None
    start, ranges = found.prefix.frame_bytes - found.prefix.body_bytes, []
    for body in found.bodies:
        ranges.append(range(start, start + len(body)))
        start += aligned(len(body))
    return ranges


def _fixed(damaged: bytearray, found: Examination, part: str) -> bytearray:
    """``damaged`` with the checksums over the damaged part recomputed; ``found`` is the frame before the damage."""
    prefix = found.prefix
    assert prefix is not None
    if part == "body":
        return _described_anew(damaged, found, prefix.key)
    control = damaged[PREFIX_BYTES : PREFIX_BYTES + prefix.control_bytes]
    pack_into("<I", damaged, _CONTROL_CRC_AT, crc32c(bytes(control)))
    pack_into("<I", damaged, _PREFIX_CRC_AT, crc32c(bytes(damaged[:_PREFIX_CRC_AT])))
    return damaged


def _described_anew(damaged: bytearray, found: Examination, key: Key) -> bytearray:
    """The same bodies, damage included, under descriptors whose checksums fit."""
    assert found.message is not None
    bodies = [bytes(damaged[place.start : place.stop]) for place in _body_ranges(found)]
    fitting = tuple(
        replace(descriptor, checksum=body_checksum(descriptor.checksum_kind, body))
        for descriptor, body in zip(descriptors_of(found.message), bodies, strict=True)
    )
    fixed = replace(found.message, bodies=fitting)  # type: ignore[type-var]  # every message is a dataclass
    return bytearray(encode_frame(fixed, key, bodies))


def subject(found: Examination) -> str:
    """The frame that a fault concerns, in a few words."""
    if found.prefix is None:
        return f"an unusable frame of {found.length} bytes"
    prefix = found.prefix
    key = "" if prefix.slot == SLOT_NONE else f" slot {prefix.slot} generation {prefix.generation} round {prefix.round}"
    return f"{prefix.type.name}{key}, {found.length} bytes"
