"""Verifiers whose one bug shows only when something unusual happens: credit that is short, an error beside a round, a
frame that comes again, too early or too late.

Called by `mutants_verifier`; as there, everything but the bug is honest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..checksums import body_checksum
from ..digest import prefix_digest
from ..events import ProposalReady, SlotFailed, StepFailed, StepTimedOut, VerifierEvent
from ..frame import Frame, encode_frame
from ..hello import Accept, Challenge, Hello, Reject
from ..limits import AUTH_NONCE_BYTES, AUTH_PROOF_BYTES, NO_COMMIT, SLOT_NONE
from ..messages import Commit, Completion, ErrorMessage, Pong, Reset, Row, Step, StepItem
from ..prefix import Key
from ..registry import Cause, ErrorCode, Scope
from ..states import SlotState, VerifierState
from .clock import NS_PER_MS
from .facts import reference_facts, verifier_parameters
from .filters import again, fields, items, on, read
from .mutants import Filter, Shell
from .mutants_drafter_rare import SmallBuffer
from .reference_verifier import PROMPT, ReferenceVerifier

E = ErrorCode
_LATE_ROUND = 7
_QUEUE = 100
"""What the mutant with a short queue takes in one turn."""


def _key(item: StepItem) -> Key:
    return Key(item.slot, item.generation, item.round)


def _flight(shell: Shell) -> dict[int, StepItem]:
    """Unresolved items by slot."""
    slots = shell.inner.connection._slots
    return {one.index: one.item for one in slots if one.state is SlotState.AWAITING and one.item is not None}


def _error(key: Key, scope: Scope, code: ErrorCode = E.CONTEXT_GAP) -> bytes:
    return bytes(encode_frame(ErrorMessage(code, scope, 0, "x"), key))


class _Odd(ReferenceVerifier):
    """One habit. ``kind`` says which."""

    kind = ""

    def __init__(self) -> None:
        super().__init__(verifier_parameters(reference_facts()))
        self._shortened: set[Key] = set()
        prepare = self.connection._prepare

        def keeping(terms: Any) -> None:
            limit, sent = self.connection._credit_limit, self.connection._rows_sent
            prepare(terms)
            if self.kind == "old-credit":
                self.connection._credit_limit = max(limit, self.connection._credit_limit)
            if self.kind == "rows-for-ever":
                self.connection._rows_sent = sent

        self.connection._prepare = keeping  # type: ignore[method-assign]
        if self.kind == "hasty-silence":
            self.connection._silence_ends_ns = self._soon  # type: ignore[method-assign]

    def _soon(self) -> int:
        """Silence after one heartbeat and a half."""
        since = self.connection._unanswered_ns
        return 2**64 if since is None else since + self.connection._heartbeat_ns() * 3 // 2

    def expire(self, now_ns: int) -> list[bytes]:
        if self.kind == "half-deadline":
            self._halve()
        return super().expire(now_ns)

    def _halve(self) -> None:
        terms = self.connection.negotiated
        for slot in self.connection._slots:
            if terms is not None and slot.state is SlotState.AWAITING and slot.key not in self._shortened:
                self._shortened.add(slot.key)
                slot.deadline_ns -= terms.step_deadline_ms * NS_PER_MS // 2

    def _on(self, event: VerifierEvent, now_ns: int) -> list[memoryview]:
        if self.kind == "refunds" and isinstance(event, SlotFailed | StepFailed):
            self.connection._rows_sent = max(0, self.connection._rows_sent - PROMPT)
        frames = super()._on(event, now_ns)
        if self.kind == "each-resets" and frames and isinstance(event, StepTimedOut | SlotFailed):
            frames.append(self.connection.reset(event.slot, Cause.ROUND_TIMED_OUT))
        if self.kind == "one-deadline" and isinstance(event, StepTimedOut):
            for session in [one for one in self._sessions if one.slot != event.slot]:
                frames.append(self.connection.reset(session.slot, Cause.ROUND_TIMED_OUT))
                session.tokens, session.prompted, session.accepted = [], False, None
        return frames

    def _judge(self, proposal: ProposalReady) -> None:
        terms = self.connection.negotiated
        if self.kind == "no-zero":
            proposal = replace(proposal, tokens=tuple(token for token in proposal.tokens if token))
        if self.kind == "no-last" and terms is not None and terms.vocab_size - 1 in proposal.tokens:
            proposal.lease.release()
            self._go_on_alone(proposal.slot)
            return
        super()._judge(proposal)


def _odd(kind: str) -> ReferenceVerifier:
    made = type("Odd", (_Odd,), {"kind": kind})()
    assert isinstance(made, ReferenceVerifier)
    return made


# Credit


def _adds(shell: Shell, pong: Pong) -> dict[str, Any]:
    """Each total is taken for a grant beyond the window."""
    terms, connection = shell.inner.connection.negotiated, shell.inner.connection
    if terms is None or pong.nonce:
        return {}
    return {"credit_limit": max(0, connection._credit_limit + pong.credit_limit - terms.context_credit_rows)}


def _taps_cost(shell: Shell, frame: Frame) -> list[bytes] | None:
    """Taps of STEP count as context."""
    step, connection = frame.message, shell.inner.connection
    assert isinstance(step, Step)
    if shell.memory.get("serial") != connection._serial:
        shell.memory.update(serial=connection._serial, taps=0)
    shell.memory["taps"] += sum(item.tap_rows for item in step.items)
    return [] if connection._rows_sent + shell.memory["taps"] > connection._credit_limit else None


def _early_credit(shell: Shell, raw: bytes) -> list[bytes]:
    """Credit that is told before ACCEPT counts."""
    frame = read(raw)
    waiting = shell.inner.connection.state is VerifierState.HELLO_SENT
    if frame is None or not waiting:
        return [raw]
    if isinstance(frame.message, Pong):
        shell.memory["early"] = frame.message.credit_limit
    if isinstance(frame.message, Accept) and "early" in shell.memory:
        most = shell.inner.connection.parameters.context_credit_rows
        return [again(frame, replace(frame.message, context_credit_rows=min(most, shell.memory.pop("early"))))]
    return [raw]


def _not_yet(shell: Shell, frame: Frame) -> list[bytes] | None:
    """Errors before the first STEP of a generation are not heard."""
    if frame.prefix.slot >= len(shell.inner.connection._slots):
        return None
    slot = shell.inner.connection._slots[frame.prefix.slot]
    return [] if slot.state is SlotState.READY and slot.item is None else None


# Replies


def _wrong(shell: Shell, raw: bytes) -> Frame | None:
    """A COMPLETION whose checksum is not that of its ROW."""
    frame = read(raw)
    terms = shell.inner.connection.negotiated
    if frame is not None and isinstance(frame.message, Row):
        shell.memory[frame.prefix.key] = b"".join(bytes(body) for body in frame.bodies)
    if frame is None or terms is None or not isinstance(frame.message, Completion) or frame.message.status:
        return None
    block = shell.memory.get(frame.prefix.key)
    right = block is None or body_checksum(terms.checksum, block) == frame.message.reply_checksum
    return None if right else frame


def _forgives(shell: Shell, raw: bytes) -> list[bytes]:
    """A wrong COMPLETION is dropped, and the round goes on."""
    return [raw] if _wrong(shell, raw) is None else []


def _takes_along(shell: Shell, raw: bytes) -> list[bytes]:
    """A wrong COMPLETION ends every round under way."""
    wrong = _wrong(shell, raw)
    if wrong is None:
        return [raw]
    return [raw, *(_error(_key(item), Scope.ROUND) for item in _flight(shell).values())]


def _completes(shell: Shell, raw: bytes) -> list[bytes]:
    """ERROR of scope ROUND ends the waiting for COMPLETION, and the rows that came are used."""
    frame = read(raw)
    if frame is not None and isinstance(frame.message, Row):
        shell.memory[frame.prefix.key] = frame
    rows = None if frame is None else shell.memory.get(frame.prefix.key)
    ends = frame is not None and isinstance(frame.message, ErrorMessage) and frame.message.scope is Scope.ROUND
    item = None if frame is None else _flight(shell).get(frame.prefix.slot)
    if not ends or rows is None or item is None:
        return [raw]
    block = b"".join(bytes(body) for body in rows.bodies)
    checksum = body_checksum(shell.inner.connection.negotiated.checksum, block)
    echo = (item.session, rows.message.epoch, item.anchor_position, item.context_version, item.prefix_digest)
    return [bytes(encode_frame(Completion(*echo, 0, item.depth, len(block), checksum), rows.prefix.key))]


def _late_failure(shell: Shell, frame: Frame) -> bytes | None:
    """A failed COMPLETION ends the generation, whatever its round is."""
    done, item = frame.message, _flight(shell).get(frame.prefix.slot)
    assert isinstance(done, Completion)
    late = item is not None and item.generation == frame.prefix.generation and item.round != frame.prefix.round
    return _error(_key(item), Scope.SLOT) if done.status and late and item is not None else None


def _while_draining(shell: Shell, frame: Frame) -> list[bytes] | None:
    return [] if shell.inner.connection.state is VerifierState.DRAINING else None


class _LastWins(Shell):
    """Of several replies in one turn the last one is used."""

    def __init__(self) -> None:
        super().__init__(_honest(), self._keep)
        self._replies: dict[Key, list[bytes]] = {}

    def _keep(self, shell: Shell, raw: bytes) -> list[bytes]:
        frame = read(raw)
        if frame is None or not isinstance(frame.message, Row | Completion):
            return [raw]
        if isinstance(frame.message, Row) and frame.message.first_row == 0:
            self._replies[frame.prefix.key] = []
        self._replies.setdefault(frame.prefix.key, []).append(raw)
        return []

    def expire(self, now_ns: int) -> list[bytes]:
        replies, self._replies = self._replies, {}
        frames = [frame for reply in replies.values() for frame in reply]
        return self._out([one for frame in frames for one in self.inner.receive(frame, now_ns)]) + super().expire(
            now_ns
        )


def _first_since(kind: type[Hello] | type[Reset]) -> Filter:
    """The first STEP of a slot on another connection, or in another generation, commits something."""

    def commit(shell: Shell, item: StepItem) -> dict[str, Any]:
        fresh = shell.memory.setdefault("fresh", {})
        if not fresh.pop(item.slot, False) or item.accepted_count != NO_COMMIT:
            return {}
        return {"accepted_count": 0, "commit_token": item.anchor_token}

    def passed(shell: Shell, raw: bytes) -> list[bytes]:
        frame = read(raw)
        if frame is not None and isinstance(frame.message, kind):
            again_said = kind is Reset or shell.inner.connection._serial > 1
            slots = range(4) if kind is Hello else [frame.prefix.slot]
            shell.memory["fresh"] = dict.fromkeys(slots, again_said)
        return items(commit)(shell, raw)

    return passed


def _modulo_4(shell: Shell, raw: bytes) -> list[bytes]:
    """Only the last two bits of a round are compared."""
    frame = read(raw)
    if frame is None or not isinstance(frame.message, Row | Completion):
        return [raw]
    item = _flight(shell).get(frame.prefix.slot)
    same = item is not None and item.generation == frame.prefix.generation and not (item.round - frame.prefix.round) % 4
    return [again(frame, key=_key(item))] if same and item is not None else [raw]


# Errors


def _this_round(shell: Shell, frame: Frame) -> bytes | None:
    """ERROR of scope ROUND is for whatever round there is."""
    error, item = frame.message, _flight(shell).get(frame.prefix.slot)
    assert isinstance(error, ErrorMessage)
    mine = item is not None and item.generation == frame.prefix.generation and error.scope is Scope.ROUND
    return again(frame, key=_key(item)) if mine and item is not None else None


def _by_session(keyless: bool) -> Filter:
    """ERROR without a key, or for a free slot, is for the round of its session."""

    def edit(shell: Shell, frame: Frame) -> bytes | None:
        error, slots = frame.message, shell.inner.connection._slots
        assert isinstance(error, ErrorMessage)
        slot = frame.prefix.slot
        free = slot < len(slots) and slots[slot].state is SlotState.FREE
        if error.scope is Scope.CONNECTION or not (slot == SLOT_NONE if keyless else free):
            return None
        rounds = [item for item in _flight(shell).values() if item.session == error.session]
        return again(frame, key=_key(rounds[0])) if rounds else None

    return on(ErrorMessage, edit)


def _by_code(shell: Shell, error: ErrorMessage) -> dict[str, Any]:
    return {"scope": Scope.CONNECTION} if error.code is E.HELLO_REQUIRED else {}


def _frames_only(shell: Shell, error: ErrorMessage) -> dict[str, Any]:
    return {"scope": Scope.FRAME} if error.code is E.BAD_PADDING else {}


def _overlooked(shell: Shell, error: ErrorMessage) -> dict[str, Any]:
    return {"scope": Scope.FRAME} if error.scope is Scope.ROUND else {}


def _whole_batch(shell: Shell, frame: Frame) -> list[bytes] | None:
    """ERROR about one round is for all that are under way."""
    error, flight = frame.message, _flight(shell)
    assert isinstance(error, ErrorMessage)
    item = flight.get(frame.prefix.slot)
    if item is None or error.scope not in (Scope.SLOT, Scope.ROUND) or _key(item) != frame.prefix.key:
        return None
    return [again(frame, key=_key(one)) for one in flight.values()]


# Connections


def _repeats(shell: Shell, raw: bytes) -> list[bytes]:
    """The last STEP is sent again after ACCEPT."""
    if raw[6:7] == b"\x02" and "step" in shell.memory:
        shell.inject.append(shell.memory["step"])
    return [raw]


def _goes_on(shell: Shell, raw: bytes) -> list[bytes]:
    """A reply that comes before ACCEPT gets the STEP that would follow."""
    if raw[6:7] == b"\x14" and shell.inner.connection.state is VerifierState.HELLO_SENT and "step" in shell.memory:
        shell.inject.append(shell.memory.pop("step"))
    return [raw]


def _keeps_step(shell: Shell, frame: Frame) -> None:
    shell.memory["step"] = again(frame)


def _begins_again(shell: Shell, frame: Frame) -> None:
    """ACCEPT on a live connection opens everything again."""
    connection = shell.inner.connection
    if connection.state is VerifierState.ACTIVE:
        connection._retire_slots(E.HELLO_REQUIRED)
        connection.state = VerifierState.HELLO_SENT


def _late_reject(shell: Shell, frame: Frame) -> bytes | None:
    live = shell.inner.connection.state is VerifierState.ACTIVE
    return _error(Key(), Scope.CONNECTION, E.HELLO_REQUIRED) if live else None


def _late_challenge(shell: Shell, frame: Frame) -> None:
    """A CHALLENGE is answered on a live connection."""
    hello = shell.inner.connection._hello
    if shell.inner.connection.state is VerifierState.ACTIVE and isinstance(hello, Hello):
        made_up = bytes(AUTH_NONCE_BYTES + AUTH_PROOF_BYTES)
        shell.inject.append(bytes(encode_frame(replace(hello, auth=made_up))))


def _calls_off(shell: Shell, frame: Frame) -> None:
    """An ERROR for a connection that is lost already ends the waiting for the next HELLO."""
    if shell.inner.connection.state is VerifierState.LOST:
        shell.inner._hello_again_ns = None


class _PongsOnly(Shell):
    """Nothing but PONG is a sign of life."""

    def __init__(self) -> None:
        super().__init__(_honest())

    def receive(self, frame: bytes, now_ns: int) -> list[bytes]:
        """See `PeerMachine`."""
        connection = self.inner.connection
        before = connection._unanswered_ns
        frames = super().receive(frame, now_ns)
        if frame[6:7] != b"\x21" and connection.state is VerifierState.ACTIVE:
            connection._unanswered_ns = before
        return frames


# Ranks that speak for themselves, from the seventh round of a session on


def _each_greets(shell: Shell, frame: Frame) -> list[bytes] | None:
    step, hello = frame.message, shell.inner.connection._hello
    assert isinstance(step, Step)
    if step.items[0].round != _LATE_ROUND or shell.memory.get("greeted"):
        return None
    shell.memory["greeted"] = True
    return [again(frame), bytes(encode_frame(replace(hello, epoch=hello.epoch + 1)))]


def _each_asks(shell: Shell, frame: Frame) -> list[bytes] | None:
    step = frame.message
    assert isinstance(step, Step)
    if any(item.round < _LATE_ROUND or item.depth < 2 for item in step.items):
        return None
    shorter = tuple(replace(item, depth=item.depth - 1) for item in step.items)
    return [again(frame), again(frame, replace(step, items=shorter))]


def _each_commits(shell: Shell, frame: Frame) -> list[bytes] | None:
    """Commits go out as messages, one from each rank."""
    step, last = frame.message, shell.memory.setdefault("last", {})
    assert isinstance(step, Step)
    commits, plain = [], []
    for item in step.items:
        before = last.get(item.slot)
        last[item.slot] = item
        late = item.round >= _LATE_ROUND and item.accepted_count != NO_COMMIT and before is not None
        plain.append(replace(item, accepted_count=NO_COMMIT, commit_token=0) if late else item)
        if late:
            position = before.anchor_position + item.accepted_count + 1
            tokens = shell.inner._session(item.slot).tokens[:position]
            message = Commit(item.session, item.accepted_count, item.commit_token, position, prefix_digest(tokens))
            commits += [bytes(encode_frame(message, _key(before)))] * 2
    return [*commits, again(frame, replace(step, items=tuple(plain)))] if commits else None


def _honest() -> ReferenceVerifier:
    return ReferenceVerifier(verifier_parameters(reference_facts()))


def _plain(incoming: Filter | None = None, outgoing: Filter | None = None) -> Shell:
    return Shell(_honest(), incoming, outgoing)


def _heard(change: Filter) -> Callable[[], Any]:
    return partial(_plain, incoming=change)


def _said(change: Filter) -> Callable[[], Any]:
    return partial(_plain, outgoing=change)


def _both(change: Filter) -> Callable[[], Any]:
    return partial(_plain, incoming=change, outgoing=on(Step, _keeps_step))


PLAIN: tuple[tuple[str, str, Callable[[], Any]], ...] = (
    ("refunds", "gives itself the credit of refused rows back", partial(_odd, "refunds")),
    ("old-credit", "keeps the credit of an older connection", partial(_odd, "old-credit")),
    ("rows-for-ever", "counts the rows of older connections", partial(_odd, "rows-for-ever")),
    (
        "credit-unasked",
        "takes credit of nonce 0 alone",
        _heard(fields(Pong, lambda s, m: {"credit_limit": 0} if m.nonce else {})),
    ),
    (
        "credit-32",
        "cuts credit to 32 bits",
        _heard(fields(Pong, lambda s, m: {"credit_limit": m.credit_limit % 2**32})),
    ),
    ("credit-adds", "adds totals of credit up", _heard(fields(Pong, _adds))),
    ("credit-early", "takes credit before ACCEPT", _heard(_early_credit)),
    ("taps-cost", "counts the taps of STEP as context", _said(on(Step, _taps_cost))),
    ("errors-later", "hears no error before the first STEP", _heard(on(ErrorMessage, _not_yet))),
    ("completes", "uses rows of a round that ERROR ended", _heard(_completes)),
    ("forgives", "waits for a right COMPLETION after a wrong one", _heard(_forgives)),
    ("takes-along", "discards all rounds for one wrong reply", _heard(_takes_along)),
    ("commits-reconnected", "commits on a new connection", _said(_first_since(Hello))),
    ("commits-reset", "commits in a new generation", _said(_first_since(Reset))),
    ("no-zero", "takes token 0 for none", partial(_odd, "no-zero")),
    ("no-last", "refuses the last token of the vocabulary", partial(_odd, "no-last")),
    ("deaf-draining", "takes no replies after DRAIN", _heard(on(Completion, _while_draining))),
    ("last-wins", "uses the last of several replies", _LastWins),
    ("late-failure", "ends a generation for a failure of an older round", _heard(on(Completion, _late_failure))),
    ("rounds-modulo-4", "compares two bits of the round", _heard(_modulo_4)),
    ("errors-any-round", "does not compare rounds of ERROR", _heard(on(ErrorMessage, _this_round))),
    ("errors-keyless", "matches ERROR without a key by session", _heard(_by_session(keyless=True))),
    ("errors-by-session", "matches ERROR for a free slot by session", _heard(_by_session(keyless=False))),
    ("errors-by-code", "goes by the code HELLO_REQUIRED, not by the scope", _heard(fields(ErrorMessage, _by_code))),
    ("errors-by-frame", "goes by the code BAD_PADDING, not by the scope", _heard(fields(ErrorMessage, _frames_only))),
    ("errors-wait", "waits for the deadline of a round that ERROR ended", _heard(fields(ErrorMessage, _overlooked))),
    ("errors-batch", "takes ERROR about one round for all", _heard(on(ErrorMessage, _whole_batch))),
    ("one-deadline", "has one deadline for all slots", partial(_odd, "one-deadline")),
    ("half-deadline", "gives a round up after half its deadline", partial(_odd, "half-deadline")),
    ("repeats-step", "sends its last STEP again on the next connection", _both(_repeats)),
    ("calls-off", "stays lost when it is told twice", _heard(on(ErrorMessage, _calls_off))),
    ("goes-on", "takes replies before ACCEPT", _both(_goes_on)),
    ("begins-again", "takes ACCEPT on a live connection", _heard(on(Accept, _begins_again))),
    ("late-reject", "takes REJECT on a live connection", _heard(on(Reject, _late_reject))),
    ("late-challenge", "answers CHALLENGE on a live connection", _heard(on(Challenge, _late_challenge))),
    ("short-queue", f"loses frames beyond {_QUEUE} at once", partial(SmallBuffer, _honest, _QUEUE)),
    ("each-greets", "says HELLO from each rank", _said(on(Step, _each_greets))),
    ("each-asks", "asks for a round from each rank", _said(on(Step, _each_asks))),
    ("each-commits", "commits a round from each rank", _said(on(Step, _each_commits))),
    ("each-resets", "resets a generation from each rank", partial(_odd, "each-resets")),
    ("pongs-only", "takes nothing but PONG for life", _PongsOnly),
    ("hasty-silence", "gives a drafter up after one heartbeat and a half", partial(_odd, "hasty-silence")),
)
