"""STP, ROW, CMT and RNG for drafters: rounds, retries, rows, commits and replay.

Spec: SPEC.md 7.4 to 7.7, 10. Called by `catalogue`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..frame import encode_frame
from ..limits import POSITION_MAX, ROUND_MAX
from ..messages import Commit, ErrorMessage, Step, StepItem
from ..prefix import Key
from ..registry import ErrorCode, Lane, MessageType, SupportPolicy
from .as_verifier import DrafterUnderTest
from .forge import raw_frame, with_values
from .record import Family, Role
from .verdicts import Unmet

STP = Family("STP", Role.DRAFTER)
ROW = Family("ROW", Role.DRAFTER)
CMT = Family("CMT", Role.DRAFTER)
RNG = Family("RNG", Role.DRAFTER)
E = ErrorCode


def _ready(t: DrafterUnderTest, **changes: Any) -> None:
    t.hello()
    t.open(**changes)


@STP.case(1, "rounds follow one another", "REQ-STP-4", "a context that drifts from the anchor")
def rounds(t: DrafterUnderTest) -> None:
    _ready(t)
    for accepted in (0, 1, 2, 5, 0, 3):
        t.round(accept=accepted)


def _depth(depth: int, t: DrafterUnderTest) -> None:
    _ready(t)
    t.require(depth <= t.terms.max_depth, f"depth {depth}")
    t.round(depth=depth)
    t.round(depth=depth, accept=depth)


for _value in range(1, 6):
    STP.add(1 + _value, f"depth {_value}", "REQ-STP-5", "replies of one depth only", partial(_depth, _value))


def _broken(
    code: ErrorCode, change: Callable[[DrafterUnderTest, StepItem], dict[str, Any]], t: DrafterUnderTest
) -> None:
    """A STEP with one wrong field is refused under its key, and the generation is dead."""
    _ready(t)
    item = t.item()
    wrong = replace(item, **change(t, item))
    t.refuses(code, t.step_frame(wrong), Key(wrong.slot, wrong.generation, wrong.round))
    t.is_dead()


_Change = Callable[[DrafterUnderTest, StepItem], dict[str, Any]]
_BROKEN: tuple[tuple[int, str, str, ErrorCode, str, _Change], ...] = (
    (10, "depth above the negotiated maximum", "REQ-STP-5", E.DEPTH_OUT_OF_RANGE, "a reply larger than its staging",
     lambda t, item: {"depth": t.terms.max_depth + 1}),
    (11, "another lane than that of OPEN", "REQ-STP-5", E.LANE_MISMATCH, "rows for another acceptance rule",
     lambda t, item: {"lane": Lane.MATCH if item.lane is not Lane.MATCH else Lane.GREEDY}),
    (12, "an anchor token beyond the vocabulary", "REQ-STP-5", E.TOKEN_OUT_OF_RANGE, "an index into the embedding",
     lambda t, item: {"anchor_token": t.facts.compatibility.vocab_size}),
    (13, "taps after a gap", "REQ-STP-4", E.CONTEXT_GAP, "missing rows that nobody notices",
     lambda t, item: {"tap_first": item.tap_first + 1, "anchor_position": item.anchor_position + 1}),
    (14, "taps that overlap the context", "REQ-STP-4", E.CONTEXT_GAP, "rows that are appended twice",
     lambda t, item: {"tap_first": item.tap_first - 1, "anchor_position": item.anchor_position - 1}),
    (15, "an anchor before the context's end", "REQ-STP-4", E.ANCHOR_MISMATCH, "an anchor among its own context",
     lambda t, item: {"anchor_position": item.anchor_position - 1}),
    (16, "an anchor beyond the context's end", "REQ-STP-4", E.ANCHOR_MISMATCH, "a hole before the anchor",
     lambda t, item: {"anchor_position": item.anchor_position + 1}),
    (17, "the last position", "REQ-STP-4", E.ANCHOR_MISMATCH, "position arithmetic that wraps",
     lambda t, item: {"anchor_position": POSITION_MAX}),
    (18, "a commit before any round", "REQ-STP-9", E.COMMIT_MISMATCH, "a commit of nothing",
     lambda t, item: {"accepted_count": 0, "commit_token": item.anchor_token}),
    (19, "a commit token beyond the vocabulary", "REQ-STP-5", E.TOKEN_OUT_OF_RANGE, "an index into the embedding",
     lambda t, item: {"accepted_count": 0, "commit_token": t.facts.compatibility.vocab_size}),
)  # fmt: skip
for _number, _title, _anchor, _code, _bug, _alter in _BROKEN:
    STP.add(_number, _title, _anchor, _bug, partial(_broken, _code, _alter))


@STP.case(20, "STEP of depth 0", "REQ-STP-5", "a proposal without rows")
def depth_zero(t: DrafterUnderTest) -> None:
    _ready(t)
    item = t.item()
    key = Key(item.slot, item.generation, item.round)
    values = item.values()
    values[7] = 0
    message = Step((item,), (t.describe_taps(item.taps, 1),))
    t.refuses(E.BAD_FIELD, with_values(message, {0: [values]}, key, [item.taps]), key)
    t.is_dead()


@STP.case(21, "the identical STEP again gets the identical bytes", "REQ-STP-7", "a second draw under one key")
def retry(t: DrafterUnderTest) -> None:
    _ready(t)
    for accepted in (0, 2):
        item = t.item(accept=accepted)
        frame = t.step(item)
        reply = t.reply(item)
        for _ in range(3):
            t.send(frame)
            t.same_bytes(reply.frames, t.reply(item).frames)


@STP.case(22, "the identical STEP again before the reply", "REQ-STP-7", "two drafts of one round")
def early_retry(t: DrafterUnderTest) -> None:
    _ready(t)
    item = t.item()
    frame = t.step_frame(item)
    t.send(frame, frame)
    t.slots[0].round, t.slots[0].end = item.round, item.anchor_position
    reply = t.reply(item)
    rest = [raw for _, raw in t.barrier()]
    if rest:
        t.same_bytes(reply.frames, rest)
    t.round()


@STP.case(23, "retries are not new rounds", "REQ-RNG-3", "a retry that moves the round or the context")
def retry_then_go_on(t: DrafterUnderTest) -> None:
    _ready(t)
    for _ in range(3):
        item = t.item(accept=1)
        frame = t.step(item)
        t.reply(item)
        t.send(frame)
        t.reply(item)
    report = t.stats()
    if (report.rounds_unresolved, report.replies_cached) != (0, 1):
        raise Unmet("no unresolved round and one reply", f"{report.rounds_unresolved}, {report.replies_cached}")


_REUSED: tuple[tuple[int, str, _Change], ...] = (
    (24, "depth", lambda t, item: {"depth": item.depth - 1 or 2}),
    (25, "anchor token", lambda t, item: {"anchor_token": item.anchor_token + 1}),
    (26, "prefix digest", lambda t, item: {"prefix_digest": b"\1" * 8}),
    (27, "context version", lambda t, item: {"context_version": 9}),
    (28, "taps", lambda t, item: {"taps": t.taps(1, fill=2)}),
)


def _reused(change: _Change, t: DrafterUnderTest) -> None:
    _ready(t)
    item = t.item()
    t.require(item.depth > 1, "depth 2")
    t.step(item)
    t.reply(item)
    t.refuses(E.ROUND_KEY_REUSED, t.step_frame(replace(item, **change(t, item))), t.slots[0].key)
    t.is_dead()


for _number, _title, _alter in _REUSED:
    STP.add(
        _number,
        f"the same key with another {_title}",
        "REQ-STP-8",
        "a redraw, or a cached reply to another question",
        partial(_reused, _alter),
    )


@STP.case(29, "a round that is not above the last one", "REQ-STP-3", "a round that is played twice")
def lower_round(t: DrafterUnderTest) -> None:
    _ready(t)
    t.slots[0].round = 9
    t.round()
    for round_ in (0, 1, 9):
        t.drops(E.STALE_ROUND, t.step_frame(t.item(accept=None, round=round_)))
    t.round()


@STP.case(30, "rounds may jump, up to the last number", "REQ-STP-3", "rounds that must follow one another")
def jump(t: DrafterUnderTest) -> None:
    _ready(t)
    for round_ in (1000, 2**31, ROUND_MAX):
        t.round(round=round_)


@STP.case(31, "two rounds of one slot at once", "REQ-STP-3", "two unresolved rounds of a slot")
def two_rounds(t: DrafterUnderTest) -> None:
    _ready(t)
    first = t.item()
    t.slots[0].round, t.slots[0].end = first.round, first.anchor_position
    second = t.item(accept=None)
    t.slots[0].end = first.tap_first
    t.send(t.step_frame(first), t.step_frame(second))
    t.slots[0].end, t.slots[0].round = second.anchor_position, second.round
    answer, raw = t.next("replies, or ERROR ROUND_UNRESOLVED")
    if isinstance(answer.message, ErrorMessage):
        if answer.message.code is not E.ROUND_UNRESOLVED:
            raise Unmet("ROUND_UNRESOLVED", answer.message.code.name, actual_frame=raw)
        t.reset()
        t.barrier()
    else:
        t.barrier()
    t.reset()
    t.alive()


@STP.case(32, "STEP for a free slot", "REQ-LIF-1", "a round without a lease")
def free_slot(t: DrafterUnderTest) -> None:
    _ready(t)
    frame = t.step_frame(t.item())
    t.close()
    t.drops(E.SLOT_NOT_OPEN, frame)


@STP.case(33, "STEP of another session", "REQ-ERR-2", "a round that another session pays for")
def other_session(t: DrafterUnderTest) -> None:
    _ready(t)
    t.drops(E.WRONG_SESSION, t.step_frame(t.item(session=1)))
    t.alive()


@STP.case(34, "several slots in one STEP", "REQ-STP-2", "batches that are answered in part")
def batch(t: DrafterUnderTest) -> None:
    t.hello()
    t.require(t.terms.max_slots > 1, "two slots")
    for slot in range(t.terms.max_slots):
        t.open(slot)
    for _ in range(3):
        items = [t.item(slot, accept=1) for slot in range(t.terms.max_slots)]
        t.step(*items)
        t.replies(*items)


@STP.case(35, "one faulty item of a STEP", "REQ-STP-2", "a fault that takes its neighbours along")
def faulty_item(t: DrafterUnderTest) -> None:
    t.hello()
    t.require(t.terms.max_slots > 1, "two slots")
    t.open(0)
    t.open(1)
    good, bad = t.item(0), t.item(1, anchor_position=POSITION_MAX)
    t.send(t.step_frame(bad, good))
    t.slots[0].round, t.slots[0].end = good.round, good.anchor_position
    error, raw = t.expect(ErrorMessage)
    if error.prefix.key != Key(1, bad.generation, bad.round):
        raise Unmet("ERROR under the faulty item's key", str(error.prefix.key), actual_frame=raw)
    t.reply(good)
    t.round(0)
    t.is_dead(1)


@STP.case(36, "a single item under another key than the prefix", "REQ-STP-1", "a prefix that speaks of another slot")
def other_key(t: DrafterUnderTest) -> None:
    _ready(t)
    item = t.item()
    message = Step((item,), (t.describe_taps(item.taps, item.tap_rows),))
    wrong = Key(item.slot, item.generation, item.round + 1)
    t.refuses(E.BAD_FIELD, encode_frame(message, wrong, [item.taps]), wrong)
    t.is_dead()


@STP.case(37, "a single item without a key in the prefix", "REQ-STP-1", "frames that cannot be dropped from the prefix")
def no_key(t: DrafterUnderTest) -> None:
    _ready(t)
    item = t.item()
    message = Step((item,), (t.describe_taps(item.taps, item.tap_rows),))
    t.drops(E.BAD_FIELD, encode_frame(message, bodies=[item.taps]))
    t.alive()


@STP.case(38, "the context version is echoed", "REQ-STP-10", "a completion for another grammar state")
def version(t: DrafterUnderTest) -> None:
    _ready(t)
    for value in (0, 1, 2**32 - 1):
        t.round(context_version=value)


@STP.case(39, "STEP without taps", "REQ-STP-4", "taps that are required")
def no_taps(t: DrafterUnderTest) -> None:
    _ready(t)
    book = t.slots[0]
    t.round(tap_rows=0)
    t.round(accept=None, tap_rows=0)
    assert book.end == 4


@STP.case(40, "taps without rows, and rows without taps", "REQ-BOD-1", "descriptors that are not counted")
def tap_count(t: DrafterUnderTest) -> None:
    _ready(t)
    item = t.item()
    key = Key(item.slot, item.generation, item.round)
    t.refuses(E.BAD_DESCRIPTOR, encode_frame(Step((item,), ()), key), key)
    t.is_dead()


@STP.case(41, "target-only rounds in between", "REQ-CMT-3", "a drafter that counts rounds")
def alone(t: DrafterUnderTest) -> None:
    _ready(t)
    t.round()
    for _ in range(3):
        t.round(accept=None, tap_rows=3)


@ROW.case(1, "rows are dyadic, with their draws among them", "REQ-ROW-1", "a q that is no distribution")
def dyadic(t: DrafterUnderTest) -> None:
    _ready(t)
    for accepted in range(6):
        t.round(accept=accepted)


def _support(policy: SupportPolicy, t: DrafterUnderTest) -> None:
    t.hello()
    t.require(policy <= t.terms.max_support, f"support {int(policy)}")
    t.open(support=policy)
    reply = t.round()
    if max(reply.entries) > policy:
        raise Unmet(f"at most {int(policy)} entries", str(reply.entries))
    if t.terms.max_slots > 1 and t.terms.max_support >= SupportPolicy.K16:
        t.open(1, support=SupportPolicy.K1 if policy is SupportPolicy.K16 else SupportPolicy.K16)
        t.round(1)
    t.round(accept=1)


for _number, _policy in enumerate((SupportPolicy.K1, SupportPolicy.K16, SupportPolicy.K32), 2):
    ROW.add(_number, f"support {int(_policy)}", "REQ-ROW-2", "rows of one size only", partial(_support, _policy))


@ROW.case(5, "frames of one size, whatever is drafted", "REQ-SEC-5", "lengths that tell what was drafted")
def constant(t: DrafterUnderTest) -> None:
    _ready(t)
    sizes = {tuple(len(raw) for raw in t.round(accept=n % 3).frames) for n in range(8)}
    if len(sizes) != 1:
        raise Unmet("one size of replies", str(sorted(sizes)))


@ROW.case(6, "temperature 0 drafts one entry", "REQ-ROW-6", "greedy drafts with a distribution")
def greedy(t: DrafterUnderTest) -> None:
    _ready(t, draft_temperature_micro=0)
    reply = t.round()
    if set(reply.entries) != {1}:
        raise Unmet("rows of one entry", str(reply.entries))


def _commit(accepted: int, t: DrafterUnderTest) -> None:
    """A commit by message, then one in the next STEP."""
    _ready(t)
    t.require(accepted <= t.terms.max_depth, f"depth {accepted}")
    t.round()
    t.commit(0, accepted)
    t.silence()
    t.round(accept=None, tap_rows=accepted + 1)
    t.round(accept=accepted)
    t.round(accept=0)


for _value in range(6):
    CMT.add(
        1 + _value, f"{_value} drafts accepted", "REQ-CMT-1", "arithmetic of accepted drafts", partial(_commit, _value)
    )


@CMT.case(10, "the same commit again", "REQ-CMT-4", "a commit that counts twice")
def again(t: DrafterUnderTest) -> None:
    _ready(t)
    t.round()
    frame = t.commit(0, 1)
    t.silence()
    t.drops(E.DUPLICATE, frame)
    t.round(accept=None, tap_rows=2)


@CMT.case(11, "another commit of the same round", "REQ-CMT-1", "a round with two outcomes")
def other(t: DrafterUnderTest) -> None:
    _ready(t)
    book = t.slots[0]
    t.round()
    t.commit(0, 1)
    t.silence()
    last = book.reply
    assert last is not None
    position = last.item.anchor_position + 1
    message = Commit(book.session, 0, 5, position, t.digest(book, position))
    t.refuses(E.COMMIT_MISMATCH, encode_frame(message, book.key), book.key)
    t.is_dead()


_WRONG_COMMITS: tuple[tuple[int, str, str, ErrorCode, Callable[[Commit], dict[str, Any]]], ...] = (
    (12, "more accepted than the depth", "REQ-CMT-1", E.COMMIT_MISMATCH, lambda c: {"accepted_count": 32}),
    (13, "a position that does not follow", "REQ-CMT-1", E.COMMIT_MISMATCH, lambda c: {"position": c.position + 1}),
    (14, "a token beyond the vocabulary", "REQ-LIM-1", E.TOKEN_OUT_OF_RANGE, lambda c: {"token": 2**31 - 1}),
    (15, "a digest of another history", "REQ-CMT-2", E.DIGEST_MISMATCH, lambda c: {"prefix_digest": b"\1" * 8}),
)


def _wrong_commit(code: ErrorCode, change: Callable[[Commit], dict[str, Any]], t: DrafterUnderTest) -> None:
    _ready(t)
    book = t.slots[0]
    reply = t.round(depth=min(4, t.terms.max_depth))
    position = reply.item.anchor_position + 1
    right = Commit(book.session, 0, t.token_at(book, position), position, t.digest(book, position))
    t.refuses(code, encode_frame(replace(right, **change(right)), book.key), book.key)
    t.is_dead()


for _number, _title, _anchor, _code, _wrong in _WRONG_COMMITS:
    CMT.add(_number, f"COMMIT: {_title}", _anchor, "a commit that is believed", partial(_wrong_commit, _code, _wrong))


@CMT.case(16, "COMMIT before any round", "REQ-CMT-5", "a commit of nothing")
def nothing(t: DrafterUnderTest) -> None:
    _ready(t)
    book = t.slots[0]
    message = Commit(book.session, 0, 1, book.end + 1, bytes(8))
    t.refuses(E.COMMIT_MISMATCH, encode_frame(message, book.key), book.key)
    t.is_dead()


@CMT.case(17, "COMMIT under the key of another round", "REQ-CMT-1", "a commit of the wrong round")
def other_round(t: DrafterUnderTest) -> None:
    _ready(t)
    t.round()
    book = t.slots[0]
    before = t.counters()
    t.commit(0, 1, key=Key(0, book.generation, book.round + 1))
    t.silence()
    if t.counters() == before:
        raise Unmet("a counted drop", "nothing counted")


def _step_commit(code: ErrorCode, change: _Change, t: DrafterUnderTest) -> None:
    """A commit in a STEP that contradicts the round or the anchor."""
    _ready(t)
    t.round(depth=min(4, t.terms.max_depth))
    item = t.item(accept=1)
    wrong = replace(item, **change(t, item))
    t.refuses(code, t.step_frame(wrong), Key(wrong.slot, wrong.generation, wrong.round))
    t.is_dead()


_STEP_COMMITS: tuple[tuple[int, str, str, ErrorCode, _Change], ...] = (
    (18, "more accepted than the depth", "REQ-CMT-1", E.COMMIT_MISMATCH, lambda t, item: {"accepted_count": 9}),
    (19, "an anchor that is not the committed token", "REQ-CMT-3", E.COMMIT_MISMATCH,
     lambda t, item: {"anchor_token": item.anchor_token + 1}),
    (20, "an anchor before the committed token", "REQ-CMT-3", E.COMMIT_MISMATCH,
     lambda t, item: {"accepted_count": 3}),
)  # fmt: skip
for _number, _title, _anchor, _code, _alter in _STEP_COMMITS:
    CMT.add(
        _number, f"STEP commits {_title}", _anchor, "a commit that is believed", partial(_step_commit, _code, _alter)
    )


@CMT.case(21, "COMMIT and a commit in the next STEP", "REQ-CMT-1", "a round that is committed twice")
def twice(t: DrafterUnderTest) -> None:
    _ready(t)
    t.round()
    reply = t.slots[0].reply
    t.commit(0, 1)
    t.silence()
    t.slots[0].reply = reply
    item = t.item(accept=1)
    t.refuses(E.COMMIT_MISMATCH, t.step_frame(item), Key(0, item.generation, item.round))
    t.is_dead()


@CMT.case(22, "a commit and an anchor further on", "REQ-CMT-3", "rounds without the drafter that are forbidden")
def further(t: DrafterUnderTest) -> None:
    _ready(t)
    t.round()
    t.round(accept=1, tap_rows=4)
    t.round(accept=0)


@CMT.case(23, "COMMIT of another session", "REQ-ERR-2", "a commit that another session pays for")
def foreign(t: DrafterUnderTest) -> None:
    _ready(t)
    t.round()
    key = t.slots[0].key
    t.drops(E.WRONG_SESSION, encode_frame(Commit(1, 0, 1, 6, bytes(8)), key))
    t.round()


@CMT.case(24, "COMMIT for a free slot", "REQ-LIF-1", "a commit without a lease")
def freed(t: DrafterUnderTest) -> None:
    _ready(t)
    t.round()
    key = t.slots[0].key
    t.close()
    t.drops(E.SLOT_NOT_OPEN, raw_frame(MessageType.COMMIT, b"\x90", key))


@RNG.case(
    1, "a seed gives the same draws in every slot", "REQ-RNG-1", "draws that depend on slot or generation numbers"
)
def same_draws(t: DrafterUnderTest) -> None:
    t.require(t.facts.deterministic, "determinism")
    t.hello()
    t.require(t.terms.max_slots > 2, "three slots")
    t.open(2)
    t.close(2)
    t.open(0, seed=12345)
    for _ in range(40):
        t.new_generation()
    t.open(2, seed=12345)
    for accepted in (0, 1, 2):
        one, two = t.round(0, accept=accepted), t.round(2, accept=accepted)
        t.same_bytes([one.block], [two.block])


@RNG.case(2, "after RESET too", "REQ-RNG-1", "draws that depend on the absolute generation")
def after_reset(t: DrafterUnderTest) -> None:
    t.require(t.facts.deterministic, "determinism")
    t.hello()
    t.require(t.terms.max_slots > 1, "two slots")
    blocks = []
    for slot in (0, 1):
        opened = t.open(slot, seed=77)
        t.round(slot)
        t._generation = opened.generation
        t.reset(slot)
        blocks.append(t.round(slot).block)
        t.close(slot)
        for _ in range(5):
            t.new_generation()
    t.same_bytes(blocks[:1], blocks[1:])


@RNG.case(3, "the first row does not depend on the seed", "REQ-ROW-1", "a q that was made after the draw")
def law(t: DrafterUnderTest) -> None:
    t.require(t.facts.deterministic, "determinism")
    t.hello()
    t.require(t.terms.max_slots > 1, "two slots")
    laws = []
    for slot, seed in ((0, 1), (1, 2**63 + 9)):
        t.open(slot, seed=seed)
        reply = t.round(slot, depth=1)
        laws.append(reply.block[16:])
    t.same_bytes(laws[:1], laws[1:])


@RNG.case(4, "another round draws again", "REQ-RNG-3", "draws that do not depend on the round")
def fresh(t: DrafterUnderTest) -> None:
    t.require(t.facts.deterministic, "determinism")
    t.hello()
    t.open(seed=5)
    drawn = {t.round(accept=None, tap_rows=0, round=n).tokens for n in range(1, 17)}
    entries = max(t.slots[0].reply.entries) if t.slots[0].reply else 1
    t.require(entries > 1, "rows of more than one entry")
    if len(drawn) == 1:
        raise Unmet("draws that differ between 16 rounds", "one draw")


@RNG.case(5, "another choice draws again", "REQ-RNG-1", "two proposals of a request that are the same")
def chosen(t: DrafterUnderTest) -> None:
    t.require(t.facts.deterministic, "determinism")
    t.hello()
    drawn = set()
    for choice in range(16):
        t.open(seed=5, choice=choice)
        reply = t.round()
        t.require(max(reply.entries) > 1, "rows of more than one entry")
        drawn.add(reply.tokens)
        t.close()
    if len(drawn) == 1:
        raise Unmet("draws that differ between 16 choices", "one draw")
