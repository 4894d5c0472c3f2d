"""Every layout of a weight multiplies like the plain one, and its absence changes nothing but speed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

from dspark.models import linear, panels
from dspark.models.linear import Linear, packed_fp32_works
from dspark.models.target import Segment, TargetModel
from tests.models.conftest import Pair

needs_packed = pytest.mark.skipif(not packed_fp32_works(), reason="this CPU has no blocked fp32 product")


def sample(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "works", lambda: False)


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch, without_native: None) -> None:
    monkeypatch.setattr(linear, "packed_fp32_works", lambda: False)


@pytest.fixture
def probed_anew() -> Iterator[None]:
    packed_fp32_works.cache_clear()
    yield
    packed_fp32_works.cache_clear()


@needs_packed
@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize("shape", [(48, 64), (1, 64), (960, 576), (577, 33), (3, 1)])
@pytest.mark.parametrize("rows", [1, 2, 6, 17, 130])
def test_packed_equals_plain(shape: tuple[int, int], rows: int) -> None:
    weight, x = sample(*shape), sample(rows, shape[1], seed=1)
    product = Linear(weight)
    torch.testing.assert_close(product(x), F.linear(x, weight), rtol=1e-4, atol=1e-4)


@needs_packed
@pytest.mark.usefixtures("without_native")
def test_packed_takes_more_dimensions_no_rows_and_strides() -> None:
    weight = sample(24, 32)
    product = Linear(weight)
    for x in (sample(3, 5, 32), sample(0, 32), sample(32, 7).T, sample(4, 64)[:, ::2], sample(9, 32)[3:5]):
        torch.testing.assert_close(product(x), F.linear(x, weight), rtol=1e-4, atol=1e-4)


@needs_packed
@pytest.mark.usefixtures("without_native")
def test_packed_weight_is_a_copy() -> None:
    weight = sample(24, 32)
    product, before = Linear(weight), weight.clone()
    weight.zero_()
    x = sample(2, 32)
    torch.testing.assert_close(product(x), F.linear(x, before), rtol=1e-4, atol=1e-4)


def test_sizes_are_kept() -> None:
    product = Linear(sample(24, 32))
    assert (product.out_features, product.in_features) == (24, 32)


def test_bf16_takes_the_plain_product() -> None:
    weight, x = sample(24, 32).bfloat16(), sample(5, 32).bfloat16()
    product = Linear(weight)
    assert torch.equal(product(x), F.linear(x, weight))


@pytest.mark.usefixtures("unpacked")
def test_without_the_packed_layout_the_plain_product_is_used() -> None:
    weight, x = sample(24, 32), sample(5, 32)
    product = Linear(weight.T.contiguous().T)  # column-major: must not matter
    torch.testing.assert_close(product(x), F.linear(x, weight))


@pytest.mark.usefixtures("unpacked")
def test_a_whole_model_without_the_packed_layout(llama: Pair) -> None:
    tokens = list(range(20))
    plain = TargetModel(llama.source.config, dict(llama.source.weights()))
    logits = plain.forward(plain.new_cache(1, 32), [Segment(0, 0, tokens)]).logits
    torch.testing.assert_close(logits, llama.their_logits(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("probed_anew")
def test_the_probe_says_no_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert packed_fp32_works() is False


class _Operators:
    """torch.ops.mkldnn of another torch."""

    def __init__(self, product: object) -> None:
        self._linear_pointwise = product
        self._reorder_linear_weight = lambda weight: weight


def refuses(*arguments: object) -> torch.Tensor:
    raise RuntimeError("not implemented for this CPU")


def is_wrong(x: torch.Tensor, weight: torch.Tensor, *rest: object) -> torch.Tensor:
    return x @ weight.T + 0.01


@pytest.mark.usefixtures("probed_anew")
@pytest.mark.parametrize("product", [refuses, is_wrong])
def test_the_probe_says_no_to_an_operator_that_fails_or_lies(
    monkeypatch: pytest.MonkeyPatch, product: object
) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", _Operators(product))
    assert packed_fp32_works() is False


def test_the_choice_among_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native first, then oneDNN's layout, and neither for bf16."""
    chosen = []
    monkeypatch.setattr(panels, "PanelWeight", lambda w: chosen.append("native"))
    monkeypatch.setattr(linear, "_blocked", lambda w: chosen.append("onednn"))
    for native, blocked in [(True, True), (False, True), (False, False)]:
        monkeypatch.setattr(panels, "works", lambda native=native: native)
        monkeypatch.setattr(linear, "packed_fp32_works", lambda blocked=blocked: blocked)
        Linear(sample(4, 8))
        Linear(sample(4, 8).bfloat16())
    assert chosen == ["native", "onednn"]
