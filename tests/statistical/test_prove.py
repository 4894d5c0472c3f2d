"""`dspark prove`: it is green on production, red on every mutant, and its figures and exit codes say so."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dspark.dyadic import MASS, Row
from dspark.errors import UserError
from dspark.philox import Domain, Keys
from dspark.proof import prove, report, tier0, tier1, tier2, tier3
from dspark.proof.chi_square import (
    ImpossibleError,
    Outcome,
    chi_square,
    chi_square_tail,
    g_test,
    holm,
    merged_cells,
    normal_tail,
    z_test,
)
from dspark.proof.claims import about, parts
from dspark.proof.mutants import EQUIVALENTS, MUTANTS
from dspark.proof.observer import Observer, acceptance_test, correction_test, likeness_test
from dspark.proof.prove import ProveOptions
from dspark.proof.served_pair import Served, serve, tiny_pair, worker_process
from dspark.proof.subject import PRODUCTION, Subject
from dspark.proof.toys import Case
from dspark.proof.trials import Evidence, Trial, in_declared_order
from dspark.proof.verdicts import ALPHA, Proof, TierResult, judge
from dspark.tickets import TOTAL
from dspark.verify import Draws, Kind, Verdict, sample_target_only


def silent(text: str) -> None:
    pass


# -- tiers 0 and 1 ---------------------------------------------------------------------------------------------


# Claims that run the draw run a lane too.
PARTS = [part for part in Subject.__dataclass_fields__ if part != "drawn"]


@pytest.mark.parametrize("part", [*PARTS, ""])
def test_tier_0_holds(part: str) -> None:
    claims = [claim for claim in tier0.claims() if (part in claim.parts if part else not claim.parts)]
    assert claims
    assert [(claim.name, found) for claim in claims if (found := claim.check(PRODUCTION))] == []


def test_tier_1_holds() -> None:
    assert [(claim.name, found) for claim in tier1.claims(60) if (found := claim.check(PRODUCTION))] == []


def test_claims_have_names_of_their_own() -> None:
    for claims in (tier0.claims(long=True), tier0.zoo_claims(), tier1.claims()):
        names = [claim.name for claim in claims]
        assert [name for name, count in Counter(names).items() if count > 1] == []


def test_a_claim_cannot_run_a_part_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="ratios"):
        parts("ratios")


# -- the zoo ---------------------------------------------------------------------------------------------------


def test_the_zoo_is_large_and_every_mutant_says_what_it_is() -> None:
    assert len(MUTANTS) >= 26
    assert {mutant.part for mutant in MUTANTS.values()} == set(Subject.__dataclass_fields__)
    assert sum(mutant.by_marginals is False for mutant in MUTANTS.values()) >= 5
    assert all(len(mutant.bug) > 8 for mutant in MUTANTS.values())
    assert not MUTANTS.keys() & EQUIVALENTS.keys()


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught_and_marginals_see_what_the_zoo_says(name: str) -> None:
    result = prove.show(MUTANTS[name], silent)
    assert result.killed_by is not None
    assert result.first_token == MUTANTS[name].by_marginals


@pytest.mark.parametrize("name", EQUIVALENTS)
def test_no_equivalent_is_caught(name: str) -> None:
    assert about(tier0.zoo_claims(), EQUIVALENTS[name].part)
    assert prove.show(EQUIVALENTS[name], silent).killed_by is None


# -- statistics ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statistic", "df", "p"),
    [
        (3.841458820694124, 1, 0.05),
        (18.307038053275146, 10, 0.05),
        (131.370, 63, 1e-6),  # the bar of test_sampling_law
        (23.928126976885387, 1, 1e-6),
        (2.0, 2, math.exp(-1)),
        (400.0, 400, 0.490597),
    ],
)
def test_tails_of_the_chi_square(statistic: float, df: int, p: float) -> None:
    assert chi_square_tail(statistic, df) == pytest.approx(p, rel=2e-4)


def test_tails_at_the_ends() -> None:
    assert chi_square_tail(0, 5) == 1
    assert chi_square_tail(1e4, 3) < 1e-300
    assert normal_tail(1.959963984540054) == pytest.approx(0.05)


def test_rare_cells_are_merged_and_none_is_lost() -> None:
    law = {"a": 0.5, "b": 0.4, "c": 0.05, "d": 0.05}
    cells = merged_cells({"a": 48, "b": 44, "c": 8}, law)
    assert cells == [(48, 50), (44, 40), (8, pytest.approx(10))]
    few = merged_cells({"a": 30, "b": 20, "d": 1}, law)
    assert few == [(30, pytest.approx(25.5)), (21, pytest.approx(25.5))]


def test_what_is_impossible_must_not_be_seen() -> None:
    with pytest.raises(ImpossibleError, match="'b' was seen"):
        merged_cells({"a": 5, "b": 1}, {"a": 1.0})
    evidence = Evidence()
    evidence.test("2", "one", 6, lambda: chi_square([merged_cells({"a": 5, "b": 1}, {"a": 1.0})]))
    assert evidence.trials[0].p == 0
    assert not judge(evidence.trials)[0].passed


def test_statistics_by_hand() -> None:
    cells = [(60.0, 50.0), (40.0, 50.0)]
    assert chi_square([cells]).statistic == pytest.approx(4)
    assert chi_square([cells, cells]).df == 2
    assert g_test([cells]).statistic == pytest.approx(2 * (60 * math.log(1.2) + 40 * math.log(0.8)))
    assert z_test(60, 50, 25).statistic == 2
    with pytest.raises(ValueError, match="too few samples"):
        chi_square([[(3.0, 3.0)]])


def test_holm_steps_down() -> None:
    assert holm([0.01, 0.04, 0.02, 0.5], 0.06) == [0.015, 0.03, 0.02, 0.03]
    assert holm([0.5, 0.1], 0.05) == [0.025, 0.025]
    assert holm([], 0.05) == []


def test_a_test_that_is_missing_or_not_declared_is_noticed() -> None:
    declared = [("2", "one"), ("2", "two")]
    made = [Trial("2", "two", 5, Outcome("z", 0.0, 0, 1.0))]
    found = in_declared_order(made, declared)
    assert [trial.p for trial in found] == [0, 1]
    assert [test.passed for test in judge(found)] == [False, True]
    with pytest.raises(ValueError, match="not declared"):
        in_declared_order([replace(made[0], name="three")], declared)
    with pytest.raises(ValueError, match="made twice"):
        in_declared_order(made * 2, declared)


def test_the_suite_is_declared_once() -> None:
    declared = [*tier2.DECLARED, *tier3.DECLARED]
    assert len(set(declared)) == len(declared) >= 25


# -- a whole run -----------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machinery of a run on few claims and few animals; the whole lists are tested above."""
    chosen = [*about(tier0.zoo_claims(), "ratio")[:2], *about(tier0.zoo_claims(), "read_dense")]
    monkeypatch.setattr(tier0, "claims", lambda long: chosen)
    monkeypatch.setattr(tier1, "claims", lambda rounds, seed: tier1_claims[:2])
    few = ("residual-from-p", "bonus-from-q", "dense-padding-accepted")
    monkeypatch.setattr(prove, "MUTANTS", {name: MUTANTS[name] for name in few})
    monkeypatch.setattr(prove, "EQUIVALENTS", {"no-bonus-token": EQUIVALENTS["no-bonus-token"]})


tier1_claims = tier1.claims(10)


@pytest.mark.usefixtures("small")
def test_production_holds() -> None:
    lines: list[str] = []
    proof = prove.run(ProveOptions(quick=True, served=False), lines.append)
    assert proof.holds
    assert (proof.passed, proof.failed, list(proof.problems())) == (5, 0, [])
    found = json.loads(json.dumps(proof.as_object()))
    assert (found["passed"], found["failed"], found["mutants"], found["mutants_killed"]) == (5, 0, 3, 3)
    assert [tier["tier"] for tier in found["tiers"]] == ["0", "1"]
    assert any(line.startswith("tier 1:") for line in lines)


@pytest.mark.usefixtures("small")
def test_a_mutant_that_survives_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = replace(MUTANTS["residual-from-p"], name="harmless", by_marginals=None, make=lambda: PRODUCTION)
    monkeypatch.setattr(prove, "MUTANTS", {"harmless": harmless})
    proof = prove.run(ProveOptions(quick=True, served=False), silent)
    assert not proof.holds
    assert proof.survivors == ["harmless"]
    assert "not caught" in " ".join(proof.problems())


@pytest.mark.usefixtures("small")
def test_an_equivalent_that_is_caught_and_a_wrong_description_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "EQUIVALENTS", {"wrong": MUTANTS["bonus-from-q"]})
    proof = prove.run(ProveOptions(quick=True, served=False), silent)
    assert (proof.holds, proof.flagged) == (False, ["bonus-from-q"])
    monkeypatch.setattr(prove, "EQUIVALENTS", {})
    wrong = replace(MUTANTS["bonus-from-q"], by_marginals=True)
    monkeypatch.setattr(prove, "MUTANTS", {"bonus-from-q": wrong})
    proof = prove.run(ProveOptions(quick=True, served=False), silent)
    assert (proof.holds, proof.misdescribed) == (False, ["bonus-from-q"])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["residual-from-p", "dense-padding-accepted"])
def test_a_planted_mutant_turns_the_suite_red(name: str) -> None:
    proof = prove.run(ProveOptions(quick=True, plant=name, served=False), silent)
    assert not proof.holds
    assert proof.failed >= 1
    assert proof.mutants == []
    assert f"planted mutant {name} was caught" in report.as_text(proof)


def test_a_plant_that_nobody_knows_is_a_clear_error() -> None:
    with pytest.raises(UserError, match="residual-from-p"):
        ProveOptions(plant="nonsense")


# -- the report ------------------------------------------------------------------------------------------------


def some_proof() -> Proof:
    proof = Proof("quick", 3, None, "9.9")
    proof.tiers = [TierResult("0", "exact joint laws", 7, 9, 1.25)]
    proof.mutants = [prove.show(MUTANTS["bonus-from-q"], silent)]
    proof.equivalents = [prove.show(EQUIVALENTS["no-bonus-token"], silent)]
    trials = [Trial("2", "a <test> | of it", 50, Outcome("chi2", 3.0, 2, 0.223)), Trial("2", "lost", 0, None, "why")]
    proof.tests = judge(trials)
    return proof


def test_the_report_shows_tiers_mutants_and_tests(tmp_path: Path) -> None:
    markdown, page = report.write(some_proof(), tmp_path / "deep")
    text, html = markdown.read_text("utf-8"), page.read_text("utf-8")
    for shown in (text, html):
        for part in ("bonus-from-q", "no-bonus-token", "exact joint laws", "chi2 = 3.00", "0.223", "FAILED"):
            assert part in shown
        assert "dspark prove --quick --seed 3" in shown
    assert "a <test> \\| of it" in text
    assert "a &lt;test&gt; | of it" in html
    assert "src=\"http" not in html
    assert "href=" not in html
    assert f"{ALPHA / 2:.3g}" in text


def test_plots_are_in_the_page_where_matplotlib_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with_plots = report.as_page(some_proof())
    assert ("data:image/png;base64," in with_plots) == (importlib.util.find_spec("matplotlib") is not None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    without = report.as_page(some_proof())
    assert "data:image" not in without
    assert "bonus-from-q" in without


def test_what_the_observer_expects_by_hand() -> None:
    """p = (1/2, 1/4, 1/4), q = (1/4, 3/4, 0): acceptance 1/2; q under p has mean 5/16."""
    tickets = np.array([TOTAL // 2, TOTAL // 4, TOTAL // 4])
    row = Row(np.array([0, 1], np.int32), np.array([MASS // 4, 3 * MASS // 4]))
    observer = Observer()
    verdict = observer.verify_ratio(lambda _: tickets, [row], [1], 9, Keys(5, 0, 1))
    (draft,) = observer.judged
    assert (draft.chance, draft.mean) == (0.5, 5 / 16)
    assert draft.variance == pytest.approx(1 / 32 + 9 / 64 - 25 / 256)
    assert draft.accepted == (verdict.accepted == 1)
    assert len(observer.committed) == verdict.accepted + 1
    assert len(observer.corrected) == 1 - verdict.accepted
    first = observer.committed[0]
    low = [0, 0.5, 0.75][verdict.token if not verdict.accepted else 1]
    assert low <= first.place < low + 0.5
    assert (first.best, first.position) == (0.5, 10)


# -- the real path ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with tiny_pair() as pair, worker_process(pair) as worker:
        drafts = {"draft_temperature": tier2.DRAFT_TEMPERATURE}
        with serve(pair, worker, Observer(), deadline_ms=tier2.DEADLINE_MS, **drafts) as running:
            yield running


def test_a_short_tier_2(served: Served) -> None:
    evidence = Evidence()
    tier2.run(served, tier2.Sizes(150, 16, 24), 0, evidence, silent)
    tests = judge(in_declared_order(evidence.trials, tier2.DECLARED))
    assert [test.trial for test in tests if not test.passed] == []
    assert [fact for fact in evidence.facts if not fact.holds] == []
    assert len(evidence.rates) == 4


def test_tier_2_sees_a_planted_residual(served: Served) -> None:
    """The acceptance is right with this mistake, the text is not."""
    served.observer.ratio = MUTANTS["residual-from-p"].make().ratio
    served.observer.clear()
    try:
        served.many(range(12), max_tokens=24, temperature=1.0)
    finally:
        served.observer.ratio = None
    with pytest.raises(ImpossibleError, match="outside the residual"):
        correction_test(served.observer.corrected)
    assert acceptance_test(served.observer.judged).p > 1e-6


def test_tier_2_sees_texts_of_another_law(served: Served) -> None:
    served.observer.ratio = MUTANTS["accept-always"].make().ratio
    served.observer.clear()
    try:
        served.many(range(12), max_tokens=24, temperature=1.0)
    finally:
        served.observer.ratio = None
    assert likeness_test(served.observer.judged).p < 1e-6
    assert likeness_test(served.observer.judged).statistic > 0


def test_the_acceptance_test_sees_an_exact_but_slow_lane(served: Served) -> None:
    """Rejecting every draft in favour of a plain sample of p keeps the law."""
    def never(case: Case, draws: Draws) -> Verdict:
        token = sample_target_only(case.tickets_at(0), case.anchor_position + 1, draws)
        return Verdict(0, token, Kind.CORRECTION)

    served.observer.ratio = never
    served.observer.clear()
    try:
        served.many(range(20), max_tokens=16, temperature=1.0)
    finally:
        served.observer.ratio = None
    assert acceptance_test(served.observer.judged).p < 1e-6


def test_numbers_that_depend_on_each_other_are_seen() -> None:
    keys = [Keys(seed, 0, 1) for seed in range(2000)]
    same = [(key.draw64(Domain.BONUS, 7), key.draw64(Domain.BONUS, 7)) for key in keys]
    assert tier2._pairs(same).p < 1e-300
    assert np.isfinite(tier2._pairs(same).statistic)


# -- the command -----------------------------------------------------------------------------------------------


def command(*arguments: str, timeout: int = 900) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "dspark.cli", "prove", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=timeout, env=environment)


def test_the_command_refuses_an_unknown_plant() -> None:
    shown = command("--plant", "nonsense")
    assert shown.returncode == 2
    assert shown.stderr.startswith("dspark: --plant nonsense")
    assert "Traceback" not in shown.stderr


@pytest.mark.slow
def test_the_command_is_green_and_writes_its_report(tmp_path: Path) -> None:
    shown = command("--quick", "--json", "--report", str(tmp_path))
    found = json.loads(shown.stdout)
    assert shown.returncode == 0, found["problems"]
    assert found["failed"] == 0
    assert found["mutants_killed"] == found["mutants"] >= 26
    assert [tier["tier"] for tier in found["tiers"]] == ["0", "1", "2", "3"]
    assert len(found["tests"]) == len(tier2.DECLARED) + len(tier3.DECLARED)
    assert "everything holds" in (tmp_path / report.MARKDOWN).read_text("utf-8")
    assert "residual-from-p" in (tmp_path / report.PAGE).read_text("utf-8")


@pytest.mark.slow
def test_the_command_is_red_with_a_planted_mutant() -> None:
    shown = command("--plant", "residual-from-p", "--json")
    found = json.loads(shown.stdout)
    assert shown.returncode == 1
    assert found["planted"] == "residual-from-p"
    failed = {tier["tier"]: tier["failed"] for tier in found["tiers"]}
    assert failed["0"] > 0
    assert failed["1"] > 0
    assert failed["2"] > 0
