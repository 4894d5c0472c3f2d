"""The native attention: torch's values, the same bits for a row whatever its company, and nothing beyond its rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark.models import decode_attention
from dspark.models.config import from_hf
from dspark.models.decode_attention import MOST_ROWS, attend, fits
from dspark.models.decode_library import library
from dspark.models.target import KVCache, RaggedAttention, Segment
from dspark.proof.tiny_pair import hf_config

pytestmark = pytest.mark.skipif(library() is None, reason="the native library was not compiled")

LENGTH = 80
# (heads, kv heads, head dim): the embedded target's, one column group and a rest, a single lane group, wide heads.
HEADS = [(9, 3, 64), (4, 2, 72), (2, 1, 8), (3, 3, 16), (2, 1, 136)]


def sample(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def caches(kv_heads: int, dim: int, seed: int = 7) -> tuple[Tensor, Tensor]:
    return sample(kv_heads, LENGTH, dim, seed=seed), sample(kv_heads, LENGTH, dim, seed=seed + 1)


def plain(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """Row by row in FP64, from the definition."""
    rows, heads, dim = q.shape
    keys, values = keys.clone(), values.clone()
    keys[:, start : start + rows], values[:, start : start + rows] = k.transpose(0, 1), v.transpose(0, 1)
    out = torch.empty(rows, heads, dim, dtype=torch.float64)
    for r in range(rows):
        for h in range(heads):
            kv = h // (heads // keys.shape[0])
            seen = keys[kv, : start + r + 1].double()
            weights = torch.softmax(seen @ q[r, h].double() / dim**0.5, dim=0)
            out[r, h] = weights @ values[kv, : start + r + 1].double()
    return out.view(rows, heads * dim).float()


@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize(("rows", "start"), [(1, 0), (1, 41), (6, 0), (6, 37), (MOST_ROWS, 3), (5, LENGTH - 5)])
def test_equals_the_definition(shape: tuple[int, int, int], rows: int, start: int) -> None:
    heads, kv_heads, dim = shape
    q, k, v = (sample(rows, n, dim, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads)))
    keys, values = caches(kv_heads, dim)
    wanted = plain(q, k, v, keys, values, start)
    torch.testing.assert_close(attend(q, k, v, keys, values, start), wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("scale", [30.0, 1e3, 1e-3])
def test_sharp_and_flat_scores(scale: float) -> None:
    """Weights that underflow are zero, equal ones stay equal; nothing overflows."""
    q, k, v = sample(4, 4, 16, scale=scale), sample(4, 2, 16, seed=1), sample(4, 2, 16, seed=2)
    keys, values = caches(2, 16)
    wanted = plain(q, k, v, keys, values, 50)
    torch.testing.assert_close(attend(q, k, v, keys, values, 50), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", HEADS)
def test_a_row_does_not_depend_on_its_company(shape: tuple[int, int, int]) -> None:
    heads, kv_heads, dim = shape
    q, k, v = (sample(11, n, dim, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads)))
    keys, values = caches(kv_heads, dim)
    together = attend(q, k, v, keys.clone(), values.clone(), 20)
    threads = torch.get_num_threads()
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            stepwise_keys, stepwise_values = keys.clone(), values.clone()
            for first, last in [(0, 1), (1, 3), (3, 9), (9, 11)]:
                run = slice(first, last)
                out = attend(q[run], k[run], v[run], stepwise_keys, stepwise_values, 20 + first)
                assert torch.equal(out, together[run])
    finally:
        torch.set_num_threads(threads)


def test_only_its_own_positions_are_written_and_read() -> None:
    q, k, v = sample(3, 4, 16), sample(3, 2, 16, seed=1), sample(3, 2, 16, seed=2)
    keys, values = caches(2, 16)
    clean_keys, clean_values = keys.clone(), values.clone()
    clean = attend(q, k, v, clean_keys, clean_values, 30)
    keys[:, 33:], values[:, 33:] = float("nan"), float("inf")  # what a rejected draft left behind
    before = keys.clone(), values.clone()
    assert torch.equal(attend(q, k, v, keys, values, 30), clean)
    for cache, old, new in ((keys, before[0], k), (values, before[1], v)):
        assert torch.equal(cache[:, 30:33], new.transpose(0, 1))
        assert torch.equal(cache[:, :30], old[:, :30])
        assert torch.equal(cache[:, 33:].isnan(), old[:, 33:].isnan())


def test_a_row_that_is_not_a_number_stays_one_and_alone() -> None:
    q, k, v = sample(3, 4, 16), sample(3, 2, 16, seed=1), sample(3, 2, 16, seed=2)
    keys, values = caches(2, 16)
    clean = attend(q, k, v, keys.clone(), values.clone(), 30)
    q[1] = float("nan")
    dirty = attend(q, k, v, keys, values, 30)
    assert bool(dirty[1].isnan().all())
    assert torch.equal(dirty[[0, 2]], clean[[0, 2]])


def test_views_of_one_product_are_taken_as_they_are() -> None:
    rows = sample(5, 4 + 2 + 2, 16)
    q, k, v = rows[:, :4], rows[:, 4:6], rows[:, 6:]
    keys, values = caches(2, 16)
    wanted = attend(q.clone(), k.clone(), v.clone(), keys.clone(), values.clone(), 9)
    assert torch.equal(attend(q, k, v, keys.clone(), values.clone(), 9), wanted)
    crossed = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(attend(crossed, k, v, keys, values, 9), wanted)


def test_what_does_not_fit() -> None:
    keys, values = caches(2, 16)
    assert fits(1, keys, values)
    assert fits(MOST_ROWS, keys, values)
    assert not fits(MOST_ROWS + 1, keys, values)
    assert not fits(1, keys.bfloat16(), values)
    assert not fits(1, keys[:, ::2], values)
    assert not fits(1, *caches(2, 12))
    q, k = sample(2, 4, 16), sample(2, 2, 16)
    with pytest.raises(AssertionError, match="do not fit"):
        attend(q, k, k, keys, values, LENGTH - 1)


def test_torchs_kernel_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two paths of the target's attention are one function."""
    config = from_hf(hf_config())
    rows = sample(4, config.heads + 2 * config.kv_heads, config.head_dim)
    q, k, v = torch.split(rows, [config.heads, config.kv_heads, config.kv_heads], dim=1)
    outputs = []
    for native in (True, False):
        monkeypatch.setattr(decode_attention, "fits", lambda *a, native=native: native)
        cache = KVCache(config, 2, 32, torch.device("cpu"), torch.float32)
        cache.keys[:], cache.values[:] = sample(*cache.keys.shape, seed=3), sample(*cache.values.shape, seed=4)
        outputs.append(RaggedAttention(cache, [Segment(1, 9, [1, 2, 3, 4])])(0, q, k, v))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)
