"""One world: built from the seed, driven through faults, healed, made to prove that it lives, quiesced, counted.

Phase 1 runs under the fault program, phase 2 after `Nemesis.heal`: every slot must consume a proposal again within two
watchdogs. Then all requests end, and nothing may be left of them anywhere. Invariant: a result is a function of (seed,
world, rounds, the faults that are left in); the first violation ends the world. Called by `campaign` and `shrink`.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from random import Random
from typing import TextIO

from dspark.sim.client import SimClient
from dspark.sim.clock import MS, VirtualClock
from dspark.sim.faults import Fault, program
from dspark.sim.forgery import tainted_sessions
from dspark.sim.ledger import Ledger, Violation
from dspark.sim.nemesis import Nemesis
from dspark.sim.network import Channel, Sink
from dspark.sim.options import draw_options
from dspark.sim.oracle import Oracle
from dspark.sim.randomness import branch
from dspark.sim.ranks import Envelope, Rank
from dspark.sim.spark import Flight, Spark
from dspark.sim.toy_models import TAP_LAYERS, TAP_WIDTH, ToyModels
from dspark.sim.trace import Trace
from dspark.sim.watch import ModelWatch
from dspark.sim.worker import ToyWorker
from dspark_proto import Compatibility, Dtype, HelloParameters, LeaseState, MessageType, SlotState, SupportPolicy
from dspark_proto.limits import SILENT_HEARTBEATS
from dspark_spark.draft_link import QUARANTINE_MAX_S, RETRY_MAX_S
from dspark_spark.draft_pool import SEED_S, DraftPool
from dspark_spark.leases import LOSS_PAUSE_MAX_S
from dspark_spark.pool_members import REST_MAX_S, Member
from dspark_spark.rank_agreement import Decision

RANK_DELAY_US = (20, 300)
PHASE_ONE = 0.9
"""Share of a world's rounds that run under faults."""
SETTLE_MS = 4000


@dataclass(slots=True)
class Result:
    """What became of a world. liveness_ms: from healing until each slot's next proposal, one figure per slot."""

    world: int
    rounds: int
    target_only: Counter[str]
    discards: Counter[str]
    proposals: int
    faults: tuple[Fault, ...]
    violations: list[Violation]
    liveness_ms: list[float]
    virtual_ns: int
    trace_hash: str
    events: Counter[str] = field(default_factory=Counter)


def _same(client: SimClient) -> SimClient:
    """The one client of a member, however often it connects."""
    return client


class World:
    """World number `world` of a run; `only`: indexes of the faults to keep, None for all of them.

    kinds: these kinds of faults, and many of them, instead of what the seed says.
    """

    def __init__(
        self, seed: int, world: int, rounds: int, only: Collection[int] | None = None, lines: TextIO | None = None,
        kinds: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.number, self.rounds = world, rounds
        self.options = options = draw_options(seed, world, kinds)
        self.clock = VirtualClock()
        self.trace = Trace(self.clock, lines, world)
        self.ledger = Ledger(self.trace)
        self._seed = seed
        self.models = ToyModels(self._branch("models"), options.vocab, int(options.support))
        self.oracle = Oracle(self.models, self.ledger, options.rule)
        whole = program(
            self._branch("program"), int(rounds * PHASE_ONE), options.fault_every, options.kinds, options.groups,
            options.workers,
        )  # fmt: skip
        self.program = whole if only is None else tuple(fault for fault in whole if fault.index in only)
        self.workers = [self._worker(index) for index in range(options.workers)]
        self.sparks = [self._spark(index) for index in range(options.groups)]
        self.ranks = [self._rank(spark) for spark in self.sparks]
        self.nemesis = Nemesis(self.clock, self.trace, self.program, self.sparks, self.workers, self.ranks)
        self._join()
        if options.watched:
            self._watch()
        self.liveness_ms: list[float] = []

    # Building

    def _branch(self, *path: object) -> Random:
        """The random numbers of one component of this world."""
        return branch(self._seed, "world", self.number, *path)

    def _parameters(self, epoch: int) -> HelloParameters:
        options = self.options
        compatibility = Compatibility(
            vocab_size=options.vocab,
            token_map_hash=sha256(b"toy").digest(),
            draft_identity="toy drafter",
            target_identity="toy target",
            tokenizer_hash=sha256(b"none").digest(),
            tap_layers=TAP_LAYERS,
            tap_dtype=Dtype.BF16,
            tap_width=TAP_WIDTH,
        )
        return HelloParameters(
            compatibility,
            epoch,
            max_slots=options.slots,
            max_depth=options.depth,
            max_support=16,
            max_in_flight=options.max_in_flight,
            context_credit_rows=options.credit_rows,
            heartbeat_ms=options.heartbeat_ms,
            step_deadline_ms=options.deadline_ms,
            dense_rows=options.support is SupportPolicy.DENSE,
        )

    def _worker(self, index: int) -> ToyWorker:
        def send(group: int, frames: list[bytes]) -> None:
            self.nemesis.down[group][index].send(frames)

        return ToyWorker(
            index, self.clock, self._branch("worker", index), self._parameters(1), self.models, self.ledger, send,
            self.options.draft_us,
        )  # fmt: skip

    def _spark(self, index: int) -> Spark:
        return Spark(
            index, self.clock, self._branch("spark", index), self.options, self.models, self.ledger, self.oracle,
            self.trace,
        )  # fmt: skip

    def _rank(self, spark: Spark) -> Rank:
        def send(envelopes: list[Envelope]) -> None:
            self.nemesis.from_rank[spark.index].send(envelopes)

        deadline_ns = 3 * self.options.rank_deadline_ms * MS
        return Rank(f"g{spark.index}r1", self.clock, self.options.flights, deadline_ns, send, spark.prefixes)

    def _join(self) -> None:
        """Channels between all processes, and the draft source of every group."""
        nemesis, delay_us = self.nemesis, self.options.delay_us
        for spark, rank in zip(self.sparks, self.ranks, strict=True):
            group = spark.index
            nemesis.up.append([self._up(group, worker, delay_us) for worker in self.workers])
            nemesis.down.append([self._down(spark, worker.index, delay_us) for worker in self.workers])
            nemesis.to_rank.append(self._channel(("to_rank", group), RANK_DELAY_US, rank.receive))
            nemesis.from_rank.append(self._channel(("from_rank", group), RANK_DELAY_US, spark.hear))
            spark.send_ranks = nemesis.to_rank[group].send
            spark.on_resolved = self._resolved_by(spark, rank)
            spark.on_refused = nemesis.quarantined
            spark.clients = [self._client(spark, worker) for worker in self.workers]
            spark.source = self._source(spark)

    def _up(self, group: int, worker: ToyWorker, delay_us: tuple[int, int]) -> Channel:
        def sink(frames: list[bytes], fault: Fault | None) -> None:
            worker.receive(group, frames, fault)

        return self._channel(("up", group, worker.index), delay_us, sink)

    def _down(self, spark: Spark, worker: int, delay_us: tuple[int, int]) -> Channel:
        def sink(frames: list[bytes], fault: Fault | None) -> None:
            spark.receive(worker, frames, fault)

        return self._channel(("down", spark.index, worker), delay_us, sink)

    def _channel(self, path: tuple[object, ...], delay_us: tuple[int, int], sink: Sink) -> Channel:
        return Channel(self.clock, self._branch("channel", *path), delay_us, sink, self._taint)

    def _taint(self, frame: bytes) -> None:
        for session in tainted_sessions(frame):
            self.ledger.taint(session)

    def _client(self, spark: Spark, worker: ToyWorker) -> SimClient:
        channel = self.nemesis.up[spark.index][worker.index]

        def send(frames: list[bytes]) -> bool:
            if self.options.refuses and not worker.alive:
                return False
            channel.send(frames)
            return True

        def refusals() -> int:
            return sum(spark.source.drops.values())

        rng = self._branch("client", spark.index, worker.index)
        return SimClient(send, self.clock.after, spark.wake, refusals, self.ledger, rng, bool(self.program))

    def _source(self, spark: Spark) -> DraftPool:
        parameters = self._parameters(spark.index + 1)
        members = [
            Member(f"w{worker}", parameters, self.options.deadline_ms, partial(_same, client))
            for worker, client in enumerate(spark.clients)
        ]
        pool = DraftPool(members, spark.clock)
        for client, worker in zip(spark.clients, pool._workers, strict=True):
            connection = worker.link._connection
            client.staging_of = connection
            if self.options.direct:
                connection._direct_receive = True
                client.connection = connection
        return pool

    def _watch(self) -> None:
        """Check every event of every ledger against the model."""
        watch = ModelWatch(self.ledger)
        for worker in self.workers:
            worker.watch = watch
        for spark, rank in zip(self.sparks, self.ranks, strict=True):
            spark.watch = watch
            rank.on_applied = self._applied_by(spark.name, watch)
            for client in spark.clients:
                assert client.staging_of is not None
                spark.looks.append(watch.verifier(client.staging_of, f"{spark.name}>{len(spark.looks)}"))

    @staticmethod
    def _applied_by(name: str, watch: ModelWatch) -> Callable[[int, Decision], None]:
        def tell(flight: int, one: Decision) -> None:
            watch.applied(f"{name}f{flight}", 1, one.group_epoch, one.sequence, one.digest)

        return tell

    def _resolved_by(self, spark: Spark, rank: Rank) -> Callable[[Flight, Decision], None]:
        """Check, at every resolved step, that the other rank stands where this one does."""

        def check(flight: Flight, decision: Decision) -> None:
            if rank.followers[flight.index].group_epoch != decision.group_epoch:
                return  # it was restarted meanwhile, and knows nothing
            texts = rank.texts[flight.index]
            for item in decision.items:
                session = spark.sessions.get(item.slot)
                if session is not None and session.number == item.session and texts.get(item.session) != session.tokens:
                    self.ledger.violate(
                        "half_commits", f"session {item.session} round {item.round}: the ranks hold different tokens"
                    )

        return check

    # Running

    def run(self) -> Result:
        """Run to the end, or to the first violation."""
        try:
            self._run()
        except Exception:
            self.ledger.violate("crashes", traceback.format_exc(limit=-6))
        return self._result()

    def _run(self) -> None:
        for spark in self.sparks:
            spark.begin()
        ledger, nemesis, clock = self.ledger, self.nemesis, self.clock
        under_faults, limit_ns = int(self.rounds * PHASE_ONE), self.rounds * 1000 * MS
        while ledger.rounds < under_faults and not ledger.violations and clock.step():
            nemesis.advance(ledger.rounds)
            if clock.now_ns > limit_ns:
                ledger.violate("not_live", f"{ledger.rounds} rounds in {clock.now_ns // 10**9} virtual seconds")
        if ledger.violations:
            return
        self._heal()
        self._run_while(lambda: ledger.rounds < self.rounds)
        if not ledger.violations:
            self._quiesce()

    def _run_while(self, wanted: Callable[[], bool]) -> None:
        while wanted() and not self.ledger.violations and self.clock.step():
            pass

    def _run_for(self, duration_ns: int) -> None:
        until = self.clock.now_ns + duration_ns
        self._run_while(lambda: self.clock.now_ns < until)

    @property
    def watchdog_ms(self) -> float:
        """The longest wait that the configuration allows to what has happened in this world.

        That is the time which a worker has to take a context, unless one was found out: it is asked ever more rarely.
        """
        options = self.options
        discards = sum((spark.discards for spark in self.sparks), Counter[str]())
        silence = (SILENT_HEARTBEATS + 1) * options.heartbeat_ms
        pauses = [RETRY_MAX_S, LOSS_PAUSE_MAX_S, REST_MAX_S, SEED_S]
        pauses += [QUARANTINE_MAX_S] if discards["audit_failed"] or discards["invalid_row"] else []
        return max(1000 * max(pauses), silence, options.deadline_ms, options.rank_deadline_ms)

    def _heal(self) -> None:
        """Whole again: every slot must come to a proposal within two watchdogs."""
        self.nemesis.heal()
        healed = self.clock.now_ns
        self.trace.emit("heal")
        missing = {(spark.index, slot) for spark in self.sparks for slot in range(self.options.slots)}
        limit = healed + int(2 * self.watchdog_ms * MS)

        def waiting() -> bool:
            for group, slot in sorted(missing):
                at = self.sparks[group].progress_ns.get(slot, 0)
                if at > healed:
                    missing.discard((group, slot))
                    self.liveness_ms.append((at - healed) / MS)
            return bool(missing) and self.clock.now_ns < limit

        self._run_while(waiting)
        if missing and not self.ledger.violations:
            self.ledger.violate("not_live", f"no proposal within two watchdogs for (group, slot) {sorted(missing)}")

    def _quiesce(self) -> None:
        """End all requests, let everything arrive, and look for what is left."""
        for spark in self.sparks:
            spark.closing = True
        self._run_for(SETTLE_MS * MS)
        for spark in self.sparks:
            spark.end()
        self._run_for(SETTLE_MS * MS)
        self._check_leaks(self._orphans())
        if self.ledger.violations or not any(worker.open_slots for worker in self.workers):
            return
        self._reconnect()
        self._check_leaks({})

    def _orphans(self) -> dict[tuple[int, int], int]:
        """Slots that a worker may still hold for a group: one for each OPEN and CLOSE that did not come as sent."""
        return {
            (group, worker): channel.hurt[MessageType.OPEN] + channel.hurt[MessageType.CLOSE]
            for group, row in enumerate(self.nemesis.up)
            for worker, channel in enumerate(row)
        }

    def _reconnect(self) -> None:
        """Cut every path until the workers count as silent: a new HELLO frees what a lost CLOSE has left."""
        paths = [channel for row in (*self.nemesis.up, *self.nemesis.down) for channel in row]
        for channel in paths:
            channel.cut = Fault(-1, "partition", 0, 0, 0, 0, 0)
        self._run_for((SILENT_HEARTBEATS + 2) * self.options.heartbeat_ms * MS)
        for channel in paths:
            channel.cut = None
        self._run_for(SETTLE_MS * MS)

    def _check_leaks(self, orphans: dict[tuple[int, int], int]) -> None:
        """Slots, leases, blocks, rounds and frames that nobody owns any more and that are still there."""
        for worker in self.workers:
            held = worker.open_slots
            for group, slots in held.items():
                if slots > orphans.get((group, worker.index), 0):
                    self.ledger.violate("leaked", f"{worker.name} has {slots} open slots of g{group}")
            if len(worker.slots) != sum(held.values()):
                self.ledger.violate("leaked", f"{worker.name} keeps the state of {len(worker.slots)} slots, not {held}")
        for spark in self.sparks:
            for text in self._held_by(spark):
                self.ledger.violate("leaked", f"{spark.name}: {text}")
        for channel in self.nemesis.channels:
            if channel.unaccounted:
                self.ledger.violate("leaked", f"a channel has lost track of {channel.unaccounted} frames")

    def _held_by(self, spark: Spark) -> list[str]:
        found = []
        for client in spark.clients:
            connection = client.staging_of
            if connection is None:
                continue
            blocks = connection.staging.leases if connection.staging else ()
            busy = [lease for lease in blocks if lease.state is not LeaseState.FREE]
            slots = [slot.index for slot in connection._slots if slot.state is not SlotState.FREE]
            found += [f"staging block {lease.state.value} for {lease.key}" for lease in busy]
            found += [f"slots {slots} are open"] if slots else []
        found += [f"a round waits for {f.round.waiting}" for f in spark.flights if f.round is not None]
        return found

    def _result(self) -> Result:
        target_only: Counter[str] = Counter()
        discards: Counter[str] = Counter()
        for spark in self.sparks:
            target_only += spark.target_only
            discards += spark.discards
        proposals = sum(spark.proposals for spark in self.sparks)
        return Result(
            self.number, self.ledger.rounds, target_only, discards, proposals, self.program, self.ledger.violations,
            self.liveness_ms, self.clock.now_ns, self.trace.digest,
        )  # fmt: skip
