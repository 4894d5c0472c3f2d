"""`dspark chaos`: options, defaults, output, exit code. Called by the `dspark` command; the work is done in `run`."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

SOAK_MINUTES, SOAK_CONCURRENCY, SOAK_FAULT_EVERY_S = 30.0, 16, 10.0


class PairName(StrEnum):
    """Names of `pairs.PAIRS`."""

    TINY = "tiny"
    EMBEDDED = "embedded"


class Scenario(StrEnum):
    """Names of `programs.PROGRAMS`."""

    MIXED = "mixed"
    TAKEOVER = "takeover"
    SWAP = "swap"


def chaos(
    minutes: Annotated[float, typer.Option(min=0.1, help="How long to do harm.")] = 10.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the plan of faults and of the mix of requests.")] = 1,
    concurrency: Annotated[int | None, typer.Option(min=1, max=64, help="Requests at once.")] = None,
    fault_every: Annotated[float, typer.Option(min=0.5, help="Seconds from one fault to the next.")] = 10.0,
    pair: Annotated[
        PairName, typer.Option(help="'tiny': random weights, made on the fly; 'embedded': what ships.")
    ] = PairName.EMBEDDED,
    workers: Annotated[int, typer.Option(min=1, max=8, help="Worker processes, each behind a proxy of its own.")] = 2,
    scenario: Annotated[
        Scenario,
        typer.Option(help="'mixed'; 'takeover': workers are killed under streams; 'swap': rolling swap under load."),
    ] = Scenario.MIXED,
    soak: Annotated[bool, typer.Option("--soak", help="30 minutes, 16 requests at once, a fault every 10 s.")] = False,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds after which a request counts as hung.")] = 120.0,
    report: Annotated[Path | None, typer.Option(help="Directory for history, result and logs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Real processes, real faults, judged on tokens; exit code 0 only when each fault took effect and none was felt."""
    from dspark import roles

    roles.prepare_machine("", "cpu", "fp32", 1, 1, 16)
    from dspark.chaos import report as reports
    from dspark.chaos import run as runs

    options = runs.Options(
        seconds=60 * (SOAK_MINUTES if soak else minutes),
        seed=seed,
        concurrency=concurrency or (8 if scenario is Scenario.TAKEOVER else SOAK_CONCURRENCY),
        fault_every_s=SOAK_FAULT_EVERY_S if soak else fault_every,
        pair=pair.value,
        workers=workers,
        report=report or Path("runs") / time.strftime("chaos-%Y%m%d-%H%M%S"),
        deadline_s=deadline,
        program=scenario.value,
    )
    with runs.interruptible() as interrupt:
        values = runs.run(options, interrupt, lambda text: print(text, file=sys.stderr, flush=True))
    typer.echo(reports.as_json(values) if as_json else reports.as_text(values))
    raise typer.Exit(0 if values["ok"] else 1)


def register(app: typer.Typer) -> None:
    """Mount `chaos` as a command of `app`."""
    app.command()(chaos)


if __name__ == "__main__":
    typer.run(chaos)
