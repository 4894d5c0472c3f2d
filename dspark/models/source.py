"""Where a target comes from: the embedded model, a GGUF file, or a Hugging Face directory.

`open_target("embedded" | path)` returns a `TargetSource`: configuration, tokenizer, identities and weights, read
lazily, so that a worker can read the embedding alone and `--help` reads nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from dspark.models import tokenizer as tokenizers
from dspark.models.config import DecoderConfig, ModelConfigError, from_hf, merged_ids, read_json
from dspark.models.gguf_source import GgufFile, embedded_gguf
from dspark.models.target import TargetModel
from dspark.models.tokenizer import ChatTokenizer

EMBEDDED = "embedded"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EMBED_TENSOR = "model.embed_tokens.weight"


class TargetSource(Protocol):
    """A target on disk."""

    name: str

    @property
    def config(self) -> DecoderConfig: ...

    def tokenizer(self) -> ChatTokenizer: ...

    def weights(self, only: frozenset[str] | None = None) -> Iterator[tuple[str, Tensor]]: ...

    def identity(self) -> str:
        """A digest of the weights file(s): verifier and worker must name the same target."""
        ...


@dataclass
class GgufSource:
    """A GGUF file of the llama architecture."""

    name: str
    path: Path

    @cached_property
    def _file(self) -> GgufFile:
        return GgufFile(self.path)

    @cached_property
    def config(self) -> DecoderConfig:
        return self._file.config()

    def tokenizer(self) -> ChatTokenizer:
        return tokenizers.from_gguf(self._file.tokenizer())

    def weights(self, only: frozenset[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        return self._file.weights(only)

    def identity(self) -> str:
        return file_digest([self.path])


@dataclass
class DirectorySource:
    """A Hugging Face directory with config.json and safetensors files."""

    name: str
    path: Path

    @cached_property
    def config(self) -> DecoderConfig:
        config = from_hf(read_json(self.path / "config.json"))
        generation = self.path / "generation_config.json"
        if not generation.is_file():
            return config
        # Chat models often end a turn with a token that only this file names.
        return replace(config, eos_ids=merged_ids(config.eos_ids, read_json(generation).get("eos_token_id")))

    def tokenizer(self) -> ChatTokenizer:
        return tokenizers.from_directory(self.path, self.config.eos_ids)

    def _files(self) -> list[Path]:
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ModelConfigError(f"{self.path} has no *.safetensors file: only safetensors weights are loaded")
        return files

    def weights(self, only: frozenset[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        for file in self._files():
            with safe_open(str(file), framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
                    if only is None or name in only:
                        yield name, opened.get_tensor(name)

    def identity(self) -> str:
        return file_digest(self._files())


def file_digest(paths: list[Path]) -> str:
    """SHA-256 over the size and the first and last MiB of each file: cheap, and different for different weights."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read(1 << 20))
    return digest.hexdigest()


def open_target(where: str) -> TargetSource:
    """`embedded` (SmolLM2-135M-Instruct from its wheel), a .gguf file, or a model directory.

    Raises ModelConfigError that says what was looked for and where.
    """
    if where == EMBEDDED:
        return GgufSource("smollm2-135m-instruct", embedded_gguf())
    path = Path(where).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return GgufSource(path.stem.lower(), path)
    if (path / "config.json").is_file():
        return DirectorySource(path.resolve().name.lower(), path)
    raise ModelConfigError(
        f"--target {where!r}: neither 'embedded', nor a .gguf file, nor a directory with a config.json"
    )


def load_target(
    source: TargetSource, *, device: str, dtype: torch.dtype, max_positions: int | None = None
) -> TargetModel:
    """Read every weight and build the network. Takes seconds: call it off the event loop."""
    return TargetModel(
        source.config, dict(source.weights()), device=device, dtype=dtype, max_positions=max_positions
    )


def load_embedding(source: TargetSource) -> Tensor:
    """The target's input embedding alone [vocab, hidden], for a drafter that shares it."""
    for name, tensor in source.weights(frozenset({EMBED_TENSOR})):
        if name == EMBED_TENSOR:
            return tensor
    raise ModelConfigError(f"the target {source.name} has no tensor {EMBED_TENSOR}")
