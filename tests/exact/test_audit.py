"""The draft audit: an honest reply always passes, and everything that checksums cannot see is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark import oracle
from dspark.audit import AuditPlan, AuditReport, DrawAudit, audit_draw, audit_rows
from dspark.dyadic import MASS, Row, draw, greedy_row, pack_rows, sparse_row, validate_reply
from dspark.philox import Domain, Keys

VOCAB, SUPPORT, DEPTH, ANCHOR = 300, 16, 6, 40
KEYS = Keys(seed=-9, generation=2, round=17)
ALL = 1.0

Logits = np.ndarray


def logits_of(seed: int) -> Logits:
    return (np.random.default_rng(seed).standard_normal((DEPTH, VOCAB)) * 2).astype(np.float32)


def draft(logits: Logits, keys: Keys, anchor: int = ANCHOR) -> tuple[list[Row], list[int]]:
    """What a worker does, one row after the other."""
    rows = [sparse_row(row, None, 1.0, SUPPORT) for row in logits]
    return rows, [draw(row, keys.draw24(Domain.PROPOSAL, anchor + 1 + i)) for i, row in enumerate(rows)]


def over_the_wire(rows: list[Row], tokens: list[int]) -> list[Row]:
    ids, q = np.zeros((DEPTH, SUPPORT), np.int32), np.zeros((DEPTH, SUPPORT), np.float32)
    entries = np.zeros(DEPTH, np.int32)
    pack_rows(rows, SUPPORT, ids, q, entries)
    return validate_reply(np.array(tokens, np.int32), entries, ids, q, VOCAB, DEPTH, SUPPORT)


def audit(rows: list[Row], tokens: list[int], keys: Keys = KEYS, anchor: int = ANCHOR) -> AuditReport:
    return audit_rows(over_the_wire(rows, tokens), tokens, anchor, keys, AuditPlan(ALL))


# -- honest replies --------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), generation=st.integers(0, 9), round_=st.integers(1, 10**6))
def test_an_honest_reply_passes_row_for_row(seed: int, generation: int, round_: int) -> None:
    keys = Keys(seed, generation, round_, choice=seed % 4)
    rows, tokens = draft(logits_of(seed), keys)
    assert audit(rows, tokens, keys) == AuditReport(DEPTH)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), token=st.integers(0, SUPPORT - 1))
def test_the_expected_token_is_the_oracles(seed: int, token: int) -> None:
    """Whatever was sent: the verdict's token is the draw of the row, by the oracle's slow search."""
    row = sparse_row(logits_of(seed)[0], None, 1.0, SUPPORT)
    sent = int(row.ids[token % len(row)])
    keys = Keys(seed, 0, 1)
    counts = dict(zip(row.ids.tolist(), row.counts.tolist(), strict=True))
    wanted = oracle.draw(counts, keys.draw64(Domain.PROPOSAL, 8) >> 40)
    assert audit_draw(row, sent, 8, keys) == DrawAudit(8, sent, wanted)


def test_one_entry_rows_pass_under_every_key_without_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keys, "words", None)
    assert audit([greedy_row(t) for t in range(DEPTH)], list(range(DEPTH))) == AuditReport(DEPTH)


def test_a_one_entry_row_of_another_token_fails() -> None:
    finding = audit_draw(greedy_row(7), 8, 5, KEYS)
    assert (finding.passed, finding.expected) == (False, 7)


# -- what a checksum cannot see --------------------------------------------------------------------------------

Fault = Callable[[], tuple[list[Row], list[int]]]


def _unrounded() -> tuple[list[Row], list[int]]:
    """The usual bug: Gumbel noise on the logits instead of the rounded row, with the same seed in hand."""
    rows, _ = draft(logits_of(1), KEYS)
    noise = np.random.default_rng(KEYS.round).gumbel(size=(DEPTH, VOCAB))
    return rows, [int(row.ids[(np.log(row.counts) + noise[i][row.ids]).argmax()]) for i, row in enumerate(rows)]


def _dense_before_truncation() -> tuple[list[Row], list[int]]:
    """Inverse CDF over the whole vocabulary with the right number, then the nearest token of the sparse row."""
    rows, tokens = draft(logits_of(2), KEYS), []
    for i, logits in enumerate(logits_of(2)):
        weights = np.exp(logits.astype(np.float64))
        reached = (weights / weights.sum()).cumsum()
        token = int(reached.searchsorted(KEYS.draw24(Domain.PROPOSAL, ANCHOR + 1 + i) / MASS))
        ids = rows[0][i].ids
        tokens.append(int(ids[np.abs(ids - token).argmin()]))
    return rows[0], tokens


def _shifted_rows() -> tuple[list[Row], list[int]]:
    """Row i + 1 declared for token i (the row that the token led to, not the one that it came from)."""
    rows, tokens = draft(logits_of(3), KEYS)
    return [_holding(row, token) for row, token in zip([*rows[1:], rows[0]], tokens, strict=True)], tokens


def _holding(row: Row, token: int) -> Row:
    """The row with its heaviest entry renamed where it lacks the token, so that the reply stays valid."""
    if row.count(token):
        return row
    ids = row.ids.copy()
    ids[int(row.counts.argmax())] = token
    order = ids.argsort()
    return Row(ids[order], row.counts[order])


def _by_probability() -> tuple[list[Row], list[int]]:
    """A CDF over the right counts, most likely first instead of ids ascending."""
    rows, tokens = draft(logits_of(4), KEYS)[0], []
    for i, row in enumerate(rows):
        order = np.argsort(-row.counts, kind="stable")
        u24 = KEYS.draw24(Domain.PROPOSAL, ANCHOR + 1 + i)
        tokens.append(int(row.ids[order][row.counts[order].cumsum().searchsorted(u24, side="right")]))
    return rows, tokens


def _stale() -> tuple[list[Row], list[int]]:
    """A reply of the round before, sent again under the new key."""
    return draft(logits_of(5), replace(KEYS, round=KEYS.round - 1))


def _inclusive() -> tuple[list[Row], list[int]]:
    """First cumulative count not below the number, on a number that lies on an edge."""
    edge = KEYS.draw24(Domain.PROPOSAL, ANCHOR + 1)
    row = Row(np.array([3, 5], np.int32), np.array([edge, MASS - edge]))
    honest, tokens = draft(logits_of(6), KEYS)
    return [row, *honest[1:]], [3, *tokens[1:]]


@pytest.mark.parametrize(
    "fault", [_unrounded, _dense_before_truncation, _shifted_rows, _by_probability, _stale, _inclusive]
)
def test_a_wrong_draw_is_found_and_named(fault: Fault) -> None:
    rows, tokens = fault()
    report = audit(rows, tokens)
    assert report.failure is not None
    index = report.failure.position - ANCHOR - 1
    assert report.passed == index
    assert report.failure.token == tokens[index]
    assert report.failure.expected == draw(rows[index], KEYS.draw24(Domain.PROPOSAL, report.failure.position))
    assert report.failure.expected != report.failure.token
    words = str(report.failure)
    assert f"position {report.failure.position}" in words
    assert str(report.failure.expected) in words


@pytest.mark.parametrize(
    "other",
    [
        replace(KEYS, seed=9),
        replace(KEYS, generation=1),
        replace(KEYS, round=18),
        replace(KEYS, choice=1),
    ],
    ids=["seed", "generation", "round", "choice"],
)
def test_a_draw_under_another_key_is_found(other: Keys) -> None:
    rows, tokens = draft(logits_of(7), other)
    assert audit(rows, tokens).failure is not None
    assert audit(rows, tokens, other) == AuditReport(DEPTH)


def test_a_draw_of_another_domain_or_position_is_found() -> None:
    rows, _ = draft(logits_of(8), KEYS)
    tokens = [draw(row, KEYS.draw24(Domain.TEST, ANCHOR + 1 + i)) for i, row in enumerate(rows)]
    assert audit(rows, tokens).failure is not None
    rows, tokens = draft(logits_of(8), KEYS, ANCHOR + 1)
    assert audit(rows, tokens).failure is not None
    assert audit(rows, tokens, anchor=ANCHOR + 1) == AuditReport(DEPTH)


def test_rows_and_tokens_must_pair_up() -> None:
    rows, tokens = draft(logits_of(9), KEYS)
    with pytest.raises(ValueError, match="shorter"):
        audit_rows(rows, tokens[:-1], ANCHOR, KEYS, AuditPlan(ALL))


# -- which rows ------------------------------------------------------------------------------------------------


def choices(rate: float, phase: int, count: int) -> list[bool]:
    plan = AuditPlan(rate, phase)
    return [plan.wants_next() for _ in range(count)]


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("phase", [0, 12345678901234567890])
def test_the_rate_is_kept_in_every_window(rate: float, phase: int) -> None:
    chosen = choices(rate, phase, 5000)
    for start in range(0, 5000, 1000):
        assert abs(sum(chosen[start : start + 1000]) - 1000 * rate) <= 3
    assert chosen == choices(rate, phase, 5000)


def test_rates_zero_and_one_mean_none_and_all() -> None:
    for phase in (0, (1 << 64) - 1, 1 << 63):
        assert not any(choices(0.0, phase, 500))
        assert all(choices(1.0, phase, 500))


def test_no_rhythm_escapes_a_low_rate() -> None:
    """A worker that errs on every nth row, for any n and from any row on, is met soon."""
    chosen = choices(0.05, 77, 20000)
    for rhythm in range(1, 60):
        for start in (0, rhythm // 2):
            first = chosen[start::rhythm].index(True)
            assert first < 250


def test_the_phase_moves_the_choice() -> None:
    assert choices(0.1, 1, 300) != choices(0.1, 1 << 62, 300)


def test_the_choice_does_not_depend_on_drafted_values() -> None:
    """After a proposal that is wrong from its first audited row on, the plan goes on as after a sound one."""
    rows, tokens = draft(logits_of(10), KEYS)
    following = []
    for sent in (tokens, [int(row.ids[0]) for row in rows]):
        plan = AuditPlan(0.4, 5)
        report = audit_rows(rows, sent, ANCHOR, KEYS, plan)
        assert (report.failure is None) == (sent is tokens)
        following.append([plan.wants_next() for _ in range(50)])
    assert following[0] == following[1] == choices(0.4, 5, DEPTH + 50)[DEPTH:]


def test_skipped_rows_are_not_looked_at() -> None:
    rows, tokens = draft(logits_of(11), KEYS)
    wrong = [next(int(v) for v in row.ids if v != token) for row, token in zip(rows, tokens, strict=True)]
    assert audit_rows(rows, wrong, ANCHOR, KEYS, AuditPlan(0.0)) == AuditReport(0)
    plan = choices(0.4, 5, DEPTH)
    first = plan.index(True)
    report = audit_rows(rows, wrong, ANCHOR, KEYS, AuditPlan(0.4, 5))
    assert report.failure is not None
    assert report.failure.position == ANCHOR + 1 + first
    honest = audit_rows(rows, tokens, ANCHOR, KEYS, AuditPlan(0.4, 5))
    assert honest == AuditReport(sum(plan))


@pytest.mark.parametrize("rate", [-0.1, 1.01, float("nan")])
def test_a_rate_outside_its_range_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="audit rate"):
        AuditPlan(rate)
