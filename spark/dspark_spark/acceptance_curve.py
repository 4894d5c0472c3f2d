"""`dspark bench acceptance`: what the width of a q row costs in acceptance, and what it costs in bytes.

One text, every width: the target answers held-out prompts alone at temperature T, then target and drafter are run once
over the finished text, and every position of it is an anchor. With x the text, p and q the rows after it, a draft at
position j is reached and accepted with probability

    S_j = E[ prod_(i<j) min(1, q_i(x_i) / p_i(x_i)) * sum_v min(p_j(v), q_j(v)) ]        ratio lane, token by token
    S_j = E[ sum_v min(m p_j(v), r q_j(v)) ]                                             ratio lane, as a block
    S_j = E[ prod_(i<j) q_i(x_i) * sum_v p_j(v) q_j(v) ]                                 match lane

with r = prod_(i<j) q_i(x_i) / p_i(x_i) and m the least such product over the prefixes of x_<j (1 for the empty one),
because the text is distributed as p. Nothing is drawn for the estimate, so widths differ by nothing but their rows; the
rows are the production ones, counts and all. Anchors are all positions of a text, while decoding places more anchors
after rejections, where drafting is harder: compare widths here, and take tokens per step from `dspark bench spec`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dspark.dense import dense_row
from dspark.dyadic import sparse_row
from dspark.models.drafter import DrafterNetwork
from dspark.models.packed_blocks import PackedBlockAttention
from dspark.models.target import KVCache, Segment, TargetModel
from dspark.models.tokenizer import ChatTokenizer
from dspark.philox import Keys
from dspark.processors import SamplingPolicy, target_row
from dspark.row import MASS, Float32s, Float64s, Row
from dspark.tickets import TOTAL
from dspark.verify import sample_target_only
from dspark_proto import ReplyLayout
from dspark_spark.held_out import PROMPT_SETS

TEMPERATURES = (0.7, 1.0)
WIDTHS = (256, 64, 32, 16)
MATCH_SUPPORT = 32
DENSE = "dense"
MATCH = "match"
BLOCK = " block"


@dataclass(frozen=True, slots=True)
class CurveOptions:
    """prompts: how many of the set's held-out prompts; max_tokens: length bound of an answer."""

    prompts: int
    max_tokens: int
    prompt_set: str = "self"


@dataclass(frozen=True, slots=True)
class Pair:
    """Target and drafter in one process. draft_ids: int64 [draft vocab], the target id of every draft id."""

    target: TargetModel
    tokenizer: ChatTokenizer
    drafter: DrafterNetwork
    draft_ids: Tensor


@dataclass
class Survival:
    """Sums over blocks of the probability that position j is reached and accepted, float64 [block]."""

    sums: Float64s
    blocks: int = 0

    def add(self, reached: Float64s) -> None:
        self.sums += reached
        self.blocks += 1

    @property
    def positions(self) -> list[float]:
        return [float(s) for s in self.sums / max(1, self.blocks)]


@dataclass
class Text:
    """One answer and what both models say about it.

    logits float32 [answer, V]: row i is the target's law of answer token i. base float32 [anchors, block, Vd]: draft
    logits with the Markov bias of the text's own tokens; anchor a drafts answer tokens a to a + block - 1.
    """

    answer: list[int]
    logits: Float32s
    base: Float32s = field(repr=False)


def run(pair: Pair, options: CurveOptions, log: Callable[[str], None]) -> dict[str, object]:
    """Measure every lane at every temperature; returns the result object."""
    block = pair.drafter.config.block_size
    prompts = PROMPT_SETS[options.prompt_set][: options.prompts]
    tables: dict[str, object] = {}
    for temperature in TEMPERATURES:
        lanes = {name: Survival(np.zeros(block)) for name in lane_names()}
        for i, prompt in enumerate(prompts):
            _add(pair, _text(pair, prompt, temperature, options.max_tokens, seed=i), temperature, lanes)
            log(f"T={temperature:g}, text {i + 1}/{len(prompts)}: {_progress(lanes)}")
        tables[f"t{temperature:g}"] = {name: _figures(pair, name, s) for name, s in lanes.items()}
    return {
        "prompt_set": options.prompt_set,
        "prompts": len(prompts),
        "max_tokens": options.max_tokens,
        "depth": block,
        "draft_vocabulary": len(pair.draft_ids),
        "temperatures": tables,
    }


def lane_names() -> list[str]:
    """The ratio lane by width, as a block and token by token, then the match lane."""
    widths = [DENSE, *(f"k{k}" for k in WIDTHS)]
    return [*(f"{width}{rule}" for width in widths for rule in (BLOCK, "")), MATCH]


def _figures(pair: Pair, name: str, survival: Survival) -> dict[str, object]:
    positions = survival.positions
    return {
        "accepted_per_position": [round(p, 4) for p in positions],
        "tokens_per_step": round(1 + sum(positions), 4),
        "reply_bytes": reply_bytes(name, len(positions), pair.target.config.vocab_size),
        "blocks": survival.blocks,
    }


def reply_bytes(name: str, depth: int, vocab: int) -> int:
    """Bytes of the rows of one reply, headers of the frames excluded."""
    name = name.removesuffix(BLOCK)
    if name == DENSE:
        return ReplyLayout(depth, 0).total_bytes + 4 * depth * vocab
    return ReplyLayout(depth, 1 if name == MATCH else int(name.removeprefix("k"))).total_bytes


def _progress(lanes: dict[str, Survival]) -> str:
    return ", ".join(f"{name} {1 + sum(s.positions):.3f}" for name, s in lanes.items())


# -- the text ----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def _text(pair: Pair, prompt: str, temperature: float, max_tokens: int, seed: int) -> Text:
    """The target's own answer, and both models' logits over it."""
    asked = pair.tokenizer.encode(pair.tokenizer.apply_chat_template([{"role": "user", "content": prompt}]))
    cache = pair.target.new_cache(1, len(asked) + max_tokens + 1)
    answer = _answer(pair, cache, asked, SamplingPolicy(temperature), max_tokens, seed)
    tokens = [*asked, *answer]
    seen = pair.target.forward(
        cache, [Segment(0, 0, tokens[:-1])], tap_layers=pair.drafter.config.target_layer_ids
    )
    assert seen.taps is not None
    first = len(asked) - 1
    return Text(answer, seen.logits[first:].float().cpu().numpy(), _draft_logits(pair, seen.taps, tokens, first))


def _answer(
    pair: Pair, cache: KVCache, asked: Sequence[int], policy: SamplingPolicy, max_tokens: int, seed: int
) -> list[int]:
    fed, start, answer = list(asked), 0, list[int]()
    keys = Keys(seed=seed, generation=0, round=1)
    while len(answer) < max_tokens:
        logits = pair.target.forward(cache, [Segment(0, start, fed)], logit_rows=[len(fed) - 1]).logits
        start += len(fed)
        tickets = target_row(logits[0].float().cpu().numpy(), policy)
        answer.append(sample_target_only(tickets, start, keys))
        if answer[-1] in pair.tokenizer.eos_ids:
            break
        fed = [answer[-1]]
    return answer


def _draft_logits(pair: Pair, taps: Tensor, tokens: list[int], first: int) -> Float32s:
    """Draft logits of every whole block of the answer [anchors, block, Vd]; anchors sit at first, first + 1, ..."""
    network, block = pair.drafter, pair.drafter.config.block_size
    count = len(tokens) - first - block
    if count <= 0:
        return np.zeros((0, block, len(pair.draft_ids)), dtype=np.float32)
    anchors = torch.arange(first, first + count)
    context = network.context_rows(taps.to(network.embed.dtype))[None]
    places = torch.arange(context.shape[1])[None]
    kv = [network.context_kv(i, context, places) for i in range(network.config.layers)]
    text = torch.tensor(tokens)
    positions = anchors[:, None] + torch.arange(block)
    ids = torch.full(positions.shape, network.config.mask_token_id)
    ids[:, 0] = text[anchors]
    hidden = network.backbone(ids[None], positions[None], PackedBlockAttention(kv, anchors[None]))
    logits = network.base_logits(hidden.reshape(-1, network.config.hidden_size))
    logits = logits + network.markov_bias(text[positions].reshape(-1))
    drafted: Float32s = logits.float().view(count, block, -1).numpy()
    return drafted


# -- the estimate ------------------------------------------------------------------------------------------------------


def _add(pair: Pair, text: Text, temperature: float, lanes: dict[str, Survival]) -> None:
    policy = SamplingPolicy(temperature)
    p = [target_row(row, policy) / TOTAL for row in text.logits]
    ids, vocab = pair.draft_ids.to(torch.int32).numpy(), pair.target.config.vocab_size
    for anchor, logits in enumerate(text.base):
        truth = p[anchor : anchor + len(logits)]
        tokens = text.answer[anchor : anchor + len(logits)]
        for k in WIDTHS:
            rows = [sparse_row(row, ids, temperature, k) for row in logits]
            lanes[f"k{k}"].add(ratio_survival(truth, rows, tokens))
            lanes[f"k{k}{BLOCK}"].add(block_survival(truth, rows, tokens))
            if k == MATCH_SUPPORT:
                lanes[MATCH].add(match_survival(truth, rows, tokens))
        rows = [dense_row(row, ids, temperature, vocab) for row in logits]
        lanes[DENSE].add(ratio_survival(truth, rows, tokens))
        lanes[f"{DENSE}{BLOCK}"].add(block_survival(truth, rows, tokens))


def ratio_survival(p: Sequence[Float64s], rows: Sequence[Row], tokens: Sequence[int]) -> Float64s:
    """Probability that each draft is reached and accepted in the ratio lane, given the target's text; float64 [block].

    Its mean over texts drawn from p is the survival itself.
    """
    reached, out = 1.0, np.zeros(len(rows))
    for j, (truth, row, token) in enumerate(zip(p, rows, tokens, strict=True)):
        q = row.counts / MASS
        out[j] = reached * float(np.minimum(truth[row.ids], q).sum())
        reached *= min(1.0, row.count(token) / MASS / float(truth[token]))
    return out


def block_survival(p: Sequence[Float64s], rows: Sequence[Row], tokens: Sequence[int]) -> Float64s:
    """The same as a block, where a prefix is kept with weight w and q w / p is its least product of q / p."""
    product, least, out = 1.0, 1.0, np.zeros(len(rows))
    for j, (truth, row, token) in enumerate(zip(p, rows, tokens, strict=True)):
        q = row.counts / MASS
        out[j] = float(np.minimum(least * truth[row.ids], product * q).sum())
        product *= row.count(token) / MASS / float(truth[token])
        least = min(least, product)
    return out


def match_survival(p: Sequence[Float64s], rows: Sequence[Row], tokens: Sequence[int]) -> Float64s:
    """The same in the match lane, where a draft survives when the target's own sample equals it."""
    reached, out = 1.0, np.zeros(len(rows))
    for j, (truth, row, token) in enumerate(zip(p, rows, tokens, strict=True)):
        out[j] = reached * float((truth[row.ids] * (row.counts / MASS)).sum())
        reached *= row.count(token) / MASS
    return out


# -- output ------------------------------------------------------------------------------------------------------------


def as_json(result: dict[str, object]) -> str:
    return json.dumps(result, indent=1)


def as_table(result: dict[str, object]) -> str:
    """One table per temperature."""
    lines = [
        f"{result['prompts']} held-out prompts ({result['prompt_set']}), answers of up to {result['max_tokens']} "
        f"tokens, depth {result['depth']}, draft vocabulary {result['draft_vocabulary']}"
    ]
    tables: dict[str, dict[str, dict[str, object]]] = result["temperatures"]  # type: ignore[assignment]
    for name, lanes in tables.items():
        lines += ["", f"T = {name[1:]}{'tokens per step':>22}{'reply bytes':>14}   accepted per position"]
        for lane, figures in lanes.items():
            positions: list[float] = figures["accepted_per_position"]  # type: ignore[assignment]
            shares = " ".join(f"{p:.3f}" for p in positions)
            lines.append(f"{lane:12}{figures['tokens_per_step']:>15}{figures['reply_bytes']:>14}   {shares}")
    return "\n".join(lines)
