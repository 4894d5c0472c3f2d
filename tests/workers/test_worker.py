"""The worker's promise: it serves many verifiers, refuses what it cannot do, and nothing that arrives ends it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from dspark import dyadic
from dspark.audit import AuditPlan
from dspark.philox import Domain, Keys
from dspark_proto import (
    Accepted,
    Cause,
    Draining,
    ErrorCode,
    Lane,
    MessageType,
    PongReceived,
    ProposalReady,
    Rejected,
    StepFailed,
    StepItem,
    SupportPolicy,
    VerifierConnection,
    VerifierEvent,
    prefix_digest,
)
from dspark_proto.transports.base import PeerFrame
from dspark_spark.proposals import Proposal, audit_proposal, read_proposal
from dspark_workers.worker import STALE_NS, STRANGER_NS, Worker
from tests.conftest import TinyPair
from tests.rig import Parts, load_parts

SECOND = 1_000_000_000
TAPS = torch.randn(300, 128, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16)


@pytest.fixture(scope="module")
def parts(tiny_pair: TinyPair) -> Parts:
    return load_parts(tiny_pair.target, tiny_pair.drafter)


@dataclass
class Spark:
    """A verifier that speaks the wire and knows no target: its taps are noise."""

    worker: Worker
    connection: VerifierConnection
    name: bytes
    now: int = 1
    events: list[VerifierEvent] = field(default_factory=list)
    rounds: dict[int, int] = field(default_factory=dict)

    def tell(self, *frames: Any, draft: bool = True) -> list[VerifierEvent]:
        """Send frames, let the worker turn, return the new events."""
        self.worker.receive([PeerFrame(self.name, memoryview(bytes(f))) for f in frames], self.now)
        if draft:
            self.worker.draft_pending()
        return hear(self.worker, self)

    def hello(self) -> list[VerifierEvent]:
        return self.tell(self.connection.hello(self.now))

    def open(self, slot: int, *, rows: int = 10, seed: int = 5, temperature: int = 1_000_000, start: int = 0) -> None:
        lane = Lane.RATIO if temperature else Lane.GREEDY
        frame = self.connection.open(
            slot, 100 + slot, seed=seed, support=SupportPolicy.K32 if temperature else SupportPolicy.K1, lane=lane,
            draft_temperature_micro=temperature, context_start=start,
        )  # fmt: skip
        self.tell(frame)
        if rows:
            self.context(slot, rows)

    def context(self, slot: int, rows: int) -> None:
        end = self.connection.context_end(slot)
        taps = memoryview(TAPS[end : end + rows].view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
        self.tell(*self.connection.context(slot, end, rows, taps).frames)

    def items(self, *slots: int, depth: int = 4) -> list[StepItem]:
        made = []
        for slot in slots:
            self.rounds[slot] = self.rounds.get(slot, 0) + 1
            state = self.connection._slots[slot]
            made.append(
                StepItem(
                    100 + slot, slot, self.connection.generation(slot), self.rounds[slot], 7,
                    self.connection.context_end(slot), prefix_digest([slot]), depth, state.lane,
                    tap_first=self.connection.context_end(slot),
                )
            )  # fmt: skip
        return made

    def step(self, *slots: int, depth: int = 4, draft: bool = True) -> list[VerifierEvent]:
        return self.tell(self.connection.step(self.items(*slots, depth=depth), self.now), draft=draft)


def hear(worker: Worker, *sparks: Spark) -> list[VerifierEvent]:
    """Deliver the worker's outbox; returns the events of the first verifier named."""
    by_name = {s.name: s for s in sparks}
    first: list[VerifierEvent] = []
    for name, frames in worker.outbox():
        spark = by_name[name]
        for frame in frames:
            events = spark.connection.receive(bytes(frame), spark.now)
            spark.events += events
            if spark is sparks[0]:
                first += events
    return first


def spark_of(parts: Parts, worker: Worker, name: bytes = b"a", **changes: object) -> Spark:
    spark = Spark(worker, VerifierConnection(parts.parameters(**changes)), name)
    assert isinstance(spark.hello()[0], Accepted)
    return spark


def drafts(events: list[VerifierEvent]) -> dict[int, list[int]]:
    """Tokens by slot of every proposal in `events`, whose rows are all valid."""
    found = {}
    for event in events:
        if isinstance(event, ProposalReady):
            proposal: Proposal = read_proposal(event, 288)
            event.lease.release()
            found[event.slot] = proposal.tokens
    return found


# -- service ---------------------------------------------------------------------------------------------------


def test_two_verifiers_at_once_get_what_each_would_get_alone(parts: Parts) -> None:
    alone = []
    for seed, rows in ((5, 10), (6, 25)):
        worker = parts.worker()
        only = spark_of(parts, worker)
        only.open(0, rows=rows, seed=seed)
        alone.append(drafts(only.step(0)))
    worker = parts.worker()
    a, b = spark_of(parts, worker, b"a"), spark_of(parts, worker, b"b")
    a.open(0, rows=10, seed=5)
    b.open(0, rows=25, seed=6)
    a.step(0, draft=False)
    b.step(0, draft=False)
    worker.draft_pending()  # one batch over both
    hear(worker, a, b)
    assert [drafts(a.events), drafts(b.events)] == alone
    assert alone[0] != alone[1]
    assert worker.counters.rounds == 2
    assert worker.free_slots == 2


def test_draws_are_keyed_by_seed_round_position_and_resets(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Keys, Domain, int]] = []
    original = Keys.draw24

    def spy(self: Keys, domain: Domain, position: int, draw: int = 0) -> int:
        seen.append((self, domain, position))
        return original(self, domain, position, draw)

    monkeypatch.setattr(Keys, "draw24", spy)
    spark = spark_of(parts, parts.worker())
    spark.open(2, seed=-77)
    spark.step(2, depth=2)
    spark.tell(spark.connection.reset(2, Cause.ROUND_TIMED_OUT))
    spark.context(2, 10)
    spark.step(2, depth=1)
    assert seen == [
        (Keys(-77, 0, 1, 0), Domain.PROPOSAL, 11),
        (Keys(-77, 0, 1, 0), Domain.PROPOSAL, 12),
        (Keys(-77, 1, 2, 0), Domain.PROPOSAL, 11),
    ]


def test_a_retried_step_gets_the_same_bytes_and_draws_nothing(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark = spark_of(parts, parts.worker())
    spark.open(0)
    frame = bytes(spark.connection.step(spark.items(0), 0))
    replies = []
    for _ in range(2):
        spark.worker.receive([PeerFrame(b"a", memoryview(frame))], 0)
        spark.worker.draft_pending()
        replies.append([bytes(f) for _, frames in spark.worker.outbox() for f in frames])
    assert replies[0] == replies[1] != []
    assert spark.worker.counters.rounds == 1


def open_lane(
    spark: Spark, slot: int, lane: Lane, support: SupportPolicy, seed: int, temperature: int = 1_000_000
) -> None:
    frame = spark.connection.open(
        slot, 100 + slot, seed=seed, support=support, lane=lane, draft_temperature_micro=temperature
    )
    spark.tell(frame)
    spark.context(slot, 10)


def test_a_match_request_gets_drawn_tokens_under_one_entry_rows(parts: Parts) -> None:
    """The tokens that a full row of the same draft temperature and key would give; the row itself stays there."""
    match, full = [], []
    for seed in range(6):
        spark = spark_of(parts, parts.worker())
        open_lane(spark, 0, Lane.MATCH, SupportPolicy.K1, seed)
        open_lane(spark, 1, Lane.RATIO, SupportPolicy.K64, seed)
        events = spark.step(0, 1)
        ready = {e.slot: e for e in events if isinstance(e, ProposalReady)}
        assert (ready[0].support, ready[0].entries) == (1, (1, 1, 1, 1))
        tokens = drafts(events)
        match.append(tokens[0])
        full.append(tokens[1])
    assert match == full
    assert len({tuple(tokens) for tokens in match}) == 6  # drawn, not the maximum


def test_a_match_request_at_temperature_zero_drafts_the_maximum(parts: Parts) -> None:
    spark = spark_of(parts, parts.worker())
    open_lane(spark, 0, Lane.MATCH, SupportPolicy.K1, seed=1, temperature=0)
    spark.open(1, seed=2, temperature=0)
    tokens = drafts(spark.step(0, 1))
    assert tokens[0] == tokens[1]


def test_every_draw_passes_the_audit_under_its_key(parts: Parts) -> None:
    """Conformance: the key is the seed of OPEN, the resets since then, and the round of the STEP."""
    spark = spark_of(parts, parts.worker())
    spark.open(0, seed=-77)
    audited = 0
    for resets in range(3):
        for _ in range(2):
            (event,) = [e for e in spark.step(0) if isinstance(e, ProposalReady)]
            proposal = read_proposal(event, 288)
            event.lease.release()
            for key, sound in ((Keys(-77, resets, event.round), True), (Keys(-77, resets + 1, event.round), False)):
                report = audit_proposal(proposal, event.anchor_position, key, AuditPlan(1.0))
                assert (report.failure is None) is sound
            audited += len(proposal.tokens)
        spark.tell(spark.connection.reset(0, Cause.ROUND_TIMED_OUT))
        spark.context(0, 10)
    assert audited == 24


# -- refusals --------------------------------------------------------------------------------------------------


def test_one_failing_request_does_not_cost_the_others(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = parts.worker()
    spark = spark_of(parts, worker)
    for slot in range(3):
        spark.open(slot, seed=slot)
    expected = drafts(spark.step(0, 1, 2))
    original = worker._chain.sample

    def fail_one(*arguments: Any, **more: Any) -> Any:
        if arguments[-2].seed == 1:
            raise ZeroDivisionError("planted")
        return original(*arguments, **more)

    for slot in range(3):
        spark.tell(spark.connection.close(slot))
        spark.open(slot, seed=slot)
        spark.rounds[slot] = 0
    monkeypatch.setattr(worker._chain, "sample", fail_one)
    events = spark.step(0, 1, 2)
    assert drafts(events) == {0: expected[0], 2: expected[2]}
    (failed,) = [e for e in events if isinstance(e, StepFailed)]
    assert (failed.slot, failed.code, failed.needs_reset) == (1, ErrorCode.DRAFT_FAILED, True)
    assert worker.counters.failed_steps == 1


def test_a_failing_batch_is_refused_whole_and_the_worker_goes_on(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = parts.worker()
    spark = spark_of(parts, worker)
    for slot in range(2):
        spark.open(slot)
    with monkeypatch.context() as patch:
        patch.setattr(worker._state, "hidden", lambda *_: 1 / 0)
        events = spark.step(0, 1)
    assert [type(e) for e in events] == [StepFailed] * 2
    for slot in range(2):
        spark.tell(spark.connection.reset(slot, Cause.REPLY_REFUSED))
        spark.context(slot, 10)
    assert set(drafts(spark.step(0, 1))) == {0, 1}


def test_without_a_free_state_slot_steps_are_refused_until_one_is_free(parts: Parts) -> None:
    worker = parts.worker(slots=1)
    spark = spark_of(parts, worker)
    spark.open(0)
    spark.open(1)
    events = spark.step(0, 1)
    assert set(drafts(events)) == {0}
    assert [(e.slot, e.code) for e in events if isinstance(e, StepFailed)] == [(1, ErrorCode.DRAFT_FAILED)]
    spark.tell(spark.connection.close(0))
    spark.tell(spark.connection.reset(1, Cause.REPLY_REFUSED))
    spark.context(1, 10)
    assert set(drafts(spark.step(1))) == {1}


def test_a_context_that_outgrows_its_slot_is_refused_and_frees_it(parts: Parts) -> None:
    worker = parts.worker(slots=2, length=32)
    spark = spark_of(parts, worker)
    spark.open(0, rows=30)
    spark.open(1, rows=8)
    spark.context(0, 10)
    assert worker.free_slots == 1
    events = spark.step(0, 1)
    assert set(drafts(events)) == {1}
    assert [e.slot for e in events if isinstance(e, StepFailed)] == [0]
    spark.tell(spark.connection.reset(0, Cause.REPLY_REFUSED))
    spark.context(0, 32)  # exactly full is fine
    assert set(drafts(spark.step(0))) == {0}


def test_a_context_that_does_not_start_at_zero_is_refused(parts: Parts) -> None:
    worker = parts.worker()
    spark = spark_of(parts, worker)
    spark.open(0, rows=4, start=16)
    assert [type(e) for e in spark.step(0)] == [StepFailed]
    spark.open(1)
    assert set(drafts(spark.step(1))) == {1}
    assert worker.free_slots == 3


def test_a_context_far_away_takes_no_memory_for_what_is_missing(parts: Parts) -> None:
    worker = parts.worker()
    spark = spark_of(parts, worker)
    spark.open(0, rows=0, start=2**30)
    taps = memoryview(TAPS[:2].view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
    ids = memoryview(bytes(8))
    spark.tell(*spark.connection.context(0, 2**30, 2, taps, ids).frames)
    (lease,) = worker.peers[spark.name].leases.values()
    assert lease.history is None


def test_another_model_is_rejected_with_the_field(parts: Parts) -> None:
    worker = parts.worker()
    other = replace(parts, compatibility=replace(parts.compatibility, draft_identity="another drafter"))
    spark = Spark(worker, VerifierConnection(other.parameters()), b"a")
    (event,) = spark.hello()
    assert isinstance(event, Rejected)
    assert (event.code, event.field) == (ErrorCode.INCOMPATIBLE, "draft_identity")
    assert spark_of(parts, worker, b"b").connection.negotiated is not None


def test_drain_reaches_every_verifier_and_open_rounds_are_answered(parts: Parts) -> None:
    worker = parts.worker()
    a, b = spark_of(parts, worker, b"a"), spark_of(parts, worker, b"b")
    a.open(0)
    a.step(0, draft=False)
    worker.drain(1000)
    worker.draft_pending()
    hear(worker, a, b)
    assert [e.deadline_ms for s in (a, b) for e in s.events if isinstance(e, Draining)] == [1000, 1000]
    assert set(drafts(a.events)) == {0}


def test_a_draining_worker_takes_no_new_verifier_and_serves_the_old_ones(parts: Parts) -> None:
    worker = parts.worker()
    old, new = spark_of(parts, worker, b"old"), Spark(worker, VerifierConnection(parts.parameters()), b"new")
    old.open(0)
    worker.drain(1000)
    hear(worker, old)
    (event,) = new.hello()
    assert isinstance(event, Rejected)
    assert event.code is ErrorCode.DRAINING
    old.step(0)
    assert set(drafts(old.events)) == {0}


def test_every_pong_says_how_full_the_worker_is(parts: Parts) -> None:
    """Whoever holds the slots: a verifier sees its own leases only, and needs the others' to compare workers."""
    worker = parts.worker(slots=4)
    a, b = spark_of(parts, worker, b"a"), spark_of(parts, worker, b"b")

    def load(spark: Spark) -> list[int]:
        events = spark.tell(spark.connection.ping(spark.now))
        return [e.load_permille for e in events if isinstance(e, PongReceived)]

    assert load(a) == [0]
    a.open(0)
    a.open(1)
    b.open(0)
    assert (load(a), load(b)) == ([750], [750])
    a.tell(a.connection.close(1))
    assert load(b) == [500]


# -- verifiers that go -----------------------------------------------------------------------------------------


def test_silent_verifiers_and_strangers_are_forgotten(parts: Parts) -> None:
    worker = parts.worker()
    spark = spark_of(parts, worker)
    spark.open(0)
    for i in range(50):
        worker.receive([PeerFrame(b"stranger%d" % i, memoryview(b"hi"))], 0)
    assert len(worker.peers) == 51
    worker.expire(STRANGER_NS - 1)
    assert len(worker.peers) == 51
    worker.expire(61 * SECOND)  # heartbeat 1 s: 60 of them
    assert worker.peers == {}
    assert worker.free_slots == 4


def test_a_verifier_that_pings_is_kept(parts: Parts) -> None:
    worker = parts.worker()
    spark = spark_of(parts, worker)
    spark.open(0)
    for second in range(0, 200, 20):
        spark.now = second * SECOND
        spark.tell(spark.connection.ping(spark.now))
        worker.expire(spark.now)
    assert set(drafts(spark.step(0))) == {0}


def test_a_new_hello_frees_what_the_old_connection_held(parts: Parts) -> None:
    worker = parts.worker()
    spark = spark_of(parts, worker)
    for slot in range(4):
        spark.open(slot)
    assert worker.free_slots == 0
    spark.hello()
    assert worker.free_slots == 4


def test_a_vanished_verifiers_slots_go_to_its_successor(parts: Parts) -> None:
    """A verifier that was killed holds its slots for a minute; the restarted one must not wait for that."""
    worker = parts.worker(slots=2)
    old = spark_of(parts, worker, b"old")
    old.open(0)
    old.open(1)
    new = spark_of(parts, worker, b"new")
    new.open(0)
    assert [type(e) for e in new.step(0)] == [StepFailed]  # not silent for long enough: it may be busy
    new.now = STALE_NS + 1
    new.tell(new.connection.reset(0, Cause.REPLY_REFUSED))
    new.context(0, 10)
    assert set(drafts(new.step(0))) == {0}
    assert worker.counters.stolen_slots == 2
    old.now = STALE_NS + 1
    assert [type(e) for e in old.step(0)] == [StepFailed]  # should it live after all: refused, not confused
    old.tell(old.connection.reset(0, Cause.REPLY_REFUSED))
    old.context(0, 10)
    assert set(drafts(old.step(0))) == {0}


# -- malformed frames ------------------------------------------------------------------------------------------


def test_no_frame_ends_the_worker(parts: Parts) -> None:
    """Every frame of a conversation with random damage, then random bytes; afterwards an honest verifier is served."""
    worker = parts.worker(context_credit_rows=64)
    model = spark_of(parts, worker, b"model")
    hello = bytes(model.connection.hello(0))
    model.hello()
    recorded = [hello]

    def record(*frames: Any, draft: bool = True) -> list[VerifierEvent]:
        recorded.extend(bytes(f) for f in frames)
        return []

    model.tell = record  # type: ignore[method-assign]
    model.open(0, rows=5)
    model.step(0)
    recorded += [bytes(model.connection.reset(0, Cause.PREEMPTED)), bytes(model.connection.close(0))]
    recorded += [bytes(model.connection.ping(0)), bytes(model.connection.stats())]
    assert {MessageType(f[6]) for f in recorded} >= {MessageType.OPEN, MessageType.CONTEXT, MessageType.STEP}
    dice = random.Random(4)
    for trial in range(1500):
        frame = bytearray(dice.choice(recorded))
        for _ in range(dice.randrange(3)):
            frame[dice.randrange(len(frame))] = dice.randrange(256)
        if dice.random() < 0.2:
            frame = frame[: dice.randrange(len(frame) + 1)]
        if dice.random() < 0.1:
            frame = bytearray(dice.randbytes(dice.randrange(200)))
        worker.receive([PeerFrame(b"vandal%d" % (trial % 7), memoryview(bytes(frame)))], 0)
        worker.draft_pending()
        worker.outbox()
    dropped = sum(sum(p.connection.counters.values()) for p in worker.peers.values())
    assert dropped > 1000
    worker.expire(61 * SECOND)
    assert worker.peers == {}
    assert worker.free_slots == 4
    honest = spark_of(parts, worker, b"honest")
    honest.open(0)
    assert set(drafts(honest.step(0))) == {0}


def test_the_rows_of_a_reply_are_the_rows_of_its_draws(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reply arrays are shared by all requests of the worker: nothing of another reply is left in one."""
    packed: list[np.ndarray] = []
    honest = dyadic.pack_rows

    def keep(rows: Any, support: int, ids: Any, q: Any, entries: Any) -> None:
        honest(rows, support, ids, q, entries)
        packed.append(q.copy())

    monkeypatch.setattr("dspark_workers.worker.pack_rows", keep)
    spark = spark_of(parts, parts.worker())
    spark.open(0, temperature=1_000_000)
    spark.open(1, temperature=0)
    events = spark.step(0, 1, depth=3)
    ready = {e.slot: e for e in events if isinstance(e, ProposalReady)}
    assert (ready[0].support, ready[1].support) == (32, 1)
    for slot, q in enumerate(packed):
        wire = np.frombuffer(ready[slot].q, dtype="<f4").reshape(q.shape)
        np.testing.assert_array_equal(wire, q)
        np.testing.assert_allclose(wire.sum(axis=1), 1)
    drafts(events)


def test_a_reset_forgets_the_text(parts: Parts) -> None:
    """The new generation's context starts empty, and nothing of the last round survives into it."""
    worker = parts.worker()
    spark = spark_of(parts, worker)
    spark.open(0)
    spark.step(0)
    lease = worker.peers[spark.name].leases[0]
    assert lease.history is not None
    assert lease.history._tokens[-1] == 7  # the anchor
    assert lease.drafted[1]
    spark.tell(spark.connection.reset(0, Cause.ROUND_TIMED_OUT))
    assert lease.history._tokens == []
    assert lease.drafted == (0, [])
