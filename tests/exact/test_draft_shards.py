"""Draft rows over shards equal the whole row, count for count, on every rank and for every split."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.collectives import Group, GroupError, LocalGroup
from dspark.dense import dense_row
from dspark.draft_shards import RowPart, dense_part, draw_dense, propose_sparse
from dspark.dyadic import MASS, Float32s, Float64s, Int32s, Row, RowError, RowFault, allocate, draw, sparse_row
from dspark.exponential import exponentiate

Bounds = tuple[int, ...]
INF = np.inf


def all_ids(logits: Float32s) -> Int32s:
    return np.arange(logits.size, dtype=np.int32)


def on_shards(bounds: Bounds, logits: Float32s, ids: Int32s | None, work: Callable) -> list:
    """``work(group, logits, ids)`` on every rank with its own range of both."""
    ids = all_ids(logits) if ids is None else ids

    def mine(group: Group) -> object:
        held = slice(bounds[group.rank], bounds[group.rank + 1])
        return work(group, logits[held], ids[held])

    return LocalGroup(len(bounds) - 1).run(mine)


def listed(row: Row | RowPart) -> tuple[list[int], list[int]]:
    return row.ids.tolist(), row.counts.tolist()


def joined(parts: list[RowPart]) -> tuple[list[int], list[int]]:
    ids, counts = (np.concatenate([getattr(part, name) for part in parts]).tolist() for name in ("ids", "counts"))
    return ids, counts


def check_sparse(
    bounds: Bounds, logits: Float32s, temperature: float, support: int, u24: int = 77, ids: Int32s | None = None
) -> None:
    whole = sparse_row(logits, ids, temperature, support)
    proposals = on_shards(
        bounds, logits, ids, lambda group, part, own: propose_sparse(group, part, own, temperature, support, u24)
    )
    for proposal in proposals:
        assert listed(proposal.row) == listed(whole)
        assert proposal.token == draw(whole, u24)
        assert (proposal.row.ids.dtype, proposal.row.counts.dtype) == (np.int32, np.int64)


def check_dense(bounds: Bounds, logits: Float32s, temperature: float, ids: Int32s | None = None) -> list[RowPart]:
    whole = dense_row(logits, ids, temperature, 1 << 20)
    parts = on_shards(bounds, logits, ids, lambda group, part, own: dense_part(group, part, own, temperature))
    assert joined(parts) == listed(whole)
    assert all((part.ids.dtype, part.counts.dtype) == (np.int32, np.int64) for part in parts)
    return parts


def row(*logits: float) -> Float32s:
    return np.array(logits, dtype=np.float32)


def random_row(seed: int, size: int, scale: float = 3.0) -> Float32s:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


ADVERSARIAL: dict[str, tuple[Float32s, Bounds]] = {
    "one rank": (random_row(1, 9), (0, 9)),
    "ties across the boundary": (row(1, 2, 2, 2, 2, 1), (0, 3, 6)),
    "all equal": (row(*[0.5] * 7), (0, 2, 5, 7)),
    "the maximum ties over three shards": (row(0, 3, 1, 3, 1, 3), (0, 2, 4, 6)),
    "first shard masked": (row(-INF, -INF, 1, 0, 2), (0, 2, 5)),
    "last shard masked": (row(1, 0, 2, -INF, -INF), (0, 3, 5)),
    "middle shard masked": (row(1, -INF, -INF, 0), (0, 1, 3, 4)),
    "masked at the edges": (row(-INF, 1, -INF, -INF, 2, -INF), (0, 3, 6)),
    "first shard empty": (row(1, 0, 2), (0, 0, 3)),
    "last shard empty": (row(1, 0, 2), (0, 3, 3)),
    "two shards empty": (row(1, 0, 2, 1), (0, 0, 2, 2, 4)),
    "single token": (row(-INF, -INF, 4, -INF), (0, 2, 4)),
    "one token each": (row(0, 1, 0, 1), (0, 1, 2, 3, 4)),
    "tokens that get no ticket": (row(9, -60, 8, -70, 0), (0, 2, 5)),
    "odd length": (random_row(2, 131), (0, 65, 131)),
    "lopsided": (random_row(3, 300), (0, 1, 299, 300)),
    "flat": (random_row(4, 500, 1e-4), (0, 125, 250, 375, 500)),
    "signed zeros tie": (row(-0.0, 0.0, -0.0, 0.0), (0, 1, 2, 4)),
}
CASES = pytest.mark.parametrize(("logits", "bounds"), ADVERSARIAL.values(), ids=ADVERSARIAL.keys())
TEMPERATURES = [0.0, 0.3, 1.0, 2.5]


# --- sparse ------------------------------------------------------------------------------------------------


@CASES
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_sparse_equals_the_whole_row(logits: Float32s, bounds: Bounds, temperature: float) -> None:
    for support in (1, 2, 3, 32, logits.size + 5):
        check_sparse(bounds, logits, temperature, support)


SPLITS = st.lists(st.integers(0, 40), max_size=3)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    logits=st.lists(st.sampled_from([-INF, -2.0, 0.0, 0.25, 1.0, 1.5]), min_size=1, max_size=40),
    cuts=SPLITS,
    temperature=st.sampled_from(TEMPERATURES),
    support=st.integers(1, 45),
    u24=st.integers(0, MASS - 1) | st.sampled_from([0, MASS - 1]),
)
def test_sparse_equals_the_whole_row_under_any_split(
    logits: list[float], cuts: list[int], temperature: float, support: int, u24: int
) -> None:
    logits[0] = max(logits[0], -2.0)
    bounds = (0, *sorted(min(cut, len(logits)) for cut in cuts), len(logits))
    check_sparse(bounds, row(*logits), temperature, support, u24)


def test_the_draw_falls_on_both_sides_of_a_shard_boundary() -> None:
    logits, bounds = row(1, 2, 2, 1), (0, 2, 4)
    for edge in sparse_row(logits, None, 1.0, 4).counts.cumsum().tolist():
        for u24 in (edge - 1, min(edge, MASS - 1)):
            check_sparse(bounds, logits, 1.0, 4, u24)


def test_draft_ids_map_to_target_ids() -> None:
    ids = np.array([3, 10, 11, 40, 99], dtype=np.int32)
    check_sparse((0, 2, 5), row(0, 9, -60, 8, 0), 2.0, 4, ids=ids)
    check_dense((0, 2, 5), row(0, 9, -60, 8, 0), 2.0, ids=ids)


def test_only_the_leaders_integer_counts() -> None:
    logits = row(0, 0, 0, 0)
    proposals = on_shards(
        (0, 2, 4),
        logits,
        None,
        lambda group, part, own: propose_sparse(group, part, own, 1.0, 4, MASS - 1 if group.rank else 0),
    )
    assert [proposal.token for proposal in proposals] == [0, 0]
    tokens = on_shards(
        (0, 2, 4),
        logits,
        None,
        lambda group, part, own: draw_dense(group, dense_part(group, part, own, 1.0), MASS - 1 if group.rank else 0),
    )
    assert tokens == [0, 0]


# --- dense -------------------------------------------------------------------------------------------------


@CASES
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_dense_equals_the_whole_row(logits: Float32s, bounds: Bounds, temperature: float) -> None:
    check_dense(bounds, logits, temperature)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    logits=st.lists(st.sampled_from([-INF, -2.0, 0.0, 0.25]) | st.floats(-9, 9, width=32), min_size=1, max_size=40),
    cuts=SPLITS,
    temperature=st.sampled_from(TEMPERATURES),
)
def test_dense_equals_the_whole_row_under_any_split(logits: list[float], cuts: list[int], temperature: float) -> None:
    logits[0] = max(logits[0], -2.0)
    bounds = (0, *sorted(min(cut, len(logits)) for cut in cuts), len(logits))
    check_dense(bounds, row(*logits), temperature)


@pytest.mark.parametrize("size", [3, 7, 3000])
def test_tied_remainders_go_to_the_lowest_ids_of_all_shards(size: int) -> None:
    """All remainders are equal, so the leftover is exactly a prefix of the ids and ends inside a later shard."""
    for bounds in [(0, 1, size), (0, size // 3, size // 2, size), (0, 0, size - 1, size - 1, size)]:
        counts = joined(check_dense(bounds, row(*[0.0] * size), 1.0))[1]
        leftover = MASS % size
        assert counts == [MASS // size + 1] * leftover + [MASS // size] * (size - leftover)


@pytest.mark.parametrize("seed", range(3))
def test_ties_among_many_remainders(seed: int) -> None:
    """Few distinct logits in a long row: the threshold is a value that all shards hold many times."""
    logits = np.random.default_rng(seed).integers(-4, 4, 2000).astype(np.float32)
    check_dense((0, 400, 401, 1500, 2000), logits, 1.0)


def knife_edge(seed: int) -> tuple[Float32s, float, int] | None:
    """A row of two levels, a temperature and a cut, on which the last bit of the normaliser decides a ticket.

    The temperature makes the remainders of both levels equal to within rounding. None when adding the sums of both
    parts does not give other counts than the whole sum, so such a row would test nothing.
    """
    rng = np.random.default_rng(seed)
    logits = -rng.integers(0, 2, int(rng.integers(150, 400))).astype(np.float32)
    logits[0] = 0
    cut = int(rng.integers(1, logits.size))

    def weights_at(temperature: float) -> Float64s:
        weights: Float64s = logits / np.float64(temperature)
        exponentiate(weights)
        return weights

    def gap(temperature: float) -> float:
        weights = weights_at(temperature)
        return float(MASS * (1 - weights.min()) / weights.sum())

    low, high = 1.0, 1.01
    level = np.floor(gap(low))
    if gap(high) >= level:
        return None
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if gap(middle) >= level else (low, middle)
    for temperature in (low, high, *(low + step * 2.0**-52 for step in range(-6, 7))):
        weights = weights_at(temperature)
        in_order, added = weights.sum(), weights[:cut].sum() + weights[cut:].sum()
        if in_order != added and (allocate(weights / in_order) != allocate(weights / added)).any():
            return logits, temperature, cut
    return None


def test_the_last_bit_of_the_normaliser_is_that_of_the_whole_row() -> None:
    cases = [case for case in map(knife_edge, range(60)) if case]
    assert len(cases) > 10
    for logits, temperature, cut in cases:
        check_dense((0, cut, logits.size), logits, temperature)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_full_vocabulary(size: int) -> None:
    logits = random_row(9, 129_280, 2.0)
    logits[[64_639, 64_640]] = logits.max()
    bounds = (0, *(64_640 + step for step in range(size - 1)), 129_280)
    check_sparse(bounds, logits, 1.0, 64)
    if size in (1, 3):
        check_dense(bounds, logits, 1.0)


def test_every_uniform_of_a_small_mass_draws_its_token() -> None:
    """The draw's whole law: each token is hit exactly count times, by consecutive integers, on all ranks."""
    logits, bounds = row(0.3, -1, 0.3, 1, -40, 0.9), (0, 2, 2, 4, 6)

    def work(group: Group, part: Float32s, own: Int32s) -> tuple[RowPart, list[int]]:
        made = dense_part(group, part, own, 1.0, mass=16)
        return made, [draw_dense(group, made, uniform) for uniform in range(16)]

    outcomes = on_shards(bounds, logits, None, work)
    weights = np.exp(np.subtract(logits, 1, dtype=np.float64))
    counts = allocate(weights / weights.sum(), 16)
    assert joined([made for made, _ in outcomes]) == (np.flatnonzero(counts).tolist(), counts[counts > 0].tolist())
    assert [tokens for _, tokens in outcomes] == [np.repeat(np.arange(6), counts).tolist()] * 4


def test_dense_draw_equals_the_whole_rows_draw_at_every_step_of_the_cdf() -> None:
    logits, bounds = random_row(11, 12), (0, 5, 5, 9, 12)
    whole = dense_row(logits, None, 1.0, 12)
    edges = [0, *whole.counts.cumsum().tolist()]
    around = {edge + step for edge in edges for step in (-1, 0, 1)}
    uniforms = sorted(uniform for uniform in around if 0 <= uniform < MASS)

    def work(group: Group, part: Float32s, own: Int32s) -> list[int]:
        made = dense_part(group, part, own, 1.0)
        return [draw_dense(group, made, uniform) for uniform in uniforms]

    assert on_shards(bounds, logits, None, work) == [[draw(whole, uniform) for uniform in uniforms]] * 4


@pytest.mark.parametrize("uniform", [-1, MASS])
def test_dense_draw_refuses_what_is_no_uniform_on_all_ranks(uniform: int) -> None:
    with pytest.raises(GroupError, match="outside a mass") as caught:
        on_shards(
            (0, 1, 2),
            row(0, 0),
            None,
            lambda group, part, own: draw_dense(group, dense_part(group, part, own, 1.0), uniform),
        )
    assert list(caught.value.failures) == [0, 1]


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [(0, 1, 4), (0, 2, 4), (0, 3, 3, 4), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize(
    ("logits", "temperature", "support", "code"),
    [
        (row(0, 1, np.nan, 3), 1.0, 2, RowFault.NOT_FINITE),
        (row(np.nan, -INF, -INF, -INF), 1.0, 2, RowFault.NOT_FINITE),
        (row(0, 1, 2, INF), 1.0, 2, RowFault.NOT_FINITE),
        (row(0, np.nan, 2, 3), 0.0, 1, RowFault.NOT_FINITE),
        (row(-INF, -INF, -INF, -INF), 1.0, 2, RowFault.ZERO_MASS),
        (row(-INF, -INF, -INF, -INF), 0.0, 2, RowFault.ZERO_MASS),
        (row(0, 1, 2, 3), -0.5, 2, RowFault.TEMPERATURE),
        (row(0, 1, 2, 3), np.nan, 2, RowFault.TEMPERATURE),
        (row(0, 1, 2, 3), INF, 2, RowFault.TEMPERATURE),
        (row(0, 1, 2, 3), 1.0, 0, RowFault.SUPPORT),
    ],
)
def test_what_the_whole_row_refuses_is_refused_on_all_ranks(
    logits: Float32s, temperature: float, support: int, code: RowFault, bounds: Bounds
) -> None:
    with pytest.raises(RowError) as whole:
        sparse_row(logits, None, temperature, support)
    assert whole.value.code == code
    works = [lambda group, part, own: propose_sparse(group, part, own, temperature, support, 0)]
    if support:
        works.append(lambda group, part, own: dense_part(group, part, own, temperature))
    for work in works:
        with pytest.raises(GroupError) as caught:
            on_shards(bounds, logits, None, work)
        assert [error.code for error in caught.value.failures.values()] == [code] * (len(bounds) - 1)


@pytest.mark.parametrize("ids", [[2, 3, 0, 1], [0, 1, 1, 2], [1, 0, 2, 3]])
def test_shards_out_of_id_order_are_refused_on_all_ranks(ids: list[int]) -> None:
    with pytest.raises(GroupError, match="ids must ascend") as caught:
        on_shards(
            (0, 2, 4),
            row(0, 0, 0, 0),
            np.array(ids, dtype=np.int32),
            lambda group, part, own: propose_sparse(group, part, own, 1.0, 4, 0),
        )
    assert list(caught.value.failures) == [0, 1]


def test_weights_that_leave_too_much_are_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A normaliser that is off by 2**-20 leaves 16 tickets, more than four weights have remainders."""
    from dspark import draft_shards

    exact = draft_shards.split_sum
    monkeypatch.setattr(draft_shards, "split_sum", lambda group, part: exact(group, part) * (1 + 2.0**-20))
    with pytest.raises(GroupError) as caught:
        on_shards((0, 2, 4), row(0, 1, 2, 3), None, lambda group, part, own: dense_part(group, part, own, 1.0))
    codes = [error.code for error in caught.value.failures.values()]
    assert codes == [RowFault.LEFTOVER] * 2


def test_a_row_part_cannot_change_after_it_was_made() -> None:
    part = check_dense((0, 2, 4), row(0, 1, 2, 3), 1.0)[0]
    with pytest.raises(ValueError, match="read-only"):
        part.counts[0] = 5


def test_the_cases_are_what_they_claim() -> None:
    for logits, bounds in ADVERSARIAL.values():
        assert bounds[0] == 0
        assert bounds[-1] == logits.size
        assert all(low <= high for low, high in pairwise(bounds))
    assert {len(bounds) - 1 for _, bounds in ADVERSARIAL.values()} == {1, 2, 3, 4}
