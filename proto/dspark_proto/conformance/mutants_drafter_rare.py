"""Drafters whose one bug shows in a rare situation only: the third round, the hundredth RESET, a second support.

They vouch for the cases that play a right conversation, which every broken drafter fails and few specific ones do.
Called by `mutants_drafter`; as there, everything but the bug is honest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..canonical import encode_canonical
from ..frame import Frame, encode_frame
from ..hello import Accept
from ..messages import Completion, Context, ErrorMessage, Open, Pong, Row
from ..prefix import Key
from ..registry import ErrorCode, MessageType, Representation, Scope, SupportPolicy
from . import repairs
from .blocks import Block
from .facts import drafter_parameters, reference_facts
from .filters import again, fields, items, on, sealing, slot_of
from .forge import changed, field_of, with_control
from .mutants import Filter, Shell
from .reference_drafter import ReferenceDrafter

FRAMES_AT_ONCE = 4
"""What the mutant with a small read buffer takes in one turn."""


def _ring(shell: Shell, frame: Frame) -> bytes | None:
    """From the third round of a generation on, COMPLETION names the position of the round before."""
    done = frame.message
    assert isinstance(done, Completion)
    rounds = shell.memory.setdefault((frame.prefix.slot, frame.prefix.generation), {})
    rounds[frame.prefix.round] = done.anchor_position
    before = sorted(position for number, position in rounds.items() if number < frame.prefix.round)
    return again(frame, changed(done, anchor_position=before[-1])) if len(before) > 1 else None


def _no_early_retry(shell: Shell, raw: bytes) -> list[bytes]:
    """The same STEP again before the reply is refused."""
    if raw[6:7] != b"\x12" or not repairs.sound(raw):
        return [raw]
    slot, key = slot_of(shell, field_of(raw, "slot")), repairs.key_of(raw)
    if slot is None or slot.state.value != "awaiting" or (slot.generation, slot.round) != (key.generation, key.round):
        return [raw]
    shell.inject.append(bytes(encode_frame(ErrorMessage(ErrorCode.ROUND_UNRESOLVED, Scope.ROUND, 0, "STEP"), key)))
    return []


def _first_of_many(shell: Shell, raw: bytes) -> list[bytes]:
    """A STEP with more items than allowed is taken for its first one."""
    values = repairs.values_of(raw) if repairs.sound(raw) and raw[6] == MessageType.STEP else None
    if values is None or not isinstance(values[0], list) or len(values[0]) <= 32:
        return [raw]
    first = values[0][0]
    cut = with_control(raw, encode_canonical([[first], *values[1:]]))
    return [repairs.with_key(cut, Key(first[1], first[2], first[3]))]


def _few(kind: MessageType, most: int) -> Filter:
    """Frames of ``kind`` are heard ``most`` times for each slot and connection."""

    def passed(shell: Shell, raw: bytes) -> list[bytes]:
        if raw[6:7] == b"\x01":
            shell.memory.clear()
        if not repairs.sound(raw) or raw[6] != kind:
            return [raw]
        slot = field_of(raw, "slot")
        shell.memory[slot] = shell.memory.get(slot, 0) + 1
        return [raw] if shell.memory[slot] <= most else []

    return passed


def _pong_for_pong(shell: Shell, frame: Frame) -> None:
    pong = frame.message
    assert isinstance(pong, Pong)
    shell.inject.append(bytes(encode_frame(pong)))


def _first_support(shell: Shell, message: Open) -> dict[str, Any]:
    """Every slot has the support of the first one that was opened."""
    known: SupportPolicy = shell.memory.setdefault("support", message.support)
    return {"support": known} if known is not message.support else {}


def _sparse_instead(shell: Shell, opened: Open) -> dict[str, Any]:
    """Dense rows without the capability are sent as sparse ones."""
    agreed = shell.inner.connection.negotiated.dense_rows
    return {"support": SupportPolicy.K32} if opened.support is SupportPolicy.DENSE and not agreed else {}


def _one_more(block: Block) -> None:
    """A dense row has a count too many."""
    if block.layout.support == 0:
        block.set_count(0, 0, block.count(0, 0) + 1)


def _called_sparse(shell: Shell, row: Row) -> dict[str, Any]:
    return {"representation": Representation.SPARSE} if row.support == 0 else {}


def _sparse_bytes(shell: Shell, accept: Accept) -> dict[str, Any]:
    return {"reply_bytes": accept.max_depth * (16 + 8 * accept.max_support)} if accept.capabilities else {}


def _counts_refused(shell: Shell, frame: Frame) -> None:
    """Rows that do not continue the context are lost for the credit."""
    context, slot = frame.message, slot_of(shell, frame.prefix.slot)
    assert isinstance(context, Context)
    if slot is not None and context.first_position != slot.context_end:
        shell.memory["lost"] = shell.memory.get("lost", 0) + context.rows


def _less_credit(shell: Shell, pong: Pong) -> dict[str, Any]:
    return {"credit_limit": pong.credit_limit - shell.memory.get("lost", 0)}


INCOMING: tuple[tuple[str, str, Filter], ...] = (
    ("accepts-four", "counts five accepted drafts as four", items(lambda s, i: {"accepted_count": _at_most_four(i)})),
    ("no-early-retry", "refuses a retry that comes before the reply", _no_early_retry),
    ("first-of-many", "takes the first item of a STEP that is too long", _first_of_many),
    ("64-resets", "does not hear more than 64 RESETs of a slot", _few(MessageType.RESET, 64)),
    ("used-up-slots", "does not open a slot for the fourth time", _few(MessageType.OPEN, 3)),
    ("pong-for-pong", "answers PONG with PONG", on(Pong, _pong_for_pong)),
    ("one-support", "has one support for all slots", fields(Open, _first_support)),
    ("dense-unasked", "opens dense rows that were not agreed on", fields(Open, _sparse_instead)),
)

OUTGOING: tuple[tuple[str, str, Filter], ...] = (
    ("third-position", "names an older position from the third round on", on(Completion, _ring)),
    ("dense-sum", "sends dense rows that total too much", sealing(_one_more)),
    ("dense-named", "calls dense rows sparse", fields(Row, _called_sparse)),
    ("dense-bytes", "has sparse reply bytes for dense rows", fields(Accept, _sparse_bytes)),
    ("dense-always", "claims dense rows that were not asked for", fields(Accept, lambda s, m: {"capabilities": 1})),
    ("compat-hash", "echoes another compatibility hash", fields(Accept, lambda s, m: {"compat_hash": bytes(32)})),
)


def forgetful() -> Shell:
    """Forgets the credit of refused rows."""
    honest = ReferenceDrafter(drafter_parameters(reference_facts()))
    return Shell(honest, on(Context, _counts_refused), fields(Pong, _less_credit))


def _at_most_four(item: Any) -> int:
    count: int = item.accepted_count
    return 4 if count == 5 else count


class SmallBuffer(Shell):
    """What arrives beyond ``room`` frames in one turn is lost."""

    def __init__(self, make: Callable[[], Any], room: int = FRAMES_AT_ONCE) -> None:
        super().__init__(make(), self._counted)
        self._room = room
        self._taken = 0

    def _counted(self, shell: Shell, raw: bytes) -> list[bytes]:
        self._taken += 1
        return [raw] if self._taken <= self._room else []

    def expire(self, now_ns: int) -> list[bytes]:
        """See `PeerMachine`."""
        self._taken = 0
        return super().expire(now_ns)
