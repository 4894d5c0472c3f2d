"""The reference verifier: a driver without a model, on `VerifierConnection`, that keeps rounds going.

What a third party's verifier must do while it is tested is what this one does: say HELLO, keep sessions open and
stepping, commit accepted rounds, go on after a refused one, RESET after a lost generation, say HELLO again when the
connection ends. Where the drafter refuses version 2 it asks for version 1, and goes back to version 2 after that
connection; where dense rows were agreed on it asks for them. It accepts a varying number of drafts, checks that rows
are dyadic before it uses one, and ends a session now and then. Called by `testees`; the mutants wrap it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..codec_pipe.dyadic import row_fault
from ..digest import prefix_digest
from ..events import (
    Accepted,
    CreditGranted,
    PeerError,
    PeerSilent,
    ProposalReady,
    Rejected,
    SlotFailed,
    StepFailed,
    StepTimedOut,
    VerifierEvent,
)
from ..limits import NO_COMMIT
from ..messages import StepItem
from ..negotiation import HelloParameters, Negotiated
from ..registry import Cause, ErrorCode, Lane, Scope, SupportPolicy
from ..staging import LeaseState
from ..states import SlotState, VerifierState
from ..verifier import VerifierConnection
from .clock import NS_PER_MS

SESSIONS = 2
ROUNDS_PER_SESSION = 12
PROMPT = 4
RETRY_MS = 200
_TAP_BYTE = b"\x01"


@dataclass
class _Session:
    """One request: its tokens by position, and the round that waits to be committed."""

    slot: int
    number: int
    tokens: list[int] = field(default_factory=list)
    round: int = 0
    accepted: tuple[int, int] | None = None
    prompted: bool = False


class ReferenceVerifier:
    """A `PeerMachine`. ``checks_rows`` False accepts any row, which is a fault."""

    def __init__(self, parameters: HelloParameters) -> None:
        self.connection = VerifierConnection(parameters)
        self.checks_rows = True
        self.session_count_wanted = SESSIONS
        self._sessions: list[_Session] = []
        self._session_count = 0
        self._hello_again_ns: int | None = None
        self._version = parameters.versions[0]

    def start(self, now_ns: int) -> list[bytes]:
        """HELLO."""
        return [bytes(self.connection.hello(now_ns, self._version))]

    def receive(self, frame: bytes, now_ns: int) -> list[bytes]:
        """React to one frame and keep the rounds going."""
        return self._react(self.connection.receive(frame, now_ns), now_ns)

    def expire(self, now_ns: int) -> list[bytes]:
        """Deadlines, and HELLO again after a lost connection."""
        if self._hello_again_ns is not None and now_ns >= self._hello_again_ns:
            self._hello_again_ns = None
            return self.start(now_ns)
        return self._react(self.connection.expire(now_ns), now_ns)

    def held(self) -> dict[str, int]:
        """Staging that no unresolved round owns."""
        staging = self.connection.staging
        if staging is None:
            return {}
        taken = len(staging.leases) - staging.count(LeaseState.FREE)
        awaiting = sum(self.connection.slot_state(s.slot) is SlotState.AWAITING for s in self._sessions)
        return {"leases": taken - awaiting}

    def _react(self, events: Sequence[VerifierEvent], now_ns: int) -> list[bytes]:
        frames: list[memoryview] = []
        for event in events:
            frames += self._on(event, now_ns)
        ready = [session for session in self._sessions if self._is_ready(session)]
        frames += [frame for session in ready for frame in self._prepare(session)]
        stepping = [s for s in self._sessions if s.prompted and self._is_ready(s)]
        items = [self._item(session) for session in stepping]
        if items:
            frames.append(self.connection.step(items, now_ns))
        return [bytes(frame) for frame in self.connection.frames_to_send()] + [bytes(frame) for frame in frames]

    def _is_ready(self, session: _Session) -> bool:
        active = self.connection.state in (VerifierState.ACTIVE, VerifierState.DRAINING)
        return active and self.connection.slot_state(session.slot) is SlotState.READY

    def _on(self, event: VerifierEvent, now_ns: int) -> list[memoryview]:
        match event:
            case Accepted():
                count = min(self.session_count_wanted, event.negotiated.max_slots)
                self._sessions = []
                return [frame for slot in range(count) for frame in self._open(slot)]
            case Rejected(code=ErrorCode.BAD_VERSION) if self._older():
                self._hello_again_ns = now_ns
            case Rejected() | PeerSilent() | PeerError(scope=Scope.CONNECTION):
                self._sessions, self._version = [], self.connection.parameters.versions[0]
                self._hello_again_ns = now_ns + RETRY_MS * NS_PER_MS
            case ProposalReady():
                self._judge(event)
            case StepFailed(needs_reset=True) | StepTimedOut() | SlotFailed():
                return self._revive(event.slot)
            case StepFailed():
                self._go_on_alone(event.slot)
            case CreditGranted():
                pass
        return []

    def _older(self) -> bool:
        """Take the next of the parameters' versions; whether there is one."""
        versions = self.connection.parameters.versions
        following = versions.index(self._version) + 1
        if following == len(versions):
            return False
        self._version = versions[following]
        return True

    def _open(self, slot: int) -> list[memoryview]:
        self._session_count += 1
        number = self._session_count
        self._sessions.append(_Session(slot, number))
        terms = self.connection.negotiated
        assert terms is not None
        lane = Lane.RATIO if terms.lanes & 1 << (Lane.RATIO - 1) else Lane.GREEDY
        support = _support(terms)
        temperature = 0 if lane is Lane.GREEDY else 1_000_000
        frame = self.connection.open(
            slot, number, seed=-number, support=support, lane=lane, draft_temperature_micro=temperature
        )
        return [frame]

    def _session(self, slot: int) -> _Session | None:
        return next((session for session in self._sessions if session.slot == slot), None)

    def _revive(self, slot: int) -> list[memoryview]:
        """A new generation for the session, from the start; or the session ends."""
        session = self._session(slot)
        if session is None or self.connection.slot_state(slot) is not SlotState.DORMANT:
            return []
        session.tokens, session.prompted, session.accepted = [], False, None
        return [self.connection.reset(slot, Cause.ROUND_TIMED_OUT)]

    def _go_on_alone(self, slot: int) -> None:
        """The round is target-only: one token of our own follows the anchor."""
        session = self._session(slot)
        if session is not None:
            session.tokens.append(self._own_token(session))

    @staticmethod
    def _own_token(session: _Session) -> int:
        return (session.number + 7 * len(session.tokens)) % 97

    def _judge(self, proposal: ProposalReady) -> None:
        """Accept a varying number of drafts, or refuse the whole proposal for a row that is not dyadic."""
        session = self._session(proposal.slot)
        terms = self.connection.negotiated
        if session is None or terms is None:
            proposal.lease.release()
            return
        layout = proposal.lease.layout
        assert layout is not None
        fault = row_fault(proposal.lease.block, layout, terms.vocab_size) if self.checks_rows else ""
        proposal.lease.release()
        if fault:
            self._go_on_alone(proposal.slot)
            return
        accepted = proposal.round % (proposal.depth + 1)
        session.tokens += proposal.tokens[:accepted]
        session.accepted = (accepted, self._own_token(session))
        session.tokens.append(session.accepted[1])

    def _prepare(self, session: _Session) -> list[memoryview]:
        """What precedes the next STEP: the prompt of a new generation, or the end of a long session."""
        if session.round >= ROUNDS_PER_SESSION:
            self._sessions.remove(session)
            closed = self.connection.close(session.slot)
            if self.connection.state is VerifierState.DRAINING:
                return [closed]
            return [closed, *self._open(session.slot), *self._prepare(self._sessions[-1])]
        if session.prompted:
            return []
        session.tokens = [self._prompt_token(session, position) for position in range(PROMPT + 2)]
        first = self.connection.context_end(session.slot)
        ids = b"".join(token.to_bytes(4, "little") for token in session.tokens[first:PROMPT])
        sent = self.connection.context(session.slot, first, PROMPT - first, self._taps(PROMPT - first), ids)
        session.prompted = first + sent.rows == PROMPT
        return list(sent.frames)

    @staticmethod
    def _prompt_token(session: _Session, position: int) -> int:
        return (session.number * 11 + position) % 97

    def _taps(self, rows: int) -> bytes:
        terms = self.connection.negotiated
        assert terms is not None
        return _TAP_BYTE * (rows * terms.tap_row_bytes)

    def _item(self, session: _Session) -> StepItem:
        """The next round; it carries the commit of the last one."""
        session.round += 1
        terms = self.connection.negotiated
        assert terms is not None
        first = self.connection.context_end(session.slot)
        anchor = len(session.tokens) - 1
        accepted, token = session.accepted or (NO_COMMIT, 0)
        session.accepted = None
        return StepItem(
            session.number,
            session.slot,
            self.connection.generation(session.slot),
            session.round,
            session.tokens[anchor],
            anchor,
            prefix_digest(session.tokens[:anchor]),
            terms.max_depth,
            Lane.RATIO if terms.lanes & 1 << (Lane.RATIO - 1) else Lane.GREEDY,
            accepted_count=accepted,
            commit_token=token,
            tap_first=first,
            tap_rows=anchor - first,
            taps=self._taps(anchor - first),
        )


def _support(terms: Negotiated) -> SupportPolicy:
    """Dense rows where they were agreed on, else the largest policy."""
    if terms.dense_rows:
        return SupportPolicy.DENSE
    return max(policy for policy in SupportPolicy if policy is not SupportPolicy.DENSE and terms.takes(policy))
