"""How SPEC.md writes the type and range of a field, from the layouts of the code.

Called by the test that compares the field tables of SPEC.md with the messages; holds no layout itself.
"""

from __future__ import annotations

from ..fields import Bin, Choice, Field, Records, Text, UInt, UInts

_POWERS = {2**bits - 1: f"2^{bits} - 1" for bits in (16, 31, 32, 63, 64)} | {2**24: "2^24", 2**20: "2^20"}

_NAMES = {"STEP": "ITEM", "STATS.counter": "COUNTER"}
"""Records that are part of a message, by the name that SPEC.md gives them."""


def _number(value: int) -> str:
    return _POWERS.get(value, f"{value:,}")


def kind_of(field: Field) -> str:
    """`uint 1 .. 32`, `bin 8`, `id (Lane)`, `list of 1 .. 32 ITEM`."""
    match field:
        case UInt(maximum=maximum, minimum=minimum):
            return f"uint {minimum} .. {_number(maximum)}"
        case Choice(members=members):
            return f"id ({members.__name__})"
        case Bin(maximum=maximum, minimum=minimum):
            return f"bin {maximum}" if minimum == maximum else f"bin {minimum} .. {maximum:,}"
        case Text(maximum=maximum):
            return f"text 0 .. {maximum}"
        case UInts(maximum=maximum, maximum_count=most, minimum_count=least):
            return f"list of {least} .. {most} uint 0 .. {_number(maximum)}"
        case Records(item=item, maximum_count=most, minimum_count=least):
            return f"list of {least} .. {most} {_NAMES.get(item.NAME, item.NAME)}"
    raise TypeError(f"{field.name}: no such field kind")
