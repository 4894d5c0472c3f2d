"""A drafter in plain Python that shares no code with this package: how to implement a peer of proto/SPEC.md.

It has no model: it drafts what followed the last token earlier in the same text (a bigram count). Invariants: a frame
is dropped as early as its order of trust allows; the row that goes out is the one that the token was drawn from; a
repeated STEP gets the bytes of the first reply; no received byte ends the process. Explained in
docs/guides/implement-a-peer.md; run by tests/proto/test_example_peer.py. Loopback only, for it authenticates nobody.
"""

from __future__ import annotations

import argparse
import hashlib
import secrets
import struct
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import xxhash
import zmq
from plain_frames import (
    ACCEPT,
    CANCEL,
    CLOSE,
    COMMIT,
    COMPLETION,
    CONTEXT,
    ERROR,
    HELLO,
    NO_KEY,
    OPEN,
    PING,
    PONG,
    REJECT,
    RESET,
    ROW,
    STATS,
    STEP,
    Key,
    Refused,
    checksum,
    encode,
    fits,
    read_bodies,
    read_control,
    read_prefix,
    require,
    unpack,
)
from plain_rows import MASS, Row, allocate, draw, pack_rows, philox

WIRE, NO_COMMIT, MATCH, GREEDY = 0x200, 255, 2, 3
TAPS, TOKENS, RECORDS, IDS, Q, ELEMENT_BYTES = 1, 2, 3, 4, 5, {1: 2, 2: 4}
STEP_FIELDS = "uuuuuubuuuuuuu"
SLOTS, DEPTH, SUPPORT, IN_FLIGHT, CREDIT_ROWS, HEARTBEAT_MS, DEADLINE_MS = 16, 8, 64, 16, 4096, 10_000, 600_000
COMPAT_NAMES = (
    "vocab_size", "token_map_hash", "draft_identity", "target_identity", "tokenizer_hash", "tap_layers", "tap_dtype",
    "tap_width", "draft_layout", "semantic_id", "verifier_id", "rng_abi", "precision", "lanes", "wire_major",
)  # fmt: skip
# Refusals that are counted and not answered, for the sender has moved on; and those that end more than a generation.
SILENT = {"STALE_GENERATION", "STALE_ROUND", "SLOT_NOT_OPEN", "WRONG_SESSION", "SLOT_NEEDS_RESET", "DUPLICATE"}
WIDER = {"SLOT_OUT_OF_RANGE": 4, "SLOT_BUSY": 4, "HELLO_REQUIRED": 5}
CODES = {
    "BAD_MAGIC": 1, "BAD_PREFIX_CRC": 2, "BAD_VERSION": 3, "UNKNOWN_TYPE": 4, "RESERVED_NOT_ZERO": 5, "WRONG_SIZE": 6,
    "LIMIT_EXCEEDED": 7, "BAD_CONTROL_CRC": 8, "NONCANONICAL": 9, "BAD_FIELD": 10, "BAD_DESCRIPTOR": 11,
    "BAD_PADDING": 12, "BAD_BODY_CHECKSUM": 13, "HELLO_REQUIRED": 32, "UNEXPECTED_MESSAGE": 33, "INCOMPATIBLE": 34,
    "NO_COMMON_CHECKSUM": 35, "BAD_NEGOTIATION": 36, "WRONG_EPOCH": 37, "AUTH_UNSUPPORTED": 39,
    "SLOT_OUT_OF_RANGE": 64, "SLOT_BUSY": 65, "SLOT_NOT_OPEN": 66, "WRONG_SESSION": 67, "STALE_GENERATION": 68,
    "STALE_ROUND": 69, "ROUND_KEY_REUSED": 70, "CONTEXT_GAP": 72, "ANCHOR_MISMATCH": 73, "DIGEST_MISMATCH": 74,
    "COMMIT_MISMATCH": 75, "DEPTH_OUT_OF_RANGE": 76, "LANE_MISMATCH": 77, "SUPPORT_OUT_OF_RANGE": 78,
    "CREDIT_EXCEEDED": 79, "SLOT_NEEDS_RESET": 80, "DUPLICATE": 83, "TOKEN_OUT_OF_RANGE": 85,
}  # fmt: skip


@dataclass
class Slot:
    """One session's place. ``digest`` covers the positions before ``end``; ``known`` are the tokens from there on."""

    generation: int = 0
    session: int | None = None
    opened: int = 0
    choice: int = 0
    seed: int = 0
    greedy: bool = False
    support: int = 1
    lane: int = 0
    dormant: bool = False
    end: int = 0
    digest: bytes | None = b""
    round: int = -1
    item: tuple[Any, ...] = ()
    drafted: list[int] = field(default_factory=list)
    committed: list[int] | None = None
    known: list[int] = field(default_factory=list)
    reply: list[bytes] = field(default_factory=list)
    last: int | None = None
    followers: dict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))

    def begin(self, generation: int, end: int, digest: bytes) -> None:
        """A new generation: nothing of the old one survives, cached replies included."""
        self.generation, self.end, self.digest, self.round, self.item = generation, end, digest, -1, ()
        self.drafted, self.committed, self.known, self.reply, self.last = [], None, [], [], None
        self.followers, self.dormant = defaultdict(Counter), False

    def learn(self, token: int) -> None:
        """Take in the next token of the text."""
        if self.last is not None:
            self.followers[self.last][token] += 1
        self.last = token

    def row(self, token: int, vocab: int) -> Row:
        """q of the token after ``token``: one entry when ids are all that is wanted, else what followed before."""
        seen = self.followers.get(token)
        if not seen:
            return [((token + 1) % vocab, MASS)]
        row = allocate(seen, self.support)
        if self.greedy or self.lane in (MATCH, GREEDY):
            return [(max(row, key=lambda pair: (pair[1], -pair[0]))[0], MASS)]
        return row


def extend(digest: bytes, tokens: list[int]) -> bytes:
    for token in tokens:
        digest = xxhash.xxh3_64_intdigest(digest + struct.pack("<I", token)).to_bytes(8, "little")
    return digest


class Peer:
    """Everything of one verifier's connection. ``receive`` takes a frame and returns the frames to send."""

    def __init__(self, epoch: int, compat: bytes) -> None:
        self.epoch, self.compat = epoch, compat
        self.counters: Counter[int] = Counter()
        self.verifier: int | None = None
        self.slots: list[Slot] = []
        self.told = False

    def receive(self, frame: bytes) -> list[bytes]:
        key = NO_KEY
        try:
            kind, key, *_ = read_prefix(frame)
            if kind == HELLO:
                return [self.hello(read_control(frame))]
            require(self.verifier is not None, "HELLO_REQUIRED")
            if kind in (OPEN, CONTEXT, COMMIT, RESET, CANCEL, CLOSE):
                slot = self.admit(kind, key)
                return self.HANDLERS[kind](self, slot, key, read_control(frame), frame)
            if kind == STEP:
                return self.step(key, frame)
            return self.answer(kind, read_control(frame))
        except Refused as refusal:
            return self.refuse(str(refusal), key)

    def refuse(self, code: str, key: Key) -> list[bytes]:
        """Section 12: count everything; tell the sender what it does not know; the slot is dead until RESET."""
        self.counters[CODES[code]] += 1
        if code == "HELLO_REQUIRED" and not self.told:
            self.told = True
            return [encode(ERROR, NO_KEY, [CODES[code], 5, 0, "connection"])]
        if code in SILENT or key == NO_KEY or self.verifier is None:
            return []
        scope, session = WIDER.get(code, 3), 0
        if key[0] < len(self.slots):
            slot = self.slots[key[0]]
            session = slot.session or 0
            if scope == 3 and slot.session is not None and slot.generation == key[1]:
                slot.begin(slot.generation, 0, b"")
                slot.dormant = True
        return [encode(ERROR, key, [CODES[code], scope, session, "plain peer"])]

    # Connection

    def hello(self, control: list[Any]) -> bytes:
        versions, compat_hash, compat, epoch, serial, *rest = control
        offered, (checksums, reply_bytes, capabilities, auth) = rest[:7], rest[7:]
        self.slots, self.verifier, self.told = [], None, False
        refusal = self.objection(versions, compat_hash, compat, offered, checksums, reply_bytes, capabilities, auth)
        if refusal:
            self.counters[CODES[refusal[0]]] += 1
            return encode(REJECT, NO_KEY, [self.epoch, epoch, serial, CODES[refusal[0]], *refusal[1:]])
        own = (SLOTS, DEPTH, SUPPORT, IN_FLIGHT, CREDIT_ROWS, HEARTBEAT_MS, DEADLINE_MS)
        terms = [min(pair) for pair in zip(own, offered, strict=True)]
        self.verifier, self.checksum = epoch, 2 if checksums & 2 else 1
        slots, self.depth, self.support, _, self.credit, *_ = terms
        self.vocab, self.lanes, self.dtype = (unpack(compat)[at] for at in (0, 13, 6))
        self.tap_entries = len(unpack(compat)[5]) * unpack(compat)[7]
        self.slots, self.rows, self.announced = [Slot() for _ in range(slots)], 0, self.credit
        tap_bytes = self.tap_entries * ELEMENT_BYTES[self.dtype]
        size = self.depth * (16 + 8 * self.support)
        sizes = [self.checksum, tap_bytes, size, 0]
        return encode(ACCEPT, NO_KEY, [WIRE, compat_hash, self.epoch, epoch, serial, *terms, *sizes, b""])

    def objection(self, versions: list[Any], compat_hash: bytes, compat: bytes, offered: list[int], checksums: int,
                  reply_bytes: int, capabilities: int, auth: bytes) -> tuple[str, str, str, str] | None:  # fmt: skip
        """(code, field, our value, theirs) of the first reason to say no. Hashes are compared before contents."""
        fields = unpack(compat)
        if self.compat and compat_hash != hashlib.sha256(self.compat).digest():
            pairs = zip(COMPAT_NAMES, unpack(self.compat), fields, strict=True)
            name, ours, theirs = next(one for one in pairs if one[1] != one[2])
            return "INCOMPATIBLE", name, str(ours)[:96], str(theirs)[:96]
        if WIRE not in versions:
            return "BAD_VERSION", "wire_versions", "", ""
        if auth:
            return "AUTH_UNSUPPORTED", "auth", "", ""
        if not checksums & 3:
            return "NO_COMMON_CHECKSUM", "checksums", "", ""
        _, depth, support = offered[:3]
        width = max(8 * support, 4 * fields[0]) if capabilities & 1 else 8 * support
        return ("BAD_NEGOTIATION", "reply_bytes", "", "") if reply_bytes != depth * (16 + width) else None

    def answer(self, kind: int, control: list[Any]) -> list[bytes]:
        """PING, STATS; PONG and ERROR need no answer."""
        if kind == ERROR:
            return []
        require(kind in (PING, PONG, STATS), "UNEXPECTED_MESSAGE")
        require(control[0] == self.verifier, "WRONG_EPOCH")
        if kind == PING:
            return [self.pong(control[1])]
        require(kind != STATS or not control[1], "UNEXPECTED_MESSAGE")
        held = sum(slot.session is not None for slot in self.slots)
        cached, counted = sum(bool(slot.reply) for slot in self.slots), sorted(self.counters.items())
        report = [self.epoch, 1, held, 0, cached, 0, [list(pair) for pair in counted]]
        return [encode(STATS, NO_KEY, report)] if kind == STATS else []

    def pong(self, nonce: int) -> bytes:
        self.announced = self.credit + self.rows
        return encode(PONG, NO_KEY, [self.epoch, nonce, 0, self.announced])

    # Slots

    def admit(self, kind: int, key: Key) -> Slot:
        """Section 11, from the prefix alone."""
        require(key[0] < len(self.slots), "SLOT_OUT_OF_RANGE")
        slot = self.slots[key[0]]
        if kind in (OPEN, RESET, CANCEL, CLOSE):
            require(key[1] > slot.generation, "STALE_GENERATION")
        else:
            require(slot.session is not None, "SLOT_NOT_OPEN")
            require(key[1] == slot.generation, "STALE_GENERATION")
        return slot

    def open(self, slot: Slot, key: Key, control: list[Any], frame: bytes) -> list[bytes]:
        session, seed, temperature, support, lane, choice, start, digest, *_ = control
        require(1 <= support <= self.support, "SUPPORT_OUT_OF_RANGE")
        require(1 <= lane <= 3, "BAD_FIELD")
        require(bool(self.lanes >> (lane - 1) & 1), "LANE_MISMATCH")
        require(slot.session is None, "SLOT_BUSY")
        slot.begin(key[1], start, digest)
        slot.session, slot.opened, slot.seed, slot.choice = session, key[1], seed, choice
        slot.support, slot.lane, slot.greedy = support, lane, temperature == 0
        return []

    def context(self, slot: Slot, key: Key, control: list[Any], frame: bytes) -> list[bytes]:
        session, first, rows, described = control
        require(session == slot.session, "WRONG_SESSION")
        require(not slot.dormant, "SLOT_NEEDS_RESET")
        require(first == slot.end, "CONTEXT_GAP")
        require(self.rows + rows <= self.announced, "CREDIT_EXCEEDED")
        shapes = [self.tap_shape(rows), (TOKENS, 3, rows, 1, 4 * rows)][: max(1, len(described))]
        bodies = read_bodies(frame, described, shapes, self.checksum)
        tokens = [token for (token,) in struct.iter_unpack("<I", bodies[1])] if len(bodies) == 2 else None
        for token in tokens or ():
            slot.learn(token)
        slot.digest = extend(slot.digest, tokens) if tokens is not None and slot.digest is not None else None
        slot.end, slot.known, self.rows = slot.end + rows, [], self.rows + rows
        owed = (self.credit + self.rows - self.announced) * 4 >= self.credit
        return [self.pong(0)] if owed else []

    def tap_shape(self, rows: int) -> tuple[int, int, int, int, int]:
        return TAPS, self.dtype, rows, self.tap_entries, rows * self.tap_entries * ELEMENT_BYTES[self.dtype]

    def commit(self, slot: Slot, key: Key, control: list[Any], frame: bytes) -> list[bytes]:
        session, accepted, token, position, digest = control
        require(session == slot.session, "WRONG_SESSION")
        require(not slot.dormant, "SLOT_NEEDS_RESET")
        committed = [*slot.drafted[:accepted], token]
        require(slot.committed != committed, "DUPLICATE")
        require(slot.committed is None and 0 <= accepted <= len(slot.drafted) > 0, "COMMIT_MISMATCH")
        require(key[2] == slot.round, "STALE_ROUND")
        require(position == slot.end + accepted + 1, "COMMIT_MISMATCH")
        require(token < self.vocab, "TOKEN_OUT_OF_RANGE")
        survivors = [*slot.known[:1], *slot.drafted[:accepted]]
        require(slot.digest is None or extend(slot.digest, survivors) == digest, "DIGEST_MISMATCH")
        slot.committed, slot.known = committed, [*survivors, token]
        return []

    def reset(self, slot: Slot, key: Key, control: list[Any], frame: bytes) -> list[bytes]:
        self.owned(slot, control[0])
        slot.begin(key[1], control[2], control[3])
        return []

    def cancel(self, slot: Slot, key: Key, control: list[Any], frame: bytes) -> list[bytes]:
        self.owned(slot, control[0])
        slot.begin(key[1], 0, b"")
        slot.dormant = True
        return []

    def close(self, slot: Slot, key: Key, control: list[Any], frame: bytes) -> list[bytes]:
        self.owned(slot, control[0])
        slot.begin(key[1], 0, b"")
        slot.session = None
        return []

    def owned(self, slot: Slot, session: int) -> None:
        require(slot.session is not None, "SLOT_NOT_OPEN")
        require(session == slot.session, "WRONG_SESSION")

    HANDLERS = MappingProxyType(
        {OPEN: open, CONTEXT: context, COMMIT: commit, RESET: reset, CANCEL: cancel, CLOSE: close}
    )

    # Rounds: section 7.4

    def step(self, key: Key, frame: bytes) -> list[bytes]:
        if key != NO_KEY:
            self.admit(STEP, key)
        items, described = read_control(frame)
        require(0 < len(items) <= 32 and all(fits(item, STEP_FIELDS) for item in items), "BAD_FIELD")
        require(key == (tuple(items[0][1:4]) if len(items) == 1 else NO_KEY), "BAD_FIELD")
        require(len(described) == sum(item[13] > 0 for item in items), "BAD_DESCRIPTOR")
        expected = [self.tap_shape(item[13]) for item in items if item[13]]
        read_bodies(frame, described, expected, self.checksum)
        left, frames = iter(described), []
        for item in items:
            try:
                frames += self.round(tuple(item), next(left)[6] if item[13] else b"")
            except Refused as refusal:  # a faulty item does not hurt the others
                frames += self.refuse(str(refusal), tuple(item[1:4]))
        return frames

    def round(self, item: tuple[Any, ...], taps: bytes) -> list[bytes]:
        session, slot_index, generation, round_, anchor, position, _, depth, lane, _, _, token, first, rows = item
        slot = self.admit(STEP, (slot_index, generation, round_))
        require(session == slot.session, "WRONG_SESSION")
        require(not slot.dormant, "SLOT_NEEDS_RESET")
        if round_ == slot.round:
            require(slot.item == (*item, taps), "ROUND_KEY_REUSED")
            self.counters[CODES["DUPLICATE"]] += 1
            return slot.reply
        require(round_ > slot.round, "STALE_ROUND")
        require(1 <= depth <= self.depth, "DEPTH_OUT_OF_RANGE")
        require(lane == slot.lane, "LANE_MISMATCH")
        require(anchor < self.vocab and token < self.vocab, "TOKEN_OUT_OF_RANGE")
        require(first == slot.end, "CONTEXT_GAP")
        require(position == first + rows, "ANCHOR_MISMATCH")
        self.follow(slot, item)
        slot.end, slot.round, slot.item, slot.committed = position, round_, (*item, taps), None
        drafts = self.draft(slot, anchor, position, round_, depth)
        slot.drafted = [drafted for drafted, _ in drafts]
        slot.reply = self.reply(slot, (slot_index, generation, round_), item, drafts)
        return slot.reply

    def follow(self, slot: Slot, item: tuple[Any, ...]) -> None:
        """Take in what was committed since the last round, and hold the declared digest against it."""
        anchor, position, digest, accepted, token, rows = (item[at] for at in (4, 5, 6, 10, 11, 13))
        if accepted != NO_COMMIT:
            require(slot.committed is None and 0 <= accepted <= len(slot.drafted) > 0, "COMMIT_MISMATCH")
            ahead = position - (slot.end + accepted + 1)
            require(ahead > 0 or (ahead == 0 and anchor == token), "COMMIT_MISMATCH")
            slot.known = [*slot.known[:1], *slot.drafted[:accepted], token]
        passed = slot.known[:rows]
        if len(passed) == rows and slot.digest is not None:
            require(extend(slot.digest, passed) == digest, "DIGEST_MISMATCH")
        for one in passed[1:]:
            slot.learn(one)
        if len(passed) < rows:
            slot.last = None  # tokens that nobody told us stand between
        slot.learn(anchor)
        slot.digest, slot.known = digest, [anchor]

    def draft(self, slot: Slot, token: int, position: int, round_: int, depth: int) -> list[tuple[int, Row]]:
        """(token, row) for each position, each row given the tokens before it."""
        drafts = []
        for index in range(depth):
            row = slot.row(token, self.vocab)
            generation = (slot.generation - slot.opened) % 2**24 << 8 | slot.choice
            token = draw(row, philox([1 << 24, position + 1 + index, round_, generation], slot.seed))
            drafts.append((token, row))
        return drafts

    def reply(self, slot: Slot, key: Key, item: tuple[Any, ...], drafts: list[Any]) -> list[bytes]:
        bodies = pack_rows(drafts, slot.support)
        depth, shapes = len(drafts), ((RECORDS, 0, 16), (IDS, 3, slot.support), (Q, 2, slot.support))
        described = [
            [kind, dtype, depth, entries, len(body), self.checksum, checksum(self.checksum, body)]
            for (kind, dtype, entries), body in zip(shapes, bodies, strict=True)
        ]
        whole = b"".join(bodies)
        row_control = [slot.session, self.epoch, 0, depth, depth, slot.support, 1, described]
        total = [0, depth, len(whole), checksum(self.checksum, whole), 0]
        end = [slot.session, self.epoch, item[5], item[9], item[6], *total]
        return [encode(ROW, key, row_control, bodies), encode(COMPLETION, key, end)]


def serve(endpoint: str, compat: bytes) -> None:
    """One ROUTER; a routing id is one connection. Section 14 names every option."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    for option, value in (
        (zmq.LINGER, 0), (zmq.SNDHWM, 256), (zmq.RCVHWM, 256), (zmq.MAXMSGSIZE, 2**26 + 4096 + 128),
        (zmq.HANDSHAKE_IVL, 5000), (zmq.HEARTBEAT_IVL, 1000), (zmq.HEARTBEAT_TIMEOUT, 5000),
        (zmq.ROUTER_MANDATORY, 1), (zmq.ROUTER_HANDOVER, 0),
    ):  # fmt: skip
        socket.setsockopt(option, value)
    socket.bind(endpoint)
    print("ready", socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
    epoch = secrets.randbits(64)
    peers: dict[bytes, Peer] = {}
    while True:
        routing_id, *frames = socket.recv_multipart()
        peer = peers.setdefault(routing_id, Peer(epoch, compat))
        for answer in [one for frame in frames[:64] for one in peer.receive(frame)]:
            try:
                socket.send_multipart([routing_id, answer], zmq.NOBLOCK)
            except zmq.ZMQError:
                peers.pop(routing_id, None)  # it is gone, or reads nothing


def main() -> None:
    """Options and signals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--listen", default="tcp://127.0.0.1:0", help="a loopback address")
    parser.add_argument("--compat", default="", help="hex of the compatibility fields; empty: those of the verifier")
    options = parser.parse_args()
    if not options.listen.startswith("tcp://127.0.0.1:"):
        parser.error("it authenticates nobody, so it listens on 127.0.0.1 only")
    serve(options.listen, bytes.fromhex(options.compat))


if __name__ == "__main__":
    main()
