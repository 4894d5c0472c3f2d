"""The ratio lane's block rule as Tier 0 explores it, what it should accept, and the rule with one mistake each.

Purpose: block verification decides with ratios whose denominators are squares of the total, so its toys stand on
coarser grids of their own. The clean step below is the rule taken apart, in fractions of N^2.

Called by the tiers and ``mutants``. It never serves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from dspark import oracle
from dspark.block_verification import verify_block
from dspark.philox import Domain
from dspark.proof.toys import Case, Step, Toy, proposals
from dspark.tickets import Grid, pick
from dspark.verify import Draws, Kind, Verdict

Masses = Callable[[Case, int, int], list[int]]
Weigh = Callable[[Case, int, int], int]
Keep = Callable[[Case, list[int], Draws], int]


def exact_block_grid(mass: int, total: int) -> Grid:
    """A grid whose coin divides by every chance and every mass of block verification: no rounding anywhere."""
    return Grid(mass, total, math.lcm(*range(1, total * total + 1)))


TINY = exact_block_grid(4, 8)


def production_block(case: Case, draws: Draws) -> Verdict:
    """The code that serves."""
    return verify_block(case.tickets_at, case.rows, case.tokens, case.anchor_position, draws, case.grid)


def expected_accepted(toy: Toy, depth: int, *, block: bool) -> Fraction:
    """Drafts that a round behind the empty prefix is expected to accept under either rule, by its definition."""
    found = Fraction(0)
    for length in range(1, depth + 1):
        for case, share in proposals(toy, (), length):
            kept = Fraction(1)
            for index, token in enumerate(case.tokens):
                p, q = toy.p(case.tokens[:index])[token], toy.q(case.tokens[:index])[token]
                kept = oracle.block_weight(kept, p, q, toy.grid.total) if block else kept * min(Fraction(1), p / q)
            found += share * kept
    return found


# --- the rule in parts -------------------------------------------------------------------------------------------


def _weigh(case: Case, index: int, before: int) -> int:
    return min(case.grid.total, _uncapped(case, index, before))


def _uncapped(case: Case, index: int, before: int) -> int:
    return _ratio(case, index, index, before)


def _ratio(case: Case, index: int, row: int, before: int) -> int:
    token = case.tokens[index]
    count = case.rows[index].count(token) * case.grid.scale
    return before * int(case.tickets_at(row)[token]) // count


def _next_row(case: Case, index: int, before: int) -> int:
    return min(case.grid.total, _ratio(case, index, index + 1, before))


def _masses(case: Case, index: int, weight: int) -> list[int]:
    masses = [weight * int(ticket) for ticket in case.tickets_at(index)]
    for token, count in zip(case.rows[index].ids.tolist(), case.rows[index].counts.tolist(), strict=True):
        share = count * case.grid.scale
        masses[token] -= share * min(case.grid.total, masses[token] // share)
    return masses


def _of_tokens(case: Case, index: int, weight: int) -> list[int]:
    """The residual of token verification."""
    return _masses(case, index, case.grid.total)


def _of_target(case: Case, index: int, weight: int) -> list[int]:
    return [int(ticket) for ticket in case.tickets_at(index)]


def _unweighted(case: Case, index: int, weight: int) -> list[int]:
    """max(a - K c w', 0): the weight of the drafts is taken off p, but p keeps all of its own."""
    left = [case.grid.total * int(ticket) for ticket in case.tickets_at(index)]
    for token, count in zip(case.rows[index].ids.tolist(), case.rows[index].counts.tolist(), strict=True):
        share = count * case.grid.scale
        left[token] = max(left[token] - share * min(case.grid.total, weight * left[token] // share), 0)
    return left


def _coin(case: Case, draws: Draws, kept: int) -> int:
    return draws.draw64(Domain.ACCEPTANCE, case.anchor_position + kept)


def _passes(case: Case, coin: int, weights: list[int], kept: int) -> bool:
    if kept == len(case.tokens):
        return coin * case.grid.total < weights[kept] * case.grid.coin
    left = sum(_masses(case, kept, weights[kept]))
    whole = left + case.grid.total * (case.grid.total - weights[kept])
    return coin * whole < left * case.grid.coin


def _longest(case: Case, weights: list[int], draws: Draws) -> int:
    tried = range(len(case.tokens), 0, -1)
    return next((kept for kept in tried if _passes(case, _coin(case, draws, kept), weights, kept)), 0)


def _up_to_the_first_refusal(case: Case, weights: list[int], draws: Draws) -> int:
    kept = 0
    while kept < len(case.tokens) and _passes(case, _coin(case, draws, kept + 1), weights, kept + 1):
        kept += 1
    return kept


def _by_weight_alone(case: Case, weights: list[int], draws: Draws) -> int:
    def passes(kept: int) -> bool:
        return _coin(case, draws, kept) * case.grid.total < weights[kept] * case.grid.coin

    return next((kept for kept in range(len(case.tokens), 0, -1) if passes(kept)), 0)


def _one_number(case: Case, weights: list[int], draws: Draws) -> int:
    coin = _coin(case, draws, 1)
    return next((kept for kept in range(len(case.tokens), 0, -1) if _passes(case, coin, weights, kept)), 0)


@dataclass(frozen=True)
class BlockParts:
    """A step in parts; the defaults are the production rule."""

    weigh: Weigh = _weigh
    keep: Keep = _longest
    masses: Masses = _masses

    def __call__(self, case: Case, draws: Draws) -> Verdict:
        weights = list(self._weights(case))
        kept, depth = self.keep(case, weights, draws), len(case.tokens)
        position = case.anchor_position + 1 + kept
        if kept == depth:
            return Verdict(
                depth, pick(case.tickets_at(depth), draws.draw64(Domain.BONUS, position), case.grid), Kind.BONUS
            )
        masses = self.masses(case, kept, weights[kept])
        masses = masses if any(masses) else _of_target(case, kept, weights[kept])
        token = oracle.pick(masses, draws.draw64(Domain.CORRECTION, position), case.grid.coin)
        return Verdict(kept, token, Kind.CORRECTION)

    def _weights(self, case: Case) -> Iterator[int]:
        weight = case.grid.total
        yield weight
        for index in range(len(case.tokens)):
            weight = self.weigh(case, index, weight)
            yield weight


BLOCK_MUTANTS: dict[str, Step] = {
    "block weight is not capped": BlockParts(weigh=_uncapped),
    "block weight from the next target row": BlockParts(weigh=_next_row),
    "block prefixes tried from the shortest": BlockParts(keep=_up_to_the_first_refusal),
    "block prefix kept with its weight": BlockParts(keep=_by_weight_alone),
    "one number for all prefixes of a block": BlockParts(keep=_one_number),
    "block correction of token verification": BlockParts(masses=_of_tokens),
    "block correction without the weight of its prefix": BlockParts(masses=_unweighted),
    "block correction from p": BlockParts(masses=_of_target),
}
BLOCK_EQUIVALENTS: dict[str, Step] = {"block step in parts": BlockParts()}
