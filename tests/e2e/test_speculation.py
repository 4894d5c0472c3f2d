"""The real path on a tiny pair: HTTP, engine, v2 wire, a worker in its own process."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dspark.block_verification import Branch
from dspark.launch import LocalWorker
from dspark.models.source import load_target, open_target
from dspark.models.target import Segment
from dspark.processors import SamplingPolicy, target_row
from dspark.tickets import TOTAL, pick
from tests.conftest import RunningEndpoint, TinyPair, run_endpoint

PROMPT = [3, 14, 15, 92, 65, 35]


def complete(url: str, **fields: Any) -> dict[str, Any]:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 32, "temperature": 0, **fields}).encode()
    request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url + "/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return {n: float(v) for n, _, v in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


def tokens(url: str, **fields: Any) -> list[int]:
    answer = complete(url, dspark_token_origins=True, ignore_eos=True, **fields)
    ids: list[int] = answer["choices"][0]["dspark"]["token_ids"]
    return ids


def test_greedy_text_does_not_change_with_speculation(tiny_endpoint: RunningEndpoint) -> None:
    for start in range(12):
        prompt = [(start * 37 + i * 11) % 256 for i in range(5 + start)]
        on = tokens(tiny_endpoint.url, prompt=prompt, max_tokens=40)
        off = tokens(tiny_endpoint.url, prompt=prompt, max_tokens=40, dspark_speculate=False)
        assert on == off
        assert len(on) == 40


def test_drafts_are_drafted_verified_and_accepted(tiny_endpoint: RunningEndpoint) -> None:
    before = metrics(tiny_endpoint.url)
    answer = complete(tiny_endpoint.url, temperature=1, seed=5, ignore_eos=True, max_tokens=64)
    after = metrics(tiny_endpoint.url)
    spec = answer["speculation"]
    assert spec["lane"] == "ratio"
    assert 0 < spec["accepted"] < spec["verified"] <= spec["drafted"]
    for name, field in (("draft", "drafted"), ("verified", "verified"), ("accepted", "accepted")):
        key = f"dspark:spec_decode_num_{name}_tokens_total"
        assert after[key] - before[key] == spec[field]
    assert answer["usage"]["completion_tokens"] == 64


def test_the_same_seed_gives_the_same_text(tiny_endpoint: RunningEndpoint) -> None:
    first, again, other = (tokens(tiny_endpoint.url, temperature=1, seed=s) for s in (11, 11, 12))
    assert first == again
    assert first != other


def test_concurrent_requests_do_not_touch_each_other(tiny_endpoint: RunningEndpoint) -> None:
    from concurrent.futures import ThreadPoolExecutor

    prompts = [[(i * 31 + j) % 256 for j in range(4 + 3 * i)] for i in range(7)]
    alone = [tokens(tiny_endpoint.url, prompt=p, max_tokens=10 + 4 * i) for i, p in enumerate(prompts)]
    with ThreadPoolExecutor(7) as pool:
        together = pool.map(
            lambda ip: tokens(tiny_endpoint.url, prompt=ip[1], max_tokens=10 + 4 * ip[0]), enumerate(prompts)
        )
    assert list(together) == alone


def test_match_lane_text_does_not_change_with_speculation(tiny_endpoint: RunningEndpoint) -> None:
    """Sampled, same seed: the drafter decides how fast, never what. In the ratio lane the seed's text does change."""
    for seed in range(6):
        asked = {"temperature": 1, "seed": seed, "max_tokens": 48, "dspark_lane": "match"}
        on = complete(tiny_endpoint.url, dspark_token_origins=True, ignore_eos=True, **asked)
        off = tokens(tiny_endpoint.url, dspark_speculate=False, **asked)
        assert on["choices"][0]["dspark"]["token_ids"] == off
        assert on["speculation"]["lane"] == "match"
        assert on["speculation"]["verified"] > 0
    texts = {tuple(tokens(tiny_endpoint.url, temperature=1, seed=3, dspark_speculate=s)) for s in (True, False)}
    assert len(texts) == 2


@pytest.mark.parametrize(("lane", "temperature"), [("greedy", 0.5), ("typical", 1)])
def test_a_lane_that_cannot_be_had_is_refused(tiny_endpoint: RunningEndpoint, lane: str, temperature: float) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        complete(tiny_endpoint.url, dspark_lane=lane, temperature=temperature)
    assert refused.value.code == 400
    assert json.load(refused.value)["error"]["param"] == "dspark_lane"


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6])
def test_short_budgets_are_kept_to_the_token(tiny_endpoint: RunningEndpoint, max_tokens: int) -> None:
    answer = complete(tiny_endpoint.url, max_tokens=max_tokens, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert answer["choices"][0]["finish_reason"] == "length"


def test_generation_to_the_end_of_the_context(tiny_endpoint: RunningEndpoint) -> None:
    prompt = [i % 256 for i in range(200)]
    on = tokens(tiny_endpoint.url, prompt=prompt, max_tokens=56)
    off = tokens(tiny_endpoint.url, prompt=prompt, max_tokens=56, dspark_speculate=False)
    assert on == off
    assert len(on) == 56


def target_law(pair: TinyPair, policy: SamplingPolicy, length: int) -> dict[tuple[int, ...], float]:
    """The exact joint law of the first `length` tokens after PROMPT, by walking every prefix with tickets."""
    source = open_target(str(pair.target))
    model = load_target(source, device="cpu", dtype=torch.float32)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    cache = model.new_cache(1, 64)
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for prefix, mass in law.items():
            row = [*PROMPT, *prefix]
            logits = model.forward(cache, [Segment(0, 0, row)], logit_rows=[len(row) - 1]).logits[0]
            tickets = target_row(logits.numpy(), policy)
            for token in np.flatnonzero(tickets):
                longer[*prefix, int(token)] = mass * int(tickets[token]) / TOTAL
        law = longer
    return law


def chi_square(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float], total: int) -> tuple[float, int]:
    """Statistic and degrees of freedom; cells expected below ten are merged into one."""
    assert set(counts) <= set(law), "a token sequence that the target cannot produce"
    statistic, cells, rest, rest_seen = 0.0, 0, 0.0, 0
    for key, probability in law.items():
        expected = probability * total
        if expected < 10:
            rest += expected
            rest_seen += counts[key]
            continue
        statistic += (counts[key] - expected) ** 2 / expected
        cells += 1
    if rest >= 10:
        statistic += (rest_seen - rest) ** 2 / rest
        cells += 1
    return statistic, cells - 1


def chi_square_limit(df: int) -> float:
    """Upper 1e-6 point, Wilson and Hilferty's approximation (within half a percent above df 5)."""
    z = 4.753424
    return float(df * (1 - 2 / (9 * df) + z * (2 / (9 * df)) ** 0.5) ** 3)


def sample_law(url: str, total: int, top_k: int) -> Counter[tuple[int, ...]]:
    from concurrent.futures import ThreadPoolExecutor

    def one(seed: int) -> tuple[int, ...]:
        # Four tokens: the first comes from prefill, the next two are drafted with room to spare.
        return tuple(tokens(url, temperature=1, top_k=top_k, seed=seed, max_tokens=4)[:3])

    with ThreadPoolExecutor(4) as pool:
        return Counter(pool.map(one, range(total)))


SAMPLES = 700


@pytest.fixture(scope="module", params=["block", "standard"])
def cold_endpoint(
    request: pytest.FixtureRequest, tiny_pair: TinyPair, tiny_worker: LocalWorker
) -> Iterator[RunningEndpoint]:
    """Drafts at another temperature than the target's: q is far from p, so that corrections matter."""
    config = tiny_pair.speculative(draft_temperature=0.4, rejection_sample_method=request.param)
    yield from run_endpoint(tiny_pair, tiny_worker.endpoint, config)


def test_the_joint_law_of_three_tokens_is_the_targets(cold_endpoint: RunningEndpoint, tiny_pair: TinyPair) -> None:
    law = target_law(tiny_pair, SamplingPolicy(1.0, top_k=3), 3)
    statistic, df = chi_square(sample_law(cold_endpoint.url, SAMPLES, 3), law, SAMPLES)
    assert df >= 8
    assert statistic < chi_square_limit(df)


def test_a_planted_wrong_residual_is_caught(
    cold_endpoint: RunningEndpoint, tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: with the correction drawn from p instead of what q leaves of it, it does."""
    law = target_law(tiny_pair, SamplingPolicy(1.0, top_k=3), 3)
    monkeypatch.setattr("dspark.verify.residual", lambda tickets, row, grid: tickets)
    monkeypatch.setattr(Branch, "correction", lambda branch, u64: pick(branch.tickets, u64))
    statistic, df = chi_square(sample_law(cold_endpoint.url, SAMPLES, 3), law, SAMPLES)
    assert statistic > chi_square_limit(df)
