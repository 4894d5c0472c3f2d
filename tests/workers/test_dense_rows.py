"""A worker that was asked for dense rows: what travels is the row of the draw, for that request alone."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.audit import AuditPlan
from dspark.philox import Keys
from dspark_proto import CONFIDENCE_MAX, Lane, LocalProtocolError, ProposalReady, SupportPolicy, VerifierEvent
from dspark_spark.proposals import audit_proposal, read_proposal
from tests.conftest import TinyPair
from tests.rig import Parts, load_parts
from tests.workers.test_worker import Spark, drafts, open_lane, spark_of

VOCAB = 288


@pytest.fixture(scope="module")
def parts(tiny_pair: TinyPair) -> Parts:
    return load_parts(tiny_pair.target, tiny_pair.drafter)


def dense_spark(parts: Parts) -> Spark:
    return spark_of(parts, parts.worker(dense_rows=True), dense_rows=True)


def ready(events: list[VerifierEvent]) -> dict[int, ProposalReady]:
    return {event.slot: event for event in events if isinstance(event, ProposalReady)}


def test_a_dense_proposal_is_the_sparse_one_of_the_whole_draft_vocabulary(parts: Parts) -> None:
    """192 draft tokens: rows of 256 entries leave none out, so both forms hold the same law and give the same draws."""
    spark = dense_spark(parts)
    open_lane(spark, 0, Lane.RATIO, SupportPolicy.DENSE, seed=4)
    open_lane(spark, 1, Lane.RATIO, SupportPolicy.K256, seed=4)
    found = ready(spark.step(0, 1))
    assert (found[0].support, len(found[0].ids), len(found[0].q)) == (0, 0, 4 * 4 * VOCAB)
    dense, sparse = (read_proposal(found[slot], VOCAB) for slot in (0, 1))
    assert dense.tokens == sparse.tokens
    assert dense.confidences == sparse.confidences
    for a, b in zip(dense.rows, sparse.rows, strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.counts, b.counts)


def test_dense_draws_pass_the_audit(parts: Parts) -> None:
    spark = dense_spark(parts)
    open_lane(spark, 0, Lane.RATIO, SupportPolicy.DENSE, seed=-9)
    for round_ in (1, 2):
        (event,) = ready(spark.step(0)).values()
        proposal = read_proposal(event, VOCAB)
        event.lease.release()
        passed = {
            seed: audit_proposal(proposal, event.anchor_position, Keys(seed, 0, round_), AuditPlan(1.0)).failure is None
            for seed in range(-9, 0)
        }
        assert passed.pop(-9)
        assert not all(passed.values())


def test_replies_of_all_forms_share_the_workers_memory_and_leave_nothing_in_it(parts: Parts) -> None:
    spark = dense_spark(parts)
    policies = (SupportPolicy.DENSE, SupportPolicy.K32, SupportPolicy.DENSE, SupportPolicy.K16)
    for slot, policy in enumerate(policies):
        open_lane(spark, slot, Lane.RATIO, policy, seed=slot)
    for depth in (4, 1, 3):
        found = ready(spark.step(0, 1, 2, 3, depth=depth))
        for slot, policy in enumerate(policies):
            width = VOCAB if policy is SupportPolicy.DENSE else int(policy)
            q = np.frombuffer(found[slot].q, dtype="<f4").reshape(depth, width)
            np.testing.assert_array_equal(q.sum(axis=1), np.ones(depth, dtype=np.float32))
        assert set(drafts(list(found.values()))) == {0, 1, 2, 3}


def test_a_match_request_with_dense_rows_gets_drawn_tokens_under_one_value_rows(parts: Parts) -> None:
    spark = dense_spark(parts)
    open_lane(spark, 0, Lane.MATCH, SupportPolicy.DENSE, seed=4)
    open_lane(spark, 1, Lane.MATCH, SupportPolicy.K1, seed=4)
    found = ready(spark.step(0, 1))
    dense, thin = (read_proposal(found[slot], VOCAB) for slot in (0, 1))
    assert dense.tokens == thin.tokens
    assert all(len(row) == 1 for row in dense.rows)


def test_confidences_reach_the_verifier(parts: Parts) -> None:
    spark = dense_spark(parts)
    spark.open(0)
    (event,) = ready(spark.step(0)).values()
    assert all(0 < units < CONFIDENCE_MAX for units in event.confidences)
    assert len(set(event.confidences)) == 4
    assert read_proposal(event, VOCAB).confidences == tuple(units / 2**24 for units in event.confidences)


def test_a_worker_that_does_not_offer_dense_rows_is_not_asked(parts: Parts) -> None:
    spark = spark_of(parts, parts.worker(), dense_rows=True)
    with pytest.raises(LocalProtocolError):
        open_lane(spark, 0, Lane.RATIO, SupportPolicy.DENSE, seed=4)
    open_lane(spark, 0, Lane.RATIO, SupportPolicy.K32, seed=4)
    assert set(drafts(spark.step(0))) == {0}
