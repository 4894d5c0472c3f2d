"""`"draft_support": "dense"`: from the flag to committed tokens, and what happens where a worker does not offer it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dspark.models.source import open_target
from dspark.speculative import SpeculativeConfig, parse, resolve
from dspark_proto import ProposalReady
from dspark_spark.build import SparkSettings, _drafts
from dspark_spark.draft_link import DraftLink
from dspark_spark.leases import DraftLease
from tests.conftest import TinyPair
from tests.rig import Parts, Reader, Rig, build_rig

PROMPT = [3, 14, 15, 92, 65, 35]
HOT: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 60}


def rig_of(parts: Parts, support: int, *, offered: bool = True) -> Rig:
    """An engine that asks for rows of `support` entries (0: dense) from a worker that may offer dense rows."""
    configured = replace(parts, drafter=replace(parts.drafter, draft_support=support))
    worker = parts.worker(step_deadline_ms=600_000, dense_rows=offered)
    return build_rig(configured, worker=worker, dense_rows=configured.drafter.dense)


def supports(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Support of every proposal that the engine takes, as it goes on."""
    seen: set[int] = set()
    take = rig.link._take

    def note(event: ProposalReady) -> None:
        seen.add(event.support)
        take(event)

    monkeypatch.setattr(rig.link, "_take", note)
    return seen


def plain(parts: Parts, **params: object) -> Reader:
    return build_rig(parts).answer(PROMPT, speculate=False, **params)


# -- the flag --------------------------------------------------------------------------------------------------


def test_dense_is_a_support_of_the_flag(tiny_pair: TinyPair) -> None:
    config = open_target(str(tiny_pair.target)).config
    written = parse(tiny_pair.speculative(draft_support="dense"))
    resolved = resolve(written, str(tiny_pair.target), config)
    assert resolved is not None
    assert (resolved.dense, resolved.draft_support) == (True, 0)
    assert [resolved.support(temperature) for temperature in (0.0, 0.5, 1.5)] == [1, 0, 0]
    assert resolved.max_support == 256
    usual = resolve(parse(tiny_pair.speculative()), str(tiny_pair.target), config)
    assert usual is not None
    assert (usual.dense, usual.draft_support) == (False, None)
    assert [usual.support(temperature) for temperature in (0.0, 0.5, 1.5)] == [1, 32, 256]


@pytest.mark.parametrize("dense", [False, True])
def test_a_rank_offers_dense_staging_when_it_was_told_to(tiny_pair: TinyPair, dense: bool) -> None:
    source = open_target(str(tiny_pair.target))
    fields: dict[str, Any] = {"draft_support": "dense"} if dense else {}
    speculative = SpeculativeConfig.model_validate_json(tiny_pair.speculative(**fields))
    drafter = resolve(speculative, str(tiny_pair.target), source.config)
    assert drafter is not None
    settings = SparkSettings(str(tiny_pair.target), worker="tcp://127.0.0.1:9", speculative=speculative)
    link, _ = _drafts(settings, drafter, source, source.tokenizer())
    assert isinstance(link, DraftLink)
    try:
        assert link._connection.parameters.dense_rows is dense
    finally:
        link.close()


# -- the path --------------------------------------------------------------------------------------------------


def test_dense_rows_give_the_text_of_sparse_rows_that_leave_nothing_out(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft vocabulary has 192 tokens, so a row of 256 entries holds the same law: token for token the same."""
    dense, wide = rig_of(parts, 0), rig_of(parts, 256)
    seen = supports(dense, monkeypatch), supports(wide, monkeypatch)
    readers = [rig.answer(PROMPT, **HOT) for rig in (dense, wide)]
    assert readers[0].ids == readers[1].ids
    assert readers[0].last.stats == readers[1].last.stats
    assert seen == ({0}, {256})
    assert readers[0].last.stats.accepted > 0
    assert dense.labelled("draft_audits_total")["passed"] == readers[0].last.stats.verified
    for rig in (dense, wide):
        assert rig.labelled("proposal_discards_total") == {}
        rig.check_books()
        rig.check_idle()


def test_greedy_and_match_requests_beside_a_dense_one(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of(parts, 0)
    seen = supports(rig, monkeypatch)
    hot, greedy = rig.ask(PROMPT, **HOT), rig.ask(PROMPT, max_tokens=40)
    rig.finish(hot, greedy)
    assert seen == {0, 1}
    assert greedy.ids == plain(parts, max_tokens=40).ids
    assert min(r.last.stats.accepted for r in (hot, greedy)) > 0
    rig.check_idle()


def test_where_the_worker_does_not_offer_them_requests_stay_target_only(parts: Parts) -> None:
    """Nothing is downgraded silently: the link says why, and greedy requests are drafted for as ever."""
    rig = rig_of(parts, 0, offered=False)
    hot = rig.answer(PROMPT, **HOT)
    assert rig.link.up
    assert hot.last.stats.rounds == 0
    assert len(hot.ids) == 60
    assert "SUPPORT_OUT_OF_RANGE" in str(rig.link.last_error)
    assert rig.answer(PROMPT).last.stats.accepted > 0
    rig.check_idle()


def test_a_reconnect_keeps_dense_rows(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark_spark.draft_link.RETRY_S", 0.0)
    rig = rig_of(parts, 0)
    seen = supports(rig, monkeypatch)
    reader = rig.ask(PROMPT, **HOT)
    rig.turns(5)
    rig.wire.replace_worker(parts.worker(step_deadline_ms=600_000, dense_rows=True))
    rig.finish(reader)
    assert rig.link.reconnects == 1
    assert seen == {0}
    assert reader.last.stats.verified > 40
    rig.check_idle()


def test_a_lease_may_ask_for_dense_rows(parts: Parts) -> None:
    rig = rig_of(parts, 0)
    rig.ask(PROMPT, **HOT)
    rig.turns(2)
    leases: list[DraftLease] = list(rig.link._leases.values())
    assert [lease.support for lease in leases] == [0]
    assert leases[0].open
    rig.engine.stop()
