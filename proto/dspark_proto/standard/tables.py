"""Markdown tables. Called by the makers of the generated parts; knows nothing of the protocol."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with the columns of ``head``; an empty cell is one space wide."""
    lines = [list(head), ["---"] * len(head), *[[str(cell) for cell in row] for row in rows]]
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines).replace(
        " --- |", "---|"
    )
