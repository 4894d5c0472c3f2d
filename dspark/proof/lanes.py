"""Verification steps of the match and the greedy lane, and wrong ones.

Purpose: both lanes in the shape in which Tier 0 explores steps: a case and draws in, a verdict out.

Called by Tier 0 and ``mutants``. It never serves.
"""

from __future__ import annotations

from collections.abc import Callable

from dspark.dyadic import Int64s
from dspark.philox import Domain
from dspark.proof.toys import Case, Step
from dspark.tickets import accepts, pick
from dspark.verify import Draws, Kind, Verdict, sample_target_only, verify_greedy, verify_match


def match_step(case: Case, draws: Draws) -> Verdict:
    """The code that serves the match lane. It is given no row."""
    return verify_match(case.tickets_at, case.tokens, case.anchor_position, draws, case.grid)


def greedy_step(case: Case, draws: Draws) -> Verdict:
    """The code that serves the greedy lane, on target rows of temperature 0. It asks for no draw."""
    return verify_greedy([int(case.tickets_at(i).argmax()) for i in range(len(case.tokens) + 1)], case.tokens)


Redraw = Callable[[Case, int, Draws], int]


def _redrawn(redraw: Redraw) -> Step:
    """Sample the target; on a difference from the draft commit what ``redraw`` says.

    The draft comes first in the cumulative sum that is sampled, so that "it is not the draft" is one run of the coin.
    """

    def step(case: Case, draws: Draws) -> Verdict:
        first = case.anchor_position + 1
        for index, token in enumerate(case.tokens):
            coin = draws.draw64(Domain.TARGET_ONLY, first + index)
            if not accepts(coin, case.grid.mass, int(case.tickets_at(index)[token]), case.grid):
                return Verdict(index, redraw(case, index, draws), Kind.CORRECTION)
        depth = len(case.tokens)
        return Verdict(depth, sample_target_only(case.tickets_at(depth), first + depth, draws, case.grid), Kind.BONUS)

    return step


def _without_x(case: Case, index: int) -> Int64s:
    masses = case.tickets_at(index).copy()
    masses[case.tokens[index]] = 0
    return masses


def _correction(case: Case, index: int, draws: Draws) -> int:
    return draws.draw64(Domain.CORRECTION, case.anchor_position + 1 + index)


def _fresh_from_p(case: Case, index: int, draws: Draws) -> int:
    return pick(case.tickets_at(index), _correction(case, index, draws), case.grid)


def _same_number_without_x(case: Case, index: int, draws: Draws) -> int:
    coin = draws.draw64(Domain.TARGET_ONLY, case.anchor_position + 1 + index)
    return pick(_without_x(case, index), coin, case.grid)


def _fresh_without_x(case: Case, index: int, draws: Draws) -> int:
    return pick(_without_x(case, index), _correction(case, index, draws), case.grid)


MATCH_MUTANTS: dict[str, Step] = {
    "match lane redraws after a rejection": _redrawn(_fresh_from_p),
    "match lane excludes x with the number that rejected it": _redrawn(_same_number_without_x),
}
MATCH_EQUIVALENTS: dict[str, Step] = {"accept x with p, else p without x": _redrawn(_fresh_without_x)}


def _second_best_is_good_enough(case: Case, draws: Draws) -> Verdict:
    """The greedy lane with a tolerance: a draft among the two largest logits is accepted."""
    best = []
    for index in range(len(case.tokens) + 1):
        logits = case.toy.target_logits(case.prefix + case.tokens[:index])
        near = (-logits).argsort(kind="stable")[:2].tolist()
        drafted = case.tokens[index] if index < len(case.tokens) else None
        best.append(drafted if drafted in near else int(near[0]))
    return verify_greedy(best, case.tokens)  # type: ignore[arg-type]


def _row_off_by_one(case: Case, draws: Draws) -> Verdict:
    best = [int(case.tickets_at(max(i - 1, 0)).argmax()) for i in range(len(case.tokens) + 1)]
    return verify_greedy(best, case.tokens)


GREEDY_MUTANTS: dict[str, Step] = {
    "greedy lane accepts the second best": _second_best_is_good_enough,
    "greedy row off by one": _row_off_by_one,
}
