"""Target tickets, acceptance, residual and choice against the oracle, at the edges of the integers."""

from __future__ import annotations

from decimal import Context, Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark import oracle
from dspark.dyadic import MASS, Row, allocate, greedy_row, softmax64, sparse_row
from dspark.processors import SamplingPolicy, target_row
from dspark.proof.toys import SMALL
from dspark.tickets import (
    STANDARD,
    TOTAL,
    Grid,
    ResidualIdentityError,
    TicketError,
    accepts,
    one_hot_tickets,
    pick,
    residual,
    target_tickets,
    tickets_from_weights,
)

COIN = 1 << 64


def counts_of(row: Row) -> dict[int, int]:
    return dict(zip(row.ids.tolist(), row.counts.tolist(), strict=True))


# --- tickets -----------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    logits=st.lists(st.floats(-60, 10) | st.sampled_from([0.0, 1.0]), min_size=1, max_size=40),
    total=st.sampled_from([TOTAL, 1 << 53, 64]),
)
def test_tickets_equal_the_oracle(logits: list[float], total: int) -> None:
    weights = softmax64(np.array(logits))
    wanted = oracle.tickets([Fraction(weight) for weight in weights.tolist()], total)
    assert tickets_from_weights(weights, total).tolist() == wanted
    assert sum(wanted) == total


def test_the_leftover_is_signed() -> None:
    """A nonnegative leftover, as on the side of q, would refuse healthy rows."""
    rng = np.random.default_rng(0)
    negative = 0
    for _ in range(60):
        weights = softmax64(rng.standard_normal(20) * 2)
        leftover = TOTAL - sum(int(weight * Fraction(TOTAL)) for weight in map(Fraction, weights.tolist()))
        negative += leftover < 0
        tickets = tickets_from_weights(weights)
        assert int(tickets.sum()) == TOTAL
        assert tickets.min() >= 0
    assert negative > 0


def test_tickets_are_near_the_softmax_and_sum_exactly() -> None:
    logits = np.random.default_rng(1).standard_normal(50_000) * 3
    tickets = target_tickets(logits)
    assert int(tickets.sum()) == TOTAL
    variation = np.abs(tickets / TOTAL - softmax64(logits)).sum() / 2
    assert variation <= logits.size / TOTAL + 1e-15


def test_tickets_are_near_the_exact_softmax() -> None:
    """Total variation at most V / 2**60, with FP64 rounding and the exponential function counted in."""
    context = Context(prec=40)
    for spread, temperature in [(0.1, 1.0), (3.0, 1.0), (3.0, 0.7), (12.0, 1.0)]:
        logits = (np.random.default_rng(4).standard_normal(4000) * spread).astype(np.float32)
        exact = [context.exp(Decimal(float(logit)) / Decimal(temperature)) for logit in logits]
        total = sum(exact, Decimal(0))
        tickets = target_row(logits, SamplingPolicy(temperature)).tolist()
        off = sum(abs(Decimal(TOTAL) * weight / total - ticket) for weight, ticket in zip(exact, tickets, strict=True))
        assert off / 2 <= logits.size


def test_removed_tokens_have_no_ticket_and_leave_no_trace() -> None:
    survivors = np.random.default_rng(2).standard_normal(30)
    logits = np.full(1000, -np.inf)
    logits[::33][:30] = survivors
    tickets = target_tickets(logits)
    assert not tickets[np.isinf(logits)].any()
    assert tickets[~np.isinf(logits)].tolist() == target_tickets(survivors).tolist()


def test_ties_give_the_leftover_to_the_lowest_id() -> None:
    first, second, third = target_tickets(np.zeros(3)).tolist()
    assert first > second == third
    assert first + second + third == TOTAL


@pytest.mark.parametrize(
    "logits",
    [[0.0, np.nan], [0.0, np.inf], [-np.inf, -np.inf], []],
)
def test_logits_without_a_distribution_are_refused(logits: list[float]) -> None:
    with pytest.raises(TicketError):
        target_tickets(np.array(logits, dtype=np.float64))


@pytest.mark.parametrize(
    "weights",
    [[0.5, np.nan], [np.inf, 0.0], [1.5, -0.5], [0.5, 0.5 + 2.0**-30], [0.5, 0.5 - 2.0**-30], []],
)
def test_weights_that_are_no_normalised_row_are_refused(weights: list[float]) -> None:
    with pytest.raises(TicketError):
        tickets_from_weights(np.array(weights, dtype=np.float64))


def test_one_hot_row() -> None:
    assert one_hot_tickets(4, 2).tolist() == [0, 0, TOTAL, 0]


# --- acceptance --------------------------------------------------------------------------------------------

TICKETS = st.one_of(st.integers(0, TOTAL), st.sampled_from([0, 1, TOTAL - 1, TOTAL, 1 << 36, (1 << 36) + 1]))
COUNTS = st.one_of(st.integers(1, MASS), st.sampled_from([1, 2, 3, MASS - 1, MASS]))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(ticket=TICKETS, count=COUNTS, step=st.integers(-2, 2))
def test_acceptance_equals_the_oracle_on_both_sides_of_its_boundary(
    ticket: int, count: int, step: int
) -> None:
    boundary = -(-ticket * COIN // (count * STANDARD.scale))
    u64 = min(max(boundary + step, 0), COIN - 1)
    wanted = oracle.accepts(Fraction(u64, COIN), Fraction(count, MASS), Fraction(ticket, TOTAL))
    assert accepts(u64, count, ticket) is wanted


@settings(max_examples=100, deadline=None, derandomize=True)
@given(ticket=TICKETS, count=COUNTS)
def test_the_number_of_accepting_coins_is_the_ratio_rounded_up(ticket: int, count: int) -> None:
    law = oracle.acceptance_probability(Fraction(count, MASS), Fraction(ticket, TOTAL))
    coins = -(-law.numerator * COIN // law.denominator)
    assert coins == 0 or accepts(coins - 1, count, ticket)
    assert coins == COIN or not accepts(coins, count, ticket)
    assert 0 <= Fraction(coins, COIN) - law < Fraction(1, COIN)


def test_every_coin_of_a_small_grid() -> None:
    """Acceptance is exact for every ticket and count when the coin resolves the ratio; and it is monotone."""
    grid = Grid(4, 8, 24)
    for count in range(1, 5):
        for ticket in range(9):
            wins = [accepts(coin, count, ticket, grid) for coin in range(grid.coin)]
            assert wins == sorted(wins, reverse=True)
            law = oracle.acceptance_probability(Fraction(count, 4), Fraction(ticket, 8))
            assert Fraction(sum(wins), grid.coin) == law


def test_a_token_without_target_mass_is_never_accepted_even_at_coin_zero() -> None:
    assert not accepts(0, 1, 0)
    assert not accepts(0, MASS, 0)
    assert accepts(0, MASS, 1)


def test_a_certain_token_is_always_accepted() -> None:
    assert accepts(COIN - 1, MASS, TOTAL)
    assert not accepts(COIN - 1, MASS, TOTAL - 1)


def test_numpy_scalars_do_not_wrap() -> None:
    assert accepts(COIN - 1, np.int64(MASS), np.int64(TOTAL))  # type: ignore[arg-type]
    assert not accepts(COIN - 1, np.int64(MASS), np.int64(1))  # type: ignore[arg-type]


# --- residual ----------------------------------------------------------------------------------------------


def random_case(seed: int) -> tuple[np.ndarray, Row]:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal(200) * rng.choice([0.3, 3.0, 12.0])
    logits[rng.random(200) < 0.3] = -np.inf
    logits[0] = 0.0
    draft = (np.nan_to_num(logits, neginf=-5.0) + rng.standard_normal(200)).astype(np.float32)
    return target_tickets(logits), sparse_row(draft, None, float(rng.choice([0.3, 1.0, 3.0])), 32)


@pytest.mark.parametrize("seed", range(12))
def test_residual_equals_the_oracle_over_the_whole_vocabulary(seed: int) -> None:
    tickets, row = random_case(seed)
    masses = residual(tickets, row)
    assert masses.tolist() == oracle.residual(tickets.tolist(), counts_of(row), STANDARD.scale)
    outside = np.setdiff1d(np.arange(tickets.size), row.ids)
    assert np.array_equal(masses[outside], tickets[outside])


def test_residual_at_the_int64_edge() -> None:
    masses = residual(one_hot_tickets(3, 0), greedy_row(2))
    assert masses.tolist() == [TOTAL, 0, 0]
    assert not residual(one_hot_tickets(3, 1), greedy_row(1)).any()


def test_residual_does_not_touch_p_or_q() -> None:
    tickets, row = random_case(1)
    before = tickets.copy(), row.counts.copy()
    residual(tickets, row)
    assert np.array_equal(tickets, before[0])
    assert np.array_equal(row.counts, before[1])


@pytest.mark.parametrize("delta", [-1, 1])
def test_one_ticket_too_many_or_too_few_is_caught(delta: int) -> None:
    tickets, row = random_case(2)
    tickets[0] += delta
    with pytest.raises(ResidualIdentityError, match="exceeds"):
        residual(tickets, row)


def test_a_wrong_total_of_q_is_caught() -> None:
    tickets, row = random_case(3)
    counts = row.counts.copy()
    counts[0] += 1
    with pytest.raises(ResidualIdentityError):
        residual(tickets, Row(row.ids, counts))


# --- choice ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_choice_equals_the_oracle_at_every_step_of_the_cdf(seed: int) -> None:
    tickets, row = random_case(seed)
    for masses in (tickets, residual(tickets, row)):
        total, listed = int(masses.sum()), masses.tolist()
        for edge in masses.cumsum()[::17].tolist():
            for step in (-1, 0, 1):
                u64 = min(max(-(-edge * COIN // total) + step, 0), COIN - 1)
                chosen = pick(masses, u64)
                assert chosen == oracle.pick(listed, u64, COIN)
                assert masses[chosen] > 0


def test_choice_law_over_every_coin_of_a_small_grid() -> None:
    masses = np.array([0, 3, 0, 4, 1, 0])
    picks = [pick(masses, coin, Grid(4, 8, 40)) for coin in range(40)]
    assert np.bincount(picks, minlength=6).tolist() == [0, 15, 0, 20, 5, 0]
    assert picks == sorted(picks)


def test_mass_zero_is_unreachable_at_both_ends_of_the_coin() -> None:
    masses = np.array([0, 0, 1, 0, TOTAL - 1, 0, 0])
    assert pick(masses, 0) == 2
    assert pick(masses, COIN - 1) == 4


def test_nothing_to_pick_is_refused() -> None:
    with pytest.raises(TicketError, match="sum to zero"):
        pick(np.zeros(3, dtype=np.int64), 5)


def test_accept_and_residual_partition_the_target_on_every_pair_of_a_small_grid() -> None:
    """min(p, q) plus the residual is p, for every q in eighths and p in steps of eighths and quarters."""
    drafts = [(a, b, 8 - a - b) for a in range(9) for b in range(9 - a)]
    targets = [(a, b, 16 - a - b) for a in range(0, 17, 2) for b in range(0, 17 - a, 4)]
    for q in drafts:
        ids = np.flatnonzero(q)
        row = Row(ids.astype(np.int32), np.array(q)[ids])
        for p in targets:
            masses = residual(np.array(p), row, SMALL)
            accepted = [min(p[token], q[token] * SMALL.scale) for token in range(3)]
            rejected = 16 - sum(accepted)
            assert int(masses.sum()) == rejected
            assert [a + m for a, m in zip(accepted, masses.tolist(), strict=True)] == list(p)


def test_allocated_rows_meet_the_identity_at_a_small_mass() -> None:
    row_counts = allocate(softmax64(np.array([0.3, 0.1, -2.0])), SMALL.mass)
    row = Row(np.array([0, 2, 4], dtype=np.int32)[row_counts > 0], row_counts[row_counts > 0])
    masses = residual(target_tickets(np.arange(5.0), SMALL.total), row, SMALL)
    assert masses.sum() > 0
