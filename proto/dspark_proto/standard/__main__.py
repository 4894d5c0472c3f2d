"""`python -m dspark_proto.standard`: exit code 1 when SPEC.md is out of date; `--write` brings it up to date.

`--requirements` prints `conformance/requirements.py` instead. Called by hand and by tests; writes no other file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .document import SPECIFICATION, requirements, written
from .sentences import requirements_module


def main(arguments: Sequence[str], path: Path = SPECIFICATION) -> int:
    """Compare ``path`` with what it should be, or write it."""
    old = path.read_text("utf-8")
    if "--requirements" in arguments:
        print(requirements_module(requirements(old)), end="")
        return 0
    new = written(old)
    if "--write" in arguments:
        path.write_text(new, "utf-8")
        return 0
    if old != new:
        print(f"{path}: out of date: python -m dspark_proto.standard --write", file=sys.stderr)
    return int(old != new)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
