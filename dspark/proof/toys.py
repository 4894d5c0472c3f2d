"""Toy models in small number systems, and the exact law of a verification step by exploring all its draws.

Purpose: the production functions run unchanged; only the grid is small (so that every probability is a fraction of the
coin) and the random numbers are scripted. A step asks for a draw; the explorer answers with every value, grouped into
the intervals on which the step goes on in the same way, and weighs each interval exactly.

Invariants: no law is rounded. The explorer relies on one thing: each outcome of a step fills one run of each coin.

Called by the claims of Tier 0 and Tier 1 and by the tests. It judges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache

import numpy as np

from dspark import oracle
from dspark.dyadic import Int64s, Row, allocate, softmax64, top_indices
from dspark.oracle import Prefix, SequenceLaw
from dspark.philox import Domain
from dspark.processors import SamplingPolicy, process
from dspark.tickets import Grid, target_tickets
from dspark.verify import Draws, Verdict, verify_ratio

Use = tuple[Domain, int]
Drawn = Callable[["Toy", Prefix], dict[int, Fraction]]
"""Law of the token that a worker drafts behind a prefix."""


def exact_grid(mass: int, total: int) -> Grid:
    """A grid whose coin every acceptance ratio and every residual mass divides: no rounding anywhere."""
    return Grid(mass, total, math.lcm(*range(1, total + 1)))


SMALL = exact_grid(8, 16)
MEDIUM = exact_grid(16, 64)


@dataclass(frozen=True)
class Toy:
    """An autoregressive target and drafter over a tiny vocabulary; rows depend on the whole prefix."""

    name: str
    grid: Grid
    vocab: int = 3
    support: int = 2
    policy: SamplingPolicy = field(default_factory=SamplingPolicy)
    draft_temperature: float = 1.0

    def target_logits(self, prefix: Prefix) -> np.ndarray:
        return _logits(self.vocab, prefix, 11)

    def draft_logits(self, prefix: Prefix) -> np.ndarray:
        return _logits(self.vocab, prefix, 29)

    def target(self, prefix: Prefix) -> Int64s:
        return _target(self, prefix, self.policy)

    def raw_target(self, prefix: Prefix) -> Int64s:
        """The target before truncation: what a verifier must not compare q with."""
        return _target(self, prefix, SamplingPolicy())

    def draft(self, prefix: Prefix) -> Row:
        return _draft(self, prefix)

    def p(self, prefix: Prefix) -> list[Fraction]:
        return [Fraction(int(ticket), self.grid.total) for ticket in self.target(prefix)]

    def q(self, prefix: Prefix) -> list[Fraction]:
        row = self.draft(prefix)
        return [Fraction(row.count(token), self.grid.mass) for token in range(self.vocab)]


def _logits(vocab: int, prefix: Prefix, salt: int) -> np.ndarray:
    """Arbitrary but fixed logits in [-1.5, 1.5] that depend on every token of the prefix."""
    state = salt
    for token in prefix:
        state = (state * 31 + token + 7) % 9973
    values = [((state * (token + 3) * 97 + token * 41) % 31) / 10 - 1.5 for token in range(vocab)]
    return np.array(values, dtype=np.float32)


@cache
def _target(toy: Toy, prefix: Prefix, policy: SamplingPolicy) -> Int64s:
    return target_tickets(process(toy.target_logits(prefix), policy), toy.grid.total)


@cache
def _draft(toy: Toy, prefix: Prefix) -> Row:
    logits = toy.draft_logits(prefix)
    chosen = top_indices(logits, toy.support)
    counts = allocate(softmax64(logits[chosen], toy.draft_temperature), toy.grid.mass)
    kept = counts > 0
    return Row(chosen[kept].astype(np.int32), counts[kept])


@dataclass(frozen=True)
class Case:
    """One proposal to verify: what a verifier is given, plus the toy for mutants that look elsewhere."""

    toy: Toy
    prefix: Prefix
    rows: tuple[Row, ...]
    tokens: Prefix

    @property
    def grid(self) -> Grid:
        return self.toy.grid

    @property
    def vocab(self) -> int:
        return self.toy.vocab

    @property
    def anchor_position(self) -> int:
        return len(self.prefix) - 1 + 100

    def tickets_at(self, index: int) -> Int64s:
        return self.toy.target(self.prefix + self.tokens[:index])


Step = Callable[[Case, Draws], Verdict]


def production(case: Case, draws: Draws) -> Verdict:
    """The code that serves."""
    return verify_ratio(case.tickets_at, case.rows, case.tokens, case.anchor_position, draws, case.grid)


class _Asked(Exception):
    def __init__(self, use: Use) -> None:
        self.use = use


@dataclass(frozen=True)
class Scripted:
    """Draws that are fixed in advance; an unscripted one ends the run and names itself."""

    script: dict[Use, int]

    def draw64(self, domain: Domain, position: int) -> int:
        use = (domain, position)
        if use not in self.script:
            raise _Asked(use)
        return self.script[use]


def verdict_law(run: Callable[[Draws], Verdict], coin: int) -> dict[Verdict, Fraction]:
    """Exact law of a step: every draw is uniform on [0, coin)."""
    law: dict[Verdict, Fraction] = {}

    def follow(script: dict[Use, int]) -> Verdict | Use:
        try:
            return run(Scripted(script))
        except _Asked as asked:
            return asked.use

    def explore(script: dict[Use, int], weight: Fraction) -> None:
        outcome = follow(script)
        if isinstance(outcome, Verdict):
            law[outcome] = law.get(outcome, Fraction(0)) + weight
            return
        for low, high in _intervals(lambda value: follow({**script, outcome: value}), 0, coin - 1):
            explore({**script, outcome: low}, weight * Fraction(high - low + 1, coin))

    explore({}, Fraction(1))
    return law


def _intervals(outcome: Callable[[int], object], low: int, high: int) -> Iterator[tuple[int, int]]:
    """Split [low, high] into runs of equal outcome; each outcome of a step fills one run of the coin."""
    start = low
    while start <= high:
        same, probe = start, high
        first = outcome(start)
        while same < probe:
            middle = (same + probe + 1) // 2
            if outcome(middle) == first:
                same = middle
            else:
                probe = middle - 1
        yield start, same
        start = same + 1


def drawn_from_the_row(toy: Toy, prefix: Prefix) -> dict[int, Fraction]:
    """An honest worker: the token is drawn from the row that it declares."""
    row = toy.draft(prefix)
    pairs = zip(row.ids.tolist(), row.counts.tolist(), strict=True)
    return {token: Fraction(count, toy.grid.mass) for token, count in pairs}


def proposals(
    toy: Toy, prefix: Prefix, depth: int, drawn: Drawn = drawn_from_the_row
) -> Iterator[tuple[Case, Fraction]]:
    """Every chain that the drafter can draw, with its exact probability."""

    def extend(rows: tuple[Row, ...], tokens: Prefix, share: Fraction) -> Iterator[tuple[Case, Fraction]]:
        if len(tokens) == depth:
            yield Case(toy, prefix, rows, tokens), share
            return
        row = toy.draft(prefix + tokens)
        for token, chance in drawn(toy, prefix + tokens).items():
            yield from extend((*rows, row), (*tokens, token), share * chance)

    return extend((), (), Fraction(1))


def round_law(
    toy: Toy, prefix: Prefix, depth: int, step: Step = production, drawn: Drawn = drawn_from_the_row
) -> SequenceLaw:
    """Exact law of what one round appends, with the given verification step."""
    law: SequenceLaw = {}
    for case, share in proposals(toy, prefix, depth, drawn):
        verdicts = verdict_law(lambda draws, case=case: step(case, draws), toy.grid.coin)  # type: ignore[misc]
        for verdict, probability in verdicts.items():
            emitted = (*case.tokens[: verdict.accepted], verdict.token)
            law[emitted] = law.get(emitted, Fraction(0)) + share * probability
    return law


def joint_law(
    toy: Toy, depth: int, length: int, step: Step = production, drawn: Drawn = drawn_from_the_row
) -> SequenceLaw:
    """Exact joint law of ``length`` tokens when rounds of ``depth`` are composed."""
    one_round = cache(lambda prefix: round_law(toy, prefix, depth, step, drawn))
    return oracle.joint_law(one_round, length)
