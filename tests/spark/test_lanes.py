"""The lane of a request: what a client may ask for, and the match lane's promise that speculation changes no token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dspark.dyadic import greedy_row
from dspark.philox import Domain, Keys
from dspark_proto import Lane, MessageType
from dspark_spark import engine
from dspark_spark.api import GenerateRequest, SamplingParams
from dspark_spark.engine import Engine, EngineSettings
from dspark_spark.lanes import LANES, choose_lane
from dspark_spark.metrics import Metrics
from dspark_workers.chain import Proposal
from tests.conftest import TinyPair
from tests.rig import Parts, Reader, Rig, build_rig, load_parts, type_of

pytestmark = pytest.mark.usefixtures("retry_at_once")

PROMPT = [3, 14, 15, 92, 65, 35]
TOKENS = 48


def request(
    name: str, lane: str, speculate: bool = True, prompt: Sequence[int] = PROMPT, **params: Any
) -> GenerateRequest:
    values: dict[str, Any] = {"temperature": 1.0, "max_tokens": TOKENS, "ignore_eos": True, "seed": 7, **params}
    return GenerateRequest(name, tuple(prompt), SamplingParams(**values), speculate, lane)


def ask(rig: Rig, lane: str, **options: Any) -> Reader:
    rig.count += 1
    reader = Reader()
    rig.engine.submit(request(f"lane{rig.count}", lane, **options), reader.deltas.append)
    return reader


def answer(rig: Rig, lane: str, **options: Any) -> Reader:
    reader = ask(rig, lane, **options)
    rig.finish(reader)
    return reader


def without_a_drafter(parts: Parts, lane: str, **options: Any) -> list[int]:
    """The answer of an engine that knows no drafter and no link."""
    alone = Engine(parts.model, parts.tokenizer, EngineSettings(2, 256, 64), Metrics(0))
    reader = Reader()
    alone.submit(request("only", lane, **options), reader.deltas.append)
    while not reader.finish:
        alone.turn()
    return reader.ids


# -- the choice ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "temperature", "lane"),
    [
        ("auto", 0.0, Lane.GREEDY),
        ("auto", 0.3, Lane.RATIO),
        ("ratio", 0.0, Lane.RATIO),
        ("ratio", 1.0, Lane.RATIO),
        ("match", 0.0, Lane.MATCH),
        ("match", 1.0, Lane.MATCH),
        ("greedy", 0.0, Lane.GREEDY),
    ],
)
def test_a_lane_is_what_was_asked_for(wanted: str, temperature: float, lane: Lane) -> None:
    assert choose_lane(wanted, temperature) is lane


@pytest.mark.parametrize(
    ("lane", "words"), [("greedy", ("lane='greedy'", "temperature 0")), ("Match", ("lane='Match'", "auto, ratio"))]
)
def test_a_lane_that_cannot_be_had_ends_its_request_with_the_fields_name(
    rig: Rig, lane: str, words: tuple[str, ...]
) -> None:
    good, bad = ask(rig, "match", max_tokens=5), ask(rig, lane)
    rig.finish(good, bad)
    assert (good.finish, bad.finish) == ("length", "error")
    assert all(word in (bad.last.error or "") for word in words)
    rig.check_idle()


@pytest.mark.parametrize("lane", LANES)
def test_at_temperature_zero_every_lane_says_the_same(rig: Rig, lane: str) -> None:
    reader = answer(rig, lane, temperature=0.0)
    assert reader.ids == rig.answer(PROMPT, max_tokens=TOKENS).ids
    assert reader.last.stats.lane == ("greedy" if lane == "auto" else lane)
    assert reader.last.stats.accepted > 0


def test_the_lease_says_what_the_lane_needs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Match asks for ids alone, drawn at the draft temperature; ratio for whole rows."""
    entries: dict[str, set[int]] = {}
    supports: dict[str, int] = {}
    read = engine.read_proposal
    current = ""

    def spy(event: Any, vocab: int) -> Any:
        entries.setdefault(current, set()).update(event.entries)
        supports[current] = event.support
        lease = next(iter(rig.wire.worker.peers[rig.wire.peer].leases.values()))
        assert lease.policy.temperature == 0.9
        return read(event, vocab)

    monkeypatch.setattr(engine, "read_proposal", spy)
    for current in ("match", "ratio"):
        assert answer(rig, current, temperature=0.9).last.stats.lane == current
    assert supports == {"match": 1, "ratio": 256}
    assert entries["match"] == {1} != entries["ratio"]


def test_a_draft_temperature_of_its_own_reaches_the_worker_in_the_match_lane(parts: Parts) -> None:
    rig = build_rig(parts, draft_temperature=0.25)
    ask(rig, "match")
    rig.turns(3)
    (lease,) = rig.wire.worker.peers[rig.wire.peer].leases.values()
    assert (lease.policy.temperature, lease.policy.support, lease.policy.ids_only) == (0.25, 1, True)


# -- numbers ---------------------------------------------------------------------------------------------------


def test_which_numbers_each_lane_uses(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Match: the number of each new position once, at round 0. Ratio: never round 0, so the two share none."""
    drawn: Counter[tuple[Domain, int, int]] = Counter()
    original = Keys.draw64

    def spy(self: Keys, domain: Domain, position: int, draw: int = 0) -> int:
        drawn[domain, self.round, position] += 1
        return original(self, domain, position, draw)

    monkeypatch.setattr(Keys, "draw64", spy)
    answer(rig, "match")
    first = len(PROMPT)
    assert drawn == {(Domain.TARGET_ONLY, 0, position): 1 for position in range(first, first + TOKENS)}
    drawn.clear()
    answer(rig, "ratio")
    assert min(round_ for _, round_, _ in drawn) >= 1
    assert {Domain.ACCEPTANCE, Domain.TARGET_ONLY} <= {domain for domain, _, _ in drawn}


# -- speculation changes no token ------------------------------------------------------------------------------

POLICIES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 12},
    {"temperature": 1.3, "top_p": 0.8},
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_speculation_on_and_off_give_the_same_text(rig: Rig, parts: Parts, policy: dict[str, Any]) -> None:
    accepted = 0
    for seed in (-3, 1 << 40):
        prompt = PROMPT[seed % 4 :]
        on = answer(rig, "match", seed=seed, prompt=prompt, **policy)
        off = answer(rig, "match", seed=seed, prompt=prompt, speculate=False, **policy)
        assert on.ids == off.ids == without_a_drafter(parts, "match", seed=seed, prompt=prompt, **policy)
        assert (on.last.stats.lane, off.last.stats.lane) == ("match", "none")
        assert on.last.stats.rounds > 0 == off.last.stats.rounds
        accepted += on.last.stats.accepted
    assert accepted > 0
    rig.check_idle()


def test_other_lanes_do_not_promise_that(rig: Rig) -> None:
    """The control: with numbers of the round, the texts of one seed part ways."""
    assert answer(rig, "ratio").ids != answer(rig, "ratio", speculate=False).ids
    assert answer(rig, "match").ids != answer(rig, "match", seed=8).ids


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_depth_changes_the_text(rig: Rig, tiny_pair: TinyPair, depth: int) -> None:
    shallow = build_rig(load_parts(tiny_pair.target, tiny_pair.drafter, depth))
    reader = answer(shallow, "match")
    assert reader.ids == answer(rig, "match").ids
    assert reader.last.stats.drafted <= depth * reader.last.stats.rounds


def test_adaptive_depths_do_not_change_the_text(rig: Rig, parts: Parts) -> None:
    settings = replace(rig.engine.settings, adaptive_depth=True)
    assert answer(build_rig(parts, settings=settings), "match").ids == answer(rig, "match").ids


def test_neighbours_in_the_batch_do_not_change_the_text(rig: Rig, parts: Parts) -> None:
    readers = [ask(rig, lane, seed=seed) for lane, seed in (("match", 1), ("ratio", 2), ("match", 3), ("match", 1))]
    rig.finish(*readers)
    for reader, seed in ((readers[0], 1), (readers[2], 3), (readers[3], 1)):
        assert reader.ids == without_a_drafter(parts, "match", seed=seed)


def faults(rig: Rig) -> Iterator[None]:
    """One fault after the other, for as long as somebody asks."""
    while True:
        rig.link._lose(0)
        yield
        rig.wire.replace_worker(rig.parts.worker(step_deadline_ms=600_000))
        rig.link._down("test")
        yield
        rig.wire.down = _lose_completions
        yield
        rig.wire.down = lambda frame: [frame]
        yield


def _lose_completions(frame: bytes) -> list[bytes]:
    if type_of(frame) is MessageType.COMPLETION:
        damaged = bytearray(frame)
        damaged[60] ^= 1
        return [bytes(damaged)]
    return [frame]


def test_resets_reconnects_and_lost_rounds_do_not_change_the_text(rig: Rig, parts: Parts) -> None:
    reader = ask(rig, "match", max_tokens=160)
    planted = faults(rig)
    while not reader.finish:
        rig.turns(4)
        next(planted)
    stats = reader.last.stats
    assert reader.ids == without_a_drafter(parts, "match", max_tokens=160)
    assert stats.rounds > 5
    assert stats.drafted > stats.verified
    assert rig.link.reconnects > 0
    assert rig.link.generation_bumps > 0
    rig.check_idle()


@pytest.mark.parametrize("trick", ["nonsense", "repeats"])
def test_no_worker_can_change_the_text(
    rig: Rig, parts: Parts, monkeypatch: pytest.MonkeyPatch, trick: str
) -> None:
    """Drafts that were drawn from nothing, under a declared row that says so of itself: slower, and nothing else."""
    honest = rig.wire.worker._chain.sample

    def lie(*arguments: Any, **named: Any) -> Proposal:
        tokens = honest(*arguments, **named).tokens
        lies = [(t * 31 + 5) % 288 for t in tokens] if trick == "nonsense" else tokens[:1] * len(tokens)
        return Proposal(lies, [greedy_row(t) for t in lies], [0] * len(lies))

    monkeypatch.setattr(rig.wire.worker._chain, "sample", lie)
    reader = answer(rig, "match")
    assert reader.last.stats.verified > 0
    assert reader.ids == without_a_drafter(parts, "match")


def test_a_worker_without_the_lane_leaves_the_request_target_only(parts: Parts) -> None:
    """Not negotiated: the request keeps its lane and its text, and is not drafted for."""
    ratio_and_greedy = 1 << (Lane.RATIO - 1) | 1 << (Lane.GREEDY - 1)
    limited = replace(parts, compatibility=replace(parts.compatibility, lanes=ratio_and_greedy))
    rig = build_rig(limited)
    reader = answer(rig, "match")
    assert rig.link.up
    assert (reader.last.stats.rounds, reader.last.stats.lane) == (0, "match")
    assert reader.ids == without_a_drafter(parts, "match")
    assert answer(rig, "ratio").last.stats.accepted > 0
