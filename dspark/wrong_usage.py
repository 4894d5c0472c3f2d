"""Wrong usage of the conformance commands exits with 5, for 2 already says that a SHOULD is broken.

Only the exit code is changed: the message is the parser's own, or one line for a `UserError`. Called by `cli`, as the
class of the command group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import typer
from typer.core import TyperGroup

from dspark.errors import UserError

USAGE: Final = 5
"""`dspark_proto.conformance.ExitCode.USAGE`, without the import of the harness."""

_UsageError: Final[Any] = typer.BadParameter.__mro__[1]
"""What the parser raises for every wrong option, argument and command; typer does not export it."""


@contextmanager
def _exits_with_five() -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        error.exit_code = USAGE
        raise
    except UserError as error:
        typer.echo(f"dspark: {error}", err=True)
        raise typer.Exit(USAGE) from None


class ConformanceGroup(TyperGroup):
    """The group `dspark conformance`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Options of the group itself."""
        with _exits_with_five():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """The command, its options and its run."""
        with _exits_with_five():
            return super().invoke(ctx)
