"""Exact laws when somebody decides how many drafts are verified, and rules that decide it wrongly.

Purpose: three settings. One request whose confidences are functions of the drafts before a position; two requests that
share a budget; and rounds that remember the drafts which the round before threw away.

Invariants: the verification step is the production one; only who decides the depth, or which numbers are drawn
again, differs.

Called by Tier 0 and ``mutants``. It never serves.

Source: DSpark paper 2607.05147, algorithm 1 and appendix A, for the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

import numpy as np

from dspark import oracle
from dspark.admission import (
    EarlyStop,
    FixedBudget,
    Load,
    Number,
    StepCurve,
    StoppingRule,
    Visible,
    admit,
    best_budget,
    survivals,
)
from dspark.dyadic import Row
from dspark.oracle import Prefix, SequenceLaw
from dspark.proof.toys import SMALL, Case, Step, Toy, production, proposals, verdict_law
from dspark.tickets import Grid
from dspark.verify import Verdict

ALONE, TOGETHER = Load(requests=1, rows=1), Load(requests=2, rows=2)
CURVE = StepCurve({1: Fraction(10), 2: Fraction(12), 3: Fraction(14), 4: Fraction(19)})
Confidence = Callable[[Toy, Prefix], Fraction]
Depth = Callable[[Sequence[Fraction]], int]
"""Depth of a request from c_1 .. c_k of its drafts. Nothing keeps a wrong rule from reading them all."""
Depths = Callable[[Sequence[Sequence[Fraction]]], list[int]]


def overlap(toy: Toy, prefix: Prefix) -> Fraction:
    """What a perfect confidence head says: the acceptance rate at this prefix."""
    return sum((min(p, q) for p, q in zip(toy.p(prefix), toy.q(prefix), strict=True)), Fraction(0))


def erratic(_toy: Toy, prefix: Prefix) -> Fraction:
    """A head that depends wildly on the last draft; 0 and 1 included."""
    return Fraction((sum((t + 1) * (i + 2) ** 2 for i, t in enumerate(prefix)) * 7 + 3) % 5, 4)


def saturated(_toy: Toy, prefix: Prefix) -> Fraction:
    """A head whose sigmoid saturates: exactly 1 after token 0 (or nothing), else a half."""
    return Fraction(1) if not prefix or prefix[-1] == 0 else Fraction(1, 2)


def confidences_of(case: Case, head: Confidence) -> list[Fraction]:
    return [head(case.toy, case.prefix + case.tokens[:k]) for k in range(len(case.tokens))]


def cut_to(case: Case, depth: int) -> Case:
    return replace(case, rows=case.rows[:depth], tokens=case.tokens[:depth])


@cache
def verdicts_of(toy: Toy, prefix: Prefix, tokens: Prefix, step: Step = production) -> dict[Verdict, Fraction]:
    rows = tuple(toy.draft(prefix + tokens[:i]) for i in range(len(tokens)))
    case = Case(toy, prefix, rows, tokens)
    return verdict_law(lambda draws: step(case, draws), toy.grid.coin)


# --- one request ---------------------------------------------------------------------------------------------------


def stopping(rule: StoppingRule) -> Depth:
    """A stopping rule, as the admission of production runs it."""
    return lambda chain: admit(rule, [chain], ALONE)[0]


def early_stop(chain: Sequence[Fraction]) -> int:
    """DSpark algorithm 1."""
    return stopping(EarlyStop(CURVE))(chain)


@dataclass(frozen=True)
class Threshold:
    """Stops at the first confidence below the bar."""

    bar: Fraction

    def admits(self, visible: Visible) -> bool:
        return visible.confidences[-1] >= self.bar


def admitted_law(
    toy: Toy, longest: int, length: int, depth_of: Depth, head: Confidence, step: Step = production
) -> SequenceLaw:
    """Joint law of ``length`` tokens of rounds whose depth ``depth_of`` chooses, judged by ``step``."""

    @cache
    def one_round(prefix: Prefix) -> SequenceLaw:
        law: SequenceLaw = {}
        for case, share in proposals(toy, prefix, longest):
            kept = cut_to(case, depth_of(confidences_of(case, head)))
            for verdict, chance in verdicts_of(toy, prefix, kept.tokens, step).items():
                emitted = (*case.tokens[: verdict.accepted], verdict.token)
                law[emitted] = law.get(emitted, Fraction(0)) + share * chance
        return law

    return oracle.joint_law(one_round, length)


# DSpark appendix A: p = (0.7, 0.3), q = (0.5, 0.5), c_1 = 0.8, c_2 = 0.9 or 0 by the first draft.
A_CURVE = StepCurve({1: Fraction(1), 2: Fraction(2), 3: Fraction(20, 9)})


@dataclass(frozen=True)
class Memoryless(Toy):
    """The same p and q behind every prefix, as tickets and counts."""

    p_tickets: tuple[int, ...] = ()
    q_counts: tuple[int, ...] = ()

    def target(self, prefix: Prefix) -> np.ndarray:
        return np.array(self.p_tickets)

    def draft(self, prefix: Prefix) -> Row:
        return Row(np.arange(len(self.q_counts), dtype=np.int32), np.array(self.q_counts))


APPENDIX_A = Memoryless("DSpark appendix A", Grid(2, 20, 2520), 2, p_tickets=(14, 6), q_counts=(1, 1))


def appendix_a_head(_toy: Toy, prefix: Prefix) -> Fraction:
    """c_1 = 0.8; c_2 says whether the first draft was token 0."""
    if not prefix:
        return Fraction(4, 5)
    return Fraction(9, 10) if prefix[-1] == 0 else Fraction(0)


def uniform_toy(vocab: int) -> Memoryless:
    """q = p, uniform."""
    return Memoryless(f"uniform on {vocab}", Grid(vocab, vocab, vocab), vocab, p_tickets=(1,) * vocab,
                      q_counts=(1,) * vocab)  # fmt: skip


def only_zero_head(_toy: Toy, prefix: Prefix) -> Fraction:
    """1 behind token 0, else 0: with ``peek_at_the_first`` the draft is kept only when it is token 0."""
    return Fraction(int(prefix[-1:] == (0,)))


def global_argmax(curve: StepCurve) -> Depth:
    """The wrong search: the best throughput anywhere, which asks c_2 whether to verify x_1."""

    def depth_of(chain: Sequence[Fraction]) -> int:
        sps = [Fraction(curve.steps_per_second(rows)) for rows in range(1, len(chain) + 2)]
        scores = oracle.throughput(1, [Fraction(a) for a in survivals(chain)], sps)
        return scores.index(max(scores))

    return depth_of


def peek_at_the_first(chain: Sequence[Fraction]) -> int:
    """Keeps a first draft whose successor looks likely: c_2 encodes x_1."""
    return int(len(chain) > 1 and chain[1] >= Fraction(1, 2))


# --- two requests --------------------------------------------------------------------------------------------------

FIRST, SECOND = Toy("first", SMALL, vocab=2), Toy("second", SMALL, vocab=2, draft_temperature=0.3)


def shared_budget(chains: Sequence[Sequence[Fraction]]) -> list[int]:
    """One draft for both requests."""
    return admit(FixedBudget(1), chains, TOGETHER)


def pair_law(depths_of: Depths, head: Confidence, length: int) -> SequenceLaw:
    """Joint law of both requests' first tokens, one behind the other; a request that has them leaves the batch."""

    def drawn(toy: Toy, prefix: Prefix) -> Iterator[tuple[Case, Fraction]]:
        return proposals(toy, prefix, 0 if len(prefix) >= length else 2)

    def appended(case: Case, prefix: Prefix) -> list[tuple[Prefix, Fraction]]:
        if len(prefix) >= length:
            return [(prefix, Fraction(1))]
        verdicts = verdicts_of(case.toy, case.prefix, case.tokens).items()
        return [((*prefix, *case.tokens[: v.accepted], v.token), share) for v, share in verdicts]

    @cache
    def law(one: Prefix, two: Prefix) -> SequenceLaw:
        if len(one) >= length and len(two) >= length:
            return {one[:length] + two[:length]: Fraction(1)}
        found: SequenceLaw = {}
        for left, p_left in drawn(FIRST, one):
            for right, p_right in drawn(SECOND, two):
                depths = depths_of([confidences_of(left, head), confidences_of(right, head)])
                for after_one, p in appended(cut_to(left, depths[0]), one):
                    for after_two, r in appended(cut_to(right, depths[1]), two):
                        for tokens, rest in law(after_one, after_two).items():
                            found[tokens] = found.get(tokens, Fraction(0)) + p_left * p_right * p * r * rest
        return found

    return law((), ())


def independent_law(length: int) -> SequenceLaw:
    """Both targets alone."""
    one, two = (oracle.ancestral_law(toy.p, length) for toy in (FIRST, SECOND))
    return {a + b: p * r for a, p in one.items() for b, r in two.items()}


def later_slots_first(chains: Sequence[Sequence[Fraction]]) -> list[int]:
    """A top-1 whose ties go to the later slot: at c = 1 exactly, the number of drafts of a request tells its draft."""
    ranked = sorted(
        (-share, -position, request)
        for request, chain in enumerate(chains)
        for position, share in enumerate(survivals(chain))
    )
    return [sum(request == place for _, _, request in ranked[:1]) for place in range(len(chains))]


_STEEP = StepCurve({2: Fraction(10), 3: Fraction(17), 4: Fraction(18), 5: Fraction(19), 6: Fraction(20)})


def budget_of_this_round(chains: Sequence[Sequence[Fraction]]) -> list[int]:
    """The best budget over this round's confidences, instead of over statistics of the past."""
    shares: list[list[Number]] = [survivals(chain) for chain in chains]
    return admit(FixedBudget(best_budget(shares, TOGETHER, _STEEP)), chains, TOGETHER)


# --- rounds with a memory ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """What rounds know of drafts that were thrown away.

    same_numbers: keys without the round, so a position that is drafted again gets its old draft.
    stale_rule: the next round is verified only where the first thrown-away draft was token 0.
    """

    same_numbers: bool = False
    stale_rule: bool = True


FRESH = Memory()
"""Production: the round is in the key, so a rule may look at what an earlier round threw away."""


def remembering_law(toy: Memoryless, memory: Memory, length: int) -> SequenceLaw:
    """Joint law of ``length`` tokens of rounds of depth 2. The state is the text and the drafts thrown away last."""

    def chains(past: Prefix) -> Iterator[tuple[Prefix, Fraction]]:
        q = toy.q(())
        for chain in np.ndindex(toy.vocab, toy.vocab):
            fixed = past if memory.same_numbers else ()
            if chain[: len(fixed)] == fixed:
                free = chain[len(fixed) :]
                share = Fraction(1)
                for token in free:
                    share *= q[token]
                yield chain, share

    @cache
    def law(text: Prefix, past: Prefix) -> SequenceLaw:
        if len(text) >= length:
            return {text[:length]: Fraction(1)}
        found: SequenceLaw = {}
        for chain, share in chains(past):
            refused = memory.stale_rule and past and past[0] != 0
            for verdict, chance in verdicts_of(toy, (), () if refused else chain).items():
                emitted = (*chain[: verdict.accepted], verdict.token)
                for tokens, rest in law(text + emitted, chain[len(emitted) :]).items():
                    found[tokens] = found.get(tokens, Fraction(0)) + share * chance * rest
        return found

    return law((), ())
