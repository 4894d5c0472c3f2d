"""Whether the codec's hot path runs in C or in Python: the one place that decides.

Purpose: find the extension module that the build made from ``codec.c`` and check that it belongs to this code.
Invariants: the decision falls once, at import; ``DSPARK_NATIVE=0`` in the environment forces Python; without the
extension everything works, slower, with equal bytes, results and errors. C does valid input only and leaves the rest
to Python, by None, False or 0, so each error has one source. Called by ``fields``, ``prefix``, ``rows``, ``checksums``,
``digest``, ``memory`` and ``events``; it builds nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Final, Protocol, TypeAlias, TypeVar, cast

from .buffers import Buffer

VARIABLE: Final = "DSPARK_NATIVE"

INTERFACE: Final = 4
"""INTERFACE of codec.c: after an update without a rebuild, arguments would mean something else."""

Plan: TypeAlias = tuple[str, str, int, int, object]
"""A field: kind (its first letter counts), attribute, minimum, maximum, and what the kind needs besides."""

RowShape: TypeAlias = tuple[int, int, int, int, int]
"""Rows, bytes of a row's ids and of its q, least and most entries of a row."""

Places: TypeAlias = tuple[int, ...]
"""Bodies of an expected frame: checksum kind, and of each body its bytes, where in the control its checksum is, and
where it goes."""

Blank: TypeAlias = tuple[int, ...]
"""A ROW frame to be filled: bytes of its control, first row, rows, checksum kind, bodies, and of each body, as offsets
in the frame, where it begins and where its checksum is."""


class Table(Protocol):
    """The fields of one record class."""

    def holds(self, record: object) -> bool:
        """Whether every field of the record is valid."""

    def twin(self, record: object) -> Any:
        """An equal record; attributes that do not travel have their defaults."""

    def read(
        self,
        frame: Buffer,
        control_bytes: int,
        control_crc: int,
        body_count: int,
        body_bytes: int,
        absent_bytes: int = ...,
        /,
    ) -> Any:
        """The record in the control of a frame with such a prefix; length, crc, padding and descriptors fit.

        The frame may lack its last bytes, so many as are said to be absent.
        """

    def write(
        self,
        out: Buffer,
        record: object,
        type: int,
        slot: int,
        generation: int,
        round: int,
        bodies: object,
        summing: bool = ...,
        /,
    ) -> int:
        """Write a frame and give its length. ``record`` may be the tuple of its values; the bodies fit it.

        With ``summing``, the bodies' descriptors get the checksums, which are computed while copying.
        """

    def read_prefix(self, frame: Buffer, /) -> Any:
        """The prefix of a frame, of the table of ``Prefix``."""

    def frame_bytes(self, buffer: Buffer, start: int, end: int, /) -> int:
        """Length of the frame at ``start``, by its prefix; 0 when that is damaged or incomplete. Of that table too."""

    def is_sound(self, descriptor: object, padded: Buffer, /) -> bool:
        """Whether a body and its padding are what the descriptor says, of the table of ``BodyDescriptor``."""

    def stage(
        self, frame: Buffer, descriptors: tuple[object, ...], out: Buffer, spans: tuple[tuple[int, int], ...], /
    ) -> bool:
        """Check the bodies, which end the frame, and copy each to its (start, bytes) of ``out``; of that table too.

        When False, parts may have been copied.
        """


class Maker(Protocol):
    """Makes records of one class."""

    def make(self, *values: object) -> Any:
        """The record with these values, one for each slot, in order."""


class Codec(Protocol):
    """The extension module."""

    INTERFACE: int
    """The :data:`INTERFACE` that it was built with."""

    CPU_CRC: bool
    """Whether it computes CRC32C with the CPU's own instruction."""

    def Table(self, record: type, fields: tuple[Plan, ...], defaults: tuple[tuple[str, object], ...], /) -> Table:
        """The table of a record class; ``defaults`` are of attributes that do not travel."""

    def Maker(self, record: type, names: tuple[str, ...], /) -> Maker:
        """The maker of a record class with these slots."""

    def rewrite_key(self, frame: Buffer, control_bytes: int, slot: int, generation: int, round: int, /) -> bool:
        """Give a frame another key, and the crcs of the control that it has now."""

    def check_rows(
        self, block: Buffer, shape: RowShape, vocab_size: int, kind: int = ..., checksum: bytes = ..., /
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
        """Tokens, entries and confidences of a reply's block whose every row is sound and that has the checksum."""

    def check_placed(
        self, block: Buffer, shape: RowShape, vocab_size: int, first: int, rows: int, kind: int, checksum: bytes, /
    ) -> bool:
        """Whether the q of these rows of a reply's block has that body checksum, and every one of the rows is sound."""

    def fill_rows(
        self,
        frame: Buffer,
        blank: Blank,
        ids: Buffer,
        q: Buffer,
        shape: RowShape,
        columns: tuple[Sequence[int], ...],
        slot: int,
        generation: int,
        round: int,
        /,
    ) -> bool:
        """Write the blank's rows of a whole reply, their checksums, the key and its crcs into a ROW frame."""

    def stage_expected(self, frame: Buffer, control: Buffer, places: Places, out: Buffer, /) -> bool:
        """Check a frame that should have this control, but for its bodies' checksums, and copy its bodies to ``out``.

        When False, parts may have been copied.
        """

    def fill_reply(
        self,
        frame: Buffer,
        blank: Blank,
        ids: Buffer,
        q: Buffer,
        shape: RowShape,
        columns: tuple[Sequence[int], ...],
        slot: int,
        generation: int,
        round: int,
        vocab_size: int,
        /,
    ) -> bytes | None:
        """:meth:`fill_rows` of a reply that has one ROW and tokens below ``vocab_size``; the reply's checksum."""

    def prefix_digest(self, digest: bytes, tokens: object, /) -> bytes | None:
        """``digest`` of a prefix, extended by the tokens of a list or tuple."""

    def checksum(self, kind: int, pieces: Sequence[Buffer], /) -> bytes:
        """The body checksum of bytes that lie in several places."""

    def address(self, buffer: Buffer, /) -> int:
        """Where the buffer's memory begins."""

    def write_records(
        self,
        records: Buffer,
        ids: Buffer,
        q: Buffer,
        shape: RowShape,
        rows: int,
        tokens: Sequence[int],
        entries: Sequence[int],
        confidences: Sequence[int],
        /,
    ) -> bool:
        """Write the records of ``rows`` rows; their ids and q are given."""


def found() -> Codec | None:
    """The extension module, where it is to be used."""
    if os.environ.get(VARIABLE) == "0":
        return None
    try:
        from . import _codec  # type: ignore[attr-defined]  # built at installation, or not there
    except ImportError:
        return None
    built = cast(Codec, _codec)
    return built if built.INTERFACE == INTERFACE else None


codec: Final = found()

R = TypeVar("R")


def maker(record: type[R]) -> Callable[..., R]:
    """A call like that of ``record``, a frozen dataclass with slots that checks nothing, but with all fields, by place.

    Python makes such a record with a call for each field, which on the round path takes longer than to check a frame.
    """
    if codec is None:
        return record
    names = tuple(one.name for one in fields(record))  # type: ignore[arg-type]
    return codec.Maker(record, names).make
