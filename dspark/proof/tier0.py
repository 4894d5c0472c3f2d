"""Tier 0: exact joint laws by enumeration, for every lane, depth, support, processor, shard split and admission rule.

Invariants: no randomness and no tolerance; laws are fractions and compared with ``==``. The one exception is the claim
about the serving constants, whose coin of 2**64 values rounds: it has a proven bound.

Called by ``prove`` and by tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

from dspark import oracle
from dspark.admission import EarlyStop, FixedBudget, FixedDepth, StoppingRule
from dspark.dyadic import RowError, RowFault
from dspark.oracle import Prefix, SequenceLaw
from dspark.processors import SamplingPolicy
from dspark.proof.admission_laws import (
    A_CURVE,
    APPENDIX_A,
    Confidence,
    Memory,
    Threshold,
    admitted_law,
    appendix_a_head,
    erratic,
    global_argmax,
    independent_law,
    only_zero_head,
    overlap,
    pair_law,
    remembering_law,
    saturated,
    stopping,
    uniform_toy,
)
from dspark.proof.block_steps import TINY, exact_block_grid, expected_accepted
from dspark.proof.claims import Claim, FactClaim, LawClaim, first_difference, parts, total_variation
from dspark.proof.edited_toys import EDITED_TOYS
from dspark.proof.shard_steps import sharded_law
from dspark.proof.subject import Subject
from dspark.proof.toys import MEDIUM, SMALL, Step, Toy, joint_law, proposals, round_law, verdict_law
from dspark.proof.worker_steps import FAULTY_DENSE, FAULTY_SPARSE, SOUND_DENSE, SOUND_SPARSE
from dspark.tickets import STANDARD

PLAIN = Toy("draft misses a token", MEDIUM)
TOP_K = Toy("top-k target", SMALL, vocab=4, support=3, policy=SamplingPolicy(top_k=2))
TOP_P = Toy("top-p target", SMALL, vocab=4, policy=SamplingPolicy(0.8, 0, 0.7))
MIN_P = Toy("min-p target", SMALL, vocab=4, policy=SamplingPolicy(1.0, 0, 1.0, 0.4))
GREEDY = Toy("temperature 0", MEDIUM, policy=SamplingPolicy(temperature=0.0))
COLD_DRAFT = Toy("colder draft", MEDIUM, support=3, draft_temperature=0.5)
ONE_ENTRY = Toy("one-entry rows", SMALL, support=1)
DENSE = Toy("dense rows", SMALL, vocab=4, support=4)
TOYS = (PLAIN, TOP_K, TOP_P, MIN_P, GREEDY, COLD_DRAFT, ONE_ENTRY, DENSE)
COLD = (GREEDY, Toy("temperature 0, dense rows", SMALL, vocab=4, support=4, policy=SamplingPolicy(temperature=0.0)))
NARROW = Toy("two tokens", SMALL, vocab=2)
ZOO_TOYS = (replace(PLAIN, grid=SMALL), TOP_K, replace(COLD_DRAFT, grid=SMALL))
SPLITS = {"two shards": (0, 1, 3), "an empty shard": (0, 2, 2, 3), "one token each": (0, 1, 2, 3)}
MASKED = Toy("masked shard", SMALL, vocab=4, policy=SamplingPolicy(top_k=1, temperature=0.7))


def claims(*, long: bool = False) -> list[Claim]:
    """All of Tier 0; ``long`` adds depths and lengths that take minutes."""
    found: list[Claim] = [*_lanes(), *_rounds(), *_edited(4 if long else 3), *_shards(), *_admission(), *_other()]
    if long:
        found += _deep()
    return found


def zoo_claims() -> list[Claim]:
    """The small claims that mutants are shown to: all parts, few cases."""
    ratio = [_lane_claim("ratio", toy, 1, 2) for toy in ZOO_TOYS]
    ratio += [_lane_claim("ratio", toy, 2, 3) for toy in ZOO_TOYS]
    lanes = [_lane_claim("match", toy, depth, 2) for toy in ZOO_TOYS for depth in (1, 2)]
    lanes += [_lane_claim("greedy", toy, 2, 3) for toy in COLD]
    lanes += [_lane_claim("block", replace(toy, grid=TINY), 2, 3) for toy in (*ZOO_TOYS, DENSE)]
    lanes.append(_lane_claim("block", replace(NARROW, grid=TINY), 3, 3))
    return [*ratio, *lanes, *_edited(3, depths=(1, 2)), *_shards(few=True), *_admission(), *_other()]


# --- lanes -----------------------------------------------------------------------------------------------------------


def _target(toy: Toy, length: int) -> Callable[[], SequenceLaw]:
    return lambda: oracle.ancestral_law(toy.p, length)


def _lane_claim(lane: str, toy: Toy, depth: int, length: int) -> LawClaim:
    def seen(subject: Subject) -> SequenceLaw:
        step: Step = getattr(subject, lane)
        return joint_law(toy, depth, length, step, subject.drawn)

    name = f"{lane}, {toy.name}, depth {depth}: joint law of {length} tokens"
    return LawClaim(name, parts(lane, "drawn"), seen, _target(toy, length))


def _lanes() -> Iterator[LawClaim]:
    for lane in ("ratio", "match"):
        for toy in TOYS:
            yield from (_lane_claim(lane, toy, depth, 3) for depth in (0, 1, 2))
        yield _lane_claim(lane, replace(PLAIN, grid=SMALL), 3, 3)
        yield _lane_claim(lane, NARROW, 4, 3)
    for toy in (replace(toy, grid=TINY) for toy in TOYS):
        yield from (_lane_claim("block", toy, depth, 3) for depth in (0, 1, 2))
    yield _lane_claim("block", replace(PLAIN, grid=TINY), 3, 3)
    yield _lane_claim("block", replace(NARROW, grid=TINY), 4, 3)
    for toy in COLD:
        yield from (_lane_claim("greedy", toy, depth, 3) for depth in range(5))


def _deep() -> Iterator[LawClaim]:
    for lane in ("ratio", "match"):
        for toy in TOYS:
            yield _lane_claim(lane, toy, 2, 4)
            yield _lane_claim(lane, replace(toy, grid=SMALL), 3, 4)
        yield _lane_claim(lane, NARROW, 4, 5)
        yield _lane_claim(lane, replace(PLAIN, grid=SMALL), 4, 4)
    for toy in TOYS:
        yield _lane_claim("block", replace(toy, grid=TINY), 2, 4)
        finer = replace(toy, name=f"{toy.name}, finer grid", grid=exact_block_grid(8, 16))
        yield _lane_claim("block", finer, 2, 3)
    yield _lane_claim("block", replace(PLAIN, grid=TINY), 4, 4)


def _rounds() -> Iterator[Claim]:
    """Not only the tokens: how many one round appends, jointly with them."""
    for toy in TOYS:
        for prefix in ((), (0,), (1, 2)):
            name = f"{toy.name}, behind {list(prefix)}: one round of depth 2"
            wanted = (oracle.round_law, oracle.match_round_law)
            for lane, law in zip(("ratio", "match"), wanted, strict=True):
                yield LawClaim(
                    f"{lane}, {name}",
                    parts(lane, "drawn"),
                    partial(_one_round, lane, toy, prefix),
                    partial(law, toy.p, toy.q, prefix, 2),
                )
    yield FactClaim("first draft is accepted with sum min(p, q) and sum p q", parts("ratio", "match"), _acceptance, 4)
    yield FactClaim("block: drafts accepted as its definition says", parts("block"), _block_acceptance, 4)
    yield FactClaim("block: no fewer drafts accepted than token by token", frozenset(), _block_gain, 6)
    yield FactClaim("serving constants: joint law of two tokens within 12 / 2**64", parts("ratio"), _serving_constants)


def _one_round(lane: str, toy: Toy, prefix: Prefix, subject: Subject) -> SequenceLaw:
    return round_law(toy, prefix, 2, getattr(subject, lane), subject.drawn)


def _acceptance(subject: Subject) -> str | None:
    """An exact but slow lane would keep every law and fail this."""
    pairs = []
    for toy in (PLAIN, TOP_K):
        p, q = toy.p(()), toy.q(())
        wanted = sum(map(min, p, q)), sum((a * b for a, b in zip(p, q, strict=True)), Fraction(0))
        for lane, rate in zip(("ratio", "match"), wanted, strict=True):
            pairs.append((f"{lane}, {toy.name}", _accepted(toy, getattr(subject, lane)), rate))
    return first_difference(pairs)


def _block_acceptance(subject: Subject) -> str | None:
    pairs = []
    for toy in (replace(PLAIN, grid=TINY), replace(COLD_DRAFT, grid=TINY)):
        for depth in (1, 2):
            wanted = expected_accepted(toy, depth, block=True)
            pairs.append((f"{toy.name}, depth {depth}", _accepted(toy, subject.block, depth), wanted))
    return first_difference(pairs)


def _block_gain(_: Subject) -> str | None:
    """At the serving constants, up to the floors of the weights; toys whose q misses a token gain too."""
    pairs = []
    for toy in (Toy("standard", STANDARD), Toy("standard, colder", STANDARD, support=3, draft_temperature=0.5)):
        for depth in (1, 2, 3):
            block, token = (expected_accepted(toy, depth, block=rule) for rule in (True, False))
            floors = Fraction(depth * toy.vocab**depth, STANDARD.total)
            pairs.append((f"{toy.name}, depth {depth}", block + floors >= token, True))
    return first_difference(pairs)


def _accepted(toy: Toy, step: Step, depth: int = 1) -> Fraction:
    total = Fraction(0)
    for case, share in proposals(toy, (), depth):
        law = verdict_law(lambda draws, case=case: step(case, draws), toy.grid.coin)  # type: ignore[misc]
        total += share * sum(chance * verdict.accepted for verdict, chance in law.items())
    return total


def _serving_constants(subject: Subject) -> str | None:
    """Each decision is off by less than 2**-64, and there are at most 12 of them."""
    toy = Toy("standard", STANDARD)
    distance = total_variation(joint_law(toy, 1, 2, subject.ratio), oracle.ancestral_law(toy.p, 2))
    return None if distance < Fraction(12, 2**64) else f"total variation {float(distance):.3g}"


# --- processors, shards ----------------------------------------------------------------------------------------------


def _edited(length: int, depths: tuple[int, ...] = (0, 1, 2, 3)) -> Iterator[LawClaim]:
    for toy in EDITED_TOYS:
        for depth in depths:
            yield LawClaim(
                f"processors, {toy.name}, depth {depth}: joint law of {length} tokens",
                parts("edited"),
                partial(_edited_law, toy, depth, length),
                _target(toy, length),
            )


def _edited_law(toy: Toy, depth: int, length: int, subject: Subject) -> SequenceLaw:
    return joint_law(toy, depth, length, subject.edited)


def _sharded_law(toy: Toy, bounds: tuple[int, ...], depth: int, length: int, subject: Subject) -> SequenceLaw:
    return sharded_law(toy, bounds, depth, length, subject.sharded)


def _shards(*, few: bool = False) -> Iterator[LawClaim]:
    cases: list[tuple[str, Toy, tuple[int, ...], int, int]] = [
        (name, replace(PLAIN, grid=SMALL), bounds, 1, 2) for name, bounds in SPLITS.items()
    ]
    cases += [("a shard without mass", MASKED, bounds, 1, 2) for bounds in ((0, 2, 4), (0, 3, 4), (0, 1, 4))]
    if few:
        cases = [case for case in cases if len(case[2]) == 3]
    else:
        cases.append(("two shards", DENSE, (0, 2, 4), 2, 2))
    for name, toy, bounds, depth, length in cases:
        yield LawClaim(
            f"{name} {list(bounds)}, {toy.name}, depth {depth}: joint law of {length} tokens",
            parts("sharded"),
            partial(_sharded_law, toy, bounds, depth, length),
            _target(toy, length),
        )
    standard = Toy("standard", STANDARD)
    yield LawClaim(
        "two shards at the serving constants: one round of depth 1 as over the whole row",
        parts("sharded"),
        lambda subject: sharded_law(standard, (0, 1, 3), 1, 1, subject.sharded),
        lambda: joint_law(standard, 1, 1),
    )


# --- admission -------------------------------------------------------------------------------------------------------

_RULES: dict[str, StoppingRule] = {
    "fixed depth 1": FixedDepth(1),
    "fixed budget 1": FixedBudget(1),
    "threshold": Threshold(Fraction(1, 2)),
}
_HEADS: dict[str, Confidence] = {"perfect head": overlap, "erratic head": erratic}


def _admission() -> Iterator[Claim]:
    toys = (replace(PLAIN, grid=SMALL), Toy("colder draft", SMALL, support=3, draft_temperature=0.5))
    for toy in toys:
        for head_name, head in _HEADS.items():
            yield LawClaim(
                f"early stop, {toy.name}, {head_name}: joint law of 3 tokens",
                parts("admission"),
                partial(_admitted_law, toy, head),
                _target(toy, 3),
            )
            for rule_name, rule in _RULES.items():
                yield LawClaim(
                    f"{rule_name}, {toy.name}, {head_name}: joint law of 3 tokens",
                    frozenset(),
                    partial(_stopped_law, toy, head, rule),
                    _target(toy, 3),
                )
    for head_name, head in _HEADS.items():
        yield LawClaim(
            f"early stop of a block, {head_name}: joint law of 3 tokens",
            parts("admission", "block"),
            partial(_admitted_block, replace(PLAIN, grid=TINY), head),
            _target(replace(PLAIN, grid=TINY), 3),
        )
    yield LawClaim(
        "DSpark appendix A: joint law of 2 tokens",
        parts("admission"),
        lambda subject: admitted_law(APPENDIX_A, 2, 2, subject.admission, appendix_a_head),
        _target(APPENDIX_A, 2),
    )
    for head_name, head in {**_HEADS, "saturated head": saturated}.items():
        yield LawClaim(
            f"two requests share a budget, {head_name}: joint law of 2 tokens each",
            parts("shared"),
            partial(_pair_law, head),
            partial(independent_law, 2),
            heads=(0, 2),
        )
    yield LawClaim(
        "rounds that remember discarded drafts: joint law of 3 tokens",
        parts("memory"),
        lambda subject: remembering_law(APPENDIX_A, subject.memory, 3),
        _target(APPENDIX_A, 3),
    )


def _admitted_law(toy: Toy, head: Confidence, subject: Subject) -> SequenceLaw:
    return admitted_law(toy, 2, 3, subject.admission, head)


def _admitted_block(toy: Toy, head: Confidence, subject: Subject) -> SequenceLaw:
    return admitted_law(toy, 2, 3, subject.admission, head, subject.block)


def _stopped_law(toy: Toy, head: Confidence, rule: StoppingRule, _: Subject) -> SequenceLaw:
    return admitted_law(toy, 2, 3, stopping(rule), head)


def _pair_law(head: Confidence, subject: Subject) -> SequenceLaw:
    return pair_law(subject.shared, head, 2)


# --- seed regressions, replies ---------------------------------------------------------------------------------------


def _other() -> Iterator[Claim]:
    yield FactClaim("seed regressions: 3/4 instead of 1/2, DSpark appendix A, 0.73 instead of 0.7", frozenset(),
                    _seed_regressions, 12)  # fmt: skip
    yield FactClaim("faulty sparse replies are refused", parts("read_sparse"), _sparse_refusals, len(FAULTY_SPARSE))
    yield FactClaim("faulty dense replies are refused", parts("read_dense"), _dense_refusals, len(FAULTY_DENSE))


def _first(law: SequenceLaw, vocab: int, place: int = 0) -> list[Fraction]:
    return [sum((p for tokens, p in law.items() if tokens[place] == v), Fraction(0)) for v in range(vocab)]


def _seed_regressions(_: Subject) -> str | None:
    """The wrong rules give the wrong numbers of the documents, to the fraction; the right ones the right numbers."""
    pairs: list[tuple[str, object, object]] = []
    for v in (2, 3, 4):
        toy, keep_zero = uniform_toy(v), (lambda chain: int(chain[1]))
        biased = _first(admitted_law(toy, 2, 1, keep_zero, only_zero_head), v)
        wanted = [Fraction(2 * v - 1, v * v)] + [Fraction(v - 1, v * v)] * (v - 1)
        pairs.append((f"admit only token 0 of {v}", biased, wanted))
        fixed = _first(admitted_law(toy, 2, 1, stopping(FixedDepth(1)), only_zero_head), v)
        pairs.append((f"fixed depth on {v}", fixed, [Fraction(1, v)] * v))
    wrong, right = [Fraction(17, 20), Fraction(3, 20)], [Fraction(7, 10), Fraction(3, 10)]
    search = _first(admitted_law(APPENDIX_A, 2, 1, global_argmax(A_CURVE), appendix_a_head), 2)
    pairs.append(("appendix A, global search", search, wrong))
    stops = _first(admitted_law(APPENDIX_A, 2, 1, _early_stop_of_appendix_a, appendix_a_head), 2)
    pairs.append(("appendix A, early stop", stops, right))
    reused, fresh = (remembering_law(APPENDIX_A, Memory(same), 2) for same in (True, False))
    pairs.append(("fresh numbers", _first(fresh, 2, 1), right))
    pairs.append(("numbers used again are biased", _first(reused, 2, 1) != right, True))
    return first_difference(pairs)


def _early_stop_of_appendix_a(chain: Sequence[Fraction]) -> int:
    """Algorithm 1 on the step curve of the appendix."""
    return stopping(EarlyStop(A_CURVE))(chain)


def _refused_with(read: Callable[[], object]) -> RowFault | None:
    try:
        read()
    except RowError as error:
        return error.code
    return None


def _sparse_refusals(subject: Subject) -> str | None:
    read = subject.read_sparse
    pairs = [(fault, _refused_with(partial(reply.read, read)), fault) for fault, reply in FAULTY_SPARSE.items()]
    return first_difference([("a sound reply", _refused_with(lambda: SOUND_SPARSE.read(read)), None), *pairs])


def _dense_refusals(subject: Subject) -> str | None:
    read = subject.read_dense
    pairs = [(fault, _refused_with(partial(reply.read, read)), fault) for fault, reply in FAULTY_DENSE.items()]
    return first_difference([("a sound reply", _refused_with(lambda: SOUND_DENSE.read(read)), None), *pairs])
