"""Drafters with one bug each. Called by `mutants`.

Besides those that overlook faults (`mutants_drafter_in`): outgoing filters that answer wrongly, and reference
drafters with one method replaced. Invariant: each leaves everything else honest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..bodies import describe
from ..buffers import aligned
from ..frame import Frame, encode_frame
from ..hello import Accept, Reject
from ..messages import Completion, ErrorMessage, Pong, Row, Stats, StepItem
from ..prefix import Key
from ..registry import ErrorCode, MessageType, Scope
from ..rows import ReplyLayout
from . import mutants_drafter_auth, mutants_drafter_rare, mutants_drafter_silence, mutants_drafter_version
from .drafted_rows import one_hot, pack
from .facts import drafter_parameters, reference_facts
from .filters import VOCAB_SIZE, again, block_filter, counted_as, fields, on, read, sealing
from .mutants import Filter, Mutant, Shell
from .mutants_drafter_in import INCOMING
from .record import Role
from .reference_drafter import ReferenceDrafter

E = ErrorCode


def reference() -> ReferenceDrafter:
    """An honest drafter."""
    return ReferenceDrafter(drafter_parameters(reference_facts()))


def _second_reply(shell: Shell, raw: bytes) -> list[bytes]:
    """A retry is drafted again: other rows under the same key."""
    frame = read(raw)
    if frame is None or not isinstance(frame.message, Row):
        return block_filter(lambda block, layout: None)(shell, raw) if "block" in shell.memory else [raw]
    seen = shell.memory.setdefault("seen", set())
    if frame.prefix.key not in seen:
        seen.add(frame.prefix.key)
        return [raw]
    depth, support = frame.message.depth, frame.message.support
    packed = pack([one_hot(500)] * depth, support, VOCAB_SIZE)

    def redraw(block: Any) -> None:
        for row in range(depth):
            block.token(row, packed.tokens[row])
            block.entries(row, 1)
        block.data[block.layout.ids_offset :] = packed.ids + packed.q

    return sealing(redraw)(shell, raw)


def _epoch_once(shell: Shell, accept: Accept) -> dict[str, Any]:
    shell.memory["hellos"] = shell.memory.get("hellos", 0) + 1
    return {"epoch": accept.epoch + shell.memory["hellos"]} if shell.memory["hellos"] > 1 else {}


def _reversed_pongs(shell: Shell, frame: Frame) -> list[bytes]:
    """The 5th PONG overtakes."""
    held = shell.memory.setdefault("held", [])
    count = shell.memory["count"] = shell.memory.get("count", 0) + 1
    if count % 8 == 5:
        held.append(again(frame))
        return []
    out = [again(frame), *held]
    held.clear()
    return out


def _cut_rows(shell: Shell, frame: Frame) -> list[bytes] | None:
    """One or several ROWs, depending on the first token: lengths tell what was drafted."""
    row = frame.message
    assert isinstance(row, Row)
    if int.from_bytes(bytes(frame.bodies[0][:4]), "little") % 2 or row.depth < 2:
        return None
    layout = ReplyLayout(row.depth, row.support, 1000)
    data = b"".join(bytes(body) for body in frame.bodies)
    frames = []
    for index in range(layout.depth):
        parts = [data[start : start + length] for start, length in layout.spans(index, 1)]
        described = tuple(
            describe(old.kind, old.dtype, 1, old.entries, part, old.checksum_kind)
            for old, part in zip(row.bodies, parts, strict=True)
        )
        one = replace(row, first_row=index, row_count=1, bodies=described)
        frames.append(bytes(encode_frame(one, frame.prefix.key, parts)))
    return frames


def _late_completion(shell: Shell, raw: bytes) -> list[bytes]:
    """COMPLETION goes out before its ROW."""
    if raw[6] == MessageType.ROW:
        shell.memory["row"] = raw
        return []
    if raw[6] == MessageType.COMPLETION and "row" in shell.memory:
        return [raw, shell.memory.pop("row")]
    return [raw]


def _stats(**values: Any) -> Filter:
    return fields(Stats, lambda shell, stats: values)


def _shown_value(shell: Shell, error: ErrorMessage) -> dict[str, Any]:
    return {"where": f"session {shell.memory.get('session')}"}


def _keep_accept(shell: Shell, frame: Frame) -> None:
    """For the mutant that answers every HELLO like the first."""
    shell.memory["accept"] = frame.message


def _keep_session(shell: Shell, raw: bytes) -> list[bytes]:
    """For the mutant that repeats received values in ERROR."""
    frame = read(raw)
    shell.memory["session"] = getattr(frame.message, "session", 0) if frame is not None else 0
    return [raw]


class _Undue(ReferenceDrafter):
    """Draws, rows and laws that depend on what they must not depend on."""

    kind = ""

    def _row(self, item: StepItem, policy: Any, index: int) -> Any:
        if self.kind == "generation":
            return super()._row(item, replace(policy, choice=policy.choice + item.generation % 2**20), index)
        if self.kind == "choice":
            return super()._row(item, replace(policy, choice=0), index)
        if self.kind == "slot":
            return super()._row(item, replace(policy, choice=policy.choice + item.slot), index)
        if self.kind == "round":
            return super()._row(replace(item, round=1), policy, index)
        if self.kind == "law":
            return super()._row(replace(item, anchor_token=(item.anchor_token + policy.seed) % 899), policy, index)
        if self.kind == "hot":
            return super()._row(item, replace(policy, one_hot=False), index)
        return super()._row(item, policy, index)


def _undue(kind: str) -> ReferenceDrafter:
    made = type("Undue", (_Undue,), {"kind": kind})(drafter_parameters(reference_facts()))
    assert isinstance(made, ReferenceDrafter)
    return made


class _Patched(ReferenceDrafter):
    """`expire` never or too early, digests that nobody checks."""

    def __init__(self, no_digest: bool = False, silence: float = 1.0) -> None:
        super().__init__(drafter_parameters(reference_facts()))
        self._silence = silence
        if no_digest:
            self.connection._check_digest = lambda *_: None  # type: ignore[method-assign]

    def expire(self, now_ns: int) -> list[bytes]:
        heard = self.connection._heard_ns
        return super().expire(heard + int((now_ns - heard) * self._silence))


_SHARED: list[ReferenceDrafter] = []


def _one_for_all() -> ReferenceDrafter:
    """One state for all connections that begin while the last one is young; a new case begins with a new clock."""
    if not _SHARED or _SHARED[-1].connection._heard_ns != 0 or len(_SHARED) > 1:
        _SHARED[:] = [reference()]
        return _SHARED[-1]
    _SHARED.append(_SHARED[-1])
    return _SHARED[-1]


_OUTGOING: tuple[tuple[str, str, Filter], ...] = (
    (
        "small-nonce",
        "answers small nonces with the next",
        fields(Pong, lambda s, m: {"nonce": m.nonce + 1} if 0 < m.nonce < 100 else {}),
    ),
    (
        "wrong-nonce",
        "answers PING with the next nonce",
        fields(Pong, lambda s, m: {"nonce": (m.nonce + 1) % 2**64} if m.nonce else {}),
    ),
    (
        "nonce-32",
        "cuts nonces to 32 bits",
        fields(Pong, lambda s, m: {"nonce": m.nonce % 2**32 or 1} if m.nonce else {}),
    ),
    ("pong-epoch", "names the verifier's epoch in PONG", fields(Pong, lambda s, m: {"epoch": m.epoch ^ 1})),
    ("pongs-overtake", "answers PINGs out of order", on(Pong, _reversed_pongs)),
    ("no-credit", "never grants credit", fields(Pong, lambda s, m: {"credit_limit": min(m.credit_limit, 8)})),
    ("wrong-serial", "echoes another serial", fields(Accept, lambda s, m: {"serial": m.serial + 1})),
    ("new-epochs", "has a new epoch with each HELLO", fields(Accept, _epoch_once)),
    ("eager-capabilities", "claims unknown capabilities", fields(Accept, lambda s, m: {"capabilities": 2**40})),
    ("no-tap-bytes", "names other tap row bytes", fields(Accept, lambda s, m: {"tap_row_bytes": m.tap_row_bytes + 1})),
    (
        "padded-tap-bytes",
        "names padded tap row bytes for CRC32C",
        fields(Accept, lambda s, m: {"tap_row_bytes": aligned(m.tap_row_bytes)} if m.checksum_kind == 1 else {}),
    ),
    ("nameless-reject", "names no field when it rejects", fields(Reject, lambda s, m: {"field": ""})),
    ("one-sided-reject", "shows its own value twice", fields(Reject, lambda s, m: {"verifier_value": m.drafter_value})),
    ("always-incompatible", "has one code for every REJECT", fields(Reject, lambda s, m: {"code": E.INCOMPATIBLE})),
    (
        "accept-late",
        "says ERROR instead of REJECT",
        on(Reject, lambda s, f: bytes(encode_frame(ErrorMessage(E.INCOMPATIBLE, Scope.CONNECTION, 0, "HELLO")))),
    ),
    ("redraws", "drafts again on a retry", _second_reply),
    ("completion-first", "sends COMPLETION before ROW", _late_completion),
    (
        "completion-position",
        "names another position",
        fields(Completion, lambda s, m: {"anchor_position": m.anchor_position + 1}),
    ),
    (
        "completion-bytes",
        "names other reply bytes",
        fields(Completion, lambda s, m: {"reply_bytes": m.reply_bytes + 4}),
    ),
    ("completion-epoch", "names the verifier's epoch", fields(Completion, lambda s, m: {"epoch": m.epoch ^ 1})),
    ("row-session", "cuts sessions to 32 bits", fields(Row, lambda s, m: {"session": m.session % 2**32})),
    ("row-not-dyadic", "sends rows that total 2^24 - 1", sealing(lambda b: b.set_count(0, 0, b.count(0, 0) - 1))),
    ("row-crc", "sends wrong row crcs", block_filter(lambda block, layout: block.__setitem__(8, block[8] ^ 1))),
    (
        "row-minus-zero",
        "pads with -0.0",
        sealing(lambda b: b.set_word(0, 15, 1 << 31) if b.layout.support > 15 else None),
    ),
    ("telling-lengths", "cuts replies by their contents", on(Row, _cut_rows)),
    ("telling-errors", "puts received bytes into ERROR", fields(ErrorMessage, _shown_value)),
    ("narrow-errors", "ends the frame only", fields(ErrorMessage, lambda s, m: {"scope": Scope.FRAME})),
    (
        "no-errors",
        "never sends ERROR for a slot",
        on(ErrorMessage, lambda s, f: [] if f.prefix.slot < 2**32 - 1 else None),
    ),
    ("errors-without-key", "sends ERROR without a key", on(ErrorMessage, lambda s, f: again(f, key=Key()))),
    ("stats-zero", "reports nothing", _stats(slots_open=0, replies_cached=0)),
    ("stats-stale", "reports a slot too many", fields(Stats, lambda s, m: {"slots_open": m.slots_open + 1})),
    ("noncanonical-as-field", "calls NONCANONICAL BAD_FIELD", counted_as(E.NONCANONICAL, E.BAD_FIELD)),
    ("descriptor-as-size", "calls BAD_DESCRIPTOR WRONG_SIZE", counted_as(E.BAD_DESCRIPTOR, E.WRONG_SIZE)),
    (
        "early-as-unexpected",
        "calls HELLO_REQUIRED UNEXPECTED_MESSAGE",
        counted_as(E.HELLO_REQUIRED, E.UNEXPECTED_MESSAGE),
    ),
    (
        "unexpected-as-required",
        "calls UNEXPECTED_MESSAGE HELLO_REQUIRED",
        counted_as(E.UNEXPECTED_MESSAGE, E.HELLO_REQUIRED),
    ),
    ("free-as-stale", "calls SLOT_NOT_OPEN STALE_GENERATION", counted_as(E.SLOT_NOT_OPEN, E.STALE_GENERATION)),
    ("credit-as-gap", "calls CREDIT_EXCEEDED CONTEXT_GAP", counted_as(E.CREDIT_EXCEEDED, E.CONTEXT_GAP)),
    ("epoch-as-session", "calls WRONG_EPOCH WRONG_SESSION", counted_as(E.WRONG_EPOCH, E.WRONG_SESSION)),
    ("duplicate-as-mismatch", "calls DUPLICATE COMMIT_MISMATCH", counted_as(E.DUPLICATE, E.COMMIT_MISMATCH)),
)


def _shelled(incoming: Filter | None = None, outgoing: Filter | None = None) -> Shell:
    return Shell(reference(), incoming, outgoing)


_REPLACED: tuple[tuple[str, str, Callable[[], Any]], ...] = (
    ("draws-by-generation", "draws by the absolute generation", partial(_undue, "generation")),
    ("draws-by-slot", "draws by the slot", partial(_undue, "slot")),
    ("draws-without-choice", "draws the same for every choice", partial(_undue, "choice")),
    ("draws-without-round", "draws the same in every round", partial(_undue, "round")),
    ("law-by-seed", "makes q by the seed", partial(_undue, "law")),
    ("never-one-hot", "sends full rows always", partial(_undue, "hot")),
    ("no-digest", "does not check digests", partial(_Patched, no_digest=True)),
    ("never-expires", "keeps the slots of the dead", partial(_Patched, silence=0.0)),
    ("expires-early", "gives a busy verifier up", partial(_Patched, silence=5.0)),
    ("expires-after-48", "gives a verifier up after 48 intervals", partial(_Patched, silence=1.25)),
    ("expires-after-75", "gives a verifier up after 75 intervals", partial(_Patched, silence=0.8)),
    ("small-buffer", "loses frames that arrive at once", partial(mutants_drafter_rare.SmallBuffer, reference)),
    ("one-state", "has one state for all connections", _one_for_all),
    ("refused-credit", "forgets the credit of refused rows", mutants_drafter_rare.forgetful),
)


def drafter_mutants() -> list[Mutant]:
    """All of them."""
    both = {"remembers": on(Accept, _keep_accept)}
    found = [
        Mutant(f"drafter-{name}", Role.DRAFTER, bug, partial(_shelled, incoming=change, outgoing=both.get(name)))
        for name, bug, change in (*INCOMING, *mutants_drafter_rare.INCOMING)
    ]
    found += [
        Mutant(f"drafter-{name}", Role.DRAFTER, bug, partial(_shelled, incoming=_keep_session, outgoing=change))
        for name, bug, change in (*_OUTGOING, *mutants_drafter_rare.OUTGOING)
    ]
    replaced = (*_REPLACED, *mutants_drafter_silence.KINDS, *mutants_drafter_version.KINDS)
    found += [Mutant(f"drafter-{name}", Role.DRAFTER, bug, make) for name, bug, make in replaced]
    secrets = mutants_drafter_auth.KINDS
    return found + [Mutant(f"drafter-{name}", Role.DRAFTER, bug, make, secret=True) for name, bug, make in secrets]
