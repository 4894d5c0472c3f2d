"""What a text has said before: runs, their latest continuation, gaps; and what the chain makes of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.models.config import from_hf
from dspark.models.drafter import EMBED, DrafterNetwork
from dspark.philox import Keys
from dspark.proof.tiny_pair import draft_ids, drafter_config, drafter_weights, hf_config, target_weights
from dspark_proto import Lane
from dspark_workers.chain import DraftPolicy, MarkovChain
from dspark_workers.history import TokenHistory


def history(*tokens: int) -> TokenHistory:
    out = TokenHistory()
    out.record(0, tokens)
    return out


def test_the_longest_run_wins_then_the_latest_place() -> None:
    told = history(1, 2, 3, 9, 2, 3, 8, 1, 2, 3)
    assert told.continuation([1, 2, 3]) == (9, 3)
    assert told.continuation([5, 2, 3]) == (8, 2)
    assert told.continuation([2, 3]) == (8, 2)
    assert told.continuation([3]) is None
    assert told.continuation([3, 2]) is None
    assert told.continuation([]) is None


def test_the_end_of_the_text_has_no_continuation_yet() -> None:
    told = history(4, 5)
    assert told.continuation([4, 5]) is None
    told.record(2, [6])
    assert told.continuation([4, 5]) == (6, 2)


def test_no_run_crosses_a_gap() -> None:
    told = history(1, 2)
    told.record(4, [3, 4, 5])
    assert told.continuation([1, 2]) is None
    assert told.continuation([2, 3]) is None
    assert told.continuation([3, 4]) == (5, 2)
    assert told.continuation([-1, -1]) is None
    assert told.continuation([2, -1]) is None
    assert told.tail(6) == [3, 4]
    assert told.tail(4) == [-1, -1]


def test_what_is_known_stays() -> None:
    """Context, surviving drafts and anchors overlap: the first to come is recorded, once."""
    told = history(1, 2, 3)
    told.record(1, [2, 3, 4])
    told.record(0, [1])
    assert told.tail(4) == [3, 4]
    assert told.continuation([2, 3]) == (4, 2)


def test_tail_is_what_stands_before_a_position() -> None:
    told = history(1, 2, 3, 4)
    assert told.tail(0) == []
    assert told.tail(1) == [1]
    assert told.tail(3) == [2, 3]


@pytest.fixture(scope="module")
def chain() -> MarkovChain:
    target = from_hf(hf_config())
    config = drafter_config(target)
    weights = drafter_weights(config) | {EMBED: target_weights(target)["model.embed_tokens.weight"]}
    return MarkovChain(DrafterNetwork(config, weights, max_positions=64), draft_ids(config))


def drafted(chain: MarkovChain, temperature: float, told: TokenHistory | None, round_: int = 1) -> list[int]:
    base = torch.randn(4, len(chain._ids), generator=torch.Generator().manual_seed(3))
    keys = Keys(seed=1, generation=0, round=round_)
    policy = DraftPolicy(temperature, 1 if temperature == 0 else 16, Lane.RATIO)
    return chain.sample(base, 7, 2, policy, keys, told).tokens


def test_greedy_drafts_continue_a_repetition(chain: MarkovChain) -> None:
    inside = [int(i) for i in chain._ids[[3, 9, 20, 30]]]
    told = history(5, 6, 7, *inside, 5, 6)  # the anchor 7 stands after 5 6 again
    told_short = TokenHistory()
    told_short.record(0, [6, 6])
    plain = drafted(chain, 0.0, None)
    base = torch.randn(4, len(chain._ids), generator=torch.Generator().manual_seed(3))
    keys = Keys(seed=1, generation=0, round=1)
    proposal = chain.sample(base, 7, 9, DraftPolicy(0.0, 1, Lane.GREEDY), keys, told)
    assert proposal.tokens == inside
    assert all(row.counts.tolist() == [1 << 24] for row in proposal.rows)
    assert drafted(chain, 0.0, told_short) == plain


def test_a_token_outside_the_draft_vocabulary_is_not_favoured(chain: MarkovChain) -> None:
    outside = next(i for i in range(288) if i not in set(chain._ids.tolist()))
    told = history(5, 7, outside, 5)
    base = torch.randn(4, len(chain._ids), generator=torch.Generator().manual_seed(3))
    keys = Keys(seed=1, generation=0, round=1)
    policy = DraftPolicy(0.0, 1, Lane.GREEDY)
    assert chain.sample(base, 7, 4, policy, keys, told).tokens == chain.sample(base, 7, 4, policy, keys).tokens


def test_sampled_rows_are_laws_with_the_bias_in_them(chain: MarkovChain) -> None:
    """The row that is sent is the row that is drawn from, and the repetition is likelier in it, not certain."""
    base = torch.randn(1, len(chain._ids), generator=torch.Generator().manual_seed(3))
    keys = Keys(seed=1, generation=0, round=1)
    policy = DraftPolicy(1.0, 64, Lane.RATIO)
    target = int(chain.sample(base, 7, 4, policy, keys).rows[0].ids[20])
    told = history(5, 7, target, 5)
    with_bias = chain.sample(base, 7, 4, policy, keys, told).rows[0]
    without = chain.sample(base, 7, 4, policy, keys).rows[0]
    assert 0 < without.count(target) < with_bias.count(target) < 1 << 24
    others = [int(i) for i in without.ids if i != target and with_bias.count(int(i))]
    before, after = (np.array([row.count(i) for i in others], float) for row in (without, with_bias))
    np.testing.assert_allclose(before / before.sum(), after / after.sum(), rtol=1e-2, atol=1e-5)
