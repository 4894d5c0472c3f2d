"""The v2 registries as enumerations: message types, error codes, checksums, dtypes, lanes, policies.

Invariant: every value equals its entry in ``proto/registry.toml``, the single source (a test compares them in
both directions). The toml is not read at run time, so an installed package does not need it.
Spec: SPEC.md, section "Registries". Called by every module of the core; calls nothing.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class MessageType(IntEnum):
    """Byte 6 of the prefix."""

    HELLO = 1
    ACCEPT = 2
    REJECT = 3
    CHALLENGE = 4
    OPEN = 16
    CONTEXT = 17
    STEP = 18
    ROW = 19
    COMPLETION = 20
    COMMIT = 21
    RESET = 22
    CANCEL = 23
    CLOSE = 24
    PING = 32
    PONG = 33
    DRAIN = 34
    ERROR = 35
    STATS = 36


class WireVersion(IntEnum):
    """A version of the exchange, ``major << 8 | minor``; all have the same frame layout."""

    V1_0 = 0x0100
    V2_0 = 0x0200

    @property
    def major(self) -> int:
        """What the compatibility fields show."""
        return self >> 8


class Scope(IntEnum):
    """What an error ends; everything outside the scope survives."""

    FRAME = 1
    ROUND = 2
    SLOT = 3
    SESSION = 4
    CONNECTION = 5


class ErrorCode(IntEnum):
    """Why a frame, round, slot or connection was refused. 0 is reserved for "no error"."""

    BAD_MAGIC = 1
    BAD_PREFIX_CRC = 2
    BAD_VERSION = 3
    UNKNOWN_TYPE = 4
    RESERVED_NOT_ZERO = 5
    WRONG_SIZE = 6
    LIMIT_EXCEEDED = 7
    BAD_CONTROL_CRC = 8
    NONCANONICAL = 9
    BAD_FIELD = 10
    BAD_DESCRIPTOR = 11
    BAD_PADDING = 12
    BAD_BODY_CHECKSUM = 13

    HELLO_REQUIRED = 32
    UNEXPECTED_MESSAGE = 33
    INCOMPATIBLE = 34
    NO_COMMON_CHECKSUM = 35
    BAD_NEGOTIATION = 36
    WRONG_EPOCH = 37
    DRAINING = 38
    AUTH_UNSUPPORTED = 39
    PEER_SILENT = 40
    STALE_HELLO = 41
    AUTH_REQUIRED = 42
    AUTH_FAILED = 43

    SLOT_OUT_OF_RANGE = 64
    SLOT_BUSY = 65
    SLOT_NOT_OPEN = 66
    WRONG_SESSION = 67
    STALE_GENERATION = 68
    STALE_ROUND = 69
    ROUND_KEY_REUSED = 70
    ROUND_UNRESOLVED = 71
    CONTEXT_GAP = 72
    ANCHOR_MISMATCH = 73
    DIGEST_MISMATCH = 74
    COMMIT_MISMATCH = 75
    DEPTH_OUT_OF_RANGE = 76
    LANE_MISMATCH = 77
    SUPPORT_OUT_OF_RANGE = 78
    CREDIT_EXCEEDED = 79
    SLOT_NEEDS_RESET = 80
    GENERATION_EXHAUSTED = 81
    STAGING_EXHAUSTED = 82
    DUPLICATE = 83
    LATE = 84
    TOKEN_OUT_OF_RANGE = 85

    ROWS_MISSING = 96
    BAD_ROW_RECORD = 97
    BAD_ROW_CRC = 98
    BAD_REPLY_CHECKSUM = 99
    COMPLETION_MISMATCH = 100
    STEP_TIMED_OUT = 101
    DRAFT_FAILED = 102
    DRAFT_NOT_FINITE = 103

    @property
    def counter(self) -> str:
        """Name of this cause in the connections' ``counters``."""
        return self.name.lower()


class Checksum(IntEnum):
    """Body and reply checksums. Prefix and control are always CRC32C."""

    CRC32C = 1
    XXH3_64 = 2


class SemanticId(IntEnum):
    """Meaning of a q row."""

    DYADIC24_STANDARD_V1 = 1


class VerifierId(IntEnum):
    """Acceptance rule family that the verifier applies."""

    TARGET60_STANDARD_V1 = 1


class RngAbi(IntEnum):
    """Keyed random number ABI of the proposal draws."""

    PHILOX4X32_10_DSPARK1 = 1


class Precision(IntEnum):
    """Arithmetic in which the drafter allocates integer counts."""

    FP64_LARGEST_REMAINDER = 1


class DraftLayout(IntEnum):
    """Whether the draft checkpoint is used as published or was adapted."""

    NATIVE = 1
    ADAPTED = 2


class Lane(IntEnum):
    """Acceptance rule of a request; fixed for a whole round."""

    RATIO = 1
    MATCH = 2
    GREEDY = 3


class SupportPolicy(IntEnum):
    """Entries per sparse row; the value is the number of entries. DENSE rows have a value for every token."""

    DENSE = 0
    K1 = 1
    K16 = 16
    K32 = 32
    K64 = 64
    K256 = 256


class Representation(IntEnum):
    """Layout of the q rows in a reply."""

    SPARSE = 1
    DENSE = 2
    TOKENS = 3


class Capability(IntEnum):
    """What a side can do beyond the mandatory; both must know it for it to be used."""

    DENSE_ROWS = 1

    @property
    def mask(self) -> int:
        """Its bit in HELLO and ACCEPT."""
        return 1 << (self - 1)


class Dtype(IntEnum):
    """Element type of a body, little-endian."""

    BYTES = 0
    BF16 = 1
    FP32 = 2
    INT32 = 3


DTYPE_BYTES: Final[dict[Dtype, int]] = {Dtype.BYTES: 1, Dtype.BF16: 2, Dtype.FP32: 4, Dtype.INT32: 4}


class BodyKind(IntEnum):
    """What a body holds."""

    TAPS = 1
    TOKENS = 2
    RECORDS = 3
    IDS = 4
    Q = 5


class Cause(IntEnum):
    """Why a RESET, CANCEL or CLOSE was sent."""

    FINISHED = 1
    CLIENT_GONE = 2
    ROUND_TIMED_OUT = 3
    REPLY_REFUSED = 4
    PREEMPTED = 5
    REBALANCED = 6
    SHUTDOWN = 7


LANES_ALL: Final = 0b111
"""Bit ``lane - 1`` per lane."""

CHECKSUMS_ALL: Final = 0b11
"""Bit ``checksum - 1`` per checksum."""

_SCOPE_RANGES: Final = (
    (1, 13, Scope.FRAME),
    (32, 43, Scope.CONNECTION),
    (64, 85, Scope.SLOT),
    (96, 103, Scope.ROUND),
)
_SCOPE_EXCEPTIONS: Final[dict[ErrorCode, Scope]] = {
    ErrorCode.BAD_VERSION: Scope.CONNECTION,
    ErrorCode.UNEXPECTED_MESSAGE: Scope.FRAME,
    ErrorCode.WRONG_EPOCH: Scope.FRAME,
    ErrorCode.DRAINING: Scope.SESSION,
    ErrorCode.STALE_HELLO: Scope.FRAME,
    ErrorCode.SLOT_OUT_OF_RANGE: Scope.SESSION,
    ErrorCode.SLOT_BUSY: Scope.SESSION,
    ErrorCode.SLOT_NOT_OPEN: Scope.FRAME,
    ErrorCode.WRONG_SESSION: Scope.FRAME,
    ErrorCode.STALE_GENERATION: Scope.FRAME,
    ErrorCode.STALE_ROUND: Scope.FRAME,
    ErrorCode.SLOT_NEEDS_RESET: Scope.FRAME,
    ErrorCode.DUPLICATE: Scope.FRAME,
    ErrorCode.LATE: Scope.FRAME,
    ErrorCode.STAGING_EXHAUSTED: Scope.ROUND,
    ErrorCode.DRAFT_FAILED: Scope.SLOT,
    ErrorCode.DRAFT_NOT_FINITE: Scope.SLOT,
    ErrorCode.STEP_TIMED_OUT: Scope.SLOT,
}


def _scopes() -> dict[ErrorCode, Scope]:
    table = {code: scope for low, high, scope in _SCOPE_RANGES for code in ErrorCode if low <= code <= high}
    return table | _SCOPE_EXCEPTIONS


SCOPES: Final[dict[ErrorCode, Scope]] = _scopes()
"""Scope of each error code."""
