"""Building the kernels of rows for a test, with the flags of the package and every warning an error."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "dspark" / "native"
COMPILER = shutil.which("cc") or shutil.which("gcc")
STRICT = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Wvla", "-Werror"]


def extension() -> dict[str, object]:
    """How the package is built, as pyproject.toml says it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    found: list[dict[str, object]] = project["tool"]["setuptools"]["ext-modules"]
    return next(module for module in found if module["name"] == "dspark.native._rows")


def package_sources() -> list[Path]:
    """What the package's build compiles."""
    named = extension()["sources"]
    assert isinstance(named, list)
    return [ROOT / source for source in named]


def compiled(folder: Path, *options: str, sources: Sequence[Path] | None = None) -> Path:
    assert COMPILER is not None
    target = folder / "_rows.so"
    flags = extension()["extra-compile-args"]
    assert isinstance(flags, list)
    inputs = [str(source) for source in (package_sources() if sources is None else sources)]
    command = [COMPILER, *flags, *STRICT, *options, f"-I{NATIVE}", "-fPIC", "-shared", "-o", str(target), *inputs]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return target
