"""Errors in the shape that OpenAI's clients parse: {"error": {"message", "type", "param", "code"}}.

Purpose: `ApiError`, the few ways to make one, and the handlers that turn any exception into that shape.
Invariants: all four keys are always there; what a client sent is echoed at most `MAX_ECHO` characters long;
a message never carries a path, an address or a traceback.
Called by: every route of `dspark_spark.http`.
Never: decides whether something is an error.
"""

from __future__ import annotations

import logging

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

logger = logging.getLogger(__name__)

MAX_ECHO = 200

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


class ErrorFields(msgspec.Struct, kw_only=True):
    """The inner object of an error answer."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """An error answer, or an error object inside a stream."""

    error: ErrorFields


class ApiError(Exception):
    """An error that the client is told about."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.body = ErrorBody(ErrorFields(message=message, type=type, param=param, code=code))

    def response(self) -> Response:
        """The whole HTTP answer."""
        return json_response(self.body, self.status, self.headers)


class ClientGoneError(Exception):
    """The client closed the connection; nobody reads the answer."""


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer from a msgspec struct or plain values."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def clip(text: str) -> str:
    """At most `MAX_ECHO` characters of what a client sent."""
    return text if len(text) <= MAX_ECHO else text[:MAX_ECHO] + "..."


def bad_request(message: str, param: str | None, code: str | None = None) -> ApiError:
    """400: the value of `param` cannot be used."""
    return ApiError(400, message, param=param, code=code)


def unsupported_parameter(param: str, remedy: str = "remove it or send its neutral value") -> ApiError:
    """400: a feature that other servers have and this one does not honour."""
    return bad_request(
        f"{clip(param)} is not supported by this server; {remedy}", clip(param), "unsupported_parameter"
    )


def unavailable(message: str, code: str, retry_after_s: int) -> ApiError:
    """503 with Retry-After: the same request may succeed later."""
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(503, message, type="service_unavailable_error", code=code, headers=headers)


def engine_error(message: str | None) -> ApiError:
    """500: the engine failed on this request."""
    text = clip(message) if message else "the engine failed on this request; see the server's log"
    return ApiError(500, text, type="server_error", code="engine_error")


async def answer_api_error(request: Request, error: Exception) -> Response:
    """Exception handler for `ApiError`."""
    assert isinstance(error, ApiError)
    return error.response()


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Exception handler for Starlette's own errors: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {clip(request.url.path)}: {error.detail}"
    code = _HTTP_CODES.get(error.status_code)
    return ApiError(error.status_code, message, code=code, headers=dict(error.headers or {})).response()


async def answer_client_gone(request: Request, error: Exception) -> Response:
    """Exception handler for `ClientGoneError`; 499 is for the log, no client reads it."""
    return Response(status_code=499)


async def answer_any(request: Request, error: Exception) -> Response:
    """Exception handler of last resort; Starlette raises the error again afterwards, so the log has the
    traceback."""
    return ApiError(
        500, "internal error; see the server's log", type="server_error", code="internal_error"
    ).response()
