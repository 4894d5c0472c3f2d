"""What the endpoint needs from a tokenizer.

Purpose: the Protocol between the endpoint and whatever tokenizer the composition root brings.
Called by: `prompts.py` (encode, template), `service.py` (tokenize and detokenize), `budget.py` (vocab_size).
Never: holds an implementation; tests bring a byte tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class ChatTokenizer(Protocol):
    """Text to ids and back. `encode` and `apply_chat_template` run in worker threads and must be
    thread-safe."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; prompts given as ids are checked against it."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a generation unless `ignore_eos`."""
        ...

    def encode(self, text: str, add_special: bool) -> list[int]:
        """Token ids of the text; `add_special` puts BOS and the like around it, as the tokenizer is
        configured."""
        ...

    def decode_bytes(self, token_ids: Sequence[int]) -> bytes:
        """Raw bytes of the ids, special tokens as b""; additive over the ids."""
        ...

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool, **kwargs: object
    ) -> str:
        """The prompt text of a conversation; each message has `role` and `content`.

        Raises ValueError when the template refuses the messages (for example roles that do not alternate).
        """
        ...
