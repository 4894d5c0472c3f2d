"""A whole reply, open to changes by row and column: how the harness, and the mutants, write rows that are wrong.

Offsets of records are SPEC.md 7.5 written out once more; the rest follows `rows.ReplyLayout`. Called by the verifier
families and by the mutants; never used to judge.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from struct import Struct

from ..bodies import describe
from ..checksums import body_checksum, crc32c
from ..frame import encode_frame
from ..messages import Row
from ..registry import Representation
from ..rows import ReplyLayout
from .as_drafter import HonestReply
from .drafted_rows import TOTAL, one_hot, pack

_INT, _WORD, _FLOAT = Struct("<i"), Struct("<I"), Struct("<f")
_SPAN = 16


@dataclass
class Block:
    """A whole reply, open to changes by row and column. Rows have two entries (one where the support is 1)."""

    data: bytearray
    layout: ReplyLayout
    vocab_size: int

    def token(self, row: int, value: int) -> None:
        """Set the drafted token."""
        _INT.pack_into(self.data, row * _SPAN, value)

    def entries(self, row: int, value: int) -> None:
        """Set the number of entries."""
        _WORD.pack_into(self.data, row * _SPAN + 4, value)

    def confidence(self, row: int, value: int) -> None:
        """Set the last word of the record."""
        _WORD.pack_into(self.data, row * _SPAN + 12, value)

    def crc(self, row: int, value: int) -> None:
        """Set the row's crc."""
        _WORD.pack_into(self.data, row * _SPAN + 8, value)

    def _cell(self, offset: int, row: int, column: int) -> int:
        return offset + (row * self.layout.width + column) * 4

    def id(self, row: int, column: int) -> int:
        """An id."""
        return int(_INT.unpack_from(self.data, self._cell(self.layout.ids_offset, row, column))[0])

    def set_id(self, row: int, column: int, value: int) -> None:
        """Set an id."""
        _INT.pack_into(self.data, self._cell(self.layout.ids_offset, row, column), value)

    def count(self, row: int, column: int) -> int:
        """A count."""
        at = self._cell(self.layout.q_offset, row, column)
        return int(_FLOAT.unpack_from(self.data, at)[0] * TOTAL)

    def set_count(self, row: int, column: int, value: float) -> None:
        """Set q to ``value`` / 2^24."""
        _FLOAT.pack_into(self.data, self._cell(self.layout.q_offset, row, column), value / TOTAL)

    def set_word(self, row: int, column: int, value: int) -> None:
        """Set the bits of a q."""
        _WORD.pack_into(self.data, self._cell(self.layout.q_offset, row, column), value)

    def word(self, row: int, column: int) -> int:
        """The bits of a q."""
        return int(_WORD.unpack_from(self.data, self._cell(self.layout.q_offset, row, column))[0])

    def seal(self) -> None:
        """Make every row crc right: the record without its crc, the ids, the q (REQ-ROW-3)."""
        for row in range(self.layout.depth):
            (start, _), *spans = self.layout.spans(row, 1)
            crc = crc32c(bytes(self.data[start : start + 8] + self.data[start + 12 : start + 16]))
            for offset, length in spans:
                crc = crc32c(bytes(self.data[offset : offset + length]), crc)
            self.crc(row, crc)


def layout_of(row: Row, vocab_size: int) -> ReplyLayout:
    """How a reply with this ROW is laid out."""
    return ReplyLayout(row.depth, row.support, vocab_size, row.representation is Representation.TOKENS)


def opened(reply: HonestReply, vocab_size: int) -> Block:
    """The block of an honest reply."""
    layout = layout_of(reply.row, vocab_size)
    return Block(bytearray(b"".join(reply.bodies)), layout, vocab_size)


def redrawn(reply: HonestReply, token: int, vocab_size: int) -> tuple[bytes, bytes]:
    """Another right reply under the same key: every draft is ``token``."""
    block, depth = opened(reply, vocab_size), reply.row.depth
    packed = pack([one_hot(token)] * depth, reply.row.support, vocab_size)
    block.data[block.layout.ids_offset :] = packed.ids + packed.q
    for row in range(depth):
        block.token(row, token)
        block.entries(row, packed.entries[row])
    block.seal()
    return rewritten(reply, block)


def rewritten(reply: HonestReply, block: Block) -> tuple[bytes, bytes]:
    """ROW and COMPLETION around another block, checksums right."""
    kind = reply.row.bodies[0].checksum_kind
    bodies = [bytes(block.data[start : start + length]) for start, length in block.layout.spans(0, block.layout.depth)]
    described = tuple(
        describe(old.kind, old.dtype, old.rows, old.entries, body, kind)
        for old, body in zip(reply.row.bodies, bodies, strict=True)
    )
    row = encode_frame(replace(reply.row, bodies=described), reply.key, bodies)
    return bytes(row), reply.with_completion(reply_checksum=body_checksum(kind, bytes(block.data)))
