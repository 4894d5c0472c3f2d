"""A seeded network: one channel per direction between two processes, with delays, and with whatever fault holds it.

Invariants: without a fault a channel loses nothing and keeps order, as the transports do; a frame is copied when it is
sent; every frame that is sent ends as delivered, lost or held, and copies are counted (see `Channel.unaccounted`).
Called by `world`, which joins channels to processes, and by `nemesis`, which bends them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from dspark.sim.clock import MS, VirtualClock
from dspark.sim.faults import Fault
from dspark.sim.forgery import corrupted, forged, truncated
from dspark_proto import MessageType

Frame = Any
"""Bytes of a wire frame, or a value between ranks."""

Sink = Callable[[list[Frame], Fault | None], None]
"""Takes frames that arrived; with a fault it is one frame, damaged by it, whose refusal is to be checked."""

_TYPE_AT = 6
"""Offset of the message type in a frame's prefix."""


class Channel:
    """One direction. `taint` is told of every forged frame; `hurt` counts frames that did not come as sent, by type."""

    def __init__(
        self, clock: VirtualClock, rng: Random, delay_us: tuple[int, int], sink: Sink, taint: Callable[[Frame], None]
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.hurt: Counter[int] = Counter()
        self.armed: list[Fault] = []
        self.cut: Fault | None = None
        self.clog: Fault | None = None
        self._clock, self._rng = clock, rng
        self._lowest_ns, self._spread_ns = 1000 * delay_us[0], 1000 * (delay_us[1] - delay_us[0])
        self._sink, self._taint = sink, taint
        self._last_ns = 0
        self._connection = 0
        self._arriving = 0
        self._on_way = 0
        self._held: list[tuple[list[Frame], int]] = []
        self._behind: tuple[Frame, Fault, int] | None = None

    def send(self, frames: Sequence[Frame]) -> None:
        """Put frames on their way, in order."""
        self.counts["sent"] += len(frames)
        delay = int(self._lowest_ns + self._spread_ns * self._rng.random())
        self._last_ns = max(self._last_ns, self._clock.now_ns + delay)
        sent = list(frames)
        if any(_type(frame) == MessageType.HELLO for frame in sent):
            self._connect()
        self._on_way += len(sent)
        connection = self._connection
        self._clock.after(self._last_ns - self._clock.now_ns, lambda: self._arrive(sent, connection))

    def _arrive(self, frames: list[Frame], connection: int) -> None:
        """Frames of the connection of that number come to the end of the channel, in order."""
        self._on_way -= len(frames)
        self._arriving = connection
        if self.cut is not None:
            self.cut.hit()
            self.counts["lost"] += len(frames)
            self.hurt.update(map(_type, frames))
        elif self.clog is not None:
            self.clog.hit()
            self._held.append((frames, connection))
        elif self.armed or self._behind:
            for frame in frames:
                self._afflict(frame)
        else:
            self._deliver(frames)

    def _connect(self) -> None:
        """A new connection begins: what was held back of the one before never arrives (SPEC.md, REQ-TRN-1)."""
        self._connection += 1
        if self._behind is not None:
            (_, fault, _), self._behind = self._behind, None
            fault.verified = True
            self.counts["lost"] += 1

    def release(self) -> None:
        """The clog is gone: what was held arrives."""
        self.clog = None
        held, self._held = self._held, []
        for frames, connection in held:
            self._on_way += len(frames)
            self._arrive(frames, connection)

    def heal(self) -> None:
        """No fault holds the channel any more."""
        self.cut = None
        self.armed.clear()
        self.release()
        if self._behind is not None:
            self._behind[1].injected = False  # nothing came that could overtake it
        self._let_go()

    @property
    def unaccounted(self) -> int:
        """Frames that were sent and are neither delivered nor lost nor held nor on their way; 0 in a sound network."""
        counts = self.counts
        held = self._on_way + sum(len(frames) for frames, _ in self._held) + (self._behind is not None)
        return counts["sent"] + counts["copies"] - counts["delivered"] - counts["lost"] - held

    def _deliver(self, frames: list[Frame], fault: Fault | None = None) -> None:
        self.counts["delivered"] += len(frames)
        self._sink(frames, fault)

    def _afflict(self, frame: Frame) -> None:
        """Deliver one frame as the first armed fault that wants it has it."""
        fault = self._taken(frame)
        if fault is None:
            self._deliver([frame])
            self._let_go()
            return
        fault.injected = True
        self.hurt[_type(frame)] += 1
        _ACTS[fault.kind.removeprefix("rank_")](self, frame, fault)

    def _taken(self, frame: Frame) -> Fault | None:
        kind = _type(frame)
        for number, fault in enumerate(self.armed):
            if fault.message in (0, kind) or not isinstance(frame, bytes):
                return self.armed.pop(number)
        return None

    def _let_go(self) -> None:
        """A frame that was held back to be overtaken arrives after all, while its connection lives."""
        if self._behind is not None:
            (frame, fault, connection), self._behind = self._behind, None
            fault.verified = fault.injected
            self._deliver_late(frame, connection)

    def _deliver_late(self, frame: Frame, connection: int) -> None:
        """Nothing of a connection arrives once the next one has begun (SPEC.md, REQ-TRN-1)."""
        if connection == self._connection:
            self._deliver([frame])
        else:
            self.counts["lost"] += 1

    def _drop(self, frame: Frame, fault: Fault) -> None:
        self.counts["lost"] += 1
        fault.verified = True

    def _duplicate(self, frame: Frame, fault: Fault) -> None:
        self.counts["copies"] += 1
        self._deliver([frame])
        self._later(frame, fault, fault.amount * MS)

    def _delay(self, frame: Frame, fault: Fault) -> None:
        self._later(frame, fault, fault.amount * MS)

    def _later(self, frame: Frame, fault: Fault, delay_ns: int) -> None:
        due = self._clock.now_ns + delay_ns

        connection = self._arriving
        self._on_way += 1

        def arrive() -> None:
            self._on_way -= 1
            fault.verified = self._clock.now_ns == due
            self._deliver_late(frame, connection)

        self._clock.after(delay_ns, arrive)

    def _reorder(self, frame: Frame, fault: Fault) -> None:
        self._let_go()
        self._behind = frame, fault, self._arriving

    def _corrupt(self, frame: bytes, fault: Fault) -> None:
        damaged = corrupted(frame, Random(fault.amount))
        self._damage(frame, damaged, fault)

    def _truncate(self, frame: bytes, fault: Fault) -> None:
        self._damage(frame, truncated(frame, Random(fault.amount)), fault)

    def _damage(self, frame: bytes, damaged: bytes, fault: Fault) -> None:
        """Whoever receives it must count a refusal; that is what verifies the fault."""
        assert damaged != frame
        self._deliver([damaged], fault)

    def _forge(self, frame: bytes, fault: Fault) -> None:
        changed, refusable = forged(frame, Random(fault.amount))
        if changed == frame:
            fault.injected = False
            self._deliver([frame])
            return
        fault.verified = True
        self._taint(frame)
        self._taint(changed)
        self._deliver([changed], fault if refusable else None)


def _type(frame: Frame) -> int:
    """The message type of a wire frame; 0 for a value between ranks."""
    return frame[_TYPE_AT] if isinstance(frame, bytes) else 0


_ACTS: dict[str, Callable[[Channel, Any, Fault], None]] = {
    "drop": Channel._drop,
    "duplicate": Channel._duplicate,
    "delay": Channel._delay,
    "reorder": Channel._reorder,
    "corrupt": Channel._corrupt,
    "truncate": Channel._truncate,
    "forge": Channel._forge,
}
