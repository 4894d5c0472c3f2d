"""Tier 0: the joint law of several tokens equals the target's, exactly, and no mutant of the step has it."""

from __future__ import annotations

from fractions import Fraction

import pytest

from dspark import oracle
from dspark.proof.tier0 import COLD_DRAFT, GREEDY, ONE_ENTRY, PLAIN, TOP_K, TOP_P
from dspark.proof.toys import SMALL, Toy, joint_law, round_law
from dspark.proof.zoo import CLEAN, MUTANTS
from dspark.tickets import STANDARD, Grid

TOYS = [PLAIN, TOP_K, TOP_P, GREEDY, COLD_DRAFT, ONE_ENTRY]


def _name(toy: Toy) -> str:
    return toy.name


@pytest.mark.parametrize("toy", TOYS, ids=_name)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_joint_law_of_three_tokens_is_the_targets(toy: Toy, depth: int) -> None:
    assert joint_law(toy, depth, 3) == oracle.ancestral_law(toy.p, 3)


def test_joint_law_at_depth_three() -> None:
    toy = Toy("depth 3", SMALL)
    assert joint_law(toy, 3, 3) == oracle.ancestral_law(toy.p, 3)


@pytest.mark.parametrize("toy", TOYS, ids=_name)
def test_one_round_equals_the_oracles_round(toy: Toy) -> None:
    for prefix in [(), (0,), (1, 2)]:
        assert round_law(toy, prefix, 2) == oracle.round_law(toy.p, toy.q, prefix, 2)


@pytest.mark.parametrize("toy", TOYS, ids=_name)
def test_oracle_rounds_compose_to_the_target(toy: Toy) -> None:
    composed = oracle.joint_law(lambda prefix: oracle.round_law(toy.p, toy.q, prefix, 3), 4)
    assert composed == oracle.ancestral_law(toy.p, 4)


def test_serving_constants_give_the_law_up_to_the_coin() -> None:
    """2**24, 2**60 and a 64-bit coin: each decision is off by less than 2**-64, and there are at most 12."""
    toy = Toy("standard", STANDARD)
    wanted, seen = oracle.ancestral_law(toy.p, 2), joint_law(toy, 1, 2)
    assert seen.keys() == wanted.keys()
    assert max(abs(seen[tokens] - wanted[tokens]) for tokens in wanted) < Fraction(12, 2**64)


def test_removed_tokens_never_appear() -> None:
    for toy in (TOP_K, TOP_P, GREEDY):
        for prefix in [(), (1,), (2, 0)]:
            impossible = {token for token, p in enumerate(toy.p(prefix)) if p == 0}
            assert impossible
            assert not {emitted[0] for emitted in round_law(toy, prefix, 1)} & impossible


def test_toys_exercise_what_they_claim() -> None:
    prefixes = [(), (0,), (1,), (2,), (0, 1), (2, 2)]
    assert any(q == 0 < p for x in prefixes for p, q in zip(PLAIN.p(x), PLAIN.q(x), strict=True))
    assert any(p == 0 < q for x in prefixes for p, q in zip(TOP_K.p(x), TOP_K.q(x), strict=True))
    residuals = [oracle.correction_law(PLAIN.p(prefix), PLAIN.q(prefix)) for prefix in prefixes]
    assert any(len(law) >= 2 for law in residuals), "a one-token residual hides shared noise"


ZOO_TOYS = [PLAIN, TOP_K, COLD_DRAFT]


def test_the_clean_step_passes_where_mutants_must_not() -> None:
    for toy in ZOO_TOYS:
        assert joint_law(toy, 1, 2, CLEAN) == oracle.ancestral_law(toy.p, 2)
        assert joint_law(toy, 2, 3, CLEAN) == oracle.ancestral_law(toy.p, 3)


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_killed(name: str) -> None:
    killed = any(
        joint_law(toy, depth, length, MUTANTS[name]) != oracle.ancestral_law(toy.p, length)
        for depth, length in [(1, 2), (2, 3)]
        for toy in ZOO_TOYS
    )
    assert killed, f"the suite cannot see: {name}"


def test_some_mutants_hide_from_single_token_marginals() -> None:
    """Why the joint law is tested: the first token alone is right although the sampler is wrong."""
    for name in ("bonus from q", "bonus row off by one", "row not conditioned on the drafted predecessor"):
        for toy in ZOO_TOYS:
            assert joint_law(toy, 2, 1, MUTANTS[name]) == oracle.ancestral_law(toy.p, 1)


def test_grid_refuses_a_total_that_mass_does_not_divide() -> None:
    with pytest.raises(ValueError, match="multiple of mass"):
        Grid(16, 60, 64)
