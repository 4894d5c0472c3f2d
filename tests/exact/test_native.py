"""The C kernels against the numpy code they stand in for: equal bits and equal refusals, on every input."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from dspark import native
from dspark.apportionment import allocate_rows, softmax64, top_indices_rows
from dspark.block_verification import Branch
from dspark.dense import dense_row, pack_dense_rows, validate_dense_reply
from dspark.dyadic import MASS, Row, RowError, draw, pack_rows, sparse_rows, validate_reply
from dspark.exponential import exponentiate
from dspark.native import kernels
from dspark.processors import LogitsError, SamplingPolicy, process, target_row
from dspark.tickets import STANDARD, TOTAL, TicketError, one_hot_tickets, target_tickets

from .compiler import COMPILER, compiled

NUMPY = native.Choice(None, "a test")


@pytest.fixture(scope="module", params=["this CPU", "every CPU"], autouse=True)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[native.Choice]:
    """Built here from the source, without a warning: with the clones for newer CPUs, and without them."""
    if COMPILER is None:
        pytest.skip("no C compiler")
    options = [] if request.param == "this CPU" else ["-DDSPARK_NO_CLONES"]
    path = compiled(tmp_path_factory.mktemp("native"), *options)
    chosen = native.Choice(native.open_library(path), request.param)
    with native.using(chosen):
        yield chosen


def outcome(call: Callable[..., object], *arguments: object) -> object:
    """What a call gives in bytes, or the refusal with its code and place."""
    try:
        return _frozen(call(*arguments))
    except (RowError, LogitsError, TicketError) as error:
        return str(error)


def _frozen(value: object) -> object:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, Row):
        return _frozen([value.ids, value.counts])
    if isinstance(value, list | tuple):
        return [_frozen(item) for item in value]
    return value


def same_both_ways(call: Callable[..., object], *arguments: object) -> object:
    """The outcome of a call, after checking that numpy gives the same one."""
    here = outcome(call, *arguments)
    with native.using(NUMPY):
        assert outcome(call, *arguments) == here
    return here


# --- allocation ----------------------------------------------------------------------------------

LENGTHS = [1, 2, 3, 31, 32, 255, 256, 257, 1023, 1024, 1025, 1500, 5000, 49_152, 129_280]


def weights_of(length: int) -> Iterator[np.ndarray]:
    """Rows of every shape that has ever mattered: flat, peaked, tied, with zeros of both signs, nearly empty."""
    rng = np.random.default_rng(length)
    yield np.full(length, 1 / length)
    for spread in (0.1, 1, 6, 40):
        yield softmax64(rng.standard_normal(length) * spread)
    yield softmax64(rng.integers(-3, 3, length).astype(np.float64))
    peaked = rng.standard_normal(length) * 0.1
    peaked[length // 2] = 17
    yield softmax64(peaked)
    one_hot = np.full(length, -0.0)
    one_hot[length // 3] = 1.0
    yield one_hot
    minus = np.full(length, -0.0)
    minus[::2] = 1 / len(minus[::2])
    yield minus
    tiny = np.full(length, 5e-324)
    tiny[-1] = 1.0
    yield tiny
    halves = np.zeros(length)
    halves[: length // 2 * 2] = 1 / max(length // 2 * 2, 1)
    yield halves if length > 1 else np.ones(1)


@pytest.mark.parametrize("length", LENGTHS)
def test_counts_are_those_of_numpy(length: int) -> None:
    for weights in weights_of(length):
        for mass in (MASS, 1, 7, 16, 2**29) if length < 2000 else (MASS,):
            same_both_ways(allocate_rows, weights[np.newaxis], mass)
        assert kernels.allocate(weights[np.newaxis], MASS) is not None


def test_batches_of_weights_are_those_of_numpy() -> None:
    rng = np.random.default_rng(4)
    for rows, length in [(1, 16), (20, 32), (33, 256), (3, 3000)]:
        weights = np.stack([softmax64(rng.standard_normal(length) * 3) for _ in range(rows)])
        assert kernels.allocate(weights, MASS) is not None
        same_both_ways(allocate_rows, weights)


@pytest.mark.parametrize("length", [2, 40, 1024, 3000])
def test_bad_weights_are_refused_as_numpy_refuses_them(length: int) -> None:
    good = softmax64(np.random.default_rng(length).standard_normal(length))
    for value in (np.nan, np.inf, -np.inf, -1e-9, 1.0, 3.0, 1e300, -1e300):
        for place in {0, length // 2, length - 1}:
            bad = good.copy()
            bad[place] = value
            assert isinstance(same_both_ways(allocate_rows, bad[np.newaxis]), str)
    for bad in (np.zeros(length), good * 2, good / 2):
        assert isinstance(same_both_ways(allocate_rows, bad[np.newaxis]), str)


def test_the_leftover_test_is_sharp_in_both() -> None:
    """R = 1 with one remainder is a row; R = 1 without any is none."""
    assert kernels.allocate(np.array([[0.5, 0.5 - 2.0**-25]]), MASS) is not None
    assert kernels.allocate(np.array([[0.5, 0.5 - 2.0**-24]]), MASS) is None
    assert kernels.allocate(np.array([[0.5, 0.5 + 2.0**-24]]), MASS) is None


def test_what_the_kernels_do_not_take_is_left_to_numpy() -> None:
    weights = np.full((1, 4), 0.25)
    assert kernels.allocate(weights.astype(np.float32), MASS) is None
    assert kernels.allocate(weights, 2**29 + 1) is None
    assert kernels.allocate(np.zeros((1, 0)), MASS) is None
    assert kernels.top(np.zeros((1, 100)), 1) is None
    assert kernels.top(np.zeros((1, 100), np.float32), 0) is None
    assert kernels.top(np.zeros((1, 100), np.float32), 4) is None
    assert allocate_rows(weights, 2**40).tolist() == [[2**38] * 4]
    with native.using(NUMPY):
        assert kernels.allocate(weights, MASS) is None


# --- target rows -----------------------------------------------------------------------------------------

TEMPERATURES = [1.0, 0.7, 1.9, 1e-3, 1e-300, 5e-324, 1e300]


def logits_of(length: int) -> Iterator[np.ndarray]:
    """Flat, peaked, tied and extreme rows; weights that tie where logits do not; each also with removed tokens."""
    rng = np.random.default_rng(length)
    normal = rng.standard_normal(length).astype(np.float32)
    rows = [normal * spread for spread in np.float32([0, 1e-20, 1e-8, 0.1, 3, 40, 1e3])]
    rows += [rng.integers(-3, 3, length).astype(np.float32), np.sort(normal), np.sort(normal)[::-1] * 20]
    rows += [np.where(rng.random(length) < 0.5, np.float32(-0.0), np.float32(0.0))]
    rows += [np.float32(3e38) * rng.choice(np.float32([-1, 1]), length), (normal * 1e-42).astype(np.float32)]
    for row in rows:
        yield row
        for share in (0.1, 0.9, 1.0):
            masked = np.where(rng.random(length) < share, np.float32(-np.inf), row)
            masked[rng.integers(length)] = row[0]
            yield masked


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 127, 128, 129, 136, 255, 257, 1000, 2047, 2048, 2049, 5001])
def test_target_rows_are_those_of_numpy(length: int) -> None:
    for index, logits in enumerate(logits_of(length)):
        for temperature in TEMPERATURES[index % 2 :: 2]:
            tickets = kernels.target_row(logits, temperature)
            assert tickets is not None
            with native.using(NUMPY):
                assert tickets.tolist() == target_row(logits, SamplingPolicy(temperature)).tolist()
            assert int(tickets.sum()) == TOTAL


@pytest.mark.parametrize("vocab", [49_152, 50_257, 129_280])
def test_target_rows_of_real_vocabularies_are_those_of_numpy(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal(vocab) * 2.5).astype(np.float32)
    masked = np.where(rng.random(vocab) < 0.5, logits, -np.inf).astype(np.float32)
    for row, temperature in [(logits, 1.0), (logits, 0.8), (masked, 1.3)]:
        assert kernels.target_row(row, temperature) is not None
        same_both_ways(target_row, row, SamplingPolicy(temperature))
        whole = target_row(row, SamplingPolicy(temperature, top_k=vocab))
        assert target_row(row, SamplingPolicy(temperature)).tobytes() == whole.tobytes()
        assert whole.tobytes() == target_tickets(process(row, SamplingPolicy(temperature))).tobytes()


@pytest.mark.parametrize("place", [0, 1, 7, 8, 31, 62])
def test_rows_without_a_law_are_left_to_numpy_which_says_why(place: int) -> None:
    words = {np.nan: "NaN", np.inf: "inf"}
    for fault in (np.nan, -np.nan, np.inf):
        logits = np.zeros(63, np.float32)
        logits[:40] = -np.inf
        logits[place] = fault
        assert kernels.target_row(logits, 1.0) is None
        assert words.get(fault, "NaN") in str(same_both_ways(target_row, logits, SamplingPolicy()))
    assert "all tokens" in str(same_both_ways(target_row, np.full(63, -np.inf, np.float32), SamplingPolicy()))
    assert kernels.target_row(np.full(63, -np.inf, np.float32), 1.0) is None


def test_target_rows_that_the_kernel_does_not_take() -> None:
    logits = np.zeros(8, np.float32)
    assert kernels.target_row(logits, 1.0) is not None
    assert kernels.target_row(logits, 0.0) is None, "0 / 0 is no weight"
    assert kernels.target_row(logits, np.nan) is None
    assert kernels.target_row(logits.astype(np.float64), 1.0) is None
    assert kernels.target_row(logits[:0], 1.0) is None
    assert kernels.target_row(np.zeros((2, 4), np.float32), 1.0) is None
    strided = np.zeros(16, np.float32)
    strided[::2] = np.arange(8)
    read = kernels.target_row(strided[::2], 1.0)
    assert read is not None
    assert read.tolist() == target_row(np.arange(8, dtype=np.float32), SamplingPolicy()).tolist()
    with native.using(NUMPY):
        assert kernels.target_row(logits, 1.0) is None


def test_target_rows_do_not_change_the_logits() -> None:
    for logits in logits_of(300):
        before = logits.tobytes()
        kernels.target_row(logits, 0.9)
        assert logits.tobytes() == before


def test_exponentials_are_those_of_numpy_in_place() -> None:
    rng = np.random.default_rng(6)
    for length in (1, 3, 4, 5, 1001, 200_000):
        values = -rng.random(length) * rng.choice([1e-6, 1, 40, 800], length)
        values[0] = -np.inf
        here = values.copy()
        assert kernels.exponentiate(here)
        with native.using(NUMPY):
            exponentiate(values)
        assert here.tobytes() == values.tobytes()
    assert not kernels.exponentiate(values.astype(np.float32))
    assert not kernels.exponentiate(values[::2])


def test_exponentials_add_their_terms_in_the_order_of_numpy() -> None:
    """Another order of the smallest terms changes one result in a million, and most where the rest is largest."""
    values = -np.random.default_rng(7).uniform(0.32, 0.3465, 4_000_000)
    here = values.copy()
    assert kernels.exponentiate(here)
    with native.using(NUMPY):
        exponentiate(values)
    assert here.tobytes() == values.tobytes()


def test_exponentials_of_memory_that_cannot_be_written_are_left_to_numpy() -> None:
    values = np.zeros(3)
    assert kernels.exponentiate(values)
    values.setflags(write=False)
    assert not kernels.exponentiate(values)


# --- block verification ----------------------------------------------------------------------------------


def branches_of(seed: int) -> Iterator[Branch]:
    """Weights at both ends, and rows under, over and far from their target."""
    rng = np.random.default_rng(seed)
    vocab = int(rng.choice([2, 40, 900]))
    logits = (rng.standard_normal(vocab) * rng.choice([0.1, 3, 30])).astype(np.float32)
    draft = (logits + rng.standard_normal(vocab) * rng.choice([0, 1, 9])).astype(np.float32)
    tickets, (row,) = target_row(logits, SamplingPolicy()), sparse_rows(draft[np.newaxis], None, [1.0], 256)
    for weight in (0, 1, 2**36, int(rng.integers(2**60)), TOTAL - 1, TOTAL):
        yield Branch(weight, tickets, row, STANDARD)
        yield Branch(weight, one_hot_tickets(vocab, int(row.ids[-1])), row, STANDARD)


@pytest.mark.parametrize("seed", range(8))
def test_what_a_prefix_keeps_by_going_on_is_what_python_says(seed: int) -> None:
    for branch in branches_of(seed):
        found = kernels.block_shares(branch.tickets, branch.row.ids, branch.row.counts, branch.weight)
        assert found is not None
        words = [int(low) | int(high) << 64 for low, high in found.tolist()]
        with native.using(NUMPY):
            judge = Branch(branch.weight, branch.tickets, branch.row, STANDARD)
            assert words == [*judge._shares, judge._going_on]
        assert (branch._shares, branch._going_on) == (judge._shares, judge._going_on)
        if branch._going_on < branch.weight * TOTAL:
            for coin in (0, 2**63, 2**64 - 1):
                assert branch.correction(coin) == judge.correction(coin)


def test_shares_of_what_is_no_row_are_left_to_python() -> None:
    tickets, ids, counts = one_hot_tickets(5, 4), np.array([1, 4], np.int32), np.array([3, MASS - 3])
    assert kernels.block_shares(tickets, ids, counts, TOTAL) is not None
    for weight in (-1, TOTAL + 1, 2**64):
        assert kernels.block_shares(tickets, ids, counts, weight) is None
    for wrong in ([4, 1], [1, 1], [-1, 4], [1, 5]):
        assert kernels.block_shares(tickets, np.array(wrong, np.int32), counts, TOTAL) is None
    for wrong in ([0, MASS], [1, -1], [1, MASS + 1]):
        assert kernels.block_shares(tickets, ids, np.array(wrong), TOTAL) is None
    for place, value in ((1, 1), (4, -1), (4, TOTAL + 1)):
        changed = tickets.copy()
        changed[place] = value
        assert kernels.block_shares(changed, ids, counts, TOTAL) is None
    assert kernels.block_shares(tickets, ids.astype(np.int64), counts, TOTAL) is None
    assert kernels.block_shares(tickets, ids, counts.astype(np.int32), TOTAL) is None
    assert kernels.block_shares(tickets.astype(np.uint64), ids, counts, TOTAL) is None


# --- selection -----------------------------------------------------------------------------------


def values_of(length: int) -> Iterator[np.ndarray]:
    """Values in every order, with ties of every width, both zeros, infinities and masked tokens."""
    rng = np.random.default_rng(length)
    normal = rng.standard_normal(length).astype(np.float32)
    yield normal
    yield np.sort(normal)
    yield np.sort(normal)[::-1]
    yield np.zeros(length, np.float32)
    yield rng.integers(-2, 3, length).astype(np.float32)
    yield np.where(rng.random(length) < 0.5, np.float32(-0.0), np.float32(0.0))
    yield np.where(rng.random(length) < 0.9, -np.inf, normal).astype(np.float32)
    almost = np.full(length, -np.inf, np.float32)
    almost[[length // 2, length - 1]] = [1, -1]
    yield almost
    yield np.full(length, -np.inf, np.float32)
    extremes = normal.copy()
    extremes[:: max(length // 7, 1)] = np.inf
    yield extremes
    yield (rng.standard_normal(length) * 1e-42).astype(np.float32)


@pytest.mark.parametrize("length", [33, 64, 65, 1000, 2111, 12_288, 49_152])
def test_supports_are_those_of_numpy(length: int) -> None:
    for wanted in {1, 2, 16, 32, 64, 256, length // 33}:
        for values in values_of(length):
            same_both_ways(top_indices_rows, values[np.newaxis], wanted)
    assert kernels.top(np.zeros((1, length), np.float32), length // 33) is not None


def test_supports_of_a_real_vocabulary_are_those_of_numpy() -> None:
    batch = np.stack(list(values_of(129_280)))
    for wanted in (16, 32, 64, 256):
        assert kernels.top(batch, wanted) is not None
        same_both_ways(top_indices_rows, batch, wanted)


@pytest.mark.parametrize("place", [0, 31, 32, 95, 96, 98])
def test_selection_declines_nan_wherever_it_is(place: int) -> None:
    values = np.zeros((2, 99), np.float32)
    assert kernels.top(values, 2) is not None
    for nan in (np.nan, -np.nan):
        values[1, place] = nan
        assert kernels.top(values, 2) is None


# --- whole rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("support", [1, 16, 32, 64, 256])
def test_sparse_rows_are_those_of_numpy(support: int) -> None:
    rng = np.random.default_rng(support)
    batch = (rng.standard_normal((7, 20_000)) * [[0.01], [1], [3], [9], [30], [100], [1000]]).astype(np.float32)
    temperatures = [1.0, 0.5, 1.0, 2.0, 0.1, 1.0, 0.0]
    same_both_ways(sparse_rows, batch, None, temperatures, support)


@pytest.mark.parametrize("vocab", [1, 256, 257, 5000, 129_280])
def test_dense_rows_are_those_of_numpy(vocab: int) -> None:
    for spread in (0.0, 1.0, 5.0, 60.0):
        logits = (np.random.default_rng(vocab).standard_normal(vocab) * spread).astype(np.float32)
        same_both_ways(dense_row, logits, None, 1.0, vocab)
        same_both_ways(_packed, dense_row(logits, None, 1.0, vocab), vocab)


def test_zeros_are_dropped_in_order() -> None:
    counts = np.array([0, 5, 0, 0, 2, 9, 0], np.int64)
    kept = kernels.drop_zeros(counts.copy())
    assert kept is not None
    assert [array.tolist() for array in kept] == [[1, 4, 5], [5, 2, 9]]


def _packed(row: Row, vocab: int) -> np.ndarray:
    q = np.full((1, vocab + 3), 5, np.float32)
    pack_dense_rows([row], vocab, q)
    return q


def test_draws_are_those_of_numpy_at_every_edge() -> None:
    row = dense_row((np.random.default_rng(9).standard_normal(3000) * 2).astype(np.float32), None, 1.0, 3000)
    edges = row.counts.cumsum()
    uniforms = {int(u) for edge in (0, *edges.tolist()) for u in (edge - 1, edge, edge + 1) if 0 <= u < MASS}
    places = edges.searchsorted(sorted(uniforms), side="right")
    assert [draw(row, u) for u in sorted(uniforms)] == row.ids[places].tolist()
    assert kernels.draw(row.counts, MASS - 1) == len(row) - 1
    assert kernels.draw(row.counts, MASS) is None, "beyond the mass nothing may be hit"


# --- replies -------------------------------------------------------------------------------------

DEPTH, SUPPORT, VOCAB = 4, 9, 60


def damaged_words(rng: np.random.Generator, words: np.ndarray, edges: list[int]) -> None:
    """Change one to three 32-bit words of an array in place: a bit, a neighbour, a copy, or an edge pattern."""
    flat = words.reshape(-1).view(np.uint32)
    for _ in range(int(rng.integers(1, 4))):
        place = int(rng.integers(flat.size))
        kind = int(rng.integers(4))
        if kind == 0:
            flat[place] ^= np.uint32(1 << int(rng.integers(32)))
        elif kind == 1:
            flat[place] = (int(flat[place]) + int(rng.choice([1, -1]))) % 2**32
        elif kind == 2:
            flat[place] = flat[int(rng.integers(flat.size))]
        else:
            flat[place] = np.uint32(rng.choice(edges))


EDGES = [0, 1, 0x80000000, 0x007FFFFF, 0x00800000, 0x337FFFFF, 0x33800000, 0x33800001, 0x3F7FFFFF, 0x3F800000,
         0x3F800001, 0x7F800000, 0x7FC00000, 0xFF800000, 0xFFC00000, 0xBF800000, 59, 60, 0xFFFFFFFF]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_damaged_sparse_replies_have_the_outcome_of_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seen: set[str] = set()
    for _ in range(500):
        rows = sparse_rows((rng.standard_normal((DEPTH, VOCAB)) * 4).astype(np.float32), None, [1.0] * DEPTH, 6)
        ids, q = np.zeros((DEPTH, SUPPORT), np.int32), np.zeros((DEPTH, SUPPORT), np.float32)
        entries = np.zeros(DEPTH, np.int32)
        pack_rows(rows, SUPPORT, ids, q, entries)
        tokens = np.array([draw(row, int(rng.integers(MASS))) for row in rows], np.int32)
        damaged_words(rng, (tokens, entries, ids, q)[int(rng.integers(4))], EDGES)
        result = same_both_ways(validate_reply, tokens, entries, ids, q, VOCAB, DEPTH, SUPPORT)
        here = kernels.sparse_reply(tokens, entries, ids, q, VOCAB)
        assert (here is None) == isinstance(result, str), "the kernel itself judges, and rightly"
        seen.add(result.split(":")[0] if isinstance(result, str) else "accepted")
    assert {"accepted", "entries", "padding", "zero_count", "wrong_sum", "id_order", "zero_at_token"} <= seen
    assert {"negative_zero", "not_finite", "over_one", "subnormal", "not_dyadic", "id_range"} <= seen


@pytest.mark.parametrize("seed", range(4))
def test_damaged_dense_replies_have_the_outcome_of_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seen: set[str] = set()
    for _ in range(300):
        vocab = int(rng.choice([5, 255, 256, 300]))
        rows = [dense_row((rng.standard_normal(vocab) * 4).astype(np.float32), None, 1.0, vocab) for _ in range(2)]
        q = np.zeros((2, vocab + 1 + int(rng.integers(9))), np.float32)
        pack_dense_rows(rows, vocab, q)
        tokens = np.array([draw(row, int(rng.integers(MASS))) for row in rows], np.int32)
        part = (tokens, q, q[1, vocab:])[int(rng.integers(3))]
        damaged_words(rng, part, EDGES)
        result = same_both_ways(validate_dense_reply, tokens, q, vocab, 2)
        here = [kernels.dense_row(row_q, vocab, token) for row_q, token in zip(q, tokens.tolist(), strict=True)]
        assert (None in here) == isinstance(result, str), "the kernel itself judges, and rightly"
        seen.add(result.split(":")[0] if isinstance(result, str) else "accepted")
    assert {"accepted", "padding", "wrong_sum", "zero_at_token", "not_finite", "not_dyadic", "over_one"} <= seen


def test_a_thread_that_flushes_subnormals_to_zero_gets_the_same_refusals() -> None:
    torch.set_flush_denormal(True)
    try:
        for pattern in (1, 0x007FFFFF):
            q = np.array([[1, 0]], np.float32)
            q.view(np.uint32)[0, 1] = pattern
            zero, ids = np.zeros(1, np.int32), np.array([[0, 0]], np.int32)
            assert kernels.dense_row(q[0], 2, 0) is None
            assert kernels.sparse_reply(zero, zero + 1, ids, q, 9) is None
    finally:
        torch.set_flush_denormal(False)


def test_the_kernels_themselves_read_strided_and_unaligned_memory() -> None:
    """They get a copy; what numpy would mend afterwards could already have read beyond an array."""
    q = np.zeros(6, np.float32)
    q[[1, 4]] = 0.25, 0.75
    spread = np.full(12, 7, np.float32)
    spread[::2] = q
    unaligned = np.frombuffer(b"x" + q.tobytes(), np.float32, offset=1)
    for other in (q, spread[::2], unaligned):
        read = kernels.dense_row(other, 6, 4)
        assert read is not None
        assert [array.tolist() for array in read] == [[1, 4], [MASS // 4, 3 * MASS // 4]]
    weights = np.broadcast_to(np.array([[0.5], [0.25]]), (2, 2))[:1]
    counts = kernels.allocate(weights, 16)
    assert counts is not None
    assert counts.tolist() == [[8, 8]]


def test_every_bit_pattern_near_an_edge_is_judged_as_numpy_judges_it() -> None:
    """One value and what it lacks to one: around every power of two that FP32 has, of both signs."""
    steps = np.arange(-2, 3)
    patterns = (np.arange(512)[:, np.newaxis] * 2**23 + steps).ravel() % 2**32
    values = patterns.astype(np.uint32).view(np.float32)
    accepted = 0
    for value in values[:, np.newaxis]:
        rest = 1 - value if np.isfinite(value[0]) else value
        q = np.stack((value, rest), axis=1)
        accepted += not isinstance(same_both_ways(validate_dense_reply, np.array([1], np.int32), q, 2, 1), str)
    assert accepted > 25, "zero, and every power of two from a ticket to one half, leave the token a count"


def test_writing_refuses_ids_beyond_the_vocabulary() -> None:
    q = np.zeros(8, np.float32)
    counts = np.array([1], np.int64)
    assert kernels.write_dense_row(np.array([5], np.int32), counts, 6, q)
    assert not kernels.write_dense_row(np.array([6], np.int32), counts, 6, q)
    assert not kernels.write_dense_row(np.array([-1], np.int32), counts, 6, q)
    q.setflags(write=False)
    assert not kernels.write_dense_row(np.array([5], np.int32), counts, 6, q)
