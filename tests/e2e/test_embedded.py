"""The shipped pair, as a newcomer meets it: `dspark serve` in its own processes, judged by the official client."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from openai import OpenAI

from dspark.models.source import load_target, open_target
from dspark.models.target import Segment
from dspark_spark.held_out import PROMPTS

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class Served:
    url: str
    client: OpenAI


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    command = [sys.executable, "-m", "dspark.cli", "serve", "--port", "0", "--dtype", "fp32"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("ready: "):
            break
    else:
        raise AssertionError("".join(lines))
    url = lines[-1].split()[1]
    yield Served(url, OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0))
    process.terminate()
    process.communicate(timeout=30)


def metric(served: Served, name: str) -> float:
    with urllib.request.urlopen(f"{served.url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def answer(served: Served, prompt: str, max_tokens: int, speculate: bool) -> list[int]:
    """Token ids of a greedy answer."""
    completion = served.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=max_tokens,
        extra_body={"dspark_token_origins": True, "dspark_speculate": speculate},
    )
    ids: list[int] = completion.choices[0].model_extra["dspark"]["token_ids"]  # type: ignore[index]
    return ids


def test_the_official_client_streams_a_sensible_answer(served: Served) -> None:
    stream = served.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "The capital of France is Paris."
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_drafts_of_the_shipped_drafter_are_accepted(served: Served) -> None:
    before = {k: metric(served, f"dspark:spec_decode_num_{k}_tokens_total") for k in ("draft", "verified", "accepted")}
    answer(served, PROMPTS[9], 64, speculate=True)
    after = {k: metric(served, f"dspark:spec_decode_num_{k}_tokens_total") for k in before}
    grown = {k: after[k] - before[k] for k in before}
    assert grown["draft"] >= grown["verified"] > 0
    # A misloaded drafter still serves correct text: only the acceptance tells. The shipped one is far above this.
    assert grown["accepted"] > 0.12 * grown["verified"]


def test_greedy_answers_do_not_change_with_speculation(served: Served) -> None:
    compare_greedy(served, PROMPTS[:3], 40)


@pytest.mark.slow
def test_fifty_greedy_answers_do_not_change_with_speculation(served: Served) -> None:
    assert len(PROMPTS) == 50
    compare_greedy(served, PROMPTS, 128)


def compare_greedy(served: Served, prompts: tuple[str, ...], max_tokens: int) -> None:
    """Identical ids, or a near-tie: then the target's top-2 gap at the first difference is printed and must be tiny."""
    differing = []
    for prompt in prompts:
        on, off = (answer(served, prompt, max_tokens, speculate) for speculate in (True, False))
        if on != off:
            at = next(i for i, (a, b) in enumerate(zip(on, off, strict=False)) if a != b)
            gap = top_two_gap(prompt, off[:at])
            print(f"{prompt!r}: first difference at token {at}, top-2 gap {gap:.2e}")
            differing.append(gap)
    print(f"{len(prompts) - len(differing)} of {len(prompts)} greedy answers identical")
    assert all(gap < 1e-3 for gap in differing)


def top_two_gap(prompt: str, prefix: list[int]) -> float:
    source = open_target("embedded")
    tokenizer = source.tokenizer()
    ids = tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": prompt}])) + prefix
    model = load_target(source, device="cpu", dtype=torch.float32, max_positions=1024)
    logits = model.forward(model.new_cache(1, len(ids)), [Segment(0, 0, ids)], logit_rows=[len(ids) - 1]).logits[0]
    first, second = logits.topk(2).values.tolist()
    return float(first - second)
