"""The exponential function against exact arithmetic: how near, where it ends, and that C and numpy agree."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Context, Decimal

import numpy as np
import pytest

from dspark import native
from dspark.dyadic import Float64s
from dspark.exponential import LOWEST, exponentiate

NUMPY = native.Choice(None, "a test")
LN2 = float(np.log(2))


@pytest.fixture(scope="module", params=["numpy", "native"], autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Everything here holds for the numpy code and for the C kernel."""
    chosen = NUMPY if request.param == "numpy" else native.choice()
    if request.param == "native" and chosen.library is None:
        pytest.skip(chosen.reason)
    with native.using(chosen):
        yield request.param


def exponentials(values: Float64s | list[float]) -> Float64s:
    result = np.array(values, dtype=np.float64)
    exponentiate(result)
    return result


def arguments() -> Float64s:
    """Of every size; and around the multiples of ln(2) / 2, where the reduction is worst and where it changes."""
    rng = np.random.default_rng(0)
    edges = np.arange(-2042, 0)[:, np.newaxis] * (LN2 / 2) * (1 + np.arange(-2, 3) * 2.0**-52)
    spread = [-rng.random(1500) * 708, -rng.random(1500) * 2, -(10.0 ** rng.uniform(-300, 0, 500))]
    values = np.concatenate([edges.ravel(), *spread, [LOWEST, -5e-324]])
    return values[values >= LOWEST]


def test_it_is_within_about_one_ulp_of_the_exact_value() -> None:
    values = arguments()
    exact = Context(prec=40)
    errors = [
        abs(Decimal(found) - wanted) / Decimal(float(np.spacing(float(wanted))))
        for found, wanted in zip(
            exponentials(values).tolist(), (exact.exp(Decimal(value)) for value in values.tolist()), strict=True
        )
    ]
    assert max(errors) < Decimal("1.01")
    assert sum(errors) / len(errors) < Decimal("0.3"), "a correctly rounded one has 0.25"


def test_its_ends() -> None:
    below = float(np.nextafter(LOWEST, -1000))
    assert exponentials([0.0, -0.0, -5e-324, -1e-17]).tolist() == [1.0] * 4
    assert exponentials([below, -709.0, -1e9, -1e308, -np.inf]).tolist() == [0.0] * 5
    assert exponentials([LOWEST])[0] == pytest.approx(np.exp(LOWEST), rel=1e-15)
    assert exponentials([LOWEST])[0] > np.finfo(np.float64).tiny, "a result is zero or normal"


def test_nothing_exceeds_one_and_nothing_is_negative() -> None:
    values = exponentials(np.concatenate([arguments(), -(2.0 ** -np.arange(1, 1075.0))]))
    assert values.max() == 1.0
    assert values.min() > 0
    assert not np.signbit(exponentials([-800.0, -np.inf])).any()


def test_nan_stays_nan() -> None:
    assert np.isnan(exponentials([np.nan, -1.0])).tolist() == [True, False]


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8, 31, 4095, 4096, 4097, 9001])
def test_the_place_of_a_number_does_not_matter(length: int) -> None:
    """Whole vectors, their remainders, and blocks: every element gets what it gets alone."""
    values = np.resize(arguments()[::-7], length)
    alone = [exponentials([value])[0] for value in values[-9:].tolist()]
    assert exponentials(values)[-9:].tolist() == alone
    halves = [exponentials(values[: length // 2]), exponentials(values[length // 2 :])]
    assert exponentials(values).tobytes() == np.concatenate(halves).tobytes()


def test_memory_of_any_shape_is_replaced_where_it_lies() -> None:
    values = np.resize(arguments(), (6, 10))
    wanted = exponentials(values.ravel()).reshape(6, 10)
    for view in (values.copy(), np.asfortranarray(values), np.repeat(values, 2, axis=1)[:, ::2]):
        before = view
        exponentiate(view)
        assert view is before
        assert view.tolist() == wanted.tolist()


def test_both_ways_give_equal_bits() -> None:
    rng = np.random.default_rng(1)
    for scale in (1e-9, 1e-3, 1.0, 30.0, 900.0):
        values = np.concatenate([arguments(), -rng.random(200_000) * scale, [-np.inf, LOWEST - 1, -1e308]])
        here = exponentials(values)
        with native.using(NUMPY):
            assert exponentials(values).tobytes() == here.tobytes()
