"""`dspark bench wire`: what a round costs on the wire, on every transport, beside a plain socket.

One round is a STEP with taps for every request and all their replies: encode, send, wait, validate into leased
staging. The other end is a stub drafter in its own process, with rows that were prepared before. After every round, in
turn, a plain blocking socket moves the same bytes up and down, to a third process: ratios are taken inside a turn, so
that drift of the machine cancels. Medians and quartiles are over turns. The verifier has cores of its own, and the
other ends share the rest, as they would on two machines.

The wait holds the link and the stub's own work (receive, write the reply, send it), which is also given by itself,
as the stub reports it: validation of the STEP and the sending of heads and bodies cannot be taken out of it.
Called by `dspark bench wire`. It loads no model and judges nothing.
"""

from __future__ import annotations

import gc
import json
import socket
import statistics
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from dspark.wire_benchmark_peers import (
    DEPTH,
    SIZES,
    TAP_LAYERS,
    TAP_WIDTH,
    TOKEN,
    Layout,
    MemoryClient,
    bound_to,
    memory_of,
    plain_process,
    receive_exactly,
    split_cores,
    stub_process,
)
from dspark_proto import (
    EMPTY_DIGEST,
    NO_COMMIT,
    Accepted,
    Lane,
    ProposalReady,
    StepItem,
    SupportPolicy,
    VerifierConnection,
    prefix_digest,
)
from dspark_proto.memory import aligned_memory
from dspark_proto.transports import ClientTransport, open_client

SCHEMES = {"zmq": "tcp", "tcp": "plain+tcp", "ucx": "ucx", "memory": ""}
"""Transports, and the scheme of their addresses; `memory` has none, for both ends are in this thread."""

VOCAB = 129_280
SPARSE = Layout("sparse", 32, VOCAB)
DENSE = Layout("dense", 0, VOCAB)
CASES = ((SPARSE, 1), (SPARSE, 4), (SPARSE, 16), (DENSE, 1), (DENSE, 4))

ACCEPTED = 2
"""Drafts that survive each round, so that a STEP brings three tap rows for every request."""

TAP_ROWS = ACCEPTED + 1
_COMMIT = 11
_WARM_UP_TURNS = 5
_TRACED_TURNS = 30
_WAIT_S = 60.0
_PARTS = ("encode", "send", "wait", "validate", "stub")


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of one round: all of it, and the parts that follow each other. `stub` is inside `wait`."""

    total: float
    encode: float
    send: float
    wait: float
    validate: float
    stub: float


@dataclass(slots=True)
class Series:
    """One transport's rounds in one case, and the plain rounds of the same turns, in seconds."""

    transport: str
    rounds: list[Round] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)


class Verifier:
    """One transport's verifier with `requests` open slots."""

    def __init__(self, client: ClientTransport, layout: Layout, requests: int) -> None:
        self.connection = VerifierConnection(layout.parameters(epoch=1, slots=requests))
        self.step_bytes = self.reply_bytes = 0
        self._client = client
        client.place = self.connection.place
        self._taps = bytes(range(256)) * (TAP_ROWS * len(TAP_LAYERS) * TAP_WIDTH * 2 // 256)
        self._digests = [EMPTY_DIGEST] * requests
        self._buffer = aligned_memory(requests * (len(self._taps) + 64) + 8192)
        self._round = 0
        self._connect()
        support = SupportPolicy(layout.support)
        for slot in range(requests):
            self._tell(self.connection.open(slot, slot + 1, seed=0, support=support, lane=Lane.RATIO))

    def _connect(self) -> None:
        until = time.monotonic() + _WAIT_S
        while not self._client.send([self.connection.hello(time.monotonic_ns())], 100):
            if time.monotonic() > until:
                raise TimeoutError("the stub drafter does not answer")
        while not any(isinstance(event, Accepted) for event in self._events(100)):
            if time.monotonic() > until:
                raise TimeoutError("the stub drafter does not accept")

    def _events(self, timeout_ms: int) -> list[object]:
        frames = self._client.poll(timeout_ms)
        return [event for frame in frames for event in self.connection.receive(frame, time.monotonic_ns())]

    def _tell(self, frame: memoryview) -> None:
        if not self._client.send([frame], 1000):
            raise ConnectionError("the link to the stub drafter went down")

    def _item(self, slot: int) -> StepItem:
        """The slot's next STEP: it commits two drafts and a correction, and brings their taps."""
        first = self.connection.context_end(slot)
        return StepItem(
            session=slot + 1,
            slot=slot,
            generation=self.connection.generation(slot),
            round=self._round,
            anchor_token=_COMMIT,
            anchor_position=first + TAP_ROWS,
            prefix_digest=self._digests[slot],
            depth=DEPTH,
            lane=Lane.RATIO,
            accepted_count=ACCEPTED if self._round > 1 else NO_COMMIT,
            commit_token=_COMMIT,
            tap_first=first,
            tap_rows=TAP_ROWS,
            taps=self._taps,
        )

    def prepare(self) -> list[StepItem]:
        """What an engine does between rounds, and nobody times here: the next round's items."""
        self._round += 1
        surviving = (_COMMIT, TOKEN, TOKEN)
        self._digests = [prefix_digest(surviving, digest) for digest in self._digests]
        return [self._item(slot) for slot in range(len(self._digests))]

    def round(self, items: Sequence[StepItem]) -> Round:
        """One round; every proposal is released."""
        began = time.perf_counter()
        frame = self.connection.step(items, time.monotonic_ns(), self._buffer)
        encoded = time.perf_counter()
        self._tell(frame)
        sent = now = time.perf_counter()
        waited, stub_us, received, ready = 0.0, 0, 0, 0
        while ready < len(items):
            frames = self._client.poll(1000)
            arrived = time.perf_counter()
            waited += arrived - now
            received += sum(map(len, frames))
            for one in frames:
                for event in self.connection.receive(one, time.monotonic_ns()):
                    if isinstance(event, ProposalReady):
                        ready, stub_us = ready + 1, event.draft_us
                        event.lease.release()
            now = time.perf_counter()
            if now - began > _WAIT_S:
                raise TimeoutError(f"{ready} of {len(items)} proposals came")
        self.step_bytes, self.reply_bytes = len(frame), received
        return Round(now - began, encoded - began, sent - encoded, waited, now - sent - waited, stub_us / 1e6)


class PlainEnd:
    """A blocking socket that moves as many bytes up and down as a round does."""

    def __init__(self, port: int, up_bytes: int, down_bytes: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(SIZES.pack(up_bytes, down_bytes))
        self._request, self._reply = memory_of(up_bytes), memory_of(down_bytes)

    def round(self) -> float:
        """Seconds of one exchange."""
        began = time.perf_counter()
        self._socket.sendall(self._request)
        if not receive_exactly(self._socket, self._reply):
            raise ConnectionError("the plain end went away")
        return time.perf_counter() - began

    def close(self) -> None:
        self._socket.close()


@contextmanager
def _verifiers(
    layout: Layout, requests: int, transports: Sequence[str], far: list[int]
) -> Iterator[dict[str, Verifier]]:
    with ExitStack() as stack:
        found = {}
        for transport in transports:
            client: ClientTransport
            if transport == "memory":
                client = MemoryClient(layout, requests)
            else:
                client = open_client(stack.enter_context(stub_process(layout, requests, SCHEMES[transport], far)))
            stack.callback(client.close)
            found[transport] = Verifier(client, layout, requests)
        yield found


def run(
    turns: int,
    transports: Sequence[str] = ("zmq", "tcp"),
    cases: Sequence[tuple[Layout, int]] = CASES,
    trace: bool = False,
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, object]:
    """Run the benchmark; returns the result object (see docs/guides/transports.md for the keys).

    `turns` is for one-request cases; cases with more bytes take fewer, but at least eight. With `trace`, the memory
    that the verifier's side of a round takes is measured too, in rounds of its own.
    """
    result: dict[str, object] = {"turns": turns, "transports": list(transports), "depth": DEPTH, "tap_rows": TAP_ROWS}
    quartiles: dict[str, list[float]] = {}
    near, far = split_cores()
    result["cores_apart"] = bool(near)
    with bound_to(near), plain_process(far) as port:
        for layout, requests in cases:
            log(f"{layout.name} rows, {requests} requests")
            with _verifiers(layout, requests, transports, far) as verifiers:
                _measure_case(result, quartiles, layout, requests, verifiers, port, turns)
                if trace:
                    for transport, verifier in verifiers.items():
                        _trace(result, f"{layout.name}_{{}}_{transport}_{requests}", verifier)
    return {**result, "quartiles": quartiles}


def _measure_case(
    result: dict[str, object],
    quartiles: dict[str, list[float]],
    layout: Layout,
    requests: int,
    verifiers: dict[str, Verifier],
    port: int,
    turns: int,
) -> None:
    for verifier in verifiers.values():
        for _ in range(_WARM_UP_TURNS):
            verifier.round(verifier.prepare())
    one = next(iter(verifiers.values()))
    up_bytes, down_bytes = one.step_bytes, one.reply_bytes
    result[f"{layout.name}_bytes_up_{requests}"] = up_bytes
    result[f"{layout.name}_bytes_down_{requests}"] = down_bytes
    plain = PlainEnd(port, up_bytes, down_bytes)
    for _ in range(_WARM_UP_TURNS):
        plain.round()
    series = [Series(transport) for transport in verifiers]
    for _ in range(max(8, turns // requests if layout.support else turns // (10 * requests))):
        for one_series in series:
            verifier = verifiers[one_series.transport]
            items = verifier.prepare()
            one_series.rounds.append(verifier.round(items))
            one_series.plain.append(plain.round())
    plain.close()
    for one_series in series:
        _report(result, quartiles, one_series, layout.name, requests)


def _report(
    result: dict[str, object], quartiles: dict[str, list[float]], series: Series, layout: str, requests: int
) -> None:
    """Medians and quartiles of a case: the ratio to the plain socket, the round and its parts in microseconds."""
    samples = {
        "ratio": [one.total / plain for one, plain in zip(series.rounds, series.plain, strict=True)],
        "us": [one.total * 1e6 for one in series.rounds],
        "plain_us": [plain * 1e6 for plain in series.plain],
    }
    samples |= {f"{part}_us": [getattr(one, part) * 1e6 for one in series.rounds] for part in _PARTS}
    for unit, values in samples.items():
        key = f"{layout}_{unit}_{series.transport}_{requests}"
        low, _, high = statistics.quantiles(values, n=4)
        result[key] = round(statistics.median(values), 3)
        quartiles[key] = [round(low, 3), round(high, 3)]


def _trace(result: dict[str, object], key: str, verifier: Verifier) -> None:
    """Bytes that a round leaves on the verifier's side, over many rounds, and the most that one holds at once.

    What it holds for a moment are Python objects: the records and views of the frames under way, and the events that
    the caller gets. Frames, taps and rows are in memory that was taken before. A collection empties the interpreter's
    own lists of freed objects, which would count as kept until they are full.
    """
    peaks, first = array("q", bytes(8 * (_WARM_UP_TURNS + _TRACED_TURNS))), 0
    tracemalloc.start()
    for turn in range(_WARM_UP_TURNS + _TRACED_TURNS):
        if turn == _WARM_UP_TURNS:
            first = _held_bytes()
        items = verifier.prepare()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        verifier.round(items)
        peaks[turn] = tracemalloc.get_traced_memory()[1] - before
    result[key.format("kept_bytes")] = round((_held_bytes() - first) / _TRACED_TURNS)
    result[key.format("peak_bytes")] = round(statistics.median(peaks[_WARM_UP_TURNS:]))
    tracemalloc.stop()


def _held_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def as_json(result: dict[str, object]) -> str:
    return json.dumps(result, indent=1)


def as_table(result: dict[str, object]) -> str:
    """The same figures for people: one line for each case and transport."""
    quartiles = result["quartiles"]
    assert isinstance(quartiles, dict)
    lines = [
        f"rounds on the wire, depth {result['depth']}, {result['tap_rows']} tap rows a request; medians, microseconds",
        "",
        f"{'rows':8} {'requests':>8} {'transport':>9} {'ratio':>6} {'quartiles':>13} {'round':>9} {'plain':>9}"
        f" {'encode':>8} {'send':>8} {'wait':>9} {'validate':>9} {'of it stub':>10}",
    ]
    for key in quartiles:
        layout, unit, transport, requests = key.rsplit("_", 3)
        if unit != "ratio":
            continue
        case = f"{transport}_{requests}"
        parts = [result[f"{layout}_{part}_{case}"] for part in ("us", "plain_us", *(f"{p}_us" for p in _PARTS))]
        spread = " .. ".join(f"{quartile:.2f}" for quartile in quartiles[key])
        lines.append(
            f"{layout:8} {requests:>8} {transport:>9} {result[key]:>6.2f} {spread:>13}"
            + "".join(f" {value:>{width}.0f}" for value, width in zip(parts, (9, 9, 8, 8, 9, 9, 10), strict=True))
        )
        if f"{layout}_kept_bytes_{case}" in result:
            lines.append(
                f"{'':18} a round keeps {result[f'{layout}_kept_bytes_{case}']} bytes, and holds at most "
                f"{result[f'{layout}_peak_bytes_{case}']} more than it began with"
            )
    return "\n".join([*lines, "", "ratio: to a plain blocking socket that moves the same bytes in the same turn"])
