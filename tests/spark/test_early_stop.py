"""Early stop: rounds are cut by confidences alone, in the order of their draws, and no text changes its law by it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dspark.admission import Load, StepCurve
from dspark.dyadic import greedy_row
from dspark_proto import Lane
from dspark_spark.api import GenerateRequest, SamplingParams
from dspark_spark.batch import Batch
from dspark_spark.depth import DepthPlanner
from dspark_spark.early_stop import cut_proposals, worth_verifying
from dspark_spark.proposals import Proposal
from dspark_spark.sequence import Sequence as Request
from dspark_workers.chain import Proposal as Drafted
from tests.conftest import TinyPair
from tests.rig import Parts, Reader, Rig, build_rig, load_parts

PROMPT = [3, 14, 15, 92, 65, 35]
DEPTH = 4
UNIT = 2**24


def flat(_rows: int) -> float:
    return 0.010


def steep(rows: int) -> float:
    return 0.010 * rows


def sloped(rows: int) -> float:
    """A second row costs a tenth of the first."""
    return 0.010 + 0.001 * (rows - 1)


def curve(measure: Callable[[int], float] = sloped, rows: int = 40) -> StepCurve:
    return DepthPlanner(DEPTH, rows, measure).curve


def proposal(*confidences: float) -> Proposal:
    tokens = list(range(len(confidences)))
    return Proposal(tokens, [greedy_row(token) for token in tokens], confidences)


def batch_of(*seeds: int, prefilling: int = 0) -> Batch:
    """Requests in slots 0, 1, .. with these seeds; `prefilling`: rows of a prompt in the same step."""
    decoding = [(cast(Request, SimpleNamespace(slot=slot, seed=seed)), None) for slot, seed in enumerate(seeds)]
    return Batch(list(decoding), [(cast(Request, SimpleNamespace()), prefilling)] if prefilling else [])


def depths(cut: Mapping[int, Proposal]) -> dict[int, int]:
    return {slot: len(found.tokens) for slot, found in cut.items()}


# -- the rule --------------------------------------------------------------------------------------------------


def test_drafts_are_verified_while_they_are_worth_their_row() -> None:
    """One request, 10 ms a step: draft k brings c_1 .. c_k tokens and costs a tenth of the step's share of one."""
    assert worth_verifying(curve(), {0: (0.9, 0.9, 0.9, 0.9)}, Load(1, 1)) == {0: 4}
    assert worth_verifying(curve(), {0: (0.9, 0.1, 0.9, 0.9)}, Load(1, 1)) == {0: 1}
    assert worth_verifying(curve(), {0: (0.05, 1.0, 1.0, 1.0)}, Load(1, 1)) == {0: 0}
    assert worth_verifying(curve(flat), {0: (0.01, 0.01, 0.01)}, Load(1, 1)) == {0: 3}
    assert worth_verifying(curve(steep), {0: (0.9, 0.9, 0.9)}, Load(1, 1)) == {0: 0}


def test_the_load_counts() -> None:
    """(T + a) / (10 + r) against T / (9 + r) in ms: with many tokens in the step a draft must be likelier."""
    assert worth_verifying(curve(), {0: (0.5,)}, Load(1, 1)) == {0: 1}
    assert worth_verifying(curve(), {0: (0.5,)}, Load(8, 8)) == {0: 1}
    assert worth_verifying(curve(), {0: (0.4,)}, Load(8, 8)) == {0: 0}
    assert worth_verifying(curve(), {0: (0.4,)}, Load(8, 30)) == {0: 1}


def test_a_stop_is_final_and_later_confidences_decide_nothing_earlier() -> None:
    """Appendix A: c_2 knows x_1, so it must not decide whether x_1 is verified."""
    dice = random.Random(3)
    made = curve()
    for _ in range(300):
        chains = {slot: [dice.random() for _ in range(DEPTH)] for slot in range(3)}
        found = worth_verifying(made, chains, Load(3, 3))
        for slot, depth in found.items():
            for later in range(depth + 1, DEPTH):
                other = {s: list(chain) for s, chain in chains.items()}
                other[slot][later] = dice.choice((0.0, 1.0, dice.random()))
                assert worth_verifying(made, other, Load(3, 3)) == found


def test_a_confidence_decides_on_its_own_draft_and_those_behind_it() -> None:
    assert worth_verifying(curve(), {0: (0.9, 0.9, 0.0, 1.0)}, Load(1, 1)) == {0: 2}
    assert worth_verifying(curve(), {0: (0.9, 0.9, 1.0, 0.0)}, Load(1, 1)) == {0: 3}


def test_requests_without_a_proposal_are_only_load() -> None:
    assert worth_verifying(curve(), {}, Load(3, 3)) == {}


# -- the batch -------------------------------------------------------------------------------------------------


def test_proposals_are_cut_to_their_first_drafts() -> None:
    made = {0: proposal(0.9, 0.9, 0.0, 0.9), 2: proposal(0.0, 1.0)}
    cut = cut_proposals(curve(), batch_of(1, 2, 3), made)
    assert depths(cut) == {0: 2, 2: 0}
    assert cut[0].tokens == [0, 1]
    assert cut[0].rows == made[0].rows[:2]
    assert cut[0].confidences == (0.9, 0.9)
    assert made[0].tokens == [0, 1, 2, 3]


def test_prefill_rows_are_load(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def note(_curve: StepCurve, confidences: Mapping[int, Sequence[float]], load: Load) -> dict[int, int]:
        seen.append((load.requests, load.rows))
        return dict.fromkeys(confidences, 1)

    monkeypatch.setattr("dspark_spark.early_stop.worth_verifying", note)
    cut_proposals(curve(), batch_of(1, 2, prefilling=17), {0: proposal(0.5, 0.5)})
    assert seen == [(2, 2 + 17)]
    cut_proposals(curve(), batch_of(1, 1, 1), {0: proposal(0.5), 1: proposal(0.5, 0.5), 2: proposal(0.5)})
    assert seen[1] == (3, 3 + 2 + 1)


@pytest.mark.parametrize("order", [(7, 7), (7, 8)])
def test_confidences_of_one_request_do_not_select_the_drafts_of_its_twin(order: tuple[int, int]) -> None:
    """Two requests of one seed draw x_1 with one number, here so that both are 0 or both are 1.

    Request 0's c_2 tells which. Where its second draft is likely, the budget is used up before request 1's first draft
    comes up: that draft would be verified when it is 1 only, and its law would be 3/4 instead of 1/2.
    """

    def cost(rows: int) -> float:
        return 0.010 if rows <= 4 else 0.010 * rows

    def verified(x: int) -> int:
        chains = {0: proposal(0.9, 1.0 if x == 0 else 0.0), 1: proposal(0.5)}
        return depths(cut_proposals(curve(cost), batch_of(*order), chains))[1]

    if order[0] == order[1]:
        assert [verified(x) for x in (0, 1)] == [1, 1]
    else:  # other seeds: x_1 of request 1 is another number, and the choice is free
        assert [verified(x) for x in (0, 1)] == [0, 1]


def test_the_first_of_a_seed_takes_part() -> None:
    chains = {slot: proposal(0.0, 0.0) for slot in (0, 1, 2, 3)}
    assert depths(cut_proposals(curve(), batch_of(5, 6, 5, 6), chains)) == {0: 0, 1: 0, 2: 2, 3: 2}
    assert depths(cut_proposals(curve(), batch_of(5, 5), {1: proposal(0.0)})) == {1: 0}


# -- in the engine ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts(tiny_pair: TinyPair) -> Parts:
    return load_parts(tiny_pair.target, tiny_pair.drafter)


def adaptive(parts: Parts, measure: Callable[[int], float], monkeypatch: pytest.MonkeyPatch) -> Rig:
    """An engine whose clock is `measure`, and that plans the full depth: only the early stop cuts."""
    monkeypatch.setattr("dspark_spark.engine.forward_timer", lambda model: measure)
    monkeypatch.setattr(DepthPlanner, "timed", lambda *_: None)
    monkeypatch.setattr(DepthPlanner, "plan", lambda self, limits, rows: dict.fromkeys(limits, DEPTH))
    settings = replace(build_rig(parts).engine.settings, adaptive_depth=True)
    return build_rig(parts, settings=settings)


def confident(rig: Rig, monkeypatch: pytest.MonkeyPatch, *values: float) -> None:
    """The worker's head says this, whatever it drafts."""
    honest = rig.wire.worker._chain.sample

    def sample(*arguments: Any, **named: Any) -> Drafted:
        found = honest(*arguments, **named)
        return replace(found, confidences=[round(value * UNIT) for value in values[: len(found.tokens)]])

    monkeypatch.setattr(rig.wire.worker._chain, "sample", sample)


def plain(parts: Parts, **params: object) -> Reader:
    return build_rig(parts).answer(PROMPT, speculate=False, **params)


@pytest.mark.parametrize(
    ("values", "verified"),
    [((1.0, 1.0, 1.0, 1.0), 4), ((1.0, 1.0, 0.0, 1.0), 2), ((0.0, 1.0, 1.0, 1.0), 0)],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_are_cut_and_everything_goes_on(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, temperature: float, values: tuple[float, ...], verified: int
) -> None:
    rig = adaptive(parts, sloped, monkeypatch)
    confident(rig, monkeypatch, *values)
    judged: list[int] = []
    original = DepthPlanner.judged

    def note(self: DepthPlanner, slot: int, lane: Lane, depth: int, accepted: int) -> None:
        judged.append(depth)
        original(self, slot, lane, depth, accepted)

    monkeypatch.setattr(DepthPlanner, "judged", note)
    reader = rig.answer(PROMPT, temperature=temperature, seed=3, max_tokens=60)
    assert len(reader.ids) == 60
    stats = reader.last.stats
    assert judged[:10] == [verified] * 10
    assert stats.drafted > stats.rounds * 3
    assert (stats.verified == stats.drafted) is (verified == 4)
    assert (stats.accepted > 0) is (verified > 0)
    if temperature == 0:
        assert reader.ids == plain(parts, max_tokens=60).ids
    assert rig.total("draft_audits_total") == stats.drafted  # cut or not, every draw was repeated
    assert rig.labelled("proposal_discards_total") == {}
    assert rig.link.generation_bumps == 0
    rig.check_books()
    rig.check_idle()


@pytest.mark.parametrize("kept", [0, 2])
def test_drafts_behind_the_stop_decide_nothing(parts: Parts, monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    """Whatever stands there, the text is the same."""
    values = [1.0] * kept + [0.0] * (DEPTH - kept)

    def text(behind: int | None) -> list[int]:
        rig = adaptive(parts, sloped, monkeypatch)
        confident(rig, monkeypatch, *values)
        honest = rig.wire.worker._chain.sample

        def sample(*arguments: Any, **named: Any) -> Drafted:
            found = honest(*arguments, **named)
            if behind is None:
                return found
            lies = [behind] * len(found.tokens[kept:])
            rows = [greedy_row(behind)] * len(lies)
            return replace(found, tokens=[*found.tokens[:kept], *lies], rows=[*found.rows[:kept], *rows])

        monkeypatch.setattr(rig.wire.worker._chain, "sample", sample)
        reader = rig.answer(PROMPT, temperature=1.0, seed=11, max_tokens=40)
        assert (reader.last.stats.accepted > 0) is (kept > 0)
        return reader.ids

    assert text(None) == text(3) == text(99)


def test_what_the_worker_believes_stays_what_was_committed(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut draft was not accepted: the next STEP says so, and the worker's digests and history agree with the text."""
    rig = adaptive(parts, sloped, monkeypatch)
    confident(rig, monkeypatch, 1.0, 1.0, 0.0, 0.0)
    seen: list[tuple[list[int], list[int]]] = []
    honest = rig.wire.worker._chain.sample

    def spy(*arguments: Any, **named: Any) -> Drafted:
        ((sequence, _),) = rig.engine._running.values()
        seen.append((list(arguments[-1]._tokens), sequence.tokens[: arguments[2] + 1]))
        return honest(*arguments, **named)

    monkeypatch.setattr(rig.wire.worker._chain, "sample", spy)
    rig.answer(PROMPT, temperature=1.0, seed=4, max_tokens=40)
    assert len(seen) > 5
    assert all(worker == verifier for worker, verifier in seen)


def test_match_texts_do_not_depend_on_the_stop(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = adaptive(parts, sloped, monkeypatch)
    texts = []
    for values in ((1.0, 0.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0)):
        confident(rig, monkeypatch, *values)
        readers = Reader()
        rig.engine.submit(match_request(f"m{values[1]}"), readers.deltas.append)
        rig.finish(readers)
        texts.append(readers.ids)
    assert texts[0] == texts[1]
    assert rig.total("spec_decode_num_verified_tokens_total") < rig.total("spec_decode_num_draft_tokens_total")


def match_request(name: str) -> GenerateRequest:
    params = SamplingParams(temperature=1.0, seed=8, max_tokens=40, ignore_eos=True)
    return GenerateRequest(name, tuple(PROMPT), params, lane="match")


def test_without_the_option_confidences_decide_nothing(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = build_rig(parts)
    confident(rig, monkeypatch, 0.0, 0.0, 0.0, 0.0)
    monkeypatch.setattr("dspark_spark.engine.cut_proposals", lambda *_: pytest.fail("called"))
    stats = rig.answer(PROMPT, temperature=1.0, seed=3, max_tokens=40).last.stats
    assert stats.verified == stats.drafted > 0
    assert stats.accepted > 0


def test_a_worker_without_a_head_is_taken_for_certain(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = adaptive(parts, sloped, monkeypatch)
    monkeypatch.setattr(rig.wire.worker._network, "_confidence_weight", None)
    stats = rig.answer(PROMPT, temperature=1.0, seed=3, max_tokens=40).last.stats
    assert stats.verified == stats.drafted > 0


def test_the_heads_own_confidences_cut_rounds(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny drafter's head is random: some rounds are cut, some are not."""
    rig = adaptive(parts, lambda rows: 0.010 + 0.003 * rows, monkeypatch)
    reader = rig.answer(PROMPT, temperature=1.0, seed=3, max_tokens=80)
    assert 0 < reader.last.stats.verified < reader.last.stats.drafted
    rig.check_books()
    rig.check_idle()
