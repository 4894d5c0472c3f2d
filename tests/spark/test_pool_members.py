"""A pool whose members change while requests run, the keys that its workers draw under, and frames out of season."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from dspark.philox import Keys
from dspark_proto import ErrorCode, MessageType
from dspark_proto.transports import TransportError
from dspark_spark.leases import DraftRequest
from dspark_workers import worker as worker_module
from tests.pool_helpers import TOKENS, check_text, drafted_after, kill, marks, prompts, silence, start
from tests.rig import Parts, Wire, build_pool_rig, build_rig, type_of

pytestmark = pytest.mark.usefixtures("retry_at_once")


@pytest.fixture(scope="module")
def undisturbed(parts: Parts) -> list[list[int]]:
    rig = build_rig(parts)
    readers = [rig.ask(prompt, max_tokens=TOKENS) for prompt in prompts()]
    rig.finish(*readers)
    return [reader.ids for reader in readers]


# -- members come and go ---------------------------------------------------------------------------------------


def test_a_worker_joins_while_requests_run(parts: Parts, undisturbed: list[list[int]]) -> None:
    rig = build_pool_rig(parts, 1)
    readers = start(rig, 2)
    joined = Wire(parts.worker(step_deadline_ms=600_000))
    rig.pool.set_members([rig.member(rig.wires[0]), rig.member(joined)])
    rig.turns(2)
    assert rig.states() == ["up", "up"]
    assert rig.leases() == [2, 0]  # who has a worker stays there
    readers += [rig.ask(prompt, max_tokens=TOKENS) for prompt in prompts()[2:]]
    rig.turns(3)
    assert rig.leases() == [2, 2]
    check_text(rig, readers, undisturbed)


def test_a_member_that_is_removed_hands_over_and_is_closed(parts: Parts, undisturbed: list[list[int]]) -> None:
    rig = build_pool_rig(parts)
    readers = start(rig)
    reconnects, drops = rig.pool.reconnects, rig.pool.drops
    rig.pool.set_members([rig.member(rig.wires[1])])
    rig.turns(2)
    assert rig.leases() == [4]
    assert rig.wires[0].closed
    assert rig.wires[0].worker.free_slots == 4
    assert (rig.pool.reconnects, rig.pool.drops) == (reconnects, drops)
    check_text(rig, readers, undisturbed)
    assert rig.labelled("lease_takeovers_total") == {"draining": 2}
    assert rig.labelled("proposal_discards_total") == {}
    assert set(rig.labelled("target_only_steps_total")) <= {"budget"}
    assert 'dspark:pool_leases{worker="memory 0"}' not in rig.metrics()


def test_removing_every_member_leaves_the_target_alone(parts: Parts, undisturbed: list[list[int]]) -> None:
    rig = build_pool_rig(parts)
    readers = start(rig)
    rig.pool.set_members([])
    rig.turns(2)
    assert not rig.pool.up
    assert rig.leases() == []
    assert [wire.worker.free_slots for wire in rig.wires] == [4, 4]
    check_text(rig, readers, undisturbed)
    assert rig.labelled("proposal_discards_total") == {}


def test_a_rolling_swap_to_another_checkpoint(parts: Parts, undisturbed: list[list[int]]) -> None:
    """The new members' HELLO names another drafter; a worker of the old one would refuse it."""
    rig = build_pool_rig(parts)
    readers = start(rig)
    compatibility = replace(parts.compatibility, draft_identity="v2")
    v2 = replace(parts, compatibility=compatibility)
    for index in range(2):
        old = rig.pool._wanted
        wire = Wire(v2.worker(step_deadline_ms=600_000))
        rig.wires.append(wire)
        member = replace(old[0].member, address=f"v2 {index}", parameters=v2.parameters(**rig.hello), drafter="v2")
        member = replace(member, connect=lambda wire=wire: wire)
        rig.pool.set_members([*(w.member for w in old[1:]), member])
        rig.turns(3)
    assert [w.member.drafter for w in rig.pool._workers] == ["v2", "v2"]
    assert sum(rig.leases()) == 4
    at = marks(readers)
    check_text(rig, readers, undisturbed)
    assert all(drafted_after(readers, at))
    assert rig.labelled("proposal_discards_total") == {}


def test_the_same_address_with_another_checkpoint_is_another_member(parts: Parts) -> None:
    rig = build_pool_rig(parts, 1)
    start(rig, 1)
    other = Wire(parts.worker(step_deadline_ms=600_000))
    old = rig.pool._wanted[0].member
    rig.pool.set_members([replace(old, drafter="v2", connect=lambda: other)])
    rig.wires.append(other)
    rig.turns(3)
    assert rig.wires[0].closed
    assert rig.leases() == [1]
    assert rig.metrics()[f'dspark:pool_leases{{worker="{old.address}"}}'] == 1


def test_members_that_cannot_be_opened_change_nothing(parts: Parts, undisturbed: list[list[int]]) -> None:
    rig = build_pool_rig(parts)
    readers = start(rig)
    opened = Wire(parts.worker())

    def fail() -> Wire:
        raise TransportError("tcp://x: no such thing")

    bad = replace(rig.member(rig.wires[0]), address="bad", connect=fail)
    with pytest.raises(TransportError):
        rig.pool.set_members([replace(rig.member(opened), address="new"), bad])
    rig.wires.remove(opened)
    assert opened.closed
    rig.turns(1)
    assert rig.leases() == [2, 2]
    check_text(rig, readers, undisturbed)


# -- keys and stale frames -------------------------------------------------------------------------------------


def test_no_draw_is_repeated_under_a_used_key_whatever_workers_take_part(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every key that any worker draws under is recorded, over resets, takeovers, reconnects and a swap."""
    used: Counter[tuple[object, ...]] = Counter()

    class Recorded(Keys):
        def __init__(self, *args: Any, **fields: Any) -> None:
            super().__init__(*args, **fields)
            used[(fields["seed"], fields["generation"], fields["round"], fields["choice"])] += 1

    monkeypatch.setattr(worker_module, "Keys", Recorded)
    rig = build_pool_rig(parts)
    readers = [rig.ask(p, temperature=1.0, seed=5 + i, max_tokens=120) for i, p in enumerate(prompts())]
    for fault in range(12):
        rig.turns(3)
        wire = rig.wires[fault % 2]
        if fault % 4 == 0:
            wire.replace_worker(parts.worker(step_deadline_ms=600_000))
        elif fault % 4 == 1:
            kill(wire)
        elif fault % 4 == 2:
            for link in (rig.link_of(0), rig.link_of(1)):
                for lease in link._leases.values():
                    link._lose(lease.wire or 0)
        else:
            rig.wires[0].connected = rig.wires[1].connected = True
    for wire in rig.wires:
        wire.connected = True
    rig.finish(*readers)
    assert len(used) > 60
    assert set(used.values()) == {1}
    rounds = Counter((seed, round_) for seed, _, round_, _ in used)
    assert set(rounds.values()) == {1}  # the round alone tells them apart; the reset count begins at 0 everywhere
    assert sum(generation == 0 for _, generation, _, _ in used) > 30
    assert rig.total("draft_audits_total") > 0
    assert rig.labelled("draft_audits_total").keys() == {"passed"}
    assert sum(rig.labelled("lease_takeovers_total").values()) >= 2
    rig.check_idle()


def test_a_round_that_was_asked_for_is_never_asked_for_again(parts: Parts) -> None:
    """Even if the engine did: the second asking is dropped and counted, before any worker could draw."""
    rig = build_pool_rig(parts)
    start(rig, 1)
    seat = rig.pool._seats[0]
    request = DraftRequest(seat.lease, seat.lease.asked_round, 3, seat.lease.known, 2, None, 3)
    steps = [wire.sent.count(MessageType.STEP) for wire in rig.wires]
    assert rig.pool.collect(rig.pool.step([request])) == {}
    assert [wire.sent.count(MessageType.STEP) for wire in rig.wires] == steps
    assert rig.pool.discards == {"round_used": 1}


def test_a_reply_of_the_old_process_is_not_believed_at_the_new_connection(
    parts: Parts, undisturbed: list[list[int]]
) -> None:
    rig = build_pool_rig(parts, 1)
    readers = start(rig, 1)
    wire, recorded = rig.wires[0], []
    wire.down = lambda frame: recorded.append(frame) or [frame]  # type: ignore[func-returns-value]
    rig.turns(1)
    replies = [frame for frame in recorded if type_of(frame) in (MessageType.ROW, MessageType.COMPLETION)]
    wire.down = lambda frame: [frame]
    wire.replace_worker(parts.worker(step_deadline_ms=600_000))
    rig.turns(3)
    assert rig.pool.reconnects == 1
    before = sum(rig.pool.drops.values())
    for frame in replies:
        wire.deliver(frame)
    rig.turns(1)
    assert sum(rig.pool.drops.values()) == before + len(replies) > before
    assert rig.pool.drops[ErrorCode.STALE_GENERATION.counter] == len(replies)
    check_text(rig, readers, undisturbed)


def test_a_reply_to_the_last_tenant_of_a_slot_is_not_the_next_ones(parts: Parts, undisturbed: list[list[int]]) -> None:
    """ABA: same worker, same wire slot, same round number, another request."""
    rig = build_pool_rig(parts, 1)
    rig.ask([9, 8, 7], name="gone", max_tokens=TOKENS)
    wire, recorded = rig.wires[0], []
    wire.down = lambda frame: recorded.append(frame) or [frame]  # type: ignore[func-returns-value]
    rig.turns(5)
    wire.down = lambda frame: [frame]
    rig.engine.cancel("gone")
    rig.turns(1)
    replies = [frame for frame in recorded if type_of(frame) in (MessageType.ROW, MessageType.COMPLETION)]
    reader = rig.ask(prompts()[0], max_tokens=TOKENS)
    while not reader.finish:
        for frame in replies:
            wire.deliver(frame)
        rig.turns(1)
    assert rig.pool.drops[ErrorCode.STALE_GENERATION.counter] >= len(replies)
    check_text(rig, [reader], undisturbed)


@pytest.mark.parametrize("turns", range(1, 7))
@pytest.mark.parametrize("held", [False, True])
def test_a_request_that_is_cancelled_at_any_turn_costs_nobody_else_anything(
    parts: Parts, undisturbed: list[list[int]], turns: int, held: bool
) -> None:
    """Also while its reply is under way: the slot's next tenant gets its own drafts."""
    rig = build_pool_rig(parts, deadline_ms=40, heartbeat_ms=60_000)
    readers = [rig.ask(prompt, max_tokens=TOKENS) for prompt in prompts(2)]
    rig.ask([9, 8, 7], name="gone", max_tokens=TOKENS)
    rig.turns(turns)
    end = silence(rig.wires[0]) if held else None
    rig.engine.cancel("gone")
    rig.turns(1)
    if end is not None:
        end()
    check_text(rig, readers, undisturbed)


@pytest.mark.parametrize("change", ["lost", "twice", "behind a reset"])
def test_commits_that_are_lost_doubled_or_overtaken_by_a_reset_change_no_text(
    parts: Parts, undisturbed: list[list[int]], change: str
) -> None:
    """The outcome of a round rides on the next STEP: whatever becomes of that frame, both ledgers agree again."""
    rig = build_pool_rig(parts, 1, deadline_ms=60, heartbeat_ms=60_000)
    readers = start(rig, 2)
    wire = rig.wires[0]
    if change == "lost":
        wire.up = lambda frame: [] if type_of(frame) is MessageType.STEP else [frame]
    elif change == "twice":
        wire.up = lambda frame: [frame, frame]
    else:
        rig.link_of(0)._lose(0)
    rig.turns(1)
    wire.up = lambda frame: [frame]
    at = marks(readers)
    check_text(rig, readers, undisturbed)
    assert all(drafted_after(readers, at))
    assert rig.labelled("proposal_discards_total") == ({"late": 2} if change == "lost" else {})


def test_close_gives_every_worker_its_slots_back(parts: Parts) -> None:
    rig = build_pool_rig(parts)
    start(rig)
    rig.pool.close()
    for wire in rig.wires:
        wire._turn()
        assert wire.closed
    assert [wire.worker.free_slots for wire in rig.wires] == [4, 4]
