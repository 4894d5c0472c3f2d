"""One request of the official client, and what came back.

Invariants: every answer ends as exactly one of complete, cancelled (this side left in mid-stream, on purpose) or failed
(with the error's text); nothing is retried, neither here nor in the client library.

Called by `load`; one `Client` belongs to one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dspark.chaos.catalogue import Case
from dspark.errors import UserError


@dataclass(eq=False)
class Answer:
    """What one request brought. Times are monotonic seconds.

    arrivals: time, tokens and drafted tokens of each chunk of a stream. usage: prompt and completion tokens.
    """

    case: Case
    stream: bool
    started: float
    ended: float | None = None
    arrivals: list[tuple[float, int, int]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage: tuple[int, int, int] | None = None
    cancelled: bool = False
    error: str | None = None

    def add(self, choice: Any, at: float) -> None:
        """Take the next chunk's (or the whole answer's) choice."""
        origins = (choice.model_extra or {}).get("dspark")
        if origins:
            self.ids += origins["token_ids"]
            self.arrivals.append((at, len(origins["token_ids"]), sum(origins["from_draft"])))
        self.text += _text(choice)
        self.finish_reason = choice.finish_reason or self.finish_reason


def _text(choice: Any) -> str:
    for part in (getattr(choice, "delta", None), getattr(choice, "message", None)):
        if part is not None:
            return part.content or ""
    return choice.text or ""


class Client:
    """The official client at `url`. Raises UserError when it is not installed."""

    def __init__(self, url: str, model: str, deadline_s: float) -> None:
        """`deadline_s`: longest silence of a connection before the request counts as failed."""
        try:
            from openai import OpenAI
        except ImportError:
            raise UserError("the load comes from the official client: pip install openai") from None
        self._openai = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=deadline_s, max_retries=0)
        self._model = model

    def ask(self, case: Case, answer: Answer, leave: Callable[[Answer], bool] = lambda answer: False) -> None:
        """Fill `answer`. `leave` is asked after every chunk of a stream: True closes the connection."""
        try:
            reply: Any = self._create(case, answer.stream)
            if answer.stream:
                self._read(reply, answer, leave)
            else:
                answer.add(reply.choices[0], time.monotonic())
                answer.usage = _usage(reply.usage)
        except Exception as error:  # whatever the client library raises is a failed request, never a failed run
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = time.monotonic()

    def _create(self, case: Case, stream: bool) -> Any:
        options: dict[str, Any] = {"model": self._model, "stream": stream, **case.body()}
        if stream:
            options["stream_options"] = {"include_usage": True}
        if case.chat:
            return self._openai.chat.completions.create(
                messages=[{"role": "user", "content": str(case.prompt)}], **options
            )
        prompt = case.prompt if isinstance(case.prompt, str) else list(case.prompt)
        return self._openai.completions.create(prompt=prompt, **options)

    @staticmethod
    def _read(chunks: Any, answer: Answer, leave: Callable[[Answer], bool]) -> None:
        with chunks:
            for chunk in chunks:
                if chunk.choices:
                    answer.add(chunk.choices[0], time.monotonic())
                if chunk.usage is not None:
                    answer.usage = _usage(chunk.usage)
                elif answer.finish_reason is None and leave(answer):
                    answer.cancelled = True
                    return


def _usage(usage: Any) -> tuple[int, int, int] | None:
    return None if usage is None else (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
