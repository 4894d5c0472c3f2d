"""Two connections joined in memory: the fixture of the transcript tests."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field, replace
from typing import Any

from dspark_proto import (
    Accepted,
    Buffer,
    Checksum,
    Compatibility,
    DrafterConnection,
    Dtype,
    ErrorCode,
    HelloParameters,
    HelloReceived,
    Key,
    Lane,
    Scope,
    StepItem,
    SupportPolicy,
    VerifierConnection,
    decode_frame,
    encode_frame,
    prefix_digest,
)
from dspark_proto.bodies import describe
from dspark_proto.messages import ErrorMessage, Step
from dspark_proto.registry import BodyKind

VOCAB = 1000
SESSION = 77
MS = 1_000_000
ANCHOR = 42
"""Default anchor; a prefix of rounds in which nothing was accepted is a run of it."""

TAP_LAYERS = (2, 14, 26)
TAP_WIDTH = 8
TAP_ROW_BYTES = len(TAP_LAYERS) * TAP_WIDTH * 2


def compatibility(**changes: Any) -> Compatibility:
    """Small, valid compatibility fields."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "token_map_hash": hashlib.sha256(b"map").digest(),
        "draft_identity": "draft@1234",
        "target_identity": "target@5678",
        "tokenizer_hash": hashlib.sha256(b"tokenizer").digest(),
        "tap_layers": TAP_LAYERS,
        "tap_dtype": Dtype.BF16,
        "tap_width": TAP_WIDTH,
    }
    return Compatibility(**(fields | changes))


def parameters(epoch: int, compat: Compatibility | None = None, **changes: Any) -> HelloParameters:
    """Parameters of one side; ``changes`` are HelloParameters fields."""
    fields: dict[str, Any] = {"max_slots": 4, "max_depth": 5, "max_support": 32, "max_in_flight": 4}
    return HelloParameters(compat or compatibility(), epoch, **(fields | changes))


def taps(rows: int, fill: int = 1) -> bytes:
    """Raw tap rows."""
    return bytes([fill]) * (rows * TAP_ROW_BYTES)


@dataclass
class Pair:
    """A verifier and a drafter that exchange frames directly; ``log`` keeps what they told their callers."""

    verifier: VerifierConnection
    drafter: DrafterConnection
    now_ns: int = 0
    verifier_events: list[Any] = field(default_factory=list)
    drafter_events: list[Any] = field(default_factory=list)

    def up(self, *frames: Buffer) -> list[Any]:
        """Deliver frames to the drafter; returns its events."""
        events = [event for frame in frames for event in self.drafter.receive(frame, self.now_ns)]
        self.drafter_events += events
        return events

    def down(self, *frames: Buffer) -> list[Any]:
        """Deliver frames to the verifier; returns its events."""
        events = [event for frame in frames for event in self.verifier.receive(frame, self.now_ns)]
        self.verifier_events += events
        return events

    def settle(self) -> list[Any]:
        """Exchange automatic frames until both outboxes are empty; returns the verifier's events."""
        events = []
        while True:
            up, down = self.verifier.frames_to_send(), self.drafter.frames_to_send()
            if not up and not down:
                return events
            self.up(*up)
            events += self.down(*down)

    def open(self, slot: int = 0, session: int = SESSION, **changes: Any) -> None:
        """Lease a slot in the ratio lane with 32 entries per row."""
        fields: dict[str, Any] = {"seed": -5, "support": SupportPolicy.K32, "lane": Lane.RATIO}
        self.up(self.verifier.open(slot, session, **(fields | changes)))

    def item(self, round_: int = 1, slot: int = 0, session: int = SESSION, **changes: Any) -> StepItem:
        """A STEP item that brings one tap row and stands on it."""
        first = self.verifier.context_end(slot)
        rows = changes.pop("tap_rows", 1)
        fields: dict[str, Any] = {
            "session": session,
            "slot": slot,
            "generation": self.verifier.generation(slot),
            "round": round_,
            "anchor_token": ANCHOR,
            "anchor_position": first + rows,
            "prefix_digest": digest_of(*[ANCHOR] * (first + rows)),
            "depth": 5,
            "lane": Lane.RATIO,
            "tap_first": first,
            "tap_rows": rows,
            "taps": taps(rows),
        }
        return StepItem(**(fields | changes))

    def step(self, *items: StepItem) -> list[StepItem]:
        """Send a STEP; returns the items that the drafter got."""
        events = self.up(self.verifier.step(items, self.now_ns))
        return [item for event in events for item in event.items]


def reply_arrays(depth: int = 5, support: int = 32, token: int = 7) -> dict[str, Any]:
    """Arguments of ``DrafterConnection.reply``: rows with all mass on one token."""
    ids, q = array("i", [0] * depth * support), array("f", [0.0] * depth * support)
    for row in range(depth):
        ids[row * support], q[row * support] = token, 1.0
    return {
        "tokens": [token] * depth,
        "entries": [1] * depth,
        "ids": memoryview(ids).cast("B"),
        "q": memoryview(q).cast("B"),
    }


def connect(
    verifier: HelloParameters | None = None, drafter: HelloParameters | None = None, **kwargs: Any
) -> Pair:
    """A pair that has completed HELLO; ``kwargs`` go to the verifier."""
    pair = Pair(
        VerifierConnection(verifier or parameters(epoch=100), **kwargs),
        DrafterConnection(drafter or parameters(epoch=200)),
    )
    (received,) = pair.up(pair.verifier.hello(pair.now_ns))
    assert isinstance(received, HelloReceived)
    assert received.code is None
    (accepted,) = pair.down(pair.drafter.accept(pair.now_ns))
    assert isinstance(accepted, Accepted)
    return pair


def digest_of(*tokens: int) -> bytes:
    """Prefix digest of a few tokens."""
    return prefix_digest(tokens)


STEP_DEADLINE = 1000 * MS


def counted(counters: dict[str, int]) -> dict[str, int]:
    """The causes that occurred."""
    return {name: count for name, count in counters.items() if count}


def tokens_bytes(*tokens: int) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def reply_frames(pair: Pair, round_: int = 1) -> list[bytearray]:
    (item,) = pair.step(pair.item(round_))
    return [bytearray(frame) for frame in pair.drafter.reply(item, **reply_arrays())]


def rebuilt(frame: bytearray, key: Key | None = None, **changes: Any) -> memoryview:
    """A reply frame with some control fields changed, checksums right."""
    decoded = decode_frame(frame)
    message = replace(decoded.message, **changes)
    return encode_frame(message, key or decoded.prefix.key, decoded.bodies)


def error_frame(code: ErrorCode, scope: Scope, key: Key | None = None) -> memoryview:
    message = ErrorMessage(code, scope, SESSION, "test")
    return encode_frame(message) if key is None else encode_frame(message, key)


def corrupted(frame: memoryview, offset: int) -> bytearray:
    copy = bytearray(frame)
    copy[offset] ^= 0x20
    return copy


def forged(pair: Pair, **changes: Any) -> memoryview:
    """A STEP that our own verifier would refuse to send."""
    item = replace(pair.item(1), **changes)
    body = describe(BodyKind.TAPS, Dtype.BF16, 1, 24, item.taps, Checksum.XXH3_64)
    return encode_frame(Step((item,), (body,)), Key(item.slot, item.generation, item.round), [item.taps])
