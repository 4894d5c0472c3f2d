"""Read a corpus: sequences for training blocks, a held-out part, and the reduced draft vocabulary.

Shards are memory-mapped, so a corpus larger than memory trains too. Whole sequences are held out, by position in
the corpus, never single blocks of a training sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dspark.errors import UserError
from dspark.training.corpus import stored_taps, tap_columns


@dataclass(frozen=True, slots=True)
class Conversation:
    """One sequence: n positions fed to the target, n + 1 tokens (the last is only a label).

    taps [n, taps * d] bf16; hidden [n, d] fp16 after the final norm; lse [n] fp32; answer tokens start at
    `answer_start`; `temperature` is the one that the answer was sampled with.
    """

    tokens: Tensor
    taps: Tensor
    hidden: Tensor
    lse: Tensor
    answer_start: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks of several sequences, padded to the longest. S sequences, A anchors each, B = block size.

    taps [S, N, taps * d]; anchors [S, A] (positions); valid [S, A, B]; block_tokens [S, A, B + 1]: anchor and labels;
    teacher_hidden [S, A, B, d] and teacher_lse [S, A, B]: target rows that predict the labels; greedy [S].
    """

    taps: Tensor
    anchors: Tensor
    valid: Tensor
    block_tokens: Tensor
    teacher_hidden: Tensor
    teacher_lse: Tensor
    greedy: Tensor


class Corpus:
    """All sequences of a corpus directory; one in `holdout_every` is held out."""

    def __init__(self, directory: Path, tap_layers: Sequence[int], holdout_every: int = 50) -> None:
        files = sorted(directory.glob("shard-*.safetensors"))
        stored = stored_taps(directory)
        if not files or stored is None:
            raise UserError(f"{directory} holds no finished shard-*.safetensors: write a corpus first")
        missing = [t for t in tap_layers if t not in stored]
        if missing:
            raise UserError(f"tap layers {missing} are not in this corpus, which holds {list(stored)}")
        sequences = [s for file in files for s in _read_shard(file, stored, tap_layers)]
        self.held_out = sequences[::holdout_every]
        self.training = [s for i, s in enumerate(sequences) if i % holdout_every]
        if not self.training:
            raise UserError(f"{directory} holds {len(sequences)} sequence(s), none to train on: write a larger corpus")

    def draft_vocabulary(self, size: int, always: Sequence[int]) -> Tensor:
        """The `size` most frequent answer tokens: sorted ids, `always` included; at most the target's vocabulary."""
        ranked = self._answer_counts(max([size, *(i + 1 for i in always)]))
        ranked[torch.tensor(list(always), dtype=torch.int64)] = ranked.sum() + 1
        return ranked.topk(size).indices.sort().values

    def coverage(self, draft_ids: Tensor) -> float:
        """Share of the answer tokens that the draft vocabulary holds."""
        counts = self._answer_counts(int(draft_ids.max()) + 1)
        return float(counts[draft_ids].sum() / counts.sum())

    def answer_temperatures(self) -> list[tuple[float, float]]:
        """(temperature, share of the training conversations), ascending."""
        counts = Counter(round(s.temperature, 3) for s in self.training)
        return [(t, n / len(self.training)) for t, n in sorted(counts.items())]

    def _answer_counts(self, at_least: int) -> Tensor:
        answers = torch.cat([s.tokens[s.answer_start :] for s in self.training]).long()
        return torch.bincount(answers, minlength=at_least)


def _read_shard(file: Path, stored: Sequence[int], wanted: Sequence[int]) -> Iterator[Conversation]:
    with safe_open(str(file), framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in ("tokens", "hidden", "lse", "meta", "taps")}
    width = tensors["taps"].shape[1] // len(stored)
    taps = tensors["taps"]
    if tuple(wanted) != tuple(stored):  # A copy in memory; all taps together stay in the mapped file.
        taps = torch.cat([taps[:, c] for c in tap_columns(stored, wanted, width)], dim=1)
    row = label = 0
    for n, answer_start, temperature in tensors["meta"].tolist():
        yield Conversation(
            tokens=tensors["tokens"][label : label + n + 1],
            taps=taps[row : row + n],
            hidden=tensors["hidden"][row : row + n],
            lse=tensors["lse"][row : row + n],
            answer_start=answer_start,
            temperature=temperature / 1000,
        )
        row, label = row + n, label + n + 1


def make_batch(sequences: Sequence[Conversation], anchors: int, block: int, generator: torch.Generator) -> Batch:
    """Sample `anchors` anchor positions per sequence among the answer's rows (with the row just before it)."""
    longest = max(len(s.taps) for s in sequences)
    taps = torch.zeros(len(sequences), longest, sequences[0].taps.shape[1])
    picked, valid, tokens, hidden, lse = [], [], [], [], []
    steps = torch.arange(block)
    for i, s in enumerate(sequences):
        n = len(s.taps)
        taps[i, :n] = s.taps
        # An anchor is a committed token whose successor is an answer token; the turn's last token is the first.
        choices = torch.arange(s.answer_start - 1, n)
        order = torch.randperm(len(choices), generator=generator)[:anchors]
        at = choices[order.sort().values]
        usable = torch.ones(anchors, dtype=torch.bool)
        usable[len(at) :] = False
        at = torch.cat([at, at.new_full((anchors - len(at),), int(choices[0]))])
        rows = at[:, None] + steps
        inside = (rows < n) & usable[:, None]
        rows = rows.clamp(max=n - 1)
        picked.append(at)
        valid.append(inside)
        tokens.append(torch.cat([s.tokens[at][:, None], s.tokens[rows + 1]], dim=1).long())
        hidden.append(s.hidden[rows].float())
        lse.append(s.lse[rows])
    return Batch(
        taps=taps,
        anchors=torch.stack(picked),
        valid=torch.stack(valid),
        block_tokens=torch.stack(tokens),
        teacher_hidden=torch.stack(hidden),
        teacher_lse=torch.stack(lse),
        greedy=torch.tensor([s.temperature == 0 for s in sequences]),
    )
