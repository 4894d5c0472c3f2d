"""The ROWs that a verifier expects: each is known but for its rows and their checksums, so it is compared, not decoded.

The layout, the session and the worker's epoch fix every byte of a ROW's control except its bodies' checksums. So the
control of each is written once, for as long as these stay, and a ROW that arrives is compared with it, its bodies are
checked and copied to their places in one call of the compiled codec. Invariants: what is taken here is exactly what
``frame`` and ``replies`` would accept, and all else is left to them, which find the reason; a worker that cuts its rows
into other frames is served by them too. Spec: SPEC.md, section "ROW". Called by ``VerifierConnection``, which has
admitted the frame's prefix before.
"""

from __future__ import annotations

from .canonical import encode_canonical
from .limits import PREFIX_BYTES
from .native import Places, codec
from .registry import Checksum
from .reply_frames import blank_row, checksum_places
from .rows import ReplyLayout


class ExpectedRows:
    """The ROWs of replies of one layout to one session, from one epoch of a worker."""

    def __init__(self, layout: ReplyLayout, session: int, epoch: int, checksum: Checksum) -> None:
        self._layout = layout
        self._owner = session, epoch
        self._rows: dict[int, tuple[bytes, Places, int]] = {}
        step = layout.rows_per_frame
        for first in range(0, layout.depth, step):
            count = min(step, layout.depth - first)
            row = blank_row(layout, session, epoch, checksum, first, count)
            control = encode_canonical(row.values())
            sums = checksum_places(PREFIX_BYTES + len(control), row.bodies)
            places = [int(checksum)]
            for (start, length), place in zip(layout.spans(first, count), sums, strict=True):
                places += (length, place.start - PREFIX_BYTES, start)
            self._rows[first] = control, tuple(places), count

    def belongs_to(self, layout: ReplyLayout, session: int, epoch: int) -> bool:
        """Whether these are the ROWs of such replies. A connection has one object for each layout and checksum."""
        return self._layout is layout and self._owner == (session, epoch)

    def take(self, frame: memoryview, first_row: int, storage: memoryview) -> int:
        """How many rows ``frame``, whose prefix is sound, has brought to ``storage``.

        0 when it is not the expected one. Then ``storage`` may hold some of its rows: nobody looks at rows that do not
        count yet.
        """
        expected = self._rows.get(first_row)
        if codec is None or expected is None:
            return 0
        control, places, count = expected
        return count if codec.stage_expected(frame, control, places, storage) else 0
