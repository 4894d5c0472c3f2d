"""State tables and diagrams of SPEC.md, from the tables in `states`.

The diagrams are Mermaid; actions that lead from one state to the same other one share an arrow. Invariant: every
entry of a table is in its diagram. Called by `document`; decides nothing about states.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from ..registry import MessageType
from ..states import DRAFTER_CONNECTION, DRAFTER_RECEIVES, SLOT, VERIFIER_CONNECTION, VERIFIER_RECEIVES
from .tables import table

StateTable = Mapping[Any, Mapping[str, Any]]


def _actions(states: StateTable) -> list[str]:
    """All actions, in the order in which the table first names them."""
    return list(dict.fromkeys(action for row in states.values() for action in row))


def state_table(states: StateTable) -> str:
    """One row for each state, one column for each action; an empty cell is a refusal."""
    actions = _actions(states)
    rows = [
        [state.name, *(row[action].name if action in row else "" for action in actions)]
        for state, row in states.items()
    ]
    return table([r"state \ action", *actions], rows)


def diagram(states: StateTable) -> str:
    """The same as a Mermaid state diagram."""
    arrows: dict[tuple[Enum, Enum], list[str]] = {}
    for state, row in states.items():
        for action, following in row.items():
            arrows.setdefault((state, following), []).append(action)
    first = next(iter(states))
    lines = [f"[*] --> {first.name}"]
    lines += [f"{one.name} --> {two.name}: {', '.join(actions)}" for (one, two), actions in arrows.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", *(f"    {line}" for line in lines), "```"])


def _part(states: StateTable) -> str:
    return f"{state_table(states)}\n\n{diagram(states)}"


def verifier_connection() -> str:
    """Section 3.1."""
    return _part(VERIFIER_CONNECTION)


def drafter_connection() -> str:
    """Section 3.2."""
    return _part(DRAFTER_CONNECTION)


def slot() -> str:
    """Section 3.3."""
    return _part(SLOT)


def receivers() -> str:
    """Which message may be received in which state of the connection."""
    rows = []
    for kind in MessageType:
        verifier, drafter = (
            ", ".join(state.name for state in type(next(iter(allowed))) if state in allowed) if allowed else ""
            for allowed in (VERIFIER_RECEIVES.get(kind), DRAFTER_RECEIVES.get(kind))
        )
        rows.append([kind.name, verifier, "in every state" if kind is MessageType.HELLO else drafter])
    return table(["message", "verifier takes it in", "drafter takes it in"], rows)
