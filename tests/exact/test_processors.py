"""Target processors against the oracle: edits, order, ties, survivors, temperature 0, and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark import oracle
from dspark.grammar import GrammarError, TokenAutomaton
from dspark.logit_edits import BlockStates, EditState, LogitEdits, first_state
from dspark.processors import LogitsError, PolicyError, SamplingPolicy, greedy_token, process, target_row
from dspark.tickets import TOTAL, target_tickets


def survivors(logits: np.ndarray, policy: SamplingPolicy, state: EditState | None = None) -> list[int]:
    return np.flatnonzero(process(logits, policy, state) > -np.inf).tolist()


def state_of(edits: LogitEdits, prompt: Sequence[int], generated: Sequence[int], vocab: int) -> EditState:
    """The state behind a text, one token after another."""
    state = first_state(edits, prompt, vocab)
    assert state is not None
    for token in generated:
        state = state.after(token)
    return state


def float32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


LOGITS = st.lists(st.integers(-8, 4), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(logits=LOGITS, top_k=st.integers(1, 45))
def test_top_k_equals_the_oracle(logits: list[int], top_k: int) -> None:
    kept = survivors(np.array(logits, dtype=np.float32), SamplingPolicy(0.7, top_k))
    assert kept == oracle.top_indices([Fraction(value) for value in logits], top_k)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(logits=LOGITS, top_k=st.sampled_from([0, 1, 5]), top_p=st.floats(0, 0.999))
def test_top_p_after_top_k_equals_the_oracle(logits: list[int], top_k: int, top_p: float) -> None:
    """Small integer logits tie often; shares of e**integer sums stay clear of a random top_p."""
    policy = SamplingPolicy(1.0, top_k, top_p)
    row = np.array(logits, dtype=np.float32)
    weights = [Fraction(weight) for weight in np.exp(row - row.max(), dtype=np.float64).tolist()]
    if top_k:
        weights = oracle.keep(weights, oracle.top_indices(weights, top_k))
    assert survivors(row, policy) == oracle.nucleus(weights, Fraction(top_p))


@pytest.mark.parametrize("scale", [0.5, 3.0, 10.0])
def test_top_p_equals_a_full_sort_on_a_long_row(scale: float) -> None:
    logits = (np.random.default_rng(1).standard_normal(20_000) * scale).astype(np.float32)
    weights = np.exp(logits.astype(np.float64) - logits.max())
    ranked = np.argsort(-logits, kind="stable")
    reached = weights[ranked].cumsum() / weights.sum()
    for top_p in (0.0, 0.3, 0.95, 0.9999):
        wanted = ranked[: int(np.searchsorted(reached, top_p)) + 1]
        assert survivors(logits, SamplingPolicy(1.0, 0, top_p)) == sorted(wanted.tolist())


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.0, [1]), (0.25, [1]), (0.26, [1, 2]), (0.5, [1, 2]), (0.75, [1, 2, 3]), (0.76, [1, 2, 3, 5])],
)
def test_top_p_keeps_equal_tokens_by_ascending_id(top_p: float, kept: list[int]) -> None:
    logits = np.full(7, -np.inf, dtype=np.float32)
    logits[[1, 2, 3, 5]] = 2.0
    assert survivors(logits, SamplingPolicy(1.0, 0, top_p)) == kept


def test_temperature_comes_before_top_p() -> None:
    logits = np.array([2.0, 1.0, 0.0], dtype=np.float32)
    assert survivors(logits, SamplingPolicy(1.0, 0, 0.9)) == [0, 1]
    assert survivors(logits, SamplingPolicy(0.25, 0, 0.9)) == [0]
    assert survivors(logits, SamplingPolicy(8.0, 0, 0.9)) == [0, 1, 2]


def test_processed_logits_are_scaled_and_shifted() -> None:
    logits = np.array([1.0, 3.0, 2.0], dtype=np.float32)
    assert process(logits, SamplingPolicy(0.5, 2)).tolist() == [-np.inf, 0.0, -2.0]


@pytest.mark.parametrize(
    "policy",
    [
        SamplingPolicy(),
        SamplingPolicy(0.7),
        SamplingPolicy(1.3, 40),
        SamplingPolicy(0.9, 0, 0.8),
        SamplingPolicy(1.0, 50, 0.5),
        SamplingPolicy(0.0),
        SamplingPolicy(0.0, 5, 0.5),
        SamplingPolicy(0.7, 50, 0.9, min_p=0.05),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("edited", [False, True])
def test_row_is_the_tickets_of_the_processed_logits(policy: SamplingPolicy, masked: bool, edited: bool) -> None:
    logits = (np.random.default_rng(9).standard_normal(3000) * 3).astype(np.float32)
    if masked:
        logits[5:900] = -np.inf
    best = int(logits.argmax())
    state = None
    if edited:
        edits = LogitEdits({best: -3.0, 1: 2.0}, 0.5, 0.25, 1.3, bad_words=((7, 8),))
        state = state_of(edits, [1, 2, best], [best, 7], 3000)
    row = target_row(logits, policy, state)
    assert row.tolist() == target_tickets(process(logits, policy, state)).tolist()
    assert int(row.sum()) == TOTAL
    if edited:
        assert row.tolist() != target_row(logits, policy).tolist()


def test_temperature_zero_is_one_hot_at_the_lowest_maximum() -> None:
    logits = np.array([1.0, 4.0, 4.0, 2.0], dtype=np.float32)
    policy = SamplingPolicy(temperature=0.0)
    assert target_row(logits, policy).tolist() == [0, TOTAL, 0, 0]
    assert survivors(logits, policy) == [1]


def test_a_tiny_temperature_neither_overflows_nor_loses_its_survivor() -> None:
    logits = np.array([3e38, -3e38], dtype=np.float32)
    assert target_row(logits, SamplingPolicy(1e-300)).tolist() == [TOTAL, 0]


@pytest.mark.parametrize(
    ("logits", "words"),
    [([0.0, np.nan], "NaN"), ([np.inf, 0.0], "inf"), ([-np.inf, -np.inf], "all tokens")],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_distribution_are_refused(
    logits: list[float], words: str, temperature: float
) -> None:
    row = np.array(logits, dtype=np.float32)
    state = state_of(LogitEdits(allowed_token_ids=(0,), logit_bias={0: 1.0}), [], [], 2)
    for make in (process, target_row):
        with pytest.raises(LogitsError, match=words):
            make(row, SamplingPolicy(temperature))
        with pytest.raises(LogitsError, match=words):
            make(row, SamplingPolicy(temperature), state)  # a mask does not hide the fault


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": np.nan}),
        ("temperature", {"temperature": np.inf}),
        ("top_k", {"top_k": -1}),
        ("top_p", {"top_p": -0.01}),
        ("top_p", {"top_p": 1.01}),
        ("top_p", {"top_p": np.nan}),
        ("min_p", {"min_p": -0.01}),
        ("min_p", {"min_p": 1.01}),
        ("min_p", {"min_p": np.nan}),
    ],
)
def test_policies_out_of_range_are_refused_by_name(field: str, values: dict[str, float]) -> None:
    with pytest.raises(PolicyError, match=field):
        SamplingPolicy(**values)  # type: ignore[arg-type]


# --- min_p and the truncation chain --------------------------------------------------------------------------


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    logits=LOGITS,
    min_p=st.sampled_from([0.0, 1.0]) | st.floats(0.0005, 0.9),
    top_k=st.sampled_from([0, 1, 2, 5]),
    top_p=st.sampled_from([1.0]) | st.floats(0, 0.999),
)
def test_min_p_then_top_k_then_top_p_equals_the_oracle(
    logits: list[int], min_p: float, top_k: int, top_p: float
) -> None:
    row = np.array(logits, dtype=np.float32)
    weights = [Fraction(weight) for weight in np.exp(row - row.max(), dtype=np.float64).tolist()]
    wanted = oracle.survivors(weights, Fraction(min_p), top_k, Fraction(top_p))
    assert survivors(row, SamplingPolicy(1.0, top_k, top_p, min_p)) == wanted


def test_min_p_is_a_share_of_the_largest_probability_after_temperature() -> None:
    logits = float32(3.0, 2.0, 1.0, 0.0)  # shares 1, 0.37, 0.14, 0.05
    assert survivors(logits, SamplingPolicy(1.0, min_p=0.3)) == [0, 1]
    assert survivors(logits, SamplingPolicy(2.0, min_p=0.3)) == [0, 1, 2]
    assert survivors(logits, SamplingPolicy(0.5, min_p=0.3)) == [0]
    assert survivors(float32(1.0, 3.0, 3.0), SamplingPolicy(1.0, min_p=1.0)) == [1, 2]


def test_top_p_sees_what_min_p_left() -> None:
    """Of 30 equal small tokens and two large ones, the small ones hold half the mass until min_p removes them."""
    logits = np.array([5.0, 4.9, *[2.1] * 30], dtype=np.float32)
    assert len(survivors(logits, SamplingPolicy(1.0, 0, 0.8))) > 2
    assert survivors(logits, SamplingPolicy(1.0, 0, 0.8, min_p=0.5)) == [0, 1]
    assert survivors(logits, SamplingPolicy(1.0, 0, 0.5, min_p=0.5)) == [0]


# --- edits against the oracle --------------------------------------------------------------------------------

VOCAB = 6
QUARTERS = st.integers(-12, 12).map(lambda n: Fraction(n, 4))
IDS = st.integers(0, VOCAB - 1)
RULES = st.builds(
    oracle.Rules,
    bias=st.dictionaries(IDS, QUARTERS, max_size=3),
    presence=st.sampled_from([Fraction(0), Fraction(1, 2), Fraction(-3, 4)]),
    frequency=st.sampled_from([Fraction(0), Fraction(1, 4), Fraction(-1, 2)]),
    repetition=st.sampled_from([Fraction(1), Fraction(2), Fraction(1, 4)]),
    min_tokens=st.integers(0, 4),
    endings=st.frozensets(IDS, max_size=2),
    bad_words=st.lists(st.lists(IDS, min_size=1, max_size=4).map(tuple), max_size=4).map(tuple),
    allowed=st.none() | st.frozensets(IDS, min_size=1),
)


def edits_of(rules: oracle.Rules, **more: Any) -> LogitEdits:
    """The same wishes as the request carries them."""
    return LogitEdits(
        {token: float(bias) for token, bias in rules.bias.items()},
        float(rules.presence),
        float(rules.frequency),
        float(rules.repetition),
        rules.min_tokens,
        tuple(rules.endings),
        rules.bad_words,
        None if rules.allowed is None else tuple(rules.allowed),
        **more,
    )


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    rules=RULES,
    logits=st.lists(QUARTERS, min_size=VOCAB, max_size=VOCAB),
    prompt=st.lists(IDS, max_size=4),
    generated=st.lists(IDS, max_size=7),
)
def test_edited_rows_equal_the_oracle(
    rules: oracle.Rules, logits: list[Fraction], prompt: list[int], generated: list[int]
) -> None:
    """Every value is a small multiple of a power of two: nothing rounds, so equality is exact."""
    wanted = oracle.edited(logits, tuple(prompt), tuple(generated), rules)
    row = np.array([float(logit) for logit in logits], dtype=np.float32)
    state = first_state(edits_of(rules), prompt, VOCAB)
    for token in generated:
        state = state.after(token) if state else None
    edited = row if state is None else state.edit(row)
    assert {t: Fraction(float(v)) for t, v in enumerate(edited) if v > -np.inf} == wanted
    if wanted:
        best = max(wanted.values())
        assert greedy_token(row, state) == min(t for t, v in wanted.items() if v == best)
    else:
        with pytest.raises(LogitsError, match="all tokens"):
            greedy_token(row, state)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rules=RULES, prompt=st.lists(IDS, max_size=4), text=st.lists(IDS, min_size=1, max_size=6), cut=st.integers(0, 5))
def test_a_state_never_changes_whatever_comes_after_it(
    rules: oracle.Rules, prompt: list[int], text: list[int], cut: int
) -> None:
    """The rollback: going on from an old state is all there is to it."""
    row = np.arange(VOCAB, dtype=np.float32)
    states = BlockStates(first_state(edits_of(rules), prompt, VOCAB), text)
    before = [None if (s := states.at(i)) is None else s.edit(row).tolist() for i in range(len(text) + 1)]
    fork = states.at(min(cut, len(text)))
    for token in range(VOCAB):
        fork = fork.after(token) if fork else None
    again = [None if (s := states.at(i)) is None else s.edit(row).tolist() for i in range(len(text) + 1)]
    assert again == before
    assert row.tolist() == list(range(VOCAB))


def test_penalties_by_hand() -> None:
    """Prompt 0 1, generated 1 2 2: repetition sees 0 1 2, frequency and presence only 1 2 2."""
    row = float32(4.0, 4.0, -4.0, 4.0)
    assert state_of(LogitEdits(repetition_penalty=2.0), [0, 1], [1, 2, 2], 4).edit(row).tolist() == [2, 2, -8, 4]
    assert state_of(LogitEdits(frequency_penalty=0.5), [0, 1], [1, 2, 2], 4).edit(row).tolist() == [4, 3.5, -5, 4]
    assert state_of(LogitEdits(presence_penalty=1.5), [0, 1], [1, 2, 2], 4).edit(row).tolist() == [4, 2.5, -5.5, 4]
    assert state_of(LogitEdits(presence_penalty=-1.0), [0, 1], [1], 4).edit(row).tolist() == [4, 5, -4, 4]


def test_bias_comes_before_the_repetition_penalty() -> None:
    state = state_of(LogitEdits({0: -6.0}, repetition_penalty=2.0), [0], [], 2)
    assert state.edit(float32(4.0, 4.0)).tolist() == [-4.0, 4.0]


def test_bans_come_before_min_p_top_k_and_temperature() -> None:
    """A banned maximum takes no part in anything."""
    state = state_of(LogitEdits(bad_words=((0,),)), [], [], 4)
    logits = float32(9.0, 2.0, 1.5, -3.0)
    assert survivors(logits, SamplingPolicy(1.0, min_p=0.5), state) == [1, 2]
    assert survivors(logits, SamplingPolicy(1.0, 2), state) == [1, 2]
    assert survivors(logits, SamplingPolicy(1.0, 0, 0.6), state) == [1]
    assert greedy_token(logits, state) == 1
    assert target_row(logits, SamplingPolicy(0.0), state).tolist() == [0, TOTAL, 0, 0]


def test_bad_words_ban_the_last_token_of_a_sequence_that_is_under_way() -> None:
    edits = LogitEdits(bad_words=((1, 2, 3), (2, 2), (0,)))

    def banned(*generated: int) -> list[int]:
        row = state_of(edits, [1, 2], generated, 4).edit(np.zeros(4, np.float32))
        return np.flatnonzero(row == -np.inf).tolist()

    assert banned() == [0]  # the prompt is not generated text
    assert banned(1) == [0]
    assert banned(1, 2) == [0, 2, 3]
    assert banned(1, 2, 0) == [0]
    assert banned(3, 1, 2) == [0, 2, 3]
    assert banned(2, 1) == [0]


def test_min_tokens_bans_endings_until_it_is_reached() -> None:
    edits = LogitEdits(min_tokens=2, ending_ids=(1, 3))
    row = np.zeros(4, np.float32)
    assert state_of(edits, [0, 0, 0], [], 4).edit(row).tolist() == [0, -np.inf, 0, -np.inf]
    assert state_of(edits, [], [0], 4).edit(row).tolist() == [0, -np.inf, 0, -np.inf]
    assert state_of(edits, [], [0, 0], 4).edit(row) is row


def test_a_row_that_nothing_applies_to_is_not_copied() -> None:
    row = np.zeros(8, np.float32)
    assert state_of(LogitEdits(presence_penalty=1.0), [1], [], 8).edit(row) is row
    assert state_of(LogitEdits(bad_words=((1, 2),)), [], [2], 8).edit(row) is row
    assert state_of(LogitEdits(bad_words=((1, 2),)), [], [1], 8).edit(row) is not row


def test_requests_that_ask_for_nothing_have_no_state() -> None:
    assert first_state(LogitEdits(), [1], 8) is None
    assert first_state(LogitEdits(ending_ids=(1, 2)), [1], 8) is None
    assert BlockStates(None, [1, 2]).at(2) is None


def test_penalties_beyond_fp32_are_refused() -> None:
    state = state_of(LogitEdits(repetition_penalty=1e-300), [0], [], 2)
    with pytest.raises(LogitsError, match="FP32"):
        target_row(float32(1.0, 2.0), SamplingPolicy(), state)
    banned = replace(state, grammar=TokenAutomaton([{1: 0}], 2))
    assert greedy_token(float32(1.0, 2.0), banned) == 1


# --- grammar -------------------------------------------------------------------------------------------------

# 0 opens, 1 closes, 2 is text, 3 ends the text when nothing is open.
BRACKETS = TokenAutomaton([{0: 1, 2: 0, 3: 2}, {0: 1, 1: 0, 2: 1}, {}], 4)


def test_grammar_masks_every_row_by_the_tokens_before_it() -> None:
    states = BlockStates(state_of(LogitEdits(grammar=BRACKETS), [1, 1], [], 4), [2, 0, 1, 3])
    logits = np.arange(4, dtype=np.float32)
    assert [survivors(logits, SamplingPolicy(), states.at(i)) for i in (3, 2, 1, 0)] == [
        [0, 2, 3],
        [0, 1, 2],
        [0, 2, 3],
        [0, 2, 3],
    ]
    with pytest.raises(LogitsError, match="all tokens"):
        target_row(logits, SamplingPolicy(), states.at(4))


def test_rows_before_a_draft_that_the_grammar_refuses_have_states() -> None:
    states = BlockStates(state_of(LogitEdits(grammar=BRACKETS), [], [], 4), [0, 3, 2])
    logits = np.arange(4, dtype=np.float32)
    assert target_row(logits, SamplingPolicy(), states.at(1))[3] == 0  # so the draft is rejected there
    with pytest.raises(GrammarError, match="token 3"):
        states.at(2)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("presence_penalty", {"presence_penalty": np.nan}),
        ("frequency_penalty", {"frequency_penalty": np.inf}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("repetition_penalty", {"repetition_penalty": np.nan}),
        ("logit_bias", {"logit_bias": {1: np.nan}}),
        ("logit_bias", {"logit_bias": {8: 1.0}}),
        ("min_tokens", {"min_tokens": -1}),
        ("ending_ids", {"min_tokens": 1, "ending_ids": (8,)}),
        ("bad_words", {"bad_words": ((1,), ())}),
        ("bad_words", {"bad_words": ((1, -1),)}),
        ("allowed_token_ids", {"allowed_token_ids": ()}),
        ("allowed_token_ids", {"allowed_token_ids": (1, 8)}),
        ("grammar", {"grammar": BRACKETS}),
    ],
)
def test_edits_out_of_range_are_refused_by_name(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match=field):
        first_state(LogitEdits(**values), [1], 8)
