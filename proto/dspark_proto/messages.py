"""The v2 messages: one frozen typed record per message, with its wire layout.

The key (slot, generation, round) of a message is in the frame's prefix and is not repeated here, except in
STEP, whose items each carry their own. No drafted value is in any record of this module: tokens and entry
counts travel in the RECORDS body and checksums as fixed-size byte strings, so a reply's length never depends
on what was drafted. Spec: SPEC.md, section "Messages". Called by ``frame`` and both connections; HELLO and
its kin are in ``hello``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

from .bodies import BodyDescriptor
from .buffers import Buffer
from .checksums import BODY_CHECKSUM_BYTES
from .digest import DIGEST_BYTES, EMPTY_DIGEST
from .errors import LocalProtocolError
from .fields import Field, Record, Records, Text, UInt, compiled, enum_field, fixed_bin
from .limits import (
    BODY_COUNT_MAX,
    CONTEXT_CHUNK_ROWS_MAX,
    DEADLINE_MS_MAX,
    DEADLINE_MS_MIN,
    DEPTH_MAX,
    DRAFT_TEMPERATURE_MICRO_MAX,
    GENERATION_MAX,
    NO_COMMIT,
    POSITION_MAX,
    ROUND_MAX,
    SLOTS_MAX,
    STATS_COUNTERS_MAX,
    STEP_ITEMS_MAX,
    SUPPORT_MAX,
    U8_MAX,
    U32_MAX,
    U64_MAX,
    VOCAB_MAX,
)
from .registry import Cause, ErrorCode, Lane, MessageType, Representation, Scope, SupportPolicy

_SESSION: Final = UInt("session", U64_MAX)
_EPOCH: Final = UInt("epoch", U64_MAX)
_DIGEST: Final = fixed_bin("prefix_digest", DIGEST_BYTES)
_CAUSE: Final = enum_field("cause", Cause)
STATUS_OK: Final = 0


class Message(Record):
    """A record that fills a frame's control block."""

    __slots__ = ()

    TYPE: ClassVar[MessageType]


_BODIES: Final = Records("bodies", BodyDescriptor, BODY_COUNT_MAX)


@compiled
@dataclass(frozen=True, slots=True)
class Open(Message):
    """Verifier takes a lease on a slot for a session. ``seed`` is the two's complement of a signed 64-bit
    seed.
    """

    session: int
    seed: int
    draft_temperature_micro: int
    support: SupportPolicy
    lane: Lane
    choice: int
    context_start: int
    start_digest: bytes
    processor_version: int
    grammar_version: int
    stop_version: int

    NAME: ClassVar[str] = "OPEN"
    TYPE: ClassVar[MessageType] = MessageType.OPEN
    LAYOUT: ClassVar[tuple[Field, ...]] = (
        _SESSION,
        UInt("seed", U64_MAX),
        UInt("draft_temperature_micro", DRAFT_TEMPERATURE_MICRO_MAX),
        enum_field("support", SupportPolicy),
        enum_field("lane", Lane),
        UInt("choice", U8_MAX),
        UInt("context_start", POSITION_MAX),
        fixed_bin("start_digest", DIGEST_BYTES),
        UInt("processor_version", U32_MAX),
        UInt("grammar_version", U32_MAX),
        UInt("stop_version", U32_MAX),
    )


@compiled
@dataclass(frozen=True, slots=True)
class Context(Message):
    """Target taps of positions ``first_position .. first_position + rows``; optionally their token ids."""

    session: int
    first_position: int
    rows: int
    bodies: tuple[BodyDescriptor, ...]

    NAME: ClassVar[str] = "CONTEXT"
    TYPE: ClassVar[MessageType] = MessageType.CONTEXT
    LAYOUT: ClassVar[tuple[Field, ...]] = (
        _SESSION,
        UInt("first_position", POSITION_MAX),
        UInt("rows", CONTEXT_CHUNK_ROWS_MAX, 1),
        _BODIES,
    )


@compiled
@dataclass(frozen=True, slots=True)
class StepItem(Record):
    """One request's part of a STEP.

    ``taps`` holds the raw little-endian rows [tap_rows, tap layers * tap width] of positions ``tap_first ..
    tap_first + tap_rows``; it travels as a body and takes no part in comparisons. A commit of the slot's
    previous replied round is ``accepted_count`` (``NO_COMMIT`` for none) and ``commit_token``, the correction
    or bonus that follows the accepted drafts.
    """

    session: int
    slot: int
    generation: int
    round: int
    anchor_token: int
    anchor_position: int
    prefix_digest: bytes
    depth: int
    lane: Lane
    context_version: int = 0
    accepted_count: int = NO_COMMIT
    commit_token: int = 0
    tap_first: int = 0
    tap_rows: int = 0
    taps: Buffer = field(default=b"", compare=False, repr=False)

    NAME: ClassVar[str] = "STEP"
    LAYOUT: ClassVar[tuple[Field, ...]] = (
        _SESSION,
        UInt("slot", SLOTS_MAX - 1),
        UInt("generation", GENERATION_MAX),
        UInt("round", ROUND_MAX),
        UInt("anchor_token", VOCAB_MAX),
        UInt("anchor_position", POSITION_MAX),
        _DIGEST,
        UInt("depth", DEPTH_MAX, 1),
        enum_field("lane", Lane),
        UInt("context_version", U32_MAX),
        UInt("accepted_count", NO_COMMIT),
        UInt("commit_token", VOCAB_MAX),
        UInt("tap_first", POSITION_MAX),
        UInt("tap_rows", CONTEXT_CHUNK_ROWS_MAX),
    )

    def with_taps(self, taps: Buffer) -> StepItem:
        """The same item with other tap rows. The fields, checked already, are not checked again."""
        if self.TABLE is None:
            return replace(self, taps=taps)
        twin: StepItem = self.TABLE.twin(self)
        object.__setattr__(twin, "taps", taps)  # nobody else has it yet
        return twin


@compiled
@dataclass(frozen=True, slots=True)
class Step(Message):
    """Draft requests, batched. ``bodies`` are the TAPS of the items with ``tap_rows > 0``, in item order."""

    items: tuple[StepItem, ...]
    bodies: tuple[BodyDescriptor, ...]

    NAME: ClassVar[str] = "STEP"
    TYPE: ClassVar[MessageType] = MessageType.STEP
    LAYOUT: ClassVar[tuple[Field, ...]] = (Records("items", StepItem, STEP_ITEMS_MAX, 1), _BODIES)
    RELATED: ClassVar[bool] = True

    def check_relations(self) -> None:
        """A slot has one item at most."""
        if len(self.items) > 1 and len({item.slot for item in self.items}) < len(self.items):
            raise LocalProtocolError(ErrorCode.BAD_FIELD, f"{self.NAME}.items", "a slot has two items")


@compiled
@dataclass(frozen=True, slots=True)
class Row(Message):
    """Rows ``first_row .. first_row + row_count`` of a reply.

    Bodies RECORDS, IDS, Q; dense rows (``support`` 0) have no IDS.
    """

    session: int
    epoch: int
    first_row: int
    row_count: int
    depth: int
    support: int
    representation: Representation
    bodies: tuple[BodyDescriptor, ...]

    NAME: ClassVar[str] = "ROW"
    TYPE: ClassVar[MessageType] = MessageType.ROW
    LAYOUT: ClassVar[tuple[Field, ...]] = (
        _SESSION,
        _EPOCH,
        UInt("first_row", DEPTH_MAX - 1),
        UInt("row_count", DEPTH_MAX, 1),
        UInt("depth", DEPTH_MAX, 1),
        UInt("support", SUPPORT_MAX),
        enum_field("representation", Representation),
        _BODIES,
    )


@compiled
@dataclass(frozen=True, slots=True)
class Completion(Message):
    """Ends a reply. ``status`` is 0, or the :class:`ErrorCode` of a failed round (then no row counts).

    ``draft_us`` is the worker's own time for the round in microseconds, link excluded; it decides nothing.
    """

    session: int
    epoch: int
    anchor_position: int
    context_version: int
    prefix_digest: bytes
    status: int
    row_count: int
    reply_bytes: int
    reply_checksum: bytes
    draft_us: int = 0

    NAME: ClassVar[str] = "COMPLETION"
    TYPE: ClassVar[MessageType] = MessageType.COMPLETION
    LAYOUT: ClassVar[tuple[Field, ...]] = (
        _SESSION,
        _EPOCH,
        UInt("anchor_position", POSITION_MAX),
        UInt("context_version", U32_MAX),
        _DIGEST,
        UInt("status", U8_MAX),
        UInt("row_count", DEPTH_MAX),
        UInt("reply_bytes", U32_MAX),
        fixed_bin("reply_checksum", BODY_CHECKSUM_BYTES),
        UInt("draft_us", U32_MAX),
    )


@compiled
@dataclass(frozen=True, slots=True)
class Commit(Message):
    """What survived of the prefix's round, when no STEP follows that could carry it.

    ``position`` is where ``token`` (correction or bonus) stands; ``prefix_digest`` covers all positions
    before it.
    """

    session: int
    accepted_count: int
    token: int
    position: int
    prefix_digest: bytes

    NAME: ClassVar[str] = "COMMIT"
    TYPE: ClassVar[MessageType] = MessageType.COMMIT
    LAYOUT: ClassVar[tuple[Field, ...]] = (
        _SESSION,
        UInt("accepted_count", DEPTH_MAX),
        UInt("token", VOCAB_MAX),
        UInt("position", POSITION_MAX),
        _DIGEST,
    )


@compiled
@dataclass(frozen=True, slots=True)
class Reset(Message):
    """The prefix's generation replaces the old one, whose every state is dead. Context restarts empty."""

    session: int
    cause: Cause
    context_start: int = 0
    start_digest: bytes = EMPTY_DIGEST

    NAME: ClassVar[str] = "RESET"
    TYPE: ClassVar[MessageType] = MessageType.RESET
    LAYOUT: ClassVar[tuple[Field, ...]] = (
        _SESSION,
        _CAUSE,
        UInt("context_start", POSITION_MAX),
        fixed_bin("start_digest", DIGEST_BYTES),
    )


@compiled
@dataclass(frozen=True, slots=True)
class Cancel(Message):
    """As RESET, but the slot stays dormant until a RESET follows."""

    session: int
    cause: Cause

    NAME: ClassVar[str] = "CANCEL"
    TYPE: ClassVar[MessageType] = MessageType.CANCEL
    LAYOUT: ClassVar[tuple[Field, ...]] = (_SESSION, _CAUSE)


@compiled
@dataclass(frozen=True, slots=True)
class Close(Message):
    """Ends the session's lease on the slot."""

    session: int
    cause: Cause

    NAME: ClassVar[str] = "CLOSE"
    TYPE: ClassVar[MessageType] = MessageType.CLOSE
    LAYOUT: ClassVar[tuple[Field, ...]] = (_SESSION, _CAUSE)


@compiled
@dataclass(frozen=True, slots=True)
class Ping(Message):
    """Heartbeat; ``epoch`` is the sender's."""

    epoch: int
    nonce: int

    NAME: ClassVar[str] = "PING"
    TYPE: ClassVar[MessageType] = MessageType.PING
    LAYOUT: ClassVar[tuple[Field, ...]] = (_EPOCH, UInt("nonce", U64_MAX))


@compiled
@dataclass(frozen=True, slots=True)
class Pong(Message):
    """Answer to PING, or with nonce 0 a credit update. ``credit_limit`` counts context rows since ACCEPT."""

    epoch: int
    nonce: int
    load_permille: int
    credit_limit: int

    NAME: ClassVar[str] = "PONG"
    TYPE: ClassVar[MessageType] = MessageType.PONG
    LAYOUT: ClassVar[tuple[Field, ...]] = (
        _EPOCH,
        UInt("nonce", U64_MAX),
        UInt("load_permille", 1000),
        UInt("credit_limit", U64_MAX),
    )


@dataclass(frozen=True, slots=True)
class Drain(Message):
    """The worker takes no new session and means to leave within ``deadline_ms``."""

    epoch: int
    deadline_ms: int

    NAME: ClassVar[str] = "DRAIN"
    TYPE: ClassVar[MessageType] = MessageType.DRAIN
    LAYOUT: ClassVar[tuple[Field, ...]] = (_EPOCH, UInt("deadline_ms", DEADLINE_MS_MAX, DEADLINE_MS_MIN))


@dataclass(frozen=True, slots=True)
class ErrorMessage(Message):
    """A refusal. ``where`` is constant text; the offending key is in the prefix."""

    code: ErrorCode
    scope: Scope
    session: int
    where: str

    NAME: ClassVar[str] = "ERROR"
    TYPE: ClassVar[MessageType] = MessageType.ERROR
    LAYOUT: ClassVar[tuple[Field, ...]] = (
        enum_field("code", ErrorCode),
        enum_field("scope", Scope),
        _SESSION,
        Text("where"),
    )


@dataclass(frozen=True, slots=True)
class StatsCounter(Record):
    """How often the worker dropped or refused for ``code``."""

    code: ErrorCode
    count: int

    NAME: ClassVar[str] = "STATS.counter"
    LAYOUT: ClassVar[tuple[Field, ...]] = (enum_field("code", ErrorCode), UInt("count", U64_MAX))


@dataclass(frozen=True, slots=True)
class Stats(Message):
    """Request (``is_report`` 0, all else zero) or report of what the worker holds for this connection."""

    epoch: int
    is_report: int = 0
    slots_open: int = 0
    rounds_unresolved: int = 0
    replies_cached: int = 0
    credit_outstanding_rows: int = 0
    counters: tuple[StatsCounter, ...] = ()

    NAME: ClassVar[str] = "STATS"
    TYPE: ClassVar[MessageType] = MessageType.STATS
    LAYOUT: ClassVar[tuple[Field, ...]] = (
        _EPOCH,
        UInt("is_report", 1),
        UInt("slots_open", SLOTS_MAX),
        UInt("rounds_unresolved", SLOTS_MAX),
        UInt("replies_cached", SLOTS_MAX),
        UInt("credit_outstanding_rows", U64_MAX),
        Records("counters", StatsCounter, STATS_COUNTERS_MAX),
    )
