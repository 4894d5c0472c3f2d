"""The engine: one thread, one loop, one forward pass of the target per turn.

    take requests -> admit to slots -> choose depths -> ask for drafts
        -> collect drafts -> stop early -> verify -> commit -> emit

Drafts are asked for in rounds (`request_groups.GroupRound`). In one group every turn asks for all decoding requests,
waits, and verifies them. In two groups a turn asks for those that the turn before committed, and verifies the others,
whose drafts were under way meanwhile; which of both it is, is measured (`group_choice`).

Prefill chunks and the decode rows of the turn's requests share the forward pass. A decoding request contributes its
anchor and its drafts; a request without drafts (no worker, a discarded round, no budget left, k = 0) contributes its
anchor alone and samples from the target. Depths are chosen before anything is drawn and from nothing that depends on a
draw. With adaptive depths a proposal may be cut again before it is verified, by its confidences alone (`early_stop`).

Invariants: a token is committed only by `_commit`; which drafts are verified is settled without looking at a draft;
every draw is keyed by (request seed, round, absolute position, domain), and a request's round advances at every step
that samples for it; requests of the match lane are keyed by position alone instead, so that no round can change their
text. A failure inside one request (a NaN row, say) ends that request alone.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from dspark.audit import AuditPlan
from dspark.dyadic import RowError
from dspark.models.target import ForwardResult, TargetModel
from dspark.models.tokenizer import ChatTokenizer
from dspark.processors import LogitsError
from dspark.speculative import ResolvedDrafter
from dspark.tickets import ResidualIdentityError
from dspark_proto import Lane, ProposalReady, prefix_digest
from dspark_spark.acceptance import judge, sample
from dspark_spark.api import FINISH_ABORT, FINISH_ERROR, Delta, GenerateRequest
from dspark_spark.batch import Batch, prefill_chunks, width
from dspark_spark.depth import DepthPlanner, forward_timer
from dspark_spark.early_stop import cut_proposals
from dspark_spark.group_choice import GroupChoice
from dspark_spark.lanes import choose_lane
from dspark_spark.leases import DraftLease, DraftRequest, DraftSource
from dspark_spark.metrics import Metrics, RoundRecord
from dspark_spark.proposals import Proposal, audit_proposal, read_proposal
from dspark_spark.request_groups import GroupRound, next_groups
from dspark_spark.request_queue import Entry, RequestQueue, Sink
from dspark_spark.sequence import Sequence, first_edits, request_seed, sampling_policy
from dspark_spark.stopwatch import Stopwatch
from dspark_spark.tally import LinkReporter, Tally
from dspark_spark.text import TextStream

IDLE_WAIT_S = 0.05
DRAFTING_STAGES = ("send", "drafter", "link", "validate")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Sizes of the engine. Lengths in tokens; `queue_limit` bounds requests that wait for a slot.

    threads: OpenMP threads of the loop's own thread; None leaves torch's default. audit_rate: share of the drafted
    tokens whose draw is repeated, 0 to 1. adaptive_depth: choose depths by past acceptance and measured times, and stop
    rounds early by the worker's confidences. request_groups: 1 or 2 groups that take turns on the link; None chooses
    by measurement.
    """

    slots: int = 8
    max_context: int = 2048
    prefill_chunk: int = 256
    queue_limit: int = 128
    threads: int | None = None
    audit_rate: float = 1.0
    adaptive_depth: bool = False
    request_groups: int | None = 1


class Engine:
    """Owns the target, its KV cache and the draft link. `submit` and `cancel` are safe from any thread."""

    def __init__(
        self,
        model: TargetModel,
        tokenizer: ChatTokenizer,
        settings: EngineSettings,
        metrics: Metrics,
        drafter: ResolvedDrafter | None = None,
        link: DraftSource | None = None,
    ) -> None:
        self.settings, self.metrics = settings, metrics
        self.drafter, self.link = drafter, link
        self.stopwatch = Stopwatch()
        self.groups = GroupChoice(settings.request_groups)
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
        self._inbox = RequestQueue(settings.queue_limit + settings.slots)
        self._waiting: deque[Entry] = deque()
        self._running: dict[str, tuple[Sequence, Sink]] = {}
        self._under_way: list[GroupRound] = []
        self._free = list(range(settings.slots - 1, -1, -1))
        self._session = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._reporter = LinkReporter(metrics)
        self._audits = AuditPlan(settings.audit_rate, secrets.randbits(64))
        self._planner: DepthPlanner | None = None
        if settings.adaptive_depth and depth:
            self._planner = DepthPlanner(depth, settings.slots * (depth + 1), forward_timer(model))

    # -- from any thread ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the loop in its own thread."""
        self._thread = threading.Thread(target=self._run, name="dspark-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Abort what runs, close the link, end the thread. Safe to call twice, and on an engine never started."""
        self._stop.set()
        if self._thread is None:
            self.start()
        if self._thread is not None:
            self._thread.join(timeout=30)

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Queue a request; `sink` is called from the engine thread. Raises EngineBusyError when the queue is full."""
        self._inbox.submit(request, sink)

    def cancel(self, request_id: str) -> None:
        """Abort a request within one round. Unknown or finished ids are ignored."""
        self._inbox.cancel(request_id)

    # -- the loop ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        end = Delta(finish_reason=FINISH_ABORT)
        if self.settings.threads is not None:
            torch.set_num_threads(self.settings.threads)
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
        self._inbox.close()
        for sequence, sink in self._running.values():
            self._leave_round(sequence)
            self._deliver(sink, replace(end, stats=sequence.stats()))
        self._running = {}
        self._waiting += [item for item in self._inbox.receive(0) if not isinstance(item, str)]
        for _, sink in self._waiting:
            self._deliver(sink, end)
        self._waiting.clear()

    def turn(self) -> bool:
        """One turn of the loop; False when there was nothing to do (it then waited a moment for a request)."""
        self._receive()
        if self.link is not None:
            self.link.pump()
        self._admit()
        self._publish_state()
        if not self._running:
            return False
        tally = Tally()
        self.stopwatch.begin()
        prefilling = prefill_chunks((s for s, _ in self._running.values()), self.settings.prefill_chunk)
        due = self._next_rounds(prefilling, tally)
        batch = Batch(self._collect(due, tally), prefilling)
        self.stopwatch.lap("send")
        result = self._verify(batch)
        self.stopwatch.lap("verify")
        self._keep_taps(batch, result)
        self._commit_all(batch, result, tally)
        self.stopwatch.lap("sample")
        self._record(tally, batch, due)
        return True

    def _receive(self) -> None:
        """Move new requests to the waiting list and drop cancelled ones, in the order in which they came."""
        idle = not self._running and not self._waiting
        for item in self._inbox.receive(IDLE_WAIT_S if idle else 0):
            if isinstance(item, str):
                self._abort(item)
            else:
                self._waiting.append(item)

    def _abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._finish(request_id, Delta(finish_reason=FINISH_ABORT))
        for entry in [e for e in self._waiting if e[0].request_id == request_id]:
            self._waiting.remove(entry)
            self._deliver(entry[1], Delta(finish_reason=FINISH_ABORT))

    def _admit(self) -> None:
        while self._waiting and self._free:
            request, sink = self._waiting.popleft()
            try:
                sequence = self._sequence(request, self._free[-1])
            except ValueError as error:
                self._deliver(sink, Delta(finish_reason=FINISH_ERROR, error=str(error)))
                continue
            self._free.pop()
            self._running[request.request_id] = (sequence, sink)
            if self.link is not None and self.drafter is not None and request.speculate:
                sequence.lease = self._new_lease(sequence)
                self.link.lease(sequence.lease)

    def _sequence(self, request: GenerateRequest, slot: int) -> Sequence:
        """Raises ValueError for a request that the endpoint should not have let through."""
        p, prompt, limit = request.params, request.prompt_ids, self.settings.max_context
        if not 0 < len(prompt) < limit:
            raise ValueError(f"the prompt has {len(prompt)} tokens: it must have 1 to {limit - 1}")
        if not 0 <= min(prompt) <= max(prompt) < self._model.config.vocab_size:
            raise ValueError(f"the prompt has a token id outside the vocabulary of {self._model.config.vocab_size}")
        if request.request_id in self._running:
            raise ValueError(f"request_id {request.request_id!r} is running already: give every request its own")
        budget = replace(p, max_tokens=min(p.max_tokens, limit - len(prompt)))
        sequence = Sequence(
            request=request,
            slot=slot,
            policy=sampling_policy(p),
            text=TextStream(self._tokenizer, budget, self._tokenizer.eos_ids),
            seed=request_seed(p.seed),
            tokens=list(prompt),
            context_limit=limit,
            lane=choose_lane(request.lane, p.temperature),
            edits=first_edits(request, self._tokenizer.eos_ids, self._model.config.vocab_size),
        )
        sequence.keys()  # a seed outside its range is refused here, not in the middle of a batch
        return sequence

    def _new_lease(self, sequence: Sequence) -> DraftLease:
        drafter, store = self.drafter, self._tap_store
        assert drafter is not None
        assert store is not None
        self._session += 1
        lane, wanted = sequence.lane, drafter.draft_temperature
        temperature = sequence.policy.temperature if wanted is None else wanted
        if lane is Lane.GREEDY:
            temperature = 0.0
        return DraftLease(
            slot=sequence.slot,
            session=self._session,
            seed=sequence.seed,
            lane=lane,
            # Ids are all that the match and greedy lanes use: their rows have one entry.
            support=drafter.support(temperature) if lane is Lane.RATIO else 1,
            temperature=temperature,
            taps=store[sequence.slot],
            tokens=sequence.tokens,
        )

    def _next_rounds(self, prefilling: list[tuple[Sequence, int]], tally: Tally) -> list[GroupRound]:
        """Ask for the drafts of requests that have no round under way; returns the rounds to verify in this turn."""
        decoding = [s for s, _ in self._running.values() if s.decoding]
        groups = self.groups.choose(sum(self._depth_limit(s) > 0 for s in decoding))
        busy = {s.slot for round_ in self._under_way for s, _ in round_.batch.decoding}
        idle = [s for s in decoding if s.slot not in busy]
        for members in next_groups(idle, len(busy), groups):
            self._under_way.append(self._ask(Batch([(s, None) for s in members], prefilling), tally))
        count = 1 if groups == 2 else len(self._under_way)
        due, self._under_way = self._under_way[:count], self._under_way[count:]
        return due

    def _ask(self, batch: Batch, tally: Tally) -> GroupRound:
        """Start the next round of these requests, and ask for drafts of everyone who can use them."""
        asked: dict[int, DraftRequest] = {}
        reasons: dict[int, str] = {}
        tokens = 0.0
        planned = self._plan(batch)
        for sequence, _ in batch.decoding:
            sequence.round += 1
            depth, reason = self._depth(sequence, [r.lease for r in asked.values()], planned.get(sequence.slot))
            tokens += self._planner.expected_tokens(sequence.slot, sequence.lane, depth) if self._planner else 1
            if depth:
                tally.asked(depth)
                asked[sequence.slot] = self._draft_request(sequence, depth)
            else:
                reasons[sequence.slot] = reason
        replies = self.link.step(list(asked.values())) if asked and self.link is not None else None
        self.stopwatch.lap("send")
        return GroupRound(batch, asked, reasons, replies, tokens, self._planner.curve if self._planner else None)

    def _collect(self, due: list[GroupRound], tally: Tally) -> list[tuple[Sequence, Proposal | None]]:
        """Everyone who is verified in this turn, with the proposals that came; waits at most the rounds' deadlines."""
        decoding: list[tuple[Sequence, Proposal | None]] = []
        for round_ in due:
            proposals = self._proposals(round_)
            decoding += [(s, proposals.get(s.slot)) for s, _ in round_.batch.decoding]
            tally.target_only.update(round_.reasons.values())
            tally.target_only["discarded"] += len(round_.asked) - len(proposals)
        return decoding

    def _proposals(self, round_: GroupRound) -> dict[int, Proposal]:
        """Wait for the round's drafts; each proposal is cut to what is worth verifying when depths are adaptive."""
        if round_.replies is None or self.link is None:
            return {}
        ready = self.link.collect(round_.replies)
        drafting_s = max((event.draft_us for event in ready.values()), default=0) / 1e6
        self.stopwatch.split("drafter", drafting_s, rest="link")
        proposals = self._read(list(round_.asked.values()), ready)
        return proposals if round_.curve is None else cut_proposals(round_.curve, round_.batch, proposals)

    def _plan(self, batch: Batch) -> dict[int, int]:
        """Depths by slot when they are adaptive, else none: fixed before any draw, from earlier rounds only."""
        if self._planner is None:
            return {}
        limits = {s.slot: (s.lane, self._depth_limit(s)) for s, _ in batch.decoding}
        return self._planner.plan(limits, batch.decode_rows() + sum(chunk for _, chunk in batch.prefilling))

    def _depth_limit(self, sequence: Sequence) -> int:
        """Drafts that drafter, worker and the request's budgets allow."""
        if sequence.lease is None or self.link is None or self.drafter is None:
            return 0
        return max(0, min(self.drafter.depth, self.link.depth_limit(sequence.lease), sequence.depth_limit()))

    def _depth(self, sequence: Sequence, asked: list[DraftLease], planned: int | None) -> tuple[int, str]:
        """How deep to draft, or 0 and why not. Looks at budgets, plan and link, never at tokens or confidences."""
        if sequence.lease is None or self.link is None or self.drafter is None:
            return 0, "speculation_off"
        if not self.link.up:
            return 0, "worker_down"
        depth = self._depth_limit(sequence)
        if depth == 0:
            return 0, "budget"
        if planned is not None and (depth := min(depth, planned)) == 0:
            return 0, "adaptive_depth"
        refusal = self.link.refusal(sequence.lease, asked)
        return (0, refusal) if refusal else (depth, "")

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

    def _read(self, requests: list[DraftRequest], ready: dict[int, ProposalReady]) -> dict[int, Proposal]:
        """Validate whole replies; an invalid one is discarded and counted, never repaired."""
        assert self.link is not None
        proposals = {}
        for request in [r for r in requests if r.lease.slot in ready]:
            slot = request.lease.slot
            try:
                proposal = read_proposal(ready[slot], self._model.config.vocab_size)
            except RowError as error:
                self.link.invalid(request.lease, str(error))
            else:
                if self._is_sound(request, proposal):
                    proposals[slot] = proposal
            finally:
                ready[slot].lease.release()
        if self.settings.audit_rate < 1:
            # Nobody has looked at all draws of its other proposals.
            leases = {request.lease.slot: request.lease for request in requests}
            proposals = {slot: one for slot, one in proposals.items() if not self.link.distrusts(leases[slot])}
        self.stopwatch.lap("validate")
        return proposals

    def _is_sound(self, request: DraftRequest, proposal: Proposal) -> bool:
        """Whether the audited tokens are the draws of their rows; if one is not, the worker is quarantined."""
        assert self.link is not None
        keys = self.link.proposal_keys(request)
        report = audit_proposal(proposal, request.anchor_position, keys, self._audits)
        self.metrics.record_audits(report.passed, int(report.failure is not None))
        if report.failure is not None:
            self.link.invalid(request.lease, str(report.failure), "audit_failed")
        return report.failure is None

    def _verify(self, batch: Batch) -> ForwardResult:
        """One forward pass over anchors, drafts and prefill chunks; logits where somebody samples."""
        return self._model.forward(self._cache, batch.segments(), tap_layers=self._taps, logit_rows=batch.logit_rows())

    def _keep_taps(self, batch: Batch, result: ForwardResult) -> None:
        """Store prefill taps and hand them to the link; decode taps wait until it is known what was accepted."""
        row = batch.decode_rows()
        for sequence, chunk in batch.prefilling:
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

    def _commit_all(self, batch: Batch, result: ForwardResult, tally: Tally) -> None:
        row = 0
        for sequence, proposal in batch.decoding:
            rows = width(proposal)
            taps = None if result.taps is None else result.taps[row : row + rows]
            sound = self._guarded(sequence, tally, self._commit, result.logits[row : row + rows], proposal, taps)
            if proposal and not sound:
                tally.discards["target_fault"] += 1
            row += rows
        for sequence, _ in batch.prefilling:
            if sequence.decoding:
                self._guarded(sequence, tally, self._commit_first, result.logits[row : row + 1])
                row += 1

    def _guarded(self, sequence: Sequence, tally: Tally, act: Callable[..., None], *arguments: object) -> bool:
        """Run a per-request step; a fault of this request's numbers ends this request only (then False)."""
        try:
            act(sequence, tally, *arguments)
            return True
        except (LogitsError, ResidualIdentityError) as error:
            tally.identity_failures += isinstance(error, ResidualIdentityError)
            self._finish(sequence.request.request_id, Delta(finish_reason=FINISH_ERROR, error=str(error)))
            return False

    def _commit_first(self, sequence: Sequence, tally: Tally, logits: torch.Tensor) -> None:
        """The token after the prompt, from the target alone."""
        token = sample(sequence, logits)
        self._emit(sequence, sequence.commit([], 0, token))

    def _commit(
        self,
        sequence: Sequence,
        tally: Tally,
        logits: torch.Tensor,
        proposal: Proposal | None,
        taps: torch.Tensor | None,
    ) -> None:
        if proposal is None:
            accepted, token, drafted = 0, sample(sequence, logits), []
            sequence.counters.target_only_steps += 1
        else:
            drafted = proposal.tokens
            assert self.drafter is not None
            accepted, token = judge(sequence, logits, proposal, self.drafter.rejection_sample_method)
            sequence.counters.judged(len(drafted), accepted)
            tally.judged(len(drafted), accepted)
            if self._planner is not None:
                self._planner.judged(sequence.slot, sequence.lane, len(drafted), accepted)
        before = len(sequence.tokens)
        delta = sequence.commit(drafted, accepted, token)
        if sequence.lease is not None and taps is not None and delta.finish_reason is None:
            lease, rows = sequence.lease, accepted + 1
            lease.taps[before - 1 : before - 1 + rows] = taps[:rows]
            self._extend_context(sequence, rows)
            sequence.last_accepted = accepted if proposal else None
        sequence.computed = len(sequence.tokens) - 1
        self._emit(sequence, delta)

    # -- delivery ----------------------------------------------------------------------------------------------

    def _emit(self, sequence: Sequence, delta: Delta) -> None:
        if delta.finish_reason is not None:
            self._finish(sequence.request.request_id, delta)
        else:
            self._deliver(self._running[sequence.request.request_id][1], delta)

    def _finish(self, request_id: str, delta: Delta) -> None:
        """Free everything the request held, then tell its client."""
        sequence, sink = self._running.pop(request_id)
        self._leave_round(sequence)
        if sequence.lease is not None and self.link is not None:
            self.link.release(sequence.lease)
        if self._planner is not None:
            self._planner.forget(sequence.slot)
        self._free.append(sequence.slot)
        self._deliver(sink, replace(delta, stats=sequence.stats()))

    def _leave_round(self, sequence: Sequence) -> None:
        """A request that ends while its drafts are under way takes them with it."""
        if any([round_.drop(sequence) for round_ in self._under_way]):
            self.metrics.record_round(RoundRecord(discards={"cancelled": 1}))
        self._under_way = [round_ for round_ in self._under_way if round_.batch.decoding]

    def _deliver(self, sink: Sink, delta: Delta) -> None:
        if delta.finish_reason is not None:
            self._inbox.ended()
        sink(delta)

    # -- metrics -----------------------------------------------------------------------------------------------

    def _record(self, tally: Tally, batch: Batch, due: list[GroupRound]) -> None:
        if self.link is not None:
            tally.discards += self.link.discards
            self.link.discards.clear()
        laps = self.stopwatch.end()
        self.metrics.record_round(tally.record(laps))
        asked = any(round_.asked for round_ in due)
        usual = not batch.prefilling and not tally.target_only["discarded"]
        waited_s = laps.get("drafter", 0.0) + laps.get("link", 0.0)
        self.groups.turned(len(batch.decoding), sum(r.tokens for r in due), waited_s, usual=usual and asked)
        if self._planner is not None and not batch.prefilling:
            drafting = sum(laps.get(stage, 0.0) for stage in DRAFTING_STAGES) if asked else None
            self._planner.timed(batch.decode_rows(), laps["verify"] + laps["sample"], drafting)

    def _publish_state(self) -> None:
        self.metrics.set_load(len(self._running), len(self._waiting) + len(self._inbox))
        if self.link is not None:
            self._reporter.publish(self.link)
