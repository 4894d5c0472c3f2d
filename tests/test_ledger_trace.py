"""Ledger events: what the watches see of real connections, and what the trace checker lets pass."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from dspark.model_check.frozen_pair import STEP_DEADLINE_NS, TAP_ROW_BYTES, LivePair
from dspark.model_check.ledger_events import Event, Kind
from dspark.model_check.trace_check import TraceChecker, check_trace
from dspark_proto import (
    Cause,
    DrafterConnection,
    Lane,
    LocalProtocolError,
    StepItem,
    SupportPolicy,
    VerifierConnection,
    prefix_digest,
)
from dspark_proto.events import ProposalReady, StepArrived
from dspark_proto.limits import NO_COMMIT
from dspark_proto.slots import VerifierSlot

K = Kind


class Watched:
    """A real pair; ``lines`` are the events since the last look, judged as they come."""

    def __init__(self) -> None:
        self.pair = LivePair(VerifierConnection, DrafterConnection, self.origin)
        self.checker = TraceChecker()
        self.found: list[Event] = []
        self.tokens = [1, 1]
        self.pair.connect()
        self.look()

    def origin(self, slot: VerifierSlot) -> tuple[int, int, int]:
        return slot.generation, slot.round, self.pair.worker

    def look(self) -> None:
        events = self.pair.events()
        assert [self.checker.feed(event) for event in events] == [""] * len(events)
        self.found += events

    def lines(self) -> list[str]:
        found, self.found = self.found, []
        return [f"{one.place} {one.kind.name} {one.slot} {one.generation} {one.round} {one.value}" for one in found]

    def up(self, frame: memoryview) -> list[StepItem]:
        self.look()
        arrived = [event for event in self.pair.drafter.receive(frame, 0) if isinstance(event, StepArrived)]
        self.look()
        return [item for event in arrived for item in event.items]

    def open(self) -> None:
        self.up(self.pair.verifier.open(0, 70, seed=1, support=SupportPolicy.K1, lane=Lane.RATIO))

    def step(self, round_: int, accepted_count: int = NO_COMMIT) -> StepItem:
        verifier, tokens = self.pair.verifier, self.tokens
        first = verifier.context_end(0)
        rows = len(tokens) - 1 - first
        token = 0 if accepted_count == NO_COMMIT else tokens[-1]
        item = StepItem(
            70,
            0,
            verifier.generation(0),
            round_,
            tokens[-1],
            len(tokens) - 1,
            prefix_digest(tokens[:-1]),
            depth=1,
            lane=Lane.RATIO,
            accepted_count=accepted_count,
            commit_token=token,
            tap_first=first,
            tap_rows=rows,
            taps=bytes(rows * TAP_ROW_BYTES),
        )
        (arrived,) = self.up(verifier.step([item], 0))
        return arrived

    def answer(self, item: StepItem) -> ProposalReady:
        frames = self.pair.reply(item, 9)
        self.look()
        events = [event for frame in frames for event in self.pair.verifier.receive(frame, 0)]
        self.look()
        (proposal,) = events
        assert isinstance(proposal, ProposalReady)
        self.tokens += [9, 1]
        return proposal


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_connection_and_a_lease_are_seen_on_both_sides(watched: Watched) -> None:
    assert watched.lines() == ["verifier CONNECTED 0 0 0 200", "worker CONNECTED 0 0 0 100"]
    watched.open()
    assert watched.lines() == ["verifier OPENED 0 1 0 70", "worker OPENED 0 1 0 70"]


def test_a_round_is_seen_from_step_to_release(watched: Watched) -> None:
    watched.open()
    watched.lines()
    proposal = watched.answer(watched.step(4))
    assert watched.lines() == [
        "verifier STEPPED 0 1 4 0",
        "verifier LEASED 0 1 4 0",
        "worker STEPPED 0 1 4 0",
        "worker DREW 0 1 4 (70, (0, 4))",
        "verifier ACCEPTED 0 1 4 200",
        "verifier FILLED 0 1 4 0",
    ]
    proposal.lease.retain()
    watched.look()
    proposal.lease.release()
    watched.look()
    proposal.lease.release()
    watched.look()
    assert watched.lines() == [f"verifier {name} 0 1 4 0" for name in ("RETAINED", "RELEASED", "RELEASED")]


def test_a_commit_is_seen_alone_and_on_a_step(watched: Watched) -> None:
    watched.open()
    watched.answer(watched.step(1))
    watched.lines()
    watched.up(watched.pair.verifier.commit(0, 1, 1, prefix_digest(watched.tokens[:-1])))
    assert watched.lines() == ["verifier COMMITTED 0 1 1 0", "worker COMMITTED 0 1 1 0"]
    watched.answer(watched.step(2)).lease.release()
    watched.look()
    watched.lines()
    watched.step(5, accepted_count=1)
    assert [line for line in watched.lines() if "LEASED" not in line] == [
        "verifier COMMITTED 0 1 2 0",
        "verifier STEPPED 0 1 5 0",
        "worker COMMITTED 0 1 2 0",
        "worker STEPPED 0 1 5 0",
    ]


def test_a_dead_round_is_seen_with_its_memory(watched: Watched) -> None:
    watched.open()
    watched.step(1)
    watched.lines()
    (timed_out,) = watched.pair.verifier.expire(STEP_DEADLINE_NS)
    assert timed_out.round == 1  # type: ignore[union-attr]
    watched.look()
    assert watched.lines() == ["verifier TIMED_OUT 0 2 1 0", "verifier QUARANTINED 0 1 1 0"]
    lease = watched.pair.leases[0]
    assert lease.key is not None
    watched.pair.verifier.cancel_confirmed(lease.key)
    watched.up(watched.pair.verifier.reset(0, Cause.ROUND_TIMED_OUT))
    assert watched.lines() == ["verifier RESET 0 3 0 0", "verifier LIFTED 0 1 1 0", "worker RESET 0 3 0 0"]


def test_ends_of_a_slot_are_told_apart(watched: Watched) -> None:
    watched.open()
    item = watched.step(1)
    watched.lines()
    (failure,) = watched.pair.drafter.fail(item)
    watched.look()
    watched.pair.verifier.receive(failure, 0)
    watched.look()
    assert watched.lines() == ["worker FAILED 0 1 0 0", "verifier KILLED 0 2 0 0", "verifier QUARANTINED 0 1 1 0"]
    watched.up(watched.pair.verifier.cancel(0, Cause.CLIENT_GONE))
    assert watched.lines() == ["verifier KILLED 0 3 0 0", "worker KILLED 0 3 0 0"]
    watched.up(watched.pair.verifier.close(0))
    assert watched.lines() == ["verifier CLOSED 0 4 0 0", "worker CLOSED 0 4 0 0"]


def test_a_new_connection_retires_the_slots_of_the_old_one(watched: Watched) -> None:
    watched.open()
    watched.lines()
    watched.pair.connect()
    watched.look()
    assert watched.lines() == [
        "verifier CLOSED 0 2 0 0",
        "worker RETIRED 0 1 0 0",
        "worker CONNECTED 0 0 0 100",
    ]


def test_a_refused_call_is_no_event(watched: Watched) -> None:
    watched.open()
    watched.lines()
    with pytest.raises(LocalProtocolError):
        watched.pair.verifier.commit(0, 0, 1, bytes(8))
    watched.look()
    assert watched.lines() == []


# Traces

OPENED = [Event(K.CONNECTED, "v", value=200), Event(K.OPENED, "v", 0, 1, 0, 70)]
STEPPED = [*OPENED, Event(K.STEPPED, "v", 0, 1, 1), Event(K.LEASED, "v", 0, 1, 1, 0)]
ACCEPTED = [*STEPPED, Event(K.ACCEPTED, "v", 0, 1, 1, 200), Event(K.FILLED, "v", 0, 1, 1, 0)]
COMMITTED = [*ACCEPTED, Event(K.COMMITTED, "v", 0, 1, 1)]
TIMED_OUT = [*STEPPED, Event(K.TIMED_OUT, "v", 0, 2, 1), Event(K.QUARANTINED, "v", 0, 1, 1, 0)]
AGAIN = [*TIMED_OUT, Event(K.RESET, "v", 0, 3), Event(K.STEPPED, "v", 0, 3, 1)]
WORKER_STEPPED = [Event(K.OPENED, "w", 0, 1, 0, 70), Event(K.STEPPED, "w", 0, 1, 1)]
DREW = [*WORKER_STEPPED, Event(K.DREW, "w", 0, 1, 1, (70, (0, 1)))]
FORMED = [Event(K.FORMED, "g", 0, 1, 0, 3)]
ONE_APPLIED = [*FORMED, Event(K.APPLIED, "g", 1, 1, 1, 99)]
BOTH_APPLIED = [*ONE_APPLIED, Event(K.APPLIED, "g", 2, 1, 1, 99)]
RESOLVED = [*BOTH_APPLIED, Event(K.RESOLVED, "g", 0, 1, 1, 99)]

IMPOSSIBLE = [
    (OPENED, Event(K.OPENED, "v", 0, 2), "open is not possible"),
    ([*OPENED, Event(K.CLOSED, "v", 0, 2)], Event(K.OPENED, "v", 0, 2), "generation 2 is used up"),
    (OPENED, Event(K.CONNECTED, "v", value=200), "slot 0 outlived"),
    (OPENED, Event(K.RESET, "v", 0, 1), "the generation stays 1"),
    (OPENED, Event(K.CLOSED, "v", 0, 1), "the generation stays 1"),
    (OPENED, Event(K.STEPPED, "v", 0, 2, 1), "generation 1, round -1"),
    (STEPPED, Event(K.STEPPED, "v", 0, 1, 2), "second unresolved round"),
    (ACCEPTED, Event(K.STEPPED, "v", 0, 1, 1), "generation 1, round 1"),
    (STEPPED, Event(K.TIMED_OUT, "v", 0, 1, 1), "the generation stays 1"),
    (STEPPED, Event(K.TIMED_OUT, "v", 0, 2, 7), "no such round"),
    (OPENED, Event(K.TIMED_OUT, "v", 0, 2, 1), "no such round"),
    (AGAIN, Event(K.ACCEPTED, "v", 0, 1, 1, 200), "a stale reply"),
    (STEPPED, Event(K.ACCEPTED, "v", 0, 1, 2, 200), "a stale reply"),
    (STEPPED, Event(K.ACCEPTED, "v", 0, 1, 1, 199), "a stale reply: the epoch"),
    ([*STEPPED, Event(K.LOST, "v")], Event(K.ACCEPTED, "v", 0, 1, 1, 200), "a stale reply: the epoch"),
    (ACCEPTED, Event(K.ACCEPTED, "v", 0, 1, 1, 200), "a second reply"),
    (ACCEPTED, Event(K.DISCARDED, "v", 0, 1, 1), "discard is not possible"),
    (STEPPED, Event(K.DISCARDED, "v", 0, 1, 2), "generation 1, round 1"),
    (STEPPED, Event(K.COMMITTED, "v", 0, 1, 1), "no such round was accepted"),
    (ACCEPTED, Event(K.COMMITTED, "v", 0, 1, 2), "no such round was accepted"),
    (COMMITTED, Event(K.COMMITTED, "v", 0, 1, 1), "reported before"),
    (STEPPED, Event(K.LEASED, "v", 1, 1, 1, 0), "the block is leased"),
    (TIMED_OUT, Event(K.LEASED, "v", 1, 1, 1, 0), "the block is quarantined"),
    (ACCEPTED, Event(K.LEASED, "v", 1, 1, 1, 0), "the block is filled"),
    (STEPPED, Event(K.FILLED, "v", 0, 1, 2, 0), "the block is leased"),
    (ACCEPTED, Event(K.ABANDONED, "v", 0, 1, 1, 0), "the block is filled"),
    (STEPPED, Event(K.LIFTED, "v", 0, 1, 1, 0), "the block is leased"),
    (STEPPED, Event(K.READ, "v", 0, 1, 1, 0), "a consumer of memory that is leased"),
    (ACCEPTED, Event(K.WROTE, "v", 0, 1, 1, 0), "a write into memory that is filled"),
    ([*ACCEPTED, Event(K.RELEASED, "v", 0, 1, 1, 0)], Event(K.RELEASED, "v", 0, 1, 1, 0), "memory that is free"),
    (STEPPED, Event(K.RETAINED, "v", 0, 1, 1, 0), "a consumer of memory that is leased"),
    (TIMED_OUT, Event(K.WROTE, "v", 0, 2, 1, 0), "a write into memory that is quarantined"),
    (DREW, Event(K.DREW, "w", 0, 1, 1, (70, (0, 1))), "drawn for a dead round"),
    (WORKER_STEPPED, Event(K.DREW, "w", 0, 1, 2, (70, (0, 2))), "drawn for a dead round"),
    ([*DREW, Event(K.STEPPED, "w", 0, 1, 2)], Event(K.DREW, "w", 0, 1, 2, (70, (0, 1))), "a second draw"),
    (WORKER_STEPPED, Event(K.FAILED, "w", 0, 2), "the generation is 1"),
    (FORMED, Event(K.FORMED, "g", 0, 1, 0, 3), "epoch 1 was formed"),
    (ONE_APPLIED, Event(K.RESOLVED, "g", 0, 1, 1, 99), "a half commit: only [1] of 2"),
    ([*FORMED, Event(K.APPLIED, "g", 2, 1, 1, 99)], Event(K.RESOLVED, "g", 0, 1, 1, 99), "only [2] of 2"),
    (BOTH_APPLIED, Event(K.RESOLVED, "g", 0, 1, 1, 98), "a half commit"),
    (BOTH_APPLIED, Event(K.RESOLVED, "g", 0, 2, 1, 99), "epoch 1, step 1"),
    (ONE_APPLIED, Event(K.APPLIED, "g", 2, 1, 1, 98), "different decisions"),
    (FORMED, Event(K.APPLIED, "g", 1, 1, 2, 99), "epoch 1, step 1"),
    (FORMED, Event(K.APPLIED, "g", 1, 2, 1, 99), "epoch 1, step 1"),
    (RESOLVED, Event(K.RESOLVED, "g", 0, 1, 1, 99), "epoch 1, step 2"),
]


@pytest.mark.parametrize(("before", "event", "reason"), IMPOSSIBLE, ids=lambda one: getattr(one, "kind", None))
def test_an_impossible_event_is_named(before: list[Event], event: Event, reason: str) -> None:
    assert check_trace(before) is None
    error = check_trace([*before, event, *before])
    assert error is not None
    assert (error.index, error.event) == (len(before), event)
    assert reason in error.reason
    assert str(error).startswith(f"event {len(before)}, {event.kind.name} (")


def test_every_kind_of_event_has_a_rule() -> None:
    for kind in Kind:
        assert TraceChecker().feed(Event(kind, "v", 0, 1, 1, (0, 0))) != "not an event of the vocabulary"
    assert TraceChecker().feed(Event(39, "v")) == "not an event of the vocabulary"  # type: ignore[arg-type]


POSSIBLE = [
    [*TIMED_OUT, Event(K.WROTE, "v", 0, 1, 1, 0), Event(K.LIFTED, "v", 0, 1, 1, 0), Event(K.LEASED, "v", 0, 3, 1, 0)],
    [*STEPPED, Event(K.DISCARDED, "v", 0, 1, 1), Event(K.ABANDONED, "v", 0, 1, 1, 0), Event(K.STEPPED, "v", 0, 1, 2)],
    [*STEPPED, Event(K.RESTARTED, "v"), *ACCEPTED],
    [*DREW, Event(K.ENDED, "w", value=70), Event(K.RETIRED, "w", 0, 1), Event(K.OPENED, "w", 0, 2, 0, 70)],
    [*DREW, Event(K.KILLED, "w", 0, 2), Event(K.RESET, "w", 0, 3), Event(K.KILLED, "w", 0, 4)],
    [*ONE_APPLIED, Event(K.FORMED, "g", 0, 2, 0, 3), Event(K.APPLIED, "g", 2, 1, 1, 98)],
    [*RESOLVED, Event(K.APPLIED, "g", 1, 1, 1, 99), Event(K.APPLIED, "g", 1, 1, 2, 97)],
    [*OPENED, *[one._replace(place="other") for one in ACCEPTED]],
]


@pytest.mark.parametrize("events", POSSIBLE)
def test_what_a_correct_ledger_may_do_passes(events: list[Event]) -> None:
    assert check_trace(events) is None


def test_a_used_key_is_remembered_after_a_restart() -> None:
    error = check_trace([*DREW, Event(K.RESTARTED, "w"), *DREW])
    assert error is not None
    assert error.reason == "a second draw under one random number key"


def rounds(last: int) -> Iterator[Event]:
    yield from OPENED
    for number in count(1):
        block = number % 2
        yield Event(K.STEPPED, "v", 0, 1, number)
        yield Event(K.LEASED, "v", 0, 1, number, block)
        yield Event(K.ACCEPTED, "v", 0, 1, number if number < last else number - 1, 200)
        yield Event(K.FILLED, "v", 0, 1, number, block)
        yield Event(K.RELEASED, "v", 0, 1, number, block)
        yield Event(K.COMMITTED, "v", 0, 1, number)


def test_an_endless_trace_is_judged_as_it_comes() -> None:
    error = check_trace(rounds(last=2000))
    assert error is not None
    assert error.index == len(OPENED) + 6 * 1999 + 2
    assert "a stale reply" in error.reason


def test_a_checker_can_go_back() -> None:
    checker = TraceChecker()
    for event in (*ACCEPTED, *DREW, *ONE_APPLIED):
        assert checker.feed(event) == ""
    kept = checker.freeze()
    assert hash(kept) == hash(checker.freeze())
    assert checker.feed(Event(K.COMMITTED, "v", 0, 1, 1)) == ""
    assert checker.freeze() != kept
    checker.thaw(kept)
    assert checker.freeze() == kept
    assert checker.feed(Event(K.COMMITTED, "v", 0, 1, 1)) == ""
