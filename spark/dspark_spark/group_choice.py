"""One group of decoding requests or two: whichever has been measured to make more tokens per second.

Why it is measured. With V(n) the time to verify and sample n requests and D the wait for drafts, a cycle in which each
request gets one step takes D + V(n) in one group, and max(D, V(n/2)) + V(n/2) in two. Where rows cost, V(n/2) is half
of V(n), and two groups hide up to half a verification. Where a forward pass costs the same for few rows as for many,
V(n/2) = V(n), and two groups never win: at D < V(n) they lose. And target and drafter may share cores, so that what
runs at the same time runs slower. No formula knows all of this, so both arrangements are tried and the quicker one is
kept.

How. Time per expected token of whole cycles is recorded in the arrangement in use. Now and then the other one is tried
for a few cycles, and each is compared with the usual time *at the same number of requests*, because that number changes
all the time. A trial that is slower in each of its first cycles ends at once; the pause to the next one then doubles.
Two groups are taken up only when they are better by MARGIN, and given up when one is better at all; they are not even
tried while the wait is a smaller share of the cycle than MARGIN, because the wait is all that they could save.
Requests are few or many: each power of two has its own choice. A single request, or requests that cannot draft, are one
group always.

Steps with prefill in them, or with lost drafts, and those right after them or after a change, are left out.

Nothing here changes a text (see `request_groups`). Called by `engine`, from its thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

MARGIN = 0.03
"""Share of the time per token that two groups must save."""
WINDOW, FEWEST = 8, 3
"""Cycles that a comparison looks at, and the fewest that say anything."""
FIRST_PAUSE, LONGEST_PAUSE = 32, 512
"""Cycles between two trials: after a change, and at most."""
TRIAL_CYCLES = 4 * WINDOW
"""A trial that has seen too few comparable cycles by then has failed."""
WAIT_WEIGHT = 0.2


@dataclass(slots=True)
class Trials:
    """The choice for one range of sizes. groups: what is used outside of trials."""

    groups: int = 1
    trying: bool = False
    _left: int = WINDOW
    _pause: int = FIRST_PAUSE
    _cycles: int = 0
    _wait: float = 0.0
    _costs: dict[int, deque[float]] = field(default_factory=dict)
    _ratios: list[float] = field(default_factory=list)

    @property
    def now(self) -> int:
        """Groups to use in this turn."""
        return 3 - self.groups if self.trying else self.groups

    def observe(self, requests: int, cost: float, wait: float) -> None:
        """A cycle: its requests, seconds per expected token, and the share of its time that was waited for drafts."""
        if self.trying:
            self._compare(requests, cost)
            return
        self._costs.setdefault(requests, deque(maxlen=WINDOW)).append(cost)
        self._wait += WAIT_WEIGHT * (wait - self._wait)
        self._left -= 1
        known = len(self._costs[requests]) >= FEWEST
        if self._left <= 0 and known and (self.groups == 2 or self._wait > MARGIN):
            self.trying, self._cycles, self._ratios = True, 0, []

    def _compare(self, requests: int, cost: float) -> None:
        self._cycles += 1
        usual = self._costs.get(requests, ())
        if len(usual) >= FEWEST:
            self._ratios.append(cost / median(usual))
        enough = len(self._ratios) >= FEWEST
        if len(self._ratios) == WINDOW:
            self._settle(median(self._ratios) < (1 - MARGIN if self.groups == 1 else 1))
        elif (enough and min(self._ratios) > 1) or self._cycles == TRIAL_CYCLES:
            self._settle(False)

    def _settle(self, better: bool) -> None:
        """The trial is over."""
        if better:
            self.groups = 3 - self.groups
            self._costs.clear()
        self._pause = FIRST_PAUSE if better else min(2 * self._pause, LONGEST_PAUSE)
        self.trying, self._left, self._wait = False, self._pause, 0.0


class GroupChoice:
    """`fixed`: 1 or 2 groups whatever it costs, None to choose. `now_s` is a clock in seconds."""

    def __init__(self, fixed: int | None = None, now_s: Callable[[], float] = time.perf_counter) -> None:
        self.fixed = fixed
        self._now_s = now_s
        self._trials: dict[int, Trials] = {}
        self._using: Trials | None = None
        self._groups = 1
        self._skip = 0
        self._began_s = 0.0
        self._turns: list[tuple[int, float, float, float]] = []

    def choose(self, drafting: int) -> int:
        """Groups in the turn that begins. drafting: decoding requests that could get drafts."""
        self._began_s = self._now_s()
        self._using, groups = None, 1
        if drafting > 1 and self.fixed is None:
            self._using = self._trials.setdefault(drafting.bit_length(), Trials())
            groups = self._using.now
        elif drafting > 1:
            groups = self.fixed or 1
        if groups != self._groups:
            self._groups, self._skip = groups, groups
            self._turns.clear()
        return groups

    def turned(self, requests: int, tokens: float, waited_s: float, *, usual: bool) -> None:
        """The turn is over: requests verified, tokens expected of them, seconds waited for drafts.

        usual: it had no prefill, and all drafts that were asked for came.
        """
        seconds = self._now_s() - self._began_s
        if self._using is None or not usual:
            self._turns.clear()
            self._skip = max(self._skip, self._groups - 1)
        elif self._skip:
            self._skip -= 1
        else:
            self._turns.append((requests, tokens, seconds, waited_s))
            if len(self._turns) == self._groups:
                self._cycle(self._using)

    def _cycle(self, trials: Trials) -> None:
        requests, tokens, seconds, waited = (sum(column) for column in zip(*self._turns, strict=True))
        self._turns.clear()
        trials.observe(int(requests), seconds / tokens, waited / seconds)

    def settled(self, drafting: int) -> int:
        """Groups that so many drafting requests use outside of trials."""
        known = self._trials.get(drafting.bit_length())
        return known.groups if known is not None and drafting > 1 else 1

    def forget(self) -> None:
        """Start over, as after a change of the link; while no request runs."""
        self._trials.clear()
