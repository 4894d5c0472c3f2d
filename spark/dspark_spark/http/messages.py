"""Chat messages as the template wants them: one role and one string each.

Purpose: check roles, join text parts, and refuse what a text model without tools cannot take.
Invariants: each message that comes out has `role` and `content`, both strings.
Called by: `prompts.py`.
Never: drops a part of a message.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark_spark.http.errors import ApiError, bad_request, clip, unsupported_parameter
from dspark_spark.http.schema import Message

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""`developer` is OpenAI's newer name for `system`; chat templates know only the older one."""

_REFUSED_FIELDS = ("tool_calls", "tool_call_id", "function_call", "audio")


def plain_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages with `role` and `content` as strings. Raises ApiError 400 with the path of the offending
    field."""
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain(message: Message, path: str) -> dict[str, str]:
    if message.role in ("tool", "function"):
        raise unsupported_parameter(
            f"{path}.role", "tools are not supported: use system, user and assistant messages"
        )
    if message.role not in _ROLES:
        raise bad_request(f"{path}.role: {clip(message.role)!r} is not a role", f"{path}.role")
    for name in _REFUSED_FIELDS:
        if (message.model_extra or {}).get(name):
            raise unsupported_parameter(f"{path}.{name}")
    return {"role": _ROLES[message.role], "content": _text(message.content, f"{path}.content")}


def _text(content: object, path: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        return "\n".join(_part_text(part, f"{path}[{index}]") for index, part in enumerate(content))
    raise _wrong_content(path)


def _part_text(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise _wrong_content(path)
    if part.get("type") not in ("text", "refusal"):
        raise unsupported_parameter(f"{path}.type", "only text parts are supported")
    text = part.get(part["type"])
    if not isinstance(text, str):
        raise _wrong_content(f"{path}.{part['type']}")
    return text


def _wrong_content(path: str) -> ApiError:
    return bad_request(f"{path}: give a string or a list of text parts", path)
