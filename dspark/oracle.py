"""The same semantics in fractions and Python integers: the judge of the sampler.

Purpose: say what a row, a draw, an acceptance, a residual and a whole decoding run mean, in code that is slow
and obvious and shares nothing with ``dyadic``, ``tickets``, ``verify`` or ``processors``. Tests hold those to
it with ``==``; nothing here rounds.

Invariants: no float, no numpy, no import of the modules it judges. Probabilities are ``Fraction``.

Called by tests and by the proof suite. It is never on a serving path.

Layers:

- *integer semantics* (``allocate``, ``draw``, ``tickets``, ``accepts``, ``residual``, ``pick``, ``verify``):
  what a decision is for given integers, in any number system (mass, total, coin);
- *laws* (``acceptance_probability`` .. ``joint_law``): the distribution of what those decisions emit;
- *processors* (``Rules`` .. ``survivors``): which logits a row is made of, and which ids it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
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


def block_weight(before: Fraction, p: Fraction, q: Fraction, total: int) -> Fraction:
    """Share of a prefix's probability that block verification may keep, after one more token; a multiple of 1/total."""
    return min(Fraction(1), Fraction(floor(before * p / q * total), total))


def verify_block(
    target: Sequence[Sequence[int]],
    rows: Sequence[Mapping[int, int]],
    tokens: Sequence[int],
    uniform: Callable[[str, int], int],
    mass: int,
    total: int,
    coin: int,
) -> Outcome:
    """One round of block verification; arguments as ``verify`` has them."""
    p = [[Fraction(ticket, total) for ticket in row] for row in target]
    q = [{token: Fraction(count, mass) for token, count in row.items()} for row in rows]
    weights = [Fraction(1)]
    for index, token in enumerate(tokens):
        weights.append(block_weight(weights[-1], p[index][token], q[index][token], total))
    depth = len(tokens)
    for kept in range(depth, 0, -1):
        chance = weights[kept]
        if kept < depth:
            left = sum(block_masses(weights[kept], p[kept], q[kept], total))
            chance = left / (left + 1 - weights[kept]) if left else Fraction(0)
        if Fraction(uniform("acceptance", kept - 1), coin) < chance:
            break
    else:
        kept = 0
    if kept == depth:
        return depth, pick(target[depth], uniform("bonus", depth), coin), "bonus"
    masses = [int(share * total**2) for share in block_masses(weights[kept], p[kept], q[kept], total)]
    return kept, pick(masses, uniform("correction", kept), coin), "correction"


def block_masses(weight: Fraction, p: Sequence[Fraction], q: Mapping[int, Fraction], total: int) -> list[Fraction]:
    """What is left of every token's share of a kept prefix once its drafted continuations have taken theirs."""
    return [
        weight * share - (q[token] * block_weight(weight, share, q[token], total) if token in q else 0)
        for token, share in enumerate(p)
    ]


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


# --- processors --------------------------------------------------------------------------------
#
# Logits are fractions; the rules look at the whole text so far every time and keep no state.


@dataclass(frozen=True)
class Rules:
    """What one request asks of its rows. ``grammar`` maps the generated text to the ids that may follow."""

    bias: Mapping[int, Fraction] = field(default_factory=dict)
    presence: Fraction = Fraction(0)
    frequency: Fraction = Fraction(0)
    repetition: Fraction = Fraction(1)
    min_tokens: int = 0
    endings: frozenset[int] = frozenset()
    bad_words: tuple[Prefix, ...] = ()
    allowed: frozenset[int] | None = None
    grammar: Callable[[Prefix], Collection[int]] | None = None


def is_banned(token: int, generated: Prefix, rules: Rules) -> bool:
    """Whether ``token`` must not follow the generated text."""
    longer = (*generated, token)
    return (
        (token in rules.endings and len(longer) <= rules.min_tokens)
        or any(longer[-len(word) :] == word for word in rules.bad_words)
        or (rules.allowed is not None and token not in rules.allowed)
        or (rules.grammar is not None and token not in rules.grammar(generated))
    )


def edited_logit(logit: Fraction, token: int, prompt: Prefix, generated: Prefix, rules: Rules) -> Fraction:
    """Bias, then repetition, frequency and presence penalty."""
    logit += rules.bias.get(token, Fraction(0))
    if token in (*prompt, *generated):
        logit = logit / rules.repetition if logit > 0 else logit * rules.repetition
    logit -= rules.frequency * generated.count(token)
    return logit - rules.presence if token in generated else logit


def edited(logits: Sequence[Fraction], prompt: Prefix, generated: Prefix, rules: Rules) -> dict[int, Fraction]:
    """The edited logit of every id that is not banned."""
    return {
        token: edited_logit(logit, token, prompt, generated, rules)
        for token, logit in enumerate(logits)
        if not is_banned(token, generated, rules)
    }


def survivors(weights: Sequence[Fraction], min_p: Fraction, top_k: int, top_p: Fraction) -> list[int]:
    """Ids that min_p, then top_k (0: off), then top_p leave of the weights after temperature; 0 is a removed id."""
    left = [weight if weight >= min_p * max(weights) else Fraction(0) for weight in weights]
    positive = sum(weight > 0 for weight in left)
    left = keep(left, top_indices(left, min(top_k or positive, positive)))
    return nucleus(left, top_p)


# --- lanes and admission -----------------------------------------------------------------------


def match(target: Sequence[Sequence[int]], tokens: Sequence[int], uniform: Callable[[int], int], coin: int) -> Outcome:
    """One round of the match lane: (accepted, last token, kind); ``uniform(index)`` is in [0, coin).

    The target's own tokens come first, drafts are compared afterwards: this says that they change no token.
    """
    own = [pick(row, uniform(index), coin) for index, row in enumerate(target)]
    agreed = 0
    while agreed < len(tokens) and own[agreed] == tokens[agreed]:
        agreed += 1
    return agreed, own[agreed], "bonus" if agreed == len(tokens) else "correction"


def match_round_law(target: Model, draft: Model, prefix: Prefix, depth: int) -> SequenceLaw:
    """Law of one round of one-entry rows, in textbook form: accept x with p(x), else p without x, renormalised.

    Drafts come from any law ``draft``; it changes how long the round is.
    """
    p = target(prefix)
    if depth == 0:
        return {(token,): share for token, share in enumerate(p) if share}
    law: SequenceLaw = {}
    for drafted, chance in enumerate(draft(prefix)):
        if chance == 0:
            continue
        if p[drafted]:
            for rest, share in match_round_law(target, draft, (*prefix, drafted), depth - 1).items():
                _add(law, (drafted, *rest), chance * p[drafted] * share)
        if p[drafted] < 1:
            others = normalised([Fraction(0) if token == drafted else share for token, share in enumerate(p)])
            for token, share in enumerate(others):
                if share:
                    _add(law, (token,), chance * (1 - p[drafted]) * share)
    return law


def stopped_round_law(
    target: Model, draft: Model, prefix: Prefix, longest: int, admits: Callable[[Prefix], bool]
) -> SequenceLaw:
    """Law of one ratio round whose draft k is verified iff ``admits(x_1 .. x_(k-1))``, asked until the first no."""

    def follow(drafts: Prefix) -> SequenceLaw:
        context = prefix + drafts
        p = target(context)
        if len(drafts) == longest or not admits(drafts):
            return {(token,): share for token, share in enumerate(p) if share}
        law: SequenceLaw = {}
        q = draft(context)
        rejected = Fraction(0)
        for token, share in enumerate(q):
            if share == 0:
                continue
            accepted = share * acceptance_probability(share, p[token])
            rejected += share - accepted
            if accepted:
                for rest, probability in follow((*drafts, token)).items():
                    _add(law, (token, *rest), accepted * probability)
        for token, probability in correction_law(p, q).items() if rejected else ():
            _add(law, (token,), rejected * probability)
        return law

    return follow(())


def throughput(requests: int, survivals: Sequence[Fraction], steps_per_second: Sequence[Fraction]) -> list[Fraction]:
    """DSpark's Theta for 0, 1, 2, .. admitted drafts: (requests + sum of a) times SPS; [i] of both is for i drafts."""
    tokens = Fraction(requests)
    scores = [tokens * steps_per_second[0]]
    for index, survival in enumerate(survivals, start=1):
        tokens += survival
        scores.append(tokens * steps_per_second[index])
    return scores
