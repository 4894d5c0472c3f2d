"""Tier 1: implementation and oracle are equal, token for token and ticket for ticket, on the same Philox words.

Invariants: serving constants; integers on both sides, so no tolerance; adversarial rows next to random ones; what has
a native and a numpy path is run on both.

Called by ``prove`` and by tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial

import numpy as np

from dspark import native, oracle
from dspark.audit import audit_draw
from dspark.collectives import Group, LocalGroup
from dspark.dense import dense_row, pack_dense_rows, validate_dense_reply
from dspark.dyadic import (
    MASS,
    Float32s,
    Int64s,
    Row,
    draw,
    pack_rows,
    softmax64,
    sparse_row,
    validate_reply,
)
from dspark.native import Choice
from dspark.oracle import Prefix
from dspark.philox import Domain, Keys
from dspark.processors import SamplingPolicy, process, target_row
from dspark.proof.claims import Claim, FactClaim, first_difference, parts
from dspark.proof.subject import Subject
from dspark.proof.toys import Case, Scripted, Toy
from dspark.target_shards import Shards, target_part
from dspark.target_shards import verify_ratio as sharded_verify
from dspark.tickets import STANDARD, TOTAL, accepts
from dspark.verify import sample_target_only

COIN = STANDARD.coin
_DOMAINS = {"acceptance": Domain.ACCEPTANCE, "correction": Domain.CORRECTION, "bonus": Domain.BONUS}
_VOCABS = (2, 3, 17, 131)
Pair = tuple[str, object, object]


def claims(rounds: int = 150, seed: int = 0) -> list[Claim]:
    """All of Tier 1. rounds: random rounds per lane; seed: where their seeds start."""
    seeds, rows = range(seed, seed + rounds), len(_LOGITS) * len(_POLICIES)
    ends = "coins at the edge of acceptance, corrections at the edges of the residual"
    return [
        FactClaim("rounds of the ratio lane", parts("ratio"), lambda s: first_difference(_ratio(s, seeds)), rounds),
        FactClaim("rounds of block verification", parts("block"), lambda s: first_difference(_block(s, seeds)), rounds),
        FactClaim("rounds of the match lane", parts("match"), lambda s: first_difference(_match(s, seeds)), rounds),
        FactClaim("rounds of the greedy lane", parts("greedy"), lambda s: first_difference(_greedy(s, seeds)), rounds),
        FactClaim(ends, parts("ratio"), lambda s: first_difference(_edges(s)), 7 * len(_EDGES)),
        FactClaim("random edges of acceptance", frozenset(), lambda _: first_difference(_random_edges(seeds)), rounds),
        *_row_claims(),
        FactClaim("target rows", frozenset(), lambda _: first_difference(_target_rows()), rows),
        FactClaim("sharded rows", frozenset(), lambda _: first_difference(_sharded_rows()), rows),
        FactClaim("sharded rounds", frozenset(), lambda _: first_difference(_sharded_rounds(seeds[:40])), 40),
        FactClaim("the audit repeats every draw", frozenset(), lambda _: first_difference(_audits(seeds)), 2 * rounds),
    ]  # fmt: skip


# --- rounds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RandomToy(Toy):
    """Serving constants and rows of a random number generator; ``seed`` picks policy and temperatures too."""

    seed: int = 0

    def target_logits(self, prefix: Prefix) -> Float32s:
        return (np.random.default_rng([self.seed, *prefix]).standard_normal(self.vocab) * 3).astype(np.float32)

    def draft_logits(self, prefix: Prefix) -> Float32s:
        noise = np.random.default_rng([self.seed, 1, *prefix]).standard_normal(self.vocab)
        return self.target_logits(prefix) + noise.astype(np.float32)

    def target(self, prefix: Prefix) -> Int64s:
        return _random_target(self, prefix)

    def draft(self, prefix: Prefix) -> Row:
        return sparse_row(self.draft_logits(prefix), None, self.draft_temperature, self.support)


@cache
def _random_target(toy: RandomToy, prefix: Prefix) -> Int64s:
    return target_row(toy.target_logits(prefix), toy.policy)


def _random_toy(seed: int, temperature: float | None = None) -> RandomToy:
    rng = np.random.default_rng(seed)
    warm = float(rng.choice([0.0, 0.5, 1.0, 2.0])) if temperature is None else temperature
    policy = SamplingPolicy(warm, int(rng.choice([0, 3])), 0.9)
    vocab, draft_temperature = _VOCABS[seed % 4], float(rng.choice([0.0, 0.7, 1.5]))
    return RandomToy("random", STANDARD, vocab, 8, policy, draft_temperature, seed)


def _case(toy: RandomToy, keys: Keys, depth: int) -> Case:
    """A proposal as the worker makes it."""
    prefix: Prefix = (1, 0)
    tokens: Prefix = ()
    rows: list[Row] = []
    for _ in range(depth):
        rows.append(toy.draft(prefix + tokens))
        position = len(prefix) + len(tokens) + 100
        tokens = (*tokens, draw(rows[-1], keys.draw24(Domain.PROPOSAL, position)))
    return Case(toy, prefix, tuple(rows), tokens)


def _target_lists(case: Case) -> list[list[int]]:
    return [case.tickets_at(index).tolist() for index in range(len(case.tokens) + 1)]


def _as_dict(row: Row) -> dict[int, int]:
    return dict(zip(row.ids.tolist(), row.counts.tolist(), strict=True))


def _oracle_round(case: Case, uniform: Callable[[str, int], int]) -> oracle.Outcome:
    rows = [_as_dict(row) for row in case.rows]
    return oracle.verify(_target_lists(case), rows, case.tokens, uniform, MASS, TOTAL, COIN)


def _ratio(subject: Subject, seeds: range) -> Iterator[Pair]:
    for seed in seeds:
        keys = Keys(seed, 1, seed % 9)
        case = _case(_random_toy(seed), keys, seed % 7)
        first = case.anchor_position + 1
        wanted = _oracle_round(case, lambda kind, index: keys.draw64(_DOMAINS[kind], first + index))  # noqa: B023
        verdict = subject.ratio(case, keys)
        yield f"seed {seed}", (verdict.accepted, verdict.token, verdict.kind.value), wanted


def _block(subject: Subject, seeds: range) -> Iterator[Pair]:
    for seed in seeds:
        keys = Keys(seed, 1, seed % 9)
        case = _case(_random_toy(seed), keys, seed % 7)
        first, rows = case.anchor_position + 1, [_as_dict(row) for row in case.rows]
        wanted = oracle.verify_block(
            _target_lists(case),
            rows,
            case.tokens,
            lambda kind, index: keys.draw64(_DOMAINS[kind], first + index),  # noqa: B023
            MASS,
            TOTAL,
            COIN,
        )
        verdict = subject.block(case, keys)
        yield f"seed {seed}", (verdict.accepted, verdict.token, verdict.kind.value), wanted


def _match(subject: Subject, seeds: range) -> Iterator[Pair]:
    for seed in seeds:
        noise = Keys.for_position_noise(seed, choice=seed % 3)
        case = _case(_random_toy(seed), Keys(seed, 0, 1), seed % 7)
        first = case.anchor_position + 1
        if seed % 2:  # drafts that are right, up to one
            own = tuple(sample_target_only(case.tickets_at(i), first + i, noise) for i in range(1))
            case = replace(case, tokens=(own + case.tokens[1:])[: len(case.tokens)])
        wanted = oracle.match(
            _target_lists(case),
            case.tokens,
            lambda index: noise.draw64(Domain.TARGET_ONLY, first + index),  # noqa: B023
            COIN,
        )
        verdict = subject.match(case, noise)
        yield f"seed {seed}", (verdict.accepted, verdict.token, verdict.kind.value), wanted


def _greedy(subject: Subject, seeds: range) -> Iterator[Pair]:
    """At temperature 0 the lane is the match lane, whose samples are all the argmax."""
    for seed in seeds:
        case = _case(_random_toy(seed, temperature=0.0), Keys(seed, 0, 1), seed % 7)
        best = [max(range(case.vocab), key=lambda v: (row[v], -v)) for row in _raw_logits(case)]
        agreed = 0
        while agreed < len(case.tokens) and best[agreed] == case.tokens[agreed]:
            agreed += 1
        verdict = subject.greedy(case, Keys(seed, 0, 1))
        yield f"seed {seed}", (verdict.accepted, verdict.token), (agreed, best[agreed])


def _raw_logits(case: Case) -> list[list[float]]:
    prefixes = (case.prefix + case.tokens[:index] for index in range(len(case.tokens) + 1))
    return [case.toy.target_logits(prefix).tolist() for prefix in prefixes]


# --- edges -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FixedToy(Toy):
    """One target row and one proposal row behind every prefix."""

    tickets: tuple[int, ...] = ()
    counts: tuple[tuple[int, int], ...] = ()

    def target(self, prefix: Prefix) -> Int64s:
        return np.array(self.tickets, dtype=np.int64)

    def draft(self, prefix: Prefix) -> Row:
        ids, counts = zip(*self.counts, strict=True)
        return Row(np.array(ids, dtype=np.int32), np.array(counts, dtype=np.int64))


_SCALE = STANDARD.scale
# name: target tickets, counts of q, drafted token. The vocabulary has as many tokens as there are tickets.
_EDGES: dict[str, tuple[tuple[int, ...], tuple[tuple[int, int], ...], int]] = {
    "p = 0 at the draft": ((0, TOTAL // 2, TOTAL // 2), ((0, MASS // 2), (1, MASS // 2)), 0),
    "q = 1": ((TOTAL // 3, TOTAL - TOTAL // 3), ((0, MASS),), 0),
    "p = q": ((TOTAL // 2, TOTAL // 2), ((0, MASS // 2), (1, MASS // 2)), 1),
    "one ticket short of q": ((TOTAL // 2 - 1, TOTAL // 2 + 1), ((0, MASS // 2), (1, MASS // 2)), 0),
    "one ticket of p": ((1, TOTAL - 1), ((0, 1), (1, MASS - 1)), 0),
    "a count of one": ((TOTAL - _SCALE + 1, _SCALE - 1), ((0, MASS - 1), (1, 1)), 1),
    "residual outside the support": ((1, 0, TOTAL - 2, 1), ((0, MASS // 2), (1, MASS // 2)), 1),
    "residual of three tokens": ((TOTAL // 8, TOTAL // 8, TOTAL // 4, TOTAL // 2), ((0, MASS),), 0),
}


def _edges(subject: Subject) -> Iterator[Pair]:
    """Acceptance and correction coins one below, at and one above where the outcome turns, and at the ends."""
    for name, (tickets, counts, token) in _EDGES.items():
        toy = FixedToy(name, STANDARD, len(tickets), len(counts), tickets=tickets, counts=counts)
        case = Case(toy, (), (toy.draft(()),), (token,))
        turn = -(-tickets[token] * COIN // (dict(counts)[token] * _SCALE))
        for coin in (0, turn - 1, turn, turn + 1, COIN - 1):
            if 0 <= coin < COIN:
                yield from _edge(subject, case, f"{name}, coin {coin}", {"acceptance": coin})
        for coin in (0, COIN // 2, COIN - 1):
            yield from _edge(subject, case, f"{name}, correction {coin}", {"acceptance": COIN - 1, "correction": coin})


def _edge(subject: Subject, case: Case, name: str, coins: dict[str, int]) -> Iterator[Pair]:
    values = {"acceptance": 0, "correction": COIN // 3, "bonus": COIN // 3, **coins}
    first = case.anchor_position + 1
    script = {(_DOMAINS[kind], first + i): value for kind, value in values.items() for i in (0, 1)}
    verdict = subject.ratio(case, Scripted({**script, (Domain.PROPOSAL, first): 0}))
    wanted = _oracle_round(case, lambda kind, _: values[kind])
    yield name, (verdict.accepted, verdict.token, verdict.kind.value), wanted


def _random_edges(seeds: range) -> Iterator[Pair]:
    for seed in seeds:
        rng = np.random.default_rng([seed, 7])
        count, ticket = int(rng.integers(1, MASS)), int(rng.integers(0, TOTAL))
        turn = min(-(-ticket * COIN // (count * _SCALE)), COIN - 1)
        for coin in (max(turn - 1, 0), turn):
            wanted = oracle.accepts(Fraction(coin, COIN), Fraction(count, MASS), Fraction(ticket, TOTAL))
            yield f"c={count}, a={ticket}, U={coin}", accepts(coin, count, ticket), wanted


# --- rows ------------------------------------------------------------------------------------------------------------

INF = np.inf


def _f32(*values: float) -> Float32s:
    return np.array(values, dtype=np.float32)


def _normal(seed: int, size: int, scale: float) -> Float32s:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


_LOGITS: dict[str, Float32s] = {
    "ties": _f32(1, 2, 2, 2, 2, 1, 1),
    "all equal": _f32(*[0.5] * 33),
    "one survivor": _f32(-INF, -INF, 4, -INF),
    "masked ends": _f32(-INF, 1, 0, 2, -INF),
    "far apart": _normal(1, 301, 60.0),
    "flat": _normal(2, 4096, 1e-4),
    "odd length": _normal(3, 131, 3.0),
    "longer than a leaf of the sum": _normal(4, 2999, 2.0),
    "a tail without tickets": _f32(0, -17, -17.5, -18, -30, -40),
    "extreme": _f32(-3e38, 3e38, 3e38, -3e38),
}
_POLICIES = (
    SamplingPolicy(),
    SamplingPolicy(0.0),
    SamplingPolicy(0.7),
    SamplingPolicy(1.3, 3),
    SamplingPolicy(0.9, 0, 0.5),
    SamplingPolicy(0.8, 0, 1.0, 0.1),
    SamplingPolicy(0.8, 40, 0.9, 0.05),
)
_SUPPORTS = (1, 3, 32, 5000)


def _row_claims() -> Iterator[Claim]:
    """Proposal rows on every path that this installation has."""
    for name in ("numpy",) if native.choice().library is None else ("native", "numpy"):
        count = len(_LOGITS) * 2 * (len(_SUPPORTS) + 1)
        yield FactClaim(f"proposal rows and replies, {name}", frozenset(), partial(_on_path, name), count)


def _on_path(name: str, _: Subject) -> str | None:
    numpy_only = native.using(Choice(None, "asked for by the proof"))
    with numpy_only if name == "numpy" else nullcontext():
        return first_difference(_proposal_rows())


def _proposal_rows() -> Iterator[Pair]:
    for name, logits in _LOGITS.items():
        values = [Fraction(float(logit)) if logit > -INF else Fraction(-(10**60)) for logit in logits]
        for temperature in (0.7, 1.0):
            for support in _SUPPORTS:
                row = sparse_row(logits, None, temperature, support)
                yield f"{name}, support {support}", _as_dict(row), _wanted(logits, values, temperature, support)
                yield from _sparse_trip(name, row, support, logits.size)
            row = dense_row(logits, None, temperature, logits.size)
            yield f"{name}, dense", _as_dict(row), _wanted(logits, values, temperature, logits.size)
            yield from _dense_trip(name, row, logits.size)


def _wanted(logits: Float32s, values: list[Fraction], temperature: float, support: int) -> dict[int, int]:
    """Selection, apportionment and dropping of zeros in fractions; only the FP64 weights are production's."""
    finite = int((logits > -INF).sum())
    chosen = oracle.top_indices(values, min(support, finite))
    weights = [Fraction(weight) for weight in softmax64(logits[chosen], temperature).tolist()]
    return {token: count for token, count in zip(chosen, oracle.allocate(weights, MASS), strict=True) if count}


def _sparse_trip(name: str, row: Row, support: int, vocab: int) -> Iterator[Pair]:
    token = np.array([draw(row, MASS // 2)], np.int32)
    ids, q, entries = np.zeros((1, support), np.int32), np.zeros((1, support), np.float32), np.zeros(1, np.int32)
    pack_rows([row], support, ids, q, entries)
    (read,) = validate_reply(token, entries, ids, q, vocab, 1, support)
    yield f"{name}, support {support}, over the wire", _as_dict(read), _as_dict(row)
    yield f"{name}, support {support}, draw", int(token[0]), oracle.draw(_as_dict(row), MASS // 2)


def _dense_trip(name: str, row: Row, vocab: int) -> Iterator[Pair]:
    q = np.full((1, vocab + 3), 9, dtype=np.float32)
    pack_dense_rows([row], vocab, q)
    (read,) = validate_dense_reply(np.array([draw(row, MASS - 1)], np.int32), q, vocab, 1)
    yield f"{name}, dense, over the wire", _as_dict(read), _as_dict(row)
    for u24 in (0, MASS // 3, MASS - 1):
        yield f"{name}, dense draw of {u24}", draw(row, u24), oracle.draw(_as_dict(row), u24)


def _target_rows() -> Iterator[Pair]:
    """Tickets of the oracle from the processed FP64 weights."""
    for name, logits in _LOGITS.items():
        for policy in _POLICIES:
            processed = process(logits, policy)
            kept = np.flatnonzero(processed > -INF)
            weights = [Fraction(weight) for weight in softmax64(processed[kept]).tolist()]
            wanted = dict(zip(kept.tolist(), oracle.tickets(weights, TOTAL), strict=True))
            row = target_row(logits, policy).tolist()
            seen = {token: ticket for token, ticket in enumerate(row) if ticket or token in wanted}
            yield f"{name}, {policy}", seen, wanted


# --- shards, audit ---------------------------------------------------------------------------------------------------


def _splits(size: int) -> tuple[Shards, ...]:
    return Shards.even(size, 2), Shards((0, 0, size // 3, size))


def _sharded_rows() -> Iterator[Pair]:
    for name, logits in _LOGITS.items():
        for policy in _POLICIES:
            for shards in _splits(logits.size)[: 1 if logits.size > 1000 else 2]:

                def part(group: Group, shards: Shards = shards, policy: SamplingPolicy = policy) -> Int64s:
                    held = slice(shards.bounds[group.rank], shards.bounds[group.rank + 1])
                    return target_part(group, shards, logits[held], policy)  # noqa: B023

                joined = np.concatenate(LocalGroup(len(shards.bounds) - 1).run(part))
                same = bool((joined == target_row(logits, policy)).all())
                yield f"{name}, {policy}, {shards.bounds}", same, True


def _sharded_rounds(seeds: range) -> Iterator[Pair]:
    for seed in seeds:
        keys = Keys(seed, 0, 3)
        case = _case(_random_toy(seed), keys, seed % 5)
        for shards in _splits(case.vocab):

            def rank(group: Group, shards: Shards = shards, case: Case = case, keys: Keys = keys) -> object:
                held = slice(shards.bounds[group.rank], shards.bounds[group.rank + 1])
                part_at, anchor = lambda i: case.tickets_at(i)[held], case.anchor_position
                verdict = sharded_verify(group, shards, part_at, case.rows, case.tokens, anchor, keys)
                return verdict.accepted, verdict.token, verdict.kind.value

            ranks = len(shards.bounds) - 1
            first = case.anchor_position + 1
            wanted = _oracle_round(case, lambda kind, i: keys.draw64(_DOMAINS[kind], first + i))  # noqa: B023
            yield f"seed {seed}, {shards.bounds}", LocalGroup(ranks).run(rank), [wanted] * ranks


def _audits(seeds: range) -> Iterator[Pair]:
    """A sound draw passes; the draw of another round's key fails where it is another token."""
    for seed in seeds:
        keys, other = Keys(seed, 0, 1), Keys(seed, 0, 2)
        row = _random_toy(seed).draft((seed % 2,))
        token, wrong = (draw(row, k.draw24(Domain.PROPOSAL, 50)) for k in (keys, other))
        yield f"seed {seed}, sound", audit_draw(row, token, 50, keys).passed, True
        yield f"seed {seed}, another round", audit_draw(row, wrong, 50, keys).passed, token == wrong
