"""The alarm for a drafter that answers and is never right: every draft of a long run of proposals was rejected.

Text stays right then, only speed is gone, so nothing else shows it: a wrong checkpoint, a wrong layer, a dangling
buffer. Acceptance that is low is a statistic; acceptance that is exactly zero is a defect.

Called by `metrics` once per round; it never changes what is drafted.
"""

from __future__ import annotations

import logging
from typing import Final

logger = logging.getLogger(__name__)

PROPOSALS = 64
"""Verified proposals without one accepted draft that raise the alarm."""


class ZeroAcceptanceAlarm:
    """Raised by `threshold` verified proposals in a row without an accepted draft, cleared by one accepted draft."""

    NAME: Final = "zero_acceptance"

    def __init__(self, threshold: int = PROPOSALS) -> None:
        self.raised = False
        self._threshold = threshold
        self._fruitless = 0

    def judged(self, proposals: int, accepted: int) -> bool:
        """`proposals` were verified, and `accepted` tokens of them taken; whether the alarm is raised now."""
        self._fruitless = 0 if accepted else self._fruitless + proposals
        raised = self._fruitless >= self._threshold
        if raised and not self.raised:
            logger.warning(
                "alarm %s: no draft was accepted in the last %d proposals: the drafter does not fit the target, or "
                "it is broken; answers are right but no faster than without it", self.NAME, self._fruitless
            )  # fmt: skip
        if self.raised and not raised:
            logger.warning("alarm %s is over: drafts are accepted again", self.NAME)
        self.raised = raised
        return raised
