"""TMO for drafters: which frames of a verifier are life, from when silence counts, and whose slots it ends.

Over a real transport the intervals are short; cases that need exact times run in process alone (tag `slow`). Spec:
SPEC.md 3.3, 8. Called by `catalogue`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..frame import encode_frame
from ..messages import Ping, Pong
from ..prefix import NO_KEY, Key
from ..registry import ErrorCode, MessageType, Scope
from .as_verifier import DrafterUnderTest
from .forge import flipped, patched, raw_frame
from .record import Family, Level, Role
from .verdicts import Unmet

TMO = Family("TMO", Role.DRAFTER)
E = ErrorCode
SHORT_MS, LONG_MS = 5, 50
"""Heartbeat intervals: of cases that wait far less or more than 60 of them, and of those that wait about as long."""


def _greet(t: DrafterUnderTest, heartbeat_ms: int) -> None:
    t.hello(heartbeat_ms=heartbeat_ms)
    t.open()
    t.round()


def _gone(t: DrafterUnderTest) -> None:
    """The drafter has ended the connection, with all that it held."""
    t.say(Ping(t.epoch, 1))
    t.told(E.HELLO_REQUIRED, NO_KEY, Scope.CONNECTION)
    t.hello()
    t.holds_nothing()


@TMO.case(4, "50 heartbeats of silence are too few", "REQ-PNG-2", "a verifier that is busy and punished",
          tags=("slow",))  # fmt: skip
def too_few(t: DrafterUnderTest) -> None:
    _greet(t, LONG_MS)
    t.wait(LONG_MS * 50)
    t.round()


@TMO.case(5, "66 heartbeats of silence are enough", "REQ-PNG-2", "leases of the dead", tags=("slow",))
def enough(t: DrafterUnderTest) -> None:
    _greet(t, LONG_MS)
    t.wait(LONG_MS * 66)
    _gone(t)


@TMO.case(6, "junk is no life", "REQ-PNG-2", "a connection that noise keeps alive")
def junk(t: DrafterUnderTest) -> None:
    """Frames with a wrong prefix are not usable."""
    _greet(t, SHORT_MS)
    ping = bytes(encode_frame(Ping(t.epoch, 1)))
    for frame in (b"junk", patched(ping, "magic", b"HTTP"), flipped(ping, 30), patched(ping, "flags", 1)):
        t.wait(SHORT_MS * 25)
        t.send(frame)
    _gone(t)


def _lives_by(make: Callable[[DrafterUnderTest], bytes], t: DrafterUnderTest) -> None:
    """Nothing but one sort of frame, for 120 heartbeats."""
    _greet(t, SHORT_MS)
    for _ in range(4):
        t.wait(SHORT_MS * 30)
        t.send(make(t))
    t.silence()
    t.round()


def _damaged(t: DrafterUnderTest) -> bytes:
    return flipped(encode_frame(Ping(t.epoch, 1)), 50)


def _stale(t: DrafterUnderTest) -> bytes:
    return raw_frame(MessageType.CONTEXT, b"\x90", Key(0, t.slots[0].generation - 1))


def _pong(t: DrafterUnderTest) -> bytes:
    return bytes(encode_frame(Pong(t.epoch, 1, 0, 0)))


for _number, _title, _bug, _make in (
    (7, "frames with damaged control", "life that needs a message that can be read", _damaged),
    (8, "stale frames", "life that needs a key that is alive", _stale),
    (9, "PONGs that nobody asked for", "life that is inferred from questions only", _pong),
):
    TMO.add(_number, f"{_title} are life", "REQ-PNG-2", _bug, partial(_lives_by, _make), level=Level.SHOULD)


@TMO.case(10, "another verifier's frames are no life", "REQ-ROL-1", "one clock for all connections")
def others_life(t: DrafterUnderTest) -> None:
    _greet(t, SHORT_MS)
    other = t.second()
    other.epoch ^= 0xFF
    other.hello()
    for _ in range(4):
        t.wait(SHORT_MS * 25)
        other.barrier()
    _gone(t)


@TMO.case(11, "a silent verifier ends its own slots only", "REQ-ROL-1", "a clean-up that takes others along")
def others_end(t: DrafterUnderTest) -> None:
    _greet(t, SHORT_MS)
    other = t.second()
    other.epoch ^= 0xFF
    _greet(other, SHORT_MS * 100)
    t.wait(SHORT_MS * 100)
    _gone(t)
    other.round(accept=2)
    if other.stats().slots_open != 1:
        raise Unmet("the other verifier's slot", f"{other.stats().slots_open} slots")
    other.close()
    other.holds_nothing()


@TMO.case(12, "after silence HELLO_REQUIRED is told once", "REQ-LIF-3", "an ERROR for each frame of a lost connection",
          level=Level.SHOULD)  # fmt: skip
def told_once(t: DrafterUnderTest) -> None:
    _greet(t, SHORT_MS)
    t.wait(SHORT_MS * 90)
    t.send(*[encode_frame(Ping(t.epoch, nonce)) for nonce in (1, 2, 3)])
    t.told(E.HELLO_REQUIRED, NO_KEY, Scope.CONNECTION)
    t.hello()
    t.holds_nothing()


@TMO.case(13, "the heartbeat of ACCEPT counts, not the one of HELLO", "REQ-PNG-2", "a lease for as long as one likes",
          tags=("slow",))  # fmt: skip
def agreed_interval(t: DrafterUnderTest) -> None:
    _greet(t, 600_000)
    t.require(t.terms.heartbeat_ms <= 10_000, "a heartbeat interval of its own")
    t.wait(t.terms.heartbeat_ms * 66)
    _gone(t)


@TMO.case(14, "silence counts from ACCEPT on", "REQ-PNG-2", "a connection that never began and never ends")
def from_accept(t: DrafterUnderTest) -> None:
    t.hello(heartbeat_ms=SHORT_MS)
    t.wait(SHORT_MS * 90)
    _gone(t)


@TMO.case(15, "HELLO starts the clock again", "REQ-PNG-2", "a new connection with an old one's clock", tags=("slow",))
def from_hello(t: DrafterUnderTest) -> None:
    _greet(t, LONG_MS)
    t.wait(LONG_MS * 40)
    t.hello(heartbeat_ms=LONG_MS)
    t.wait(LONG_MS * 40)
    t.open()
    t.round()
