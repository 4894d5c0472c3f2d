"""Toys whose rows have a memory: penalties, bans and grammars; and wrong ways to keep that memory.

Purpose: rows of production (states that advance over the drafts of a block and start again from the committed text)
against rows of the oracle (which looks at the whole text every time).

Invariants: one state object per prefix serves every branch of an enumeration, so a state that a branch changed is seen
by the others.

Called by Tier 0. It never serves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache

import numpy as np

from dspark import oracle
from dspark.dyadic import Int64s
from dspark.grammar import TokenAutomaton
from dspark.logit_edits import BlockStates, EditState, LogitEdits, first_state
from dspark.oracle import Prefix
from dspark.processors import SamplingPolicy, process
from dspark.proof.toys import SMALL, Case, Step, Toy
from dspark.tickets import target_tickets
from dspark.verify import Draws, Verdict, verify_ratio

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
        return _wanted_row(self, prefix)


@cache
def _wanted_row(toy: EditedToy, prefix: Prefix) -> Int64s:
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
    """The state behind a committed text."""
    if not prefix:
        return first_state(toy.edits, toy.prompt, toy.vocab)
    before = committed_state(toy, prefix[:-1])
    return None if before is None else before.after(prefix[-1])


@cache
def _block_states(toy: EditedToy, prefix: Prefix, drafts: Prefix) -> BlockStates:
    return BlockStates(committed_state(toy, prefix), drafts)


def _toy_of(case: Case) -> EditedToy:
    assert isinstance(case.toy, EditedToy)
    return case.toy


RowAt = Callable[[Case, BlockStates, int], Int64s]


def with_rows(row_at: RowAt) -> Step:
    """A verification step over rows that ``row_at`` makes."""

    def step(case: Case, draws: Draws) -> Verdict:
        states = _block_states(_toy_of(case), case.prefix, case.tokens)
        return verify_ratio(
            lambda index: row_at(case, states, index), case.rows, case.tokens, case.anchor_position, draws, case.grid
        )

    return step


def _row(case: Case, states: BlockStates, index: int) -> Int64s:
    return production_row(_toy_of(case), case.prefix + case.tokens[:index], states.at(index))


production_step = with_rows(_row)
"""The code that serves: states of the block, rows, verdict."""


def _followers(text: Prefix) -> set[int]:
    """0 opens, at most two deep; 1 closes what is open; 2 is text, and does not follow itself."""
    depth = text.count(0) - text.count(1)
    followers = ({0} if depth < 2 else set()) | ({1} if depth else set())
    return followers if text[-1:] == (2,) else followers | {2}


# States: twice the depth, plus one behind a 2.
_BRACKETS = TokenAutomaton([{0: 2, 2: 1}, {0: 2}, {0: 4, 1: 0, 2: 3}, {0: 4, 1: 0}, {1: 2, 2: 5}, {1: 2}], 3)

COUNTS = EditedToy(
    "frequency and presence penalty",
    SMALL,
    rules=oracle.Rules(frequency=HALF, presence=QUARTER),
    edits=LogitEdits(frequency_penalty=0.5, presence_penalty=0.25),
)
REPETITION = EditedToy(
    "repetition penalty and bias",
    SMALL,
    prompt=(2,),
    rules=oracle.Rules({1: HALF}, repetition=Fraction(4)),
    edits=LogitEdits({1: 0.5}, repetition_penalty=4.0),
)
GRAMMAR = EditedToy("grammar", SMALL, rules=oracle.Rules(grammar=_followers), edits=LogitEdits(grammar=_BRACKETS))
BANS = EditedToy(
    "bad words, min_tokens, allowed ids",
    SMALL,
    vocab=4,
    rules=oracle.Rules(
        bad_words=((0, 1), (3, 0, 0)), min_tokens=2, endings=frozenset({2}), allowed=frozenset({0, 2, 3})
    ),
    edits=LogitEdits(bad_words=((0, 1), (3, 0, 0)), min_tokens=2, ending_ids=(2,), allowed_token_ids=(3, 0, 2)),
)
EVERYTHING = EditedToy(
    "all edits, then min_p, top_k and top_p",
    SMALL,
    policy=SamplingPolicy(1.5, 2, 0.9, 0.125),
    prompt=(0, 0),
    rules=oracle.Rules(
        {0: QUARTER}, HALF, -QUARTER, Fraction(2), 1, frozenset({1}), ((0, 0, 1),), frozenset({0, 1, 2}), _followers
    ),
    edits=LogitEdits({0: 0.25}, 0.5, -0.25, 2.0, 1, (1,), ((0, 0, 1),), (0, 1, 2), _BRACKETS),
)
COLD = EditedToy(
    "edits at temperature 0",
    SMALL,
    policy=SamplingPolicy(0.0),
    rules=oracle.Rules(frequency=Fraction(2), grammar=_followers),
    edits=LogitEdits(frequency_penalty=2.0, grammar=_BRACKETS),
)
EDITED_TOYS = (COUNTS, REPETITION, GRAMMAR, BANS, EVERYTHING, COLD)


# --- mutants -------------------------------------------------------------------------------------------------------


def without_rollback() -> Step:
    """An engine that advances one state while it judges and does not take it back after a rejection."""
    left: dict[tuple[EditedToy, Prefix], EditState | None] = {}

    def step(case: Case, draws: Draws) -> Verdict:
        toy = _toy_of(case)
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
    return production_row(_toy_of(case), case.prefix + case.tokens[:index], state)


def _frozen(case: Case, states: BlockStates, index: int) -> Int64s:
    return production_row(_toy_of(case), case.prefix + case.tokens[:index], states.at(0))


def _one_row_late(case: Case, states: BlockStates, index: int) -> Int64s:
    return production_row(_toy_of(case), case.prefix + case.tokens[:index], states.at(max(index - 1, 0)))


def _prompt_forgotten(case: Case, states: BlockStates, index: int) -> Int64s:
    toy, text = _toy_of(case), case.prefix + case.tokens[:index]
    return production_row(toy, text, committed_state(replace(toy, prompt=()), text))


ROW_MUTANTS: dict[str, RowAt] = {
    "penalties not advanced over drafts": _frozen,
    "grammar mask of the row before": _one_row_late,
    "bonus row without edits": _bonus_without_edits,
    "prompt left out of the repetition penalty": _prompt_forgotten,
}
"""By name; ``without_rollback`` is the one that has a state of its own."""
