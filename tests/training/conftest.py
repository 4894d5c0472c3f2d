"""A tiny target and a small corpus that it wrote, shared by the training tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dspark.models.drafter_config import DrafterConfig
from dspark.models.source import TargetSource, load_target, open_target
from dspark.models.target import TargetModel
from dspark.models.tokenizer import ChatTokenizer
from dspark.proof.tiny_pair import drafter_config, write_target
from dspark.training.corpus import CorpusProgress, CorpusSettings, CorpusWriter
from dspark.training.dataset import Corpus
from dspark.training.trainer import Trainer, TrainSettings, initial_weights

SETTINGS = CorpusSettings(
    answer_temperatures=((0.0, 0.35), (0.6, 0.1), (1.0, 0.55)),
    tap_layers=(0, 1, 2), rows=6, max_instruction=8, max_answer=14, sequences_per_shard=10, seed=3
)


@dataclass(frozen=True)
class Written:
    """A target and the corpus that it wrote."""

    target: Path
    source: TargetSource
    model: TargetModel
    tokenizer: ChatTokenizer
    corpus: Path

    def writer(self, directory: Path, settings: CorpusSettings = SETTINGS) -> CorpusWriter:
        return CorpusWriter(self.model, self.tokenizer, settings, directory)

    def drafter(self, **changes: object) -> DrafterConfig:
        return drafter_config(self.source.config, **changes)


def quiet(progress: CorpusProgress) -> None:
    """No report."""


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    root = tmp_path_factory.mktemp("training")
    # A dozen ends of text, so that a random model ends some of its answers by itself.
    target = write_target(root / "target", seed=2, scale=0.06, eos_token_id=[257, *range(100, 112)])
    source = open_target(str(target))
    model = load_target(source, device="cpu", dtype=torch.float32)
    result = Written(target, source, model, source.tokenizer(), root / "corpus")
    result.writer(result.corpus).run(600, quiet)
    return result


MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def make_trainer(written: Written, tmp_path: Path) -> MakeTrainer:
    """Build a trainer with fresh weights; keyword arguments change its settings."""

    def make(name: str = "run", *, corpus: Corpus | None = None, **changes: object) -> Trainer:
        corpus = corpus or Corpus(written.corpus, (0, 2), holdout_every=5)
        ids = corpus.draft_vocabulary(150, always=(257,))
        config = written.drafter(draft_vocab_size=len(ids), layers=2)
        weights = initial_weights(config, dict(written.source.weights()), ids, seed=4)
        values: dict[str, object] = {"steps": 6, "sequences": 3, "anchors": 5, "save_every": 3, "evaluate_every": 3}
        settings = TrainSettings(**{**values, **changes})  # type: ignore[arg-type]
        return Trainer(config, weights, ids, corpus, settings, tmp_path / name)

    return make
