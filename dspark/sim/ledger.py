"""What the simulator knows and no process does: what was drafted under which key, who lied, what must never happen.

Called by the simulated processes while they act, and by `world` at the end.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from dspark.philox import Keys
from dspark.sim.faults import Fault
from dspark.sim.trace import Trace

VIOLATIONS = (
    "wrong_tokens", "stale_accepted", "corrupt_accepted", "half_commits", "leaked", "double_leases", "keys_reused",
    "wrong_context", "quarantined_used", "unexplained", "crashes", "not_live", "model_violations",
)  # fmt: skip
"""Everything that must stay zero. wrong_context: a worker drafted from other tap rows than the committed ones.
unexplained: a worker was found out that had not lied, with nothing forged."""

_REMEMBERED = 8


@dataclass(frozen=True, slots=True)
class Drafted:
    """One proposal as it was drawn: its key, by whom, under which generation, where, on what, and the tokens."""

    keys: Keys
    epoch: int
    generation: int
    anchor_position: int
    context: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must never happen, when and how."""

    kind: str
    at_round: int
    detail: str

    def __str__(self) -> str:
        return f"{self.kind} at round {self.at_round}: {self.detail}"


class Ledger:
    """`rounds` is the number of completed rounds of the world, which times its faults."""

    def __init__(self, trace: Trace) -> None:
        self.rounds = 0
        self.counts: Counter[str] = Counter()
        self.violations: list[Violation] = []
        self._trace = trace
        self._drafted: dict[int, list[Drafted]] = {}
        self._lies: dict[tuple[int, int], Fault] = {}
        self._tainted: set[int] = set()
        self._quarantined: dict[tuple[int, int], int] = {}

    def violate(self, kind: str, detail: str) -> None:
        """Something that must not happen has happened."""
        self.violations.append(Violation(kind, self.rounds, detail))
        self._trace.emit("violation", kind, detail)

    def drafted(self, session: int, one: Drafted) -> None:
        """A worker has drawn a proposal. The same key must always have drawn from the same place."""
        known = self._drafted.setdefault(session, [])
        for other in known:
            if other.keys == one.keys and other != one and session not in self._tainted:
                self.violate("keys_reused", f"session {session}: {one} after {other}")
        known.append(one)
        del known[:-_REMEMBERED]

    def recent(self, session: int) -> list[Drafted]:
        """The session's last proposals, of all workers."""
        return self._drafted.get(session, [])

    def forget(self, session: int) -> None:
        """The session is over."""
        self._drafted.pop(session, None)

    def lied(self, session: int, round_: int, fault: Fault) -> None:
        """A worker sends something false for this round, under right checksums."""
        self._lies[session, round_] = fault

    def reads(self, group: int, session: int, round_: int, asked_ns: int) -> None:
        """The proposal that was asked for at `asked_ns` has come through to its reader; a lie takes hold now."""
        fault = self._lies.get((session, round_))
        if fault is not None:
            fault.injected = True
        epoch = self._drawn_by(session, round_)
        if asked_ns > self._quarantined.get((group, epoch), asked_ns):
            self.violate("quarantined_used", f"session {session} round {round_} was drafted by epoch {epoch}")

    def found_out(self, group: int, session: int, round_: int, reason: str, now_ns: int) -> None:
        """The round's proposal was refused for its contents."""
        fault = self._lies.get((session, round_))
        if fault is not None:
            fault.verified = True
        elif session not in self._tainted:
            self.violate("unexplained", f"session {session} round {round_}: {reason}")
        self._quarantined.setdefault((group, self._drawn_by(session, round_)), now_ns)

    def _drawn_by(self, session: int, round_: int) -> int:
        """The epoch of the worker that drew a round; 0 when none did."""
        drawn = self.drawn_in(session, round_)
        return 0 if drawn is None else drawn.epoch

    def drawn_in(self, session: int, round_: int, generation: int | None = None) -> Drafted | None:
        """What was drawn for a round, if it was not long ago.

        A forged STEP can make a worker draw a round long before the verifier asks for it, in another generation: of the
        draws of such a session the one in the slot's `generation` is meant, when there is one.
        """
        drawn = [one for one in self.recent(session) if one.keys.round == round_]
        if session in self._tainted:
            drawn.sort(key=lambda one: one.generation != generation)
        return drawn[0] if drawn else None

    def taint(self, session: int) -> None:
        """A forged frame of this session is about: what its workers believe need not be what it is."""
        self._tainted.add(session)

    def tainted(self, session: int) -> bool:
        return session in self._tainted

    def accepted_damage(self, fault: Fault) -> None:
        """A damaged frame, or a reply that names another round, was not refused."""
        kind = "stale_accepted" if fault.kind == "forge" else "corrupt_accepted"
        self.violate(kind, f"no refusal was counted for {fault}")
