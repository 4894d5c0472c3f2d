"""Counters, gauges and histograms of the serving side, under the field's names with our prefix `dspark:`.

Purpose: one object that the engine thread and the endpoint write to and that `/metrics` renders.
Invariants: drafted = verified + discarded + cut by early stop, accepted <= verified, as long as each
`RoundRecord` says so; the series of every draft position exists from the start with value 0, so that a drafter
that does nothing is visible as zeros; an alarm is raised while no draft is accepted at all.
Called by: the engine thread (`record_round` once per round, `set_load`, worker and wire events), the endpoint
(`record_prompt`, `record_delta`, `record_finish`, `render`). Thread-safe.
Never: uses prometheus-client's global registry; a process may hold several `Metrics`.
Source of the names: vLLM's `vllm:*` series; see docs/reference/http.md for the list.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from dspark_spark.alarm import ZeroAcceptanceAlarm
from dspark_spark.api import FINISH_ABORT, FINISH_ERROR, FINISH_LENGTH, FINISH_STOP
from dspark_spark.leases import WorkerState, WorkerStatus

# A `_created` series beside every counter would double the page and tell when the process started.
disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = CONTENT_TYPE_LATEST

_PREFIX = "dspark:"
_REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_RECOVERY_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_STAGE_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What one batched round did, summed over its requests.

    drafts: proposals that were verified or discarded. drafted_tokens: tokens in them. verified_tokens:
    drafted tokens that the target judged. accepted_per_position[i]: requests whose draft token at position
    i was accepted. discards: cause -> proposals thrown away whole. target_only: cause -> requests that took
    one token without a proposal. residual_identity_failures: corrections refused because sum(a-Kc)+ !=
    sum(Kc-a)+. stage_seconds: stage -> wall time in seconds (for example draft_wait, validate, verify,
    sample, commit).
    """

    drafts: int = 0
    drafted_tokens: int = 0
    verified_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    discards: Mapping[str, int] = field(default_factory=dict)
    target_only: Mapping[str, int] = field(default_factory=dict)
    residual_identity_failures: int = 0
    stage_seconds: Mapping[str, float] = field(default_factory=dict)


class Metrics:
    """All series of one process, in a registry of their own."""

    def __init__(self, num_speculative_tokens: int) -> None:
        """`num_speculative_tokens` is k: the number of per-position series; 0 makes none."""
        self._registry = CollectorRegistry()
        self._zero_acceptance = ZeroAcceptanceAlarm()
        self._addresses: set[str] = set()
        self._make_request_series()
        self._make_speculation_series(num_speculative_tokens)
        self._make_link_series()

    # The engine thread's side.

    def record_round(self, record: RoundRecord) -> None:
        """Add one round. Positions beyond k get a series of their own when they first occur."""
        self._drafts.inc(record.drafts)
        self._drafted_tokens.inc(record.drafted_tokens)
        self._verified_tokens.inc(record.verified_tokens)
        self._accepted_tokens.inc(sum(record.accepted_per_position))
        for position, count in enumerate(record.accepted_per_position):
            self._accepted_per_position.labels(str(position)).inc(count)
        for reason, count in record.discards.items():
            self._discards.labels(reason).inc(count)
        for reason, count in record.target_only.items():
            self._target_only_steps.labels(reason).inc(count)
        self._residual_identity_failures.inc(record.residual_identity_failures)
        for stage, seconds in record.stage_seconds.items():
            self._round_stage.labels(stage).observe(seconds)
        verified = record.drafts - sum(record.discards.values()) if record.verified_tokens else 0
        if verified:
            raised = self._zero_acceptance.judged(verified, sum(record.accepted_per_position))
            self._alarm.labels(ZeroAcceptanceAlarm.NAME).set(int(raised))

    def set_load(self, running: int, waiting: int) -> None:
        """Requests in the decode batch, and requests that wait for a slot."""
        self._running.set(running)
        self._waiting.set(waiting)

    def set_worker_up(self, is_up: bool) -> None:
        """Whether the drafter worker answers; False from the start until this is called."""
        self._worker_up.set(int(is_up))

    def set_pool(self, workers: Sequence[WorkerStatus]) -> None:
        """The workers of the pool; a worker that is no longer one of them loses its series."""
        states = Tally(worker.state for worker in workers)
        for state in get_args(WorkerState):
            self._pool_workers.labels(state).set(states[state])
        leases: Tally[str] = Tally()
        for worker in workers:
            leases[worker.address] += worker.leases
        for gone in self._addresses - set(leases):
            self._pool_leases.remove(gone)
        for address, count in leases.items():
            self._pool_leases.labels(address).set(count)
        self._addresses = set(leases)

    def record_takeover(self, cause: str, count: int = 1) -> None:
        """Leases that went from one worker to another."""
        self._takeovers.labels(cause).inc(count)

    def record_respeculation(self, seconds: float) -> None:
        """A request whose worker was lost has its next proposal, so long after."""
        self._respeculate.observe(seconds)

    def record_audits(self, passed: int, failed: int) -> None:
        """Drafted tokens whose draw was repeated from their row and key."""
        self._audits_passed.inc(passed)
        self._audits_failed.inc(failed)

    def record_worker_reconnect(self) -> None:
        """The link to the worker was lost and is back."""
        self._worker_reconnects.inc()

    def record_generation_bump(self, count: int = 1) -> None:
        """Slots whose generation went up, which makes every reply still under way stale."""
        self._generation_bumps.inc(count)

    def record_wire_drop(self, cause: str, count: int = 1) -> None:
        """Messages that were dropped on arrival, by cause (for example stale, duplicate, corrupt)."""
        self._wire_drops.labels(cause).inc(count)

    # The endpoint's side.

    def record_prompt(self, token_count: int) -> None:
        """A prompt was handed to the engine."""
        self._prompt_tokens.inc(token_count)

    def record_delta(self, token_count: int, seconds: float, is_first: bool) -> None:
        """Tokens arrived `seconds` after the request (first delta) or after the delta before."""
        self._generation_tokens.inc(token_count)
        latency = self._time_to_first_token if is_first else self._inter_token_latency
        latency.observe(seconds)

    def record_finish(self, finished_reason: str, seconds: float) -> None:
        """A request ended `seconds` after it was handed to the engine; one of the FINISH_* reasons."""
        self._finished.labels(finished_reason).inc()
        self._e2e_latency.observe(seconds)

    def render(self) -> bytes:
        """The Prometheus text format; its content type is `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    # Construction.

    def _make_request_series(self) -> None:
        self._running = self._gauge("num_requests_running", "Requests in the decode batch")
        self._waiting = self._gauge("num_requests_waiting", "Requests waiting for a slot")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens handed to the engine")
        self._generation_tokens = self._counter("generation_tokens", "Tokens delivered")
        self._finished = self._counter("request_success", "Requests that ended, by reason", "finished_reason")
        for reason in (FINISH_STOP, FINISH_LENGTH, FINISH_ABORT, FINISH_ERROR):
            self._finished.labels(reason)
        self._time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Request to first tokens", _REQUEST_SECONDS
        )
        self._inter_token_latency = self._histogram(
            "inter_token_latency_seconds",
            "Between two deltas; a delta may hold several tokens",
            _TOKEN_SECONDS,
        )
        self._e2e_latency = self._histogram("e2e_request_latency_seconds", "Request to end", _REQUEST_SECONDS)

    def _make_speculation_series(self, num_speculative_tokens: int) -> None:
        self._drafts = self._counter("spec_decode_num_drafts", "Proposals")
        self._drafted_tokens = self._counter("spec_decode_num_draft_tokens", "Tokens in proposals")
        self._verified_tokens = self._counter(
            "spec_decode_num_verified_tokens", "Draft tokens that were judged"
        )
        self._accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted")
        self._accepted_per_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position", "position"
        )
        for position in range(num_speculative_tokens):
            self._accepted_per_position.labels(str(position))
        self._discards = self._counter("proposal_discards", "Proposals thrown away whole, by cause", "reason")
        self._target_only_steps = self._counter(
            "target_only_steps", "Steps without a proposal, by cause", "reason"
        )
        self._residual_identity_failures = self._counter(
            "residual_identity_failures", "Corrections whose residual identity did not hold"
        )
        audits = self._counter("draft_audits", "Drafted tokens whose draw was repeated, by result", "result")
        self._audits_passed, self._audits_failed = audits.labels("passed"), audits.labels("failed")
        self._round_stage = self._histogram(
            "round_stage_seconds", "Stages of a round", _STAGE_SECONDS, "stage"
        )

    def _make_link_series(self) -> None:
        self._worker_up = self._gauge("worker_up", "1 while the drafter worker answers")
        self._worker_reconnects = self._counter("worker_reconnects", "Links to the worker that came back")
        self._pool_workers = self._gauge("pool_workers", "Workers of the pool, by state", "state")
        for state in get_args(WorkerState):
            self._pool_workers.labels(state)
        self._pool_leases = self._gauge("pool_leases", "Requests that a worker drafts for", "worker")
        self._takeovers = self._counter("lease_takeovers", "Leases that went to another worker, by cause", "cause")
        for cause in ("worker_down", "draining", "quarantined", "late", "refused"):
            self._takeovers.labels(cause)
        self._respeculate = self._histogram(
            "request_respeculate_seconds", "Loss of a request's worker to its next proposal", _RECOVERY_SECONDS
        )
        self._alarm = self._gauge("alarm", "1 while something is wrong that no request shows", "name")
        self._alarm.labels(ZeroAcceptanceAlarm.NAME)
        self._generation_bumps = self._counter("generation_bumps", "Slot generations that went up")
        self._wire_drops = self._counter("wire_drops", "Messages dropped on arrival, by cause", "cause")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(_PREFIX + name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(_PREFIX + name, text, labels, buckets=buckets, registry=self._registry)
