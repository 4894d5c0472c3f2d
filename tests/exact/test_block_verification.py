"""Block verification against its paper, its oracle, and token verification; the joint laws are with the proofs."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark import oracle
from dspark.block_verification import Branch, verify_block
from dspark.dyadic import MASS, Int64s, Row, RowError, RowFault, greedy_row
from dspark.philox import Domain
from dspark.proof.block_steps import expected_accepted, production_block
from dspark.proof.toys import Toy, proposals, verdict_law
from dspark.tickets import STANDARD, TOTAL, Grid, ResidualIdentityError, TicketError, one_hot_tickets
from dspark.verify import Keys, Kind, Verdict, verify_ratio

from .test_verify import Recorder, make_round

DOMAINS = {"acceptance": Domain.ACCEPTANCE, "correction": Domain.CORRECTION, "bonus": Domain.BONUS}


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
    verdict = verify_block(target.__getitem__, rows, tokens, 49, keys)
    wanted = oracle.verify_block(
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


class PaperToy(Toy):
    """The example of the paper's introduction: p = (1/3, 2/3) and q = (2/3, 1/3) behind every prefix."""

    def target(self, prefix: tuple[int, ...]) -> Int64s:
        return np.array([4, 8], dtype=np.int64)

    def draft(self, prefix: tuple[int, ...]) -> Row:
        return Row(np.array([0, 1], dtype=np.int32), np.array([4, 2], dtype=np.int64))


def test_the_papers_example_accepts_11_ninths_and_token_by_token_10_ninths() -> None:
    toy = PaperToy("paper", Grid(6, 12, 12**2 * 5 * 7 * 11), vocab=2)
    assert expected_accepted(toy, 2, block=True) == Fraction(11, 9)
    assert expected_accepted(toy, 2, block=False) == Fraction(10, 9)
    seen = Fraction(0)
    for case, share in proposals(toy, (), 2):
        law = verdict_law(lambda draws, case=case: production_block(case, draws), toy.grid.coin)
        seen += share * sum(chance * verdict.accepted for verdict, chance in law.items())
    assert seen == Fraction(11, 9)


def test_one_draft_is_judged_as_token_by_token() -> None:
    """Up to the floor of its weight: below one part in 2**60, which no coin of this run falls into."""
    for seed in range(300):
        keys = Keys(seed, 0, 1)
        target, rows, tokens = make_round(seed, 17, 1, keys)
        block = verify_block(target.__getitem__, rows, tokens, 49, keys)
        token = verify_ratio(target.__getitem__, rows, tokens, 49, keys)
        assert (block.accepted, block.kind) == (token.accepted, token.kind)


def test_no_drafts_are_a_plain_sample() -> None:
    assert verify_block(lambda _: one_hot_tickets(5, 4), [], [], 7, Keys(1, 0, 1)) == Verdict(0, 4, Kind.BONUS)


def test_numbers_are_asked_from_the_longest_prefix_down_and_once() -> None:
    recorder = Recorder(0)  # a coin of 0 keeps whatever has any weight
    target = [one_hot_tickets(5, 3), one_hot_tickets(5, 1), one_hot_tickets(5, 2)]
    verdict = verify_block(target.__getitem__, [greedy_row(3), greedy_row(1)], [3, 1], 10, recorder)
    assert verdict == Verdict(2, 2, Kind.BONUS)
    assert recorder.asked == [(Domain.ACCEPTANCE, 12), (Domain.BONUS, 13)]

    recorder = Recorder(0)
    verdict = verify_block(target.__getitem__, [greedy_row(3), greedy_row(0)], [3, 0], 10, recorder)
    assert verdict == Verdict(1, 1, Kind.CORRECTION)
    assert recorder.asked == [(Domain.ACCEPTANCE, 11), (Domain.CORRECTION, 12)]


def test_rows_behind_a_weight_of_zero_are_not_made() -> None:
    asked: list[int] = []

    def tickets_at(index: int) -> Int64s:
        asked.append(index)
        return one_hot_tickets(5, 4)

    verdict = verify_block(tickets_at, [greedy_row(1)] * 4, [1] * 4, 10, Keys(3, 0, 1))
    assert verdict == Verdict(0, 4, Kind.CORRECTION)
    assert asked == [0]


def test_a_draft_without_a_count_is_refused() -> None:
    with pytest.raises(RowError) as caught:
        verify_block(lambda _: one_hot_tickets(5, 4), [greedy_row(1)], [4], 7, Keys(1, 0, 1))
    assert caught.value.code is RowFault.ZERO_AT_TOKEN


def test_rows_and_tokens_must_pair() -> None:
    with pytest.raises(ValueError, match="1 rows for 0 drafted tokens"):
        verify_block(lambda _: one_hot_tickets(5, 4), [greedy_row(1)], [], 7, Keys(1, 0, 1))


@pytest.mark.parametrize("wrong", ["p", "q"])
def test_a_wrong_total_is_noticed_at_the_correction(wrong: str) -> None:
    tickets, row = one_hot_tickets(5, 4), greedy_row(1)
    if wrong == "p":
        tickets[2] += 1
    else:
        row = Row(row.ids.copy(), row.counts + 1)
    with pytest.raises(ResidualIdentityError):
        verify_block(lambda _: tickets, [row], [1], 7, Keys(1, 0, 1))


def test_a_prefix_that_is_always_continued_has_nothing_to_correct() -> None:
    halves = np.array([TOTAL // 2, TOTAL // 2], dtype=np.int64)
    row = Row(np.array([0, 1], dtype=np.int32), np.array([MASS // 2, MASS // 2], dtype=np.int64))
    branch = Branch(TOTAL, halves, row, STANDARD)
    assert branch.extended(0) == branch.extended(1) == TOTAL
    assert not branch.keeps(0)
    with pytest.raises(TicketError):
        branch.correction(0)


def test_the_correction_walks_the_whole_vocabulary_in_order() -> None:
    """Every coin of a small grid: supported ids and the gaps between them get the masses that the oracle names."""
    grid = Grid(8, 16, 16 * 16)
    tickets = np.array([2, 5, 0, 3, 1, 4, 1], dtype=np.int64)
    row = Row(np.array([1, 3, 5], dtype=np.int32), np.array([5, 1, 2], dtype=np.int64))
    for weight in range(1, 17):
        branch = Branch(weight, tickets, row, grid)
        q = {token: Fraction(row.count(token), 8) for token in (1, 3, 5)}
        p = [Fraction(int(ticket), 16) for ticket in tickets]
        masses = [int(share * 256) for share in oracle.block_masses(Fraction(weight, 16), p, q, 16)]
        for coin in range(256):
            assert branch.correction(coin) == oracle.pick(masses, coin, 256)
