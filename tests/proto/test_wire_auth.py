"""Challenge and response in HELLO: who proves what, when, and what a side without the secret learns (nothing)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from wire_pairs import MS, Pair, compatibility, counted, parameters, reply_arrays

from dspark_proto import (
    Accepted,
    Authentication,
    DrafterConnection,
    DrafterState,
    ErrorCode,
    HelloParameters,
    HelloReceived,
    LocalProtocolError,
    PeerSilent,
    Rejected,
    SlotClosed,
    VerifierConnection,
    VerifierState,
    decode_canonical,
    decode_frame,
    encode_frame,
)
from dspark_proto.hello import Accept, Challenge, Hello, Reject
from dspark_proto.limits import HANDSHAKE_DEADLINE_MS
from dspark_proto.messages import Ping

SECRET, OTHER = b"sixteen bytes!!!", b"sixteen bytes???"
VECTORS = json.loads((Path(__file__).parents[2] / "proto" / "vectors" / "auth.json").read_text())["vectors"]


def nonces(start: int) -> Iterator[bytes]:
    """Nonces that a test can foresee, each another one."""
    number = start
    while True:
        yield number.to_bytes(32, "big")
        number += 1


def holder(epoch: int, secret: bytes | None = SECRET, binding: bytes = b"tcp", **changes: Any) -> HelloParameters:
    """Parameters of a side that holds ``secret``; None: of one that holds none."""
    source = nonces(epoch * 1000)
    authentication = None if secret is None else Authentication(secret, lambda: next(source), binding)
    return parameters(epoch, authentication=authentication, **changes)


def joined(verifier: bytes | None = SECRET, drafter: bytes | None = SECRET) -> Pair:
    return Pair(VerifierConnection(holder(100, verifier)), DrafterConnection(holder(200, drafter)))


def greet(pair: Pair) -> list[Any]:
    """HELLO and everything that follows by itself; returns the drafter's last events."""
    events = pair.up(pair.verifier.hello(pair.now_ns))
    pair.down(*pair.drafter.frames_to_send())
    return [*events, *pair.up(*pair.verifier.frames_to_send())]


def challenge_of(pair: Pair) -> Challenge:
    """The CHALLENGE that waits in the drafter's outbox."""
    (frame,) = pair.drafter.frames_to_send()
    message = decode_frame(frame).message
    assert isinstance(message, Challenge)
    return message


def proven_hello(pair: Pair) -> Hello:
    """The HELLO with proof that the verifier wants to send, after a challenge; the drafter has not got it."""
    pair.up(pair.verifier.hello(pair.now_ns))
    pair.down(*pair.drafter.frames_to_send())
    (frame,) = pair.verifier.frames_to_send()
    message = decode_frame(frame).message
    assert isinstance(message, Hello)
    return message


def refused(pair: Pair, message: Hello) -> Reject:
    """What a drafter says to a HELLO that it must refuse, having told and allocated nothing."""
    (event,) = [one for one in pair.up(encode_frame(message)) if isinstance(one, HelloReceived)]
    assert event.negotiated is None
    with pytest.raises(LocalProtocolError):
        pair.drafter.accept(0)
    reject = decode_frame(pair.drafter.reject()).message
    assert isinstance(reject, Reject)
    assert (reject.field, reject.drafter_value, reject.verifier_value) == ("HELLO.auth", "", "")
    assert pair.drafter.negotiated is None
    assert pair.drafter._slots == ()
    return reject


# Success


def test_both_prove_the_secret_and_a_round_runs() -> None:
    pair = joined()
    (received,) = greet(pair)
    assert received.code is None
    (accepted,) = pair.down(pair.drafter.accept(0))
    assert isinstance(accepted, Accepted)
    assert (pair.verifier.state, pair.drafter.state) == (VerifierState.ACTIVE, DrafterState.ACTIVE)
    pair.open()
    (item,) = pair.step(pair.item(1))
    (ready,) = pair.down(*pair.drafter.reply(item, **reply_arrays()))
    assert ready.tokens == (7,) * 5
    assert counted(pair.verifier.counters) == counted(pair.drafter.counters) == {}


def test_the_frames_of_the_handshake() -> None:
    pair = joined()
    first = decode_frame(pair.verifier.hello(0)).message
    assert isinstance(first, Hello)
    assert first.auth == (100_000).to_bytes(32, "big")
    pair.up(encode_frame(first))
    assert pair.drafter.state is DrafterState.CHALLENGED
    challenge = challenge_of(pair)
    assert challenge == Challenge(200, 100, 1, (200_000).to_bytes(32, "big"))
    pair.down(encode_frame(challenge))
    assert pair.verifier.state is VerifierState.PROOF_SENT
    (frame,) = pair.verifier.frames_to_send()
    second = decode_frame(frame).message
    assert isinstance(second, Hello)
    assert second == replace(first, auth=second.auth)
    assert (second.auth[:32], len(second.auth)) == (first.auth, 64)
    pair.up(frame)
    accept = decode_frame(pair.drafter.accept(0)).message
    assert isinstance(accept, Accept)
    assert len(accept.auth) == 32
    assert accept.auth != second.auth[32:]


def test_without_a_secret_everything_is_as_before() -> None:
    pair = joined(None, None)
    frame = pair.verifier.hello(0)
    hello = decode_frame(frame).message
    assert isinstance(hello, Hello)
    assert hello.auth == b""
    (received,) = pair.up(frame)
    assert received.code is None
    accept = decode_frame(pair.drafter.accept(0)).message
    assert isinstance(accept, Accept)
    assert accept.auth == b""
    assert pair.drafter.frames_to_send() == []


def test_a_reconnect_proves_again_with_new_nonces() -> None:
    pair = joined()
    greet(pair)
    pair.down(pair.drafter.accept(0))
    pair.open()
    first = pair.up(pair.verifier.hello(0))
    assert [type(event) for event in first] == [SlotClosed]
    assert pair.drafter.negotiated is None
    assert challenge_of(pair).nonce == (200_001).to_bytes(32, "big")
    greet(pair)
    (accepted,) = pair.down(pair.drafter.accept(0))
    assert isinstance(accepted, Accepted)


# The verifier has to prove it


def test_a_verifier_without_a_secret_is_told_that_one_is_wanted() -> None:
    pair = joined(verifier=None)
    (received,) = greet(pair)
    assert received.code is ErrorCode.AUTH_REQUIRED
    assert pair.down(pair.drafter.reject()) == [Rejected(ErrorCode.AUTH_REQUIRED, "HELLO.auth", "", "")]
    assert pair.drafter.counters["auth_required"] == 1
    assert pair.verifier.state is VerifierState.IDLE


def test_a_wrong_secret_is_refused_in_constant_text() -> None:
    pair = joined(verifier=OTHER)
    (received,) = greet(pair)
    assert received.code is ErrorCode.AUTH_FAILED
    assert pair.down(pair.drafter.reject()) == [Rejected(ErrorCode.AUTH_FAILED, "HELLO.auth", "", "")]
    assert counted(pair.drafter.counters) == {"auth_failed": 1}
    assert pair.drafter._slots == ()


def test_another_binding_is_another_proof() -> None:
    pair = Pair(VerifierConnection(holder(100, binding=b"ipc")), DrafterConnection(holder(200, binding=b"tcp")))
    (received,) = greet(pair)
    assert received.code is ErrorCode.AUTH_FAILED


@pytest.mark.parametrize(
    "spoil",
    [
        lambda auth: auth[:63],
        lambda auth: auth[:33],
        lambda auth: auth[:31],
        lambda auth: auth[:1],
        lambda auth: auth[:32] + bytes(32),
        lambda auth: auth[:63] + bytes([auth[63] ^ 1]),
        lambda auth: auth[:32] + bytes([auth[32] ^ 0x80]) + auth[33:],
        lambda auth: bytes([auth[0] ^ 1]) + auth[1:],
        lambda auth: auth[32:] + auth[:32],
    ],
)
def test_a_truncated_or_changed_proof_is_refused(spoil: Any) -> None:
    pair = joined()
    hello = proven_hello(pair)
    assert refused(pair, replace(hello, auth=spoil(hello.auth))).code is ErrorCode.AUTH_FAILED
    assert counted(pair.drafter.counters) == {"auth_failed": 1}


@pytest.mark.parametrize(
    "changes", [{"max_slots": 3}, {"serial": 9}, {"epoch": 101}, {"checksums": 1}, {"capabilities": 1}]
)
def test_a_proof_is_for_one_hello_only(changes: dict[str, int]) -> None:
    pair = joined()
    assert refused(pair, replace(proven_hello(pair), **changes)).code is ErrorCode.AUTH_FAILED


def test_a_proof_is_worth_nothing_the_second_time() -> None:
    pair = joined()
    hello = proven_hello(pair)
    (received,) = pair.up(encode_frame(hello))
    assert received.code is None
    pair.drafter.accept(0)
    assert refused(pair, hello).code is ErrorCode.AUTH_FAILED
    pair.up(encode_frame(replace(hello, auth=hello.auth[:32])))
    assert challenge_of(pair).nonce == (200_001).to_bytes(32, "big")
    assert refused(pair, hello).code is ErrorCode.AUTH_FAILED


def test_a_wrong_guess_uses_the_challenge_up() -> None:
    pair = joined()
    hello = proven_hello(pair)
    assert refused(pair, replace(hello, auth=hello.auth[:32] + bytes(32))).code is ErrorCode.AUTH_FAILED
    assert refused(pair, hello).code is ErrorCode.AUTH_FAILED


def test_a_proof_without_a_challenge_is_refused() -> None:
    hello = proven_hello(joined())
    assert refused(joined(), hello).code is ErrorCode.AUTH_FAILED


def test_the_drafters_own_proof_is_no_proof_of_a_verifier() -> None:
    pair = joined()
    hello = proven_hello(pair)
    pair.up(encode_frame(hello))
    accept = decode_frame(pair.drafter.accept(0)).message
    assert isinstance(accept, Accept)
    # The same nonces and HELLO again: a drafter whose source repeats itself still has its role in the proof.
    again = Pair(pair.verifier, DrafterConnection(holder(200)))
    again.up(encode_frame(replace(hello, auth=hello.auth[:32])))
    assert challenge_of(again).nonce == (200_000).to_bytes(32, "big")
    assert refused(again, replace(hello, auth=hello.auth[:32] + accept.auth)).code is ErrorCode.AUTH_FAILED


def test_nothing_is_told_before_the_proof() -> None:
    """A HELLO that could not be accepted anyway gets the same CHALLENGE as one that could."""
    other = compatibility(vocab_size=5, draft_identity="other")
    pair = Pair(VerifierConnection(holder(100, compat=other)), DrafterConnection(holder(200)))
    assert pair.up(pair.verifier.hello(0)) == []
    assert isinstance(challenge_of(pair), Challenge)
    assert counted(pair.drafter.counters) == {}
    (received,) = greet(pair)
    assert received.code is ErrorCode.INCOMPATIBLE
    assert received.mismatch.field == "vocab_size"


def test_a_flood_of_hellos_holds_one_nonce_and_sends_no_more_than_it_gets() -> None:
    pair = joined()
    hello = decode_frame(pair.verifier.hello(0)).message
    assert isinstance(hello, Hello)
    sent = 0
    for serial in range(200):
        frame = encode_frame(replace(hello, serial=serial))
        assert pair.up(frame) == []
        sent += len(frame)
    answers = pair.drafter.frames_to_send()
    assert sum(map(len, answers)) <= sent
    assert pair.drafter._slots == ()
    assert pair.drafter.state is DrafterState.CHALLENGED
    # Only the last challenge counts: a proof for an earlier one is void.
    authentication = pair.verifier.parameters.authentication
    assert authentication is not None
    earlier = decode_frame(answers[198]).message
    assert isinstance(earlier, Challenge)
    late = authentication.proven(replace(hello, serial=198), earlier.nonce)
    assert refused(pair, late).code is ErrorCode.AUTH_FAILED


def test_only_hello_is_heard_between_challenge_and_proof() -> None:
    pair = joined()
    pair.up(pair.verifier.hello(0))
    challenge_of(pair)
    assert pair.up(encode_frame(Ping(100, 1))) == []
    assert pair.drafter.frames_to_send() == []
    assert pair.drafter.counters["hello_required"] == 1
    for call in (lambda: pair.drafter.accept(0), pair.drafter.reject):
        with pytest.raises(LocalProtocolError):
            call()


def test_a_drafter_without_a_secret_refuses_to_be_asked() -> None:
    pair = joined(drafter=None)
    hello = decode_frame(pair.verifier.hello(0)).message
    assert isinstance(hello, Hello)
    assert refused(pair, hello).code is ErrorCode.AUTH_UNSUPPORTED
    assert pair.drafter.counters["auth_unsupported"] == 1


# The drafter has to prove it


def proven_accept(pair: Pair) -> Accept:
    greet(pair)
    accept = decode_frame(pair.drafter.accept(0)).message
    assert isinstance(accept, Accept)
    return accept


@pytest.mark.parametrize(
    "changes",
    [{"auth": b""}, {"auth": bytes(32)}, {"max_depth": 4}, {"epoch": 201}, {"context_credit_rows": 1}],
)
def test_an_accept_without_the_right_proof_is_refused_and_nothing_allocated(changes: dict[str, Any]) -> None:
    pair = joined()
    accept = proven_accept(pair)
    (event,) = pair.down(encode_frame(replace(accept, **changes)))
    assert event == Rejected(ErrorCode.AUTH_FAILED, "ACCEPT.auth", "", "")
    assert (pair.verifier.staging, pair.verifier.negotiated) == (None, None)
    assert pair.verifier.state is VerifierState.IDLE
    assert pair.verifier.counters["auth_failed"] == 1


def test_a_truncated_proof_of_the_drafter_is_refused() -> None:
    pair = joined()
    accept = proven_accept(pair)
    (event,) = pair.down(encode_frame(replace(accept, auth=accept.auth[:31])))
    assert event.code is ErrorCode.AUTH_FAILED


def test_the_verifiers_own_proof_played_back_is_refused() -> None:
    pair = joined()
    hello = proven_hello(pair)
    pair.up(encode_frame(hello))
    accept = decode_frame(pair.drafter.accept(0)).message
    assert isinstance(accept, Accept)
    (event,) = pair.down(encode_frame(replace(accept, auth=hello.auth[32:])))
    assert event.code is ErrorCode.AUTH_FAILED


def test_a_drafter_that_accepts_without_asking_is_refused() -> None:
    pair = joined()
    impostor = DrafterConnection(parameters(200))
    hello = decode_frame(pair.verifier.hello(0)).message
    assert isinstance(hello, Hello)
    impostor.receive(encode_frame(replace(hello, auth=b"")), 0)
    (event,) = pair.down(impostor.accept(0))
    assert event == Rejected(ErrorCode.AUTH_FAILED, "ACCEPT.auth", "", "")
    assert pair.verifier.staging is None


def test_a_drafter_with_another_secret_is_refused() -> None:
    pair = joined()
    hello = proven_hello(pair)
    pair.up(encode_frame(hello))
    accept = decode_frame(pair.drafter.accept(0)).message
    assert isinstance(accept, Accept)
    wrong = Authentication(OTHER, lambda: bytes(32), b"tcp")
    forged = wrong.sealed(replace(accept, auth=b""), hello, (200_000).to_bytes(32, "big"))
    (event,) = pair.down(encode_frame(forged))
    assert event.code is ErrorCode.AUTH_FAILED


def test_an_accept_of_an_earlier_handshake_is_refused() -> None:
    """The same serial and epoch, as after a repeated nonce source on one side only: the other's nonce is new."""
    accept = proven_accept(joined())
    pair = Pair(VerifierConnection(holder(100)), DrafterConnection(holder(201)))
    greet(pair)
    (event,) = pair.down(encode_frame(accept))
    assert event.code is ErrorCode.AUTH_FAILED


def test_a_verifier_answers_one_challenge_and_only_its_own() -> None:
    pair = joined()
    pair.up(pair.verifier.hello(0))
    challenge = challenge_of(pair)
    for changes in ({"serial": 0}, {"verifier_epoch": 101}):
        assert pair.down(encode_frame(replace(challenge, **changes))) == []
    assert counted(pair.verifier.counters) == {"stale_hello": 2}
    assert pair.verifier.frames_to_send() == []
    pair.down(encode_frame(challenge))
    assert len(pair.verifier.frames_to_send()) == 1
    pair.down(encode_frame(replace(challenge, nonce=bytes(32))))
    assert pair.verifier.frames_to_send() == []
    assert pair.verifier.counters["unexpected_message"] == 1


def test_a_verifier_without_a_secret_drops_a_challenge() -> None:
    pair = joined(None, None)
    pair.up(pair.verifier.hello(0))
    assert pair.down(encode_frame(Challenge(200, 100, 1, bytes(32)))) == []
    assert counted(pair.verifier.counters) == {"unexpected_message": 1}
    assert pair.verifier.state is VerifierState.HELLO_SENT
    (accepted,) = pair.down(pair.drafter.accept(0))
    assert isinstance(accepted, Accepted)


def test_a_verifier_without_a_secret_takes_no_proof() -> None:
    pair = joined(None, None)
    pair.up(pair.verifier.hello(0))
    accept = decode_frame(pair.drafter.accept(0)).message
    assert isinstance(accept, Accept)
    (event,) = pair.down(encode_frame(replace(accept, auth=bytes(32))))
    assert event.code is ErrorCode.AUTH_UNSUPPORTED


def test_an_unanswered_proof_times_out() -> None:
    pair = joined()
    pair.up(pair.verifier.hello(5))
    pair.down(*pair.drafter.frames_to_send())
    deadline = pair.verifier.next_deadline_ns()
    assert deadline == 5 + HANDSHAKE_DEADLINE_MS * MS
    (event,) = pair.verifier.expire(deadline)
    assert isinstance(event, PeerSilent)
    assert pair.verifier.state is VerifierState.LOST


# What a side is given


@pytest.mark.parametrize(("secret", "binding"), [(b"", b""), (bytes(15), b""), (bytes(16), bytes(97))])
def test_secrets_and_bindings_out_of_range(secret: bytes, binding: bytes) -> None:
    with pytest.raises(LocalProtocolError) as caught:
        Authentication(secret, lambda: bytes(32), binding)
    assert caught.value.code is ErrorCode.BAD_FIELD


def test_a_source_of_short_nonces_is_refused() -> None:
    verifier = VerifierConnection(parameters(1, authentication=Authentication(SECRET, lambda: bytes(16))))
    with pytest.raises(LocalProtocolError) as caught:
        verifier.hello(0)
    assert caught.value.where == "authentication.nonces"
    assert verifier.state is VerifierState.IDLE


def test_the_secret_is_in_no_repr() -> None:
    shown = repr(holder(1))
    assert "tcp" in shown
    assert "sixteen" not in shown


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["id"])
def test_golden_proof(vector: dict[str, str]) -> None:
    raw = {name: bytes.fromhex(vector[f"{name}_hex"]) for name in ("secret", "binding", "drafter_nonce", "proof")}
    hello = Hello.from_values(decode_canonical(bytes.fromhex(vector["hello_hex"])))
    assert hello.auth.hex() == vector["verifier_nonce_hex"]
    side = Authentication(raw["secret"], lambda: bytes(32), raw["binding"])
    if vector["role"] == "verifier":
        assert side.proven(hello, raw["drafter_nonce"]).auth == hello.auth + raw["proof"]
        return
    accept = Accept.from_values(decode_canonical(bytes.fromhex(vector["accept_hex"])))
    assert side.sealed(accept, hello, raw["drafter_nonce"]).auth == raw["proof"]
    assert side.drafter_is_genuine(replace(accept, auth=raw["proof"]), hello, raw["drafter_nonce"])
