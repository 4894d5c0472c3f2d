"""A drafter in plain Python that shares no code with this package: how to implement a peer of proto/SPEC.md.

It has no model: after token t it proposes t + 1, or t + 2 with a quarter of the mass. From top to bottom: rows and
draws (sections 7.5, 10), one slot (7.1 to 7.8), one connection (6, 8, 11, 12), one socket (14). Explained in
docs/guides/implement-a-peer.md; judged by tests/proto/test_example_peer.py. Loopback only, for it authenticates nobody.
"""

from __future__ import annotations

import argparse
import hashlib
import secrets
import struct
import time
from collections import Counter

import zmq
from crc32c import crc32c
from plain_codec import (
    CODES,
    COMPAT,
    NO_KEY,
    REGISTRY,
    Refused,
    aligned,
    checksum,
    encode,
    extend,
    read_bodies,
    read_control,
    read_prefix,
    record,
    require,
    unpack,
)

MASS, NO_COMMIT, RATIO, V2_0 = 2**24, 255, 1, 0x0200
CAPACITIES = 16, 8, 64, 16, 4096, 10_000, 600_000  # slots, depth, support, in flight, credit, heartbeat, deadline
SCOPES = {row["name"]: row["id"] for row in REGISTRY["scope"]}
SCOPE_OF = {row["name"]: max(SCOPES["SLOT"], SCOPES[row["scope"]]) for row in REGISTRY["error"]}
COUNTED = {row["name"] for row in REGISTRY["error"] if row["via"] == "count"}  # never told to the sender
NEW_GENERATION = {"OPEN", "RESET", "CANCEL", "CLOSE"}
OF_A_SLOT = NEW_GENERATION | {"CONTEXT", "COMMIT"}


def philox(counter, seed):
    """First word of Philox4x32-10, without its low eight bits: a uniform integer below 2^24."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & 0xFFFFFFFF, (low >> 32) ^ c3 ^ k1, low & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0 >> 8


def draw(row, uniform):
    """The first token, ids ascending, whose cumulative count is above `uniform`."""
    for token, count in row:
        uniform -= count
        if uniform < 0:
            return token
    raise AssertionError("the counts of a row sum to 2^24")


def pack_rows(drafts, support):
    """RECORDS, IDS and Q of a reply; the confidence of every row is 2^24, "no opinion"."""
    records, ids, q = b"", b"", b""
    for token, row in drafts:
        padding = bytes(4 * (support - len(row)))
        row_ids = b"".join(struct.pack("<i", one) for one, _ in row) + padding
        row_q = b"".join(struct.pack("<f", count / MASS) for _, count in row) + padding
        crc = crc32c(struct.pack("<iII", token, len(row), MASS) + row_ids + row_q)
        records += struct.pack("<iIII", token, len(row), crc, MASS)
        ids, q = ids + row_ids, q + row_q
    return records, ids, q


class Slot:
    """One session's place. The context ends before position `end`, and `digest` covers it, None where tokens are not
    known; `known` are the committed tokens from `end` on: the anchor, and what a commit added.
    """

    session, generation = None, 0

    def begin(self, generation, end=0, digest=b"", dormant=False):
        """A new generation: nothing of the old one survives, cached replies included."""
        self.generation, self.end, self.digest, self.dormant = generation, end, digest, dormant
        self.known, self.round, self.item, self.reply, self.drafted, self.committed = [], -1, None, [], [], None

    def follow(self, accepted, token, position, ahead):
        """Take in a commit, once; `ahead`: how far `position` may be from that of the token."""
        require(self.committed is None and accepted <= len(self.drafted) > 0, "COMMIT_MISMATCH")
        require(position - (self.end + accepted + 1) in ahead, "COMMIT_MISMATCH")
        self.known = [*self.known[:1], *self.drafted[:accepted], token]

    def check_digest(self, position, digest):
        """The declared digest must be that of the tokens before `position`, where they are all known."""
        passed = self.known[: position - self.end]
        if len(passed) == position - self.end and self.digest is not None:
            require(extend(self.digest, passed) == digest, "DIGEST_MISMATCH")

    def draft(self, depth, vocab):
        """[(token, row), ..] left to right, each row given the tokens before it, drawn with its own key."""
        drafts, token = [], self.known[0]
        for position in range(self.end + 1, self.end + 1 + depth):
            row = self.row(token, vocab)
            generation = (self.generation - self.opened) % 2**24 << 8 | self.choice
            token = draw(row, philox((1 << 24, position, self.round, generation), self.seed))
            drafts.append((token, row))
        return drafts

    def row(self, token, vocab):
        """q of the token after `token`: [(id, count), ..], ids ascending, counts of total 2^24. Yours is a network."""
        first, second = (token + 1) % vocab, (token + 2) % vocab
        if not self.sampled or self.support == 1 or first == second:
            return [(first, MASS)]
        return sorted([(first, MASS // 4 * 3), (second, MASS // 4)])


class Peer:
    """Everything of one verifier's connection. `receive` takes a frame and a time in seconds, and returns frames."""

    def __init__(self, epoch, compat=b""):
        self.epoch, self.compat, self.counters = epoch, compat, Counter()
        self.verifier, self.slots, self.told, self.heard = None, [], False, 0.0

    def receive(self, frame, now):
        key, name = NO_KEY, ""
        try:
            name, key, rest = read_prefix(frame)
            self.heard = now
            require(name in OF_A_SLOT | {"HELLO", "STEP", "PING", "PONG", "ERROR", "STATS"}, "UNEXPECTED_MESSAGE")
            require(self.verifier is not None or name == "HELLO", "HELLO_REQUIRED")
            slot = self.admit(name, key) if name in OF_A_SLOT or (name == "STEP" and key != NO_KEY) else None
            control = read_control(frame, name, rest)
            if name == "HELLO":
                return [self.hello(*control)]
            if name == "STEP":
                return self.step(key, frame, *control)
            if slot is None:
                return self.answer(name, control)
            self.rows += control[2] if name == "CONTEXT" else 0  # a refusal does not cost the verifier its credit
            self.own(slot, control[0], awake=name in ("CONTEXT", "COMMIT"), free=name == "OPEN")
            return getattr(self, name.lower())(slot, key, frame, *control) or []
        except Refused as refusal:
            return self.refuse(str(refusal), NO_KEY if name == "ERROR" else key)

    def refuse(self, code, key):
        """Section 12: count everything; tell the sender what it does not know; the slot is dead until RESET."""
        self.counters[CODES[code]] += 1
        if code == "HELLO_REQUIRED" and not self.told:
            self.told = True
            return [encode("ERROR", NO_KEY, [CODES[code], SCOPES["CONNECTION"], 0, "connection"])]
        if code in COUNTED or key == NO_KEY or self.verifier is None:
            return []
        slot = self.slots[key[0]] if key[0] < len(self.slots) else Slot()
        if SCOPE_OF[code] == SCOPES["SLOT"] and slot.session is not None and slot.generation == key[1]:
            slot.begin(slot.generation, dormant=True)
        return [encode("ERROR", key, [CODES[code], SCOPE_OF[code], slot.session or 0, "plain peer"])]

    def expire(self, now):
        """A verifier that was silent for 60 heartbeat intervals is gone."""
        if self.verifier is not None and now > self.heard + 60 * self.heartbeat_ms / 1000:
            self.counters[CODES["PEER_SILENT"]] += 1
            self.slots, self.verifier = [], None

    def hello(self, versions, compat_hash, compat, epoch, serial, *rest):
        self.slots, self.verifier, self.told = [], None, False
        ours, offered, difference = self.compat or compat, rest[:7], ["", "", ""]
        checksums, reply_bytes, capabilities, auth = rest[7:]
        try:
            require(not auth, "AUTH_UNSUPPORTED")
            require(V2_0 in versions, "BAD_VERSION")
            if (compat_hash, compat) != (hashlib.sha256(ours).digest(), ours):
                require(compat_hash == hashlib.sha256(compat).digest(), "BAD_FIELD")
                theirs = unpack(compat)
                require(record(*COMPAT.values())(theirs), "BAD_FIELD")
                pairs = zip(COMPAT, unpack(ours), theirs, strict=True)
                difference = [str(one)[:96] for one in next(pair for pair in pairs if pair[1] != pair[2])]
                raise Refused("INCOMPATIBLE")
            terms = dict(zip(COMPAT, unpack(ours), strict=True))
            width = max(8 * offered[2], 4 * terms["vocab_size"] if capabilities & 1 else 0)
            require(reply_bytes == offered[1] * (16 + width), "BAD_NEGOTIATION")
            require(checksums & 3, "NO_COMMON_CHECKSUM")
        except Refused as refusal:
            self.counters[CODES[str(refusal)]] += 1
            return encode("REJECT", NO_KEY, [self.epoch, epoch, serial, CODES[str(refusal)], *difference])
        agreed = [min(pair) for pair in zip(CAPACITIES, offered, strict=True)]
        slots, self.depth, self.support, _, self.credit, self.heartbeat_ms, _ = agreed
        self.verifier, self.slots, self.rows, self.announced = epoch, [Slot() for _ in range(slots)], 0, self.credit
        self.vocab, self.lanes, self.tap_dtype = terms["vocab_size"], terms["lanes"], terms["tap_dtype"]
        self.tap_entries, self.checksum = len(terms["tap_layers"]) * terms["tap_width"], 2 if checksums & 2 else 1
        sizes = [self.checksum, self.tap_shape(1)[4], self.depth * (16 + 8 * self.support), 0]
        return encode("ACCEPT", NO_KEY, [V2_0, compat_hash, self.epoch, epoch, serial, *agreed, *sizes, b""])

    def answer(self, name, control):
        """PING, PONG, STATS and ERROR."""
        if name == "ERROR":
            return []
        require(control[0] == self.verifier, "WRONG_EPOCH")
        if name != "STATS":
            return [self.pong(control[1])] if name == "PING" else []
        require(not control[1], "UNEXPECTED_MESSAGE")
        held = [slot for slot in self.slots if slot.session is not None]
        counters = [list(pair) for pair in sorted(self.counters.items())]
        report = [self.epoch, 1, len(held), 0, sum(bool(slot.reply) for slot in held), 0, counters]
        return [encode("STATS", NO_KEY, report)]

    def pong(self, nonce):
        self.announced = self.credit + self.rows
        return encode("PONG", NO_KEY, [self.epoch, nonce, 0, self.announced])

    # The messages of a slot: section 7

    def admit(self, name, key):
        """Section 11, from the prefix alone."""
        require(key[0] < len(self.slots), "SLOT_OUT_OF_RANGE")
        slot = self.slots[key[0]]
        if name in NEW_GENERATION:
            require(key[1] < 2**63, "GENERATION_EXHAUSTED")
            require(key[1] > slot.generation, "STALE_GENERATION")
        else:
            require(slot.session is not None, "SLOT_NOT_OPEN")
            require(key[1] == slot.generation, "STALE_GENERATION")
        return slot

    def own(self, slot, session, awake, free=False):
        """The session of the message has the slot; `awake`: the slot must not wait for RESET."""
        require(free or slot.session is not None, "SLOT_NOT_OPEN")
        require(free or session == slot.session, "WRONG_SESSION")
        require(not (awake and slot.dormant), "SLOT_NEEDS_RESET")

    def open(self, slot, key, _frame, session, seed, temperature, support, lane, choice, start, digest, *_):
        require(self.lanes >> (lane - 1) & 1, "LANE_MISMATCH")
        require(1 <= support <= self.support, "SUPPORT_OUT_OF_RANGE")
        require(slot.session is None, "SLOT_BUSY")
        slot.begin(key[1], start, digest)
        slot.session, slot.opened, slot.seed, slot.choice, slot.lane = session, key[1], seed, choice, lane
        slot.support, slot.sampled = support, temperature > 0 and lane == RATIO

    def reset(self, slot, key, _frame, _session, _cause, start, digest):
        slot.begin(key[1], start, digest)

    def cancel(self, slot, key, _frame, _session, _cause):
        slot.begin(key[1], dormant=True)

    def close(self, slot, key, _frame, _session, _cause):
        slot.begin(key[1])
        slot.session = None

    def context(self, slot, _key, frame, _session, first, rows, described):
        require(first == slot.end, "CONTEXT_GAP")
        require(rows <= self.credit, "CREDIT_EXCEEDED")  # all rows that came before have been taken in
        shapes = [self.tap_shape(rows), [2, 3, rows, 1, 4 * rows]][: max(1, len(described))]
        _taps, *token_ids = self.bodies(frame, described, shapes)
        known = bool(token_ids) and slot.digest is not None
        slot.digest = extend(slot.digest, struct.unpack(f"<{rows}I", token_ids[0])) if known else None
        slot.known, slot.end = [], slot.end + rows
        return [self.pong(0)] if (self.credit + self.rows - self.announced) * 4 >= self.credit else []

    def tap_shape(self, rows):
        return [1, self.tap_dtype, rows, self.tap_entries, rows * self.tap_entries * {1: 2, 2: 4}[self.tap_dtype]]

    def bodies(self, data, described, shapes):
        """The checked bodies at the end of `data`, which have exactly these shapes."""
        require([one[:6] for one in described] == [[*one, self.checksum] for one in shapes], "BAD_DESCRIPTOR")
        return list(read_bodies(data, described))

    def commit(self, slot, key, _frame, _session, accepted, token, position, digest):
        require(slot.committed is None or slot.committed != (accepted, token), "DUPLICATE")
        require(slot.committed is None and slot.drafted, "COMMIT_MISMATCH")
        require(key[2] == slot.round, "STALE_ROUND")
        require(token < self.vocab, "TOKEN_OUT_OF_RANGE")
        slot.follow(accepted, token, position, ahead=[0])
        slot.check_digest(position, digest)
        slot.committed = accepted, token

    def step(self, key, frame, items, described):
        require(key == (tuple(items[0][1:4]) if len(items) == 1 else NO_KEY), "BAD_FIELD")
        require(len(described) == sum(item[13] > 0 for item in items), "BAD_DESCRIPTOR")
        require(all(one[5] == self.checksum for one in described), "BAD_DESCRIPTOR")
        left, frames, start = iter(described), [], len(frame) - sum(aligned(one[4]) for one in described)
        for item in items:
            taps = [next(left)] if item[13] else []
            end = start + sum(aligned(one[4]) for one in taps)
            try:
                frames += self.round(item, taps, frame[start:end])
            except Refused as refusal:  # a faulty item does not hurt the others
                frames += self.refuse(str(refusal), tuple(item[1:4]))
            start = end
        return frames

    def round(self, item, taps, data):
        session, *key, anchor, position, digest, depth, lane, version, accepted, token, first, rows = item
        slot = self.admit("STEP", key)
        self.own(slot, session, awake=True)
        if key[2] == slot.round:
            require(slot.item == (item, taps), "ROUND_KEY_REUSED")
            self.counters[CODES["DUPLICATE"]] += 1
            return slot.reply
        require(key[2] > slot.round, "STALE_ROUND")
        require(depth <= self.depth, "DEPTH_OUT_OF_RANGE")
        require(lane == slot.lane, "LANE_MISMATCH")
        require(anchor < self.vocab and token < self.vocab, "TOKEN_OUT_OF_RANGE")
        require(first == slot.end, "CONTEXT_GAP")
        require(position == first + rows, "ANCHOR_MISMATCH")
        if accepted != NO_COMMIT:
            slot.follow(accepted, token, position, ahead=range(0 if anchor == token else 1, 2**31))
        self.bodies(data, taps, [self.tap_shape(rows)] if rows else [])  # a model would take them in
        slot.check_digest(position, digest)
        slot.end, slot.digest, slot.known = position, digest, [anchor]
        slot.round, slot.item, slot.committed = key[2], (item, taps), None
        drafts = slot.draft(depth, self.vocab)
        slot.drafted = [token for token, _ in drafts]
        slot.reply = self.reply(slot, tuple(key), [position, version, digest], drafts)
        return slot.reply

    def reply(self, slot, key, echo, drafts):
        bodies, depth, kind = pack_rows(drafts, slot.support), len(drafts), self.checksum
        shapes = ([3, 0, depth, 16], [4, 3, depth, slot.support], [5, 2, depth, slot.support])
        described = [[*s, len(b), kind, checksum(kind, b)] for s, b in zip(shapes, bodies, strict=True)]
        whole = b"".join(bodies)
        rows = [slot.session, self.epoch, 0, depth, depth, slot.support, 1, described]
        end = [slot.session, self.epoch, *echo, 0, depth, len(whole), checksum(kind, whole), 0]
        return [encode("ROW", key, rows, bodies), encode("COMPLETION", key, end)]


def serve(endpoint, compat):
    """One ROUTER; a routing id is one connection. Section 14 names every option."""
    socket = zmq.Context().socket(zmq.ROUTER)
    for option, value in (
        (zmq.LINGER, 0), (zmq.SNDHWM, 256), (zmq.RCVHWM, 256), (zmq.MAXMSGSIZE, 2**26 + 4096 + 128),
        (zmq.HANDSHAKE_IVL, 5000), (zmq.HEARTBEAT_IVL, 1000), (zmq.HEARTBEAT_TIMEOUT, 5000),
        (zmq.ROUTER_MANDATORY, 1), (zmq.ROUTER_HANDOVER, 0),
    ):  # fmt: skip
        socket.setsockopt(option, value)
    socket.bind(endpoint)
    print("ready", socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
    epoch, peers = secrets.randbits(64), {}
    while True:
        arrived = socket.poll(100)
        for peer in peers.values():
            peer.expire(time.monotonic())
        routing_id, *frames = socket.recv_multipart() if arrived else [b""]
        peer = peers.setdefault(routing_id, Peer(epoch, compat)) if frames else None
        for answer in [one for frame in frames[:63] for one in peer.receive(frame, time.monotonic())]:
            try:
                socket.send_multipart([routing_id, answer], zmq.NOBLOCK)
            except zmq.ZMQError:
                peers.pop(routing_id, None)  # it is gone, or reads nothing


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--listen", default="tcp://127.0.0.1:0", help="a loopback address")
    parser.add_argument("--compat", default="", help="hex of the compatibility fields; empty: those of the verifier")
    options = parser.parse_args()
    if not options.listen.startswith("tcp://127.0.0.1:"):
        parser.error("it authenticates nobody, so it listens on 127.0.0.1 only")
    serve(options.listen, bytes.fromhex(options.compat))


if __name__ == "__main__":
    main()
