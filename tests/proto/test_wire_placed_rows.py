"""Rows that are checked in their block as they arrive: what one pass of the compiled codec finds and refuses."""

from __future__ import annotations

import pytest
from test_wire_dense import dense_arrays
from wire_pairs import reply_arrays

from dspark_proto import Checksum
from dspark_proto.checksums import body_checksum
from dspark_proto.native import codec
from dspark_proto.rows import ReplyLayout, placed_rows_are_sound, write_reply


@pytest.mark.skipif(codec is None, reason="in one pass by the compiled codec alone")
@pytest.mark.parametrize("layout", [ReplyLayout(5, 0, 1008), ReplyLayout(5, 32)], ids=["dense", "sparse"])
@pytest.mark.parametrize("kind", Checksum)
def test_any_run_of_rows_is_found_sound_or_not(layout: ReplyLayout, kind: Checksum) -> None:
    block = memoryview(bytearray(layout.total_bytes))
    write_reply(block, layout, **(reply_arrays() if layout.support else dense_arrays(5, 1008)))
    rows, ids = layout.row_bytes, layout.ids_row_bytes
    for first, count in [(0, 5), (0, 1), (1, 3), (4, 1), (2, 2), (5, 0)]:
        start = layout.q_offset + first * rows

        def sound(vocab_size: int = 1008, first: int = first, count: int = count, start: int = start) -> bool:
            checksum = body_checksum(kind, block[start : start + count * rows])
            return placed_rows_are_sound(block, layout, vocab_size, first, count, kind, checksum)

        assert sound()
        assert not placed_rows_are_sound(block, layout, 1008, first, count, kind, b"\x99" * 8)
        for row in range(5):
            places = [row * 16, row * 16 + 8, layout.q_offset + row * rows + rows - 1]
            for at in [*places, layout.ids_offset + row * ids] if ids else places:
                block[at] ^= 1
                assert sound() is not (first <= row < first + count)
                block[at] ^= 1
        assert sound(vocab_size=7) is (count == 0)


@pytest.mark.skipif(codec is None, reason="of the compiled codec")
def test_a_block_or_rows_that_the_layout_does_not_have_are_not_sound() -> None:
    layout = ReplyLayout(5, 0, 1008)
    block = memoryview(bytearray(layout.total_bytes))
    write_reply(block, layout, **dense_arrays(5, 1008))
    kind, none = Checksum.XXH3_64, body_checksum(Checksum.XXH3_64, b"")
    assert placed_rows_are_sound(block, layout, 1008, 0, 0, kind, none)
    for wrong in (
        (block[:-1], layout, 1008, 0, 0, kind, none),
        (block, layout, 1008, 6, 0, kind, none),
        (block, layout, 1008, 3, 3, kind, none),
        (block, layout, 2**31 + 1, 0, 0, kind, none),
        (block, layout, 1008, 0, 0, 9, none),
        (block, layout, 1008, 0, 0, kind, none[:4]),
        (block, layout, 1008, -1, 0, kind, none),
    ):
        assert not placed_rows_are_sound(*wrong)  # type: ignore[arg-type]
