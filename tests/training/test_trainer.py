"""One training run: what it starts from, what a block may see, exact resumption, and that it learns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dspark.errors import UserError
from dspark.models.config import from_hf
from dspark.models.drafter import expected_shapes
from dspark.models.target import Segment
from dspark.proof.tiny_pair import drafter_config, hf_config, target_weights
from dspark.training.dataset import Batch, Corpus, make_batch
from dspark.training.trainer import FROZEN, Trainer, initial_weights
from tests.training.conftest import MakeTrainer, Written


def silent(entry: object) -> None:
    """No report."""


def batch_of(trainer: Trainer, count: int = 4, anchors: int = 5, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return make_batch(trainer.corpus.training[:count], anchors, trainer.config.block_size, generator)


def logits_of(trainer: Trainer, batch: Batch) -> Tensor:
    """[S, A, B, Vd]."""
    with torch.no_grad():
        return trainer.forward(batch)[0].view(*batch.valid.shape, -1)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_drafter_starts_as_the_targets_last_layers(architecture: str, tied: bool) -> None:
    target = from_hf(hf_config(architecture, tie_word_embeddings=tied))
    weights = target_weights(target)
    config = drafter_config(target, layers=2)
    ids = torch.arange(config.draft_vocab_size) + 50
    start = initial_weights(config, weights, ids, seed=1)
    assert start.keys() == {*expected_shapes(config), "embed_tokens.weight"}
    for i in (0, 1):
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "post_attention_layernorm"):
            assert torch.equal(start[f"layers.{i}.{name}.weight"], weights[f"model.layers.{i + 2}.{name}.weight"])
    norm = weights.get("model.layers.3.self_attn.k_norm.weight", torch.full((16,), 1.5))
    assert torch.equal(start["layers.1.self_attn.k_norm.weight"], norm)
    head = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert torch.equal(start["lm_head.weight"], head[ids])
    taps = torch.randn(3, config.tap_width, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(taps @ start["fc.weight"].T, taps[:, -64:])  # the deepest tap passes through
    assert torch.equal(start["markov_head.markov_w1.weight"], initial_weights(config, weights, ids, 1)[
        "markov_head.markov_w1.weight"])  # fmt: skip
    assert all(start[n].data_ptr() != w.data_ptr() for n in start for w in weights.values())


def test_a_block_sees_the_context_strictly_below_its_anchor(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    batch = batch_of(trainer, count=2, anchors=3)
    before = logits_of(trainer, batch)
    for s, a in ((0, 0), (0, 2), (1, 1)):
        anchor = int(batch.anchors[s, a])
        assert bool(batch.valid[s, a, 0])
        for position, seen in ((anchor - 1, True), (0, True), (anchor, False), (batch.taps.shape[1] - 1, False)):
            taps = batch.taps.clone()
            taps[s, position] += 3
            changed = logits_of(trainer, replace(batch, taps=taps))[s, a] - before[s, a]
            assert (changed.abs().amax(-1) > 1e-6).tolist() == [seen] * trainer.config.block_size


def test_blocks_do_not_see_each_other(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    batch = batch_of(trainer, count=2, anchors=3)
    before = logits_of(trainer, batch)
    tokens = batch.block_tokens.clone()
    tokens[0, 1, 0] = (tokens[0, 1, 0] + 1) % 288
    changed = (logits_of(trainer, replace(batch, block_tokens=tokens)) - before).abs().amax((-1, -2)) > 1e-6
    assert changed.tolist() == [[False, True, False], [False, False, False]]


def test_rows_of_a_block_see_each_other_and_only_earlier_labels(make_trainer: MakeTrainer) -> None:
    """The anchor reaches every row; the label of row j reaches row j + 1 alone, through the Markov head."""
    trainer = make_trainer()
    batch = batch_of(trainer, count=1, anchors=1)
    before = logits_of(trainer, batch)[0, 0]
    for index, rows in ((0, [True] * 4), (1, [False, True, False, False]), (3, [False] * 3 + [True]), (4, [False] * 4)):
        tokens = batch.block_tokens.clone()
        tokens[0, 0, index] = (tokens[0, 0, index] + 7) % 288
        changed = logits_of(trainer, replace(batch, block_tokens=tokens))[0, 0] - before
        assert (changed.abs().amax(-1) > 1e-6).tolist() == rows


def test_padding_changes_nothing(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    sequences = sorted(trainer.corpus.training[:8], key=lambda s: len(s.taps))
    short, long = sequences[0], sequences[-1]
    block = trainer.config.block_size
    assert len(short.taps) < len(long.taps)
    alone = make_batch([short], 4, block, torch.Generator().manual_seed(1))
    together = make_batch([short, long], 4, block, torch.Generator().manual_seed(1))
    assert torch.equal(alone.anchors[0], together.anchors[0])
    expected, ours = logits_of(trainer, alone)[0], logits_of(trainer, together)[0]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_the_teacher_is_the_targets_own_law(make_trainer: MakeTrainer, written: Written) -> None:
    trainer = make_trainer()
    batch = batch_of(trainer, count=3)
    teacher = trainer.teacher(batch).view(*batch.valid.shape, -1)
    for i, s in enumerate(trainer.corpus.training[:3]):
        fed = s.tokens[:-1].tolist()
        logits = written.model.forward(written.model.new_cache(1, len(fed)), [Segment(0, 0, fed)]).logits
        law = torch.softmax(logits, -1)[:, trainer.draft_ids]
        for a, j in batch.valid[i].nonzero().tolist():
            row = int(batch.anchors[i, a]) + j
            torch.testing.assert_close(teacher[i, a, j], law[row], rtol=0.02, atol=1e-4)
    assert (teacher.sum(-1) < 0.95).any()


def trained(trainer: Trainer) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in trainer.weights.items()}


def run_until(trainer: Trainer, stop: int) -> None:
    """Run, and be interrupted after `stop` steps."""

    def interrupt(entry: dict[str, object]) -> None:
        if entry["step"] == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.run(interrupt)


@pytest.mark.parametrize("stop", [3, 4])
def test_an_interrupted_run_resumes_exactly(make_trainer: MakeTrainer, stop: int) -> None:
    """Interrupted right after its state was saved, and one step later (that step is done once more)."""
    whole = make_trainer("whole")
    whole.run(silent)
    run_until(make_trainer("parts"), stop)
    resumed = make_trainer("parts")
    steps: list[int] = []
    resumed.run(lambda entry: steps.append(entry["step"]))
    assert steps == [4, 5, 6]
    assert resumed.state.log == whole.state.log
    assert [entry["step"] for entry in whole.state.log] == [3, 6]
    expected = trained(whole)
    assert all(torch.equal(value, expected[name]) for name, value in trained(resumed).items())


def test_a_finished_run_does_nothing_more(make_trainer: MakeTrainer) -> None:
    first = make_trainer()
    first.run(silent)
    again = make_trainer()
    again.run(lambda entry: pytest.fail("stepped"))
    assert again.state == first.state
    expected = trained(first)
    assert all(torch.equal(value, expected[name]) for name, value in trained(again).items())


def test_a_run_trains_everything_but_the_shared_matrices(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    before = trained(trainer)
    trainer.run(silent)
    after = trained(trainer)
    assert {n for n in before if torch.equal(before[n], after[n])} == set(FROZEN)


def test_another_vocabulary_or_shape_is_refused(make_trainer: MakeTrainer, written: Written) -> None:
    first = make_trainer()
    first.run(silent)
    shifted = torch.arange(len(first.draft_ids)) + 1
    assert not torch.equal(shifted, first.draft_ids)
    for config, ids, named in (
        (first.config, shifted, "draft_ids"),
        (replace(first.config, markov_rank=16), first.draft_ids, r"markov_head\.markov_w1\.weight"),
        (replace(first.config, layers=3), first.draft_ids, r"layers\.2\."),
    ):
        weights = initial_weights(config, dict(written.source.weights()), ids, seed=4)
        other = Trainer(config, weights, ids, first.corpus, first.settings, first.directory)
        with pytest.raises(UserError, match=rf"another shape or vocabulary \({named}.* differs\)"):
            other.run(silent)


def test_the_learning_rate_warms_up_and_falls_to_nothing(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(steps=100, learning_rate=1e-3, warmup=0.1)
    rates = []
    for step in range(100):
        trainer.state.step = step
        rates.append(trainer._learning_rate())
    assert rates[0] == pytest.approx(1e-4)
    assert max(rates) == pytest.approx(1e-3)
    assert rates.index(max(rates)) in (9, 10)
    assert rates[-1] < 1e-6
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_every_sequence_is_used_once_per_epoch(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(sequences=3)
    count = len(trainer.corpus.training)
    drawn = [s for _ in range(count) for s in trainer._next_sequences()]
    for epoch in range(3):
        part = drawn[epoch * count : (epoch + 1) * count]
        assert len({id(s) for s in part}) == count
    assert [id(s) for s in drawn[:count]] != [id(s) for s in drawn[count : 2 * count]]


def test_evaluation_is_repeatable_and_consistent(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    figures = trainer.evaluate()
    assert figures == trainer.evaluate()
    for lane in ("t0", "t1"):
        accept = figures[f"accept_{lane}"]
        assert all(0 <= a <= 1 for a in accept)
        expected = 1 + sum(torch.tensor(accept).cumprod(0).tolist())
        assert figures[f"tokens_per_step_{lane}"] == pytest.approx(expected, abs=1e-3)
    confidence, acceptance = figures["calibration"]
    for i, count in enumerate(figures["counts"]):
        assert count == 0 or (i / 10 - 1e-6 <= confidence[i] <= (i + 1) / 10 + 1e-6 and 0 <= acceptance[i] <= 1)


def test_conditional_acceptance_counts_blocks_that_got_so_far(make_trainer: MakeTrainer) -> None:
    """accept_t1[j] by hand: among blocks alive before j, weighted by how likely they are, the mean chance at j."""
    trainer = make_trainer()
    held = trainer.corpus.held_out
    batch = make_batch(held[:12], 32, trainer.config.block_size, torch.Generator().manual_seed(1234))
    assert len(held) <= 12
    teacher = trainer.teacher(batch)
    overlap = torch.minimum(torch.softmax(logits_of(trainer, batch).flatten(0, 2), -1), teacher).sum(-1)
    chances = overlap.view(batch.valid.shape)
    expected = []
    for j in range(trainer.config.block_size):
        reached = accepted = 0.0
        for s, a in batch.valid[:, :, j].nonzero().tolist():
            if not batch.greedy[s]:
                survival = float(chances[s, a, :j].prod())
                reached += survival
                accepted += survival * float(chances[s, a, j])
        expected.append(accepted / reached)
    assert trainer.evaluate()["accept_t1"] == pytest.approx(expected, abs=2e-4)


def test_overfitting_ten_sequences_raises_acceptance(make_trainer: MakeTrainer, written: Written) -> None:
    corpus = Corpus(written.corpus, (0, 2), holdout_every=5)
    corpus.training = corpus.held_out = corpus.training[:10]
    assert {s.temperature for s in corpus.training} >= {0.0, 1.0}
    trainer = make_trainer(
        corpus=corpus, steps=120, sequences=10, anchors=14, learning_rate=4e-3, save_every=1000, evaluate_every=1000
    )
    before = trainer.evaluate()
    trainer.run(silent)
    after = trainer.evaluate()
    assert after["tokens_per_step_t0"] > before["tokens_per_step_t0"] + 1
    assert after["tokens_per_step_t1"] > before["tokens_per_step_t1"] + 0.5
    confidence, acceptance = (torch.tensor(row) for row in after["calibration"])
    used = torch.tensor(after["counts"]) > 30
    assert used.sum() >= 2
    assert (confidence - acceptance)[used].abs().max() < 0.2
