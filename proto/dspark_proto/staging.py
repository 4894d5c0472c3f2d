"""Preallocated reply staging, leased by (slot, generation, round).

Invariants: all memory is taken once, when the connection is accepted, in blocks of the negotiated maximum; a
block is in exactly one state; it returns to FREE only when its last consumer has released it, or when a
quarantine is lifted; a quarantined block is never leased. Nothing allocates block memory after construction.
Spec: SPEC.md, section "Staging and leases". Called by ``VerifierConnection`` and, through leases, by its
consumers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from .buffers import Buffer, aligned, byte_view
from .errors import LocalProtocolError
from .memory import aligned_memory
from .prefix import Key
from .registry import ErrorCode
from .rows import ReplyLayout
from .states import State


class LeaseState(State):
    """Life of a staging block."""

    FREE = "free"
    LEASED = "leased"
    FILLED = "filled"
    QUARANTINED = "quarantined"


LEASE: Final[dict[LeaseState, dict[str, LeaseState]]] = {
    LeaseState.FREE: {"lease": LeaseState.LEASED},
    LeaseState.LEASED: {
        "fill": LeaseState.FILLED,
        "abandon": LeaseState.FREE,
        "quarantine": LeaseState.QUARANTINED,
    },
    LeaseState.FILLED: {"drain": LeaseState.FREE},
    LeaseState.QUARANTINED: {"lift": LeaseState.FREE},
}
"""state -> action -> next state; a missing key is a protocol error of the local caller."""


@dataclass(slots=True, eq=False)
class Lease:
    """One block, from the STEP that leased it to the release by its last consumer."""

    storage: memoryview = field(repr=False)
    state: LeaseState = LeaseState.FREE
    key: Key | None = None
    layout: ReplyLayout | None = None
    consumers: int = 0

    def take(self, key: Key, layout: ReplyLayout) -> None:
        """Lease a free block for ``key``."""
        self._move("lease")
        self.key, self.layout = key, layout

    @property
    def block(self) -> memoryview:
        """The writable bytes of the leased layout."""
        if self.layout is None:
            raise LocalProtocolError(ErrorCode.STAGING_EXHAUSTED, "lease", "take the lease first")
        return self.storage[: self.layout.total_bytes]

    def fill(self) -> None:
        """The reply is complete and valid; it has one consumer."""
        self._move("fill")
        self.consumers = 1

    def retain(self) -> None:
        """Add a consumer; each must call :meth:`release` once."""
        if self.state is not LeaseState.FILLED:
            raise LocalProtocolError(ErrorCode.STAGING_EXHAUSTED, "lease.retain", "the lease is not filled")
        self.consumers += 1

    def release(self) -> None:
        """One consumer is done; the last one frees the block. Views of it must not be used afterwards."""
        if self.state is LeaseState.FILLED and self.consumers > 1:
            self.consumers -= 1
            return
        self._move("drain")
        self._clear()

    def abandon(self) -> None:
        """The round is dead and nothing writes into the block any more."""
        self._move("abandon")
        self._clear()

    def quarantine(self) -> None:
        """The round is dead, but a transport may still write into the block."""
        self._move("quarantine")

    def lift(self) -> None:
        """The transport has confirmed that it will not write any more."""
        self._move("lift")
        self._clear()

    def _move(self, action: str) -> None:
        following = LEASE[self.state].get(action)
        if following is None:
            raise LocalProtocolError(
                ErrorCode.STAGING_EXHAUSTED,
                f"lease.{action}",
                f"not allowed while the lease is {self.state.value}",
            )
        self.state = following

    def _clear(self) -> None:
        self.key, self.layout, self.consumers = None, None, 0


class Staging:
    """A fixed set of blocks of ``block_bytes`` each.

    ``allocate(bytes)`` returns zeroed writable memory once; a caller passes page-locked memory where it can.
    """

    def __init__(self, lease_count: int, block_bytes: int, allocate: Callable[[int], Buffer] = aligned_memory) -> None:
        stride = aligned(block_bytes)
        storage = byte_view(allocate(lease_count * stride))
        starts = range(0, lease_count * stride, stride)
        self.leases: Final = tuple(Lease(storage[start : start + block_bytes]) for start in starts)

    def count(self, state: LeaseState) -> int:
        """Blocks in ``state``."""
        return sum([lease.state is state for lease in self.leases])

    def take(self, key: Key, layout: ReplyLayout) -> Lease:
        """Lease a free block.

        Raises :class:`LocalProtocolError` STAGING_EXHAUSTED when none is free.
        """
        for lease in self.leases:
            if lease.state is LeaseState.FREE:
                lease.take(key, layout)
                return lease
        raise LocalProtocolError(
            ErrorCode.STAGING_EXHAUSTED,
            "STEP",
            "release consumed proposals, or negotiate more rounds in flight",
        )

    def lift_quarantine(self, key: Key) -> None:
        """Free the quarantined block of ``key``; a key that holds none is a caller's error."""
        for lease in self.leases:
            if lease.state is LeaseState.QUARANTINED and lease.key == key:
                lease.lift()
                return
        raise LocalProtocolError(ErrorCode.STAGING_EXHAUSTED, "lease", "no block is quarantined for this key")
