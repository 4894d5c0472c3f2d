"""Rows on the wire: what is packed is what is read, and every malformed reply is refused with its code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from dspark import native
from dspark.dyadic import (
    MASS,
    Float32s,
    Int32s,
    RowError,
    RowFault,
    draw,
    pack_rows,
    sparse_row,
    validate_reply,
)

VOCAB, DEPTH, SUPPORT = 100, 3, 8


@pytest.fixture(scope="module", params=["numpy", "native"], autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Everything here holds for the numpy code and for the C kernels."""
    chosen = native.Choice(None, "a test") if request.param == "numpy" else native.choice()
    if request.param == "native" and chosen.library is None:
        pytest.skip(chosen.reason)
    with native.using(chosen):
        yield request.param


@dataclass
class Reply:
    """A packed reply that a test damages in one place."""

    tokens: Int32s
    entries: Int32s
    ids: Int32s
    q: Float32s
    vocab: int = VOCAB
    depth: int = DEPTH

    def validate(self) -> list[tuple[list[int], list[int]]]:
        rows = validate_reply(self.tokens, self.entries, self.ids, self.q, self.vocab, self.depth, SUPPORT)
        return [(row.ids.tolist(), row.counts.tolist()) for row in rows]


def good_reply() -> Reply:
    rng = np.random.default_rng(7)
    rows = [sparse_row(rng.standard_normal(VOCAB).astype(np.float32), None, 1.0, 5) for _ in range(DEPTH)]
    ids, q = np.full((DEPTH, SUPPORT), 9, np.int32), np.full((DEPTH, SUPPORT), 9, np.float32)
    entries = np.zeros(DEPTH, np.int32)
    pack_rows(rows, SUPPORT, ids, q, entries)
    tokens = np.array([draw(row, 12345) for row in rows], np.int32)
    return Reply(tokens, entries, ids, q)


def test_packed_rows_are_read_back_equal() -> None:
    rng = np.random.default_rng(3)
    rows = [sparse_row(rng.standard_normal(50).astype(np.float32), None, t, 8) for t in (0.0, 0.1, 1.0, 9.0)]
    ids, q = np.zeros((4, 8), np.int32), np.zeros((4, 8), np.float32)
    entries = np.zeros(4, np.int32)
    pack_rows(rows, 8, ids, q, entries)
    tokens = np.array([row.ids[0] for row in rows], np.int32)
    seen = validate_reply(tokens, entries, ids, q, 50, 4, 8)
    assert [row.ids.tolist() for row in seen] == [row.ids.tolist() for row in rows]
    assert [row.counts.tolist() for row in seen] == [row.counts.tolist() for row in rows]


def test_packing_clears_what_the_buffer_held_before() -> None:
    reply = good_reply()
    padding = np.arange(SUPPORT) >= reply.entries[:, None]
    assert padding.any()
    assert not reply.ids[padding].any()
    assert not reply.q[padding].any()


def test_every_count_is_exact_in_fp32() -> None:
    edges = np.array([1 << bit for bit in range(25)])
    random = np.random.default_rng(0).integers(0, MASS, 100_000)
    counts = np.concatenate((edges, edges - 1, np.minimum(edges + 1, MASS), random))
    q = (counts * (1.0 / MASS)).astype(np.float32)
    assert np.array_equal(q.astype(np.float64) * MASS, counts)


def test_read_only_wire_memory_is_enough_and_is_not_kept() -> None:
    reply = good_reply()
    before = reply.validate()
    staging = bytearray(reply.ids.tobytes() + reply.q.tobytes())
    wire = memoryview(staging).toreadonly()
    half = len(staging) // 2
    ids = np.frombuffer(wire[:half], np.int32).reshape(DEPTH, SUPPORT)
    q = np.frombuffer(wire[half:], np.float32).reshape(DEPTH, SUPPORT)
    rows = validate_reply(reply.tokens, reply.entries, ids, q, VOCAB, DEPTH, SUPPORT)
    staging[:] = bytes(len(staging))
    assert [(row.ids.tolist(), row.counts.tolist()) for row in rows] == before


def _bits(pattern: int) -> Float32s:
    return np.array(pattern, np.uint32).view(np.float32)


def _set(field: str, place: tuple[int, ...], value: object) -> Callable[[Reply], None]:
    def damage(reply: Reply) -> None:
        getattr(reply, field)[place] = value

    return damage


def _swap_ids(reply: Reply) -> None:
    reply.ids[1, [0, 1]] = reply.ids[1, [1, 0]]


def _move_mass(reply: Reply, delta: int) -> None:
    reply.q[0, 0] += np.float32(delta / MASS)


def _empty_an_entry(reply: Reply) -> None:
    reply.q[0, 0] += reply.q[0, 1]
    reply.q[0, 1] = 0


def _token_outside_the_row(reply: Reply) -> None:
    reply.tokens[2] = next(token for token in range(VOCAB) if token not in reply.ids[2])


def _token_in_the_padding(reply: Reply) -> None:
    """Id 0 is what padding holds, so it must not count as support."""
    assert 0 not in reply.ids[1, : reply.entries[1]]
    reply.tokens[1] = 0


def _reshape(reply: Reply) -> None:
    reply.ids = reply.ids[:, :-1]


def _retype(reply: Reply) -> None:
    reply.q = reply.q.astype(np.float64)  # type: ignore[assignment, unused-ignore]


REFUSALS: list[tuple[str, Callable[[Reply], None], RowFault]] = [
    ("sum one too many", lambda reply: _move_mass(reply, 1), RowFault.WRONG_SUM),
    ("sum one too few", lambda reply: _move_mass(reply, -1), RowFault.WRONG_SUM),
    ("no multiple of 2**-24", _set("q", (0, 0), 0.1), RowFault.NOT_DYADIC),
    ("half a ticket", _set("q", (0, 0), 2.0**-25), RowFault.NOT_DYADIC),
    ("negative zero in an entry", _set("q", (0, 0), _bits(0x80000000)), RowFault.NEGATIVE_ZERO),
    ("negative zero in padding", _set("q", (0, 7), _bits(0x80000000)), RowFault.NEGATIVE_ZERO),
    ("smallest subnormal", _set("q", (0, 0), _bits(1)), RowFault.SUBNORMAL),
    ("largest subnormal", _set("q", (0, 7), _bits(0x007FFFFF)), RowFault.SUBNORMAL),
    ("quiet NaN", _set("q", (0, 0), np.nan), RowFault.NOT_FINITE),
    ("negative NaN", _set("q", (0, 0), _bits(0xFFC00000)), RowFault.NOT_FINITE),
    ("infinity", _set("q", (0, 7), np.inf), RowFault.NOT_FINITE),
    ("negative infinity", _set("q", (0, 7), -np.inf), RowFault.NOT_FINITE),
    ("negative value", _set("q", (0, 0), -0.25), RowFault.NEGATIVE),
    ("value above one", _set("q", (0, 0), np.nextafter(np.float32(1), np.float32(2))), RowFault.OVER_ONE),
    ("huge value", _set("q", (0, 0), 1e38), RowFault.OVER_ONE),
    ("unsorted ids", _swap_ids, RowFault.ID_ORDER),
    ("duplicate id", lambda reply: _set("ids", (1, 1), reply.ids[1, 0])(reply), RowFault.ID_ORDER),
    ("id equal to the vocabulary size", _set("ids", (0, 4), VOCAB), RowFault.ID_RANGE),
    ("negative id", _set("ids", (0, 0), -1), RowFault.ID_RANGE),
    ("id in padding", _set("ids", (0, 6), 50), RowFault.PADDING),
    ("value in padding", _set("q", (0, 6), 2.0**-24), RowFault.PADDING),
    ("empty entry", _empty_an_entry, RowFault.ZERO_COUNT),
    ("token outside the row", _token_outside_the_row, RowFault.ZERO_AT_TOKEN),
    ("token in the padding", _token_in_the_padding, RowFault.ZERO_AT_TOKEN),
    ("no entries", _set("entries", (0,), 0), RowFault.ENTRIES),
    ("negative entries", _set("entries", (1,), -1), RowFault.ENTRIES),
    ("more entries than support", _set("entries", (2,), SUPPORT + 1), RowFault.ENTRIES),
    ("entries one too many", _set("entries", (0,), 6), RowFault.ZERO_COUNT),
    ("entries one too few", _set("entries", (0,), 4), RowFault.PADDING),
    ("narrow rows", _reshape, RowFault.SHAPE),
    ("wrong dtype", _retype, RowFault.SHAPE),
]


@pytest.mark.parametrize(("what", "damage", "code"), REFUSALS, ids=[case[0] for case in REFUSALS])
def test_malformed_replies_are_refused(what: str, damage: Callable[[Reply], None], code: RowFault) -> None:
    reply = good_reply()
    reply.validate()
    damage(reply)
    with pytest.raises(RowError) as refusal:
        reply.validate()
    assert refusal.value.code == code, what
    assert refusal.value.where


def test_a_reply_of_another_depth_is_refused() -> None:
    reply = good_reply()
    reply.depth = DEPTH - 1
    with pytest.raises(RowError, match="tokens"):
        reply.validate()


def test_the_refusal_names_row_and_entry() -> None:
    reply = good_reply()
    reply.q[2, 1] = np.nan
    with pytest.raises(RowError, match=r"not_finite: q\[2, 1\]"):
        reply.validate()


def test_a_thread_that_flushes_subnormals_to_zero_refuses_them_all_the_same() -> None:
    """torch can switch that on for a thread; compared as floats, a subnormal would then pass for a zero."""
    torch.set_flush_denormal(True)
    try:
        for place in ((0, 0), (0, 7)):
            reply = good_reply()
            reply.q[place] = _bits(1)
            with pytest.raises(RowError) as refusal:
                reply.validate()
            assert refusal.value.code == RowFault.SUBNORMAL
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("field", ["tokens", "entries", "ids", "q"])
def test_memory_that_is_strided_or_unaligned_is_read_the_same(field: str) -> None:
    reply = good_reply()
    before = reply.validate()
    array = getattr(reply, field)
    strided = np.repeat(array, 2, axis=-1)[..., ::2]
    unaligned = np.frombuffer(b"x" + array.tobytes(), dtype=array.dtype, offset=1).reshape(array.shape)
    assert not strided.flags.c_contiguous
    assert not unaligned.flags.aligned
    for other in (strided, unaligned):
        setattr(reply, field, other)
        assert reply.validate() == before


def test_a_reply_of_depth_zero_has_no_rows() -> None:
    empty, flat = np.zeros((0, 4), np.float32), np.zeros(0, np.int32)
    assert validate_reply(flat, flat, empty.astype(np.int32), empty, VOCAB, 0, 4) == []


def test_packing_refuses_what_does_not_fit() -> None:
    row = sparse_row(np.zeros(8, np.float32), None, 1.0, 8)
    with pytest.raises(RowError) as too_long:
        pack_rows([row], 4, np.zeros((1, 4), np.int32), np.zeros((1, 4), np.float32), np.zeros(1, np.int32))
    assert too_long.value.code == RowFault.ENTRIES
    with pytest.raises(RowError) as mismatch:
        pack_rows([row], 8, np.zeros((2, 8), np.int32), np.zeros((2, 8), np.float32), np.zeros(2, np.int32))
    assert mismatch.value.code == RowFault.SHAPE
