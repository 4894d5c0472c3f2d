"""How a choice looks in an answer: the two dialects of OpenAI's completions API.

Purpose: build chunks, usage chunks and whole answers from choice states and deltas.
Invariants: all objects of one answer share id, created, model and fingerprint; concatenated chunk texts
equal the text of the whole answer, because both are the engine's deltas.
Called by: `completions.py`, `stream.py`.
Never: reads the engine or the request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from dspark_spark.api import Delta
from dspark_spark.http.chunks import (
    Answer,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    Choice,
    Origins,
    TextChoice,
    Usage,
)
from dspark_spark.http.generation import ChoiceState
from dspark_spark.http.usage import speculation_of, usage_of


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What every object of one answer carries, and what the client asked to see.

    created: Unix time in seconds. with_usage: `stream_options.include_usage`. with_origins:
    `dspark_token_origins`.
    """

    id: str
    created: int
    model: str
    fingerprint: str
    with_usage: bool
    with_origins: bool


class Reply(ABC):
    """One answer, streamed or whole."""

    whole_object: str
    chunk_object: str

    def __init__(self, head: ReplyHead) -> None:
        self.head = head

    def chunk(self, choice: ChoiceState, delta: Delta) -> Answer | None:
        """The chunk for a delta that `choice` has already taken, or None when it shows nothing (text held
        back)."""
        shows_tokens = self.head.with_origins and bool(delta.token_ids)
        if not (delta.text or shows_tokens or delta.finish_reason or choice.delta_count == 1):
            return None
        usage: UnsetType | None = None if self.head.with_usage else UNSET
        return self._answer(self.chunk_object, [self._chunk_choice(choice, delta)], usage)

    def usage_chunk(self, choices: Sequence[ChoiceState]) -> Answer:
        """The chunk after the last choice has ended: no choices, but usage and speculation."""
        answer = self._answer(self.chunk_object, [], usage_of(choices))
        answer.speculation = speculation_of(choices)
        return answer

    def whole(self, choices: Sequence[ChoiceState]) -> Answer:
        """The answer of a request that does not stream."""
        answer = self._answer(self.whole_object, [self._whole_choice(c) for c in choices], usage_of(choices))
        answer.speculation = speculation_of(choices)
        return answer

    @abstractmethod
    def _chunk_choice(self, choice: ChoiceState, delta: Delta) -> Choice: ...

    @abstractmethod
    def _whole_choice(self, choice: ChoiceState) -> Choice: ...

    def _origins(self, source: Delta | ChoiceState) -> Origins | UnsetType:
        if not self.head.with_origins:
            return UNSET
        return Origins(token_ids=list(source.token_ids), from_draft=list(source.from_draft))

    def _answer(self, kind: str, choices: list[Choice], usage: Usage | UnsetType | None) -> Answer:
        head = self.head
        return Answer(
            id=head.id,
            object=kind,
            created=head.created,
            model=head.model,
            system_fingerprint=head.fingerprint,
            choices=choices,
            usage=usage,
        )


class ChatReply(Reply):
    """/v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _chunk_choice(self, choice: ChoiceState, delta: Delta) -> Choice:
        is_first = choice.delta_count == 1
        return ChatChunkChoice(
            index=choice.index,
            delta=ChatDelta(
                role="assistant" if is_first else UNSET,
                content=delta.text if delta.text or is_first else UNSET,
            ),
            finish_reason=delta.finish_reason,
            stop_reason=UNSET if delta.finish_reason is None else delta.stop_reason,
            dspark=self._origins(delta),
        )

    def _whole_choice(self, choice: ChoiceState) -> Choice:
        return ChatChoice(
            index=choice.index,
            message=ChatMessage(content="".join(choice.text)),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            dspark=self._origins(choice),
        )


class TextReply(Reply):
    """/v1/completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def _chunk_choice(self, choice: ChoiceState, delta: Delta) -> Choice:
        return TextChoice(
            index=choice.index,
            text=delta.text,
            finish_reason=delta.finish_reason,
            stop_reason=UNSET if delta.finish_reason is None else delta.stop_reason,
            dspark=self._origins(delta),
        )

    def _whole_choice(self, choice: ChoiceState) -> Choice:
        return TextChoice(
            index=choice.index,
            text="".join(choice.text),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            dspark=self._origins(choice),
        )
