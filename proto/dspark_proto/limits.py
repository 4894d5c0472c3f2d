"""Hard limits of the v2 protocol: checked before anything is decoded, sized or allocated.

Invariant: a negotiated value may be smaller than its limit here, never larger. Values equal the ``[limits]``
table of ``proto/registry.toml`` (a test compares them). Spec: SPEC.md, section "Limits".
"""

from __future__ import annotations

from typing import Final

U8_MAX: Final = 2**8 - 1
U16_MAX: Final = 2**16 - 1
U32_MAX: Final = 2**32 - 1
U64_MAX: Final = 2**64 - 1

PREFIX_BYTES: Final = 48
ALIGNMENT_BYTES: Final = 64
CONTROL_BYTES_MAX: Final = 4096
CONTROL_DEPTH_MAX: Final = 3
TEXT_BYTES_MAX: Final = 96
COMPAT_BYTES_MAX: Final = 1024
AUTH_BYTES_MAX: Final = 64
AUTH_NONCE_BYTES: Final = 32
AUTH_PROOF_BYTES: Final = 32
AUTH_SECRET_BYTES_MIN: Final = 16
AUTH_BINDING_BYTES_MAX: Final = 96
BODY_COUNT_MAX: Final = 32
BODY_BYTES_MAX: Final = 64 * 2**20
FRAME_BYTES_MAX: Final = BODY_BYTES_MAX + CONTROL_BYTES_MAX + 2 * ALIGNMENT_BYTES
WIRE_VERSIONS_MAX: Final = 8

SLOTS_MAX: Final = 1024
DEPTH_MAX: Final = 32
SUPPORT_MAX: Final = 256
CONFIDENCE_MAX: Final = 2**24
"""Confidence "certain" in a row record, in units of 2^-24; also that of a worker that has no opinion."""
ROW_CHUNK_BYTES: Final = 2**20
"""Bytes of rows that one ROW holds at most, unless a single row is larger."""
IN_FLIGHT_MAX: Final = 1024
IN_FLIGHT_MIN: Final = 2
STEP_ITEMS_MAX: Final = 32
STATS_COUNTERS_MAX: Final = 128

VOCAB_MAX: Final = 2**31 - 1
POSITION_MAX: Final = 2**31 - 1
ROUND_MAX: Final = U32_MAX
GENERATION_MAX: Final = 2**63 - 1
TAP_LAYERS_MAX: Final = 16
TAP_WIDTH_MAX: Final = 65536
CONTEXT_CHUNK_ROWS_MAX: Final = 4096
CONTEXT_CHUNK_BYTES: Final = 2**20
CONTEXT_CREDIT_ROWS_MAX: Final = 2**24
DRAFT_TEMPERATURE_MICRO_MAX: Final = 100_000_000

DEADLINE_MS_MIN: Final = 1
DEADLINE_MS_MAX: Final = 600_000
HANDSHAKE_DEADLINE_MS: Final = 10_000
SILENT_HEARTBEATS: Final = 3
"""Heartbeat intervals that a PING may stay unanswered before the worker counts as silent."""
SILENT_HEARTBEATS_WORKER: Final = 60
"""Heartbeat intervals without any frame after which a worker frees a verifier's slots; longer, for a
verifier's
thread may be busy in a forward pass."""

SLOT_NONE: Final = U32_MAX
"""Prefix slot of a frame that belongs to no single slot."""

NO_COMMIT: Final = U8_MAX
"""``accepted_count`` of a STEP item that carries no commit."""

NANOSECONDS_PER_MS: Final = 1_000_000
