"""Which requirement of SPEC.md an error code stands for: the way from a refusal to the sentence that was broken.

Invariant: every code of the registry is here, and every anchor exists in SPEC.md (a test compares both). Called by
``explain`` and ``replay``; checks nothing.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from ..registry import ErrorCode

_E: TypeAlias = ErrorCode

ANCHORS: Final[dict[ErrorCode, tuple[str, ...]]] = {
    _E.BAD_MAGIC: ("REQ-PFX-2",),
    _E.BAD_PREFIX_CRC: ("REQ-PFX-3",),
    _E.BAD_VERSION: ("REQ-PFX-4", "REQ-HEL-4", "REQ-HEL-15"),
    _E.UNKNOWN_TYPE: ("REQ-PFX-5", "REQ-VER-1"),
    _E.RESERVED_NOT_ZERO: ("REQ-PFX-6",),
    _E.WRONG_SIZE: ("REQ-PFX-1", "REQ-PFX-8", "REQ-FRM-1", "REQ-CMP-1"),
    _E.LIMIT_EXCEEDED: ("REQ-PFX-7", "REQ-LIM-1"),
    _E.BAD_CONTROL_CRC: ("REQ-CRC-2",),
    _E.NONCANONICAL: ("REQ-CAN-1", "REQ-CAN-2"),
    _E.BAD_FIELD: ("REQ-CAN-4", "REQ-CAN-5", "REQ-STP-1"),
    _E.BAD_DESCRIPTOR: ("REQ-FRM-4", "REQ-BOD-1", "REQ-BOD-2"),
    _E.BAD_PADDING: ("REQ-FRM-3",),
    _E.BAD_BODY_CHECKSUM: ("REQ-CRC-3",),
    _E.HELLO_REQUIRED: ("REQ-LIF-3",),
    _E.UNEXPECTED_MESSAGE: ("REQ-LIF-1",),
    _E.INCOMPATIBLE: ("REQ-HEL-3",),
    _E.NO_COMMON_CHECKSUM: ("REQ-HEL-8",),
    _E.BAD_NEGOTIATION: ("REQ-HEL-6", "REQ-HEL-7"),
    _E.WRONG_EPOCH: ("REQ-EPO-1",),
    _E.DRAINING: ("REQ-OPN-5", "REQ-DRN-1"),
    _E.AUTH_UNSUPPORTED: ("REQ-HEL-11",),
    _E.PEER_SILENT: ("REQ-PNG-2",),
    _E.STALE_HELLO: ("REQ-HEL-10",),
    _E.AUTH_REQUIRED: ("REQ-AUT-1",),
    _E.AUTH_FAILED: ("REQ-AUT-1", "REQ-AUT-4"),
    _E.SLOT_OUT_OF_RANGE: ("REQ-PFX-9",),
    _E.SLOT_BUSY: ("REQ-OPN-2",),
    _E.SLOT_NOT_OPEN: ("REQ-LIF-1",),
    _E.WRONG_SESSION: ("REQ-LIF-1",),
    _E.STALE_GENERATION: ("REQ-GEN-2", "REQ-OPN-3"),
    _E.STALE_ROUND: ("REQ-GEN-2", "REQ-STP-3"),
    _E.ROUND_KEY_REUSED: ("REQ-STP-8",),
    _E.ROUND_UNRESOLVED: ("REQ-STP-3", "REQ-CTX-3"),
    _E.CONTEXT_GAP: ("REQ-CTX-2", "REQ-STP-4"),
    _E.ANCHOR_MISMATCH: ("REQ-STP-4",),
    _E.DIGEST_MISMATCH: ("REQ-DIG-2",),
    _E.COMMIT_MISMATCH: ("REQ-CMT-1", "REQ-CMT-3"),
    _E.DEPTH_OUT_OF_RANGE: ("REQ-STP-5",),
    _E.LANE_MISMATCH: ("REQ-OPN-4", "REQ-STP-5", "REQ-ONE-2"),
    _E.SUPPORT_OUT_OF_RANGE: ("REQ-OPN-4", "REQ-ONE-2"),
    _E.CREDIT_EXCEEDED: ("REQ-CTX-4",),
    _E.SLOT_NEEDS_RESET: ("REQ-GEN-5",),
    _E.GENERATION_EXHAUSTED: ("REQ-GEN-1",),
    _E.STAGING_EXHAUSTED: ("REQ-STG-2",),
    _E.DUPLICATE: ("REQ-ROW-5", "REQ-CMT-4", "REQ-GEN-2"),
    _E.LATE: ("REQ-GEN-2",),
    _E.TOKEN_OUT_OF_RANGE: ("REQ-STP-5",),
    _E.ROWS_MISSING: ("REQ-ROW-5", "REQ-CMP-1"),
    _E.BAD_ROW_RECORD: ("REQ-ROW-4",),
    _E.BAD_ROW_CRC: ("REQ-ROW-3",),
    _E.BAD_REPLY_CHECKSUM: ("REQ-CMP-1",),
    _E.COMPLETION_MISMATCH: ("REQ-CMP-2",),
    _E.STEP_TIMED_OUT: ("REQ-GEN-4",),
    _E.DRAFT_FAILED: ("REQ-CMP-4",),
    _E.DRAFT_NOT_FINITE: ("REQ-CMP-4",),
}
"""Anchors by code; the first is the usual one."""


def in_words(code: ErrorCode) -> str:
    """`CONTEXT_GAP (REQ-CTX-2, REQ-STP-4)`."""
    return f"{code.name} ({', '.join(ANCHORS[code])})"
