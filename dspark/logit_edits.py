"""Edits of target logits that depend on the text so far: bias, penalties, bans and the grammar's mask.

Purpose: the part of p that has a memory. Row i of a verify block stands behind the committed tokens and the drafts
before it, x_1 .. x_i, and is edited as if those drafts were committed.

Invariants:

- Order: logit_bias, then repetition, frequency and presence penalty, then everything that bans a token.
- Arithmetic is FP64; a logit is stored back as FP32 after the bias and after the penalties.
- A state is a value. ``EditState.after`` returns another one and judging a row changes none, so a rejected draft
  leaves nothing behind: the next round starts from the state of the committed tokens, whatever was judged.
- Only ids that have a bias, a count or a ban are touched; ids that nobody asked about keep their bits.

Called by ``dspark.processors`` (rows) and by the verifier's engine (states). It never knows a temperature.

Sources: OpenAI's API reference for logit_bias and the presence and frequency penalty; Keskar et al. 1909.05858,
section 4.1, for the repetition penalty, in the form that divides positive logits and multiplies the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dspark.dyadic import Float32s, Float64s, Int64s, Mask
from dspark.grammar import Grammar


class PolicyError(ValueError):
    """A sampling parameter outside its range; the message names the field."""


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """What one request asks for; the defaults ask for nothing.

    Fields:
        logit_bias: added to the logit of each id.
        presence_penalty: taken from the logit of each id that was generated, however often.
        frequency_penalty: taken from it once for every time that the id was generated.
        repetition_penalty: > 0; divides a positive logit of each id of prompt or generated text, multiplies others.
        min_tokens: ``ending_ids`` are banned until so many tokens were generated.
        ending_ids: ids that would end the text (EOS, stop ids). On their own they ask for nothing.
        bad_words: token sequences; the last id of one is banned where the generated text ends with the others.
        allowed_token_ids: all other ids are banned; None allows all.
        grammar: its state before the first generated token.

    Raises:
        PolicyError: a value out of range.
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ending_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise PolicyError(f"{name}={getattr(self, name)} must be a finite number")
        if not 0 < self.repetition_penalty < math.inf:
            raise PolicyError(f"repetition_penalty={self.repetition_penalty} must be a finite number > 0")
        if not all(map(math.isfinite, self.logit_bias.values())):
            raise PolicyError("logit_bias must have finite values")
        if self.min_tokens < 0:
            raise PolicyError(f"min_tokens={self.min_tokens} must be >= 0")
        if not all(self.bad_words):
            raise PolicyError("bad_words must not have an empty sequence")
        if self.allowed_token_ids == ():
            raise PolicyError("allowed_token_ids must have at least one id (None allows all)")

    @property
    def penalises(self) -> bool:
        """Whether tokens have to be counted."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def asks(self) -> bool:
        """Whether any row of this request could be edited."""
        return replace(self, ending_ids=()) != LogitEdits()


@dataclass(frozen=True, slots=True, eq=False)
class TokenCounts:
    """How often ids were generated: ``ids`` int64[n], each once; ``generated`` int64[n] >= 0.

    0 is an id of the prompt that was not generated yet: only the repetition penalty looks at those.
    """

    ids: Int64s
    generated: Int64s

    def plus(self, token: int) -> TokenCounts:
        """The counts with one more token."""
        hit = self.ids == token
        if hit.any():
            return TokenCounts(self.ids, self.generated + hit)
        return TokenCounts(np.append(self.ids, token), np.append(self.generated, 1))


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """What is the same at every position: the request, and arrays made of it once.

    Fields:
        bias_ids, bias: int64[n] and float64[n].
        forbidden: bool[V], True outside ``allowed_token_ids``; None when all are allowed.
        bad_endings: the last ids of ``bad_words``, by the tokens that come before them.
        lengths: how many tokens those are, ascending, each length once.
    """

    edits: LogitEdits
    bias_ids: Int64s
    bias: Float64s
    forbidden: Mask | None
    bad_endings: Mapping[tuple[int, ...], list[int]]
    lengths: tuple[int, ...]

    @property
    def reach(self) -> int:
        """How many past tokens the longest of ``bad_words`` looks at."""
        return self.lengths[-1] if self.lengths else 0


@dataclass(frozen=True, slots=True, eq=False)
class EditState:
    """What the edits of one row depend on; made by ``first_state`` and ``after`` only.

    Fields:
        generated: number of tokens generated so far.
        counts: of those tokens, and the prompt's ids; empty when nothing is penalised.
        recent: the last tokens, as many as ``bad_words`` can look at.
        grammar: the grammar's state; None without one.
    """

    plan: _Plan
    generated: int
    counts: TokenCounts
    recent: tuple[int, ...]
    grammar: Grammar | None

    def after(self, token: int) -> EditState:
        """The state one token later. Raises GrammarError for a token that the grammar does not allow here."""
        plan = self.plan
        return EditState(
            plan,
            self.generated + 1,
            self.counts.plus(token) if plan.edits.penalises else self.counts,
            (*self.recent, token)[-plan.reach :] if plan.reach else (),
            None if self.grammar is None else self.grammar.after(token),
        )

    def edit(self, logits: Float32s) -> Float32s:
        """The row float32[V] after all edits; the argument itself, not a copy, where none of them applies.

        Banned ids are ``-inf``. Whether anything is left is for the caller to see.
        """
        banned = list(self._banned())
        masks = [mask for mask in (self.plan.forbidden, self._outside_grammar()) if mask is not None]
        if not (banned or masks or self.plan.bias_ids.size or self.counts.ids.size):
            return logits
        row = logits.copy()
        # A logit that leaves FP32 becomes infinite, which the caller refuses.
        with np.errstate(over="ignore"):
            row[self.plan.bias_ids] = row[self.plan.bias_ids] + self.plan.bias
            row[self.counts.ids] = self._penalised(row[self.counts.ids])
        row[banned] = -np.inf
        for mask in masks:
            np.putmask(row, mask, -np.inf)
        return row

    def _penalised(self, logits: Float32s) -> Float64s:
        edits, generated = self.plan.edits, self.counts.generated
        values = logits.astype(np.float64)
        penalty = edits.repetition_penalty
        if penalty != 1:
            values = np.where(values > 0, values / penalty, values * penalty)
        values -= edits.frequency_penalty * generated + edits.presence_penalty * (generated > 0)
        return values

    def _banned(self) -> Iterator[int]:
        """Ids banned at this position by min_tokens and bad_words."""
        edits, known = self.plan.edits, len(self.recent)
        if self.generated < edits.min_tokens:
            yield from edits.ending_ids
        for length in self.plan.lengths:
            if length <= known:
                yield from self.plan.bad_endings.get(self.recent[known - length :], ())

    def _outside_grammar(self) -> Mask | None:
        return None if self.grammar is None else ~self.grammar.allowed()


def first_state(edits: LogitEdits, prompt: Sequence[int], vocab: int) -> EditState | None:
    """The state before the first generated token; None when nothing is asked for.

    Args:
        prompt: the prompt's token ids; the repetition penalty looks at them.
        vocab: V, the length of the target's rows.

    Raises:
        PolicyError: an id outside [0, V), or a grammar for another vocabulary.
    """
    if not edits.asks:
        return None
    _check_ids(edits, vocab)
    seen = np.unique(np.array(prompt if edits.repetition_penalty != 1 else (), dtype=np.int64))
    counts = TokenCounts(seen, np.zeros_like(seen))
    return EditState(_plan(edits, vocab), 0, counts, (), edits.grammar)


def _plan(edits: LogitEdits, vocab: int) -> _Plan:
    bad_endings: dict[tuple[int, ...], list[int]] = {}
    for *before, last in edits.bad_words:
        bad_endings.setdefault(tuple(before), []).append(last)
    return _Plan(
        edits,
        np.array(list(edits.logit_bias), dtype=np.int64),
        np.array(list(edits.logit_bias.values()), dtype=np.float64),
        _forbidden(edits.allowed_token_ids, vocab),
        bad_endings,
        tuple(sorted({len(before) for before in bad_endings})),
    )


def _check_ids(edits: LogitEdits, vocab: int) -> None:
    fields: dict[str, Sequence[int]] = {
        "logit_bias": tuple(edits.logit_bias),
        "ending_ids": edits.ending_ids,
        "bad_words": [token for word in edits.bad_words for token in word],
        "allowed_token_ids": edits.allowed_token_ids or (),
    }
    for name, ids in fields.items():
        if ids and not 0 <= min(ids) <= max(ids) < vocab:
            raise PolicyError(f"{name} has a token id outside the vocabulary of {vocab}")
    if edits.grammar is not None and edits.grammar.allowed().size != vocab:
        raise PolicyError(f"grammar is for {edits.grammar.allowed().size} token ids, the target has {vocab}")


def _forbidden(allowed: tuple[int, ...] | None, vocab: int) -> Mask | None:
    if allowed is None:
        return None
    forbidden = np.ones(vocab, dtype=np.bool_)
    forbidden[list(allowed)] = False
    return forbidden


class BlockStates:
    """The state of every row of one verify block, made when it is asked for.

    Row 0 stands behind the committed tokens, row i behind the first i drafts too. A draft behind a rejected one has
    no state: nobody asks for it, and a grammar could not give one.
    """

    def __init__(self, committed: EditState | None, drafts: Sequence[int]) -> None:
        """``committed``: state behind the committed tokens, None without edits; ``drafts``: x_1 .. x_depth."""
        self._states = [committed]
        self._drafts = drafts

    def at(self, row: int) -> EditState | None:
        """The state of target row ``row`` in [0, depth]; None without edits."""
        while len(self._states) <= row:
            last = self._states[-1]
            self._states.append(None if last is None else last.after(self._drafts[len(self._states) - 1]))
        return self._states[row]
