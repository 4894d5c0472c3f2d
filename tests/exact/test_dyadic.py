"""Proposal rows against the oracle: allocation, support, ties, the draw law, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark import native, oracle
from dspark.apportionment import allocate_rows, softmax64_rows, top_indices_rows
from dspark.dyadic import (
    MASS,
    Float32s,
    Float64s,
    Row,
    RowError,
    RowFault,
    allocate,
    draw,
    greedy_row,
    softmax64,
    sparse_row,
    sparse_rows,
    top_indices,
)


@pytest.fixture(scope="module", params=["numpy", "native"], autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Everything here holds for the numpy code and for the C kernels."""
    chosen = native.Choice(None, "a test") if request.param == "numpy" else native.choice()
    if request.param == "native" and chosen.library is None:
        pytest.skip(chosen.reason)
    with native.using(chosen):
        yield request.param


def exactly(weights: Float64s) -> list[Fraction]:
    return [Fraction(weight) for weight in weights.tolist()]


def boundary_rows() -> list[Float64s]:
    """Rows whose scaled weights sit on and beside integers, tie, vanish, or hold everything."""
    ticket = 1.0 / MASS
    on_grid = np.array([0.25, 0.5, 0.25 - 8 * ticket] + [ticket] * 8)
    nudged = on_grid.copy()
    nudged[0], nudged[1] = np.nextafter(0.25, 1), np.nextafter(0.5, 0)
    twice = nudged.copy()
    twice[0], twice[1] = np.nextafter(twice[0], 1), np.nextafter(twice[1], 0)
    return [
        np.array([1.0]),
        np.array([0.0, 1.0, 0.0]),
        np.full(3, 1 / 3),
        np.full(7, 1 / 7),
        np.full(2048, 1 / 2048),
        np.full(3000, 1 / 3000),
        on_grid,
        nudged,
        twice,
        np.array([1 - 2.0**-24, 2.0**-25, 2.0**-25]),
        np.array([1 - 2.0**-30, 2.0**-31, 2.0**-31]),
    ]


@pytest.mark.parametrize("weights", boundary_rows())
def test_boundary_rows_equal_the_oracle(weights: Float64s) -> None:
    assert allocate(weights).tolist() == oracle.allocate(exactly(weights), MASS)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    logits=st.lists(st.floats(-40, 10) | st.sampled_from([0.0, 1.0, -1.0]), min_size=1, max_size=40),
    mass=st.sampled_from([MASS, 16, 7]),
)
def test_allocation_equals_the_oracle(logits: list[float], mass: int) -> None:
    weights = softmax64(np.array(logits))
    assert allocate(weights, mass).tolist() == oracle.allocate(exactly(weights), mass)


@pytest.mark.parametrize("size", [1024, 1025, 1500])
def test_long_rows_with_ties_equal_the_oracle(size: int) -> None:
    """Both sides of the switch from sorting to partitioning; integer logits force many equal remainders."""
    logits = np.random.default_rng(size).integers(-6, 6, size).astype(np.float64)
    weights = softmax64(logits)
    assert allocate(weights).tolist() == oracle.allocate(exactly(weights), MASS)


def test_leftover_goes_to_the_lowest_index_among_ties() -> None:
    assert allocate(np.full(3, 1 / 3), 16).tolist() == [6, 5, 5]


@pytest.mark.parametrize(
    ("weights", "code"),
    [
        ([0.5, np.nan], RowFault.NOT_FINITE),
        ([0.5, np.inf], RowFault.NOT_FINITE),
        ([1.5, -0.5], RowFault.NEGATIVE),
        ([0.0, 0.0], RowFault.ZERO_MASS),
        ([3.0, 0.0], RowFault.LEFTOVER),
        ([0.5, 0.5 - 1e-6], RowFault.LEFTOVER),
        ([0.5, 0.5 + 1e-6], RowFault.LEFTOVER),
        ([0.5, 0.5 - 2.0**-24], RowFault.LEFTOVER),
    ],
)
def test_bad_weights_are_refused(weights: list[float], code: RowFault) -> None:
    with pytest.raises(RowError) as refusal:
        allocate(np.array(weights))
    assert refusal.value.code == code
    assert refusal.value.where


def test_one_missing_ticket_without_a_remainder_is_refused_and_with_one_is_not() -> None:
    """The sharp test, R <= number of nonzero remainders: R = 1 is right for one row, wrong for the other."""
    assert allocate(np.array([0.5, 0.5 - 2.0**-25])).tolist() == [MASS // 2, MASS // 2]
    with pytest.raises(RowError):
        allocate(np.array([0.5, 0.5 - 2.0**-24]))


def test_fp32_weights_are_caught() -> None:
    """Why FP64: FP32 softmax weights leave an impossible leftover in some rows."""
    rng = np.random.default_rng(5)
    refused = 0
    for _ in range(400):
        shifted = rng.standard_normal(4).astype(np.float32) * 3
        weights = np.exp(shifted)
        weights /= weights.sum(dtype=np.float32)
        try:
            allocate(weights.astype(np.float64))
        except RowError as error:
            refused += error.code == RowFault.LEFTOVER
    assert refused > 0


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    values=st.lists(st.integers(-3, 3), min_size=1, max_size=60),
    how_many=st.integers(1, 70),
)
def test_support_equals_the_oracle(values: list[int], how_many: int) -> None:
    chosen = top_indices(np.array(values, dtype=np.float32), how_many)
    assert chosen.tolist() == oracle.top_indices([Fraction(value) for value in values], how_many)


def test_masked_tokens_never_enter_the_support() -> None:
    logits = np.array([-np.inf, 1.0, -np.inf, 2.0, -np.inf], dtype=np.float32)
    assert top_indices(logits, 4).tolist() == [1, 3]
    assert top_indices(logits, 9).tolist() == [1, 3]
    assert sparse_row(logits, None, 1.0, 4).ids.tolist() == [1, 3]


def test_sparse_row_selects_then_normalises_then_drops_zeros() -> None:
    logits = np.array([0.0, 9.0, -60.0, 8.0, 0.0], dtype=np.float32)
    ids = np.array([3, 10, 11, 40, 99], dtype=np.int32)
    row = sparse_row(logits, ids, 2.0, 4)
    weights = softmax64(logits[[0, 1, 3, 4]], 2.0)
    assert row.ids.tolist() == [3, 10, 40, 99]
    assert row.counts.tolist() == oracle.allocate(exactly(weights), MASS)
    assert sparse_row(logits, ids, 0.25, 5).ids.tolist() == [10, 40], "entries that get no ticket are dropped"
    assert row.ids.dtype == np.int32
    assert row.counts.dtype == np.int64


def test_temperature_is_the_drafters_own() -> None:
    logits = np.array([0.0, 1.0], dtype=np.float32)
    hot, cold = sparse_row(logits, None, 2.0, 2), sparse_row(logits, None, 0.5, 2)
    assert hot.counts.tolist() == oracle.allocate(exactly(softmax64(logits / 2)), MASS)
    assert cold.count(1) > hot.count(1)


def test_temperature_zero_is_the_lowest_id_maximum() -> None:
    row = sparse_row(np.array([1, 5, 5], dtype=np.float32), np.array([7, 8, 9], dtype=np.int32), 0.0, 2)
    assert (row.ids.tolist(), row.counts.tolist()) == ([8], [MASS])


def test_a_tiny_temperature_does_not_overflow() -> None:
    assert sparse_row(np.array([3e38, -3e38], dtype=np.float32), None, 1e-300, 2).ids.tolist() == [0]


@pytest.mark.parametrize(
    ("logits", "temperature", "support", "code"),
    [
        ([0.0, np.nan], 1.0, 2, RowFault.NOT_FINITE),
        ([0.0, np.inf], 1.0, 2, RowFault.NOT_FINITE),
        ([-np.inf, -np.inf], 1.0, 2, RowFault.ZERO_MASS),
        ([0.0, 1.0], -1.0, 2, RowFault.TEMPERATURE),
        ([0.0, 1.0], np.nan, 2, RowFault.TEMPERATURE),
        ([0.0, 1.0], np.inf, 2, RowFault.TEMPERATURE),
        ([0.0, 1.0], 1.0, 0, RowFault.SUPPORT),
    ],
)
def test_bad_logits_and_policies_are_refused(
    logits: list[float], temperature: float, support: int, code: RowFault
) -> None:
    with pytest.raises(RowError) as refusal:
        sparse_row(np.array(logits, dtype=np.float32), None, temperature, support)
    assert refusal.value.code == code


def same_rows(some: list[Row], others: list[Row]) -> bool:
    return [(row.ids.tolist(), row.counts.tolist()) for row in some] == [
        (row.ids.tolist(), row.counts.tolist()) for row in others
    ]


def batch_of(rows: int, vocab: int, seed: int) -> Float32s:
    """Logits of several shapes: normal, peaked, flat, with ties, and with masked tokens."""
    rng = np.random.default_rng(seed)
    batch = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    batch[1 % rows] *= 8
    batch[2 % rows] = 0
    batch[3 % rows] = rng.integers(-2, 3, vocab)
    batch[4 % rows, rng.random(vocab) < 0.5] = -np.inf
    return batch


@pytest.mark.parametrize("vocab", [300, 4_099, 49_152, 129_280])
@pytest.mark.parametrize("support", [1, 16, 32, 64, 256])
def test_many_rows_are_the_rows_one_by_one(vocab: int, support: int) -> None:
    batch = batch_of(6, vocab, seed=vocab + support)
    ids = (np.arange(vocab) * 2 + 1).astype(np.int32)
    temperatures = [1.0, 0.7, 1.0, 2.5, 0.3, 1.0]
    for mapping in (None, ids):
        alone = [sparse_row(row, mapping, t, support) for row, t in zip(batch, temperatures, strict=True)]
        assert same_rows(sparse_rows(batch, mapping, temperatures, support), alone)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 32, 64, 127, 129, 256, 1000])
def test_softmax_of_many_rows_is_bit_for_bit_that_of_each(length: int) -> None:
    """Summation order decides the last bit, and with it, now and then, a ticket."""
    logits = (np.random.default_rng(length).standard_normal((33, length)) * 4).astype(np.float32)
    temperatures = np.linspace(0.1, 3, 33)
    together = softmax64_rows(logits, temperatures)
    alone = np.stack([softmax64(row, t) for row, t in zip(logits, temperatures.tolist(), strict=True)])
    assert together.tobytes() == alone.tobytes()


def test_rows_with_few_finite_logits_and_greedy_rows_take_part_in_a_batch() -> None:
    batch = np.full((4, 100), -np.inf, dtype=np.float32)
    batch[0, [5, 80]] = 1.0
    batch[1, :] = np.arange(100) % 7
    batch[2, 99] = -3.0
    batch[3, :] = np.arange(100)
    rows = sparse_rows(batch, None, [1.0, 0.0, 1.0, 1.0], 3)
    assert same_rows(rows[:1], [Row(np.array([5, 80], np.int32), np.array([MASS // 2, MASS // 2]))])
    assert same_rows(rows[1:3], [greedy_row(6), greedy_row(99)])
    assert rows[3].ids.tolist() == [97, 98, 99]
    assert sparse_rows(batch[:0], None, [], 3) == []


def test_a_batch_refuses_what_a_row_refuses() -> None:
    good = np.zeros((2, 5), dtype=np.float32)
    nan, masked = good.copy(), good.copy()
    nan[1, 3] = np.nan
    masked[1] = -np.inf
    cases: list[tuple[Float32s, list[float], int, RowFault]] = [
        (nan, [1.0, 1.0], 2, RowFault.NOT_FINITE),
        (masked, [1.0, 1.0], 2, RowFault.ZERO_MASS),
        (good, [1.0, -1.0], 2, RowFault.TEMPERATURE),
        (good, [1.0, np.inf], 2, RowFault.TEMPERATURE),
        (good, [1.0, 1.0], 0, RowFault.SUPPORT),
        (good, [1.0], 2, RowFault.SHAPE),
        (good[0], [1.0] * 5, 2, RowFault.SHAPE),
    ]
    for logits, temperatures, support, code in cases:
        with pytest.raises(RowError) as refusal:
            sparse_rows(logits, None, temperatures, support)
        assert refusal.value.code == code


def test_allocation_of_many_rows_refuses_for_the_first_bad_one() -> None:
    weights = np.full((3, 4), 0.25)
    weights[1] = [0.5, 0.5, 0.5, -0.5]
    weights[2] = np.nan
    with pytest.raises(RowError, match="negative: draft weight at index 3"):
        allocate_rows(weights)
    with pytest.raises(RowError) as refusal:
        allocate_rows(weights[[0, 2, 1]])
    assert refusal.value.code == RowFault.NOT_FINITE


def test_supports_of_many_rows_say_how_many_places_are_set() -> None:
    values = np.array([[1, 1, 1, 1], [-np.inf, 2, -np.inf, -np.inf]], dtype=np.float32)
    places, found = top_indices_rows(values, 2)
    assert found.tolist() == [2, 1]
    assert places[0].tolist() == [0, 1]
    assert places[1, :1].tolist() == [1]


def test_draw_law_over_all_uniforms() -> None:
    """All 2**24 uniforms, searched as ``draw`` searches: each token is hit exactly count times."""
    row = sparse_row(np.random.default_rng(1).standard_normal(64).astype(np.float32), None, 1.0, 32)
    cumulative = row.counts.cumsum()
    hits = np.zeros(len(row), dtype=np.int64)
    for start in range(0, MASS, 1 << 20):
        places = cumulative.searchsorted(np.arange(start, start + (1 << 20)), side="right")
        hits += np.bincount(places, minlength=len(row))
    assert hits.tolist() == row.counts.tolist()


def test_draw_equals_the_oracle_at_every_step_of_the_cdf() -> None:
    row = sparse_row(np.random.default_rng(2).standard_normal(64).astype(np.float32), None, 1.5, 16)
    counts = dict(zip(row.ids.tolist(), row.counts.tolist(), strict=True))
    edges = [0, *row.counts.cumsum().tolist()]
    for uniform in {edge + step for edge in edges for step in (-1, 0, 1)}:
        if 0 <= uniform < MASS:
            assert draw(row, uniform) == oracle.draw(counts, uniform)


@pytest.mark.parametrize("entries", [511, 512, 513, 5000])
def test_long_rows_are_drawn_from_by_the_same_rule(entries: int) -> None:
    counts = allocate(softmax64(np.random.default_rng(entries).standard_normal(entries) * 3)) + 1
    counts[counts.argmax()] -= entries
    row = Row(np.arange(0, 3 * entries, 3, dtype=np.int32), counts)
    cumulative = counts.cumsum()
    assert cumulative[-1] == MASS
    for place in {0, 1, 255, 256, 257, 510, entries // 2, entries - 1}:
        assert draw(row, int(cumulative[place]) - 1) == 3 * place
        assert draw(row, int(cumulative[place] - counts[place])) == 3 * place


@pytest.mark.parametrize("uniform", [-1, MASS])
def test_draw_refuses_what_is_no_24_bit_uniform(uniform: int) -> None:
    with pytest.raises(ValueError, match="u24"):
        draw(greedy_row(4), uniform)


def test_greedy_row_is_one_entry() -> None:
    row = greedy_row(17)
    assert (row.ids.tolist(), row.counts.tolist(), len(row)) == ([17], [MASS], 1)
    assert draw(row, 0) == draw(row, MASS - 1) == 17


def test_count_is_zero_outside_the_support() -> None:
    row = Row(np.array([2, 5], dtype=np.int32), np.array([1, MASS - 1]))
    assert [row.count(token) for token in range(7)] == [0, 0, 1, 0, 0, MASS - 1, 0]


def test_a_row_cannot_change_after_it_was_made() -> None:
    row = greedy_row(3)
    with pytest.raises(ValueError, match="read-only"):
        row.counts[0] = 5
