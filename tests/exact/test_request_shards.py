"""Requests split over ranks: every rank learns every verdict, and a refused request ends alone."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.collectives import Group, GroupError, LocalGroup
from dspark.dyadic import RowError, RowFault, draw, sparse_row
from dspark.philox import Domain, Keys
from dspark.processors import LogitsError, SamplingPolicy, target_row
from dspark.request_shards import Refused, judge, owner_of
from dspark.tickets import ResidualIdentityError, TicketError
from dspark.verify import Kind, Verdict, verify_ratio


def whole_verdict(slot: int) -> Verdict:
    """A round of one to three drafts of the request in a slot, judged on whole rows."""
    rng, keys, depth = np.random.default_rng(slot), Keys(slot, 0, 1), 1 + slot % 3
    logits = (rng.standard_normal((depth + 1, 17)) * 2).astype(np.float32)
    rows = [sparse_row(logits[i] + rng.standard_normal(17).astype(np.float32), None, 1.0, 4) for i in range(depth)]
    tokens = [draw(row, keys.draw24(Domain.PROPOSAL, 8 + i)) for i, row in enumerate(rows)]
    return verify_ratio(lambda i: target_row(logits[i], SamplingPolicy()), rows, tokens, 7, keys)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("slots", [[], [0], [5, 2, 9, 4, 1], [0, 4, 8], list(range(7))])
def test_split_requests_are_judged_as_if_they_were_not(size: int, slots: list[int]) -> None:
    """Also with ranks that own nothing, and with no request at all."""
    verdicts = {slot: whole_verdict(slot) for slot in slots}
    judged: list[list[int]] = [[] for _ in range(size)]

    def work(group: Group) -> list:
        def judge_one(index: int) -> Verdict:
            judged[group.rank].append(slots[index])
            return verdicts[slots[index]]

        return judge(group, slots, judge_one)

    assert LocalGroup(size).run(work) == [[verdicts[slot] for slot in slots]] * size
    assert judged == [[slot for slot in slots if owner_of(slot, size) == rank] for rank in range(size)]


def test_a_slot_keeps_its_rank_and_every_rank_is_used() -> None:
    assert [owner_of(slot, 3) for slot in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    "refusal",
    [
        LogitsError("NaN"),
        TicketError("no mass"),
        RowError(RowFault.ZERO_AT_TOKEN, "token 4"),
        ResidualIdentityError("p exceeds q"),
    ],
)
def test_a_refused_request_ends_alone(refusal: Exception) -> None:
    verdict = Verdict(1, 6, Kind.BONUS)

    def work(group: Group) -> list:
        def judge_one(index: int) -> Verdict:
            if index == 1:
                raise refusal
            return verdict

        return judge(group, [0, 1, 2], judge_one)

    assert LocalGroup(2).run(work) == [
        [verdict, Refused(1, None), verdict],
        [verdict, Refused(1, refusal), verdict],
    ]


def test_a_bug_in_judging_ends_all_ranks() -> None:
    def judge_one(index: int) -> Verdict:
        raise KeyError(index)

    with pytest.raises(GroupError, match="rank 1 of 2 failed: KeyError"):
        LocalGroup(2).run(lambda group: judge(group, [1], judge_one))
