"""The tokens of one request as the worker knows them, indexed so that a repetition can be continued.

Texts repeat themselves: names, list items, phrases of the question, loops of a small model at temperature 0. A
drafter of two layers learns that badly, a table does it for nothing: where the last tokens stood before, what followed
them is a likely next token. `chain` adds it to the draft logits, as the Markov head adds its bigram bias; the row that
is drawn from and sent is formed after that, so exactness is not touched.

Invariants: the index is a function of the committed text alone (what later decisions may see); positions that the
worker was never told (rounds without it) are gaps, and no match crosses one; memory is bounded by the context's length.
"""

from __future__ import annotations

from collections.abc import Sequence

UNKNOWN = -1
LONGEST = 3
"""Tokens of the longest match; the shortest has two: after a single token almost anything may follow."""


class TokenHistory:
    """Committed tokens by position, and the latest continuation of every run of two and of three."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._following: dict[tuple[int, ...], int] = {}

    def record(self, position: int, tokens: Sequence[int]) -> None:
        """Tokens at `position`, `position` + 1, ...; what is known already stays, what lies between is a gap."""
        for offset, token in enumerate(tokens):
            self._append(position + offset, token)

    def _append(self, position: int, token: int) -> None:
        if position < len(self._tokens):
            return
        self._tokens += [UNKNOWN] * (position - len(self._tokens))
        for length in range(2, LONGEST + 1):
            run = tuple(self._tokens[-length:])
            if len(run) == length and UNKNOWN not in run:
                self._following[run] = token
        self._tokens.append(token)

    def tail(self, position: int) -> list[int]:
        """The tokens just before `position`, at most as many as a match needs."""
        return self._tokens[max(0, position - LONGEST + 1) : position]

    def continuation(self, text: Sequence[int]) -> tuple[int, int] | None:
        """What followed the last tokens of `text` where they stood before, and how many of them matched.

        The longest match, its latest place.
        """
        for length in range(LONGEST, 1, -1):
            if len(text) >= length:
                token = self._following.get(tuple(text[-length:]))
                if token is not None:
                    return token, length
        return None
