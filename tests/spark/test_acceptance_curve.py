"""The acceptance curve: its estimator is unbiased, exactly, and the command measures a real pair."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from dspark.dyadic import sparse_row
from dspark.proof.tiny_pair import write_drafter, write_target
from dspark.row import Row
from dspark_spark.acceptance_curve import block_survival, lane_names, match_survival, ratio_survival, reply_bytes

VOCAB = 3


def rows_of(seed: int) -> tuple[dict[tuple[int, ...], np.ndarray], dict[tuple[int, ...], Row]]:
    """A target law and a draft row for every prefix of up to two tokens."""
    random = np.random.default_rng(seed)
    prefixes = [p for n in range(3) for p in itertools.product(range(VOCAB), repeat=n)]
    p = {x: random.dirichlet(np.ones(VOCAB)) for x in prefixes}
    q = {x: sparse_row(random.normal(size=VOCAB).astype(np.float32), None, 1.0, 2) for x in prefixes}
    return p, q


def dense(row: Row) -> np.ndarray:
    out = np.zeros(VOCAB)
    out[row.ids] = row.counts / (1 << 24)
    return out


@pytest.mark.parametrize("seed", range(5))
def test_the_estimators_mean_is_the_survival(seed: int) -> None:
    """Summed over every text, weighted by the target: the probability that drafting and judging gives."""
    p, q = rows_of(seed)
    ratio, match, block = np.zeros(3), np.zeros(3), np.zeros(3)
    true_ratio, true_match, true_block = np.zeros(3), np.zeros(3), np.zeros(3)
    for text in itertools.product(range(VOCAB), repeat=3):
        prefixes = [text[:j] for j in range(3)]
        truth, rows = [p[x] for x in prefixes], [q[x] for x in prefixes]
        weight = float(np.prod([t[x] for t, x in zip(truth, text, strict=True)]))
        ratio += weight * ratio_survival(truth, rows, text)
        match += weight * match_survival(truth, rows, text)
        block += weight * block_survival(truth, rows, text)
    for j in range(3):
        for drafts in itertools.product(range(VOCAB), repeat=j + 1):
            q_values = [dense(q[drafts[:i]])[x] for i, x in enumerate(drafts)]
            p_values = [p[drafts[:i]][x] for i, x in enumerate(drafts)]
            true_ratio[j] += float(np.prod(np.minimum(q_values, p_values)))
            true_match[j] += float(np.prod(np.multiply(q_values, p_values)))
            kept = 1.0
            for q_x, p_x in zip(q_values, p_values, strict=True):
                kept = min(1.0, kept * p_x / q_x) if q_x else 0.0
            true_block[j] += float(np.prod(q_values)) * kept
    np.testing.assert_allclose(ratio, true_ratio, rtol=1e-9)
    np.testing.assert_allclose(match, true_match, rtol=1e-9)
    np.testing.assert_allclose(block, true_block, rtol=1e-9)
    assert (ratio > match).all()
    assert (block >= ratio - 1e-12).all()


def test_reply_bytes_grow_with_the_width() -> None:
    """16 B of record, and 8 B an entry for sparse rows, 4 B a token for dense ones."""
    assert reply_bytes("k32", 5, 49152) == 5 * (16 + 32 * 8)
    assert reply_bytes("match", 5, 49152) == 5 * (16 + 8)
    assert reply_bytes("dense", 5, 49152) == 5 * (16 + 4 * 49152)


def test_the_command_measures_a_pair(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from dspark import placement
    from dspark.cli import app

    target = write_target(tmp_path / "target", seed=4, scale=0.06)
    drafter = write_drafter(tmp_path / "drafter", target, seed=5)
    config = json.dumps({"method": "dspark", "model": str(drafter)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "prepare", lambda placement: None)  # torch is loaded already in this process
        output = CliRunner().invoke(
            app,
            ["bench", "acceptance", "--target", str(target), "--speculative-config", config,
             "--prompts", "1", "--max-tokens", "16", "--json"],
        )  # fmt: skip
    assert output.exit_code == 0, output.output
    result = json.loads(output.stdout)
    for name in ("t0.7", "t1"):
        lanes = result["temperatures"][name]
        assert list(lanes) == lane_names()
        for figures in lanes.values():
            positions = figures["accepted_per_position"]
            assert figures["blocks"] > 0
            assert 1 > positions[0] >= positions[-1] >= 0
            assert figures["tokens_per_step"] == pytest.approx(1 + sum(positions), abs=1e-3)
        assert lanes["dense"]["tokens_per_step"] > lanes["k16"]["tokens_per_step"] > lanes["match"]["tokens_per_step"]
