"""Damage to frames: bits flipped, ends cut off, and forgeries whose checksums are right.

Called by `network`, with a generator of the fault's own, so that the same fault does the same damage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from random import Random
from struct import error as StructError
from typing import Any

from dspark_proto import LocalProtocolError, decode_frame, encode_frame
from dspark_proto.bodies import BodyDescriptor
from dspark_proto.checksums import body_checksum
from dspark_proto.frame import descriptors_of
from dspark_proto.messages import Completion, Row

_KEY_FIELDS = ("slot", "generation", "round")
_FREE = frozenset({"taps", "draft_us"})
"""Not forged: bytes that travel as a body, and a figure that decides nothing."""


def corrupted(frame: bytes, rng: Random) -> bytes:
    """One to three bits flipped; no checksum follows."""
    copy = bytearray(frame)
    for bit in rng.sample(range(8 * len(copy)), rng.randint(1, 3)):
        copy[bit >> 3] ^= 1 << (bit & 7)
    return bytes(copy)


def truncated(frame: bytes, rng: Random) -> bytes:
    """Its first bytes."""
    return frame[: rng.randrange(len(frame))]


def forged(frame: bytes, rng: Random) -> tuple[bytes, bool]:
    """One number of the key, of the message, of a STEP item or of a body changed, checksums right.

    Returns the frame, unchanged where nothing valid came of it, and whether its receiver must refuse it: a reply that
    names another round than the one that is awaited, by whatever field, is none.
    """
    decoded = decode_frame(frame)
    message, key, bodies = decoded.message, decoded.prefix.key, list(decoded.bodies)
    choice = rng.randrange(3)
    certain = isinstance(message, Row | Completion)
    try:
        if choice == 0:
            name = _KEY_FIELDS[rng.randrange(3)]
            key = replace(key, **{name: max(0, getattr(key, name) + _nudge(rng))})
        elif choice == 1 and bodies:
            message, certain = _with_other_body(message, bodies, rng), False
        else:
            message = _with_other_field(message, rng)
        return bytes(encode_frame(message, key, bodies)), certain
    except (LocalProtocolError, StructError):
        return frame, False  # no valid frame says that


def tainted_sessions(frame: bytes) -> Iterable[int]:
    """The sessions that a frame speaks of."""
    message: Any = decode_frame(frame).message
    if hasattr(message, "items"):
        return [item.session for item in message.items]
    return [message.session]


def _nudge(rng: Random) -> int:
    return rng.choice((-1, 1, 1, rng.getrandbits(6)))


def _with_other_field(message: Any, rng: Random) -> Any:
    """The message, or one item of a STEP, with one of its integers moved."""
    items = getattr(message, "items", ())
    if items:
        which = rng.randrange(len(items))
        changed = [*items]
        changed[which] = _with_other_field(items[which], rng)
        return replace(message, items=tuple(changed))
    names = [one.name for one in fields(message) if type(getattr(message, one.name)) in (int, bytes)]
    names = [name for name in names if name not in _FREE]
    name = names[rng.randrange(len(names))]
    value = getattr(message, name)
    if isinstance(value, bytes):
        return replace(message, **{name: bytes([value[0] ^ (1 << rng.randrange(8))]) + value[1:]})
    return replace(message, **{name: max(0, value + _nudge(rng))})


def _with_other_body(message: Any, bodies: list[Any], rng: Random) -> Any:
    """One bit of one body flipped, and its checksum made right; `bodies` is changed too."""
    which = rng.randrange(len(bodies))
    body = bytearray(bodies[which])
    body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
    bodies[which] = bytes(body)
    descriptors: list[BodyDescriptor] = list(descriptors_of(message))
    checksum = body_checksum(descriptors[which].checksum_kind, bodies[which])
    descriptors[which] = replace(descriptors[which], checksum=checksum)
    return replace(message, bodies=tuple(descriptors))
