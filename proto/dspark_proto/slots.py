"""The slot ledger: which session, generation and round each slot is in, and the rules a STEP must meet.

Both sides keep the same ledger and apply the same checks; the verifier reports a broken rule as local misuse,
the drafter as the peer's fault. Invariants: a slot's generation never decreases while the connection object
lives, a round is used at most once per generation, and context rows are contiguous. Spec: SPEC.md, sections
"STEP" and "Generations". Called by ``verifier`` and ``drafter``; sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .buffers import Buffer
from .digest import EMPTY_DIGEST
from .errors import LocalProtocolError
from .expected_rows import ExpectedRows
from .limits import GENERATION_MAX, NO_COMMIT
from .messages import StepItem
from .negotiation import Negotiated
from .prefix import Key, make_key
from .registry import ErrorCode, Lane, SupportPolicy
from .reply_frames import ReplyFrames
from .staging import Lease
from .states import SLOT, SlotState

_REFUSED_IN: dict[SlotState, ErrorCode] = {
    SlotState.FREE: ErrorCode.SLOT_NOT_OPEN,
    SlotState.READY: ErrorCode.SLOT_BUSY,
    SlotState.AWAITING: ErrorCode.ROUND_UNRESOLVED,
    SlotState.DORMANT: ErrorCode.SLOT_NEEDS_RESET,
}


def require(condition: bool, code: ErrorCode, where: str, remedy: str = "") -> None:
    """Raise :class:`LocalProtocolError` unless ``condition`` holds."""
    if not condition:
        raise LocalProtocolError(code, where, remedy)


@dataclass(slots=True, eq=False)
class Slot:
    """One slot, as both sides know it. ``round`` is the last round used in this generation, -1 for none.

    ``item`` is the last STEP item; ``replied`` says that its round ended with a valid reply, ``committed``
    that its outcome was reported. ``context_end`` is the first position whose taps have not been sent.
    """

    index: int
    state: SlotState = SlotState.FREE
    session: int = 0
    generation: int = 0
    opened_generation: int = 0
    support: SupportPolicy = SupportPolicy.K1
    lane: Lane = Lane.GREEDY
    context_start: int = 0
    context_end: int = 0
    round: int = -1
    item: StepItem | None = None
    tap_checksum: bytes = b""
    replied: bool = False
    committed: bool = False

    def move(self, action: str, where: str) -> None:
        """Apply ``action``; a missing table entry is the protocol error."""
        following = SLOT[self.state].get(action)
        if following is None:
            raise LocalProtocolError(_REFUSED_IN[self.state], where, f"the slot is {self.state.value}")
        self.state = following

    @property
    def key(self) -> Key:
        """Key of the round in flight, or of the last one."""
        return make_key(self.index, self.generation, self.round if self.round > 0 else 0)

    @property
    def reset_count(self) -> int:
        """Generations since OPEN: the generation field of the random number key."""
        return self.generation - self.opened_generation

    def next_generation(self) -> int:
        """The generation that follows. Raises GENERATION_EXHAUSTED at the limit."""
        require(self.generation < GENERATION_MAX, ErrorCode.GENERATION_EXHAUSTED, "slot", "reconnect")
        return self.generation + 1

    def begin(self, generation: int, context_start: int) -> None:
        """Forget every state of older generations."""
        self.generation = generation
        self.context_start = self.context_end = context_start
        self.round, self.item, self.tap_checksum = -1, None, b""
        self.replied = self.committed = False

    def start_round(self, item: StepItem, tap_checksum: bytes) -> None:
        """``item`` has passed :func:`check_step`: its round is now unresolved."""
        self.move("step", "STEP")
        self.round, self.item, self.tap_checksum = item.round, item, tap_checksum
        self.context_end = item.anchor_position
        self.replied = self.committed = False

    def is_retry(self, item: StepItem, tap_checksum: bytes) -> bool:
        """Whether ``item`` repeats the last STEP item, taps included."""
        return self.item == item and self.tap_checksum == tap_checksum


@dataclass(slots=True, eq=False)
class VerifierSlot(Slot):
    """Spark side: the lease and deadline of the unresolved round. ``expired`` is the last timed-out key.

    ``expected`` has the ROWs of the last round's layout; ``rows_sound`` of those received have been found sound in
    the block.
    """

    lease: Lease | None = None
    expected: ExpectedRows | None = field(default=None, repr=False)
    rows_received: int = 0
    rows_sound: int = 0
    deadline_ns: int = 0
    expired: Key | None = None


@dataclass(slots=True, eq=False)
class DrafterSlot(Slot):
    """Worker side: what is known of the tokens, and the preallocated reply frames.

    ``digest`` covers the positions before ``context_end`` (None when the tokens are unknown),
    ``known_tokens`` are the committed tokens from there on, ``drafted`` the tokens of the last reply.
    ``reply_storage`` holds the frames of the last reply; ``reply_rows`` has the ROW frames of each depth that was asked
    for, to be filled again, and ``stored_rows`` those that are in the storage now.
    """

    digest: bytes | None = EMPTY_DIGEST
    known_tokens: tuple[int, ...] = ()
    drafted: tuple[int, ...] = ()
    reply_storage: memoryview = field(default=memoryview(b""), repr=False)
    reply_rows: dict[int, ReplyFrames] = field(default_factory=dict, repr=False)
    stored_rows: ReplyFrames | None = field(default=None, repr=False)
    reply_frames: tuple[memoryview, ...] = ()


def check_session(slot: Slot, session: int, where: str) -> None:
    """The message's session owns the slot."""
    if slot.state is SlotState.FREE:
        raise LocalProtocolError(ErrorCode.SLOT_NOT_OPEN, f"{where}.slot", "open it first")
    if slot.session != session:
        raise LocalProtocolError(ErrorCode.WRONG_SESSION, f"{where}.session", "another session owns the slot")


def check_owner(slot: Slot, session: int, generation: int, where: str) -> None:
    """The message belongs to the slot's session and current generation."""
    if slot.state is SlotState.FREE or slot.session != session:
        check_session(slot, session, where)
    if slot.generation != generation:
        raise LocalProtocolError(ErrorCode.STALE_GENERATION, f"{where}.generation", "use generation(slot)")
    if slot.state is SlotState.DORMANT:
        raise LocalProtocolError(ErrorCode.SLOT_NEEDS_RESET, f"{where}.slot", "reset the slot")


def check_context(slot: Slot, first_position: int) -> None:
    """CONTEXT rows continue the context, and no round is unresolved."""
    require(slot.state is SlotState.READY, ErrorCode.ROUND_UNRESOLVED, "CONTEXT.slot", "wait for the reply")
    require(
        first_position == slot.context_end,
        ErrorCode.CONTEXT_GAP,
        "CONTEXT.first_position",
        "start at its end",
    )


def check_step(slot: Slot, item: StepItem, terms: Negotiated) -> None:
    """Everything a new STEP item must meet; its owner has been checked.

    Raises :class:`LocalProtocolError` with the code of the first broken rule.
    """
    if item.round <= slot.round:
        raise LocalProtocolError(ErrorCode.STALE_ROUND, "STEP.round", "use a round above the last one")
    if slot.state is not SlotState.READY:
        raise LocalProtocolError(ErrorCode.ROUND_UNRESOLVED, "STEP.slot", "wait for the reply")
    if item.depth > terms.max_depth:
        raise LocalProtocolError(ErrorCode.DEPTH_OUT_OF_RANGE, "STEP.depth", "use the negotiated maximum")
    if item.lane is not slot.lane:
        raise LocalProtocolError(ErrorCode.LANE_MISMATCH, "STEP.lane", "use the lane of OPEN")
    if item.anchor_token >= terms.vocab_size:
        raise LocalProtocolError(ErrorCode.TOKEN_OUT_OF_RANGE, "STEP.anchor_token")
    if item.commit_token >= terms.vocab_size:
        raise LocalProtocolError(ErrorCode.TOKEN_OUT_OF_RANGE, "STEP.commit_token")
    if item.tap_first != slot.context_end:
        raise LocalProtocolError(ErrorCode.CONTEXT_GAP, "STEP.tap_first", "start at the context's end")
    if item.anchor_position != item.tap_first + item.tap_rows:
        raise LocalProtocolError(ErrorCode.ANCHOR_MISMATCH, "STEP.anchor_position", "it follows the taps")
    if item.accepted_count != NO_COMMIT:
        check_commit(slot, item.accepted_count, item.commit_token, item)


def check_commit(slot: Slot, accepted_count: int, token: int, following: StepItem | None) -> None:
    """A commit reports the last replied round once, and agrees with the STEP that carries it."""
    where = "COMMIT" if following is None else "STEP"
    last = slot.item
    if last is None or not slot.replied or slot.committed:
        raise LocalProtocolError(ErrorCode.COMMIT_MISMATCH, f"{where}.accepted_count", "no round awaits a commit")
    if accepted_count > last.depth:
        raise LocalProtocolError(ErrorCode.COMMIT_MISMATCH, f"{where}.accepted_count", "more than the depth")
    if following is not None:
        position = last.anchor_position + accepted_count + 1
        ahead = following.anchor_position - position
        if ahead < 0 or (ahead == 0 and following.anchor_token != token):
            raise LocalProtocolError(
                ErrorCode.COMMIT_MISMATCH, "STEP.anchor_position", "the anchor follows what was committed"
            )


def check_taps(taps: Buffer, rows: int, terms: Negotiated, where: str) -> None:
    """``taps`` holds exactly ``rows`` rows."""
    expected = rows * terms.tap_row_bytes
    if len(taps) != expected:
        raise LocalProtocolError(ErrorCode.WRONG_SIZE, f"{where}.taps", f"{rows} rows are {expected} bytes")
