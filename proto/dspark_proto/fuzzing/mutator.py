"""Choosing what to do to which frame, from a seeded generator alone.

Invariant: the same generator state and pool give the same mutant; no clock, no hash order. Frames are left
unchanged at times, so that sequences of good frames are repeated and reordered too. Called by ``campaign``
and the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final, NamedTuple

from ..registry import MessageType
from . import body_mutations, byte_mutations, control_mutations
from .encoding import Seal, seal
from .forged_replies import forged_reply
from .specimens import Pool, Specimen

Mutation = Callable[[Random, Specimen, Pool], bytearray]

ANY_FRAME: Final[tuple[Mutation, ...]] = (
    byte_mutations.flip_bits,
    byte_mutations.set_bytes,
    byte_mutations.truncate,
    byte_mutations.extend,
    byte_mutations.move_slice,
    byte_mutations.splice_frames,
    byte_mutations.prefix_field,
    byte_mutations.prefix_field,
)
"""Mutations that need nothing but bytes; one that is listed twice is twice as likely."""

WITH_CONTROL: Final[tuple[Mutation, ...]] = (
    control_mutations.wrong_type,
    control_mutations.edge_integer,
    control_mutations.edge_integer,
    control_mutations.edge_integer,
    control_mutations.overlong,
    control_mutations.length_lie,
    control_mutations.resize_bytes,
    control_mutations.rearrange,
    control_mutations.transplant,
    control_mutations.transplant,
    control_mutations.foreign_control,
    control_mutations.bomb,
)
"""Mutations of specimens whose control could be taken apart."""

WITH_BODIES: Final[tuple[Mutation, ...]] = (
    body_mutations.changed_body,
    body_mutations.resized_body,
    body_mutations.descriptor_lie,
    body_mutations.padding_set,
)
"""Mutations of specimens with bodies."""

_SEALS: Final = (Seal.FULL, Seal.FULL, Seal.FULL, Seal.FULL, Seal.FULL, Seal.PREFIX, Seal.NONE)


UNCHANGED: Final = "unchanged"
"""How the frame of a mutant came about that is none."""


class Mutant(NamedTuple):
    """Frames to deliver in order (two for a forged reply), and how they came about."""

    frames: tuple[bytes, ...]
    how: str
    seal: Seal


class Mutator:
    """Draws mutants. ``pool`` is what values and slices are transplanted from."""

    def __init__(self, rng: Random, pool: Pool) -> None:
        self.rng = rng
        self.pool = pool

    def mutant(self, specimen: Specimen) -> Mutant:
        """A mutant of ``specimen``, or now and then the specimen itself."""
        rng = self.rng
        if rng.random() < 0.1:
            return Mutant((specimen.frame,), UNCHANGED, Seal.FULL)
        closing = self._closing(specimen) if rng.random() < 0.2 else None
        if closing is not None:
            return Mutant(tuple(forged_reply(rng, specimen, closing)), "forged_reply", Seal.FULL)
        mutation = rng.choice(self._applicable(specimen))
        level = rng.choice(_SEALS)
        return Mutant((bytes(seal(mutation(rng, specimen, self.pool), level)),), mutation.__name__, level)

    def _applicable(self, specimen: Specimen) -> tuple[Mutation, ...]:
        kinds = [ANY_FRAME]
        if specimen.elements:
            kinds.append(WITH_CONTROL)
            if specimen.descriptors:
                kinds.append(WITH_BODIES)
        return self.rng.choice(kinds)

    def _closing(self, specimen: Specimen) -> Specimen | None:
        """The COMPLETION that answers the same key as a sparse ROW."""
        if specimen.type != MessageType.ROW or len(specimen.descriptors) != 3:
            return None
        key = specimen.frame[24:40]
        completions = self.pool.by_type.get(MessageType.COMPLETION, [])
        return next((one for one in completions if one.frame[24:40] == key), None)
