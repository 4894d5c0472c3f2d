"""Batches of blocks: anchors, labels, teacher rows, padding; the reduced vocabulary; the held-out part."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from dspark.errors import UserError
from dspark.training.dataset import Batch, Conversation, Corpus, make_batch
from tests.training.conftest import Written

BLOCK = 4


@pytest.fixture(scope="module")
def corpus(written: Written) -> Corpus:
    return Corpus(written.corpus, (0, 1, 2), holdout_every=5)


def batch_of(sequences: list[Conversation], anchors: int, seed: int = 0) -> Batch:
    return make_batch(sequences, anchors, BLOCK, torch.Generator().manual_seed(seed))


def test_whole_sequences_are_held_out(corpus: Corpus, written: Written) -> None:
    whole = Corpus(written.corpus, (0, 1, 2), holdout_every=10_000)
    texts = [tuple(s.tokens.tolist()) for s in (*whole.held_out, *whole.training)]
    assert [tuple(s.tokens.tolist()) for s in corpus.held_out] == texts[::5]
    assert [tuple(s.tokens.tolist()) for s in corpus.training] == [t for i, t in enumerate(texts) if i % 5]


def test_taps_of_some_of_the_stored_layers(corpus: Corpus, written: Written) -> None:
    part = Corpus(written.corpus, (0, 2), holdout_every=5)
    for some, whole in zip(part.training, corpus.training, strict=True):
        assert torch.equal(some.taps, torch.cat([whole.taps[:, :64], whole.taps[:, 128:]], dim=1))


@pytest.mark.parametrize("seed", range(3))
def test_anchors_are_distinct_rows_before_an_answer_token(corpus: Corpus, seed: int) -> None:
    sequences = corpus.training[:6]
    batch = batch_of(sequences, 5, seed)
    for s, anchors, valid in zip(sequences, batch.anchors.tolist(), batch.valid, strict=True):
        used = [a for a, v in zip(anchors, valid, strict=True) if v[0]]
        assert used == sorted(set(used))
        assert len(used) == min(5, len(s.taps) - s.answer_start + 1)
        assert all(s.answer_start - 1 <= a < len(s.taps) for a in used)


def test_all_rows_become_anchors_once_when_there_is_room(corpus: Corpus) -> None:
    s = corpus.training[0]
    batch = batch_of([s], 40)
    used = batch.anchors[0][batch.valid[0, :, 0]].tolist()
    assert used == list(range(s.answer_start - 1, len(s.taps)))
    assert not batch.valid[0, len(used) :].any()


def test_labels_and_teacher_rows(corpus: Corpus) -> None:
    """Row j of a block at anchor a predicts token a + j + 1, and its teacher is the target's row a + j."""
    sequences = corpus.training[:6]
    batch = batch_of(sequences, 8)
    checked = 0
    for i, s in enumerate(sequences):
        for a, anchor in enumerate(batch.anchors[i].tolist()):
            usable = bool(batch.valid[i, a, 0])
            assert batch.block_tokens[i, a, 0] == s.tokens[anchor]
            for j in range(BLOCK):
                assert bool(batch.valid[i, a, j]) == (usable and anchor + j < len(s.taps))
                if batch.valid[i, a, j]:
                    assert batch.block_tokens[i, a, j + 1] == s.tokens[anchor + j + 1]
                    assert torch.equal(batch.teacher_hidden[i, a, j], s.hidden[anchor + j].float())
                    assert batch.teacher_lse[i, a, j] == s.lse[anchor + j]
                    checked += 1
    assert checked > 80
    assert not batch.valid.all()


def test_padding_is_zero_and_temperatures_are_marked(corpus: Corpus) -> None:
    sequences = corpus.training[:6]
    batch = batch_of(sequences, 2)
    assert batch.taps.shape[1] == max(len(s.taps) for s in sequences) > min(len(s.taps) for s in sequences)
    for i, s in enumerate(sequences):
        assert torch.equal(batch.taps[i, : len(s.taps)], s.taps.float())
        assert not batch.taps[i, len(s.taps) :].any()
    assert batch.greedy.tolist() == [s.temperature == 0 for s in sequences]


def test_the_draft_vocabulary_is_the_most_frequent(corpus: Corpus) -> None:
    counts = Counter(t for s in corpus.training for t in s.tokens[s.answer_start :].tolist())
    ids = corpus.draft_vocabulary(40, always=())
    coverage = corpus.coverage(ids)
    assert ids.tolist() == sorted(set(ids.tolist()))
    assert len(ids) == 40
    kept = sum(counts[i] for i in ids.tolist())
    assert kept == sum(n for _, n in counts.most_common(40))
    assert coverage == pytest.approx(kept / counts.total())


def test_the_end_of_text_is_always_drafted(corpus: Corpus) -> None:
    """Also where it is above every token of the corpus and above the size asked for."""
    ids = corpus.draft_vocabulary(10, always=(257, 287))
    assert {257, 287} <= set(ids.tolist())
    assert len(ids) == 10


def test_a_vocabulary_of_the_targets_size_is_the_targets(corpus: Corpus) -> None:
    ids = corpus.draft_vocabulary(288, always=(257,))
    coverage = corpus.coverage(ids)
    assert ids.tolist() == list(range(288))
    assert coverage == 1.0


def test_refusals(written: Written, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="write a corpus first"):
        Corpus(tmp_path, (0,))
    with pytest.raises(UserError, match=r"tap layers \[3\] are not in this corpus, which holds \[0, 1, 2\]"):
        Corpus(written.corpus, (0, 3))
    with pytest.raises(UserError, match="none to train on"):
        Corpus(written.corpus, (0,), holdout_every=1)
