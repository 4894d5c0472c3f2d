"""TRN and TMO for verifiers: frames that come again, at once, too early or too late, and what counts as life.

Spec: SPEC.md 3, 8, 11, 14. Called by `catalogue`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..buffers import Buffer
from ..frame import encode_frame
from ..hello import Accept, Challenge, Reject
from ..limits import AUTH_NONCE_BYTES
from ..messages import ErrorMessage, Ping, Pong
from ..registry import ErrorCode, Scope
from .as_drafter import HonestReply, Outcome, VerifierUnderTest
from .record import Family, Role
from .verdicts import Unmet

TRN = Family("TRN", Role.VERIFIER)
TMO = Family("TMO", Role.VERIFIER)
E = ErrorCode
_BURST = 150
"""More frames than a part of a ZeroMQ message, or a small queue, can take; fewer than any high-water mark here."""


def _serves_on(accept: Accept, t: VerifierUnderTest, rounds: int) -> None:
    """Rounds on the connection of ``accept``, with no other HELLO."""
    t.serves()
    for _ in range(rounds):
        t.accepts(lambda reply: reply.frames)
    if t.left or t.hello is None or t.hello.serial != accept.serial:
        raise Unmet("one connection", "another HELLO", actual_frame=t.hello_frame)


@TRN.case(103, "HELLO_REQUIRED five times", "REQ-LIF-1", "a second copy of the news that calls off the reconnect")
def told_often(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    required = encode_frame(ErrorMessage(E.HELLO_REQUIRED, Scope.CONNECTION, 0, "connection"))
    t.hello = None
    t.send(*[required] * 5)
    t.await_hello()
    t.connect()
    for _ in range(3):
        t.serves()


@TRN.case(104, "replies between HELLO and ACCEPT", "REQ-LIF-1", "a reply for a verifier that has no connection")
def between(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    old = t.honest(t.await_step())
    t.restart()
    t.connect(lambda hello: old.frames)
    for _ in range(3):
        t.serves()


@TRN.case(105, "every frame comes twice", "REQ-LIF-1", "an ACCEPT that begins the connection again")
def twice(t: VerifierUnderTest) -> None:
    accept = t.connect()
    t.say(accept)
    t.serves()
    t.say(accept)
    for _ in range(6):
        t.accepts(lambda reply: [frame for frame in reply.frames for _ in range(2)])
    _serves_on(accept, t, 0)


@TRN.case(106, "REJECT behind ACCEPT", "REQ-LIF-1", "a refusal that ends a live connection")
def late_reject(t: VerifierUnderTest) -> None:
    accept = t.connect()
    t.say(Reject(t.epoch, accept.verifier_epoch, accept.serial, E.INCOMPATIBLE, "vocab_size", "1", "2"))
    _serves_on(accept, t, 3)


@TRN.case(107, "CHALLENGE behind ACCEPT", "REQ-LIF-1", "a proof, and a HELLO, on a live connection")
def late_challenge(t: VerifierUnderTest) -> None:
    accept = t.connect()
    t.say(Challenge(t.epoch, accept.verifier_epoch, accept.serial, bytes(AUTH_NONCE_BYTES)))
    _serves_on(accept, t, 3)


@TRN.case(108, f"{_BURST} frames at once", "REQ-TRN-1", "frames that are lost when many come at once")
def burst(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    nonces = range(1000, 1000 + _BURST)
    mark = len(t.log)
    pings = [encode_frame(Ping(t.epoch, nonce)) for nonce in nonces]
    t.accepts(lambda reply: [reply.frames[0], *pings, reply.frames[1]])
    answered = [frame.message.nonce for frame in t.log[mark:] if isinstance(frame.message, Pong)]
    if answered != [*nonces]:
        raise Unmet(f"PONGs {nonces[0]} to {nonces[-1]} in order", f"{len(answered)}: {answered[:8]} ..")


@TRN.case(109, "everything that was sent comes again", "REQ-GEN-2", "keys that are compared in part")
def replayed(t: VerifierUnderTest) -> None:
    """Replies of six rounds, of every slot, in the middle of another round."""
    sent: list[Buffer] = []

    def keeps(reply: HonestReply) -> Sequence[Buffer]:
        sent.extend(reply.frames)
        return reply.frames

    t.connect()
    for _ in range(6):
        t.accepts(keeps)
    for _ in range(4):
        t.accepts(lambda reply: [*sent, reply.frames[0], *sent, reply.frames[1]])


@TMO.case(106, "replies without any PONG", "REQ-PNG-2", "life that is inferred from PONG only")
def no_pongs(t: VerifierUnderTest) -> None:
    """Every usable frame is a sign of life."""
    t.answers_pings = False
    t.connect(heartbeat_ms=50)
    serial = None if t.hello is None else t.hello.serial
    pings = 0
    for _ in t.until(None, "PINGs of 6 heartbeats"):
        t.watch(25)
        t.accepts(lambda reply: reply.frames)
        pings = sum(isinstance(frame.message, Ping) for frame in t.log)
        if pings >= 6:
            break
    if t.left or t.hello is None or t.hello.serial != serial:
        raise Unmet("one connection", "another HELLO", actual_frame=t.hello_frame)
    t.answers_pings = True


@TMO.case(107, "an answer after more than two heartbeats", "REQ-PNG-2", "a drafter that is busy and given up",
          tags=("slow",))  # fmt: skip
def late_pong(t: VerifierUnderTest) -> None:
    """No round is answered meanwhile: the PONG is the first frame since the PING."""
    accept = t.connect(heartbeat_ms=250, step_deadline_ms=1000)
    item = t.await_step()
    t.answers_pings = False
    for _ in t.until(None, "a PING"):
        if isinstance(t.pump(what="a PING").message, Ping):
            break
    t.watch(550)
    t.answers_pings = True
    if t.left or t.hello is None or t.hello.serial != accept.serial:
        raise Unmet("the same connection after more than two heartbeats", "another HELLO", actual_frame=t.hello_frame)
    t.answer(item)
    if t.outcome(item) not in (Outcome.COMMITTED, Outcome.CLOSED):
        raise Unmet("the round committed", t.outcome(item).value)
