"""Replies of a lying worker: every checksum right, the values arbitrary.

Damage is found by checksums, so only these reach the checks behind them. SPEC.md, section "ROW" (records, row
crc) and "COMPLETION" (reply checksum). Called by ``mutator``.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from struct import Struct
from typing import Final, cast

from ..bodies import BodyDescriptor
from ..checksums import body_checksum, crc32c
from ..frame import decode_frame, encode_frame
from ..messages import Completion, Row
from .byte_mutations import EDGES
from .specimens import Specimen

_RECORD: Final = Struct("<IIII")
_UNDER_CRC: Final = Struct("<III")
_U32: Final = 1 << 32


def forged_reply(rng: Random, row: Specimen, completion: Specimen) -> list[bytes]:
    """``row`` with changed values and the ``completion`` that goes with it.

    ``row`` must carry a whole sparse reply (three bodies); ``completion`` answers the same key.
    """
    decoded, closing = decode_frame(row.frame), decode_frame(completion.frame)
    bodies = [bytearray(body) for body in decoded.bodies]
    _change(rng, bodies)
    message, last = cast(Row, decoded.message), cast(Completion, closing.message)
    descriptors = tuple(_redone(one, body) for one, body in zip(message.bodies, bodies, strict=True))
    checksum = body_checksum(descriptors[0].checksum_kind, b"".join(bodies))
    frames = (
        encode_frame(replace(message, bodies=descriptors), decoded.prefix.key, bodies),
        encode_frame(replace(last, reply_checksum=checksum), closing.prefix.key),
    )
    return [bytes(frame) for frame in frames]


def _redone(descriptor: BodyDescriptor, body: bytearray) -> BodyDescriptor:
    return replace(descriptor, checksum=body_checksum(descriptor.checksum_kind, body))


def _change(rng: Random, bodies: list[bytearray]) -> None:
    """One record, id or q becomes arbitrary; then the crc of every row is right again."""
    records, ids, q = bodies
    rows = len(records) // _RECORD.size
    chosen = rng.randrange(rows)
    values = rng.choice((ids, q))
    places = (
        (records, chosen * _RECORD.size + rng.choice((0, 4, 12))),
        (values, rng.randrange(len(values) // 4) * 4),
    )
    target, at = rng.choice(places)
    target[at : at + 4] = (rng.choice(EDGES) % _U32).to_bytes(4, "little")
    width = len(ids) // rows
    for row in range(rows):
        token, entries, _, confidence = _RECORD.unpack_from(records, row * _RECORD.size)
        crc = crc32c(_UNDER_CRC.pack(token, entries, confidence))
        for body in (ids, q):
            crc = crc32c(bytes(body[row * width : (row + 1) * width]), crc)
        _RECORD.pack_into(records, row * _RECORD.size, token, entries, crc, confidence)
