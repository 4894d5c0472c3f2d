"""The draft audit in the engine: honest workers pass whatever happens on the way, a wrong draw ends the service."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dspark.dyadic import Row
from dspark.philox import Keys
from dspark_proto import MessageType
from dspark_spark.draft_link import DraftLink
from dspark_spark.leases import DraftRound
from dspark_workers.chain import Proposal
from tests.rig import Parts, Reader, Rig, build_rig

pytestmark = pytest.mark.usefixtures("retry_at_once")

PROMPT = [3, 14, 15, 92, 65, 35]
HOT = {"temperature": 1.0, "seed": 5, "max_tokens": 60}


def audits(rig: Rig) -> dict[str, float]:
    return rig.labelled("draft_audits_total")


# -- honest workers --------------------------------------------------------------------------------------------


def test_every_drafted_token_is_audited_and_passes(rig: Rig) -> None:
    readers = [rig.ask(PROMPT[i:], temperature=t, seed=i, max_tokens=30) for i, t in enumerate((0.0, 0.7, 1.0, 1.5))]
    rig.finish(*readers)
    assert audits(rig) == {"passed": sum(r.last.stats.verified for r in readers)}
    assert rig.link.up
    rig.check_idle()


def test_resets_reconnects_and_repeated_steps_are_audited_under_the_right_key(rig: Rig) -> None:
    """Each changes the generation of the worker's key, or the frames, and none is mistaken for a wrong draw."""
    reader = rig.ask(PROMPT, **{**HOT, "max_tokens": 150})
    for fault in (None, "reset", "reset", "reopen", None, "reconnect", "reset", None, "repeat"):
        rig.turns(4)
        if fault == "reset":
            rig.link._lose(0)
        elif fault == "reopen":
            rig.link._leases[0].losses = 2
            rig.link._lose(0)
        elif fault == "reconnect":
            rig.wire.replace_worker(rig.parts.worker(step_deadline_ms=600_000))
            rig.link._down("test")
        elif fault == "repeat":
            rig.wire.up = lambda frame: [frame, frame]
    rig.finish(reader)
    assert rig.link.reconnects == 1
    assert rig.wire.sent.count(MessageType.RESET) >= 3
    assert rig.wire.sent.count(MessageType.OPEN) == 3
    assert audits(rig) == {"passed": reader.last.stats.verified}
    assert rig.labelled("proposal_discards_total") == {}


def test_a_reset_after_the_reply_does_not_change_the_key_of_that_reply(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot fails while its proposal waits to be read: the generation moves on, the draws are those of before."""
    reader = rig.ask(PROMPT, **HOT)
    rig.turns(3)
    collect = DraftLink.collect

    def lose_then_return(self: DraftLink, round_: DraftRound) -> Any:
        ready = collect(self, round_)
        self._lose(0)
        self._revive(1 << 62)
        return ready

    before = audits(rig)["passed"]
    with monkeypatch.context() as patch:
        patch.setattr(DraftLink, "collect", lose_then_return)
        rig.turns(3)
    rig.finish(reader)
    assert audits(rig) == {"passed": reader.last.stats.verified}
    assert audits(rig)["passed"] > before


@pytest.mark.parametrize(("rate", "least", "most"), [(0.0, 0, 0), (0.25, 0.2, 0.3)])
def test_a_lower_rate_audits_a_share(parts: Parts, rig: Rig, rate: float, least: float, most: float) -> None:
    settings = replace(rig.engine.settings, audit_rate=rate)
    rig = build_rig(parts, settings=settings)
    reader = rig.answer(PROMPT, **{**HOT, "max_tokens": 120})
    verified = reader.last.stats.verified
    assert verified > 100
    assert least * verified <= audits(rig).get("passed", 0) <= most * verified


# -- wrong draws -----------------------------------------------------------------------------------------------

Lie = Callable[[Proposal], Proposal]


def _another_token(proposal: Proposal) -> Proposal:
    row = proposal.rows[0]
    other = next(int(v) for v in row.ids if v != proposal.tokens[0])
    return replace(proposal, tokens=[other, *proposal.tokens[1:]])


def _moved_mass(proposal: Proposal) -> Proposal:
    """The token is the draw of the true row; the row on the wire is another one, with the token's mass cut down."""
    row, token = proposal.rows[0], proposal.tokens[0]
    counts = row.counts.copy()
    place = int(row.ids.searchsorted(token))
    counts[place - 1] += counts[place] - 1
    counts[place] = 1
    return replace(proposal, rows=[Row(row.ids, counts), *proposal.rows[1:]])


@pytest.mark.parametrize("lie", [_another_token, _moved_mass])
def test_a_wrong_draw_quarantines_the_worker_until_another_process_answers(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, lie: Lie
) -> None:
    honest = rig.wire.worker._chain.sample
    reader = rig.ask(PROMPT, **HOT)
    rig.turns(4)
    passed = audits(rig)["passed"]
    monkeypatch.setattr(rig.wire.worker._chain, "sample", lambda *a, **k: lie(honest(*a, **k)))
    rig.turns(1)
    assert not rig.link.up
    assert audits(rig) == {"passed": passed, "failed": 1}
    assert rig.labelled("proposal_discards_total") == {"audit_failed": 1}
    position = reader_position(reader)
    assert f"audit failed (position {position}: token" in (rig.link.last_error or "")
    rig.turns(4)
    assert not rig.link.up  # the same process is not believed again
    drafted = len(reader.deltas)
    rig.wire.replace_worker(rig.parts.worker(step_deadline_ms=600_000))
    rig.finish(reader)
    assert rig.link.up
    assert sum(sum(d.from_draft) for d in reader.deltas[drafted:]) > 0
    assert audits(rig)["failed"] == 1
    rig.check_idle()


def reader_position(reader: Reader) -> int:
    """Position of the token that the last step added: the one that the wrong draft was for."""
    return len(PROMPT) + len(reader.ids) - 1


def _wrong_field(name: str, change: Callable[[int], int]) -> Callable[..., Keys]:
    def make(**fields: int) -> Keys:
        return Keys(**{**fields, name: change(fields[name])})

    return make


@pytest.mark.parametrize("field", ["seed", "generation", "round", "choice"])
def test_a_worker_with_another_key_is_found(rig: Rig, monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    monkeypatch.setattr("dspark_workers.worker.Keys", _wrong_field(field, lambda value: value + 1))
    reader = rig.answer(PROMPT, **HOT)
    assert reader.finish == "length"
    assert rig.labelled("proposal_discards_total") == {"audit_failed": 1}
    assert reader.last.stats.accepted == 0


def test_a_stale_reply_is_found(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that answers with the drafts of the round before: tokens and rows agree, every checksum is right."""
    made: list[Proposal] = []
    honest = rig.wire.worker._chain.sample

    def stale(*arguments: Any, **named: Any) -> Proposal:
        made.append(honest(*arguments, **named))
        return made[-2] if len(made) == 4 else made[-1]

    monkeypatch.setattr(rig.wire.worker._chain, "sample", stale)
    reader = rig.answer(PROMPT, **HOT)
    assert reader.last.stats.rounds == 3
    assert rig.labelled("proposal_discards_total") == {"audit_failed": 1}


def test_with_the_audit_off_a_wrong_draw_passes(parts: Parts, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: nothing else in the engine sees it."""
    rig = build_rig(parts, settings=replace(rig.engine.settings, audit_rate=0.0))
    honest = rig.wire.worker._chain.sample
    monkeypatch.setattr(rig.wire.worker._chain, "sample", lambda *a, **k: _another_token(honest(*a, **k)))
    reader = rig.answer(PROMPT, **HOT)
    assert rig.link.up
    assert reader.last.stats.verified > 0
    assert rig.labelled("proposal_discards_total") == {}


@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_what_a_found_out_worker_sent_to_others_is_used_only_if_it_was_audited_whole(
    parts: Parts, rig: Rig, monkeypatch: pytest.MonkeyPatch, rate: float
) -> None:
    rig = build_rig(parts, settings=replace(rig.engine.settings, audit_rate=rate))
    readers = [rig.ask(PROMPT, temperature=1.0, seed=seed, max_tokens=40) for seed in (1, 2, 3)]
    rig.turns(4)
    honest, used = rig.engine._read, []

    def read(*arguments: Any) -> Any:
        used.append(honest(*arguments))
        return used[-1]

    def lie_to_one(*arguments: Any, **named: Any) -> Proposal:
        proposal = sample(*arguments, **named)
        (keys,) = [a for a in (*arguments, *named.values()) if isinstance(a, Keys)]
        return _another_token(proposal) if keys.seed == 2 else proposal

    sample = rig.wire.worker._chain.sample
    monkeypatch.setattr(rig.engine, "_read", read)
    monkeypatch.setattr(rig.wire.worker._chain, "sample", lie_to_one)
    while rig.link.up:
        rig.turns(1)
    assert audits(rig)["failed"] == 1
    assert len(used[-1]) == (2 if rate == 1 else 0)
    rig.finish(*readers)
    assert [r.finish for r in readers] == ["length"] * 3
    rig.check_idle()


def test_the_others_of_the_batch_go_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = rig.wire.worker._chain.sample

    def lie_to_one(*arguments: Any, **named: Any) -> Proposal:
        proposal = honest(*arguments, **named)
        (keys,) = [a for a in (*arguments, *named.values()) if isinstance(a, Keys)]
        return _another_token(proposal) if keys.seed == 2 else proposal

    monkeypatch.setattr(rig.wire.worker._chain, "sample", lie_to_one)
    readers = [rig.ask(PROMPT, temperature=1.0, seed=seed, max_tokens=20) for seed in (1, 2, 3)]
    rig.finish(*readers)
    assert [r.finish for r in readers] == ["length"] * 3
    assert rig.labelled("proposal_discards_total") == {"audit_failed": 1}
    rig.check_idle()
