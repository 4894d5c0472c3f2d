"""Frames whose last body a transport receives straight into leased staging.

The q of a dense reply is nearly all of its bytes. A transport that has a large frame's prefix before the bodies asks
``VerifierConnection.place`` where the last one belongs, receives it there, and hands out a :class:`PlacedFrame`. What
is known of the frame then is its key and its size; all else is checked when it is whole, and no row counts before that,
so what a frame that is refused leaves there harms nobody. Invariants: a transport has one such write under way, and
until that frame is whole it hands out no other and asks about no other; so whatever the connection gets next, the frame
itself or the first one of a new stream, confirms that nothing is written any more. A round that dies before that leaves
its block quarantined until then. Spec: SPEC.md, sections "Staging and leases" and "Plain TCP mapping". Called by
``verifier_inbox``, and by the transport for the types; checks nothing of what was written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from .prefix import Key
from .staging import Lease, LeaseState

Place: TypeAlias = Callable[[memoryview], memoryview | None]
"""The prefix of a frame under way: where all of its last body goes, or None for no such place."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacedFrame:
    """A whole frame in two parts: all bytes before the last body, and the last body, in the memory of ``place``."""

    head: memoryview = field(repr=False)
    body: memoryview = field(repr=False)

    def __len__(self) -> int:
        """Bytes of the frame."""
        return len(self.head) + len(self.body)

    def __bytes__(self) -> bytes:
        """The frame as it was sent."""
        return b"".join((self.head, self.body))


Received: TypeAlias = memoryview | PlacedFrame
"""What a client transport hands out; the second only where somebody has set its ``place``."""


@dataclass(slots=True, eq=False)
class Write:
    """One transport's write into ``lease`` that is under way: of the ROW with this prefix, to ``memory``."""

    prefix: bytes
    key: Key | None
    lease: Lease
    memory: memoryview

    def made(self, frame: PlacedFrame) -> bool:
        """Whether ``frame`` is the one that was asked about, and lies where it was told to."""
        return frame.body is self.memory and frame.head[: len(self.prefix)] == self.prefix

    def end(self) -> None:
        """The transport writes no more: memory of a dead round is free."""
        if self.lease.state is LeaseState.QUARANTINED and self.lease.key == self.key:
            self.lease.lift()
