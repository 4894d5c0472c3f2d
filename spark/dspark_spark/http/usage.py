"""Usage and speculation figures of an answer.

Purpose: sums over the choices of a request.
Invariants: total = prompt + completion; completion = token ids delivered, however they were grouped into
deltas.
Called by: `reply.py`.
Never: counts drafted tokens as completion tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark_spark.api import SpeculationStats
from dspark_spark.http.chunks import CompletionDetails, PromptDetails, Speculation, Usage
from dspark_spark.http.generation import ChoiceState


def usage_of(choices: Sequence[ChoiceState]) -> Usage:
    """Token counts over all choices."""
    prompt_tokens = sum(choice.prompt_count for choice in choices)
    completion_tokens = sum(len(choice.token_ids) for choice in choices)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptDetails(),
        completion_tokens_details=CompletionDetails(),
    )


def speculation_of(choices: Sequence[ChoiceState]) -> Speculation:
    """Figures over all choices; the lane is "mixed" when they did not share one."""
    stats = [choice.stats for choice in choices]
    lanes = {item.lane for item in stats}
    return Speculation(
        lane=lanes.pop() if len(lanes) == 1 else "mixed",
        rounds=sum(item.rounds for item in stats),
        drafted=sum(item.drafted for item in stats),
        verified=sum(item.verified for item in stats),
        accepted=sum(item.accepted for item in stats),
        target_only_steps=sum(item.target_only_steps for item in stats),
        mean_tokens_per_step=_mean_tokens_per_step(stats),
    )


def _mean_tokens_per_step(stats: Sequence[SpeculationStats]) -> float:
    """Each step commits one token of the target's own (correction, bonus or plain) and the accepted drafts
    before it."""
    steps = sum(item.rounds + item.target_only_steps for item in stats)
    return 1 + sum(item.accepted for item in stats) / steps if steps else 0.0
