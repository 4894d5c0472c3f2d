"""The checked-in list of cases: an id, once published, stays, and goes on meaning the same.

`cases.txt` beside this module has one line for each case: id, role, level, rule and title. `python -m
dspark_proto.conformance.case_list` adds new cases to it, and refuses when a listed one has vanished or changed; whoever
means that edits the line by hand. Called by tests and by hand; judges no testee.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from .catalogue import all_cases
from .record import Case

LIST_FILE: Final = Path(__file__).with_name("cases.txt")


def line_of(case: Case) -> str:
    """What a case means, in one line."""
    return f"{case.id}  {case.role.value:<8}  {case.level.value:<6}  {case.anchor:<10}  {case.title}"


def as_text(cases: Iterable[Case]) -> str:
    """The whole file."""
    return "".join(f"{line_of(case)}\n" for case in cases)


def listed(text: str) -> dict[str, str]:
    """Id -> line of a file like :data:`LIST_FILE`."""
    return {line.split(" ", 1)[0]: line for line in text.splitlines()}


def broken_promises(old: Mapping[str, str], cases: Iterable[Case]) -> list[str]:
    """Ids of ``old`` that no case has any more, or that mean something else now."""
    new = {case.id: line_of(case) for case in cases}
    return [name for name, line in old.items() if new.get(name) != line]


def update(path: Path = LIST_FILE, cases: Iterable[Case] | None = None) -> None:
    """Add new cases to the file. Raises ``ValueError``, and writes nothing, when a listed one is gone or changed."""
    chosen = all_cases() if cases is None else tuple(cases)
    broken = broken_promises(listed(path.read_text("utf-8")) if path.exists() else {}, chosen)
    if broken:
        raise ValueError(f"{path.name}: ids that are listed vanished or changed: {' '.join(broken)}")
    path.write_text(as_text(chosen), "utf-8")


if __name__ == "__main__":
    update()
