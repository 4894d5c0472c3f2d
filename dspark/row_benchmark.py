"""`dspark bench rows`: what target rows, and making, writing, checking and drawing from proposal rows cost on one core.

Every kernel runs once a round, in turn with its yardsticks: numpy's own FP64 softmax of the same row (`softmax64` in
the keys), and a plain copy that moves as many bytes as the kernel has to. Ratios are taken inside a round, so that
drift of the machine cancels; medians and quartiles are over rounds. The inputs stay in the last-level cache, where a
forward pass or the link has just written them, and leave the first one between two calls.

Bytes moved: what has to be read and written once. A copy of B bytes in all reads B / 2 and writes B / 2.
Called by `dspark bench rows`. It loads no model, opens no connection and judges nothing.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dspark import native
from dspark.dense import dense_row, pack_dense_rows, validate_dense_reply
from dspark.dyadic import (
    MASS,
    Float32s,
    Float64s,
    Row,
    allocate,
    draw,
    pack_rows,
    softmax64,
    sparse_rows,
    validate_reply,
)
from dspark.processors import SamplingPolicy, target_row

VOCABULARIES = (49_152, 129_280)
SUPPORTS = (16, 32, 64, 256)
MADE_ROWS = 5
READ_ROWS = 20

# Standard deviation of the synthetic logits: half the mass on some hundred tokens, a long tail behind them.
_SPREAD = 2.5
_WARM_UP_ROUNDS = 3

_LARGE_BLOCK_BYTES = 31 << 20


@dataclass
class Kernel:
    """One timed call: `figure` and `case` name its keys, `rows` is how many rows it handles, `moved` its bytes."""

    figure: str
    case: str
    call: Callable[[], object]
    moved: int
    rows: int = 1
    seconds: list[float] = field(default_factory=list)
    copy_seconds: list[float] = field(default_factory=list)


def run(
    rounds: int, vocabularies: Sequence[int] = VOCABULARIES, supports: Sequence[int] = SUPPORTS
) -> dict[str, object]:
    """Run the benchmark; returns the result object (see docs/reference/benchmarks.md for the keys)."""
    _settle_allocator()
    chosen = native.choice()
    result: dict[str, object] = {
        "native": chosen.library is not None,
        "path": str(chosen),
        "numpy": np.__version__,
        "rounds": rounds,
        "vocabularies": list(vocabularies),
        "supports": list(supports),
    }
    quartiles: dict[str, list[float]] = {}
    for vocab in vocabularies:
        kernels = [*_row_kernels(vocab), *_makers(vocab, supports)]
        _measure(kernels, rounds)
        _report(result, quartiles, kernels, softmax=kernels[0])
    readers = [_sparse_reader(support, vocabularies[0]) for support in supports]
    _measure(readers, rounds)
    _report(result, quartiles, readers, softmax=None)
    return {**result, "quartiles": quartiles}


def _settle_allocator() -> None:
    """Free one large block, as every process has that loaded a model.

    Until then glibc hands the memory of freed rows back to the system, and each new row takes it again page by page.
    """
    block = np.ones(_LARGE_BLOCK_BYTES, dtype=np.uint8)
    del block


def _logits(rows: int, vocab: int, seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * _SPREAD).astype(np.float32)


def _numpy_softmax(logits: Float32s) -> Float64s:
    """The yardstick: `softmax64` in plain numpy, whatever has become of that function since."""
    weights: Float64s = np.subtract(logits, logits.max(), dtype=np.float64)
    np.exp(weights, out=weights)
    weights /= weights.sum()
    return weights


def _row_kernels(vocab: int) -> list[Kernel]:
    """The softmax, a target row, and what a dense proposal row goes through, in order."""
    logits, policy = _logits(1, vocab, seed=0)[0], SamplingPolicy()
    weights, row, case = softmax64(logits), dense_row(logits, None, 1.0, vocab), str(vocab)
    return [
        Kernel("softmax64", case, lambda: _numpy_softmax(logits), 12 * vocab),
        Kernel("target_row", case, lambda: target_row(logits, policy), 12 * vocab),
        Kernel("dense_allocate", case, lambda: allocate(weights), 16 * vocab),
        Kernel("dense_make", case, lambda: dense_row(logits, None, 1.0, vocab), 4 * vocab + 12 * len(row)),
        Kernel("dense_draw", case, lambda: draw(row, MASS // 2), 4 * len(row)),
        *_dense_wire_kernels(row, vocab),
    ]


def _dense_wire_kernels(row: Row, vocab: int) -> list[Kernel]:
    """Writing one dense row to the wire, and checking it there."""
    written, q = np.zeros((1, vocab), np.float32), np.zeros((1, vocab), np.float32)
    pack_dense_rows([row], vocab, q)
    token = np.array([draw(row, MASS // 2)], np.int32)
    moved = 4 * vocab + 12 * len(row)
    return [
        Kernel("dense_pack", str(vocab), lambda: pack_dense_rows([row], vocab, written), moved),
        Kernel("dense_validate", str(vocab), lambda: validate_dense_reply(token, q, vocab, 1), moved),
    ]


def _makers(vocab: int, supports: Sequence[int]) -> list[Kernel]:
    """Making a batch of sparse rows of each support."""
    temperatures = [1.0] * MADE_ROWS

    def maker(support: int) -> Kernel:
        logits = _logits(MADE_ROWS, vocab, seed=support)
        call = lambda: sparse_rows(logits, None, temperatures, support)  # noqa: E731
        return Kernel("sparse_make", f"{MADE_ROWS}x{support}_{vocab}", call, logits.nbytes, MADE_ROWS)

    return [maker(support) for support in supports]


def _sparse_reader(support: int, vocab: int) -> Kernel:
    """Checking a whole sparse reply."""
    rows = sparse_rows(_logits(READ_ROWS, vocab, seed=support), None, [1.0] * READ_ROWS, support)
    shape = (READ_ROWS, support)
    ids, q, entries = np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(READ_ROWS, np.int32)
    pack_rows(rows, support, ids, q, entries)
    tokens = np.array([draw(row, MASS // 2) for row in rows], np.int32)
    return Kernel(
        "sparse_validate",
        f"{READ_ROWS}x{support}",
        lambda: validate_reply(tokens, entries, ids, q, vocab, READ_ROWS, support),
        20 * ids.size,
        READ_ROWS,
    )


def _measure(kernels: Sequence[Kernel], rounds: int) -> None:
    """Time every kernel once a round, each beside a copy of its bytes."""
    blocks = [np.ones((2, kernel.moved // 2), dtype=np.uint8) for kernel in kernels]
    for turn in range(-_WARM_UP_ROUNDS, rounds):
        for kernel, block in zip(kernels, blocks, strict=True):
            started = time.perf_counter()
            kernel.call()
            middle = time.perf_counter()
            block[1] = block[0]
            copied = time.perf_counter()
            if turn >= 0:
                kernel.seconds.append(middle - started)
                kernel.copy_seconds.append(copied - middle)


def _report(
    result: dict[str, object],
    quartiles: dict[str, list[float]],
    kernels: Sequence[Kernel],
    softmax: Kernel | None,
) -> None:
    """Three figures of each kernel: microseconds and copies of a call, and softmaxes of one of its rows."""
    for kernel in kernels:
        samples = {
            "us": [1e6 * seconds for seconds in kernel.seconds],
            "copy_ratio": _ratios(kernel.seconds, kernel.copy_seconds),
        }
        if softmax is not None and kernel is not softmax:
            samples["ratio"] = _ratios([s / kernel.rows for s in kernel.seconds], softmax.seconds)
        for unit, values in samples.items():
            key = f"{kernel.figure}_{unit}_{kernel.case}"
            result[key] = round(statistics.median(values), 3)
            quartiles[key] = [round(quartile, 3) for quartile in _quartiles(values)]


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def _quartiles(values: Sequence[float]) -> list[float]:
    if len(values) == 1:
        return [values[0]] * 2
    low, _, high = statistics.quantiles(values, n=4)
    return [low, high]


def as_json(result: dict[str, object]) -> str:
    return json.dumps(result, indent=1)


def as_table(result: dict[str, object]) -> str:
    """The same figures for people: one line for each kernel."""
    quartiles = result["quartiles"]
    assert isinstance(quartiles, dict)
    lines = [
        f"target and proposal rows, one thread, {result['rounds']} interleaved rounds, {result['path']}",
        "",
        f"{'kernel':34} {'us, median':>11} {'quartiles':>19} {'softmaxes a row':>16} {'copies':>8}",
    ]
    for key in quartiles:
        if "_us_" in key:
            ratio = result.get(key.replace("_us_", "_ratio_"), "")
            spread = " .. ".join(f"{quartile:.1f}" for quartile in quartiles[key])
            copies = result[key.replace("_us_", "_copy_ratio_")]
            name = key.replace("_us_", " ").replace("_", " ")
            lines.append(f"{name:34} {result[key]:>11.1f} {spread:>19} {ratio:>16} {copies:>8}")
    return "\n".join([*lines, "", "copies: of a plain copy that moves as many bytes; --json has every key"])
