"""The clock and counters of one engine request.

Purpose: turn the deltas of a request into the latency and token series of `Metrics`.
Invariants: a request that the engine took in is counted once in `request_success_total`, one that it
refused as busy never; tokens are counted when they arrive.
Called by: `generation.py`.
Never: sees text.
"""

from __future__ import annotations

import time

from dspark_spark.api import FINISH_ABORT, FINISH_ERROR, Delta, EngineBusyError
from dspark_spark.metrics import Metrics


class RequestMeter:
    """Starts its clock when made. `end` counts an abort unless a finish reason or a failure came before."""

    def __init__(self, metrics: Metrics, prompt_count: int) -> None:
        self._metrics = metrics
        self._prompt_count = prompt_count
        self._started = self._latest = time.monotonic()
        self._has_tokens = False
        self._reason: str | None = FINISH_ABORT

    def add(self, delta: Delta) -> None:
        """Count one delta. A delta without tokens (text that was held back) is no event of its own."""
        self._reason = delta.finish_reason or self._reason
        if not delta.token_ids:
            return
        if not self._has_tokens:
            self._metrics.record_prompt(self._prompt_count)
        now = time.monotonic()
        self._metrics.record_delta(len(delta.token_ids), now - self._latest, is_first=not self._has_tokens)
        self._has_tokens = True
        self._latest = now

    def fail(self, error: Exception) -> None:
        """The engine raised."""
        self._reason = None if isinstance(error, EngineBusyError) else FINISH_ERROR

    def end(self) -> None:
        """No more deltas."""
        if self._reason is not None:
            self._metrics.record_finish(self._reason, time.monotonic() - self._started)
