"""A whole speculative path in one thread: engine, link, wire frames, worker, with faults planted on the wire.

`Wire` is the link's transport; its other end is a real `Worker`, which runs whenever a frame arrives. Nothing sleeps
unless a test freezes the worker. Tests drive `engine.turn()` themselves.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from dspark import speculative
from dspark.identity import compatibility
from dspark.models.drafter import DrafterCheckpoint, DrafterNetwork
from dspark.models.source import load_embedding, load_target, open_target
from dspark.models.target import TargetModel
from dspark.models.tokenizer import ChatTokenizer
from dspark.speculative import ResolvedDrafter
from dspark_proto import Buffer, Compatibility, HelloParameters, MessageType
from dspark_proto.placement import Place
from dspark_proto.transports.base import PeerFrame
from dspark_spark.api import Delta, GenerateRequest, SamplingParams
from dspark_spark.draft_link import DraftLink
from dspark_spark.draft_pool import DraftPool
from dspark_spark.engine import Engine, EngineSettings
from dspark_spark.metrics import Metrics
from dspark_spark.pool_members import Member
from dspark_workers.worker import Worker

LENGTH = 256
TYPE_BYTE = 6  # of a frame's prefix


def type_of(frame: Buffer) -> MessageType:
    return MessageType(memoryview(frame)[TYPE_BYTE])


@dataclass(frozen=True, repr=False)
class Parts:
    """What is loaded once: both halves of a tiny pair."""

    model: TargetModel
    tokenizer: ChatTokenizer
    drafter: ResolvedDrafter
    network: DrafterNetwork
    draft_ids: Tensor
    compatibility: Compatibility

    def parameters(self, **changes: object) -> HelloParameters:
        """HELLO of either side; a new process each time."""
        values: dict[str, object] = {
            "epoch": secrets.randbits(64),
            "max_slots": 4,
            "max_depth": self.drafter.depth,
            "max_in_flight": 4,
            **changes,
        }
        return HelloParameters(self.compatibility, **values)  # type: ignore[arg-type]

    def worker(self, slots: int = 4, length: int = LENGTH, **changes: object) -> Worker:
        """A worker process, as it were: new epoch, empty state."""
        return Worker(self.network, self.draft_ids, self.parameters(**changes), slots=slots, length=length)


def load_parts(target: Path, drafter: Path, depth: int = 4) -> Parts:
    source = open_target(str(target))
    config = speculative.SpeculativeConfig(method="dspark", model=str(drafter), num_speculative_tokens=depth)
    resolved = speculative.resolve(config, str(target), source.config)
    assert resolved is not None
    tokenizer = source.tokenizer()
    checkpoint = DrafterCheckpoint(drafter)
    return Parts(
        load_target(source, device="cpu", dtype=torch.float32),
        tokenizer,
        resolved,
        checkpoint.network(load_embedding(source), max_positions=LENGTH),
        checkpoint.draft_ids,
        compatibility(source, tokenizer, drafter, checkpoint.config),
    )


@dataclass(repr=False)
class Wire:
    """Client transport whose peer is `worker`. up, down: hooks that see each frame and may change, drop or repeat it.

    connected False: nothing is taken, as with no TCP connection. frozen: frames wait, as before a stopped process.
    post: replies by peer that nobody has fetched; wires to one worker share it, and have a peer name each.
    """

    worker: Worker
    connected: bool = True
    frozen: bool = False
    up: Callable[[bytes], list[bytes]] = lambda frame: [frame]
    down: Callable[[bytes], list[bytes]] = lambda frame: [frame]
    sent: list[MessageType] = field(default_factory=list)
    peer: bytes = b"spark"
    closed: bool = False
    place: Place | None = None
    post: dict[bytes, list[bytes]] = field(default_factory=dict)
    _stuck: list[bytes] = field(default_factory=list)
    _arrived: list[bytes] = field(default_factory=list)

    def send(self, frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        if not self.connected:
            return False
        self.sent += [type_of(frame) for frame in frames]
        self._stuck += [out for frame in frames for out in self.up(bytes(frame))]
        self._turn()
        return True

    def poll(self, timeout_ms: int) -> list[memoryview]:
        self._turn()
        if not self._arrived and timeout_ms:
            time.sleep(timeout_ms / 1000)
        arrived, self._arrived = self._arrived, []
        return [memoryview(frame) for frame in arrived]

    def close(self) -> None:
        self.closed = True

    def replace_worker(self, worker: Worker) -> None:
        """The process died and another one listens: what was under way is lost, and the peer has a new name."""
        self.worker = worker
        self.peer += b"'"
        self._stuck, self._arrived = [], []

    def thaw(self) -> None:
        self.frozen = False
        self._turn()

    def deliver(self, frame: bytes) -> None:
        """A frame out of nowhere."""
        self._arrived.append(frame)

    def _turn(self) -> None:
        if self.frozen or not self.connected:
            return
        frames, self._stuck = self._stuck, []
        self.worker.receive([PeerFrame(self.peer, memoryview(f)) for f in frames], time.monotonic_ns())
        self.worker.draft_pending()
        self.worker.expire(time.monotonic_ns())
        for peer, replies in self.worker.outbox():
            self.post.setdefault(peer, []).extend(bytes(reply) for reply in replies)
        self._arrived += [out for reply in self.post.pop(self.peer, []) for out in self.down(reply)]


@dataclass
class Reader:
    """A client: what it has received."""

    deltas: list[Delta] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [t for d in self.deltas for t in d.token_ids]

    @property
    def text(self) -> str:
        return "".join(d.text for d in self.deltas)

    @property
    def last(self) -> Delta:
        return self.deltas[-1]

    @property
    def finish(self) -> str | None:
        return self.deltas[-1].finish_reason if self.deltas else None


@dataclass
class Rig:
    """An engine with its link, wire and worker; requests get ids of their own."""

    parts: Parts
    engine: Engine
    wire: Wire
    count: int = 0

    @property
    def link(self) -> DraftLink:
        assert isinstance(self.engine.link, DraftLink)
        return self.engine.link

    def ask(
        self, prompt: Sequence[int], *, speculate: bool = True, name: str | None = None, **params: object
    ) -> Reader:
        """Submit; greedy and endless to 24 tokens unless said otherwise."""
        self.count += 1
        values: dict[str, object] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **params}
        reader = Reader()
        request = GenerateRequest(
            name or f"r{self.count}", tuple(prompt), SamplingParams(**values), speculate  # type: ignore[arg-type]
        )
        self.engine.submit(request, reader.deltas.append)
        return reader

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.engine.turn()

    def finish(self, *readers: Reader, limit: int = 400) -> None:
        """Turn until all have ended."""
        for _ in range(limit):
            if all(r.finish for r in readers):
                return
            self.engine.turn()
        raise AssertionError(f"not finished after {limit} turns: {[r.finish for r in readers]}")

    def answer(self, prompt: Sequence[int], **params: object) -> Reader:
        reader = self.ask(prompt, **params)  # type: ignore[arg-type]
        self.finish(reader)
        return reader

    def metrics(self) -> dict[str, float]:
        lines = self.engine.metrics.render().decode().splitlines()
        return {n: float(v) for n, _, v in (line.rpartition(" ") for line in lines if not line.startswith("#"))}

    def total(self, name: str) -> float:
        """Sum of a series over its labels."""
        return sum(v for n, v in self.metrics().items() if n.partition("{")[0] == f"dspark:{name}")

    def labelled(self, name: str) -> dict[str, float]:
        """label value -> count, of the labels that have counted."""
        series = ((n.partition("{"), v) for n, v in self.metrics().items())
        return {label.split('"')[1]: v for (n, _, label), v in series if n == f"dspark:{name}" and v and label}

    def check_idle(self) -> None:
        """Nothing is held by anybody: the end of every test."""
        assert sorted(self.engine._free) == list(range(self.engine.settings.slots))
        assert self.engine._under_way == []
        check_link_idle(self.link)

    def check_books(self) -> None:
        """Drafted tokens are verified or discarded, proposals likewise, and accepted ones were verified."""
        verified = self.total("spec_decode_num_verified_tokens_total")
        assert self.total("spec_decode_num_accepted_tokens_total") <= verified
        assert verified <= self.total("spec_decode_num_draft_tokens_total")


@dataclass
class PoolRig(Rig):
    """An engine with a pool; `wires[i]` leads to worker i. `wire` is the first."""

    wires: list[Wire] = field(default_factory=list)
    deadline_ms: int = 2000
    hello: dict[str, object] = field(default_factory=dict)

    @property
    def pool(self) -> DraftPool:
        assert isinstance(self.engine.link, DraftPool)
        return self.engine.link

    def link_of(self, index: int) -> DraftLink:
        """The link over `wires[index]`."""
        return next(w.link for w in self.pool._workers if w.link._client is self.wires[index])

    def member(self, wire: Wire, drafter: str = "") -> Member:
        """What makes the pool use `wire`; its address is "memory N", N its place among the wires."""
        if wire not in self.wires:
            self.wires.append(wire)
        parameters = self.parts.parameters(**self.hello)
        return Member(f"memory {self.wires.index(wire)}", parameters, self.deadline_ms, lambda: wire, drafter)

    def leases(self) -> list[int]:
        """Leases of each worker, in the order of the pool."""
        return [status.leases for status in self.pool.workers]

    def states(self) -> list[str]:
        return [status.state for status in self.pool.workers]

    def check_idle(self) -> None:
        """Nothing is held by anybody, on either side of any wire: the end of every test."""
        assert sorted(self.engine._free) == list(range(self.engine.settings.slots))
        assert self.engine._under_way == []
        assert self.pool._seats == {}
        for worker in self.pool._workers:
            check_link_idle(worker.link)
        for wire in self.wires:
            if wire.connected and not wire.frozen:
                wire._turn()
                assert wire.worker.free_slots == wire.worker._state.slots

    def check_books(self) -> None:
        """Every proposal that was asked for was verified, discarded by cause, or belongs to a request that left."""
        super().check_books()
        asked = self.total("spec_decode_num_drafts_total")
        discarded = self.total("proposal_discards_total")
        assert discarded <= asked


def build_pool_rig(
    parts: Parts,
    workers: Sequence[Worker] | int = 2,
    *,
    deadline_ms: int = 2000,
    settings: EngineSettings | None = None,
    wires: Sequence[Wire] = (),
    now_ns: Callable[[], int] = time.monotonic_ns,
    **hello: object,
) -> PoolRig:
    """`workers`: worker processes, or how many; or `wires` to workers that other rigs use too."""
    settings = settings or EngineSettings(slots=4, max_context=LENGTH, prefill_chunk=32, queue_limit=8)
    if isinstance(workers, int):
        workers = [parts.worker(step_deadline_ms=600_000) for _ in range(workers)]
    values = {"step_deadline_ms": deadline_ms, "max_slots": settings.slots, "max_in_flight": max(2, settings.slots)}
    pool = DraftPool([], now_ns)
    engine = Engine(parts.model, parts.tokenizer, settings, Metrics(parts.drafter.depth), parts.drafter, pool)
    rig = PoolRig(parts, engine, Wire(workers[0]), deadline_ms=deadline_ms, hello=values | hello)
    chosen = wires or [rig.wire, *(Wire(process) for process in workers[1:])]
    rig.wire = chosen[0]
    pool.set_members([rig.member(wire) for wire in chosen])
    rig.engine.turn()
    rig.engine.turn()
    return rig


def check_link_idle(link: DraftLink) -> None:
    """No lease, no round, no staging, no slot."""
    assert (link._leases, link._by_wire, link._rounds) == ({}, {}, {})
    staging = link._connection.staging
    assert staging is None or all(lease.state.value == "free" for lease in staging.leases)
    if link.up:
        assert all(slot.state.value == "free" for slot in link._connection._slots)


def build_rig(
    parts: Parts,
    *,
    worker: Worker | None = None,
    deadline_ms: int = 2000,
    link_deadline_ms: int | None = None,
    settings: EngineSettings | None = None,
    draft_temperature: float | None = None,
    **hello: object,
) -> Rig:
    settings = settings or EngineSettings(slots=4, max_context=LENGTH, prefill_chunk=32, queue_limit=4)
    wire = Wire(worker or parts.worker(step_deadline_ms=600_000))
    values = {"step_deadline_ms": deadline_ms, "max_slots": settings.slots, "max_in_flight": max(2, settings.slots)}
    parameters = parts.parameters(**(values | hello))
    link = DraftLink("memory", parameters, link_deadline_ms or deadline_ms, client=wire)
    drafter = replace(parts.drafter, draft_temperature=draft_temperature)
    engine = Engine(parts.model, parts.tokenizer, settings, Metrics(drafter.depth), drafter, link)
    return Rig(parts, engine, wire)
