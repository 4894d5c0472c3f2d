"""One engine request under the endpoint, without HTTP: it is closed and counted whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dspark_spark.api import Delta, GenerateRequest, SamplingParams
from dspark_spark.http.generation import metered_deltas
from dspark_spark.metrics import Metrics

REQUEST = GenerateRequest("r", (1, 2, 3), SamplingParams())


class OneGenerationEngine:
    """Keeps hold of its only generation, so that nothing but the endpoint can close it."""

    def __init__(self, deltas: list[Delta]) -> None:
        self.generation = self._play(deltas)
        self.is_closed = False

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        return self.generation

    async def _play(self, deltas: list[Delta]) -> AsyncIterator[Delta]:
        try:
            for delta in deltas:
                yield delta
        finally:
            self.is_closed = True


def drain(engine: Any, metrics: Metrics) -> list[Delta]:
    async def collect() -> list[Delta]:
        return [delta async for delta in metered_deltas(engine, metrics, REQUEST)]

    return asyncio.run(collect())


def test_deltas_behind_the_finish_reason_are_not_read_and_the_engine_is_told() -> None:
    end = Delta(token_ids=(7,), finish_reason="stop")
    engine, metrics = OneGenerationEngine([end, Delta("late")]), Metrics(0)
    assert drain(engine, metrics) == [end]
    assert engine.is_closed
    assert b'request_success_total{finished_reason="stop"} 1.0' in metrics.render()


def test_end_without_a_finish_reason_is_an_error() -> None:
    engine, metrics = OneGenerationEngine([Delta("a", (1,))]), Metrics(0)
    with pytest.raises(RuntimeError, match="without a finish reason"):
        drain(engine, metrics)
    assert b'request_success_total{finished_reason="error"} 1.0' in metrics.render()


def test_delta_without_tokens_is_no_latency_event() -> None:
    deltas = [Delta("a", (1, 2)), Delta("held back"), Delta(finish_reason="stop")]
    metrics = Metrics(0)
    drain(OneGenerationEngine(deltas), metrics)
    rendered = metrics.render()
    assert b"dspark:time_to_first_token_seconds_count 1.0" in rendered
    assert b"dspark:inter_token_latency_seconds_count 0.0" in rendered
    assert b"dspark:generation_tokens_total 2.0" in rendered
