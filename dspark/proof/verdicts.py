"""What a run of the proof found: the figures behind the exit code, the JSON object and the report.

Called by ``prove``, which fills it, and ``report``, which shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from dspark.proof.chi_square import holm
from dspark.proof.mutants import Mutant
from dspark.proof.trials import Fact, Rate, Trial

ALPHA = 1e-6
"""Level of all tests of Tiers 2 and 3 together."""


@dataclass(frozen=True)
class TierResult:
    """A tier: claims (or tests and facts) and what did not hold. cases: single comparisons behind the claims."""

    tier: str
    title: str
    passed: int
    cases: int
    seconds: float
    failures: tuple[str, ...] = ()

    @property
    def failed(self) -> int:
        return len(self.failures)


@dataclass(frozen=True)
class MutantResult:
    """killed_by: the first claim that fails, None for a survivor. first_token: whether the first token shows it."""

    mutant: Mutant
    killed_by: str | None
    finding: str
    claims_failed: int
    claims: int
    first_token: bool | None

    @property
    def as_declared(self) -> bool:
        """Whether single-token marginals see what the zoo says they see."""
        return self.first_token == self.mutant.by_marginals


@dataclass(frozen=True)
class Judged:
    """A test with the threshold that Holm's rule gives it."""

    trial: Trial
    threshold: float

    @property
    def passed(self) -> bool:
        return self.trial.outcome is not None and self.trial.p > self.threshold


def judge(trials: list[Trial]) -> list[Judged]:
    """All tests of the suite together; the order stays."""
    thresholds = holm([trial.p for trial in trials], ALPHA)
    return [Judged(trial, bar) for trial, bar in zip(trials, thresholds, strict=True)]


@dataclass
class Proof:
    """A whole run. mode: "quick" or "long"; planted: name of the mutant on trial, None for production."""

    mode: str
    seed: int
    planted: str | None
    version: str
    seconds: float = 0.0
    tiers: list[TierResult] = field(default_factory=list)
    mutants: list[MutantResult] = field(default_factory=list)
    equivalents: list[MutantResult] = field(default_factory=list)
    tests: list[Judged] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)

    @property
    def passed(self) -> int:
        return sum(tier.passed for tier in self.tiers)

    @property
    def failed(self) -> int:
        return sum(tier.failed for tier in self.tiers)

    @property
    def survivors(self) -> list[str]:
        """Mutants that nothing caught."""
        return [result.mutant.name for result in self.mutants if result.killed_by is None]

    @property
    def flagged(self) -> list[str]:
        """Equivalents that were taken for mutants."""
        return [result.mutant.name for result in self.equivalents if result.killed_by is not None]

    @property
    def misdescribed(self) -> list[str]:
        """Mutants that marginals see although the zoo says no, or the other way round."""
        return [result.mutant.name for result in self.mutants if not result.as_declared]

    @property
    def holds(self) -> bool:
        """The exit code is 0 when this is true."""
        return bool(self.tiers) and not (self.failed or self.survivors or self.flagged or self.misdescribed)

    def problems(self) -> Iterator[str]:
        """Everything that keeps the proof from holding, a line each."""
        for tier in self.tiers:
            yield from (f"tier {tier.tier}: {failure}" for failure in tier.failures)
        yield from (f"survivor: {name} is not caught by any claim" for name in self.survivors)
        yield from (f"equivalent: {name} has the same law and was flagged" for name in self.flagged)
        yield from (f"mutant: {name} does not show in the first token as the zoo says" for name in self.misdescribed)

    def as_object(self) -> dict[str, object]:
        """The JSON object of ``dspark prove --json``."""
        return {
            "holds": self.holds,
            "mode": self.mode,
            "seed": self.seed,
            "planted": self.planted,
            "version": self.version,
            "seconds": round(self.seconds, 1),
            "passed": self.passed,
            "failed": self.failed,
            "mutants": len(self.mutants),
            "mutants_killed": len(self.mutants) - len(self.survivors),
            "equivalents": len(self.equivalents),
            "equivalents_flagged": len(self.flagged),
            "alpha": ALPHA,
            "tiers": [asdict(tier) | {"failed": tier.failed, "seconds": round(tier.seconds, 1)} for tier in self.tiers],
            "zoo": [_mutant_object(result) for result in self.mutants],
            "tests": [_test_object(test) for test in self.tests],
            "facts": [asdict(fact) for fact in self.facts],
            "acceptance": [asdict(rate) for rate in self.rates],
            "problems": list(self.problems()),
        }


def _mutant_object(result: MutantResult) -> dict[str, object]:
    return {
        "name": result.mutant.name,
        "bug": result.mutant.bug,
        "killed_by": result.killed_by,
        "finding": result.finding,
        "claims_failed": result.claims_failed,
        "claims": result.claims,
        "seen_by_first_token": result.first_token,
    }


def _test_object(test: Judged) -> dict[str, object]:
    outcome = test.trial.outcome
    return {
        "tier": test.trial.tier,
        "name": test.trial.name,
        "samples": test.trial.samples,
        "kind": outcome.kind if outcome else None,
        "statistic": outcome.statistic if outcome else None,
        "df": outcome.df if outcome else None,
        "p": test.trial.p,
        "threshold": test.threshold,
        "passed": test.passed,
        "error": test.trial.error,
    }
