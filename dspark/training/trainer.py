"""Train a drafter on a corpus: blocks, teacher forcing, AdamW with warm-up and cosine, checkpoints and resume.

The layers start as copies of the target's last ones, fc passes the deepest tap through, lm_head is the target's rows of
the draft vocabulary (frozen, like the shared embedding): from there a useful drafter is minutes away instead of hours.
Every `save_every` steps the whole state goes to disk (weights, optimiser, generator, log), written beside and renamed,
so an interrupted run resumes exactly where it stopped.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from dspark.errors import UserError
from dspark.models.drafter import EMBED, DrafterNetwork, expected_shapes
from dspark.models.drafter_config import DrafterConfig
from dspark.models.packed_blocks import PackedBlockAttention
from dspark.training.dataset import Batch, Conversation, Corpus, make_batch
from dspark.training.losses import BlockLosses, block_losses, cross_entropy_weights, position_weights

STATE_FILE = "state.safetensors"
FROZEN = (EMBED, "lm_head.weight")


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Optimisation settings. A step trains `sequences * anchors` blocks."""

    steps: int
    sequences: int = 8
    anchors: int = 40
    learning_rate: float = 1e-3
    warmup: float = 0.04
    clip: float = 1.0
    seed: int = 1
    evaluate_every: int = 200
    save_every: int = 100


@dataclass
class TrainState:
    """Where a run is: finished steps, seconds spent in them, and the log that the report plots."""

    step: int = 0
    seconds: float = 0.0
    log: list[dict[str, Any]] = field(default_factory=list)


def initial_weights(
    config: DrafterConfig, target: Mapping[str, Tensor], draft_ids: Tensor, seed: int
) -> dict[str, Tensor]:
    """A drafter that starts as the target's last layers over its deepest tap (native names)."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in expected_shapes(config).items():
        weights[name] = torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)
    for i in range(config.layers):
        source = f"model.layers.{config.num_target_layers - config.layers + i}."
        for name in [n for n in weights if n.startswith(f"layers.{i}.")]:
            origin = source + name.removeprefix(f"layers.{i}.")
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weights[name] = target.get(origin, torch.full_like(weights[name], 1.5)).clone()
            else:
                weights[name] = target[origin].clone()
    first = f"model.layers.{config.num_target_layers - config.layers}.input_layernorm.weight"
    weights["hidden_norm.weight"] = target[first].clone()
    weights["norm.weight"] = target["model.norm.weight"].clone()
    weights["fc.weight"][:, -config.hidden_size :] = torch.eye(config.hidden_size)
    embedding = target["model.embed_tokens.weight"]
    weights["lm_head.weight"] = target.get("lm_head.weight", embedding)[draft_ids].clone()
    for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
        weights[name] = torch.randn(weights[name].shape, generator=generator) * 0.02
    weights[EMBED] = embedding.clone()
    return weights


class Trainer:
    """One training run in `directory`; construct, then `run`."""

    def __init__(
        self,
        config: DrafterConfig,
        weights: dict[str, Tensor],
        draft_ids: Tensor,
        corpus: Corpus,
        settings: TrainSettings,
        directory: Path,
    ) -> None:
        self.config, self.settings, self.directory = config, settings, directory
        self.corpus, self.draft_ids = corpus, draft_ids
        self.state = TrainState()
        self.weights = {n: t.float().requires_grad_(n not in FROZEN) for n, t in weights.items()}
        self._head = weights["lm_head.weight"].float()
        self._to_draft = torch.full((config.vocab_size,), -1, dtype=torch.int64)
        self._to_draft[draft_ids] = torch.arange(len(draft_ids))
        self._generator = torch.Generator().manual_seed(settings.seed)
        self._order: list[int] = []
        trained = [t for n, t in self.weights.items() if n not in FROZEN]
        self._optimiser = torch.optim.AdamW(
            trained, lr=settings.learning_rate, weight_decay=0.0, betas=(0.9, 0.95), fused=True
        )
        self.network = DrafterNetwork(
            config, self.weights, linear=lambda w: lambda x: F.linear(x, w), max_positions=4096
        )

    def run(self, report: Callable[[dict[str, Any]], None]) -> None:
        """Train to `settings.steps`, resuming from the directory when it holds a state."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._resume()
        while self.state.step < self.settings.steps:
            started = time.perf_counter()
            entry = self._step()
            self.state.seconds += time.perf_counter() - started
            if self.state.step % self.settings.evaluate_every == 0 or self.state.step == self.settings.steps:
                entry |= self.evaluate()
                self.state.log.append(entry)
            if self.state.step % self.settings.save_every == 0 or self.state.step == self.settings.steps:
                self.save()
            report(entry)

    def _learning_rate(self) -> float:
        s, step = self.settings, self.state.step
        warm = max(1, round(s.warmup * s.steps))
        if step < warm:
            return s.learning_rate * (step + 1) / warm
        return s.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, s.steps - warm)))

    def _next_sequences(self) -> list[Conversation]:
        while len(self._order) < self.settings.sequences:
            self._order += torch.randperm(len(self.corpus.training), generator=self._generator).tolist()
        picked, self._order = self._order[: self.settings.sequences], self._order[self.settings.sequences :]
        return [self.corpus.training[i] for i in picked]

    def _step(self) -> dict[str, Any]:
        for group in self._optimiser.param_groups:
            group["lr"] = self._learning_rate()
        batch = make_batch(
            self._next_sequences(), self.settings.anchors, self.config.block_size, self._generator
        )
        losses = self.losses(batch, *self.forward(batch))
        self._optimiser.zero_grad(set_to_none=True)
        losses.loss.backward()  # type: ignore[no-untyped-call]
        trained = [t for t in self.weights.values() if t.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(trained, self.settings.clip)
        self._optimiser.step()
        self.state.step += 1
        first = batch.valid.flatten().view(-1, self.config.block_size)[:, 0]
        return {
            "step": self.state.step,
            "loss": float(losses.loss.detach()),
            "train_accept_1": float(losses.acceptance.view(-1, self.config.block_size)[first, 0].mean()),
            "learning_rate": self._learning_rate(),
            "gradient_norm": float(norm),
        }

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Logits after the Markov bias [S*A*B, Vd] and confidence logits [S*A*B] under teacher forcing."""
        c = self.config
        context = self.network.context_rows(batch.taps)
        places = torch.arange(batch.taps.shape[1]).expand(len(batch.taps), -1)
        kv = [self.network.context_kv(i, context, places) for i in range(c.layers)]
        positions = batch.anchors[:, :, None] + torch.arange(c.block_size)
        ids = torch.full(positions.shape, c.mask_token_id)
        ids[:, :, 0] = batch.block_tokens[:, :, 0]
        hidden = self.network.backbone(ids, positions, PackedBlockAttention(kv, batch.anchors))
        hidden = hidden.reshape(-1, c.hidden_size)
        previous = batch.block_tokens[:, :, :-1].reshape(-1)
        logits = self.network.base_logits(hidden) + self.network.markov_bias(previous)
        return logits, self.network.confidence_logits(hidden, previous)

    def losses(self, batch: Batch, logits: Tensor, confidence: Tensor | None) -> BlockLosses:
        """The losses of a forward pass, and the figures behind them."""
        teacher = self.teacher(batch)
        labels = self._to_draft[batch.block_tokens[:, :, 1:].reshape(-1)]
        return block_losses(
            logits,
            confidence,
            teacher,
            labels,
            position_weights(batch.valid),
            cross_entropy_weights(batch.greedy, batch.valid),
        )

    @torch.no_grad()
    def teacher(self, batch: Batch) -> Tensor:
        """Target probabilities on the draft vocabulary [S*A*B, Vd] at temperature 1."""
        hidden = batch.teacher_hidden.reshape(-1, self.config.hidden_size)
        return torch.exp(F.linear(hidden, self._head) - batch.teacher_lse.reshape(-1, 1))

    @torch.no_grad()
    def evaluate(self, batches: int = 12) -> dict[str, Any]:
        """Held-out figures, the same blocks at every call (see `Evaluation`)."""
        return evaluate(self, batches)

    def save(self) -> None:
        """Weights, optimiser and log in one file, written beside its place and renamed: a kill leaves the old one."""
        tensors = {n: t.detach() for n, t in self.weights.items() if n not in FROZEN}
        for i, p in enumerate(self._optimiser.param_groups[0]["params"]):
            slots = self._optimiser.state.get(p, {})
            tensors |= {f"optimiser.{i}.{k}": v for k, v in slots.items() if isinstance(v, Tensor)}
        tensors["generator"] = self._generator.get_state()
        tensors["order"] = torch.tensor(self._order, dtype=torch.int64)
        tensors["draft_ids"] = self.draft_ids
        told = {"settings": json.dumps(asdict(self.settings)), "state": json.dumps(asdict(self.state))}
        _replace(self.directory / STATE_FILE, lambda p: save_file(tensors, str(p), metadata=told))

    def _resume(self) -> None:
        file = self.directory / STATE_FILE
        if not file.is_file():
            return
        self.state = TrainState(**read_state(self.directory))
        tensors = load_file(str(file))
        self._check_resumable(tensors)
        self._generator.set_state(tensors["generator"])
        self._order = tensors["order"].tolist()
        for name, weight in self.weights.items():
            if name not in FROZEN:
                weight.data.copy_(tensors[name])
        for i, p in enumerate(self._optimiser.param_groups[0]["params"]):
            keys = ("step", "exp_avg", "exp_avg_sq")
            self._optimiser.state[p] = {k: tensors[f"optimiser.{i}.{k}"].clone() for k in keys}


    def _check_resumable(self, tensors: Mapping[str, Tensor]) -> None:
        """Rows of the Markov head mean draft ids: under another vocabulary they would be silently wrong."""
        changed = [
            name
            for name, weight in self.weights.items()
            if name not in FROZEN and (name not in tensors or tensors[name].shape != weight.shape)
        ]
        if not torch.equal(tensors.get("draft_ids", self.draft_ids), self.draft_ids):
            changed.append("draft_ids")
        if changed:
            raise UserError(
                f"{self.directory} holds a training of another shape or vocabulary ({changed[0]} differs): "
                "give the options and the corpus that it began with, or another directory"
            )


def read_state(directory: Path) -> dict[str, Any]:
    """The fields of `TrainState` as saved in a training directory."""
    with safe_open(str(directory / STATE_FILE), framework="pt") as opened:
        state: dict[str, Any] = json.loads(opened.metadata()["state"])
    return state


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    write(partial)
    partial.replace(path)


@torch.no_grad()
def evaluate(trainer: Trainer, batches: int) -> dict[str, Any]:
    """Held-out acceptance under teacher forcing.

    accept_t1[j] = mean of 1 - L1/2 at position j given all earlier ones accepted (weighted by their survival), on
    answers sampled at T > 0; accept_t0[j] = conditional argmax hits on greedy answers; tokens_per_step = 1 + sum of the
    survivals. `calibration` pairs mean confidence with mean acceptance in ten bins.
    """
    block = trainer.config.block_size
    generator = torch.Generator().manual_seed(1234)
    tallies = {"t1": torch.zeros(2, block), "t0": torch.zeros(2, block)}
    bins = torch.zeros(3, 10)
    held = trainer.corpus.held_out
    for start in range(0, min(len(held), batches * 12), 12):
        batch = make_batch(held[start : start + 12], 32, block, generator)
        _tally(trainer, batch, tallies, bins)
    result: dict[str, Any] = {"calibration": (bins[1:] / bins[0].clamp(min=1)).tolist(), "counts": bins[0].tolist()}
    for lane, (reached, accepted) in tallies.items():
        conditional = accepted / reached.clamp(min=1e-9)
        result[f"accept_{lane}"] = [round(float(x), 4) for x in conditional]
        result[f"tokens_per_step_{lane}"] = round(1 + float(conditional.cumprod(0).sum()), 4)
    return result


def _tally(trainer: Trainer, batch: Batch, tallies: dict[str, Tensor], bins: Tensor) -> None:
    block = trainer.config.block_size
    logits, confidence = trainer.forward(batch)
    losses = trainer.losses(batch, logits, confidence)
    shape = batch.valid.shape
    valid = batch.valid.view(-1, block)
    greedy = batch.greedy[:, None].expand(shape[0], shape[1]).reshape(-1)
    for lane, chance, rows in (
        ("t1", losses.acceptance.view(-1, block), ~greedy),
        ("t0", losses.argmax_hit.view(-1, block).float(), greedy),
    ):
        kept = (chance * valid)[rows]
        survival = torch.cat([torch.ones(len(kept), 1), kept.cumprod(1)[:, :-1]], dim=1) * valid[rows]
        tallies[lane][0] += survival.sum(0)
        tallies[lane][1] += (survival * kept).sum(0)
    if confidence is not None:
        _calibrate(confidence.sigmoid(), losses.acceptance, batch.valid.flatten(), bins)


def _calibrate(confidence: Tensor, acceptance: Tensor, valid: Tensor, bins: Tensor) -> None:
    index = (confidence * 10).long().clamp(max=9)[valid]
    for row, values in enumerate((torch.ones_like(confidence), confidence, acceptance)):
        bins[row].scatter_add_(0, index, values[valid])
