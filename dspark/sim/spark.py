"""A Spark group: the production draft source, validation, audit and acceptance, driven by events instead of a loop.

One *flight* is a group of requests that goes through drafting, reading, agreement and commit together; several flights
share the draft source and have their rounds under way at the same time, which the engine does with two. Invariants: as
in the engine, a session's round grows with every step that it takes part in, depths are fixed before anything is drawn,
a proposal is released as soon as it has been read. Whatever is committed is judged by the oracle. Called by `world`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import torch

from dspark.audit import AuditPlan
from dspark.block_verification import verify_block
from dspark.dyadic import Int64s, RowError
from dspark.philox import Keys
from dspark.sim.client import SimClient, poison
from dspark.sim.clock import MS, VirtualClock
from dspark.sim.faults import Fault
from dspark.sim.ledger import Ledger
from dspark.sim.options import Options
from dspark.sim.oracle import Consumed, Oracle
from dspark.sim.process import Process
from dspark.sim.ranks import Envelope
from dspark.sim.toy_models import TAP_ROW_BYTES, TAP_WIDTH, ToyModels, tap_row
from dspark.sim.trace import Trace
from dspark.sim.watch import ModelWatch
from dspark.verify import sample_target_only, verify_greedy, verify_match, verify_ratio
from dspark_proto import Lane, ProposalReady, SupportPolicy, extend_digest
from dspark_spark.leases import DraftLease, DraftRequest, DraftRound, DraftSource
from dspark_spark.proposals import Proposal, audit_proposal, read_proposal
from dspark_spark.rank_agreement import (
    Decision,
    DecisionItem,
    LeaderState,
    PlanItem,
    ProposalCopy,
    RankLeader,
    Turn,
)

_LANES = (Lane.RATIO,) * 8 + (Lane.MATCH, Lane.GREEDY)


@dataclass(slots=True, eq=False)
class Session:
    """One request, as `dspark_spark.sequence` has it."""

    number: int
    seed: int
    lane: Lane
    tokens: list[int]
    limit: int
    lease: DraftLease
    round: int = 0
    last_accepted: int | None = None
    over: bool = False

    def advance(self) -> None:
        """A step begins; no two steps of a request share a round."""
        self.round += 1

    def keys(self) -> Keys:
        """As `dspark_spark.sequence.Sequence.keys`."""
        if self.lane is Lane.MATCH:
            return Keys.for_position_noise(self.seed)
        return Keys(seed=self.seed, generation=0, round=self.round)


@dataclass(slots=True)
class Read:
    """A proposal that passed validation and audit, and what the oracle is told of it."""

    proposal: Proposal
    consumed: Consumed


@dataclass(slots=True, eq=False)
class Flight:
    """Requests that step together, in slots of their own; `asked` and `round` while drafts are awaited."""

    index: int
    slots: list[int]
    leader: RankLeader
    asked: dict[int, DraftRequest] = field(default_factory=dict)
    asked_ns: int = 0
    round: DraftRound | None = None
    read: dict[int, Read] = field(default_factory=dict)
    agreed: tuple[PlanItem, ...] | None = None
    forwarded: bool = False
    busy: bool = False
    drafting: bool = False


class Spark(Process):
    """Spark group number `index`. Fields without a default are set by `world` before `begin`."""

    source: DraftSource
    clients: list[SimClient]
    send_ranks: Callable[[list[Envelope]], None]
    on_resolved: Callable[[Flight, Decision], None]
    on_refused: Callable[[int], None]

    def __init__(
        self, index: int, clock: VirtualClock, rng: Random, options: Options, models: ToyModels,
        ledger: Ledger, oracle: Oracle, trace: Trace,
    ) -> None:  # fmt: skip
        super().__init__(f"g{index}", clock)
        self.index, self.options = index, options
        self.sessions: dict[int, Session] = {}
        self.target_only: Counter[str] = Counter()
        self.discards: Counter[str] = Counter()
        self.proposals = 0
        self.progress_ns: dict[int, int] = {}
        self.closing = False
        self.watch: ModelWatch | None = None
        self.looks: list[Callable[[], None]] = []
        self.flights = [self._flight(number) for number in range(options.flights)]
        self._rng, self._models, self._ledger, self._oracle, self._trace = rng, models, ledger, oracle, trace
        self._count = 0
        self._audits = AuditPlan(options.audit_rate, rng.getrandbits(64))
        self._taps = torch.zeros(options.slots, options.context_max, TAP_WIDTH, dtype=torch.bfloat16)
        self._tap_bytes = self._taps.view(torch.uint8).numpy().data.cast("B")

    def _flight(self, number: int) -> Flight:
        deadline_ns = self.options.rank_deadline_ms * MS
        leader = RankLeader(self.options.ranks, deadline_ns, deadline_ns // 4)
        return Flight(number, list(range(number, self.options.slots, self.options.flights)), leader)

    def begin(self) -> None:
        """Start all flights and the process's own timer."""
        for flight in self.flights:
            self._form(flight)
        self.after(self.options.deadline_ms * MS, self._tick)

    def receive(self, worker: int, frames: list[bytes], fault: Fault | None) -> None:
        """Frames from a worker arrive."""
        self.clients[worker].arrive(frames, fault)
        self.run(self._pump)

    def wake(self) -> None:
        """Frames are there whose bytes have just been written."""
        self.run(self._pump)

    def hear(self, envelopes: list[Envelope], _fault: Fault | None) -> None:
        """Answers of another rank arrive."""
        self.run(lambda: self._hear(envelopes))

    def prefixes(self, flight: int) -> dict[int, list[int]]:
        """Committed tokens of a flight's sessions, for a rank that joins."""
        slots = self.flights[flight].slots
        return {one.number: list(one.tokens) for slot in slots if (one := self.sessions.get(slot))}

    def _tick(self) -> None:
        self._pump()
        for flight in self.flights:
            self._turn(flight, flight.leader.expire(self.clock()))
        self.after(self.options.deadline_ms * MS, self._tick)

    def _pump(self) -> None:
        """Let the draft source take everything that is there, and go on with every flight whose drafts have come."""
        self.source.pump()
        for client in self.clients:
            while client.inbox:
                self.source.pump()
            client.settle()
            client.confirm_cancelled()
        for flight in self.flights:
            if flight.round is not None and not flight.round.waiting:
                self._collect(flight)

    # Sessions

    def _admit(self, flight: Flight) -> None:
        if self.closing:
            return
        for slot in flight.slots:
            if slot not in self.sessions:
                self._open(slot)

    def _open(self, slot: int) -> None:
        """A request arrives: its lease, its prompt's taps, and its first token from the target alone."""
        rng, options = self._rng, self.options
        self._count += 1
        number = (self.index + 1) * 10_000_000 + self._count
        lane = rng.choice(_LANES)
        seed = rng.getrandbits(64) - (1 << 63)
        prompt = [rng.randrange(options.vocab) for _ in range(rng.randint(1, options.prompt_max))]
        limit = len(prompt) + rng.randint(2, options.tokens_max)
        lease = DraftLease(
            slot=slot,
            session=number,
            seed=seed,
            lane=lane,
            support=int(options.support) if lane is Lane.RATIO else int(SupportPolicy.K1),
            temperature=0.0 if lane is Lane.GREEDY else 1.0,
            taps=self._taps[slot],
            tokens=prompt,
        )
        session = Session(number, seed, lane, prompt, limit, lease)
        self.sessions[slot] = session
        self._oracle.opened(number, seed, lane, prompt)
        self._trace.emit("open", self.index, slot, number)
        self.source.lease(lease)
        session.advance()
        self.target_only["first_token"] += 1
        self._take(session, None, [self._sample(session)])
        self.source.feed(lease)

    def _finish(self, session: Session) -> None:
        """The request is over, whatever is under way for it."""
        session.over = True
        del self.sessions[session.lease.slot]
        self.source.release(session.lease)
        self._oracle.closed(session.number)
        self._ledger.forget(session.number)
        if self.watch is not None:
            self.watch.ended(session.number)

    def end(self) -> None:
        """All requests are over."""
        for session in list(self.sessions.values()):
            self._finish(session)

    def abort_one(self) -> None:
        """A client goes away at some moment: its request ends at once."""
        if self.sessions:
            slots = sorted(self.sessions)
            session = self.sessions[slots[self._rng.randrange(len(slots))]]
            self._trace.emit("abort", self.index, session.number)
            self._finish(session)

    # One step of a flight

    def _step(self, flight: Flight) -> None:
        """As `Engine.turn` up to the STEP: pump, admit, fix depths, ask."""
        flight.busy = True
        self._pump()
        self._admit(flight)
        if self._rng.randrange(1000) < self.options.abort_permille:
            self.abort_one()
        asked: dict[int, DraftRequest] = {}
        for slot in flight.slots:
            session = self.sessions.get(slot)
            if session is not None:
                session.advance()
                depth = self._depth(session, [one.lease for one in asked.values()])
                if depth:
                    asked[slot] = self._request(session, depth)
        flight.asked, flight.asked_ns = asked, self._world_clock.now_ns
        if not asked:
            self._agree(flight, {})
            return
        flight.drafting = True
        flight.round = self.source.step(list(asked.values()))
        self.after(self.options.deadline_ms * MS + 1, self._pump)
        if not flight.round.waiting:
            self._collect(flight)

    def _depth(self, session: Session, asked: Sequence[DraftLease]) -> int:
        """Drafts to ask for; 0, counted by its reason, when there can be none."""
        lease = session.lease
        left = session.limit - len(session.tokens) - 1
        depth = min(self.options.depth, self.source.depth_limit(lease), left)
        reason = "budget" if left <= 0 else "" if depth else "worker_down"
        reason = reason or self.source.refusal(lease, asked)
        if reason:
            self.target_only[reason] += 1
            return 0
        return depth

    def _request(self, session: Session, depth: int) -> DraftRequest:
        accepted, session.last_accepted = session.last_accepted, None
        anchor = session.tokens[-1]
        return DraftRequest(session.lease, session.round, anchor, len(session.tokens) - 1, depth, accepted, anchor)

    def _collect(self, flight: Flight) -> None:
        """All drafts are there, or given up; whoever reads them does so a little later."""
        assert flight.round is not None
        ready, flight.round = self.source.collect(flight.round), None
        self.after(self._rng.randint(*self.options.read_us) * 1000, lambda: self._read_all(flight, ready))

    def _read_all(self, flight: Flight, ready: dict[int, ProposalReady]) -> None:
        """As `Engine._read`: validate whole replies, audit them, release their staging."""
        read = {}
        for slot, request in flight.asked.items():
            event = ready.get(slot)
            if event is None:
                continue
            one = self._read(request, event, flight.asked_ns)
            event.lease.release()
            for look in self.looks:
                look()
            poison(event.lease)
            if one is not None:
                read[slot] = one
        self._agree(flight, read)

    def _read(self, request: DraftRequest, event: ProposalReady, asked_ns: int) -> Read | None:
        session = self.sessions.get(request.lease.slot)
        if session is None or session.lease is not request.lease:
            return None
        self._ledger.reads(self.index, session.number, request.round, asked_ns)
        try:
            proposal = read_proposal(event, self._models.vocab)
        except RowError as error:
            self._refuse(request, str(error), "invalid_row")
            return None
        keys = self.source.proposal_keys(request)
        report = audit_proposal(proposal, request.anchor_position, keys, self._audits)
        if report.failure is not None:
            self._refuse(request, str(report.failure), "audit_failed")
            return None
        rows = [(tuple(row.ids.tolist()), tuple(row.counts.tolist())) for row in proposal.rows]
        return Read(proposal, Consumed(keys.generation, proposal.tokens, rows))

    def _refuse(self, request: DraftRequest, reason: str, cause: str) -> None:
        now, session = self._world_clock.now_ns, request.lease.session
        self._ledger.found_out(self.index, session, request.round, reason, now)
        self._trace.emit("quarantine", self.index, request.lease.session, request.round, cause)
        self.source.invalid(request.lease, reason, cause)
        self.on_refused(request.lease.session)

    # The agreement of the ranks

    def _form(self, flight: Flight) -> None:
        """A new group epoch; whatever was under way in the old one is dead."""
        flight.read, flight.agreed, flight.forwarded = {}, None, False
        epoch = flight.leader.group_epoch + 1
        if self.watch is not None:
            self.watch.formed(f"{self.name}f{flight.index}", epoch, self.options.ranks)
        self._turn(flight, flight.leader.form(epoch, self.clock()))

    def _agree(self, flight: Flight, read: dict[int, Read]) -> None:
        """Share the drafts and plan the step; the forward pass runs while the other ranks answer."""
        flight.drafting = False
        leader = flight.leader
        if leader.state is not LeaderState.READY:
            flight.busy = False  # the group is being formed anew: this step is given up
            return
        flight.read, flight.agreed, flight.forwarded = read, None, False
        items = []
        for slot in flight.slots:
            session = self.sessions.get(slot)
            if session is not None:
                items.append(self._planned(flight, session, read.get(slot)))
        pause = self._rng.randint(*self.options.forward_us) * 1000
        epoch, sequence = leader.group_epoch, leader.sequence + 1
        self.after(pause, lambda: self._forwarded(flight, epoch, sequence))
        self._turn(flight, leader.plan(items, self.clock()))

    def _planned(self, flight: Flight, session: Session, read: Read | None) -> PlanItem:
        slot = session.lease.slot
        key = session.number, 0 if read is None else read.consumed.generation, session.round
        if read is None:
            return PlanItem(slot, *key)
        tokens = tuple(read.proposal.tokens)
        copy = ProposalCopy(flight.leader.group_epoch, slot, *key, tokens)
        self._turn(flight, flight.leader.share(copy))
        return PlanItem(slot, *key, len(tokens), copy.digest)

    def _hear(self, envelopes: list[Envelope]) -> None:
        for number, message in envelopes:
            flight = self.flights[number]
            forming = flight.leader.state is LeaderState.FORMING
            self._turn(flight, flight.leader.receive(message, self.clock()))
            if forming:
                self._next(flight)

    def _turn(self, flight: Flight, turn: Turn) -> None:
        """Do what the agreement asks for."""
        if turn.messages:
            self.send_ranks([(flight.index, message) for _, message in turn.messages])
        if turn.agreed is not None:
            flight.agreed = turn.agreed
            self._decide(flight)
        if turn.resolved is not None:
            if self.watch is not None:
                one = turn.resolved
                self.watch.resolved(f"{self.name}f{flight.index}", one.group_epoch, one.sequence, one.digest)
            self._commit(flight, turn.resolved)
        if turn.failed:
            self._trace.emit("epoch_over", self.index, flight.index, turn.failed)
            flight.busy = flight.drafting
            self.after(MS, lambda: self._form(flight))

    def _forwarded(self, flight: Flight, epoch: int, sequence: int) -> None:
        """The forward pass of a step is done, if the step still lives."""
        if (epoch, sequence) == (flight.leader.group_epoch, flight.leader.sequence):
            flight.forwarded = True
            self._decide(flight)

    def _decide(self, flight: Flight) -> None:
        """Once all ranks have agreed and the target's rows are there: judge every proposal, or sample."""
        if flight.agreed is None or not flight.forwarded or flight.leader.state is not LeaderState.AGREED:
            return
        items = []
        for item in flight.agreed:
            session = self.sessions.get(item.slot)
            accepted, token = 0, 0
            if session is not None and session.number == item.session:
                accepted, token = self._verdict(session, flight.read.get(item.slot) if item.depth else None)
            items.append(DecisionItem(*item[:4], accepted, token, item.cause))
        self._turn(flight, flight.leader.decide(items, self.clock()))

    def _verdict(self, session: Session, read: Read | None) -> tuple[int, int]:
        return (0, self._sample(session)) if read is None else self._judge(session, read.proposal)

    def _commit(self, flight: Flight, decision: Decision) -> None:
        """Committed on every other rank: now it is here. Then the next step."""
        for item, agreed in zip(decision.items, flight.agreed or (), strict=True):
            session = self.sessions.get(item.slot)
            if session is not None and session.number == item.session:
                read = flight.read[item.slot] if agreed.depth else None
                self._commit_one(session, read, item.accepted, item.token)
        self.on_resolved(flight, decision)
        for slot in flight.slots:
            session = self.sessions.get(slot)
            if session is not None and len(session.tokens) >= session.limit:
                self._finish(session)
        self.discards += self.source.discards
        self.source.discards.clear()
        flight.busy = False
        self.after(1000, lambda: self._next(flight))

    def _next(self, flight: Flight) -> None:
        """Take the next step, if the group can and the flight is not in one."""
        if flight.leader.state is LeaderState.READY and not flight.busy and not self.closing:
            self._step(flight)

    def _commit_one(self, session: Session, read: Read | None, accepted: int, token: int) -> None:
        drafts = read.proposal.tokens[:accepted] if read else []
        if read is not None:
            self.proposals += 1
            self.progress_ns[session.lease.slot] = self._world_clock.now_ns
        self._take(session, read.consumed if read else None, [*drafts, token])
        session.last_accepted = accepted if read else None

    def _take(self, session: Session, consumed: Consumed | None, run: list[int]) -> None:
        """Commit a round: the oracle judges it, then tokens and taps become the session's."""
        self._ledger.rounds += 1
        self._oracle.judge(session.number, session.round, consumed, run)
        self._trace.emit("commit", session.number, session.round, len(run) - 1, run[-1], int(consumed is not None))
        session.tokens += run
        self._extend(session, len(session.tokens) - 1)

    def _extend(self, session: Session, known: int) -> None:
        """Taps and digest of every committed position below `known`."""
        lease = session.lease
        base = lease.slot * self.options.context_max * TAP_ROW_BYTES
        for position in range(lease.known, known):
            at = base + position * TAP_ROW_BYTES
            token = session.tokens[position]
            self._tap_bytes[at : at + TAP_ROW_BYTES] = tap_row(session.number, position, token)
            lease.digest = extend_digest(lease.digest, token)
        lease.known = known

    # The target

    def _tickets(self, session: Session, drafts: Sequence[int]) -> Callable[[int], Int64s]:
        """Target row behind the committed tokens and some drafts, as `verify` asks for it."""
        models, tokens = self._models, session.tokens

        def at(index: int) -> Int64s:
            previous = drafts[index - 1] if index else tokens[-1]
            return models.tickets[models.target_index(previous, len(tokens) + index)]

        return at

    def _sample(self, session: Session) -> int:
        """As `acceptance.sample`."""
        tickets = self._tickets(session, ())(0)
        if session.lane is Lane.GREEDY:
            return int(tickets.argmax())
        return sample_target_only(tickets, len(session.tokens), session.keys())

    def _judge(self, session: Session, proposal: Proposal) -> tuple[int, int]:
        """As `acceptance.judge`: drafts accepted and the token after them."""
        drafts, anchor = proposal.tokens, len(session.tokens) - 1
        tickets_at = self._tickets(session, drafts)
        if session.lane is Lane.GREEDY:
            best = [int(tickets_at(index).argmax()) for index in range(len(drafts) + 1)]
            verdict = verify_greedy(best, drafts)
        elif session.lane is Lane.MATCH:
            verdict = verify_match(tickets_at, drafts, anchor, session.keys())
        else:
            verify = verify_block if self.options.rule == "block" else verify_ratio
            verdict = verify(tickets_at, proposal.rows, drafts, anchor, session.keys())
        return verdict.accepted, verdict.token
