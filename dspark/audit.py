"""Draft audit: repeat a worker's draw from what it declared, and compare.

Purpose: checksums say that a reply arrived as it was sent; the audit says that each token is the draw of its own row
under the key of its own round. It finds what nothing else can: a draw from unrounded logits, a row of another
position, a stale reply, another key, ids in another order. It does not show that a row was formed before its number
was known; that stays a matter of trust in the worker.

Invariants:

- Nothing is drawn: the audit recomputes a number that the worker owns (``Domain.PROPOSAL``) and uses it for nothing.
- Which rows are audited depends on a counter, never on a drafted value, so that skipping rows selects on nothing.
- A failed audit is a worker bug or a lie. The caller discards the proposal and quarantines the worker; as a routine
  fallback it would make a discard depend on drafted content.
- A one-entry row (greedy drafting, ``match`` and ``greedy`` lanes) has one possible token: no number is computed.

Called by the verifier's engine for each validated proposal, and by conformance checks of a worker.

Source: seed document 000 (the counts that travel are the law of the draw); the rule is ``dyadic.draw``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dspark.dyadic import MASS, Row, draw
from dspark.philox import Domain, Keys, upper24

# 2**64 over the golden ratio: multiples spread evenly, so a worker that errs in any fixed rhythm meets an audit.
_GOLDEN_STEP = 0x9E3779B97F4A7C15
_CIRCLE = 1 << 64


@dataclass(frozen=True, slots=True)
class DrawAudit:
    """One drafted token against its row and key: absolute ``position``, the ``token`` sent, the ``expected`` one."""

    position: int
    token: int
    expected: int

    @property
    def passed(self) -> bool:
        return self.token == self.expected

    def __str__(self) -> str:
        return f"position {self.position}: token {self.token} was sent, its row and key give {self.expected}"


@dataclass(frozen=True, slots=True)
class AuditReport:
    """``passed`` rows were audited and sound, up to the first ``failure``; rows after it were not looked at."""

    passed: int
    failure: DrawAudit | None = None


class AuditPlan:
    """Chooses the rows to audit: a share ``rate`` of them, by the running number of the row.

    ``phase`` (64 bits) is where the sequence starts. A secret phase keeps a worker from knowing which rows are looked
    at; the same phase gives the same choice.

    Raises:
        ValueError: the rate is not in [0, 1].
    """

    def __init__(self, rate: float, phase: int = 0) -> None:
        if not 0 <= rate <= 1:
            raise ValueError(f"audit rate {rate} must be in [0, 1]: 1 audits every drafted token, 0 none")
        self._threshold = round(rate * _CIRCLE)
        self._place = phase % _CIRCLE

    def wants_next(self) -> bool:
        """Whether the next row is audited; every row of every proposal asks once, in order."""
        chosen = self._place < self._threshold
        self._place = (self._place + _GOLDEN_STEP) % _CIRCLE
        return chosen


def audit_draw(row: Row, token: int, position: int, keys: Keys) -> DrawAudit:
    """Repeat one draw.

    Args:
        row: the wire row, as ``validate_reply`` returned it.
        token: the drafted global id that came with it.
        position: absolute position of the drafted token.
        keys: the worker's key: request seed, resets since OPEN, round of the STEP, choice.
    """
    if row.count(token) == MASS:
        return DrawAudit(position, token, token)
    return DrawAudit(position, token, draw(row, upper24(keys.words(Domain.PROPOSAL, position))))


def audit_rows(
    rows: Sequence[Row], tokens: Sequence[int], anchor_position: int, keys: Keys, plan: AuditPlan
) -> AuditReport:
    """Audit one proposal's rows, as far as the plan wants them, up to the first failure.

    Row i belongs to position ``anchor_position + 1 + i``.
    """
    passed = 0
    # Asked for all rows first: where the plan stands afterwards is a matter of depth, not of what was found.
    wanted = [plan.wants_next() for _ in tokens]
    for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        if not wanted[index]:
            continue
        finding = audit_draw(row, token, anchor_position + 1 + index, keys)
        if not finding.passed:
            return AuditReport(passed, finding)
        passed += 1
    return AuditReport(passed)
