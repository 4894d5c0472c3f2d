"""From target logits to committed tokens: judge a proposal, or sample without one.

Greedy requests compare argmaxes, the others integer rows; no float crosses a decision. Rows are edited and processed
one by one, as far as the judgement gets: token by token to the first rejection, as a block to the last draft. Called
by `engine` for one request at a time; a row that defines no distribution raises, which ends that request alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import torch
from torch import Tensor

from dspark.block_verification import verify_block
from dspark.dyadic import Float32s, Int64s
from dspark.logit_edits import BlockStates
from dspark.processors import LogitsError, greedy_token, target_row
from dspark.speculative import RejectionMethod
from dspark.verify import sample_target_only, verify_greedy, verify_match, verify_ratio
from dspark_proto import Lane
from dspark_spark.proposals import Proposal
from dspark_spark.sequence import Sequence


class TargetRows:
    """The target's rows behind the committed tokens and 0, 1 .. drafts. logits: [depth + 1, vocab]."""

    def __init__(self, sequence: Sequence, logits: Tensor, drafts: Tokens[int]) -> None:
        self._policy = sequence.policy
        self._logits: Float32s = logits.float().cpu().numpy()
        self._states = BlockStates(sequence.edit_state(), drafts)
        self._drafts = drafts

    def tickets_at(self, index: int) -> Int64s:
        """Row `index` as tickets. Raises LogitsError."""
        return target_row(self._logits[index], self._policy, self._states.at(index))

    def best(self) -> list[int]:
        """Edited argmax of each row, up to the first that is not the draft behind it. Raises LogitsError."""
        chosen: list[int] = []
        for index, draft in enumerate([*self._drafts, None]):
            chosen.append(greedy_token(self._logits[index], self._states.at(index)))
            if chosen[-1] != draft:
                break
        return chosen


def judge(sequence: Sequence, logits: Tensor, proposal: Proposal, method: RejectionMethod = "block") -> tuple[int, int]:
    """Drafts accepted, and the token after them. logits: [depth + 1, vocab].

    method: the rule of the ratio lane; the others have one each.

    Raises LogitsError, and ResidualIdentityError when p or q do not add up.
    """
    drafts = proposal.tokens
    if sequence.greedy:
        best = argmax(logits) if sequence.edits is None else TargetRows(sequence, logits, drafts).best()
        verdict = verify_greedy(best, drafts[: len(best) - 1])
    elif sequence.lane is Lane.MATCH:
        rows = TargetRows(sequence, logits, drafts)
        verdict = verify_match(rows.tickets_at, drafts, sequence.anchor_position, sequence.keys())
    else:
        rows = TargetRows(sequence, logits, drafts)
        verify = verify_block if method == "block" else verify_ratio
        verdict = verify(rows.tickets_at, proposal.rows, drafts, sequence.anchor_position, sequence.keys())
    return verdict.accepted, verdict.token


def sample(sequence: Sequence, logits: Tensor) -> int:
    """The next token from the target alone. logits: [1, vocab]. Raises LogitsError."""
    if sequence.greedy:
        return argmax(logits)[0] if sequence.edits is None else TargetRows(sequence, logits, ()).best()[0]
    tickets = TargetRows(sequence, logits, ()).tickets_at(0)
    return sample_target_only(tickets, len(sequence.tokens), sequence.keys())


def argmax(logits: Tensor) -> list[int]:
    """Argmax of every unedited row, lowest id on ties. Raises LogitsError when a row has no finite maximum."""
    best = logits.max(dim=-1)
    if not bool(torch.isfinite(best.values).all()):
        raise LogitsError("the target's logits are not finite")
    chosen: list[int] = best.indices.tolist()
    return chosen
