"""Tier 0 with a memory: the joint law when p depends on counts, bans and a grammar's state.

The law that must come out is the oracle's: its rows look at the whole text every time. What must give it is the
production path: states that advance over the drafts of a block and start again from the committed text after a
rejection. One state object per prefix, and one row per state, serve every branch of the enumeration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from dspark import oracle
from dspark.dyadic import Int64s
from dspark.grammar import GrammarError, TokenAutomaton
from dspark.logit_edits import BlockStates, EditState, LogitEdits, first_state
from dspark.oracle import Prefix
from dspark.processors import SamplingPolicy, process
from dspark.tickets import target_tickets
from dspark.verify import Draws, Verdict, verify_ratio

from .toys import SMALL, Case, Step, Toy, joint_law

HALF, QUARTER = Fraction(1, 2), Fraction(1, 4)


@dataclass(frozen=True)
class EditedToy(Toy):
    """A toy whose rows are edited: ``rules`` for the oracle, ``edits`` for production. Logits are quarters."""

    rules: oracle.Rules = field(default_factory=oracle.Rules, compare=False)
    edits: LogitEdits = field(default_factory=LogitEdits, compare=False)
    prompt: Prefix = ()

    def target_logits(self, prefix: Prefix) -> np.ndarray:
        return np.round(super().target_logits(prefix) * 4) / 4

    def target(self, prefix: Prefix) -> Int64s:
        return wanted_row(self, prefix)


@cache
def wanted_row(toy: EditedToy, prefix: Prefix) -> Int64s:
    """What must be: the oracle's logits, then the ticket row."""
    logits = [Fraction(float(logit)) for logit in toy.target_logits(prefix)]
    row = np.full(toy.vocab, -np.inf, dtype=np.float32)
    for token, logit in oracle.edited(logits, toy.prompt, prefix, toy.rules).items():
        row[token] = logit
    return target_tickets(process(row, toy.policy), toy.grid.total)


@cache
def production_row(toy: EditedToy, prefix: Prefix, state: EditState | None) -> Int64s:
    """What production makes of the same position."""
    return target_tickets(process(toy.target_logits(prefix), toy.policy, state), toy.grid.total)


@cache
def committed_state(toy: EditedToy, prefix: Prefix) -> EditState | None:
    if not prefix:
        return first_state(toy.edits, toy.prompt, toy.vocab)
    before = committed_state(toy, prefix[:-1])
    return None if before is None else before.after(prefix[-1])


@cache
def block_states(toy: EditedToy, prefix: Prefix, drafts: Prefix) -> BlockStates:
    return BlockStates(committed_state(toy, prefix), drafts)


def toy_of(case: Case) -> EditedToy:
    assert isinstance(case.toy, EditedToy)
    return case.toy


def with_rows(row_at: Callable[[Case, BlockStates, int], Int64s]) -> Step:
    """A verification step over rows that ``row_at`` makes."""

    def step(case: Case, draws: Draws) -> Verdict:
        states = block_states(toy_of(case), case.prefix, case.tokens)
        return verify_ratio(
            lambda index: row_at(case, states, index),
            case.rows,
            case.tokens,
            case.anchor_position,
            draws,
            case.grid,
        )

    return step


def _row(case: Case, states: BlockStates, index: int) -> Int64s:
    return production_row(toy_of(case), case.prefix + case.tokens[:index], states.at(index))


production = with_rows(_row)


def open_brackets(text: Prefix) -> int:
    return text.count(0) - text.count(1)


def bracket_followers(text: Prefix) -> set[int]:
    """0 opens, at most two deep; 1 closes what is open; 2 is text, and does not follow itself."""
    depth = open_brackets(text)
    followers = {0} if depth < 2 else set()
    if depth:
        followers.add(1)
    return followers if text[-1:] == (2,) else followers | {2}


# States: twice the depth, plus one behind a 2.
BRACKETS = TokenAutomaton([{0: 2, 2: 1}, {0: 2}, {0: 4, 1: 0, 2: 3}, {0: 4, 1: 0}, {1: 2, 2: 5}, {1: 2}], 3)

COUNTS = EditedToy(
    "frequency and presence",
    SMALL,
    rules=oracle.Rules(frequency=HALF, presence=QUARTER),
    edits=LogitEdits(frequency_penalty=0.5, presence_penalty=0.25),
)
REPETITION = EditedToy(
    "repetition and bias",
    SMALL,
    prompt=(2,),
    rules=oracle.Rules({1: HALF}, repetition=Fraction(4)),
    edits=LogitEdits({1: 0.5}, repetition_penalty=4.0),
)
GRAMMAR = EditedToy(
    "grammar", SMALL, rules=oracle.Rules(grammar=bracket_followers), edits=LogitEdits(grammar=BRACKETS)
)
BANS = EditedToy(
    "bad words and min_tokens",
    SMALL,
    vocab=4,
    rules=oracle.Rules(
        bad_words=((0, 1), (3, 0, 0)), min_tokens=2, endings=frozenset({2}), allowed=frozenset({0, 2, 3})
    ),
    edits=LogitEdits(bad_words=((0, 1), (3, 0, 0)), min_tokens=2, ending_ids=(2,), allowed_token_ids=(3, 0, 2)),
)
ALL = EditedToy(
    "everything, then min_p, top_k and top_p",
    SMALL,
    policy=SamplingPolicy(1.5, 2, 0.9, 0.125),
    prompt=(0, 0),
    rules=oracle.Rules(
        {0: QUARTER},
        HALF,
        -QUARTER,
        Fraction(2),
        1,
        frozenset({1}),
        ((0, 0, 1),),
        frozenset({0, 1, 2}),
        bracket_followers,
    ),
    edits=LogitEdits({0: 0.25}, 0.5, -0.25, 2.0, 1, (1,), ((0, 0, 1),), (0, 1, 2), BRACKETS),
)
COLD = EditedToy(
    "temperature 0",
    SMALL,
    policy=SamplingPolicy(0.0),
    rules=oracle.Rules(frequency=Fraction(2), grammar=bracket_followers),
    edits=LogitEdits(frequency_penalty=2.0, grammar=BRACKETS),
)
TOYS = [COUNTS, REPETITION, GRAMMAR, BANS, ALL, COLD]


def name(toy: Toy) -> str:
    return toy.name


@pytest.mark.parametrize("toy", TOYS, ids=name)
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_joint_law_of_four_tokens_is_the_oracles(toy: EditedToy, depth: int) -> None:
    assert joint_law(toy, depth, 4, production) == oracle.ancestral_law(toy.p, 4)


def is_killed(step: Step, toy: EditedToy) -> bool:
    """Whether the law of a wrong step differs, or the grammar meets a token that it had not allowed."""
    try:
        return any(joint_law(toy, depth, 4, step) != oracle.ancestral_law(toy.p, 4) for depth in (1, 2))
    except GrammarError:
        return True


@pytest.mark.parametrize("toy", TOYS, ids=name)
def test_the_edits_matter_and_depend_on_the_text(toy: EditedToy) -> None:
    """Else the laws above would prove nothing about states."""
    plain = Toy("unedited", toy.grid, toy.vocab, toy.support, toy.policy)
    assert oracle.ancestral_law(toy.p, 2) != oracle.ancestral_law(plain.p, 2)
    frozen = with_rows(lambda case, states, i: production_row(toy, case.prefix + case.tokens[:i], states.at(0)))
    assert is_killed(frozen, toy)


@pytest.mark.parametrize("toy", [GRAMMAR, ALL, COLD], ids=name)
def test_no_text_leaves_the_grammar(toy: EditedToy) -> None:
    for text in joint_law(toy, 3, 3, production):
        assert all(text[i] in bracket_followers(text[:i]) for i in range(len(text)))


def test_drafts_that_the_grammar_refuses_are_among_the_proposals() -> None:
    illegal = [
        prefix
        for prefix in [(), (0,), (2,), (0, 0), (0, 2)]
        if any(toy_q and token not in bracket_followers(prefix) for token, toy_q in enumerate(GRAMMAR.q(prefix)))
    ]
    assert len(illegal) >= 2


def _mutating() -> Step:
    """An engine that advances one state while it judges and forgets to take it back after a rejection."""
    left: dict[tuple[EditedToy, Prefix], EditState | None] = {}

    def step(case: Case, draws: Draws) -> Verdict:
        toy = toy_of(case)
        key = (toy, case.prefix)
        left.setdefault(key, committed_state(toy, case.prefix))

        def tickets_at(index: int) -> Int64s:
            state = left[key]
            if index and state is not None:
                left[key] = state = state.after(case.tokens[index - 1])
            return production_row(toy, case.prefix + case.tokens[:index], state)

        return verify_ratio(tickets_at, case.rows, case.tokens, case.anchor_position, draws, case.grid)

    return step


def _bonus_without_edits(case: Case, states: BlockStates, index: int) -> Int64s:
    state = None if index == len(case.tokens) else states.at(index)
    return production_row(toy_of(case), case.prefix + case.tokens[:index], state)


def _one_row_late(case: Case, states: BlockStates, index: int) -> Int64s:
    return production_row(toy_of(case), case.prefix + case.tokens[:index], states.at(max(index - 1, 0)))


def _prompt_forgotten(case: Case, states: BlockStates, index: int) -> Int64s:
    toy, text = toy_of(case), case.prefix + case.tokens[:index]
    return production_row(toy, text, committed_state(replace(toy, prompt=()), text))


MUTANTS: dict[str, tuple[Callable[[], Step], EditedToy]] = {
    "no rollback after a rejection": (_mutating, COUNTS),
    "bonus row without edits": (lambda: with_rows(_bonus_without_edits), COUNTS),
    "bonus row without the grammar": (lambda: with_rows(_bonus_without_edits), GRAMMAR),
    "row i uses the state of row i - 1": (lambda: with_rows(_one_row_late), GRAMMAR),
    "counts one token late": (lambda: with_rows(_one_row_late), COUNTS),
    "prompt left out of the repetition penalty": (lambda: with_rows(_prompt_forgotten), REPETITION),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_mutant_of_the_states_is_killed(mutant: str) -> None:
    make, toy = MUTANTS[mutant]
    assert is_killed(make(), toy)
