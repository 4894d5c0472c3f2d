"""All cases, in the order of their ids, and how to choose among them.

Invariant: ids are unique. Called by `runner`, `selftest` and the command line.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import lru_cache

from . import (
    cases_control,
    cases_drafter_auth,
    cases_drafter_dense,
    cases_drafter_frame,
    cases_drafter_hello,
    cases_drafter_link,
    cases_drafter_rounds,
    cases_drafter_silence,
    cases_drafter_slots,
    cases_drafter_version,
    cases_frame,
    cases_verifier_auth,
    cases_verifier_commit,
    cases_verifier_context,
    cases_verifier_dense,
    cases_verifier_hello,
    cases_verifier_link,
    cases_verifier_ranks,
    cases_verifier_reply,
    cases_verifier_step,
    cases_verifier_traffic,
    cases_verifier_version,
)
from .record import Case, Family, Role

_MODULES = (
    cases_frame,
    cases_control,
    cases_drafter_frame,
    cases_drafter_hello,
    cases_drafter_auth,
    cases_drafter_slots,
    cases_drafter_rounds,
    cases_drafter_dense,
    cases_drafter_link,
    cases_drafter_silence,
    cases_drafter_version,
    cases_verifier_reply,
    cases_verifier_dense,
    cases_verifier_hello,
    cases_verifier_auth,
    cases_verifier_version,
    cases_verifier_link,
    cases_verifier_context,
    cases_verifier_commit,
    cases_verifier_step,
    cases_verifier_traffic,
    cases_verifier_ranks,
)


@lru_cache(maxsize=1)
def all_cases() -> tuple[Case, ...]:
    """Every case."""
    families = [value for module in _MODULES for value in vars(module).values() if isinstance(value, Family)]
    cases = sorted((case for family in families for case in family.cases), key=lambda case: case.id)
    assert len({case.id for case in cases}) == len(cases), "a case id is used twice"
    return tuple(cases)


def select(role: Role | None = None, patterns: Iterable[str] = (), exclude: Iterable[str] = ()) -> tuple[Case, ...]:
    """Cases of a role whose id matches one of ``patterns`` (``DSP2-ROW-*``, or just ``ROW``) and none of
    ``exclude``."""
    wanted, unwanted = [_glob(one) for one in patterns], [_glob(one) for one in exclude]
    return tuple(
        case
        for case in all_cases()
        if (role is None or case.role is role)
        and (not wanted or any(fnmatchcase(case.id, pattern) for pattern in wanted))
        and not any(fnmatchcase(case.id, pattern) for pattern in unwanted)
    )


def _glob(pattern: str) -> str:
    return f"DSP2-{pattern}-*" if len(pattern) == 3 and pattern.isalpha() else pattern
