"""One pair under fire: every frame goes through ``feed``, which holds the connection to the invariants.

The invariants, each a kind of :class:`Escape`: ``exception`` (receive, or a call that its events ask for,
raised), ``uncounted`` (a frame without any effect was not counted, REQ-ERR-1), ``damage`` (a frame with a
broken prefix did something, REQ-PFX-3), ``bystander`` (a slot that the frame does not name changed,
REQ-ERR-5), ``answers`` (too many, or ERROR for ERROR, REQ-ERR-3), ``limit`` (a ledger beyond a hard limit,
REQ-LIM-1), ``memory``, ``time``, and ``liveness`` (afterwards no clean round). Called by ``campaign``, the
tests and the atheris harness.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from struct import unpack_from
from typing import Final

from ..buffers import Buffer
from ..checksums import crc32c
from ..errors import RemoteProtocolError
from ..events import HelloReceived, StatsReceived, StepArrived
from ..frame import decode_frame
from ..limits import GENERATION_MAX, PREFIX_BYTES
from ..messages import Step
from ..registry import MessageType
from ..states import DrafterState, SlotState, VerifierState
from .conversation import BYSTANDER, recorded
from .encoding import PREFIX_CRC_AT
from .limits import ANSWERS_MAX, FRAME_CPU_NS_MAX, RETAINED_BYTES_MAX, TRACED_BYTES_MAX
from .observation import Observation, blocks_taken, observe
from .pair import Event, Pair, Parcel, Side
from .specimens import type_of

_LIVE: Final = (VerifierState.ACTIVE, VerifierState.DRAINING, DrafterState.ACTIVE, DrafterState.DRAINING)


class Escape(Exception):
    """An invariant is broken. ``kind`` is one of those above, ``detail`` says how."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind = kind
        self.detail = detail
        super().__init__(f"{kind}: {detail}")


class Trial:
    """Feeds frames to the connections of ``pair``; ``traced`` also measures memory (slow).

    ``frames``, ``accepted`` and ``refused`` count what was fed: refused is a frame that caused no event and
    raised a counter. ``changes`` counts frames that changed a ledger, ``reconnected`` says that the terms under
    which the trial began are gone, ``by_code`` holds the raised counters.
    """

    def __init__(self, pair: Pair, *, bystander: bool = True, traced: bool = False) -> None:
        self.pair = pair
        self.traced = traced
        self.frames = self.accepted = self.refused = self.changes = 0
        self.reconnected = False
        self.by_code: Counter[str] = Counter()
        self.frame_ns_max = self.traced_bytes_max = 0
        self._bystander = bystander
        self._seen = {side: observe(pair.connection(side)) for side in Side}
        self._start = dict(self._seen)
        self._counters = {side: dict(pair.connection(side).counters) for side in Side}
        self._counted = {side: sum(self._counters[side].values()) for side in Side}
        if traced:
            tracemalloc.start()
        self._traced_start = tracemalloc.get_traced_memory()[0] if traced else 0

    # Frames

    def feed(self, to: Side, frame: bytes, *, answer: bool = True) -> Sequence[Event]:
        """Deliver one frame and check everything.

        With ``answer`` the callers answer at once, and nothing travels on; without it whoever drives the pair
        takes the answers (``Pair.sent``). Raises :class:`Escape`.
        """
        self.frames += 1
        pair = self.pair
        known, waiting = len(pair.items), len(pair.outgoing)
        events = self._delivered(to, frame)
        if answer:
            self._answer(events, known)
        self._check(to, frame, events, pair.outgoing[waiting:])
        if answer:
            pair.outgoing.clear()
        return events

    def _delivered(self, to: Side, frame: bytes) -> Sequence[Event]:
        if self.traced:
            tracemalloc.reset_peak()
            base = tracemalloc.get_traced_memory()[0]
        started = time.thread_time_ns()
        try:
            events = self.pair.deliver(to, frame)
        except Exception as error:
            raise Escape("exception", _described(error)) from error
        spent = time.thread_time_ns() - started
        if self.traced:
            self._check_memory(tracemalloc.get_traced_memory()[1] - base, len(frame))
        else:
            self.frame_ns_max = max(self.frame_ns_max, spent)
            if spent > FRAME_CPU_NS_MAX:
                raise Escape("time", f"one frame took more than {_power(spent // 1000)} us of processor time")
        return events

    def _answer(self, events: Sequence[Event], known: int) -> None:
        """What the drafter's caller does at once: answer a HELLO and the new items of other slots."""
        try:
            if any(isinstance(event, HelloReceived) for event in events):
                self.pair.answer_hello()
            if any(isinstance(event, StepArrived) for event in events):
                fresh = [item for item in self.pair.items[known:] if item.slot != BYSTANDER]
                self.pair.items = [item for item in self.pair.items if item not in fresh]
                for item in fresh:
                    self.pair.reply(item)
        except Exception as error:
            raise Escape("exception", f"while answering: {_described(error)}") from error

    def _check(self, to: Side, frame: bytes, events: Sequence[Event], answers: Sequence[Parcel]) -> None:
        connection = self.pair.connection(to)
        before, now = self._seen[to], observe(connection)
        counted = sum(connection.counters.values())
        silent = counted == self._counted[to]
        changed = now != before
        self._seen[to], self._counted[to] = now, counted
        self.changes += changed
        if events or silent:
            self.accepted += 1
        else:
            self.refused += 1
        if silent and not (events or changed or answers) and type_of(frame) != MessageType.PONG:
            raise Escape("uncounted", "no event, no answer, no change and no counter")
        if (events or changed or answers) and _prefix_is_broken(frame):
            raise Escape("damage", "a frame with a broken prefix had an effect")
        self._check_answers(frame, answers)
        if changed:
            self._check_ledgers(to, frame, before, now)

    def _check_answers(self, frame: bytes, answers: Sequence[Parcel]) -> None:
        if len(answers) > ANSWERS_MAX:
            raise Escape("answers", f"{len(answers)} frames")
        if answers and type_of(frame) == MessageType.ERROR:
            raise Escape("answers", "ERROR was answered")
        if self.traced:
            for parcel in answers:
                try:
                    decode_frame(parcel.frame)
                except Exception as error:
                    raise Escape("answers", f"an answer does not decode: {_described(error)}") from error

    def _check_ledgers(self, to: Side, frame: bytes, before: Observation, now: Observation) -> None:
        start = self._start[to].terms
        self.reconnected |= start is not None and now.terms is not start
        if any(ledger[2] > GENERATION_MAX for ledger in now.slots):
            raise Escape("limit", "a slot's generation is above its hard limit")
        if now.state is not before.state or now.terms is not before.terms or not self._bystander:
            return
        harmed = [index for index, (old, new) in enumerate(zip(before.slots, now.slots, strict=True)) if old != new]
        named = _named_slots(frame)
        if not named.issuperset(harmed):
            raise Escape("bystander", f"{to.value}: slots {harmed} changed by a frame for {sorted(named)}")

    def settle(self) -> None:
        """Take the ledgers as they are after calls of the callers or the clock."""
        for side in Side:
            connection = self.pair.connection(side)
            self._seen[side], self._counted[side] = observe(connection), sum(connection.counters.values())

    # Costs

    def _check_memory(self, peak: int, length: int) -> None:
        self.traced_bytes_max = max(self.traced_bytes_max, peak)
        if peak > length + TRACED_BYTES_MAX:
            raise Escape("memory", f"one frame allocated more than {_power(peak)} bytes")

    def close(self) -> None:
        """Stop measuring memory and add up the counters; must be called once, also after an Escape."""
        if self.traced:
            tracemalloc.stop()
        for side in Side:
            start = self._counters[side]
            for name, count in self.pair.connection(side).counters.items():
                if count != start[name]:
                    self.by_code[name] += count - start[name]

    def check_retained(self) -> None:
        """After a batch: the connections hold little more than before. Raises :class:`Escape`."""
        if not self.traced or tracemalloc.get_traced_memory()[0] - self._traced_start <= RETAINED_BYTES_MAX:
            return
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - self._traced_start
        if held > RETAINED_BYTES_MAX:
            raise Escape("memory", f"more than {_power(held)} bytes are held after the batch")

    # Liveness

    def probe(self) -> None:
        """The connections still serve: the bystander's round ends well, then HELLO and a clean round.

        Raises :class:`Escape`.
        """
        try:
            if self._bystander:
                self._probe_bystander()
            _probe_reconnect(self.pair)
        except Escape:
            raise
        except Exception as error:
            raise Escape("liveness", _described(error)) from error

    def _probe_bystander(self) -> None:
        pair = self.pair
        good = [one.frame for one in recorded(terms=pair.terms) if _is_reply_to_bystander(one.frame)]
        if self._untouched(Side.DRAFTER):
            items = [item for item in pair.items if item.slot == BYSTANDER]
            sent = [parcel.frame for item in items for parcel in pair.reply(item)]
            _require(sent == good, "the drafter's reply to the bystander is not the recorded one")
        if self._untouched(Side.VERIFIER):
            proposals = pair.proposals
            for frame in good:
                pair.deliver(Side.VERIFIER, frame)
            _require(pair.proposals == proposals + 1, "the bystander's good reply made no proposal")

    def _untouched(self, side: Side) -> bool:
        """Whether the bystander's round is as it was when the trial began."""
        start, now = self._start[side], self._seen[side]
        if start.state not in _LIVE or now.state not in _LIVE or now.terms is not start.terms:
            return False
        if len(start.slots) <= BYSTANDER or len(now.slots) <= BYSTANDER:
            return False
        ledger = start.slots[BYSTANDER]
        return ledger == now.slots[BYSTANDER] and ledger[0] is SlotState.AWAITING


def _probe_reconnect(pair: Pair) -> None:
    """HELLO, one round, CLOSE: in any state, and nothing is left afterwards."""
    pair.sent()
    pair.items.clear()
    _exchange(pair, pair.send(Side.DRAFTER, pair.verifier.hello, pair.now_ns))
    _require(pair.verifier.state is VerifierState.ACTIVE, "HELLO was not accepted")
    proposals = pair.proposals
    for parcels in (pair.open(0), pair.context(0, [7, 8], with_tokens=True)):
        _exchange(pair, parcels)
    _exchange(pair, pair.step(1, 0))
    _exchange(pair, pair.replies(0))
    _require(pair.proposals == proposals + 1, "a clean round made no proposal")
    _exchange(pair, pair.send(Side.DRAFTER, pair.verifier.close, 0))
    _require(blocks_taken(pair.verifier) == 0, "staging blocks are not free")
    reports = _exchange(pair, pair.send(Side.DRAFTER, pair.verifier.stats))
    (report,) = [event.stats for event in reports if isinstance(event, StatsReceived)]
    held = report.slots_open, report.rounds_unresolved, report.replies_cached, report.credit_outstanding_rows
    _require(not any(held), f"the drafter still holds {held}")


def _exchange(pair: Pair, parcels: list[Parcel]) -> list[Event]:
    """Deliver ``parcels`` and what they cause until nothing is under way."""
    events: list[Event] = []
    while parcels:
        for parcel in parcels:
            events += pair.deliver(parcel.to, parcel.frame)
        parcels = pair.sent()
    return events


def _require(condition: bool, detail: str) -> None:
    if not condition:
        raise Escape("liveness", detail)


def _is_reply_to_bystander(frame: bytes) -> bool:
    (slot,) = unpack_from("<I", frame, 32)
    return slot == BYSTANDER and type_of(frame) in (MessageType.ROW, MessageType.COMPLETION)


def _prefix_is_broken(frame: Buffer) -> bool:
    if len(frame) < PREFIX_BYTES:
        return True
    (crc,) = unpack_from("<I", frame, PREFIX_CRC_AT)
    return bool(crc != crc32c(bytes(frame[:PREFIX_CRC_AT])))


def _named_slots(frame: bytes) -> set[int]:
    """The slots that ``frame`` may change: the prefix's, and those of STEP items."""
    (slot,) = unpack_from("<I", frame, 32)
    named = {slot}
    if type_of(frame) == MessageType.STEP:
        try:
            message = decode_frame(frame).message
        except RemoteProtocolError:
            return named | set(range(4))
        if isinstance(message, Step):
            named |= {item.slot for item in message.items}
    return named


def _power(value: int) -> int:
    """The power of two below ``value``: findings that differ in the figure alone are the same."""
    return 1 << value.bit_length() - 1


def _described(error: Exception) -> str:
    """Type, text and the innermost place of an exception."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}" if trace else "?"
    return f"{type(error).__name__} at {place}: {error}"
