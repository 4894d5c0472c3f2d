"""Fields that edit logits: from what the client wrote to token ids.

Purpose: `logit_bias`, whose keys are ids in quotes, and `bad_words`, which are texts.
Invariants: every id that comes out is in the vocabulary; an error names the field and the entry.
Called by: `budget.py`, in a worker thread, because encoding many words takes long.
Never: touches a logit; what the fields do is `dspark.logit_edits`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dspark_spark.http.errors import bad_request, clip
from dspark_spark.http.prompts import Ids
from dspark_spark.http.tokenizer import ChatTokenizer


def bias_by_id(tokenizer: ChatTokenizer, bias: Mapping[str, float]) -> dict[int, float]:
    """The bias with integer keys. Raises ApiError 400 for a key that is no token id."""
    last = tokenizer.vocab_size - 1
    by_id: dict[int, float] = {}
    for key, value in bias.items():
        token = int(key) if key.isascii() and key.isdecimal() and len(key) <= len(str(last)) else -1
        # Only the plain spelling: "07" and "7" would be one id with two values.
        if not 0 <= token <= last or str(token) != key:
            shown = clip(key)
            message = f"logit_bias: {shown!r} is no token id; they go from \"0\" to \"{last}\""
            raise bad_request(message, f"logit_bias.{shown}")
        by_id[token] = value
    return by_id


def word_sequences(tokenizer: ChatTokenizer, words: Sequence[str]) -> tuple[Ids, ...]:
    """The token sequences to ban: each word as it begins a text, and as it follows a space. No sequence twice.

    Raises ApiError 400 for a word without tokens.
    """
    sequences: dict[Ids, None] = {}
    for index, word in enumerate(words):
        bare = word.lstrip(" ") or word
        for text in (bare, f" {bare}"):
            ids = tuple(tokenizer.encode(text, False))
            if not ids:
                where = f"bad_words[{index}]"
                raise bad_request(f"{where}: the word has no tokens; remove it", where)
            sequences[ids] = None
    return tuple(sequences)
