"""What a run does: which faults when, what mix of requests, and when it is over.

``mixed`` is chaos proper. ``takeover`` kills one worker after another under streams alone and measures how long the
affected requests go without drafts; ``swap`` replaces every worker by another checkpoint version under load.

Called by `run` and tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dspark.chaos.faults import FAULTS, Swap, Takeover
from dspark.chaos.load import Mix
from dspark.chaos.schedule import Planned, plan

LEAD_S, APART_S, KILLS = 5.0, 20.0, 3


@dataclass(frozen=True)
class Program:
    """seconds: length of the load; None ends it `LEAD_S` after the last fault is healed."""

    faults: list[Planned]
    mix: Mix
    seconds: float | None


Make = Callable[[int, float, float, int], Program]


def mixed(links: int, seconds: float, every_s: float, seed: int) -> Program:
    """Every kind of fault but `Takeover`, which wants all others to be well; one every `every_s` seconds."""
    return Program(
        plan([kind for kind in FAULTS if kind != Takeover.kind], links, seconds, every_s, seed), Mix(), seconds
    )


def takeover(links: int, _seconds: float, _every_s: float, seed: int) -> Program:
    """One worker after the other is killed, with time to come back in between."""
    faults = [Planned(n, LEAD_S + n * APART_S, Takeover.kind, (seed + n) % links, n) for n in range(KILLS)]
    return Program(faults, Mix(law=0.0, stream=1.0, leave=0.0), None)


def swap(_links: int, _seconds: float, _every_s: float, seed: int) -> Program:
    """Both workers are swapped, and swapped back."""
    faults = [Planned(n, LEAD_S + n * APART_S, Swap.kind, 0, seed) for n in range(2)]
    return Program(faults, Mix(leave=0.0), None)


PROGRAMS: Mapping[str, Make] = {"mixed": mixed, "takeover": takeover, "swap": swap}
