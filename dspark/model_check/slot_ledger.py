"""The model of one slot: the production connections over a network that loses, repeats and reorders.

The network is the set of all frames ever sent: any of them may arrive now, later, again, or never. Both ends may
do all that their callers may: step with and without a commit, commit alone, cancel, reset, close, time out,
answer, fail, connect again, to a restarted worker too; a transport may go on writing for a dead round until it
has confirmed that it stopped, and a consumer holds its proposal for as long as it likes. What an end refuses
(LocalProtocolError) is not a transition. Laws: those of ``trace_check``, fed with what the ledgers went through;
whence a reply comes is read from its token. Bounds: ``generations``, ``rounds`` per generation, ``reconnects``.
Called by ``__main__`` and by tests, which plant bugs in subclasses of the connections.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Final, NamedTuple, cast

from dspark_proto import (
    Buffer,
    Cause,
    DrafterConnection,
    Key,
    Lane,
    LocalProtocolError,
    StepItem,
    SupportPolicy,
    VerifierConnection,
    prefix_digest,
)
from dspark_proto.events import ProposalReady, StepArrived
from dspark_proto.limits import NO_COMMIT
from dspark_proto.prefix import read_prefix
from dspark_proto.slots import VerifierSlot
from dspark_proto.staging import Lease, LeaseState
from dspark_proto.states import SlotState

from .explore import Numbers, Step, bits
from .frozen_pair import EPOCHS, STEP_DEADLINE_NS, TAP_ROW_BYTES, VERIFIER, WORKER, LivePair
from .ledger_events import Event, Kind
from .trace_check import TraceChecker

_START: Final = (1, 1)
"""Tokens before the first round of a generation; the last is the anchor."""

_ALL: Final = -1
"""A mask with every bit set."""


class World(NamedTuple):
    """One state. ``pair``, ``tokens`` and ``laws`` number interned values; the others are masks of such numbers:
    frames ever sent, STEP items in the worker's hands, and (block, key) of who writes and who reads staging.
    """

    pair: int
    tokens: int
    laws: int
    reconnects: int = 0
    up: int = 0
    down: int = 0
    work: int = 0
    writers: int = 0
    consumers: int = 0


class Change(NamedTuple):
    """What an action does to a world; ``added`` and ``dropped`` are in the order of the world's masks."""

    pair: int
    tokens: int
    reconnects: int
    events: int
    added: tuple[int, ...]
    dropped: tuple[int, ...]


_UP, _DOWN, _WORK, _WRITERS, _CONSUMERS = range(5)


class SlotLedger:
    """The model; ``verifier`` and ``drafter`` are the classes that run, for tests with planted bugs.

    ``without`` names actions that are left out: a smaller model that looks further.
    """

    name = "slot_ledger"

    def __init__(
        self,
        verifier: type[VerifierConnection] = VerifierConnection,
        drafter: type[DrafterConnection] = DrafterConnection,
        generations: int = 2,
        rounds: int = 2,
        reconnects: int = 0,
        without: Iterable[str] = (),
        goals: Iterable[str] = (),
    ) -> None:
        self.goals = frozenset(goals)
        self._bounds = generations, rounds, reconnects
        self._without = frozenset(without)
        self._pairs, self._tokens, self._events, self._memory = Numbers(), Numbers(), Numbers(), Numbers()
        self._frames, self._items, self._laws = Numbers(), Numbers(), Numbers()
        self._changes: dict[Hashable, Change | None] = {}
        self._verdicts: dict[Hashable, tuple[int, str]] = {}
        self._checker = TraceChecker()
        self._added, self._dropped = [0] * 5, [0] * 5
        self._drawn_token = 0
        self._pair = LivePair(verifier, drafter, self._origin)
        self._pair.connect()

    def initial(self) -> Hashable:
        """Connected, nothing open."""
        for event in self._pair.events():
            self._checker.feed(event)
        laws = self._laws.number(self._checker.freeze())
        return World(self._pairs.number(self._pair.save()), self._tokens.number(_START), laws)

    def steps(self, state: Hashable) -> Iterator[Step]:
        """Every transition that both ends allow; what changes nothing is left out."""
        world = cast(World, state)
        for name, argument in self._possible(world):
            change = self._change(world, name, argument)
            if change is not None:
                after, broken = self._apply(world, change)
                if broken or after != world:
                    yield Step(self._label(name, argument), after, broken)

    def reached(self, state: Hashable) -> Iterable[str]:
        """Goals that ``state`` meets."""
        pair = self._pairs.value(cast(World, state).pair)
        if any(lease[0] is LeaseState.QUARANTINED for lease in pair.leases):
            yield "quarantine"
        if pair.slot("replied"):
            yield f"accepted in generation {pair.slot('generation')} of worker {pair.worker}"
            if pair.slot("committed"):
                yield "commit alone"
        elif pair.slot("state") is SlotState.AWAITING and pair.slot("item").accepted_count != NO_COMMIT:
            yield "commit on STEP"

    def is_home(self, state: Hashable) -> bool:
        """Nothing is awaited and no staging is held."""
        pair = self._pairs.value(cast(World, state).pair)
        idle = all(lease[0] is LeaseState.FREE for lease in pair.leases)
        return idle and pair.slot("state") is not SlotState.AWAITING

    # Transitions

    def _possible(self, world: World) -> Iterator[tuple[str, int]]:
        generations, rounds, reconnects = self._bounds
        slot = self._pairs.value(world.pair).slot
        names = ["COMMIT"]
        if slot("generation") < generations:
            names += ["OPEN", "RESET"]
        if slot("generation") <= generations:
            names += ["deadline", "CANCEL", "CLOSE"]
            names += ["STEP", "STEP with commit"] if slot("round") < rounds else []
        if world.reconnects < reconnects:
            names += ["reconnect", "restart"]
        yield from ((name, 0) for name in names if name not in self._without)
        for name, mask in (
            ("answer", world.work),
            ("fail", world.work),
            ("to worker", world.up),
            ("to verifier", world.down),
            ("release", world.consumers),
            ("stop", world.writers),
        ):
            if name not in self._without:
                yield from ((name, number) for number in bits(mask))

    def _change(self, world: World, name: str, argument: int) -> Change | None:
        """What the action does, from the production code; None when an end refuses it."""
        key = (world.pair, world.tokens, name, argument)
        if key not in self._changes:
            self._changes[key] = self._tried(world, name, argument)
        return self._changes[key]

    def _tried(self, world: World, name: str, argument: int) -> Change | None:
        self._pair.load(self._pairs.value(world.pair))
        self._context = self._tokens.value(world.tokens)
        self._added, self._dropped = [0] * 5, [0] * 5
        before: list[Event] = []
        try:
            if name == "restart":
                self._pair.restart(EPOCHS[1])
                before.append(Event(Kind.RESTARTED, WORKER))
            _ACTIONS[name](self, argument)
        except LocalProtocolError:
            return None
        return Change(
            self._pairs.number(self._pair.save()),
            self._tokens.number(self._context),
            int(name in ("reconnect", "restart")),
            self._events.number((*before, *self._pair.events())),
            tuple(self._added),
            tuple(self._dropped),
        )

    def _apply(self, world: World, change: Change) -> tuple[World, str]:
        masks = [
            mask & ~dropped | added
            for mask, added, dropped in zip(world[4:], change.added, change.dropped, strict=True)
        ]
        key = world.laws, change.events, masks[_WRITERS], masks[_CONSUMERS]
        if key not in self._verdicts:
            self._verdicts[key] = self._judged(*key)
        laws, broken = self._verdicts[key]
        return World(change.pair, change.tokens, laws, world.reconnects + change.reconnects, *masks), broken

    def _judged(self, laws: int, events: int, writers: int, consumers: int) -> tuple[int, str]:
        """What the ledgers went through; then a late write by every transport, and a look by every consumer."""
        checker = self._checker
        checker.thaw(self._laws.value(laws))
        users = [Event(Kind.WROTE, VERIFIER, *self._memory.value(number)) for number in bits(writers)]
        users += [Event(Kind.READ, VERIFIER, *self._memory.value(number)) for number in bits(consumers)]
        broken = next(filter(None, map(checker.feed, (*self._events.value(events), *users))), "")
        return self._laws.number(checker.freeze()), broken

    def _label(self, name: str, argument: int) -> str:
        if name in ("to worker", "to verifier"):
            prefix = read_prefix(memoryview(self._frames.value(argument)))
            return f"{prefix.type.name} g{prefix.generation} r{prefix.round} {name}"
        if name in ("answer", "fail"):
            item = self._items.value(argument)
            return f"worker: {name} g{item.generation} r{item.round}"
        if name in ("release", "stop"):
            _, generation, round_, block = self._memory.value(argument)
            return f"{name} block {block} of g{generation} r{round_}"
        return name

    # Actions: they run the production code and note what it hands out

    def _open(self, _: int) -> None:
        session = 70 + self._pair.slot.generation
        self._send(self._pair.verifier.open(0, session, seed=1, support=SupportPolicy.K1, lane=Lane.RATIO))
        self._context = _START

    def _reset(self, _: int) -> None:
        self._send(self._pair.verifier.reset(0, Cause.ROUND_TIMED_OUT))
        self._context = _START

    def _cancel(self, _: int) -> None:
        self._send(self._pair.verifier.cancel(0, Cause.CLIENT_GONE))

    def _close(self, _: int) -> None:
        self._send(self._pair.verifier.close(0))

    def _deadline(self, _: int) -> None:
        self._pair.verifier.expire(STEP_DEADLINE_NS)

    def _step(self, _: int, accepted_count: int = NO_COMMIT) -> None:
        slot, tokens = self._pair.slot, self._context
        anchor, rows = len(tokens) - 1, len(tokens) - 1 - slot.context_end
        item = StepItem(
            slot.session,
            0,
            slot.generation,
            max(slot.round, 0) + 1,
            tokens[-1],
            anchor,
            prefix_digest(tokens[:-1]),
            depth=1,
            lane=Lane.RATIO,
            accepted_count=accepted_count,
            commit_token=0 if accepted_count == NO_COMMIT else tokens[-1],
            tap_first=slot.context_end,
            tap_rows=rows,
            taps=bytes(rows * TAP_ROW_BYTES),
        )
        self._send(self._pair.verifier.step([item], 0))
        if slot.lease is not None:
            self._added[_WRITERS] = 1 << self._block(slot.lease, slot.key)

    def _step_with_commit(self, _: int) -> None:
        self._step(0, accepted_count=1)

    def _commit(self, _: int) -> None:
        tokens = self._context
        self._send(self._pair.verifier.commit(0, 1, tokens[-1], prefix_digest(tokens[:-1])))

    def _reconnect(self, _: int) -> None:
        """A transport delivers in order per sender (REQ-TRN-1): no frame overtakes the HELLO."""
        self._pair.connect()
        self._dropped[_UP] = _ALL

    def _restart(self, _: int) -> None:
        self._reconnect(0)
        self._dropped[_WORK] = _ALL

    def _answer(self, number: int) -> None:
        item = self._items.value(number)
        token = EPOCHS.index(self._pair.worker) * 64 + item.generation * 8 + item.round
        self._answered(number, self._pair.reply(item, token))

    def _fail(self, number: int) -> None:
        self._answered(number, self._pair.drafter.fail(self._items.value(number)))

    def _answered(self, number: int, frames: Iterable[Buffer]) -> None:
        self._dropped[_WORK] = 1 << number
        self._added[_DOWN] = self._sent(frames)

    def _to_worker(self, number: int) -> None:
        for event in self._pair.drafter.receive(self._frames.value(number), 0):
            if isinstance(event, StepArrived):
                self._added[_WORK] = sum(1 << self._items.number(item) for item in event.items)
        self._added[_DOWN] = self._sent(self._pair.drafter.frames_to_send())

    def _to_verifier(self, number: int) -> None:
        for event in self._pair.verifier.receive(self._frames.value(number), 0):
            if isinstance(event, ProposalReady):
                self._drawn_token = event.tokens[0]
                self._context = (*self._context, self._drawn_token, 1)
                key = Key(event.slot, event.generation, event.round)
                user = 1 << self._block(event.lease, key)
                self._dropped[_WRITERS] = self._added[_CONSUMERS] = user

    def _release(self, number: int) -> None:
        self._lease(number).release()
        self._dropped[_CONSUMERS] = 1 << number

    def _stop(self, number: int) -> None:
        slot, generation, round_, _block = self._memory.value(number)
        self._pair.verifier.cancel_confirmed(Key(slot, generation, round_))
        self._dropped[_WRITERS] = 1 << number

    def _send(self, frame: Buffer) -> None:
        self._added[_UP] = self._sent([frame])

    def _sent(self, frames: Iterable[Buffer]) -> int:
        mask = 0
        for frame in frames:
            mask |= 1 << self._frames.number(bytes(frame))
        return mask

    def _block(self, lease: Lease, key: Key) -> int:
        return self._memory.number((key.slot, key.generation, key.round, self._pair.leases.index(lease)))

    def _lease(self, number: int) -> Lease:
        block: int = self._memory.value(number)[3]
        return self._pair.leases[block]

    def _origin(self, _slot: VerifierSlot) -> tuple[int, int, Hashable]:
        """Under what the reply that has just been accepted was drawn: its token says so."""
        epoch, rest = divmod(self._drawn_token, 64)
        return *divmod(rest, 8), EPOCHS[epoch]


_ACTIONS: Final[dict[str, Callable[[SlotLedger, int], None]]] = {
    "OPEN": SlotLedger._open,
    "RESET": SlotLedger._reset,
    "CANCEL": SlotLedger._cancel,
    "CLOSE": SlotLedger._close,
    "deadline": SlotLedger._deadline,
    "STEP": SlotLedger._step,
    "STEP with commit": SlotLedger._step_with_commit,
    "COMMIT": SlotLedger._commit,
    "reconnect": SlotLedger._reconnect,
    "restart": SlotLedger._restart,
    "answer": SlotLedger._answer,
    "fail": SlotLedger._fail,
    "to worker": SlotLedger._to_worker,
    "to verifier": SlotLedger._to_verifier,
    "release": SlotLedger._release,
    "stop": SlotLedger._stop,
}
