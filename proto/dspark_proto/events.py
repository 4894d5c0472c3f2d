"""What the connections tell their callers: frozen values, one class per kind of news.

Memory: views in ``ContextArrived`` and in ``StepArrived`` items point into the received buffer and live as
long as it does; views in ``ProposalReady`` point into leased staging and live until the lease is released.
Called by ``verifier`` and ``drafter``, which build them; holds no logic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from .messages import Stats, StepItem
from .native import maker
from .negotiation import Mismatch, Negotiated
from .registry import Cause, ErrorCode, Lane, Scope, SupportPolicy
from .staging import Lease


@dataclass(frozen=True, slots=True)
class Accepted:
    """The worker accepted; all slots are free."""

    negotiated: Negotiated


@dataclass(frozen=True, slots=True)
class Rejected:
    """The worker refused. ``field`` and both values are text for a person, empty when there is none."""

    code: ErrorCode
    field: str
    local: str
    peer: str


@dataclass(frozen=True, slots=True)
class ProposalReady:
    """A whole, structurally valid proposal in leased staging.

    ``tokens[i]``, ``entries[i]`` and ``confidences[i]`` belong to the draft for position
    ``anchor_position + 1 + i``. ``ids`` is int32 [depth, support] and ``q`` float32 [depth, support], both
    read-only little-endian bytes; with ``support`` 0 (dense rows) ``ids`` is empty and ``q`` [depth,
    vocabulary size]. A confidence is the worker's guess, in units of 2^-24, that the draft is accepted if all
    before it are; 2^24 also stands for "no opinion". ``draft_us`` is the worker's own time for the round. The
    values are *not* checked beyond sizes, ranges of tokens, entries and confidences, and checksums. Call
    ``lease.release()`` when done.
    """

    slot: int
    session: int
    generation: int
    round: int
    anchor_position: int
    depth: int
    support: int
    tokens: tuple[int, ...]
    entries: tuple[int, ...]
    confidences: tuple[int, ...]
    ids: memoryview = field(repr=False)
    q: memoryview = field(repr=False)
    lease: Lease = field(repr=False)
    draft_us: int = 0


make_proposal = maker(ProposalReady)


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The whole proposal of this round is discarded; run the round target-only.

    With ``needs_reset`` the slot's generation has been bumped (``generation`` is the dead one) and only
    ``reset`` or ``close`` is allowed; without it the next STEP may follow at once.
    """

    slot: int
    session: int
    generation: int
    round: int
    code: ErrorCode
    needs_reset: bool


@dataclass(frozen=True, slots=True)
class StepTimedOut:
    """No valid reply in time. The generation was bumped before the staging can be leased again; ``reset``."""

    slot: int
    session: int
    generation: int
    new_generation: int
    round: int


@dataclass(frozen=True, slots=True)
class SlotFailed:
    """The worker refused something about the slot outside a round; ``reset`` or ``close`` it."""

    slot: int
    session: int
    generation: int
    new_generation: int
    code: ErrorCode


@dataclass(frozen=True, slots=True)
class PeerError:
    """The peer reported an error. With scope CONNECTION all slots are gone; call ``hello`` again."""

    code: ErrorCode
    scope: Scope
    where: str


@dataclass(frozen=True, slots=True)
class PeerSilent:
    """The peer did not answer for ``silent_ns``; all slots are gone and the connection is LOST."""

    silent_ns: int


@dataclass(frozen=True, slots=True)
class Draining:
    """The worker takes no new session and leaves within ``deadline_ms``; open slots go on."""

    deadline_ms: int


@dataclass(frozen=True, slots=True)
class CreditGranted:
    """The worker will take ``rows`` more context rows in total than before."""

    rows: int


@dataclass(frozen=True, slots=True)
class PongReceived:
    """Answer to a PING. ``load_permille`` is the worker's own figure."""

    nonce: int
    load_permille: int


@dataclass(frozen=True, slots=True)
class StatsReceived:
    """The worker's report."""

    stats: Stats


VerifierEvent: TypeAlias = (
    Accepted
    | Rejected
    | ProposalReady
    | StepFailed
    | StepTimedOut
    | SlotFailed
    | PeerError
    | PeerSilent
    | Draining
    | CreditGranted
    | PongReceived
    | StatsReceived
)


@dataclass(frozen=True, slots=True)
class HelloReceived:
    """A verifier asks; every earlier slot is dead. Answer with ``accept`` when ``code`` is None, else
    ``reject``.

    ``mismatch`` is set when ``code`` is INCOMPATIBLE, ``negotiated`` when the two sides can talk.
    """

    code: ErrorCode | None
    mismatch: Mismatch | None
    negotiated: Negotiated | None


@dataclass(frozen=True, slots=True)
class SlotOpened:
    """A session took a slot. ``seed`` is signed 64-bit; temperature is in millionths, 0 = greedy.

    ``lane`` says what the rows are for: in MATCH and GREEDY each has one entry, whatever ``support`` is.
    """

    slot: int
    session: int
    generation: int
    seed: int
    draft_temperature_micro: int
    support: SupportPolicy
    lane: Lane
    choice: int
    context_start: int
    processor_version: int
    grammar_version: int
    stop_version: int


@dataclass(frozen=True, slots=True)
class ContextArrived:
    """Taps of ``rows`` positions from ``first_position``: raw rows of the negotiated tap dtype.

    ``token_ids`` is int32 [rows] as bytes, or None. After use call ``context_consumed(rows)``.
    """

    slot: int
    session: int
    generation: int
    first_position: int
    rows: int
    taps: memoryview = field(repr=False)
    token_ids: memoryview | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class StepArrived:
    """Draft requests to answer with ``reply`` or ``fail``, each exactly once; refused items are not in it."""

    items: tuple[StepItem, ...]


make_step_arrived = maker(StepArrived)


@dataclass(frozen=True, slots=True)
class SlotCommitted:
    """What survived of ``round``, sent without a following STEP. ``token`` stands at ``position``."""

    slot: int
    session: int
    generation: int
    round: int
    accepted_count: int
    token: int
    position: int


@dataclass(frozen=True, slots=True)
class SlotReset:
    """Everything of the slot's older generation is dead; context restarts empty at ``context_start``."""

    slot: int
    session: int
    generation: int
    cause: Cause
    context_start: int


@dataclass(frozen=True, slots=True)
class SlotCancelled:
    """Stop work on the slot; its state is dead and it waits for a reset or close."""

    slot: int
    session: int
    generation: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class SlotClosed:
    """The session ended; free everything of the slot. ``cause`` is None when the connection itself ended."""

    slot: int
    session: int
    cause: Cause | None


DrafterEvent: TypeAlias = (
    HelloReceived
    | SlotOpened
    | ContextArrived
    | StepArrived
    | SlotCommitted
    | SlotReset
    | SlotCancelled
    | SlotClosed
    | PeerError
    | PeerSilent
)
