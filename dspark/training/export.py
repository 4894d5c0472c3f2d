"""Write a drafter checkpoint in the native layout: config.json and model.safetensors (bf16), and a model card.

The shared embedding is not written: the drafter uses the target's, like the reduced-vocabulary checkpoints that other
engines load. `d2t` holds offsets (target id = draft id + d2t[draft id]).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark.models.drafter import check_shapes, expected_shapes
from dspark.models.drafter_config import DrafterConfig


def write_checkpoint(
    directory: Path, config: DrafterConfig, weights: Mapping[str, Tensor], draft_ids: Tensor, card: str
) -> int:
    """Write the checkpoint; returns the size of the weights file in bytes. `weights` may hold more than is written."""
    check_shapes(config, weights, embedding=False)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {n: weights[n].detach().to(torch.bfloat16).contiguous() for n in expected_shapes(config)}
    if config.draft_vocab_size != config.vocab_size:
        tensors["d2t"] = draft_ids - torch.arange(len(draft_ids))
    file = directory / "model.safetensors"
    save_file(tensors, str(file), metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config.to_json(), indent=2) + "\n", "utf-8")
    (directory / "README.md").write_text(card, "utf-8")
    return file.stat().st_size
