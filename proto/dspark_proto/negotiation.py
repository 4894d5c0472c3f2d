"""Negotiation: what HELLO offers, whether two sides can talk, and the terms that both then keep.

Invariants: the compatibility hash is compared before its contents are decoded; capacities follow the minimum
rule, so nothing is upgraded or downgraded silently; a verifier accepts no term above its offer and no size
but its own. Spec: SPEC.md, section "HELLO, ACCEPT, REJECT". Called by both connections; sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from hashlib import sha256

from .canonical import decode_canonical
from .errors import LocalProtocolError, RemoteProtocolError
from .hello import CAPACITIES, Accept, Compatibility, Hello
from .limits import TEXT_BYTES_MAX
from .prefix import WIRE_VERSION
from .registry import CHECKSUMS_ALL, Checksum, Dtype, ErrorCode
from .rows import ReplyLayout


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
    return {capacity.name: getattr(source, capacity.name) for capacity in CAPACITIES}


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
    values = ((field.name, getattr(local, field.name), getattr(peer, field.name)) for field in fields(local))
    name, ours, theirs = next(found for found in values if found[1] != found[2])
    return Mismatch(name, _shown(ours), _shown(theirs))


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
