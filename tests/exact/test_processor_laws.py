"""Tier 0 with a memory: the joint law when p depends on counts, bans and a grammar's state.

The law that must come out is the oracle's: its rows look at the whole text every time. What must give it is the
production path: states that advance over the drafts of a block and start again from the committed text after a
rejection. One state object per prefix, and one row per state, serve every branch of the enumeration.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dspark import oracle
from dspark.grammar import GrammarError
from dspark.oracle import Prefix
from dspark.proof.edited_toys import (
    COLD,
    COUNTS,
    EDITED_TOYS,
    EVERYTHING,
    GRAMMAR,
    REPETITION,
    ROW_MUTANTS,
    EditedToy,
    production_row,
    production_step,
    with_rows,
    without_rollback,
)
from dspark.proof.toys import Step, Toy, joint_law


def open_brackets(text: Prefix) -> int:
    return text.count(0) - text.count(1)


def bracket_followers(text: Prefix) -> set[int]:
    """0 opens, at most two deep; 1 closes what is open; 2 is text, and does not follow itself.

    Written apart from the toys, which it judges.
    """
    depth = open_brackets(text)
    followers = {0} if depth < 2 else set()
    if depth:
        followers.add(1)
    return followers if text[-1:] == (2,) else followers | {2}


def name(toy: Toy) -> str:
    return toy.name


@pytest.mark.parametrize("toy", EDITED_TOYS, ids=name)
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_joint_law_of_four_tokens_is_the_oracles(toy: EditedToy, depth: int) -> None:
    assert joint_law(toy, depth, 4, production_step) == oracle.ancestral_law(toy.p, 4)


def is_killed(step: Step, toy: EditedToy) -> bool:
    """Whether the law of a wrong step differs, or the grammar meets a token that it had not allowed."""
    try:
        return any(joint_law(toy, depth, 4, step) != oracle.ancestral_law(toy.p, 4) for depth in (1, 2))
    except GrammarError:
        return True


@pytest.mark.parametrize("toy", EDITED_TOYS, ids=name)
def test_the_edits_matter_and_depend_on_the_text(toy: EditedToy) -> None:
    """Else the laws above would prove nothing about states."""
    plain = Toy("unedited", toy.grid, toy.vocab, toy.support, toy.policy)
    assert oracle.ancestral_law(toy.p, 2) != oracle.ancestral_law(plain.p, 2)
    frozen = with_rows(lambda case, states, i: production_row(toy, case.prefix + case.tokens[:i], states.at(0)))
    assert is_killed(frozen, toy)


@pytest.mark.parametrize("toy", [GRAMMAR, EVERYTHING, COLD], ids=name)
def test_no_text_leaves_the_grammar(toy: EditedToy) -> None:
    for text in joint_law(toy, 3, 3, production_step):
        assert all(text[i] in bracket_followers(text[:i]) for i in range(len(text)))


def test_drafts_that_the_grammar_refuses_are_among_the_proposals() -> None:
    illegal = [
        prefix
        for prefix in [(), (0,), (2,), (0, 0), (0, 2)]
        if any(toy_q and token not in bracket_followers(prefix) for token, toy_q in enumerate(GRAMMAR.q(prefix)))
    ]
    assert len(illegal) >= 2


def wrong_rows(mutant: str) -> Callable[[], Step]:
    return lambda: with_rows(ROW_MUTANTS[mutant])


MUTANTS: dict[str, tuple[Callable[[], Step], EditedToy]] = {
    "no rollback after a rejection": (without_rollback, COUNTS),
    "bonus row without edits": (wrong_rows("bonus row without edits"), COUNTS),
    "bonus row without the grammar": (wrong_rows("bonus row without edits"), GRAMMAR),
    "row i uses the state of row i - 1": (wrong_rows("grammar mask of the row before"), GRAMMAR),
    "counts one token late": (wrong_rows("grammar mask of the row before"), COUNTS),
    "prompt left out of the repetition penalty": (wrong_rows("prompt left out of the repetition penalty"), REPETITION),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_mutant_of_the_states_is_killed(mutant: str) -> None:
    make, toy = MUTANTS[mutant]
    assert is_killed(make(), toy)
