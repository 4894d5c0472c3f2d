"""`dspark bench spec`: speculative against target-only decoding in one engine, interleaved.

Every prompt is answered four times in a row: {target only, speculative} x {T = 0, T = 1}, one request at a time, after
a warm-up. Only one variable differs inside a pair. Times are wall-clock from submission to the last token (prefill
included); tokens are committed tokens. The order inside a pair alternates from prompt to prompt, so that drift of the
machine cancels.
"""

from __future__ import annotations

import json
import queue
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dspark_spark.api import FINISH_ABORT, FINISH_ERROR, Delta, GenerateRequest, SamplingParams
from dspark_spark.build import Spark
from dspark_spark.held_out import PROMPT_SETS

LINK_TIMEOUT_S = 30.0
TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """prompts: how many of the set's held-out prompts; max_tokens: length bound of an answer."""

    prompts: int
    max_tokens: int
    prompt_set: str = "self"


@dataclass
class ArmTotals:
    """Totals of one arm (a temperature, with or without speculation)."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    pair_rates: list[float] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    turns: int = 0

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def run(spark: Spark, options: BenchOptions, log: Callable[[str], None]) -> dict[str, object]:
    """Run the benchmark; returns the result object (see docs/reference/benchmarks.md for the keys)."""
    held_out = PROMPT_SETS[options.prompt_set]
    spark.engine.start()
    try:
        _await_link(spark)
        arms = {(t, s): ArmTotals() for t in TEMPERATURES for s in (False, True)}
        for key in arms:
            _answer(spark, held_out[-1], key, 16, ArmTotals(), seed=0)
        prompts = held_out[: options.prompts]
        for i, prompt in enumerate(prompts):
            for temperature in TEMPERATURES:
                order = (False, True) if i % 2 == 0 else (True, False)
                for speculate in order:
                    key = (temperature, speculate)
                    _answer(spark, prompt, key, options.max_tokens, arms[key], seed=i)
            log(f"prompt {i + 1}/{len(prompts)}: {_progress(arms)}")
        return {"prompt_set": options.prompt_set, **_result(spark, arms, len(prompts), options.max_tokens)}
    finally:
        spark.engine.stop()


def _await_link(spark: Spark) -> None:
    link = spark.engine.link
    if link is None or not link.wait_up(LINK_TIMEOUT_S):
        error = "there is no link" if link is None else link.last_error
        raise RuntimeError(f"the drafter worker did not come up in {LINK_TIMEOUT_S:.0f} s: {error}")


def _answer(
    spark: Spark, prompt: str, key: tuple[float, bool], max_tokens: int, arm: ArmTotals, seed: int
) -> None:
    temperature, speculate = key
    text = spark.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    request = GenerateRequest(
        request_id=f"bench-{seed}-{temperature}-{speculate}",
        prompt_ids=tuple(spark.tokenizer.encode(text)),
        params=SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed),
        speculate=speculate,
    )
    deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    spark.engine.stopwatch.take()
    started = time.perf_counter()
    spark.engine.submit(request, deltas.put)
    steps: list[Delta] = []
    while not steps or steps[-1].finish_reason is None:
        steps.append(deltas.get())
    seconds = time.perf_counter() - started
    if steps[-1].finish_reason in (FINISH_ERROR, FINISH_ABORT):
        raise RuntimeError(f"the engine failed on {prompt!r}: {steps[-1].error}")
    _add(arm, steps, seconds, *spark.engine.stopwatch.take())


def _add(arm: ArmTotals, steps: list[Delta], seconds: float, turns: int, stages: dict[str, float]) -> None:
    """Account one answer. The first delta is the prefill's token, not a decode step."""
    decode, last = steps[1:], steps[-1]
    tokens = sum(len(d.token_ids) for d in steps)
    arm.seconds += seconds
    arm.tokens += tokens
    arm.steps += len(decode)
    arm.rounds += last.stats.rounds
    arm.drafted += last.stats.drafted
    arm.verified += last.stats.verified
    arm.accepted += last.stats.accepted
    arm.pair_rates.append(tokens / seconds)
    for delta in decode:
        for position in range(sum(delta.from_draft)):
            if position == len(arm.accepted_at):
                arm.accepted_at.append(0)
            arm.accepted_at[position] += 1
    arm.turns += turns
    for name, value in stages.items():
        arm.stages[name] = arm.stages.get(name, 0.0) + value


def _tokens_per_step(arm: ArmTotals, answers: int) -> float:
    """Tokens that decode steps made (an answer's first token comes from its prefill) per decode step."""
    return (arm.tokens - answers) / max(1, arm.steps)


def _progress(arms: dict[tuple[float, bool], ArmTotals]) -> str:
    parts = []
    for t in TEMPERATURES:
        plain, spec = arms[t, False], arms[t, True]
        parts.append(f"T={t:g} {plain.tok_s:.1f} -> {spec.tok_s:.1f} tok/s ({spec.tok_s / plain.tok_s:.2f}x)")
    return ", ".join(parts)


def _result(
    spark: Spark, arms: dict[tuple[float, bool], ArmTotals], prompts: int, max_tokens: int
) -> dict[str, object]:
    result: dict[str, object] = {
        "model": spark.model_name,
        **spark.facts,
        "prompts": prompts,
        "max_tokens": max_tokens,
    }
    for t in TEMPERATURES:
        plain, spec, name = arms[t, False], arms[t, True], f"t{t:g}"
        ratios = [a / b for a, b in zip(spec.pair_rates, plain.pair_rates, strict=True)]
        result |= {
            f"tok_s_{name}": round(spec.tok_s, 2),
            f"target_only_tok_s_{name}": round(plain.tok_s, 2),
            f"speedup_{name}": round(spec.tok_s / plain.tok_s, 3),
            f"speedup_median_{name}": round(statistics.median(ratios), 3),
            f"speedup_quartiles_{name}": [round(q, 3) for q in _quartiles(ratios)],
            f"tokens_per_step_{name}": round(_tokens_per_step(spec, prompts), 3),
            f"acceptance_per_position_{name}": [round(n / max(1, spec.rounds), 3) for n in spec.accepted_at],
            f"target_only_step_ms_{name}": _step_ms(plain),
        }
    both = [arms[t, True] for t in TEMPERATURES]
    result |= {
        "drafted": sum(a.drafted for a in both),
        "verified": sum(a.verified for a in both),
        "accepted": sum(a.accepted for a in both),
        "round_ms": {f"t{t:g}": _stages_ms(arms[t, True]) for t in TEMPERATURES},
    }
    return result


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


def _step_ms(arm: ArmTotals) -> float:
    return round(1000 * sum(arm.stages.values()) / arm.turns, 2)


def _stages_ms(arm: ArmTotals) -> dict[str, float]:
    """Mean milliseconds of each stage per turn of the loop; `total` is their sum."""
    stages = {name: round(1000 * value / arm.turns, 3) for name, value in arm.stages.items()}
    return {**stages, "total": round(sum(stages.values()), 3)}


def as_json(result: dict[str, object]) -> str:
    return json.dumps(result, indent=1)


def as_table(result: dict[str, object]) -> str:
    """The same figures for people."""
    lines = [
        f"{result['model']} ({result['dtype']}, {result['device']}), depth {result['num_speculative_tokens']}, "
        f"{result['prompts']} held-out prompts ({result['prompt_set']}) x {result['max_tokens']} tokens, "
        "one request at a time",
        "",
        f"{'':26}{'T = 0':>10}{'T = 1':>10}",
    ]
    rows = (
        ("target only, tok/s", "target_only_tok_s"),
        ("speculative, tok/s", "tok_s"),
        ("speedup", "speedup"),
        ("speedup, median of prompts", "speedup_median"),
        ("tokens per step", "tokens_per_step"),
    )
    lines += [f"{title:26}{result[f'{key}_t0']:>10}{result[f'{key}_t1']:>10}" for title, key in rows]
    lines += ["", f"drafted {result['drafted']}, verified {result['verified']}, accepted {result['accepted']}"]
    for name in ("t0", "t1"):
        accepted: list[float] = result[f"acceptance_per_position_{name}"]  # type: ignore[assignment]
        shares = " ".join(f"{share:.3f}" for share in accepted)
        lines.append(f"accepted per drafted position, T = {name[1:]}: {shares}")
    stages: dict[str, dict[str, float]] = result["round_ms"]  # type: ignore[assignment]
    for name, split in stages.items():
        lines.append(f"round, ms, T = {name[1:]}: " + ", ".join(f"{k} {v:.2f}" for k, v in split.items()))
    return "\n".join(lines)
