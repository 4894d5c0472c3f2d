"""From a validated request to prompt token ids.

Purpose: the chat template and the four shapes of `prompt` (text, texts, ids, lists of ids).
Invariants: every prompt that comes out has at least one token and only ids below the vocabulary size.
Called by: `completions.py` and `service.py`, in a worker thread, because encoding a long text takes long.
Never: truncates a prompt; a prompt that is too long is refused by `budget.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark_spark.http.errors import bad_request, clip
from dspark_spark.http.messages import plain_messages
from dspark_spark.http.schema import Message
from dspark_spark.http.tokenizer import ChatTokenizer

Ids = tuple[int, ...]


def chat_prompt(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    add_special: bool = False,
) -> Ids:
    """Ids of the templated conversation. `add_special` is off by default: templates write their own BOS."""
    plain = plain_messages(messages)
    try:
        text = tokenizer.apply_chat_template(plain, add_generation_prompt=add_generation_prompt)
    except ValueError as error:
        raise bad_request(
            f"messages: the chat template refuses them: {clip(str(error))}", "messages"
        ) from None
    return _encode(tokenizer, text, add_special, "messages")


def completion_prompts(tokenizer: ChatTokenizer, prompt: object, max_prompts: int) -> list[Ids]:
    """Ids of each prompt of a /v1/completions body. Raises ApiError 400 with the path of the offending
    element."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and _all_ints(prompt)):
        return [_one_prompt(tokenizer, prompt, "prompt")]
    if not isinstance(prompt, list):
        raise bad_request(
            "prompt: give a string, a list of strings, a list of token ids or lists of them", "prompt"
        )
    if len(prompt) > max_prompts:
        raise bad_request(f"prompt: {len(prompt)} prompts, at most {max_prompts} in one request", "prompt")
    return [_one_prompt(tokenizer, item, f"prompt[{index}]") for index, item in enumerate(prompt)]


def check_ids(tokenizer: ChatTokenizer, ids: Sequence[int], path: str) -> Ids:
    """The ids, if all are in the vocabulary."""
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < tokenizer.vocab_size:
            where = f"{path}[{index}]"
            raise bad_request(
                f"{where}: {token_id} is no token id; they go from 0 to {tokenizer.vocab_size - 1}", where
            )
    return tuple(ids)


def _one_prompt(tokenizer: ChatTokenizer, item: object, path: str) -> Ids:
    if isinstance(item, str):
        return _encode(tokenizer, item, True, path)
    if isinstance(item, list) and item and _all_ints(item):
        return check_ids(tokenizer, item, path)
    raise bad_request(f"{path}: give a text or a non-empty list of token ids", path)


def _all_ints(items: Sequence[object]) -> bool:
    return all(type(item) is int for item in items)


def _encode(tokenizer: ChatTokenizer, text: str, add_special: bool, path: str) -> Ids:
    ids = tuple(tokenizer.encode(text, add_special))
    if not ids:
        raise bad_request(f"{path}: the prompt has no tokens; give at least one", path)
    return ids
