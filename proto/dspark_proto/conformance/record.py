"""The case record: one rule of SPEC.md, the bug that breaks it, and a script that tells the two apart.

A case is written once and runs on every transport, for it only sees a handle on the testee. Ids are never reused.
Called by the families (`cases_*`), which build cases, and by `runner`; holds no protocol logic.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from .requirements import REQUIREMENTS

_ID: Final = re.compile(r"DSP2-[A-Z]{3}-\d{3}")


class Level(StrEnum):
    """How binding the requirement is, in the words of RFC 2119."""

    MUST = "MUST"
    SHOULD = "SHOULD"
    MAY = "MAY"


class Role(StrEnum):
    """What the testee is: a network peer, or a decoder of single frames."""

    DRAFTER = "drafter"
    VERIFIER = "verifier"
    CODEC = "codec"


Script = Callable[[Any], None]
"""Drives the handle of the case's role (`DrafterUnderTest`, `VerifierUnderTest` or `CodecUnderTest`); raises
`Unmet`."""


@dataclass(frozen=True)
class Case:
    """One conformance case. ``bug`` is what it hunts; its id is for ever."""

    id: str
    title: str
    anchor: str
    level: Level
    role: Role
    bug: str
    script: Script = field(repr=False, compare=False)
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert _ID.fullmatch(self.id), self.id
        assert self.anchor in REQUIREMENTS, f"{self.id}: {self.anchor} is not in SPEC.md"

    @property
    def requirement(self) -> str:
        """The sentence of SPEC.md."""
        return REQUIREMENTS[self.anchor]

    @property
    def needs_secret(self) -> bool:
        """Only a testee that asks for proofs can be judged."""
        return "secret" in self.tags

    @property
    def family(self) -> str:
        """Three letters: PFX, CAN, ..."""
        return self.id.split("-")[1]


class Family:
    """Collects the cases of one family and role; numbers are given by hand, so that they never move."""

    def __init__(self, name: str, role: Role, tags: tuple[str, ...] = ()) -> None:
        self.name = name
        self._tags = tags
        self.role = role
        self.cases: list[Case] = []

    def add(
        self,
        number: int,
        title: str,
        anchor: str,
        bug: str,
        script: Script,
        *,
        level: Level = Level.MUST,
        tags: tuple[str, ...] = (),
    ) -> None:
        """One case; ``number`` is for ever."""
        name = f"DSP2-{self.name}-{number:03d}"
        self.cases.append(Case(name, title, anchor, level, self.role, bug, script, self._tags + tags))

    def case(
        self,
        number: int,
        title: str,
        anchor: str,
        bug: str,
        *,
        level: Level = Level.MUST,
        tags: tuple[str, ...] = (),
    ) -> Callable[[Script], Script]:
        """Decorator form of :meth:`add`."""

        def register(script: Script) -> Script:
            self.add(number, title, anchor, bug, script, level=level, tags=tags)
            return script

        return register
