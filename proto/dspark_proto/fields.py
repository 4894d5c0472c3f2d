"""Field kinds of control records: the range checks that every message, sent or received, passes.

A record class lists its fields in ``LAYOUT``, in wire order. ``Record.__post_init__`` checks each, so an
invalid record cannot exist; ``values`` and ``from_values`` are the two directions of the codec. Limits live
in the layouts, hence they hold before anything is sized from a field. Records of the round path also have a
``TABLE``: the same layout for the compiled codec, which does both directions for valid records; what it does not
accept is done again here, where the reason is found. Spec: SPEC.md, section "Field kinds".
Called by ``messages`` and ``hello``; never touches bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import ClassVar, Protocol, Self, TypeVar, cast

from .canonical import Value
from .errors import LocalProtocolError
from .limits import TEXT_BYTES_MAX
from .native import Plan, Table, codec
from .registry import ErrorCode


class Field(Protocol):
    """One position of a record."""

    @property
    def name(self) -> str:
        """Attribute of the record, also the last part of an error's ``where``."""

    def problem(self, value: object) -> str:
        """What is wrong with ``value``, as a remedy; empty when it is valid."""

    def encode(self, value: object) -> Value:
        """The wire value."""

    def decode(self, value: Value) -> object:
        """The attribute value; an undecodable value is returned as it is and then fails ``problem``."""

    def plan(self) -> Plan | None:
        """The same checks for the compiled codec; None for a kind that it does not know."""


@dataclass(frozen=True, slots=True)
class UInt:
    """An unsigned integer in ``minimum..maximum``."""

    name: str
    maximum: int
    minimum: int = 0

    def problem(self, value: object) -> str:
        if type(value) is int and self.minimum <= value <= self.maximum:
            return ""
        return f"must be an int (no subclass) in {self.minimum}..{self.maximum}"

    def encode(self, value: object) -> Value:
        return cast(int, value)

    def decode(self, value: Value) -> object:
        return value

    def plan(self) -> Plan | None:
        return "uint", self.name, self.minimum, self.maximum, None


@dataclass(frozen=True, slots=True)
class Choice:
    """A member of a registry enumeration; ``by_id`` spares the slow enumeration call on the round path."""

    name: str
    members: type[IntEnum]
    by_id: Mapping[Value, IntEnum]

    def problem(self, value: object) -> str:
        return "" if isinstance(value, self.members) else f"must be a {self.members.__name__}"

    def encode(self, value: object) -> Value:
        return int(cast(IntEnum, value))

    def decode(self, value: Value) -> object:
        return self.by_id.get(value, value) if type(value) is int else value

    def plan(self) -> Plan | None:
        return "enumeration", self.name, 0, 0, (self.members, tuple(self.by_id.items()))


def enum_field(name: str, members: type[IntEnum]) -> Choice:
    """A member of ``members``."""
    return Choice(name, members, {int(member): member for member in members})


@dataclass(frozen=True, slots=True)
class Bin:
    """A byte string of ``minimum..maximum`` bytes."""

    name: str
    maximum: int
    minimum: int

    def problem(self, value: object) -> str:
        if isinstance(value, bytes) and self.minimum <= len(value) <= self.maximum:
            return ""
        return f"must be {self.minimum}..{self.maximum} bytes"

    def encode(self, value: object) -> Value:
        return cast(bytes, value)

    def decode(self, value: Value) -> object:
        return value

    def plan(self) -> Plan | None:
        return "bytes", self.name, self.minimum, self.maximum, None


def fixed_bin(name: str, length: int) -> Bin:
    """A byte string of exactly ``length`` bytes."""
    return Bin(name, length, length)


@dataclass(frozen=True, slots=True)
class Text:
    """Printable ASCII of at most ``maximum`` bytes, for identities and field names."""

    name: str
    maximum: int = TEXT_BYTES_MAX

    def problem(self, value: object) -> str:
        if isinstance(value, str) and len(value) <= self.maximum and value.isascii() and _printable(value):
            return ""
        return f"must be at most {self.maximum} printable ASCII characters"

    def encode(self, value: object) -> Value:
        return cast(str, value)

    def decode(self, value: Value) -> object:
        return value

    def plan(self) -> Plan | None:
        return None


def _printable(value: str) -> bool:
    return not value or value.isprintable()


@dataclass(frozen=True, slots=True)
class UInts:
    """``minimum_count..maximum_count`` unsigned integers up to ``maximum``; a tuple in the record."""

    name: str
    maximum: int
    maximum_count: int
    minimum_count: int = 0

    def problem(self, value: object) -> str:
        item = UInt(self.name, self.maximum)
        if (
            isinstance(value, tuple)
            and self.minimum_count <= len(value) <= self.maximum_count
            and not any(item.problem(one) for one in value)
        ):
            return ""
        return f"must be {self.minimum_count}..{self.maximum_count} integers up to {self.maximum}"

    def encode(self, value: object) -> Value:
        return list(cast("tuple[int, ...]", value))

    def decode(self, value: Value) -> object:
        return tuple(value) if isinstance(value, list) else value

    def plan(self) -> Plan | None:
        return None


class Record:
    """A frozen, typed control record: a message, or one row of a list inside a message."""

    __slots__ = ()

    NAME: ClassVar[str]
    LAYOUT: ClassVar[tuple[Field, ...]]
    TABLE: ClassVar[Table | None] = None
    RELATED: ClassVar[bool] = False
    """Whether :meth:`check_relations` has something to check."""

    def __post_init__(self) -> None:
        table = self.TABLE
        if table is None or not table.holds(self):
            self._check_fields()
        if self.RELATED:
            self.check_relations()

    def _check_fields(self) -> None:
        for field in self.LAYOUT:
            problem = field.problem(getattr(self, field.name))
            if problem:
                raise LocalProtocolError(ErrorCode.BAD_FIELD, f"{self.NAME}.{field.name}", problem)

    def check_relations(self) -> None:
        """Check what no field can check by itself; every field is valid already.

        Raises :class:`LocalProtocolError` BAD_FIELD.
        """

    def values(self) -> list[Value]:
        """The wire values, in layout order."""
        return [field.encode(getattr(self, field.name)) for field in self.LAYOUT]

    @classmethod
    def from_values(cls, values: Value) -> Self:
        """The record that ``values`` describe.

        Raises :class:`LocalProtocolError` BAD_FIELD; the receive path converts it to the remote class.
        """
        layout = cls.LAYOUT
        if not isinstance(values, list) or len(values) != len(layout):
            raise LocalProtocolError(ErrorCode.BAD_FIELD, cls.NAME, f"must be an array of {len(layout)} fields")
        build = cast("Callable[..., Self]", cls)
        return build(*[field.decode(value) for field, value in zip(layout, values, strict=True)])


R = TypeVar("R", bound=Record)


def compiled(record: type[R]) -> type[R]:
    """Give a record class, a dataclass already, its ``TABLE``, where the compiled codec is there and can."""
    travelling = {field.name for field in record.LAYOUT}
    others = [one for one in fields(record) if one.name not in travelling]  # type: ignore[arg-type]
    record.TABLE = table_of(record, record.LAYOUT, tuple((one.name, one.default) for one in others))
    return record


def table_of(record: type, layout: tuple[Field, ...], defaults: tuple[tuple[str, object], ...] = ()) -> Table | None:
    """The compiled codec's table of a class with these slots; None without the codec, or when it lacks a kind."""
    plans = tuple(plan for field in layout if (plan := field.plan()) is not None)
    if codec is None or len(plans) < len(layout):
        return None
    return codec.Table(record, plans, defaults)


@dataclass(frozen=True, slots=True)
class Records:
    """A list of at most ``maximum_count`` nested records; a tuple in the record."""

    name: str
    item: type[Record]
    maximum_count: int
    minimum_count: int = 0

    def problem(self, value: object) -> str:
        if (
            isinstance(value, tuple)
            and self.minimum_count <= len(value) <= self.maximum_count
            and all(isinstance(one, self.item) for one in value)
        ):
            return ""
        return f"must be {self.minimum_count}..{self.maximum_count} {self.item.NAME} records"

    def encode(self, value: object) -> Value:
        return [one.values() for one in cast("tuple[Record, ...]", value)]

    def decode(self, value: Value) -> object:
        if not isinstance(value, list) or len(value) > self.maximum_count:
            return value
        return tuple(self.item.from_values(one) for one in value)

    def plan(self) -> Plan | None:
        table = self.item.TABLE
        return None if table is None else ("records", self.name, self.minimum_count, self.maximum_count, table)
