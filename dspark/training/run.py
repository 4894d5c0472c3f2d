"""`dspark train`: corpus, training, checkpoint, report; every stage resumes where it was interrupted.

The run directory holds `corpus/`, `training/` (state), `checkpoint/` (native layout) and `report.html`.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from dspark.errors import UserError
from dspark.models.config import DecoderConfig
from dspark.models.drafter import EMBED, DrafterCheckpoint
from dspark.models.drafter_config import DrafterConfig
from dspark.models.source import TargetSource, load_target, open_target
from dspark.training.corpus import CorpusProgress, CorpusSettings, CorpusWriter, read_progress
from dspark.training.dataset import Corpus
from dspark.training.export import write_checkpoint
from dspark.training.report import write_report
from dspark.training.trainer import Trainer, TrainSettings, initial_weights

REPORT_EVERY_S = 10.0
MAX_POSITIONS = 4096  # of a conversation with the chat template's own text


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What the command line asked for; `taps` is a comma-separated list, empty for the default spread.

    greedy_share: part of the answers written at temperature 0, the others at 1. initial: checkpoint to go on from;
    its shape, taps and draft vocabulary then hold, whatever the other options say.
    """

    output: Path
    target: str
    tokens: int
    blocks: int
    layers: int
    taps: str
    block: int
    rank: int
    draft_vocab: int
    learning_rate: float
    rows: int
    seed: int
    greedy_share: float = 0.6
    initial: Path | None = None


def train(options: TrainOptions) -> None:
    """Run every stage that is not finished. Ctrl-C loses at most the steps since the last checkpoint."""
    console = Console(stderr=True)
    source = open_target(options.target)
    initial = None if options.initial is None else initial_checkpoint(options.initial, source.config)
    if initial is not None:
        taps = initial.config.target_layer_ids
    else:
        taps = parse_taps(options.taps, source.config.layers)
        # Refuses impossible options before hours of writing, not after.
        drafter_config(source.config, taps, options, min(options.draft_vocab, source.config.vocab_size))
    try:
        _write_corpus(options, source, taps, console)
        trainer = _train(options, source, taps, initial, console)
    except KeyboardInterrupt:
        console.print(f"interrupted; run the same command again to resume from {options.output}")
        raise SystemExit(130) from None
    size = write_checkpoint(
        options.output / "checkpoint",
        trainer.config,
        trainer.weights,
        trainer.draft_ids,
        model_card(options, source, trainer),
    )
    report = write_report(options.output / "report.html", trainer.state.log, trainer.config)
    console.print(f"checkpoint: {options.output / 'checkpoint'} ({size / 1e6:.1f} MB); report: {report}")


def parse_taps(text: str, layers: int) -> tuple[int, ...]:
    """Zero-based layer ids, sorted. The default spreads five taps from layer 2 to the last but one of `layers`."""
    if layers < 2:
        raise UserError("the target has one layer: nothing can be tapped before its last one")
    if text:
        try:
            return tuple(sorted({int(part) for part in text.split(",")}))
        except ValueError:
            raise UserError(f"--taps {text!r}: give zero-based layer numbers, for example 2,8,14,20,26") from None
    last = layers - 2
    first = min(2, last)
    count = min(5, last - first + 1)
    return tuple(sorted({first + round(i * (last - first) / max(1, count - 1)) for i in range(count)}))


def _write_corpus(options: TrainOptions, source: TargetSource, taps: tuple[int, ...], console: Console) -> None:
    directory = options.output / "corpus"
    done = read_progress(directory)
    if done.answer_tokens >= options.tokens:
        console.print(f"corpus: {done.answer_tokens:,} answer tokens are there")
        return
    model = load_target(source, device="cpu", dtype=torch.float32, max_positions=MAX_POSITIONS)
    settings = CorpusSettings(
        tap_layers=taps,
        rows=options.rows,
        seed=options.seed,
        answer_temperatures=((0.0, options.greedy_share), (1.0, 1 - options.greedy_share)),
    )
    ticker = _Ticker()

    def report(progress: CorpusProgress) -> None:
        if ticker.due():
            rate = (progress.answer_tokens - done.answer_tokens) / ticker.elapsed
            left = (options.tokens - progress.answer_tokens) / max(rate, 1e-9)
            console.print(
                f"corpus: {progress.answer_tokens:,} of {options.tokens:,} answer tokens, "
                f"{rate:.0f}/s, {left / 60:.0f} min left"
            )

    CorpusWriter(model, source.tokenizer(), settings, directory).run(options.tokens, report)


def initial_checkpoint(directory: Path, target: DecoderConfig) -> DrafterCheckpoint:
    """The checkpoint that a training goes on from. Raises UserError when it was made for a target of another shape."""
    checkpoint = DrafterCheckpoint(directory)
    ours = (checkpoint.config.hidden_size, checkpoint.config.vocab_size, checkpoint.config.num_target_layers)
    theirs = (target.hidden_size, target.vocab_size, target.layers)
    if ours != theirs:
        raise UserError(
            f"--initial {directory} was made for a target with (hidden size, vocabulary, layers) {ours}, "
            f"this target has {theirs}"
        )
    return checkpoint


def _starting_point(
    options: TrainOptions,
    source: TargetSource,
    taps: tuple[int, ...],
    corpus: Corpus,
    initial: DrafterCheckpoint | None,
) -> tuple[DrafterConfig, dict[str, Tensor], Tensor]:
    """Config, weights and draft vocabulary that the first step works on."""
    weights = dict(source.weights())
    if initial is not None:
        embedding = weights["model.embed_tokens.weight"].clone()
        return initial.config, {EMBED: embedding} | initial.tensors, initial.draft_ids
    size = min(options.draft_vocab, source.config.vocab_size)
    draft_ids = corpus.draft_vocabulary(size, always=source.config.eos_ids)
    config = drafter_config(source.config, taps, options, len(draft_ids))
    return config, initial_weights(config, weights, draft_ids, options.seed), draft_ids


def _train(
    options: TrainOptions,
    source: TargetSource,
    taps: tuple[int, ...],
    initial: DrafterCheckpoint | None,
    console: Console,
) -> Trainer:
    corpus = Corpus(options.output / "corpus", taps)
    config, weights, draft_ids = _starting_point(options, source, taps, corpus, initial)
    console.print(
        f"corpus: {len(corpus.training)} sequences, {len(corpus.held_out)} held out; "
        f"draft vocabulary {len(draft_ids)} covers {corpus.coverage(draft_ids):.2%} of the answer tokens"
    )
    per_step = TrainSettings(steps=0)
    steps = max(1, options.blocks // (per_step.sequences * per_step.anchors))
    settings = TrainSettings(steps=steps, learning_rate=options.learning_rate, seed=options.seed)
    trainer = Trainer(config, weights, draft_ids, corpus, settings, options.output / "training")
    ticker = _Ticker()

    def report(entry: dict[str, Any]) -> None:
        if "accept_t1" in entry:
            console.print(_held_out_line(entry, trainer))
        elif ticker.due():
            rate = trainer.state.step * settings.sequences * settings.anchors / trainer.state.seconds
            console.print(
                f"step {entry['step']}/{settings.steps}: loss {entry['loss']:.3f}, "
                f"accept@1 {entry['train_accept_1']:.3f}, {rate:.0f} blocks/s"
            )

    trainer.run(report)
    return trainer


def _held_out_line(entry: dict[str, Any], trainer: Trainer) -> str:
    return (
        f"step {entry['step']}/{trainer.settings.steps}: held out "
        f"T=1 {entry['tokens_per_step_t1']:.3f} tokens/step {entry['accept_t1']}, "
        f"T=0 {entry['tokens_per_step_t0']:.3f} {entry['accept_t0']}"
    )


def drafter_config(
    target: DecoderConfig, taps: tuple[int, ...], options: TrainOptions, draft_vocab: int
) -> DrafterConfig:
    """A drafter shaped like the target's own layers. Raises ModelConfigError for options that fit no drafter."""
    if options.layers > target.layers:
        raise UserError(f"--layers {options.layers}: the draft layers start as copies of the target's {target.layers}")
    return DrafterConfig(
        hidden_size=target.hidden_size,
        layers=options.layers,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        intermediate_size=target.intermediate_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
        rms_eps=target.rms_eps,
        rope_theta=target.rope_theta,
        max_context=target.max_context,
        target_layer_ids=taps,
        num_target_layers=target.layers,
        # Mask rows differ from the anchor by position, so any token serves; 0 ends texts in the embedded target.
        mask_token_id=0,
        block_size=options.block,
        markov_rank=options.rank,
        confidence_head=True,
        confidence_with_markov=True,
    )


def model_card(options: TrainOptions, source: TargetSource, trainer: Trainer) -> str:
    """The checkpoint's README: what it is for, what it saw, what it reached."""
    progress = read_progress(options.output / "corpus")
    temperatures = ", ".join(f"{t:g} ({w:.0%})" for t, w in trainer.corpus.answer_temperatures())
    minutes = trainer.state.seconds / 60
    last = trainer.state.log[-1] if trainer.state.log else {}
    blocks = trainer.state.step * trainer.settings.sequences * trainer.settings.anchors
    facts = {k: last.get(k) for k in ("accept_t1", "tokens_per_step_t1", "accept_t0", "tokens_per_step_t0")}
    return f"""---
license: apache-2.0
base_model: {source.name}
tags: [speculative-decoding, dspark]
---
# DSpark drafter for {source.name}

A {trainer.config.layers}-layer DSpark drafter in the native `Qwen3DSparkModel` layout, trained with `dspark train`.
It shares the target's input embedding, drafts blocks of {trainer.config.block_size} from the taps of layers
{list(trainer.config.target_layer_ids)}, and has a draft vocabulary of {len(trainer.draft_ids)} tokens (`d2t`).

| | |
|---|---|
| data | {progress.answer_tokens:,} answer tokens in {progress.sequences:,} conversations |
| written by | the target itself, both sides |
| answer temperatures | {temperatures} |
| training | {trainer.state.step:,} steps, {blocks:,} blocks, {minutes:.0f} minutes on CPU |
| learning rate | {options.learning_rate:g}, warm-up and cosine |
| started from | {"the target's last layers" if options.initial is None else "an earlier checkpoint of this drafter"} |
| losses | sampled answers: 0.1 CE + 0.9 L1, greedy answers: 0.6 CE + 0.4 L1; 1.0 BCE(confidence); decay exp(-j/4) |

Held out (teacher forcing, conversations that were not trained on): `{json.dumps(facts)}`
"""


class _Ticker:
    """True at most every few seconds."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def due(self) -> bool:
        now = time.monotonic()
        if now - self._last < REPORT_EVERY_S:
            return False
        self._last = now
        return True
