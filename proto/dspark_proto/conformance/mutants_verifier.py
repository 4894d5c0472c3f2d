"""Verifiers with one bug each. Called by `mutants`.

As in `mutants_drafter`: filters before and behind the reference verifier, and a few replaced methods.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..checksums import body_checksum
from ..events import ProposalReady
from ..frame import Frame, encode_frame
from ..hello import Accept, Hello, Reject
from ..limits import NO_COMMIT, SLOT_NONE
from ..messages import Completion, Drain, ErrorMessage, Open, Ping, Pong, Reset, Row, Step, StepItem
from ..negotiation import accept_message, negotiate
from ..prefix import Key
from ..registry import ErrorCode, Scope, SupportPolicy
from ..rows import ReplyLayout
from ..states import SlotState
from . import mutants_verifier_rare, mutants_verifier_terms, repairs
from .blocks import Block, layout_of
from .clock import NS_PER_MS
from .facts import reference_facts, verifier_parameters
from .filters import VOCAB_SIZE, again, fields, items, on, read
from .forge import changed, field_of
from .mutants import Filter, Mutant, Shell, repairing
from .record import Role
from .reference_verifier import ReferenceVerifier

E = ErrorCode


def reference() -> ReferenceVerifier:
    """An honest verifier."""
    return ReferenceVerifier(verifier_parameters(reference_facts()))


def _next_step(item: StepItem) -> bytes:
    """The round after ``item``, at the same anchor and without a commit."""
    second = replace(
        item, round=item.round + 1, tap_first=item.anchor_position, tap_rows=0, taps=b"", accepted_count=NO_COMMIT
    )
    return bytes(encode_frame(Step((second,), ()), Key(item.slot, item.generation, second.round)))


class _Careless(ReferenceVerifier):
    """One method replaced."""

    kind = ""

    def __init__(self) -> None:
        super().__init__(verifier_parameters(reference_facts()))
        self.checks_rows = self.kind != "rows"
        self._hurried: set[Key] = set()
        if self.kind == "lease":
            self.connection._drop_lease = lambda slot: None  # type: ignore[method-assign]

    def expire(self, now_ns: int) -> list[bytes]:
        if self.kind == "deadlines":
            return []
        hasty = self._hurry(now_ns) if self.kind == "impatient" else []
        return hasty + super().expire(now_ns)

    def _hurry(self, now_ns: int) -> list[bytes]:
        """Another STEP for each round that has been unresolved for a third of its deadline, without a new deadline."""
        frames = []
        for slot in self.connection._slots:
            if slot.state is SlotState.AWAITING and slot.item is not None and slot.key not in self._hurried:
                terms = self.connection.negotiated
                assert terms is not None
                if slot.deadline_ns - now_ns < terms.step_deadline_ms * NS_PER_MS * 2 // 3:
                    self._hurried.add(slot.key)
                    frames.append(_next_step(slot.item))
        return frames

    def _judge(self, proposal: ProposalReady) -> None:
        if self.kind == "release":
            proposal.lease.retain()
        super()._judge(proposal)

    def start(self, now_ns: int) -> list[bytes]:
        if self.kind == "generations":
            first = self.connection._serial
            fresh = ReferenceVerifier(verifier_parameters(reference_facts()))
            self.connection, self._sessions = fresh.connection, []
            self.connection._serial = first
        return super().start(now_ns)


def _kind(name: str) -> ReferenceVerifier:
    made = type("Careless", (_Careless,), {"kind": name})()
    assert isinstance(made, ReferenceVerifier)
    return made


def _flight(shell: Shell) -> dict[int, Any]:
    """Unresolved items by slot."""
    slots = shell.inner.connection._slots
    return {slot.index: slot.item for slot in slots if slot.state.value == "awaiting" and slot.item is not None}


def _item_of(shell: Shell, frame: Frame) -> Any:
    return _flight(shell).get(frame.prefix.slot)


def _rekeyed(shell: Shell, raw: bytes) -> list[bytes]:
    """Replies are matched by slot only."""
    if not repairs.sound(raw) or raw[6] not in (19, 20):
        return [raw]
    item = _flight(shell).get(field_of(raw, "slot"))
    return [raw] if item is None else [repairs.with_key(raw, Key(item.slot, item.generation, item.round))]


def _any_slot(shell: Shell, raw: bytes) -> list[bytes]:
    """Slots are taken modulo 4."""
    if not repairs.sound(raw) or raw[6] not in (19, 20) or not 4 <= field_of(raw, "slot") < SLOT_NONE:
        return [raw]
    item = _flight(shell).get(field_of(raw, "slot") % 4)
    return [raw] if item is None else [repairs.with_key(raw, Key(item.slot, item.generation, item.round))]


def _by_session(shell: Shell, raw: bytes) -> list[bytes]:
    """A reply without a slot is for the round of its session."""
    frame = read(raw)
    if frame is None or frame.prefix.slot != SLOT_NONE or not isinstance(frame.message, Row | Completion):
        return [raw]
    rounds = [item for item in _flight(shell).values() if item.session == frame.message.session]
    return [again(frame, key=Key(item.slot, item.generation, item.round)) for item in rounds] or [raw]


def _owner(shell: Shell, frame: Frame) -> bytes | None:
    """Epoch and session of replies are not compared."""
    terms, item = shell.inner.connection.negotiated, _item_of(shell, frame)
    if terms is None or item is None:
        return None
    return again(frame, changed(frame.message, epoch=terms.peer_epoch, session=item.session))


def _by_arrival(shell: Shell, raw: bytes) -> list[bytes]:
    """One reply at a time: the first ROW of another round is dropped until the reply under way is complete."""
    frame = read(raw)
    if frame is None or not isinstance(frame.message, Row | Completion):
        return [raw]
    item = _item_of(shell, frame)
    if item is None or Key(item.slot, item.generation, item.round) != frame.prefix.key:
        return [raw]
    under_way = shell.memory.get("reply")
    alive = {Key(one.slot, one.generation, one.round) for one in _flight(shell).values()}
    if isinstance(frame.message, Row) and under_way in alive and under_way != frame.prefix.key:
        return []
    shell.memory["reply"] = frame.prefix.key if isinstance(frame.message, Row) else None
    return [raw]


class _Together(Shell):
    """Only ROWs that arrive in the same turn as their COMPLETION are used."""

    def __init__(self) -> None:
        super().__init__(reference(), self._held)

    @staticmethod
    def _held(shell: Shell, raw: bytes) -> list[bytes]:
        frame = read(raw)
        if frame is not None and isinstance(frame.message, Row):
            shell.memory.setdefault("rows", []).append(raw)
            return []
        ends = frame is not None and isinstance(frame.message, Completion)
        return [*shell.memory.pop("rows", []), raw] if ends else [raw]

    def expire(self, now_ns: int) -> list[bytes]:
        self.memory.pop("rows", None)
        return super().expire(now_ns)


def _greedy() -> Shell:
    """Three sessions, and as many rounds in flight, whatever the drafter agreed to."""
    inner = reference()
    inner.session_count_wanted = 3
    return Shell(inner, fields(Accept, lambda s, m: {"max_in_flight": 4}))


def _stored(shell: Shell, raw: bytes) -> list[bytes]:
    """Remembers the ROWs of the round in flight, by key."""
    frame = read(raw)
    if frame is not None and isinstance(frame.message, Row):
        shell.memory.setdefault(frame.prefix.key, []).append(frame)
    return [raw]


def _recompleted(change: Callable[[Shell, Frame], dict[str, Any]]) -> Filter:
    """A COMPLETION whose fields are made to fit what came before it."""

    def edit(shell: Shell, frame: Frame) -> bytes | None:
        changes = change(shell, frame)
        return again(frame, replace(frame.message, **changes)) if changes else None  # type: ignore[type-var]

    def passed(shell: Shell, raw: bytes) -> list[bytes]:
        _stored(shell, raw)
        return on(Completion, edit)(shell, raw)

    return passed


def _echoes(shell: Shell, frame: Frame) -> dict[str, Any]:
    item = _item_of(shell, frame)
    if item is None:
        return {}
    return {
        "anchor_position": item.anchor_position,
        "context_version": item.context_version,
        "prefix_digest": item.prefix_digest,
    }


def _sizes(shell: Shell, frame: Frame) -> dict[str, Any]:
    rows = shell.memory.get(frame.prefix.key)
    if not rows or frame.message.status:  # type: ignore[attr-defined]
        return {}
    row = rows[0].message
    return {"row_count": row.depth, "reply_bytes": layout_of(row, VOCAB_SIZE).total_bytes}


def _checksum(shell: Shell, frame: Frame) -> dict[str, Any]:
    rows = shell.memory.get(frame.prefix.key)
    terms = shell.inner.connection.negotiated
    if not rows or terms is None or rows[0].message.row_count != rows[0].message.depth:
        return {}
    return {"reply_checksum": body_checksum(terms.checksum, b"".join(bytes(body) for body in rows[0].bodies))}


def _resealed(clamp: bool) -> Filter:
    """Row crcs, or (with ``clamp``) the ranges of records, are not checked."""

    def passed(shell: Shell, raw: bytes) -> list[bytes]:
        frame = read(raw)
        if frame is None or not isinstance(frame.message, Row | Completion):
            return [raw]
        if isinstance(frame.message, Completion):
            block = shell.memory.pop("block", None)
            terms = shell.inner.connection.negotiated
            if block is None or terms is None:
                return [raw]
            return [again(frame, replace(frame.message, reply_checksum=body_checksum(terms.checksum, bytes(block))))]
        row = frame.message
        if row.row_count != row.depth or row.support == 0:
            return [raw]
        layout = ReplyLayout(row.depth, row.support, 1000)
        data = bytearray(b"".join(bytes(body) for body in frame.bodies))
        if len(data) != layout.total_bytes:
            return [raw]
        before = bytes(data)
        block = Block(data, layout, 1000)
        if clamp:
            _clamp(block)
        block.seal()
        if bytes(data) == before:
            return [raw]
        shell.memory["block"] = data
        return [repairs.redescribed(again_with(frame, data, layout))]

    return passed


def again_with(frame: Frame, data: bytearray, layout: ReplyLayout) -> bytes:
    """The ROW with other bodies, descriptors left as they are."""
    parts = [bytes(data[start : start + length]) for start, length in layout.spans(0, layout.depth)]
    return bytes(encode_frame(frame.message, frame.prefix.key, parts))


def _clamp(block: Any) -> None:
    for row in range(block.layout.depth):
        start = row * 16
        token = int.from_bytes(block.data[start : start + 4], "little", signed=True)
        entries = int.from_bytes(block.data[start + 4 : start + 8], "little")
        confidence = int.from_bytes(block.data[start + 12 : start + 16], "little")
        used = [block.id(row, column) for column in range(min(2, block.layout.support))]
        block.token(row, token if 0 <= token < 1000 else used[0])
        block.entries(row, entries if 1 <= entries <= block.layout.support else len(used))
        block.confidence(row, min(confidence, 2**24))


def _sorted_rows(shell: Shell, raw: bytes) -> list[bytes]:
    """Rows are put into order before they are used; a missing one is not missed."""
    frame = read(raw)
    if frame is None:
        return [raw]
    if isinstance(frame.message, Row):
        shell.memory.setdefault("rows", []).append((frame.message.first_row, raw))
        return []
    if isinstance(frame.message, Completion):
        rows = sorted(shell.memory.pop("rows", []))
        return [*(row for _, row in rows), raw]
    return [raw]


def _old_rows(shell: Shell, raw: bytes) -> list[bytes]:
    """Where rows are missing, those of the last whole reply are used."""
    frame = read(raw)
    if frame is None or frame.prefix.slot >= 4:
        return [raw]
    if isinstance(frame.message, Row) and frame.message.row_count == frame.message.depth:
        shell.memory["last"] = frame
        shell.memory["row of"] = frame.prefix.key
    item = _item_of(shell, frame)
    late = isinstance(frame.message, Completion) and shell.memory.get("row of") != frame.prefix.key
    if not late or item is None or "last" not in shell.memory or frame.message.status:  # type: ignore[attr-defined]
        return [raw]
    last: Frame = shell.memory["last"]
    terms = shell.inner.connection.negotiated
    row = changed(last.message, session=item.session)
    checksum = body_checksum(terms.checksum, b"".join(bytes(body) for body in last.bodies))
    done = changed(frame.message, reply_checksum=checksum)
    return [again(last, row, frame.prefix.key), again(frame, done)]


def _once(kind: type[Row] | type[Completion]) -> Filter:
    """A repetition is a fault that ends the round's generation."""

    def passed(shell: Shell, raw: bytes) -> list[bytes]:
        frame = read(raw)
        if frame is None or not isinstance(frame.message, kind):
            return [raw]
        seen = shell.memory.setdefault("seen", set())
        if raw in seen and frame.prefix.slot < 4:
            slot = shell.inner.connection._slots[frame.prefix.slot]
            error = ErrorMessage(E.DUPLICATE, Scope.SLOT, 0, "x")
            return [bytes(encode_frame(error, Key(slot.index, slot.generation, max(slot.round, 0))))]
        seen.add(raw)
        return [raw]

    return passed


def _no_status(shell: Shell, completion: Completion) -> dict[str, Any]:
    """A failed round is a lost one; the generation goes on."""
    return {"status": 0, "reply_checksum": b"\1" * 8} if completion.status else {}


def _whole_accept(shell: Shell, raw: bytes) -> list[bytes]:
    """ACCEPT is believed in everything: replaced by the one that an honest drafter would send."""
    frame = read(raw)
    if frame is None or not isinstance(frame.message, Accept):
        return [raw]
    parameters = reference_facts().parameters(frame.message.epoch, step_deadline_ms=300)
    hello: Hello = shell.memory["hello"]
    right = accept_message(parameters, hello, negotiate(parameters, hello))
    wrong = (frame.message.serial, frame.message.verifier_epoch) != (hello.serial, hello.epoch)
    lower = any(
        getattr(frame.message, n) < getattr(right, n)
        for n in ("max_slots", "max_depth", "max_support", "max_in_flight")
    )
    keep = wrong or lower or frame.message.checksum_kind is not right.checksum_kind
    return [raw] if keep else [again(frame, replace(right, heartbeat_ms=min(frame.message.heartbeat_ms, 1000)))]


def _keep_hello(shell: Shell, frame: Frame) -> None:
    shell.memory["hello"] = frame.message


def _own_terms(shell: Shell, accept: Accept) -> dict[str, Any]:
    """The verifier's own offer counts, whatever the drafter agreed to."""
    ours = shell.inner.connection.parameters
    depth, support = ours.max_depth, ours.max_support
    return {
        "max_slots": ours.max_slots,
        "max_depth": depth,
        "max_support": support,
        "reply_bytes": ReplyLayout(depth, support).total_bytes,
    }


def _stale_accept(shell: Shell, accept: Accept | Reject) -> dict[str, Any]:
    connection = shell.inner.connection
    return {"serial": connection._serial, "verifier_epoch": connection.parameters.epoch}


def _epoch_of(shell: Shell, message: Any) -> dict[str, Any]:
    terms = shell.inner.connection.negotiated
    return {"epoch": terms.peer_epoch} if terms is not None else {}


def _broad_error(shell: Shell, error: ErrorMessage) -> dict[str, Any]:
    return {"scope": Scope.SLOT} if error.scope is Scope.FRAME else {}


def _narrow_error(shell: Shell, error: ErrorMessage) -> dict[str, Any]:
    return {"scope": Scope.FRAME} if error.scope in (Scope.ROUND, Scope.SLOT, Scope.SESSION) else {}


def _any_error(shell: Shell, frame: Frame) -> bytes | None:
    """Generations of ERROR are not compared."""
    item = _item_of(shell, frame)
    return again(frame, key=Key(item.slot, item.generation, item.round)) if item is not None else None


def _junk(bad: Callable[[bytes], bool]) -> Filter:
    """A bad frame ends the rounds under way."""

    def passed(shell: Shell, raw: bytes) -> list[bytes]:
        if not bad(raw):
            return [raw]
        error = ErrorMessage(E.BAD_FIELD, Scope.ROUND, 0, "x")
        flight = _flight(shell).values()
        return [bytes(encode_frame(error, Key(item.slot, item.generation, item.round))) for item in flight]

    return passed


def _undecodable(raw: bytes) -> bool:
    return repairs.sound(raw) and raw[6] in {1, 2, 16, 33, 32, 36} and read(raw) is None


def _two_steps(shell: Shell, frame: Frame) -> list[bytes] | None:
    """After some rounds a second STEP is sent before the first is answered."""
    step = frame.message
    assert isinstance(step, Step)
    count = shell.memory["count"] = shell.memory.get("count", 0) + 1
    if count != 1 or len(step.items) != 1:
        return None
    return [again(frame), _next_step(step.items[0])]


def _error_back(shell: Shell, raw: bytes) -> list[bytes]:
    if raw[6:7] == b"\x23" and repairs.sound(raw):
        shell.inject.append(bytes(encode_frame(ErrorMessage(E.UNEXPECTED_MESSAGE, Scope.FRAME, 0, "ERROR"))))
    return [raw]


def _commits_anyway(shell: Shell, item: Any) -> dict[str, Any]:
    """Every STEP commits the round before, whether it was used or not."""
    return (
        {"accepted_count": 0, "commit_token": item.anchor_token}
        if item.accepted_count == NO_COMMIT and item.round > 1
        else {}
    )


def _early_pong(shell: Shell, raw: bytes) -> list[bytes]:
    """Answers PING before ACCEPT, with an OPEN."""
    if shell.inner.connection.state.value == "hello_sent" and raw[6:7] == b"\x20":
        opened = Open(1, 1, 0, SupportPolicy.K1, 3, 0, 0, bytes(8), 0, 0, 0)  # type: ignore[arg-type]
        shell.inject.append(bytes(encode_frame(opened, Key(0, 1))))
    return [raw]


def _whole_only(shell: Shell, frame: Frame) -> list[bytes] | None:
    row = frame.message
    assert isinstance(row, Row)
    return [] if row.row_count < row.depth else None


_Row = tuple[str, str, Filter]

_INCOMING: tuple[_Row, ...] = (
    ("no-prefix-crc", "does not compare the prefix crc", repairing(repairs.prefix_crc)),
    ("flags", "ignores flags", repairing(repairs.no_flags)),
    ("any-major", "does not compare the major version", repairing(repairs.any_major)),
    ("size", "ignores missing and trailing bytes", repairing(repairs.exact_size)),
    ("no-control-crc", "does not compare the control crc", repairing(repairs.control_crc)),
    ("padding", "does not look at padding", repairing(repairs.padding)),
    ("no-body-checksum", "does not compare body checksums", repairing(repairs.redescribed)),
    ("any-checksum-kind", "takes bodies under any checksum", repairing(lambda f: repairs.redescribed(f, 2))),
    ("clamps", "clamps fields into their ranges", repairing(repairs.clamped)),
    ("refuses-minor", "drops other minor versions", lambda s, f: [] if repairs.sound(f) and f[5] else [f]),
    ("by-slot", "matches replies by slot only", _rekeyed),
    ("any-slot", "takes slots modulo their number", _any_slot),
    ("by-session", "takes replies without a slot", _by_session),
    ("by-arrival", "cannot take replies of two slots at once", _by_arrival),
    ("row-owner", "does not compare session and epoch of ROW", on(Row, _owner)),
    ("completion-owner", "does not compare session and epoch of COMPLETION", on(Completion, _owner)),
    ("no-echo", "does not compare what COMPLETION echoes", _recompleted(_echoes)),
    ("no-sizes", "does not compare counts and bytes of COMPLETION", _recompleted(_sizes)),
    ("no-reply-checksum", "does not compare the reply checksum", _recompleted(_checksum)),
    ("no-row-crc", "does not compare row crcs", _resealed(clamp=False)),
    ("no-row-ranges", "clamps the fields of records", _resealed(clamp=True)),
    ("sorts-rows", "puts rows into order", _sorted_rows),
    ("old-rows", "uses older rows where some are missing", _old_rows),
    ("whole-rows", "takes one ROW only", on(Row, _whole_only)),
    ("row-once", "ends a generation for a ROW twice", _once(Row)),
    ("completion-once", "ends a generation for a COMPLETION twice", _once(Completion)),
    ("no-status", "goes on after a failed round", fields(Completion, _no_status)),
    (
        "row-fields",
        "ignores depth and support of ROW",
        fields(
            Row,
            lambda s, m: {
                "depth": max(m.depth, len(m.bodies) and m.bodies[0].rows),
                "support": m.bodies[1].entries if len(m.bodies) > 1 else m.support,
            },
        ),
    ),
    (
        "any-draft-time",
        "refuses long draft times",
        fields(Completion, lambda s, m: {"reply_checksum": b"\1" * 8} if m.draft_us > 2**31 else {}),
    ),
    ("own-terms", "ignores what the drafter agreed to", fields(Accept, _own_terms)),
    ("stale-accept", "does not compare what ACCEPT echoes", fields(Accept, _stale_accept)),
    ("stale-reject", "does not compare what REJECT echoes", fields(Reject, _stale_accept)),
    ("xxh3-only", "always sends XXH3-64", fields(Accept, lambda s, m: {"checksum_kind": 2})),
    ("more-credit", "sends more context than granted", fields(Accept, lambda s, m: {"context_credit_rows": 64})),
    ("foreign-credit", "takes credit of any epoch", fields(Pong, _epoch_of)),
    ("foreign-ping", "answers PINGs of any epoch", fields(Ping, _epoch_of)),
    ("foreign-drain", "drains for any epoch", fields(Drain, _epoch_of)),
    ("no-drain", "does not hear DRAIN", on(Drain, lambda s, f: [])),
    ("broad-errors", "ends a generation for an ERROR of scope FRAME", fields(ErrorMessage, _broad_error)),
    ("narrow-errors", "ends nothing for an ERROR", fields(ErrorMessage, _narrow_error)),
    ("any-error", "does not compare generations of ERROR", on(ErrorMessage, _any_error)),
    ("error-for-error", "answers ERROR with ERROR", _error_back),
    ("junk-prefix", "ends rounds for a bad prefix", _junk(lambda f: not repairs.sound(f) or f[4] != 2)),
    (
        "junk-fields",
        "ends rounds for bad fields",
        _junk(
            lambda f: (
                repairs.sound(f)
                and (
                    f[7] > 0 or f[6] > 36 or field_of(f, "control_length") > 4096 or field_of(f, "body_length") > 2**26
                )
            )
        ),
    ),
    ("junk-control", "ends rounds for bad control", _junk(_undecodable)),
    ("unasked-stats", "ends rounds for an unasked report", _junk(lambda f: f[6:7] == b"\x24")),
    ("early", "opens sessions before ACCEPT", _early_pong),
)

_OUTGOING: tuple[_Row, ...] = (
    (
        "small-nonce",
        "answers small nonces with the next",
        fields(Pong, lambda s, m: {"nonce": m.nonce + 1} if 0 < m.nonce < 100 else {}),
    ),
    ("wrong-hash", "sends another compatibility hash", fields(Hello, lambda s, m: {"compat_hash": bytes(32)})),
    ("same-serial", "has one serial for every HELLO", fields(Hello, lambda s, m: {"serial": 1})),
    ("no-crc32c", "does not offer CRC32C", fields(Hello, lambda s, m: {"checksums": 2})),
    ("wrong-nonce", "answers PING with the next nonce", fields(Pong, lambda s, m: {"nonce": (m.nonce + 1) % 2**64})),
    ("no-pings", "never sends PING", on(Ping, lambda s, f: [])),
    (
        "wrong-digest",
        "covers the anchor in digests",
        items(lambda s, i: {"prefix_digest": b"\1" * 8} if i.round % 5 == 4 else {}),
    ),
    ("two-steps", "sends a second STEP too early", on(Step, _two_steps)),
    ("commits-anyway", "commits rounds that it refused", items(_commits_anyway)),
    ("never-commits", "never commits", items(lambda s, i: {"accepted_count": NO_COMMIT, "commit_token": 0})),
    (
        "late-anchor",
        "counts accepted drafts one too few",
        items(lambda s, i: {"accepted_count": i.accepted_count + 1} if i.accepted_count < 5 else {}),
    ),
    ("no-reset", "never sends RESET", on(Reset, lambda s, f: [])),
    ("slots-drift", "names another slot in STEP", items(lambda s, i: {"slot": (i.slot + i.round // 9) % 4})),
)


def _shelled(incoming: Filter | None = None, outgoing: Filter | None = None) -> Shell:
    return Shell(reference(), incoming, outgoing)


def _believing() -> Shell:
    def keep(shell: Shell, raw: bytes) -> list[bytes]:
        frame = read(raw)
        if frame is not None and isinstance(frame.message, Hello):
            _keep_hello(shell, frame)
        return [raw]

    return Shell(reference(), _whole_accept, keep)


def verifier_mutants() -> list[Mutant]:
    """All of them."""
    found = [
        Mutant(f"verifier-{name}", Role.VERIFIER, bug, partial(_shelled, incoming=change))
        for name, bug, change in _INCOMING
    ]
    found += [
        Mutant(f"verifier-{name}", Role.VERIFIER, bug, partial(_shelled, outgoing=change))
        for name, bug, change in _OUTGOING
    ]
    kinds: list[tuple[str, str, Callable[[], Any]]] = [
        ("believing", "believes every ACCEPT", _believing),
        ("any-row", "samples from rows that are no distribution", partial(_kind, "rows")),
        ("no-deadlines", "waits for ever", partial(_kind, "deadlines")),
        ("leaks-refused", "loses the staging of refused rounds", partial(_kind, "lease")),
        ("leaks-used", "loses the staging of used rounds", partial(_kind, "release")),
        ("rows-together", "needs ROW and COMPLETION at once", _Together),
        ("more-rounds", "has more rounds in flight than agreed", _greedy),
        ("impatient", "sends a new round before the last is answered", partial(_kind, "impatient")),
        ("old-generations", "starts generations again after a reconnect", partial(_kind, "generations")),
    ]
    plain = (*kinds, *mutants_verifier_terms.PLAIN, *mutants_verifier_rare.PLAIN)
    found += [Mutant(f"verifier-{name}", Role.VERIFIER, bug, make) for name, bug, make in plain]
    secret = mutants_verifier_terms.SECRET
    return found + [Mutant(f"verifier-{name}", Role.VERIFIER, bug, make, secret=True) for name, bug, make in secret]
