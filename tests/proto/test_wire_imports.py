"""The core imports nothing that reads a clock, opens a socket, draws a number or starts a task."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import dspark_proto

PACKAGE = Path(dspark_proto.__file__).parent
ALLOWED = {
    "__future__", "collections", "crc32c", "dataclasses", "enum", "functools", "hashlib", "hmac", "msgpack",
    "struct", "typing", "xxhash",
}  # fmt: skip
CORE = sorted(path.name for path in PACKAGE.glob("*.py"))


def imported_roots(path: Path) -> set[str]:
    """Top-level names of absolute imports in a module."""
    roots = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            roots.add(str(node.module).split(".")[0])
    return roots


@pytest.mark.parametrize("module", CORE)
def test_core_module_imports_only_what_is_allowed(module: str) -> None:
    one_variable_of_the_environment = {"os"} if module == "native.py" else set()
    assert imported_roots(PACKAGE / module) <= ALLOWED | one_variable_of_the_environment


def test_core_does_not_import_its_transports() -> None:
    for module in CORE:
        assert "transports" not in (PACKAGE / module).read_text().replace("dspark_proto.transports", "")


def test_transports_add_only_their_library_to_the_standard_one() -> None:
    roots = set().union(*(imported_roots(path) for path in (PACKAGE / "transports").glob("*.py")))
    assert roots - ALLOWED - sys.stdlib_module_names <= {"zmq", "ucxx"}


def test_public_names_exist_and_are_sorted() -> None:
    assert all(hasattr(dspark_proto, name) for name in dspark_proto.__all__)
    assert len(set(dspark_proto.__all__)) == len(dspark_proto.__all__)


def test_little_endian_views_are_native_here() -> None:
    """Consumers may view q rows without a byte swap on every supported machine."""
    assert sys.byteorder == "little"
