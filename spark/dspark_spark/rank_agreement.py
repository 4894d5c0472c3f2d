"""The agreement of one tensor-parallel group: a round is committed on all ranks or seen by nobody.

Rank 0 decides; the others obey one plan and one decision per step. Invariants: at most one step is unresolved; a
decision is *resolved* (to be committed by rank 0, sent to clients and reported to workers) only after every other
rank has confirmed that it committed exactly it; a proposal that one rank does not hold as planned is discarded
whole, on all ranks; a rank that cannot follow says so and ends the epoch, and what it committed of an unresolved
step dies with it. None of this depends on timing: deadlines only end waits.

Values in, one :class:`Turn` out; time is an argument. No float, no random number, no socket. Loss, duplication,
reordering and restarts of ranks are harmless (``rank_model`` checks that exhaustively). Called by whoever joins
the ranks, one object per rank and per group of requests; the forward pass may run between plan and decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from .rank_messages import (
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
)

VETO: Final = "veto"
"""Cause of a proposal that some rank does not hold as planned."""


class LeaderState(Enum):
    """State of rank 0; in AGREED all ranks have answered the plan, in DECIDED they are committing."""

    DOWN = "down"
    FORMING = "forming"
    READY = "ready"
    PLANNED = "planned"
    AGREED = "agreed"
    DECIDED = "decided"


class FollowerState(Enum):
    """State of another rank; OUT obeys nothing but a new group."""

    OUT = "out"
    READY = "ready"
    PLANNED = "planned"
    APPLYING = "applying"


_L, _F = LeaderState, FollowerState
LEADER: Final[Mapping[LeaderState, Mapping[str, LeaderState]]] = {
    _L.DOWN: {"form": _L.FORMING},
    _L.FORMING: {"form": _L.FORMING, "joined": _L.READY, "fail": _L.DOWN},
    _L.READY: {"form": _L.FORMING, "plan": _L.PLANNED, "fail": _L.DOWN},
    _L.PLANNED: {"form": _L.FORMING, "agree": _L.AGREED, "fail": _L.DOWN},
    _L.AGREED: {"form": _L.FORMING, "decide": _L.DECIDED, "fail": _L.DOWN},
    _L.DECIDED: {"form": _L.FORMING, "resolve": _L.READY, "fail": _L.DOWN},
}
FOLLOWER: Final[Mapping[FollowerState, Mapping[str, FollowerState]]] = {
    _F.OUT: {"join": _F.READY},
    _F.READY: {"join": _F.READY, "plan": _F.PLANNED, "fail": _F.OUT},
    _F.PLANNED: {"join": _F.READY, "decide": _F.APPLYING, "fail": _F.OUT},
    _F.APPLYING: {"join": _F.READY, "applied": _F.READY, "fail": _F.OUT},
}
"""state -> action -> next state; a missing key is a mistake of the caller (ValueError)."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a call asks of its caller; ``messages`` are (rank to send to, message).

    Leader: ``agreed`` are the plan's items with vetoed proposals discarded, to be decided; ``resolved`` is
    committed on every other rank: commit and emit it. Follower: ``plan`` is to be run; ``apply`` is to be
    committed, then :meth:`RankFollower.applied` called. ``failed``: the epoch is over, for this cause, and every
    round of the unresolved step is dead.
    """

    messages: tuple[tuple[int, RankMessage], ...] = ()
    agreed: tuple[PlanItem, ...] | None = None
    resolved: Decision | None = None
    plan: Plan | None = None
    apply: Decision | None = None
    failed: str = ""


NOTHING: Final = Turn()


@dataclass(slots=True)
class RankLeader:
    """Rank 0 of ``ranks``. ``counters`` counts drops, discarded proposals and ends of epochs by cause."""

    ranks: int
    deadline_ns: int
    resend_ns: int
    state: LeaderState = LeaderState.DOWN
    group_epoch: int = 0
    sequence: int = 0
    items: tuple[PlanItem, ...] = ()
    asked: Form | Plan | Decision | None = None
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
        return self._ask(Form(group_epoch), now_ns)

    def share(self, slot: int, generation: int, round_: int, tokens: tuple[int, ...], reply_checksum: bytes) -> Turn:
        """Send the drafts of a validated reply to the other ranks, as soon as they are there, once."""
        return self._broadcast(ProposalCopy(self.group_epoch, slot, generation, round_, tokens, reply_checksum))

    def plan(self, items: Sequence[PlanItem], now_ns: int) -> Turn:
        """Start the next step. The forward pass may begin at once, on every rank."""
        self._move("plan")
        self.sequence, self.items, self.vetoes = self.sequence + 1, tuple(items), frozenset()
        self.due_ns = now_ns + self.deadline_ns
        return self._ask(Plan(self.group_epoch, self.sequence, self.items), now_ns)

    def decide(self, items: Sequence[DecisionItem], now_ns: int) -> Turn:
        """Fix what the agreed step came to, one item per agreed item in its order."""
        agreed = [(*item[:4], item.cause) for item in self.items]
        if [(*item[:4], item.cause) for item in items] != agreed:
            raise ValueError("decide exactly the agreed items, with their causes")
        if any(one.accepted > item.depth for one, item in zip(items, self.items, strict=True)):
            raise ValueError("a round accepts no more than its drafts, and none of a discarded proposal")
        self._move("decide")
        digest = Plan(self.group_epoch, self.sequence, self.items).digest if self.asked is None else self.plan_digest
        return self._ask(Decision(self.group_epoch, self.sequence, digest, tuple(items)), now_ns)
