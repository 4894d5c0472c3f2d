"""Tier 1: the verification round equals the oracle, decision for decision, on the same random integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark import oracle
from dspark.dyadic import MASS, Int64s, Row, RowError, RowFault, draw, greedy_row, sparse_row
from dspark.philox import Domain
from dspark.processors import SamplingPolicy, target_row
from dspark.tickets import STANDARD, TOTAL, ResidualIdentityError, one_hot_tickets
from dspark.verify import Keys, Kind, Verdict, sample_target_only, verify_greedy, verify_ratio

DOMAINS = {"acceptance": Domain.ACCEPTANCE, "correction": Domain.CORRECTION, "bonus": Domain.BONUS}


def make_round(seed: int, vocab: int, depth: int, keys: Keys) -> tuple[list[Int64s], list[Row], list[int]]:
    """Target rows under a random policy, and a proposal as the worker makes it."""
    rng = np.random.default_rng(seed)
    policy = SamplingPolicy(float(rng.choice([0.0, 0.5, 1.0, 2.0])), int(rng.choice([0, 3])), 0.9)
    logits = (rng.standard_normal((depth + 1, vocab)) * 3).astype(np.float32)
    drafts = logits[:depth] + rng.standard_normal((depth, vocab)).astype(np.float32)
    rows = [sparse_row(draft, None, float(rng.choice([0.0, 0.7, 1.5])), 8) for draft in drafts]
    tokens = [draw(row, keys.draw24(Domain.PROPOSAL, 50 + i)) for i, row in enumerate(rows)]
    return [target_row(row, policy) for row in logits], rows, tokens


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([2, 3, 17, 130]),
    depth=st.integers(0, 6),
    round_=st.integers(0, 9),
)
def test_round_equals_the_oracle(seed: int, vocab: int, depth: int, round_: int) -> None:
    keys = Keys(seed, 1, round_)
    target, rows, tokens = make_round(seed, vocab, depth, keys)
    verdict = verify_ratio(target.__getitem__, rows, tokens, 49, keys)
    wanted = oracle.verify(
        [row.tolist() for row in target],
        [dict(zip(row.ids.tolist(), row.counts.tolist(), strict=True)) for row in rows],
        tokens,
        lambda kind, index: keys.draw64(DOMAINS[kind], 50 + index),
        MASS,
        TOTAL,
        STANDARD.coin,
    )
    assert (verdict.accepted, verdict.token, verdict.kind.value) == wanted
    assert target[verdict.accepted][verdict.token] > 0, "a token without target mass was emitted"


class Recorder:
    """Scripted draws that remember what was asked."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.asked: list[tuple[Domain, int]] = []

    def draw64(self, domain: Domain, position: int) -> int:
        self.asked.append((domain, position))
        return self.value


def test_positions_and_domains_of_a_fully_accepted_round() -> None:
    recorder = Recorder(0)
    rows_asked: list[int] = []

    def tickets_at(index: int) -> Int64s:
        rows_asked.append(index)
        return one_hot_tickets(4, index)

    verdict = verify_ratio(tickets_at, [greedy_row(0), greedy_row(1)], [0, 1], 10, recorder)
    assert verdict == Verdict(2, 2, Kind.BONUS)
    assert recorder.asked == [(Domain.ACCEPTANCE, 11), (Domain.ACCEPTANCE, 12), (Domain.BONUS, 13)]
    assert rows_asked == [0, 1, 2]


def test_a_rejection_stops_asking_for_target_rows() -> None:
    recorder = Recorder(0)
    rows_asked: list[int] = []

    def tickets_at(index: int) -> Int64s:
        rows_asked.append(index)
        return one_hot_tickets(4, 3)

    verdict = verify_ratio(tickets_at, [greedy_row(3), greedy_row(0), greedy_row(3)], [3, 0, 3], 10, recorder)
    assert verdict == Verdict(1, 3, Kind.CORRECTION)
    assert recorder.asked == [(Domain.ACCEPTANCE, 11), (Domain.ACCEPTANCE, 12), (Domain.CORRECTION, 12)]
    assert rows_asked == [0, 1]


def test_no_drafts_is_a_bonus_draw() -> None:
    keys = Keys(1, 0, 0)
    assert verify_ratio(lambda _: one_hot_tickets(5, 4), [], [], 7, keys) == Verdict(0, 4, Kind.BONUS)


def test_a_token_outside_its_row_is_refused() -> None:
    with pytest.raises(RowError) as refusal:
        verify_ratio(lambda _: one_hot_tickets(5, 4), [greedy_row(1)], [4], 7, Keys(1, 0, 0))
    assert refusal.value.code == RowFault.ZERO_AT_TOKEN


def test_rows_and_tokens_must_pair_up() -> None:
    with pytest.raises(ValueError, match="own row"):
        verify_ratio(lambda _: one_hot_tickets(5, 4), [greedy_row(1)], [], 7, Keys(1, 0, 0))


def test_a_wrong_total_stops_the_round() -> None:
    broken = one_hot_tickets(5, 4)
    broken[4] -= 1
    with pytest.raises(ResidualIdentityError):
        verify_ratio(lambda _: broken, [greedy_row(1)], [1], 7, Keys(1, 0, 0))


@pytest.mark.parametrize(
    ("argmax", "tokens", "verdict"),
    [
        ([5, 6, 7], [5, 6], Verdict(2, 7, Kind.BONUS)),
        ([5, 6, 7], [5, 9], Verdict(1, 6, Kind.CORRECTION)),
        ([5, 6, 7], [9, 6], Verdict(0, 5, Kind.CORRECTION)),
        ([5], [], Verdict(0, 5, Kind.BONUS)),
    ],
)
def test_greedy_lane(argmax: list[int], tokens: list[int], verdict: Verdict) -> None:
    assert verify_greedy(argmax, tokens) == verdict


def test_greedy_lane_needs_a_bonus_row() -> None:
    with pytest.raises(ValueError, match="need 3 target rows, got 2"):
        verify_greedy([1, 2], [1, 2])


@pytest.mark.parametrize("seed", range(20))
def test_greedy_lane_is_the_ratio_lane_at_temperature_zero(seed: int) -> None:
    """Also with drafts that were sampled: a one-hot p accepts its maximum always and nothing else ever."""
    rng = np.random.default_rng(seed)
    argmax = rng.integers(0, 3, 5).tolist()
    keys = Keys(seed, 0, 0)
    rows = [sparse_row(rng.standard_normal(3).astype(np.float32), None, 1.0, 3) for _ in range(4)]
    tokens = [draw(row, keys.draw24(Domain.PROPOSAL, 1 + i)) for i, row in enumerate(rows)]
    ratio = verify_ratio(lambda i: one_hot_tickets(3, argmax[i]), rows, tokens, 0, keys)
    assert ratio == verify_greedy(argmax, tokens)


def test_target_only_has_its_own_domain() -> None:
    recorder = Recorder(1 << 63)
    tickets = np.array([TOTAL // 2, TOTAL // 4, TOTAL // 4])
    assert sample_target_only(tickets, 42, recorder) == 1
    assert recorder.asked == [(Domain.TARGET_ONLY, 42)]
