"""Products in panels: right, the same bits for a row whatever its company, and no memory of the caller's."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
import torch
from torch.nn import functional as F

from dspark.models import panels
from dspark.models.decode_library import library
from dspark.models.panels import PanelWeight
from dspark.models.target import Segment, TargetModel
from tests.models.conftest import Pair

needs_native = pytest.mark.skipif(not panels.works(), reason="the native library was not compiled")
SHAPES = [(48, 64), (1, 64), (960, 576), (577, 33), (3, 1), (16, 5)]


def sample(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@needs_native
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 17, 130])
def test_equals_the_plain_product(shape: tuple[int, int], rows: int) -> None:
    weight, x = sample(*shape), sample(rows, shape[1], seed=1)
    torch.testing.assert_close(PanelWeight(weight)(x), F.linear(x, weight), rtol=1e-4, atol=1e-4)


@needs_native
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_does_not_depend_on_its_company(shape: tuple[int, int]) -> None:
    """Bit for bit: any number of rows, any place among them, any number of threads."""
    product, x = PanelWeight(sample(*shape)), sample(29, shape[1], seed=1)
    together = product(x)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, threads):
            torch.set_num_threads(count)
            for first, rows in [(0, 1), (28, 1), (3, 4), (7, 6), (2, 11), (1, 13), (0, 29)]:
                assert torch.equal(product(x[first : first + rows]), together[first : first + rows])
    finally:
        torch.set_num_threads(threads)


@needs_native
def test_more_dimensions_no_rows_and_strides() -> None:
    weight = sample(24, 32)
    product = PanelWeight(weight)
    for x in (sample(3, 5, 32), sample(0, 32), sample(32, 7).T, sample(4, 64)[:, ::2], sample(9, 32)[3:5], sample(32)):
        torch.testing.assert_close(product(x), F.linear(x, weight), rtol=1e-4, atol=1e-4)


@needs_native
def test_the_weight_is_a_copy() -> None:
    weight, x = sample(24, 32), sample(2, 32)
    product, before = PanelWeight(weight.T.contiguous().T), weight.clone()
    weight.zero_()
    torch.testing.assert_close(product(x), F.linear(x, before), rtol=1e-4, atol=1e-4)


@needs_native
def test_what_does_not_fit_is_refused_before_the_native_call() -> None:
    product = PanelWeight(sample(24, 32))
    for x in (sample(2, 31), sample(2, 33), sample(2, 32).double(), sample(2, 32).bfloat16()):
        with pytest.raises(ValueError, match="wanted float32"):
            product(x)


@needs_native
def test_not_a_number_stays_in_its_row() -> None:
    """One request's overflow must not reach another's row."""
    product, x = PanelWeight(sample(40, 32)), sample(5, 32, seed=1)
    clean = product(x)
    x[2, 7] = float("nan")
    dirty = product(x)
    assert bool(dirty[2].isnan().all())
    for row in (0, 1, 3, 4):
        assert torch.equal(dirty[row], clean[row])


@needs_native
def test_large_weights_are_aligned_to_huge_pages() -> None:
    product = PanelWeight(sample(1024, 1024))
    assert product._memory.data_ptr() % (1 << 21) == 0


@needs_native
def test_verify_rows_are_the_rows_of_single_steps(llama: Pair) -> None:
    """The target's logits of a verify block equal, bit for bit, those of one step at a time."""
    model = TargetModel(llama.source.config, dict(llama.source.weights()))
    tokens = list(range(20, 31))
    block, single = model.new_cache(1, 32), model.new_cache(1, 32)
    for cache in (block, single):
        model.forward(cache, [Segment(0, 0, tokens[:5])])
    together = model.forward(block, [Segment(0, 5, tokens[5:])]).logits
    for i, token in enumerate(tokens[5:]):
        alone = model.forward(single, [Segment(0, 5 + i, [token])]).logits
        assert torch.equal(alone[0], together[i]), f"row {i} differs by {(alone[0] - together[i]).abs().max()}"


def test_without_the_library_it_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "library", lambda: None)
    panels.works.cache_clear()
    try:
        assert panels.works() is False
    finally:
        panels.works.cache_clear()


@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("gcc") or os.environ.get("DSPARK_NATIVE") == "0",
    reason="no compiler was there to build the library",
)
def test_where_a_compiler_is_the_library_is_there() -> None:
    """Otherwise every test of the native kernels would be skipped without a sign."""
    assert library() is not None
    assert panels.works()
