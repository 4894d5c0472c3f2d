"""What a link knows of itself: leases and rounds by slot, the wire slots that they hold, timers, and what it can take.

Nothing here sends or decides. Base class of `draft_link.DraftLink`; used by nothing else. Owned by the engine thread;
`workers` may be read from any.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from dspark_proto import HelloParameters, SupportPolicy, VerifierConnection
from dspark_proto.transports.base import ClientTransport
from dspark_proto.transports.zmq import ZmqClient
from dspark_spark.leases import DraftLease, DraftRound, WorkerState, WorkerStatus

MICRO = 1_000_000


class LinkState:
    """Leases are known by the engine's slot, and by the slot of the wire that each holds."""

    def __init__(
        self,
        endpoint: str,
        parameters: HelloParameters,
        deadline_ms: int,
        client: ClientTransport | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
        quarantine: set[int] | None = None,
    ) -> None:
        """`now_ns` is the clock of every deadline and pause; a simulation gives its own, with its own client.

        quarantine: epochs of worker processes that sent invalid content; the links of a pool share one set.
        """
        self.up = False
        self.reconnects = 0
        self.generation_bumps = 0
        self.discards: Counter[str] = Counter()
        self.takeovers: Counter[str] = Counter()
        self.respeculations: list[float] = []
        self.last_error: str | None = None
        self.address = endpoint
        self.others_load = 0.0  # share of the worker that other verifiers held at its last PONG, 0 to 1
        self.late_rounds = 0  # in a row, over all leases, since this worker process answered one
        self._connection = VerifierConnection(parameters)
        self._client = client or ZmqClient(endpoint)
        self._client.place = self._connection.place
        self._step_memory = memoryview(b"")
        self._deadline_ms = deadline_ms
        self._now_ns = now_ns
        # By the engine's slot: leases, the round that awaits each, and the reset count and worker of its last STEP.
        self._leases: dict[int, DraftLease] = {}
        self._rounds: dict[int, DraftRound] = {}
        self._resets: dict[int, int] = {}
        self._asked_epochs: dict[int, int | None] = {}
        self._by_wire: dict[int, DraftLease] = {}
        self._next_hello_ns = 0
        self._probed_ns = 0
        # Since when CONTEXT has found too little credit, rows granted since then, and new starts for it in a row.
        self._starved_ns: int | None = None
        self._granted = self._starvations = 0
        self._starves = False
        self._hellos_unanswered = 0
        self._was_up = self._has_left = False
        self._answered, self._fruitless = True, 0
        self._late: set[DraftRound] = set()  # rounds under way that are counted in `late_rounds`
        self._last_epoch: int | None = None
        self._version = 0
        self._leaves_ns: int | None = None
        self._quarantine = set() if quarantine is None else quarantine
        self._quarantines = 0

    # -- what it is like ---------------------------------------------------------------------------------------

    @property
    def state(self) -> WorkerState:
        """`late` is for the pool to say: it depends on how long a worker has rested."""
        if self.up:
            return "up" if self._leaves_ns is None else "draining"
        if self._has_left and self._now_ns() < self._next_hello_ns:
            return "draining"
        return "quarantined" if self._epoch() in self._quarantine else "connecting"

    @property
    def workers(self) -> tuple[WorkerStatus, ...]:
        """Its one worker; may be read from any thread."""
        return (WorkerStatus(self.address, self.state, len(self._by_wire), self.last_error),)

    @property
    def capacity(self) -> int:
        """Requests that the worker takes from this link; 0 while it is not there."""
        negotiated = self._connection.negotiated
        return negotiated.max_slots if self.up and negotiated else 0

    @property
    def room(self) -> int:
        """Further requests that the worker takes now."""
        return self.capacity - len(self._by_wire) if self._leaves_ns is None else 0

    @property
    def held(self) -> int:
        """Leases that are this link's, open or waiting to be."""
        return len(self._leases)

    def takes(self, lease: DraftLease) -> bool:
        """Whether the agreed version has a place for the lease."""
        terms = self._connection.negotiated
        if not self.up or terms is None:
            return False
        temperature = round(lease.temperature * MICRO)
        return terms.takes(SupportPolicy(lease.support)) and terms.takes_lane(lease.lane, temperature)

    def awaits(self, lease: DraftLease) -> bool:
        """Whether a round of the lease is under way."""
        return lease.slot in self._rounds

    def serves(self, round_: DraftRound) -> bool:
        """Whether the round waits for this worker."""
        return any(one is round_ for one in self._rounds.values())

    def wait_up(self, timeout_s: float) -> bool:
        """Wait, from another thread than the engine's, until the worker has accepted."""
        until = time.monotonic() + timeout_s
        while not self.up and time.monotonic() < until:
            time.sleep(0.02)
        return self.up

    def _epoch(self) -> int | None:
        """The worker process that accepted last."""
        negotiated = self._connection.negotiated
        return None if negotiated is None else negotiated.peer_epoch

    def depth_limit(self, lease: DraftLease) -> int:
        """Deepest proposal that the lease's worker takes; 0 while it is not there."""
        negotiated = self._connection.negotiated
        return negotiated.max_depth if self.up and negotiated else 0

    @property
    def drops(self) -> dict[str, int]:
        """Frames dropped by cause since start."""
        return self._connection.counters
