"""The module `conformance/requirements.py`: the standard's sentences for reports, which have no file beside them.

`python -m dspark_proto.standard --requirements` prints it. Called by `__main__` and by a test; writes no file.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Final

from .document import Requirement

_HEAD: Final = '''"""The requirements of SPEC.md that cases refer to: anchor -> sentence, shown with every failure.

A copy of the standard's sentences, so that a report needs no file beside it; made by `python -m dspark_proto.standard
--requirements`, and a test holds it to SPEC.md. Called by `record`; decides nothing.
"""

from __future__ import annotations

from typing import Final

REQUIREMENTS: Final[dict[str, str]] = {
'''
_LINE: Final = 120
_PIECE: Final = 110


def _literal(text: str) -> str:
    """A string literal with the quotes that need no escape, where there are such."""
    quote = "'" if '"' in text and "'" not in text else '"'
    escaped = text.replace("\\", "\\\\").replace(quote, f"\\{quote}")
    return f"{quote}{escaped}{quote}"


def _entry(requirement: Requirement) -> str:
    line = f'    "{requirement.anchor}": {_literal(requirement.sentence)},'
    if len(line) <= _LINE:
        return line
    pieces = textwrap.wrap(
        requirement.sentence, _PIECE, drop_whitespace=False, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join([f'    "{requirement.anchor}": (', *(f"        {_literal(piece)}" for piece in pieces), "    ),"])


def requirements_module(requirements: Iterable[Requirement]) -> str:
    """The whole file."""
    return _HEAD + "".join(f"{_entry(one)}\n" for one in requirements) + "}\n"
