"""Who the models are: the digests that verifier and worker compare in HELLO before anything is allocated.

Both roles build the same `Compatibility` from the same files: the target (identity, vocabulary, tokenizer) and the
drafter checkpoint (identity, token map, taps). Equal digests mean that q's global ids and the taps mean the same thing.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import torch
from safetensors import safe_open

from dspark.models.config import ModelConfigError
from dspark.models.drafter_config import DrafterConfig
from dspark.models.source import TargetSource, file_digest
from dspark.models.tokenizer import ChatTokenizer
from dspark_proto import Compatibility, Dtype


def tokenizer_hash(tokenizer: ChatTokenizer) -> bytes:
    """SHA-256 over the byte pieces in id order."""
    digest = hashlib.sha256()
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.decode_bytes([token])
        digest.update(struct.pack("<I", len(piece)) + piece)
    return digest.digest()


def token_map_hash(directory: Path, config: DrafterConfig) -> bytes:
    """SHA-256 over the target id of every draft id, as little-endian int32."""
    ids = torch.arange(config.draft_vocab_size)
    with safe_open(str(directory / "model.safetensors"), framework="pt") as opened:
        if "d2t" in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
            ids = ids + opened.get_tensor("d2t")
    return hashlib.sha256(ids.to(torch.int32).numpy().astype("<i4").tobytes()).digest()


def compatibility(
    source: TargetSource, tokenizer: ChatTokenizer, directory: Path, config: DrafterConfig
) -> Compatibility:
    """Everything that must be equal on both sides of the wire. Raises ModelConfigError for an unreadable checkpoint."""
    weights = directory / "model.safetensors"
    if not weights.is_file():
        raise ModelConfigError(f"{directory} has no model.safetensors")
    return Compatibility(
        vocab_size=config.vocab_size,
        token_map_hash=token_map_hash(directory, config),
        draft_identity=file_digest([weights]),
        target_identity=source.identity(),
        tokenizer_hash=tokenizer_hash(tokenizer),
        tap_layers=config.target_layer_ids,
        tap_dtype=Dtype.BF16,
        tap_width=config.hidden_size,
    )
