"""The engine as the endpoint sees it: an async iterator over a thread's deltas."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import asdict

from dspark_spark.api import Delta, GenerateRequest
from dspark_spark.engine import Engine


class EngineBridge:
    """Implements `api.AsyncEngine` over an `Engine` in its own thread."""

    def __init__(self, engine: Engine, model_name: str, facts: dict[str, object]) -> None:
        self.model_name = model_name
        self.max_context = engine.settings.max_context
        self._engine = engine
        self._facts = facts

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """See `api.AsyncEngine.generate`. Leaving the iterator early cancels the request."""
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[Delta] = asyncio.Queue()

        def sink(delta: Delta) -> None:
            # After the loop has closed nobody reads any more; the engine thread must not die of that.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(deltas.put_nowait, delta)

        self._engine.submit(request, sink)
        finished = False
        try:
            while not finished:
                delta = await deltas.get()
                finished = delta.finish_reason is not None
                yield delta
        finally:
            if not finished:
                self._engine.cancel(request.request_id)

    def is_ready(self) -> bool:
        return self._engine.alive

    def is_alive(self) -> bool:
        return self._engine.alive

    def describe(self) -> dict[str, object]:
        link = self._engine.link
        state: dict[str, object] = {"worker": "none"}
        if link is not None:
            state = {"worker": "up" if link.up else "down", "worker_reconnects": link.reconnects}
            if link.last_error:
                state["worker_error"] = link.last_error
            state["workers"] = [asdict(worker) for worker in link.workers]
        return {**self._facts, **state}
