"""One verification round of one request: accept, correct or take the bonus.

Purpose: given the rows a worker declared, the tokens it drew from them and the target's rows, decide what is
committed. The committed tokens follow the target's law exactly.

Invariants:

- Target row i is the law of the token at position ``anchor_position + 1 + i`` given the drafts before it; row
  ``depth`` is the bonus row. In the verify forward over [anchor, x_1 .. x_depth], row i is logits row i.
- A round commits ``tokens[:accepted]`` and one more token: a correction (residual) or the bonus (target row).
- Acceptance, correction and bonus draws come from different domains, each asked at most once per position.
- A request uses one lane for a whole round; the lane is chosen before anything is drawn.
- In the ``match`` lane each token is the target's own sample: drafts decide how many tokens a round brings, never
  which ones.

Called by the verifier's engine. It never decides a depth, never looks at confidences, never changes a row.

Sources: Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318. ``match`` is the same rule for one-entry
rows (accept x with p(x), else p without x), written as "sample p, compare".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from dspark.dyadic import Int64s, Row, RowError, RowFault
from dspark.philox import Domain, Keys
from dspark.tickets import STANDARD, Grid, accepts, pick, residual

__all__ = [
    "Draws",
    "Keys",
    "Kind",
    "Verdict",
    "sample_target_only",
    "verify_greedy",
    "verify_match",
    "verify_ratio",
]


class Draws(Protocol):
    """Where 64-bit uniform integers come from; serving passes ``Keys``."""

    def draw64(self, domain: Domain, position: int) -> int: ...


class Kind(StrEnum):
    """How the last token of a round came about."""

    CORRECTION = "correction"
    BONUS = "bonus"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of a round: commit ``tokens[:accepted]``, then ``token``."""

    accepted: int
    token: int
    kind: Kind


def verify_ratio(
    tickets_at: Callable[[int], Int64s],
    rows: Sequence[Row],
    tokens: Sequence[int],
    anchor_position: int,
    keys: Draws,
    grid: Grid = STANDARD,
) -> Verdict:
    """The ``ratio`` lane: accept with min(1, p/q), else draw from the residual max(p - q, 0).

    Args:
        tickets_at: gives target row i, int64[V]; asked in order and only as far as needed.
        rows: the proposal row of every drafted token, depth of them; none means a plain bonus draw.
        tokens: drafted global ids, one per row.
        anchor_position: absolute position of the last committed token.
        keys: the request's random numbers for this round.

    Raises:
        RowError: ``zero_at_token`` when a drafted token has no count; accepting it would be unbounded.
        ResidualIdentityError: p or q has a wrong total.
    """
    if len(rows) != len(tokens):
        raise ValueError(f"{len(rows)} rows for {len(tokens)} drafted tokens; each token needs its own row")
    for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        position = anchor_position + 1 + index
        tickets = tickets_at(index)
        if not _survives(tickets, row, token, keys.draw64(Domain.ACCEPTANCE, position), grid):
            coin = keys.draw64(Domain.CORRECTION, position)
            return Verdict(index, pick(residual(tickets, row, grid), coin, grid), Kind.CORRECTION)
    depth = len(rows)
    coin = keys.draw64(Domain.BONUS, anchor_position + 1 + depth)
    return Verdict(depth, pick(tickets_at(depth), coin, grid), Kind.BONUS)


def _survives(tickets: Int64s, row: Row, token: int, u64: int, grid: Grid) -> bool:
    count = row.count(token)
    if count == 0:
        raise RowError(RowFault.ZERO_AT_TOKEN, f"token {token} has no count in its row")
    return accepts(u64, count, int(tickets[token]), grid)


def verify_greedy(target_argmax: Sequence[int], tokens: Sequence[int]) -> Verdict:
    """The ``greedy`` lane: accept while the draft equals the target's maximum; no random number is used.

    Args:
        target_argmax: lowest-id maximum of target rows 0..depth, so one more than ``tokens``.
        tokens: drafted global ids.
    """
    if len(target_argmax) != len(tokens) + 1:
        raise ValueError(f"{len(tokens)} drafts need {len(tokens) + 1} target rows, got {len(target_argmax)}")
    for index, token in enumerate(tokens):
        if token != target_argmax[index]:
            return Verdict(index, int(target_argmax[index]), Kind.CORRECTION)
    return Verdict(len(tokens), int(target_argmax[-1]), Kind.BONUS)


def verify_match(
    tickets_at: Callable[[int], Int64s],
    tokens: Sequence[int],
    anchor_position: int,
    noise: Draws,
    grid: Grid = STANDARD,
) -> Verdict:
    """The ``match`` lane: sample the target at every position, accept while the draft is that very sample.

    Every committed token is ``F(p(. | committed prefix), U_position)`` with one fixed F (``sample_target_only``). So
    the text of a request is a function of its seed and of the bits of p: with ``Keys.for_position_noise`` it is the
    same with speculation on or off, at every depth, under any rule that cuts drafts (even one that reads them),
    after time-outs, and with any worker, honest or not. It needs two things of the engine: rows of p whose bits do
    not depend on how many positions share the forward pass (else a sample may move where two cumulative sums straddle
    U), and processors that are functions of the committed prefix.

    Position-only numbers are safe here and only here. A position's number is asked once in a request, because sampling
    stops at the first difference and every sample taken is committed; nothing is drawn again under a condition. In
    the ``ratio`` lane a rejected round leaves drafts behind that were never committed; their positions are drafted
    again, and with the same numbers anything that had looked at the old drafts would know the new ones.

    Args:
        tickets_at: gives target row i, int64[V]; asked in order and only as far as needed.
        tokens: drafted global ids; none means a plain sample of the target. No rows are needed.
        anchor_position: absolute position of the last committed token.
        noise: the request's numbers, the same object that ``sample_target_only`` gets in steps without drafts.
    """
    for index, token in enumerate(tokens):
        sampled = sample_target_only(tickets_at(index), anchor_position + 1 + index, noise, grid)
        if sampled != token:
            return Verdict(index, sampled, Kind.CORRECTION)
    depth = len(tokens)
    sampled = sample_target_only(tickets_at(depth), anchor_position + 1 + depth, noise, grid)
    return Verdict(depth, sampled, Kind.BONUS)


def sample_target_only(tickets: Int64s, position: int, keys: Draws, grid: Grid = STANDARD) -> int:
    """The token at ``position`` when nothing was drafted or the whole proposal was discarded.

    ``keys`` are those of the round, or the position noise of a request in the ``match`` lane.
    """
    return pick(tickets, keys.draw64(Domain.TARGET_ONLY, position), grid)
