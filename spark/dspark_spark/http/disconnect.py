"""Stop working when the client has gone.

Purpose: race a handler with ASGI's `http.disconnect`, which nothing else listens to while a handler runs.
Invariants: when `until_disconnect` returns or raises, the work has ended: finished or cancelled and awaited.
Called by: `completions.py` (whole answers), `stream.py` (streams).
Never: reads the request's body; it must have been read before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from dspark_spark.http.errors import ClientGoneError

Result = TypeVar("Result")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`. Raises ClientGoneError, with the work cancelled, when the client leaves first."""
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGoneError
        return worker.result()
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
