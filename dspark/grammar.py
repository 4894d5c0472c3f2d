"""Which tokens a request's grammar allows next.

Purpose: the interface between a grammar engine and the target's rows, and one small grammar that implements it.

Invariants:

- A state is a value: ``after`` returns another state and leaves this one as it was. Forking is keeping a
  reference, rolling back is going on from an older one; there is nothing to undo and nothing to forget.
- ``allowed`` depends on the tokens so far and on nothing else.

Called by ``dspark.logit_edits``, once for each row that is really judged. It never sees logits and never draws.

An engine that keeps one mutable matcher fits behind this: a state then holds the matcher and its own tokens, and
moves the matcher (roll back to the common prefix, consume the rest) when it is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from dspark.dyadic import Mask


class GrammarError(ValueError):
    """A token was added that the grammar does not allow at this place."""


class Grammar(Protocol):
    """Where a request stands in its grammar."""

    def allowed(self) -> Mask:
        """bool[V], not to be written to: True for each token id that may come next.

        A grammar that is complete allows the ids that end the text. All False means that the text cannot go on;
        the request is then refused, never continued without its grammar.
        """
        ...

    def after(self, token: int) -> Grammar:
        """The state one token later. Raises GrammarError for a token that is not allowed here."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TokenAutomaton:
    """A deterministic finite automaton over token ids.

    Fields:
        moves: for each state, the tokens that it allows and the state that each of them leads to.
        vocab: V, the length of the target's rows.
        state: where the text so far has led.
    """

    moves: Sequence[Mapping[int, int]]
    vocab: int
    state: int = 0

    def allowed(self) -> Mask:
        """See ``Grammar.allowed``."""
        mask = np.zeros(self.vocab, dtype=np.bool_)
        mask[list(self.moves[self.state])] = True
        return mask

    def after(self, token: int) -> TokenAutomaton:
        """See ``Grammar.after``."""
        following = self.moves[self.state].get(token)
        if following is None:
            raise GrammarError(f"token {token} is not allowed in state {self.state}")
        return replace(self, state=following)
