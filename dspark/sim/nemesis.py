"""Carries out a world's fault program, and heals what it did.

Invariants: a fault acts when the world has completed its number of rounds; one that lasts ends by itself, but not
before its effect has been seen; after `heal` nothing acts any more. Called by `world` after every event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from dspark.sim.clock import MS, VirtualClock
from dspark.sim.faults import DOWN, Fault
from dspark.sim.network import Channel
from dspark.sim.process import Process
from dspark.sim.ranks import Rank
from dspark.sim.spark import Spark
from dspark.sim.trace import Trace
from dspark.sim.worker import ToyWorker

_AGAIN_NS = 10 * MS


class Nemesis:
    """`up[g][w]`, `down[g][w]`, `to_rank[g]` and `from_rank[g]` are the channels of the world."""

    def __init__(
        self, clock: VirtualClock, trace: Trace, program: Sequence[Fault], sparks: list[Spark],
        workers: list[ToyWorker], ranks: list[Rank],
    ) -> None:  # fmt: skip
        self.up: list[list[Channel]] = []
        self.down: list[list[Channel]] = []
        self.to_rank: list[Channel] = []
        self.from_rank: list[Channel] = []
        self.over = False
        self._clock, self._trace, self._program = clock, trace, program
        self._sparks, self._workers, self._ranks = sparks, workers, ranks
        self._next = 0

    def advance(self, rounds: int) -> None:
        """Carry out every fault that is due."""
        while self._next < len(self._program) and self._program[self._next].at_round <= rounds:
            fault = self._program[self._next]
            self._next += 1
            self._trace.emit("fault", fault.index, fault.kind)
            self._act(fault)

    @property
    def channels(self) -> list[Channel]:
        """Every channel of the world, in a fixed order."""
        rows = [*self.up, *self.down]
        return [*(channel for row in rows for channel in row), *self.to_rank, *self.from_rank]

    def heal(self) -> None:
        """Whole network, running processes, honest workers."""
        self.over = True
        for channel in self.channels:
            channel.heal()
        for process in [*self._sparks, *self._workers, *self._ranks]:
            if process.paused:
                process.resume()
        for rank in self._ranks:
            rank.slow = None
            if not rank.alive:
                rank.start()
        for worker in self._workers:
            if worker.lie is not None or not worker.alive:
                worker.lie = None
                self.restart(worker)

    def restart(self, worker: ToyWorker) -> None:
        """Another process in the worker's place."""
        if worker.alive:
            worker.kill()
        worker.start()
        self._trace.emit("restart", worker.index, worker.incarnation)

    def quarantined(self, session: int) -> None:
        """An operator restarts the worker that was found out, a little later."""
        for worker in self._workers:
            if any(slot.session == session for slot in worker.slots.values()):
                incarnation = worker.incarnation
                self._clock.after(300 * MS, partial(self._restart_once, worker, incarnation))

    def _restart_once(self, worker: ToyWorker, incarnation: int) -> None:
        if worker.incarnation == incarnation and worker.alive:
            self.restart(worker)

    def _act(self, fault: Fault) -> None:
        kind = fault.kind
        if kind in _ON_RANKS:
            _ON_RANKS[kind](self, fault)
        elif kind in _ON_PROCESSES:
            _ON_PROCESSES[kind](self, fault)
        else:
            row = self.down if fault.message in _DOWNWARD or (fault.message == 0 and fault.index % 2) else self.up
            row[fault.group][fault.worker].armed.append(fault)

    def _until(self, fault: Fault, end: Callable[[], None]) -> None:
        """End a lasting fault after its time, once it has been seen to act."""

        def check() -> None:
            if self.over:
                return
            if fault.verified:
                end()
            else:
                self._clock.after(_AGAIN_NS, check)

        self._clock.after(fault.amount * MS, check)

    # Paths

    def _cut(self, fault: Fault, channels: list[Channel]) -> None:
        for channel in channels:
            channel.cut = fault

        def mend() -> None:
            for channel in channels:
                if channel.cut is fault:
                    channel.cut = None

        self._until(fault, mend)

    def _partition(self, fault: Fault) -> None:
        self._cut(fault, [self.up[fault.group][fault.worker], self.down[fault.group][fault.worker]])

    def _partition_up(self, fault: Fault) -> None:
        self._cut(fault, [self.up[fault.group][fault.worker]])

    def _partition_down(self, fault: Fault) -> None:
        self._cut(fault, [self.down[fault.group][fault.worker]])

    def _clog(self, fault: Fault) -> None:
        rows = self.up if fault.index % 2 else self.down
        self._clog_one(fault, rows[fault.group][fault.worker])

    def _clog_one(self, fault: Fault, channel: Channel) -> None:
        if self.over:
            return
        channel.clog = fault

        def mend() -> None:
            if channel.clog is fault:
                channel.release()

        self._until(fault, mend)

    def _swizzle(self, fault: Fault) -> None:
        """Clog some channels of a group one after the other, and let them go in another order."""
        rng = Random(fault.amount * 1000 + fault.index)
        every = [*self.up[fault.group], *self.down[fault.group], self.to_rank[fault.group]]
        chosen = rng.sample(every, rng.randint(1, len(every)))
        pause_ns = max(1, fault.amount * MS // (4 * len(chosen)))
        for number, channel in enumerate(chosen):
            self._clock.after(number * pause_ns, partial(self._clog_one, fault, channel))
        # Each is let go after the fault's time from its own beginning; shuffled beginnings shuffle the ends.

    # Processes

    def _pause(self, fault: Fault) -> None:
        process: Process = self._workers[fault.worker] if fault.index % 3 else self._sparks[fault.group]
        self._stop(fault, process)

    def _stop(self, fault: Fault, process: Process) -> None:
        if process.paused or not process.alive:
            return
        process.pause(fault.hit)
        incarnation = process.incarnation

        def go_on() -> None:
            if process.paused and process.incarnation == incarnation:
                process.resume()

        self._until(fault, go_on)

    def _kill(self, fault: Fault) -> None:
        self._end(fault, fault.amount * MS)

    def _restart(self, fault: Fault) -> None:
        self._end(fault, 0)

    def _end(self, fault: Fault, pause_ns: int) -> None:
        worker = self._workers[fault.worker]
        if not worker.alive:
            return
        worker.death = fault
        worker.kill()

        def again() -> None:
            if not worker.alive:
                self.restart(worker)

        if pause_ns:
            self._clock.after(pause_ns, again)
        else:
            again()

    def _drain(self, fault: Fault) -> None:
        """A worker announces that it leaves, and another takes its place when the time is over."""
        worker = self._workers[fault.worker]
        if worker.alive and not worker.paused and worker.drain(max(1, fault.amount)):
            fault.hit()
            incarnation = worker.incarnation
            self._clock.after(fault.amount * MS, lambda: self._restart_once(worker, incarnation))

    def _lie(self, fault: Fault) -> None:
        worker = self._workers[fault.worker]
        if worker.alive and worker.lie is None:
            worker.lie = fault

    def _bent(self, fault: Fault) -> Process:
        return (self._workers[fault.worker], self._sparks[fault.group], self._ranks[fault.group])[fault.index % 3]

    def _clock_jump(self, fault: Fault) -> None:
        process = self._bent(fault)
        before = process.clock()
        process.clock.jump(fault.amount * MS)
        fault.injected, fault.verified = True, process.clock() - before == fault.amount * MS

    def _clock_stall(self, fault: Fault) -> None:
        process = self._bent(fault)
        process.clock.stall(fault.amount * MS)
        fault.injected = True

        def check() -> None:
            fault.verified = process.clock.stands

        self._clock.after(fault.amount * MS // 2, check)

    # Ranks

    def _rank_frame(self, fault: Fault) -> None:
        row = self.to_rank if fault.index % 2 else self.from_rank
        row[fault.group].armed.append(fault)

    def _rank_partition(self, fault: Fault) -> None:
        self._cut(fault, [self.to_rank[fault.group], self.from_rank[fault.group]])

    def _rank_pause(self, fault: Fault) -> None:
        self._stop(fault, self._ranks[fault.group])

    def _rank_restart(self, fault: Fault) -> None:
        rank = self._ranks[fault.group]
        before = rank.followers
        rank.kill()
        rank.start()
        fault.injected, fault.verified = True, rank.followers is not before

    def _slow_rank(self, fault: Fault) -> None:
        rank = self._ranks[fault.group]
        rank.slow = fault, fault.amount * MS // 20

        def catch_up() -> None:
            if rank.slow is not None and rank.slow[0] is fault:
                rank.slow = None

        self._until(fault, catch_up)


_DOWNWARD = frozenset(map(int, DOWN))
_ON_PROCESSES: dict[str, Callable[[Nemesis, Fault], None]] = {
    "partition": Nemesis._partition,
    "partition_up": Nemesis._partition_up,
    "partition_down": Nemesis._partition_down,
    "clog": Nemesis._clog,
    "swizzle": Nemesis._swizzle,
    "pause": Nemesis._pause,
    "kill": Nemesis._kill,
    "restart": Nemesis._restart,
    "drain": Nemesis._drain,
    "lie": Nemesis._lie,
    "clock_jump": Nemesis._clock_jump,
    "clock_stall": Nemesis._clock_stall,
}
_ON_RANKS: dict[str, Callable[[Nemesis, Fault], None]] = {
    "rank_drop": Nemesis._rank_frame,
    "rank_duplicate": Nemesis._rank_frame,
    "rank_delay": Nemesis._rank_frame,
    "rank_reorder": Nemesis._rank_frame,
    "rank_partition": Nemesis._rank_partition,
    "rank_pause": Nemesis._rank_pause,
    "rank_restart": Nemesis._rank_restart,
    "slow_rank": Nemesis._slow_rank,
}
