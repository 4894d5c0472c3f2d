"""Negotiation: what HELLO offers, whether two sides can talk, and the terms that both then keep.

Invariants: the compatibility hash is compared before its contents are decoded; capacities follow the minimum
rule, so nothing is upgraded or downgraded silently; a verifier accepts no version but the one that it asked
for, no term above its offer and no size but its own. Spec: SPEC.md, section "HELLO, ACCEPT, REJECT". Called by
both connections; sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from hashlib import sha256
from typing import Final

from .auth import Authentication
from .canonical import decode_canonical
from .errors import LocalProtocolError, RemoteProtocolError
from .hello import CAPACITIES, Accept, Compatibility, Hello
from .limits import BODY_BYTES_MAX, TEXT_BYTES_MAX
from .registry import CHECKSUMS_ALL, Capability, Checksum, Dtype, ErrorCode, Lane, SupportPolicy, WireVersion
from .rows import ReplyLayout

_GREEDY: Final = 1 << (Lane.GREEDY - 1)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """First compatibility field that differs, with both values as text."""

    field: str
    local: str
    peer: str


@dataclass(frozen=True, slots=True)
class HelloParameters:
    """What one side brings to HELLO. ``epoch`` is a random u64 drawn at process start; times are in ms.

    ``dense_rows``: replies may have rows over the whole vocabulary, for which each reply needs memory (both
    sides: ``max_depth * vocab_size * 4`` bytes, times ``max_in_flight`` here, times ``max_slots`` there).
    ``versions``: those that this side speaks; a verifier asks for the first unless its caller names another.
    ``authentication``: with it, no connection comes about with a peer that cannot prove the same secret.
    """

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
    dense_rows: bool = False
    versions: tuple[WireVersion, ...] = (WireVersion.V2_0,)
    authentication: Authentication | None = None

    def __post_init__(self) -> None:
        if not self.versions or not all(isinstance(one, WireVersion) for one in self.versions):
            raise LocalProtocolError(ErrorCode.BAD_VERSION, "HELLO.wire_versions", "name one WireVersion or more")
        hello_message(self, 0)
        if WireVersion.V1_0 in self.versions and not self.compatibility.lanes & _GREEDY:
            raise LocalProtocolError(ErrorCode.LANE_MISMATCH, "HELLO.compat", "version 1 is the greedy lane")
        if self.dense_rows and _dense_row(self.compatibility.vocab_size).body_bytes(1) > BODY_BYTES_MAX:
            raise LocalProtocolError(
                ErrorCode.LIMIT_EXCEEDED, "HELLO.capabilities", "a dense row of this vocabulary needs two frames"
            )

    @property
    def reply_bytes(self) -> int:
        """Bytes of the largest reply that these parameters allow in version 2."""
        return largest_reply(self.max_depth, self.max_support, self.dense_rows, self.compatibility.vocab_size)


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
    dense_rows: bool = False
    version: WireVersion = WireVersion.V2_0

    @property
    def tokens_only(self) -> bool:
        """Version 1: replies name tokens and nothing else."""
        return self.version is WireVersion.V1_0

    def takes(self, support: SupportPolicy) -> bool:
        """Whether a session may ask for rows of this policy."""
        if self.tokens_only:
            return support is SupportPolicy.K1
        return self.dense_rows if support is SupportPolicy.DENSE else support <= self.max_support

    def takes_lane(self, lane: Lane, draft_temperature_micro: int) -> bool:
        """Whether a session may run in this lane on drafts of this temperature."""
        return bool(self.lanes & 1 << (lane - 1)) and not (self.tokens_only and draft_temperature_micro)

    def layout(self, depth: int, support: SupportPolicy) -> ReplyLayout:
        """Layout of a reply of ``depth`` rows of a policy that the terms take."""
        return ReplyLayout(depth, int(support), 0 if support else self.vocab_size, self.tokens_only)


def _dense_row(vocab_size: int) -> ReplyLayout:
    return ReplyLayout(1, SupportPolicy.DENSE, vocab_size)


def compatibility_for(compatibility: Compatibility, version: WireVersion) -> Compatibility:
    """What must be equal for an exchange of ``version``; version 1 has the greedy lane alone."""
    if version is WireVersion.V2_0:
        return compatibility
    return replace(compatibility, lanes=_GREEDY, wire_major=version.major)


def largest_reply(
    depth: int, support: int, dense_rows: bool, vocab_size: int, version: WireVersion = WireVersion.V2_0
) -> int:
    """Bytes of the largest reply: ``depth`` rows of ``support`` entries, or dense ones where they are larger; in
    version 1 ``depth`` records.
    """
    if version is WireVersion.V1_0:
        return ReplyLayout(depth, 1, tokens_only=True).total_bytes
    sparse = ReplyLayout(depth, support).total_bytes
    return max(sparse, ReplyLayout(depth, 0, vocab_size).total_bytes) if dense_rows else sparse


def hello_message(
    parameters: HelloParameters, serial: int, version: WireVersion | None = None, auth: bytes = b""
) -> Hello:
    """The HELLO that ``parameters`` describe, for their first version or for ``version``.

    Raises :class:`LocalProtocolError` for a value out of range.
    """
    version = version or parameters.versions[0]
    dense = parameters.dense_rows and version is WireVersion.V2_0
    depth, support = parameters.max_depth, parameters.max_support
    compat = compatibility_for(parameters.compatibility, version).encoded()
    return Hello(
        wire_versions=(int(version),),
        compat_hash=sha256(compat).digest(),
        compat=compat,
        epoch=parameters.epoch,
        serial=serial,
        **_capacities(parameters),
        checksums=parameters.checksums,
        reply_bytes=largest_reply(depth, support, dense, parameters.compatibility.vocab_size, version),
        capabilities=_capabilities(dense),
        auth=auth,
    )


def _capabilities(dense_rows: bool) -> int:
    return Capability.DENSE_ROWS.mask if dense_rows else 0


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


def common_version(local: HelloParameters, hello: Hello) -> WireVersion:
    """The highest version that both sides list. Drafter side.

    Raises :class:`RemoteProtocolError` BAD_VERSION when there is none.
    """
    common = [version for version in local.versions if version in hello.wire_versions]
    if not common:
        raise RemoteProtocolError(ErrorCode.BAD_VERSION, "HELLO.wire_versions")
    return max(common)


def negotiate(local: HelloParameters, hello: Hello, version: WireVersion = WireVersion.V2_0) -> Negotiated:
    """Apply the minimum rule to both sides' capacities. Drafter side.

    Raises :class:`RemoteProtocolError` NO_COMMON_CHECKSUM or BAD_NEGOTIATION.
    """
    dense = version is WireVersion.V2_0 and bool(hello.capabilities & Capability.DENSE_ROWS.mask)
    vocab_size = local.compatibility.vocab_size
    if hello.reply_bytes != largest_reply(hello.max_depth, hello.max_support, dense, vocab_size, version):
        raise RemoteProtocolError(ErrorCode.BAD_NEGOTIATION, "HELLO.reply_bytes")
    offered = _capacities(hello)
    capacities = {name: min(value, offered[name]) for name, value in _capacities(local).items()}
    checksum = _common_checksum(local.checksums & hello.checksums)
    return _negotiated(local, capacities, checksum, hello.epoch, dense and local.dense_rows, version)


def _common_checksum(mask: int) -> Checksum:
    """The cheapest body checksum that both sides know."""
    for kind in (Checksum.XXH3_64, Checksum.CRC32C):
        if mask & 1 << (kind - 1):
            return kind
    raise RemoteProtocolError(ErrorCode.NO_COMMON_CHECKSUM, "HELLO.checksums")


def _negotiated(
    local: HelloParameters,
    capacities: dict[str, int],
    checksum: Checksum,
    peer_epoch: int,
    dense_rows: bool,
    version: WireVersion,
) -> Negotiated:
    compatibility = compatibility_for(local.compatibility, version)
    depth, support = capacities["max_depth"], capacities["max_support"]
    return Negotiated(
        **capacities,
        checksum=checksum,
        tap_row_bytes=compatibility.tap_row_bytes,
        reply_bytes=largest_reply(depth, support, dense_rows, compatibility.vocab_size, version),
        vocab_size=compatibility.vocab_size,
        lanes=compatibility.lanes,
        tap_dtype=compatibility.tap_dtype,
        peer_epoch=peer_epoch,
        dense_rows=dense_rows,
        version=version,
    )


def accept_message(local: HelloParameters, hello: Hello, agreed: Negotiated) -> Accept:
    """The ACCEPT for ``hello`` with the values of ``agreed``."""
    return Accept(
        wire_version=int(agreed.version),
        compat_hash=hello.compat_hash,
        epoch=local.epoch,
        verifier_epoch=hello.epoch,
        serial=hello.serial,
        **_capacities(agreed),
        checksum_kind=agreed.checksum,
        tap_row_bytes=agreed.tap_row_bytes,
        reply_bytes=agreed.reply_bytes,
        capabilities=_capabilities(agreed.dense_rows),
        auth=b"",
    )


def accepted_terms(local: HelloParameters, accept: Accept, version: WireVersion) -> Negotiated:
    """The terms of an ACCEPT, checked against what this verifier offered for ``version``.

    Raises :class:`RemoteProtocolError` BAD_NEGOTIATION when a value exceeds the offer or a size is not ours.
    """
    if accept.wire_version != version:
        raise RemoteProtocolError(ErrorCode.BAD_VERSION, "ACCEPT.wire_version")
    if accept.compat_hash != sha256(compatibility_for(local.compatibility, version).encoded()).digest():
        raise RemoteProtocolError(ErrorCode.INCOMPATIBLE, "ACCEPT.compat_hash")
    capacities = _capacities(accept)
    for name, value in capacities.items():
        if value > getattr(local, name):
            raise RemoteProtocolError(ErrorCode.BAD_NEGOTIATION, f"ACCEPT.{name}")
    if not local.checksums & 1 << (accept.checksum_kind - 1):
        raise RemoteProtocolError(ErrorCode.NO_COMMON_CHECKSUM, "ACCEPT.checksum_kind")
    if accept.capabilities & ~_capabilities(local.dense_rows and version is WireVersion.V2_0):
        raise RemoteProtocolError(ErrorCode.BAD_NEGOTIATION, "ACCEPT.capabilities")
    dense = bool(accept.capabilities)
    agreed = _negotiated(local, capacities, accept.checksum_kind, accept.epoch, dense, version)
    if (accept.tap_row_bytes, accept.reply_bytes) != (agreed.tap_row_bytes, agreed.reply_bytes):
        raise RemoteProtocolError(ErrorCode.BAD_NEGOTIATION, "ACCEPT.reply_bytes")
    return agreed
