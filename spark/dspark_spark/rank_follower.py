"""Any other rank of a tensor-parallel group: it obeys one plan and one decision per step, or leaves the group.

Invariants: decisions are taken in sequence, each once; a plan or decision that does not follow from what this
rank holds ends the epoch here, it is never repaired; a proposal that this rank does not hold as planned is
vetoed. The agreement as a whole: ``rank_agreement``. Called by the rank's engine; decides nothing from floats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from .rank_messages import (
    NOTHING,
    VETO,
    Ack,
    Applied,
    Decision,
    Down,
    Form,
    Joined,
    Plan,
    PlanItem,
    ProposalCopy,
    RankMessage,
    Turn,
)


class FollowerState(Enum):
    """State of another rank; OUT obeys nothing but a new group."""

    OUT = "out"
    READY = "ready"
    PLANNED = "planned"
    APPLYING = "applying"


_F = FollowerState
FOLLOWER: Final[Mapping[FollowerState, Mapping[str, FollowerState]]] = {
    _F.OUT: {"join": _F.READY},
    _F.READY: {"join": _F.READY, "plan": _F.PLANNED, "fail": _F.OUT},
    _F.PLANNED: {"join": _F.READY, "decide": _F.APPLYING, "fail": _F.OUT},
    _F.APPLYING: {"join": _F.READY, "applied": _F.READY, "fail": _F.OUT},
}
"""state -> action -> next state; a missing key is a mistake of the caller (ValueError)."""


@dataclass(slots=True)
class RankFollower:
    """Any other rank. ``copies`` holds at most one shared proposal per slot; every answer goes to rank 0.

    ``deadline_ns`` bounds the wait for a decision; let it be above the leader's.
    """

    rank: int
    deadline_ns: int
    state: FollowerState = FollowerState.OUT
    group_epoch: int = 0
    sequence: int = 0
    copies: dict[int, ProposalCopy] = field(default_factory=dict)
    planned: frozenset[int] = frozenset()
    ack: Ack | None = None
    decision: Decision | None = None
    due_ns: int = 0
    counters: Counter[str] = field(default_factory=Counter, compare=False)

    def receive(self, message: RankMessage, now_ns: int) -> Turn:
        """Take one message of rank 0. A stale one is dropped; one that cannot be followed ends the epoch here."""
        if message.group_epoch < self.group_epoch:
            return self._drop("stale_epoch")
        if isinstance(message, Form):
            return self._join(message)
        if message.group_epoch > self.group_epoch or self.state is _F.OUT:
            return self._cannot_follow(message.group_epoch, "not_joined")
        if isinstance(message, ProposalCopy):
            return self._keep(message)
        if not isinstance(message, Plan | Decision):
            return self._drop("unexpected")
        if message.sequence < self.sequence:
            return self._drop("stale_sequence")
        return self._take_plan(message, now_ns) if isinstance(message, Plan) else self._take_decision(message)

    def applied(self) -> Turn:
        """The decision of the last ``apply`` has been committed here, all of it."""
        self._move("applied")
        self.planned = frozenset()
        return self._confirm()

    def next_deadline_ns(self) -> int | None:
        """When :meth:`expire` has something to do; None when nothing is awaited."""
        return self.due_ns if self.state is _F.PLANNED else None

    def expire(self, now_ns: int) -> Turn:
        """Leave the epoch when the decision does not come: nobody can know what became of it."""
        if self.state is not _F.PLANNED or now_ns < self.due_ns:
            return NOTHING
        return self._cannot_follow(self.group_epoch, "deadline")

    def _join(self, form: Form) -> Turn:
        if form.group_epoch > self.group_epoch:
            self._move("join")
            self.group_epoch, self.sequence, self.ack, self.decision = form.group_epoch, 0, None, None
            self.copies, self.planned = {}, frozenset()
        elif self.state is _F.OUT:
            return self._drop("already_down")
        return self._answer(Joined(self.group_epoch, self.rank))

    def _keep(self, copy: ProposalCopy) -> Turn:
        """What a plan was compared with stays as it is until the step has been committed."""
        held = self.copies.get(copy.slot)
        stale = held is not None and (copy.session, copy.round) < (held.session, held.round)
        if stale or copy.slot in self.planned:
            return self._drop("stale_copy")
        self.copies[copy.slot] = copy
        return NOTHING

    def _take_plan(self, plan: Plan, now_ns: int) -> Turn:
        if plan.sequence == self.sequence and self.ack is not None and self.ack.plan_digest == plan.digest:
            self.counters["duplicate"] += 1
            return self._answer(self.ack)
        if plan.sequence != self.sequence + 1 or self.state is not _F.READY:
            return self._cannot_follow(plan.group_epoch, "out_of_sequence")
        self._move("plan")
        self.sequence, self.decision, self.due_ns = plan.sequence, None, now_ns + self.deadline_ns
        self.planned = frozenset(item.slot for item in plan.items)
        vetoes = tuple(item.slot for item in plan.items if item.depth and not self._holds(item))
        self.counters[VETO] += len(vetoes)
        self.ack = Ack(plan.group_epoch, plan.sequence, self.rank, plan.digest, vetoes)
        return Turn(((0, self.ack),), plan=plan)

    def _holds(self, item: PlanItem) -> bool:
        copy = self.copies.get(item.slot)
        return copy is not None and copy.digest == item.proposal and len(copy.tokens) == item.depth

    def _take_decision(self, decision: Decision) -> Turn:
        if self.decision == decision:
            self.counters["duplicate"] += 1
            return NOTHING if self.state is _F.APPLYING else self._confirm()
        ack = self.ack
        if self.state is not _F.PLANNED or ack is None or decision.sequence != self.sequence:
            return self._cannot_follow(decision.group_epoch, "out_of_sequence")
        if decision.plan_digest != ack.plan_digest:
            return self._cannot_follow(decision.group_epoch, "plan_mismatch")
        if any(item.accepted and item.slot in ack.vetoes for item in decision.items):
            return self._cannot_follow(decision.group_epoch, "veto_ignored")
        self._move("decide")
        self.decision = decision
        return Turn(apply=decision)

    def _confirm(self) -> Turn:
        assert self.decision is not None
        return self._answer(Applied(self.group_epoch, self.sequence, self.rank, self.decision.digest))

    def _cannot_follow(self, group_epoch: int, cause: str) -> Turn:
        self.counters[cause] += 1
        if self.state is _F.OUT:
            return self._answer(Down(group_epoch, self.rank, cause))
        self._move("fail")
        return Turn(((0, Down(group_epoch, self.rank, cause)),), failed=cause)

    def _drop(self, cause: str) -> Turn:
        self.counters[cause] += 1
        return NOTHING

    @staticmethod
    def _answer(message: RankMessage) -> Turn:
        return Turn(((0, message),))

    def _move(self, action: str) -> None:
        following = FOLLOWER[self.state].get(action)
        if following is None:
            raise ValueError(f"{action} is not possible while the rank is {self.state.value}")
        self.state = following
