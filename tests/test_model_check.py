"""The models hold, planted bugs are found in them, and traces are judged as the models are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from dspark.model_check.checks import CHECKS
from dspark.model_check.explore import Numbers, Report, Step, bits, explore
from dspark.model_check.slot_ledger import SlotLedger
from dspark.model_check.two_rank_commit import TwoRankCommit
from dspark_proto import Cause, DrafterConnection, StepItem, VerifierConnection
from dspark_proto.events import ProposalReady, VerifierEvent
from dspark_proto.prefix import Key, Prefix
from dspark_proto.slots import DrafterSlot, VerifierSlot
from dspark_proto.staging import LeaseState
from dspark_proto.states import SlotState
from dspark_spark.rank_agreement import (
    Applied,
    Decision,
    Down,
    FollowerState,
    PlanItem,
    ProposalCopy,
    RankFollower,
    RankLeader,
    RankMessage,
    Turn,
)

# The search itself


class Lift:
    """A lift of five floors that sticks on the fifth, unless it is repaired."""

    name = "lift"
    goals: ClassVar[frozenset[str]] = frozenset({"top"})

    def __init__(self, repaired: bool = True, highest: int = 5, forbidden: int = 99) -> None:
        self._repaired, self._highest, self._forbidden = repaired, highest, forbidden

    def initial(self) -> Hashable:
        return 0

    def steps(self, state: Any) -> Iterable[Step]:
        if state < self._highest:
            yield Step("up", state + 1, "too high" if state + 1 == self._forbidden else "")
            yield Step("two up", min(state + 2, self._highest))
        if state and (state < 5 or self._repaired):
            yield Step("down", state - 1)

    def reached(self, state: Hashable) -> Iterable[str]:
        return ["top"] if state == 5 else []

    def is_home(self, state: Hashable) -> bool:
        return state == 0


def test_a_model_that_holds_is_counted() -> None:
    assert explore(Lift()) == Report("lift", states=6, transitions=15, depth=3)
    assert str(explore(Lift())) == "lift: 6 states, 15 transitions, depth 3, holds"


def test_a_broken_law_comes_with_the_shortest_way_to_it() -> None:
    report = explore(Lift(forbidden=4))
    assert (report.broken, report.trace) == ("too high", ("up", "two up", "up"))
    assert str(report).splitlines()[1:] == ["    1  up", "    2  two up", "    3  up"]


def test_a_state_without_a_way_home_is_found() -> None:
    report = explore(Lift(repaired=False))
    assert (report.broken, report.trace) == ("no way home from here", ("up", "two up", "two up"))


def test_a_model_that_does_nothing_does_not_hold() -> None:
    assert explore(Lift(highest=3)).broken == "never reached: top"


def test_a_model_that_grows_too_large_does_not_hold() -> None:
    assert explore(Lift(), max_states=3).broken == "more than 3 states"


def test_numbers_are_those_of_first_use() -> None:
    numbers = Numbers()
    assert [numbers.number(value) for value in "abca"] == [0, 1, 2, 0]
    assert numbers.value(1) == "b"
    assert list(bits(0b10110)) == [1, 2, 4]


# The models


@pytest.mark.parametrize("name", CHECKS)
def test_the_model_holds(name: str) -> None:
    report = explore(CHECKS[name]())
    assert report.broken == "", str(report)


def test_a_report_does_not_depend_on_the_process() -> None:
    """Hash seeds differ between processes: no order may come from a hash."""
    code = (
        "from dspark.model_check import checks, explore\n"
        "names = ('slot: two rounds of one generation', 'ranks: three ranks')\n"
        "for name in names: print(explore.explore(checks.CHECKS[name](), max_states=800))"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0].count(b"more than 800 states") == 2
    assert printed[0] == printed[1]


# Bugs planted in the connections


class NoGenerationCheck(VerifierConnection):
    """A reply is taken for any generation."""

    def _admit(self, prefix: Prefix) -> VerifierSlot:
        return super()._admit(replace(prefix, generation=self._slots[prefix.slot].generation))


class NoBumpAtTheDeadline(VerifierConnection):
    """A dead round leaves its generation alive."""

    def _kill_generation(self, slot: VerifierSlot) -> None:
        slot.move("fail", "slot")
        slot.begin(slot.generation, 0)
        self._drop_lease(slot)


class NoQuarantine(VerifierConnection):
    """The memory of a dead round is free at once, though a transport still writes."""

    def _drop_lease(self, slot: VerifierSlot) -> None:
        if slot.lease is not None and slot.lease.state is LeaseState.LEASED:
            slot.lease.abandon()
        slot.lease = None


class QuarantineEndsWithTheReset(VerifierConnection):
    """A reset is taken for the transport's confirmation."""

    def reset(self, slot: int, cause: Cause, context_start: int = 0, start_digest: bytes = bytes(8)) -> memoryview:
        frame = super().reset(slot, cause, context_start, start_digest)
        for lease in self._pool().leases:
            if lease.state is LeaseState.QUARANTINED:
                lease.lift()
        return frame


class QuarantineForEver(VerifierConnection):
    """The transport's confirmation is not listened to."""

    def cancel_confirmed(self, key: Key) -> None:
        pass


class MemoryFreeOnAcceptance(VerifierConnection):
    """A proposal's memory is leased again while its consumer reads."""

    def receive(self, buffer: Any, now_ns: int) -> list[VerifierEvent]:
        events = super().receive(buffer, now_ns)
        for event in events:
            if isinstance(event, ProposalReady):
                event.lease.release()
        return events


class CommitTwice(VerifierConnection):
    """What was reported alone is reported again by the STEP."""

    def step(self, items: Any, now_ns: int, out: Any = None) -> memoryview:
        self._slots[0].committed = False
        return super().step(items, now_ns, out)


class TwoRoundsAtOnce(VerifierConnection):
    """The next STEP does not wait for the reply."""

    def step(self, items: Any, now_ns: int, out: Any = None) -> memoryview:
        slot = self._slots[0]
        if slot.state is SlotState.AWAITING:
            slot.state = SlotState.READY
        return super().step(items, now_ns, out)


class CancelKeepsTheGeneration(VerifierConnection):
    """CANCEL leaves the reply of the cancelled round current."""

    def cancel(self, slot: int, cause: Cause) -> memoryview:
        frame = super().cancel(slot, cause)
        self._slots[slot].generation -= 1
        return frame


class GenerationsStartAgain(VerifierConnection):
    """A new connection numbers generations from the start."""

    def hello(self, now_ns: int, version: Any = None) -> memoryview:
        frame = super().hello(now_ns, version)
        for slot in self._slots:
            slot.generation = 0
        return frame


class DrawAgain(DrafterConnection):
    """A repeated STEP is drafted again under its used key."""

    def _take_item(self, item: StepItem, body: Any) -> StepItem | None:
        slot = self._slots[item.slot]
        if slot.replied and slot.item == item and slot.generation == item.generation:
            slot.state, slot.replied = SlotState.AWAITING, False
            return item
        return super()._take_item(item, body)


class AnswerTheDead(DrafterConnection):
    """Work for a dead round is sent as the answer to the present one."""

    def stream_reply(self, item: StepItem, *rows: Any, **more: Any) -> Iterator[memoryview]:
        slot = self._slots[item.slot]
        present = slot.item if slot.state is SlotState.AWAITING else None
        return super().stream_reply(present or item, *rows, **more)


class OldResets(DrafterConnection):
    """The worker takes messages that start a generation in any order."""

    def _admit(self, prefix: Prefix) -> DrafterSlot:
        slot = self._slots[prefix.slot]
        return slot if slot.state is not SlotState.FREE else super()._admit(prefix)


ABA: dict[str, Any] = {"generations": 3, "rounds": 1, "without": ("CANCEL", "CLOSE", "fail", "COMMIT")}
ALL: dict[str, Any] = {"generations": 2, "rounds": 1}
ROUNDS: dict[str, Any] = {"generations": 1, "rounds": 2}
RECONNECT: dict[str, Any] = {"generations": 2, "rounds": 1, "reconnects": 1, "without": ("CANCEL", "fail", "COMMIT")}


@pytest.mark.parametrize(
    ("planted", "bounds", "broken", "steps"),
    [
        (NoGenerationCheck, ABA, "a stale reply", 9),
        (NoBumpAtTheDeadline, ALL, "the generation stays 1", 3),
        (NoQuarantine, ALL, "a write into memory that is free", 3),
        (QuarantineEndsWithTheReset, ABA, "a write into memory that is free", 3),
        (QuarantineForEver, ALL, "no way home from here", 3),
        (MemoryFreeOnAcceptance, ALL, "a consumer of memory that is free", 7),
        (CommitTwice, ROUNDS, "commit was reported before", 9),
        (TwoRoundsAtOnce, ROUNDS, "a second unresolved round", 3),
        (CancelKeepsTheGeneration, ALL, "the generation stays 1", 2),
        (GenerationsStartAgain, RECONNECT, "the generation stays 1", 2),
        (DrawAgain, ALL, "the slot is at generation 1, round 1", 6),
        (AnswerTheDead, ABA, "a stale reply", 11),
        (OldResets, ABA, "the generation stays", 6),
    ],
)
def test_a_bug_in_a_connection_is_found(planted: type, bounds: dict[str, Any], broken: str, steps: int) -> None:
    role = "verifier" if issubclass(planted, VerifierConnection) else "drafter"
    report = explore(SlotLedger(**bounds, **{role: planted}))
    assert broken in report.broken, str(report)
    assert len(report.trace) == steps, str(report)


# Bugs planted in the ranks


class EmitOnDecision(RankLeader):
    """A step counts as resolved when it has been decided."""

    def decide(self, items: Any, now_ns: int) -> Turn:
        turn = RankLeader.decide(self, items, now_ns)
        self._move("resolve")
        assert isinstance(self.question, Decision)
        return Turn(turn.messages, resolved=self.question)


class EmitOnTheFirstAnswer(RankLeader):
    """One confirmation is taken for all."""

    def receive(self, message: RankMessage, now_ns: int) -> Turn:
        if isinstance(message, Applied) and message.rank in self.waiting:
            self.waiting = frozenset({message.rank})
        return RankLeader.receive(self, message, now_ns)


class SilenceIsConsent(RankLeader):
    """At the deadline the step is resolved without the silent ranks."""

    def expire(self, now_ns: int) -> Turn:
        if isinstance(self.question, Decision) and self.waiting and now_ns >= self.due_ns:
            self.waiting = frozenset()
            return self._complete()
        return RankLeader.expire(self, now_ns)


class Patience(RankLeader):
    """Rank 0 waits for ever."""

    def expire(self, now_ns: int) -> Turn:
        return Turn()

    def receive(self, message: RankMessage, now_ns: int) -> Turn:
        return Turn() if isinstance(message, Down) else RankLeader.receive(self, message, now_ns)


class AckBeforeApply(RankFollower):
    """A decision is confirmed on arrival, before it has been committed."""

    def _take_decision(self, decision: Decision) -> Turn:
        turn = RankFollower._take_decision(self, decision)
        return Turn(self._confirm().messages, apply=turn.apply) if turn.apply else turn


class ApplyAgain(RankFollower):
    """A repeated decision is committed again."""

    def _take_decision(self, decision: Decision) -> Turn:
        if self.decision == decision and self.state is FollowerState.READY:
            self.state = FollowerState.APPLYING
            return Turn(apply=decision)
        return RankFollower._take_decision(self, decision)


class OldEpochsCount(RankFollower):
    """A decision is obeyed whatever its epoch and plan are."""

    def receive(self, message: RankMessage, now_ns: int) -> Turn:
        if isinstance(message, Decision) and self.ack is not None:
            message = replace(message, group_epoch=self.group_epoch, plan_digest=self.ack.plan_digest)
        return RankFollower.receive(self, message, now_ns)


class GapsAreSkipped(RankFollower):
    """A rank that missed steps goes on with the next plan."""

    def _take_plan(self, plan: Any, now_ns: int) -> Turn:
        if self.state is FollowerState.READY and plan.sequence > self.sequence:
            self.sequence = plan.sequence - 1
        return RankFollower._take_plan(self, plan, now_ns)


class NothingIsCompared(RankFollower):
    """A proposal is taken to be the planned one."""

    def _holds(self, item: PlanItem) -> bool:
        return True


class CopiesChange(RankFollower):
    """What a plan was compared with may be replaced before the commit."""

    def _keep(self, copy: ProposalCopy) -> Turn:
        self.planned = frozenset()
        return RankFollower._keep(self, copy)


ONE: dict[str, Any] = {"epochs": 1, "steps": 1}
TWO_STEPS: dict[str, Any] = {"epochs": 1, "drafts": False}
TWO_EPOCHS: dict[str, Any] = {"steps": 1, "drafts": False}


@pytest.mark.parametrize(
    ("planted", "bounds", "broken", "steps"),
    [
        (EmitOnDecision, ONE, "a half commit", 7),
        (EmitOnTheFirstAnswer, ONE | {"ranks": 3, "restarts": 0}, "a half commit", 14),
        (SilenceIsConsent, ONE, "a half commit", 8),
        (Patience, TWO_EPOCHS, "no way home from here", 7),
        (AckBeforeApply, ONE, "a half commit", 9),
        (ApplyAgain, ONE, "commits step 1 after step 1", 11),
        (OldEpochsCount, TWO_EPOCHS, "commits another step's decision", 14),
        (GapsAreSkipped, TWO_STEPS, "commits step 2 after step 0", 18),
        (NothingIsCompared, ONE, "drafts that it does not hold", 9),
        (CopiesChange, ONE, "drafts that it does not hold", 12),
    ],
)
def test_a_bug_in_the_ranks_is_found(planted: type, bounds: dict[str, Any], broken: str, steps: int) -> None:
    role = "leader" if issubclass(planted, RankLeader) else "follower"
    report = explore(TwoRankCommit(**bounds, **{role: planted}))
    assert broken in report.broken, str(report)
    assert len(report.trace) == steps, str(report)
