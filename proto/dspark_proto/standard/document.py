"""SPEC.md as a document: its requirements, and its generated parts between markers.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`. A requirement is a list item that starts
with its anchor, `- {#REQ-ABC-1} ...`, and goes on as long as lines are indented. Called by `__main__` and by tests;
writes no file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from . import diagrams, registries
from .matrix import CASES, matrix
from .worked_round import worked_round

SPECIFICATION: Final = Path(__file__).parents[2] / "SPEC.md"

_PART: Final = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.S)
_ITEM: Final = re.compile(r"(?:-|\d+\.) \{#(REQ-[A-Z]{3}-\d+)\} (.*)")
_HEADING: Final = re.compile(r"#{2,4} (?:(\d+(?:\.\d+)?)\.? )?")


@dataclass(frozen=True, slots=True)
class Requirement:
    """``section`` is the number of the numbered heading that it stands under; ``sentence`` is its whole item."""

    anchor: str
    section: str
    sentence: str


def requirements(text: str) -> list[Requirement]:
    """The requirements of a standard, in their order."""
    found: list[Requirement] = []
    section, growing = "", False
    for line in text.splitlines():
        heading, item = _HEADING.match(line), _ITEM.match(line)
        if heading:
            section = heading[1] or section
        if item:
            found.append(Requirement(item[1], section, item[2]))
        elif growing and line.startswith("  ") and line.strip():
            last = found[-1]
            found[-1] = Requirement(last.anchor, last.section, f"{last.sentence} {line.strip()}")
        growing = bool(item) or (growing and line.startswith("  "))
    return found


def _compliance(text: str) -> str:
    named = {one.anchor: one.section for one in requirements(text)}
    return matrix(named, CASES.read_text("utf-8"))


PARTS: Final[dict[str, Callable[[str], str]]] = {
    "verifier-connection": lambda _: diagrams.verifier_connection(),
    "drafter-connection": lambda _: diagrams.drafter_connection(),
    "slot": lambda _: diagrams.slot(),
    "receivers": lambda _: diagrams.receivers(),
    "messages": lambda _: registries.messages(),
    "scopes": lambda _: registries.scopes(),
    "errors": lambda _: registries.errors(),
    "limits": lambda _: registries.limits(),
    "ids": lambda _: registries.ids(),
    "worked-round": lambda _: worked_round(),
    "compliance": _compliance,
}
"""Name of a marker -> what belongs there, from the whole text."""


def generated(text: str) -> dict[str, str]:
    """Name -> content of each generated part that ``text`` has now."""
    return {found[2]: found[0] for found in _PART.finditer(text)}


def written(text: str) -> str:
    """``text`` with every generated part as it should be. Raises KeyError for a marker that nothing belongs to."""
    return _PART.sub(lambda found: f"{found[1]}\n{PARTS[found[2]](text)}\n\n{found[3]}", text)
