"""Tier 2: the law of text that comes out of the real path: worker, wire, engine, HTTP.

Invariants: the tests are ``DECLARED``; samples are seeded, so that a run at one seed is one figure; the expected laws
come from ``target_law`` and from the target rows themselves, not from the path on trial. Part of the composition root,
as ``served_pair``.

Called by ``prove``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dspark.logit_edits import LogitEdits
from dspark.philox import Domain, Keys
from dspark.processors import SamplingPolicy
from dspark.proof.chi_square import Outcome, chi_square, g_test, merged_cells
from dspark.proof.observer import (
    BLOCK,
    acceptance_test,
    best_token_test,
    correction_test,
    likeness_test,
    neighbour_test,
    place_test,
)
from dspark.proof.served_pair import PROMPT, Served
from dspark.proof.target_law import Sampling, TokenLaw, Tokens, conditional, marginal, target_law
from dspark.proof.trials import Evidence, Rate

TIER = "2"
DEADLINE_MS = 5000
DRAFT_TEMPERATURE = 0.4
"""Drafts are colder than the target, so that q is far from p and corrections matter."""

PLAIN = Sampling(SamplingPolicy(1.0, top_k=3))
PROCESSED = Sampling(
    SamplingPolicy(0.8, 5, 0.9, 0.02),
    LogitEdits(logit_bias={7: 0.5, 80: -0.5}, presence_penalty=0.25, frequency_penalty=0.5, repetition_penalty=1.1),
)
_JOINT = "joint of tokens 1 to 3"
_NUMBERS = {
    "acceptance, correction": (Domain.ACCEPTANCE, Domain.CORRECTION),
    "proposal, acceptance": (Domain.PROPOSAL, Domain.ACCEPTANCE),
    "proposal, correction": (Domain.PROPOSAL, Domain.CORRECTION),
    "target-only, bonus": (Domain.TARGET_ONLY, Domain.BONUS),
}
_DEPTH = 4
_TESTS = (
    f"ratio over HTTP: {_JOINT}, chi2",
    f"ratio over HTTP: {_JOINT}, G",
    "ratio over HTTP: two consecutive drafted tokens, chi2",
    "ratio over HTTP: token 2 given token 1, chi2",
    "ratio over HTTP: token 3 given tokens 1 and 2, chi2",
    f"processors over HTTP: {_JOINT}, chi2",
    f"processors over HTTP: {_JOINT}, G",
    f"match lane: {_JOINT}, chi2",
    f"match lane: {_JOINT}, G",
    "long texts, ratio: places in the target rows, chi2",
    "long texts, ratio: places of consecutive tokens, chi2",
    "long texts, ratio: how often the most likely token came, z",
    "long texts, ratio: the drafter's probability of committed tokens, z",
    *(f"acceptance of draft {place + 1} is sum min(p, q), z" for place in range(_DEPTH)),
    "long texts, ratio: places of corrections in the residual, chi2",
    *(f"numbers of {name} at one position are independent, chi2" for name in _NUMBERS),
    "proposal numbers of consecutive rounds are independent, chi2",
)
_BLOCK_TESTS = (
    f"block rule over HTTP: {_JOINT}, chi2",
    f"block rule over HTTP: {_JOINT}, G",
    "long texts, block rule: places in the target rows, chi2",
    "long texts, block rule: places of consecutive tokens, chi2",
    "long texts, block rule: how often the most likely token came, z",
)
DECLARED: tuple[tuple[str, str], ...] = tuple((TIER, name) for name in (*_TESTS, *_BLOCK_TESTS))


@dataclass(frozen=True)
class Sizes:
    """How much is sampled. short: requests of four tokens for each joint; long, length: longer texts, their tokens."""

    short: int
    long: int
    length: int


def run(served: Served, sizes: Sizes, seed: int, evidence: Evidence, log: Callable[[str], None]) -> None:
    """All of Tier 2 on a running pair."""
    plain = target_law(served.pair.target, PROMPT, PLAIN, 3)
    log(f"tier 2: {sizes.short} requests over HTTP, ratio lane")
    _ratio(served, plain, request_seeds(seed, 0, sizes.short), evidence)
    log(f"tier 2: {sizes.short} requests over HTTP, all processors")
    _processors(served, request_seeds(seed, 1, sizes.short), evidence)
    log(f"tier 2: {sizes.short} requests, match lane")
    samples = firsts(served.many_in_lane("match", request_seeds(seed, 2, sizes.short), 4, 3), 3)
    joint_tests(evidence, TIER, "match lane: ", samples, plain, ("chi2", "G"))
    log(f"tier 2: {sizes.long} texts of {sizes.length} tokens")
    _long(served, sizes, seed, evidence)
    log(f"tier 2: {sizes.short} requests and {sizes.long} texts under the block rule")
    with served.block_rule():
        _block(served, plain, sizes, seed, evidence)
    _numbers(seed, evidence)
    _facts(served, seed, evidence)


def request_seeds(seed: int, series: int, count: int) -> list[int]:
    """Seeds that no two series of one run share."""
    start = seed * 10_000_000 + series * 1_000_000
    return list(range(start, start + count))


def firsts(texts: Sequence[Tokens], length: int) -> list[Tokens]:
    """The first tokens of each text: the first comes from the prefill, the others have been drafted."""
    return [text[:length] for text in texts]


def joint_tests(
    evidence: Evidence, tier: str, of: str, samples: Sequence[Tokens], law: TokenLaw, kinds: Sequence[str]
) -> None:
    """Declared tests of a joint law."""
    make: Mapping[str, Callable[[list[list[tuple[float, float]]]], Outcome]] = {"chi2": chi_square, "G": g_test}
    for kind in kinds:
        evidence.test(tier, f"{of}{_JOINT}, {kind}", len(samples), partial(_joint, make[kind], samples, law))


def _joint(
    make: Callable[[list[list[tuple[float, float]]]], Outcome], samples: Sequence[Tokens], law: TokenLaw
) -> Outcome:
    return make([_cells(samples, law)])


def _cells(samples: Sequence[Tokens], law: TokenLaw) -> list[tuple[float, float]]:
    return merged_cells(Counter(samples), law)  # type: ignore[arg-type]


def _ratio(served: Served, law: TokenLaw, seeds: Sequence[int], evidence: Evidence) -> None:
    samples = firsts(served.many(seeds, max_tokens=4, **PLAIN.body()), 3)
    joint_tests(evidence, TIER, "ratio over HTTP: ", samples, law, ("chi2", "G"))
    pairs = [sample[1:] for sample in samples]
    evidence.test(TIER, _TESTS[2], len(pairs), lambda: chi_square([_cells(pairs, marginal(law, (1, 2)))]))
    for given, name in ((1, _TESTS[3]), (2, _TESTS[4])):
        evidence.test(TIER, name, len(samples), partial(_given, samples, law, given))


def _given(samples: Sequence[Tokens], law: TokenLaw, given: int) -> Outcome:
    """The next token within each class of equal prefixes; classes too small for two cells say nothing."""
    groups = []
    for prefix, following in conditional(law, given).items():
        behind = [sample[given : given + 1] for sample in samples if sample[:given] == prefix]
        if behind:
            groups.append(_cells(behind, following))
    return chi_square([cells for cells in groups if len(cells) > 1])


def _processors(served: Served, seeds: Sequence[int], evidence: Evidence) -> None:
    law = target_law(served.pair.target, PROMPT, PROCESSED, 3)
    samples = firsts(served.many(seeds, max_tokens=4, **PROCESSED.body()), 3)
    joint_tests(evidence, TIER, "processors over HTTP: ", samples, law, ("chi2", "G"))


def _long(served: Served, sizes: Sizes, seed: int, evidence: Evidence) -> None:
    """Every position of long texts, each against its own target row."""
    served.observer.clear()
    served.many(request_seeds(seed, 3, sizes.long), max_tokens=sizes.length, temperature=1.0)
    committed, judged, corrected = served.observer.committed, served.observer.judged, served.observer.corrected
    evidence.test(TIER, _TESTS[12], len(judged), lambda: likeness_test(judged))
    evidence.test(TIER, _TESTS[13 + _DEPTH], len(corrected), lambda: correction_test(corrected))
    for name, test in zip(_TESTS[9:12], (place_test, neighbour_test, best_token_test), strict=True):
        evidence.test(TIER, name, len(committed), partial(test, committed))
    for place in range(_DEPTH):
        drafts = [draft for draft in judged if draft.place == place]
        evidence.test(TIER, _TESTS[13 + place], len(drafts), partial(acceptance_test, drafts))
        if drafts:
            seen = sum(draft.accepted for draft in drafts) / len(drafts)
            expected = sum(draft.chance for draft in drafts) / len(drafts)
            evidence.rates.append(Rate(place + 1, len(drafts), seen, expected))


def _block(served: Served, law: TokenLaw, sizes: Sizes, seed: int, evidence: Evidence) -> None:
    """The same laws where proposals are judged as a whole."""
    seeds = request_seeds(seed, 5, sizes.short + sizes.long)
    samples = firsts(served.many(seeds[: sizes.short], max_tokens=4, **PLAIN.body()), 3)
    joint_tests(evidence, TIER, "block rule over HTTP: ", samples, law, ("chi2", "G"))
    served.observer.clear()
    served.many(seeds[sizes.short :], max_tokens=sizes.length, temperature=1.0)
    committed = served.observer.committed
    for name, test in zip(_BLOCK_TESTS[2:], (place_test, neighbour_test, best_token_test), strict=True):
        evidence.test(TIER, name, len(committed), partial(test, committed))
    judged = sum(token.lane == BLOCK for token in committed)
    evidence.fact(TIER, "tokens came from the block rule", judged > 0, f"{judged} of {len(committed)}")


def _numbers(seed: int, evidence: Evidence) -> None:
    """Numbers of the keys themselves, two uses at a time, top three bits of each."""
    count = 6400
    keys = [Keys(seed * count + i, 0, 1) for i in range(count)]
    for name, (one, other) in _NUMBERS.items():
        numbers = [(key.draw64(one, 7), key.draw64(other, 7)) for key in keys]
        test = f"numbers of {name} at one position are independent, chi2"
        evidence.test(TIER, test, count, partial(_pairs, numbers))
    again = [(key.draw64(Domain.PROPOSAL, 7), Keys(key.seed, 0, 2).draw64(Domain.PROPOSAL, 7)) for key in keys]
    evidence.test(TIER, _TESTS[-1], count, lambda: _pairs(again))


def _pairs(numbers: Sequence[tuple[int, int]]) -> Outcome:
    cells = [(one >> 61) * 8 + (two >> 61) for one, two in numbers]
    counts = np.bincount(cells, minlength=64)
    return chi_square([[(float(seen), len(numbers) / 64) for seen in counts]])


def _facts(served: Served, seed: int, evidence: Evidence) -> None:
    prompts = [[(start * 37 + i * 11) % 256 for i in range(5 + start)] for start in range(8)]
    bodies: list[dict[str, object]] = [{"prompt": prompt, "max_tokens": 24, "temperature": 0.0} for prompt in prompts]
    on, off = (served.each([{**body, "dspark_speculate": drafted} for body in bodies]) for drafted in (True, False))
    name = "greedy text is the same with speculation on and off"
    evidence.fact(TIER, name, on == off, f"{len(prompts)} prompts, 24 tokens each")
    seeds = request_seeds(seed, 4, 8)
    alone = [[served.tokens(seed=s, max_tokens=24, temperature=1.0) for s in seeds[:3]] for _ in range(2)]
    evidence.fact(TIER, "the same seed gives the same text", alone[0] == alone[1], "3 seeds, 24 tokens each")
    stats = served.complete(max_tokens=48, temperature=1.0, seed=seeds[0])["speculation"]
    drafted = stats["lane"] == "ratio" and 0 < stats["accepted"] < stats["verified"]
    evidence.fact(TIER, "drafts were verified, and some but not all accepted", drafted, str(stats))
