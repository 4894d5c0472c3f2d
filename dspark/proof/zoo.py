"""Mutants of the ratio lane's verification step, each with one deliberate mistake.

Purpose: show that the suite can fail. Every animal is a mistake that a shipped system has made or that the literature
warns of. The clean step below is the production rule taken apart, so that a mutant replaces exactly one part.

Called by ``mutants``, where each has its place in the whole zoo. Nothing here is on a serving path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from dspark.dyadic import Int64s, Row, allocate
from dspark.philox import Domain
from dspark.proof.toys import Case, Step, production
from dspark.tickets import accepts, pick, residual
from dspark.verify import Draws, Kind, Verdict

Accept = Callable[[Case, int, int], bool]
Masses = Callable[[Case, int], Int64s]
Coin = Callable[[Case, int, Draws], int]


def _accept(case: Case, index: int, coin: int) -> bool:
    token = case.tokens[index]
    return accepts(coin, case.rows[index].count(token), int(case.tickets_at(index)[token]), case.grid)


def _correction(case: Case, index: int) -> Int64s:
    return residual(case.tickets_at(index), case.rows[index], case.grid)


def _bonus(case: Case, index: int) -> Int64s:
    return case.tickets_at(index)


def _coin_of(domain: Domain) -> Coin:
    return lambda case, index, draws: draws.draw64(domain, case.anchor_position + 1 + index)


_ACCEPTANCE, _CORRECTION = _coin_of(Domain.ACCEPTANCE), _coin_of(Domain.CORRECTION)


@dataclass(frozen=True)
class Parts:
    """A verification step in parts; the defaults are the production rule."""

    accept: Accept = _accept
    correction: Masses = _correction
    bonus: Masses = _bonus
    acceptance_coin: Coin = _ACCEPTANCE
    correction_coin: Coin = _CORRECTION

    def __call__(self, case: Case, draws: Draws) -> Verdict:
        for index in range(len(case.tokens)):
            if not self.accept(case, index, self.acceptance_coin(case, index, draws)):
                coin = self.correction_coin(case, index, draws)
                return Verdict(index, pick(self.correction(case, index), coin, case.grid), Kind.CORRECTION)
        depth = len(case.tokens)
        coin = _coin_of(Domain.BONUS)(case, depth, draws)
        return Verdict(depth, pick(self.bonus(case, depth), coin, case.grid), Kind.BONUS)


def _proposal_number(case: Case, index: int, draws: Draws) -> int:
    """The number that the worker drew the token with, as a coin: uniform over the token's own tickets."""
    row, token = case.rows[index], case.tokens[index]
    below = int(row.counts[row.ids < token].sum())
    inside = _coin_of(Domain.PROPOSAL)(case, index, draws)
    return (below * case.grid.coin + inside * row.count(token)) // case.grid.mass


def _coin_of_the_first(case: Case, index: int, draws: Draws) -> int:
    return _ACCEPTANCE(case, 0, draws)


def _dense(case: Case, row: Row) -> Int64s:
    masses = np.zeros(case.vocab, dtype=np.int64)
    masses[row.ids] = row.counts * case.grid.scale
    return masses


def _reallocated(case: Case, row: Row, weights: np.ndarray) -> Row:
    counts = allocate(weights / weights.sum(), case.grid.mass)
    return Row(row.ids[counts > 0], counts[counts > 0])


def _with_rows(change: Callable[[Case, int], Row]) -> Step:
    """The verifier believes in other rows than the ones that were drawn from."""

    @lru_cache(maxsize=4096)
    def believed(case: Case) -> Case:
        return replace(case, rows=tuple(change(case, index) for index in range(len(case.rows))))

    step = Parts(correction=lambda case, i: _unchecked(case, i, case.tickets_at(i)))
    return lambda case, draws: step(believed(case), draws)


def _unchecked(case: Case, index: int, tickets: Int64s) -> Int64s:
    """A residual without the identity check, as float code has it: p itself when nothing is left."""
    return _or_p(case, index, np.maximum(tickets - _dense(case, case.rows[index]), 0))


def _sharpened(case: Case, index: int) -> Row:
    row = case.rows[index]
    return _reallocated(case, row, row.counts.astype(np.float64) ** 2)


def _unconditioned(case: Case, index: int) -> Row:
    """The backbone row without the drafted predecessor; a count of 1 stands in where the token is absent."""
    row = case.toy.draft(case.prefix + (0,) * index)
    if row.count(case.tokens[index]):
        return row
    return case.rows[index]


def _one_entry_dropped(case: Case, index: int) -> Row:
    row = case.rows[index]
    others = np.flatnonzero(row.ids != case.tokens[index])
    if others.size == 0:
        return row
    kept = np.delete(np.arange(len(row)), others[-1])
    return _reallocated(case, Row(row.ids[kept], row.counts[kept]), row.counts[kept].astype(np.float64))


def _on_support(case: Case, index: int) -> Int64s:
    masses = np.zeros(case.vocab, dtype=np.int64)
    ids = case.rows[index].ids
    masses[ids] = _correction(case, index)[ids]
    return _or_p(case, index, masses)


def _without_token(case: Case, index: int) -> Int64s:
    masses = case.tickets_at(index).copy()
    masses[case.tokens[index]] = 0
    return _or_p(case, index, masses)


def _or_p(case: Case, index: int, masses: Int64s) -> Int64s:
    return masses if masses.any() else case.tickets_at(index)


def _accept_or_equal(case: Case, index: int, coin: int) -> bool:
    token = case.tokens[index]
    count, ticket = case.rows[index].count(token), int(case.tickets_at(index)[token])
    return coin * count * case.grid.scale <= ticket * case.grid.coin


def _accept_raw(case: Case, index: int, coin: int) -> bool:
    token = case.tokens[index]
    raw = case.toy.raw_target(case.prefix + case.tokens[:index])
    return accepts(coin, case.rows[index].count(token), int(raw[token]), case.grid)


def _accept_inverted(case: Case, index: int, coin: int) -> bool:
    token = case.tokens[index]
    p, q = int(case.tickets_at(index)[token]), case.rows[index].count(token) * case.grid.scale
    return coin * p < q * case.grid.coin


def _accept_next_row(case: Case, index: int, coin: int) -> bool:
    token = case.tokens[index]
    return accepts(coin, case.rows[index].count(token), int(case.tickets_at(index + 1)[token]), case.grid)


def _accept_typical(case: Case, index: int, coin: int) -> bool:
    return 10 * int(case.tickets_at(index)[case.tokens[index]]) >= 3 * case.grid.total


def _bonus_from_q(case: Case, index: int) -> Int64s:
    return _dense(case, case.toy.draft(case.prefix + case.tokens[:index]))


def _admit_only_zero(case: Case, draws: Draws) -> Verdict:
    """Admission that looks at the drafted token: keep the proposal only when it starts with token 0."""
    return production(case if case.tokens[0] == 0 else replace(case, rows=(), tokens=()), draws)


def _discard_by_length(case: Case, draws: Draws) -> Verdict:
    """A reply that is as long as its rows: a late one is dropped, and how long it is says what was drafted."""
    entries = sum(len(row) for row in case.rows)
    return production(case if entries % 2 == 0 else replace(case, rows=(), tokens=()), draws)


CLEAN = Parts()

MUTANTS: dict[str, Step] = {
    "residual from p": Parts(correction=lambda case, i: case.tickets_at(i)),
    "correction on the support of q only": Parts(correction=_on_support),
    "correction from q": Parts(correction=lambda case, i: _dense(case, case.rows[i])),
    "correction from absolute difference": Parts(
        correction=lambda case, i: _or_p(case, i, np.abs(case.tickets_at(i) - _dense(case, case.rows[i])))
    ),
    "correction from p without x": Parts(correction=_without_token),
    "correction row off by one": Parts(
        correction=lambda case, i: _unchecked(case, i, case.tickets_at(i + 1))
    ),
    "correction reuses the acceptance coin": Parts(correction_coin=_ACCEPTANCE),
    "correction reuses the proposal number": Parts(correction_coin=_proposal_number),
    "acceptance reuses the proposal number": Parts(acceptance_coin=_proposal_number),
    "one acceptance coin for all positions": Parts(acceptance_coin=_coin_of_the_first),
    "accept on equality": Parts(accept=_accept_or_equal),
    "accept with p before top-k": Parts(accept=_accept_raw),
    "accept with q over p": Parts(accept=_accept_inverted),
    "accept with the next target row": Parts(accept=_accept_next_row),
    "accept half as often": Parts(accept=lambda case, i, coin: _accept(case, i, 2 * coin)),
    "accept above a threshold": Parts(accept=_accept_typical),
    "accept always": Parts(accept=lambda case, i, coin: True),
    "bonus from q": Parts(bonus=_bonus_from_q),
    "bonus row off by one": Parts(bonus=lambda case, i: case.tickets_at(i - 1)),
    "row at another draft temperature": _with_rows(_sharpened),
    "row not conditioned on the drafted predecessor": _with_rows(_unconditioned),
    "row with an entry dropped and renormalised": _with_rows(_one_entry_dropped),
    "admission looks at the drafted token": _admit_only_zero,
    "discard by the length of the reply": _discard_by_length,
}
"""By name; ``mutants`` adds what each mistake is."""


def _accept_from_one(case: Case, index: int, coin: int) -> bool:
    """u in (0, 1] and <=, instead of u in [0, 1) and <."""
    return _accept_or_equal(case, index, coin + 1)


def _without_bonus(case: Case, draws: Draws) -> Verdict:
    """A round that ends with its last accepted draft."""
    verdict = production(case, draws)
    if verdict.kind is Kind.BONUS and case.tokens:
        return Verdict(len(case.tokens) - 1, case.tokens[-1], Kind.BONUS)
    return verdict


def _capped_afterwards(case: Case, draws: Draws) -> Verdict:
    """A round cut to one token after it was judged; that token is the accepted draft, where it was accepted."""
    verdict = production(case, draws)
    return Verdict(0, case.tokens[0], verdict.kind) if verdict.accepted else verdict


def _discarded_by_a_coin(case: Case, draws: Draws) -> Verdict:
    """Some proposals are late, whatever they hold."""
    late = draws.draw64(Domain.TEST, case.anchor_position) * 2 < case.grid.coin
    return production(replace(case, rows=(), tokens=()) if late else case, draws)


EQUIVALENTS: dict[str, Step] = {
    "step in parts": CLEAN,
    "coin from one with equality": Parts(accept=_accept_from_one),
    "no bonus token": _without_bonus,
    "round capped after its verdict": _capped_afterwards,
    "proposals discarded by a coin": _discarded_by_a_coin,
}
"""Other steps with the same law."""
