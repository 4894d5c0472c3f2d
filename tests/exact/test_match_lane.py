"""The match lane: every committed token is the target's own sample, whatever was drafted, admitted or discarded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark import oracle
from dspark.dyadic import Int64s, Row, draw
from dspark.oracle import Prefix
from dspark.philox import POSITION_NOISE_ROUND, Domain, Keys
from dspark.processors import SamplingPolicy, target_row
from dspark.proof.tier0 import GREEDY, ONE_ENTRY, PLAIN, TOP_K, TOP_P
from dspark.proof.toys import SMALL, Case, Step, Toy, joint_law, proposals, round_law, verdict_law
from dspark.tickets import STANDARD, TOTAL, Grid, one_hot_tickets
from dspark.verify import (
    Draws,
    Kind,
    Verdict,
    sample_target_only,
    verify_greedy,
    verify_match,
    verify_ratio,
)

TOYS = [PLAIN, TOP_K, TOP_P, GREEDY, ONE_ENTRY]


def match(case: Case, draws: Draws) -> Verdict:
    """The code that serves. It is given no row."""
    return verify_match(case.tickets_at, case.tokens, case.anchor_position, draws, case.grid)


def _name(toy: Toy) -> str:
    return toy.name


# -- Tier 0: the joint law -------------------------------------------------------------------------------------


@pytest.mark.parametrize("toy", TOYS, ids=_name)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_joint_law_of_three_tokens_is_the_targets(toy: Toy, depth: int) -> None:
    assert joint_law(toy, depth, 3, match) == oracle.ancestral_law(toy.p, 3)


def test_joint_law_at_depth_three() -> None:
    toy = Toy("depth 3", SMALL)
    assert joint_law(toy, 3, 3, match) == oracle.ancestral_law(toy.p, 3)


def test_joint_law_at_depth_four() -> None:
    toy = Toy("depth 4", SMALL, vocab=2)
    assert joint_law(toy, 4, 4, match) == oracle.ancestral_law(toy.p, 4)


@pytest.mark.parametrize("toy", TOYS, ids=_name)
def test_one_round_is_the_textbook_round_of_one_entry_rows(toy: Toy) -> None:
    """Accept x with p(x), else p without x: the emitted run, its length included, has that law."""
    for prefix in [(), (0,), (1, 2)]:
        for depth in (0, 1, 2):
            wanted = oracle.match_round_law(toy.p, toy.q, prefix, depth)
            assert round_law(toy, prefix, depth, match) == wanted


def test_the_first_draft_is_accepted_as_often_as_both_choose_it() -> None:
    """An exact but slow lane (one that never accepts, say) would pass every test of the law and fail this one."""
    for toy in (PLAIN, TOP_K):
        accepted = Fraction(0)
        for case, share in proposals(toy, (), 1):
            law = verdict_law(lambda draws, case=case: match(case, draws), toy.grid.coin)  # type: ignore[misc]
            accepted += share * sum(p for verdict, p in law.items() if verdict.accepted)
        assert accepted == sum(p * q for p, q in zip(toy.p(()), toy.q(()), strict=True))


Rule = Callable[[Case], int]


def _only_after_token_zero(case: Case) -> int:
    return len(case.tokens) if case.tokens[0] == 0 else 0


def _up_to_a_repetition(case: Case) -> int:
    return next((i for i, t in enumerate(case.tokens) if t in case.tokens[:i]), len(case.tokens))


def _while_the_target_agrees(case: Case) -> int:
    """Reads drafts and target rows: the most anticipating rule there is."""
    likely = [int(case.tickets_at(i).argmax()) == t for i, t in enumerate(case.tokens)]
    return likely.index(False) if False in likely else len(likely)


def _by_the_last_draft(case: Case) -> int:
    return int(case.tokens[-1])


PEEKING: list[Rule] = [_only_after_token_zero, _up_to_a_repetition, _while_the_target_agrees, _by_the_last_draft]


def cut_by(rule: Rule, step: Step) -> Step:
    def cut(case: Case, draws: Draws) -> Verdict:
        depth = rule(case)
        return step(replace(case, rows=case.rows[:depth], tokens=case.tokens[:depth]), draws)

    return cut


@pytest.mark.parametrize("rule", PEEKING)
@pytest.mark.parametrize("toy", [PLAIN, TOP_K], ids=_name)
def test_rules_that_read_the_drafts_keep_the_law(toy: Toy, rule: Rule) -> None:
    assert joint_law(toy, 2, 3, cut_by(rule, match)) == oracle.ancestral_law(toy.p, 3)


@pytest.mark.parametrize("rule", PEEKING)
def test_the_same_rules_break_the_ratio_lane(rule: Rule) -> None:
    def ratio(case: Case, draws: Draws) -> Verdict:
        return verify_ratio(case.tickets_at, case.rows, case.tokens, case.anchor_position, draws, case.grid)

    broken = [joint_law(toy, 2, 3, cut_by(rule, ratio)) != oracle.ancestral_law(toy.p, 3) for toy in (PLAIN, TOP_K)]
    assert any(broken)


# -- position-only numbers: safe here and only here ------------------------------------------------------------

COINS = Grid(mass=2, total=20, coin=2520)
P, Q = np.array([14, 6]), Row(np.arange(2, dtype=np.int32), np.array([1, 1]))
Decide = Callable[[Prefix], dict[Verdict, Fraction]]


def in_ratio(drafts: Prefix) -> dict[Verdict, Fraction]:
    rows = [Q] * len(drafts)
    return verdict_law(lambda draws: verify_ratio(lambda _: P, rows, drafts, 0, draws, COINS), COINS.coin)


def in_match(drafts: Prefix) -> dict[Verdict, Fraction]:
    return verdict_law(lambda draws: verify_match(lambda _: P, drafts, 0, draws, COINS), COINS.coin)


def second_token_is_zero(decide: Decide, *, position_only: bool) -> Fraction:
    """Probability of token 0 at the second position when the next round is admitted by a draft of the last one.

    Round 1 drafts two tokens. If the first is rejected, the second was thrown away unread; round 2 drafts that position
    again and verifies it only if the thrown-away draft was token 0. With position-only keys it is the same draft.
    """
    zero = Fraction(0)
    quarter = Fraction(1, 4)
    for first, second in np.ndindex(2, 2):
        for verdict, share in decide((first, second)).items():
            if verdict.accepted:
                token = second if verdict.accepted == 2 else verdict.token
                zero += quarter * share * (token == 0)
                continue
            for again in (second,) if position_only else (0, 1):
                chance = share if position_only else share / 2
                law = decide((again,) if second == 0 else ())
                zero += quarter * chance * sum(
                    p for v, p in law.items() if (again if v.accepted else v.token) == 0
                )
    return zero


def test_position_only_keys_bias_the_ratio_lane_but_not_this_one() -> None:
    right = Fraction(7, 10)
    assert second_token_is_zero(in_ratio, position_only=False) == right
    assert second_token_is_zero(in_ratio, position_only=True) == Fraction(73, 100)
    assert second_token_is_zero(in_match, position_only=True) == right


SEEDS = st.integers(-(1 << 63), (1 << 63) - 1)
WORDS = st.integers(0, (1 << 32) - 1)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(seed=SEEDS, choice=st.integers(0, 255), position=WORDS, domain=st.sampled_from(list(Domain)),
       generation=st.integers(0, (1 << 24) - 1), round_=st.integers(1, (1 << 32) - 1))  # fmt: skip
def test_position_noise_shares_no_number_with_a_drafting_round(
    seed: int, choice: int, position: int, domain: Domain, generation: int, round_: int
) -> None:
    """Rounds of a request start at 1, and fields are packed without hashing: no Philox input can be the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dspark.philox.block", lambda *words: words)
        noise = Keys.for_position_noise(seed, choice).words(Domain.TARGET_ONLY, position)
        ratio = Keys(seed, generation, round_, choice).words(domain, position)
        other = Keys.for_position_noise(seed, choice ^ 1).words(Domain.TARGET_ONLY, position)
    assert noise != ratio
    assert noise != other
    assert noise[2] == POSITION_NOISE_ROUND == 0


# -- Tier 1: token for token -----------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), vocab=st.sampled_from([2, 3, 17, 130]), depth=st.integers(0, 6),
       right=st.integers(0, 6))  # fmt: skip
def test_round_equals_the_oracle(seed: int, vocab: int, depth: int, right: int) -> None:
    rng = np.random.default_rng(seed)
    policy = SamplingPolicy(float(rng.choice([0.0, 0.5, 1.0, 2.0])), int(rng.choice([0, 3])), 0.9)
    target = [target_row((rng.standard_normal(vocab) * 3).astype(np.float32), policy) for _ in range(depth + 1)]
    noise = Keys.for_position_noise(seed, choice=seed % 3)
    own = [sample_target_only(row, 50 + i, noise) for i, row in enumerate(target)]
    tokens = own[: min(right, depth)] + rng.integers(0, vocab, depth - min(right, depth)).tolist()
    verdict = verify_match(target.__getitem__, tokens, 49, noise)
    wanted = oracle.match(
        [row.tolist() for row in target],
        tokens,
        lambda index: noise.draw64(Domain.TARGET_ONLY, 50 + index),
        STANDARD.coin,
    )
    assert (verdict.accepted, verdict.token, verdict.kind.value) == wanted
    assert verdict.accepted >= min(right, depth)
    assert target[verdict.accepted][verdict.token] > 0, "a token without target mass was emitted"


@pytest.mark.parametrize("seed", range(20))
def test_at_temperature_zero_it_is_the_greedy_lane(seed: int) -> None:
    rng = np.random.default_rng(seed)
    argmax = rng.integers(0, 3, 5).tolist()
    tokens = rng.integers(0, 3, 4).tolist()
    noise = Keys.for_position_noise(seed)
    assert verify_match(lambda i: one_hot_tickets(3, argmax[i]), tokens, 0, noise) == verify_greedy(argmax, tokens)


@dataclass
class Recorder:
    """Draws of ``keys`` that remember what was asked."""

    keys: Draws
    asked: list[tuple[Domain, int]]

    def draw64(self, domain: Domain, position: int) -> int:
        self.asked.append((domain, position))
        return self.keys.draw64(domain, position)


def test_rows_are_asked_for_one_after_the_other_and_not_past_a_difference() -> None:
    asked: list[int] = []

    def tickets_at(index: int) -> Int64s:
        asked.append(index)
        return one_hot_tickets(4, 3)

    recorder = Recorder(Keys.for_position_noise(1), [])
    assert verify_match(tickets_at, [3, 0, 3], 10, recorder) == Verdict(1, 3, Kind.CORRECTION)
    assert asked == [0, 1]
    assert recorder.asked == [(Domain.TARGET_ONLY, 11), (Domain.TARGET_ONLY, 12)]
    assert verify_match(tickets_at, [3], 10, recorder) == Verdict(1, 3, Kind.BONUS)


# -- the text is a function of the seed and of p ---------------------------------------------------------------

STANDARD_TOY = Toy("standard", STANDARD, vocab=5, support=3)
LENGTH = 30
Drafter = Callable[[Prefix, Keys], Iterator[int]]


def honest(prefix: Prefix, keys: Keys) -> Iterator[int]:
    drafts: Prefix = ()
    while True:
        row = STANDARD_TOY.draft(prefix + drafts)
        drafts = (*drafts, draw(row, keys.draw24(Domain.PROPOSAL, len(prefix) + len(drafts))))
        yield drafts[-1]


def stubborn(prefix: Prefix, keys: Keys) -> Iterator[int]:
    while True:
        yield 2


def clairvoyant(prefix: Prefix, keys: Keys) -> Iterator[int]:
    """Knows the target and its numbers, and uses both: every other draft is right, the rest are wrong on purpose."""
    noise, drafts = Keys.for_position_noise(keys.seed), prefix
    while True:
        right = sample_target_only(_target(drafts), len(drafts), noise)
        token = right if (len(drafts) + keys.round) % 3 else (right + 1) % 5
        drafts = (*drafts, token)
        yield token


@cache
def _target(prefix: Prefix) -> Int64s:
    return STANDARD_TOY.target(prefix[-3:])


def decode(seed: int, drafter: Drafter, depths: Callable[[int, int], int]) -> tuple[Prefix, list[tuple[Domain, int]]]:
    """Rounds until LENGTH tokens are there; ``depths(round, position)`` may be 0, which is a step without drafts."""
    noise = Recorder(Keys.for_position_noise(seed), [])
    text: Prefix = (0,)
    round_ = 0
    while len(text) < LENGTH:
        round_ += 1
        depth = min(depths(round_, len(text)), LENGTH - len(text) - 1)
        drafting = drafter(text, Keys(seed, 0, round_))
        drafts = tuple(next(drafting) for _ in range(depth))
        if depth == 0:
            text = (*text, sample_target_only(_target(text), len(text), noise))
            continue
        before = text
        verdict = verify_match(lambda i: _target(before + drafts[:i]), drafts, len(text) - 1, noise)  # noqa: B023
        text = (*text, *drafts[: verdict.accepted], verdict.token)
    return text, noise.asked


SCHEDULES: list[Callable[[int, int], int]] = [
    *(lambda round_, position, depth=depth: depth for depth in range(5)),  # type: ignore[misc]
    lambda round_, position: 4 if round_ % 3 else 0,
    lambda round_, position: (round_ * 7 + position) % 5,
]


@pytest.mark.parametrize("seed", [0, -5, 77])
def test_the_text_is_the_same_with_any_drafter_and_any_depths(seed: int) -> None:
    alone, _ = decode(seed, stubborn, lambda round_, position: 0)
    for drafter in (honest, stubborn, clairvoyant):
        for schedule in SCHEDULES:
            text, asked = decode(seed, drafter, schedule)
            assert text == alone
            # Each number is used once, in order, and for nothing but its own position.
            assert asked == [(Domain.TARGET_ONLY, position) for position in range(1, LENGTH)]
    assert decode(seed + 1, honest, SCHEDULES[2])[0] != alone


def test_tickets_of_the_toy_are_real_ones() -> None:
    row = _target((0, 1))
    assert int(row.sum()) == TOTAL
    assert np.count_nonzero(row) > 2
