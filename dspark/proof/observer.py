"""What a running engine decided, next to what it should have decided: the records of Tiers 2 and 3.

Purpose: stand between the engine and ``dspark.verify`` while requests run, pass every call on, and keep for each draft
whether it was accepted and how likely that was, and for each committed token its place in the target's row.

Invariants:

- A call is answered by the step on trial and by nothing else; the observer changes no argument, and its own numbers
  are of the test domain, which no decision uses.
- Given the text before it, a draft is accepted with probability sum min(p, q) over its declared row, and the place of a
  committed token in its own row of p (spread over the token's mass by a number of its own) is uniform on
  [0, 1), independent of all places before it. Both hold behind every prefix, so all positions of all texts are one
  sample.

Called by ``served_pair``, from the engine's thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from dspark import verify
from dspark.block_verification import verify_block
from dspark.dyadic import Int64s, Row
from dspark.philox import Domain, Keys
from dspark.proof.chi_square import ImpossibleError, Outcome, chi_square, z_test
from dspark.proof.toys import Case, Step, Toy
from dspark.tickets import STANDARD, TOTAL, Grid, residual
from dspark.verify import Verdict

TicketsAt = Callable[[int], Int64s]
RATIO, BLOCK, MATCH = "ratio", "block", "match"


@dataclass(frozen=True)
class Judged:
    """A draft of the ratio lane that was reached. place: 0 for the first of its round; chance: sum min(p, q).

    likeness: q of the token that was committed there; mean, variance: of q under p, which is what they should be.
    """

    place: int
    chance: float
    accepted: bool
    likeness: float
    mean: float
    variance: float


@dataclass(frozen=True)
class Committed:
    """A committed token. seed, position: whose and where; place: in its row of p, uniform on [0, 1); best: p of the
    row's maximum; was_best: whether that is the token."""

    lane: str
    seed: int
    position: int
    place: float
    best: float
    was_best: bool


@dataclass(frozen=True)
class Corrected:
    """A correction of the ratio lane. place: in its residual max(p - q, 0), uniform on [0, 1); None outside of it."""

    token: int
    place: float | None


@dataclass
class Observer:
    """Records of one run. ratio: the step on trial, None for production."""

    ratio: Step | None = None
    judged: list[Judged] = field(default_factory=list)
    committed: list[Committed] = field(default_factory=list)
    corrected: list[Corrected] = field(default_factory=list)

    def clear(self) -> None:
        """Forget the records."""
        self.judged, self.committed, self.corrected = [], [], []

    def verify_ratio(
        self,
        tickets_at: TicketsAt,
        rows: Sequence[Row],
        tokens: Sequence[int],
        anchor_position: int,
        keys: Keys,
        grid: Grid = STANDARD,
    ) -> Verdict:
        """In the place of ``verify.verify_ratio``."""
        if self.ratio is None:
            verdict = verify.verify_ratio(tickets_at, rows, tokens, anchor_position, keys, grid)
        else:
            verdict = self.ratio(_served_case(tickets_at, rows, tokens, anchor_position), keys)
        for index in range(min(verdict.accepted + 1, len(tokens))):
            accepted = index < verdict.accepted
            token = tokens[index] if accepted else verdict.token
            self.judged.append(_judged(index, tickets_at(index), rows[index], token, accepted))
        if verdict.accepted < len(tokens):
            masses = residual(tickets_at(verdict.accepted), rows[verdict.accepted], grid)
            position = anchor_position + 1 + verdict.accepted
            self.corrected.append(Corrected(verdict.token, _place(masses, verdict.token, keys, position)))
        self._commit(RATIO, tickets_at, tokens, anchor_position, keys, verdict)
        return verdict

    def verify_block(
        self,
        tickets_at: TicketsAt,
        rows: Sequence[Row],
        tokens: Sequence[int],
        anchor_position: int,
        keys: Keys,
        grid: Grid = STANDARD,
    ) -> Verdict:
        """In the place of ``verify_block``. A block is judged as a whole: no single draft has a chance of its own."""
        verdict = verify_block(tickets_at, rows, tokens, anchor_position, keys, grid)
        self._commit(BLOCK, tickets_at, tokens, anchor_position, keys, verdict)
        return verdict

    def verify_match(
        self,
        tickets_at: TicketsAt,
        tokens: Sequence[int],
        anchor_position: int,
        noise: Keys,
        grid: Grid = STANDARD,
    ) -> Verdict:
        """In the place of ``verify.verify_match``."""
        verdict = verify.verify_match(tickets_at, tokens, anchor_position, noise, grid)
        self._commit(MATCH, tickets_at, tokens, anchor_position, noise, verdict)
        return verdict

    def sample_target_only(self, tickets: Int64s, position: int, keys: Keys, grid: Grid = STANDARD) -> int:
        """In the place of ``verify.sample_target_only``."""
        token = verify.sample_target_only(tickets, position, keys, grid)
        self._record(MATCH if keys.round == 0 else RATIO, tickets, position, keys, token)
        return token

    def _commit(
        self, lane: str, tickets_at: TicketsAt, tokens: Sequence[int], anchor: int, keys: Keys, verdict: Verdict
    ) -> None:
        for index, token in enumerate([*tokens[: verdict.accepted], verdict.token]):
            self._record(lane, tickets_at(index), anchor + 1 + index, keys, token)

    def _record(self, lane: str, tickets: Int64s, position: int, keys: Keys, token: int) -> None:
        place = _place(tickets, token, keys, position)
        if place is None:
            raise ImpossibleError(f"token {token} was committed and has no mass in its target row")
        best = int(tickets.argmax())
        self.committed.append(Committed(lane, keys.seed, position, place, int(tickets[best]) / TOTAL, best == token))


def _place(masses: Int64s, token: int, keys: Keys, position: int) -> float | None:
    """Where a token stands in a row of masses, spread over its own mass; None when it has none."""
    mass = int(masses[token])
    if mass == 0:
        return None
    spread = keys.draw64(Domain.TEST, position) / STANDARD.coin
    return (int(masses[:token].sum()) + spread * mass) / int(masses.sum())


@dataclass(frozen=True)
class ServedCase(Case):
    """A proposal of a running engine, for steps that take a case."""

    rows_of_p: TicketsAt = field(default=lambda index: np.zeros(0, dtype=np.int64), compare=False)
    anchor: int = 0

    @property
    def vocab(self) -> int:
        return int(self.rows_of_p(0).size)

    @property
    def anchor_position(self) -> int:
        return self.anchor

    def tickets_at(self, index: int) -> Int64s:
        return self.rows_of_p(index)


def _served_case(tickets_at: TicketsAt, rows: Sequence[Row], tokens: Sequence[int], anchor: int) -> ServedCase:
    return ServedCase(Toy("served", STANDARD), (), tuple(rows), tuple(tokens), tickets_at, anchor)


def _judged(place: int, tickets: Int64s, row: Row, token: int, accepted: bool) -> Judged:
    chance = int(np.minimum(tickets[row.ids], row.counts * STANDARD.scale).sum()) / TOTAL
    p, q = tickets[row.ids] / TOTAL, row.counts / STANDARD.mass
    mean = float(p @ q)
    return Judged(place, chance, accepted, row.count(token) / STANDARD.mass, mean, float(p @ (q * q)) - mean**2)


# --- tests over records ----------------------------------------------------------------------------------------------

_CELLS, _SIDE = 16, 8


def acceptance_test(judged: Sequence[Judged]) -> Outcome:
    """Accepted drafts against the sum of their chances."""
    variance = sum(draft.chance * (1 - draft.chance) for draft in judged)
    return z_test(sum(draft.accepted for draft in judged), math.fsum(draft.chance for draft in judged), variance)


def likeness_test(judged: Sequence[Judged]) -> Outcome:
    """How likely the drafter found the committed tokens, against what it finds of tokens of the target.

    The direction in which a wrong verifier errs: text that leans towards the drafter, or away from it.
    """
    expected = math.fsum(draft.mean for draft in judged)
    return z_test(math.fsum(draft.likeness for draft in judged), expected, math.fsum(d.variance for d in judged))


def place_test(committed: Sequence[Committed]) -> Outcome:
    """Places of committed tokens in their rows, sixteen cells."""
    return _uniform([token.place for token in committed])


def correction_test(corrected: Sequence[Corrected]) -> Outcome:
    """Places of corrections in their residuals, sixteen cells.

    Raises:
        ImpossibleError: a correction that the residual does not hold.
    """
    outside = [correction.token for correction in corrected if correction.place is None]
    if outside:
        raise ImpossibleError(f"{len(outside)} corrections outside the residual, the first is token {outside[0]}")
    return _uniform([correction.place for correction in corrected if correction.place is not None])


def _uniform(places: Sequence[float]) -> Outcome:
    counts = np.bincount([min(int(place * _CELLS), _CELLS - 1) for place in places], minlength=_CELLS)
    return chi_square([[(float(seen), len(places) / _CELLS) for seen in counts]])


def neighbour_test(committed: Sequence[Committed]) -> Outcome:
    """Places of two consecutive tokens of one text, eight by eight cells; the pairs are disjoint, so independent."""
    ordered = sorted(committed, key=lambda token: (token.seed, token.position))
    pairs = [
        (one, two)
        for one, two in pairwise(ordered)
        if one.seed == two.seed and two.position == one.position + 1 and one.position % 2 == 0
    ]
    cells = [_eighth(one.place) * _SIDE + _eighth(two.place) for one, two in pairs]
    counts = np.bincount(cells, minlength=_SIDE * _SIDE)
    return chi_square([[(float(seen), len(pairs) / _SIDE**2) for seen in counts]])


def _eighth(place: float) -> int:
    return min(int(place * _SIDE), _SIDE - 1)


def best_token_test(committed: Sequence[Committed]) -> Outcome:
    """How often the most likely token came, against the sum of its probabilities."""
    variance = sum(token.best * (1 - token.best) for token in committed)
    return z_test(sum(token.was_best for token in committed), math.fsum(t.best for t in committed), variance)
