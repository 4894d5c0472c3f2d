"""What the harness must know of a testee: its compatibility fields, and what it promises beyond the standard.

A drafter compares identities before it talks, so the harness has to offer its own. Facts come from a JSON file
(`docs/guides/conformance.md` shows one) or, for the reference peers, from here. Called by `testees` and by the command
line; never guesses a value.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from secrets import token_bytes
from typing import Any

from ..auth import Authentication
from ..hello import Compatibility
from ..limits import AUTH_NONCE_BYTES
from ..negotiation import HelloParameters
from ..registry import DraftLayout, Dtype, Precision, RngAbi, SemanticId, VerifierId, WireVersion

DRAFTER_EPOCH = 0xD0
VERIFIER_EPOCH = 0x5E
"""Process epochs of the reference peers."""

REFERENCE_SECRET = bytes(range(32))
"""Of the reference peers that have one."""

_IDS: dict[str, type] = {
    "tap_dtype": Dtype,
    "draft_layout": DraftLayout,
    "semantic_id": SemanticId,
    "verifier_id": VerifierId,
    "rng_abi": RngAbi,
    "precision": Precision,
}


@dataclass(frozen=True)
class Facts:
    """``deterministic``: equal keys and context give equal proposals in every slot. ``quiet_ms``: how long after a PONG
    an unwanted frame may still come. ``deadline_ms``: how long the harness waits for an answer that is due. ``secret``:
    what the testee asks proofs of, at least 16 bytes, or empty. ``binding``: what proofs are bound to (SPEC.md 6.1).
    ``version_1``: a drafter speaks version 1 too.
    """

    compatibility: Compatibility
    deterministic: bool = False
    quiet_ms: int = 0
    deadline_ms: int = 5000
    secret: bytes = field(default=b"", repr=False)
    binding: str = ""
    version_1: bool = False

    @property
    def authentication(self) -> Authentication | None:
        """What the harness proves itself with; None without a secret."""
        if not self.secret:
            return None
        return Authentication(self.secret, partial(token_bytes, AUTH_NONCE_BYTES), self.binding.encode())

    def parameters(self, epoch: int, **changes: Any) -> HelloParameters:
        """The harness's side of HELLO."""
        values: dict[str, Any] = {
            "max_slots": 4,
            "max_depth": 5,
            "max_support": 32,
            "max_in_flight": 4,
            "context_credit_rows": 64,
            "heartbeat_ms": 1000,
            "step_deadline_ms": 1000,
        }
        return HelloParameters(self.compatibility, epoch, **(values | changes))


def reference_facts(secret: bytes = b"") -> Facts:
    """A small vocabulary and narrow taps."""
    return Facts(
        Compatibility(
            vocab_size=1000,
            token_map_hash=sha256(b"map").digest(),
            draft_identity="reference-draft@1",
            target_identity="reference-target@1",
            tokenizer_hash=sha256(b"tokenizer").digest(),
            tap_layers=(2, 14, 26),
            tap_dtype=Dtype.BF16,
            tap_width=8,
        ),
        deterministic=True,
        secret=secret,
        version_1=True,
    )


def drafter_parameters(facts: Facts) -> HelloParameters:
    """What the reference drafter brings to HELLO: both versions as the facts say, and dense rows for who asks."""
    versions = (WireVersion.V2_0, WireVersion.V1_0) if facts.version_1 else (WireVersion.V2_0,)
    return facts.parameters(DRAFTER_EPOCH, dense_rows=True, versions=versions, authentication=facts.authentication)


def verifier_parameters(facts: Facts) -> HelloParameters:
    """What the reference verifier brings to HELLO: version 2 first, version 1 too, and dense rows."""
    versions = (WireVersion.V2_0, WireVersion.V1_0)
    return facts.parameters(VERIFIER_EPOCH, dense_rows=True, versions=versions, authentication=facts.authentication)


def facts_to_json(facts: Facts) -> str:
    """The file that :func:`facts_from_file` reads."""
    compatibility = {
        name: value.hex() if isinstance(value, bytes) else value for name, value in asdict(facts.compatibility).items()
    }
    rest = {name.name: getattr(facts, name.name) for name in fields(facts) if name.name != "compatibility"}
    rest["secret"] = facts.secret.hex()
    return json.dumps({"compatibility": compatibility, **rest}, indent=2)


def facts_from_file(path: Path) -> Facts:
    """Read a facts file. Raises ``ValueError`` with the name of the field that is wrong."""
    try:
        values = json.loads(path.read_text("utf-8"))
        given = dict(values.pop("compatibility"))
    except (OSError, KeyError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a facts file: {error}") from None
    try:
        for name, registry in _IDS.items():
            if name in given:
                given[name] = registry(given[name])
        for name in ("token_map_hash", "tokenizer_hash"):
            given[name] = bytes.fromhex(given[name])
        given["tap_layers"] = tuple(given["tap_layers"])
        values["secret"] = bytes.fromhex(values.get("secret", ""))
        return replace(Facts(Compatibility(**given)), **values)
    except Exception as error:
        raise ValueError(f"{path}: {error}") from None
