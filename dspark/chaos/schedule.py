"""Which fault happens when: a plan that is a function of the seed alone.

Invariants: one fault every `every_s` seconds from `first_s` on, now and then with a second one on another link at the
same moment; every kind comes once before any comes twice; nothing depends on what happens in the run.

Called by `nemesis` and tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

PAIR_SHARE = 0.25
FIRST_S = 3.0


@dataclass(frozen=True)
class Planned:
    """A fault to come. at_s: after the start of the plan. link: which worker or proxy. draw: seed of its choices."""

    number: int
    at_s: float
    kind: str
    link: int
    draw: int


def plan(kinds: Sequence[str], links: int, seconds: float, every_s: float, seed: int) -> list[Planned]:
    """All faults of a run."""
    random = Random(f"plan/{seed}")
    bag: list[str] = []
    faults: list[Planned] = []
    at_s = min(FIRST_S, every_s)
    while at_s < seconds:
        link = random.randrange(links)
        count = 2 if links > 1 and random.random() < PAIR_SHARE else 1
        for extra in range(count):
            if not bag:
                bag = list(kinds)
                random.shuffle(bag)
            kind = bag.pop()
            faults.append(Planned(len(faults), at_s, kind, (link + extra) % links, random.getrandbits(32)))
        at_s += every_s
    return faults
