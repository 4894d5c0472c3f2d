"""`dspark fuzz`: how many bent frames the wire protocol's connections stand, and what got through.

Runs campaigns of `dspark_proto.fuzzing` in this process, or in `--jobs` processes that take turns at the batches; sums
up, saves what escaped, and runs a saved finding again. Any batch depends on the seed and its number alone. An
interrupt ends the run after the batch, with its summary. Called by the `dspark` command; it opens no connection and
judges nothing itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dspark_proto.fuzzing import Campaign

Show = Callable[[int, int, float], None]
"""Called with the frames and escapes so far and the seconds since the start."""

_PROGRESS_SECONDS = 1.0
_SUMS = ("frames", "mutated", "accepted", "refused", "escapes", "trials", "traced_frames")
_MAXIMA = ("peak_traced_bytes", "max_frame_us")
_COUNTERS = ("by_code", "by_mutation")


@dataclass(frozen=True)
class Share:
    """Which part of a campaign a process runs: batches `first`, `first + stride`, ... until `frames` or `minutes`."""

    seed: int
    frames: int
    minutes: float | None = None
    first: int = 0
    stride: int = 1


@dataclass
class Stop:
    """Set by an interrupt; the run ends after the batch under way. Jobs end when their standard input does."""

    asked: bool = False
    children: list[subprocess.Popen[str]] = field(default_factory=list)

    def ask(self, *_: object) -> None:
        """Signal handler."""
        self.asked = True
        for child in self.children:
            if child.stdin is not None:
                child.stdin.close()


@contextmanager
def _interruptible() -> Iterator[Stop]:
    """Turn SIGINT into a request for as long as the block runs."""
    stop = Stop()
    before = signal.signal(signal.SIGINT, stop.ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def vectors_directory() -> Path | None:
    """The golden vectors of a source checkout; None in an installed package."""
    import dspark_proto

    found = Path(dspark_proto.__file__).parent.parent / "vectors"
    return found if (found / "frames.json").exists() else None


def run_share(share: Share, stop: Stop, show: Show | None = None) -> dict[str, Any]:
    """Run `share` in this process; returns the result object (see docs/internals/fuzzing.md for the keys).

    `show` is called about once a second.
    """
    from dspark_proto.fuzzing import Campaign

    campaign = Campaign(share.seed, vectors_directory())
    started = shown = time.monotonic()
    ends = None if share.minutes is None else started + 60 * share.minutes
    batch = share.first
    while campaign.tally.frames < share.frames and not stop.asked and (ends is None or time.monotonic() < ends):
        campaign.run(batch)
        batch += share.stride
        if show and time.monotonic() - shown >= _PROGRESS_SECONDS:
            shown = time.monotonic()
            show(campaign.tally.frames, campaign.tally.escapes, shown - started)
    return _result(campaign, share.seed, time.monotonic() - started, stop.asked)


def _result(campaign: Campaign, seed: int, seconds: float, interrupted: bool) -> dict[str, Any]:
    tally = campaign.tally
    return {
        "frames": tally.frames,
        "mutated": tally.mutated,
        "accepted": tally.accepted,
        "refused": tally.refused,
        "by_code": dict(tally.by_code.most_common()),
        "escapes": tally.escapes,
        "seconds": round(seconds, 3),
        "frames_per_s": round(tally.frames / max(seconds, 1e-9), 1),
        "peak_traced_bytes": tally.peak_traced_bytes,
        "traced_frames": tally.traced_frames,
        "max_frame_us": tally.max_frame_ns // 1000,
        "trials": tally.trials,
        "by_mutation": dict(tally.by_mutation.most_common()),
        "seed": seed,
        "jobs": 1,
        "interrupted": interrupted,
        "findings": [finding.to_json() for finding in tally.findings],
    }


def _show_progress(frames: int, escapes: int, seconds: float) -> None:
    typer.echo(f"{frames:,} frames, {frames / seconds:,.0f} a second, {escapes} escapes", err=True)


def run_jobs(share: Share, jobs: int, stop: Stop, show: Show | None = None) -> dict[str, Any]:
    """Run `share` in `jobs` processes and add up their results. Raises `RuntimeError` when one of them fails."""
    started = time.monotonic()
    children = [_start_job(share, number, jobs) for number in range(jobs)]
    stop.children += children
    reports: list[dict[str, Any]] = [{"frames": 0, "escapes": 0} for _ in children]
    readers = [threading.Thread(target=_follow, args=(child, reports, number)) for number, child in enumerate(children)]
    for reader in readers:
        reader.start()
    for reader in readers:
        while reader.is_alive():
            reader.join(_PROGRESS_SECONDS)
            if show:
                frames, escapes = (sum(int(one[key]) for one in reports) for key in ("frames", "escapes"))
                show(frames, escapes, time.monotonic() - started)
    codes = [child.wait() for child in children]
    if any(codes) or any("findings" not in one for one in reports):
        raise RuntimeError(f"a job ended without a result (exit codes {codes})")
    return merged(reports, time.monotonic() - started)


def _start_job(share: Share, number: int, jobs: int) -> subprocess.Popen[str]:
    frames = share.frames // jobs + (number < share.frames % jobs)
    command = [sys.executable, "-m", "dspark.wire_fuzz", "--frames", str(frames), "--seed", str(share.seed)]
    command += ["--first-batch", str(share.first + number * share.stride), "--stride", str(share.stride * jobs)]
    command += [] if share.minutes is None else ["--minutes", str(share.minutes)]
    # In a session of its own: an interrupt of the terminal reaches the parent alone, which then asks each job.
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)


def _follow(child: subprocess.Popen[str], reports: list[dict[str, Any]], number: int) -> None:
    """Keep the newest line of a job: progress, and at last its result."""
    assert child.stdout is not None
    for line in child.stdout:
        reports[number] = json.loads(line)


def merged(reports: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """One result object for several: sums, maxima, and each finding once."""
    total: dict[str, Any] = {key: sum(one[key] for one in reports) for key in _SUMS}
    total |= {key: max(one[key] for one in reports) for key in _MAXIMA}
    for key in _COUNTERS:
        names = {name for one in reports for name in one[key]}
        sums = {name: sum(one[key].get(name, 0) for one in reports) for name in names}
        total[key] = dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))
    found = {(finding["kind"], finding["detail"]): finding for one in reports for finding in one["findings"]}
    total |= {"seconds": round(seconds, 3), "frames_per_s": round(total["frames"] / max(seconds, 1e-9), 1)}
    total |= {"seed": reports[0]["seed"], "jobs": len(reports)}
    return total | {"interrupted": any(one["interrupted"] for one in reports), "findings": list(found.values())}


def save(finding: dict[str, Any], directory: Path) -> Path:
    """Write a finding to a file of its own; returns the path."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"{finding['seed']}-{finding['batch']}-{finding['kind']}"
    path = next(
        path
        for path in (directory / f"{stem}{suffix}.json" for suffix in ("", *(f"-{n}" for n in range(1, 1000))))
        if not path.exists() or json.loads(path.read_text("utf-8")) == finding
    )
    path.write_text(json.dumps(finding, indent=1) + "\n", "utf-8")
    return path


def run_again(path: Path) -> str:
    """What a saved finding does now; empty when the connections hold. Raises `ValueError` for another file."""
    from dspark_proto.fuzzing import Finding, replay

    try:
        finding = Finding.from_json(json.loads(path.read_text("utf-8")))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a finding: {error}") from error
    escape = replay(finding)
    return "" if escape is None else str(escape)


def _table(result: dict[str, Any]) -> str:
    shown = (*_SUMS[:-2], "seconds", "frames_per_s", *_MAXIMA, "trials", "seed")
    lines = [f"{key:18} {result[key]:>14,}" for key in shown]
    lines += [f"  {name:24} {count:>12,}" for name, count in result["by_code"].items()]
    return "\n".join(lines)


def _report(result: dict[str, Any], directory: Path, as_json: bool) -> None:
    findings = result.pop("findings")
    files = [str(save(finding, directory)) for finding in findings]
    result["findings"] = [
        {"kind": one["kind"], "detail": one["detail"], "file": file} for one, file in zip(findings, files, strict=True)
    ]
    typer.echo(json.dumps(result) if as_json else _table(result))
    for one in result["findings"]:
        typer.echo(f"{one['kind']}: {one['detail']}\n  dspark fuzz --replay {one['file']}", err=True)


def fuzz(
    frames: Annotated[int, typer.Option(min=1, help="Frames to deliver, at least.")] = 100_000,
    seed: Annotated[int, typer.Option(min=0, help="The same seed bends the same frames.")] = 1,
    minutes: Annotated[float | None, typer.Option(min=0, help="Stop after so many minutes.")] = None,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Processes.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    out: Annotated[Path, typer.Option(help="Directory for what escaped.")] = Path("fuzz-findings"),
    replay: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Run this saved finding again, and nothing else.")
    ] = None,
) -> None:
    """Bend frames of the wire protocol and feed them to both connections; exit code 1 when one got through."""
    if replay is not None:
        try:
            escape = run_again(replay)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--replay") from error
        typer.echo(escape or "the connections hold")
        raise typer.Exit(1 if escape else 0)
    share = Share(seed, frames, minutes)
    with _interruptible() as stop:
        show = _show_progress if sys.stderr.isatty() else None
        result = run_share(share, stop, show) if jobs == 1 else run_jobs(share, jobs, stop, show)
    _report(result, out, as_json)
    raise typer.Exit(1 if result["escapes"] else 0)


def register(app: typer.Typer) -> None:
    """Mount `fuzz` as a command of `app`."""
    app.command()(fuzz)


def _job(
    frames: Annotated[int, typer.Option()],
    seed: Annotated[int, typer.Option()],
    first_batch: int = 0,
    stride: int = 1,
    minutes: float | None = None,
) -> None:
    """One job of `run_jobs`: lines of JSON with how far it is, and at last its result."""
    stop = Stop()
    threading.Thread(target=_stop_at_end_of_input, args=(stop,), daemon=True).start()
    share = Share(seed, frames, minutes, first_batch, stride)
    _print(run_share(share, stop, lambda done, escapes, _: _print({"frames": done, "escapes": escapes})))


def _stop_at_end_of_input(stop: Stop) -> None:
    """The parent has closed its end, or is gone."""
    while os.read(sys.stdin.fileno(), 64):
        pass
    stop.ask()


def _print(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    typer.run(_job)
