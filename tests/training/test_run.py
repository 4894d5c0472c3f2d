"""`dspark train` on a tiny target: every stage, interrupted and resumed; the checkpoint and the report it leaves."""

from __future__ import annotations

import base64
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.errors import UserError
from dspark.models.drafter import DrafterCheckpoint
from dspark.models.source import load_embedding, open_target
from dspark.proof.tiny_pair import drafter_config, write_target
from dspark.speculative import parse, resolve
from dspark.training import run
from dspark.training.corpus import CorpusWriter, read_progress
from dspark.training.report import write_report
from dspark.training.run import TrainOptions, parse_taps, train
from dspark.training.trainer import Trainer, read_state


def options_for(target: Path, output: Path) -> TrainOptions:
    return TrainOptions(
        output=output,
        target=str(target),
        tokens=1500,
        blocks=4 * 320,
        layers=1,
        taps="0,1,2",
        block=3,
        rank=8,
        draft_vocab=120,
        learning_rate=2e-3,
        rows=8,
        seed=5,
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), seed=2, scale=0.06)


@pytest.fixture(scope="module")
def finished(target: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainOptions:
    options = options_for(target, tmp_path_factory.mktemp("run"))
    train(options)
    return options


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_a_corpus_smaller_than_one_shard_is_kept(finished: TrainOptions) -> None:
    progress = read_progress(finished.output / "corpus")
    assert progress.answer_tokens >= 1500
    assert progress.shards == 1


def test_the_checkpoint_is_a_drafter_for_the_target(finished: TrainOptions) -> None:
    directory = finished.output / "checkpoint"
    checkpoint = DrafterCheckpoint(directory)
    config = checkpoint.config
    assert (config.layers, config.block_size, config.markov_rank, config.draft_vocab_size) == (1, 3, 8, 120)
    assert config.target_layer_ids == (0, 1, 2)
    assert 257 in checkpoint.draft_ids  # the end of text can always be drafted
    source = open_target(finished.target)
    network = checkpoint.network(load_embedding(source))
    assert network.context_rows(torch.zeros(2, config.tap_width)).shape == (2, 64)
    speculative = parse(json.dumps({"method": "dspark", "model": str(directory)}))
    resolved = resolve(speculative, finished.target, source.config)
    assert resolved is not None
    assert resolved.depth == 3


def test_the_checkpoint_holds_the_trained_weights(finished: TrainOptions) -> None:
    from safetensors.torch import load_file

    state = load_file(str(finished.output / "training" / "state.safetensors"))
    checkpoint = DrafterCheckpoint(finished.output / "checkpoint")
    trained = [n for n in checkpoint.tensors if n != "lm_head.weight"]
    assert all(torch.equal(checkpoint.tensors[n], state[n].bfloat16()) for n in trained)
    assert torch.equal(checkpoint.draft_ids, state["draft_ids"])
    head = dict(open_target(finished.target).weights())["lm_head.weight"]
    assert torch.equal(checkpoint.tensors["lm_head.weight"], head[checkpoint.draft_ids].bfloat16())


def test_the_report_has_its_four_plots(finished: TrainOptions) -> None:
    page = (finished.output / "report.html").read_text("utf-8")
    images = re.findall(r'<img alt="([^"]+)" src="data:image/png;base64,([^"]+)">', page)
    assert [label for label, _ in images] == [
        "loss", "tokens per step", "acceptance per position", "calibration of the confidence head",
    ]  # fmt: skip
    assert all(base64.b64decode(data).startswith(b"\x89PNG") for _, data in images)
    assert "Qwen3DSparkModel" in page
    assert page.count("<tr>") == 3


def test_the_card_says_what_was_trained(finished: TrainOptions) -> None:
    card = (finished.output / "checkpoint" / "README.md").read_text("utf-8")
    state = read_state(finished.output / "training")
    assert state["step"] == 4
    assert "4 steps, 1,280 blocks" in card
    assert str(state["log"][-1]["tokens_per_step_t1"]) in card
    assert f"{read_progress(finished.output / 'corpus').answer_tokens:,} answer tokens" in card


def test_a_finished_run_repeats_only_its_output(finished: TrainOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(finished.output / "corpus") | files(finished.output / "checkpoint")
    monkeypatch.setattr(Trainer, "_step", lambda self: pytest.fail("stepped"))
    monkeypatch.setattr(run, "CorpusWriter", lambda *arguments: pytest.fail("wrote a corpus"))
    train(finished)
    assert files(finished.output / "corpus") | files(finished.output / "checkpoint") == before


def test_an_interrupted_run_ends_where_a_whole_one_does(
    finished: TrainOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted once while it writes and once while it trains; status 130 both times, the same drafter at the end."""
    options = replace(finished, output=tmp_path)
    calls = {"writing": 0, "training": 0}

    def interrupt_after(limit: int, stage: str, original: Any) -> Any:
        def call(self: Any, *arguments: Any) -> Any:
            calls[stage] += 1
            if calls[stage] == limit:
                raise KeyboardInterrupt
            return original(self, *arguments)

        return call

    monkeypatch.setattr(CorpusWriter, "_step", interrupt_after(50, "writing", CorpusWriter._step))
    monkeypatch.setattr(Trainer, "_step", interrupt_after(3, "training", Trainer._step))
    for stage in ("writing", "training"):
        with pytest.raises(SystemExit) as stopped:
            train(options)
        assert stopped.value.code == 130
        assert calls[stage] >= 3
        assert not (tmp_path / "checkpoint").exists()
    train(options)
    weights = "checkpoint/model.safetensors"
    assert (tmp_path / weights).read_bytes() == (finished.output / weights).read_bytes()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"taps": "0,3"}, "target_layer_ids .* must lie in"),
        ({"taps": "two"}, "--taps 'two': give zero-based layer numbers"),
        ({"layers": 5}, "--layers 5: .* target's 4"),
        ({"block": 33}, "block_size 33"),
        ({"rank": 0}, "markov_rank 0"),
        ({"target": "nothing-here"}, "--target 'nothing-here'"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_written(
    target: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        train(replace(options_for(target, tmp_path / "run"), **changes))
    assert not (tmp_path / "run").exists()


def test_a_draft_vocabulary_is_at_most_the_targets(finished: TrainOptions, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for name, content in files(finished.output / "corpus").items():
        (tmp_path / "corpus" / name).write_bytes(content)
    train(replace(finished, output=tmp_path, draft_vocab=8192, blocks=1))
    checkpoint = DrafterCheckpoint(tmp_path / "checkpoint")
    assert torch.equal(checkpoint.draft_ids, torch.arange(288))


@pytest.mark.parametrize(
    ("text", "layers", "taps"),
    [
        ("", 30, (2, 8, 15, 22, 28)),
        ("", 36, (2, 10, 18, 26, 34)),
        ("", 8, (2, 3, 4, 5, 6)),
        ("", 4, (2,)),
        ("", 2, (0,)),
        ("14,2,26", 30, (2, 14, 26)),
        (" 3 ,3", 30, (3,)),
    ],
)
def test_parse_taps(text: str, layers: int, taps: tuple[int, ...]) -> None:
    assert parse_taps(text, layers) == taps


def test_a_target_of_one_layer_has_nothing_to_tap() -> None:
    with pytest.raises(UserError, match="one layer"):
        parse_taps("", 1)


def test_the_report_needs_matplotlib(finished: TrainOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    config = drafter_config(open_target(finished.target).config)
    with pytest.raises(UserError, match=r"pip install 'dspark\[train\]'"):
        write_report(tmp_path / "report.html", [], config)


def test_training_goes_on_from_a_checkpoint(finished: TrainOptions, tmp_path: Path) -> None:
    """Its taps, shape and vocabulary hold; the first step already starts from its weights."""
    before = DrafterCheckpoint(finished.output / "checkpoint")
    options = replace(
        finished, output=tmp_path / "more", initial=finished.output / "checkpoint", taps="0,1", block=2,
        draft_vocab=60, blocks=320, learning_rate=1e-6,
    )  # fmt: skip
    train(options)
    after = DrafterCheckpoint(options.output / "checkpoint")
    assert after.config == before.config
    assert torch.equal(after.draft_ids, before.draft_ids)
    for name, weight in before.tensors.items():
        assert torch.allclose(after.tensors[name].float(), weight.float(), atol=1e-2, rtol=1e-2), name
    assert any(not torch.equal(after.tensors[name], weight) for name, weight in before.tensors.items())
    card = (options.output / "checkpoint" / "README.md").read_text("utf-8")
    assert "an earlier checkpoint" in card


def test_a_checkpoint_for_another_target_is_refused(finished: TrainOptions, tmp_path: Path) -> None:
    other = write_target(tmp_path / "other", seed=3, num_hidden_layers=5)
    options = replace(finished, output=tmp_path / "run", target=str(other), initial=finished.output / "checkpoint")
    with pytest.raises(UserError, match="--initial"):
        train(options)
    assert not (tmp_path / "run").exists()
