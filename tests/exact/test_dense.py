"""Dense rows: equal to sparse rows over everything, read back from the wire as sent, and refused when malformed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest

from dspark import native, oracle
from dspark.dense import dense_row, pack_dense_rows, validate_dense_reply
from dspark.dyadic import (
    MASS,
    Float32s,
    Int32s,
    Row,
    RowError,
    RowFault,
    allocate,
    draw,
    greedy_row,
    softmax64,
    sparse_row,
)
from dspark.philox import Domain
from dspark.tickets import STANDARD, residual, target_tickets
from dspark.verify import Kind, Verdict, verify_ratio

SIZES = [1, 2, 3, 255, 256, 257, 1024, 1025, 49_152, 129_279, 129_280]


@pytest.fixture(scope="module", params=["numpy", "native"], autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Everything here holds for the numpy code and for the C kernels."""
    chosen = native.Choice(None, "a test") if request.param == "numpy" else native.choice()
    if request.param == "native" and chosen.library is None:
        pytest.skip(chosen.reason)
    with native.using(chosen):
        yield request.param


def content(row: Row) -> tuple[list[int], list[int]]:
    return row.ids.tolist(), row.counts.tolist()


def logits_of(vocab: int, spread: float, seed: int = 0) -> Float32s:
    return (np.random.default_rng(seed + vocab).standard_normal(vocab) * spread).astype(np.float32)


# --- making --------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_a_dense_row_is_the_sparse_row_over_all_tokens(vocab: int, spread: float) -> None:
    logits = logits_of(vocab, spread)
    for temperature in (1.0, 0.6, 0.0):
        row = dense_row(logits, None, temperature, vocab)
        assert content(row) == content(sparse_row(logits, None, temperature, vocab))
        assert int(row.counts.sum()) == MASS
        assert row.counts.min() > 0
        assert (row.ids.dtype, row.counts.dtype) == (np.int32, np.int64)


@pytest.mark.parametrize("vocab", [5, 40])
def test_a_small_dense_row_equals_the_oracle(vocab: int) -> None:
    logits = logits_of(vocab, 3.0)
    counts = oracle.allocate([Fraction(w) for w in softmax64(logits, 0.8).tolist()], MASS)
    row = dense_row(logits, None, 0.8, vocab)
    assert content(row) == ([i for i, c in enumerate(counts) if c], [c for c in counts if c])


def test_masked_tokens_take_no_part_and_do_not_change_the_others() -> None:
    logits = logits_of(3000, 2.0)
    masked = np.full(6000, -np.inf, dtype=np.float32)
    masked[::2] = logits
    row = dense_row(masked, None, 1.0, 6000)
    alone = dense_row(logits, None, 1.0, 3000)
    assert row.ids.tolist() == [2 * token for token in alone.ids.tolist()]
    assert row.counts.tolist() == alone.counts.tolist()


def test_a_reduced_draft_vocabulary_is_spread_over_the_target_ids() -> None:
    logits = logits_of(500, 2.0)
    logits[7] = -np.inf
    ids = np.sort(np.random.default_rng(1).choice(9000, 500, replace=False)).astype(np.int32)
    row, own = dense_row(logits, ids, 0.9, 9000), dense_row(logits, None, 0.9, 500)
    assert row.ids.tolist() == ids[own.ids].tolist()
    assert row.counts.tolist() == own.counts.tolist()
    assert content(dense_row(logits, ids, 0.0, 9000)) == content(greedy_row(int(ids[logits.argmax()])))


@pytest.mark.parametrize(
    ("logits", "ids", "temperature", "code"),
    [
        ([0.0, np.nan], None, 1.0, RowFault.NOT_FINITE),
        ([0.0, np.inf], None, 1.0, RowFault.NOT_FINITE),
        ([-np.inf, -np.inf], None, 1.0, RowFault.ZERO_MASS),
        ([0.0, 1.0], None, -0.5, RowFault.TEMPERATURE),
        ([0.0, 1.0], None, np.nan, RowFault.TEMPERATURE),
        ([0.0, 1.0, 2.0, 3.0], None, 1.0, RowFault.ID_RANGE),
        ([0.0, 1.0], [1, 3], 1.0, RowFault.ID_RANGE),
    ],
)
def test_bad_logits_and_padded_heads_are_refused(
    logits: list[float], ids: list[int] | None, temperature: float, code: RowFault
) -> None:
    mapping = None if ids is None else np.array(ids, np.int32)
    with pytest.raises(RowError) as refusal:
        dense_row(np.array(logits, np.float32), mapping, temperature, vocab=3)
    assert refusal.value.code == code


# --- the wire ------------------------------------------------------------------------------------


@dataclass
class Reply:
    """A packed dense reply that a test damages in one place."""

    tokens: Int32s
    q: Float32s
    vocab: int
    depth: int

    def validate(self) -> list[tuple[list[int], list[int]]]:
        return [content(row) for row in validate_dense_reply(self.tokens, self.q, self.vocab, self.depth)]


def reply_of(vocab: int, width: int, spread: float = 2.0, depth: int = 3) -> tuple[Reply, list[Row]]:
    rows = [dense_row(logits_of(vocab, spread, seed), None, 1.0, vocab) for seed in range(depth)]
    q = np.full((depth, width), 9, np.float32)
    pack_dense_rows(rows, vocab, q)
    tokens = np.array([draw(row, 12_345_678) for row in rows], np.int32)
    return Reply(tokens, q, vocab, depth), rows


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("padding", [0, 1, 100])
def test_packed_rows_are_read_back_equal(vocab: int, padding: int) -> None:
    reply, rows = reply_of(vocab, vocab + padding, spread=3.0)
    assert not reply.q[:, vocab:].any()
    assert not np.signbit(reply.q).any()
    assert reply.q.astype(np.float64).sum(axis=1).tolist() == [1.0] * 3
    assert reply.validate() == [content(row) for row in rows]


def test_rows_are_copies_of_read_only_memory() -> None:
    reply, rows = reply_of(700, 704)
    staging = bytearray(reply.q.tobytes())
    wire = np.frombuffer(memoryview(staging).toreadonly(), np.float32).reshape(reply.q.shape)
    read = validate_dense_reply(reply.tokens, wire, 700, 3)
    staging[:] = bytes(len(staging))
    assert [content(row) for row in read] == [content(row) for row in rows]
    with pytest.raises(ValueError, match="read-only"):
        read[0].counts[0] = 1


def test_strided_and_unaligned_memory_is_read_and_written_the_same() -> None:
    reply, rows = reply_of(300, 320)
    strided = np.repeat(reply.q, 2, axis=1)[:, ::2]
    unaligned = np.frombuffer(b"x" + reply.q.tobytes(), np.float32, offset=1).reshape(reply.q.shape)
    for q in (strided, unaligned):
        assert [content(row) for row in validate_dense_reply(reply.tokens, q, 300, 3)] == [content(r) for r in rows]
    target = np.full((3, 640), 7, np.float32)
    pack_dense_rows(rows, 300, target[:, ::2])
    assert np.array_equal(target[:, ::2], reply.q)
    assert (target[:, 1::2] == 7).all()


def _bits(pattern: int) -> Float32s:
    return np.array(pattern, np.uint32).view(np.float32)


def _set(place: tuple[int, int], value: object) -> Callable[[Reply], None]:
    def damage(reply: Reply) -> None:
        reply.q[place] = value

    return damage


def _move(delta: int) -> Callable[[Reply], None]:
    def damage(reply: Reply) -> None:
        reply.q[1, reply.q[1].argmax()] += np.float32(delta / MASS)

    return damage


def _draft(token: int) -> Callable[[Reply], None]:
    def damage(reply: Reply) -> None:
        reply.tokens[2] = token

    return damage


def _token_without_a_count(reply: Reply) -> None:
    reply.tokens[0] = int(np.flatnonzero(reply.q[0] == 0)[0])


def _mass_in_the_padding(reply: Reply) -> None:
    """The sum is right, the place is not."""
    likeliest = reply.q[0].argmax()
    reply.q[0, VOCAB], reply.q[0, likeliest] = reply.q[0, likeliest], 0


def _padded_token(reply: Reply) -> None:
    _mass_in_the_padding(reply)
    reply.tokens[0] = VOCAB


def _reshape(reply: Reply) -> None:
    reply.q = reply.q[:2]


def _narrow(reply: Reply) -> None:
    reply.q = np.ascontiguousarray(reply.q[:, : VOCAB - 1])


def _retype(reply: Reply) -> None:
    reply.q = reply.q.astype(np.float64)  # type: ignore[assignment, unused-ignore]


def _retype_tokens(reply: Reply) -> None:
    reply.tokens = reply.tokens.astype(np.int64)  # type: ignore[assignment, unused-ignore]


VOCAB, WIDTH = 1000, 1024
REFUSALS: list[tuple[str, Callable[[Reply], None], RowFault]] = [
    ("sum one too many", _move(1), RowFault.WRONG_SUM),
    ("sum one too few", _move(-1), RowFault.WRONG_SUM),
    ("no multiple of 2**-24", _set((0, 3), 0.1), RowFault.NOT_DYADIC),
    ("half a ticket", _set((2, 999), 2.0**-25), RowFault.NOT_DYADIC),
    ("a ticket and a half", _set((2, 999), 1.5 * 2.0**-24), RowFault.NOT_DYADIC),
    ("negative zero", _set((0, 0), _bits(0x80000000)), RowFault.NEGATIVE_ZERO),
    ("negative zero in the padding", _set((2, 1023), _bits(0x80000000)), RowFault.NEGATIVE_ZERO),
    ("smallest subnormal", _set((1, 256), _bits(1)), RowFault.SUBNORMAL),
    ("largest subnormal", _set((1, 255), _bits(0x007FFFFF)), RowFault.SUBNORMAL),
    ("subnormal in the padding", _set((0, 1000), _bits(1)), RowFault.SUBNORMAL),
    ("smallest normal", _set((1, 255), _bits(0x00800000)), RowFault.NOT_DYADIC),
    ("quiet NaN", _set((0, 5), np.nan), RowFault.NOT_FINITE),
    ("NaN in the padding", _set((0, 1001), np.nan), RowFault.NOT_FINITE),
    ("negative NaN", _set((0, 5), _bits(0xFFC00000)), RowFault.NOT_FINITE),
    ("infinity", _set((0, 5), np.inf), RowFault.NOT_FINITE),
    ("negative infinity", _set((0, 5), -np.inf), RowFault.NOT_FINITE),
    ("negative value", _set((0, 5), -(2.0**-24)), RowFault.NEGATIVE),
    ("value above one", _set((0, 5), np.nextafter(np.float32(1), np.float32(2))), RowFault.OVER_ONE),
    ("huge value", _set((0, 5), 1e38), RowFault.OVER_ONE),
    ("all zero", _set((0, slice(None)), 0.0), RowFault.WRONG_SUM),  # type: ignore[arg-type]
    ("value in the padding", _set((2, 1023), 2.0**-24), RowFault.PADDING),
    ("mass moved into the padding", _mass_in_the_padding, RowFault.PADDING),
    ("token in the padding", _padded_token, RowFault.PADDING),
    ("token without a count", _token_without_a_count, RowFault.ZERO_AT_TOKEN),
    ("negative token", _draft(-1), RowFault.ZERO_AT_TOKEN),
    ("token beyond the vocabulary", _draft(VOCAB), RowFault.ZERO_AT_TOKEN),
    ("token beyond the row", _draft(2**31 - 1), RowFault.ZERO_AT_TOKEN),
    ("wrong shape", _reshape, RowFault.SHAPE),
    ("narrower than the vocabulary", _narrow, RowFault.SHAPE),
    ("wrong type", _retype, RowFault.SHAPE),
    ("wrong type of tokens", _retype_tokens, RowFault.SHAPE),
]


@pytest.mark.parametrize(("what", "damage", "code"), REFUSALS, ids=[case[0] for case in REFUSALS])
def test_malformed_replies_are_refused(what: str, damage: Callable[[Reply], None], code: RowFault) -> None:
    reply, rows = reply_of(VOCAB, WIDTH, spread=5.0)
    assert reply.validate() == [content(row) for row in rows]
    damage(reply)
    with pytest.raises(RowError) as refusal:
        reply.validate()
    assert refusal.value.code == code, what
    assert refusal.value.where


def test_the_last_column_is_no_token_minus_one() -> None:
    """numpy would read column -1: the last token of an unpadded row."""
    row = Row(np.array([4], np.int32), np.array([MASS]))
    q = np.zeros((1, 5), np.float32)
    pack_dense_rows([row], 5, q)
    assert len(validate_dense_reply(np.array([4], np.int32), q, 5, 1)) == 1
    with pytest.raises(RowError) as refusal:
        validate_dense_reply(np.array([-1], np.int32), q, 5, 1)
    assert refusal.value.code == RowFault.ZERO_AT_TOKEN


def test_packing_refuses_what_does_not_fit() -> None:
    row = Row(np.array([1, 6], np.int32), np.array([1, MASS - 1]))
    cases: list[tuple[list[Row], int, np.ndarray, RowFault]] = [
        ([row], 6, np.zeros((1, 8), np.float32), RowFault.ID_RANGE),
        ([row], 9, np.zeros((1, 8), np.float32), RowFault.SHAPE),
        ([row, row], 7, np.zeros((1, 8), np.float32), RowFault.SHAPE),
        ([row], 7, np.zeros(8, np.float32), RowFault.SHAPE),
        ([row], 7, np.zeros((1, 8)), RowFault.SHAPE),
    ]
    for rows, vocab, q, code in cases:
        with pytest.raises(RowError) as refusal:
            pack_dense_rows(rows, vocab, q)
        assert refusal.value.code == code


# --- downstream: nothing asks whether a row is dense ---------------------------------------------


@pytest.mark.parametrize("vocab", [257, 129_280])
def test_count_and_draw_agree_with_the_wire(vocab: int) -> None:
    reply, _ = reply_of(vocab, vocab + 64, spread=4.0, depth=1)
    (row,) = validate_dense_reply(reply.tokens, reply.q, vocab, 1)
    for token in (0, 1, vocab // 2, vocab - 1, int(reply.tokens[0])):
        assert row.count(token) == int(reply.q[0, token] * MASS)
    assert row.count(vocab) == row.count(-1) == 0
    cumulative = (reply.q[0].astype(np.float64) * MASS).astype(np.int64).cumsum()
    for u24 in (0, 1, MASS // 3, MASS - 1, 12_345_678):
        assert draw(row, u24) == int(cumulative.searchsorted(u24, side="right"))


@dataclass(frozen=True)
class Coins:
    """The same coin for every acceptance, and another for the last token."""

    acceptance: int
    last: int

    def draw64(self, domain: Domain, position: int) -> int:
        return self.acceptance if domain is Domain.ACCEPTANCE else self.last


@pytest.mark.parametrize("vocab", [400, 129_280])
def test_a_round_over_dense_rows(vocab: int) -> None:
    reply, _ = reply_of(vocab, vocab + 16, spread=2.0, depth=2)
    rows = validate_dense_reply(reply.tokens, reply.q, vocab, 2)
    tokens = reply.tokens.tolist()
    tickets = [target_tickets(logits_of(vocab, 2.0, seed=50 + i).astype(np.float64)) for i in range(3)]
    accepted = verify_ratio(tickets.__getitem__, rows, tokens, 10, Coins(0, 0))
    assert accepted == Verdict(2, int(np.flatnonzero(tickets[2])[0]), Kind.BONUS)
    q = (reply.q[0, :vocab].astype(np.float64) * MASS).astype(np.int64) * STANDARD.scale
    expected = np.maximum(tickets[0] - q, 0)
    assert np.array_equal(residual(tickets[0], rows[0]), expected)
    tickets[0][tickets[0].argmax()] += tickets[0][tokens[0]]
    tickets[0][tokens[0]] = 0
    rejected = verify_ratio(tickets.__getitem__, rows, tokens, 10, Coins(0, 0))
    first = int(np.flatnonzero(np.maximum(tickets[0] - q, 0))[0])
    assert rejected == Verdict(0, first, Kind.CORRECTION)


def test_no_ticket_is_lost_between_weights_and_wire() -> None:
    """Allocation, packing and reading, count for count, at the size of a real vocabulary."""
    logits = logits_of(129_280, 2.5)
    counts = allocate(softmax64(logits))
    q = np.zeros((1, 129_280), np.float32)
    pack_dense_rows([dense_row(logits, None, 1.0, 129_280)], 129_280, q)
    assert np.array_equal((q[0].astype(np.float64) * MASS).astype(np.int64), counts)
