"""The JSON objects of answers and stream chunks, as msgspec structs.

Purpose: the exact field names and order of OpenAI's objects, with vLLM's `stop_reason` and ours
(`speculation`, `dspark`).
Invariants: a field that is UNSET is left out; `finish_reason` is null until the end and never "".
Called by: `reply.py`, `usage.py`.
Never: computes anything.
Source: OpenAI's openapi.yaml, `CreateChatCompletionResponse` and its stream variant.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class PromptDetails(msgspec.Struct, kw_only=True):
    """There is no prefix cache yet, so `cached_tokens` is 0."""

    cached_tokens: int = 0
    audio_tokens: int = 0


class CompletionDetails(msgspec.Struct, kw_only=True):
    """The two prediction fields mean OpenAI's Predicted Outputs, not speculative decoding; they stay 0."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    audio_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """total = prompt + completion; completion counts committed tokens, never drafted ones."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Speculation(msgspec.Struct, kw_only=True):
    """What speculation did for this request; drafted = verified + discarded."""

    lane: str
    rounds: int
    drafted: int
    verified: int
    accepted: int
    target_only_steps: int
    mean_tokens_per_step: float


class Origins(msgspec.Struct, kw_only=True):
    """Committed tokens; from_draft[i] is true where token_ids[i] came from the drafter."""

    token_ids: list[int]
    from_draft: list[bool]


class ChatDelta(msgspec.Struct, kw_only=True):
    """The new part of a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatMessage(msgspec.Struct, kw_only=True):
    """A whole message."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChoiceFields(msgspec.Struct, kw_only=True):
    """What every kind of choice has."""

    index: int
    logprobs: None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    dspark: Origins | UnsetType = UNSET


class ChatChunkChoice(ChoiceFields, kw_only=True):
    """A choice in a chat chunk."""

    delta: ChatDelta


class ChatChoice(ChoiceFields, kw_only=True):
    """A choice in a whole chat answer."""

    message: ChatMessage


class TextChoice(ChoiceFields, kw_only=True):
    """A choice of /v1/completions, in a chunk as in a whole answer."""

    text: str


Choice = ChatChunkChoice | ChatChoice | TextChoice


class Answer(msgspec.Struct, kw_only=True):
    """A chunk or a whole answer of either route; `usage` is null in chunks before the usage chunk, if that
    was asked."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET
    speculation: Speculation | UnsetType = UNSET
