"""Server-sent events: the streamed form of an answer.

Purpose: frames of a generation, and the ASGI response that sends them.
Invariants: exactly one chunk with a finish reason per choice, then the usage chunk if asked for, then
`[DONE]`; a failure sends an error object and `[DONE]` instead of a finish reason; the generation is closed
whatever happens.
Called by: `completions.py`.
Never: buffers frames; each is sent when its delta arrives.
Source: OpenAI's openapi.yaml for the order of chunks; the WHATWG HTML standard, section 9.2, for the framing.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dspark_spark.http.disconnect import until_disconnect
from dspark_spark.http.errors import ApiError, ClientGoneError
from dspark_spark.http.generation import Arrival, Generation
from dspark_spark.http.reply import Reply

logger = logging.getLogger(__name__)

KEEPALIVE = b": keepalive\n\n"
DONE = b"data: [DONE]\n\n"

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(body: object) -> bytes:
    """One event. JSON has no raw newline, so one `data:` line is enough."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def frames(
    generation: Generation, reply: Reply, first: Arrival | None, keepalive_s: float
) -> AsyncIterator[bytes]:
    """Frames of the answer. `first` is what was received before the headers went out; None is silence so
    far."""
    try:
        yield _frame(reply, first)
        while not generation.finished:
            yield _frame(reply, await generation.next(keepalive_s))
    except ApiError as error:
        yield event(error.body)
    else:
        if reply.head.with_usage:
            yield event(reply.usage_chunk(generation.choices))
    yield DONE


def _frame(reply: Reply, arrival: Arrival | None) -> bytes:
    """A keepalive comment for silence, nothing for a delta that shows nothing."""
    if arrival is None:
        return KEEPALIVE
    chunk = reply.chunk(*arrival)
    return b"" if chunk is None else event(chunk)


class EventStream(Response):
    """Sends frames until they end or the client leaves; closes the generation in both cases."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], generation: Generation, headers: dict[str, str]) -> None:
        super().__init__(headers=_HEADERS | headers)
        del self.headers["content-length"]
        self._events = events
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except ClientGoneError:
            logger.info("client left a stream of %d choices", len(self._generation.choices))
        finally:
            await self._generation.aclose()

    async def _send_all(self, send: Send) -> None:
        # Headers go out before the first event, so that a client sees them while the prompt is being read.
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for frame in self._events:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
