"""Ranks that compute together: two primitives, and what is built on them.

Purpose: code that is split over ranks says here, and nowhere else, in which order numbers of different ranks meet. A
backend moves bytes and never adds.

Invariants:

- All ranks make the same calls in the same order with arrays of one shape and dtype, so a backend needs no exchange of
  sizes and no branch depends on a rank. Values that steer a branch come out of a collective.
- Results are in rank order and equal on all ranks, bit for bit.
- A reduction is a gather, and then the same arithmetic on every rank. ``split_sum`` adds in the order in which numpy
  adds the whole vector, so that a split row and a whole row have one normaliser.
- A ``LocalGroup`` cannot hang in a collective: when a rank fails or leaves early, the others end at their next call.

Called by ``dspark.draft_shards``, ``dspark.target_shards`` and ``dspark.request_shards``. It knows no token, no device
and no random number.

Source: numpy's pairwise summation (``numpy/_core/src/umath/loops_utils.h.src``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NoReturn, Protocol, TypeVar

import numpy as np

from dspark.dyadic import Float64s, Int64s

Numbers = TypeVar("Numbers", Int64s, Float64s)
Result = TypeVar("Result")

# numpy adds up to this many values in one unrolled loop and halves longer ranges, the left half a multiple of 8.
_LEAF = 128
_UNROLL = 8


class Group(Protocol):
    """The ranks that take part, seen from one of them. Arrays are int64 or float64 and may hold infinities and NaN."""

    @property
    def rank(self) -> int:
        """This rank, in [0, size)."""

    @property
    def size(self) -> int:
        """How many ranks there are, >= 1."""

    def all_gather(self, values: Numbers) -> Numbers:
        """[size, *shape]: the arrays of all ranks, of one shape and dtype, in rank order."""

    def broadcast(self, values: Numbers, source: int) -> Numbers:
        """The array of rank ``source``; the others pass one of the same shape and dtype, which is not looked at."""


class GroupError(RuntimeError):
    """A rank failed, or the ranks did not make the same call.

    Fields:
        failures: rank to its own error, without the ranks that ended only because another one failed.
    """

    def __init__(self, message: str, failures: dict[int, BaseException] | None = None) -> None:
        super().__init__(message)
        self.failures = failures or {}


class _Stopped(GroupError):
    """This rank ends because another one did."""


@dataclass(frozen=True, slots=True)
class LocalGroup:
    """``size`` ranks as threads of this process, for tests and for one host."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size={self.size}; a group has at least one rank")

    def run(self, work: Callable[[Group], Result]) -> list[Result]:
        """What ``work`` returned on every rank, in rank order.

        Raises:
            GroupError: a rank raised (lowest rank as the cause), or the ranks made different calls. All ranks have
                ended by then.
        """
        meeting = _Meeting(self.size)
        results: dict[int, Result] = {}
        failures: dict[int, BaseException] = {}

        def serve(rank: int) -> None:
            try:
                results[rank] = work(_LocalRank(rank, meeting))
                meeting.exchange(rank, "the end", np.zeros(0))
            except BaseException as error:
                failures[rank] = error
                meeting.stop()

        threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(self.size)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            meeting.stop()
        if failures:
            self._raise({r: e for r, e in sorted(failures.items()) if not isinstance(e, _Stopped)})
        return [results[rank] for rank in range(self.size)]

    def _raise(self, failures: dict[int, BaseException]) -> NoReturn:
        rank, error = next(iter(failures.items()))
        text = f"rank {rank} of {self.size} failed: {type(error).__name__}: {error}"
        raise GroupError(text, failures) from error


class _Meeting:
    """Where local ranks meet: each puts an array down and leaves with all of them, or with an error.

    Not a ``threading.Barrier``: its abort also hits ranks that a full barrier has released but that did not wake yet,
    so which ranks see a result would depend on the scheduler.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._condition = threading.Condition()
        self._posted: dict[int, tuple[str, Int64s | Float64s]] = {}
        self._delivered: list[tuple[str, Int64s | Float64s]] = []
        self._round = 0
        self._stopped = False

    def exchange(self, rank: int, call: str, values: Numbers) -> list[Numbers]:
        """The arrays of all ranks in rank order; they are shared, so nobody may write to them."""
        with self._condition:
            mine = self._round
            self._posted[rank] = (call, values)
            if len(self._posted) == self.size:
                self._deliver()
            self._condition.wait_for(lambda: self._round > mine or self._stopped)
            if self._round == mine:
                raise _Stopped(f"rank {rank} ended at {call}: another rank did")
            delivered = self._delivered
        calls = [other for other, _ in delivered]
        if len(set(calls)) > 1:
            named = ", ".join(f"rank {other}: {text}" for other, text in enumerate(calls))
            raise GroupError(f"the ranks made different calls: {named}")
        return [array for _, array in delivered]  # type: ignore[misc]  # one call, one dtype

    def stop(self) -> None:
        """End all ranks that wait, and those that come later."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

    def _deliver(self) -> None:
        self._delivered = [self._posted[rank] for rank in range(self.size)]
        self._posted = {}
        self._round += 1
        self._condition.notify_all()


class _LocalRank:
    """One rank of a ``LocalGroup``."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self._rank = rank
        self._meeting = meeting

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._meeting.size

    def all_gather(self, values: Numbers) -> Numbers:
        return np.stack(self._exchange("all_gather", values))

    def broadcast(self, values: Numbers, source: int) -> Numbers:
        return self._exchange(f"broadcast from {source}", values)[source].copy()

    def _exchange(self, call: str, values: Numbers) -> list[Numbers]:
        if values.dtype not in (np.int64, np.float64):
            raise TypeError(f"{call} of {values.dtype}; ranks exchange int64 and float64 only")
        call = f"{call} {values.dtype}{list(values.shape)}"
        return self._meeting.exchange(self._rank, call, values.copy())


def split_sum(group: Group, part: Float64s) -> float:
    """Sum of a finite vector that is split over the ranks: bit for bit ``np.concatenate(parts).sum()``.

    The tree of the pairwise sum depends on the length alone. A rank adds the subtrees that lie in its part; leaves
    that a boundary cuts travel value by value, at most 128 for each boundary. Two collectives.

    Args:
        part: float64[n] of this rank; n may differ between ranks and be 0.
    """
    sizes = group.all_gather(np.array([part.size])).ravel().tolist()
    bounds = [0, *accumulate(sizes)]
    pieces = list(_pieces(0, bounds[-1], bounds))
    mine = range(bounds[group.rank], bounds[group.rank + 1])
    sums = np.zeros(len(pieces))
    for place, (start, stop) in enumerate(pieces):
        if start in mine:
            sums[place] = part[start - mine.start : stop - mine.start].sum()
    # Each piece has one owner and is zero elsewhere, so this addition selects and does not round.
    selected = group.all_gather(sums).sum(axis=0).tolist()
    return _add(0, bounds[-1], bounds, iter(selected))


def _pieces(start: int, stop: int, bounds: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of the summation tree that no bound cuts, left to right; a leaf that is cut falls into single values."""
    if not _cut(start, stop, bounds):
        yield start, stop
    elif stop - start <= _LEAF:
        yield from ((place, place + 1) for place in range(start, stop))
    else:
        middle = _middle(start, stop)
        yield from _pieces(start, middle, bounds)
        yield from _pieces(middle, stop, bounds)


def _add(start: int, stop: int, bounds: Sequence[int], pieces: Iterator[float]) -> float:
    """Put the sums of ``_pieces`` together again."""
    if not _cut(start, stop, bounds):
        return next(pieces)
    if stop - start <= _LEAF:
        return float(np.fromiter(pieces, dtype=np.float64, count=stop - start).sum())
    middle = _middle(start, stop)
    left = _add(start, middle, bounds, pieces)
    return left + _add(middle, stop, bounds, pieces)


def _cut(start: int, stop: int, bounds: Sequence[int]) -> bool:
    return any(start < bound < stop for bound in bounds)


def _middle(start: int, stop: int) -> int:
    half = (stop - start) // 2
    return start + half - half % _UNROLL


def locate(totals: Sequence[int], chosen: int) -> tuple[int, int]:
    """The rank that holds unit ``chosen`` of a mass that is split over the ranks, and the unit within its part.

    One integer serves both choices: chosen < mass of rank 0 means rank 0, else subtract and go on. The strict test
    never reaches a rank of mass zero.

    Args:
        totals: nonnegative mass of each rank.
        chosen: in [0, sum of totals).

    Raises:
        ValueError: ``chosen`` lies outside.
    """
    rest = chosen
    for rank, total in enumerate(totals):
        if 0 <= rest < total:
            return rank, rest
        rest -= total
    raise ValueError(f"unit {chosen} is outside a mass of {sum(totals)}")
