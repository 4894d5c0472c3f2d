"""The engine's promises to its requests: whole answers, clean ends, and nobody pays for somebody else's fault."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch

from dspark import oracle
from dspark.grammar import TokenAutomaton
from dspark.models.target import ForwardResult, Segment
from dspark.philox import Domain, Keys
from dspark_proto import MessageType
from dspark_spark.api import EngineBusyError, GenerateRequest, SamplingParams
from dspark_spark.engine import Engine, EngineSettings
from dspark_spark.metrics import Metrics
from tests.conftest import TinyPair
from tests.rig import Parts, Reader, Rig, build_rig, load_parts, type_of

PROMPT = [3, 14, 15, 92, 65, 35]


@pytest.fixture(scope="module")
def parts(tiny_pair: TinyPair) -> Parts:
    return load_parts(tiny_pair.target, tiny_pair.drafter)


@pytest.fixture
def rig(parts: Parts) -> Rig:
    return build_rig(parts)


def alone(parts: Parts, prompt: Sequence[int], **params: Any) -> Reader:
    """The answer of an engine that has no drafter at all."""
    engine = Engine(parts.model, parts.tokenizer, EngineSettings(2, 256, 64), Metrics(0))
    reader = Reader()
    values: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **params}
    engine.submit(GenerateRequest("only", tuple(prompt), SamplingParams(**values)), reader.deltas.append)
    while not reader.finish:
        engine.turn()
    return reader


# -- whole answers ---------------------------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_an_engine_without_a_drafter(rig: Rig, parts: Parts) -> None:
    answer = rig.answer(PROMPT, max_tokens=60)
    assert answer.ids == alone(parts, PROMPT, max_tokens=60).ids
    stats = answer.last.stats
    assert 0 < stats.accepted <= stats.verified == stats.drafted
    assert len(answer.ids) == 60
    # The first token is the prefill's; every step brings one more than it accepted.
    assert stats.accepted + stats.rounds + stats.target_only_steps == 59
    rig.check_idle()


def test_a_prompt_longer_than_the_chunk_is_prefilled_in_pieces(rig: Rig, parts: Parts) -> None:
    prompt = [(7 * i) % 256 for i in range(150)]  # chunks of 32
    before = rig.total("round_stage_seconds_count")
    reader = rig.ask(prompt, max_tokens=8)
    while not reader.deltas:
        rig.engine.turn()
    assert rig.metrics()['dspark:round_stage_seconds_count{stage="verify"}'] - before == 5
    rig.finish(reader)
    assert reader.ids == alone(parts, prompt, max_tokens=8).ids
    assert reader.last.stats.accepted > 0


def test_prefill_and_decode_share_a_turn(rig: Rig) -> None:
    first = rig.ask(PROMPT, max_tokens=100)
    while len(first.deltas) < 2:
        rig.engine.turn()
    second = rig.ask([(5 * i) % 256 for i in range(120)], max_tokens=4)
    before = len(first.deltas)
    while not second.deltas:
        rig.engine.turn()
    assert len(first.deltas) - before >= 4  # it kept its pace: one delta a turn while the other was prefilled
    rig.finish(first, second)
    rig.check_idle()


def test_more_requests_than_slots_wait_for_their_turn_and_reuse_slots(rig: Rig, parts: Parts) -> None:
    prompts = [[(i * 31 + j) % 256 for j in range(3 + 5 * i)] for i in range(8)]
    readers = [rig.ask(p, max_tokens=6 + 3 * i) for i, p in enumerate(prompts)]
    rig.engine.turn()
    assert len(rig.engine._running) == 4
    rig.finish(*readers)
    for i, (prompt, reader) in enumerate(zip(prompts, readers, strict=True)):
        assert reader.ids == alone(parts, prompt, max_tokens=6 + 3 * i).ids
        assert reader.last.stats.accepted > 0
    rig.check_idle()


def test_a_stop_inside_an_accepted_run_drops_the_rest(rig: Rig) -> None:
    free = rig.answer(PROMPT, max_tokens=40)
    run = next(d for d in free.deltas if sum(d.from_draft) >= 2)
    index = len([t for d in free.deltas[: free.deltas.index(run)] for t in d.token_ids])
    stop = run.token_ids[0]
    assert stop not in free.ids[:index]  # else the test would stop earlier than in the run
    reader = rig.answer(PROMPT, max_tokens=40, stop_token_ids=(stop,))
    assert (reader.finish, reader.last.stop_reason) == ("stop", stop)
    assert reader.ids == free.ids[: index + 1]
    assert len(reader.last.from_draft) == len(reader.last.token_ids) == 1
    assert reader.text == "".join(d.text for d in free.deltas)[: len(reader.text)]
    rig.check_idle()


def test_the_context_ends_the_answer_even_when_the_budget_is_larger(rig: Rig) -> None:
    prompt = [i % 256 for i in range(230)]
    reader = rig.answer(prompt, max_tokens=1000)
    assert (len(reader.ids), reader.finish) == (26, "length")
    assert rig.answer([9] * 255, max_tokens=1000).finish == "length"  # room for one token
    rig.check_idle()


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([1] * 256, {}, "256 tokens"),
        ([], {}, "0 tokens"),
        ([5, 288], {}, "outside the vocabulary"),
        ([5, -1], {}, "outside the vocabulary"),
        ([5], {"seed": 1 << 63}, "seed"),
        ([5], {"temperature": -1.0}, "temperature"),
        ([5], {"top_p": 7.0}, "top_p"),
        ([5], {"min_p": 2.0}, "min_p"),
        ([5], {"repetition_penalty": 0.0}, "repetition_penalty"),
        ([5], {"allowed_token_ids": (5, 288)}, "allowed_token_ids"),
    ],
)
def test_a_request_that_cannot_run_is_refused_alone(
    rig: Rig, prompt: list[int], params: dict[str, Any], words: str
) -> None:
    good = rig.ask(PROMPT, max_tokens=6)
    bad = rig.ask(prompt, **params)
    rig.finish(good, bad)
    assert bad.finish == "error"
    assert words in (bad.last.error or "")
    assert good.finish == "length"
    rig.check_idle()


def test_two_running_requests_cannot_have_one_id(rig: Rig) -> None:
    first, second = (rig.ask(PROMPT, name="same", max_tokens=12) for _ in range(2))
    rig.finish(first, second)
    assert (first.finish, second.finish) == ("length", "error")
    assert rig.answer(PROMPT, name="same", max_tokens=3).finish == "length"  # afterwards it may be used again


# -- lanes and seeds -------------------------------------------------------------------------------------------


def test_lanes(rig: Rig) -> None:
    assert rig.answer(PROMPT).last.stats.lane == "greedy"
    assert rig.answer(PROMPT, temperature=0.8, seed=1).last.stats.lane == "ratio"
    off = rig.answer(PROMPT, speculate=False).last.stats
    assert (off.lane, off.drafted, off.target_only_steps) == ("none", 0, 23)
    assert rig.labelled("target_only_steps_total")["speculation_off"] == 23


@pytest.mark.parametrize("seed", [0, -1, -(1 << 63), (1 << 63) - 1])
def test_every_seed_drafts_and_repeats(rig: Rig, seed: int) -> None:
    """Negative seeds are half of all fresh ones: they must reach the worker as they are."""
    first, again = (rig.answer(PROMPT, temperature=1.0, seed=seed) for _ in range(2))
    assert first.ids == again.ids
    assert first.last.stats.accepted > 0


def test_without_a_seed_two_answers_differ(rig: Rig) -> None:
    assert rig.answer(PROMPT, temperature=1.0).ids != rig.answer(PROMPT, temperature=1.0).ids


def test_no_random_number_is_drawn_twice(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds never repeat, so neither a reset (generation up) nor a reconnect (generation 0 again) reuses a key."""
    drawn: Counter[tuple[object, ...]] = Counter()

    def spy(name: str) -> None:
        original = getattr(Keys, name)

        def draw(self: Keys, domain: Domain, position: int, *rest: int) -> int:
            drawn[self, domain, position, rest] += 1
            value: int = original(self, domain, position, *rest)
            return value

        monkeypatch.setattr(Keys, name, draw)

    spy("draw24")
    spy("draw64")
    reader = rig.ask(PROMPT, temperature=1.0, seed=77, max_tokens=120)
    for fault in (None, "reset", None, "reconnect", None, "reset"):
        rig.turns(5)
        if fault == "reset":
            rig.link._lose(0)
        elif fault == "reconnect":
            rig.wire.replace_worker(rig.parts.worker())
            rig.link._down("test")
            rig.link._next_hello_ns = 0
    rig.finish(reader)
    generations = {key[0].generation for key in drawn if key[1] is Domain.PROPOSAL}  # type: ignore[attr-defined]
    assert generations == {0, 1}
    assert rig.link.reconnects == 1
    assert max(drawn.values()) == 1
    assert {key[1] for key in drawn} >= {Domain.PROPOSAL, Domain.ACCEPTANCE, Domain.TARGET_ONLY}


# -- edited rows -----------------------------------------------------------------------------------------------

EOS = 257
# Even and odd ids take turns.
TURNS = TokenAutomaton([{t: 1 + t % 2 for t in range(0, 288) if s != 1 + t % 2} for s in range(3)], 288)

EDITS: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5},
    "bias": {"logit_bias": {t: -3.0 for t in range(0, 288, 4)}},
    "allowed ids": {"allowed_token_ids": tuple(range(20, 60))},
    "grammar": {"grammar": TURNS},
    "everything": {
        "presence_penalty": -0.5,
        "repetition_penalty": 2.0,
        "logit_bias": {7: 2.0},
        "grammar": TURNS,
        "bad_words": ((7,), (8, 9)),
        "min_tokens": 8,
        "ignore_eos": False,
    },
}


@pytest.mark.parametrize("name", EDITS)
def test_edited_greedy_text_does_not_change_with_speculation(rig: Rig, parts: Parts, name: str) -> None:
    accepted = 0
    for start in range(4):
        prompt = [(start * 37 + i * 11) % 256 for i in range(5 + start)]
        on = rig.answer(prompt, **EDITS[name])
        off = rig.answer(prompt, speculate=False, **EDITS[name])
        assert on.ids == off.ids
        assert off.last.stats.verified == 0 < on.last.stats.verified
        accepted += on.last.stats.accepted
    assert accepted > 0
    assert on.ids == alone(parts, prompt, **EDITS[name]).ids
    assert on.ids != alone(parts, prompt).ids[: len(on.ids)], "the edits change nothing"
    rig.check_idle()


def test_penalised_greedy_text_is_the_oracles(rig: Rig, parts: Parts) -> None:
    """A loop of forward passes over the whole text, each row edited in fractions."""
    rules = oracle.Rules({7: Fraction(1)}, Fraction(1, 2), Fraction(1, 4), Fraction(3, 2), bad_words=((8,),))
    text: list[int] = []
    for _ in range(24):
        cache = parts.model.new_cache(1, 64)
        result = parts.model.forward(cache, [Segment(0, 0, [*PROMPT, *text])], logit_rows=[len(PROMPT) + len(text) - 1])
        logits = [Fraction(value) for value in result.logits[0].tolist()]
        edited = oracle.edited(logits, tuple(PROMPT), tuple(text), rules)
        text.append(max(edited, key=lambda token: (edited[token], -token)))
    reader = rig.answer(
        PROMPT,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.5,
        logit_bias={7: 1.0},
        bad_words=((8,),),
    )
    assert reader.ids == text


def test_a_banned_token_never_appears(rig: Rig) -> None:
    """The most frequent tokens and pairs of a free answer, banned in each way there is."""
    free = rig.answer(PROMPT, temperature=1.0, seed=3, max_tokens=80).ids
    (often, _), (pair, _) = Counter(free).most_common(1)[0], Counter(pairwise(free)).most_common(1)[0]
    assert often in rig.answer(PROMPT, temperature=1.0, seed=4, max_tokens=80).ids
    bans: list[dict[str, Any]] = [
        {"bad_words": ((often,), pair)},
        {"allowed_token_ids": tuple(t for t in range(288) if t != often), "bad_words": (pair,)},
        {"logit_bias": {often: -100.0}, "bad_words": (pair,)},
    ]
    for ban in bans:
        for temperature, seed in [(0.0, 0), (1.0, 4)]:
            answer = rig.answer(PROMPT, temperature=temperature, seed=seed, max_tokens=80, **ban)
            assert often not in answer.ids
            assert pair not in pairwise(answer.ids)
            assert len(answer.ids) == 80
            assert answer.last.stats.accepted > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("minimum", [0, 1, 2, 5, 11])
def test_min_tokens_is_kept_to_the_token(rig: Rig, temperature: float, minimum: int) -> None:
    """EOS and a stop id are so likely that one of them comes as soon as it may."""
    likely = {"logit_bias": {EOS: 100.0, 9: 100.0}, "stop_token_ids": (9,), "ignore_eos": False}
    answer = rig.answer(PROMPT, temperature=temperature, seed=1, min_tokens=minimum, **likely)
    assert (len(answer.ids), answer.finish) == (minimum + 1, "stop")
    assert not {9, EOS} & set(answer.ids[:-1])


def test_min_tokens_leaves_an_ignored_eos_alone(rig: Rig) -> None:
    answer = rig.answer(PROMPT, min_tokens=4, logit_bias={EOS: 100.0}, max_tokens=6)
    assert answer.ids == [EOS] * 6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_sampled_text_leaves_its_grammar(rig: Rig, temperature: float) -> None:
    answer = rig.answer(PROMPT, temperature=temperature, seed=8, max_tokens=100, grammar=TURNS)
    assert all((a + b) % 2 for a, b in pairwise(answer.ids))
    assert answer.last.stats.accepted > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_the_edits_leave_empty_ends_its_request_only(rig: Rig, temperature: float) -> None:
    """The grammar runs dry after ten tokens, in the middle of a block."""
    dry = TokenAutomaton([*({t: n + 1 for t in range(288)} for n in range(10)), {}], 288)
    victim = rig.ask(PROMPT, temperature=temperature, seed=1, max_tokens=60, grammar=dry)
    other = rig.ask(PROMPT, temperature=temperature, seed=1, max_tokens=60)
    rig.finish(victim, other)
    assert (victim.finish, other.finish) == ("error", "length")
    assert len(victim.ids) <= 10
    assert "removed all tokens" in (victim.last.error or "")
    assert len(other.ids) == 60
    rig.check_idle()


# -- ends ------------------------------------------------------------------------------------------------------


def test_cancel_in_every_phase(rig: Rig) -> None:
    running = [rig.ask(PROMPT, max_tokens=60) for _ in range(3)]
    long = rig.ask([i % 256 for i in range(200)], name="prefill")
    waiting = rig.ask(PROMPT, name="waiting")
    rig.turns(3)
    assert not long.deltas
    assert not waiting.deltas
    for name in ("waiting", "prefill", "r1", "never heard of"):
        rig.engine.cancel(name)
    rig.engine.turn()
    assert [r.finish for r in (waiting, long, running[0])] == ["abort"] * 3
    assert running[0].last.stats.verified > 0
    length = len(running[0].deltas)
    rig.finish(*running)
    assert len(running[0].deltas) == length  # nothing came after the end
    assert [r.finish for r in running[1:]] == ["length"] * 2
    rig.check_idle()
    assert rig.wire.worker.free_slots == 4


def test_a_cancellation_right_after_its_request_is_not_lost(rig: Rig) -> None:
    reader = rig.ask(PROMPT, name="short-lived")
    rig.engine.cancel("short-lived")
    rig.engine.turn()
    assert reader.finish == "abort"
    assert not reader.ids


def test_a_full_queue_refuses_and_recovers(rig: Rig) -> None:
    readers = [rig.ask(PROMPT, max_tokens=3) for _ in range(8)]  # 4 slots, 4 waiting
    with pytest.raises(EngineBusyError, match="8 requests"):
        rig.ask(PROMPT)
    rig.engine.turn()
    with pytest.raises(EngineBusyError):
        rig.ask(PROMPT)  # admitted ones still count
    rig.finish(*readers)
    assert rig.answer(PROMPT, max_tokens=2).finish == "length"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_no_distribution_ends_its_request_only(
    rig: Rig, parts: Parts, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    forward = parts.model.forward

    def poisoned(cache: Any, segments: Sequence[Segment], **options: Any) -> ForwardResult:
        result = forward(cache, segments, **options)
        if len(segments) == 2 and len(segments[0].tokens) > 1 and segments[0].start > 12:
            logits = result.logits.clone()
            logits[0] = torch.nan
            return replace(result, logits=logits)
        return result

    monkeypatch.setattr(parts.model, "forward", poisoned)
    victim = rig.ask(PROMPT, temperature=temperature, seed=1, max_tokens=60)
    other = rig.ask(PROMPT[:3], temperature=temperature, seed=2, max_tokens=60)
    rig.finish(victim, other)
    assert victim.finish == "error"
    assert "logits" in (victim.last.error or "").lower()
    assert other.finish == "length"
    monkeypatch.undo()
    assert other.ids == build_rig(parts).answer(PROMPT[:3], temperature=temperature, seed=2, max_tokens=60).ids
    assert rig.labelled("proposal_discards_total") == {"target_fault": 1}
    rig.check_idle()


class Crash(Exception):
    pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_engine_dies_everybody_hears_of_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    readers = [rig.ask(PROMPT, max_tokens=200) for _ in range(6)]
    turns = 0
    turn = rig.engine.turn

    def fail_later() -> bool:
        nonlocal turns
        turns += 1
        if turns == 5:
            raise Crash("out of luck")
        return turn()

    monkeypatch.setattr(rig.engine, "turn", fail_later)
    rig.engine.start()
    assert rig.engine._thread is not None
    rig.engine._thread.join(20)
    assert not rig.engine.alive
    assert [r.finish for r in readers] == ["error"] * 6
    assert all("out of luck" in (r.last.error or "") for r in readers)
    with pytest.raises(EngineBusyError, match="stopped"):
        rig.ask(PROMPT)
    assert rig.wire.closed
    rig.engine.cancel("r1")  # harmless


def test_stop_aborts_what_runs_and_what_waits(rig: Rig) -> None:
    started = threading.Event()
    request = GenerateRequest("first", tuple(PROMPT), SamplingParams(max_tokens=240, ignore_eos=True))
    rig.engine.submit(request, lambda delta: started.set())
    readers = [rig.ask(PROMPT, max_tokens=240) for _ in range(6)]
    rig.engine.start()
    assert started.wait(10)
    rig.engine.stop()
    assert not rig.engine.alive
    assert [r.finish for r in readers] == ["abort"] * 6
    assert rig.wire.closed
    rig.engine.stop()


def test_an_engine_that_never_ran_can_be_stopped(rig: Rig) -> None:
    rig.engine.stop()
    assert rig.wire.closed
    with pytest.raises(EngineBusyError):
        rig.ask(PROMPT)


# -- books -----------------------------------------------------------------------------------------------------


def test_what_was_drafted_was_verified_or_discarded(rig: Rig) -> None:
    """With every fourth reply lost on the way: proposals = verified rounds + discards, and tokens likewise."""
    lost = Counter[str]()

    def lose(frame: bytes) -> list[bytes]:
        if type_of(frame) is MessageType.COMPLETION:
            lost["completions"] += 1
            if lost["completions"] % 4 == 0:
                lost["planted"] += 1
                damaged = bytearray(frame)
                damaged[60] ^= 1
                return [bytes(damaged)]
        return [frame]

    rig.wire.down = lose
    readers = [rig.ask(PROMPT[i:], max_tokens=50, temperature=float(i % 2), seed=i) for i in range(4)]
    rig.finish(*readers)
    stats = [r.last.stats for r in readers]
    assert lost["planted"] > 3
    discards = rig.labelled("proposal_discards_total")
    assert sum(discards.values()) == lost["planted"]
    assert rig.total("spec_decode_num_drafts_total") == sum(s.rounds for s in stats) + sum(discards.values())
    assert rig.total("spec_decode_num_draft_tokens_total") == sum(s.drafted for s in stats)
    assert rig.total("spec_decode_num_verified_tokens_total") == sum(s.verified for s in stats)
    assert rig.total("spec_decode_num_accepted_tokens_total") == sum(s.accepted for s in stats)
    assert sum(s.drafted - s.verified for s in stats) > 0
    assert rig.total("target_only_steps_total") == sum(s.target_only_steps for s in stats)
    assert rig.labelled("target_only_steps_total")["discarded"] == lost["planted"]
    for reader in readers:
        assert len(reader.ids) == 1 + sum(
            (reader.last.stats.accepted, reader.last.stats.rounds, reader.last.stats.target_only_steps)
        )
    rig.check_idle()


def test_a_wire_that_is_never_there_is_just_an_engine(parts: Parts) -> None:
    rig = build_rig(parts)
    rig.wire.connected = False
    reader = rig.answer(PROMPT)
    assert reader.ids == alone(parts, PROMPT).ids
    assert reader.last.stats.target_only_steps == 23
    assert rig.labelled("target_only_steps_total") == {"worker_down": 23}
