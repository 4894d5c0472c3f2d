"""From committed token ids to text that may be shown: detokenising, stop strings, stop tokens, EOS and the
budget.

Purpose: a speculative round commits 1..k+1 tokens at once, and a stop may lie anywhere inside them.
`TextStream` looks at them one by one, as if they had come one by one, and says how many of them count.
Invariants: the text released, the ids kept and the finish reason do not depend on how the tokens were
grouped into pushes; no release ends inside a UTF-8 sequence; no part of a stop string is ever released.
Called by: the engine thread, one `TextStream` per request. Not thread-safe.
Never: looks at logits, knows HTTP, or looks past the token that ended the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dspark_spark.api import FINISH_LENGTH, FINISH_STOP, SamplingParams


class ByteTokenizer(Protocol):
    """The part of a tokenizer that detokenising needs."""

    def decode_bytes(self, token_ids: Sequence[int]) -> bytes:
        """Raw bytes of the ids, special tokens as b"". The bytes of a list are those of its ids, one after
        another."""
        ...


class IncrementalDetokenizer:
    """Token ids in, whole characters out.

    A byte-level token may hold part of a character: its bytes wait until the character is complete. Bytes
    that can never become a character turn into U+FFFD, exactly as ``bytes.decode("utf-8", "replace")`` of
    the whole would do.
    """

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Text that this token completes; may be empty."""
        return self._decoder.decode(self._tokenizer.decode_bytes((token_id,)))

    def flush(self) -> str:
        """What is left at the end: U+FFFD where bytes of an unfinished character wait, else ""."""
        tail = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return tail


class StopMatcher:
    """Knuth-Morris-Pratt automaton of one stop string, fed one character at a time."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        """Length of the longest prefix of `stop` that the text so far ends with."""
        self._fallback = _fallback_lengths(stop)

    def step(self, char: str) -> bool:
        """Take one character; True when the stop string is complete. Not to be called again after that."""
        while self.matched and self.stop[self.matched] != char:
            self.matched = self._fallback[self.matched]
        if self.stop[self.matched] == char:
            self.matched += 1
        return self.matched == len(self.stop)


def _fallback_lengths(stop: str) -> list[int]:
    """For each matched length, the next shorter prefix of `stop` that is also a suffix of that prefix."""
    fallback = [0] * (len(stop) + 1)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = fallback[length]
        if stop[index] == stop[length]:
            length += 1
        fallback[index + 1] = length
    return fallback


class StopScanner:
    """Holds text back while it could be the beginning of a stop string.

    The stop string that is *complete* first wins; of several that end at the same character, the longest.
    This rule does not depend on how the text is cut into pieces. Work is linear in the text, times the
    number of stop strings.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """`stops` are non-empty. Raises ValueError for an empty one, which would match everywhere."""
        ordered = sorted(stops, key=len, reverse=True)
        if "" in ordered:
            raise ValueError("stop: a stop string must not be empty; remove it")
        self._matchers = [StopMatcher(stop) for stop in ordered]
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns (text to release, stop string that matched or None). After a match the scanner is spent."""
        if not self._matchers:
            return text, None
        window = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            stop = self._step(char)
            if stop is not None:
                self._held = ""
                return window[: end - len(stop)], stop
        cut = len(window) - max(matcher.matched for matcher in self._matchers)
        self._held = window[cut:]
        return window[:cut], None

    def flush(self) -> str:
        """Text still held back; the end of the generation shows that it was no stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str | None:
        """Move every matcher on; the longest stop string that this character completes."""
        complete = [matcher.stop for matcher in self._matchers if matcher.step(char)]
        return complete[0] if complete else None


@dataclass(frozen=True, slots=True)
class Pushed:
    """What became of the tokens of one push.

    kept_count: how many of the pushed tokens count (in ids, text and usage); the rest come after the end:
    drop them. text: to be released now. finish_reason: FINISH_STOP, FINISH_LENGTH or None. stop_reason: the
    stop string or stop token id that matched; None for EOS and for FINISH_LENGTH.
    """

    kept_count: int
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class TextStream:
    """The text side of one request, from its first committed token to its end.

    Order of the rules for each token: EOS (unless `ignore_eos`), stop token id, stop string, then the
    budget; so a stop beats `max_tokens` when the same token brings both. The token that ends the text
    counts, its own text is not released (EOS, stop token id) or is cut before the stop string.
    """

    def __init__(
        self, tokenizer: ByteTokenizer, params: SamplingParams, eos_ids: Iterable[int], already: int = 0
    ) -> None:
        """`already`: tokens of this request that were counted before, for a stream that is rebuilt."""
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._scanner = StopScanner(params.stop)
        self._eos_ids = frozenset() if params.ignore_eos else frozenset(eos_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._max_tokens = params.max_tokens
        self.token_count = already
        """Tokens that count so far."""
        self.finished = False

    @property
    def remaining(self) -> int:
        """Tokens that the budget still allows; a draft needs no more positions than this."""
        return self._max_tokens - self.token_count

    def push(self, token_ids: Sequence[int]) -> Pushed:
        """Take the tokens of one round, in order. Raises RuntimeError once the text has ended."""
        if self.finished:
            raise RuntimeError(
                "push after the end of the text; drop the request from the batch when it finishes"
            )
        released: list[str] = []
        for kept_count, token_id in enumerate(token_ids, start=1):
            step = self._take(token_id)
            released.append(step.text)
            if step.finish_reason is not None:
                self.finished = True
                return Pushed(kept_count, "".join(released), step.finish_reason, step.stop_reason)
        return Pushed(len(token_ids), "".join(released))

    def flush(self) -> str:
        """Text still held back, for an end that `push` did not see (abort, error); "" after an end that it
        saw."""
        if self.finished:
            return ""
        self.finished = True
        return self._end("", FINISH_LENGTH, None).text

    def _take(self, token_id: int) -> Pushed:
        self.token_count += 1
        if token_id in self._eos_ids:
            return self._end("", FINISH_STOP, None)
        if token_id in self._stop_ids:
            return self._end("", FINISH_STOP, token_id)
        text, matched = self._scanner.push(self._detokenizer.push(token_id))
        if matched is not None:
            return Pushed(1, text, FINISH_STOP, matched)
        if self.token_count >= self._max_tokens:
            return self._end(text, FINISH_LENGTH, None)
        return Pushed(1, text)

    def _end(self, text: str, reason: str, stop_reason: int | None) -> Pushed:
        """End the text and release what waits; an unfinished character may itself complete a stop string."""
        tail, matched = self._scanner.push(self._detokenizer.flush())
        if matched is not None:
            return Pushed(1, text + tail, FINISH_STOP, matched)
        return Pushed(1, text + tail + self._scanner.flush(), reason, stop_reason)
