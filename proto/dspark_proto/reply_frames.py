"""The ROW frames of a slot's replies: encoded once, then filled again for every round.

Of a ROW nothing changes from round to round but its key, its rows and their checksums, all of fixed size. So the frames
of a layout are encoded once, like every other frame, into the slot's storage; a reply then writes its rows where they
travel, and the key, the checksums and the crcs that cover them over the old ones. Invariants: nothing is allocated for
frames or rows after the first reply of a session; every byte is what ``encode_frame_into`` would have written. Spec:
SPEC.md, section "ROW". Called by ``DrafterConnection``, which owns the storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .bodies import BodyDescriptor
from .buffers import ZEROS, aligned
from .canonical import encode_canonical
from .checksums import BODY_CHECKSUM_BYTES, NO_CHECKSUM, body_checksum, pieces_checksum
from .frame import body_views, encode_frame_into
from .limits import PREFIX_BYTES
from .messages import Row
from .native import Blank
from .prefix import Key, Keyed, Prefix, read_prefix, rewrite_key
from .registry import Checksum
from .rows import Columns, ReplyLayout, check_columns, fill_rows, write_records


@dataclass(frozen=True, slots=True)
class _RowFrame:
    """One encoded ROW: views of its bodies without padding, and where its control has their checksums.

    ``blank`` is all that comes before the bodies, ``padding`` the zeros behind each; ``plan`` is what the compiled
    codec has to know to fill it.
    """

    frame: memoryview
    blank: bytes
    control_bytes: int
    rows: slice
    bodies: tuple[memoryview, ...]
    padding: tuple[memoryview, ...]
    checksums: tuple[slice, ...]
    plan: Blank


class ReplyFrames:
    """The ROWs of replies of one layout to one session, in ``storage``; ``rest`` is what they leave of it.

    ``frames`` are theirs; where it is one, ``only`` is what ``fill_reply`` has to know of it.
    Frames of several layouts may share a storage: see ``restore``.
    """

    def __init__(self, storage: memoryview, layout: ReplyLayout, session: int, epoch: int, checksum: Checksum) -> None:
        self.layout: Final = layout
        self._checksum = checksum
        self._no_bytes = storage[:0]
        self._rows: list[_RowFrame] = []
        self.rest = storage
        step = layout.rows_per_frame
        for first in range(0, layout.depth, step):
            self._encode(blank_row(layout, session, epoch, checksum, first, min(step, layout.depth - first)))
        self.frames: Final = tuple(one.frame for one in self._rows)
        self.only: Final = self._rows[0].plan if len(self._rows) == 1 else None
        kinds = range(len(self._rows[0].bodies))
        self._pieces = [one.bodies[kind] for kind in kinds for one in self._rows]

    def _encode(self, row: Row) -> None:
        bodies = [bytes(body.body_bytes) for body in row.bodies]
        frame = self.rest[: encode_frame_into(self.rest, row, Key(), bodies)]
        prefix = read_prefix(frame)
        views = body_views(prefix, row, frame)
        checksums = tuple(checksum_places(PREFIX_BYTES + prefix.control_bytes, row.bodies))
        self._rows.append(
            _RowFrame(
                frame,
                bytes(frame[: len(frame) - prefix.body_bytes]),
                prefix.control_bytes,
                slice(row.first_row, row.first_row + row.row_count),
                tuple(view[: body.body_bytes] for view, body in zip(views, row.bodies, strict=True)),
                tuple(view[body.body_bytes :] for view, body in zip(views, row.bodies, strict=True)),
                checksums,
                _plan(prefix, row, len(frame), checksums),
            )
        )
        self.rest = self.rest[len(frame) :]

    def restore(self) -> None:
        """The storage has held the frames of another layout: bring back what ``fill`` does not write."""
        for one in self._rows:
            one.frame[: len(one.blank)] = one.blank
            for padding in one.padding:
                padding[:] = ZEROS[: len(padding)]

    def fill(self, index: int, key: Keyed, ids: memoryview, q: memoryview, columns: Columns) -> memoryview:
        """Frame ``index`` of a reply under ``key``, whose arrays ``checked_arrays`` gave.

        Raises :class:`LocalProtocolError` BAD_ROW_RECORD, whichever row has it: who got one frame gets all.
        """
        one = self._rows[index]
        if not fill_rows(one.frame, one.plan, ids, q, self.layout, key, columns):
            check_columns(self.layout, columns)
            self._write_rows(one, ids, q, tuple(column[one.rows] for column in columns))
            for place, body in zip(one.checksums, one.bodies, strict=True):
                one.frame[place] = body_checksum(self._checksum, body)
            rewrite_key(one.frame, key, one.control_bytes)
        return one.frame

    def _write_rows(self, one: _RowFrame, ids: memoryview, q: memoryview, columns: Columns) -> None:
        """Copy the rows' ids and q, and write the records over them. A layout may have no ids, or no q either."""
        ids_row, q_row = self.layout.ids_row_bytes, self.layout.row_bytes
        ids_part = q_part = self._no_bytes
        if ids_row:
            ids_part = one.bodies[1]
            ids_part[:] = ids[one.rows.start * ids_row : one.rows.stop * ids_row]
        if q_row:
            q_part = one.bodies[-1]
            q_part[:] = q[one.rows.start * q_row : one.rows.stop * q_row]
        write_records(one.bodies[0], ids_part, q_part, self.layout, columns)

    def checksum(self) -> bytes:
        """The reply checksum: all records, then all ids, then all q."""
        return pieces_checksum(self._checksum, self._pieces)


def blank_row(layout: ReplyLayout, session: int, epoch: int, checksum: Checksum, first_row: int, row_count: int) -> Row:
    """The ROW of some rows, without the checksums of its bodies."""
    bodies = tuple(BodyDescriptor(*shape, checksum, NO_CHECKSUM) for shape in layout.shapes(row_count))
    return Row(session, epoch, first_row, row_count, layout.depth, layout.support, layout.representation, bodies)


def _plan(prefix: Prefix, row: Row, frame_bytes: int, checksums: tuple[slice, ...]) -> Blank:
    """See :data:`Blank`."""
    start = frame_bytes - prefix.body_bytes
    places: list[int] = []
    for body, checksum in zip(row.bodies, checksums, strict=True):
        places += (start, checksum.start)
        start += aligned(body.body_bytes)
    kind = row.bodies[0].checksum_kind
    return (prefix.control_bytes, row.first_row, row.row_count, int(kind), len(row.bodies), *places)


def checksum_places(end: int, bodies: tuple[BodyDescriptor, ...]) -> list[slice]:
    """Where the descriptors, which end at ``end``, have their checksums: a descriptor's last bytes."""
    places = []
    for body in reversed(bodies):
        places.append(slice(end - BODY_CHECKSUM_BYTES, end))
        end -= len(encode_canonical(body.values()))
    return places[::-1]
