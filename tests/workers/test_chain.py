"""What one chain draws: rows by lane and support, and confidences that were fixed before the draw."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark.dense import dense_row
from dspark.dyadic import MASS, draw, sparse_row
from dspark.models.config import from_hf
from dspark.models.drafter import EMBED, DrafterNetwork
from dspark.philox import Domain, Keys
from dspark.proof.tiny_pair import draft_ids, drafter_config, drafter_weights, hf_config, target_weights
from dspark_proto import CONFIDENCE_MAX, Lane
from dspark_workers.chain import DraftPolicy, MarkovChain, Proposal

ANCHOR, POSITION, DEPTH = 7, 20, 4
VOCAB = 288


def network_of(**changes: Any) -> DrafterNetwork:
    """A random drafter; ``confidence_head`` and ``bias`` of the head may be changed."""
    bias = changes.pop("bias", None)
    target = from_hf(hf_config())
    config = drafter_config(target, **changes)
    weights = drafter_weights(config) | {EMBED: target_weights(target)["model.embed_tokens.weight"]}
    if bias is not None:
        weights["confidence_head.proj.bias"] = torch.tensor([bias])
    return DrafterNetwork(config, weights, max_positions=64)


@pytest.fixture(scope="module")
def network() -> DrafterNetwork:
    return network_of()


@pytest.fixture(scope="module")
def hidden(network: DrafterNetwork) -> Tensor:
    return torch.randn(DEPTH, network.config.hidden_size, generator=torch.Generator().manual_seed(3))


def drafted(
    network: DrafterNetwork,
    hidden: Tensor,
    policy: DraftPolicy,
    round_: int = 1,
    *,
    head: bool = True,
) -> Proposal:
    chain = MarkovChain(network, draft_ids(network.config))
    keys = Keys(seed=1, generation=0, round=round_)
    base = network.base_logits(hidden)
    return chain.sample(base, ANCHOR, POSITION, policy, keys, hidden=hidden if head else None)


def logits_of(network: DrafterNetwork, hidden: Tensor, position: int, previous: int) -> np.ndarray:
    bias = network.markov_bias(torch.tensor([previous]))
    return (network.base_logits(hidden)[position] + bias[0]).float().numpy()


RATIO = DraftPolicy(1.0, 64, Lane.RATIO)


# -- confidences -----------------------------------------------------------------------------------------------


def test_a_confidence_is_the_heads_value_at_the_token_before(network: DrafterNetwork, hidden: Tensor) -> None:
    proposal = drafted(network, hidden, RATIO)
    before = [ANCHOR, *proposal.tokens[:-1]]
    for position, (previous, confidence) in enumerate(zip(before, proposal.confidences, strict=True)):
        logit = network.confidence_logits(hidden[position : position + 1], torch.tensor([previous]))
        assert logit is not None
        assert confidence == round(float(torch.sigmoid(logit)) * CONFIDENCE_MAX)
    assert len({*proposal.confidences}) == DEPTH
    assert all(0 < value < CONFIDENCE_MAX for value in proposal.confidences)


def test_a_confidence_does_not_know_its_own_draft_or_a_later_one(network: DrafterNetwork, hidden: Tensor) -> None:
    """Over many draws: one value for each run of tokens before it, however the draft itself came out."""
    values: dict[tuple[int, ...], set[int]] = defaultdict(set)
    drafts: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for round_ in range(150):
        proposal = drafted(network, hidden, DraftPolicy(0.3, 16, Lane.RATIO), round_)
        for position, token in enumerate(proposal.tokens):
            before = tuple(proposal.tokens[:position])
            values[before].add(proposal.confidences[position])
            drafts[before].add(token)
    assert all(len(found) == 1 for found in values.values())
    assert len(drafts[()]) > 2
    assert any(len(drafts[before]) > 1 for before in drafts if len(before) == 2)
    assert len({next(iter(values[before])) for before in values if len(before) == 1}) > 2


@pytest.mark.parametrize("lane", list(Lane))
def test_every_lane_gets_confidences(network: DrafterNetwork, hidden: Tensor, lane: Lane) -> None:
    policy = DraftPolicy(0.0 if lane is Lane.GREEDY else 1.0, 1, lane)
    assert max(drafted(network, hidden, policy).confidences) < CONFIDENCE_MAX


def test_without_a_head_there_is_no_opinion(network: DrafterNetwork, hidden: Tensor) -> None:
    headless = network_of(confidence_head=False)
    proposal = drafted(headless, hidden, RATIO)
    assert proposal.confidences == [CONFIDENCE_MAX] * DEPTH
    assert proposal.tokens == drafted(network, hidden, RATIO).tokens
    assert drafted(network, hidden, RATIO, head=False).confidences == [CONFIDENCE_MAX] * DEPTH


def test_a_head_without_the_markov_part_is_read_too(hidden: Tensor) -> None:
    plain = network_of(confidence_with_markov=False)
    values = [drafted(plain, hidden, RATIO, round_).confidences for round_ in (1, 2)]
    assert values[0] == values[1]
    assert max(values[0]) < CONFIDENCE_MAX


def test_a_certain_head_stays_in_range_and_a_broken_one_fails_the_draft(hidden: Tensor) -> None:
    assert drafted(network_of(bias=1000.0), hidden, RATIO).confidences == [CONFIDENCE_MAX] * DEPTH
    assert drafted(network_of(bias=-1000.0), hidden, RATIO).confidences == [0] * DEPTH
    with pytest.raises(ValueError, match="NaN"):
        drafted(network_of(bias=float("nan")), hidden, RATIO)


# -- rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("support", [0, 1, 32])
def test_rows_of_the_match_lane_have_one_entry_whatever_the_support(
    network: DrafterNetwork, hidden: Tensor, support: int
) -> None:
    proposal = drafted(network, hidden, DraftPolicy(1.0, support, Lane.MATCH))
    assert proposal.tokens == drafted(network, hidden, RATIO).tokens  # drawn, as a row of 64 would
    for token, row in zip(proposal.tokens, proposal.rows, strict=True):
        assert (row.ids.tolist(), row.counts.tolist()) == ([token], [MASS])


def test_a_ratio_row_of_one_entry_is_the_law_of_its_draw(network: DrafterNetwork, hidden: Tensor) -> None:
    """Support 1 in the ratio lane says "the most likely token", not "ids alone": a drawn token would belie the row."""
    proposals = [drafted(network, hidden, DraftPolicy(1.0, 1, Lane.RATIO), round_) for round_ in range(5)]
    assert {tuple(p.tokens) for p in proposals} == {tuple(proposals[0].tokens)}
    best = sparse_row(logits_of(network, hidden, 0, ANCHOR), None, 1.0, 1).ids[0]
    assert proposals[0].tokens[0] == int(draft_ids(network.config)[int(best)])


def test_a_dense_row_is_the_law_of_the_whole_draft_vocabulary(network: DrafterNetwork, hidden: Tensor) -> None:
    ids = draft_ids(network.config).to(torch.int32).numpy()
    proposal = drafted(network, hidden, DraftPolicy(1.0, 0, Lane.RATIO))
    before = [ANCHOR, *proposal.tokens[:-1]]
    for position, (previous, token, row) in enumerate(zip(before, proposal.tokens, proposal.rows, strict=True)):
        expected = dense_row(logits_of(network, hidden, position, previous), ids, 1.0, VOCAB)
        np.testing.assert_array_equal(row.ids, expected.ids)
        np.testing.assert_array_equal(row.counts, expected.counts)
        word = Keys(seed=1, generation=0, round=1).draw24(Domain.PROPOSAL, POSITION + 1 + position)
        assert token == draw(row, word)
        assert len(row) > 64
        assert set(row.ids.tolist()) <= set(ids.tolist())


def test_greedy_drafting_has_one_entry_in_every_form(network: DrafterNetwork, hidden: Tensor) -> None:
    wanted = drafted(network, hidden, DraftPolicy(0.0, 1, Lane.GREEDY))
    for support, lane in ((0, Lane.RATIO), (32, Lane.RATIO), (1, Lane.MATCH)):
        found = drafted(network, hidden, replace(RATIO, temperature=0.0, support=support, lane=lane))
        assert found.tokens == wanted.tokens
        assert all(row.counts.tolist() == [MASS] for row in found.rows)
