"""AUT for verifiers: a drafter that does not hold the secret, or proves it for something else.

All but the last two need `Facts.secret`; without it a testee is UNSUPPORTED. Spec: SPEC.md 6.1. Called by `catalogue`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from secrets import token_bytes

from ..auth import Authentication
from ..frame import encode_frame
from ..hello import Accept, Challenge, Hello, Reject
from ..limits import AUTH_NONCE_BYTES, AUTH_PROOF_BYTES
from ..registry import ErrorCode
from .as_drafter import VerifierUnderTest
from .cases_verifier_hello import bad_accept, no_session
from .forge import flipped
from .record import Family, Role
from .verdicts import Unmet, Unsupported

AUT = Family("AUT", Role.VERIFIER, tags=("secret",))
PLAIN = Family("AUT", Role.VERIFIER)
E = ErrorCode


@dataclass(frozen=True)
class _Asked:
    """A HELLO, the nonce that it was challenged with (zeros where it was not), and the right ACCEPT, unsealed."""

    hello: Hello
    nonce: bytes
    accept: Accept
    secret: Authentication

    @property
    def sealed(self) -> Accept:
        """With the right proof."""
        return self.secret.sealed(self.accept, self.hello, self.nonce)

    def with_auth(self, auth: bytes) -> Accept:
        """With another proof."""
        return replace(self.accept, auth=auth)


def _secret(t: VerifierUnderTest) -> Authentication:
    found = t.facts.authentication
    if found is None:
        raise Unsupported("a secret")
    return found


def _challenge(t: VerifierUnderTest, hello: Hello, nonce: bytes) -> bytes:
    return bytes(encode_frame(Challenge(t.epoch, hello.epoch, hello.serial, nonce)))


def _asked(t: VerifierUnderTest, *, challenged: bool = True) -> _Asked:
    hello = t.hello or t.await_hello()
    nonce = bytes(AUTH_NONCE_BYTES)
    if challenged:
        nonce = token_bytes(AUTH_NONCE_BYTES)
        t.send(_challenge(t, hello, nonce))
        first, hello = hello, t.await_hello()
        while hello.serial != first.serial:  # it crossed the CHALLENGE, which is void now
            t.send(_challenge(t, hello, nonce))
            first, hello = hello, t.await_hello()
        if not _secret(t).verifier_is_genuine(hello, replace(hello, auth=hello.auth[:AUTH_NONCE_BYTES]), nonce):
            raise Unmet("the verifier's proof in HELLO", hello.auth.hex() or "no proof", actual_frame=t.hello_frame)
    return _Asked(hello, nonce, t.accept_for(hello), _secret(t))


def _refused(make: Callable[[_Asked], Accept], t: VerifierUnderTest, *, challenged: bool = True) -> None:
    """An ACCEPT whose proof is not right opens nothing; a genuine drafter is served after it."""
    asked = _asked(t, challenged=challenged)
    t.say(make(asked))
    no_session(t)
    t.restart()
    t.connect()
    t.serves()


@AUT.case(100, "both sides prove the secret, time and again", "REQ-AUT-4", "a proof that is right once only")
def proven(t: VerifierUnderTest) -> None:
    for _ in range(3):
        t.connect()
        t.serves()
        t.restart()
    t.connect()
    t.serves()


def _other_secret(asked: _Asked) -> Accept:
    other = replace(asked.secret, secret=bytes(reversed(asked.secret.secret)) + b"!")
    return other.sealed(asked.accept, asked.hello, asked.nonce)


def _other_binding(asked: _Asked) -> Accept:
    return replace(asked.secret, binding=asked.secret.binding + b"?").sealed(asked.accept, asked.hello, asked.nonce)


def _other_terms(asked: _Asked) -> Accept:
    return replace(asked.sealed, max_slots=max(1, asked.accept.max_slots - 1))


_FORGED: tuple[tuple[int, str, str, str, Callable[[_Asked], Accept]], ...] = (
    (101, "ACCEPT without a proof", "REQ-AUT-4", "a drafter that need not know the secret", lambda asked: asked.accept),
    (102, "a proof under another secret", "REQ-AUT-4", "a proof that is not compared", _other_secret),
    (103, "a proof whose first byte is wrong", "REQ-AUT-4", "a proof that is compared in part",
     lambda asked: asked.with_auth(flipped(asked.sealed.auth, 0))),
    (104, "a proof whose last byte is wrong", "REQ-AUT-4", "a proof that is compared in part",
     lambda asked: asked.with_auth(flipped(asked.sealed.auth, -1))),
    (105, "the verifier's own proof sent back", "REQ-AUT-4", "a proof that serves both sides",
     lambda asked: asked.with_auth(asked.hello.auth[AUTH_NONCE_BYTES:])),
    (106, "a right proof on other terms", "REQ-AUT-4", "terms that nobody proved", _other_terms),
    (107, "a proof of zeros", "REQ-AUT-4", "a proof that is not compared",
     lambda asked: asked.with_auth(bytes(AUTH_PROOF_BYTES))),
    (108, "a proof that is bound to another sort of link", "REQ-AUT-4", "a proof that is passed on", _other_binding),
)  # fmt: skip
for _number, _title, _anchor, _bug, _make in _FORGED:
    AUT.add(_number, _title, _anchor, _bug, partial(_refused, _make))


@AUT.case(109, "a sealed ACCEPT without a CHALLENGE", "REQ-AUT-4", "a proof that is bound to no nonce of the drafter's")
def unchallenged(t: VerifierUnderTest) -> None:
    _refused(lambda asked: asked.sealed, t, challenged=False)


@AUT.case(110, "the proof of an earlier connection again", "REQ-AUT-3", "a recorded ACCEPT that opens the door")
def replayed(t: VerifierUnderTest) -> None:
    old = t.connect()
    t.serves()
    t.restart()
    _refused(lambda asked: asked.with_auth(old.auth), t)


@AUT.case(111, "every HELLO has a nonce of its own", "REQ-AUT-3", "a nonce that can be foreseen")
def fresh_nonces(t: VerifierUnderTest) -> None:
    nonces = set()
    for _ in range(4):
        hello = t.hello or t.await_hello()
        nonces.add(hello.auth)
        if len(hello.auth) != AUTH_NONCE_BYTES:
            raise Unmet(f"a nonce of {AUTH_NONCE_BYTES} bytes", f"{len(hello.auth)} bytes", actual_frame=t.hello_frame)
        t.restart()
    if len(nonces) != 4:
        raise Unmet("4 different nonces", str(len(nonces)))
    t.connect()
    t.serves()


@AUT.case(112, "a second CHALLENGE for one HELLO is dropped", "REQ-AUT-5", "proofs for whoever asks, as many as wanted")
def twice(t: VerifierUnderTest) -> None:
    t.connect(before=lambda hello: [_challenge(t, hello, token_bytes(AUTH_NONCE_BYTES))])
    t.serves()


@AUT.case(113, "a CHALLENGE for an older HELLO is dropped", "REQ-HEL-10", "a proof for a HELLO that is void")
def stale(t: VerifierUnderTest) -> None:
    hello = t.hello or t.await_hello()
    older = replace(hello, serial=(hello.serial - 1) % 2**32)
    t.send(_challenge(t, older, token_bytes(AUTH_NONCE_BYTES)))
    t.connect()
    t.serves()


@AUT.case(114, "the proven HELLO is the challenged one", "REQ-AUT-2", "terms that change between nonce and proof")
def same_hello(t: VerifierUnderTest) -> None:
    t.connect()
    t.serves()
    first = t.restart()
    asked = _asked(t)
    if replace(asked.hello, auth=first.auth) != first:
        raise Unmet("the same HELLO with a proof", "another HELLO", actual_frame=t.hello_frame)
    t.restart()
    t.connect()
    t.serves()


@AUT.case(115, "REJECT AUTH_FAILED, then a drafter that accepts", "REQ-LIF-1", "a verifier that gives up for ever")
def rejected(t: VerifierUnderTest) -> None:
    asked = _asked(t)
    t.say(Reject(t.epoch, asked.hello.epoch, asked.hello.serial, E.AUTH_FAILED, "", "", ""))
    no_session(t)
    t.restart()
    t.connect()
    t.serves()


@PLAIN.case(120, "a CHALLENGE for a verifier without a secret", "REQ-AUT-5", "an answer that nobody can give")
def no_secret(t: VerifierUnderTest) -> None:
    if t.facts.secret:
        raise Unsupported("a connection without a secret")
    hello = t.hello or t.await_hello()
    t.send(_challenge(t, hello, token_bytes(AUTH_NONCE_BYTES)))
    t.connect()
    t.serves()


@PLAIN.case(121, "a sealed ACCEPT for a verifier without a secret", "REQ-HEL-11", "a proof that nobody asked for")
def unasked(t: VerifierUnderTest) -> None:
    if t.facts.secret:
        raise Unsupported("a connection without a secret")
    bad_accept(lambda accept, hello: {"auth": bytes(AUTH_PROOF_BYTES)}, t)
