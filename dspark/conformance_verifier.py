"""The product's verifier as a testee: the engine's draft link, driven as the engine drives it, without a model.

A `Requests` has a few requests that never end for long: it leases, steps, collects, judges rows with the engine's own
check, commits, and goes on target-only where a proposal is missing. The link blocks in its transport while a round is
under way. Over a real transport that is what it does here too (`LinkHost`, in a thread of its own); in process, where
time is the harness's, `LinkMachine` lets it run until it would block and then hands back control.

Called by `conformance`, which is handed the classes of the Spark package. Draws are not audited: the harness in the
drafter's place has no drafter's random numbers.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from dspark.dyadic import RowError
from dspark_proto import EMPTY_DIGEST, HelloParameters, Lane, ProposalReady, WireVersion, prefix_digest
from dspark_proto.buffers import Buffer
from dspark_proto.conformance import Facts, InProcess, Peer, Role, ServedVerifier, Testee, reference_facts
from dspark_proto.conformance.facts import REFERENCE_SECRET, VERIFIER_EPOCH
from dspark_proto.placement import Place
from dspark_proto.transports import ClientTransport

DEADLINE_MS = 2000
"""Of a round; the drafter may offer less."""

PATIENCE_MS = 15_000
"""The link rests up to 5 s after a lost generation, and as long again while the worker takes the context."""

REQUESTS, ROUNDS, PROMPT, TEXT_MAX = 2, 12, 6, 256
TARGET_ONLY_TURNS = 8
"""After so many turns a request that the worker has no place for has ended."""

SORTS = ((Lane.RATIO, 0, 1.0), (Lane.RATIO, 32, 1.0), (Lane.GREEDY, 1, 0.0))
"""Lane, support and temperature of requests: dense rows, sparse ones, tokens. Each request is of the first sort that
the worker has a place for.
"""


class ProposalLike(Protocol):
    """What `Requests` needs of `dspark_spark.proposals.Proposal`."""

    @property
    def tokens(self) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class VerifierParts:
    """What the harness needs of `dspark_spark`: `DraftLink`, `DraftLease`, `DraftRequest` and `read_proposal`."""

    link: Callable[..., Any]
    lease: Callable[..., Any]
    request: Callable[..., Any]
    read: Callable[[ProposalReady, int], ProposalLike]


def parameters(facts: Facts) -> HelloParameters:
    """What the link brings to HELLO: all that it can do."""
    return facts.parameters(
        VERIFIER_EPOCH,
        step_deadline_ms=DEADLINE_MS,
        dense_rows=True,
        versions=(WireVersion.V2_0, WireVersion.V1_0),
        authentication=facts.authentication,
    )


@dataclass(slots=True)
class _Request:
    """One request: its lease, its tokens (the last one is the anchor) and what was accepted of the last proposal."""

    lease: Any
    tokens: list[int]
    sort: int
    round: int = 0
    accepted: int | None = None
    idle: int = 0

    def extend(self) -> None:
        """The context covers everything before the anchor."""
        lease, end = self.lease, len(self.tokens) - 1
        lease.digest = prefix_digest(self.tokens[lease.known : end], lease.digest)
        lease.known = end


class Requests:
    """See the module. `turn` is one round of the engine."""

    def __init__(self, parts: VerifierParts, offer: HelloParameters, client: ClientTransport, **clock: Any) -> None:
        self.link = parts.link("conformance", offer, DEADLINE_MS, client, **clock)
        self._parts = parts
        self._vocab = offer.compatibility.vocab_size
        width = len(offer.compatibility.tap_layers) * offer.compatibility.tap_width
        self._taps = torch.ones(TEXT_MAX, width, dtype=torch.bfloat16)
        self._sessions = 0
        self._running = [self._begin(slot, 0) for slot in range(REQUESTS)]

    def turn(self) -> bool:
        """One round; False when nothing could be asked for."""
        self.link.pump()
        for place, request in enumerate(self._running):
            if request.round >= ROUNDS or request.idle >= TARGET_ONLY_TURNS:
                self.link.release(request.lease)
                sort = (request.sort + 1) % len(SORTS) if request.idle else 0
                self._running[place] = self._begin(request.lease.slot, sort)
        asking = self._asking()
        if not asking:
            return False
        round_ = self.link.step([self._ask(request) for request in asking])
        ready = self.link.collect(round_)
        for request in asking:
            self._judge(request, ready.get(request.lease.slot))
        return True

    def held(self) -> dict[str, int]:
        """Staging blocks that no round under way owns."""
        staging = self.link._connection.staging
        taken = 0 if staging is None else sum(lease.state.value != "free" for lease in staging.leases)
        return {"blocks": taken - len(self.link._rounds)}

    def _begin(self, slot: int, sort: int) -> _Request:
        self._sessions += 1
        tokens = [(self._sessions * 11 + position) % 97 for position in range(PROMPT)]
        lane, support, temperature = SORTS[sort]
        lease = self._parts.lease(
            slot=slot,
            session=self._sessions,
            seed=-self._sessions,
            lane=lane,
            support=support,
            temperature=temperature,
            taps=self._taps,
            tokens=tokens,
            digest=EMPTY_DIGEST,
        )
        request = _Request(lease, tokens, sort)
        self.link.lease(lease)
        request.extend()
        self.link.feed(lease)
        return request

    def _asking(self) -> list[_Request]:
        """Those that a STEP may ask for; the others are target-only for a while."""
        asking: list[_Request] = []
        for request in self._running:
            refused = self.link.refusal(request.lease, [one.lease for one in asking])
            request.idle = request.idle + 1 if self.link.up and not request.lease.open else 0
            if not refused:
                asking.append(request)
        return asking

    def _ask(self, request: _Request) -> Any:
        request.round += 1
        accepted, request.accepted = request.accepted, None
        return self._parts.request(
            lease=request.lease,
            round=request.round,
            anchor_token=request.tokens[-1],
            anchor_position=len(request.tokens) - 1,
            depth=self.link.depth_limit(request.lease),
            accepted_count=accepted,
            commit_token=request.tokens[-1],
        )

    def _judge(self, request: _Request, event: ProposalReady | None) -> None:
        """Accept a varying number of drafts, and put a token of the target's own behind them."""
        if event is not None:
            try:
                drafted = self._parts.read(event, self._vocab).tokens
                request.accepted = event.round % (event.depth + 1)
                request.tokens += drafted[: request.accepted]
            except RowError as error:
                self.link.invalid(request.lease, str(error))
            finally:
                event.lease.release()
        request.tokens.append((request.lease.session + 7 * len(request.tokens)) % 97)
        request.extend()


class LinkHost:
    """The link on a real transport: it polls the client itself. A `Host`."""

    def __init__(self, parts: VerifierParts, facts: Facts, client: ClientTransport) -> None:
        self._requests = Requests(parts, parameters(facts), client)

    def turn(self, now_ns: int, wait_ms: int) -> bool:
        """One round, or a short rest when nothing could be asked for."""
        busy = self._requests.turn()
        if not busy:
            time.sleep(min(wait_ms, 2) / 1000)
        return busy

    def close(self) -> None:
        """Leave the drafter."""
        self._requests.link.close()


class _Stopped(BaseException):
    """Ends the thread of a `LinkMachine`."""


class LinkMachine:
    """The link as a `PeerMachine` on the harness's time, and its own `ClientTransport`.

    It runs in a thread, which works only while `receive` or `expire` waits for it: until it would block in `poll`, or
    has nothing to do. So a case is as repeatable as one against a machine without threads.
    """

    place: Place | None = None

    def __init__(self, parts: VerifierParts, facts: Facts) -> None:
        self._parts, self._offer = parts, parameters(facts)
        self._requests: Requests | None = None
        self._now_ns = 0
        self._arrived: deque[memoryview] = deque()
        self._sent: list[bytes] = []
        self._crash: Exception | None = None
        self._stopped = False
        self._turns, self._rests = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def start(self, now_ns: int) -> list[bytes]:
        """See `PeerMachine`."""
        return self.expire(now_ns)

    def receive(self, frame: bytes, now_ns: int) -> list[bytes]:
        """See `PeerMachine`."""
        self._arrived.append(memoryview(frame))
        return self.expire(now_ns)

    def expire(self, now_ns: int) -> list[bytes]:
        """See `PeerMachine`. Raises what the link raised."""
        self._now_ns = now_ns
        self._turns.release()
        self._rests.acquire()
        if self._crash is not None:
            raise self._crash
        sent, self._sent = self._sent, []
        return sent

    def held(self) -> dict[str, int]:
        """See `PeerMachine`."""
        return {} if self._requests is None else self._requests.held()

    def end(self) -> None:
        """Stop the thread."""
        self._stopped = True
        self._turns.release()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._turns.acquire()
            self._requests = Requests(self._parts, self._offer, self, now_ns=lambda: self._now_ns)
            while True:
                if not self._requests.turn():
                    self._rest()
        except _Stopped:
            return
        except Exception as error:  # whatever it was, the case that caused it must hear of it
            self._crash = error
        self._rests.release()

    def _rest(self) -> None:
        """Hand back control until the harness has news."""
        self._rests.release()
        self._turns.acquire()
        if self._stopped:
            raise _Stopped

    # The link's transport end

    def send(self, frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        """See `ClientTransport`."""
        self._sent += [bytes(frame) for frame in frames]
        return True

    def poll(self, timeout_ms: int) -> list[memoryview]:
        """See `ClientTransport`; waits on the harness's time."""
        until = self._now_ns + timeout_ms * 1_000_000
        while not self._arrived and self._now_ns < until:
            self._rest()
        frames, self._arrived = list(self._arrived), deque()
        return frames

    def close(self) -> None:
        """See `ClientTransport`."""


class LinkTestee(InProcess):
    """The link on virtual time, a new one for each case; the one before is ended."""

    def __init__(self, parts: VerifierParts, facts: Facts) -> None:
        super().__init__(Role.VERIFIER, facts, self._next)
        self._parts = parts
        self._machine: LinkMachine | None = None

    def _next(self) -> LinkMachine:
        self.close()
        self._machine = LinkMachine(self._parts, self.facts)
        return self._machine

    def close(self) -> None:
        """See `Testee`."""
        if self._machine is not None:
            self._machine.end()
            self._machine = None


def verifier_peers(parts: VerifierParts) -> tuple[Peer, ...]:
    """Our verifier, without a secret and with one. Over a real transport the cases of ten lost generations in a row are
    left out: the link rests ever longer between them.
    """

    def opened(transport: str, facts: Facts) -> Testee:
        if transport == "inproc":
            return LinkTestee(parts, facts)
        return ServedVerifier(transport, facts, lambda client: LinkHost(parts, facts, client))

    found = [replace(reference_facts(secret), deadline_ms=PATIENCE_MS) for secret in (b"", REFERENCE_SECRET)]
    skips = frozenset({"slow", "losses"})
    return tuple(Peer("own verifier", Role.VERIFIER, facts, opened, skips=skips) for facts in found)
