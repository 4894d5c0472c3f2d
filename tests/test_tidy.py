"""House rules that a machine can check, over every tracked Python file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(p for room in ("dspark", "proto", "workers", "spark") for p in (ROOT / room).rglob("*.py"))
ALL = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))]
LONGEST_LINE, LONGEST_FUNCTION, LONGEST_MODULE = 120, 60, 600
FORBIDDEN_IMPORTS = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
UPWARD = {
    "proto": {"dspark", "dspark_workers", "dspark_spark", "torch", "numpy"},
    "workers": {"dspark_spark"},
    "spark": {"dspark_workers"},
}
COMPOSITION_ROOT = {"cli.py", "roles.py", "chat.py", "doctor.py", "launch.py", "served_pair.py"}
COMPOSING_FOLDERS = {"sim", "chaos", "model_check"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("path", ALL, ids=name)
def test_files_are_tidy(path: Path) -> None:
    text = path.read_text("utf-8")
    lines = text.splitlines()
    assert len(lines) <= LONGEST_MODULE
    assert [i for i, line in enumerate(lines, 1) if len(line) > LONGEST_LINE] == []
    assert [i for i, line in enumerate(lines, 1) if "\t" in line or line != line.rstrip()] == []


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_functions_are_short_and_modules_say_what_they_are(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    if tree.body:
        assert ast.get_docstring(tree), "a module head says what the module is for"
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {f.name: (f.end_lineno or 0) - f.lineno + 1 for f in functions}
    assert {n: size for n, size in long.items() if size > LONGEST_FUNCTION} == {}


@pytest.mark.parametrize("path", ALL, ids=name)
def test_nothing_deserialises_foreign_code(path: Path) -> None:
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    assert FORBIDDEN_IMPORTS & set(imports(tree)) == set()
    calls = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
    assert [c.id for c in calls if isinstance(c, ast.Name) and c.id in ("eval", "exec")] == []
    loads = [c for c in calls if isinstance(c, ast.Attribute) and c.attr == "load"]
    assert [c for c in loads if isinstance(c.value, ast.Name) and c.value.id == "torch"] == []


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_nothing_imports_upwards(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    used = set(imports(ast.parse(path.read_text("utf-8"))))
    composes = path.name in COMPOSITION_ROOT or path.parent.name in COMPOSING_FOLDERS
    if room == "dspark" and not composes:
        assert used & {"dspark_workers", "dspark_spark"} == set()
    assert used & UPWARD.get(room, set()) == set()


def test_documents_link_to_files_that_exist() -> None:
    documents = [ROOT / "README.md", ROOT / "proto" / "SPEC.md", *(ROOT / "docs").rglob("*.md")]
    missing = []
    for document in documents:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text("utf-8")):
            if "://" not in target and not (document.parent / target).exists():
                missing.append(f"{name(document)}: {target}")
    assert missing == []
