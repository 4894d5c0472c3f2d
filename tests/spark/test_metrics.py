"""The metrics registry: names, zeros from the start, and what a round adds."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dspark_spark.async_engine import EngineBridge
from dspark_spark.draft_pool import DraftPool
from dspark_spark.leases import WorkerState, WorkerStatus
from dspark_spark.metrics import CONTENT_TYPE, Metrics, RoundRecord
from dspark_spark.tally import LinkReporter


def samples(metrics: Metrics) -> dict[str, float]:
    """Series name with labels -> value, as Prometheus would parse it."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


ZERO_FROM_THE_START = [
    "dspark:num_requests_running",
    "dspark:num_requests_waiting",
    "dspark:prompt_tokens_total",
    "dspark:generation_tokens_total",
    "dspark:request_success_total{finished_reason=stop}",
    "dspark:request_success_total{finished_reason=length}",
    "dspark:request_success_total{finished_reason=abort}",
    "dspark:request_success_total{finished_reason=error}",
    "dspark:time_to_first_token_seconds_count",
    "dspark:inter_token_latency_seconds_count",
    "dspark:e2e_request_latency_seconds_count",
    "dspark:spec_decode_num_drafts_total",
    "dspark:draft_audits_total{result=passed}",
    "dspark:draft_audits_total{result=failed}",
    "dspark:spec_decode_num_draft_tokens_total",
    "dspark:spec_decode_num_verified_tokens_total",
    "dspark:spec_decode_num_accepted_tokens_total",
    "dspark:spec_decode_num_accepted_tokens_per_pos_total{position=0}",
    "dspark:spec_decode_num_accepted_tokens_per_pos_total{position=1}",
    "dspark:spec_decode_num_accepted_tokens_per_pos_total{position=2}",
    "dspark:residual_identity_failures_total",
    "dspark:worker_up",
    "dspark:pool_workers{state=connecting}",
    "dspark:pool_workers{state=up}",
    "dspark:pool_workers{state=late}",
    "dspark:pool_workers{state=draining}",
    "dspark:pool_workers{state=quarantined}",
    "dspark:lease_takeovers_total{cause=worker_down}",
    "dspark:lease_takeovers_total{cause=draining}",
    "dspark:lease_takeovers_total{cause=quarantined}",
    "dspark:lease_takeovers_total{cause=late}",
    "dspark:lease_takeovers_total{cause=refused}",
    "dspark:request_respeculate_seconds_count",
    "dspark:alarm{name=zero_acceptance}",
    "dspark:worker_reconnects_total",
    "dspark:generation_bumps_total",
]


@pytest.mark.parametrize("series", ZERO_FROM_THE_START)
def test_series_exist_with_zero_before_anything_happened(series: str) -> None:
    assert samples(Metrics(num_speculative_tokens=3))[series] == 0


def test_without_speculation_there_are_no_positions() -> None:
    assert not [name for name in samples(Metrics(0)) if "per_pos_total" in name]


def test_round_adds_up() -> None:
    metrics = Metrics(2)
    record = RoundRecord(
        drafts=3,
        drafted_tokens=6,
        verified_tokens=4,
        accepted_per_position=(2, 1),
        discards={"late": 1},
        target_only={"late": 1, "no_worker": 2},
        residual_identity_failures=1,
        stage_seconds={"verify": 0.02, "sample": 0.001},
    )
    metrics.record_round(record)
    metrics.record_round(record)
    seen = samples(metrics)
    assert seen["dspark:spec_decode_num_drafts_total"] == 6
    assert seen["dspark:spec_decode_num_draft_tokens_total"] == 12
    assert seen["dspark:spec_decode_num_verified_tokens_total"] == 8
    assert seen["dspark:spec_decode_num_accepted_tokens_total"] == 6
    assert seen["dspark:spec_decode_num_accepted_tokens_per_pos_total{position=0}"] == 4
    assert seen["dspark:spec_decode_num_accepted_tokens_per_pos_total{position=1}"] == 2
    assert seen["dspark:proposal_discards_total{reason=late}"] == 2
    assert seen["dspark:target_only_steps_total{reason=no_worker}"] == 4
    assert seen["dspark:residual_identity_failures_total"] == 2
    assert seen["dspark:round_stage_seconds_count{stage=verify}"] == 2
    assert seen["dspark:round_stage_seconds_sum{stage=verify}"] == pytest.approx(0.04)


def test_link_and_load() -> None:
    metrics = Metrics(1)
    metrics.set_load(running=3, waiting=2)
    metrics.set_worker_up(True)
    metrics.record_worker_reconnect()
    metrics.record_generation_bump(4)
    metrics.record_wire_drop("stale")
    metrics.record_wire_drop("corrupt", 2)
    seen = samples(metrics)
    assert (seen["dspark:num_requests_running"], seen["dspark:num_requests_waiting"]) == (3, 2)
    assert seen["dspark:worker_up"] == 1
    assert seen["dspark:worker_reconnects_total"] == 1
    assert seen["dspark:generation_bumps_total"] == 4
    assert seen["dspark:wire_drops_total{cause=stale}"] == 1
    assert seen["dspark:wire_drops_total{cause=corrupt}"] == 2
    metrics.set_worker_up(False)
    assert samples(metrics)["dspark:worker_up"] == 0


def test_the_pool_is_shown_as_it_is_now() -> None:
    metrics = Metrics(1)
    a, b = WorkerStatus("tcp://a:1", "up", 3, None), WorkerStatus("tcp://b:2", "late", 1, "slow")
    metrics.set_pool([a, b, WorkerStatus("tcp://a:1", "draining", 2, None)])
    seen = samples(metrics)
    states = {state: seen[f"dspark:pool_workers{{state={state}}}"] for state in get_args(WorkerState)}
    assert states == {"connecting": 0, "up": 1, "late": 1, "draining": 1, "quarantined": 0}
    assert seen["dspark:pool_leases{worker=tcp://a:1}"] == 5  # one leaves, its successor listens at the same address
    assert seen["dspark:pool_leases{worker=tcp://b:2}"] == 1
    metrics.set_pool([b])
    seen = samples(metrics)
    assert "dspark:pool_leases{worker=tcp://a:1}" not in seen
    assert seen["dspark:pool_workers{state=up}"] == 0


def test_takeovers_and_recoveries_are_published_once() -> None:
    metrics, pool = Metrics(1), DraftPool([])
    reporter = LinkReporter(metrics)
    pool.takeovers["late"] += 2
    pool.respeculations += [0.5, 1.5]
    reporter.publish(pool)
    reporter.publish(pool)
    seen = samples(metrics)
    assert seen["dspark:lease_takeovers_total{cause=late}"] == 2
    assert seen["dspark:request_respeculate_seconds_count"] == 2
    assert seen["dspark:request_respeculate_seconds_sum"] == 2.0


def test_version_names_every_worker() -> None:
    engine = SimpleNamespace(link=DraftPool([]), settings=SimpleNamespace(max_context=8), alive=True)
    engine.link.workers = (WorkerStatus("tcp://a:1", "up", 3, None), WorkerStatus("tcp://b:2", "late", 1, "slow"))
    engine.link.trouble = "--workers-file x: line 2"
    facts = EngineBridge(engine, "target", {"dtype": "fp32"}).describe()  # type: ignore[arg-type]
    assert facts == {
        "dtype": "fp32",
        "worker": "down",
        "worker_reconnects": 0,
        "worker_error": "--workers-file x: line 2",
        "workers": [
            {"address": "tcp://a:1", "state": "up", "leases": 3, "last_error": None},
            {"address": "tcp://b:2", "state": "late", "leases": 1, "last_error": "slow"},
        ],
    }
    engine.link = None
    assert EngineBridge(engine, "target", {}).describe() == {"worker": "none"}  # type: ignore[arg-type]


def test_request_series() -> None:
    metrics = Metrics(1)
    metrics.record_prompt(7)
    metrics.record_delta(3, 0.2, is_first=True)
    metrics.record_delta(2, 0.05, is_first=False)
    metrics.record_finish("length", 0.25)
    seen = samples(metrics)
    assert seen["dspark:prompt_tokens_total"] == 7
    assert seen["dspark:generation_tokens_total"] == 5
    assert seen["dspark:time_to_first_token_seconds_sum"] == pytest.approx(0.2)
    assert seen["dspark:inter_token_latency_seconds_sum"] == pytest.approx(0.05)
    assert seen["dspark:request_success_total{finished_reason=length}"] == 1
    assert seen["dspark:e2e_request_latency_seconds_count"] == 1


def test_two_registries_in_one_process_do_not_mix() -> None:
    first, second = Metrics(1), Metrics(1)
    first.record_prompt(5)
    assert samples(second)["dspark:prompt_tokens_total"] == 0


def test_threads_lose_no_round() -> None:
    metrics = Metrics(1)
    record = RoundRecord(drafts=1, drafted_tokens=1, verified_tokens=1, accepted_per_position=(1,))

    def many() -> None:
        for _ in range(500):
            metrics.record_round(record)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert samples(metrics)["dspark:spec_decode_num_accepted_tokens_total"] == 2000


def test_content_type_is_the_text_format() -> None:
    assert CONTENT_TYPE.startswith("text/plain")
