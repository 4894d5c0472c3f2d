"""What a testee answers: each operation of the pipe on this package's codec.

| op | request | value |
|---|---|---|
| decode | hex of a frame | type, key [slot, generation, round], control, bodies_hex; canonical_hex: the frame again |
| encode | type, key, control, bodies_hex | none; canonical_hex: the frame |
| digest | tokens, start_hex | digest_hex |
| checksum | kind (CRC32C or XXH3_64), hex | checksum_hex, 8 bytes |
| validate_row | hex of a whole reply, depth, support, vocab_size | tokens, entries, confidences |
| state_step | table (verifier, drafter or slot), state, action | state |
| prove | role (verifier or drafter), secret, binding, both nonces, control of hello and accept: all _hex | proof_hex |

``validate_row`` answers NOT_DYADIC, which is local and never travels, for a row that is whole but no distribution.
``state_step`` answers REFUSED for an action without an entry. Invariants: a request that is not understood is
``unsupported``, one with a wrong argument ``BAD_REQUEST``; no request ends the testee. Called by ``testee``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from struct import error as struct_error
from typing import Any, Final, cast

from ..auth import Authentication
from ..canonical import Value, decode_canonical
from ..checksums import body_checksum
from ..digest import prefix_digest
from ..errors import ProtocolError
from ..frame import MESSAGES, decode_frame, encode_frame
from ..hello import Accept, Hello
from ..limits import AUTH_NONCE_BYTES, DEPTH_MAX, SUPPORT_MAX
from ..prefix import Key
from ..registry import Checksum, MessageType, Scope
from ..rows import ReplyLayout, check_reply
from ..states import DRAFTER_CONNECTION, SLOT, VERIFIER_CONNECTION, DrafterState, SlotState, VerifierState
from .dyadic import row_fault
from .messages import Object

Answer = Object
NOT_DYADIC: Final = "NOT_DYADIC"
REFUSED: Final = "REFUSED"
BAD_REQUEST: Final = "BAD_REQUEST"

_TABLES: Final[dict[str, tuple[type[Enum], Any]]] = {
    "verifier": (VerifierState, VERIFIER_CONNECTION),
    "drafter": (DrafterState, DRAFTER_CONNECTION),
    "slot": (SlotState, SLOT),
}


def answer(request: Object) -> Answer:
    """The answer to one request. Never raises for its contents."""
    operation = _OPERATIONS.get(str(request.get("op")))
    if operation is None:
        return {"unsupported": True}
    try:
        return operation(request)
    except ProtocolError as error:
        return _refused(error.code.name, error.scope)
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError, struct_error) as error:
        return {"error_code": BAD_REQUEST, "scope": Scope.FRAME.name, "detail": type(error).__name__}


def _refused(code: str, scope: Scope) -> Answer:
    return {"error_code": code, "scope": scope.name}


def _decode(request: Object) -> Answer:
    frame = decode_frame(bytes.fromhex(request["hex"]))
    prefix = frame.prefix
    value = {
        "type": prefix.type.name,
        "key": [prefix.slot, prefix.generation, prefix.round],
        "control": as_json(frame.message.values()),
        "bodies_hex": [body.hex() for body in frame.bodies],
    }
    again = encode_frame(frame.message, prefix.key, frame.bodies)
    return {"ok": True, "value": value, "canonical_hex": again.hex()}


def _encode(request: Object) -> Answer:
    kind = MESSAGES[MessageType[request["type"]]]
    message = kind.from_values(from_json(request["control"]))
    slot, generation, round_ = request["key"]
    bodies = [bytes.fromhex(body) for body in request["bodies_hex"]]
    frame = encode_frame(message, Key(slot, generation, round_), bodies)
    return {"ok": True, "canonical_hex": frame.hex()}


def _digest(request: Object) -> Answer:
    start = bytes.fromhex(request.get("start_hex", "00" * 8))
    return {"ok": True, "value": {"digest_hex": prefix_digest(request["tokens"], start).hex()}}


def _checksum(request: Object) -> Answer:
    checksum = body_checksum(Checksum[request["kind"]], bytes.fromhex(request["hex"]))
    return {"ok": True, "value": {"checksum_hex": checksum.hex()}}


def _validate_row(request: Object) -> Answer:
    block, vocab_size = bytes.fromhex(request["hex"]), request["vocab_size"]
    support = request["support"]
    if not 1 <= request["depth"] <= DEPTH_MAX or not 0 <= support <= SUPPORT_MAX:
        raise ValueError("depth or support")
    layout = ReplyLayout(request["depth"], support, 0 if support else vocab_size)
    if len(block) != layout.total_bytes:
        return _refused("WRONG_SIZE", Scope.FRAME)
    records = check_reply(memoryview(block), layout, vocab_size)
    if row_fault(block, layout, vocab_size):
        return _refused(NOT_DYADIC, Scope.ROUND)
    value = {name: list(column) for name, column in records._asdict().items()}
    return {"ok": True, "value": value}


def _state_step(request: Object) -> Answer:
    states, table = _TABLES[request["table"]]
    following = table[states(request["state"])].get(request["action"])
    if following is None:
        return _refused(REFUSED, Scope.FRAME)
    return {"ok": True, "value": {"state": following.value}}


def _prove(request: Object) -> Answer:
    blocks = {name: bytes.fromhex(request[f"{name}_hex"]) for name in ("hello", "accept")}
    secret, binding, nonce, drafter_nonce = (
        bytes.fromhex(request[f"{name}_hex"]) for name in ("secret", "binding", "verifier_nonce", "drafter_nonce")
    )
    authentication = Authentication(secret, lambda: nonce, binding)
    hello = replace(Hello.from_values(decode_canonical(blocks["hello"])), auth=authentication.nonce())
    if request["role"] == "verifier":
        proof = authentication.proven(hello, drafter_nonce).auth[AUTH_NONCE_BYTES:]
    else:
        accept = Accept.from_values(decode_canonical(blocks["accept"]))
        proof = authentication.sealed(accept, hello, drafter_nonce).auth
    return {"ok": True, "value": {"proof_hex": proof.hex()}}


def as_json(value: Value) -> Any:
    """A control value as the vectors write it: byte strings as ``{"hex": ...}``."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return [as_json(one) for one in value] if isinstance(value, list) else value


def from_json(value: Any) -> Value:
    """The control value that ``as_json`` wrote. Raises ``ValueError`` for anything else."""
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"])
    if isinstance(value, list):
        return [from_json(one) for one in value]
    if type(value) in (int, str):
        return cast(Value, value)
    raise ValueError("control holds integers, strings, byte strings and lists")


_OPERATIONS: Final[dict[str, Callable[[Object], Answer]]] = {
    "decode": _decode,
    "encode": _encode,
    "digest": _digest,
    "checksum": _checksum,
    "validate_row": _validate_row,
    "state_step": _state_step,
    "prove": _prove,
}
