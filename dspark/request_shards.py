"""Requests split over verifier ranks: each rank judges its own, and all ranks learn all verdicts.

Purpose: where every rank holds whole target rows of some requests, judging is the unsplit code, run by the owner.

Invariants:

- The owner of a request follows from its slot alone: it keeps its rank, and its cache, for life.
- One collective per step, in which a rank without requests takes part like any other.
- A request whose rows define no distribution is refused alone: the others and the ranks go on.

Called by the verifier's ranks, all of them, in step, with the same requests in the same order. It does not know how a
request is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dspark.collectives import Group
from dspark.dyadic import Int64s, RowError
from dspark.processors import LogitsError
from dspark.tickets import ResidualIdentityError, TicketError
from dspark.verify import Kind, Verdict

Refusal = LogitsError | TicketError | RowError | ResidualIdentityError

_KINDS = tuple(Kind)
_REFUSED = -1


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that its owner could not judge; ``reason`` is known to the owner only."""

    owner: int
    reason: Refusal | None


Outcome = Verdict | Refused


def owner_of(slot: int, size: int) -> int:
    """The rank of a slot: slots go round the ranks, so neighbours in a batch are on different ranks."""
    return slot % size


def judge(group: Group, slots: Sequence[int], judge_one: Callable[[int], Verdict]) -> list[Outcome]:
    """Outcomes of all requests, in the order of ``slots``, on all ranks.

    Args:
        slots: the slot of every request of this step, equal on all ranks; may be empty.
        judge_one: judges the request at an index of ``slots``; called for this rank's requests only, in order.
    """
    reasons: dict[int, Refusal] = {}
    mine = np.zeros((len(slots), 3), dtype=np.int64)
    owners = [owner_of(slot, group.size) for slot in slots]
    for index, owner in enumerate(owners):
        if owner == group.rank:
            mine[index] = _judged(judge_one, index, reasons)
    gathered = group.all_gather(mine)
    return [_outcome(gathered[owner, index], owner, reasons.get(index)) for index, owner in enumerate(owners)]


def _judged(
    judge_one: Callable[[int], Verdict], index: int, reasons: dict[int, Refusal]
) -> tuple[int, int, int]:
    try:
        verdict = judge_one(index)
    except (LogitsError, TicketError, RowError, ResidualIdentityError) as refusal:
        reasons[index] = refusal
        return _REFUSED, 0, 0
    return verdict.accepted, verdict.token, _KINDS.index(verdict.kind)


def _outcome(record: Int64s, owner: int, reason: Refusal | None) -> Outcome:
    accepted, token, kind = record.tolist()
    return Refused(owner, reason) if accepted == _REFUSED else Verdict(accepted, token, _KINDS[kind])
