"""Sampled law of the real numbers: Philox keys, packed and validated rows, serving constants.

Exact enumeration (``tests/exact``) proves the rule; these tests show that the keyed draws feed it independent
uniforms and that nothing is lost between the worker's arrays and the verifier's. Seeds are fixed, so every
figure is a constant; the bars are quantiles at alpha = 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest

from dspark.dyadic import Int64s, Row, draw, pack_rows, sparse_row, validate_reply
from dspark.philox import Domain, Keys
from dspark.processors import SamplingPolicy, target_row
from dspark.tickets import TOTAL, accepts, pick, residual
from dspark.verify import Kind, Verdict, verify_ratio

VOCAB, SUPPORT, DEPTH, LENGTH = 4, 2, 2, 3
REQUESTS = 5000
POLICY = SamplingPolicy(temperature=0.9)

# Upper 1e-6 quantile of chi-square with 63 degrees of freedom.
BAR_63 = 131.370

# Every row is a permutation of these, so no cell of the joint is rare.
LOGITS = np.array([0.5, 0.15, -0.15, -0.5], dtype=np.float32)

Prefix = tuple[int, ...]
Verify = Callable[[Callable[[int], Int64s], Sequence[Row], Sequence[int], int, Keys], Verdict]


@cache
def target(prefix: Prefix) -> Int64s:
    return target_row(_logits(prefix), POLICY)


@cache
def proposal(prefix: Prefix) -> Row:
    """The drafter ranks the tokens in reverse and misses half of them, so most drafts are rejected."""
    return sparse_row(-_logits(prefix), None, 1.0, SUPPORT)


def _logits(prefix: Prefix) -> np.ndarray:
    seed = sum((token + 1) * 5**place for place, token in enumerate(prefix))
    return np.random.default_rng(seed).permutation(LOGITS)


def over_the_wire(rows: list[Row], tokens: list[int]) -> list[Row]:
    ids, q = np.zeros((DEPTH, SUPPORT), np.int32), np.zeros((DEPTH, SUPPORT), np.float32)
    entries = np.zeros(DEPTH, np.int32)
    pack_rows(rows, SUPPORT, ids, q, entries)
    return validate_reply(np.array(tokens, np.int32), entries, ids, q, VOCAB, DEPTH, SUPPORT)


def decode(seed: int, verify: Verify) -> tuple[Prefix, list[Verdict]]:
    """One request: rounds of draft and verify until LENGTH tokens are committed."""
    committed: Prefix = ()
    verdicts: list[Verdict] = []
    while len(committed) < LENGTH:
        keys = Keys(seed, generation=0, round=len(verdicts))
        rows: list[Row] = []
        drafts: list[int] = []
        for _ in range(DEPTH):
            row = proposal((*committed, *drafts))
            rows.append(row)
            drafts.append(draw(row, keys.draw24(Domain.PROPOSAL, len(committed) + len(drafts) + 1)))
        prefix, tokens = committed, tuple(drafts)
        verdict = verify(
            lambda i, prefix=prefix, tokens=tokens: target(prefix + tokens[:i]),  # type: ignore[misc]
            over_the_wire(rows, drafts),
            drafts,
            len(committed),
            keys,
        )
        verdicts.append(verdict)
        committed = (*committed, *drafts[: verdict.accepted], verdict.token)
    return committed[:LENGTH], verdicts


def joint_probability(sequence: Prefix) -> float:
    tickets = [int(target(sequence[:i])[token]) for i, token in enumerate(sequence)]
    return float(np.prod([ticket / TOTAL for ticket in tickets]))


def chi_square(verify: Verify) -> float:
    """Statistic of the joint of three tokens, 64 cells, each with an expectation of at least 10."""
    expected = {cell: REQUESTS * joint_probability(cell) for cell in product(range(VOCAB), repeat=LENGTH)}
    assert min(expected.values()) >= 10
    seen: dict[Prefix, int] = {}
    for seed in range(REQUESTS):
        sequence, _ = decode(seed, verify)
        seen[sequence] = seen.get(sequence, 0) + 1
    return sum((seen.get(cell, 0) - mean) ** 2 / mean for cell, mean in expected.items())


def test_joint_of_three_tokens_has_the_targets_law() -> None:
    assert chi_square(verify_ratio) < BAR_63


def correction_from_p(
    tickets_at: Callable[[int], Int64s], rows: Sequence[Row], tokens: Sequence[int], anchor: int, keys: Keys
) -> Verdict:
    """The planted bug: after a rejection, sample the target instead of the residual."""
    for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        tickets, position = tickets_at(index), anchor + 1 + index
        coin = keys.draw64(Domain.ACCEPTANCE, position)
        if not accepts(coin, row.count(token), int(tickets[token])):
            return Verdict(index, pick(tickets, keys.draw64(Domain.CORRECTION, position)), Kind.CORRECTION)
    coin = keys.draw64(Domain.BONUS, anchor + 1 + len(rows))
    return Verdict(len(rows), pick(tickets_at(len(rows)), coin), Kind.BONUS)


def correction_with_the_acceptance_coin(
    tickets_at: Callable[[int], Int64s], rows: Sequence[Row], tokens: Sequence[int], anchor: int, keys: Keys
) -> Verdict:
    """The planted bug: the correction shares the noise of the acceptance."""
    verdict = verify_ratio(tickets_at, rows, tokens, anchor, keys)
    if verdict.kind is Kind.BONUS:
        return verdict
    index = verdict.accepted
    coin = keys.draw64(Domain.ACCEPTANCE, anchor + 1 + index)
    return Verdict(index, pick(residual(tickets_at(index), rows[index]), coin), Kind.CORRECTION)


def test_residuals_have_two_tokens() -> None:
    """With one token in the residual, a correction that shares noise would look right."""
    assert np.count_nonzero(residual(target(()), proposal(()))) == 2


@pytest.mark.parametrize("bug", [correction_from_p, correction_with_the_acceptance_coin])
def test_the_chi_square_can_fail(bug: Verify) -> None:
    assert chi_square(bug) > 2 * BAR_63


def test_first_draft_is_accepted_as_often_as_p_and_q_overlap() -> None:
    """An exact but slow verifier (or a wrong row) would pass every test of the law and fail this one."""
    tickets, row = target(()), proposal(())
    overlap = sum(min(int(tickets[v]) / TOTAL, row.count(v) / 2**24) for v in range(VOCAB))
    accepted = sum(decode(seed, verify_ratio)[1][0].accepted > 0 for seed in range(3000))
    assert abs(accepted - 3000 * overlap) < 4.9 * np.sqrt(3000 * overlap * (1 - overlap))


def pair_statistic(pairs: list[tuple[int, int]]) -> float:
    """Chi-square of independence and uniformity on an 8 x 8 grid of the top three bits (64 cells, df 63)."""
    table = np.zeros((8, 8))
    for first, second in pairs:
        table[first >> 61, second >> 61] += 1
    mean = len(pairs) / 64
    return float(((table - mean) ** 2 / mean).sum())


SAMPLES = 6400


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Domain.ACCEPTANCE, Domain.CORRECTION),
        (Domain.ACCEPTANCE, Domain.PROPOSAL),
        (Domain.CORRECTION, Domain.PROPOSAL),
        (Domain.ACCEPTANCE, Domain.BONUS),
        (Domain.TARGET_ONLY, Domain.BONUS),
    ],
)
def test_domains_are_independent(one: Domain, other: Domain) -> None:
    keys = [Keys(seed, 0, 0) for seed in range(SAMPLES)]
    assert pair_statistic([(key.draw64(one, 7), key.draw64(other, 7)) for key in keys]) < BAR_63


@pytest.mark.parametrize(
    "later",
    [Keys(5, 0, 1), Keys(5, 1, 0), Keys(5, 0, 0, choice=1), Keys(6, 0, 0)],
    ids=["round", "generation", "choice", "seed"],
)
def test_every_key_field_gives_fresh_numbers_at_the_same_position(later: Keys) -> None:
    """A position that is drafted again in another round, generation or choice must not meet its old noise."""
    first = Keys(5, 0, 0)
    pairs = [
        (first.draw64(Domain.PROPOSAL, position), later.draw64(Domain.PROPOSAL, position))
        for position in range(SAMPLES)
    ]
    assert pair_statistic(pairs) < BAR_63


def test_neighbouring_positions_and_draws_are_independent() -> None:
    keys = Keys(9, 3, 2)
    by_position = [keys.draw64(Domain.TEST, position) for position in range(SAMPLES + 1)]
    by_draw = [keys.draw64(Domain.TEST, 0, draw) for draw in range(SAMPLES + 1)]
    for series in (by_position, by_draw):
        assert pair_statistic(list(pairwise(series))) < BAR_63


def test_pair_statistic_can_fail() -> None:
    keys = Keys(9, 3, 2)
    same = [keys.draw64(Domain.TEST, position) for position in range(SAMPLES)]
    assert pair_statistic(list(zip(same, same, strict=True))) > 100 * BAR_63
