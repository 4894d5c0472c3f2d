"""Sampling parameters of one choice, with its token budget fitted to the context.

Purpose: defaults, and the rule for `max_tokens`: a number that was asked for is honoured or refused, never
clamped; only the default adapts to the context that is left.
Invariants: prompt tokens + max_tokens <= context.
Called by: `completions.py`.
Never: touches the engine.
"""

from __future__ import annotations

from dspark_spark.api import SamplingParams
from dspark_spark.http.errors import ApiError, bad_request
from dspark_spark.http.prompts import check_ids
from dspark_spark.http.schema import GenerationFields
from dspark_spark.http.tokenizer import ChatTokenizer


def sampling_params(
    fields: GenerationFields,
    tokenizer: ChatTokenizer,
    max_context: int,
    prompt_count: int,
    default_tokens: int | None,
) -> SamplingParams:
    """The engine's view of the request, for a prompt of `prompt_count` tokens.

    default_tokens: budget when the request names none; None means all the context that is left.
    Raises ApiError 400 (`context_length_exceeded`, or an id outside the vocabulary).
    """
    stop_ids = check_ids(tokenizer, fields.stop_token_ids or (), "stop_token_ids")
    return SamplingParams(
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=max(fields.top_k or 0, 0),
        seed=fields.seed,
        max_tokens=_budget(fields, max_context, prompt_count, default_tokens),
        stop=tuple(fields.stop or ()),
        stop_token_ids=stop_ids,
        ignore_eos=bool(fields.ignore_eos),
    )


def _budget(fields: GenerationFields, max_context: int, prompt_count: int, default_tokens: int | None) -> int:
    left = max_context - prompt_count
    asked = fields.max_completion_tokens or fields.max_tokens
    if left < 1 or (asked is not None and asked > left):
        raise _too_long(max_context, prompt_count, asked, fields)
    return asked or min(default_tokens or left, left)


def _too_long(max_context: int, prompt_count: int, asked: int | None, fields: GenerationFields) -> ApiError:
    message = f"this model's maximum context length is {max_context} tokens; the prompt has {prompt_count}"
    if prompt_count >= max_context:
        return bad_request(
            f"{message}, which leaves none to generate; shorten it", None, "context_length_exceeded"
        )
    param = "max_completion_tokens" if fields.max_completion_tokens else "max_tokens"
    message += f" and {asked} more were asked for; ask for at most {max_context - prompt_count}"
    return bad_request(message, param, "context_length_exceeded")
