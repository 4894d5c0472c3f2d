"""The C kernels as functions on arrays; each one may decline, and then numpy does the work.

Purpose: check types, shapes and bounds, make room for outputs and scratch, call, and hand back arrays.

Invariants:

- ``None`` means "not here": no library, arrays that the kernels do not take, or input that they refuse. The caller
  then runs the numpy code, which computes the same or says what is wrong. So there is one set of error messages.
- Every size that the C sources ask their caller for is established here, before the call.
- Outputs are fresh memory that nothing else holds.

Called by ``dspark.exponential``, ``dspark.apportionment``, ``dspark.dyadic``, ``dspark.dense``,
``dspark.processors`` and ``dspark.block_verification`` only. It raises nothing of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark import native

Array = NDArray[Any]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Uint64s = NDArray[np.uint64]

# GROUP of rows.c, which refuses when this one is too small.
_GROUP = 32
_LONGEST = 2**31 - 1
_LARGEST_MASS = 2**29
_LARGEST_WEIGHT = 2**60


def exponentiate(values: Array) -> bool:
    """Replace values <= 0, float64 of any shape, by their exponentials; False when numpy has to do it."""
    library = native.choice().library
    if library is None or values.dtype != np.float64 or not values.flags.carray:
        return False
    return not library.dspark_exponentials(_at(values), values.size)


def target_row(logits: Array, temperature: float) -> Int64s | None:
    """Tickets int64[n], in all 2**60, of logits float32[n] at a temperature > 0; ``-inf`` is a removed token."""
    library = native.choice().library
    if library is None or logits.dtype != np.float32 or logits.ndim != 1 or not 1 <= logits.size <= _LONGEST:
        return None
    logits = _plain(logits)
    tickets, scratch = np.empty(logits.size, np.int64), np.empty(logits.size, np.float32)
    refused = library.dspark_target_row(_at(logits), logits.size, temperature, _at(tickets), _at(scratch))
    return None if refused else tickets


def block_shares(tickets: Int64s, ids: Int32s, counts: Int64s, weight: int) -> Uint64s | None:
    """What a prefix of this weight keeps by going on to each supported token, and behind the last one the sum.

    uint64[entries + 1, 2], the lower word first.
    """
    library = native.choice().library
    fits = tickets.dtype == counts.dtype == np.int64 and ids.dtype == np.int32
    if library is None or not (fits and 0 <= weight <= _LARGEST_WEIGHT):
        return None
    tickets, ids, counts = _plain(tickets), _plain(ids), _plain(counts)
    shares = np.empty((ids.size + 1, 2), np.uint64)
    refused = library.dspark_block_shares(
        _at(tickets), tickets.size, _at(ids), _at(counts), ids.size, weight, _at(shares)
    )
    return None if refused else shares


def top(values: Array, wanted: int) -> tuple[Int64s, Int64s] | None:
    """Of values float32[rows, n]: chosen int64[rows, wanted] ascending, and found int64[rows], how many are set.

    Declines when ``wanted`` is more than about a thirtieth of n: there numpy is as fast.
    """
    library = native.choice().library
    rows, length = values.shape
    if library is None or values.dtype != np.float32 or not 1 <= wanted <= length // (_GROUP + 1):
        return None
    if length > _LONGEST:
        return None
    room = max(length // _GROUP, wanted * (_GROUP + 1))
    values, scratch = _plain(values), np.empty(3 * room, np.uint64)
    chosen, found = np.zeros((rows, wanted), np.int64), np.empty(rows, np.int64)
    refused = library.dspark_top_rows(
        _at(values), rows, length, wanted, _at(scratch), room, _at(chosen), _at(found)
    )
    return None if refused else (chosen, found)


def allocate(weights: Array, mass: int) -> Int64s | None:
    """Counts int64[rows, n] of normalised weights float64[rows, n]."""
    library = native.choice().library
    rows, length = weights.shape
    if library is None or weights.dtype != np.float64:
        return None
    if not (1 <= length <= _LONGEST and 1 <= mass <= _LARGEST_MASS):
        return None
    weights, counts = _plain(weights), np.empty((rows, length), np.int64)
    keys, places = np.empty(length, np.uint64), np.empty(length, np.int32)
    refused = library.dspark_allocate_rows(
        _at(weights), rows, length, mass, _at(counts), _at(keys), _at(places)
    )
    return None if refused else counts


def drop_zeros(counts: Int64s) -> tuple[Int32s, Int64s] | None:
    """Places int32[n] and values int64[n] of the nonzero counts int64[length]; ``counts`` is consumed."""
    library = native.choice().library
    if library is None or not 1 <= counts.size <= _LONGEST:
        return None
    counts, places = _plain(counts), np.empty(counts.size, np.int32)
    kept = library.dspark_drop_zeros(_at(counts), counts.size, _at(places))
    return places[:kept], counts[:kept]


def sparse_reply(
    tokens: Int32s, entries: Int32s, ids: Int32s, q: Array, vocab: int
) -> tuple[Int32s, Int64s] | None:
    """Copies of ids and counts [depth, support] of a reply without fault; shapes and types are already checked."""
    library = native.choice().library
    if library is None:
        return None
    depth, support = ids.shape
    tokens, entries, ids, q = _plain(tokens), _plain(entries), _plain(ids), _plain(q)
    ids_out, counts_out = np.empty((depth, support), np.int32), np.empty((depth, support), np.int64)
    refused = library.dspark_sparse_reply(
        _at(tokens), _at(entries), _at(ids), _at(q), depth, support, vocab, _at(ids_out), _at(counts_out)
    )
    return None if refused else (ids_out, counts_out)


def dense_row(q: Array, vocab: int, token: int) -> tuple[Int32s, Int64s] | None:
    """Ids int32[n] and counts int64[n] of one faultless dense row q float32[width], vocab <= width."""
    library = native.choice().library
    if library is None or not 1 <= vocab <= q.size <= _LONGEST:
        return None
    q, ids, counts = _plain(q), np.empty(vocab, np.int32), np.empty(vocab, np.int64)
    kept = library.dspark_dense_row(_at(q), q.size, vocab, token, _at(ids), _at(counts))
    return None if kept < 0 else (ids[:kept], counts[:kept])


def write_dense_row(ids: Int32s, counts: Int64s, vocab: int, q_out: Array) -> bool:
    """Write one dense row into q_out float32[width], vocab <= width; False when numpy has to do it."""
    library = native.choice().library
    if library is None or not (q_out.flags.carray and vocab <= q_out.size):
        return False
    ids, counts = _plain(ids), _plain(counts)
    refused = library.dspark_write_dense_row(_at(ids), _at(counts), ids.size, vocab, _at(q_out), q_out.size)
    return not refused


def draw(counts: Int64s, uniform: int) -> int | None:
    """The first place whose cumulative count is above ``uniform``."""
    library = native.choice().library
    if library is None:
        return None
    counts = _plain(counts)
    place = int(library.dspark_draw(_at(counts), counts.size, uniform))
    return None if place < 0 else place


def _plain(array: Array) -> Array:
    """The array itself, or a copy, so that C may walk it: contiguous and aligned."""
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else array.copy()


def _at(array: Array) -> int:
    address: int = array.ctypes.data
    return address
