"""The compiled kernels of decode steps: `dspark/native/products.c` and `attention.c` in one shared object.

Finds it beside its sources, lends it torch's OpenMP library, and declares its functions. Called by `panels` and
`decode_attention`; without it (no compiler at installation, another system, `DSPARK_NATIVE=0`) they are not used.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import dspark

FOLDER = Path(dspark.__file__).resolve().parent / "native"
# INTERFACE of products.c: a library that was built for other arguments is not called.
INTERFACE = 1

_SIZE, _POINTER, _INT = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
_SIGNATURES: dict[str, tuple[tuple[object, ...], object]] = {
    "dspark_decode_interface": ((), _INT),
    "dspark_packed_size": ((_SIZE, _SIZE), _SIZE),
    "dspark_pack": ((_POINTER, _POINTER, _SIZE, _SIZE), None),
    "dspark_product": ((*(_POINTER,) * 4, *(_SIZE,) * 3, _INT), None),
    "dspark_attention": ((*(_POINTER,) * 7, *(_SIZE,) * 9, _INT), None),
}


@cache
def library() -> ctypes.CDLL | None:
    """The library with its signatures, or None. Calls release the interpreter lock: the endpoint goes on meanwhile."""
    paths = [p for suffix in EXTENSION_SUFFIXES if (p := FOLDER / f"_decode{suffix}").is_file()]
    if not paths or os.environ.get("DSPARK_NATIVE") == "0" or not _share_openmp():
        return None
    try:
        native = ctypes.CDLL(str(paths[0]))
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(native, name)
            function.argtypes, function.restype = arguments, result
    except (OSError, AttributeError):
        return None
    return native if native.dspark_decode_interface() == INTERFACE else None


def _share_openmp() -> bool:
    """Make the OpenMP library that torch has loaded visible to ours: two teams on the same cores starve each other."""
    try:
        mapped = Path("/proc/self/maps").read_text("utf-8").split()
        ctypes.CDLL(next(path for path in mapped if "libgomp" in path), ctypes.RTLD_GLOBAL)
    except (OSError, StopIteration):
        return False
    return True
