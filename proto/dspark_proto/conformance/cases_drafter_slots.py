"""OPN, CTX and GEN for drafters: leases, context and generations of a slot.

Spec: SPEC.md 7.1 to 7.3, 7.8, 11. Called by `catalogue`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..frame import encode_frame
from ..limits import GENERATION_MAX
from ..messages import Cancel, Close, Context, Message, Reset
from ..prefix import Key
from ..registry import Cause, ErrorCode, Lane, MessageType, Scope, SupportPolicy
from .as_verifier import DrafterUnderTest
from .forge import position_of, raw_frame, with_values
from .record import Family, Role
from .verdicts import Unmet

OPN = Family("OPN", Role.DRAFTER)
CTX = Family("CTX", Role.DRAFTER)
GEN = Family("GEN", Role.DRAFTER)
E = ErrorCode


@OPN.case(1, "every negotiated slot can be open at once", "REQ-OPN-2", "one slot less than negotiated")
def all_slots(t: DrafterUnderTest) -> None:
    t.hello()
    for slot in range(t.terms.max_slots):
        t.open(slot)
    for slot in range(t.terms.max_slots):
        t.round(slot)
    for slot in range(t.terms.max_slots):
        t.close(slot)
    t.holds_nothing()


@OPN.case(2, "OPEN of a live slot leaves its lease unharmed", "REQ-OPN-2", "a second session that takes over a slot")
def busy(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    t.round()
    message, key = t.open_message()
    t.refuses(E.SLOT_BUSY, encode_frame(message, key), key, Scope.SESSION)
    t.round()


@OPN.case(3, "OPEN with the generation of an earlier lease", "REQ-OPN-3", "frames of two leases under one key")
def stale(t: DrafterUnderTest) -> None:
    t.hello()
    old = t.open().generation
    t.close()
    for generation in (0, old, old + 1):
        message, _ = t.open_message()
        t.drops(E.STALE_GENERATION, encode_frame(message, Key(0, generation)))
    t.open()
    t.alive()


@OPN.case(4, "generations may jump", "REQ-OPN-3", "generations that must follow one another")
def jump(t: DrafterUnderTest) -> None:
    t.hello()
    for generation in (1_000, 2**32, 2**62):
        t._generation = generation - 1
        t.open()
        t.round()
        t.close()
    t.silence()
    t.holds_nothing()


@OPN.case(5, "support above the negotiated maximum", "REQ-OPN-4", "rows larger than the staging for them")
def support(t: DrafterUnderTest) -> None:
    t.hello(max_support=16, reply_bytes=t.parameters().max_depth * (16 + 8 * 16))
    message, key = t.open_message(support=SupportPolicy.K32)
    t.refuses(E.SUPPORT_OUT_OF_RANGE, encode_frame(message, key), key)
    t.open()
    t.alive()


@OPN.case(6, "a slot serves again after CLOSE", "REQ-GEN-6", "a slot that is used up")
def reopened(t: DrafterUnderTest) -> None:
    t.hello()
    for _ in range(5):
        t.open()
        t.round()
        t.close()
    t.holds_nothing()


@OPN.case(7, "context that starts after 0", "REQ-OPN-6", "positions counted from the first row")
def later_start(t: DrafterUnderTest) -> None:
    t.hello()
    t.open(context_start=1000, start_digest=b"12345678")
    item = t.item()
    t.step(item)
    t.require(t.drafted(item), "contexts that start after position 0")


def _seed(seed: int, t: DrafterUnderTest) -> None:
    t.hello()
    t.open(seed=seed)
    t.round()


for _number, _value in ((8, 0), (9, 2**63), (10, 2**64 - 1)):
    OPN.add(_number, f"seed {_value}", "REQ-OPN-1", "seeds of one sign only", partial(_seed, _value))


@OPN.case(11, "sessions of any number", "REQ-OPN-1", "session numbers cut to 32 bits")
def sessions(t: DrafterUnderTest) -> None:
    t.hello()
    for slot, session in enumerate((0, 2**32, 2**64 - 1)):
        t.require(slot < t.terms.max_slots, "three slots")
        t.open(slot, session=session)
        t.round(slot)
        t.close(slot)


def _lane(lane: Lane, t: DrafterUnderTest) -> None:
    """Rounds in one lane; the handle checks that other lanes than RATIO have rows of one entry."""
    t.require(bool(t.facts.compatibility.lanes & 1 << (lane - 1)), f"lane {lane.name}")
    t.hello()
    t.open(lane=lane)
    for _ in range(3):
        t.round(accept=1)


for _number, _member in enumerate(Lane, 12):
    OPN.add(_number, f"lane {_member.name} drafts", "REQ-LAN-2" if _member is Lane.RATIO else "REQ-ROW-6",
            "rows of many entries where one is due", partial(_lane, _member))  # fmt: skip


@CTX.case(
    1, "context in several frames, with and without tokens", "REQ-CTX-1", "token bodies that are required, or ignored"
)
def several(t: DrafterUnderTest) -> None:
    t.hello()
    t.open(prompt=0)
    t.context(0, 2)
    t.context(0, 1, tokens=False)
    t.context(0, 3)
    t.round()


def _position(delta: int, t: DrafterUnderTest) -> None:
    t.hello()
    book = t.open()
    frame = t.context_frame(0, 1, first_position=book.end + delta)
    t.refuses(E.CONTEXT_GAP, frame, Key(0, book.generation))
    t.is_dead()


CTX.add(2, "CONTEXT after a gap", "REQ-CTX-2", "missing rows that nobody notices", partial(_position, 1))
CTX.add(3, "CONTEXT that overlaps", "REQ-CTX-2", "rows that are appended twice", partial(_position, -1))


@CTX.case(4, "more context than the credit", "REQ-CTX-4", "unbounded memory for context")
def credit(t: DrafterUnderTest) -> None:
    t.hello(context_credit_rows=4)
    t.open(prompt=0)
    frame = t.context_frame(0, 5)
    t.refuses(E.CREDIT_EXCEEDED, frame, Key(0, t.slots[0].generation))
    t.is_dead()


@CTX.case(5, "credit is granted as context is used", "REQ-CTX-4", "a prompt longer than the window never gets through")
def granted(t: DrafterUnderTest) -> None:
    t.hello(context_credit_rows=8)
    t.open(prompt=0)
    sent = 0
    for _ in range(8):
        rows = min(4, t.credit_limit - sent)
        if rows <= 0:
            raise Unmet("credit for more rows once the first were used", f"a limit of {t.credit_limit} rows")
        t.context(0, rows)
        sent += rows
        t.barrier()
    t.round()


@CTX.case(6, "credit is shared by the slots", "REQ-CTX-4", "a window for each slot")
def shared(t: DrafterUnderTest) -> None:
    t.hello(context_credit_rows=4)
    t.require(t.terms.max_slots > 1, "two slots")
    t.open(0, prompt=0)
    t.open(1, prompt=0)
    first = t.context_frame(0, 3)
    second = t.context_frame(1, 3)
    t.send(first, second)
    t.slots[0].end += 3
    frames = t.barrier()
    t.require(bool(frames) or t.credit_limit < 6, "a window that is not refilled between two frames")
    if not frames:
        raise Unmet("CREDIT_EXCEEDED for the second frame", "6 rows within a credit of 4")


@CTX.case(7, "taps of STEP need no credit", "REQ-CTX-4", "rounds that starve when the window is used up")
def step_taps(t: DrafterUnderTest) -> None:
    t.hello(context_credit_rows=4)
    t.open(prompt=4)
    for _ in range(8):
        t.round(accept=2)


@CTX.case(8, "CONTEXT of another session", "REQ-ERR-2", "a message that the slot's new owner pays for")
def other_session(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    t.drops(E.WRONG_SESSION, t.context_frame(0, 1, session=1))
    t.alive()


@CTX.case(9, "CONTEXT for a free slot", "REQ-LIF-1", "context without a lease")
def free_slot(t: DrafterUnderTest) -> None:
    t.hello()
    book = t.open()
    frame = t.context_frame(0, 1, key=Key(0, book.generation))
    t.close()
    t.drops(E.SLOT_NOT_OPEN, frame)
    t.holds_nothing()


@CTX.case(10, "CONTEXT while a round is unresolved", "REQ-CTX-3", "context under a draft")
def during_round(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    item = t.item()
    frame = t.step_frame(item)
    book = t.slots[0]
    book.end = item.anchor_position
    t.send(frame, t.context_frame(0, 1))
    book.round = item.round
    answer, raw = t.next("a reply, or ERROR ROUND_UNRESOLVED")
    if answer.message.TYPE is MessageType.ERROR:
        t.same_bytes([b"ROUND_UNRESOLVED"], [answer.message.code.name.encode()])  # type: ignore[attr-defined]
        t.is_dead()
    elif answer.message.TYPE is not MessageType.ROW:
        raise Unmet("ROW or ERROR", answer.message.NAME, actual_frame=raw)


@CTX.case(11, "CONTEXT without rows", "REQ-LIM-1", "an empty message that moves nothing")
def no_rows(t: DrafterUnderTest) -> None:
    t.hello()
    book = t.open()
    message = Context(book.session, book.end, 1, ())
    key = Key(0, book.generation)
    t.refuses(E.BAD_FIELD, with_values(message, {position_of(Context, "rows"): 0}, key), key)
    t.is_dead()


@CTX.case(12, "CONTEXT without TAPS", "REQ-BOD-1", "bodies that are not looked for")
def no_taps(t: DrafterUnderTest) -> None:
    t.hello()
    book = t.open()
    key = Key(0, book.generation)
    t.refuses(E.BAD_DESCRIPTOR, encode_frame(Context(book.session, book.end, 1, ()), key), key)
    t.is_dead()


@CTX.case(13, "a large CONTEXT", "REQ-CTX-5", "frames that do not fit the receiver")
def large(t: DrafterUnderTest) -> None:
    t.hello(context_credit_rows=512)
    t.open(prompt=0)
    rows = min(256, t.terms.context_credit_rows, 2**20 // t.terms.tap_row_bytes)
    t.context(0, rows)
    t.round()


@CTX.case(14, "credit of a refused CONTEXT comes back", "REQ-CTX-6", "a window that each refusal makes smaller")
def refused_credit(t: DrafterUnderTest) -> None:
    t.hello(context_credit_rows=8)
    book = t.open(prompt=0)
    rows = t.terms.context_credit_rows
    t.refuses(E.CONTEXT_GAP, t.context_frame(0, rows, first_position=3), Key(0, book.generation))
    if t.credit_limit < 2 * rows:
        raise Unmet(f"credit for {2 * rows} rows in the next PONG", f"{t.credit_limit}")
    t.is_dead()


@CTX.case(20, "a digest over other tokens than those of CONTEXT", "REQ-DIG-2", "drafting for another history")
def wrong_digest(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    item = t.item(tap_rows=0)
    frame = t.step_frame(replace(item, prefix_digest=b"\1" * 8))
    t.refuses(E.DIGEST_MISMATCH, frame, Key(0, item.generation, item.round))
    t.is_dead()


@CTX.case(21, "a digest that does not follow from the last round", "REQ-DIG-1", "a digest that covers the prompt only")
def later_digest(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    t.round()
    item = t.item(accept=2)
    frame = t.step_frame(replace(item, prefix_digest=b"\1" * 8))
    t.refuses(E.DIGEST_MISMATCH, frame, Key(0, item.generation, item.round))
    t.is_dead()


@CTX.case(22, "an unknown history is adopted", "REQ-DIG-2", "refusing what cannot be known")
def adopted(t: DrafterUnderTest) -> None:
    t.hello()
    book = t.open(prompt=0)
    t.context(0, 4, tokens=False)
    item = replace(t.item(), prefix_digest=b"\7" * 8)
    t.step(item)
    t.reply(item)
    book.start, book.start_digest = item.anchor_position, b"\7" * 8
    t.round(accept=2)
    t.round(accept=1)


_ENDS: dict[str, type[Reset] | type[Cancel] | type[Close]] = {"RESET": Reset, "CANCEL": Cancel, "CLOSE": Close}


def _stale_end(name: str, t: DrafterUnderTest) -> None:
    """RESET, CANCEL and CLOSE need a generation above the current one."""
    t.hello()
    book = t.open()
    for generation in (0, book.generation - 1, book.generation):
        t.drops(E.STALE_GENERATION, encode_frame(_ENDS[name](book.session, Cause.PREEMPTED), Key(0, generation)))
    t.alive()


def _foreign_end(name: str, t: DrafterUnderTest) -> None:
    """Only the session that owns the slot can end it."""
    t.hello()
    t.open()
    t.drops(E.WRONG_SESSION, encode_frame(_ENDS[name](1, Cause.PREEMPTED), Key(0, t.new_generation())))
    t.alive()


for _index, _name in enumerate(_ENDS):
    GEN.add(
        1 + _index,
        f"{_name} with a generation that is not new",
        "REQ-GEN-2",
        "an old message that ends a new lease",
        partial(_stale_end, _name),
    )
    GEN.add(4 + _index, f"{_name} of another session", "REQ-ERR-2", "a session that ends another one's lease",
            partial(_foreign_end, _name))  # fmt: skip


@GEN.case(
    7, "RESET kills everything of the old generation", "REQ-GEN-3", "replies of a dead generation that are sent again"
)
def reset(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    item = t.item()
    old = t.step(item)
    t.reply(item)
    t.reset()
    t.drops(E.STALE_GENERATION, old)
    t.round()


@GEN.case(8, "after RESET the context is empty", "REQ-GEN-3", "rows of the old generation that draft on")
def empty_context(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    t.round()
    book = t.reset(prompt=0)
    book.end = 4
    t.refuses(E.CONTEXT_GAP, t.context_frame(0, 1), Key(0, book.generation))


@GEN.case(9, "100 RESETs in a row", "REQ-GEN-3", "memory that each generation takes and none gives back")
def storm(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    for _ in range(100):
        t.reset(prompt=0)
    t.reset()
    t.round()
    t.close()
    t.holds_nothing()


@GEN.case(10, "CANCEL leaves the slot dormant until RESET", "REQ-GEN-5", "a cancelled slot that goes on")
def cancel(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    book = t.slots[0]
    t.cancel()
    t.drops(E.SLOT_NEEDS_RESET, t.step_frame(t.item()))
    if t.stats().slots_open != 1:
        raise Unmet("one open slot", str(t.stats().slots_open))
    assert book.session == t.slots[0].session
    t.reset()
    t.round()


@GEN.case(11, "CANCEL twice, then CLOSE", "REQ-GEN-5", "a dormant slot that cannot be given back")
def cancel_twice(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    t.cancel()
    t.cancel()
    t.close()
    t.silence()
    t.holds_nothing()


@GEN.case(12, "CANCEL races the reply", "REQ-GEN-5", "a reply under a generation that its sender has been told is dead")
def cancel_race(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    item = t.item()
    frame = t.step_frame(item)
    t.slots[0].end = item.anchor_position
    t.slots[0].round = item.round
    key = Key(0, t.new_generation())
    t.send(frame, encode_frame(Cancel(item.session, Cause.CLIENT_GONE), key))
    t.slots[0].generation = key.generation
    for answer, raw in t.barrier():
        if answer.prefix.generation != item.generation:
            raise Unmet(f"nothing, or frames of generation {item.generation}", str(answer.prefix.key), actual_frame=raw)
    t.reset()
    t.round()


def _dead_key(kind: MessageType, t: DrafterUnderTest) -> None:
    """A message of the slot's previous generation is dropped from its prefix alone."""
    t.hello()
    old = t.open().generation
    t.reset()
    for generation in (old, old + 1000):
        t.drops(E.STALE_GENERATION, raw_frame(kind, b"\x90", Key(0, generation, 1)))
    t.round()


for _number, _kind in ((13, MessageType.CONTEXT), (14, MessageType.STEP), (15, MessageType.COMMIT)):
    GEN.add(
        _number,
        f"{_kind.name} of another generation",
        "REQ-PFX-9",
        "decoding, and failing a slot for, stale frames",
        partial(_dead_key, _kind),
    )


@GEN.case(16, "CLOSE frees slot, round and reply", "REQ-GEN-6", "a lease that outlives its session")
def close(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    t.round()
    report = t.stats()
    if (report.slots_open, report.replies_cached) != (1, 1):
        raise Unmet("one slot and one reply while the session lives", f"{report.slots_open}, {report.replies_cached}")
    t.close()
    t.holds_nothing()


@GEN.case(17, "RESET, CANCEL and CLOSE of a free slot", "REQ-LIF-1", "a slot that comes to life without OPEN")
def free(t: DrafterUnderTest) -> None:
    t.hello()
    messages: list[Message] = [Reset(1, Cause.PREEMPTED), Cancel(1, Cause.PREEMPTED), Close(1, Cause.FINISHED)]
    for message in messages:
        t.drops(E.SLOT_NOT_OPEN, encode_frame(message, Key(0, t.new_generation())))
    t.holds_nothing()


@GEN.case(18, "ABA: two generations later, an old key is still dead", "REQ-GEN-2", "keys that compare rounds only")
def aba(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    item = t.item()
    old = t.step(item)
    t.reply(item)
    t.close()
    t.open()
    t.drops(E.STALE_GENERATION, old)
    t.reset()
    t.drops(E.STALE_GENERATION, old)
    t.round()


@GEN.case(19, "a generation above the limit", "REQ-LIM-1", "a counter that wraps")
def too_high(t: DrafterUnderTest) -> None:
    t.hello()
    message, _ = t.open_message()
    t.say(message, Key(0, GENERATION_MAX + 1))
    t.barrier()
    if t.stats().slots_open:
        raise Unmet("OPEN refused", "a slot of generation 2^63")


@GEN.case(20, "OPEN frames of two slots do not mix", "REQ-ROL-1", "state that is kept once for all slots")
def two_slots(t: DrafterUnderTest) -> None:
    t.hello()
    t.require(t.terms.max_slots > 1, "two slots")
    t.open(0)
    t.open(1)
    t.round(0)
    t.reset(1)
    t.round(0, accept=3)
    t.close(1)
    t.round(0, accept=1)
