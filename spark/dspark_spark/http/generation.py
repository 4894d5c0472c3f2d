"""The choices of one HTTP request while the engine works on them.

Purpose: run one engine request per choice, merge their deltas in order of arrival, keep what usage needs.
Invariants: closing cancels every engine request that has not ended; each engine request is counted in the
metrics once, however it ends; an engine's failure comes out as an `ApiError` and never as an end of text.
Called by: `completions.py`, `stream.py`, on the event loop.
Never: changes text; the engine has already cut stops and held back what may become one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from dspark_spark.api import (
    FINISH_ABORT,
    FINISH_ERROR,
    AsyncEngine,
    Delta,
    EngineBusyError,
    GenerateRequest,
    SpeculationStats,
)
from dspark_spark.http.errors import ApiError, engine_error, unavailable
from dspark_spark.http.meter import RequestMeter
from dspark_spark.metrics import Metrics

logger = logging.getLogger(__name__)


class ChoiceState:
    """What one choice has received so far."""

    def __init__(self, index: int, prompt_count: int) -> None:
        self.index = index
        self.prompt_count = prompt_count
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.from_draft: list[bool] = []
        self.delta_count = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.stats = SpeculationStats()

    def add(self, delta: Delta) -> None:
        """Take the next delta."""
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.from_draft += delta.from_draft
        self.delta_count += 1
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason
            self.stats = delta.stats


Arrival = tuple[ChoiceState, Delta]


class Generation:
    """Engine requests under way. Needs a running event loop; `aclose` must be called."""

    def __init__(
        self, engine: AsyncEngine, metrics: Metrics, requests: Sequence[GenerateRequest], retry_after_s: int
    ) -> None:
        self.choices = [ChoiceState(index, len(request.prompt_ids)) for index, request in enumerate(requests)]
        self._retry_after_s = retry_after_s
        self._arrivals: asyncio.Queue[tuple[ChoiceState, Delta | Exception]] = asyncio.Queue()
        self._readers = [
            asyncio.create_task(self._read(choice, metered_deltas(engine, metrics, request)))
            for choice, request in zip(self.choices, requests, strict=True)
        ]

    @property
    def finished(self) -> bool:
        """Every choice has its finish reason."""
        return all(choice.finish_reason is not None for choice in self.choices)

    async def next(self, timeout_s: float | None = None) -> Arrival | None:
        """The next delta of any choice, or None after `timeout_s` seconds of silence. Raises ApiError."""
        try:
            async with asyncio.timeout(timeout_s):
                choice, item = await self._arrivals.get()
        except TimeoutError:
            return None
        if isinstance(item, Exception):
            raise self._as_api_error(item)
        if item.finish_reason == FINISH_ERROR:
            raise engine_error(item.error)
        if item.finish_reason == FINISH_ABORT:
            raise unavailable("the server ended this request", "request_aborted", self._retry_after_s)
        choice.add(item)
        return choice, item

    async def aclose(self) -> None:
        """Cancel what still runs and wait until the engine has been told."""
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _read(self, choice: ChoiceState, deltas: AsyncIterator[Delta]) -> None:
        try:
            async for delta in deltas:
                self._arrivals.put_nowait((choice, delta))
        except Exception as error:
            self._arrivals.put_nowait((choice, error))

    def _as_api_error(self, error: Exception) -> ApiError:
        if isinstance(error, EngineBusyError):
            return unavailable("the server is busy; try again later", "engine_busy", self._retry_after_s)
        logger.error("engine failed", exc_info=error)
        return engine_error(None)


async def metered_deltas(
    engine: AsyncEngine, metrics: Metrics, request: GenerateRequest
) -> AsyncIterator[Delta]:
    """The engine's deltas of one request up to its finish reason, counted and timed on their way.

    Raises what the engine raises, and RuntimeError when the engine stops without a finish reason.
    """
    meter = RequestMeter(metrics, len(request.prompt_ids))
    deltas = engine.generate(request)
    try:
        async for delta in deltas:
            meter.add(delta)
            yield delta
            if delta.finish_reason is not None:
                return
        raise RuntimeError("the engine's deltas ended without a finish reason")
    except Exception as error:
        meter.fail(error)
        raise
    finally:
        await _close(deltas)
        meter.end()


async def _close(deltas: AsyncIterator[Delta]) -> None:
    if isinstance(deltas, AsyncGenerator):
        await deltas.aclose()
