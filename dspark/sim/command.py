"""`dspark sim`: how many rounds the production protocol stands in worlds full of faults, and what it got wrong.

Runs a campaign, or one world of it, and prints what must be zero, what was injected and how fast it healed. A world
that fails is shrunk to the faults that matter, with the command that shows it again. An interrupt ends the run after
the world under way, with its summary. Called by the `dspark` command; heavy modules are imported when it runs.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dspark.sim.campaign import Tally

_PROGRESS_SECONDS, _LOG_SECONDS = 5.0, 60.0
"""Between two lines of progress: for somebody who looks at a terminal, and for a log file."""
_SHRUNK = 3


class Interrupt:
    """Set by SIGINT."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self, *_: object) -> None:
        """Signal handler."""
        self.asked = True


@contextmanager
def _interruptible() -> Iterator[Interrupt]:
    interrupt = Interrupt()
    before = signal.signal(signal.SIGINT, interrupt.ask)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


class Progress:
    """A line on stderr every few seconds; every minute where it is no terminal."""

    def __init__(self) -> None:
        self._shown = 0.0
        self._every = _PROGRESS_SECONDS if sys.stderr.isatty() else _LOG_SECONDS

    def __call__(self, tally: Tally, seconds: float) -> None:
        if seconds - self._shown < self._every:
            return
        self._shown = seconds
        faults, hours = sum(tally.injected.values()), tally.virtual_ns / 3.6e12
        typer.echo(
            f"{tally.rounds:,} rounds, {tally.worlds} worlds, {faults:,} faults, {hours:.2f} virtual hours, "
            f"{tally.rounds / seconds:,.0f} rounds/s, {sum(tally.violations.values())} violations",
            err=True,
        )


def _table(result: dict[str, Any]) -> str:
    plain = {key: value for key, value in result.items() if not isinstance(value, dict | list)}
    lines = [
        f"{key:20} {value:>14,}" if isinstance(value, int) else f"{key:20} {value}" for key, value in plain.items()
    ]
    lines += [f"{'fault':20} {'set':>8} {'injected':>9} {'verified':>9}"]
    lines += [f"{kind:20} {n['set']:>8} {n['injected']:>9} {n['verified']:>9}" for kind, n in result["by_kind"].items()]
    return "\n".join(lines)


def _explain(result: dict[str, Any], plant: str | None, kinds: tuple[str, ...]) -> None:
    """Say how to see the failures again, and bring the first ones down to the faults that matter."""
    from dspark.sim.shrink import command, shrink

    for failure in result["failures"]:
        where = f"world {failure['world']} of {failure['rounds']} rounds"
        typer.echo(f"{failure['kind']} in {where}: {failure['detail']}", err=True)
    if result["failures"]:
        typer.echo("looking for the faults that matter; an interrupt ends the search", err=True)
    for failure in result["failures"][:_SHRUNK]:
        found = shrink(result["seed"], failure["world"], failure["rounds"], failure["kind"], plant, kinds)
        typer.echo(f"world {failure['world']}: {found.violation}", err=True)
        for fault in found.faults:
            typer.echo(f"  {fault}", err=True)
        typer.echo(f"  {command(found)}", err=True)


def sim(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to complete, at least.")] = 100_000,
    seed: Annotated[int, typer.Option(min=0, help="The same seed makes the same worlds.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    world: Annotated[int | None, typer.Option(min=0, help="Run this world of the seed alone.")] = None,
    faults: Annotated[str | None, typer.Option(help="Keep these faults of the world: 3,17,42, or none.")] = None,
    kinds: Annotated[str | None, typer.Option(help="Only these kinds of faults, many of them: drop,corrupt.")] = None,
    plant: Annotated[str | None, typer.Option(help="Plant this bug first, to see it caught; `list` names all.")] = None,
    trace: Annotated[Path | None, typer.Option(dir_okay=False, help="Write every event as a line of JSON.")] = None,
) -> None:
    """Run the wire protocol, draft pool and acceptance in simulated worlds full of faults; exit code 1 if one fails."""
    from dspark.sim import campaign, plants
    from dspark.sim.world import World

    if plant == "list":
        typer.echo("\n".join(f"{name:24} {one.summary}" for name, one in plants.PLANTS.items()))
        raise typer.Exit(0)
    if plant is not None and plant not in plants.PLANTS:
        raise typer.BadParameter(f"no bug is called {plant!r}; `--plant list` names all", param_hint="--plant")
    kept, chosen = _indexes(faults), _known(kinds)
    started = time.monotonic()
    with (
        _interruptible() as interrupt,
        trace.open("w") if trace else nullcontext() as lines,
        plants.planted(plant) if plant else nullcontext(),
    ):
        if world is None:
            tally = campaign.run(seed, rounds, Progress(), lambda: interrupt.asked, lines, chosen)
        else:
            tally = campaign.Tally()
            tally.add(World(seed, world, rounds, kept, lines, chosen).run(), rounds)
    result = campaign.report(tally, seed, time.monotonic() - started)
    typer.echo(json.dumps(result) if as_json else _table(result))
    if world is None or faults is None:
        _explain(result, plant, chosen)
    raise typer.Exit(0 if tally.clean else 1)


def _indexes(faults: str | None) -> list[int] | None:
    if faults is None:
        return None
    try:
        return [int(one) for one in faults.split(",")] if faults not in ("", "none") else []
    except ValueError as error:
        raise typer.BadParameter("name faults by their numbers: 3,17,42", param_hint="--faults") from error


def _known(kinds: str | None) -> tuple[str, ...]:
    from dspark.sim.faults import KINDS

    chosen = tuple(kinds.split(",")) if kinds else ()
    for kind in chosen:
        if kind not in KINDS:
            raise typer.BadParameter(f"no fault is called {kind!r}: {', '.join(KINDS)}", param_hint="--kinds")
    return chosen


def register(app: typer.Typer) -> None:
    """Mount `sim` as a command of `app`."""
    app.command()(sim)
