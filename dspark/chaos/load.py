"""The load: so many requests at once, each thread asking case after case until told to stop.

Which case a thread asks next, streaming or not, is drawn from a generator of its own, so that the mix is the seed's.
Invariants: every request that was started is in `answers`; a request that is still running when its deadline is over is
a hung one, and its thread is left behind.

Called by `run` and `scenarios`; `faults` asks it to leave streams.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from dspark.chaos.catalogue import Case, Lane, law_case
from dspark.chaos.client import Answer, Client

RETRY_S = 0.5
"""Pause of a thread whose request failed."""


@dataclass(frozen=True)
class Mix:
    """Shares of all requests: judged by law; streamed; streams whose client leaves in the middle unasked."""

    law: float = 0.5
    stream: float = 0.7
    leave: float = 0.05


class Load:
    """`clients` threads, which begin at `start`. `on_end` gets every answer, in the thread that asked."""

    def __init__(
        self,
        make_client: Callable[[], Client],
        cases: Sequence[Case],
        clients: int,
        seed: int,
        on_end: Callable[[Answer], None],
        mix: Mix,
    ) -> None:
        self.answers: list[Answer] = []
        self._cases, self._on_end, self._mix = list(cases), on_end, mix
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._to_leave = self._left = self._laws = 0
        self._threads = [
            threading.Thread(target=self._run, args=(make_client, Random(f"{seed}/{number}")), daemon=True)
            for number in range(clients)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def running(self) -> list[Answer]:
        """Requests under way."""
        with self._lock:
            return [answer for answer in self.answers if answer.ended is None]

    def leave(self, count: int) -> None:
        """Let the next `count` chunks of streams be the last ones that their clients read."""
        with self._lock:
            self._to_leave += count

    @property
    def left(self) -> int:
        """Streams that were left so far."""
        return self._left

    def finish(self, deadline_s: float) -> None:
        """Ask no more, and wait for what runs, each request for its deadline at most."""
        self._stop.set()
        until = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self, make_client: Callable[[], Client], random: Random) -> None:
        client = make_client()
        while not self._stop.is_set():
            case = self._next_case(random)
            answer = Answer(case, random.random() < self._mix.stream, time.monotonic())
            with self._lock:
                self.answers.append(answer)
            own_leave = case.max_tokens // 2 if random.random() < self._mix.leave else None
            client.ask(case, answer, partial(self._leaves, own_leave))
            self._on_end(answer)
            if answer.error is not None:
                self._stop.wait(RETRY_S)

    def _next_case(self, random: Random) -> Case:
        if random.random() >= self._mix.law:
            return random.choice(self._cases)
        with self._lock:
            self._laws += 1
            return law_case(self._laws)

    def _leaves(self, own: int | None, answer: Answer) -> bool:
        # How often one could leave a stream depends on what was accepted: the texts left over would have another law.
        if answer.case.lane is Lane.LAW:
            return False
        with self._lock:
            told = self._to_leave > 0
            self._to_leave -= told
            leaves = told or (own is not None and len(answer.ids) >= own)
            self._left += leaves
            return leaves
