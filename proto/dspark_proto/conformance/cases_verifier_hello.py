"""HEL and VER for verifiers: offers, answers that must not be believed, and restarts of the drafter.

Spec: SPEC.md 3, 6, 16. Called by `catalogue`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

from ..frame import decode_frame
from ..hello import CAPACITIES, Accept, Hello, Reject
from ..messages import Drain, Ping
from ..negotiation import compatibility_of, hello_message
from ..prefix import Key
from ..registry import ErrorCode, MessageType
from .as_drafter import VerifierUnderTest
from .forge import position_of, raw_frame, with_values
from .record import Family, Level, Role
from .verdicts import Unmet

HEL = Family("HEL", Role.VERIFIER)
VER = Family("VER", Role.VERIFIER)
E = ErrorCode
PATIENCE_MS = 15_000


@HEL.case(100, "HELLO is right", "REQ-HEL-1", "a hash or size that does not follow from the fields")
def right_hello(t: VerifierUnderTest) -> None:
    hello = t.hello or t.await_hello()
    wanted = hello_message(t.parameters(hello), hello.serial)
    if sha256(hello.compat).digest() != hello.compat_hash:
        raise Unmet("the SHA-256 of compat", hello.compat_hash.hex(), actual_frame=t.hello_frame)
    if compatibility_of(hello).encoded() != hello.compat:
        raise Unmet("canonical compat", hello.compat.hex())
    if 0x0200 not in hello.wire_versions or (hello.auth and not t.facts.secret) or hello.capabilities >> 8:
        raise Unmet("version 2.0, no auth, no unknown capabilities", f"{hello.wire_versions}, {hello.capabilities:x}")
    if not hello.checksums & 0b01 and wanted.checksums & 0b01:
        raise Unmet("the mandatory CRC32C among the checksums", bin(hello.checksums))
    if len({version >> 8 for version in hello.wire_versions}) > 1:
        t.tolerate("HELLO lists versions of more than one major (REQ-HEL-15)")
    t.connect()
    t.serves()


def _serves_within(changes: dict[str, Any], t: VerifierUnderTest) -> None:
    """The harness agrees to less; the books refuse a verifier that goes beyond."""
    t.connect(**changes)
    for _ in range(3):
        t.serves()


for _number, _title, _changes in (
    (101, "one slot", {"max_slots": 1}),
    (102, "depth 1", {"max_depth": 1}),
    (103, "support 1", {"max_support": 1}),
    (104, "support 16", {"max_support": 16}),
    (106, "CRC32C only", {"checksums": 0b01}),
    (107, "depth 3", {"max_depth": 3}),
):
    HEL.add(_number, f"a drafter with {_title}", "REQ-HEL-6", "going beyond what was negotiated",
            partial(_serves_within, _changes))  # fmt: skip


@HEL.case(105, "a drafter with two rounds in flight", "REQ-HEL-6", "going beyond what was negotiated")
def in_flight(t: VerifierUnderTest) -> None:
    t.connect(max_in_flight=2)
    for _ in range(3):
        item = t.await_step()
        t.watch(t.step_ms // 10)
        unanswered = 1 + len(t.waiting())
        if unanswered > 2:
            raise Unmet("at most 2 unanswered rounds", str(unanswered))
        t.answer(item)
    t.serves()


def no_session(t: VerifierUnderTest) -> None:
    """The verifier must not open anything; it may ask again."""
    end_ns = t.link.clock.now_ns() + 500 * 1_000_000
    while t.link.clock.now_ns() < end_ns:
        raw = t.link.receive(50)
        if raw is None:
            continue
        kind = decode_frame(raw).message.TYPE
        if kind is MessageType.HELLO:
            break
        if kind not in (MessageType.ERROR, MessageType.PING):
            raise Unmet("no session", kind.name, actual_frame=raw)


def bad_accept(change: Callable[[Accept, Hello], dict[str, Any]], t: VerifierUnderTest) -> None:
    """An ACCEPT that must not be believed; after a restart of the drafter all is well."""
    hello = t.hello or t.await_hello()
    accept = t.accept_for(hello)
    t.say(replace(accept, **change(accept, hello)))
    no_session(t)
    t.restart()
    t.connect()
    t.serves()


for _number, _capacity in enumerate(CAPACITIES, 110):

    def _above(accept: Accept, hello: Hello, name: str = _capacity.name) -> dict[str, Any]:
        return {name: getattr(hello, name) + 1}

    HEL.add(_number, f"ACCEPT with {_capacity.name} above the offer", "REQ-HEL-6", "terms that only one side agreed to",
            partial(bad_accept, _above))  # fmt: skip
HEL.add(120, "ACCEPT with other reply bytes", "REQ-HEL-7", "staging of another size than replies",
        partial(bad_accept, lambda accept, hello: {"reply_bytes": accept.reply_bytes + 8}))  # fmt: skip
HEL.add(121, "ACCEPT with other tap row bytes", "REQ-HEL-7", "taps of another size",
        partial(bad_accept, lambda accept, hello: {"tap_row_bytes": accept.tap_row_bytes + 2}))  # fmt: skip
HEL.add(122, "ACCEPT of another wire version", "REQ-HEL-4", "a silent upgrade",
        partial(bad_accept, lambda accept, hello: {"wire_version": 0x0201}))  # fmt: skip
HEL.add(123, "ACCEPT with another compatibility hash", "REQ-HEL-10", "an answer to another verifier",
        partial(bad_accept, lambda accept, hello: {"compat_hash": bytes(32)}))  # fmt: skip
HEL.add(124, "ACCEPT with a capability that was not offered", "REQ-HEL-5", "a feature that only one side has",
        partial(bad_accept, lambda accept, hello: {"capabilities": 1 << 40}))  # fmt: skip


def _connects_at_once(hello: Hello, t: VerifierUnderTest) -> None:
    """``hello`` is still the one that counts."""
    t.connect()
    t.serves()
    if t.hello is None or t.hello.serial != hello.serial:
        raise Unmet("no other HELLO", "another HELLO", actual_frame=t.hello_frame)


def _stale_accept(change: Callable[[Accept], dict[str, Any]], t: VerifierUnderTest) -> None:
    """An ACCEPT of another HELLO is dropped; the right one still counts."""
    hello = t.hello or t.await_hello()
    accept = t.accept_for(hello)
    t.say(replace(accept, **change(accept)))
    _connects_at_once(hello, t)


HEL.add(
    130,
    "ACCEPT of an older HELLO",
    "REQ-HEL-10",
    "an answer that is taken for another one's",
    partial(_stale_accept, lambda accept: {"serial": (accept.serial - 1) % 2**32, "epoch": accept.epoch ^ 1}),
)
HEL.add(
    131,
    "ACCEPT for another process",
    "REQ-HEL-10",
    "an answer that is taken for another one's",
    partial(_stale_accept, lambda accept: {"verifier_epoch": accept.verifier_epoch ^ 1, "epoch": accept.epoch ^ 1}),
)


@HEL.case(132, "ACCEPT with fields out of range is dropped", "REQ-HEL-9", "an absurd limit that is agreed to")
def absurd(t: VerifierUnderTest) -> None:
    hello = t.hello or t.await_hello()
    accept = replace(t.accept_for(hello), epoch=t.epoch ^ 1)
    for name, value in (("heartbeat_ms", 0), ("step_deadline_ms", 600_001), ("checksum_kind", 0), ("max_in_flight", 1)):
        t.send(with_values(accept, {position_of(Accept, name): value}))
    t.connect()
    t.serves()


@HEL.case(133, "REJECT, then a drafter that accepts", "REQ-LIF-1", "a verifier that gives up for ever")
def rejected(t: VerifierUnderTest) -> None:
    hello = t.hello or t.await_hello()
    t.say(Reject(t.epoch, hello.epoch, hello.serial, E.INCOMPATIBLE, "vocab_size", "1", "2"))
    no_session(t)
    t.restart()
    t.connect()
    t.serves()


@HEL.case(134, "REJECT of an older HELLO is dropped", "REQ-HEL-10", "an answer that is taken for another one's")
def stale_reject(t: VerifierUnderTest) -> None:
    hello = t.hello or t.await_hello()
    t.say(Reject(t.epoch, hello.epoch, (hello.serial - 1) % 2**32, E.INCOMPATIBLE, "", "", ""))
    _connects_at_once(hello, t)


@HEL.case(135, "frames before ACCEPT", "REQ-LIF-2", "slots without negotiated limits")
def early(t: VerifierUnderTest) -> None:
    t.hello or t.await_hello()
    key = Key(0, 1, 1)
    t.send(raw_frame(MessageType.ROW, b"\x90", key), raw_frame(MessageType.COMPLETION, b"\x90", key))
    t.say(Ping(t.epoch, 1))
    t.say(Drain(t.epoch, 1000))
    t.connect()
    t.serves()


@HEL.case(136, "a restarted drafter is found again", "REQ-LIF-4", "sessions of a process that is gone")
def restarted(t: VerifierUnderTest) -> None:
    serials = []
    for _ in range(3):
        t.connect()
        t.serves()
        serials.append(t.restart().serial)
    if len(set(serials)) != 3:
        raise Unmet("a new serial with each HELLO", str(serials))
    t.epoch ^= 0xFF
    t.connect()
    t.serves()


@HEL.case(137, "no answer for 10 s", "REQ-HEL-12", "waiting for ever", level=Level.SHOULD, tags=("slow",))
def no_answer(t: VerifierUnderTest) -> None:
    first = t.hello or t.await_hello()
    again = t.await_hello(PATIENCE_MS)
    if again.serial == first.serial:
        raise Unmet("a new serial", str(again.serial))
    t.connect()
    t.serves()


@VER.case(100, "a drafter of version 1 only", "REQ-VER-1", "a v1 drafter that is talked to in v2")
def version_one(t: VerifierUnderTest) -> None:
    hello = t.hello or t.await_hello()
    t.say(Reject(t.epoch, hello.epoch, hello.serial, E.BAD_VERSION, "HELLO.wire_versions", "", ""))
    no_session(t)
    t.restart()
    t.connect()
    t.serves()


VER.add(101, "ACCEPT of version 3", "REQ-HEL-4", "a silent upgrade",
        partial(bad_accept, lambda accept, hello: {"wire_version": 0x0300}))  # fmt: skip
VER.add(102, "ACCEPT of version 1", "REQ-HEL-4", "a silent downgrade",
        partial(bad_accept, lambda accept, hello: {"wire_version": 0x0100}))  # fmt: skip
