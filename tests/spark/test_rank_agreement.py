"""The agreement of the ranks, as transcripts; ``tests/test_model_check.py`` checks it exhaustively."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from dspark_spark.rank_agreement import (
    FOLLOWER,
    LEADER,
    Ack,
    Applied,
    Decision,
    DecisionItem,
    Down,
    FollowerState,
    Form,
    Joined,
    LeaderState,
    Plan,
    PlanItem,
    ProposalCopy,
    RankFollower,
    RankLeader,
    RankMessage,
    Turn,
)

DEADLINE, RESEND = 100, 10
COPY = ProposalCopy(1, 0, 70, 1, 4, (7, 8), b"checksum")
DRAFTED = PlanItem(0, 70, 1, 4, 2, COPY.digest)
TARGET_ONLY = PlanItem(1, 71, 3, 9, cause="late")


@dataclass
class Group:
    """Rank 0 and its followers; ``pump`` delivers in order what ``lost`` does not hold back."""

    ranks: int = 2
    leader: RankLeader = field(init=False)
    followers: dict[int, RankFollower] = field(init=False)
    resolved: list[Decision] = field(default_factory=list)
    agreed: list[tuple[PlanItem, ...]] = field(default_factory=list)
    applied: dict[int, list[Decision]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.leader = RankLeader(self.ranks, DEADLINE, RESEND)
        self.followers = {rank: RankFollower(rank, 2 * DEADLINE) for rank in range(1, self.ranks)}
        self.applied = {rank: [] for rank in self.followers}
        self.pump(self.leader.form(1, 0))

    def pump(self, turn: Turn, now_ns: int = 0, lost: Callable[[int, RankMessage], bool] | None = None) -> None:
        waiting = list(turn.messages)
        self.note(turn)
        while waiting:
            to, message = waiting.pop(0)
            if lost is not None and lost(to, message):
                continue
            answer = self.followers[to].receive(message, now_ns) if to else self.leader.receive(message, now_ns)
            self.note(answer)
            waiting += answer.messages
            if answer.apply is not None:
                self.applied[to].append(answer.apply)
                waiting += self.followers[to].applied().messages

    def note(self, turn: Turn) -> None:
        self.resolved += [turn.resolved] if turn.resolved else []
        self.agreed += [turn.agreed] if turn.agreed is not None else []
        self.failed += [turn.failed] if turn.failed else []

    def plan(self, *items: PlanItem, lost: Callable[[int, RankMessage], bool] | None = None) -> None:
        self.pump(self.leader.plan(items, 0), lost=lost)

    def decide(self, lost: Callable[[int, RankMessage], bool] | None = None, token: int = 5) -> None:
        items = [DecisionItem(*item[:4], item.depth, token, item.cause) for item in self.leader.items]
        self.pump(self.leader.decide(items, 0), lost=lost)


def lose(kind: type[RankMessage], to: int | None = None) -> Callable[[int, RankMessage], bool]:
    return lambda rank, message: isinstance(message, kind) and to in (None, rank)


def test_a_step_is_resolved_when_every_rank_has_committed_it() -> None:
    group = Group(ranks=3)
    group.pump(group.leader.share(COPY))
    group.plan(DRAFTED, TARGET_ONLY)
    group.decide()
    (decision,) = group.resolved
    assert decision.items == (DecisionItem(0, 70, 1, 4, 2, 5), DecisionItem(1, 71, 3, 9, 0, 5, "late"))
    assert group.applied == {1: [decision], 2: [decision]}
    assert group.leader.state is LeaderState.READY
    assert group.followers[1].copies[0].tokens == (7, 8)


def test_one_unconfirmed_rank_holds_the_step_back() -> None:
    group = Group(ranks=3)
    group.plan(TARGET_ONLY)
    group.decide(lost=lose(Decision, to=2))
    assert group.applied[1]
    assert not group.resolved
    assert group.leader.state is LeaderState.DECIDED
    assert group.leader.waiting == {2}
    group.pump(group.leader.expire(RESEND))
    assert len(group.resolved) == 1


def test_a_lost_answer_is_asked_for_again_and_nothing_is_committed_twice() -> None:
    group = Group()
    group.plan(TARGET_ONLY, lost=lose(Ack))
    assert group.leader.state is LeaderState.PLANNED
    group.pump(group.leader.expire(RESEND))
    assert group.leader.state is LeaderState.AGREED
    group.decide(lost=lose(Applied))
    assert group.leader.expire(RESEND - 1).messages == ()
    group.pump(group.leader.expire(2 * RESEND))
    assert len(group.resolved) == len(group.applied[1]) == 1
    assert group.followers[1].counters == {"duplicate": 2, "veto": 0}


@pytest.mark.parametrize(
    "held",
    [
        None,
        replace(COPY, tokens=(7, 9)),
        replace(COPY, reply_checksum=b"other rows"),
        replace(COPY, round=3),
        replace(COPY, group_epoch=0),
    ],
)
def test_a_rank_with_another_view_of_the_proposal_has_it_discarded_on_all(held: ProposalCopy | None) -> None:
    group = Group(ranks=3)
    group.pump(group.leader.share(COPY), lost=lambda to, _: to == 2)
    if held is not None:
        group.followers[2].receive(held, 0)
    group.plan(DRAFTED, TARGET_ONLY)
    assert group.agreed == [(DRAFTED._replace(depth=0, proposal=0, cause="veto"), TARGET_ONLY)]
    group.decide()
    assert group.resolved[0].items[0] == DecisionItem(0, 70, 1, 4, 0, 5, "veto")
    assert group.leader.counters["veto"] == 1
    assert group.followers[1].counters["veto"] == 0
    assert group.followers[2].counters["veto"] == 1


def test_the_copy_that_a_plan_was_compared_with_is_not_replaced() -> None:
    group = Group()
    group.pump(group.leader.share(COPY))
    group.plan(DRAFTED)
    group.followers[1].receive(replace(COPY, tokens=(1, 2)), 0)
    group.followers[1].receive(replace(COPY, round=5), 0)
    assert group.followers[1].copies[0] == COPY
    group.decide()
    group.followers[1].receive(replace(COPY, round=5), 0)
    assert group.followers[1].copies[0].round == 5
    assert group.followers[1].receive(COPY, 0) == Turn()
    assert group.followers[1].counters["stale_copy"] == 3


def test_the_copy_of_a_new_session_replaces_that_of_the_old_one_in_its_slot() -> None:
    group = Group()
    group.pump(group.leader.share(COPY))
    fresh = replace(COPY, session=COPY.session + 1, round=COPY.round - 3)
    group.pump(group.leader.share(fresh))
    assert group.followers[1].copies == {0: fresh}
    group.followers[1].receive(replace(COPY, round=COPY.round + 5), 0)
    assert group.followers[1].copies == {0: fresh}
    assert group.followers[1].counters == {"stale_copy": 1}
    group.plan(DRAFTED._replace(session=fresh.session, round=fresh.round, proposal=fresh.digest))
    assert group.agreed[0][0].depth == 2


def test_a_veto_cannot_be_overruled() -> None:
    group = Group()
    group.plan(DRAFTED)
    with pytest.raises(ValueError, match="decide exactly"):
        group.leader.decide([DecisionItem(0, 70, 1, 4, 2, 5)], 0)
    with pytest.raises(ValueError, match="no more than its drafts"):
        group.leader.decide([DecisionItem(0, 70, 1, 4, 1, 5, "veto")], 0)
    forged = Decision(1, 1, group.leader.digest, (DecisionItem(0, 70, 1, 4, 2, 5),))
    turn = group.followers[1].receive(forged, 0)
    assert (turn.apply, turn.failed) == (None, "veto_ignored")


@pytest.mark.parametrize("phase", ["form", "plan", "agree", "decide"])
def test_a_deadline_ends_the_epoch_and_nothing_is_resolved(phase: str) -> None:
    group = Group(ranks=3)
    if phase == "form":
        group.leader.form(2, 0)
    else:
        group.plan(TARGET_ONLY, lost=lose(Ack) if phase == "plan" else None)
    if phase == "decide":
        group.decide(lost=lose(Applied, to=None) if phase == "decide" else None)
    assert group.leader.next_deadline_ns() == (DEADLINE if phase == "agree" else RESEND)
    assert group.leader.expire(DEADLINE - 1).failed == ""
    assert group.leader.expire(DEADLINE).failed == "deadline"
    assert group.leader.state is LeaderState.DOWN
    assert group.leader.next_deadline_ns() is None
    assert not group.resolved
    for follower in group.followers.values():
        answer = Applied(1, 1, follower.rank, group.leader.digest)
        assert group.leader.receive(answer, 0) == Turn()
    group.pump(group.leader.form(3, 0))
    assert group.leader.state is LeaderState.READY
    assert {one.sequence for one in group.followers.values()} == {0}


def test_a_follower_leaves_when_no_decision_comes() -> None:
    group = Group()
    assert group.followers[1].next_deadline_ns() is None
    group.plan(TARGET_ONLY)
    follower = group.followers[1]
    assert follower.next_deadline_ns() == 2 * DEADLINE
    assert follower.expire(2 * DEADLINE - 1) == Turn()
    turn = follower.expire(2 * DEADLINE)
    assert turn.messages == ((0, Down(1, 1, "deadline")),)
    assert turn.failed == "deadline"
    assert follower.state is FollowerState.OUT
    group.pump(turn)
    assert group.failed[-1] == "deadline"
    assert group.leader.state is LeaderState.DOWN


def test_messages_of_an_older_epoch_are_dropped_and_counted() -> None:
    group = Group()
    group.plan(TARGET_ONLY)
    old_plan, old_decision = group.leader.question, Decision(1, 1, group.leader.digest, ())
    group.leader.expire(DEADLINE)
    group.pump(group.leader.form(2, 0))
    follower = group.followers[1]
    for message in (old_plan, old_decision, Form(1), COPY):
        assert isinstance(message, Plan | Decision | Form | ProposalCopy)
        assert follower.receive(message, 0) == Turn()
    assert follower.counters["stale_epoch"] == 4
    for answer in (Joined(1, 1), Ack(1, 1, 1, 0), Applied(1, 1, 1, 0), Down(1, 1, "deadline")):
        assert group.leader.receive(answer, 0) == Turn()
    assert group.leader.counters["stale_epoch"] == 4
    assert group.leader.state is LeaderState.READY


@pytest.mark.parametrize(
    "message",
    [Plan(1, 2, ()), Plan(1, 9, ()), Decision(1, 1, 0, ()), Decision(1, 5, 0, ())],
    ids=str,
)
def test_a_rank_that_cannot_follow_ends_the_epoch(message: Plan | Decision) -> None:
    group = Group()
    turn = group.followers[1].receive(message, 0)
    assert turn.failed == "out_of_sequence"
    assert turn.apply is None
    assert group.followers[1].state is FollowerState.OUT
    again = group.followers[1].receive(message, 0)
    assert again.messages == ((0, Down(1, 1, "not_joined")),)
    group.pump(turn)
    assert group.leader.state is LeaderState.DOWN
    assert group.followers[1].receive(Form(1), 0) == Turn()
    group.pump(group.leader.form(2, 0))
    assert group.followers[1].state is FollowerState.READY


@pytest.mark.parametrize("kind", ["another plan", "the next plan", "the next decision"])
def test_nothing_but_its_decision_follows_a_plan(kind: str) -> None:
    group = Group()
    group.plan(TARGET_ONLY)
    messages: dict[str, Plan | Decision] = {
        "another plan": Plan(1, 1, (DRAFTED,)),
        "the next plan": Plan(1, 2, ()),
        "the next decision": Decision(1, 2, group.leader.digest, ()),
    }
    turn = group.followers[1].receive(messages[kind], 0)
    assert (turn.apply, turn.failed) == (None, "out_of_sequence")


def test_a_new_epoch_starts_without_the_copies_of_the_old_one() -> None:
    group = Group()
    group.pump(group.leader.share(COPY))
    group.plan(DRAFTED)
    group.leader.expire(DEADLINE)
    group.pump(group.leader.form(2, 0))
    assert group.followers[1].copies == {}
    copy = replace(COPY, group_epoch=2, round=5)
    group.pump(group.leader.share(copy))
    group.plan(DRAFTED._replace(round=5, proposal=copy.digest))
    assert group.agreed[-1][0].depth == 2


def test_a_decision_for_another_plan_is_not_committed() -> None:
    group = Group()
    group.plan(TARGET_ONLY)
    turn = group.followers[1].receive(Decision(1, 1, group.leader.digest ^ 1, ()), 0)
    assert (turn.apply, turn.failed) == (None, "plan_mismatch")


def test_ranks_with_another_plan_or_decision_are_found() -> None:
    group = Group()
    group.leader.plan([TARGET_ONLY], 0)
    assert group.leader.receive(Ack(1, 1, 1, group.leader.digest ^ 1), 0).failed == "plan_mismatch"
    group.pump(group.leader.form(2, 0))
    group.plan(TARGET_ONLY)
    group.decide(lost=lose(Applied))
    turn = group.leader.receive(Applied(2, 1, 1, group.leader.digest ^ 1), 0)
    assert (turn.resolved, turn.failed) == (None, "decision_mismatch")


def test_a_rank_that_restarted_has_forgotten_and_says_so() -> None:
    group = Group()
    group.plan(TARGET_ONLY)
    group.followers[1] = RankFollower(1, 2 * DEADLINE)
    group.decide()
    assert group.failed == ["not_joined"]
    assert not group.resolved
    assert group.leader.counters == {"not_joined": 1}


def test_answers_that_are_not_expected_are_dropped_and_counted() -> None:
    group = Group()
    for message, cause in (
        (Joined(1, 1), "duplicate"),
        (Ack(1, 0, 1, 0), "duplicate"),
        (Applied(1, 0, 1, 0), "duplicate"),
        (Ack(1, 1, 2, 0), "unexpected"),
        (Ack(1, 1, 0, 0), "unexpected"),
        (Form(1), "unexpected"),
    ):
        before = group.leader.counters[cause]
        assert group.leader.receive(message, 0) == Turn()
        assert group.leader.counters[cause] == before + 1
    group.plan(TARGET_ONLY, lost=lose(Ack))
    assert group.leader.receive(Ack(1, 7, 1, group.leader.digest), 0) == Turn()
    assert group.leader.state is LeaderState.PLANNED


def test_a_group_of_one_rank_waits_for_nobody() -> None:
    group = Group(ranks=1)
    assert group.leader.state is LeaderState.READY
    group.plan(DRAFTED)
    assert group.agreed == [(DRAFTED,)]
    group.decide()
    assert group.resolved[0].items[0].accepted == 2


def test_the_caller_keeps_the_order_of_a_step() -> None:
    leader = RankLeader(2, DEADLINE, RESEND)
    with pytest.raises(ValueError, match="plan is not possible while the leader is down"):
        leader.plan([], 0)
    leader.form(4, 0)
    with pytest.raises(ValueError, match="group_epoch must grow"):
        leader.form(4, 0)
    with pytest.raises(ValueError, match="decide is not possible"):
        leader.decide([], 0)
    with pytest.raises(ValueError, match="applied is not possible"):
        RankFollower(1, DEADLINE).applied()


def test_every_state_of_the_tables_can_be_left_and_reached() -> None:
    for table, states in ((LEADER, LeaderState), (FOLLOWER, FollowerState)):
        assert set(table) == set(states)
        assert {following for row in table.values() for following in row.values()} == set(states)
