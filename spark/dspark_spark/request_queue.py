"""The way into the engine: requests and cancellations from any thread, in order, bounded, refused once it is closed.

One queue carries both, so that a cancellation is never seen before the request that it names. Called by `engine`; knows
nothing of slots or tokens.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeAlias

from dspark_spark.api import Delta, EngineBusyError, GenerateRequest

Sink: TypeAlias = Callable[[Delta], None]
Entry: TypeAlias = tuple[GenerateRequest, Sink]


class RequestQueue:
    """`limit` bounds the requests that were submitted and have not ended, wherever they are."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: queue.SimpleQueue[Entry | str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending = 0
        self._closed = False

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Put a request in. Raises EngineBusyError when it is full or closed."""
        with self._lock:
            if self._closed:
                raise EngineBusyError("the engine has stopped")
            if self._pending >= self._limit:
                raise EngineBusyError(f"{self._pending} requests are running or waiting")
            self._pending += 1
            self._items.put((request, sink))

    def cancel(self, request_id: str) -> None:
        """Ask for the end of a request; ignored once the queue is closed."""
        with self._lock:
            if not self._closed:
                self._items.put(request_id)

    def receive(self, wait_s: float) -> list[Entry | str]:
        """Everything that has come in (a request, or the id of one to cancel), waiting up to `wait_s` for the first."""
        items: list[Entry | str] = []
        try:
            items.append(self._items.get(timeout=wait_s) if wait_s else self._items.get_nowait())
            while True:
                items.append(self._items.get_nowait())
        except queue.Empty:
            return items

    def ended(self) -> None:
        """One request has got its last delta."""
        with self._lock:
            self._pending -= 1

    def close(self) -> None:
        """Refuse whatever comes from now on."""
        with self._lock:
            self._closed = True

    def __len__(self) -> int:
        return self._items.qsize()
