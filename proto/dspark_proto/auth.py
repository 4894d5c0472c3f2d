"""The proofs of HELLO: either side shows that it holds the shared secret, and never sends it.

A proof is HMAC-SHA256 under the secret of: the prover's role, what the link is bound to, both nonces, the HELLO, and
for the drafter's proof the ACCEPT, each preceded by its length so that no two lists give the same bytes. Roles make a
proof worthless as the other side's, nonces make it worthless another time. Invariants: comparison takes the same time
wherever two proofs differ; the secret is in no message and no repr; nothing here draws a number. Spec: SPEC.md,
section "Authentication" (RFC 2104). Called by both connections; the caller provides secret and nonces.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Final

from .canonical import encode_canonical
from .errors import LocalProtocolError
from .hello import Accept, Hello
from .limits import AUTH_BINDING_BYTES_MAX, AUTH_NONCE_BYTES, AUTH_SECRET_BYTES_MIN
from .registry import ErrorCode

VERIFIER_LABEL: Final = b"dspark2 verifier"
DRAFTER_LABEL: Final = b"dspark2 drafter"


@dataclass(frozen=True, slots=True)
class Authentication:
    """What a side proves itself with.

    ``secret``: at least 16 bytes, the same on both sides. ``nonces()`` returns 32 bytes that nobody can foresee, new
    ones each time (``secrets.token_bytes``). ``binding``: up to 96 bytes that both ends of one link know, such as the
    transport's scheme; a proof made for another binding is wrong. Raises :class:`LocalProtocolError` BAD_FIELD.
    """

    secret: bytes = field(repr=False)
    nonces: Callable[[], bytes] = field(repr=False)
    binding: bytes = b""

    def __post_init__(self) -> None:
        if len(self.secret) < AUTH_SECRET_BYTES_MIN:
            raise LocalProtocolError(ErrorCode.BAD_FIELD, "authentication.secret", "needs 16 bytes or more")
        if len(self.binding) > AUTH_BINDING_BYTES_MAX:
            raise LocalProtocolError(ErrorCode.BAD_FIELD, "authentication.binding", "has 96 bytes or fewer")

    def nonce(self) -> bytes:
        """A new nonce. Raises :class:`LocalProtocolError` BAD_FIELD for a source that gives no 32 bytes."""
        nonce = self.nonces()
        if len(nonce) != AUTH_NONCE_BYTES:
            raise LocalProtocolError(ErrorCode.BAD_FIELD, "authentication.nonces", "must give 32 bytes")
        return nonce

    def proven(self, hello: Hello, drafter_nonce: bytes) -> Hello:
        """``hello``, whose ``auth`` is the verifier's nonce alone, with the verifier's proof behind it."""
        return replace(hello, auth=hello.auth + self._proof(VERIFIER_LABEL, hello, drafter_nonce))

    def verifier_is_genuine(self, hello: Hello, challenged: Hello, drafter_nonce: bytes) -> bool:
        """Whether ``hello`` is ``challenged``, the HELLO that got ``drafter_nonce``, with the right proof behind it."""
        repeats = replace(hello, auth=hello.auth[:AUTH_NONCE_BYTES]) == challenged
        proof = self._proof(VERIFIER_LABEL, challenged, drafter_nonce)
        return hmac.compare_digest(hello.auth[AUTH_NONCE_BYTES:], proof) and repeats

    def sealed(self, accept: Accept, hello: Hello, drafter_nonce: bytes) -> Accept:
        """``accept``, whose ``auth`` is empty, with the drafter's proof. ``hello`` may have its proof or not."""
        return replace(accept, auth=self._proof(DRAFTER_LABEL, hello, drafter_nonce, accept))

    def drafter_is_genuine(self, accept: Accept, hello: Hello, drafter_nonce: bytes) -> bool:
        """Whether ``accept`` has the proof of a drafter that holds the secret and answers ``hello``."""
        proof = self._proof(DRAFTER_LABEL, hello, drafter_nonce, accept)
        return hmac.compare_digest(accept.auth, proof)

    def _proof(self, label: bytes, hello: Hello, drafter_nonce: bytes, accept: Accept | None = None) -> bytes:
        nonce = hello.auth[:AUTH_NONCE_BYTES]
        parts = [label, self.binding, nonce, drafter_nonce, encode_canonical(replace(hello, auth=nonce).values())]
        if accept is not None:
            parts.append(encode_canonical(replace(accept, auth=b"").values()))
        return hmac.digest(self.secret, b"".join(len(part).to_bytes(4, "little") + part for part in parts), sha256)
