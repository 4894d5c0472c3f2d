"""Tier 1 of edited rows: what `acceptance` commits for one sequence equals the oracle, round after round."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from dspark import oracle
from dspark.dyadic import MASS, Float32s, draw, sparse_row
from dspark.grammar import TokenAutomaton
from dspark.philox import Domain
from dspark.processors import LogitsError, process
from dspark.speculative import RejectionMethod
from dspark.tickets import STANDARD, TOTAL, target_tickets
from dspark_proto import Lane
from dspark_spark import acceptance
from dspark_spark.acceptance import judge, sample
from dspark_spark.api import GenerateRequest, SamplingParams
from dspark_spark.proposals import Proposal
from dspark_spark.sequence import Sequence, first_edits, sampling_policy
from dspark_spark.text import TextStream

VOCAB = 12
PROMPT = (3, 3, 7)
EOS = 11
DOMAINS = {"acceptance": Domain.ACCEPTANCE, "correction": Domain.CORRECTION, "bonus": Domain.BONUS}

# Residues modulo 3 go round: a token follows one whose residue is one less. State 0 is the beginning.
RESIDUES = TokenAutomaton(
    [
        {t: t % 3 + 1 for t in range(VOCAB) if state == 0 or t % 3 == state % 3}
        for state in range(4)
    ],
    VOCAB,
)


def residue_followers(text: oracle.Prefix) -> list[int]:
    return [t for t in range(VOCAB) if not text or t % 3 == (text[-1] + 1) % 3]


CASES: dict[str, tuple[dict[str, Any], oracle.Rules]] = {
    "penalties and bias": (
        {
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
            "repetition_penalty": 2.0,
            "logit_bias": {4: 1.25, 7: -2.0},
        },
        oracle.Rules({4: Fraction(5, 4), 7: Fraction(-2)}, Fraction(1, 2), Fraction(1, 4), Fraction(2)),
    ),
    "bans": (
        {"bad_words": ((5,), (1, 2), (2, 1, 1)), "min_tokens": 6, "allowed_token_ids": (0, 1, 2, 5, 6, EOS)},
        oracle.Rules(
            min_tokens=6,
            endings=frozenset({EOS}),
            bad_words=((5,), (1, 2), (2, 1, 1)),
            allowed=frozenset({0, 1, 2, 5, 6, EOS}),
        ),
    ),
    "grammar and frequency": (
        {"grammar": RESIDUES, "frequency_penalty": 0.75},
        oracle.Rules(frequency=Fraction(3, 4), grammar=residue_followers),
    ),
}


class Bytes:
    """No text: these tests look at ids."""

    def decode_bytes(self, token_ids: Tokens[int]) -> bytes:
        return b""


def new_sequence(seed: int = 0, **params: Any) -> Sequence:
    request = GenerateRequest("r", PROMPT, SamplingParams(max_tokens=500, **params))
    return Sequence(
        request=request,
        slot=0,
        policy=sampling_policy(request.params),
        text=TextStream(Bytes(), SamplingParams(max_tokens=500, ignore_eos=True), ()),
        seed=seed,
        tokens=list(PROMPT),
        context_limit=1000,
        edits=first_edits(request, (EOS,), VOCAB),
    )


def oracle_row(logits: Float32s, text: oracle.Prefix, rules: oracle.Rules) -> Float32s:
    """The edited row as float32[V]; a random quarter, and rules in powers of two, need no rounding."""
    row = np.full(VOCAB, -np.inf, dtype=np.float32)
    for token, logit in oracle.edited([Fraction(float(v)) for v in logits], PROMPT, text, rules).items():
        row[token] = logit
    return row


def quarters(rng: np.random.Generator, rows: int) -> Float32s:
    values: Float32s = (np.round(rng.standard_normal((rows, VOCAB)) * 8) / 4).astype(np.float32)
    return values


def propose(rng: np.random.Generator, sequence: Sequence, logits: Float32s, greedy: bool) -> Proposal:
    """Drafts near the unedited target, as a worker that knows nothing of the edits makes them."""
    noisy = logits + rng.standard_normal(logits.shape).astype(np.float32) * 0.5
    rows = [sparse_row(row, None, 0.0 if greedy else 1.0, 6) for row in noisy]
    first = sequence.anchor_position + 1
    tokens = [draw(row, sequence.keys().draw24(Domain.PROPOSAL, first + i)) for i, row in enumerate(rows)]
    return Proposal(tokens, rows)


RULES = {"standard": oracle.verify, "block": oracle.verify_block}


def wanted(
    sequence: Sequence,
    logits: Float32s,
    proposal: Proposal,
    text: oracle.Prefix,
    rules: oracle.Rules,
    method: RejectionMethod,
) -> tuple[int, int]:
    """The oracle's round. Rows behind a draft that p cannot give are never looked at; ones stand in for them."""
    tickets: list[list[int]] = []
    for index, row in enumerate(logits):
        text_here = text + tuple(proposal.tokens[:index])
        edited = oracle_row(row, text_here, rules)
        reachable = all(tickets[i][t] for i, t in enumerate(proposal.tokens[:index]))
        tickets.append(target_tickets(process(edited, sequence.policy)).tolist() if reachable else [1] * VOCAB)
    accepted, token, _ = RULES[method](
        tickets,
        [dict(zip(row.ids.tolist(), row.counts.tolist(), strict=True)) for row in proposal.rows],
        proposal.tokens,
        lambda kind, index: sequence.keys().draw64(DOMAINS[kind], sequence.anchor_position + 1 + index),
        MASS,
        TOTAL,
        STANDARD.coin,
    )
    return accepted, token


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("temperature", [0.0, 0.75, 1.5])
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("method", RULES)
def test_rounds_equal_the_oracle(case: str, temperature: float, truncated: bool, method: RejectionMethod) -> None:
    params, rules = CASES[case]
    chain = {"top_k": 6, "top_p": 0.9, "min_p": 0.05} if truncated else {}
    rng = np.random.default_rng(len(case))
    outcomes = set()
    for seed in range(6):
        sequence = new_sequence(seed, temperature=temperature, **params, **chain)
        for round_ in range(12):
            sequence.round = round_
            text = tuple(sequence.tokens[len(PROMPT) :])
            logits = quarters(rng, 4)
            proposal = propose(rng, sequence, logits[:3], temperature == 0)
            accepted, token = judge(sequence, torch.from_numpy(logits), proposal, method)
            assert (accepted, token) == wanted(sequence, logits, proposal, text, rules, method)
            assert sequence.tokens[len(PROMPT) :] == list(text)
            sequence.commit(proposal.tokens, accepted, token)
            outcomes.add(accepted)
    assert len(outcomes) > 1, "every round went the same way"


@pytest.mark.parametrize("case", CASES)
def test_steps_without_drafts_follow_the_same_rows(case: str) -> None:
    params, rules = CASES[case]
    rng = np.random.default_rng(5)
    sequence = new_sequence(temperature=0.0, **params)
    for _ in range(30):
        logits = quarters(rng, 1)
        edited = oracle_row(logits[0], tuple(sequence.tokens[len(PROMPT) :]), rules)
        token = sample(sequence, torch.from_numpy(logits))
        assert token == int(np.flatnonzero(edited == edited.max())[0])
        sequence.commit([], 0, token)


@pytest.mark.parametrize("case", CASES)
def test_match_lane_text_does_not_depend_on_drafts(case: str) -> None:
    """The same position noise over rows that are functions of the committed text: drafts change nothing but speed."""
    params, _ = CASES[case]

    def row(text: Tokens[int]) -> Float32s:
        values: Float32s = quarters(np.random.default_rng(list(text)), 1)[0]
        return values

    def text_of(depth: int) -> list[int]:
        sequence = new_sequence(17, temperature=1.25, **params)
        sequence.lane = Lane.MATCH
        rng = np.random.default_rng(depth)
        while len(sequence.tokens) < 40:
            text = sequence.tokens
            if depth == 0:
                sequence.commit([], 0, sample(sequence, torch.from_numpy(row(text)[None])))
                continue
            # Good drafts, so that whole blocks are accepted too: the answer itself, with a wrong token now and then.
            drafts = [t if rng.random() < 0.8 else int(rng.integers(VOCAB)) for t in plain[len(text) :][:depth]]
            logits = np.stack([row([*text, *drafts[:i]]) for i in range(len(drafts) + 1)])
            accepted, token = judge(sequence, torch.from_numpy(logits), Proposal(drafts, []))
            sequence.commit(drafts, accepted, token)
            longest.append(accepted)
        return sequence.tokens[:40]

    longest: list[int] = []
    plain = text_of(0)
    for depth in (1, 3, 5):
        assert text_of(depth) == plain
    assert max(longest) == 5


def test_a_draft_that_is_not_kept_leaves_no_count() -> None:
    sequence = new_sequence(temperature=0.0, frequency_penalty=1.0)
    logits = torch.zeros(3, VOCAB)
    logits[:, 5] = 0.5
    proposal = propose(np.random.default_rng(0), sequence, np.full((2, VOCAB), 0, np.float32), True)
    proposal = Proposal([5, 6], proposal.rows)
    assert judge(sequence, logits, proposal) == (1, 0)  # row 1 counts the drafted 5: 0.5 - 1 < 0
    assert judge(sequence, logits, proposal) == (1, 0)  # judged again: nothing was left behind
    sequence.commit(proposal.tokens, 0, 9)  # suppose the round was given up
    state = sequence.edit_state()
    assert state is not None
    assert dict(zip(state.counts.ids.tolist(), state.counts.generated.tolist(), strict=True)) == {9: 1}


def test_bf16_logits_of_a_greedy_request_are_edited_too() -> None:
    sequence = new_sequence(temperature=0.0, logit_bias={2: 100.0})
    assert sample(sequence, torch.zeros(1, VOCAB, dtype=torch.bfloat16)) == 2


def test_a_greedy_request_without_edits_stays_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows never leave the device and are never copied."""
    plain, edited = new_sequence(temperature=0.0), new_sequence(temperature=0.0, logit_bias={2: 1.0})
    assert plain.edits is None

    def refuse(*arguments: object) -> None:
        raise AssertionError("took the row apart")

    monkeypatch.setattr(acceptance, "greedy_token", refuse)
    logits = torch.zeros(1, VOCAB)
    assert sample(plain, logits) == 0
    assert judge(plain, torch.zeros(2, VOCAB), Proposal([0], [])) == (1, 0)
    with pytest.raises(AssertionError, match="apart"):
        sample(edited, logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_survivor_is_refused(temperature: float) -> None:
    sequence = new_sequence(temperature=temperature, allowed_token_ids=(EOS,), min_tokens=2)
    with pytest.raises(LogitsError, match="all tokens"):
        sample(sequence, torch.zeros(1, VOCAB))
