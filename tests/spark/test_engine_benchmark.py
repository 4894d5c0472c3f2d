"""`dspark bench spec` on the tiny pair: every figure that it promises, and figures that agree with each other."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from dspark import roles
from dspark.launch import LocalWorker
from dspark_spark import benchmark
from dspark_spark.benchmark import BenchOptions
from dspark_spark.held_out import PROMPTS
from dspark_spark.stopwatch import Stopwatch
from tests.conftest import TinyPair

PER_TEMPERATURE = ("tok_s", "target_only_tok_s", "speedup", "tokens_per_step", "acceptance_per_position")
KEYS = {f"{key}_{t}" for key in PER_TEMPERATURE for t in ("t0", "t1")} | {"drafted", "verified", "accepted", "round_ms"}
STAGES = {"send", "drafter", "link", "validate", "verify", "sample"}


def test_two_prompts(tiny_pair: TinyPair, tiny_worker: LocalWorker) -> None:
    machine = roles.Machine(str(tiny_pair.target), "cpu", "fp32", 1, 2, 256)
    spark = roles.build_spark(machine, tiny_pair.speculative(), tiny_worker.endpoint, 5000)
    log: list[str] = []
    result = benchmark.run(spark, BenchOptions(2, 24), log.append)
    assert set(result) >= KEYS
    assert json.loads(benchmark.as_json(result)) == result
    drafted, verified, accepted = (result[k] for k in ("drafted", "verified", "accepted"))
    assert 0 < accepted <= verified <= drafted  # type: ignore[operator]
    for name in ("t0", "t1"):
        per_position: list[float] = result[f"acceptance_per_position_{name}"]  # type: ignore[assignment]
        assert all(1 >= a >= b > 0 for a, b in pairwise(per_position))
        assert 1 <= result[f"tokens_per_step_{name}"] <= 5  # type: ignore[operator]
        speedup = result[f"tok_s_{name}"] / result[f"target_only_tok_s_{name}"]  # type: ignore[operator]
        assert result[f"speedup_{name}"] == pytest.approx(speedup, rel=0.02)
        stages: dict[str, float] = result["round_ms"][name]  # type: ignore[index]
        assert set(stages) == {*STAGES, "total"}
        assert stages["total"] == pytest.approx(sum(v for k, v in stages.items() if k != "total"), abs=0.01)
        assert result[f"target_only_step_ms_{name}"] > 0  # type: ignore[operator]
    assert [line.partition(":")[0] for line in log] == ["prompt 1/2", "prompt 2/2"]
    table = benchmark.as_table(result)
    assert f"drafted {drafted}, verified {verified}, accepted {accepted}" in table
    assert not spark.engine.alive


def test_figures_count_decode_steps_only() -> None:
    """The first delta is the prefill's token; tokens per step and positions come from the others."""
    from dspark_spark.api import Delta, SpeculationStats

    arm = benchmark.ArmTotals()
    stats = SpeculationStats("greedy", rounds=2, drafted=8, verified=8, accepted=3, target_only_steps=1)
    steps = [
        Delta(token_ids=(1,), from_draft=(False,)),
        Delta(token_ids=(1, 2, 3), from_draft=(True, True, False)),
        Delta(token_ids=(4,), from_draft=(False,)),
        Delta(token_ids=(5, 6), from_draft=(True, False), finish_reason="length", stats=stats),
    ]
    benchmark._add(arm, steps, 2.0, 4, {"verify": 1.0})
    assert (arm.tokens, arm.steps, arm.accepted_at) == (7, 3, [2, 1])
    assert benchmark._tokens_per_step(arm, 1) == 2.0
    assert arm.tok_s == 3.5


def test_the_held_out_prompts_are_different_and_enough() -> None:
    assert len(set(PROMPTS)) == len(PROMPTS) >= 20


def test_stopwatch_splits_and_takes() -> None:
    watch = Stopwatch()
    watch.begin()
    watch.lap("a")
    watch.split("b", 1000.0, rest="c")  # more than there was: all of it is b's
    laps = watch.end()
    assert set(laps) == {"a", "b", "c"}
    assert laps["b"] >= 0
    assert laps["c"] < 0.5
    rounds, totals = watch.take()
    assert (rounds, totals) == (1, laps)
    assert watch.take() == (0, {})
