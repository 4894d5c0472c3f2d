"""One request inside the engine: its tokens, its KV progress, its sampling, its text, its speculation counters."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from dspark.philox import Keys
from dspark.processors import SamplingPolicy
from dspark_spark.api import Delta, GenerateRequest, SpeculationStats
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
    round counts engine steps of this request and keys its random numbers: no two steps share a key.
    """

    request: GenerateRequest
    slot: int
    policy: SamplingPolicy
    text: TextStream
    seed: int
    tokens: list[int]
    context_limit: int
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
        return Keys(seed=self.seed, generation=0, round=self.round)

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


def request_seed(seed: int | None) -> int:
    """The request's 64-bit key: the user's seed, or fresh random bits."""
    return seed if seed is not None else secrets.randbits(64) - (1 << 63)
