"""The model of a group of ranks: the production agreement over a network that loses, repeats and reorders.

The network is the set of all messages ever sent: any of them may arrive now, later, again, or never; a copy of a
proposal may also arrive with other tokens. Any rank may restart without memory at any point, rank 0 too, and any
deadline may pass at any time. Committing takes time: between a decision's arrival and ``applied`` anything may
happen. Laws: no step is resolved before every other rank has committed it (``trace_check``); a rank commits in
sequence, each step once, and no draft that it does not hold. Bounds: ``epochs``, ``steps`` per epoch,
``restarts``. Called by ``__main__`` and by tests, which plant bugs in subclasses of the two classes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple, cast

from dspark_spark.rank_agreement import (
    Ack,
    Applied,
    Decision,
    DecisionItem,
    FollowerState,
    LeaderState,
    Plan,
    PlanItem,
    ProposalCopy,
    RankFollower,
    RankLeader,
    RankMessage,
    Turn,
)

from .explore import Numbers, Step, bits
from .ledger_events import Event, Kind
from .trace_check import TraceChecker

_GROUP = "group"
_DEADLINE_NS, _RESEND_NS = 100, 10
_CLOCKS = frozenset(("counters", "due_ns", "resend_at_ns"))
"""Not part of the state: what only counts, and times, which are the same in every state."""


_NO_TURN = Turn()


class GroupWorld(NamedTuple):
    """One state; ``leader``, ``followers`` and ``laws`` number interned values.

    ``inboxes`` are masks of the messages ever sent to each rank; ``applied`` is what each follower committed last,
    as (epoch, sequence), since it started.
    """

    leader: int
    followers: tuple[int, ...]
    inboxes: tuple[int, ...]
    laws: int
    epoch: int = 0
    restarts: int = 0
    applied: tuple[tuple[int, int], ...] = ()


class TwoRankCommit:
    """The model; ``ranks`` may also be 3. ``leader`` and ``follower`` are the classes that run.

    Without ``drafts`` every step is target-only. Without ``faults`` nothing is bent, restarts or expires, and all
    steps must be able to resolve, from every state.
    """

    name = "two_rank_commit"

    def __init__(
        self,
        leader: type[RankLeader] = RankLeader,
        follower: type[RankFollower] = RankFollower,
        ranks: int = 2,
        epochs: int = 2,
        steps: int = 2,
        restarts: int = 1,
        drafts: bool = True,
        faults: bool = True,
        goals: Iterable[str] = (),
    ) -> None:
        self.goals = frozenset(goals)
        self._bounds = epochs, steps, restarts
        self._drafts, self._faults = drafts, faults
        self._leader = leader(ranks, _DEADLINE_NS, _RESEND_NS)
        self._followers = {rank: follower(rank, 2 * _DEADLINE_NS) for rank in range(1, ranks)}
        self._blank = {rank: _frozen(one) for rank, one in self._followers.items()} | {0: _frozen(self._leader)}
        self._states, self._messages, self._laws = Numbers(), Numbers(), Numbers()
        self._turns: dict[Hashable, tuple[int, Turn] | None] = {}
        self._verdicts: dict[Hashable, tuple[int, str]] = {}
        self._texts: dict[int, str] = {}
        self._checker = TraceChecker()

    def initial(self) -> Hashable:
        """No group has been formed yet."""
        followers = tuple(self._states.number(self._blank[rank]) for rank in self._followers)
        laws = self._laws.number(self._checker.freeze())
        inboxes = (0,) * (1 + len(followers))
        return GroupWorld(
            self._states.number(self._blank[0]), followers, inboxes, laws, applied=((0, 0),) * len(followers)
        )

    def steps(self, state: Hashable) -> Iterator[Step]:
        """Every transition."""
        world = cast(GroupWorld, state)
        yield from self._leader_steps(world)
        for rank in self._followers:
            yield from self._follower_steps(world, rank)

    def reached(self, state: Hashable) -> Iterable[str]:
        """Goals that ``state`` meets."""
        world = cast(GroupWorld, state)
        leader = self._leader_state(world)
        if leader["state"] is LeaderState.READY and isinstance(leader["question"], Decision):
            (item,) = leader["question"].items
            kind = "after a veto" if item.cause else "with drafts" if item.accepted else "target-only"
            yield f"resolved {kind} in epoch {world.epoch}"
        if leader["state"] is LeaderState.DOWN and any(epoch == world.epoch for epoch, _ in world.applied):
            yield "a rank committed what was never resolved"

    def is_home(self, state: Hashable) -> bool:
        """The group can serve the next step, or the bounds leave no epoch to form."""
        world = cast(GroupWorld, state)
        leader = self._leader_state(world)
        if not self._faults:
            return leader["state"] is LeaderState.READY and leader["sequence"] == self._bounds[1]
        return leader["state"] is LeaderState.READY or world.epoch == self._bounds[0]

    # Rank 0

    def _leader_steps(self, world: GroupWorld) -> Iterator[Step]:
        epochs, steps, restarts = self._bounds
        leader = self._leader_state(world)
        epoch, sequence = world.epoch, leader["sequence"] + 1
        copy = _copy(epoch, sequence, 7)
        if epoch < epochs and leader["state"] is LeaderState.DOWN:
            yield self._formed(world)
        if epoch < epochs and self._faults and epoch and world.restarts < restarts:
            reborn = world._replace(leader=self._states.number(self._blank[0]), restarts=world.restarts + 1)
            yield self._formed(reborn, "restarts, ")
        if leader["state"] is LeaderState.READY and sequence <= steps:
            if self._drafts:
                yield from self._led(world, "share", lambda one: one.share(copy))
            item = PlanItem(0, 1, 1, copy.round, *((1, copy.digest) if self._drafts else (0, 0)))
            yield from self._led(world, "plan", lambda one: one.plan([item], 0))
        if leader["state"] is LeaderState.AGREED:
            items = [
                DecisionItem(item.slot, item.session, item.generation, item.round, item.depth, 5, item.cause)
                for item in leader["items"]
            ]
            yield from self._led(world, "decide", lambda one: one.decide(items, 0))
        if self._faults:
            yield from self._led(world, "deadline", lambda one: one.expire(_DEADLINE_NS))
        for number in bits(world.inboxes[0]):
            message = self._messages.value(number)
            yield from self._led(world, self._text(number), partial(_receive, message=message))

    def _formed(self, world: GroupWorld, before: str = "") -> Step:
        epoch = world.epoch + 1
        formed = Event(Kind.FORMED, _GROUP, 0, epoch, 0, len(world.inboxes))
        laws, broken = self._judged(world.laws, formed)
        (step,) = self._led(world._replace(epoch=epoch, laws=laws), "form", lambda one: one.form(epoch, 0))
        return step._replace(label=f"rank 0: {before}form", broken=broken or step.broken)

    def _led(self, world: GroupWorld, label: str, call: Callable[[RankLeader], Turn]) -> Iterator[Step]:
        done = self._turn(world.leader, world.epoch, label, self._leader, call)
        if done is None or done == (world.leader, _NO_TURN):
            return
        leader, turn = done
        inboxes = list(world.inboxes)
        for rank, message in turn.messages:
            inboxes[rank] |= 1 << self._messages.number(message)
            if isinstance(message, ProposalCopy) and self._faults:
                bent = _copy(message.group_epoch, message.round % 10, 8)
                inboxes[rank] |= 1 << self._messages.number(bent)
        laws, broken = world.laws, ""
        if turn.resolved is not None:
            laws, broken = self._judged(laws, _event(Kind.RESOLVED, 0, turn.resolved))
        yield Step(f"rank 0: {label}", world._replace(leader=leader, inboxes=tuple(inboxes), laws=laws), broken)

    # Other ranks

    def _follower_steps(self, world: GroupWorld, rank: int) -> Iterator[Step]:
        follower = self._states.value(world.followers[rank - 1])
        if self._faults:
            if world.restarts < self._bounds[2]:
                reborn = self._moved(world, rank, self._states.number(self._blank[rank]), _NO_TURN)
                applied = _replaced(world.applied, rank, (0, 0))
                yield Step(f"rank {rank} restarts", reborn._replace(restarts=world.restarts + 1, applied=applied))
            yield from self._followed(world, rank, "deadline", lambda one: one.expire(3 * _DEADLINE_NS))
        if dict(follower)["state"] is FollowerState.APPLYING:
            yield from self._commit(world, rank, dict(follower)["decision"])
        for number in bits(world.inboxes[rank]):
            message = self._messages.value(number)
            yield from self._followed(world, rank, self._text(number), partial(_receive, message=message))

    def _commit(self, world: GroupWorld, rank: int, decision: Decision) -> Iterator[Step]:
        laws, broken = self._judged(world.laws, _event(Kind.APPLIED, rank, decision))
        broken = broken or self._misapplied(world, rank, decision)
        applied = _replaced(world.applied, rank, (decision.group_epoch, decision.sequence))
        after = world._replace(laws=laws, applied=applied)
        for step in self._followed(after, rank, "has committed", lambda one: one.applied()):
            yield step._replace(broken=broken)

    def _misapplied(self, world: GroupWorld, rank: int, decision: Decision) -> str:
        epoch, sequence = world.applied[rank - 1]
        expected = sequence + 1 if epoch == decision.group_epoch else 1
        if decision.group_epoch < epoch or decision.sequence != expected:
            return f"rank {rank} commits step {decision.sequence} after step {sequence} of epoch {epoch}"
        held = dict(dict(self._states.value(world.followers[rank - 1]))["copies"])
        right = _copy(decision.group_epoch, decision.sequence, 7)
        if any(item.round != right.round for item in decision.items):
            return f"rank {rank} commits another step's decision"
        if any(item.accepted and held.get(item.slot) != right for item in decision.items):
            return f"rank {rank} commits drafts that it does not hold"
        return ""

    def _followed(
        self, world: GroupWorld, rank: int, label: str, call: Callable[[RankFollower], Turn]
    ) -> Iterator[Step]:
        done = self._turn(world.followers[rank - 1], 0, label, self._followers[rank], call)
        if done is not None and done != (world.followers[rank - 1], _NO_TURN):
            yield Step(f"rank {rank}: {label}", self._moved(world, rank, *done))

    def _moved(self, world: GroupWorld, rank: int, follower: int, turn: Turn) -> GroupWorld:
        answers = sum(1 << self._messages.number(message) for _, message in turn.messages)
        return world._replace(
            followers=_replaced(world.followers, rank, follower),
            inboxes=(world.inboxes[0] | answers, *world.inboxes[1:]),
        )

    # State and laws

    def _turn(
        self, state: int, epoch: int, label: str, one: Any, call: Callable[[Any], Turn]
    ) -> tuple[int, Turn] | None:
        """What ``call`` does to ``one`` in ``state``; None when it is not possible. A label names all of its call."""
        key = (state, epoch, label)
        if key not in self._turns:
            _thaw(one, self._states.value(state))
            try:
                turn = call(one)
                self._turns[key] = self._states.number(_frozen(one)), turn
            except ValueError:
                self._turns[key] = None
        return self._turns[key]

    def _judged(self, laws: int, event: Event) -> tuple[int, str]:
        key = (laws, event)
        if key not in self._verdicts:
            self._checker.thaw(self._laws.value(laws))
            broken = self._checker.feed(event)
            self._verdicts[key] = self._laws.number(self._checker.freeze()), broken
        return self._verdicts[key]

    def _text(self, number: int) -> str:
        if number not in self._texts:
            message = self._messages.value(number)
            self._texts[number] = f"gets {_summary(message)} (message {number})"
        return self._texts[number]

    def _leader_state(self, world: GroupWorld) -> dict[str, Any]:
        return dict(self._states.value(world.leader))


def _copy(epoch: int, sequence: int, token: int) -> ProposalCopy:
    """The drafts of a step; rounds are numbered through all epochs, ten apart."""
    return ProposalCopy(epoch, 0, 1, 1, epoch * 10 + sequence, (token,))


def _receive(one: RankLeader | RankFollower, message: RankMessage) -> Turn:
    return one.receive(message, 0)


def _event(kind: Kind, rank: int, decision: Decision) -> Event:
    return Event(kind, _GROUP, rank, decision.group_epoch, decision.sequence, decision.digest)


def _replaced(values: tuple[Any, ...], rank: int, value: Any) -> tuple[Any, ...]:
    return (*values[: rank - 1], value, *values[rank:])


def _frozen(one: RankLeader | RankFollower) -> tuple[tuple[str, Any], ...]:
    names = [f.name for f in fields(one) if f.name not in _CLOCKS]
    values = [getattr(one, name) for name in names]
    return tuple(
        (name, tuple(sorted(value.items())) if isinstance(value, dict) else value)
        for name, value in zip(names, values, strict=True)
    )


def _thaw(one: RankLeader | RankFollower, frozen: tuple[tuple[str, Any], ...]) -> None:
    for name, value in frozen:
        setattr(one, name, dict(value) if name == "copies" else value)
    one.due_ns = 2 * _DEADLINE_NS if isinstance(one, RankFollower) else _DEADLINE_NS


def _summary(message: RankMessage) -> str:
    text = f"{type(message).__name__} of epoch {message.group_epoch}"
    if isinstance(message, ProposalCopy):
        return f"{text} round {message.round} tokens {message.tokens}"
    if isinstance(message, Plan | Ack | Decision | Applied):
        text += f" step {message.sequence}"
    if isinstance(message, Plan):
        return f"{text} {[f'round {item.round} depth {item.depth}' for item in message.items]}"
    if isinstance(message, Decision):
        return f"{text} {[f'round {item.round} accepted {item.accepted} {item.cause}' for item in message.items]}"
    return f"{text} vetoes {message.vetoes}" if isinstance(message, Ack) and message.vetoes else text
