"""HELLO, ACCEPT, REJECT and CHALLENGE: who may talk to whom, and with which limits.

The compatibility fields travel as one opaque byte string with its SHA-256: a receiver compares hashes first
and decodes the contents only to name the first field that differs. Capacities are negotiated by the minimum
rule. Invariants: nothing is allocated before ACCEPT; no field is silently upgraded or downgraded; every
deadline is positive and bounded. Spec: SPEC.md, section "HELLO, ACCEPT, REJECT". Called by both connections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from .canonical import encode_canonical
from .errors import LocalProtocolError
from .fields import Bin, Field, Record, Text, UInt, UInts, enum_field, fixed_bin
from .limits import (
    AUTH_BYTES_MAX,
    AUTH_NONCE_BYTES,
    AUTH_PROOF_BYTES,
    COMPAT_BYTES_MAX,
    CONTEXT_CREDIT_ROWS_MAX,
    DEADLINE_MS_MAX,
    DEADLINE_MS_MIN,
    DEPTH_MAX,
    IN_FLIGHT_MAX,
    IN_FLIGHT_MIN,
    SLOTS_MAX,
    SUPPORT_MAX,
    TAP_LAYERS_MAX,
    TAP_WIDTH_MAX,
    U16_MAX,
    U32_MAX,
    U64_MAX,
    VOCAB_MAX,
    WIRE_VERSIONS_MAX,
)
from .messages import Message
from .prefix import MAJOR
from .registry import (
    DTYPE_BYTES,
    LANES_ALL,
    Checksum,
    DraftLayout,
    Dtype,
    ErrorCode,
    MessageType,
    Precision,
    RngAbi,
    SemanticId,
    VerifierId,
)

HASH_BYTES: Final = 32

_DEADLINE: Final = (DEADLINE_MS_MAX, DEADLINE_MS_MIN)
CAPACITIES: Final = (
    UInt("max_slots", SLOTS_MAX, 1),
    UInt("max_depth", DEPTH_MAX, 1),
    UInt("max_support", SUPPORT_MAX, 1),
    UInt("max_in_flight", IN_FLIGHT_MAX, IN_FLIGHT_MIN),
    UInt("context_credit_rows", CONTEXT_CREDIT_ROWS_MAX, 1),
    UInt("heartbeat_ms", *_DEADLINE),
    UInt("step_deadline_ms", *_DEADLINE),
)


@dataclass(frozen=True, slots=True)
class Compatibility(Record):
    """What must be equal on both sides for a q row to mean the same thing.

    ``token_map_hash`` and ``tokenizer_hash`` are SHA-256 digests; identities are short ASCII names that
    include a content digest; ``tap_layers`` are 0-based target layer indices whose outputs are concatenated;
    ``tap_width`` is the width of one tap in elements; ``lanes`` is a mask of ``1 << (lane - 1)``.
    """

    vocab_size: int
    token_map_hash: bytes
    draft_identity: str
    target_identity: str
    tokenizer_hash: bytes
    tap_layers: tuple[int, ...]
    tap_dtype: Dtype
    tap_width: int
    draft_layout: DraftLayout = DraftLayout.NATIVE
    semantic_id: SemanticId = SemanticId.DYADIC24_STANDARD_V1
    verifier_id: VerifierId = VerifierId.TARGET60_STANDARD_V1
    rng_abi: RngAbi = RngAbi.PHILOX4X32_10_DSPARK1
    precision: Precision = Precision.FP64_LARGEST_REMAINDER
    lanes: int = LANES_ALL
    wire_major: int = MAJOR

    NAME: ClassVar[str] = "COMPATIBILITY"
    LAYOUT: ClassVar[tuple[Field, ...]] = (
        UInt("vocab_size", VOCAB_MAX, 1),
        fixed_bin("token_map_hash", HASH_BYTES),
        Text("draft_identity"),
        Text("target_identity"),
        fixed_bin("tokenizer_hash", HASH_BYTES),
        UInts("tap_layers", U16_MAX, TAP_LAYERS_MAX, 1),
        enum_field("tap_dtype", Dtype),
        UInt("tap_width", TAP_WIDTH_MAX, 1),
        enum_field("draft_layout", DraftLayout),
        enum_field("semantic_id", SemanticId),
        enum_field("verifier_id", VerifierId),
        enum_field("rng_abi", RngAbi),
        enum_field("precision", Precision),
        UInt("lanes", LANES_ALL, 1),
        UInt("wire_major", U16_MAX),
    )

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if self.tap_dtype not in (Dtype.BF16, Dtype.FP32):
            raise LocalProtocolError(ErrorCode.BAD_FIELD, f"{self.NAME}.tap_dtype", "must be BF16 or FP32")

    @property
    def tap_row_bytes(self) -> int:
        """Bytes of the taps of one position."""
        return len(self.tap_layers) * self.tap_width * DTYPE_BYTES[self.tap_dtype]

    def encoded(self) -> bytes:
        """Canonical encoding; its SHA-256 is the compatibility hash."""
        return encode_canonical(self.values())


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Verifier's offer. ``serial`` counts HELLOs of this process, so a late ACCEPT cannot be mistaken.

    ``auth`` is empty, or the verifier's nonce (32 bytes), followed by its proof (32 bytes) once it was challenged.
    """

    wire_versions: tuple[int, ...]
    compat_hash: bytes
    compat: bytes
    epoch: int
    serial: int
    max_slots: int
    max_depth: int
    max_support: int
    max_in_flight: int
    context_credit_rows: int
    heartbeat_ms: int
    step_deadline_ms: int
    checksums: int
    reply_bytes: int
    capabilities: int
    auth: bytes

    NAME: ClassVar[str] = "HELLO"
    TYPE: ClassVar[MessageType] = MessageType.HELLO
    LAYOUT: ClassVar[tuple[Field, ...]] = (
        UInts("wire_versions", U16_MAX, WIRE_VERSIONS_MAX, 1),
        fixed_bin("compat_hash", HASH_BYTES),
        Bin("compat", COMPAT_BYTES_MAX, 1),
        UInt("epoch", U64_MAX),
        UInt("serial", U32_MAX),
        *CAPACITIES,
        UInt("checksums", U16_MAX, 1),
        UInt("reply_bytes", U32_MAX),
        UInt("capabilities", U64_MAX),
        Bin("auth", AUTH_BYTES_MAX, 0),
    )


@dataclass(frozen=True, slots=True)
class Accept(Message):
    """Drafter's answer: the negotiated values, and exact body sizes that the verifier must find the same.

    ``auth`` is empty, or the drafter's proof (32 bytes).
    """

    wire_version: int
    compat_hash: bytes
    epoch: int
    verifier_epoch: int
    serial: int
    max_slots: int
    max_depth: int
    max_support: int
    max_in_flight: int
    context_credit_rows: int
    heartbeat_ms: int
    step_deadline_ms: int
    checksum_kind: Checksum
    tap_row_bytes: int
    reply_bytes: int
    capabilities: int
    auth: bytes = b""

    NAME: ClassVar[str] = "ACCEPT"
    TYPE: ClassVar[MessageType] = MessageType.ACCEPT
    LAYOUT: ClassVar[tuple[Field, ...]] = (
        UInt("wire_version", U16_MAX),
        fixed_bin("compat_hash", HASH_BYTES),
        UInt("epoch", U64_MAX),
        UInt("verifier_epoch", U64_MAX),
        UInt("serial", U32_MAX),
        *CAPACITIES,
        enum_field("checksum_kind", Checksum),
        UInt("tap_row_bytes", U32_MAX),
        UInt("reply_bytes", U32_MAX),
        UInt("capabilities", U64_MAX),
        Bin("auth", AUTH_PROOF_BYTES, 0),
    )


@dataclass(frozen=True, slots=True)
class Reject(Message):
    """Drafter refuses. ``field``, ``drafter_value`` and ``verifier_value`` name the first difference."""

    epoch: int
    verifier_epoch: int
    serial: int
    code: ErrorCode
    field: str
    drafter_value: str
    verifier_value: str

    NAME: ClassVar[str] = "REJECT"
    TYPE: ClassVar[MessageType] = MessageType.REJECT
    LAYOUT: ClassVar[tuple[Field, ...]] = (
        UInt("epoch", U64_MAX),
        UInt("verifier_epoch", U64_MAX),
        UInt("serial", U32_MAX),
        enum_field("code", ErrorCode),
        Text("field"),
        Text("drafter_value"),
        Text("verifier_value"),
    )


@dataclass(frozen=True, slots=True)
class Challenge(Message):
    """Drafter asks for the proof of the HELLO that this message echoes; ``nonce`` is used for this one proof."""

    epoch: int
    verifier_epoch: int
    serial: int
    nonce: bytes

    NAME: ClassVar[str] = "CHALLENGE"
    TYPE: ClassVar[MessageType] = MessageType.CHALLENGE
    LAYOUT: ClassVar[tuple[Field, ...]] = (
        UInt("epoch", U64_MAX),
        UInt("verifier_epoch", U64_MAX),
        UInt("serial", U32_MAX),
        fixed_bin("nonce", AUTH_NONCE_BYTES),
    )
