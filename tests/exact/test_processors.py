"""Target processors against the oracle: order, ties, survivors, temperature 0, and refusals."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark import oracle
from dspark.processors import LogitsError, PolicyError, SamplingPolicy, process, target_row
from dspark.tickets import TOTAL, target_tickets


def survivors(logits: np.ndarray, policy: SamplingPolicy) -> list[int]:
    return np.flatnonzero(process(logits, policy) > -np.inf).tolist()


LOGITS = st.lists(st.integers(-8, 4), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(logits=LOGITS, top_k=st.integers(1, 45))
def test_top_k_equals_the_oracle(logits: list[int], top_k: int) -> None:
    kept = survivors(np.array(logits, dtype=np.float32), SamplingPolicy(0.7, top_k))
    assert kept == oracle.top_indices([Fraction(value) for value in logits], top_k)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(logits=LOGITS, top_k=st.sampled_from([0, 1, 5]), top_p=st.floats(0, 0.999))
def test_top_p_after_top_k_equals_the_oracle(logits: list[int], top_k: int, top_p: float) -> None:
    """Small integer logits tie often; shares of e**integer sums stay clear of a random top_p."""
    policy = SamplingPolicy(1.0, top_k, top_p)
    row = np.array(logits, dtype=np.float32)
    weights = [Fraction(weight) for weight in np.exp(row - row.max(), dtype=np.float64).tolist()]
    if top_k:
        weights = oracle.keep(weights, oracle.top_indices(weights, top_k))
    assert survivors(row, policy) == oracle.nucleus(weights, Fraction(top_p))


@pytest.mark.parametrize("scale", [0.5, 3.0, 10.0])
def test_top_p_equals_a_full_sort_on_a_long_row(scale: float) -> None:
    logits = (np.random.default_rng(1).standard_normal(20_000) * scale).astype(np.float32)
    weights = np.exp(logits.astype(np.float64) - logits.max())
    ranked = np.argsort(-logits, kind="stable")
    reached = weights[ranked].cumsum() / weights.sum()
    for top_p in (0.0, 0.3, 0.95, 0.9999):
        wanted = ranked[: int(np.searchsorted(reached, top_p)) + 1]
        assert survivors(logits, SamplingPolicy(1.0, 0, top_p)) == sorted(wanted.tolist())


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.0, [1]), (0.25, [1]), (0.26, [1, 2]), (0.5, [1, 2]), (0.75, [1, 2, 3]), (0.76, [1, 2, 3, 5])],
)
def test_top_p_keeps_equal_tokens_by_ascending_id(top_p: float, kept: list[int]) -> None:
    logits = np.full(7, -np.inf, dtype=np.float32)
    logits[[1, 2, 3, 5]] = 2.0
    assert survivors(logits, SamplingPolicy(1.0, 0, top_p)) == kept


def test_temperature_comes_before_top_p() -> None:
    logits = np.array([2.0, 1.0, 0.0], dtype=np.float32)
    assert survivors(logits, SamplingPolicy(1.0, 0, 0.9)) == [0, 1]
    assert survivors(logits, SamplingPolicy(0.25, 0, 0.9)) == [0]
    assert survivors(logits, SamplingPolicy(8.0, 0, 0.9)) == [0, 1, 2]


def test_processed_logits_are_scaled_and_shifted() -> None:
    logits = np.array([1.0, 3.0, 2.0], dtype=np.float32)
    assert process(logits, SamplingPolicy(0.5, 2)).tolist() == [-np.inf, 0.0, -2.0]


@pytest.mark.parametrize(
    "policy",
    [
        SamplingPolicy(),
        SamplingPolicy(0.7),
        SamplingPolicy(1.3, 40),
        SamplingPolicy(0.9, 0, 0.8),
        SamplingPolicy(1.0, 50, 0.5),
        SamplingPolicy(0.0),
        SamplingPolicy(0.0, 5, 0.5),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_row_is_the_tickets_of_the_processed_logits(policy: SamplingPolicy, masked: bool) -> None:
    logits = (np.random.default_rng(9).standard_normal(3000) * 3).astype(np.float32)
    if masked:
        logits[5:900] = -np.inf
    row = target_row(logits, policy)
    assert row.tolist() == target_tickets(process(logits, policy)).tolist()
    assert int(row.sum()) == TOTAL


def test_temperature_zero_is_one_hot_at_the_lowest_maximum() -> None:
    logits = np.array([1.0, 4.0, 4.0, 2.0], dtype=np.float32)
    policy = SamplingPolicy(temperature=0.0)
    assert target_row(logits, policy).tolist() == [0, TOTAL, 0, 0]
    assert survivors(logits, policy) == [1]


def test_a_tiny_temperature_neither_overflows_nor_loses_its_survivor() -> None:
    logits = np.array([3e38, -3e38], dtype=np.float32)
    assert target_row(logits, SamplingPolicy(1e-300)).tolist() == [TOTAL, 0]


@pytest.mark.parametrize(
    ("logits", "words"),
    [([0.0, np.nan], "NaN"), ([np.inf, 0.0], "inf"), ([-np.inf, -np.inf], "all tokens")],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_distribution_are_refused(
    logits: list[float], words: str, temperature: float
) -> None:
    row = np.array(logits, dtype=np.float32)
    for make in (process, target_row):
        with pytest.raises(LogitsError, match=words):
            make(row, SamplingPolicy(temperature))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": np.nan}),
        ("temperature", {"temperature": np.inf}),
        ("top_k", {"top_k": -1}),
        ("top_p", {"top_p": -0.01}),
        ("top_p", {"top_p": 1.01}),
        ("top_p", {"top_p": np.nan}),
    ],
)
def test_policies_out_of_range_are_refused_by_name(field: str, values: dict[str, float]) -> None:
    with pytest.raises(PolicyError, match=field):
        SamplingPolicy(**values)  # type: ignore[arg-type]
