"""The acceptance alarm: exactly zero over a long run is an alarm, anything else is a statistic."""

from __future__ import annotations

import logging

import pytest
from torch import Tensor

from dspark_spark.alarm import PROPOSALS, ZeroAcceptanceAlarm
from dspark_spark.metrics import Metrics, RoundRecord
from tests.rig import Parts, build_rig

FRUITLESS = RoundRecord(drafts=4, drafted_tokens=16, verified_tokens=16)


def value(metrics: Metrics) -> float:
    (line,) = [x for x in metrics.render().decode().splitlines() if x.startswith("dspark:alarm{")]
    assert 'name="zero_acceptance"' in line
    return float(line.rpartition(" ")[2])


def test_raised_at_the_threshold_and_cleared_by_one_accepted_draft(caplog: pytest.LogCaptureFixture) -> None:
    alarm = ZeroAcceptanceAlarm(threshold=5)
    with caplog.at_level(logging.WARNING):
        assert [alarm.judged(2, 0) for _ in range(4)] == [False, False, True, True]
        assert [record.message.startswith("alarm zero_acceptance: no draft") for record in caplog.records] == [True]
        assert not alarm.judged(1, 1)
        assert "is over" in caplog.records[1].message
        assert [alarm.judged(2, 0) for _ in range(3)] == [False, False, True]
        assert len(caplog.records) == 3


def test_an_accepted_draft_now_and_then_is_no_alarm() -> None:
    alarm = ZeroAcceptanceAlarm(threshold=5)
    assert not any(alarm.judged(1, int(i % 5 == 4)) for i in range(100))


def test_the_metric_follows_verified_proposals_only() -> None:
    metrics = Metrics(4)
    assert value(metrics) == 0
    assert PROPOSALS >= 64
    for _ in range(PROPOSALS // 4 - 1):
        metrics.record_round(FRUITLESS)
    for _ in range(100):  # late proposals were not verified, target-only steps had none
        metrics.record_round(RoundRecord(drafts=4, drafted_tokens=16, discards={"late": 4}))
        metrics.record_round(RoundRecord(target_only={"worker_down": 4}))
    assert value(metrics) == 0
    metrics.record_round(FRUITLESS)
    assert value(metrics) == 1
    metrics.record_round(RoundRecord(target_only={"worker_down": 4}))
    assert value(metrics) == 1
    metrics.record_round(RoundRecord(drafts=1, drafted_tokens=4, verified_tokens=4, accepted_per_position=(1,)))
    assert value(metrics) == 0


def test_a_drafter_that_is_never_right_raises_it_on_the_production_path(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drafts one token only, which the request has banned; answers are right all the same."""
    banned = int(parts.draft_ids[0])
    honest = build_rig(parts).answer([3, 14, 15], max_tokens=100, logit_bias={banned: -100.0})
    rig = build_rig(parts)
    base_logits = parts.network.base_logits

    def one_sided(hidden: Tensor) -> Tensor:
        logits = base_logits(hidden)
        logits[..., 0] += 1e4
        return logits

    monkeypatch.setattr(parts.network, "base_logits", one_sided)
    monkeypatch.setattr(rig.wire.worker, "_copy", False)
    reader = rig.answer([3, 14, 15], max_tokens=100, logit_bias={banned: -100.0})
    assert reader.ids == honest.ids
    assert reader.last.stats.accepted == 0
    assert reader.last.stats.rounds > PROPOSALS
    assert value(rig.engine.metrics) == 1
