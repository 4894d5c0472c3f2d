"""The same semantics in fractions and Python integers: the judge of the sampler.

Purpose: say what a row, a draw, an acceptance, a residual and a whole decoding run mean, in code that is slow
and obvious and shares nothing with ``dyadic``, ``tickets``, ``verify`` or ``processors``. Tests hold those to
it with ``==``; nothing here rounds.

Invariants: no float, no numpy, no import of the modules it judges. Probabilities are ``Fraction``.

Called by tests and by the proof suite. It is never on a serving path.

Two layers:

- *integer semantics* (``allocate``, ``draw``, ``tickets``, ``accepts``, ``residual``, ``pick``, ``verify``):
  what a decision is for given integers, in any number system (mass, total, coin);
- *laws* (``acceptance_probability`` .. ``joint_law``): the distribution of what those decisions emit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import floor

Prefix = tuple[int, ...]
Law = dict[int, Fraction]
SequenceLaw = dict[Prefix, Fraction]
Model = Callable[[Prefix], Sequence[Fraction]]
Outcome = tuple[int, int, str]


class OracleRefusal(ValueError):
    """The inputs define no row."""


# --- integer semantics -------------------------------------------------------------------------


def allocate(weights: Sequence[Fraction], mass: int) -> list[int]:
    """Counts with sum ``mass``: floors, one more to the largest remainders, ties to the lowest id."""
    if any(weight < 0 for weight in weights) or not any(weights):
        raise OracleRefusal("weights must be nonnegative with positive mass")
    counts = [floor(weight * mass) for weight in weights]
    remainders = [weight * mass - count for weight, count in zip(weights, counts, strict=True)]
    leftover = mass - sum(counts)
    if not 0 <= leftover <= sum(remainder > 0 for remainder in remainders):
        raise OracleRefusal(f"leftover {leftover}")
    by_remainder = sorted(range(len(weights)), key=lambda index: (-remainders[index], index))
    for index in by_remainder[:leftover]:
        counts[index] += 1
    return counts


def top_indices(values: Sequence[Fraction], how_many: int) -> list[int]:
    """Ascending indices of the largest values, ties to the lowest index."""
    ranked = sorted(range(len(values)), key=lambda index: (-values[index], index))
    return sorted(ranked[:how_many])


def nucleus(weights: Sequence[Fraction], top_p: Fraction) -> list[int]:
    """Ascending indices of the shortest (weight descending, id ascending) prefix that reaches top_p."""
    ranked = sorted(range(len(weights)), key=lambda index: (-weights[index], index))
    wanted = top_p * sum(weights)
    kept: list[int] = []
    reached = Fraction(0)
    for index in ranked:
        kept.append(index)
        reached += weights[index]
        if reached >= wanted:
            break
    return sorted(kept)


def tickets(weights: Sequence[Fraction], total: int) -> list[int]:
    """Target tickets with sum ``total``: floors, and the signed leftover to the lowest-id maximum."""
    row = [floor(weight * total) for weight in weights]
    row[weights.index(max(weights))] += total - sum(row)
    return row


def draw(counts: Mapping[int, int], uniform: int) -> int:
    """First token, ids ascending, whose cumulative count is strictly above ``uniform``."""
    reached = 0
    for token in sorted(counts):
        reached += counts[token]
        if reached > uniform:
            return token
    raise OracleRefusal(f"uniform {uniform} is not below the mass {reached}")


def pick(masses: Sequence[int], uniform: int, coin: int) -> int:
    """The token of a bounded integer: ``uniform`` in [0, coin) scaled down to [0, sum of masses)."""
    return draw(dict(enumerate(masses)), uniform * sum(masses) // coin)


def accepts(uniform: Fraction, q: Fraction, p: Fraction) -> bool:
    """The textbook test u < p / q, without the division."""
    return uniform * q < p


def residual(p_tickets: Sequence[int], counts: Mapping[int, int], scale: int) -> list[int]:
    """max(a - K c, 0) for every token."""
    return [max(ticket - scale * counts.get(token, 0), 0) for token, ticket in enumerate(p_tickets)]


def verify(
    target: Sequence[Sequence[int]],
    rows: Sequence[Mapping[int, int]],
    tokens: Sequence[int],
    uniform: Callable[[str, int], int],
    mass: int,
    total: int,
    coin: int,
) -> Outcome:
    """One round: (accepted, last token, kind); ``uniform(kind, index)`` gives integers in [0, coin)."""
    for index, (counts, token) in enumerate(zip(rows, tokens, strict=True)):
        q, p = Fraction(counts[token], mass), Fraction(target[index][token], total)
        if not accepts(Fraction(uniform("acceptance", index), coin), q, p):
            masses = residual(target[index], counts, total // mass)
            return index, pick(masses, uniform("correction", index), coin), "correction"
    depth = len(rows)
    return depth, pick(target[depth], uniform("bonus", depth), coin), "bonus"


# --- laws --------------------------------------------------------------------------------------


def normalised(weights: Sequence[Fraction]) -> list[Fraction]:
    """Weights divided by their sum."""
    mass = sum(weights)
    return [Fraction(weight) / mass for weight in weights]


def keep(weights: Sequence[Fraction], kept: Sequence[int]) -> list[Fraction]:
    """Zero outside ``kept``, normalised."""
    return normalised([weight if token in kept else Fraction(0) for token, weight in enumerate(weights)])


def one_hot(weights: Sequence[Fraction]) -> list[Fraction]:
    """Temperature 0: the whole mass on the lowest-id maximum."""
    return keep(weights, [weights.index(max(weights))])


def acceptance_probability(q: Fraction, p: Fraction) -> Fraction:
    """min(1, p / q) of a drafted token."""
    return min(Fraction(1), p / q)


def correction_law(p: Sequence[Fraction], q: Sequence[Fraction]) -> Law:
    """Law of the token after a rejection: (p - q)+ over the whole vocabulary, normalised."""
    above = [max(target - draft, Fraction(0)) for target, draft in zip(p, q, strict=True)]
    mass = sum(above)
    return {token: share / mass for token, share in enumerate(above) if share}


def round_law(target: Model, draft: Model, prefix: Prefix, depth: int) -> SequenceLaw:
    """Law of the tokens that one round of ``depth`` drafts appends to ``prefix``."""
    if depth == 0:
        return {(token,): p for token, p in enumerate(target(prefix)) if p}
    law: SequenceLaw = {}
    p, q = target(prefix), draft(prefix)
    rejected = Fraction(0)
    for token, share in enumerate(q):
        if share == 0:
            continue
        accepted = share * acceptance_probability(share, p[token])
        rejected += share - accepted
        if accepted:
            for rest, probability in round_law(target, draft, (*prefix, token), depth - 1).items():
                _add(law, (token, *rest), accepted * probability)
    if rejected:
        for token, probability in correction_law(p, q).items():
            _add(law, (token,), rejected * probability)
    return law


def joint_law(one_round: Callable[[Prefix], Mapping[Prefix, Fraction]], length: int) -> SequenceLaw:
    """Joint law of the first ``length`` tokens when rounds are composed until that many are committed."""

    def extend(prefix: Prefix) -> SequenceLaw:
        if len(prefix) >= length:
            return {prefix[:length]: Fraction(1)}
        law: SequenceLaw = {}
        for tokens, probability in one_round(prefix).items():
            for sequence, rest in extend(prefix + tokens).items():
                _add(law, sequence, probability * rest)
        return law

    return extend(())


def ancestral_law(target: Model, length: int) -> SequenceLaw:
    """Joint law of ``length`` tokens of the target alone: what every lane has to equal."""
    return joint_law(lambda prefix: {(token,): p for token, p in enumerate(target(prefix)) if p}, length)


def _add(law: SequenceLaw, sequence: Prefix, probability: Fraction) -> None:
    law[sequence] = law.get(sequence, Fraction(0)) + probability
