"""The exact law of the first tokens that a real target gives, by walking every prefix.

Purpose: what Tiers 2 and 3 compare counts with. The target is run one prefix at a time, without engine, drafter, batch
or cache reuse; rows are those of ``processors.target_row``.

Called by ``tier2`` and ``tier3``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dspark.logit_edits import EditState, LogitEdits, first_state
from dspark.processors import SamplingPolicy, target_row
from dspark.tickets import TOTAL

Tokens = tuple[int, ...]
TokenLaw = dict[Tokens, float]


@dataclass(frozen=True)
class Sampling:
    """How a request samples: the policy, the edits, and the same as fields of an HTTP body."""

    policy: SamplingPolicy
    edits: LogitEdits = field(default_factory=LogitEdits)

    def body(self) -> dict[str, object]:
        """Fields of POST /v1/completions."""
        policy, edits = self.policy, self.edits
        return {
            "temperature": policy.temperature,
            "top_k": policy.top_k,
            "top_p": policy.top_p,
            "min_p": policy.min_p,
            "frequency_penalty": edits.frequency_penalty,
            "presence_penalty": edits.presence_penalty,
            "repetition_penalty": edits.repetition_penalty,
            "logit_bias": {str(token): bias for token, bias in edits.logit_bias.items()},
        }


def target_law(target: Path, prompt: Sequence[int], sampling: Sampling, length: int) -> TokenLaw:
    """Joint law of the first ``length`` tokens behind a prompt."""
    import torch

    from dspark.models.source import load_target, open_target
    from dspark.models.target import Segment

    model = load_target(open_target(str(target)), device="cpu", dtype=torch.float32)
    cache = model.new_cache(1, len(prompt) + length + 1)
    first = first_state(sampling.edits, prompt, model.config.vocab_size)
    law: dict[Tokens, tuple[float, EditState | None]] = {(): (1.0, first)}
    for _ in range(length):
        longer: dict[Tokens, tuple[float, EditState | None]] = {}
        for prefix, (mass, state) in law.items():
            row = [*prompt, *prefix]
            logits = model.forward(cache, [Segment(0, 0, row)], logit_rows=[len(row) - 1]).logits[0]
            tickets = target_row(logits.numpy(), sampling.policy, state)
            for token in np.flatnonzero(tickets).tolist():
                share = mass * int(tickets[token]) / TOTAL
                longer[*prefix, token] = share, None if state is None else state.after(token)
        law = longer
    return {tokens: mass for tokens, (mass, _) in law.items()}


def marginal(law: TokenLaw, places: Sequence[int]) -> TokenLaw:
    """The law of the tokens at some places."""
    found: TokenLaw = {}
    for tokens, mass in law.items():
        key = tuple(tokens[place] for place in places)
        found[key] = found.get(key, 0.0) + mass
    return found


def conditional(law: TokenLaw, given: int) -> dict[Tokens, TokenLaw]:
    """For each way in which the first ``given`` tokens can come, the law of the one behind them."""
    groups: dict[Tokens, TokenLaw] = {}
    for tokens, mass in marginal(law, range(given + 1)).items():
        groups.setdefault(tokens[:given], {})[tokens[given:]] = mass
    return {
        prefix: {token: mass / sum(group.values()) for token, mass in group.items()} for prefix, group in groups.items()
    }
