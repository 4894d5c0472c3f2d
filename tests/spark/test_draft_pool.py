"""The pool's promise: workers come, go, lie and stall, the text is the same, and a request that lost its worker is
drafted for by another one soon, under keys that no draw has used.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from dspark_proto import MessageType
from dspark_spark import pool_members
from dspark_spark.draft_pool import SEED_ROWS
from dspark_spark.engine import EngineSettings
from dspark_spark.leases import DraftRequest
from tests.pool_helpers import TOKENS, check_text, drafted_after, kill, marks, prompts, silence, start
from tests.rig import LENGTH, Parts, Wire, build_pool_rig, build_rig, type_of

pytestmark = pytest.mark.usefixtures("retry_at_once")


@pytest.fixture(scope="module")
def undisturbed(parts: Parts) -> list[list[int]]:
    rig = build_rig(parts)
    readers = [rig.ask(prompt, max_tokens=TOKENS) for prompt in prompts()]
    rig.finish(*readers)
    return [reader.ids for reader in readers]


# -- sharing out -----------------------------------------------------------------------------------------------


def test_requests_are_shared_out_and_stay_where_they_are(parts: Parts, undisturbed: list[list[int]]) -> None:
    rig = build_pool_rig(parts)
    assert rig.states() == ["up", "up"]
    readers = start(rig)
    assert rig.leases() == [2, 2]
    homes = {slot: seat.worker for slot, seat in rig.pool._seats.items()}
    rig.turns(4)
    assert {slot: seat.worker for slot, seat in rig.pool._seats.items()} == homes
    check_text(rig, readers, undisturbed)
    assert all(reader.last.stats.accepted > 0 for reader in readers)
    assert [wire.sent.count(MessageType.OPEN) for wire in rig.wires] == [2, 2]
    assert rig.labelled("lease_takeovers_total") == {}
    assert rig.labelled("proposal_discards_total") == {}


def test_shares_follow_capacity(parts: Parts) -> None:
    workers = [parts.worker(slots=n, max_slots=n, step_deadline_ms=600_000) for n in (2, 6)]
    settings = EngineSettings(slots=8, max_context=LENGTH, prefill_chunk=64, queue_limit=8)
    rig = build_pool_rig(parts, workers, settings=settings)
    readers = start(rig, 8, max_tokens=20)
    assert rig.leases() == [2, 6]
    assert {lease.wire for lease in rig.link_of(0)._leases.values()} == {0, 1}  # none is lost to engine slot numbers
    rig.finish(*readers)
    assert all(reader.last.stats.accepted > 0 for reader in readers)
    rig.check_idle()


def test_what_other_verifiers_hold_counts(parts: Parts) -> None:
    """PONG says how full a worker is; a worker that another Spark group fills is taken last."""
    rig = build_pool_rig(parts, heartbeat_ms=60_000)
    rig.wires[0].worker._free = [0]  # others hold three of its four slots
    links = [rig.link_of(0), rig.link_of(1)]

    def ping() -> list[float]:
        for link in links:
            link._tell(link._connection.ping, time.monotonic_ns())
        rig.turns(1)
        return [link.others_load for link in links]

    assert ping() == [0.75, 0.0]
    readers = start(rig, 3, max_tokens=20)
    assert rig.leases() == [0, 3]
    assert ping() == [0.75, 0.0]  # the pool's own leases are not others'
    rig.wires[0].worker._free = [0, 1, 2, 3]
    rig.finish(*readers)
    rig.check_idle()


def test_two_groups_share_two_workers(parts: Parts, undisturbed: list[list[int]]) -> None:
    """Each worker serves both; same slots and seeds on both sides, and nobody gets another's drafts."""
    workers = [parts.worker(slots=4, step_deadline_ms=600_000) for _ in range(2)]
    posts: list[dict[bytes, list[bytes]]] = [{}, {}]
    rigs = [
        build_pool_rig(parts, workers, wires=[Wire(w, peer=name, post=p) for w, p in zip(workers, posts, strict=True)])
        for name in (b"first", b"second")
    ]
    readers = [[rig.ask(prompt, max_tokens=TOKENS) for prompt in prompts()] for rig in rigs]
    for _ in range(10):
        for rig in rigs:
            rig.turns(1)
    assert [rig.leases() for rig in rigs] == [[2, 2], [2, 2]]
    assert [worker.free_slots for worker in workers] == [0, 0]
    while not all(reader.finish for answers in readers for reader in answers):
        for rig in rigs:
            rig.turns(1)
    for rig in rigs:
        rig.turns(1)
    for answers in readers:
        assert [reader.ids for reader in answers] == undisturbed
        assert all(reader.last.stats.accepted > 0 for reader in answers)
    assert [worker.free_slots for worker in workers] == [4, 4]
    assert all(rig.labelled("proposal_discards_total") == {} for rig in rigs)


def test_requests_without_room_wait_for_it(parts: Parts) -> None:
    workers = [parts.worker(slots=1, max_slots=1, step_deadline_ms=600_000) for _ in range(2)]
    rig = build_pool_rig(parts, workers)
    readers = [rig.ask(prompt, max_tokens=20 if i < 2 else 90) for i, prompt in enumerate(prompts())]
    rig.finish(*readers[:2])
    assert [reader.last.stats.accepted > 0 for reader in readers[:2]] == [True, True]
    assert rig.labelled("target_only_steps_total")["no_lease"] > 0
    rig.turns(1)
    assert rig.leases() == [1, 1]
    rig.finish(*readers)
    assert all(reader.last.stats.accepted > 0 for reader in readers)
    assert rig.labelled("lease_takeovers_total") == {}  # none had a worker before
    rig.check_idle()


# -- a worker is lost ------------------------------------------------------------------------------------------


def test_a_request_whose_worker_died_is_drafted_for_by_the_other_one_next_round(
    parts: Parts, undisturbed: list[list[int]]
) -> None:
    rig = build_pool_rig(parts)
    readers = start(rig)
    kill(rig.wires[0])
    before = [reader.last for reader in readers]
    rig.turns(1)  # the round is lost with the worker, and each request goes on in the same step
    assert all(reader.last is not delta for reader, delta in zip(readers, before, strict=True))
    assert rig.labelled("proposal_discards_total") == {"send_failed": 2}
    rounds = rig.wires[1].worker.counters.rounds
    rig.turns(1)
    assert rig.wires[1].worker.counters.rounds == rounds + 4  # all are drafted for in the very next round
    assert rig.leases() == [0, 4]
    assert rig.labelled("lease_takeovers_total") == {"worker_down": 2}
    at = marks(readers)
    check_text(rig, readers, undisturbed)
    assert all(drafted_after(readers, at))
    assert rig.total("request_respeculate_seconds_count") == 2
    reasons = rig.labelled("target_only_steps_total")
    assert (reasons.pop("discarded"), set(reasons) <= {"budget"}) == (2, True)
    assert rig.labelled("proposal_discards_total") == {"send_failed": 2}


def test_killed_in_the_middle_of_a_round_is_noticed_before_the_deadline(
    parts: Parts, undisturbed: list[list[int]]
) -> None:
    """The STEP was sent, then the connection broke: a ping that cannot be sent says so, and no timer."""
    workers = [parts.worker(step_deadline_ms=600_000, heartbeat_ms=60_000) for _ in range(2)]
    rig = build_pool_rig(parts, workers, deadline_ms=60_000, heartbeat_ms=60_000)
    readers = start(rig)

    def die(frame: bytes) -> list[bytes]:
        if type_of(frame) is MessageType.STEP:
            kill(rig.wires[0])
        return []

    rig.wires[0].up = die
    started = time.monotonic()
    rig.turns(1)
    assert time.monotonic() - started < 30
    assert rig.labelled("proposal_discards_total") == {"send_failed": 2}
    check_text(rig, readers, undisturbed)
    assert rig.labelled("lease_takeovers_total") == {"worker_down": 2}


def test_all_workers_lost_and_one_comes_back(parts: Parts, undisturbed: list[list[int]]) -> None:
    rig = build_pool_rig(parts)
    readers = start(rig)
    for wire in rig.wires:
        kill(wire)
    rig.turns(4)
    assert not rig.pool.up
    assert rig.labelled("target_only_steps_total")["worker_down"] > 0
    assert rig.leases() == [0, 0]
    at = marks(readers)
    rig.wires[1].replace_worker(parts.worker(step_deadline_ms=600_000))
    rig.wires[1].connected = True
    check_text(rig, readers, undisturbed)
    assert all(drafted_after(readers, at))
    assert rig.total("worker_reconnects_total") == 1
    assert rig.labelled("lease_takeovers_total") == {"worker_down": 2}  # the other two went back to their own


def test_a_takeover_does_not_seed_more_than_a_turns_worth(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark_spark.draft_pool.SEED_ROWS", 100)
    rig = build_pool_rig(parts)
    readers = [rig.ask([(7 * i + k) % 256 for k in range(70)], max_tokens=40) for i in range(4)]
    rig.turns(14)
    assert rig.leases() == [2, 2]
    kill(rig.wires[0])
    rig.turns(2)
    assert rig.leases() == [0, 3]
    rig.turns(1)
    assert rig.leases() == [0, 4]
    rig.finish(*readers)
    assert SEED_ROWS > LENGTH
    rig.check_idle()


def test_a_long_context_is_seeded_anew_as_credit_comes(parts: Parts) -> None:
    rig = build_pool_rig(parts, context_credit_rows=32)
    prompt = [(11 * i) % 256 for i in range(150)]
    reader = rig.ask(prompt, max_tokens=60)
    for _ in range(30):
        if len(reader.deltas) > 6:
            break
        rig.turns(1)
    kill(rig.wires[0])
    rows = rig.wires[1].worker.counters.context_rows
    at = marks([reader])
    rig.finish(reader)
    assert rig.wires[1].worker.counters.context_rows - rows >= 150  # the whole kept context
    assert drafted_after([reader], at)[0] > 0
    rig.check_idle()


def test_a_worker_that_takes_no_context_loses_the_lease_in_the_end(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers pings and grants no credit: no round is ever late, for none can be asked for."""
    monkeypatch.setattr("dspark_spark.draft_pool.SEED_S", 0.2)
    rig = build_pool_rig(parts, context_credit_rows=16)
    rig.wires[0].down = lambda frame: [] if type_of(frame) is MessageType.PONG else [frame]
    reader = rig.ask([(11 * i) % 256 for i in range(60)], max_tokens=60)
    rig.turns(6)
    assert rig.leases() == [1, 0]
    time.sleep(0.2)
    rig.turns(1)
    assert rig.leases() == [0, 1]
    rig.finish(reader)
    assert reader.last.stats.accepted > 0
    assert rig.labelled("lease_takeovers_total") == {"late": 1}
    rig.check_idle()


def test_groups_that_are_late_together_are_late_once_each(parts: Parts) -> None:
    """Two rounds under way, slots in alternation: two late rounds, not four."""
    rig = build_pool_rig(parts, 1, deadline_ms=20, heartbeat_ms=60_000)
    start(rig)
    silence(rig.wires[0])
    requests = [
        DraftRequest(s.lease, s.round + 1, s.tokens[-1], s.anchor_position, 2, None, s.tokens[-1])
        for s, _ in rig.engine._running.values()
    ]
    assert [rig.pool.refusal(r.lease, []) for r in requests] == [""] * 4
    rounds = [rig.pool.step(requests[0::2]), rig.pool.step(requests[1::2])]
    time.sleep(0.03)
    rig.link_of(0).listen()
    assert [len(round_.waiting) for round_ in rounds] == [0, 0]
    assert rig.link_of(0).late_rounds == 2
    assert [rig.pool.collect(round_) for round_ in rounds] == [{}, {}]


# -- late, draining, lying -------------------------------------------------------------------------------------


def test_a_worker_whose_rounds_keep_timing_out_loses_its_leases_and_rests(
    parts: Parts, undisturbed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_members, "REST_S", 1000.0)
    rig = build_pool_rig(parts, deadline_ms=300, heartbeat_ms=60_000)
    readers = start(rig)
    end = silence(rig.wires[0])
    rig.turns(1)
    assert rig.states() == ["up", "up"]  # once is no reason to leave
    rig.turns(1)
    rig.pool.pump()
    assert rig.states() == ["late", "up"]
    assert rig.leases() == [0, 4]
    assert rig.pool.takeovers == {"late": 2}
    end()
    late = rig.ask([9, 9, 9], max_tokens=20)
    rig.finish(late)
    check_text(rig, readers, undisturbed)
    assert rig.labelled("proposal_discards_total") == {"late": 4}
    assert rig.labelled("wire_drops_total")["late"] > 0  # what came after all was not believed
    assert rig.wires[0].sent.count(MessageType.OPEN) == 2  # nor did the new request go there


def test_a_resting_worker_is_tried_again_with_growing_pauses(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = build_pool_rig(parts, 1)
    worker = rig.pool._workers[0]
    rests = []
    for late in (1, 2, 3, 4, 5, 6, 7, 8):
        worker.link.late_rounds = late
        worker.judge(1_000)
        rests.append(max(0, worker.rest_until_ns - 1_000) / 1e9)
        worker.judge(5_000)  # looked at again, with nothing new
        assert worker.rest_until_ns in (0, int(rests[-1] * 1e9) + 1_000)
    assert rests == [0, 1, 2, 4, 5, 5, 5, 5]
    worker.link.late_rounds = 0  # it answered
    worker.judge(6_000)
    assert worker.rest_until_ns == 0


def test_a_rested_worker_gets_a_request_and_is_healthy_again(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, undisturbed: list[list[int]]
) -> None:
    monkeypatch.setattr(pool_members, "REST_S", 0.6)
    rig = build_pool_rig(parts, deadline_ms=300, heartbeat_ms=60_000)
    readers = start(rig, 2)
    end = silence(rig.wires[0])
    rig.turns(2)
    end()
    assert rig.link_of(0).late_rounds == 2
    rig.finish(*readers)
    time.sleep(0.65)
    rig.turns(1)
    assert rig.states() == ["up", "up"]
    more = [rig.ask(prompt, max_tokens=TOKENS) for prompt in prompts(2)]
    rig.turns(6)
    assert rig.leases() == [1, 1]
    assert rig.link_of(0).late_rounds == 0
    check_text(rig, more, undisturbed)


def test_a_single_late_worker_keeps_its_requests_and_gets_no_new_ones(parts: Parts) -> None:
    rig = build_pool_rig(parts, 1, deadline_ms=50, heartbeat_ms=60_000)
    reader = start(rig, 1, max_tokens=30)[0]
    silence(rig.wires[0])
    rig.turns(2)
    late = rig.ask([9, 9, 9], max_tokens=10)
    rig.turns(1)
    assert rig.leases() == [1]
    assert rig.states() == ["late"]
    rig.wires[0].connected = False
    rig.finish(reader, late)
    assert late.last.stats.drafted == 0
    rig.check_idle()


def test_a_draining_workers_requests_move_without_losing_a_round(parts: Parts, undisturbed: list[list[int]]) -> None:
    rig = build_pool_rig(parts)
    readers = start(rig)
    rig.wires[0].worker.drain(60_000)
    rig.turns(1)
    assert rig.leases() == [0, 4]
    assert rig.states() == ["draining", "up"]
    assert rig.wires[0].worker.free_slots == 4  # so that it can end at once
    at = marks(readers)
    check_text(rig, readers, undisturbed)
    assert all(drafted_after(readers, at))
    assert rig.labelled("lease_takeovers_total") == {"draining": 2}
    assert rig.labelled("proposal_discards_total") == {}
    assert set(rig.labelled("target_only_steps_total")) <= {"budget"}
    assert rig.total("request_respeculate_seconds_count") == 0  # no worker was lost


def test_a_drain_between_step_and_reply_lets_the_round_finish(parts: Parts, undisturbed: list[list[int]]) -> None:
    """DRAIN overtakes the reply: the lease stays until the reply is there, and then it goes."""
    rig = build_pool_rig(parts, 1)
    readers = start(rig, 1)
    wire, step, held = rig.wires[0], rig.pool.step, []
    seen: list[tuple[list[str], list[int], int]] = []

    def look(waiting: int) -> None:
        rig.pool.pump()
        seen.append((rig.states(), rig.leases(), waiting))

    def hold_all_but_drain(frame: bytes) -> list[bytes]:
        if type_of(frame) is MessageType.DRAIN:
            return [frame]
        held.append(frame)
        return []

    def drain_behind(requests: list[DraftRequest]) -> Any:
        wire.down = hold_all_but_drain
        round_ = step(requests)
        wire.worker.drain(60_000)
        look(len(round_.waiting))
        look(len(round_.waiting))
        wire.down = lambda frame: [frame]
        for frame in held:
            wire.deliver(frame)
        look(len(round_.waiting))
        assert not round_.waiting
        return round_

    rig.pool.step = drain_behind  # type: ignore[method-assign]
    rig.turns(1)
    rig.pool.step = step  # type: ignore[method-assign]
    assert seen == [(["draining"], [1], 1), (["draining"], [1], 1), (["draining"], [0], 1)]
    check_text(rig, readers, undisturbed)
    assert rig.labelled("proposal_discards_total") == {}


def lie(monkeypatch: pytest.MonkeyPatch, liar: Any) -> None:
    """This worker's counts are no distribution; its checksums are right."""
    honest = liar._pack

    def pack(rows: Any, support: int) -> Any:
        packed = honest(rows, support)
        liar._q[0] *= 0.5
        return packed

    monkeypatch.setattr(liar, "_pack", pack)


def test_a_liar_is_quarantined_and_its_requests_go_on_elsewhere(
    parts: Parts, undisturbed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = build_pool_rig(parts)
    readers = start(rig)
    with monkeypatch.context() as patch:
        lie(patch, rig.wires[0].worker)
        rig.turns(1)
    assert rig.labelled("proposal_discards_total")["invalid_row"] >= 1
    rig.turns(2)
    assert rig.states() == ["quarantined", "up"]  # nor is it believed when it has become honest
    assert rig.leases() == [0, 4]
    assert "quarantined" in (rig.pool.last_error or "")
    check_text(rig, readers, undisturbed)
    assert rig.labelled("lease_takeovers_total") == {"quarantined": 2}
    rig.wires[0].replace_worker(parts.worker(step_deadline_ms=600_000))
    rig.turns(3)
    assert rig.states() == ["up", "up"]


def test_a_quarantined_process_is_not_believed_at_another_address(
    parts: Parts, undisturbed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = build_pool_rig(parts, 1)
    readers = start(rig, 2)
    with monkeypatch.context() as patch:
        lie(patch, rig.wires[0].worker)
        rig.turns(2)
    again = Wire(rig.wires[0].worker, peer=b"other way")
    rig.pool.set_members([rig.member(again)])
    rig.turns(3)
    assert rig.states() == ["quarantined"]
    check_text(rig, readers, undisturbed)
    assert again.sent.count(MessageType.OPEN) == 0


def test_a_liar_that_is_restarted_again_and_again_is_asked_ever_more_rarely(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark_spark.draft_link.RETRY_S", 0.5)
    rig = build_pool_rig(parts, 1)
    link = rig.link_of(0)
    start(rig, 1)
    lease = rig.pool._seats[0].lease
    pauses = []
    for _ in range(9):
        link.up = True
        link.invalid(lease, "planted")
        link.invalid(lease, "planted")  # another row of the same round: the same lie
        pauses.append(round((link._next_hello_ns - time.monotonic_ns()) / 1e9))
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_worker_without_free_state_slots_passes_its_requests_on(parts: Parts) -> None:
    """It accepts leases, and refuses their steps: another one takes them after two losses."""
    workers = [parts.worker(slots=1, max_slots=4, step_deadline_ms=600_000), parts.worker(step_deadline_ms=600_000)]
    rig = build_pool_rig(parts, workers)
    readers = start(rig, 4, max_tokens=40, steps=6)
    assert rig.leases() == [1, 3]
    rig.finish(*readers)
    assert all(reader.last.stats.accepted > 0 for reader in readers)
    assert rig.labelled("lease_takeovers_total") == {"refused": 1}
    assert rig.labelled("proposal_discards_total") == {"draft_failed": 2}
    rig.check_idle()
