"""Counterexamples of the seed documents: admission that looks at a draw is biased, fixed depth is not.

Each test runs the production verification step; only who decides the depth differs.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from dspark import oracle
from dspark.dyadic import Row
from dspark.oracle import Prefix, SequenceLaw
from dspark.proof.toys import verdict_law
from dspark.tickets import Grid
from dspark.verify import verify_ratio

Depth = Callable[[Prefix], int]


def admitted_law(grid: Grid, p: list[int], q: list[int], depth_of: Depth, longest: int) -> SequenceLaw:
    """Law of one round over position-independent rows; ``depth_of(drafts)`` says how many are verified."""
    row = Row(np.arange(len(q), dtype=np.int32), np.array(q))
    law: SequenceLaw = {}
    for drafts in np.ndindex(*[len(q)] * longest):
        share = Fraction(int(np.prod([q[token] for token in drafts])), grid.mass**longest)
        kept = drafts[: depth_of(drafts)]
        verdicts = verdict_law(
            lambda draws, kept=kept: verify_ratio(  # type: ignore[misc]
                lambda _: np.array(p), [row] * len(kept), kept, 0, draws, grid
            ),
            grid.coin,
        )
        for verdict, probability in verdicts.items():
            emitted = (*kept[: verdict.accepted], verdict.token)
            law[emitted] = law.get(emitted, Fraction(0)) + share * probability
    return law


def first_token(law: SequenceLaw, vocab: int) -> list[Fraction]:
    return [sum((p for tokens, p in law.items() if tokens[0] == v), Fraction(0)) for v in range(vocab)]


@pytest.mark.parametrize("vocab", [2, 3, 4])
def test_selection_bias_is_three_quarters_instead_of_one_half(vocab: int) -> None:
    """q = p uniform; admit the draft only when it is token 0, else go target-only: (2V - 1) / V**2."""
    grid = Grid(vocab, vocab, vocab)
    uniform = [1] * vocab
    biased = first_token(admitted_law(grid, uniform, uniform, lambda drafts: int(drafts[0] == 0), 1), vocab)
    assert biased[0] == Fraction(2 * vocab - 1, vocab**2)
    assert biased[1:] == [Fraction(vocab - 1, vocab**2)] * (vocab - 1)
    fixed = first_token(admitted_law(grid, uniform, uniform, lambda _: 1, 1), vocab)
    assert fixed == [Fraction(1, vocab)] * vocab


def survival(drafts: Prefix) -> list[Fraction]:
    """Expected tokens of the DSpark appendix A example for depths 0, 1, 2; the last depends on draft 1."""
    second = Fraction(9, 10) if drafts[0] == 0 else Fraction(0)
    first = Fraction(8, 10)
    return [Fraction(1), 1 + first, 1 + first + first * second]


STEPS_PER_SECOND = [Fraction(1), Fraction(1, 2), Fraction(45, 100)]


def throughputs(drafts: Prefix) -> list[Fraction]:
    return [tokens * speed for tokens, speed in zip(survival(drafts), STEPS_PER_SECOND, strict=True)]


def best_anywhere(drafts: Prefix) -> int:
    scores = throughputs(drafts)
    return scores.index(max(scores))


def early_stop(drafts: Prefix) -> int:
    """DSpark algorithm 1: stop at the first depth that does not improve."""
    scores = throughputs(drafts)
    depth = 0
    while depth + 1 < len(scores) and scores[depth + 1] > scores[depth]:
        depth += 1
    return depth


APPENDIX_A = Grid(mass=2, total=20, coin=2520)
TARGET, DRAFT = [14, 6], [1, 1]


def test_appendix_a_scores() -> None:
    assert throughputs((0, 0)) == [1, Fraction(9, 10), Fraction(1134, 1000)]
    assert throughputs((1, 0)) == [1, Fraction(9, 10), Fraction(81, 100)]


def test_appendix_a_global_search_is_biased() -> None:
    law = first_token(admitted_law(APPENDIX_A, TARGET, DRAFT, best_anywhere, 2), 2)
    assert law == [Fraction(17, 20), Fraction(3, 20)]


@pytest.mark.parametrize("rule", [early_stop, lambda _: 0, lambda _: 1, lambda _: 2])
def test_appendix_a_early_stop_and_fixed_depths_are_exact(rule: Depth) -> None:
    law = first_token(admitted_law(APPENDIX_A, TARGET, DRAFT, rule, 2), 2)
    assert law == [Fraction(7, 10), Fraction(3, 10)]


def test_oracle_agrees_on_the_unbiased_round() -> None:
    law = admitted_law(APPENDIX_A, TARGET, DRAFT, lambda _: 2, 2)
    p, q = [Fraction(7, 10), Fraction(3, 10)], [Fraction(1, 2)] * 2
    assert law == oracle.round_law(lambda _: p, lambda _: q, (), 2)
