"""The judge: what every consumed token must be, computed again from (seed, generation, round, position, p, q).

Its own Philox, its own draws, acceptance, residual and block weights, in Python integers over the models' tables; its
own copy of every session's committed tokens. Invariant: nothing of what it judges is called here, and the tables of the
toy models are all that it shares with the world. Called by `spark` at every commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from dspark.sim.ledger import Ledger
from dspark.sim.toy_models import ToyModels, tap_row
from dspark_proto import Lane

N, M, COIN = 1 << 60, 1 << 24, 1 << 64
K = N // M
PROPOSAL, ACCEPTANCE, CORRECTION, BONUS, TARGET_ONLY = 1, 2, 3, 4, 5

Counts = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids and counts of a draft row."""


def philox(c0: int, c1: int, c2: int, c3: int, seed: int) -> int:
    """Philox4x32-10: the first two output words as one 64-bit number, the first word high."""
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = right >> 32 ^ c1 ^ k0, right & 0xFFFFFFFF, left >> 32 ^ c3 ^ k1, left & 0xFFFFFFFF
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    return c0 << 32 | c1


def chosen(masses: Sequence[int], number: int) -> int:
    """The index whose share of [0, sum) holds `number`."""
    for index, mass in enumerate(masses):
        number -= mass
        if number < 0:
            return index
    raise ValueError("the number is not below the sum of the masses")


@dataclass(slots=True)
class Consumed:
    """What a round consumed: the drafted tokens, the rows that were read with them, and the worker's generation."""

    generation: int
    tokens: list[int]
    rows: list[Counts]


@dataclass(slots=True)
class Committed:
    """A session as the oracle knows it. `context` is a checksum over the taps of every position before the last."""

    session: int
    seed: int
    lane: Lane
    tokens: list[int]
    context: int = 0
    keys: set[int] = field(default_factory=set)


class Oracle:
    """Judges all sessions of a world; what is wrong goes to the ledger."""

    def __init__(self, models: ToyModels, ledger: Ledger, rule: str) -> None:
        self.sessions: dict[int, Committed] = {}
        self._models, self._ledger, self._rule = models, ledger, rule

    def opened(self, session: int, seed: int, lane: Lane, prompt: Sequence[int]) -> None:
        """A request begins."""
        one = Committed(session, seed, lane, list(prompt))
        for position in range(len(prompt) - 1):
            one.context = crc32(tap_row(session, position, prompt[position]), one.context)
        self.sessions[session] = one

    def closed(self, session: int) -> None:
        """A request is over."""
        del self.sessions[session]

    def judge(self, session: int, round_: int, consumed: Consumed | None, run: list[int]) -> None:
        """`run` is about to be committed in this round: drafts that survived, and the token after them."""
        one = self.sessions[session]
        if consumed is not None:
            self._judge_drafts(one, round_, consumed)
        expected = self._run(one, round_, consumed)
        if run != expected:
            self._ledger.violate(
                "wrong_tokens", f"session {session} round {round_}: {run} was committed, the oracle says {expected}"
            )
        if round_ in one.keys:
            self._ledger.violate("keys_reused", f"session {session} has used round {round_} before")
        one.keys.add(round_)
        self._commit(one, run)

    def _commit(self, one: Committed, run: list[int]) -> None:
        """Taps are known for every committed position but the last."""
        start = len(one.tokens) - 1
        one.tokens += run
        for position in range(start, len(one.tokens) - 1):
            one.context = crc32(tap_row(one.session, position, one.tokens[position]), one.context)

    # Drafts

    def _judge_drafts(self, one: Committed, round_: int, consumed: Consumed) -> None:
        """The worker's rows and tokens are those of this very prefix, key and position."""
        if self._ledger.tainted(one.session):
            expected = self._draws(one, round_, consumed)
            if expected != consumed.tokens:
                self._ledger.violate("wrong_tokens", f"session {one.session} round {round_}: drafts are no draws")
            return
        tokens, rows = self._ideal(one, round_, consumed.generation, len(consumed.tokens))
        if (tokens, rows) == (consumed.tokens, consumed.rows):
            return
        self._ledger.violate(
            self._what(one, round_, consumed),
            f"session {one.session} round {round_}: {consumed.tokens} was consumed, {tokens} is the draft",
        )

    def _what(self, one: Committed, round_: int, consumed: Consumed) -> str:
        """How drafts came to be wrong, from what the workers drew."""
        kind = "corrupt_accepted"
        for drawn in self._ledger.recent(one.session):
            if list(drawn.tokens) != consumed.tokens:
                continue
            if (drawn.keys.round, drawn.keys.generation) == (round_, consumed.generation):
                return "wrong_context" if drawn.context != one.context else "corrupt_accepted"
            kind = "stale_accepted"
        return kind

    def _draws(self, one: Committed, round_: int, consumed: Consumed) -> list[int]:
        """The draws that the rows, as they were read, give under the round's key."""
        tokens = []
        for index, (ids, counts) in enumerate(consumed.rows):
            number = self._number(one, PROPOSAL, len(one.tokens) + index, round_, consumed.generation) >> 40
            tokens.append(ids[chosen(counts, number)])
        return tokens

    def _ideal(self, one: Committed, round_: int, generation: int, depth: int) -> tuple[list[int], list[Counts]]:
        """What an honest worker with the right context drafts under this key."""
        previous, tokens, rows = one.tokens[-1], [], []
        for position in range(len(one.tokens), len(one.tokens) + depth):
            row = self._models.drafts[self._models.draft_index(one.context, previous, position)]
            if one.lane is Lane.GREEDY:
                previous = row.ids[row.counts.index(max(row.counts))]
            else:
                number = self._number(one, PROPOSAL, position, round_, generation) >> 40
                previous = row.ids[chosen(row.counts, number)]
            tokens.append(previous)
            rows.append((row.ids, row.counts) if one.lane is Lane.RATIO else ((previous,), (M,)))
        return tokens, rows

    # Verdicts

    def _run(self, one: Committed, round_: int, consumed: Consumed | None) -> list[int]:
        """What the round commits."""
        drafts = consumed.tokens if consumed else []
        if one.lane is Lane.GREEDY:
            return self._until_differs(drafts, one, lambda row, _: row.index(max(row)))
        if one.lane is Lane.MATCH:
            number = self._number
            return self._until_differs(
                drafts, one, lambda row, position: chosen(row, number(one, TARGET_ONLY, position, 0) * N >> 64)
            )
        if consumed is None:
            return [self._pick(self._target(one, []), one, TARGET_ONLY, len(one.tokens), round_)]
        if self._rule == "block":
            return self._block(one, round_, consumed)
        return self._one_by_one(one, round_, consumed)

    def _target(self, one: Committed, drafts: Sequence[int]) -> list[int]:
        previous = drafts[-1] if drafts else one.tokens[-1]
        return self._models.masses[self._models.target_index(previous, len(one.tokens) + len(drafts))]

    def _until_differs(self, drafts: list[int], one: Committed, sample: Callable[[list[int], int], int]) -> list[int]:
        run: list[int] = []
        for index in range(len(drafts) + 1):
            run.append(sample(self._target(one, drafts[:index]), len(one.tokens) + index))
            if index == len(drafts) or run[-1] != drafts[index]:
                break
        return run

    def _one_by_one(self, one: Committed, round_: int, consumed: Consumed) -> list[int]:
        drafts = consumed.tokens
        for index, (draft, row) in enumerate(zip(drafts, consumed.rows, strict=True)):
            position = len(one.tokens) + index
            target, count = self._target(one, drafts[:index]), dict(zip(*row, strict=True))
            if self._number(one, ACCEPTANCE, position, round_) * count[draft] * K >= target[draft] << 64:
                left = [max(mass - K * count.get(token, 0), 0) for token, mass in enumerate(target)]
                return [*drafts[:index], self._pick(left, one, CORRECTION, position, round_)]
        return [*drafts, self._pick(self._target(one, drafts), one, BONUS, len(one.tokens) + len(drafts), round_)]

    def _block(self, one: Committed, round_: int, consumed: Consumed) -> list[int]:
        """The longest prefix that its weight keeps; see `dspark.oracle.verify_block` for the same in fractions."""
        drafts, start = consumed.tokens, len(one.tokens)
        targets = [self._target(one, drafts[:index]) for index in range(len(drafts) + 1)]
        counts = [dict(zip(*row, strict=True)) for row in consumed.rows]
        weights = [N]
        for index, draft in enumerate(drafts):
            weights.append(min(N, weights[-1] * targets[index][draft] // (K * counts[index][draft])))
        for kept in range(len(drafts), 0, -1):
            coin = self._number(one, ACCEPTANCE, start + kept - 1, round_)
            if kept == len(drafts):
                if coin * N < weights[kept] << 64:
                    return [*drafts, self._pick(targets[kept], one, BONUS, start + kept, round_)]
                continue
            left = sum(_left(weights[kept], targets[kept], counts[kept]))
            if left and coin * (left + N * N - weights[kept] * N) < left << 64:
                break
        else:
            kept = 0
        masses = _left(weights[kept], targets[kept], counts[kept])
        return [*drafts[:kept], self._pick(masses, one, CORRECTION, start + kept, round_)]

    def _pick(self, masses: list[int], one: Committed, domain: int, position: int, round_: int) -> int:
        return chosen(masses, self._number(one, domain, position, round_) * sum(masses) >> 64)

    def _number(self, one: Committed, domain: int, position: int, round_: int, generation: int = 0) -> int:
        return philox(domain << 24, position, round_, generation << 8, one.seed)


def _left(weight: int, target: list[int], counts: dict[int, int]) -> list[int]:
    """What a kept prefix of this weight has left for every token once drafted continuations have taken theirs."""
    masses = [weight * mass for mass in target]
    for token, count in counts.items():
        masses[token] -= K * count * min(N, weight * target[token] // (K * count))
    return masses
