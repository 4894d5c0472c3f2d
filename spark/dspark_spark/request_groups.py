"""Groups of decoding requests that take turns on the link: while one is verified, the other's drafts are under way.

A turn of two groups: STEP for the group that was committed last, collect the other group's drafts, verify them, commit
them. So the wait for drafts, link there and back included, passes behind a forward pass over the other group.

A group is nothing lasting: it is whoever got a STEP together, a `GroupRound`, and it ends when that is verified.
Between two rounds requests move as they like, which keeps the halves equal when requests come and go (`next_groups`).

Exactness: a round is what it would be in one group. Its number, its keys and its rows belong to its request, and with
fixed depths nothing else enters. With adaptive depths a round's depth is planned when its STEP is sent, from rounds
that were verified before; and the early stop uses the step curve and the load of that moment (`GroupRound`), so that
what is verified of it later depends on nothing that was drawn meanwhile but its own confidences. How many groups there
are, and who is in which, follows from clocks and from who has come and gone: from nothing that was drafted and not yet
verified, because no reply is looked at before its own turn, and replies have the same size whatever they hold.

Called by `engine`. How many groups there should be is `group_choice`'s business.

Source: design of two request groups in ping-pong; a drafter that needs the target's taps cannot draft further ahead.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

from dspark.admission import StepCurve
from dspark_spark.batch import Batch
from dspark_spark.leases import DraftRequest, DraftRound
from dspark_spark.sequence import Sequence


@dataclass(eq=False, slots=True)
class GroupRound:
    """One group's step under way, from its STEP to its verification.

    batch: the group's requests, and the prefill that was due when its drafts were asked for. asked: what was asked for,
    by slot; reasons: why nothing was, for the other slots. replies: where drafts come, None when nobody was asked.
    tokens: expected to be committed by this step. curve: step times as they were known then, when depths are adaptive.
    """

    batch: Batch
    asked: dict[int, DraftRequest]
    reasons: dict[int, str]
    replies: DraftRound | None
    tokens: float
    curve: StepCurve | None

    def drop(self, sequence: Sequence) -> bool:
        """The request has ended; a reply that is there already is given back.

        True when this drops a proposal that was asked for and is not counted as discarded yet. Call it before the link
        hears that the lease is over.
        """
        if not any(member is sequence for member, _ in self.batch.decoding):
            return False
        self.batch.decoding = [item for item in self.batch.decoding if item[0] is not sequence]
        self.reasons.pop(sequence.slot, None)
        if self.asked.pop(sequence.slot, None) is None or self.replies is None:
            return False
        ready = self.replies.ready.pop(sequence.slot, None)
        if ready is not None:
            ready.lease.release()
        return ready is not None or sequence.slot in self.replies.waiting


def next_groups(idle: List[Sequence], under_way: int, groups: int) -> list[List[Sequence]]:
    """Who gets a STEP now, and with whom.

    Of two groups none gets more than half of all requests: who is too many waits for the other group's turn.

    Args:
        idle: decoding requests without a round under way, in order of arrival.
        under_way: how many requests have one.
        groups: 1 or 2.
    """
    if groups == 1:
        return [idle] if idle else []
    half = (len(idle) + under_way + 1) // 2
    halves = [idle[:half]] if under_way else [idle[:half], idle[half:]]
    return [members for members in halves if members]
