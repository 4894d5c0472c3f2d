"""The corpus that a target writes for itself: what a sequence holds, interruption, resumption, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dspark.errors import UserError
from dspark.models.source import load_target, open_target
from dspark.models.target import Segment
from dspark.models.tokenizer import ChatTokenizer
from dspark.proof.tiny_pair import write_target
from dspark.training.corpus import (
    OPENERS,
    CorpusProgress,
    _sample,
    read_progress,
    stored_taps,
    tap_columns,
    template_parts,
)
from dspark.training.dataset import Conversation, Corpus
from tests.training.conftest import SETTINGS, Written, quiet


@pytest.fixture(scope="module")
def sequences(written: Written) -> list[Conversation]:
    corpus = Corpus(written.corpus, SETTINGS.tap_layers, holdout_every=1000)
    return [*corpus.held_out, *corpus.training]


def test_template_parts(written: Written) -> None:
    prefix, turn = template_parts(written.tokenizer)
    assert written.tokenizer.encode("<|user|>") == prefix
    assert written.tokenizer.encode("<|end|><|assistant|>") == turn


@pytest.mark.parametrize("template", ["fixed", "{{ messages[0].content }}<|end|>", "<|user|>{{ messages[0].content }}"])
def test_templates_that_cannot_start_or_end_an_instruction_are_refused(tmp_path: Path, template: str) -> None:
    directory = write_target(tmp_path)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(UserError, match="chat template must put something before and after"):
        template_parts(open_target(str(directory)).tokenizer())


def test_sequences_have_the_shape_of_a_conversation(written: Written, sequences: list[Conversation]) -> None:
    prefix, turn = template_parts(written.tokenizer)
    longest_opener = max(len(written.tokenizer.encode(text)) for text in OPENERS)
    assert len(sequences) >= 40
    for s in sequences:
        n, tokens = len(s.taps), s.tokens.tolist()
        assert (len(tokens), len(s.hidden), len(s.lse)) == (n + 1, n, n)
        assert tokens[: len(prefix)] == prefix
        assert tokens[s.answer_start - len(turn) : s.answer_start] == turn
        instruction = tokens[len(prefix) : s.answer_start - len(turn)]
        assert len(instruction) <= longest_opener + SETTINGS.max_instruction
        assert not {turn[0], *written.tokenizer.eos_ids} & set(instruction)
        answer = tokens[s.answer_start :]
        assert 1 <= len(answer) <= SETTINGS.max_answer + 1
        assert not {turn[0], *written.tokenizer.eos_ids} & set(answer[:-1])


def test_sequences_vary(written: Written, sequences: list[Conversation]) -> None:
    assert len({tuple(s.tokens.tolist()) for s in sequences}) == len(sequences)
    assert {s.temperature for s in sequences} == {0.0, 0.6, 1.0}
    texts = [written.tokenizer.decode(s.tokens.tolist()) for s in sequences]
    opened = sum(text.startswith(OPENERS) for text in texts)
    assert 0.2 * len(texts) < opened < 0.8 * len(texts)
    answers = [len(s.tokens) - s.answer_start for s in sequences]
    assert min(answers) < SETTINGS.max_answer  # some ended by themselves
    assert max(answers) == SETTINGS.max_answer + 1


def test_rows_equal_a_fresh_forward_of_the_tokens(written: Written, sequences: list[Conversation]) -> None:
    """Whatever slot and cache a row was written with: taps, hidden state and log-sum-exp are those of its own text."""
    for s in sequences[::3]:
        fed = s.tokens[:-1].tolist()
        cache = written.model.new_cache(1, len(fed))
        fresh = written.model.forward(cache, [Segment(0, 0, fed)], tap_layers=SETTINGS.tap_layers)
        assert fresh.taps is not None
        torch.testing.assert_close(s.taps.float(), fresh.taps.float(), rtol=2**-7, atol=1e-4)
        torch.testing.assert_close(s.hidden.float(), fresh.hidden, rtol=2**-9, atol=1e-3)
        torch.testing.assert_close(s.lse, torch.logsumexp(fresh.logits, -1), rtol=1e-4, atol=1e-4)


def test_greedy_answers_are_the_targets_argmax(written: Written, sequences: list[Conversation]) -> None:
    greedy = [s for s in sequences if s.temperature == 0]
    assert greedy
    for s in greedy:
        tokens = s.tokens.tolist()
        logits = written.model.forward(written.model.new_cache(1, len(tokens)), [Segment(0, 0, tokens)]).logits
        rows = logits[s.answer_start - 1 : -1]
        chosen = rows.gather(1, s.tokens[s.answer_start :].long()[:, None]).squeeze(1)
        torch.testing.assert_close(chosen, rows.max(-1).values, rtol=0, atol=1e-4)


def test_progress_counts_what_is_on_disk(written: Written, sequences: list[Conversation]) -> None:
    progress = read_progress(written.corpus)
    assert progress.sequences == len(sequences)
    assert progress.answer_tokens == sum(len(s.tokens) - s.answer_start for s in sequences) >= 600
    assert progress.tokens == sum(len(s.taps) for s in sequences)
    assert progress.shards == len(list(written.corpus.glob("shard-*.safetensors"))) > 1
    assert stored_taps(written.corpus) == SETTINGS.tap_layers
    assert not list(written.corpus.glob("*.partial"))


def test_a_finished_corpus_is_left_alone(written: Written) -> None:
    before = {p.name: p.read_bytes() for p in written.corpus.iterdir()}
    written.writer(written.corpus).run(600, quiet)
    assert {p.name: p.read_bytes() for p in written.corpus.iterdir()} == before


class _Stop:
    """Interrupts a writer when it has finished so many shards."""

    def __init__(self, shards: int) -> None:
        self._shards = shards

    def __call__(self, progress: CorpusProgress) -> None:
        if progress.shards >= self._shards:
            raise KeyboardInterrupt


def test_an_interrupted_corpus_is_continued(written: Written, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        written.writer(tmp_path).run(400, _Stop(1))
    (tmp_path / "shard-00001.partial").write_bytes(b"half a shard")
    first = (tmp_path / "shard-00000.safetensors").read_bytes()
    done = read_progress(tmp_path)
    assert (done.shards, done.sequences) == (1, 10)
    written.writer(tmp_path).run(400, quiet)
    assert (tmp_path / "shard-00000.safetensors").read_bytes() == first
    shards = [load_file(str(p)) for p in sorted(tmp_path.glob("shard-*.safetensors"))]
    assert len(shards) == read_progress(tmp_path).shards > 1
    assert not torch.equal(shards[0]["tokens"][:60], shards[1]["tokens"][:60])  # not the same text once more
    assert read_progress(tmp_path).answer_tokens >= 400


def test_the_same_seed_writes_the_same_corpus(written: Written, tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        written.writer(tmp_path / name, replace(SETTINGS, seed=seed)).run(80, quiet)
    a, b, c = ((tmp_path / name / "shard-00000.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_other_taps_in_one_directory_are_refused(written: Written) -> None:
    with pytest.raises(UserError, match=r"holds taps of the layers \[0, 1, 2\], not \[0, 2\]"):
        written.writer(written.corpus, replace(SETTINGS, tap_layers=(0, 2))).run(10_000, quiet)


def test_short_limits_leave_room_for_every_opener(written: Written, tmp_path: Path) -> None:
    settings = replace(SETTINGS, max_instruction=1, max_answer=1, rows=20)
    written.writer(tmp_path, settings).run(200, quiet)
    corpus = Corpus(tmp_path, SETTINGS.tap_layers)
    assert max(len(s.tokens) - s.answer_start for s in corpus.training) == 2


def test_a_context_that_is_too_short_is_refused(tmp_path: Path) -> None:
    source = open_target(str(write_target(tmp_path, max_position_embeddings=40)))
    model = load_target(source, device="cpu", dtype=torch.float32)
    tokenizer: ChatTokenizer = source.tokenizer()
    with pytest.raises(UserError, match="do not fit the target's context of 40"):
        Written(tmp_path, source, model, tokenizer, tmp_path).writer(tmp_path)


def test_sampling_follows_the_temperature() -> None:
    torch.manual_seed(5)
    logits = torch.tensor([0.0, 1.0, 2.0, float("-inf")])
    for temperature in (0.5, 1.0):
        drawn = _sample(logits.expand(40_000, 4), torch.full((40_000,), temperature))
        share = torch.bincount(drawn, minlength=4) / 40_000
        torch.testing.assert_close(share, torch.softmax(logits / temperature, -1), rtol=0, atol=0.012)
        assert share[3] == 0
    assert _sample(logits.expand(50, 4), torch.zeros(50)).tolist() == [2] * 50


def test_tap_columns() -> None:
    assert tap_columns((2, 8, 14), (2, 14), 10) == [slice(0, 10), slice(20, 30)]
