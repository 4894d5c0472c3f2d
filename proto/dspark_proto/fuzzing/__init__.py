"""Structure-aware fuzzing of the wire protocol: frames bent in known ways, fed to connections in real states.

The invariant: a received frame is accepted, or refused under a registered code, never anything else. No other
exception, no unbounded memory or time, no harm to a slot that the frame does not name, and afterwards the
connection still serves a clean round. Seeds are the frames of a live session in memory (``conversation``) and
of the golden vectors; mutation (``mutator``) draws from a seeded generator and reads no clock. Used by
``dspark fuzz``, the tests and ``tests/proto/atheris_frames.py``; standard library and this package alone.
"""

from __future__ import annotations

from .campaign import Campaign, Finding, Tally, replay
from .conversation import STAGES, conversation, recorded, staged
from .limits import FRAME_CPU_NS_MAX, TRACED_BYTES_MAX
from .mutator import Mutant, Mutator
from .pair import Pair, Parcel, Side
from .specimens import Pool, Specimen, specimen_of
from .trial import Escape, Trial

__all__ = (
    "FRAME_CPU_NS_MAX",
    "STAGES",
    "TRACED_BYTES_MAX",
    "Campaign",
    "Escape",
    "Finding",
    "Mutant",
    "Mutator",
    "Pair",
    "Parcel",
    "Pool",
    "Side",
    "Specimen",
    "Tally",
    "Trial",
    "conversation",
    "recorded",
    "replay",
    "specimen_of",
    "staged",
)
