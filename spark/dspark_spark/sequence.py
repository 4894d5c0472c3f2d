"""One request inside the engine: its tokens, its KV progress, its sampling, its text, its speculation counters."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from dspark.logit_edits import EditState, LogitEdits, first_state
from dspark.philox import Keys
from dspark.processors import SamplingPolicy
from dspark_proto import Lane
from dspark_spark.api import Delta, GenerateRequest, SamplingParams, SpeculationStats
from dspark_spark.leases import DraftLease
from dspark_spark.text import TextStream


@dataclass
class SequenceCounters:
    """Running totals behind `SpeculationStats`."""

    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    target_only_steps: int = 0

    def judged(self, depth: int, accepted: int) -> None:
        """A proposal of `depth` drafts was verified."""
        self.rounds += 1
        self.verified += depth
        self.accepted += accepted


@dataclass
class Sequence:
    """A request that holds a slot.

    tokens: prompt and committed tokens; the last one is the anchor once decoding. computed: positions whose KV rows are
    valid; while decoding it is len(tokens) - 1, because the anchor's row is computed together with the drafts.
    round counts the steps of this request that sample, from 1, and keys its random numbers: no two steps share a key.
    lane: the acceptance rule to the request's end. In the match lane its numbers are keyed by position alone.
    edits: what its rows are edited with, behind some of the committed tokens; `edit_state` brings it up to all of them.
    """

    request: GenerateRequest
    slot: int
    policy: SamplingPolicy
    text: TextStream
    seed: int
    tokens: list[int]
    context_limit: int
    edits: EditState | None = None
    lane: Lane = Lane.RATIO
    computed: int = 0
    round: int = 0
    lease: DraftLease | None = None
    last_accepted: int | None = None
    counters: SequenceCounters = field(default_factory=SequenceCounters)

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def decoding(self) -> bool:
        return self.computed >= self.prompt_length

    @property
    def greedy(self) -> bool:
        return self.policy.temperature == 0

    @property
    def anchor_position(self) -> int:
        return len(self.tokens) - 1

    def keys(self) -> Keys:
        """The random number keys of this round. Spark's domains need no generation: rounds never repeat."""
        if self.lane is Lane.MATCH:
            return Keys.for_position_noise(self.seed)
        return Keys(seed=self.seed, generation=0, round=self.round)

    def edit_state(self) -> EditState | None:
        """The edits of the row behind the last committed token; None when this request asks for none.

        Made from `tokens`, which hold committed tokens only: no draft that was judged can be left in it.
        """
        state = self.edits
        if state is not None:
            for token in self.tokens[self.prompt_length + state.generated :]:
                state = state.after(token)
            self.edits = state
        return state

    def depth_limit(self) -> int:
        """Drafts that could still be committed together with the token that always comes."""
        return max(0, min(self.text.remaining - 1, self.context_limit - len(self.tokens) - 1))

    def stats(self) -> SpeculationStats:
        c = self.counters
        lane = "none" if self.lease is None else self.lease.lane.name.lower()
        return SpeculationStats(lane, c.rounds, c.drafted, c.verified, c.accepted, c.target_only_steps)

    def commit(self, drafted: list[int], accepted: int, token: int) -> Delta:
        """Take `accepted` drafts and the token after them; returns what the client gets, cut at a stop."""
        run = [*drafted[:accepted], token]
        pushed = self.text.push(run)
        kept = run[: pushed.kept_count]
        self.tokens += kept
        finish = pushed.finish_reason
        return Delta(
            text=pushed.text,
            token_ids=tuple(kept),
            from_draft=tuple(i < accepted for i in range(len(kept))),
            finish_reason=finish,
            stop_reason=pushed.stop_reason,
        )


def sampling_policy(params: SamplingParams) -> SamplingPolicy:
    """How this request's edited rows are processed. Raises PolicyError."""
    return SamplingPolicy(params.temperature, params.top_k, params.top_p, params.min_p)


def first_edits(request: GenerateRequest, eos_ids: Iterable[int], vocab: int) -> EditState | None:
    """The edits of this request's first row, None when it asks for none. Raises PolicyError."""
    p = request.params
    edits = LogitEdits(
        logit_bias=p.logit_bias,
        presence_penalty=p.presence_penalty,
        frequency_penalty=p.frequency_penalty,
        repetition_penalty=p.repetition_penalty,
        min_tokens=p.min_tokens,
        ending_ids=(*(() if p.ignore_eos else eos_ids), *p.stop_token_ids),
        bad_words=p.bad_words,
        allowed_token_ids=p.allowed_token_ids,
        grammar=p.grammar,
    )
    return first_state(edits, request.prompt_ids, vocab)


def request_seed(seed: int | None) -> int:
    """The request's 64-bit key: the user's seed, or fresh random bits."""
    return seed if seed is not None else secrets.randbits(64) - (1 << 63)
