"""One valid frame of every message type, for the families that spoil frames without a connection.

Called by the codec families; values are small and arbitrary.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256

from ..bodies import describe
from ..frame import encode_frame
from ..hello import Accept, Challenge, Hello, Reject
from ..limits import AUTH_NONCE_BYTES
from ..messages import (
    Cancel,
    Close,
    Commit,
    Completion,
    Context,
    Drain,
    ErrorMessage,
    Message,
    Open,
    Ping,
    Pong,
    Reset,
    Row,
    Stats,
    StatsCounter,
    Step,
    StepItem,
)
from ..prefix import NO_KEY, Key
from ..registry import (
    BodyKind,
    Cause,
    Checksum,
    Dtype,
    ErrorCode,
    Lane,
    Representation,
    Scope,
    SupportPolicy,
)
from .facts import reference_facts

KEY = Key(1, 7, 3)
DIGEST = bytes(range(8))
Example = tuple[Message, Key, tuple[bytes, ...]]


def _hello() -> Hello:
    compat = reference_facts().compatibility.encoded()
    capacities = (4, 5, 32, 4, 64, 1000, 1000)
    return Hello((0x0200,), sha256(compat).digest(), compat, 1, 1, *capacities, 3, 5 * (16 + 8 * 32), 0, b"")


def _accept() -> Accept:
    capacities = (4, 5, 32, 4, 64, 1000, 1000)
    return Accept(0x0200, bytes(32), 2, 1, 1, *capacities, Checksum.XXH3_64, 48, 5 * (16 + 8 * 32), 0)


def _step() -> Example:
    taps = bytes(range(48))
    item = StepItem(5, 1, 7, 3, 42, 9, DIGEST, 2, Lane.RATIO, tap_first=8, tap_rows=1, taps=taps)
    body = describe(BodyKind.TAPS, Dtype.BF16, 1, 24, taps, Checksum.XXH3_64)
    return Step((item,), (body,)), KEY, (taps,)


def _context() -> Example:
    bodies = (bytes(96), bytes(8))
    taps = describe(BodyKind.TAPS, Dtype.BF16, 2, 24, bodies[0], Checksum.XXH3_64)
    tokens = describe(BodyKind.TOKENS, Dtype.INT32, 2, 1, bodies[1], Checksum.XXH3_64)
    return Context(5, 0, 2, (taps, tokens)), KEY, bodies


def _row() -> Example:
    bodies = (bytes(32), bytes(128), bytes(128))
    records = describe(BodyKind.RECORDS, Dtype.BYTES, 2, 16, bodies[0], Checksum.XXH3_64)
    ids = describe(BodyKind.IDS, Dtype.INT32, 2, 16, bodies[1], Checksum.XXH3_64)
    q = describe(BodyKind.Q, Dtype.FP32, 2, 16, bodies[2], Checksum.XXH3_64)
    return Row(5, 2, 0, 2, 2, 16, Representation.SPARSE, (records, ids, q)), KEY, bodies


@lru_cache(maxsize=1)
def examples() -> dict[str, Example]:
    """Message name -> (message, key, bodies)."""
    opened = Open(5, 2**64 - 5, 700_000, SupportPolicy.K32, Lane.RATIO, 0, 0, DIGEST, 1, 2, 3)
    report = Stats(2, 1, 1, 0, 1, 4, (StatsCounter(ErrorCode.BAD_MAGIC, 3),))
    plain: list[tuple[Message, Key]] = [
        (_hello(), NO_KEY),
        (_accept(), NO_KEY),
        (Reject(2, 1, 1, ErrorCode.INCOMPATIBLE, "vocab_size", "1000", "1001"), NO_KEY),
        (Challenge(2, 1, 1, bytes(AUTH_NONCE_BYTES)), NO_KEY),
        (opened, Key(1, 7)),
        (Completion(5, 2, 9, 0, DIGEST, 0, 2, 2 * (16 + 8 * 16), DIGEST, 300), KEY),
        (Commit(5, 1, 42, 11, DIGEST), KEY),
        (Reset(5, Cause.PREEMPTED, 0, DIGEST), Key(1, 8)),
        (Cancel(5, Cause.CLIENT_GONE), Key(1, 8)),
        (Close(5, Cause.FINISHED), Key(1, 8)),
        (Ping(1, 300), NO_KEY),
        (Pong(2, 300, 10, 64), NO_KEY),
        (Drain(2, 1000), NO_KEY),
        (ErrorMessage(ErrorCode.CONTEXT_GAP, Scope.SLOT, 5, "STEP.tap_first"), KEY),
        (report, NO_KEY),
    ]
    found: dict[str, Example] = {message.NAME: (message, key, ()) for message, key in plain}
    found |= {example[0].NAME: example for example in (_step(), _context(), _row())}
    return dict(sorted(found.items(), key=lambda one: one[1][0].TYPE))


def frame_of(name: str) -> bytes:
    """The frame of an example."""
    message, key, bodies = examples()[name]
    return bytes(encode_frame(message, key, bodies))
