"""Statistics of counts: chi-square and G with their tail probabilities, z, and Holm's rule for a whole suite.

Invariants:

- Cells that are expected fewer than ``FEWEST`` times are merged into one; what is impossible must not have been seen.
- A p-value is exact for the reference distribution to about 1e-12 relative; none is read from a table.
- ``holm`` rejects at level alpha over all tests together, whatever their dependence.

Called by Tiers 2 and 3. It draws nothing.

Sources: Numerical Recipes, 6.2, for the incomplete gamma function; Holm, Scand. J. Statist. 6 (1979).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

FEWEST = 10.0
_TINY, _CLOSE = 1e-300, 1e-15


@dataclass(frozen=True)
class Outcome:
    """A statistic with its reference distribution. kind: "chi2", "G" or "z"; df: 0 for z."""

    kind: str
    statistic: float
    df: int
    p: float


def upper_gamma(shape: float, x: float) -> float:
    """Regularised upper incomplete gamma function Q(shape, x), shape > 0, x >= 0."""
    if x <= 0:
        return 1.0
    scale = math.exp(-x + shape * math.log(x) - math.lgamma(shape))
    return 1 - scale * _series(shape, x) if x < shape + 1 else scale * _fraction(shape, x)


def _series(shape: float, x: float) -> float:
    term = total = 1 / shape
    place = shape
    while term > total * _CLOSE:
        place += 1
        term *= x / place
        total += term
    return total


def _fraction(shape: float, x: float) -> float:
    """Lentz's evaluation of the continued fraction."""
    below = x + 1 - shape
    numerator, denominator = 1 / _TINY, 1 / below
    value = denominator
    for step in range(1, 10_000):
        factor = -step * (step - shape)
        below += 2
        denominator = 1 / (factor * denominator + below or _TINY)
        numerator = below + factor / numerator or _TINY
        change = denominator * numerator
        value *= change
        if abs(change - 1) < _CLOSE:
            break
    return value


def chi_square_tail(statistic: float, df: int) -> float:
    """P(chi-square with df >= 1 degrees of freedom > statistic)."""
    return upper_gamma(df / 2, statistic / 2)


def normal_tail(z: float) -> float:
    """Two-sided tail of a standard normal number."""
    return math.erfc(abs(z) / math.sqrt(2))


class ImpossibleError(ValueError):
    """Something was seen that the law gives no probability."""


def merged_cells(counts: Mapping[Hashable, int], law: Mapping[Hashable, float]) -> list[tuple[float, float]]:
    """(seen, expected) of the cells, rare ones merged.

    Raises:
        ImpossibleError: a count outside the law.
    """
    impossible = [cell for cell in counts if counts[cell] and not law.get(cell)]
    if impossible:
        raise ImpossibleError(f"{impossible[0]!r} was seen and has no probability")
    total = sum(counts.values())
    cells, rare_seen, rare = [], 0.0, 0.0
    for cell, probability in law.items():
        expected = probability * total
        if expected >= FEWEST:
            cells.append((float(counts.get(cell, 0)), expected))
        else:
            rare_seen, rare = rare_seen + counts.get(cell, 0), rare + expected
    if rare >= FEWEST:
        cells.append((rare_seen, rare))
    elif rare and cells:
        # Too little for a cell of its own: it joins the smallest, so that nothing that was seen is left out.
        smallest = min(range(len(cells)), key=lambda place: cells[place][1])
        seen, expected = cells[smallest]
        cells[smallest] = (seen + rare_seen, expected + rare)
    return cells


def chi_square(groups: Sequence[Sequence[tuple[float, float]]]) -> Outcome:
    """Pearson's statistic over groups of cells, each group with its own total."""
    statistic = sum((seen - expected) ** 2 / expected for cells in groups for seen, expected in cells)
    return _outcome("chi2", statistic, groups)


def g_test(groups: Sequence[Sequence[tuple[float, float]]]) -> Outcome:
    """The likelihood ratio statistic over the same groups."""
    terms = (seen * math.log(seen / expected) for cells in groups for seen, expected in cells if seen)
    return _outcome("G", max(0.0, 2 * sum(terms)), groups)


def _outcome(kind: str, statistic: float, groups: Sequence[Sequence[tuple[float, float]]]) -> Outcome:
    df = sum(len(cells) - 1 for cells in groups if cells)
    if df < 1:
        raise ValueError("fewer than two cells: too few samples for this test")
    return Outcome(kind, statistic, df, chi_square_tail(statistic, df))


def z_test(seen: float, expected: float, variance: float) -> Outcome:
    """A sum of independent indicators against its mean."""
    z = (seen - expected) / math.sqrt(variance)
    return Outcome("z", z, 0, normal_tail(z))


def holm(p_values: Sequence[float], alpha: float) -> list[float]:
    """The threshold of each test: it fails when its p-value is at or below it, in Holm's order.

    The smallest of m p-values meets alpha / m, the next alpha / (m - 1), .. until one passes; those behind it pass too
    and get the threshold at which the procedure stopped.
    """
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    thresholds = [0.0] * len(p_values)
    stopped: float | None = None
    for rank, place in enumerate(order):
        bar = alpha / (len(order) - rank) if stopped is None else stopped
        thresholds[place] = bar
        if stopped is None and p_values[place] > bar:
            stopped = bar
    return thresholds
