"""Parameters that clients of OpenAI or vLLM know and that this server does not honour.

Purpose: refuse them by name, so that no client believes in a grammar or a beam search that was silently left out.
Invariants: null and a parameter's neutral value (the one that asks for nothing) pass; any other value is a
400.
Called by: `body.py`, with the raw JSON object, before it is validated.
Never: looks at a parameter that is honoured.
"""

from __future__ import annotations

from collections.abc import Mapping

from dspark_spark.http.errors import unsupported_parameter

Neutral = tuple[object, ...]

_COMMON: dict[str, Neutral] = {
    # OpenAI
    "n": (1,),
    "best_of": (1,),
    "response_format": ({"type": "text"},),
    # vLLM: sampling
    "length_penalty": (1,),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "thinking_token_budget": (),
    # vLLM: grammars, under their present, former and SGLang's names
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "grammar": (),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    # vLLM: prompts and answers
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "priority": (0,),
    "cache_salt": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "lora_path": (),
}

CHAT: dict[str, Neutral] = _COMMON | {
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "include_reasoning": (True,),
    "verbosity": ("medium",),
    "web_search_options": (),
    "add_special_tokens": (False,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "mm_processor_kwargs": (),
}

COMPLETION: dict[str, Neutral] = _COMMON | {
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (),
    "add_special_tokens": (True,),
}


def without_refusals(body: Mapping[str, object], refusals: Mapping[str, Neutral]) -> dict[str, object]:
    """The body without the fields of the table, all of which are neutral here.

    Raises ApiError 400 `unsupported_parameter` for the first that asks for something this server leaves out.
    """
    for name, value in body.items():
        if name in refusals and value is not None and not _is_neutral(value, refusals[name]):
            raise unsupported_parameter(name)
    return {name: value for name, value in body.items() if name not in refusals}


def _is_neutral(value: object, neutral: Neutral) -> bool:
    """Equality in JSON's sense: true is not 1, but 0.0 is 0."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)
