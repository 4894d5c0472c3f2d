"""Golden vectors as questions with their expected answers.

Suites: frames (decode and encode), refusals (decode must refuse with this code), digests, rows (validate_row), states
(state_step), auth (prove). Invariants: what is expected comes from the files alone, except that a code's scope is the
registry's; a suite that is not known is an error, so that no file is skipped in silence. Called by ``runner``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..registry import SCOPES, ErrorCode, Scope
from .answers import NOT_DYADIC, REFUSED
from .messages import Object

SCHEMA_NAME: Final = "schema.json"
_LOCAL_SCOPES: Final = {NOT_DYADIC: Scope.ROUND, REFUSED: Scope.FRAME}


@dataclass(frozen=True, slots=True)
class PipeCase:
    """One question. ``hunts`` is the bug that a wrong answer shows, empty for positive vectors."""

    id: str
    requirement: str
    request: Object = field(repr=False)
    expected: Object = field(repr=False)
    hunts: str = ""


def load_cases(directory: Path) -> list[PipeCase]:
    """The cases of every vector file in ``directory``. Raises ``ValueError`` for a suite that is not known."""
    cases: list[PipeCase] = []
    for path in sorted(directory.glob("*.json")):
        if path.name == SCHEMA_NAME:
            continue
        document = json.loads(path.read_text("utf-8"))
        make = _SUITES.get(document["suite"])
        if make is None:
            raise ValueError(f"{path.name}: the suite {document['suite']!r} is not known to this runner")
        for vector in document["vectors"]:
            cases.extend(make(vector))
    return cases


def _frames(vector: Any) -> Iterator[PipeCase]:
    value = {name: vector[name] for name in ("type", "key", "control", "bodies_hex")}
    frame_hex = vector["frame_hex"]
    decoded = {"ok": True, "value": value, "canonical_hex": frame_hex}
    yield _case(vector, "/decode", {"op": "decode", "hex": frame_hex}, decoded)
    yield _case(vector, "/encode", {"op": "encode", **value}, {"ok": True, "canonical_hex": frame_hex})


def _refusals(vector: Any) -> Iterator[PipeCase]:
    yield _case(vector, "", {"op": "decode", "hex": vector["frame_hex"]}, _refusal(vector["error"]))


def _digests(vector: Any) -> Iterator[PipeCase]:
    expected = {"ok": True, "value": {"digest_hex": vector["digest_hex"]}}
    yield _case(vector, "", {"op": "digest", "tokens": vector["tokens"]}, expected)


def _rows(vector: Any) -> Iterator[PipeCase]:
    request = {name: vector[name] for name in ("depth", "support", "vocab_size")}
    yield _case(vector, "", {"op": "validate_row", "hex": vector["block_hex"], **request}, _outcome(vector))


def _states(vector: Any) -> Iterator[PipeCase]:
    request = {name: vector[name] for name in ("table", "state", "action")}
    yield _case(vector, "", {"op": "state_step", **request}, _outcome(vector))


def _auth(vector: Any) -> Iterator[PipeCase]:
    names = ("role", "secret_hex", "binding_hex", "verifier_nonce_hex", "drafter_nonce_hex", "hello_hex", "accept_hex")
    expected = {"ok": True, "value": {"proof_hex": vector["proof_hex"]}}
    yield _case(vector, "", {"op": "prove", **{name: vector[name] for name in names}}, expected)


def _outcome(vector: Any) -> Object:
    """The expected answer of a vector that has either a value or an error."""
    return _refusal(vector["error"]) if "error" in vector else {"ok": True, "value": vector["value"]}


def _refusal(code: str) -> Object:
    scope = _LOCAL_SCOPES[code] if code in _LOCAL_SCOPES else SCOPES[ErrorCode[code]]
    return {"error_code": code, "scope": scope.name}


def _case(vector: Any, suffix: str, request: Object, expected: Object) -> PipeCase:
    return PipeCase(vector["id"] + suffix, vector["requirement"], request, expected, vector.get("hunts", ""))


_SUITES: Final[dict[str, Callable[[Any], Iterator[PipeCase]]]] = {
    "frames": _frames,
    "refusals": _refusals,
    "digests": _digests,
    "rows": _rows,
    "states": _states,
    "auth": _auth,
}
