"""Target rows and rounds over shards equal the whole row's, token for token; and the exact joint law of all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark import oracle, processors, verify
from dspark.collectives import Group, GroupError, LocalGroup
from dspark.draft_shards import dense_part, draw_dense
from dspark.dyadic import Float32s, Int64s, Row, RowError, RowFault, greedy_row, sparse_row
from dspark.logit_edits import LogitEdits, first_state
from dspark.oracle import Prefix
from dspark.philox import Domain, Keys
from dspark.processors import LogitsError, SamplingPolicy, target_row
from dspark.proof.toys import MEDIUM, SMALL, Case, Toy, joint_law
from dspark.target_shards import (
    Shards,
    greedy_token,
    pick,
    pick_residual,
    sample_target_only,
    target_part,
    ticket_of,
    verify_ratio,
)
from dspark.tickets import STANDARD, TOTAL, Grid, ResidualIdentityError, TicketError, residual
from dspark.tickets import pick as whole_pick
from dspark.verify import Draws, Kind, Verdict

INF = np.inf
COIN = 1 << 64


def row(*logits: float) -> Float32s:
    return np.array(logits, dtype=np.float32)


def random_row(seed: int, size: int, scale: float = 3.0) -> Float32s:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def own(group: Group, shards: Shards, whole: np.ndarray) -> np.ndarray:
    """This rank's range of a whole row."""
    return whole[shards.bounds[group.rank] : shards.bounds[group.rank + 1]]


def on_shards(shards: Shards, work: Callable[[Group], object]) -> list:
    return LocalGroup(len(shards.bounds) - 1).run(work)


def agreed(shards: Shards, work: Callable[[Group], object]) -> object:
    """What all ranks arrived at."""
    outcomes = on_shards(shards, work)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    return outcomes[0]


def refusals(shards: Shards, work: Callable[[Group], object], kind: type[BaseException]) -> None:
    """All ranks refuse with the same kind of error."""
    with pytest.raises(GroupError) as caught:
        on_shards(shards, work)
    assert [type(error) for error in caught.value.failures.values()] == [kind] * (len(shards.bounds) - 1)


# --- shards ------------------------------------------------------------------------------------------------


def test_every_token_has_the_owner_that_holds_it() -> None:
    shards = Shards((0, 0, 3, 3, 5))
    assert [shards.owner(token) for token in range(5)] == [1, 1, 1, 3, 3]
    assert all(token in shards.of(shards.owner(token)) for token in range(5))
    for outside in (-1, 5):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            shards.owner(outside)


def test_even_shards_cover_the_vocabulary() -> None:
    assert Shards.even(129_280, 2).bounds == (0, 64_640, 129_280)
    assert Shards.even(7, 3).bounds == (0, 2, 4, 7)
    assert Shards.even(2, 4).bounds == (0, 0, 1, 1, 2)


@pytest.mark.parametrize("bounds", [(), (0,), (1, 2), (0, 3, 2)])
def test_bounds_that_are_no_split_are_refused(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must ascend from 0"):
        Shards(bounds)


# --- rows --------------------------------------------------------------------------------------------------

ADVERSARIAL: dict[str, tuple[Float32s, Shards]] = {
    "one rank": (random_row(1, 9), Shards((0, 9))),
    "ties across the boundary": (row(1, 2, 2, 2, 2, 1), Shards((0, 3, 6))),
    "all equal": (row(*[0.5] * 7), Shards((0, 2, 5, 7))),
    "the maximum ties over three shards": (row(0, 3, 1, 3, 1, 3), Shards((0, 1, 4, 6))),
    "first shard masked": (row(-INF, -INF, 1, 0, 2), Shards((0, 2, 5))),
    "last shard masked": (row(1, 0, 2, -INF, -INF), Shards((0, 3, 5))),
    "middle shard masked": (row(1, -INF, -INF, 0), Shards((0, 1, 3, 4))),
    "first shard empty": (row(1, 0, 2), Shards((0, 0, 3))),
    "two shards empty": (row(1, 0, 2, 1), Shards((0, 0, 2, 2, 4))),
    "single token": (row(-INF, -INF, 4, -INF), Shards((0, 2, 4))),
    "one token each": (row(0, 1, 0, 1), Shards((0, 1, 2, 3, 4))),
    "odd length": (random_row(2, 131), Shards((0, 65, 131))),
    "lopsided": (random_row(3, 300), Shards((0, 1, 299, 300))),
    "flat": (random_row(4, 500, 1e-4), Shards((0, 125, 250, 375, 500))),
    "far apart": (random_row(5, 400, 60.0), Shards((0, 150, 400))),
    "larger than a leaf of the sum": (random_row(6, 5000, 2.0), Shards((0, 1111, 3333, 5000))),
    "weights tie where logits do not": (row(-1e-20, 0, -2e-20, 1e-20), Shards((0, 1, 3, 4))),
    "beyond every temperature": (row(-3e38, 3e38, 3e38, -3e38), Shards((0, 2, 4))),
}
POLICIES = [
    SamplingPolicy(),
    SamplingPolicy(0.0),
    SamplingPolicy(0.7),
    SamplingPolicy(1e-300),
    SamplingPolicy(1.3, 1),
    SamplingPolicy(1.3, 3),
    SamplingPolicy(1.3, 400),
    SamplingPolicy(0.9, 0, 0.0),
    SamplingPolicy(0.9, 0, 0.5),
    SamplingPolicy(0.9, 0, 0.999999),
    SamplingPolicy(1.0, 40, 0.6),
    SamplingPolicy(0.8, 0, 1.0, 0.1),
    SamplingPolicy(0.8, 3, 0.9, 0.05),
    SamplingPolicy(1.0, 0, 1.0, 1.0),
]
CASES = pytest.mark.parametrize(("logits", "shards"), ADVERSARIAL.values(), ids=ADVERSARIAL.keys())


def joined_row(logits: Float32s, shards: Shards, policy: SamplingPolicy) -> list[int]:
    parts = on_shards(shards, lambda group: target_part(group, shards, own(group, shards, logits), policy))
    return np.concatenate(parts).tolist()


@CASES
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_row_equals_the_whole_row(logits: Float32s, shards: Shards, policy: SamplingPolicy) -> None:
    assert joined_row(logits, shards, policy) == target_row(logits, policy).tolist()


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    logits=st.lists(st.sampled_from([-INF, -3.0, 0.0, 0.5]) | st.floats(-9, 9, width=32), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=3),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 60]),
    top_p=st.just(1.0) | st.floats(0, 1),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
)
def test_row_equals_the_whole_row_under_any_split(
    logits: list[float], cuts: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits[0] = max(logits[0], -3.0)
    shards = Shards((0, *sorted(min(cut, len(logits)) for cut in cuts), len(logits)))
    policy = SamplingPolicy(temperature, top_k, top_p, min_p)
    assert joined_row(row(*logits), shards, policy) == target_row(row(*logits), policy).tolist()


def turning_point(logits: Float32s, kept: int) -> tuple[float, float]:
    """Neighbouring values of top_p: the whole row keeps at most ``kept`` tokens at the first, more at the second."""
    low, high = 0.0, 1.0
    while np.nextafter(low, 1) < high:
        middle = (low + high) / 2
        survivors = np.count_nonzero(processors.process(logits, SamplingPolicy(1.0, 0, middle)) > -INF)
        low, high = (middle, high) if survivors <= kept else (low, middle)
    return low, high


@pytest.mark.parametrize(("size", "scale"), [(2000, 0.05), (2000, 0.3), (700, 0.02), (700, 0.001), (700, 4.0)])
def test_top_p_turns_at_the_same_bit_as_in_the_whole_row(size: int, scale: float) -> None:
    """There the last bit of a sum decides: bucket sums of the ranks must round as those of the whole row."""
    logits, shards = random_row(8, size, scale), Shards((0, size // 3, size // 3 + 1, size))
    for kept in range(size // 20, size, size // 8):
        for top_p in turning_point(logits, kept):
            policy = SamplingPolicy(1.0, 0, top_p)
            assert joined_row(logits, shards, policy) == target_row(logits, policy).tolist()


@pytest.mark.parametrize("seed", [1, 2, 3, 5, 8])
def test_top_p_just_below_one(seed: int) -> None:
    """The largest top_p that is not off; for most of these seeds no prefix of the bucket sums reaches it."""
    logits, policy = random_row(seed, 50, 1.0), SamplingPolicy(1.0, 0, float(np.nextafter(1, 0)))
    for bounds in [(0, 50), (0, 13, 50), (0, 1, 49, 49, 50)]:
        assert joined_row(logits, Shards(bounds), policy) == target_row(logits, policy).tolist()


def test_every_processor_is_accounted_for() -> None:
    """A field that is added to the policy must be implemented for shards too, or p would differ in silence."""
    assert {each.name for each in fields(SamplingPolicy)} == {"temperature", "top_k", "top_p", "min_p"}


EDITS = LogitEdits(
    logit_bias={1: 3.0, 30: -2.5},
    presence_penalty=0.4,
    frequency_penalty=0.3,
    repetition_penalty=1.3,
    bad_words=((7,), (12, 13)),
    allowed_token_ids=tuple(range(0, 38)),
)


@pytest.mark.parametrize("policy", [SamplingPolicy(0.0), SamplingPolicy(0.8), SamplingPolicy(1.0, 5, 0.9)], ids=str)
@pytest.mark.parametrize("bounds", [(0, 40), (0, 13, 40), (0, 13, 13, 38, 40)])
def test_edited_row_equals_the_whole_row(policy: SamplingPolicy, bounds: tuple[int, ...]) -> None:
    shards, logits = Shards(bounds), random_row(12, 40)
    state = first_state(EDITS, [2, 3, 20, 39], 40)
    assert state is not None
    for token in (20, 20, 5, 12):
        state = state.after(token)
    parts = on_shards(shards, lambda group: target_part(group, shards, own(group, shards, logits), policy, state))
    assert np.concatenate(parts).tolist() == target_row(logits, policy, state).tolist()
    token = agreed(shards, lambda group: greedy_token(group, shards, own(group, shards, logits), state))
    assert token == processors.greedy_token(logits, state)


def test_a_ban_does_not_hide_a_failed_forward_pass() -> None:
    shards, logits = Shards((0, 2, 4)), row(0, 1, np.nan, 2)
    state = first_state(LogitEdits(allowed_token_ids=(0, 1)), [], 4)
    refusals(
        shards,
        lambda group: target_part(group, shards, own(group, shards, logits), SamplingPolicy(), state),
        LogitsError,
    )


@CASES
def test_greedy_token_is_the_lowest_maximum(logits: Float32s, shards: Shards) -> None:
    token = agreed(shards, lambda group: greedy_token(group, shards, own(group, shards, logits)))
    assert token == processors.greedy_token(logits)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_full_vocabulary(size: int) -> None:
    logits = random_row(9, 129_280, 2.0)
    logits[[64_639, 64_640]] = logits.max()
    shards = Shards((0, *(64_640 + step for step in range(size - 1)), 129_280))
    for policy in (SamplingPolicy(0.9), SamplingPolicy(1.0, 0, 0.9)):
        assert joined_row(logits, shards, policy) == target_row(logits, policy).tolist()


@pytest.mark.parametrize("policy", [SamplingPolicy(), SamplingPolicy(0.0), SamplingPolicy(1.0, 2, 0.5)], ids=str)
@pytest.mark.parametrize("logits", [row(0, 1, np.nan, 3), row(INF, 0, 0, 0), row(-INF, -INF, -INF, -INF)])
@pytest.mark.parametrize("bounds", [(0, 1, 4), (0, 4, 4), (0, 1, 2, 3, 4)])
def test_logits_without_a_distribution_are_refused_on_all_ranks(
    logits: Float32s, policy: SamplingPolicy, bounds: tuple[int, ...]
) -> None:
    shards = Shards(bounds)
    refusals(shards, lambda group: target_part(group, shards, own(group, shards, logits), policy), LogitsError)


def test_a_wrong_normaliser_is_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from dspark import target_shards

    exact = target_shards.split_sum
    monkeypatch.setattr(target_shards, "split_sum", lambda group, part: exact(group, part) * (1 + 2.0**-30))
    shards, logits = Shards((0, 2, 4)), row(0, 1, 2, 3)
    refusals(
        shards, lambda group: target_part(group, shards, own(group, shards, logits), SamplingPolicy()), TicketError
    )


def test_logits_of_another_rank_are_refused() -> None:
    shards = Shards((0, 1, 4))
    with pytest.raises(GroupError, match=r"rank 0 has logits \[2\] for ids 0..0"):
        on_shards(shards, lambda group: target_part(group, shards, row(0, 1), SamplingPolicy()))


# --- rounds ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """Whole target rows, a proposal, and what the whole path makes of it."""

    shards: Shards
    target: list[Int64s]
    rows: list[Row]
    tokens: list[int]
    keys: Draws

    def verdict(self) -> Verdict:
        return verify.verify_ratio(self.target.__getitem__, self.rows, self.tokens, 49, self.keys)

    def verdict_of_ranks(self) -> object:
        def work(group: Group) -> Verdict:
            parts = [own(group, self.shards, whole) for whole in self.target]
            return verify_ratio(group, self.shards, parts.__getitem__, self.rows, self.tokens, 49, self.keys)

        return agreed(self.shards, work)


def make_round(seed: int, vocab: int, depth: int, bounds: tuple[int, ...]) -> Round:
    """Drafts near the target, so that all of acceptance, correction and bonus happen; masked tokens everywhere."""
    rng = np.random.default_rng(seed)
    policy = SamplingPolicy(float(rng.choice([0.0, 0.7, 1.0])), int(rng.choice([0, 3])), float(rng.choice([1.0, 0.9])))
    logits = (rng.standard_normal((depth + 1, vocab)) * 2).astype(np.float32)
    drafts = logits[:depth] + rng.standard_normal((depth, vocab)).astype(np.float32)
    if rng.random() < 0.5:
        cut = int(rng.integers(1, vocab))
        logits[:, :cut] = -INF
    rows = [sparse_row(draft, None, float(rng.choice([0.0, 1.0])), 4) for draft in drafts]
    tokens = [int(rng.choice(drafted.ids)) for drafted in rows]
    return Round(Shards(bounds), [target_row(own, policy) for own in logits], rows, tokens, Keys(seed, 0, 1))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([2, 3, 17, 131]),
    depth=st.integers(0, 5),
    shares=st.lists(st.floats(0, 1), max_size=3),
)
def test_round_equals_the_whole_round(seed: int, vocab: int, depth: int, shares: list[float]) -> None:
    case = make_round(seed, vocab, depth, (0, *sorted(int(share * vocab) for share in shares), vocab))
    assert case.verdict_of_ranks() == case.verdict()


def test_rounds_of_the_tests_end_in_every_way() -> None:
    verdicts = [make_round(seed, 17, 3, (0, 17)).verdict() for seed in range(60)]
    assert {(verdict.accepted, verdict.kind) for verdict in verdicts} >= {
        (0, Kind.CORRECTION),
        (1, Kind.CORRECTION),
        (3, Kind.BONUS),
    }


@pytest.mark.parametrize("token", [63, 64, 65, 0, 130])
def test_drafted_tokens_at_the_shard_edge(token: int) -> None:
    """Certain, impossible and even drafts on both sides of a boundary, and at both ends."""
    shards, certain = Shards((0, 64, 64, 131)), np.zeros(131, dtype=np.int64)
    certain[token] = TOTAL
    flat = target_row(np.zeros(131, dtype=np.float32), SamplingPolicy())
    other = np.roll(certain, 1)
    for first in (certain, flat, other):
        for coin in (0, COIN // 200, COIN - 1):
            case = Round(shards, [first, other], [greedy_row(token)], [token], Constant(coin))
            assert case.verdict_of_ranks() == case.verdict()


@dataclass(frozen=True)
class Constant:
    """The same integer for every use."""

    value: int

    def draw64(self, domain: Domain, position: int) -> int:
        return self.value


def test_ticket_of_every_token_on_all_ranks() -> None:
    shards, whole = Shards((0, 2, 2, 5)), np.array([5, 0, 7, 1, TOTAL - 13])
    for token in range(5):
        ticket = agreed(shards, lambda group, token=token: ticket_of(group, shards, own(group, shards, whole), token))
        assert ticket == whole[token]


@pytest.mark.parametrize("seed", range(4))
def test_choice_equals_the_whole_choice_at_every_step_of_the_cdf(seed: int) -> None:
    case = make_round(seed, 29, 1, (0, 9, 9, 20, 29))
    tickets, drafted = case.target[0], case.rows[0]
    left = residual(tickets, drafted)
    for masses, by_residual in ((tickets, False), (left, True)):
        total = int(masses.sum())
        if total == 0:
            continue
        edges = {-(-edge * COIN // total) + step for edge in masses.cumsum().tolist() for step in (-1, 0, 1)}
        coins = [coin for coin in sorted(edges) if 0 <= coin < COIN]

        def work(group: Group, coins: list[int] = coins, by_residual: bool = by_residual) -> list[int]:
            part = own(group, case.shards, tickets)
            if by_residual:
                return [pick_residual(group, case.shards, part, drafted, coin) for coin in coins]
            return [pick(group, case.shards, part, coin) for coin in coins]

        assert agreed(case.shards, work) == [whole_pick(masses, coin) for coin in coins]


@pytest.mark.parametrize("masses", [[0, 0, 3, 1], [3, 1, 0, 0], [0, 2, 2, 0], [0, 0, 0, 4]])
def test_shards_and_tokens_without_mass_are_unreachable(masses: list[int]) -> None:
    shards, grid, whole = Shards((0, 2, 2, 4)), Grid(2, 4, 4), np.array(masses)
    picks = agreed(
        shards, lambda group: [pick(group, shards, own(group, shards, whole), coin, grid) for coin in range(4)]
    )
    assert picks == np.repeat(np.arange(4), masses).tolist()


def test_nothing_to_pick_is_refused_on_all_ranks() -> None:
    shards, nothing = Shards((0, 1, 3)), np.zeros(3, dtype=np.int64)
    refusals(shards, lambda group: pick(group, shards, own(group, shards, nothing), 5), TicketError)


@pytest.mark.parametrize("place", [0, 2, 3])
@pytest.mark.parametrize("delta", [-1, 1])
def test_one_ticket_too_many_or_too_few_is_caught_on_all_ranks(place: int, delta: int) -> None:
    shards = Shards((0, 2, 4))
    broken = target_row(row(0, 1, 0, 2), SamplingPolicy())
    broken[place] += delta
    drafted = sparse_row(row(1, 0, 0, 0), None, 1.0, 2)
    refusals(
        shards,
        lambda group: pick_residual(group, shards, own(group, shards, broken), drafted, 7),
        ResidualIdentityError,
    )


def test_proposals_that_are_none_are_refused_on_all_ranks() -> None:
    shards, tickets = Shards((0, 2, 5)), target_row(row(0, 1, 0, 2, 0), SamplingPolicy())

    def judged(rows: list[Row], tokens: list[int]) -> Callable[[Group], object]:
        return lambda group: verify_ratio(
            group, shards, lambda _: own(group, shards, tickets), rows, tokens, 7, Keys(1, 0, 1)
        )

    with pytest.raises(GroupError) as caught:
        on_shards(shards, judged([greedy_row(1)], [4]))
    errors = list(caught.value.failures.values())
    assert [error.code for error in errors if isinstance(error, RowError)] == [RowFault.ZERO_AT_TOKEN] * 2
    refusals(shards, judged([greedy_row(1)], []), ValueError)
    refusals(shards, judged([greedy_row(9)], [9]), ValueError)


def test_target_only_equals_the_whole_row() -> None:
    shards, tickets = Shards((0, 2, 5)), target_row(row(0, 1, 0, 2, 0), SamplingPolicy())
    for seed in range(8):
        keys = Keys(seed, 0, 1)
        token = agreed(
            shards,
            lambda group, keys=keys: sample_target_only(group, shards, own(group, shards, tickets), 42, keys),
        )
        assert token == verify.sample_target_only(tickets, 42, keys)


class Recorder:
    """Draws that remember what was asked."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.asked: list[tuple[Domain, int]] = []

    def draw64(self, domain: Domain, position: int) -> int:
        self.asked.append((domain, position))
        return self.value


@pytest.mark.parametrize("coin", [0, COIN - 1])
def test_every_rank_asks_for_the_same_draws_as_the_whole_round(coin: int) -> None:
    case = make_round(3, 17, 3, (0, 8, 17))
    whole = Recorder(coin)
    verify.verify_ratio(case.target.__getitem__, case.rows, case.tokens, 49, whole)

    def work(group: Group) -> list[tuple[Domain, int]]:
        mine = Recorder(coin)
        parts = [own(group, case.shards, tickets) for tickets in case.target]
        verify_ratio(group, case.shards, parts.__getitem__, case.rows, case.tokens, 49, mine)
        return mine.asked

    assert agreed(case.shards, work) == whole.asked


# --- the joint law -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardedToy(Toy):
    """A toy whose proposal rows are made by shards: dense, ticket by ticket of the small mass."""

    shards: Shards = field(default_factory=lambda: Shards((0, 1, 3)))

    def draft(self, prefix: Prefix) -> Row:
        return _drafted(self, prefix)


@cache
def _drafted(toy: ShardedToy, prefix: Prefix) -> Row:
    """The law of the sharded draw, found by drawing every uniform."""
    logits = toy.draft_logits(prefix)
    ids = np.arange(toy.vocab, dtype=np.int32)

    def work(group: Group) -> list[int]:
        part = dense_part(
            group,
            own(group, toy.shards, logits),
            own(group, toy.shards, ids),
            toy.draft_temperature,
            toy.grid.mass,
        )
        return [draw_dense(group, part, uniform) for uniform in range(toy.grid.mass)]

    drawn, counts = np.unique(agreed(toy.shards, work), return_counts=True)
    return Row(drawn.astype(np.int32), counts)


def sharded_step(group: Group, toy: ShardedToy) -> Callable[[Case, Draws], Verdict]:
    """The verification step of one rank; its target rows are made by shards too."""

    @cache
    def part(prefix: Prefix) -> Int64s:
        logits = own(group, toy.shards, toy.target_logits(prefix))
        return target_part(group, toy.shards, logits, toy.policy, total=toy.grid.total)

    def step(case: Case, draws: Draws) -> Verdict:
        def tickets_at(index: int) -> Int64s:
            return part(case.prefix + case.tokens[:index])

        return verify_ratio(
            group, toy.shards, tickets_at, case.rows, case.tokens, case.anchor_position, draws, case.grid
        )

    return step


TOYS = [
    (ShardedToy("two shards", MEDIUM), 1, 2),
    (ShardedToy("depth two", SMALL), 2, 2),
    (ShardedToy("a shard is empty", SMALL, shards=Shards((0, 2, 2, 3))), 1, 2),
    (ShardedToy("one token each", SMALL, vocab=4, shards=Shards((0, 1, 2, 3, 4))), 1, 2),
    (ShardedToy("top-k target", SMALL, vocab=4, policy=SamplingPolicy(top_k=2), shards=Shards((0, 2, 4))), 1, 2),
    (ShardedToy("top-p target", SMALL, policy=SamplingPolicy(0.8, 0, 0.7)), 1, 2),
    (ShardedToy("temperature 0 target", MEDIUM, policy=SamplingPolicy(0.0)), 1, 2),
]


@pytest.mark.parametrize(("toy", "depth", "length"), TOYS, ids=lambda value: getattr(value, "name", ""))
def test_joint_law_of_sharded_drafting_and_sharded_verification(toy: ShardedToy, depth: int, length: int) -> None:
    """Every rank explores all draws in step with the others; all find the target's law, with ``==``."""
    laws = on_shards(toy.shards, lambda group: joint_law(toy, depth, length, sharded_step(group, toy)))
    assert laws == [oracle.ancestral_law(toy.p, length)] * (len(toy.shards.bounds) - 1)


def test_every_ticket_and_coin_of_a_round() -> None:
    """M=16, N=64: acceptance and correction over all coins of the grid, by counting and not by intervals."""
    toy = ShardedToy("all coins", Grid(16, 64, 64))
    case = Case(toy, (), (toy.draft(()),), (0,))

    def work(group: Group) -> list[tuple[int, int]]:
        step = sharded_step(group, toy)
        return [(v.accepted, v.token) for v in (step(case, Constant(coin)) for coin in range(64))]

    wanted = [
        (v.accepted, v.token)
        for v in (
            verify.verify_ratio(case.tickets_at, case.rows, case.tokens, case.anchor_position, Constant(coin), toy.grid)
            for coin in range(64)
        )
    ]
    assert agreed(toy.shards, work) == wanted
    assert {accepted for accepted, _ in wanted} == {0, 1}


def test_the_cases_are_what_they_claim() -> None:
    assert {len(shards.bounds) - 1 for _, shards in ADVERSARIAL.values()} == {1, 2, 3, 4}
    assert all(shards.vocab == logits.size for logits, shards in ADVERSARIAL.values())
    logits = ADVERSARIAL["weights tie where logits do not"][0]
    assert target_row(logits, SamplingPolicy()).argmax() == 0 != logits.argmax()
    assert STANDARD.total == TOTAL
    for toy, _, _ in TOYS:
        assert any(q == 0 < p or q > p for p, q in zip(toy.p(()), toy.q(()), strict=True))
        assert sum(toy.p(())) == sum(toy.q(())) == Fraction(1)
