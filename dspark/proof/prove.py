"""``dspark prove``: run the tiers and the zoo, and say whether speculation changes no distribution.

Invariants:

- The list of claims and tests is fixed before anything runs. A seed makes Tiers 0 to 2 the same run each time; the
  faults of Tier 3 come by the clock.
- It holds when every claim and test holds, every mutant is caught, and no equivalent is.
- With a planted mutant the same suite runs on it, without the zoo, and has to fail.

Called by the command line and by tests. Tiers 2 and 3 start processes of this machine (see ``served_pair``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dspark import __version__
from dspark.errors import UserError
from dspark.proof import tier0, tier1
from dspark.proof.claims import Claim, Finding, about
from dspark.proof.mutants import EQUIVALENTS, MUTANTS, Mutant
from dspark.proof.subject import PRODUCTION, Subject
from dspark.proof.trials import Evidence, in_declared_order
from dspark.proof.verdicts import MutantResult, Proof, TierResult, judge

Log = Callable[[str], None]
TITLES = {
    "0": "exact joint laws",
    "1": "implementation equals oracle",
    "2": "law of the real path",
    "3": "law of the real path under faults",
}


@dataclass(frozen=True, slots=True)
class ProveOptions:
    """quick: minutes instead of a quarter of an hour. seed: of all samples. plant: a mutant's name.

    served: whether Tiers 2 and 3, which start a worker and an endpoint, are run.

    Raises:
        UserError: no mutant has that name.
    """

    quick: bool = False
    seed: int = 0
    plant: str | None = None
    served: bool = True

    def __post_init__(self) -> None:
        if self.plant is not None and self.plant not in MUTANTS:
            raise UserError(f"--plant {self.plant}: no such mutant: use one of {', '.join(sorted(MUTANTS))}")


def run(options: ProveOptions, log: Log) -> Proof:
    """The whole proof; ``log`` gets a line of progress now and then."""
    started = time.monotonic()
    planted = MUTANTS[options.plant] if options.plant else None
    subject = planted.make() if planted else PRODUCTION
    proof = Proof("quick" if options.quick else "long", options.seed, options.plant, __version__)
    proof.tiers.append(_tier("0", tier0.claims(long=not options.quick), subject, log))
    proof.tiers.append(_tier("1", tier1.claims(150 if options.quick else 3000, options.seed), subject, log))
    if planted is None:
        proof.mutants = [show(mutant, log) for mutant in MUTANTS.values()]
        proof.equivalents = [show(other, log) for other in EQUIVALENTS.values()]
    if options.served and (planted is None or planted.serves):
        _served(options, subject, proof, log)
    proof.seconds = time.monotonic() - started
    return proof


# --- tiers 0 and 1 ---------------------------------------------------------------------------------------------------


def _tier(tier: str, claims: Sequence[Claim], subject: Subject, log: Log) -> TierResult:
    log(f"tier {tier}: {len(claims)} claims")
    started = time.monotonic()
    findings = [(claim, claim.check(subject)) for claim in claims]
    wrong = tuple(f"{claim.name}: {finding.text}" for claim, finding in findings if finding)
    cases = sum(claim.cases for claim in claims)
    return TierResult(tier, TITLES[tier], len(claims) - len(wrong), cases, time.monotonic() - started, wrong)


def show(mutant: Mutant, log: Log) -> MutantResult:
    """Show a mutant (or an equivalent) to the small claims about its part."""
    claims = about(_ZOO_CLAIMS, mutant.part)
    found: list[tuple[str, Finding]] = []
    for claim in claims:
        finding = claim.check(mutant.make())
        if finding is not None:
            found.append((claim.name, finding))
    killed_by, text = (found[0][0], found[0][1].text) if found else (None, "")
    log(f"{mutant.name}: {len(found)} of {len(claims)} claims fail")
    laws = [finding.first_token for _, finding in found if finding.first_token is not None]
    return MutantResult(mutant, killed_by, text, len(found), len(claims), any(laws) if laws else None)


_ZOO_CLAIMS = tier0.zoo_claims()


# --- tiers 2 and 3 ---------------------------------------------------------------------------------------------------


def _served(options: ProveOptions, subject: Subject, proof: Proof, log: Log) -> None:
    """The real path; the only place of this module that starts something."""
    from dspark.proof import tier2, tier3
    from dspark.proof.observer import Observer
    from dspark.proof.served_pair import serve, tiny_pair, worker_process

    sizes = tier2.Sizes(700, 80, 48) if options.quick else tier2.Sizes(6000, 600, 64)
    faulty = tier2.Sizes(300, 32, 48) if options.quick else tier2.Sizes(2500, 250, 64)
    evidence = Evidence()
    observer = Observer(None if subject is PRODUCTION else subject.ratio)
    log("tier 2: starting a worker and an endpoint on a tiny pair")
    started = time.monotonic()
    with tiny_pair() as pair, worker_process(pair) as worker:
        drafts = {"draft_temperature": tier2.DRAFT_TEMPERATURE}
        with serve(pair, worker, observer, deadline_ms=tier2.DEADLINE_MS, **drafts) as served:
            tier2.run(served, sizes, options.seed, evidence, log)
        between = time.monotonic()
        with serve(pair, worker, observer, deadline_ms=tier3.DEADLINE_MS, **drafts) as served:
            tier3.run(served, faulty, options.seed, evidence, log)
    settle(proof, evidence, (*tier2.DECLARED, *tier3.DECLARED), (between - started, time.monotonic() - between))


def settle(
    proof: Proof, evidence: Evidence, declared: Sequence[tuple[str, str]], seconds: tuple[float, float]
) -> None:
    """Judge all tests together and add both tiers. seconds: of Tier 2 and of Tier 3."""
    proof.tests = judge(in_declared_order(evidence.trials, declared))
    proof.facts, proof.rates = evidence.facts, evidence.rates
    for tier, took in zip(("2", "3"), seconds, strict=True):
        tests = [test for test in proof.tests if test.trial.tier == tier]
        facts = [fact for fact in proof.facts if fact.tier == tier]
        if not tests and not facts:
            continue
        wrong = [f"{t.trial.name}: {t.trial.error or f'p = {t.trial.p:.3g}'}" for t in tests if not t.passed]
        wrong += [f"{fact.name}: {fact.detail}" for fact in facts if not fact.holds]
        total = len(tests) + len(facts)
        samples = sum(test.trial.samples for test in tests)
        proof.tiers.append(TierResult(tier, TITLES[tier], total - len(wrong), samples, took, tuple(wrong)))
