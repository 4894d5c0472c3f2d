"""AUT for drafters that hold a secret: proofs that are missing, wrong, replayed, reflected, or made for something else.

Every case needs `Facts.secret`; without it a testee is UNSUPPORTED. Spec: SPEC.md 6.1. Called by `catalogue`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from hashlib import sha256
from secrets import token_bytes

from ..frame import encode_frame
from ..hello import Accept, Hello
from ..limits import AUTH_NONCE_BYTES, AUTH_PROOF_BYTES
from ..messages import Ping
from ..prefix import Key
from ..registry import ErrorCode
from .as_verifier import DrafterUnderTest
from .forge import flipped
from .record import Family, Role
from .verdicts import Unmet, WrongCode

AUT = Family("AUT", Role.DRAFTER, tags=("secret",))
E = ErrorCode


def _asked(t: DrafterUnderTest) -> tuple[Hello, bytes, Hello]:
    """A HELLO that was challenged, the drafter's nonce, and the HELLO with the right proof, not yet sent."""
    hello = t.offer(auth=token_bytes(AUTH_NONCE_BYTES))
    nonce = t.challenged(hello)
    return hello, nonce, t.authentication.proven(hello, nonce)


def _refused(t: DrafterUnderTest, hello: Hello, code: ErrorCode) -> None:
    """REJECT with ``code``, which tells no value of the drafter's."""
    answer = t.answer_to(bytes(encode_frame(hello)))
    if isinstance(answer, Accept):
        raise Unmet(f"REJECT {code.name}", "ACCEPT")
    if answer.code is not code:
        raise WrongCode(f"REJECT {code.name}", f"REJECT {answer.code.name}")
    t.refused = True
    t.check_echo(hello, answer)
    if answer.drafter_value or answer.verifier_value:
        raise Unmet("constant text", f"{answer.drafter_value} {answer.verifier_value}")


@AUT.case(1, "both sides prove the secret, time and again", "REQ-AUT-1", "a proof that is right once only")
def proven(t: DrafterUnderTest) -> None:
    for _ in range(3):
        t.hello()
    t.open()
    t.round()


@AUT.case(2, "a HELLO without a proof", "REQ-AUT-1", "a secret that need not be known")
def missing(t: DrafterUnderTest) -> None:
    _refused(t, t.offer(), E.AUTH_REQUIRED)


def _damaged(offset: int, t: DrafterUnderTest) -> None:
    _, _, right = _asked(t)
    _refused(t, replace(right, auth=flipped(right.auth, offset)), E.AUTH_FAILED)
    t.hello()


for _number, _title, _offset in ((3, "first", AUTH_NONCE_BYTES), (4, "last", -1)):
    AUT.add(_number, f"a proof whose {_title} byte is wrong", "REQ-AUT-1", "a proof that is compared in part",
            partial(_damaged, _offset))  # fmt: skip


@AUT.case(5, "the proof of an earlier connection again", "REQ-AUT-3", "a recorded HELLO that opens the door")
def replayed(t: DrafterUnderTest) -> None:
    _, _, right = _asked(t)
    answer = t.answer_to(bytes(encode_frame(right)))
    if not isinstance(answer, Accept):
        raise Unmet("ACCEPT", f"REJECT {answer.code.name}")
    _refused(t, right, E.AUTH_FAILED)


@AUT.case(6, "an old proof for a new challenge", "REQ-AUT-3", "a proof that does not depend on the drafter's nonce")
def stale(t: DrafterUnderTest) -> None:
    hello, _, right = _asked(t)
    t.challenged(hello)
    _refused(t, right, E.AUTH_FAILED)


@AUT.case(7, "the drafter's own proof sent back", "REQ-AUT-1", "a proof that serves both sides")
def reflected(t: DrafterUnderTest) -> None:
    own = t.hello().auth
    hello, _, _ = _asked(t)
    _refused(t, replace(hello, auth=hello.auth + own), E.AUTH_FAILED)
    t.hello()


@AUT.case(8, "a right proof on another HELLO", "REQ-AUT-2", "terms that nobody proved")
def other_hello(t: DrafterUnderTest) -> None:
    _, _, right = _asked(t)
    _refused(t, replace(right, max_slots=right.max_slots + 1), E.AUTH_FAILED)


@AUT.case(9, "a CHALLENGE serves one proof", "REQ-AUT-3", "a nonce that lets proofs be tried one after the other")
def one_try(t: DrafterUnderTest) -> None:
    _, _, right = _asked(t)
    _refused(t, replace(right, auth=right.auth[:AUTH_NONCE_BYTES] + bytes(AUTH_PROOF_BYTES)), E.AUTH_FAILED)
    _refused(t, right, E.AUTH_FAILED)


@AUT.case(10, "an incompatible HELLO is not told so before it is proven", "REQ-AUT-1", "identities for everybody")
def tells_nothing(t: DrafterUnderTest) -> None:
    ours = t.facts.compatibility
    compat = replace(ours, vocab_size=ours.vocab_size + 1).encoded()
    _refused(t, t.offer(compat=compat, compat_hash=sha256(compat).digest()), E.AUTH_REQUIRED)
    t.rejected(t.offer(compat=compat, compat_hash=sha256(compat).digest()), E.INCOMPATIBLE)


@AUT.case(11, "every CHALLENGE has a nonce of its own", "REQ-AUT-3", "a nonce that can be foreseen")
def fresh_nonces(t: DrafterUnderTest) -> None:
    nonces = {t.challenged(t.offer(auth=bytes(AUTH_NONCE_BYTES))) for _ in range(4)}
    if len(nonces) != 4:
        raise Unmet("4 different nonces", f"{len(nonces)}")


@AUT.case(12, "frames between CHALLENGE and proof", "REQ-AUT-1", "slots for a verifier that has proven nothing")
def unproven(t: DrafterUnderTest) -> None:
    t.hello()
    message, key = t.open_message()
    _, _, right = _asked(t)
    t.send(encode_frame(Ping(t.epoch, 9)), encode_frame(message, Key(0, key.generation)))
    answer = t.answer_to(bytes(encode_frame(right)))
    if not isinstance(answer, Accept):
        raise Unmet("ACCEPT", f"REJECT {answer.code.name}")
    t.holds_nothing()
