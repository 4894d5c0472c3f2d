"""`dspark bench rows`: it times what it says, every key is there, and its ratios are ratios of its times."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from dspark import native, row_benchmark
from dspark.apportionment import softmax64
from dspark.processors import SamplingPolicy, target_row
from dspark.row_benchmark import Kernel

VOCAB, SUPPORTS = 300, (2, 8)


@pytest.fixture(scope="module")
def result() -> dict[str, object]:
    return row_benchmark.run(3, vocabularies=(VOCAB,), supports=SUPPORTS)


def test_every_kernel_has_its_keys(result: dict[str, object]) -> None:
    dense = {f"dense_{what}_{unit}_{VOCAB}" for what in ("allocate", "make", "draw", "pack", "validate")
             for unit in ("us", "ratio", "copy_ratio")}  # fmt: skip
    made = {f"sparse_make_{unit}_5x{k}_{VOCAB}" for k in SUPPORTS for unit in ("us", "ratio", "copy_ratio")}
    target = {f"target_row_{unit}_{VOCAB}" for unit in ("us", "ratio", "copy_ratio")}
    read = {f"sparse_validate_{unit}_20x{k}" for k in SUPPORTS for unit in ("us", "copy_ratio")}
    softmax = {f"softmax64_us_{VOCAB}", f"softmax64_copy_ratio_{VOCAB}"}
    quartiles = result["quartiles"]
    assert isinstance(quartiles, dict)
    assert set(quartiles) == dense | target | made | read | softmax
    for key, (low, high) in quartiles.items():
        value = result[key]
        assert isinstance(value, float)
        assert 0 < low <= value <= high, key


def test_the_result_says_how_it_was_measured(result: dict[str, object]) -> None:
    assert result["native"] is (native.choice().library is not None)
    assert result["path"] == str(native.choice())
    assert result["rounds"] == 3
    assert result["vocabularies"] == [VOCAB]
    with native.using(native.Choice(None, "a test")):
        assert row_benchmark.run(1, (VOCAB,), SUPPORTS[:1])["native"] is False


def test_the_report_takes_ratios_inside_a_round_and_per_row() -> None:
    """Drift that doubles every time of a round changes no ratio; a batch counts by the row."""
    softmax = Kernel("softmax64", "9", lambda: None, 8, 1, [1e-6, 2e-6, 4e-6], [1e-6, 1e-6, 1e-6])
    batch = Kernel("sparse_make", "5x2_9", lambda: None, 8, 5, [1e-5, 2e-5, 4e-5], [5e-6, 1e-5, 2e-5])
    result: dict[str, object] = {}
    quartiles: dict[str, list[float]] = {}
    row_benchmark._report(result, quartiles, [softmax, batch], softmax)
    assert result["sparse_make_us_5x2_9"] == 20
    assert result["sparse_make_ratio_5x2_9"] == 2
    assert quartiles["sparse_make_ratio_5x2_9"] == [2, 2]
    assert result["sparse_make_copy_ratio_5x2_9"] == 2
    assert result["softmax64_copy_ratio_9"] == 2
    assert "softmax64_ratio_9" not in result


def test_the_yardstick_is_a_softmax_of_the_row_and_the_target_row_is_timed_beside_it() -> None:
    softmax, target, *_ = row_benchmark._row_kernels(VOCAB)
    logits = row_benchmark._logits(1, VOCAB, seed=0)[0]
    weights, tickets = softmax.call(), target.call()
    assert isinstance(weights, np.ndarray)
    assert isinstance(tickets, np.ndarray)
    assert weights == pytest.approx(softmax64(logits), rel=1e-14)
    assert tickets.tolist() == target_row(logits, SamplingPolicy()).tolist()


def test_kernels_are_interleaved_and_warmed_up() -> None:
    order: list[str] = []

    def recorder(name: str) -> Callable[[], object]:
        return lambda: order.append(name)

    kernels = [Kernel("a", "1", recorder("a"), 16), Kernel("b", "1", recorder("b"), 16)]
    row_benchmark._measure(kernels, rounds=4)
    assert order == ["a", "b"] * (4 + row_benchmark._WARM_UP_ROUNDS)
    assert [len(kernel.seconds) for kernel in kernels] == [4, 4]
    assert [len(kernel.copy_seconds) for kernel in kernels] == [4, 4]


def test_output_for_machines_and_for_people(result: dict[str, object]) -> None:
    assert json.loads(row_benchmark.as_json(result)) == result
    table = row_benchmark.as_table(result)
    names = [f"target row {VOCAB}", f"dense validate {VOCAB}", f"sparse make 5x8 {VOCAB}", "sparse validate 20x2"]
    for name in (*names, f"softmax64 {VOCAB}"):
        assert any(line.startswith(name) for line in table.splitlines()), name
    line = next(line for line in table.splitlines() if line.startswith(f"dense allocate {VOCAB}"))
    assert f"{result[f'dense_allocate_ratio_{VOCAB}']}" in line.split()
