"""The request bodies, as pydantic models.

Purpose: types and ranges of every parameter that is honoured or accepted without effect.
Invariants: strict types (no "0.5" for 0.5, no true for 1); null means "not given"; limits hold before any
work is done.
Called by: `body.py`.
Never: holds a parameter of `refusals.py`; unknown fields are kept in `model_extra` and named in a response
header.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 256
MAX_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_MESSAGES = 4096

_INT64 = 2**63
_INT32_MAX = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=_INT32_MAX)]
TokenBudget = Annotated[int, Field(ge=1, le=_INT32_MAX)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class StrictModel(BaseModel):
    """Strict types; unknown fields are kept apart."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)


class StreamOptions(StrictModel):
    """`include_obfuscation` is accepted without effect."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


class GenerationFields(StrictModel):
    """What both generating routes accept; the meaning of each field is in docs/reference/http.md."""

    model: Annotated[str, Field(max_length=256)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT32_MAX)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    max_tokens: TokenBudget | None = None
    max_completion_tokens: TokenBudget | None = None
    stop: Annotated[list[StopString], Field(max_length=MAX_STOPS), BeforeValidator(_as_list)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_INT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    dspark_token_origins: bool | None = None
    dspark_speculate: bool | None = None
    dspark_lane: Literal["auto", "ratio", "match", "greedy"] | None = None
    # Accepted without effect.
    user: object = None
    metadata: object = None
    store: object = None
    service_tier: object = None
    safety_identifier: object = None
    prompt_cache_key: object = None


class Message(StrictModel):
    """One message of a conversation; `messages.py` reads `content`, which has two shapes."""

    role: str
    content: object = None
    name: str | None = None


class ChatRequest(GenerationFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    add_generation_prompt: bool | None = None


class CompletionRequest(GenerationFields):
    """Body of POST /v1/completions; `prompts.py` reads `prompt`, which has four shapes."""

    prompt: object


class TokenizeRequest(StrictModel):
    """Body of POST /tokenize: either `prompt` or `messages`."""

    model: Annotated[str, Field(max_length=256)] | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(StrictModel):
    """Body of POST /detokenize."""

    model: Annotated[str, Field(max_length=256)] | None = None
    tokens: list[TokenId]
