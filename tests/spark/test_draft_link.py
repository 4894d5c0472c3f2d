"""The link's promise: whatever the worker does, the text is the same, it comes soon, and every loss is counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from dspark import dyadic
from dspark_proto import ErrorCode, LocalProtocolError, MessageType, SlotState
from dspark_spark import draft_link
from dspark_spark.draft_link import DraftLink
from dspark_spark.engine import EngineSettings
from dspark_spark.leases import DraftRound
from tests.rig import Parts, Reader, Rig, build_rig, type_of

pytestmark = pytest.mark.usefixtures("retry_at_once")

PROMPT = [3, 14, 15, 92, 65, 35]
TOKENS = 40


@pytest.fixture(scope="module")
def undisturbed(parts: Parts) -> list[int]:
    rig = build_rig(parts)
    return rig.answer(PROMPT, max_tokens=TOKENS).ids


def pick(kind: MessageType, change: Callable[[bytes], list[bytes]], nth: int = 2) -> Any:
    """A wire hook that changes the nth frame of a kind (once); `.hits` says whether it did."""

    def hook(frame: bytes) -> list[bytes]:
        if type_of(frame) is not kind:
            return [frame]
        hook.seen += 1  # type: ignore[attr-defined]
        if hook.seen != nth:  # type: ignore[attr-defined]
            return [frame]
        hook.hits += 1  # type: ignore[attr-defined]
        return change(frame)

    hook.seen = hook.hits = 0  # type: ignore[attr-defined]
    return hook


def flip(frame: bytes) -> list[bytes]:
    """One bit, in the last byte of the last body that is not padding."""
    damaged = bytearray(frame)
    place = max(i for i, byte in enumerate(damaged) if byte)
    damaged[place] ^= 1
    return [bytes(damaged)]


def drop(_frame: bytes) -> list[bytes]:
    return []


def start(rig: Rig, steps: int = 3, **params: Any) -> Reader:
    """A long greedy request that is being drafted for."""
    reader = rig.ask(PROMPT, max_tokens=TOKENS, **params)
    while len(reader.deltas) < steps:
        rig.engine.turn()
    assert rig.link.up
    return reader


# -- the worker is not there, or goes --------------------------------------------------------------------------


def test_a_worker_that_comes_late_is_found_and_seeded(rig: Rig, undisturbed: list[int]) -> None:
    rig.wire.connected = False
    reader = rig.ask(PROMPT, max_tokens=TOKENS)
    started = time.monotonic()
    rig.turns(6)
    assert time.monotonic() - started < 6
    assert not rig.link.up
    rig.wire.connected = True
    rig.finish(reader)
    assert reader.ids == undisturbed
    assert reader.last.stats.accepted > 0
    assert reader.last.stats.target_only_steps >= 5
    assert rig.link.reconnects == 0  # it came, it did not come back
    rig.check_idle()


def test_hello_is_repeated_ever_more_rarely(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_link, "RETRY_S", 0.5)
    now = 1_000_000_000_000
    monkeypatch.setattr(rig.link, "_now_ns", lambda: now)
    rig.wire.up = drop
    sent = []
    for tick in range(100):
        now = 1_000_000_000_000 + tick * 100_000_000
        before = len(rig.wire.sent)
        rig.link.pump()
        sent += [tick] * (len(rig.wire.sent) - before)
    gaps = [b - a for a, b in pairwise(sent)]
    assert gaps[:3] == [5, 10, 20]
    assert set(gaps[3:]) == {20}


@pytest.mark.parametrize("notices", ["refusal", "send"])
def test_a_restarted_worker_is_taken_again_within_the_request(
    rig: Rig, undisturbed: list[int], notices: str
) -> None:
    """The link notices by a socket that takes nothing, or by the new process's refusal of a session that it lacks."""
    reader = start(rig)
    old = rig.wire.worker
    rig.wire.replace_worker(rig.parts.worker(step_deadline_ms=600_000))
    if notices == "send":
        rig.wire.connected = False
        rig.turns(2)
        assert not rig.link.up
        rig.wire.connected = True
    before = reader.deltas[-1], len(reader.deltas)
    rig.finish(reader)
    assert reader.ids == undisturbed
    assert rig.link.reconnects == 1
    assert any(any(d.from_draft) for d in reader.deltas[before[1] + 4 :])
    causes = {"refusal": {"hello_required": 1}, "send": {"send_failed": 1}}
    assert rig.labelled("proposal_discards_total") == causes[notices]
    assert rig.wire.worker.counters.rounds > 0
    assert old is not rig.wire.worker
    assert rig.metrics()["dspark:worker_up"] == 1
    assert rig.total("worker_reconnects_total") == 1
    rig.check_idle()
    assert rig.wire.worker.free_slots == 4


def test_a_silent_worker_is_noticed_before_a_long_deadline(parts: Parts, undisturbed: list[int]) -> None:
    rig = build_rig(parts, deadline_ms=60_000, heartbeat_ms=10)
    reader = start(rig)
    rig.wire.frozen = True
    started = time.monotonic()
    rig.engine.turn()
    assert 0.02 < time.monotonic() - started < 6
    assert not rig.link.up
    rig.wire.connected = False
    rig.finish(reader)
    assert reader.ids == undisturbed
    assert rig.labelled("proposal_discards_total") == {"peer_silent": 1}


def test_a_late_round_costs_one_deadline_and_is_not_believed_later(parts: Parts, undisturbed: list[int]) -> None:
    rig = build_rig(parts, deadline_ms=60, heartbeat_ms=60_000)
    reader = start(rig)
    held: list[bytes] = []
    rig.wire.down = lambda frame: held.append(frame) or []  # type: ignore[func-returns-value]
    started = time.monotonic()
    rig.engine.turn()
    assert 0.05 < time.monotonic() - started < 4
    assert rig.link.up  # a late slot is not a lost worker
    rig.wire.down = lambda frame: [frame]
    for frame in held:
        rig.wire.deliver(frame)
    rig.finish(reader)
    assert reader.ids == undisturbed
    assert rig.labelled("proposal_discards_total") == {"late": 1}
    drops = rig.labelled("wire_drops_total")
    assert drops[ErrorCode.LATE.counter] == 2  # its ROW and its COMPLETION
    assert drops[ErrorCode.STEP_TIMED_OUT.counter] == 1
    assert rig.total("generation_bumps_total") == 1
    assert reader.last.stats.drafted - reader.last.stats.verified == 4
    assert sum(sum(d.from_draft) for d in reader.deltas[5:]) > 0  # the slot was seeded anew
    rig.check_idle()


def test_a_worker_that_stays_late_is_asked_less_and_less(
    parts: Parts, undisturbed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark_spark.leases.LOSS_PAUSE_S", 30.0)
    rig = build_rig(parts, deadline_ms=30, heartbeat_ms=60_000)
    reader = start(rig)
    rig.wire.frozen = True  # and it never wakes
    started = time.monotonic()
    rig.finish(reader)
    assert time.monotonic() - started < 9
    assert reader.ids == undisturbed
    assert rig.labelled("proposal_discards_total") == {"late": 2}  # twice, then a pause
    assert rig.labelled("target_only_steps_total")["no_lease"] > 10
    # It was seeded anew after the first loss, and then left alone.
    assert rig.wire.sent.count(MessageType.RESET) == 1
    assert rig.wire.sent.count(MessageType.OPEN) == 1


def test_pauses_double_and_are_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark_spark.leases.LOSS_PAUSE_S", 0.2)
    start(rig)
    lease = rig.link._leases[0]
    pauses = []
    for losses in (0, 1, 2, 3, 4, 5, 6, 60):
        lease.losses = losses
        pauses.append(round(lease.pause_ns() / 1e9, 3))
    assert pauses == [0, 0, 0.2, 0.6, 1.4, 2.0, 2.0, 2.0]


def test_the_links_own_deadline_bounds_the_wait(parts: Parts, undisturbed: list[int]) -> None:
    rig = build_rig(parts, deadline_ms=60_000, link_deadline_ms=50, heartbeat_ms=60_000)
    reader = start(rig)
    rig.wire.frozen = True
    started = time.monotonic()
    rig.engine.turn()
    assert 0.04 < time.monotonic() - started < 4
    assert rig.link.discards == {}  # taken over into the metrics
    assert rig.labelled("proposal_discards_total") == {"step_deadline": 1}
    assert not rig.link.up
    rig.wire.thaw()
    rig.finish(reader)
    assert reader.ids == undisturbed
    assert rig.link.reconnects == 1


def test_a_send_that_fails_discards_every_awaited_proposal_once(rig: Rig) -> None:
    readers = [rig.ask(PROMPT[i:], max_tokens=20) for i in range(3)]
    rig.turns(6)
    rig.wire.connected = False
    rig.turns(1)
    assert rig.labelled("proposal_discards_total") == {"send_failed": 3}
    rig.turns(2)
    assert rig.labelled("proposal_discards_total") == {"send_failed": 3}
    assert rig.labelled("target_only_steps_total")["worker_down"] == 6
    rig.finish(*readers)
    rig.check_idle()


# -- damaged, false and unexpected frames ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MessageType.ROW, MessageType.COMPLETION])
def test_a_damaged_reply_is_dropped_and_counted(rig: Rig, undisturbed: list[int], kind: MessageType) -> None:
    rig.wire.down = hook = pick(kind, flip, nth=3)
    reader = rig.answer(PROMPT, max_tokens=TOKENS)
    assert hook.hits == 1
    assert reader.ids == undisturbed
    discards = rig.labelled("proposal_discards_total")
    assert sum(discards.values()) == 1
    (cause,) = discards
    assert rig.labelled("wire_drops_total")[cause] == 1
    assert rig.link.up
    assert reader.last.stats.accepted > 0
    rig.check_idle()


@pytest.mark.parametrize("kind", [MessageType.ROW, MessageType.COMPLETION])
def test_a_lost_reply_frame_times_out(parts: Parts, undisturbed: list[int], kind: MessageType) -> None:
    rig = build_rig(parts, deadline_ms=50)
    rig.wire.down = hook = pick(kind, drop, nth=3)
    reader = rig.answer(PROMPT, max_tokens=TOKENS)
    assert hook.hits == 1
    assert reader.ids == undisturbed
    assert sum(rig.labelled("proposal_discards_total").values()) == 1
    rig.check_idle()


@pytest.mark.parametrize("kind", [MessageType.ROW, MessageType.COMPLETION, MessageType.ACCEPT])
def test_a_repeated_frame_changes_nothing(rig: Rig, undisturbed: list[int], kind: MessageType) -> None:
    rig.wire.down = hook = pick(kind, lambda frame: [frame, frame], nth=1)
    reader = rig.answer(PROMPT, max_tokens=TOKENS)
    assert hook.hits == 1
    assert reader.ids == undisturbed
    assert sum(rig.labelled("wire_drops_total").values()) == 1
    assert rig.labelled("proposal_discards_total") == {}
    assert rig.link.reconnects == 0


@pytest.mark.parametrize("kind", [MessageType.OPEN, MessageType.CONTEXT, MessageType.STEP, MessageType.HELLO])
def test_a_damaged_request_frame_costs_a_round_at_most(
    parts: Parts, undisturbed: list[int], kind: MessageType
) -> None:
    rig = build_rig(parts, deadline_ms=50)
    rig.wire.up = hook = pick(kind, flip, nth=1)
    reader = rig.answer(PROMPT, max_tokens=TOKENS)
    assert hook.hits == 1
    assert reader.ids == undisturbed
    assert reader.last.stats.accepted > 0
    assert sum(rig.wire.worker.peers[rig.wire.peer].connection.counters.values()) >= 1
    rig.check_idle()


def test_garbage_from_the_worker_is_counted(rig: Rig, undisturbed: list[int]) -> None:
    reader = start(rig)
    for frame in (b"", b"x", b"DSPK" * 40, bytes(64)):
        rig.wire.deliver(frame)
    rig.finish(reader)
    assert reader.ids == undisturbed
    assert sum(rig.labelled("wire_drops_total").values()) == 4


def test_an_invalid_row_quarantines_the_worker_until_another_process_answers(
    rig: Rig, undisturbed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums are right, the counts are no distribution: not transport damage, but a worker that is wrong."""
    honest = dyadic.pack_rows

    def lie(rows: Any, support: int, ids: Any, q: Any, entries: Any) -> None:
        honest(rows, support, ids, q, entries)
        q[0, 0] *= 0.5

    reader = start(rig)
    hellos = rig.wire.sent.count(MessageType.HELLO)
    with monkeypatch.context() as patch:
        patch.setattr("dspark_workers.worker.pack_rows", lie)
        rig.turns(4)
    assert not rig.link.up
    assert "quarantined" in (rig.link.last_error or "")
    assert rig.labelled("proposal_discards_total") == {"invalid_row": 1}
    rig.turns(3)
    assert not rig.link.up  # the same process is not believed, even when it has become honest
    assert rig.wire.sent.count(MessageType.HELLO) > hellos
    assert rig.labelled("target_only_steps_total")["worker_down"] > 3
    drafted = len(reader.deltas)
    rig.wire.replace_worker(rig.parts.worker(step_deadline_ms=600_000))
    rig.finish(reader)
    assert rig.link.up
    assert rig.link.last_error is None
    assert reader.ids == undisturbed
    assert sum(sum(d.from_draft) for d in reader.deltas[drafted:]) > 0
    rig.check_idle()


def test_a_slot_failure_between_rounds_does_not_carry_the_old_commit_over(
    rig: Rig, undisturbed: list[int]
) -> None:
    """After RESET the worker knows no round, so the outcome of the last one must not travel with the next STEP."""
    reader = start(rig)
    lease = rig.link._leases[0]
    assert lease.replied
    slot = rig.link._connection._slots[0]
    for event in rig.link._connection._fail_idle(slot, ErrorCode.DRAFT_FAILED):
        rig.link._on(event)
    assert slot.state is SlotState.DORMANT
    rig.finish(reader)
    assert reader.ids == undisturbed
    assert rig.link.reconnects == 0  # a reset was enough
    assert rig.wire.sent.count(MessageType.RESET) == 1
    assert rig.total("generation_bumps_total") == 1


def test_a_refusal_by_our_own_side_starts_over_instead_of_ending_the_engine(
    rig: Rig, undisturbed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = start(rig)

    def refuse(*_: object) -> memoryview:
        raise LocalProtocolError(ErrorCode.STALE_ROUND, "STEP.round", "planted")

    with monkeypatch.context() as patch:
        patch.setattr(rig.link._connection, "step", refuse)
        rig.engine.turn()
    assert "planted" in (rig.link.last_error or "")
    rig.finish(reader)
    assert rig.labelled("proposal_discards_total") == {"refused_locally": 1}
    assert rig.link.reconnects == 1
    assert reader.ids == undisturbed
    rig.check_idle()


def test_a_refusing_worker_is_named(parts: Parts) -> None:
    rig = build_rig(parts)
    other = replace(parts, compatibility=replace(parts.compatibility, target_identity="another target"))
    rig.wire.worker = other.worker()
    assert rig.answer(PROMPT, max_tokens=6).finish == "length"
    assert not rig.link.up
    assert "target_identity" in (rig.link.last_error or "")
    assert "another target" in (rig.link.last_error or "")


# -- leases ----------------------------------------------------------------------------------------------------


def test_a_request_that_ends_while_the_worker_is_away_leaves_nothing(rig: Rig, undisturbed: list[int]) -> None:
    reader = start(rig, name="gone")
    rig.wire.connected = False
    rig.turns(2)
    rig.engine.cancel("gone")
    rig.turns(1)
    assert reader.finish == "abort"
    rig.wire.connected = True
    again = rig.answer(PROMPT, max_tokens=TOKENS)  # in the same engine slot, after the same worker is back
    assert again.ids == undisturbed
    assert again.last.stats.accepted > 0
    rig.check_idle()
    assert rig.wire.worker.free_slots == 4


def test_a_lost_slot_can_be_released(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark_spark.leases.LOSS_PAUSE_S", 30.0)
    rig = build_rig(parts, deadline_ms=30, heartbeat_ms=60_000)
    start(rig, name="gone")
    rig.wire.frozen = True
    rig.turns(3)
    assert rig.link._leases[0].lost
    rig.engine.cancel("gone")
    rig.turns(1)
    rig.wire.thaw()
    assert rig.answer(PROMPT, max_tokens=20).last.stats.accepted > 0
    rig.check_idle()
    assert rig.wire.worker.free_slots == 4


def test_a_prompt_far_longer_than_the_credit_ends_up_drafted_for(parts: Parts) -> None:
    rig = build_rig(parts, context_credit_rows=16)
    prompt = [(11 * i) % 256 for i in range(180)]
    reader = rig.answer(prompt, max_tokens=30)
    assert reader.last.stats.accepted > 0
    assert rig.wire.worker.counters.context_rows >= 180
    rig.check_idle()


def test_credit_that_never_comes_leaves_the_request_target_only(parts: Parts) -> None:
    rig = build_rig(parts, context_credit_rows=16)
    rig.wire.down = lambda frame: [] if type_of(frame) is MessageType.PONG else [frame]
    reader = rig.answer([(11 * i) % 256 for i in range(60)], max_tokens=10)
    assert reader.finish == "length"
    assert reader.last.stats.drafted == 0
    assert rig.labelled("target_only_steps_total") == {"no_lease": 8, "budget": 1}
    rig.check_idle()


def test_credit_that_was_lost_with_a_frame_comes_back_with_a_new_start(parts: Parts) -> None:
    """A whole window goes with one CONTEXT; PING and PONG are fine, so nothing else would end the link."""
    rig = build_rig(parts, worker=parts.worker(context_credit_rows=32), heartbeat_ms=20)
    hook = rig.wire.up = pick(MessageType.CONTEXT, drop, nth=1)
    reader = rig.ask([3 + i % 90 for i in range(60)], max_tokens=200)
    until = time.monotonic() + 20
    while not rig.link.reconnects and time.monotonic() < until:
        rig.engine.turn()
    assert (hook.hits, rig.link.reconnects) == (1, 1)
    rig.finish(reader)
    assert reader.last.stats.accepted > 0
    rig.check_idle()


def test_a_reply_that_is_there_is_read_whole_before_its_deadline_is_looked_at(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transport hands a large reply out in several reads; the turn that comes late must not stop after the first."""
    reader = rig.ask(PROMPT, max_tokens=30)
    rig.turns(3)
    poll, held = rig.wire.poll, []

    def one_frame_a_read(timeout_ms: int) -> list[memoryview]:
        held.extend(poll(timeout_ms))
        return [held.pop(0)] if held else []

    def collect_late(self: DraftLink, round_: DraftRound) -> Any:
        round_.until_ns = 0
        self.listen()
        return round_.ready

    verified = reader.last.stats.verified
    with monkeypatch.context() as patch:
        patch.setattr(rig.wire, "poll", one_frame_a_read)
        patch.setattr(DraftLink, "collect", collect_late)
        rig.turns(3)
    assert rig.labelled("proposal_discards_total") == {}
    rig.finish(reader)
    assert reader.last.stats.verified > verified + 3
    rig.check_idle()


def test_a_request_that_needs_no_credit_does_not_end_the_wait_of_one_that_does(parts: Parts) -> None:
    """The short prompt goes with its first STEP and is drafted for all along; the window of the long one is lost."""
    rig = build_rig(parts, worker=parts.worker(context_credit_rows=32), heartbeat_ms=20)
    hook = rig.wire.up = pick(MessageType.CONTEXT, drop, nth=1)
    long = rig.ask([3 + i % 90 for i in range(60)], max_tokens=180)
    until = time.monotonic() + 20
    while not hook.hits and time.monotonic() < until:
        rig.engine.turn()
    short = rig.ask(PROMPT[:4], max_tokens=200)
    while not rig.link.reconnects and time.monotonic() < until and not short.finish:
        rig.engine.turn()
    assert rig.link.reconnects == 1
    assert any(d.from_draft[0] for d in short.deltas)
    rig.finish(long, short)
    assert long.last.stats.accepted > 0
    rig.check_idle()


def test_more_engine_slots_than_the_worker_has(parts: Parts) -> None:
    """Requests that find no slot at the worker wait for one, target-only, and take it as soon as it is free."""
    rig = build_rig(parts, worker=parts.worker(slots=2, max_slots=2, max_in_flight=2))
    readers = [rig.ask([*PROMPT[:4], i], max_tokens=20 + 60 * (i > 1)) for i in range(4)]
    rig.finish(*readers[:2])
    assert all(r.last.stats.accepted > 0 for r in readers[:2])
    assert not any(d.from_draft[0] for r in readers[2:] for d in r.deltas)
    waited = rig.labelled("target_only_steps_total")["no_lease"]
    rig.turns(2)
    assert {lease.slot: lease.wire for lease in rig.link._leases.values()} == {2: 0, 3: 1}
    rig.finish(*readers)
    assert all(r.last.stats.accepted > 0 for r in readers)
    assert rig.labelled("target_only_steps_total")["no_lease"] <= waited + 2
    assert rig.labelled("proposal_discards_total") == {}
    rig.check_idle()


def test_a_worker_with_fewer_state_slots_than_it_promised(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its refusals cost the refused requests a few rounds each, not one per token."""
    monkeypatch.setattr("dspark_spark.leases.LOSS_PAUSE_S", 5.0)
    rig = build_rig(parts, worker=parts.worker(slots=1))
    readers = [rig.ask([*PROMPT[:4], i], max_tokens=30) for i in range(3)]
    rig.finish(*readers)
    assert [r.last.stats.accepted > 0 for r in readers] == [True, False, False]
    assert rig.labelled("proposal_discards_total") == {"draft_failed": 4}
    assert rig.answer(PROMPT).last.stats.accepted > 0
    rig.check_idle()


def test_fewer_rounds_in_flight_than_requests(parts: Parts) -> None:
    rig = build_rig(parts, worker=parts.worker(max_in_flight=2))
    readers = [rig.ask([*PROMPT[:4], i], max_tokens=12) for i in range(4)]
    rig.finish(*readers)
    assert all(r.finish == "length" for r in readers)
    assert rig.labelled("target_only_steps_total")["in_flight_limit"] > 0
    assert rig.labelled("proposal_discards_total") == {}
    rig.check_idle()


def test_more_requests_than_one_step_frame_holds(parts: Parts) -> None:
    count = 35  # a STEP has at most 32 items
    settings = EngineSettings(slots=count, max_context=64, prefill_chunk=256, queue_limit=4)
    worker = parts.worker(slots=count, max_slots=count, max_in_flight=count)
    rig = build_rig(parts, worker=worker, settings=settings)
    readers = [rig.ask([i, i + 1, i + 2], max_tokens=8) for i in range(count)]
    rig.finish(*readers)
    assert all(r.last.stats.verified > 0 for r in readers)
    assert rig.labelled("proposal_discards_total") == {}
    rig.check_idle()


def test_a_draining_worker_gets_its_slots_back_and_its_successor_is_found(
    rig: Rig, undisturbed: list[int]
) -> None:
    reader = start(rig)
    rig.wire.worker.drain(60_000)
    rig.turns(2)
    assert not rig.link.up
    assert "draining" in (rig.link.last_error or "")
    assert rig.wire.worker.free_slots == 4  # so that it can end at once
    hellos = rig.wire.sent.count(MessageType.HELLO)
    rig.turns(1)
    assert rig.wire.sent.count(MessageType.HELLO) == hellos  # not asked while it leaves
    rig.wire.replace_worker(rig.parts.worker(step_deadline_ms=600_000))
    assert rig.link._next_hello_ns > time.monotonic_ns()
    rig.link._next_hello_ns = 0  # its deadline has passed
    rig.finish(reader)
    assert reader.ids == undisturbed
    assert rig.link.reconnects == 1
    assert rig.wire.worker.counters.rounds > 0
    assert rig.labelled("proposal_discards_total") == {}
    rig.check_idle()


def test_a_lost_close_does_not_poison_the_slot(rig: Rig, undisturbed: list[int]) -> None:
    """The worker calls the slot busy, for ever: only a fresh start tells it that the request is over."""
    hook = rig.wire.up = pick(MessageType.CLOSE, drop, nth=1)
    first = rig.answer(PROMPT, max_tokens=TOKENS)
    assert hook.hits == 1
    second = rig.answer(PROMPT, max_tokens=TOKENS)
    assert rig.link.reconnects == 1
    third = rig.answer(PROMPT, max_tokens=TOKENS)
    assert first.ids == second.ids == third.ids == undisturbed
    assert third.last.stats.target_only_steps <= 1
    rig.check_idle()


def test_a_reply_that_is_read_late_accuses_the_process_that_made_it(rig: Rig) -> None:
    reader = start(rig)
    (lease,) = rig.link._leases.values()
    accused = rig.link._epoch()
    rig.wire.replace_worker(rig.parts.worker(step_deadline_ms=600_000))
    rig.link._down("test")
    while not rig.link.up:
        rig.link.pump()
    rig.link.invalid(lease, "a row that came before")
    assert rig.link.up
    assert rig.link._quarantine == {accused} != {rig.link._epoch()}
    assert rig.link.discards == {"invalid_row": 1}
    rig.finish(reader)
    rig.check_idle()


def test_close_gives_everything_back(rig: Rig) -> None:
    start(rig)
    assert rig.wire.worker.free_slots == 3
    rig.link.close()
    rig.wire._turn()
    assert rig.wire.worker.free_slots == 4
    assert rig.wire.closed
