"""Whether the C kernels are used: the environment, the file beside the package, and what it was built from."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark import native

from .compiler import COMPILER, NATIVE, ROOT, compiled, extension, package_sources

NAME = f"_rows{native.EXTENSION_SUFFIXES[0]}"
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


def test_zero_in_the_environment_forces_numpy() -> None:
    script = "from dspark import native; print(native.choice())"
    for value, expected in (("0", "numpy (DSPARK_NATIVE=0)"), ("1", str(native.choose(environment={})))):
        environment = {**os.environ, "DSPARK_NATIVE": value}
        command = [sys.executable, "-c", script]
        shown = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=60)
        assert shown.stdout.strip() == expected, shown.stderr


def test_without_a_library_numpy_works_and_the_reason_is_given(tmp_path: Path) -> None:
    chosen = native.choose(tmp_path, {})
    assert chosen.library is None
    assert "no C compiler" in str(chosen)


@needs_compiler
@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("dspark_draw", "dspark_drew", "does not load"),
        ("#define INTERFACE ", "#define INTERFACE 9", "built from other sources"),
    ],
    ids=["a function is missing", "another interface"],
)
def test_a_library_of_other_sources_is_not_used(tmp_path: Path, old: str, new: str, reason: str) -> None:
    rows, other = NATIVE / "rows.c", tmp_path / "other.c"
    other.write_text(rows.read_text("utf-8").replace(old, new))
    sources = [other if source == rows else source for source in package_sources()]
    compiled(tmp_path, "-O0", sources=sources).rename(tmp_path / NAME)
    chosen = native.choose(tmp_path, {})
    assert chosen.library is None
    assert reason in chosen.reason


def test_a_file_that_is_no_library_is_not_used(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"no shared object")
    chosen = native.choose(tmp_path, {})
    assert chosen.library is None
    assert "does not load" in chosen.reason


@needs_compiler
def test_a_library_that_fits_is_used(tmp_path: Path) -> None:
    path = compiled(tmp_path, "-O0").rename(tmp_path / NAME)
    chosen = native.choose(tmp_path, {})
    assert isinstance(chosen.library, ctypes.PyDLL)
    assert str(chosen) == f"native ({path})"
    assert native.choose(tmp_path, {native.VARIABLE: "0"}).library is None


def test_the_build_is_optional_and_gives_the_same_results_on_every_cpu() -> None:
    module = extension()
    assert module["optional"] is True
    decode = {"products.c", "attention.c"}
    assert {source.name for source in package_sources()} == {path.name for path in NATIVE.glob("*.c")} - decode
    flags = module["extra-compile-args"]
    assert isinstance(flags, list)
    assert "-ffp-contract=off" in flags
    assert not [flag for flag in flags if "fast-math" in flag or flag.startswith("-m")]
