"""The round over vocabulary shards as Tier 0 explores it, and wrong ways to choose a shard.

Purpose: every rank explores all draws in step with the others; all of them have to find the law of the whole row.

Invariants: ranks are threads of this process; a mutant replaces how the shard, or the token in it, is chosen.

Called by Tier 0 and ``mutants``. It never serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from dspark import target_shards
from dspark.collectives import Group, LocalGroup, locate
from dspark.dyadic import Int64s
from dspark.oracle import Prefix, SequenceLaw
from dspark.philox import Domain
from dspark.proof.toys import Case, Toy, joint_law
from dspark.target_shards import Shards, target_part, ticket_of
from dspark.tickets import accepts
from dspark.verify import Draws, Kind, Verdict

Rank = Callable[[Group, Shards, Callable[[int], Int64s], Case, Draws], Verdict]
"""One rank's verdict; the function gives this rank's part of target row i."""
Locate = Callable[[Sequence[int], int], tuple[int, int]]
Totals = Callable[[list[int]], list[int]]


def production_rank(
    group: Group, shards: Shards, part_at: Callable[[int], Int64s], case: Case, draws: Draws
) -> Verdict:
    """The code that serves."""
    return target_shards.verify_ratio(
        group, shards, part_at, case.rows, case.tokens, case.anchor_position, draws, case.grid
    )


def sharded_law(toy: Toy, bounds: tuple[int, ...], depth: int, length: int, rank: Rank) -> SequenceLaw:
    """Joint law that every rank finds, rows made by shards too.

    Raises:
        RuntimeError: the ranks found different laws.
    """
    shards = Shards(bounds)

    def work(group: Group) -> SequenceLaw:
        held = slice(bounds[group.rank], bounds[group.rank + 1])

        @cache
        def part(prefix: Prefix) -> Int64s:
            return target_part(group, shards, toy.target_logits(prefix)[held], toy.policy, total=toy.grid.total)

        def step(case: Case, draws: Draws) -> Verdict:
            return rank(group, shards, lambda index: part(case.prefix + case.tokens[:index]), case, draws)

        return joint_law(toy, depth, length, step)

    laws = LocalGroup(len(bounds) - 1).run(work)
    if any(law != laws[0] for law in laws):
        raise RuntimeError("the ranks found different laws")
    return laws[0]


def _everything(totals: list[int]) -> list[int]:
    return totals


@dataclass(frozen=True)
class ShardParts:
    """The round of one rank in parts. locate: shard and place of a unit of mass; residual_totals: masses that count."""

    locate: Locate = locate
    residual_totals: Totals = _everything

    def __call__(
        self, group: Group, shards: Shards, part_at: Callable[[int], Int64s], case: Case, draws: Draws
    ) -> Verdict:
        for index, (row, token) in enumerate(zip(case.rows, case.tokens, strict=True)):
            position, tickets = case.anchor_position + 1 + index, part_at(index)
            ticket = ticket_of(group, shards, tickets, token)
            if not accepts(draws.draw64(Domain.ACCEPTANCE, position), row.count(token), ticket, case.grid):
                held = shards.of(group.rank)
                counts = np.array([row.count(owned) for owned in held], dtype=np.int64)
                masses = np.maximum(tickets - counts * case.grid.scale, 0)
                coin = draws.draw64(Domain.CORRECTION, position)
                chosen = self._pick(group, shards, masses, self.residual_totals, coin, case)
                return Verdict(index, chosen, Kind.CORRECTION)
        depth = len(case.tokens)
        coin = draws.draw64(Domain.BONUS, case.anchor_position + 1 + depth)
        return Verdict(depth, self._pick(group, shards, part_at(depth), _everything, coin, case), Kind.BONUS)

    def _pick(
        self, group: Group, shards: Shards, masses: Int64s, count: Totals, coin: int, case: Case
    ) -> int:
        totals = count(group.all_gather(np.array([masses.sum()])).ravel().tolist())
        owner, rest = self.locate(totals, coin * sum(totals) // case.grid.coin)
        place = int(masses.cumsum().searchsorted(rest, side="right")) if owner == group.rank else 0
        token = min(shards.of(owner).start + place, shards.vocab - 1)
        return int(group.broadcast(np.array([token], dtype=np.int64), owner)[0])


def _first_with_mass(totals: list[int]) -> list[int]:
    """The residual of the first shard that has any; the others' is forgotten."""
    first = next(rank for rank, total in enumerate(totals) if total)
    return [total if rank == first else 0 for rank, total in enumerate(totals)]


def _by_float(totals: Sequence[int], chosen: int) -> tuple[int, int]:
    """The shard from FP64 sums; its own unit, kept inside it."""
    reached = 0
    for rank, total in enumerate(totals):
        if float(chosen) < float(reached + total):
            return rank, max(chosen - reached, 0)
        reached += total
    return len(totals) - 1, totals[-1] - 1


def _not_strict(totals: Sequence[int], chosen: int) -> tuple[int, int]:
    """``<=`` where ``<`` belongs: a shard without mass takes unit 0."""
    rest = chosen
    for rank, total in enumerate(totals):
        if rest <= total:
            return rank, rest
        rest -= total
    return len(totals) - 1, rest


SHARD_MUTANTS: dict[str, Rank] = {
    "residual on one shard only": ShardParts(residual_totals=_first_with_mass),
    "shard chosen by a float": ShardParts(locate=_by_float),
    "shard without mass can be chosen": ShardParts(locate=_not_strict),
}
SHARD_EQUIVALENTS: dict[str, Rank] = {"sharded round in parts": ShardParts()}
