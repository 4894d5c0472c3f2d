"""Sampling parameters of the choices of a request, with their token budgets fitted to the context.

Purpose: defaults, and the rule for `max_tokens`: a number that was asked for is honoured or refused, never
clamped; only the default adapts to the context that is left.
Invariants: prompt tokens + max_tokens <= context; min_tokens <= max_tokens.
Called by: `completions.py`, in a worker thread.
Never: touches the engine.
"""

from __future__ import annotations

from dataclasses import replace

from dspark_spark.api import SamplingParams
from dspark_spark.http.errors import ApiError, bad_request
from dspark_spark.http.logit_fields import bias_by_id, word_sequences
from dspark_spark.http.prompts import check_ids
from dspark_spark.http.schema import GenerationFields
from dspark_spark.http.tokenizer import ChatTokenizer
from dspark_spark.lanes import AUTO, choose_lane


def sampling_params(fields: GenerationFields, tokenizer: ChatTokenizer) -> SamplingParams:
    """The engine's view of the request, the same for all its choices; `with_budget` sets `max_tokens`.

    Raises ApiError 400 for an id outside the vocabulary or a word that has no tokens.
    """
    allowed = fields.allowed_token_ids
    return SamplingParams(
        temperature=_given(fields.temperature, 1.0),
        top_p=_given(fields.top_p, 1.0),
        top_k=max(fields.top_k or 0, 0),
        min_p=fields.min_p or 0.0,
        seed=fields.seed,
        stop=tuple(fields.stop or ()),
        stop_token_ids=check_ids(tokenizer, fields.stop_token_ids or (), "stop_token_ids"),
        ignore_eos=bool(fields.ignore_eos),
        logit_bias=bias_by_id(tokenizer, fields.logit_bias or {}),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=_given(fields.repetition_penalty, 1.0),
        min_tokens=fields.min_tokens or 0,
        bad_words=word_sequences(tokenizer, fields.bad_words or ()),
        allowed_token_ids=None if allowed is None else check_ids(tokenizer, allowed, "allowed_token_ids"),
    )


def checked_lane(fields: GenerationFields, temperature: float) -> str:
    """The lane asked for. Raises ApiError where the temperature does not allow it."""
    lane = fields.dspark_lane or AUTO
    try:
        choose_lane(lane, temperature)
    except ValueError as error:
        raise bad_request(str(error), "dspark_lane") from None
    return lane


def with_budget(
    params: SamplingParams,
    fields: GenerationFields,
    max_context: int,
    prompt_count: int,
    default_tokens: int | None,
) -> SamplingParams:
    """The parameters of one choice, for a prompt of `prompt_count` tokens.

    default_tokens: budget when the request names none; None means all the context that is left.
    Raises ApiError 400 (`context_length_exceeded`, or `min_tokens` beyond the budget).
    """
    budget = _budget(fields, max_context, prompt_count, default_tokens)
    if params.min_tokens > budget:
        message = f"min_tokens: {params.min_tokens} is more than the {budget} tokens that may be generated"
        raise bad_request(message, "min_tokens")
    return replace(params, max_tokens=budget)


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


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
