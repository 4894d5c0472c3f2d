"""Which drafts of this round's proposals are verified, when depths are adaptive: those worth their rows.

The worker sends with each draft a confidence that it fixed before the draw. `worth_verifying` runs a stopping rule over
them; the drafts behind the stop are dropped without being looked at, and the worker is told that they were not
accepted. They are drawn anew, with other numbers, in the next round.

Invariants: no token and no row decides; of requests with the same seed, whose drafts may share random numbers, one
takes part and the others are verified whole, because the confidences of one could tell what another drafted. Both
together keep the ratio lane exact (see `dspark.admission`); the match and greedy lanes are exact under any rule. Step
times and load are those of the moment when the drafts were asked for: whatever was learned between asking and verifying
could have been learned from a draw.

Called by `engine` between the replies and the forward pass. It never draws and keeps no state.

Source: DSpark paper 2607.05147, algorithm 1 and appendix A.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dspark.admission import EarlyStop, Load, StepCurve, admit
from dspark_spark.batch import Batch
from dspark_spark.proposals import Proposal


def cut_proposals(curve: StepCurve, batch: Batch, proposals: dict[int, Proposal]) -> dict[int, Proposal]:
    """Proposals by slot, each cut to what is worth verifying; none of them grows.

    curve, batch: step times, and the step's requests without proposals, as they were when the drafts were asked for.
    """
    chosen = {slot: proposals[slot].confidences for slot in _one_per_seed(batch, proposals)}
    whole = sum(len(proposal.tokens) for slot, proposal in proposals.items() if slot not in chosen)
    rows = batch.decode_rows() + sum(chunk for _, chunk in batch.prefilling) + whole
    depths = worth_verifying(curve, chosen, Load(len(batch.decoding), rows))
    return {slot: proposal.cut(depths.get(slot, len(proposal.tokens))) for slot, proposal in proposals.items()}


def worth_verifying(curve: StepCurve, confidences: Mapping[int, Sequence[float]], load: Load) -> dict[int, int]:
    """How many drafts to verify, by slot: DSpark algorithm 1.

    Whether draft k of a request is verified is decided from c_1 .. c_k, which are functions of the drafts before it,
    from other requests' confidences, and from what was fixed before the draws. Of requests that draw with the same
    random numbers only one may be among `confidences`: another's confidences would tell of its drafts.

    Args:
        confidences: c_1, c_2, .. in [0, 1] of each proposal.
        load: the step without the drafts that this decides on.
    """
    depths = admit(EarlyStop(curve), list(confidences.values()), load)
    return dict(zip(confidences, depths, strict=True))


def _one_per_seed(batch: Batch, proposals: dict[int, Proposal]) -> list[int]:
    """Slots of the first request of each seed that has a proposal."""
    first: dict[int, int] = {}
    for sequence, _ in batch.decoding:
        if sequence.slot in proposals:
            first.setdefault(sequence.seed, sequence.slot)
    return list(first.values())
