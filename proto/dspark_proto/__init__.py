"""The dspark v2 wire protocol: sans-IO core.

``VerifierConnection`` (Spark side) and ``DrafterConnection`` (worker side) turn received bytes and a time
into events, and calls into frames to send; sockets, clocks and threads belong to the caller (see
``dspark_proto.transports``). The standard is ``proto/SPEC.md``. Everything public is re-exported here.
"""

from __future__ import annotations

from .auth import Authentication
from .buffers import Buffer
from .canonical import decode_canonical, encode_canonical
from .checksums import body_checksum, crc32c
from .digest import DIGEST_BYTES, EMPTY_DIGEST, extend_digest, prefix_digest
from .drafter import DrafterConnection
from .errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from .events import (
    Accepted,
    ContextArrived,
    CreditGranted,
    DrafterEvent,
    Draining,
    HelloReceived,
    PeerError,
    PeerSilent,
    PongReceived,
    ProposalReady,
    Rejected,
    SlotCancelled,
    SlotClosed,
    SlotCommitted,
    SlotFailed,
    SlotOpened,
    SlotReset,
    StatsReceived,
    StepArrived,
    StepFailed,
    StepTimedOut,
    VerifierEvent,
)
from .frame import Frame, decode_frame, encode_frame, encode_frame_into
from .hello import Compatibility
from .limits import CONFIDENCE_MAX, NO_COMMIT, SLOT_NONE
from .messages import StepItem
from .negotiation import HelloParameters, Mismatch, Negotiated
from .prefix import MAJOR, MINOR, WIRE_VERSION, Key, Prefix, read_prefix
from .registry import (
    Capability,
    Cause,
    Checksum,
    DraftLayout,
    Dtype,
    ErrorCode,
    Lane,
    MessageType,
    Precision,
    RngAbi,
    Scope,
    SemanticId,
    SupportPolicy,
    VerifierId,
    WireVersion,
)
from .rows import ReplyLayout
from .staging import Lease, LeaseState, Staging
from .states import DrafterState, SlotState, VerifierState
from .verifier import ContextSend, VerifierConnection

__all__ = (
    "CONFIDENCE_MAX",
    "DIGEST_BYTES",
    "EMPTY_DIGEST",
    "MAJOR",
    "MINOR",
    "NO_COMMIT",
    "SLOT_NONE",
    "WIRE_VERSION",
    "Accepted",
    "Authentication",
    "Buffer",
    "Capability",
    "Cause",
    "Checksum",
    "Compatibility",
    "ContextArrived",
    "ContextSend",
    "CreditGranted",
    "DraftLayout",
    "DrafterConnection",
    "DrafterEvent",
    "DrafterState",
    "Draining",
    "Dtype",
    "ErrorCode",
    "Frame",
    "HelloParameters",
    "HelloReceived",
    "Key",
    "Lane",
    "Lease",
    "LeaseState",
    "LocalProtocolError",
    "MessageType",
    "Mismatch",
    "Negotiated",
    "PeerError",
    "PeerSilent",
    "PongReceived",
    "Precision",
    "Prefix",
    "ProposalReady",
    "ProtocolError",
    "Rejected",
    "RemoteProtocolError",
    "ReplyLayout",
    "RngAbi",
    "Scope",
    "SemanticId",
    "SlotCancelled",
    "SlotClosed",
    "SlotCommitted",
    "SlotFailed",
    "SlotOpened",
    "SlotReset",
    "SlotState",
    "Staging",
    "StatsReceived",
    "StepArrived",
    "StepFailed",
    "StepItem",
    "StepTimedOut",
    "SupportPolicy",
    "VerifierConnection",
    "VerifierEvent",
    "VerifierId",
    "VerifierState",
    "WireVersion",
    "body_checksum",
    "crc32c",
    "decode_canonical",
    "decode_frame",
    "encode_canonical",
    "encode_frame",
    "encode_frame_into",
    "extend_digest",
    "prefix_digest",
    "read_prefix",
)
