"""What the endpoint and the engine say to each other.

The endpoint (an asyncio thread) hands a `GenerateRequest` to the engine (a thread of its own) and reads `Delta`s
until one carries a `finish_reason`. Both sides import this module and not each other, so that either can be
replaced: tests drive the endpoint with a scripted engine, and the benchmark drives the engine without HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dspark.grammar import Grammar

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_ABORT = "abort"
FINISH_ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request samples, already validated by the endpoint.

    temperature: 0 is greedy. top_p in (0, 1]; top_k 0 means off. seed: signed 64-bit, None draws one.
    max_tokens: upper bound on new tokens (>= 1), already clamped to the context that is left.
    stop: non-empty strings; the text is cut before the earliest match. stop_token_ids end the text like EOS does.
    min_p in [0, 1], 0 means off. logit_bias: id -> what is added. presence_penalty, frequency_penalty: 0 is off;
    repetition_penalty > 0: 1 is off. min_tokens: no id that ends the text before so many. bad_words: token sequences
    that are not completed. allowed_token_ids: None allows all. grammar: where the text starts in it, None is off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One choice to generate. `prompt_ids` are target token ids, not empty, shorter than the context.

    lane: the acceptance rule: "auto", "ratio", "match" or "greedy" (temperature 0 only); see `lanes`.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    speculate: bool = True
    lane: str = "auto"


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """What speculation did for one request: drafted = verified + discarded (late, corrupt, stale) + cut early."""

    lane: str = "none"
    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    target_only_steps: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and the tokens behind it.

    text: decodable text only (never half of a UTF-8 sequence) and never part of a stop string.
    token_ids: tokens committed since the last delta; they count in `usage` even where their text is still held back.
    from_draft: one flag per token, True where an accepted draft token was committed.
    finish_reason: None until the last delta; then one of the FINISH_* values. `stop_reason` names the stop string or
    the stop token id that matched, None for EOS. `error` explains FINISH_ERROR. `stats` comes with the last delta.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    from_draft: tuple[bool, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)


class EngineBusyError(RuntimeError):
    """The queue is full; the endpoint answers 503 with Retry-After."""


class AsyncEngine(Protocol):
    """What the endpoint needs from an engine."""

    model_name: str
    max_context: int

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Yield deltas until one has a finish_reason. Raises EngineBusyError before the first delta.

        Closing the iterator (``aclose``) or cancelling the task that reads it aborts the request within one round.
        """
        ...

    def is_ready(self) -> bool:
        """The model is loaded and the loop turns."""
        ...

    def is_alive(self) -> bool:
        """False once the engine thread has died."""
        ...

    def describe(self) -> dict[str, object]:
        """Facts for /version and /ready: dtype, speculation state, drafter link state."""
        ...
