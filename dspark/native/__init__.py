"""Whether rows are computed in C or in numpy: the one place that decides.

Purpose: find the shared object that the build made from ``rows.c`` and its neighbours, check that it is the one this
code was written for, and hand it to ``kernels``. Without it everything still works, in numpy, with equal results.

Invariants:

- The decision falls once, when this package is imported; ``DSPARK_NATIVE=0`` in the environment forces numpy.
- A library with another interface number is not called: after an update without a rebuild its arguments would
  mean something else.
- The library sits beside this file, in an editable install as in a wheel, under a suffix of this interpreter.

Called by ``kernels``, ``dspark doctor`` and ``dspark bench rows``. It computes nothing and never builds anything.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

VARIABLE = "DSPARK_NATIVE"
FOLDER = Path(__file__).resolve().parent

# INTERFACE of rows.c.
INTERFACE = 2

_POINTER, _SIZE, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_SIGNATURES = {
    "dspark_rows_interface": (),
    "dspark_top_rows": (_POINTER, _SIZE, _SIZE, _SIZE, _POINTER, _SIZE, _POINTER, _POINTER),
    "dspark_allocate_rows": (_POINTER, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER, _POINTER),
    "dspark_drop_zeros": (_POINTER, _SIZE, _POINTER),
    "dspark_sparse_reply": (*(_POINTER,) * 4, *(_SIZE,) * 3, *(_POINTER,) * 2),
    "dspark_dense_row": (_POINTER, *(_SIZE,) * 3, *(_POINTER,) * 2),
    "dspark_write_dense_row": (*(_POINTER,) * 2, *(_SIZE,) * 2, _POINTER, _SIZE),
    "dspark_draw": (_POINTER, _SIZE, _SIZE),
    "dspark_exponentials": (_POINTER, _SIZE),
    "dspark_target_row": (_POINTER, _SIZE, _REAL, *(_POINTER,) * 2),
    "dspark_block_shares": (_POINTER, _SIZE, *(_POINTER,) * 2, *(_SIZE,) * 2, _POINTER),
}


class LibraryError(Exception):
    """A shared object that cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The library in use, or None for numpy; ``reason`` says where it is, or why there is none."""

    library: ctypes.PyDLL | None
    reason: str

    def __str__(self) -> str:
        return f"{'numpy' if self.library is None else 'native'} ({self.reason})"


def open_library(path: Path) -> ctypes.PyDLL:
    """Load a shared object and declare its functions.

    The interpreter lock is kept during a call. Calls are shorter than the interval at which threads switch, and one
    that let go of the lock in the middle of a round could wait a whole interval to get it back.

    Raises:
        LibraryError: it does not load, lacks a function, or was built for another interface.
    """
    try:
        library = ctypes.PyDLL(str(path))
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _SIZE
    except (OSError, AttributeError) as error:
        raise LibraryError(f"{path.name} does not load: {error}") from error
    if library.dspark_rows_interface() != INTERFACE:
        raise LibraryError(f"{path.name} was built from other sources; install dspark again to rebuild it")
    return library


def choose(folder: Path = FOLDER, environment: Mapping[str, str] = os.environ) -> Choice:
    """Native when a usable library lies in ``folder`` and the environment does not forbid it."""
    if environment.get(VARIABLE) == "0":
        return Choice(None, f"{VARIABLE}=0")
    paths = [path for suffix in EXTENSION_SUFFIXES if (path := folder / f"_rows{suffix}").is_file()]
    if not paths:
        return Choice(None, "not built: no C compiler was there when dspark was installed")
    try:
        return Choice(open_library(paths[0]), str(paths[0]))
    except LibraryError as error:
        return Choice(None, str(error))


_choice = choose()


def choice() -> Choice:
    """What is in use now."""
    return _choice


@contextmanager
def using(chosen: Choice) -> Iterator[None]:
    """Another choice inside a ``with`` block, for the whole process: for tests and benchmarks, not for serving."""
    global _choice
    before, _choice = _choice, chosen
    try:
        yield
    finally:
        _choice = before
