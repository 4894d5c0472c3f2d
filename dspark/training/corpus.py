"""The training corpus: the target writes both sides of the conversation itself, so there is nothing to download.

Every row of a lock-step batch starts from the chat template's user turn, with a few opening words forced in front of
half of them for variety; the model finishes the instruction, the template's assistant header is forced, and the model
answers at one of several temperatures. While it generates, the taps of candidate layers (bf16), the last hidden state
after the final norm (fp16) and the log-sum-exp of the logits are kept: that is everything that training needs, and the
target is never run again.

A corpus is a directory of numbered safetensors shards, each written whole and then renamed, so an interrupted run
continues where it stopped. Called by `dspark train`; reads nothing but the model.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from dspark.errors import UserError
from dspark.models.target import LockstepAttention, RaggedAttention, Segment, TargetModel
from dspark.models.tokenizer import ChatTokenizer

_MARK = "\u2603mark\u2603"

OPENERS = (
    "What is", "What are the", "How do I", "How does", "How can", "Why do", "Why is", "Explain", "Explain how",
    "Describe", "Write a short story about", "Write a poem about", "Write an email", "Write a paragraph about",
    "Write a Python function that", "Write a function", "Summarize", "Give me", "Give three", "List", "List five",
    "Tell me about", "Who was", "When did", "Where is", "Can you", "Could you explain", "I need help with",
    "Translate", "Compare", "What is the difference between", "Create a", "Suggest", "Is it", "Which", "Solve",
    "Calculate", "If I have", "Name", "Define", "Rewrite the following", "Help me", "My", "I want to", "Please write",
    "What happens when", "How many", "Tell me a", "Imagine", "Plan a", "Recommend", "In one sentence,", "Briefly",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CorpusSettings:
    """How the corpus is written. Lengths and counts in tokens; `answer_temperatures` are (temperature, weight)."""

    tap_layers: tuple[int, ...]
    rows: int = 128
    max_instruction: int = 56
    max_answer: int = 192
    instruction_temperature: float = 0.8
    answer_temperatures: tuple[tuple[float, float], ...] = ((0.0, 0.6), (1.0, 0.4))
    sequences_per_shard: int = 256
    seed: int = 1


@dataclass(slots=True)
class _Row:
    """One row of the lock-step batch."""

    forced: deque[int]
    tokens: list[int]
    temperature: float
    answer_temperature: float
    answer_start: int = 0
    instruction_budget: int = 0


@dataclass
class CorpusProgress:
    """What has been written so far, in tokens; `answer_tokens` are the ones that train."""

    tokens: int = 0
    answer_tokens: int = 0
    sequences: int = 0
    shards: int = 0


@dataclass
class _Shard:
    """Finished sequences that wait for their file."""

    tokens: list[Tensor] = field(default_factory=list)
    taps: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    lse: list[Tensor] = field(default_factory=list)
    meta: list[tuple[int, int, int]] = field(default_factory=list)


def template_parts(tokenizer: ChatTokenizer) -> tuple[list[int], list[int]]:
    """Token ids in front of the user's text, and between it and the assistant's answer.

    Raises UserError when there are none: a row is started by feeding the one, and an instruction ended by the other.
    """
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], add_generation_prompt=True)
    before, mark, after = text.partition(_MARK)
    prefix, turn = tokenizer.encode(before), tokenizer.encode(after)
    if not (mark and prefix and turn):
        raise UserError(
            "the chat template must put something before and after the user's text: the target cannot write "
            "conversations with this one, use an instruction-tuned model"
        )
    return prefix, turn


class CorpusWriter:
    """Generates sequences in lock step and writes shards into `directory`."""

    def __init__(
        self, model: TargetModel, tokenizer: ChatTokenizer, settings: CorpusSettings, directory: Path
    ) -> None:
        self._model, self._tokenizer, self._settings = model, tokenizer, settings
        self._directory = directory
        self._prefix, self._turn = template_parts(tokenizer)
        self._length = self._longest()
        self._cache = model.new_cache(settings.rows, self._length)
        width = len(settings.tap_layers) * model.config.hidden_size
        rows = settings.rows
        self._taps = torch.zeros(rows, self._length, width, dtype=torch.bfloat16)
        self._hidden = torch.zeros(rows, self._length, model.config.hidden_size, dtype=torch.float16)
        self._lse = torch.zeros(rows, self._length)
        self._positions = torch.full((rows,), len(self._prefix) - 1, dtype=torch.int64)
        self.progress = CorpusProgress()
        self._shard = _Shard()

    def _longest(self) -> int:
        """Positions of the longest possible sequence."""
        s = self._settings
        opener = max(len(self._tokenizer.encode(text)) for text in OPENERS)
        length = len(self._prefix) + opener + s.max_instruction + len(self._turn) + s.max_answer
        if length > self._model.config.max_context:
            raise UserError(
                f"conversations of up to {length} tokens do not fit the target's context of "
                f"{self._model.config.max_context}: use a target with a longer one"
            )
        return length

    def run(self, answer_tokens: int, report: Callable[[CorpusProgress], None]) -> None:
        """Generate until the corpus holds `answer_tokens`; existing shards count. Safe to interrupt.

        Raises UserError when the directory holds shards with taps of other layers.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        self._check_resumable()
        self.progress = read_progress(self._directory)
        self._random = random.Random(self._settings.seed * 1_000_003 + self.progress.shards)
        torch.manual_seed(self._settings.seed * 1_000_003 + self.progress.shards)
        self._write_prefix()
        rows = [self._new_row() for _ in range(self._settings.rows)]
        inputs = torch.tensor([row.forced.popleft() for row in rows])
        while self.progress.answer_tokens < answer_tokens:
            inputs = self._step(rows, inputs)
            report(self.progress)
        if self._shard.meta:
            self._write_shard()

    def _check_resumable(self) -> None:
        stored = stored_taps(self._directory)
        if stored is not None and stored != self._settings.tap_layers:
            raise UserError(
                f"{self._directory} holds taps of the layers {list(stored)}, not {list(self._settings.tap_layers)}: "
                "continue with those, or use another directory"
            )

    @torch.inference_mode()
    def _write_prefix(self) -> None:
        """The shared prefix is computed once and copied into every row."""
        ids = torch.tensor(self._prefix)
        attention = RaggedAttention(self._cache, [Segment(0, 0, self._prefix)])
        x, taps = self._model.run_layers(ids, torch.arange(len(ids)), attention, self._settings.tap_layers)
        hidden = self._final_norm(x)
        n = len(self._prefix)
        self._cache.keys[:, :, :, :n] = self._cache.keys[:, :1, :, :n]
        self._cache.values[:, :, :, :n] = self._cache.values[:, :1, :, :n]
        assert taps is not None
        self._taps[:, :n] = taps
        self._hidden[:, :n] = hidden.to(torch.float16)
        self._lse[:, :n] = torch.logsumexp(self._model.lm_head(hidden), dim=-1)

    def _final_norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self._model.norm, self._model.config.rms_eps)

    def _new_row(self) -> _Row:
        opener = self._random.choice(OPENERS) if self._random.random() < 0.5 else ""
        temperatures, weights = zip(*self._settings.answer_temperatures, strict=True)
        # The last prefix token is fed again so that the step that starts a row has logits to sample from.
        return _Row(
            forced=deque([self._prefix[-1], *self._tokenizer.encode(opener)]),
            tokens=list(self._prefix[:-1]),
            temperature=self._settings.instruction_temperature,
            answer_temperature=self._random.choices(temperatures, weights)[0],
            instruction_budget=self._settings.max_instruction,
        )

    @torch.inference_mode()
    def _step(self, rows: list[_Row], inputs: Tensor) -> Tensor:
        """One lock-step forward; returns the next input token of every row."""
        span = int(self._positions.max()) + 1
        attention = LockstepAttention(self._cache, self._positions, span)
        x, taps = self._model.run_layers(inputs, self._positions, attention, self._settings.tap_layers)
        hidden = self._final_norm(x)
        logits = self._model.lm_head(hidden)
        index = torch.arange(len(rows))
        assert taps is not None
        self._taps[index, self._positions] = taps
        self._hidden[index, self._positions] = hidden.to(torch.float16)
        self._lse[index, self._positions] = torch.logsumexp(logits, dim=-1)
        sampled = _sample(logits, torch.tensor([row.temperature for row in rows])).tolist()
        fed = inputs.tolist()
        following = [self._advance(i, rows, fed[i], sampled[i]) for i in range(len(rows))]
        self._positions = torch.tensor([len(row.tokens) for row in rows])
        return torch.tensor(following)

    def _advance(self, index: int, rows: list[_Row], fed: int, sampled: int) -> int:
        """Record the token just fed to row `index` and choose the next one; a finished row is replaced."""
        row = rows[index]
        row.tokens.append(fed)
        if row.forced:
            return row.forced.popleft()
        if row.answer_start == 0:
            return self._advance_instruction(row, sampled)
        ended = sampled == self._turn[0] or sampled in self._tokenizer.eos_ids
        if ended or self._answer_length(row) >= self._settings.max_answer:
            self._finish(index, row, sampled)
            rows[index] = self._new_row()
            return rows[index].forced.popleft()
        return sampled

    def _answer_length(self, row: _Row) -> int:
        return len(row.tokens) - row.answer_start

    def _advance_instruction(self, row: _Row, sampled: int) -> int:
        row.instruction_budget -= 1
        if sampled == self._turn[0] or sampled in self._tokenizer.eos_ids or row.instruction_budget <= 0:
            row.forced = deque(self._turn[1:])
            row.answer_start = len(row.tokens) + len(self._turn)
            row.temperature = row.answer_temperature
            return self._turn[0]
        return sampled

    def _finish(self, index: int, row: _Row, last: int) -> None:
        """Keep a finished sequence: all fed tokens, plus the sampled last one as a label only."""
        n = len(row.tokens)
        tokens = torch.tensor([*row.tokens, last], dtype=torch.int32)
        self._shard.tokens.append(tokens)
        self._shard.taps.append(self._taps[index, :n].clone())
        self._shard.hidden.append(self._hidden[index, :n].clone())
        self._shard.lse.append(self._lse[index, :n].clone())
        self._shard.meta.append((n, row.answer_start, round(row.answer_temperature * 1000)))
        self.progress.tokens += n
        self.progress.answer_tokens += n + 1 - row.answer_start
        self.progress.sequences += 1
        if len(self._shard.meta) >= self._settings.sequences_per_shard:
            self._write_shard()

    def _write_shard(self) -> None:
        shard, self._shard = self._shard, _Shard()
        path = self._directory / f"shard-{self.progress.shards:05d}.safetensors"
        tensors = {
            "tokens": torch.cat(shard.tokens),
            "taps": torch.cat(shard.taps),
            "hidden": torch.cat(shard.hidden),
            "lse": torch.cat(shard.lse),
            "meta": torch.tensor(shard.meta, dtype=torch.int32),
        }
        partial = path.with_suffix(".partial")
        save_file(tensors, str(partial))
        partial.rename(path)
        self.progress.shards += 1
        state = {"progress": asdict(self.progress), "settings": asdict(self._settings)}
        partial = self._directory / "corpus.json.partial"
        partial.write_text(json.dumps(state, indent=1), "utf-8")
        partial.replace(self._directory / "corpus.json")


def read_progress(directory: Path) -> CorpusProgress:
    """Progress of the shards in `directory` (zeros when there are none)."""
    file = directory / "corpus.json"
    if not file.is_file():
        return CorpusProgress()
    return CorpusProgress(**json.loads(file.read_text("utf-8"))["progress"])


def stored_taps(directory: Path) -> tuple[int, ...] | None:
    """The layers whose taps the shards in `directory` hold; None when there are no shards."""
    file = directory / "corpus.json"
    if not file.is_file():
        return None
    return tuple(json.loads(file.read_text("utf-8"))["settings"]["tap_layers"])


def _sample(logits: Tensor, temperatures: Tensor) -> Tensor:
    """One token per row of logits [rows, vocab]: argmax at temperature 0, else inverse-CDF sampling."""
    greedy = logits.argmax(dim=-1)
    weights = torch.softmax(logits / temperatures.clamp(min=1e-3)[:, None], dim=-1)
    cumulative = weights.cumsum(dim=-1)
    points = torch.rand(len(logits), 1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, points, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return torch.where(temperatures > 0, drawn, greedy)


def tap_columns(stored: Sequence[int], wanted: Sequence[int], hidden_size: int) -> list[slice]:
    """Where the wanted tap layers lie inside a stored row of taps."""
    return [slice(stored.index(t) * hidden_size, (stored.index(t) + 1) * hidden_size) for t in wanted]
