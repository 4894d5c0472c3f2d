"""HEL and VER for drafters: who may connect, under which terms, and what a restart looks like.

Spec: SPEC.md 3, 6, 16. Called by `catalogue`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

from ..frame import encode_frame
from ..hello import CAPACITIES, Compatibility, Hello, Reject
from ..messages import Completion, Drain, ErrorMessage, Ping, Row
from ..negotiation import hello_message
from ..prefix import Key
from ..registry import Checksum, DraftLayout, Dtype, ErrorCode, Lane, MessageType, Representation, Scope
from .as_verifier import DrafterUnderTest
from .forge import NEWER_TYPE, changed, patched, position_of, raw_frame, with_values
from .record import Family, Level, Role
from .verdicts import Unmet

HEL = Family("HEL", Role.DRAFTER)
VER = Family("VER", Role.DRAFTER)
E = ErrorCode


@HEL.case(1, "HELLO is accepted, and a round follows", "REQ-HEL-10", "no answer, or one to another HELLO")
def happy(t: DrafterUnderTest) -> None:
    accept = t.hello()
    if accept.compat_hash != sha256(t.facts.compatibility.encoded()).digest():
        raise Unmet("the compatibility hash of the HELLO", accept.compat_hash.hex())
    t.open()
    t.round()


@HEL.case(
    2, "ACCEPT echoes epoch and serial of each HELLO", "REQ-HEL-10", "an answer that cannot be told from an older one"
)
def echo(t: DrafterUnderTest) -> None:
    for epoch in (1, 2**64 - 1, 7):
        t.epoch = epoch
        t.hello()


def _minimum(name: str, t: DrafterUnderTest) -> None:
    """Offer less and then more of one capacity: ACCEPT has the minimum, and exact sizes."""
    usual = getattr(t.hello(), name)
    field = next(capacity for capacity in CAPACITIES if capacity.name == name)
    for value in (field.minimum, field.maximum):
        parameters = changed(t.parameters(), **{name: value})
        t.serial += 1
        answer = t.answer_to(hello_message(parameters, t.serial))
        if isinstance(answer, Reject):
            raise Unmet("ACCEPT", f"REJECT {answer.code.name}")
        got = getattr(answer, name)
        if got > value or (value == field.minimum and got != value):
            raise Unmet(f"{name} at most {value}", str(got))
        if value == field.maximum and got < usual:
            raise Unmet(f"{name} at least {usual}", str(got))
        if answer.reply_bytes != answer.max_depth * (16 + 8 * answer.max_support):
            raise Unmet("reply bytes that follow from depth and support", str(answer.reply_bytes))


for _number, _capacity in enumerate(CAPACITIES, 3):
    HEL.add(
        _number, f"{_capacity.name}: the minimum of both sides", "REQ-HEL-6", "a capacity taken from one side",
        partial(_minimum, _capacity.name),
    )  # fmt: skip


@HEL.case(
    10, "ACCEPT has the tap row bytes that follow from HELLO", "REQ-HEL-7", "sizes that the two sides compute apart"
)
def tap_bytes(t: DrafterUnderTest) -> None:
    wanted = t.facts.compatibility.tap_row_bytes
    for offer in ({}, {"checksums": 0b01}, {"heartbeat_ms": 1}):
        accept = t.hello(**offer)
        if accept.tap_row_bytes != wanted:
            raise Unmet(f"{wanted} tap row bytes", str(accept.tap_row_bytes))


_OTHER: dict[str, Any] = {
    "vocab_size": lambda c: c.vocab_size + 1,
    "token_map_hash": lambda c: bytes(32),
    "draft_identity": lambda c: c.draft_identity[:90] + "x",
    "target_identity": lambda c: c.target_identity[:90] + "x",
    "tokenizer_hash": lambda c: bytes(32),
    "tap_layers": lambda c: (*c.tap_layers[:-1], c.tap_layers[-1] + 1),
    "tap_dtype": lambda c: Dtype.FP32 if c.tap_dtype is Dtype.BF16 else Dtype.BF16,
    "tap_width": lambda c: c.tap_width + 1,
    "draft_layout": lambda c: DraftLayout.ADAPTED if c.draft_layout is DraftLayout.NATIVE else DraftLayout.NATIVE,
    "lanes": lambda c: c.lanes ^ 1 << (Lane.GREEDY - 1) or 1,
    "wire_major": lambda c: 3,
}


def _hello_with(t: DrafterUnderTest, compatibility: Compatibility) -> Hello:
    encoded = compatibility.encoded()
    return t.offer(compat=encoded, compat_hash=sha256(encoded).digest())


def _incompatible(name: str, t: DrafterUnderTest) -> None:
    """One field differs: REJECT names it and shows both values; the next good HELLO is accepted."""
    ours = t.facts.compatibility
    other = replace(ours, **{name: _OTHER[name](ours)})
    reject = t.rejected(_hello_with(t, other), E.INCOMPATIBLE)
    if reject.field != name or not reject.drafter_value or not reject.verifier_value:
        raise Unmet(f"field {name} with both values", f"{reject.field} {reject.drafter_value} {reject.verifier_value}")
    if reject.drafter_value == reject.verifier_value:
        raise Unmet("two different values", reject.drafter_value)
    t.hello()


for _number, _name in enumerate(_OTHER, 11):
    HEL.add(
        _number, f"another {_name} is rejected by name", "REQ-HEL-3",
        "drafting for another model, or a refusal that nobody can act on", partial(_incompatible, _name),
    )  # fmt: skip


@HEL.case(30, "a hash that is not that of compat", "REQ-HEL-1", "trusting a declared hash")
def wrong_hash(t: DrafterUnderTest) -> None:
    t.rejected(t.offer(compat_hash=bytes(32)), E.BAD_FIELD)
    other = replace(t.facts.compatibility, vocab_size=t.facts.compatibility.vocab_size + 1)
    ours = sha256(t.facts.compatibility.encoded()).digest()
    t.rejected(t.offer(compat=other.encoded(), compat_hash=ours), E.BAD_FIELD)
    t.hello()


@HEL.case(31, "compat that is not canonical", "REQ-HEL-2", "decoding foreign bytes loosely")
def loose_compat(t: DrafterUnderTest) -> None:
    for compat, code in ((b"\xc1", E.NONCANONICAL), (b"\x90", E.BAD_FIELD), (b"\x80", E.NONCANONICAL)):
        t.rejected(t.offer(compat=compat, compat_hash=sha256(compat).digest()), code)
    t.hello()


@HEL.case(
    32, "unknown capability bits are ignored", "REQ-HEL-5", "refusing what a newer peer offers, or agreeing to it"
)
def capabilities(t: DrafterUnderTest) -> None:
    accept = t.hello(capabilities=2**63 | 2**40)
    if accept.capabilities:
        raise Unmet("capabilities 0", str(accept.capabilities))


@HEL.case(33, "unknown checksum bits are ignored", "REQ-HEL-5", "refusing what a newer peer offers, or agreeing to it")
def checksum_bits(t: DrafterUnderTest) -> None:
    t.hello(checksums=2**15 | 0b11)
    t.open()
    t.round()


def _checksum(mask: int, kind: Checksum, t: DrafterUnderTest) -> None:
    accept = t.hello(checksums=mask)
    if accept.checksum_kind is not kind:
        raise Unmet(kind.name, accept.checksum_kind.name)
    t.open()
    t.round()


HEL.add(34, "CRC32C when it is all that is common", "REQ-HEL-8", "a mandatory checksum that is not implemented",
        partial(_checksum, 0b01, Checksum.CRC32C))  # fmt: skip
HEL.add(35, "XXH3-64 when both know it", "REQ-HEL-8", "another choice than the standard's",
        partial(_checksum, 0b11, Checksum.XXH3_64))  # fmt: skip


@HEL.case(36, "no common checksum", "REQ-HEL-8", "going on without checksums")
def no_checksum(t: DrafterUnderTest) -> None:
    t.rejected(t.offer(checksums=2**14), E.NO_COMMON_CHECKSUM)
    t.hello()


@HEL.case(37, "reply bytes that do not follow from the capacities", "REQ-HEL-7", "staging of another size than replies")
def reply_bytes(t: DrafterUnderTest) -> None:
    right = t.offer().reply_bytes
    for wrong in (0, right - 1, right + 4, 2**32 - 1):
        t.rejected(t.offer(reply_bytes=wrong), E.BAD_NEGOTIATION)
    t.hello()


@HEL.case(38, "auth that this version does not have", "REQ-HEL-11", "ignoring a secret that the peer relies on")
def auth(t: DrafterUnderTest) -> None:
    for value in (b"\0", b"secret", bytes(64)):
        t.rejected(t.offer(auth=value), E.AUTH_UNSUPPORTED)
    t.hello()


def _absurd(name: str, value: int, t: DrafterUnderTest) -> None:
    """A HELLO with a field out of range is no HELLO: it is counted, and the connection goes on."""
    t.hello()
    t.open()
    hello = t.offer()
    t.drops(E.BAD_FIELD, with_values(hello, {position_of(Hello, name): value}))
    t.alive()


for _number, _name, _value, _anchor in (
    (40, "heartbeat_ms", 0, "REQ-HEL-9"),
    (41, "heartbeat_ms", 600_001, "REQ-HEL-9"),
    (42, "step_deadline_ms", 0, "REQ-HEL-9"),
    (43, "step_deadline_ms", 600_001, "REQ-HEL-9"),
    (44, "max_slots", 0, "REQ-LIM-1"),
    (45, "max_slots", 1025, "REQ-LIM-1"),
    (46, "max_depth", 0, "REQ-LIM-1"),
    (47, "max_depth", 33, "REQ-LIM-1"),
    (48, "max_support", 257, "REQ-LIM-1"),
    (49, "max_in_flight", 1, "REQ-LIM-1"),
    (50, "checksums", 0, "REQ-CRC-4"),
):
    HEL.add(_number, f"HELLO with {_name} {_value}", _anchor, "an absurd limit that is agreed to",
            partial(_absurd, _name, _value))  # fmt: skip


@HEL.case(
    60, "HELLO on a live connection ends it first", "REQ-LIF-4", "slots and replies of the old connection that live on"
)
def second_hello(t: DrafterUnderTest) -> None:
    t.hello()
    old = t.open()
    t.round()
    key = old.key
    t.hello()
    t.holds_nothing()
    t.drops(E.SLOT_NOT_OPEN, raw_frame(MessageType.COMMIT, b"\x90", key))
    t.open()
    t.round()


@HEL.case(61, "credit starts again with each HELLO", "REQ-LIF-4", "credit of the old connection that lives on")
def credit_again(t: DrafterUnderTest) -> None:
    for _ in range(3):
        accept = t.hello()
        t.open(prompt=0)
        t.context(0, min(accept.context_credit_rows, 8))
        t.alive()


@HEL.case(62, "a REJECT leaves no connection behind", "REQ-LIF-2", "slots for a verifier that was refused")
def after_reject(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    t.rejected(t.offer(auth=b"x"), E.AUTH_UNSUPPORTED)
    t.send(encode_frame(Ping(t.epoch, 5)))
    answer = t.link.receive(t.facts.quiet_ms or 50)
    if answer is not None and answer[6] != MessageType.ERROR:
        raise Unmet("no PONG", f"a frame of type {answer[6]}", actual_frame=answer)
    t.hello()
    t.holds_nothing()


@HEL.case(63, "frames before HELLO are dropped", "REQ-LIF-3", "a slot without negotiated limits")
def early(t: DrafterUnderTest) -> None:
    for kind in (MessageType.OPEN, MessageType.STEP, MessageType.RESET):
        t.send(raw_frame(kind, b"\x90", Key(0, 1)))
    t.send(t_hello := bytes(encode_frame(t.offer())))
    frames = []
    while True:
        frame, _ = t.next("ACCEPT")
        if frame.message.TYPE is MessageType.ACCEPT:
            break
        frames.append(frame.message)
    if any(not isinstance(one, ErrorMessage) or one.scope is not Scope.CONNECTION for one in frames):
        raise Unmet("nothing but ERROR HELLO_REQUIRED before ACCEPT", str(frames), t_hello)
    t.hello()
    t.holds_nothing()


@HEL.case(64, "the first frame before HELLO gets ERROR HELLO_REQUIRED, once", "REQ-LIF-3",
          "a verifier that never learns of a restart", level=Level.SHOULD)  # fmt: skip
def told_once(t: DrafterUnderTest) -> None:
    ping = encode_frame(Ping(t.epoch, 1))
    t.send(ping)
    frame, raw = t.expect(ErrorMessage, "ERROR HELLO_REQUIRED")
    error = frame.message
    assert isinstance(error, ErrorMessage)
    if (error.code, error.scope) != (E.HELLO_REQUIRED, Scope.CONNECTION):
        raise Unmet("HELLO_REQUIRED with scope CONNECTION", f"{error.code.name} {error.scope.name}", actual_frame=raw)
    t.send(ping, ping)
    t.hello()


@HEL.case(65, "messages of the other direction", "REQ-LIF-1", "a state machine that takes messages from the wrong side")
def wrong_side(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    key = t.slots[0].key
    t.drops(E.UNEXPECTED_MESSAGE, encode_frame(Drain(t.epoch, 1000)))
    row = Row(1, t.epoch, 0, 1, 1, 16, Representation.SPARSE, ())
    completion = Completion(1, t.epoch, 0, 0, bytes(8), 0, 0, 0, bytes(8))
    t.drops(E.UNEXPECTED_MESSAGE, encode_frame(row, key), encode_frame(completion, key))
    reject = Reject(1, t.epoch, 1, E.INCOMPATIBLE, "", "", "")
    t.drops(E.UNEXPECTED_MESSAGE, encode_frame(reject))
    t.alive()


@HEL.case(66, "the epoch stays the same in one process", "REQ-HEL-10", "an epoch that changes with each HELLO")
def epoch(t: DrafterUnderTest) -> None:
    epochs = {t.hello().epoch for _ in range(3)}
    if len(epochs) != 1:
        raise Unmet("one epoch", str(epochs))


def _versions(versions: tuple[int, ...], t: DrafterUnderTest) -> None:
    """The HELLO is version 2's in all else: a drafter of version 1 too finds it incompatible (REQ-HEL-15)."""
    known = t.facts.version_1 and 0x0100 in versions
    t.rejected(t.offer(wire_versions=versions), E.INCOMPATIBLE if known else E.BAD_VERSION)
    t.hello()


for _number, _title, _offered in (
    (1, "a version 1 verifier", (0x0100,)),
    (2, "a version 3 verifier", (0x0300,)),
    (3, "a verifier of 2.1 only", (0x0201,)),
    (4, "8 unknown versions", tuple(range(0x0900, 0x0908))),
    (5, "version 0", (0,)),
):
    VER.add(
        _number, f"{_title} is rejected", "REQ-HEL-4", "a silent upgrade or downgrade", partial(_versions, _offered)
    )


@VER.case(6, "2.0 among others is chosen", "REQ-HEL-4", "a silent upgrade or downgrade")
def among(t: DrafterUnderTest) -> None:
    for versions in ((0x0300, 0x0200), (0x0200, 0x0100), (0x0100, 0x0200, 0x0201, 0x0300)):
        accept = t.hello(wire_versions=versions)
        if accept.wire_version != 0x0200:
            raise Unmet("version 0x0200", hex(accept.wire_version))
    t.open()
    t.round()


@VER.case(7, "HELLO in another major version's frame", "REQ-PFX-4", "decoding the frame of another version")
def major(t: DrafterUnderTest) -> None:
    t.hello()
    t.drops(E.BAD_VERSION, patched(bytes(encode_frame(t.offer())), "major", 1))


@VER.case(8, "HELLO with another minor version in the prefix", "REQ-PFX-4", "refusing a newer minor version")
def minor(t: DrafterUnderTest) -> None:
    hello = t.offer()
    answer = t.answer_to(patched(bytes(encode_frame(hello)), "minor", 3))
    if isinstance(answer, Reject):
        raise Unmet("ACCEPT", f"REJECT {answer.code.name}")


@VER.case(9, "a newer message type is a counted drop", "REQ-VER-1", "an unknown type that ends the connection")
def newer_type(t: DrafterUnderTest) -> None:
    t.hello()
    t.open()
    ping = bytes(encode_frame(Ping(t.epoch, 1)))
    t.drops(E.UNKNOWN_TYPE, patched(ping, "type", NEWER_TYPE), patched(ping, "type", 64))
    t.alive()
