"""The other rank of a Spark group: production `RankFollower`s, one per flight, and the texts that they commit.

A decision that was applied is kept as unresolved until the next plan, and dies when the rank joins another epoch: then
the texts are taken from rank 0's committed prefixes again, as a rebuilt group does. Called by `spark` and `world`.
"""

from __future__ import annotations

from collections.abc import Callable

from dspark.sim.clock import VirtualClock
from dspark.sim.faults import Fault
from dspark.sim.process import Process
from dspark_spark.rank_agreement import Decision, Form, RankFollower, RankMessage, Turn

Prefixes = Callable[[int], dict[int, list[int]]]
"""The committed tokens of a flight's sessions on rank 0."""

Envelope = tuple[int, RankMessage]
"""A flight and a message of its agreement."""


class Rank(Process):
    """Rank 1. `texts[flight][session]` are the tokens that it has committed."""

    def __init__(
        self, name: str, clock: VirtualClock, flights: int, deadline_ns: int, send: Callable[[list[Envelope]], None],
        prefixes: Prefixes,
    ) -> None:  # fmt: skip
        super().__init__(name, clock)
        self.slow: tuple[Fault, int] | None = None
        self.on_applied: Callable[[int, Decision], None] | None = None
        self._flights, self._deadline_ns, self._send, self._prefixes = flights, deadline_ns, send, prefixes
        self.start()

    def start(self) -> None:
        """A new process, which is in no group."""
        self.alive = True
        self.followers = [RankFollower(1, self._deadline_ns) for _ in range(self._flights)]
        self.texts: list[dict[int, list[int]]] = [{} for _ in range(self._flights)]
        self.after(self._deadline_ns // 2, self._tick)

    def receive(self, envelopes: list[Envelope], _fault: Fault | None) -> None:
        """Messages of rank 0 arrive."""
        if not self.alive:
            return
        if self.slow is not None:
            fault, delay_ns = self.slow
            fault.hit()
            self.after(delay_ns, lambda: self._take(envelopes))
            return
        self.run(lambda: self._take(envelopes))

    def _take(self, envelopes: list[Envelope]) -> None:
        for flight, message in envelopes:
            follower = self.followers[flight]
            joining = isinstance(message, Form) and message.group_epoch > follower.group_epoch
            turn = follower.receive(message, self.clock())
            if joining and follower.group_epoch == message.group_epoch:
                self.texts[flight] = self._prefixes(flight)
            self._act(flight, turn)

    def _tick(self) -> None:
        for flight, follower in enumerate(self.followers):
            self._act(flight, follower.expire(self.clock()))
        self.after(self._deadline_ns // 2, self._tick)

    def _act(self, flight: int, turn: Turn) -> None:
        if turn.messages:
            self._send([(flight, message) for _, message in turn.messages])
        if turn.apply is not None:
            self._apply(flight, turn.apply)
            self._act(flight, self.followers[flight].applied())

    def _apply(self, flight: int, decision: Decision) -> None:
        """Commit every item, all of it."""
        if self.on_applied is not None:
            self.on_applied(flight, decision)
        known, texts = None, self.texts[flight]
        for item in decision.items:
            if item.session not in texts:
                known = known or self._prefixes(flight)
                texts[item.session] = known.get(item.session, [])
            drafts = self.followers[flight].copies[item.slot].tokens[: item.accepted] if item.accepted else ()
            texts[item.session] += [*drafts, item.token]
        for session in [one for one in texts if one not in {item.session for item in decision.items}]:
            del texts[session]
