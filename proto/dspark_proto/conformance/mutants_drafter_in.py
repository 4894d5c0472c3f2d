"""Drafters that overlook one kind of fault: filters before an honest drafter. Called by `mutants_drafter`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

from ..frame import Frame, encode_frame
from ..hello import CAPACITIES, Hello
from ..limits import GENERATION_MAX, NO_COMMIT
from ..messages import Close, Commit, Context, ErrorMessage, Open, Ping, Stats, Step, StepItem
from ..negotiation import hello_message
from ..prefix import Key
from ..registry import Cause, ErrorCode, Lane, MessageType, Scope, SupportPolicy
from . import repairs
from .facts import reference_facts
from .filters import again, fields, items, on, read, slot_of
from .forge import field_of, patched
from .mutants import Filter, Shell, repairing

E = ErrorCode


def _unsound(shell: Shell, raw: bytes) -> list[bytes]:
    """Bad prefixes are dropped without a trace."""
    known = repairs.sound(raw) and raw[4] == 2 and raw[6] in {int(k) for k in MessageType} and raw[7] == 0
    return [raw] if known and 0 < field_of(raw, "control_length") <= 4096 else []


def _dies(when: Callable[[bytes], bool]) -> Filter:
    def passed(shell: Shell, raw: bytes) -> list[bytes]:
        shell.memory["dead"] = shell.memory.get("dead") or when(raw)
        return [] if shell.memory["dead"] else [raw]

    return passed


def _hello(shell: Shell, hello: Hello) -> dict[str, Any]:
    compat = reference_facts().compatibility.encoded()
    return {"compat": compat, "compat_hash": sha256(compat).digest()} if hello.compat != compat else {}


def _loose_hello(shell: Shell, raw: bytes) -> list[bytes]:
    return [repairs.clamped(raw)] if repairs.sound(raw) and raw[6] == MessageType.HELLO else [raw]


def _clamped(shell: Shell, raw: bytes) -> list[bytes]:
    return [raw] if raw[6:7] == b"\x01" else [repairs.clamped(raw)]


def _own_capacities(shell: Shell, hello: Hello) -> dict[str, Any]:
    ours = hello_message(reference_facts().parameters(1), 1)
    return {capacity.name: getattr(ours, capacity.name) for capacity in CAPACITIES} | {"reply_bytes": ours.reply_bytes}


def _wrapped_slot(shell: Shell, raw: bytes) -> list[bytes]:
    """Slots are taken modulo the negotiated number."""
    count = len(shell.inner.connection._slots)
    if not repairs.sound(raw) or not count or not count <= field_of(raw, "slot") < 2**32 - 1:
        return [raw]
    return [patched(raw, "slot", field_of(raw, "slot") % count)]


def _current_generation(shell: Shell, raw: bytes) -> list[bytes]:
    """Only slot and round are compared."""
    if not repairs.sound(raw) or raw[6] not in (17, 18, 21):
        return [raw]
    slot = slot_of(shell, field_of(raw, "slot"))
    if slot is None:
        return [raw]
    frame = read(patched(raw, "generation", slot.generation))
    if frame is None or not isinstance(frame.message, Step):
        return [patched(raw, "generation", slot.generation)]
    fixed = tuple(replace(item, generation=slot.generation) for item in frame.message.items)
    return [again(frame, replace(frame.message, items=fixed))]


def _new_generation(shell: Shell, raw: bytes) -> list[bytes]:
    """Generations of OPEN, RESET, CANCEL and CLOSE are not compared."""
    if not repairs.sound(raw) or raw[6] not in (16, 22, 23, 24):
        return [raw]
    slot = slot_of(shell, field_of(raw, "slot"))
    if slot is None or field_of(raw, "generation") > slot.generation:
        return [raw]
    return [patched(raw, "generation", slot.generation + 1)]


def _session(shell: Shell, raw: bytes) -> list[bytes]:
    """Any session may speak for the slot."""
    frame = read(raw)
    if frame is None or frame.prefix.type not in (17, 18, 21, 22, 23, 24):
        return [raw]
    slot = slot_of(shell, frame.prefix.slot)
    if slot is None or slot.state.value == "free":
        return [raw]
    message: Any = frame.message
    if isinstance(message, Step):
        fixed = tuple(replace(item, session=slot.session) for item in message.items)
        return [again(frame, replace(message, items=fixed))]
    return [again(frame, replace(message, session=slot.session))]


def _steals(shell: Shell, frame: Frame) -> list[bytes] | None:
    """OPEN of a live slot ends its session first."""
    slot = slot_of(shell, frame.prefix.slot)
    if slot is None or slot.state.value == "free":
        return None
    key = Key(slot.index, slot.generation + 1)
    closing = bytes(encode_frame(Close(slot.session, Cause.FINISHED), key))
    return [closing, again(frame, key=Key(slot.index, frame.prefix.generation + 2))]


def _gap(shell: Shell, frame: Frame) -> bytes | None:
    slot = slot_of(shell, frame.prefix.slot)
    assert isinstance(frame.message, Context)
    return again(frame, replace(frame.message, first_position=slot.context_end)) if slot is not None else None


def _fresh(shell: Shell, item: StepItem) -> Any:
    """The slot, when the item is a new round of its generation."""
    slot = slot_of(shell, item.slot)
    live = slot is not None and slot.generation == item.generation and item.round != slot.round
    return slot if live and slot.state.value == "ready" else None


def _anchor(shell: Shell, item: StepItem) -> dict[str, Any]:
    slot = _fresh(shell, item)
    if slot is None:
        return {}
    return {"tap_first": slot.context_end, "anchor_position": slot.context_end + item.tap_rows}


def _lane(shell: Shell, item: StepItem) -> dict[str, Any]:
    slot = _fresh(shell, item)
    return {"lane": slot.lane} if slot is not None else {}


def _vocabulary(shell: Shell, item: StepItem) -> dict[str, Any]:
    return {"anchor_token": item.anchor_token % 1000, "commit_token": item.commit_token % 1000}


def _no_step_commit(shell: Shell, item: StepItem) -> dict[str, Any]:
    """Commits in STEP are ignored; so is a digest that says otherwise."""
    return {"accepted_count": NO_COMMIT, "commit_token": 0}


def _round(shell: Shell, item: StepItem) -> dict[str, Any]:
    """Any round will do."""
    slot = slot_of(shell, item.slot)
    older = slot is not None and item.round < slot.round and slot.generation == item.generation
    return {"round": slot.round + 1} if older else {}


def _reused(shell: Shell, frame: Frame) -> bytes | None:
    """A used key gets the cached reply, whatever it asks."""
    step = frame.message
    assert isinstance(step, Step)
    known = shell.memory.setdefault(frame.prefix.key, again(frame))
    return bytes(known) if len(step.items) == 1 else None


def _key_of_item(shell: Shell, raw: bytes) -> list[bytes]:
    """The prefix of a single item is not compared with it."""
    frame = read(raw)
    if frame is None or not isinstance(frame.message, Step) or len(frame.message.items) != 1:
        return [raw]
    item = frame.message.items[0]
    return [again(frame, key=Key(item.slot, item.generation, item.round))]


def _only_first(shell: Shell, frame: Frame) -> bytes | None:
    """Of a batch only the first item is taken."""
    step = frame.message
    assert isinstance(step, Step)
    if len(step.items) < 2:
        return None
    item = step.items[0]
    key = Key(item.slot, item.generation, item.round)
    return bytes(encode_frame(Step((item,), step.bodies[:1]), key, frame.bodies[:1]))


def _remembers(shell: Shell, frame: Frame) -> list[bytes]:
    """A second HELLO is answered like the first, and nothing ends."""
    hello = frame.message
    assert isinstance(hello, Hello)
    if shell.memory.get("hello") == hello.epoch and shell.inner.connection.negotiated is not None:
        shell.inject.append(bytes(encode_frame(replace(shell.memory["accept"], serial=hello.serial))))
        return []
    shell.memory["hello"] = hello.epoch
    return [again(frame)]


def _error_for_error(shell: Shell, raw: bytes) -> list[bytes]:
    if raw[6:7] == b"\x23" and repairs.sound(raw):
        answer = ErrorMessage(E.UNEXPECTED_MESSAGE, Scope.FRAME, 0, "ERROR")
        shell.inject.append(bytes(encode_frame(answer, repairs.key_of(raw))))
    return [raw]


def _no_retry(shell: Shell, raw: bytes) -> list[bytes]:
    """The same STEP again is dropped."""
    if raw[6:7] != b"\x12":
        return [raw]
    seen = shell.memory.setdefault("steps", set())
    repeated = raw in seen
    seen.add(raw)
    return [] if repeated else [raw]


def _deaf_while_drafting(shell: Shell, raw: bytes) -> list[bytes]:
    """PING is not answered while a round is unresolved."""
    drafting = any(slot.state.value == "awaiting" for slot in shell.inner.connection._slots)
    return [] if drafting and raw[6:7] == b"\x20" else [raw]


def _dormant_close(shell: Shell, frame: Frame) -> list[bytes] | None:
    slot = slot_of(shell, frame.prefix.slot)
    return [] if slot is not None and slot.state.value == "dormant" else None


def _low_generations(shell: Shell, raw: bytes) -> list[bytes]:
    """OPEN of a generation that needs more than 32 bits is dropped."""
    return [] if raw[6:7] == b"\x10" and repairs.sound(raw) and field_of(raw, "generation") >= 2**32 else [raw]


def _wrapped_generation(shell: Shell, raw: bytes) -> list[bytes]:
    """Generations above the limit begin again at 1."""
    if not repairs.sound(raw) or field_of(raw, "generation") <= GENERATION_MAX:
        return [raw]
    return [patched(raw, "generation", field_of(raw, "generation") - GENERATION_MAX)]


def _small(shell: Shell, frame: Frame) -> list[bytes] | None:
    context = frame.message
    assert isinstance(context, Context)
    return [] if context.rows > 32 else None


INCOMING: tuple[tuple[str, str, Filter], ...] = (
    ("any-magic", "does not compare the magic", repairing(repairs.any_magic)),
    ("no-prefix-crc", "does not compare the prefix crc", repairing(repairs.prefix_crc)),
    ("any-major", "does not compare the major version", repairing(repairs.any_major)),
    ("unknown-type", "takes unknown types for PING", repairing(repairs.known_type)),
    ("flags", "ignores flags", repairing(repairs.no_flags)),
    ("reserved", "ignores the reserved field", repairing(repairs.no_reserved)),
    ("true-lengths", "does not bound lengths", repairing(repairs.true_lengths)),
    ("size", "ignores missing and trailing bytes", repairing(repairs.exact_size)),
    ("no-control-crc", "does not compare the control crc", repairing(repairs.control_crc)),
    ("padding", "does not look at padding", repairing(repairs.padding)),
    ("no-body-checksum", "does not compare body checksums", repairing(repairs.redescribed)),
    ("any-checksum-kind", "takes bodies under any checksum", repairing(lambda f: repairs.redescribed(f, 2))),
    ("body-count", "believes the prefix about bodies", repairing(repairs.counted_bodies)),
    ("loose-msgpack", "takes any msgpack", repairing(repairs.reencoded)),
    ("clamps", "clamps fields into their ranges", _clamped),
    ("clamps-hello", "clamps the fields of a HELLO", _loose_hello),
    ("uncounted", "drops bad prefixes without counting", _unsound),
    ("refuses-minor", "drops other minor versions", lambda s, f: [] if repairs.sound(f) and f[5] else [f]),
    ("dies-short", "dies of a short frame", _dies(lambda f: len(f) < 48)),
    ("dies-big", "dies of a big frame", _dies(lambda f: len(f) > 2**20)),
    ("dies-garbage", "dies of garbage", _dies(lambda f: f[:4] != b"DSPK")),
    ("any-compat", "accepts any compatibility fields", fields(Hello, _hello)),
    ("any-version", "accepts any wire version", fields(Hello, lambda s, m: {"wire_versions": (0x0200,)})),
    ("any-auth", "ignores auth", fields(Hello, lambda s, m: {"auth": b""} if m.auth else {})),
    (
        "any-checksums",
        "goes on without a common checksum",
        fields(Hello, lambda s, m: {"checksums": 3} if not m.checksums & 3 else {}),
    ),
    ("crc-only", "always chooses CRC32C", fields(Hello, lambda s, m: {"checksums": 1} if m.checksums & 1 else {})),
    ("xxh3-only", "always chooses XXH3-64", fields(Hello, lambda s, m: {"checksums": 2} if m.checksums & 3 else {})),
    ("own-capacities", "ignores the verifier's capacities", fields(Hello, _own_capacities)),
    (
        "any-reply-bytes",
        "does not check reply bytes",
        fields(Hello, lambda s, m: {"reply_bytes": m.max_depth * (16 + 8 * m.max_support)}),
    ),
    (
        "needs-one-version",
        "knows only the first version",
        fields(Hello, lambda s, m: {"wire_versions": m.wire_versions[:1]}),
    ),
    (
        "strict-checksums",
        "refuses unknown checksum bits",
        fields(Hello, lambda s, m: {"checksums": 2**14} if m.checksums >> 2 else {}),
    ),
    ("remembers", "keeps slots across HELLO", on(Hello, _remembers)),
    ("slot-modulo", "takes slots modulo their number", _wrapped_slot),
    ("any-generation", "compares slot and round only", _current_generation),
    ("any-new-generation", "does not compare generations of OPEN, RESET, CANCEL, CLOSE", _new_generation),
    ("any-session", "lets any session speak for a slot", _session),
    ("steals-slots", "ends a session for a new one", on(Open, _steals)),
    (
        "support-clamped",
        "clamps the support",
        fields(
            Open,
            lambda s, m: (
                {"support": SupportPolicy.K16} if m.support > s.inner.connection.negotiated.max_support else {}
            ),
        ),
    ),
    (
        "first-slot-only",
        "refuses the last slot",
        lambda s, f: [] if f[6:7] == b"\x10" and repairs.sound(f) and field_of(f, "slot") == 3 else [f],
    ),
    ("starts-at-zero", "contexts start at 0", fields(Open, lambda s, m: {"context_start": 0})),
    (
        "no-seed",
        "refuses negative seeds",
        lambda s, f: (
            []
            if (m := read(f))
            and isinstance(m.message, Open)
            and m.message.seed >= 2**63
            and m.message.seed not in (2**64 - 5,)
            else [f]
        ),
    ),
    (
        "small-seeds",
        "refuses seed 0",
        lambda s, f: [] if (m := read(f)) and isinstance(m.message, Open) and m.message.seed == 0 else [f],
    ),
    (
        "sessions-32",
        "refuses sessions above 2^32",
        lambda s, f: [] if (m := read(f)) and isinstance(m.message, Open) and m.message.session >= 2**32 else [f],
    ),
    ("ratio-only", "drafts for the ratio lane in every lane", fields(Open, lambda s, m: {"lane": Lane.RATIO})),
    ("leaks", "does not hear CLOSE", on(Close, lambda s, f: [])),
    ("dormant-close", "does not hear CLOSE of a dormant slot", on(Close, _dormant_close)),
    ("generations-32", "refuses generations from 2^32", _low_generations),
    ("generation-wraps", "begins generations again after the last", _wrapped_generation),
    ("deaf-while-drafting", "does not answer PING while it drafts", _deaf_while_drafting),
    ("no-cancel", "does not hear CANCEL", lambda s, f: [] if f[6:7] == b"\x17" else [f]),
    (
        "reset-lost",
        "does not hear the second RESET of a session",
        lambda s, f: (
            []
            if f[6:7] == b"\x16" and s.memory.setdefault("n", []).append(1) is None and len(s.memory["n"]) == 2
            else [f]
        ),
    ),
    ("any-position", "appends CONTEXT wherever it says", on(Context, _gap)),
    ("tokens-needed", "ignores CONTEXT without tokens", on(Context, lambda s, f: None if len(f.bodies) == 2 else [])),
    (
        "small-context",
        "ignores CONTEXT of more than 32 rows",
        on(Context, _small),
    ),
    ("any-anchor", "does not check anchors and tap positions", items(_anchor)),
    ("any-lane", "does not check the lane of STEP", items(_lane)),
    ("any-token", "takes tokens modulo the vocabulary", items(_vocabulary)),
    ("any-depth", "clamps the depth", items(lambda s, i: {"depth": min(i.depth, 5)})),
    ("full-depth", "drafts the full depth always", items(lambda s, i: {"depth": 5})),
    ("any-round", "takes rounds in any order", items(_round)),
    ("no-step-commit", "ignores commits in STEP", items(_no_step_commit)),
    ("reused-key", "answers a used key from its cache", on(Step, _reused)),
    ("any-prefix-key", "does not compare prefix and item", _key_of_item),
    ("first-item", "takes only the first item of a STEP", on(Step, _only_first)),
    ("no-context-version", "forgets the context version", items(lambda s, i: {"context_version": 0})),
    ("needs-taps", "ignores STEP without taps", on(Step, lambda s, f: None if f.bodies else [])),
    ("no-retry", "ignores retries", _no_retry),
    (
        "rounds-31",
        "refuses rounds from 2^31",
        lambda s, f: [] if f[6:7] == b"\x12" and repairs.sound(f) and field_of(f, "round") >= 2**31 else [f],
    ),
    ("no-commit", "does not hear COMMIT", on(Commit, lambda s, f: [])),
    ("error-for-error", "answers ERROR with ERROR", _error_for_error),
    (
        "any-epoch-ping",
        "answers PINGs of any epoch",
        fields(
            Ping,
            lambda s, m: {"epoch": s.inner.connection.negotiated.peer_epoch} if s.inner.connection.negotiated else {},
        ),
    ),
    ("report-for-report", "answers a report with a report", fields(Stats, lambda s, m: {"is_report": 0})),
    (
        "no-hello-required",
        "says nothing before HELLO",
        lambda s, f: [] if s.inner.connection.state.value == "awaiting_hello" and f[6:7] != b"\x01" else [f],
    ),
)
