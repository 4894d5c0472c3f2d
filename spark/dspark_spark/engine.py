"""The engine: one thread, one loop, one forward pass of the target per turn.

    take requests -> admit to slots -> choose depths -> draft -> verify -> commit -> emit

Prefill chunks and decode rows of all requests share the forward pass. A decoding request contributes its anchor and its
drafts; a request without drafts (no worker, a discarded round, no budget left, k = 0) contributes its anchor alone and
samples from the target. Depths are chosen before anything is drawn and from nothing that depends on a draw.

Invariants: a token is committed only by `_commit`; a proposal is either verified whole or not looked at; every draw is
keyed by (request seed, round, absolute position, domain), and a request's round advances at every step it takes part in.
A failure inside one request (a NaN row, say) ends that request alone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dspark.dyadic import Row, RowError
from dspark.models.target import ForwardResult, Segment, TargetModel
from dspark.models.tokenizer import ChatTokenizer
from dspark.processors import LogitsError, PolicyError, SamplingPolicy, target_row
from dspark.speculative import ResolvedDrafter
from dspark.tickets import ResidualIdentityError
from dspark.verify import sample_target_only, verify_greedy, verify_ratio
from dspark_proto import Lane, prefix_digest
from dspark_spark.api import FINISH_ABORT, FINISH_ERROR, Delta, EngineBusyError, GenerateRequest
from dspark_spark.draft_link import DraftLease, DraftLink, DraftRequest
from dspark_spark.metrics import Metrics, RoundRecord
from dspark_spark.proposals import Proposal, read_proposal
from dspark_spark.sequence import Sequence, request_seed
from dspark_spark.stopwatch import Stopwatch
from dspark_spark.text import TextStream

IDLE_WAIT_S = 0.05
Sink = Callable[[Delta], None]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Sizes of the engine. Lengths in tokens; `queue_limit` bounds requests that wait for a slot."""

    slots: int = 8
    max_context: int = 2048
    prefill_chunk: int = 256
    queue_limit: int = 128


@dataclass
class _Round:
    """What one turn works on: (sequence, drafts) in the order of the forward pass."""

    decoding: list[tuple[Sequence, Proposal | None]]
    prefilling: list[tuple[Sequence, int]]


@dataclass
class _Tally:
    """Counts of one turn, for the metrics."""

    drafts: int = 0
    drafted: int = 0
    verified: int = 0
    per_position: list[int] = field(default_factory=list)
    target_only: dict[str, int] = field(default_factory=dict)
    identity_failures: int = 0


class Engine:
    """Owns the target, its KV cache and the draft link. `submit` and `cancel` are safe from any thread."""

    def __init__(
        self,
        model: TargetModel,
        tokenizer: ChatTokenizer,
        settings: EngineSettings,
        metrics: Metrics,
        drafter: ResolvedDrafter | None = None,
        link: DraftLink | None = None,
    ) -> None:
        self.settings, self.metrics = settings, metrics
        self.drafter, self.link = drafter, link
        self.stopwatch = Stopwatch()
        self._model, self._tokenizer = model, tokenizer
        self._taps = drafter.config.target_layer_ids if drafter else ()
        depth = drafter.depth if drafter else 0
        # Rows past a slot's committed length are written by drafts, so a slot is deeper than the context by one block.
        self._cache = model.new_cache(settings.slots, settings.max_context + depth + 1)
        self._tap_store = (
            torch.zeros(settings.slots, settings.max_context, drafter.config.tap_width, dtype=torch.bfloat16)
            if drafter
            else None
        )
        self._inbox: queue.SimpleQueue[tuple[GenerateRequest, Sink]] = queue.SimpleQueue()
        self._waiting: deque[tuple[GenerateRequest, Sink]] = deque()
        self._running: dict[str, tuple[Sequence, Sink]] = {}
        self._free = list(range(settings.slots - 1, -1, -1))
        self._cancelled: set[str] = set()
        self._accepting = threading.Lock()
        self._pending = 0
        self._dead = False
        self._session = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._wire_seen: dict[str, int] = {}
        self._link_seen = (0, 0)

    # -- from any thread ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the loop in its own thread."""
        self._thread = threading.Thread(target=self._run, name="dspark-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Abort what runs, close the link, end the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=30)

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Queue a request; `sink` is called from the engine thread. Raises EngineBusyError when the queue is full."""
        with self._accepting:
            if self._dead:
                raise EngineBusyError("the engine has stopped")
            if self._pending >= self.settings.queue_limit + self.settings.slots:
                raise EngineBusyError(f"{self._pending} requests are running or waiting")
            self._pending += 1
            self._inbox.put((request, sink))

    def cancel(self, request_id: str) -> None:
        """Abort a request within one round. Unknown or finished ids are ignored."""
        self._cancelled.add(request_id)

    # -- the loop ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        end = Delta(finish_reason=FINISH_ABORT)
        try:
            while not self._stop.is_set():
                self.turn()
        except Exception as error:
            end = Delta(finish_reason=FINISH_ERROR, error=f"the engine failed: {error}")
            raise
        finally:
            self._end_all(end)
            if self.link is not None:
                self.link.close()

    def _end_all(self, end: Delta) -> None:
        """Nobody is left waiting, whatever ended the loop."""
        with self._accepting:
            self._dead = True
        for _, sink in self._running.values():
            self._deliver(sink, end)
        self._running = {}
        while not self._inbox.empty():
            self._waiting.append(self._inbox.get())
        for _, sink in self._waiting:
            self._deliver(sink, end)
        self._waiting.clear()

    def turn(self) -> bool:
        """One turn of the loop; False when there was nothing to do (it then waited a moment for a request)."""
        self._receive(wait=not self._running)
        if self.link is not None:
            self.link.pump()
        self._admit()
        self._publish_state()
        if not self._running:
            return False
        tally = _Tally()
        self.stopwatch.begin()
        plan = self._schedule()
        drafts = self._draft(plan, tally)
        plan.decoding = [(s, drafts.get(s.slot)) for s, _ in plan.decoding]
        self.stopwatch.lap("send")
        result = self._verify(plan)
        self.stopwatch.lap("verify")
        self._keep_taps(plan, result)
        self._commit_all(plan, result, tally)
        self.stopwatch.lap("sample")
        self._record(tally)
        return True

    def _receive(self, *, wait: bool) -> None:
        """Move new requests to the waiting list and drop cancelled ones."""
        try:
            item = self._inbox.get(timeout=IDLE_WAIT_S) if wait and not self._waiting else self._inbox.get_nowait()
            while True:
                self._waiting.append(item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            pass
        cancelled, self._cancelled = self._cancelled, set()
        for request_id in cancelled & self._running.keys():
            self._finish(request_id, Delta(finish_reason=FINISH_ABORT))
        for entry in [e for e in self._waiting if e[0].request_id in cancelled]:
            self._waiting.remove(entry)
            self._deliver(entry[1], Delta(finish_reason=FINISH_ABORT))

    def _admit(self) -> None:
        while self._waiting and self._free:
            request, sink = self._waiting.popleft()
            try:
                sequence = self._sequence(request)
            except (PolicyError, ValueError) as error:
                self._deliver(sink, Delta(finish_reason=FINISH_ERROR, error=str(error)))
                continue
            self._running[request.request_id] = (sequence, sink)

    def _sequence(self, request: GenerateRequest) -> Sequence:
        p = request.params
        if len(request.prompt_ids) >= self.settings.max_context:
            raise ValueError(f"the prompt has {len(request.prompt_ids)} tokens, the context {self.settings.max_context}")
        sequence = Sequence(
            request=request,
            slot=self._free[-1],
            policy=SamplingPolicy(p.temperature, p.top_k, p.top_p),
            text=TextStream(self._tokenizer, p, self._tokenizer.eos_ids),
            seed=request_seed(p.seed),
            tokens=list(request.prompt_ids),
            context_limit=self.settings.max_context,
        )
        self._free.pop()
        if self.link is not None and self.drafter is not None and request.speculate:
            sequence.lease = self._new_lease(sequence)
            self.link.lease(sequence.lease)
        return sequence

    def _new_lease(self, sequence: Sequence) -> DraftLease:
        drafter, store = self.drafter, self._tap_store
        assert drafter is not None and store is not None
        self._session += 1
        greedy = sequence.greedy
        wanted = drafter.draft_temperature
        temperature = 0.0 if greedy else sequence.policy.temperature if wanted is None else wanted
        return DraftLease(
            slot=sequence.slot,
            session=self._session,
            seed=sequence.seed & ((1 << 64) - 1),
            lane=Lane.GREEDY if greedy else Lane.RATIO,
            support=drafter.draft_support if temperature > 0 else 1,
            temperature=temperature,
            taps=store[sequence.slot],
        )

    def _schedule(self) -> _Round:
        """Every decoding request, and prefill chunks in arrival order up to the budget."""
        decoding: list[tuple[Sequence, Proposal | None]] = []
        prefilling: list[tuple[Sequence, int]] = []
        budget = self.settings.prefill_chunk
        for sequence, _ in self._running.values():
            if sequence.decoding:
                decoding.append((sequence, None))
            elif budget > 0:
                chunk = min(budget, sequence.prompt_length - sequence.computed)
                prefilling.append((sequence, chunk))
                budget -= chunk
        for sequence, _ in [*decoding, *prefilling]:
            sequence.round += 1
        return _Round(decoding, prefilling)

    def _draft(self, plan: _Round, tally: _Tally) -> dict[int, Proposal]:
        """Ask the worker for proposals of every decoding request that can use one; wait at most the deadline."""
        requests = []
        for sequence, _ in plan.decoding:
            depth, reason = self._depth(sequence)
            if depth:
                requests.append(self._draft_request(sequence, depth))
            else:
                tally.target_only[reason] = tally.target_only.get(reason, 0) + 1
        if not requests or self.link is None:
            return {}
        self.link.step(requests)
        self.stopwatch.lap("send")
        ready = self.link.await_proposals()
        drafting_s = max((event.draft_us for event in ready.values()), default=0) / 1e6
        self.stopwatch.split("drafter", drafting_s, rest="link")
        return self._read(requests, ready, tally)

    def _depth(self, sequence: Sequence) -> tuple[int, str]:
        """How deep to draft, or 0 and why not. Looks at budgets and at the link, never at tokens or confidences."""
        if sequence.lease is None or self.link is None or self.drafter is None:
            return 0, "speculation_off"
        if not self.link.up:
            return 0, "worker_down"
        depth = min(self.drafter.depth, self.link.max_depth, sequence.depth_limit())
        if depth <= 0:
            return 0, "budget"
        return (depth, "") if self.link.can_draft(sequence.lease) else (0, "no_lease")

    def _draft_request(self, sequence: Sequence, depth: int) -> DraftRequest:
        assert sequence.lease is not None
        sequence.counters.drafted += depth
        accepted, sequence.last_accepted = sequence.last_accepted, None
        return DraftRequest(
            lease=sequence.lease,
            round=sequence.round,
            anchor_token=sequence.tokens[-1],
            anchor_position=sequence.anchor_position,
            depth=depth,
            accepted_count=accepted,
            commit_token=sequence.tokens[-1],
        )

    def _read(self, requests: list[DraftRequest], ready: dict, tally: _Tally) -> dict[int, Proposal]:
        """Validate whole replies; an invalid one is discarded and counted, never repaired."""
        assert self.link is not None
        proposals = {}
        for request in requests:
            tally.drafts += 1
            tally.drafted += request.depth
            event = ready.get(request.lease.slot)
            if event is None:
                continue
            try:
                proposals[request.lease.slot] = read_proposal(event, self._model.config.vocab_size)
            except RowError as error:
                self.link.invalid(str(error))
            finally:
                event.lease.release()
        self.stopwatch.lap("validate")
        return proposals

    def _verify(self, plan: _Round) -> ForwardResult:
        """One forward pass over anchors, drafts and prefill chunks; logits where somebody samples."""
        segments, wanted, row = [], [], 0
        for sequence, proposal in plan.decoding:
            drafts = proposal.tokens if proposal else ()
            segments.append(Segment(sequence.slot, sequence.anchor_position, (sequence.tokens[-1], *drafts)))
            wanted += range(row, row + 1 + len(drafts))
            row += 1 + len(drafts)
        for sequence, chunk in plan.prefilling:
            start = sequence.computed
            segments.append(Segment(sequence.slot, start, sequence.tokens[start : start + chunk]))
            row += chunk
            if start + chunk == sequence.prompt_length:
                wanted.append(row - 1)
        return self._model.forward(self._cache, segments, tap_layers=self._taps, logit_rows=wanted)

    def _keep_taps(self, plan: _Round, result: ForwardResult) -> None:
        """Store prefill taps and hand them to the link; decode taps wait until it is known what was accepted."""
        row = sum(1 + (len(p.tokens) if p else 0) for _, p in plan.decoding)
        for sequence, chunk in plan.prefilling:
            if sequence.lease is not None and result.taps is not None:
                lease = sequence.lease
                lease.taps[lease.known : lease.known + chunk] = result.taps[row : row + chunk]
                self._extend_context(sequence, chunk)
                if self.link is not None:
                    self.link.feed(lease)
            sequence.computed += chunk
            row += chunk

    def _extend_context(self, sequence: Sequence, rows: int) -> None:
        lease = sequence.lease
        assert lease is not None
        lease.digest = prefix_digest(sequence.tokens[lease.known : lease.known + rows], lease.digest)
        lease.known += rows

    def _commit_all(self, plan: _Round, result: ForwardResult, tally: _Tally) -> None:
        row = tap_row = 0
        for sequence, proposal in plan.decoding:
            rows = 1 + (len(proposal.tokens) if proposal else 0)
            taps = None if result.taps is None else result.taps[tap_row : tap_row + rows]
            self._guarded(sequence, tally, self._commit, result.logits[row : row + rows], proposal, taps)
            row += rows
            tap_row += rows
        for sequence, _ in plan.prefilling:
            if sequence.decoding:
                self._guarded(sequence, tally, self._commit_first, result.logits[row : row + 1])
                row += 1

    def _guarded(self, sequence: Sequence, tally: _Tally, act: Callable[..., None], *arguments: object) -> None:
        """Run a per-request step; a fault of this request's numbers ends this request only."""
        try:
            act(sequence, tally, *arguments)
        except (LogitsError, ResidualIdentityError) as error:
            tally.identity_failures += isinstance(error, ResidualIdentityError)
            self._finish(sequence.request.request_id, Delta(finish_reason=FINISH_ERROR, error=str(error)))

    def _commit_first(self, sequence: Sequence, tally: _Tally, logits: torch.Tensor) -> None:
        """The token after the prompt, from the target alone."""
        token = self._sample(sequence, logits)
        self._emit(sequence, sequence.commit([], 0, token))

    def _commit(
        self,
        sequence: Sequence,
        tally: _Tally,
        logits: torch.Tensor,
        proposal: Proposal | None,
        taps: torch.Tensor | None,
    ) -> None:
        if proposal is None:
            accepted, token, drafted = 0, self._sample(sequence, logits), []
            sequence.counters.target_only_steps += 1
        else:
            drafted = proposal.tokens
            accepted, token = self._judge(sequence, logits, proposal)
            self._count(sequence, len(drafted), accepted, tally)
        before = len(sequence.tokens)
        delta = sequence.commit(drafted, accepted, token)
        if sequence.lease is not None and taps is not None and delta.finish_reason is None:
            lease, rows = sequence.lease, accepted + 1
            lease.taps[before - 1 : before - 1 + rows] = taps[:rows]
            self._extend_context(sequence, rows)
            sequence.last_accepted = accepted if proposal else None
        sequence.computed = len(sequence.tokens) - 1
        self._emit(sequence, delta)

    def _judge(self, sequence: Sequence, logits: torch.Tensor, proposal: Proposal) -> tuple[int, int]:
        """Accept a prefix of the drafts and take the token after it."""
        if sequence.greedy:
            verdict = verify_greedy(self._argmax(logits), proposal.tokens)
        else:
            rows: list[Row] = proposal.rows
            host = logits.float().cpu().numpy()
            verdict = verify_ratio(
                lambda i: target_row(host[i], sequence.policy),
                rows,
                proposal.tokens,
                sequence.anchor_position,
                sequence.keys(),
            )
        return verdict.accepted, verdict.token

    def _sample(self, sequence: Sequence, logits: torch.Tensor) -> int:
        if sequence.greedy:
            return self._argmax(logits)[0]
        tickets = target_row(logits[0].float().cpu().numpy(), sequence.policy)
        return sample_target_only(tickets, len(sequence.tokens), sequence.keys())

    def _argmax(self, logits: torch.Tensor) -> list[int]:
        """Argmax of every row, lowest id on ties. Raises LogitsError when a row has no finite maximum."""
        best = logits.max(dim=-1)
        if not bool(torch.isfinite(best.values).all()):
            raise LogitsError("the target's logits are not finite")
        chosen: list[int] = best.indices.tolist()
        return chosen

    def _count(self, sequence: Sequence, depth: int, accepted: int, tally: _Tally) -> None:
        sequence.counters.rounds += 1
        sequence.counters.verified += depth
        sequence.counters.accepted += accepted
        tally.verified += depth
        while len(tally.per_position) < accepted:
            tally.per_position.append(0)
        for position in range(accepted):
            tally.per_position[position] += 1

    # -- delivery ----------------------------------------------------------------------------------------------

    def _emit(self, sequence: Sequence, delta: Delta) -> None:
        if delta.finish_reason is not None:
            self._finish(sequence.request.request_id, delta)
        else:
            self._deliver(self._running[sequence.request.request_id][1], delta)

    def _finish(self, request_id: str, delta: Delta) -> None:
        """Free everything the request held, then tell its client."""
        sequence, sink = self._running.pop(request_id)
        if sequence.lease is not None and self.link is not None:
            self.link.release(sequence.lease)
        self._free.append(sequence.slot)
        self._deliver(sink, delta)

    def _deliver(self, sink: Sink, delta: Delta) -> None:
        if delta.finish_reason is not None:
            with self._accepting:
                self._pending -= 1
        sink(delta)

    # -- metrics -----------------------------------------------------------------------------------------------

    def _record(self, tally: _Tally) -> None:
        discards = dict(self.link.discards) if self.link is not None else {}
        if self.link is not None:
            self.link.discards.clear()
        self.metrics.record_round(
            RoundRecord(
                drafts=tally.drafts,
                drafted_tokens=tally.drafted,
                verified_tokens=tally.verified,
                accepted_per_position=tuple(tally.per_position),
                discards=discards,
                target_only=tally.target_only,
                residual_identity_failures=tally.identity_failures,
                stage_seconds=self.stopwatch.end(),
            )
        )

    def _publish_state(self) -> None:
        self.metrics.set_load(len(self._running), len(self._waiting) + self._inbox.qsize())
        if self.link is None:
            return
        self.metrics.set_worker_up(self.link.up)
        reconnects, bumps = self.link.reconnects, self.link.generation_bumps
        seen_reconnects, seen_bumps = self._link_seen
        for _ in range(reconnects - seen_reconnects):
            self.metrics.record_worker_reconnect()
        if bumps > seen_bumps:
            self.metrics.record_generation_bump(bumps - seen_bumps)
        self._link_seen = (reconnects, bumps)
        for cause, count in self.link.drops.items():
            new = count - self._wire_seen.get(cause, 0)
            if new:
                self.metrics.record_wire_drop(cause, new)
                self._wire_seen[cause] = count
