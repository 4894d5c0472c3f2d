"""Tier 0 of admission: every rule of the ratio lane keeps the joint law exactly; rules that peek are seen to break it.

The verification step is the production one throughout; confidences are functions of the drafts before a position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import FrozenInstanceError, dataclass, field
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark import oracle
from dspark.admission import (
    Drafted,
    EarlyStop,
    FixedBudget,
    FixedDepth,
    Load,
    Number,
    PastRound,
    StepCurve,
    StoppingRule,
    Visible,
    admit,
    best_budget,
    expected_tokens,
    free_depth,
    survivals,
)
from dspark.oracle import Prefix, SequenceLaw
from dspark.proof.admission_laws import (
    ALONE,
    CURVE,
    FIRST,
    SECOND,
    Confidence,
    Depths,
    Threshold,
    confidences_of,
    cut_to,
    erratic,
    overlap,
    saturated,
    verdicts_of,
)
from dspark.proof.toys import MEDIUM, SMALL, Case, Toy, proposals, verdict_law
from dspark.tickets import Grid
from dspark.verify import Draws, Verdict, verify_match
from dspark_proto import Lane

from .test_seed_regressions import APPENDIX_A, DRAFT, TARGET, admitted_law, first_token


def verdicts(case: Case) -> dict[Verdict, Fraction]:
    """Exact law of the production step; a case follows from toy, prefix and tokens, so each is explored once."""
    return verdicts_of(case.toy, case.prefix, case.tokens)


def stopped_round(toy: Toy, prefix: Prefix, longest: int, rule: StoppingRule, head: Confidence) -> SequenceLaw:
    """Law of one round behind an admission rule."""
    law: SequenceLaw = {}
    for case, share in proposals(toy, prefix, longest):
        (depth,) = admit(rule, [confidences_of(case, head)], ALONE)
        for verdict, chance in verdicts(cut_to(case, depth)).items():
            emitted = (*case.tokens[: verdict.accepted], verdict.token)
            law[emitted] = law.get(emitted, Fraction(0)) + share * chance
    return law


def stopped_law(toy: Toy, longest: int, length: int, rule: StoppingRule, head: Confidence) -> SequenceLaw:
    """Joint law of ``length`` tokens of such rounds."""
    return oracle.joint_law(cache(lambda prefix: stopped_round(toy, prefix, longest, rule, head)), length)


@dataclass(frozen=True)
class Uphill:
    """Reads the whole history of confidences: goes on while they do not fall."""

    def admits(self, visible: Visible) -> bool:
        return list(visible.confidences) == sorted(visible.confidences)


PLAIN = Toy("draft misses a token", MEDIUM)
COLD = Toy("colder draft", SMALL, support=3, draft_temperature=0.5)
HEADS: list[Confidence] = [overlap, erratic]
RULES: list[StoppingRule] = [
    FixedDepth(0),
    FixedDepth(1),
    FixedDepth(2),
    FixedBudget(1),
    EarlyStop(CURVE),
    Threshold(Fraction(1, 2)),
    Uphill(),
]


def _name(thing: object) -> str:
    return getattr(thing, "name", None) or getattr(thing, "__name__", None) or type(thing).__name__


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule)[:30])
@pytest.mark.parametrize("head", HEADS, ids=_name)
@pytest.mark.parametrize("toy", [PLAIN, COLD], ids=_name)
def test_joint_law_is_the_targets_under_every_stopping_rule(toy: Toy, head: Confidence, rule: StoppingRule) -> None:
    assert stopped_law(toy, 2, 3, rule, head) == oracle.ancestral_law(toy.p, 3)


def test_early_stop_at_depth_three() -> None:
    toy = Toy("depth 3", SMALL)
    assert stopped_law(toy, 3, 3, EarlyStop(CURVE), erratic) == oracle.ancestral_law(toy.p, 3)


@pytest.mark.parametrize("head", HEADS, ids=_name)
def test_a_stopped_round_is_the_oracles(head: Confidence) -> None:
    """Not only the tokens: how long the round is, jointly with them. The oracle scores Theta by itself."""
    sps = [1 / CURVE.seconds(rows) for rows in (1, 2, 3)]
    for prefix in [(), (0,), (2, 1)]:

        def improves(drafts: Prefix, prefix: Prefix = prefix) -> bool:
            chain = [head(PLAIN, prefix + drafts[:k]) for k in range(len(drafts) + 1)]
            product = [Fraction(1)]
            for confidence in chain:
                product.append(product[-1] * confidence)
            scores = oracle.throughput(1, product[1:], sps)  # type: ignore[arg-type]
            return scores[-1] > scores[-2]

        wanted = oracle.stopped_round_law(PLAIN.p, PLAIN.q, prefix, 2, improves)
        assert stopped_round(PLAIN, prefix, 2, EarlyStop(CURVE), head) == wanted
        fixed = oracle.stopped_round_law(PLAIN.p, PLAIN.q, prefix, 2, lambda drafts: True)
        assert fixed == oracle.round_law(PLAIN.p, PLAIN.q, prefix, 2)
    lengths = {len(tokens) for tokens in stopped_round(PLAIN, (), 2, EarlyStop(CURVE), erratic)}
    assert len(lengths) > 1


# -- rules over earlier rounds ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class AsLastTime:
    """One more draft than the last round accepted; one when there was none."""

    def admits(self, visible: Visible) -> bool:
        last = visible.history[-1].accepted if visible.history else 0
        return visible.position <= last + 1


def test_a_rule_over_past_outcomes_keeps_the_joint_law() -> None:
    """The state of the composition is (prefix, outcome of the round before)."""

    @cache
    def law(prefix: Prefix, past: tuple[PastRound, ...]) -> SequenceLaw:
        if len(prefix) >= 3:
            return {prefix[:3]: Fraction(1)}
        found: SequenceLaw = {}
        for case, share in proposals(PLAIN, prefix, 2):
            (depth,) = admit(AsLastTime(), [confidences_of(case, overlap)], ALONE, [past])
            for verdict, chance in verdicts(cut_to(case, depth)).items():
                emitted = (*prefix, *case.tokens[: verdict.accepted], verdict.token)
                for tokens, rest in law(emitted, (PastRound(depth, verdict.accepted),)).items():
                    found[tokens] = found.get(tokens, Fraction(0)) + share * chance * rest
        return found

    assert law((), ()) == oracle.ancestral_law(PLAIN.p, 3)


# -- appendix A ------------------------------------------------------------------------------------------------

A_CURVE = StepCurve({1: Fraction(1), 2: Fraction(2), 3: Fraction(20, 9)})
A_SPS = [Fraction(1), Fraction(1, 2), Fraction(45, 100)]


def a_confidences(drafts: Prefix) -> list[Fraction]:
    """c_1 = 0.8; c_2 says whether the first draft was token 0."""
    return [Fraction(4, 5), Fraction(9, 10) if drafts[0] == 0 else Fraction(0)]


def a_scores(drafts: Prefix) -> list[Fraction]:
    return oracle.throughput(1, survivals(a_confidences(drafts)), A_SPS)  # type: ignore[arg-type]


def global_argmax(drafts: Prefix) -> int:
    """The wrong rule: the best Theta anywhere, which asks c_2 whether to verify x_1."""
    scores = a_scores(drafts)
    return scores.index(max(scores))


def test_appendix_a_numbers() -> None:
    assert [A_CURVE.steps_per_second(rows) for rows in (1, 2, 3)] == A_SPS
    assert a_scores((0, 0)) == [1, Fraction(9, 10), Fraction(1134, 1000)]
    assert a_scores((1, 0)) == [1, Fraction(9, 10), Fraction(81, 100)]


def test_appendix_a_global_search_is_biased_and_early_stop_is_not() -> None:
    def early(drafts: Prefix) -> int:
        return admit(EarlyStop(A_CURVE), [a_confidences(drafts)], ALONE)[0]

    wrong = first_token(admitted_law(APPENDIX_A, TARGET, DRAFT, global_argmax, 2), 2)
    assert wrong == [Fraction(17, 20), Fraction(3, 20)]
    right = first_token(admitted_law(APPENDIX_A, TARGET, DRAFT, early, 2), 2)
    assert right == [Fraction(7, 10), Fraction(3, 10)]


# -- rules that read drafts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnlyTokenZero:
    """The seed's example: take the draft when it is token 0, go without it otherwise."""

    def depth(self, drafted: Drafted) -> int:
        return len(drafted.tokens) if drafted.tokens[0] == 0 else 0


def free_cut(drafts: Prefix, lane: Lane = Lane.MATCH) -> int:
    return free_depth(OnlyTokenZero(), Drafted(drafts, (), (), ALONE), lane)


@pytest.mark.parametrize("vocab", [2, 3, 4])
def test_a_free_rule_gives_three_quarters_in_the_ratio_lane_and_a_half_in_the_match_lane(vocab: int) -> None:
    grid, uniform = Grid(vocab, vocab, vocab), [1] * vocab
    biased = first_token(admitted_law(grid, uniform, uniform, free_cut, 1), vocab)
    assert biased[0] == Fraction(2 * vocab - 1, vocab**2)
    law = [Fraction(0)] * vocab
    for draft in range(vocab):
        kept = (draft,)[: free_cut((draft,))]

        def run(draws: Draws, kept: Prefix = kept) -> Verdict:
            return verify_match(lambda _: np.array(uniform), kept, 0, draws, grid)

        for verdict, share in verdict_law(run, grid.coin).items():
            law[(*kept[: verdict.accepted], verdict.token)[0]] += share / vocab
    assert law == [Fraction(1, vocab)] * vocab


def test_free_rules_are_refused_in_the_ratio_lane() -> None:
    with pytest.raises(ValueError, match="ratio"):
        free_cut((0, 1), Lane.RATIO)
    assert [free_cut((0, 1), lane) for lane in (Lane.MATCH, Lane.GREEDY)] == [2, 2]


@pytest.mark.parametrize(("asked", "given"), [(-3, 0), (1, 1), (9, 2)])
def test_a_free_rule_cannot_ask_for_more_than_there_is(asked: int, given: int) -> None:
    class Asks:
        def depth(self, drafted: Drafted) -> int:
            return asked

    assert free_depth(Asks(), Drafted((4, 5), (), (), ALONE), Lane.GREEDY) == given


# -- two requests ----------------------------------------------------------------------------------------------

PAIR = (FIRST, SECOND)
Both = tuple[Prefix, Prefix]


def pair_law(depths_of: Depths, head: Confidence, length: int) -> dict[Both, Fraction]:
    """Exact joint law of both requests' first tokens; a request that has them leaves the batch."""

    def drawn(toy: Toy, prefix: Prefix) -> Iterator[tuple[Case, Fraction]]:
        return proposals(toy, prefix, 0 if len(prefix) >= length else 2)

    @cache
    def law(state: Both) -> dict[Both, Fraction]:
        if all(len(prefix) >= length for prefix in state):
            return {(state[0][:length], state[1][:length]): Fraction(1)}
        found: dict[Both, Fraction] = {}
        for one, p_one in drawn(FIRST, state[0]):
            for two, p_two in drawn(SECOND, state[1]):
                depths = depths_of([confidences_of(one, head), confidences_of(two, head)])
                for after, share in outcomes((cut_to(one, depths[0]), cut_to(two, depths[1])), state):
                    for tokens, rest in law(after).items():
                        found[tokens] = found.get(tokens, Fraction(0)) + p_one * p_two * share * rest
        return found

    def outcomes(pair: tuple[Case, Case], state: Both) -> Iterator[tuple[Both, Fraction]]:
        sides = [
            [(prefix, Fraction(1))]
            if len(prefix) >= length
            else [((*prefix, *c.tokens[: v.accepted], v.token), p) for v, p in verdicts(c).items()]
            for c, prefix in zip(pair, state, strict=True)
        ]
        for one, p in sides[0]:
            for two, r in sides[1]:
                yield (one, two), p * r

    return law(((), ()))


def independent(length: int) -> dict[Both, Fraction]:
    one, two = (oracle.ancestral_law(toy.p, length) for toy in PAIR)
    return {(a, b): p * q for a, p in one.items() for b, q in two.items()}


def budgeted(budget: int) -> Depths:
    return lambda pair: admit(FixedBudget(budget), pair, Load(2, 2))


@pytest.mark.parametrize("budget", [0, 1, 2, 3])
@pytest.mark.parametrize("head", [overlap, erratic, saturated], ids=_name)
def test_two_requests_share_a_fixed_budget_exactly(budget: int, head: Confidence) -> None:
    assert pair_law(budgeted(budget), head, 2) == independent(2)


def test_two_requests_under_early_stop_are_exact() -> None:
    load = Load(2, 2)
    assert pair_law(lambda pair: admit(EarlyStop(CURVE), pair, load), erratic, 2) == independent(2)


def later_slots_first(budget: int) -> Depths:
    """A top-K whose ties go to the later slot: at c = 1 exactly, the number of drafts of a request tells its draft."""

    def depths(pair: Sequence[Sequence[Fraction]]) -> list[int]:
        ranked = sorted(
            (-share, -position, request)
            for request, chain in enumerate(pair)
            for position, share in enumerate(survivals(chain))
        )
        return [sum(request == r for _, _, request in ranked[:budget]) for r in range(len(pair))]

    return depths


@pytest.mark.parametrize("budget", [1, 2])
def test_ties_that_look_at_later_slots_are_seen(budget: int) -> None:
    assert pair_law(later_slots_first(budget), saturated, 2) != independent(2)


def test_a_budget_that_depends_on_this_rounds_confidences_is_seen() -> None:
    """The best budget is right over statistics of the past; over this round's draws it is appendix A again."""

    def greedy(pair: Sequence[Sequence[Fraction]]) -> list[int]:
        budget = best_budget([survivals(chain) for chain in pair], Load(2, 2), A_PAIR)
        return admit(FixedBudget(budget), pair, Load(2, 2))

    assert pair_law(greedy, erratic, 2) != independent(2)


A_PAIR = StepCurve({2: Fraction(10), 3: Fraction(17), 4: Fraction(18), 5: Fraction(19), 6: Fraction(20)})


# -- what a rule sees ------------------------------------------------------------------------------------------


@dataclass
class Spy:
    """Records every view; admits what `wanted` says."""

    wanted: Callable[[Visible], bool]
    seen: list[Visible] = field(default_factory=list)

    def admits(self, visible: Visible) -> bool:
        self.seen.append(visible)
        return self.wanted(visible)


class Guarded(Sequence[Number]):
    """Confidences that remember how far they were read."""

    def __init__(self, values: Sequence[Number]) -> None:
        self.values, self.furthest = values, -1

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, place: int | slice) -> Number | Sequence[Number]:  # type: ignore[override]
        end = place.stop - 1 if isinstance(place, slice) else place
        self.furthest = max(self.furthest, end)
        return self.values[place]


def test_a_rule_sees_a_position_only_after_the_one_before_it_was_admitted() -> None:
    half = Fraction(1, 2)
    chains = [Guarded([half, 1, half]), Guarded([Fraction(3, 4), half, 1])]
    spy = Spy(lambda v: (v.request, v.position) in [(1, 1), (0, 1), (0, 2)])
    past = [(PastRound(3, 1),), ()]
    assert admit(spy, chains, Load(2, 5), past) == [2, 1]
    assert [(v.request, v.position) for v in spy.seen] == [(1, 1), (0, 1), (0, 2), (1, 2), (0, 3)]
    assert [v.survival for v in spy.seen] == [Fraction(3, 4), half, half, Fraction(3, 8), Fraction(1, 4)]
    assert [v.confidences for v in spy.seen][2:] == [(half, 1), (Fraction(3, 4), half), (half, 1, half)]
    assert [v.admitted for v in spy.seen] == [0, 1, 2, 3, 3]
    assert [v.expected for v in spy.seen] == [0, Fraction(3, 4), Fraction(5, 4), Fraction(7, 4), Fraction(7, 4)]
    assert [v.history for v in spy.seen] == [past[v.request] for v in spy.seen]
    assert {v.load for v in spy.seen} == {Load(2, 5)}
    assert [chain.furthest for chain in chains] == [2, 1]


def test_equal_survivals_are_tried_by_position_then_request() -> None:
    spy = Spy(lambda v: True)
    admit(spy, [[1.0, 1.0], [1.0, 1.0, 0.5], [1.0]], Load(3, 3))
    order = [(v.position, v.request) for v in spy.seen]
    assert order == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (3, 1)]


def test_what_a_rule_sees_cannot_be_changed_and_holds_no_draft() -> None:
    spy = Spy(lambda v: True)
    admit(spy, [[0.5]], ALONE)
    with pytest.raises(FrozenInstanceError):
        spy.seen[0].position = 2  # type: ignore[misc]
    assert not [name for name in Visible.__dataclass_fields__ if "token" in name or "draft" in name]
    assert isinstance(spy.seen[0].confidences, tuple)


def test_requests_without_drafts_get_none() -> None:
    assert admit(FixedBudget(5), [[], [0.5], []], Load(3, 3)) == [0, 1, 0]
    assert admit(FixedDepth(3), [], Load(0, 0)) == []


@pytest.mark.parametrize("wrong", [-0.1, 1.5, float("nan")])
def test_a_confidence_outside_its_range_is_named(wrong: float) -> None:
    with pytest.raises(ValueError, match="request 1, position 2"):
        admit(FixedDepth(3), [[0.5, 0.5], [0.5, wrong]], Load(2, 2))


CHAINS = st.lists(st.lists(st.integers(0, 8).map(lambda n: Fraction(n, 8)), max_size=4), min_size=1, max_size=3)


def algorithm_1(chains: list[list[Fraction]], curve: StepCurve) -> list[int]:
    """DSpark's own form: sort everything by survival, admit in order, stop at the first that does not improve."""
    slots = sorted(
        (-share, position, request)
        for request, chain in enumerate(chains)
        for position, share in enumerate(survivals(chain), start=1)
    )
    depths, tokens, rows = [0] * len(chains), Fraction(len(chains)), len(chains)
    best = tokens / curve.seconds(rows)
    for negative, position, request in slots:
        tokens, rows = tokens - negative, rows + 1
        if tokens / curve.seconds(rows) <= best:
            break
        best, depths[request] = tokens / curve.seconds(rows), position
    return depths


@settings(max_examples=80, deadline=None, derandomize=True)
@given(chains=CHAINS, steps=st.lists(st.integers(0, 6), min_size=16, max_size=16))
def test_early_stop_is_algorithm_one(chains: list[list[Fraction]], steps: list[int]) -> None:
    curve = StepCurve({rows: Fraction(20 + sum(steps[:rows])) for rows in range(1, 17)})
    assert admit(EarlyStop(curve), chains, Load(len(chains), len(chains))) == algorithm_1(chains, curve)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(chains=CHAINS, budget=st.integers(0, 12))
def test_a_fixed_budget_takes_the_best_survivals(chains: list[list[Fraction]], budget: int) -> None:
    depths = admit(FixedBudget(budget), chains, Load(len(chains), len(chains)))
    taken = sorted((s for c, d in zip(chains, depths, strict=True) for s in survivals(c)[:d]), reverse=True)
    best = sorted((s for c in chains for s in survivals(c)), reverse=True)
    assert taken == best[:budget]


# -- curves, budgets -------------------------------------------------------------------------------------------


def test_a_curve_goes_through_its_points_and_between_them() -> None:
    curve = StepCurve({4: Fraction(8), 2: Fraction(3), 10: Fraction(9)})
    assert [curve.seconds(rows) for rows in (1, 2, 3, 4, 7, 10)] == [3, 3, Fraction(11, 2), 8, Fraction(17, 2), 9]
    assert curve.seconds(20) == 18  # a row beyond the last point costs what its rows cost on average
    assert curve.steps_per_second(4) == Fraction(1, 8)


def test_a_curve_never_falls() -> None:
    curve = StepCurve({1: 5.0, 2: 4.0, 3: 3.0, 4: 9.0, 5: 8.0, 6: 10.0})
    assert [curve.seconds(rows) for rows in range(1, 7)] == [4, 4, 4, 8.5, 8.5, 10]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(points=st.dictionaries(st.integers(1, 30), st.fractions(Fraction(1, 10), 9), min_size=1, max_size=8))
def test_any_points_give_a_curve_that_never_falls(points: dict[int, Fraction]) -> None:
    curve = StepCurve(points)
    times = [curve.seconds(rows) for rows in range(1, 40)]
    assert times == sorted(times)
    assert min(points.values()) <= times[0]
    if list(dict(sorted(points.items())).values()) == sorted(points.values()):
        assert [curve.seconds(rows) for rows in points] == list(points.values())


@pytest.mark.parametrize("points", [{}, {0: 1.0}, {1: 0.0}, {1: -1.0}, {1: float("nan")}])
def test_a_curve_of_nonsense_is_refused(points: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="step curve"):
        StepCurve(points)


def test_expected_tokens_counts_the_token_that_always_comes() -> None:
    assert survivals([Fraction(1, 2), Fraction(1, 2), 1]) == [Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)]
    assert expected_tokens(survivals([Fraction(1, 2), Fraction(1, 2)])) == Fraction(7, 4)
    assert expected_tokens([]) == 1


@settings(max_examples=80, deadline=None, derandomize=True)
@given(chains=CHAINS, steps=st.lists(st.integers(0, 6), min_size=20, max_size=20), rest=st.integers(0, 3),
       asking=st.integers(0, 9))  # fmt: skip
def test_best_budget_is_the_best(chains: list[list[Fraction]], steps: list[int], rest: int, asking: int) -> None:
    curve = StepCurve({rows: Fraction(20 + sum(steps[:rows])) for rows in range(1, 21)})
    load = Load(len(chains), len(chains) + rest)
    every = [survivals(chain) for chain in chains]
    ranked = sorted((s for chain in every for s in chain), reverse=True)
    speeds = [
        (load.requests + sum(ranked[:k])) / (curve.seconds(load.rows + k) + (asking if k else 0))
        for k in range(len(ranked) + 1)
    ]
    assert best_budget(every, load, curve, asking) == speeds.index(max(speeds))


def test_a_cost_of_asking_can_make_no_draft_the_best() -> None:
    curve = StepCurve({1: 10.0, 2: 10.0})
    assert best_budget([[0.5]], ALONE, curve) == 1
    assert best_budget([[0.5]], ALONE, curve, draft_seconds=5.1) == 0
