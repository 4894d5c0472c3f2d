"""Verifiers with one bug each in what they agree to: the drafter's proof, the version, dense rows.

Called by `mutants_verifier`; as there, everything but the bug is honest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..auth import VERIFIER_LABEL, Authentication
from ..frame import Frame, encode_frame
from ..hello import Accept, Challenge, Hello, Reject
from ..limits import AUTH_NONCE_BYTES, AUTH_PROOF_BYTES
from ..messages import Context, Open, Pong, Reset, Row, StepItem
from ..negotiation import Negotiated
from ..registry import ErrorCode, Representation, WireVersion
from ..states import VerifierState
from .facts import REFERENCE_SECRET, reference_facts, verifier_parameters
from .filters import again, fields, items, on, read
from .mutants import Filter, Shell
from .mutants_drafter_rare import SmallBuffer
from .reference_verifier import ReferenceVerifier

E = ErrorCode


class _Careless(Authentication):
    """Believes proofs that it must not. ``kind`` says which; ``seen`` are proofs that were right once."""

    kind = ""
    seen: list[bytes]

    def drafter_is_genuine(self, accept: Accept, hello: Hello, drafter_nonce: bytes) -> bool:
        honest = partial(super().drafter_is_genuine, hello=hello, drafter_nonce=drafter_nonce)
        right = honest(accept)
        if right:
            self.seen.append(accept.auth)
        proof = self.sealed(accept, hello, drafter_nonce).auth
        match self.kind:
            case "any-seal":
                return len(accept.auth) == AUTH_PROOF_BYTES
            case "half-seal":
                return accept.auth[:16] == proof[:16]
            case "last-half-seal":
                return accept.auth[16:] == proof[16:]
            case "own-seal":
                return right or accept.auth == self._proof(VERIFIER_LABEL, hello, drafter_nonce)
            case "old-seal":
                return right or accept.auth in self.seen
            case "open-terms":
                return any(honest(replace(accept, max_slots=slots)) for slots in range(1, 9))
            case "unbound":
                other = replace(self, binding=b"?")
                return right or other.drafter_is_genuine(accept, hello, drafter_nonce)
        return right


def _asking(kind: str = "") -> ReferenceVerifier:
    """A verifier with a secret; its way to judge proofs is replaced."""
    facts = reference_facts(REFERENCE_SECRET)
    honest = facts.authentication
    assert honest is not None
    made: Authentication = honest
    if kind == "same-nonce":
        made = replace(honest, nonces=lambda: bytes(AUTH_NONCE_BYTES))
    elif kind:
        values: dict[str, Any] = {"kind": kind, "seen": [], "__slots__": ()}
        made = type("Careless", (_Careless,), values)(honest.secret, honest.nonces, honest.binding)
    return ReferenceVerifier(replace(verifier_parameters(facts), authentication=made))


def _lenient(takes: Callable[[Any, Accept], bool]) -> ReferenceVerifier:
    """A verifier that looks at a proof only where ``takes`` does not wave it through."""
    verifier = _asking()
    ask = verifier.connection._check_proof

    def check(accept: Accept) -> None:
        if not takes(verifier.connection, accept):
            ask(accept)

    verifier.connection._check_proof = check  # type: ignore[method-assign]
    return verifier


def _seal_of_zeros(connection: Any, accept: Accept) -> bool:
    """A proof for no CHALLENGE at all is good."""
    unasked = connection.state is VerifierState.HELLO_SENT
    nonce = bytes(AUTH_NONCE_BYTES)
    secret = connection.parameters.authentication
    return unasked and bool(secret.drafter_is_genuine(accept, connection._hello, nonce))


def _answers_twice(shell: Shell, frame: Frame) -> None:
    """Every CHALLENGE is answered."""
    connection = shell.inner.connection
    if connection.state is VerifierState.PROOF_SENT:
        connection.state = VerifierState.HELLO_SENT


def _stale(shell: Shell, challenge: Challenge) -> dict[str, Any]:
    return {"serial": shell.inner.connection._serial}


def _first_proof(shell: Shell, hello: Hello) -> dict[str, Any]:
    """Each HELLO has the first one's proof."""
    if len(hello.auth) <= AUTH_NONCE_BYTES:
        return {}
    first = shell.memory.setdefault("proof", hello.auth[AUTH_NONCE_BYTES:])
    return {"auth": hello.auth[:AUTH_NONCE_BYTES] + first}


def _second_thoughts(shell: Shell, raw: bytes) -> list[bytes]:
    """The second HELLO of a process offers less once it is challenged, and proves that."""

    def edit(shell: Shell, frame: Frame) -> bytes | None:
        hello = frame.message
        assert isinstance(hello, Hello)
        connection = shell.inner.connection
        if hello.serial != 2 or len(hello.auth) <= AUTH_NONCE_BYTES:
            return None
        less = replace(hello, auth=hello.auth[:AUTH_NONCE_BYTES], heartbeat_ms=hello.heartbeat_ms - 1)
        return again(frame, connection.parameters.authentication.proven(less, connection._drafter_nonce))

    return on(Hello, edit)(shell, raw)


def _gives_up(shell: Shell, frame: Frame) -> None:
    refused = frame.message
    assert isinstance(refused, Reject)
    shell.memory["over"] = refused.code is E.AUTH_FAILED


def _while_hopeful(shell: Shell, frame: Frame) -> list[bytes] | None:
    return [] if shell.memory.get("over") else None


def _answers_anyway(shell: Shell, frame: Frame) -> None:
    """A CHALLENGE is answered although there is no secret."""
    hello = shell.inner.connection._hello
    assert isinstance(hello, Hello)
    made_up = bytes(AUTH_NONCE_BYTES + AUTH_PROOF_BYTES)
    shell.inject.append(bytes(encode_frame(replace(hello, auth=made_up))))


def _as_asked(shell: Shell, accept: Accept) -> dict[str, Any]:
    """The version of ACCEPT is not compared."""
    return {"wire_version": int(shell.inner.connection._version)}


def _no_capabilities(shell: Shell, accept: Accept) -> dict[str, Any]:
    """In version 1, capabilities are ignored."""
    return {"capabilities": 0} if accept.wire_version == WireVersion.V1_0 else {}


def _any_reason(shell: Shell, reject: Reject) -> dict[str, Any]:
    """Every refusal is a reason for version 1."""
    return {"code": E.BAD_VERSION}


class _Downgraded(ReferenceVerifier):
    """Stays with version 1."""

    def __init__(self) -> None:
        super().__init__(verifier_parameters(reference_facts()))
        self._lowest = self._version

    def start(self, now_ns: int) -> list[bytes]:
        self._lowest = self._version = min(self._lowest, self._version)
        return super().start(now_ns)


def _sampled(shell: Shell, opened: Open) -> dict[str, Any]:
    """OPEN of version 1 has a temperature."""
    terms: Negotiated | None = shell.inner.connection.negotiated
    return {"draft_temperature_micro": 1_000_000} if terms is not None and terms.tokens_only else {}


def _old_sizes(shell: Shell, hello: Hello) -> dict[str, Any]:
    """HELLO of version 1 has version 2's reply bytes."""
    return {"reply_bytes": hello.max_depth * 24} if WireVersion.V1_0 in hello.wire_versions else {}


def _one_row(shell: Shell, frame: Frame) -> list[bytes] | None:
    """Dense rows must come in one ROW."""
    row = frame.message
    assert isinstance(row, Row)
    several = row.representation is Representation.DENSE and row.row_count < row.depth
    return [] if several else None


def _never_dense(shell: Shell, frame: Frame) -> list[bytes] | None:
    """Dense rows are not understood."""
    row = frame.message
    assert isinstance(row, Row)
    return [] if row.representation is Representation.DENSE else None


def _miscounts(shell: Shell, item: StepItem) -> dict[str, Any]:
    """From the seventh round of a session on, accepted drafts are counted one too many."""
    return {"accepted_count": item.accepted_count + 1} if item.round > 6 and item.accepted_count < 5 else {}


def _falls(shell: Shell, frame: Frame) -> None:
    """The last total of credit counts, whatever it is."""
    pong = frame.message
    assert isinstance(pong, Pong)
    connection = shell.inner.connection
    if pong.nonce == 0 and pong.credit_limit < getattr(connection, "_credit_limit", 0):
        connection._credit_limit = pong.credit_limit


def _bare_resets(shell: Shell, raw: bytes) -> list[bytes]:
    """After RESET no context is sent."""
    frame = read(raw)
    if frame is not None and isinstance(frame.message, Reset):
        shell.memory["reset"] = frame.prefix.slot
    fresh = frame is not None and isinstance(frame.message, Context) and frame.prefix.slot == shell.memory.get("reset")
    return [] if fresh else [raw]


def _plain(incoming: Filter | None = None, outgoing: Filter | None = None) -> Shell:
    return Shell(_honest(), incoming, outgoing)


def _honest() -> ReferenceVerifier:
    return ReferenceVerifier(verifier_parameters(reference_facts()))


def _secret(incoming: Filter | None = None, outgoing: Filter | None = None) -> Shell:
    return Shell(_asking(), incoming, outgoing)


_SEALS = (
    ("any-seal", "does not compare the drafter's proof"),
    ("half-seal", "compares the first half of the drafter's proof"),
    ("last-half-seal", "compares the last half of the drafter's proof"),
    ("own-seal", "takes its own proof for the drafter's"),
    ("old-seal", "takes proofs of earlier connections"),
    ("open-terms", "takes a proof for other terms"),
    ("unbound", "takes a proof that is bound to another sort of link"),
    ("same-nonce", "has one nonce for every HELLO"),
)

SECRET: tuple[tuple[str, str, Callable[[], Any]], ...] = (
    *((name, bug, partial(_asking, name)) for name, bug in _SEALS),
    ("optional-seal", "takes an ACCEPT without a proof", partial(_lenient, lambda c, accept: not accept.auth)),
    ("unchallenged", "takes a proof where no CHALLENGE was", partial(_lenient, _seal_of_zeros)),
    ("answers-twice", "answers every CHALLENGE", partial(_secret, incoming=on(Challenge, _answers_twice))),
    ("stale-challenge", "does not compare what CHALLENGE echoes", partial(_secret, incoming=fields(Challenge, _stale))),
    ("one-proof", "has one proof for every HELLO", partial(_secret, outgoing=fields(Hello, _first_proof))),
    ("second-thoughts", "proves another HELLO than the challenged one", partial(_secret, outgoing=_second_thoughts)),
    (
        "gives-up",
        "gives up after AUTH_FAILED",
        partial(_secret, on(Reject, _gives_up), on(Hello, _while_hopeful)),
    ),
)

PLAIN: tuple[tuple[str, str, Callable[[], Any]], ...] = (
    (
        "answers-anyway",
        "answers a CHALLENGE without a secret",
        partial(_plain, incoming=on(Challenge, _answers_anyway)),
    ),
    ("strips-seals", "ignores a proof in ACCEPT", partial(_plain, incoming=fields(Accept, lambda s, m: {"auth": b""}))),
    ("any-version", "does not compare the version of ACCEPT", partial(_plain, incoming=fields(Accept, _as_asked))),
    (
        "v1-capabilities",
        "ignores capabilities in version 1",
        partial(_plain, incoming=fields(Accept, _no_capabilities)),
    ),
    ("v1-eager", "asks for version 1 after any refusal", partial(_plain, incoming=fields(Reject, _any_reason))),
    ("v1-for-ever", "stays with version 1", _Downgraded),
    ("v1-sampled", "asks for sampled drafts in version 1", partial(_plain, outgoing=fields(Open, _sampled))),
    ("v1-sizes", "offers reply bytes of version 2 in version 1", partial(_plain, outgoing=fields(Hello, _old_sizes))),
    ("miscounts", "counts accepted drafts one too many after a while", partial(_plain, outgoing=items(_miscounts))),
    ("credit-falls", "takes any total of credit", partial(_plain, incoming=on(Pong, _falls))),
    ("bare-resets", "sends no context after RESET", partial(_plain, outgoing=_bare_resets)),
    ("small-buffer", "loses frames that arrive at once", partial(SmallBuffer, _honest)),
    ("dense-in-one", "takes dense rows in one ROW only", partial(_plain, incoming=on(Row, _one_row))),
    ("dense-never", "asks for dense rows and takes none", partial(_plain, incoming=on(Row, _never_dense))),
)
