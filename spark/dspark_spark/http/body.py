"""From the bytes of a request to a validated model.

Purpose: the steps between the socket and a route, in order: size, content type, JSON, refusals, types and
ranges.
Invariants: the first step that fails answers; nothing is tokenised or generated before all of them passed;
the body is never held beyond `max_body_bytes`.
Called by: `completions.py`, `service.py`.
Never: repairs a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from dspark_spark.http.errors import ApiError, bad_request, clip, unsupported_parameter
from dspark_spark.http.refusals import Neutral, without_refusals

IGNORED_HEADER = "x-dspark-ignored-params"

_MAX_IGNORED_NAMES = 20

Model = TypeVar("Model", bound=BaseModel)


async def read_model(
    request: Request, model: type[Model], max_bytes: int, refusals: Mapping[str, Neutral] | None = None
) -> Model:
    """The request's body as `model`. Raises ApiError 400, 413 or 415."""
    _require_json(request)
    raw = _decode(await _read(request, max_bytes))
    fields = without_refusals(raw, refusals or {})
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _first_problem(error) from None


def ignored_headers(model: BaseModel) -> dict[str, str]:
    """The response header that names the unknown fields of the request; empty if there are none.

    Header values are ASCII: other characters and commas of a name are replaced by "?".
    """
    names = list(_unknown_names(model, ""))[:_MAX_IGNORED_NAMES]
    return {IGNORED_HEADER: ", ".join(_header_safe(name) for name in names)} if names else {}


def _unknown_names(model: BaseModel, prefix: str) -> list[str]:
    names = [prefix + name for name in model.model_extra or {}]
    for name in type(model).model_fields:
        value = getattr(model, name)
        items = value if isinstance(value, list) else [value]
        for index, item in enumerate(items):
            if isinstance(item, BaseModel):
                path = f"{name}[{index}]" if isinstance(value, list) else name
                names += _unknown_names(item, f"{prefix}{path}.")
    return names


def _header_safe(name: str) -> str:
    return "".join(char if "!" <= char <= "~" and char != "," else "?" for char in clip(name))


def _require_json(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        seen = clip(media_type) or "none"
        raise ApiError(415, f"content type {seen}: send application/json", code="unsupported_media_type")


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413, f"the request body is larger than {max_bytes} bytes; send less", code="body_too_large"
    )


def _decode(body: bytes) -> dict[str, object]:
    """Strict JSON: no NaN, no lone surrogate (which no tokenizer could take)."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {clip(str(error))}", None, "invalid_json") from None
    if not isinstance(raw, dict):
        raise bad_request("the body must be a JSON object", None, "invalid_json")
    return raw


def _first_problem(error: ValidationError) -> ApiError:
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = param_path(problem["loc"])
    if param == "stream_options.continuous_usage_stats":
        return unsupported_parameter(param)
    return bad_request(
        f"{param}: {problem['msg']}", param, "missing_parameter" if problem["type"] == "missing" else None
    )


def param_path(location: Sequence[str | int]) -> str:
    """("messages", 0, "role") -> "messages[0].role"."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return path.removeprefix(".")
