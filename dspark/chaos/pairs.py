"""The models of a run: a target, two versions of a drafter that fits it, and how much is asked of them.

``tiny`` is a pair of random weights, written on the fly, for quick runs; ``embedded`` is the target and the drafter
that ship. The second version of a drafter has another identity: a worker that serves it is another worker.

Called by `run`. torch is imported when a pair is written.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Pair:
    """target: as `--target` takes it. drafters: directories of the two versions. max_tokens: of an answer.

    context: of endpoint and workers, in tokens. draft_deadline_ms: the watchdog of a round.
    """

    target: str
    drafters: tuple[Path, Path]
    max_tokens: int
    context: int
    draft_deadline_ms: int


def tiny_pair(directory: Path) -> Pair:
    """Random weights, the same in every run."""
    from dspark.proof.tiny_pair import write_drafter, write_target

    target = write_target(directory / "target", scale=0.04)
    first, second = (write_drafter(directory / f"drafter-{seed}", target, seed=seed) for seed in (1, 2))
    return Pair(str(target), (first, second), max_tokens=128, context=320, draft_deadline_ms=300)


def embedded_pair(directory: Path) -> Pair:
    """What ships; the second version has the same weights in another file."""
    from dspark.speculative import SHIPPED_DRAFTER

    return Pair(
        "embedded",
        (SHIPPED_DRAFTER, _as_another_version(SHIPPED_DRAFTER, directory / "drafter-2")),
        max_tokens=48,
        context=320,
        draft_deadline_ms=1000,
    )


def _as_another_version(drafter: Path, directory: Path) -> Path:
    from safetensors import safe_open
    from safetensors.torch import save_file

    shutil.copytree(drafter, directory)
    weights = directory / "model.safetensors"
    with safe_open(str(weights), framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (safe_open is no mapping)
        metadata = dict(opened.metadata() or {})
    weights.unlink()
    save_file(tensors, str(weights), metadata={**metadata, "version": "2"})
    return directory


PAIRS: Mapping[str, Callable[[Path], Pair]] = {"tiny": tiny_pair, "embedded": embedded_pair}
