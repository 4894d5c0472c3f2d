"""Which acceptance rule a request runs under, from its `lane` field and its temperature.

The lane is fixed when the request is admitted, before anything is drawn, and holds to its end, with or without a
drafter: in the match lane a request that is not drafted for still samples with the same numbers.

Called by `engine`. `auto` is greedy at temperature 0 and ratio above it.
"""

from __future__ import annotations

from dspark_proto import Lane

AUTO = "auto"
LANES = (AUTO, *(lane.name.lower() for lane in Lane))


def choose_lane(wanted: str, temperature: float) -> Lane:
    """The lane of a request. Raises ValueError, which names the field, for a lane that cannot be had."""
    if wanted == AUTO:
        return Lane.GREEDY if temperature == 0 else Lane.RATIO
    if wanted not in LANES:
        raise ValueError(f"lane={wanted!r} is unknown: use one of {', '.join(LANES)}")
    lane = Lane[wanted.upper()]
    if lane is Lane.GREEDY and temperature != 0:
        raise ValueError(f"lane='greedy' needs temperature 0, not {temperature:g}: use 'match', 'ratio' or 'auto'")
    return lane
