"""Two connections in memory, and a caller of each that reacts to events as their documentation says.

Invariants: ids, epochs and clocks are constants, so the same calls give the same bytes; a call that the
ledger refuses because the link has diverged (LocalProtocolError) sends nothing. Called by ``conversation``
and ``trial``; it judges nothing.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from itertools import count
from typing import Any, Final, NamedTuple

from ..auth import Authentication
from ..buffers import Buffer
from ..digest import prefix_digest
from ..drafter import DrafterConnection
from ..errors import LocalProtocolError
from ..events import (
    ContextArrived,
    DrafterEvent,
    HelloReceived,
    ProposalReady,
    SlotCancelled,
    SlotClosed,
    SlotOpened,
    SlotReset,
    StepArrived,
    VerifierEvent,
)
from ..hello import Compatibility
from ..limits import NO_COMMIT
from ..messages import StepItem
from ..negotiation import HelloParameters
from ..registry import Dtype, ErrorCode, Lane, SupportPolicy, WireVersion
from ..states import DrafterState
from ..verifier import ContextSend, VerifierConnection

VERIFIER_EPOCH: Final = 100
DRAFTER_EPOCH: Final = 200
SESSION: Final = 77
ANCHOR: Final = 42
DRAFTED: Final = 7
DEPTH: Final = 5
TAP_ROW_BYTES: Final = 48
VOCAB_SIZE: Final = 96

POLICIES: Final = (
    (SupportPolicy.K32, Lane.RATIO),
    (SupportPolicy.K1, Lane.MATCH),
    (SupportPolicy.DENSE, Lane.RATIO),
    (SupportPolicy.K16, Lane.RATIO),
)
"""Support and lane of each slot; in version 1 each is greedy with one entry."""

Event = VerifierEvent | DrafterEvent


class Side(Enum):
    """Who receives a frame."""

    VERIFIER = "verifier"
    DRAFTER = "drafter"


class Terms(Enum):
    """What both sides offer: version 2, version 2 under a shared secret, or version 1."""

    V2 = "v2"
    SECRET = "secret"
    V1 = "v1"


class Parcel(NamedTuple):
    """A frame on its way to ``to``."""

    to: Side
    frame: bytes


def hello_parameters(epoch: int, terms: Terms = Terms.V2) -> HelloParameters:
    """Small valid parameters, the same on both sides."""
    serial = count(epoch)
    secret = Authentication(b"a secret of the fuzzer", lambda: next(serial).to_bytes(32, "little"))
    compatibility = Compatibility(
        vocab_size=VOCAB_SIZE,
        token_map_hash=hashlib.sha256(b"map").digest(),
        draft_identity="draft@1234",
        target_identity="target@5678",
        tokenizer_hash=hashlib.sha256(b"tokenizer").digest(),
        tap_layers=(2, 14, 26),
        tap_dtype=Dtype.BF16,
        tap_width=8,
    )
    return HelloParameters(
        compatibility,
        epoch,
        max_slots=4,
        max_depth=DEPTH,
        max_support=32,
        max_in_flight=4,
        dense_rows=terms is not Terms.V1,
        versions=(WireVersion.V1_0 if terms is Terms.V1 else WireVersion.V2_0,),
        authentication=secret if terms is Terms.SECRET else None,
    )


@cache
def reply_arrays(depth: int, support: int) -> dict[str, Any]:
    """Arguments of ``DrafterConnection.reply``: rows with all mass on one token; support 0 gives dense rows."""
    width = support or VOCAB_SIZE
    ids, q = array("i", [0] * depth * support), array("f", [0.0] * depth * width)
    q[0 if support else DRAFTED :: width] = array("f", [1.0] * depth)
    if support:
        ids[::support] = array("i", [DRAFTED] * depth)
    entries = 1 if support else width
    return {"tokens": [DRAFTED] * depth, "entries": [entries] * depth, "ids": ids.tobytes(), "q": q.tobytes()}


@dataclass
class Pair:
    """A verifier, a drafter, and what their callers keep.

    ``items`` are STEP items that the drafter's caller has not answered; ``history[slot]`` are the tokens
    before the anchor, ``anchors[slot]`` the anchor; ``proposals`` counts whole proposals.
    """

    session: int = SESSION
    terms: Terms = Terms.V2
    verifier: VerifierConnection = field(init=False)
    drafter: DrafterConnection = field(init=False)
    now_ns: int = 0
    proposals: int = 0
    items: list[StepItem] = field(default_factory=list)
    hello_waits: bool = False
    supports: dict[int, int] = field(default_factory=dict)
    history: dict[int, list[int]] = field(default_factory=dict)
    anchors: dict[int, int] = field(default_factory=dict)
    outgoing: list[Parcel] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.verifier = VerifierConnection(hello_parameters(VERIFIER_EPOCH, self.terms))
        self.drafter = DrafterConnection(hello_parameters(DRAFTER_EPOCH, self.terms))

    def connection(self, side: Side) -> VerifierConnection | DrafterConnection:
        """The connection of ``side``."""
        return self.verifier if side is Side.VERIFIER else self.drafter

    # Delivery and reactions

    def deliver(self, to: Side, frame: Buffer) -> Sequence[Event]:
        """Receive ``frame`` at ``to``, react, and collect what the connection sends by itself."""
        events: Sequence[Event]
        if to is Side.VERIFIER:
            events = self.verifier.receive(frame, self.now_ns)
            self._release(events)
        else:
            events = self.drafter.receive(frame, self.now_ns)
            for event in events:
                self._react(event)
        self.collect()
        return events

    def _release(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, ProposalReady):
                self.proposals += 1
                event.lease.release()

    def _react(self, event: Event) -> None:
        if isinstance(event, StepArrived):
            self.items += event.items
        elif isinstance(event, HelloReceived):
            self.hello_waits = True
        elif isinstance(event, ContextArrived):
            self.drafter.context_consumed(event.rows)
        elif isinstance(event, SlotOpened):
            self.supports[event.slot] = int(event.support)
        elif isinstance(event, SlotClosed | SlotReset | SlotCancelled):
            self.items = [item for item in self.items if item.slot != event.slot]

    def collect(self) -> None:
        """Move both outboxes into ``outgoing``."""
        for frame in self.verifier.frames_to_send():
            self.outgoing.append(Parcel(Side.DRAFTER, bytes(frame)))
        for frame in self.drafter.frames_to_send():
            self.outgoing.append(Parcel(Side.VERIFIER, bytes(frame)))

    def tick(self, elapsed_ns: int) -> None:
        """Let time pass and both connections act on their deadlines."""
        self.now_ns += elapsed_ns
        self._release(self.verifier.expire(self.now_ns))
        for event in self.drafter.expire(self.now_ns):
            self._react(event)
        self.collect()

    def sent(self) -> list[Parcel]:
        """Take what waits in ``outgoing``, with the answer to a HELLO that waits."""
        self.answer_hello()
        parcels, self.outgoing = self.outgoing, []
        return parcels

    def answer_hello(self) -> None:
        """Accept the HELLO that waits, or reject it when the two sides cannot talk."""
        if not self.hello_waits:
            return
        self.hello_waits = False
        if self.drafter.state is not DrafterState.HELLO_RECEIVED:
            return  # a newer HELLO has taken its place, and was challenged
        try:
            frame = self.drafter.accept(self.now_ns)
        except LocalProtocolError as error:
            if error.code is not ErrorCode.INCOMPATIBLE:
                raise
            frame = self.drafter.reject()
        self.outgoing.append(Parcel(Side.VERIFIER, bytes(frame)))

    def reply(self, item: StepItem) -> list[Parcel]:
        """A whole reply to an item."""
        frames = self.drafter.reply(item, **reply_arrays(item.depth, self.supports[item.slot]))
        return [Parcel(Side.VERIFIER, bytes(frame)) for frame in frames]

    def replies(self, *slots: int) -> list[Parcel]:
        """Answer the unanswered items of ``slots``."""
        taken = [item for item in self.items if item.slot in slots]
        self.items = [item for item in self.items if item.slot not in slots]
        return [parcel for item in taken for parcel in self.reply(item)]

    # Calls of the two callers

    def send(
        self, side: Side, call: Callable[..., memoryview | ContextSend], *args: Any, **kwargs: Any
    ) -> list[Parcel]:
        """The frames of a call for ``side``; none when the ledger refuses it."""
        try:
            made = call(*args, **kwargs)
        except LocalProtocolError:
            return []
        frames = made.frames if isinstance(made, ContextSend) else (made,)
        return [Parcel(side, bytes(frame)) for frame in frames]

    def open(self, slot: int) -> list[Parcel]:
        """OPEN with the slot's policy."""
        support, lane = self._policy(slot)
        self._forget(slot)
        call = self.verifier.open
        return self.send(Side.DRAFTER, call, slot, self.session + slot, seed=-5, support=support, lane=lane)

    def _policy(self, slot: int) -> tuple[SupportPolicy, Lane]:
        return (SupportPolicy.K1, Lane.GREEDY) if self.terms is Terms.V1 else POLICIES[slot]

    def _forget(self, slot: int) -> None:
        self.history[slot], self.anchors[slot] = [], ANCHOR

    def context(self, slot: int, tokens: Sequence[int], with_tokens: bool) -> list[Parcel]:
        """CONTEXT rows of ``tokens``, at the context's end."""
        start = len(self.history[slot])
        self.history[slot] += tokens
        ids = array("i", tokens).tobytes() if with_tokens else None
        taps = bytes([1]) * (len(tokens) * TAP_ROW_BYTES)
        return self.send(Side.DRAFTER, self.verifier.context, slot, start, len(tokens), taps, ids)

    def step(self, round_: int, *slots: int, accepted: int = NO_COMMIT) -> list[Parcel]:
        """One STEP for ``slots``; with ``accepted`` it commits their last round (see ``advance``)."""
        return self.send(Side.DRAFTER, self._step, round_, slots, accepted)

    def _step(self, round_: int, slots: Sequence[int], accepted: int) -> memoryview:
        items = [self._item(round_, slot, accepted) for slot in slots]
        return self.verifier.step(items, self.now_ns)

    def _item(self, round_: int, slot: int, accepted: int) -> StepItem:
        first, tokens, anchor = self.verifier.context_end(slot), self.history[slot], self.anchors[slot]
        rows = max(0, len(tokens) - first)
        return StepItem(
            session=self.session + slot,
            slot=slot,
            generation=self.verifier.generation(slot),
            round=round_,
            anchor_token=anchor,
            anchor_position=first + rows,
            prefix_digest=prefix_digest(tokens),
            depth=DEPTH,
            lane=self._policy(slot)[1],
            accepted_count=accepted,
            commit_token=0 if accepted == NO_COMMIT else anchor,
            tap_first=first,
            tap_rows=rows,
            taps=bytes([2]) * (rows * TAP_ROW_BYTES),
        )

    def advance(self, slot: int, accepted: int, correction: int) -> None:
        """The slot's last round had ``accepted`` drafts accepted, then ``correction``."""
        self.history[slot] += [self.anchors[slot], *[DRAFTED] * accepted]
        self.anchors[slot] = correction

    def commit(self, slot: int, accepted: int) -> list[Parcel]:
        """COMMIT of what ``advance`` has noted."""
        call, digest = self.verifier.commit, prefix_digest(self.history[slot])
        return self.send(Side.DRAFTER, call, slot, accepted, self.anchors[slot], digest)
