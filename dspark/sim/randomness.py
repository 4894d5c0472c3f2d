"""One tree of random numbers: a generator per component, so that adding a component shifts no other.

Called by everything in the simulator that chooses something.
"""

from __future__ import annotations

from hashlib import blake2b
from random import Random


def branch(seed: int, *path: object) -> Random:
    """The generator of one component: a function of the seed and of the component's name alone."""
    text = "/".join(map(str, (seed, *path)))
    return Random(int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little"))
