"""A Spark group's end of a channel to one worker: the `ClientTransport` that the draft link gets.

With direct receive it also plays the network card: rows are written into leased staging in two halves with time in
between, by address, whoever owns the block by then. Invariants: a frame is handed over only when its bytes have been
written; a receive is posted once for each lease, so that a repeated row is written nowhere; what is sent to a worker
that is known to be gone is refused, as a closed socket refuses it. Called by `spark`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from dspark.sim.faults import Fault
from dspark.sim.ledger import Ledger
from dspark_proto import Buffer, Key, Lease, LeaseState, MessageType, VerifierConnection, read_prefix
from dspark_proto.errors import RemoteProtocolError
from dspark_proto.placement import Place

POISON = 0xA5
_HALF_NS, _SLOW_NS = 60_000, 400_000_000
"""Time between the halves of a direct write, mostly; now and then it is up to the longer one, past the deadline."""


@dataclass(slots=True)
class Write:
    """A direct write under way: the second half of these bytes is still to come into `lease`."""

    lease: Lease
    key: Key
    block: memoryview
    rest: bytes


class SimClient:
    """`after(delay_ns, act)` are the timers of the network card, `wake` tells the process that frames are there.

    refusals: how many frames the connection has refused. slow: some direct writes take longer than any deadline.
    """

    place: Place | None = None

    def __init__(
        self,
        send: Callable[[list[bytes]], bool],
        after: Callable[[int, Callable[[], None]], None],
        wake: Callable[[], None],
        refusals: Callable[[], int],
        ledger: Ledger,
        rng: Random,
        slow: bool,
    ) -> None:
        self.inbox: deque[tuple[bytes, Fault | None]] = deque()
        self.connection: VerifierConnection | None = None
        self.staging_of: VerifierConnection | None = None
        self._send, self._after, self._wake = send, after, wake
        self._refusals, self._ledger, self._rng, self._slow = refusals, ledger, rng, slow
        self._probe: tuple[Fault, int] | None = None
        self._behind: deque[tuple[bytes, Fault | None]] = deque()
        self._writing: Write | None = None
        self._served: deque[Key] = deque(maxlen=64)
        self.direct_writes = 0

    # ClientTransport

    def send(self, frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        """Copy and send; False when the worker is known to be gone."""
        return self._send([bytes(frame) for frame in frames])

    def poll(self, timeout_ms: int) -> list[memoryview]:
        """What has arrived, in order; a damaged frame comes alone, so that its refusal can be counted."""
        self.settle()
        arrived: list[memoryview] = []
        while self.inbox and not (arrived and self.inbox[0][1]):
            frame, fault = self.inbox.popleft()
            arrived.append(memoryview(frame))
            if fault is not None:
                self._probe = fault, self._refusals()
                break
        return arrived

    def settle(self) -> None:
        """Whether the damaged frame that was handed over last has been refused."""
        if self._probe is None:
            return
        (fault, before), self._probe = self._probe, None
        fault.verified = self._refusals() > before
        if not fault.verified:
            self._ledger.accepted_damage(fault)

    def close(self) -> None:
        """Nothing is kept outside the simulator."""

    # The network card

    def arrive(self, frames: list[bytes], fault: Fault | None) -> None:
        """Frames have come over the channel; with a fault, one that was damaged."""
        self._behind += [(frame, fault) for frame in frames]
        self._advance()

    def _advance(self) -> None:
        """Hand frames over in order; rows of a live lease first go into its block, half by half."""
        while self._behind and self._writing is None:
            self._writing = self._first_half(self._behind[0][0]) if self.connection else None
            if self._writing is None:
                self.inbox.append(self._behind.popleft())
            else:
                slow = self._slow and self._rng.random() < 0.01
                self._after(int(self._rng.random() * _SLOW_NS) if slow else _HALF_NS, self._second_half)

    def _first_half(self, frame: bytes) -> Write | None:
        """Begin a direct write; None when the frame is no row of a leased block."""
        try:
            prefix = read_prefix(memoryview(frame))
        except RemoteProtocolError:
            return None
        assert self.connection is not None
        staging = self.connection.staging
        if prefix.type is not MessageType.ROW or staging is None:
            return None
        for lease in staging.leases:
            if lease.state is LeaseState.LEASED and lease.key == prefix.key and prefix.key not in self._served:
                self._served.append(prefix.key)
                block = lease.block
                half = len(block) // 2
                body = frame[prefix.frame_bytes - prefix.body_bytes :].ljust(len(block), b"\0")
                block[:half] = body[:half]
                return Write(lease, prefix.key, block[half:], body[half : len(block)])
        return None

    def _second_half(self) -> None:
        write, self._writing = self._writing, None
        assert write is not None
        write.block[:] = write.rest
        self.direct_writes += 1
        lease = write.lease
        if lease.key != write.key or lease.state not in (LeaseState.LEASED, LeaseState.QUARANTINED):
            self._ledger.violate("double_leases", f"a write for {write.key} hit a block that is {lease.state.value}")
        self.inbox.append(self._behind.popleft())
        self._advance()
        self._wake()

    def confirm_cancelled(self) -> None:
        """Tell the connection of every dead round that no write for it is under way any more."""
        connection = self.connection
        if connection is None or connection.staging is None:
            return
        for lease in connection.staging.leases:
            busy = self._writing is not None and self._writing.lease is lease
            if lease.state is LeaseState.QUARANTINED and not busy and lease.key is not None:
                connection.cancel_confirmed(lease.key)


def poison(lease: Lease) -> None:
    """Overwrite a block that nobody holds, so that a late reader is found out."""
    if lease.state is LeaseState.FREE:
        lease.storage[:] = bytes([POISON]) * len(lease.storage)
