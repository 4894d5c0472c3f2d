"""Two groups of requests take turns on the link: texts, books and leases are those of one group, whatever happens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dspark_proto import MessageType, ProposalReady
from dspark_spark.batch import Batch, prefill_chunks
from dspark_spark.depth import DepthPlanner
from dspark_spark.group_choice import WINDOW
from dspark_spark.leases import DraftRequest, DraftRound
from dspark_spark.request_groups import GroupRound, next_groups
from dspark_spark.sequence import Sequence as Request
from tests.conftest import TinyPair
from tests.rig import Parts, Reader, Rig, build_rig, load_parts, type_of

PROMPT = [3, 14, 15, 92, 65, 35]


@pytest.fixture(scope="module")
def parts(tiny_pair: TinyPair) -> Parts:
    return load_parts(tiny_pair.target, tiny_pair.drafter)


def grouped(parts: Parts, groups: int | None, **changes: Any) -> Rig:
    settings = replace(build_rig(parts).engine.settings, request_groups=groups, **changes.pop("settings", {}))
    return build_rig(parts, settings=settings, **changes)


@pytest.fixture
def rig(parts: Parts) -> Rig:
    return grouped(parts, 2)


def ask_all(rig: Rig, count: int = 4, **params: Any) -> list[Reader]:
    """Different prompts, lanes and lengths."""
    values = {"max_tokens": 40, **params}
    return [
        rig.ask([*PROMPT[i:], 7 * i, *range(i * i)], **{"temperature": float(i % 2), "seed": i, **values})
        for i in range(count)
    ]


def texts(readers: Sequence[Reader]) -> list[list[int]]:
    return [reader.ids for reader in readers]


def expected(parts: Parts, **params: Any) -> list[list[int]]:
    """In one group, undisturbed."""
    rig = build_rig(parts)
    readers = ask_all(rig, **params)
    rig.finish(*readers)
    return texts(readers)


def sizes(rig: Rig) -> list[int]:
    """Requests of each round under way."""
    return [len(round_.batch.decoding) for round_ in rig.engine._under_way]


# -- texts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, None])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_texts_do_not_depend_on_the_groups(parts: Parts, groups: int | None, count: int) -> None:
    """Greedy and sampled, with more requests than slots, of different lengths."""
    plain, rig = build_rig(parts), grouped(parts, groups)
    readers, others = ([r.ask(PROMPT[i % 4 :], temperature=float(i % 2), seed=i, max_tokens=12 + 9 * i)
                        for i in range(count)] for r in (plain, rig))  # fmt: skip
    plain.finish(*readers)
    rig.finish(*others)
    assert texts(readers) == texts(others)
    assert [r.last.stats for r in readers] == [r.last.stats for r in others]
    assert sum(r.last.stats.accepted for r in others) > 0
    rig.check_books()
    rig.check_idle()


def test_one_is_verified_while_the_other_drafts(rig: Rig, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every turn: STEP for those committed in the turn before, and verification of the others."""
    events: list[tuple[str, tuple[int, ...]]] = []
    step, forward = rig.link.step, parts.model.forward

    def note_step(requests: Sequence[DraftRequest]) -> DraftRound:
        events.append(("step", tuple(r.lease.slot for r in requests)))
        return step(requests)

    def note_forward(cache: Any, segments: Any, **options: Any) -> Any:
        events.append(("verify", tuple(s.slot for s in segments)))
        return forward(cache, segments, **options)

    monkeypatch.setattr(rig.link, "step", note_step)
    monkeypatch.setattr(parts.model, "forward", note_forward)
    readers = [rig.ask(PROMPT[i:], max_tokens=40) for i in range(4)]
    rig.turns(6)
    a, b = (0, 1), (2, 3)
    assert events[0] == ("verify", (0, 1, 2, 3))  # the prompts
    assert events[1:5] == [("step", a), ("step", b), ("verify", a), ("step", a)]
    assert events[5:11] == [("verify", b), ("step", b), ("verify", a), ("step", a), ("verify", b), ("step", b)]
    assert sizes(rig) == [2]
    rig.finish(*readers)
    rig.check_idle()


def test_rounds_belong_to_their_request(parts: Parts) -> None:
    """The same round numbers, anchors and depths in one group and in two; chunks of a prompt are no rounds."""

    def asked(groups: int) -> dict[int, list[tuple[int, int, int]]]:
        rig = grouped(parts, groups)
        found: dict[int, list[tuple[int, int, int]]] = {}
        step = rig.link.step

        def note(requests: Sequence[DraftRequest]) -> DraftRound:
            for r in requests:
                found.setdefault(r.lease.slot, []).append((r.round, r.anchor_position, r.depth))
            return step(requests)

        rig.link.step = note  # type: ignore[method-assign]
        rig.finish(*[rig.ask([5 * i + j for j in range(20 + 9 * i)], max_tokens=20, seed=i) for i in range(3)])
        return found

    one, two = asked(1), asked(2)
    assert one == two
    assert [rounds[0][0] for rounds in one.values()] == [2, 2, 2]  # the first token is round 1
    assert all([r for r, _, _ in rounds] == list(range(2, 2 + len(rounds))) for rounds in one.values())


def test_prefill_rides_along_and_its_request_joins(rig: Rig, parts: Parts) -> None:
    first = [rig.ask(PROMPT[i:], max_tokens=80) for i in range(2)]
    while not all(len(r.deltas) > 2 for r in first):
        rig.engine.turn()
    before = [len(r.deltas) for r in first]
    long = rig.ask([(5 * i) % 256 for i in range(120)], max_tokens=30)
    while not long.deltas:
        rig.engine.turn()
    gained = [len(r.deltas) - b for r, b in zip(first, before, strict=True)]
    assert gained == [2, 2]  # four chunks, in turn with the two groups
    rig.finish(*first, long)
    assert long.last.stats.accepted > 0
    assert long.ids == build_rig(parts).answer([(5 * i) % 256 for i in range(120)], max_tokens=30).ids
    rig.check_idle()


def test_halves_stay_equal_when_requests_come_and_go(rig: Rig) -> None:
    readers = [rig.ask(PROMPT[i:], max_tokens=100, name=f"n{i}") for i in range(4)]
    rig.turns(4)
    assert sizes(rig) == [2]
    for name in ("n0", "n1"):  # one whole group
        rig.engine.cancel(name)
    rig.turns(4)
    assert sizes(rig) == [1]
    more = [rig.ask(PROMPT[:3], max_tokens=100) for _ in range(2)]
    seen = []
    for _ in range(8):
        rig.engine.turn()
        seen += sizes(rig)
    assert seen[-4:] == [2, 2, 2, 2]
    rig.finish(*readers, *more)
    rig.check_idle()


def test_two_groups_become_one_again_and_two(rig: Rig, parts: Parts) -> None:
    readers = ask_all(rig, max_tokens=60)
    for groups in (2, 1, 2, 1, None, 2):
        rig.engine.groups.fixed = groups
        rig.turns(3)
        assert sizes(rig) == ([] if groups != 2 else [2])
    rig.finish(*readers)
    assert texts(readers) == expected(parts, max_tokens=60)
    rig.check_books()
    rig.check_idle()


# -- ends and faults with a round under way ----------------------------------------------------------------------


def test_cancel_with_drafts_under_way_and_the_slot_in_use_again(rig: Rig, parts: Parts) -> None:
    """Its reply was not looked at: staging comes back, and the next request in the slot gets a reply of its own."""
    readers = [rig.ask(PROMPT[i:], max_tokens=60, name=f"n{i}") for i in range(4)]
    rig.turns(4)
    waiting = rig.engine._under_way[0].batch.decoding[0][0]
    assert waiting.slot in rig.link._rounds
    rig.engine.cancel(waiting.request.request_id)
    other = rig.ask([9, 8, 7], max_tokens=20)
    rig.engine.turn()
    assert rig.labelled("proposal_discards_total") == {"cancelled": 1}
    rig.finish(*readers, other)
    assert other.ids == build_rig(parts).answer([9, 8, 7], max_tokens=20).ids
    assert sorted(r.finish or "" for r in readers) == ["abort", "length", "length", "length"]
    assert rig.labelled("proposal_discards_total") == {"cancelled": 1}
    stats = [r.last.stats for r in (*readers, other)]
    assert rig.total("spec_decode_num_drafts_total") == 1 + sum(s.rounds for s in stats)
    assert rig.total("target_only_steps_total") == sum(s.target_only_steps for s in stats)
    rig.check_idle()
    assert rig.wire.worker.free_slots == 4


@pytest.mark.parametrize("arrived", [False, True])
def test_cancel_whether_the_reply_is_there_or_not(rig: Rig, arrived: bool) -> None:
    readers = [rig.ask(PROMPT[i:], max_tokens=30) for i in range(4)]
    rig.turns(3)
    rig.wire.frozen = not arrived
    rig.engine._next_rounds([], _no_tally())  # STEP for one group; the other's round is due and goes unverified here
    if arrived:
        rig.link.pump()
    assert bool(rig.engine._under_way[0].replies.ready) is arrived  # type: ignore[union-attr]
    slots = [s for s, _ in rig.engine._under_way[0].batch.decoding]
    for sequence in slots:
        rig.engine._abort(sequence.request.request_id)
    assert rig.labelled("proposal_discards_total") == {"cancelled": 2}
    assert rig.engine._under_way == []
    staging = rig.link._connection.staging
    assert staging is not None
    assert sum(lease.state.value != "free" for lease in staging.leases) == 2  # those of the group that was due
    assert all(len(r.deltas) >= 2 for r in readers)


def _no_tally() -> Any:
    return SimpleNamespace(asked=lambda depth: None)


def test_a_worker_that_dies_with_both_groups_asked(rig: Rig, parts: Parts) -> None:
    """Both groups go on target-only in the same turns, nobody waits, and drafting comes back."""
    readers = ask_all(rig, max_tokens=80)
    rig.turns(4)
    lost = sum(sizes(rig))
    before = [len(r.deltas) for r in readers]
    rig.wire.replace_worker(rig.parts.worker())
    rig.link._down("test")
    rig.turns(3)
    assert all(len(r.deltas) - b >= 1 for r, b in zip(readers, before, strict=True))
    assert lost == 2
    drafted = [r.last.stats.drafted if r.finish else 0 for r in readers]
    rig.link._next_hello_ns = 0
    rig.finish(*readers)
    assert all(r.last.stats.drafted > d for r, d in zip(readers, drafted, strict=True))
    assert rig.link.reconnects == 1
    assert sum(rig.labelled("proposal_discards_total").values()) == rig.labelled("target_only_steps_total")["discarded"]
    assert [reader.ids for reader in readers[::2]] == expected(parts, max_tokens=80)[::2]  # the greedy ones
    rig.check_books()
    rig.check_idle()


def test_replies_that_came_before_the_link_went_down_count(rig: Rig) -> None:
    readers = [rig.ask(PROMPT[i:], max_tokens=40) for i in range(4)]
    rig.turns(4)
    rig.link.pump()
    assert len(rig.engine._under_way[0].replies.ready) == 2  # type: ignore[union-attr]
    rig.link._down("test")
    before = rig.total("spec_decode_num_verified_tokens_total")
    rig.engine.turn()
    assert rig.total("spec_decode_num_verified_tokens_total") > before
    rig.finish(*readers)
    rig.check_idle()


def test_lost_replies_cost_their_own_rounds_only(rig: Rig, parts: Parts) -> None:
    count = 0

    def damage(frame: bytes) -> list[bytes]:
        nonlocal count
        if type_of(frame) is MessageType.COMPLETION:
            count += 1
            if count % 5 == 0:
                damaged = bytearray(frame)
                damaged[60] ^= 1
                return [bytes(damaged)]
        return [frame]

    rig.wire.down = damage
    readers = ask_all(rig, max_tokens=50)
    rig.finish(*readers)
    stats = [r.last.stats for r in readers]
    discards = sum(rig.labelled("proposal_discards_total").values())
    assert discards == count // 5 > 2
    assert rig.total("spec_decode_num_drafts_total") == sum(s.rounds for s in stats) + discards
    assert rig.total("spec_decode_num_draft_tokens_total") == sum(s.drafted for s in stats)
    assert rig.total("target_only_steps_total") == sum(s.target_only_steps for s in stats)
    assert [reader.ids for reader in readers[::2]] == expected(parts, max_tokens=50)[::2]
    rig.check_idle()


def test_a_silent_worker_costs_one_deadline(parts: Parts) -> None:
    rig = grouped(parts, 2, deadline_ms=30)
    readers = [rig.ask(PROMPT[i:], max_tokens=30) for i in range(4)]
    rig.turns(3)
    rig.wire.frozen = True
    rig.turns(3)
    assert all(len(r.deltas) >= 3 for r in readers)
    rig.wire.thaw()
    rig.finish(*readers)
    assert texts(readers) == texts_of_one_group(parts)
    assert sum(rig.labelled("proposal_discards_total").values()) > 0
    rig.check_books()
    rig.check_idle()


def texts_of_one_group(parts: Parts) -> list[list[int]]:
    rig = build_rig(parts)
    readers = [rig.ask(PROMPT[i:], max_tokens=30) for i in range(4)]
    rig.finish(*readers)
    return texts(readers)


def test_few_staging_blocks_are_shared(parts: Parts) -> None:
    rig = grouped(parts, 2, max_in_flight=2)
    readers = [rig.ask(PROMPT[i:], max_tokens=30) for i in range(4)]
    rig.finish(*readers)
    assert texts(readers) == texts_of_one_group(parts)
    assert rig.labelled("target_only_steps_total")["in_flight_limit"] > 0
    assert sum(r.last.stats.accepted for r in readers) > 0
    rig.check_idle()


def test_draining_with_a_round_under_way(rig: Rig, parts: Parts) -> None:
    readers = [rig.ask(PROMPT[i:], max_tokens=30) for i in range(4)]
    rig.turns(4)
    rig.wire.worker.drain(1)
    rig.finish(*readers)
    assert texts(readers) == texts_of_one_group(parts)
    rig.check_books()
    rig.check_idle()


def test_stop_with_a_round_under_way(rig: Rig) -> None:
    readers = [rig.ask(PROMPT[i:], max_tokens=100) for i in range(4)]
    rig.turns(4)
    rig.link.pump()
    assert sizes(rig) == [2]
    rig.engine.stop()
    assert [r.finish for r in readers] == ["abort"] * 4
    assert rig.wire.closed
    assert rig.engine._under_way == []
    staging = rig.link._connection.staging
    assert staging is not None
    assert all(lease.state.value == "free" for lease in staging.leases)
    assert rig.link._rounds == {}
    assert rig.total("spec_decode_num_drafts_total") == sum(r.last.stats.rounds for r in readers) + 2


# -- adaptive depths ---------------------------------------------------------------------------------------------


def test_adaptive_depths_and_early_stops_in_two_groups(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark_spark.engine.forward_timer", lambda model: lambda rows: 0.010 + 0.002 * rows)
    rig = grouped(parts, 2, settings={"adaptive_depth": True})
    readers = ask_all(rig, temperature=0.0)
    rig.finish(*readers)
    assert texts(readers) == expected(parts, temperature=0.0)
    assert 0 < rig.total("spec_decode_num_verified_tokens_total") < rig.total("spec_decode_num_draft_tokens_total")
    assert not rig.engine._planner._requests  # type: ignore[union-attr]
    rig.check_books()
    rig.check_idle()


def test_a_stop_uses_what_was_known_when_the_drafts_were_asked_for(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step times that were measured since then would tell how many drafts of the other group survived."""
    monkeypatch.setattr("dspark_spark.engine.forward_timer", lambda model: lambda rows: 0.010 + 0.002 * rows)
    rig = grouped(parts, 2, settings={"adaptive_depth": True})
    planner = rig.engine._planner
    assert planner is not None
    known: list[object] = []  # curves at STEPs, in order
    used: list[object] = []
    ask = rig.engine._ask

    def note_ask(batch: Batch, tally: Any) -> GroupRound:
        round_ = ask(batch, tally)
        if round_.asked:
            known.append(planner.curve)
        return round_

    def note_cut(curve: object, batch: Batch, proposals: dict[int, Any]) -> dict[int, Any]:
        used.append(curve)
        return proposals

    monkeypatch.setattr(rig.engine, "_ask", note_ask)
    monkeypatch.setattr("dspark_spark.engine.cut_proposals", note_cut)
    monkeypatch.setattr(DepthPlanner, "plan", lambda self, limits, rows: {s: min(2, d) for s, (_, d) in limits.items()})
    rig.finish(*[rig.ask(PROMPT[i:], max_tokens=12) for i in range(4)])
    assert len(used) > 6
    assert all(curve is asked for curve, asked in zip(used, known, strict=False))
    assert len(set(map(id, known))) > 4  # and it changed all the time


# -- who goes with whom ------------------------------------------------------------------------------------------


def some(*slots: int) -> list[Request]:
    return [cast(Request, SimpleNamespace(slot=slot)) for slot in slots]


@pytest.mark.parametrize(
    ("idle", "under_way", "groups", "slots"),
    [
        ((), 0, 2, []),
        ((), 3, 1, []),
        ((1, 2, 3), 0, 1, [[1, 2, 3]]),
        ((1, 2), 2, 1, [[1, 2]]),
        ((1,), 0, 2, [[1]]),
        ((1, 2, 3), 0, 2, [[1, 2], [3]]),
        ((1, 2), 2, 2, [[1, 2]]),
        ((1, 2, 3, 4), 1, 2, [[1, 2, 3]]),
        ((1,), 5, 2, [[1]]),
    ],
)
def test_halves(idle: tuple[int, ...], under_way: int, groups: int, slots: list[list[int]]) -> None:
    found = next_groups(some(*idle), under_way, groups)
    assert [[request.slot for request in members] for members in found] == slots


def test_a_request_that_ended_takes_its_reply_with_it() -> None:
    released: list[int] = []
    a, b, c = some(0, 1, 2)
    ready = cast(ProposalReady, SimpleNamespace(lease=SimpleNamespace(release=lambda: released.append(0))))
    asked = dict.fromkeys((0, 1), cast(DraftRequest, "a request"))
    replies = DraftRound(0, {1}, {0: ready})
    round_ = GroupRound(Batch([(a, None), (b, None), (c, None)], []), asked, {2: "budget"}, replies, 3, None)
    assert not round_.drop(some(0)[0])  # another request in the same slot
    assert (round_.drop(a), released, replies.ready) == (True, [0], {})
    assert not round_.drop(a)
    assert round_.drop(b)
    assert not round_.drop(c)  # nothing was asked for it
    assert (round_.batch.decoding, round_.asked, round_.reasons) == ([], {}, {})


def test_a_proposal_that_was_discarded_is_not_counted_twice() -> None:
    (a,) = some(0)
    replies = DraftRound(0, set())  # neither awaited nor ready: the link has counted it
    assert not GroupRound(Batch([(a, None)], []), {0: cast(DraftRequest, "a request")}, {}, replies, 1, None).drop(a)


def test_chunks_of_a_prompt_start_no_round_but_the_last() -> None:
    def prompt(length: int, computed: int) -> Any:
        return SimpleNamespace(prompt_length=length, computed=computed, decoding=computed >= length, round=0)

    requests = [prompt(10, 4), prompt(5, 5), prompt(40, 0), prompt(3, 0)]
    chunks = prefill_chunks(cast(list[Request], requests), 20)
    assert [chunk for _, chunk in chunks] == [6, 14]
    assert [r.round for r in requests] == [1, 0, 0, 0]


def test_the_engine_measures_its_turns(parts: Parts) -> None:
    """The rig's worker answers inside `step`, so nothing is waited for, and the choice stays with one group."""
    rig = grouped(parts, None)
    readers = [rig.ask(PROMPT[i:], max_tokens=60) for i in range(4)]
    rig.finish(*readers)
    (trials,) = [t for n, t in rig.engine.groups._trials.items() if n == 3]
    assert list(trials._costs) == [4]
    assert len(trials._costs[4]) == WINDOW
    assert all(cost > 0 for cost in trials._costs[4])
    rig.check_idle()
