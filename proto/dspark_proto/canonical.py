"""The control profile ``dsp-msgpack-1``: one byte string per value.

msgpack has no canonical form, and its decoders accept overlong encodings. The profile allows arrays, unsigned
integers, byte strings and ASCII strings only, in their shortest forms, at most three arrays deep; the decoder
re-encodes and compares. Spec: SPEC.md, section "Control profile". Called by ``frame`` and ``hello``.
"""

from __future__ import annotations

from typing import Final, TypeAlias, cast

import msgpack  # type: ignore[import-untyped]  # ships no annotations

from .buffers import Buffer
from .errors import RemoteProtocolError
from .limits import CONTROL_DEPTH_MAX, STATS_COUNTERS_MAX
from .registry import ErrorCode

Scalar: TypeAlias = int | bytes | str
Value: TypeAlias = Scalar | list["Value"]

ARRAY_LENGTH_MAX: Final = STATS_COUNTERS_MAX
"""Values of the longest array. msgpack makes room for an array when it reads the header, and nests 1,024 deep."""

_SCALARS: Final = frozenset((int, bytes, str))

_PACKER: Final = msgpack.Packer(use_bin_type=True, autoreset=True)
"""One packer: making one costs five times a message. ``pack`` holds the interpreter lock for them."""


def encode_canonical(values: list[Value]) -> bytes:
    """``values`` in the profile's only encoding; the typed messages guarantee its types."""
    return cast(bytes, _PACKER.pack(values))


def decode_canonical(control: Buffer, where: str = "control") -> list[Value]:
    """The values in ``control``.

    Raises :class:`RemoteProtocolError` NONCANONICAL for anything but the one legal encoding.
    """
    try:
        values = msgpack.unpackb(control, use_list=True, max_array_len=ARRAY_LENGTH_MAX, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise RemoteProtocolError(ErrorCode.NONCANONICAL, where) from error
    if type(values) is not list or not _in_profile(values, CONTROL_DEPTH_MAX):
        raise RemoteProtocolError(ErrorCode.NONCANONICAL, where)
    if encode_canonical(values) != control:
        raise RemoteProtocolError(ErrorCode.NONCANONICAL, where)
    return values


def _in_profile(values: list[Value], depth: int) -> bool:
    """Whether all values have a profile type (``bool`` is not ``int`` here) and nest at most ``depth``
    arrays.
    """
    for value in values:
        kind = type(value)
        if kind in _SCALARS:
            continue
        if kind is not list or depth == 1 or not _in_profile(cast("list[Value]", value), depth - 1):
            return False
    return True
