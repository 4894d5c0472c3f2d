"""The reference drafter: a worker without a model, on `DrafterConnection`.

It draws every token from the row that it sends, with keyed numbers, so that equal keys give equal proposals and a retry
would show a second draw. As a real worker it takes every frame that has arrived before it drafts (in `expire`).
Invariant: every STEP that arrives is answered. Called by `testees`; the mutants wrap it.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

from ..checksums import xxh3_64_bytes
from ..drafter import DrafterConnection
from ..events import ContextArrived, DrafterEvent, HelloReceived, SlotOpened, StepArrived
from ..messages import StepItem
from ..negotiation import HelloParameters
from ..registry import Lane
from .drafted_rows import TOTAL, DraftedRow, one_hot, pack

_KEY = Struct("<QIIQQQ")


@dataclass(frozen=True)
class _Policy:
    """How an open slot drafts."""

    seed: int
    choice: int
    support: int
    one_hot: bool


class ReferenceDrafter:
    """A `PeerMachine`."""

    def __init__(self, parameters: HelloParameters) -> None:
        self.connection = DrafterConnection(parameters)
        self._policies: dict[int, _Policy] = {}
        self._pending: list[StepItem] = []
        self._unused_rows = 0

    def start(self, now_ns: int) -> list[bytes]:
        """A drafter waits."""
        return []

    def receive(self, frame: bytes, now_ns: int) -> list[bytes]:
        """Answer one frame; drafts wait for `expire`."""
        frames: list[bytes] = []
        for event in self.connection.receive(frame, now_ns):
            frames += [bytes(one) for one in self._on(event, now_ns)]
        return [bytes(one) for one in self.connection.frames_to_send()] + frames

    def expire(self, now_ns: int) -> list[bytes]:
        """Use the context, draft what is pending, and free what a silent verifier held."""
        rows, self._unused_rows = self._unused_rows, 0
        if rows:
            self.connection.context_consumed(rows)
        pending, self._pending = self._pending, []
        frames = [bytes(frame) for item in pending for frame in self._draft(item)]
        self.connection.expire(now_ns)
        return frames + [bytes(one) for one in self.connection.frames_to_send()]

    def held(self) -> dict[str, int]:
        """STATS tells; nothing beyond it."""
        return {}

    def _on(self, event: DrafterEvent, now_ns: int) -> list[memoryview]:
        match event:
            case HelloReceived(code=None):
                self._unused_rows = 0
                return [self.connection.accept(now_ns)]
            case HelloReceived():
                self._unused_rows = 0
                return [self.connection.reject()]
            case SlotOpened():
                greedy = event.draft_temperature_micro == 0 or event.lane is not Lane.RATIO
                self._policies[event.slot] = _Policy(event.seed, event.choice, int(event.support), greedy)
            case ContextArrived():
                self._unused_rows += event.rows
            case StepArrived():
                self._pending += event.items
        return []

    def _draft(self, item: StepItem) -> list[memoryview]:
        policy = self._policies[item.slot]
        rows = [self._row(item, policy, index) for index in range(item.depth)]
        packed = pack(rows, policy.support, self.connection.parameters.compatibility.vocab_size)
        return self.connection.reply(item, packed.tokens, packed.entries, packed.ids, packed.q)

    def _row(self, item: StepItem, policy: _Policy, index: int) -> DraftedRow:
        """The row of one position, and a draw from it keyed by seed, position, round, generation and choice."""
        vocab_size = self.connection.parameters.compatibility.vocab_size
        position = item.anchor_position + 1 + index
        anchored = _KEY.pack(position, item.anchor_token, 0, 0, 0, 0)
        start = int.from_bytes(xxh3_64_bytes(anchored), "little")
        if policy.one_hot:
            return one_hot(start % vocab_size)
        width = min(policy.support or 5, 5, vocab_size)
        ids = tuple(sorted({(start + step * 37) % vocab_size for step in range(width)}))
        share = TOTAL // (2 * len(ids))
        counts = [share] * len(ids)
        counts[start % len(ids)] = TOTAL - share * (len(ids) - 1)
        key = _KEY.pack(
            position,
            item.round,
            policy.choice,
            self.connection.reset_count(item.slot) % 2**24,
            policy.seed % 2**64,
            0,
        )
        threshold = int.from_bytes(xxh3_64_bytes(key), "little") % TOTAL
        for token, count in zip(ids, counts, strict=True):
            threshold -= count
            if threshold < 0:
                return DraftedRow(ids, tuple(counts), token)
        raise AssertionError("the counts total 2^24")
