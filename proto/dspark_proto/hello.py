"""HELLO, ACCEPT and REJECT: who may talk to whom, and with which limits.

The compatibility fields travel as one opaque byte string with its SHA-256: a receiver compares hashes first
and decodes the contents only to name the first field that differs. Capacities are negotiated by the minimum
rule. Invariants: nothing is allocated before ACCEPT; no field is silently upgraded or downgraded; every
deadline is positive and bounded. Spec: SPEC.md, section "HELLO, ACCEPT, REJECT". Called by both connections.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from hashlib import sha256
from typing import ClassVar, Final

from .canonical import decode_canonical, encode_canonical
from .errors import LocalProtocolError, RemoteProtocolError
from .fields import Bin, Choice, Field, Record, Text, UInt, UInts, fixed_bin
from .limits import (
    AUTH_BYTES_MAX,
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
    TEXT_BYTES_MAX,
    U16_MAX,
    U32_MAX,
    U64_MAX,
    VOCAB_MAX,
    WIRE_VERSIONS_MAX,
)
from .messages import Message
from .prefix import MAJOR, WIRE_VERSION
from .registry import (
    CHECKSUMS_ALL,
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
from .rows import ReplyLayout

HASH_BYTES: Final = 32

_DEADLINE: Final = (DEADLINE_MS_MAX, DEADLINE_MS_MIN)
_CAPACITIES: Final = (
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
        Choice("tap_dtype", Dtype),
        UInt("tap_width", TAP_WIDTH_MAX, 1),
        Choice("draft_layout", DraftLayout),
        Choice("semantic_id", SemanticId),
        Choice("verifier_id", VerifierId),
        Choice("rng_abi", RngAbi),
        Choice("precision", Precision),
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
class Mismatch:
    """First compatibility field that differs, with both values as text."""

    field: str
    local: str
    peer: str


@dataclass(frozen=True, slots=True)
class HelloParameters:
    """What one side brings to HELLO. ``epoch`` is a random u64 drawn at process start; times are in ms."""

    compatibility: Compatibility
    epoch: int
    max_slots: int = 16
    max_depth: int = 8
    max_support: int = 256
    max_in_flight: int = 16
    context_credit_rows: int = 4096
    heartbeat_ms: int = 1000
    step_deadline_ms: int = 1000
    checksums: int = CHECKSUMS_ALL

    def __post_init__(self) -> None:
        hello_message(self, 0)

    @property
    def reply_bytes(self) -> int:
        """Bytes of the largest reply: ``max_depth`` rows of ``max_support`` entries."""
        return ReplyLayout(self.max_depth, self.max_support).total_bytes


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Verifier's offer. ``serial`` counts HELLOs of this process, so a late ACCEPT cannot be mistaken."""

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
        *_CAPACITIES,
        UInt("checksums", U16_MAX, 1),
        UInt("reply_bytes", U32_MAX),
        UInt("capabilities", U64_MAX),
        Bin("auth", AUTH_BYTES_MAX, 0),
    )


@dataclass(frozen=True, slots=True)
class Accept(Message):
    """Drafter's answer: the negotiated values, and exact body sizes that the verifier must find the same."""

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

    NAME: ClassVar[str] = "ACCEPT"
    TYPE: ClassVar[MessageType] = MessageType.ACCEPT
    LAYOUT: ClassVar[tuple[Field, ...]] = (
        UInt("wire_version", U16_MAX),
        fixed_bin("compat_hash", HASH_BYTES),
        UInt("epoch", U64_MAX),
        UInt("verifier_epoch", U64_MAX),
        UInt("serial", U32_MAX),
        *_CAPACITIES,
        Choice("checksum_kind", Checksum),
        UInt("tap_row_bytes", U32_MAX),
        UInt("reply_bytes", U32_MAX),
        UInt("capabilities", U64_MAX),
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
        Choice("code", ErrorCode),
        Text("field"),
        Text("drafter_value"),
        Text("verifier_value"),
    )


@dataclass(frozen=True, slots=True)
class Negotiated:
    """The limits of an accepted connection; ``peer_epoch`` is the other process's."""

    max_slots: int
    max_depth: int
    max_support: int
    max_in_flight: int
    context_credit_rows: int
    heartbeat_ms: int
    step_deadline_ms: int
    checksum: Checksum
    tap_row_bytes: int
    reply_bytes: int
    vocab_size: int
    lanes: int
    tap_dtype: Dtype
    peer_epoch: int


def hello_message(parameters: HelloParameters, serial: int) -> Hello:
    """The HELLO that ``parameters`` describe. Raises :class:`LocalProtocolError` for a value out of range."""
    compat = parameters.compatibility.encoded()
    return Hello(
        wire_versions=(WIRE_VERSION,),
        compat_hash=sha256(compat).digest(),
        compat=compat,
        epoch=parameters.epoch,
        serial=serial,
        **_capacities(parameters),
        checksums=parameters.checksums,
        reply_bytes=parameters.reply_bytes,
        capabilities=0,
        auth=b"",
    )


def _capacities(source: HelloParameters | Hello | Accept | Negotiated) -> dict[str, int]:
    return {capacity.name: getattr(source, capacity.name) for capacity in _CAPACITIES}


def compatibility_of(hello: Hello) -> Compatibility:
    """Decode the opaque contents of a HELLO whose hash differs from ours.

    Raises :class:`RemoteProtocolError` when the declared hash is not that of the contents.
    """
    if sha256(hello.compat).digest() != hello.compat_hash:
        raise RemoteProtocolError(ErrorCode.BAD_FIELD, "HELLO.compat_hash")
    try:
        return Compatibility.from_values(decode_canonical(hello.compat, "HELLO.compat"))
    except LocalProtocolError as error:
        error.as_remote()


def first_mismatch(local: Compatibility, hello: Hello) -> Mismatch | None:
    """The first field in which ``hello`` differs from ``local``; None when the hashes are equal."""
    encoded = local.encoded()
    if hello.compat_hash == sha256(encoded).digest() and hello.compat == encoded:
        return None
    peer = compatibility_of(hello)
    for field in fields(local):
        ours, theirs = getattr(local, field.name), getattr(peer, field.name)
        if ours != theirs:
            return Mismatch(field.name, _shown(ours), _shown(theirs))
    raise RemoteProtocolError(ErrorCode.BAD_FIELD, "HELLO.compat")


def _shown(value: object) -> str:
    """A compatibility value as at most 96 printable ASCII characters."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return ",".join(str(one) for one in value)[:TEXT_BYTES_MAX]
    return str(value)[:TEXT_BYTES_MAX]


def negotiate(local: HelloParameters, hello: Hello) -> Negotiated:
    """Apply the minimum rule to both sides' capacities. Drafter side.

    Raises :class:`RemoteProtocolError` BAD_VERSION, NO_COMMON_CHECKSUM, AUTH_UNSUPPORTED or BAD_NEGOTIATION.
    """
    if WIRE_VERSION not in hello.wire_versions:
        raise RemoteProtocolError(ErrorCode.BAD_VERSION, "HELLO.wire_versions")
    if hello.auth:
        raise RemoteProtocolError(ErrorCode.AUTH_UNSUPPORTED, "HELLO.auth")
    if hello.reply_bytes != ReplyLayout(hello.max_depth, hello.max_support).total_bytes:
        raise RemoteProtocolError(ErrorCode.BAD_NEGOTIATION, "HELLO.reply_bytes")
    offered = _capacities(hello)
    capacities = {name: min(value, offered[name]) for name, value in _capacities(local).items()}
    return _negotiated(local, capacities, _common_checksum(local.checksums & hello.checksums), hello.epoch)


def _common_checksum(mask: int) -> Checksum:
    """The cheapest body checksum that both sides know."""
    for kind in (Checksum.XXH3_64, Checksum.CRC32C):
        if mask & 1 << (kind - 1):
            return kind
    raise RemoteProtocolError(ErrorCode.NO_COMMON_CHECKSUM, "HELLO.checksums")


def _negotiated(
    local: HelloParameters, capacities: dict[str, int], checksum: Checksum, peer_epoch: int
) -> Negotiated:
    compatibility = local.compatibility
    return Negotiated(
        **capacities,
        checksum=checksum,
        tap_row_bytes=compatibility.tap_row_bytes,
        reply_bytes=ReplyLayout(capacities["max_depth"], capacities["max_support"]).total_bytes,
        vocab_size=compatibility.vocab_size,
        lanes=compatibility.lanes,
        tap_dtype=compatibility.tap_dtype,
        peer_epoch=peer_epoch,
    )


def accept_message(local: HelloParameters, hello: Hello, agreed: Negotiated) -> Accept:
    """The ACCEPT for ``hello`` with the values of ``agreed``."""
    return Accept(
        wire_version=WIRE_VERSION,
        compat_hash=hello.compat_hash,
        epoch=local.epoch,
        verifier_epoch=hello.epoch,
        serial=hello.serial,
        **_capacities(agreed),
        checksum_kind=agreed.checksum,
        tap_row_bytes=agreed.tap_row_bytes,
        reply_bytes=agreed.reply_bytes,
        capabilities=0,
    )


def accepted_terms(local: HelloParameters, accept: Accept) -> Negotiated:
    """The terms of an ACCEPT, checked against what this verifier offered.

    Raises :class:`RemoteProtocolError` BAD_NEGOTIATION when a value exceeds the offer or a size is not ours.
    """
    if accept.wire_version != WIRE_VERSION:
        raise RemoteProtocolError(ErrorCode.BAD_VERSION, "ACCEPT.wire_version")
    if accept.compat_hash != sha256(local.compatibility.encoded()).digest():
        raise RemoteProtocolError(ErrorCode.INCOMPATIBLE, "ACCEPT.compat_hash")
    capacities = _capacities(accept)
    for name, value in capacities.items():
        if value > getattr(local, name):
            raise RemoteProtocolError(ErrorCode.BAD_NEGOTIATION, f"ACCEPT.{name}")
    if not local.checksums & 1 << (accept.checksum_kind - 1):
        raise RemoteProtocolError(ErrorCode.NO_COMMON_CHECKSUM, "ACCEPT.checksum_kind")
    agreed = _negotiated(local, capacities, accept.checksum_kind, accept.epoch)
    if (accept.tap_row_bytes, accept.reply_bytes) != (agreed.tap_row_bytes, agreed.reply_bytes):
        raise RemoteProtocolError(ErrorCode.BAD_NEGOTIATION, "ACCEPT.reply_bytes")
    return agreed
