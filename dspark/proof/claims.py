"""A claim: one statement that the suite holds the subject to, with ``==``.

Purpose: a name, the parts of the subject that it runs, and a check that says what is wrong. A claim about a law keeps
both laws at hand, so that a finding can say how far apart they are and whether the first token alone shows it.

Called by the tiers, which list claims, and by ``prove``, which runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from dspark.collectives import GroupError
from dspark.dyadic import RowError
from dspark.grammar import GrammarError
from dspark.oracle import Prefix, SequenceLaw
from dspark.proof.subject import Subject
from dspark.tickets import ResidualIdentityError, TicketError

# What a wrong step can run into before it gets a law wrong.
Refusals = (GrammarError, GroupError, ResidualIdentityError, RowError, RuntimeError, TicketError, ValueError)


@dataclass(frozen=True)
class Finding:
    """What is wrong. joint, first_token: total variation, None where no law was compared or none came out."""

    text: str
    joint: Fraction | None = None
    first_token: Fraction | None = None


class Claim(Protocol):
    """parts: the fields of ``Subject`` that it runs. cases: how many comparisons it makes."""

    @property
    def name(self) -> str: ...

    @property
    def parts(self) -> frozenset[str]: ...

    @property
    def cases(self) -> int: ...

    def check(self, subject: Subject) -> Finding | None:
        """None when the claim holds."""
        ...


@dataclass(frozen=True)
class LawClaim:
    """The joint law that the subject gives is the wanted one, fraction by fraction.

    heads: places in a sequence at which a first token stands (two of them where two requests are one sequence).
    """

    name: str
    parts: frozenset[str]
    seen: Callable[[Subject], SequenceLaw]
    wanted: Callable[[], SequenceLaw]
    heads: tuple[int, ...] = (0,)
    cases: int = 1

    def check(self, subject: Subject) -> Finding | None:
        wanted = self.wanted()
        try:
            seen = self.seen(subject)
        except Refusals as refusal:
            return Finding(f"{type(refusal).__name__}: {refusal}")
        if seen == wanted:
            return None
        joint = total_variation(seen, wanted)
        first = max(total_variation(_marginal(seen, at), _marginal(wanted, at)) for at in self.heads)
        return Finding(f"total variation {float(joint):.3g}, of the first token {float(first):.3g}", joint, first)


@dataclass(frozen=True)
class FactClaim:
    """A statement with a check of its own; ``wrong`` says what does not hold, None when all does."""

    name: str
    parts: frozenset[str]
    wrong: Callable[[Subject], str | None]
    cases: int = 1

    def check(self, subject: Subject) -> Finding | None:
        try:
            text = self.wrong(subject)
        except Refusals as refusal:
            text = f"{type(refusal).__name__}: {refusal}"
        return None if text is None else Finding(text)


def parts(*names: str) -> frozenset[str]:
    """Names of ``Subject`` fields. Raises ValueError for one that does not exist."""
    unknown = set(names) - set(Subject.__dataclass_fields__)
    if unknown:
        raise ValueError(f"a subject has no {sorted(unknown)}")
    return frozenset(names)


def total_variation(one: SequenceLaw, other: SequenceLaw) -> Fraction:
    """Half the sum of the absolute differences."""
    return sum((abs(one.get(s, Fraction(0)) - other.get(s, Fraction(0))) for s in one.keys() | other.keys()),
               Fraction(0)) / 2  # fmt: skip


def _marginal(law: SequenceLaw, place: int) -> SequenceLaw:
    found: SequenceLaw = {}
    for sequence, share in law.items():
        key: Prefix = sequence[place : place + 1]
        found[key] = found.get(key, Fraction(0)) + share
    return found


def first_difference(pairs: Iterable[tuple[str, object, object]]) -> str | None:
    """The first (what, seen, wanted) whose sides differ, in words."""
    for what, seen, wanted in pairs:
        if seen != wanted:
            return f"{what}: {seen}, wanted {wanted}"
    return None


def about(claims: Sequence[Claim], part: str) -> list[Claim]:
    """The claims that run a part."""
    return [claim for claim in claims if part in claim.parts]
