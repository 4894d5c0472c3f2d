"""What every request passes through: its id, its log line, its last-resort error, and the API key.

Purpose: two plain ASGI middlewares; Starlette's BaseHTTPMiddleware would put a queue between a stream and
its client.
Invariants: every HTTP answer has an `x-request-id`; a client's own id is echoed only when it is short and
plain ASCII; keys are compared in constant time, as digests.
Called by: Starlette, as arranged in `app.py`.
Never: logs a key, a prompt or an answer.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark_spark.http.errors import ApiError, answer_any

logger = logging.getLogger("dspark_spark.http.access")

REQUEST_ID_HEADER = "x-request-id"
OPEN_PATHS = frozenset({"/health", "/ready"})
"""Load balancers ask these without a key."""

_PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestEnvelope:
    """Gives each request an id, logs how it ended, and answers for errors that nothing else caught."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get(REQUEST_ID_HEADER))
        started = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            logger.exception("request %s failed", request_id)
            if status == 0:
                await (await answer_any(Request(scope), error))(scope, receive, send_with_id)
        seconds = time.monotonic() - started
        logger.info("%s %s %d %.3f s %s", scope["method"], scope["path"], status, seconds, request_id)


def _request_id(given: str | None) -> str:
    if given is not None and _PLAIN_ID.fullmatch(given):
        return given
    return f"req-{uuid.uuid4().hex}"


class ApiKeyGuard:
    """401 for every path but `OPEN_PATHS` unless the request brings one of the keys as a bearer token."""

    def __init__(self, app: ASGIApp, digests: tuple[bytes, ...]) -> None:
        self._app = app
        self._digests = digests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and scope["path"] not in OPEN_PATHS
            and not self._knows(Headers(scope=scope))
        ):
            await _unauthorized().response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip())
        # Every key is compared, so that the time does not tell which one came close.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def read_key_digests(path: Path) -> tuple[bytes, ...]:
    """Digests of the keys in the file, one a line; empty lines and lines that begin with # do not count.

    Raises ValueError when the file has no key: an endpoint that was meant to be guarded must not start open.
    """
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    digests = tuple(_digest(line) for line in lines if line and not line.startswith("#"))
    if not digests:
        raise ValueError(f"api_key_file: {path} has no key; write one a line, or leave the setting out")
    return digests


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8")).digest()


def _unauthorized() -> ApiError:
    return ApiError(
        401,
        "no valid API key; send it as 'Authorization: Bearer <key>'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
