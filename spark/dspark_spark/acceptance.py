"""From target logits to committed tokens: judge a proposal, or sample without one.

Greedy requests compare argmaxes, the others integer rows; no float crosses a decision. Called by `engine` for one
request at a time; a row that defines no distribution raises, which ends that request alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.processors import LogitsError, target_row
from dspark.verify import sample_target_only, verify_greedy, verify_ratio
from dspark_spark.proposals import Proposal
from dspark_spark.sequence import Sequence


def judge(sequence: Sequence, logits: Tensor, proposal: Proposal) -> tuple[int, int]:
    """Drafts accepted, and the token after them. logits: [depth + 1, vocab].

    Raises LogitsError, and ResidualIdentityError when p or q do not add up.
    """
    if sequence.greedy:
        verdict = verify_greedy(argmax(logits), proposal.tokens)
    else:
        host = logits.float().cpu().numpy()
        verdict = verify_ratio(
            lambda i: target_row(host[i], sequence.policy),
            proposal.rows,
            proposal.tokens,
            sequence.anchor_position,
            sequence.keys(),
        )
    return verdict.accepted, verdict.token


def sample(sequence: Sequence, logits: Tensor) -> int:
    """The next token from the target alone. logits: [1, vocab]. Raises LogitsError."""
    if sequence.greedy:
        return argmax(logits)[0]
    tickets = target_row(logits[0].float().cpu().numpy(), sequence.policy)
    return sample_target_only(tickets, len(sequence.tokens), sequence.keys())


def argmax(logits: Tensor) -> list[int]:
    """Argmax of every row, lowest id on ties. Raises LogitsError when a row has no finite maximum."""
    best = logits.max(dim=-1)
    if not bool(torch.isfinite(best.values).all()):
        raise LogitsError("the target's logits are not finite")
    chosen: list[int] = best.indices.tolist()
    return chosen
