"""Drafters with a secret, and one bug each in how they ask for it. Called by `mutants_drafter`."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..auth import VERIFIER_LABEL, Authentication
from ..errors import RemoteProtocolError
from ..frame import encode_frame
from ..hello import Accept, Hello
from ..limits import AUTH_NONCE_BYTES
from ..messages import Ping, Pong
from ..negotiation import first_mismatch
from ..registry import ErrorCode
from .facts import DRAFTER_EPOCH, REFERENCE_SECRET, drafter_parameters, reference_facts
from .filters import read
from .mutants import Shell
from .reference_drafter import ReferenceDrafter


class _Careless(Authentication):
    """Compares proofs in another way than it must. ``kind`` says which."""

    kind = ""
    sealed_once: list[bytes]

    def verifier_is_genuine(self, hello: Hello, challenged: Hello, drafter_nonce: bytes) -> bool:
        sent = hello.auth[AUTH_NONCE_BYTES:]
        right = self._proof(VERIFIER_LABEL, challenged, drafter_nonce)
        repeats = replace(hello, auth=hello.auth[:AUTH_NONCE_BYTES]) == challenged
        match self.kind:
            case "own-proof":
                return sent in self.sealed_once or super().verifier_is_genuine(hello, challenged, drafter_nonce)
            case "half-proof":
                return sent[:16] == right[:16] and repeats
            case "last-half-proof":
                return sent[16:] == right[16:] and repeats
            case "any-hello":
                return hmac.compare_digest(sent, right)
        return super().verifier_is_genuine(hello, challenged, drafter_nonce)

    def sealed(self, accept: Accept, hello: Hello, drafter_nonce: bytes) -> Accept:
        if self.kind == "one-seal" and self.sealed_once:
            return replace(accept, auth=self.sealed_once[0])
        done = super().sealed(accept, hello, drafter_nonce)
        self.sealed_once.append(done.auth)
        return done


def _drafter(kind: str = "") -> ReferenceDrafter:
    honest = reference_facts(REFERENCE_SECRET).authentication
    assert honest is not None
    values: dict[str, Any] = {"kind": kind, "sealed_once": [], "__slots__": ()}
    made = type("Careless", (_Careless,), values)(honest.secret, honest.nonces, honest.binding)
    if kind == "same-nonce":
        made = replace(made, nonces=lambda: bytes(AUTH_NONCE_BYTES))
    drafter = ReferenceDrafter(replace(drafter_parameters(reference_facts()), authentication=made))
    if kind in _DOORS:
        ask = drafter.connection._authenticate
        drafter.connection._authenticate = partial(_DOORS[kind], drafter.connection, ask)  # type: ignore[method-assign]
    return drafter


def _optional(connection: Any, ask: Callable[[Hello], bool], hello: Hello) -> bool:
    """Who proves nothing gets in."""
    return ask(hello) if hello.auth else True


def _keeps(connection: Any, ask: Callable[[Hello], bool], hello: Hello) -> bool:
    """A challenge stays good until the next one."""
    kept = connection._challenge
    try:
        return ask(hello)
    finally:
        connection._challenge = connection._challenge or kept


def _tells(connection: Any, ask: Callable[[Hello], bool], hello: Hello) -> bool:
    """Compatibility is looked at before the proof."""
    if first_mismatch(connection.parameters.compatibility, hello) is not None:
        raise RemoteProtocolError(ErrorCode.INCOMPATIBLE, "HELLO.compat")
    return ask(hello)


_DOORS: dict[str, Callable[[Any, Callable[[Hello], bool], Hello], bool]] = {
    "optional-proof": _optional,
    "keeps-challenge": _keeps,
    "tells-first": _tells,
}


def _answers_early(shell: Shell, raw: bytes) -> list[bytes]:
    """PING is answered between CHALLENGE and proof."""
    frame = read(raw)
    if frame is not None and isinstance(frame.message, Ping) and shell.inner.connection.state.value == "challenged":
        shell.inject.append(bytes(encode_frame(Pong(DRAFTER_EPOCH, frame.message.nonce, 0, 0))))
    return [raw]


KINDS: tuple[tuple[str, str, Callable[[], Any]], ...] = (
    ("own-proof", "takes its own proofs for the verifier's", partial(_drafter, "own-proof")),
    ("half-proof", "compares the first half of a proof", partial(_drafter, "half-proof")),
    ("last-half-proof", "compares the last half of a proof", partial(_drafter, "last-half-proof")),
    ("any-hello", "does not compare the proven HELLO with the challenged one", partial(_drafter, "any-hello")),
    ("one-seal", "has one proof for every ACCEPT", partial(_drafter, "one-seal")),
    ("same-nonce", "has one nonce for every CHALLENGE", partial(_drafter, "same-nonce")),
    ("optional-proof", "lets in who proves nothing", partial(_drafter, "optional-proof")),
    ("keeps-challenge", "lets a challenge serve several proofs", partial(_drafter, "keeps-challenge")),
    ("tells-first", "compares identities before the proof", partial(_drafter, "tells-first")),
    ("answers-early", "answers PING before the proof", lambda: Shell(_drafter(), _answers_early)),
)
