"""Rank 0 of a tensor-parallel group: it plans, decides, and says when a step is resolved.

Invariants: one unresolved step at most; a decision is resolved only after every other rank has confirmed exactly
it; a vetoed proposal is decided with nothing accepted; nothing depends on timing, deadlines only end waits.
The agreement as a whole: ``rank_agreement``. Called by the engine of rank 0; sends nothing itself, draws
nothing, and sees no float.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from .rank_messages import (
    NOTHING,
    VETO,
    Ack,
    Applied,
    Decision,
    DecisionItem,
    Down,
    Form,
    Joined,
    Plan,
    PlanItem,
    ProposalCopy,
    RankMessage,
    Turn,
)


class LeaderState(Enum):
    """State of rank 0; in AGREED all ranks have answered the plan, in DECIDED they are committing."""

    DOWN = "down"
    FORMING = "forming"
    READY = "ready"
    PLANNED = "planned"
    AGREED = "agreed"
    DECIDED = "decided"


_L = LeaderState
LEADER: Final[Mapping[LeaderState, Mapping[str, LeaderState]]] = {
    _L.DOWN: {"form": _L.FORMING},
    _L.FORMING: {"form": _L.FORMING, "joined": _L.READY, "fail": _L.DOWN},
    _L.READY: {"form": _L.FORMING, "plan": _L.PLANNED, "fail": _L.DOWN},
    _L.PLANNED: {"form": _L.FORMING, "agree": _L.AGREED, "fail": _L.DOWN},
    _L.AGREED: {"form": _L.FORMING, "decide": _L.DECIDED, "fail": _L.DOWN},
    _L.DECIDED: {"form": _L.FORMING, "resolve": _L.READY, "fail": _L.DOWN},
}
"""state -> action -> next state; a missing key is a mistake of the caller (ValueError)."""


@dataclass(slots=True)
class RankLeader:
    """Rank 0 of ``ranks``. ``counters`` counts drops, vetoed proposals and ends of epochs by cause.

    ``deadline_ns`` bounds one step and one forming; ``resend_ns`` is after how long an unanswered question is
    asked again.
    """

    ranks: int
    deadline_ns: int
    resend_ns: int
    state: LeaderState = LeaderState.DOWN
    group_epoch: int = 0
    sequence: int = 0
    items: tuple[PlanItem, ...] = ()
    question: Form | Plan | Decision | None = None
    digest: int = 0
    waiting: frozenset[int] = frozenset()
    vetoes: frozenset[int] = frozenset()
    due_ns: int = 0
    resend_at_ns: int = 0
    counters: Counter[str] = field(default_factory=Counter, compare=False)

    def form(self, group_epoch: int, now_ns: int) -> Turn:
        """Start an epoch, above every earlier one of any leader of this group; an unresolved step is dead."""
        if group_epoch <= self.group_epoch:
            raise ValueError("group_epoch must grow")
        self._move("form")
        self.group_epoch, self.sequence, self.items = group_epoch, 0, ()
        self.due_ns = now_ns + self.deadline_ns
        return self._ask(Form(group_epoch), 0, now_ns)

    def share(self, copy: ProposalCopy) -> Turn:
        """Send the drafts of a validated reply to the other ranks; its digest goes into the plan."""
        return Turn(self._to(range(1, self.ranks), copy))

    def plan(self, items: Sequence[PlanItem], now_ns: int) -> Turn:
        """Start the next step. Its forward pass may begin at once, on every rank."""
        self._move("plan")
        self.sequence, self.items, self.vetoes = self.sequence + 1, tuple(items), frozenset()
        self.due_ns = now_ns + self.deadline_ns
        plan = Plan(self.group_epoch, self.sequence, self.items)
        return self._ask(plan, plan.digest, now_ns)

    def decide(self, items: Sequence[DecisionItem], now_ns: int) -> Turn:
        """Fix what the agreed step came to: one item per agreed item, in order, with its cause."""
        if [(*one[:4], one.cause) for one in items] != [(*one[:4], one.cause) for one in self.items]:
            raise ValueError("decide exactly the agreed items")
        if any(one.accepted > agreed.depth for one, agreed in zip(items, self.items, strict=True)):
            raise ValueError("a round accepts no more than its drafts, and none of a discarded proposal")
        self._move("decide")
        decision = Decision(self.group_epoch, self.sequence, self.digest, tuple(items))
        return self._ask(decision, decision.digest, now_ns)

    def receive(self, message: RankMessage, now_ns: int) -> Turn:
        """Take one message of another rank; anything that is not expected now is dropped and counted."""
        if not isinstance(message, Joined | Ack | Applied | Down) or not 0 < message.rank < self.ranks:
            return self._drop("unexpected")
        if message.group_epoch != self.group_epoch:
            return self._drop("stale_epoch")
        if isinstance(message, Down):
            return self._drop("already_down") if self.state is _L.DOWN else self._fail(message.cause)
        if not self._answers(message):
            return self._drop("duplicate")
        if isinstance(message, Ack):
            if message.plan_digest != self.digest:
                return self._fail("plan_mismatch")
            self.vetoes |= set(message.vetoes)
        elif isinstance(message, Applied) and message.decision_digest != self.digest:
            return self._fail("decision_mismatch")
        self.waiting -= {message.rank}
        return NOTHING if self.waiting else self._complete()

    def next_deadline_ns(self) -> int | None:
        """When :meth:`expire` has something to do; None when nothing is pending."""
        if self.state in (_L.DOWN, _L.READY):
            return None
        return min(self.due_ns, self.resend_at_ns) if self.waiting else self.due_ns

    def expire(self, now_ns: int) -> Turn:
        """Ask the silent ranks again, or end the epoch when the deadline has passed."""
        if self.state in (_L.DOWN, _L.READY):
            return NOTHING
        if now_ns >= self.due_ns:
            return self._fail("deadline")
        if not self.waiting or now_ns < self.resend_at_ns or self.question is None:
            return NOTHING
        self.resend_at_ns = now_ns + self.resend_ns
        return Turn(self._to(self.waiting, self.question))

    def _answers(self, message: Joined | Ack | Applied) -> bool:
        """Whether ``message`` is the first answer of its rank to the question that is open."""
        kind = {_L.FORMING: Joined, _L.PLANNED: Ack, _L.DECIDED: Applied}.get(self.state)
        if kind is None or not isinstance(message, kind) or message.rank not in self.waiting:
            return False
        return isinstance(message, Joined) or message.sequence == self.sequence

    def _ask(self, question: Form | Plan | Decision, digest: int, now_ns: int) -> Turn:
        self.question, self.digest, self.waiting = question, digest, frozenset(range(1, self.ranks))
        self.resend_at_ns = now_ns + self.resend_ns
        if not self.waiting:
            return self._complete()
        return Turn(self._to(self.waiting, question))

    def _complete(self) -> Turn:
        """Every rank has answered."""
        if isinstance(self.question, Plan):
            self._move("agree")
            self.items = tuple(self._without_vetoed(item) for item in self.items)
            return Turn(agreed=self.items)
        if isinstance(self.question, Decision):
            self._move("resolve")
            return Turn(resolved=self.question)
        self._move("joined")
        return NOTHING

    def _without_vetoed(self, item: PlanItem) -> PlanItem:
        if item.slot not in self.vetoes or not item.depth:
            return item
        self.counters[VETO] += 1
        return item._replace(depth=0, proposal=0, cause=VETO)

    def _fail(self, cause: str) -> Turn:
        self.counters[cause] += 1
        self._move("fail")
        return Turn(failed=cause)

    def _drop(self, cause: str) -> Turn:
        self.counters[cause] += 1
        return NOTHING

    def _move(self, action: str) -> None:
        following = LEADER[self.state].get(action)
        if following is None:
            raise ValueError(f"{action} is not possible while the leader is {self.state.value}")
        self.state = following

    @staticmethod
    def _to(ranks: Iterable[int], message: RankMessage) -> tuple[tuple[int, RankMessage], ...]:
        return tuple((rank, message) for rank in sorted(ranks))
