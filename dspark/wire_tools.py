"""Commands around the wire: explain a frame or a capture, replay a capture, stand in the middle, test a codec.

``register`` adds them to the group that the command line mounts (`dspark conformance`). Nothing heavy is imported
before a command runs. Exit codes: 0 as expected, 1 a requirement is broken, 4 the other side cannot be reached, 5
usage. Called by the composition root; the work is done in ``dspark_proto.capture`` and ``dspark_proto.codec_pipe``.
"""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

if TYPE_CHECKING:
    from dspark_proto.capture import Entry, Fault, Report, TransportKind
    from dspark_proto.codec_pipe import Judgement
    from dspark_proto.transports import ClientTransport, ServerTransport

BROKEN: Final = 1
UNREACHABLE: Final = 4
USAGE: Final = 5

Brief = Annotated[bool, typer.Option("--brief", help="One line per record.")]
AllChecks = Annotated[bool, typer.Option("--checks", help="Show every check of every frame, also those that passed.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    for command in (explain, replay, capture, codec):
        app.command()(command)


def explain(
    source: Annotated[str, typer.Argument(help="A .dspcap file, a file with one frame, or a frame in hex.")],
    brief: Brief = False,
    checks: AllChecks = False,
) -> None:
    """Say in plain English what a frame or a capture holds, and which requirement a fault breaks."""
    from dspark_proto.capture import CaptureError, CaptureReader, explain_capture, explain_frame
    from dspark_proto.capture.records import MAGIC

    path = Path(source)
    try:
        if not path.is_file():
            typer.echo("\n".join(explain_frame(_from_hex(source), checks)))
        elif not _starts_with(path, MAGIC):
            typer.echo("\n".join(explain_frame(_one_frame(path), checks)))
        else:
            with CaptureReader(path) as reader:
                for line in explain_capture(reader, brief, checks):
                    typer.echo(line)
    except (CaptureError, OSError) as error:
        _stop(str(error), USAGE)


def replay(
    file: Annotated[Path, typer.Argument(help="A .dspcap file that was recorded from the start of a connection.")],
    to: Annotated[
        str, typer.Option(help="Address of a drafter, e.g. tcp://127.0.0.1:7777; empty: this package's own, in memory.")
    ] = "",
    connection: Annotated[int | None, typer.Option(min=0, help="Connection of the capture; default the first.")] = None,
    same_rows: Annotated[bool, typer.Option("--same-rows", help="Rows and tokens must be the same too.")] = False,
    timeout_ms: Annotated[int, typer.Option(min=1, max=600_000, help="How long to wait for an answer.")] = 2000,
    as_json: Json = False,
) -> None:
    """Send the verifier's side of a capture again, and compare the answers with the captured ones."""
    from dspark_proto.capture import CaptureError, connection_entries, read_frames

    try:
        entries = connection_entries(read_frames(file), connection)
        report = _replay(entries, to, timeout_ms, same_rows)
    except (CaptureError, OSError) as error:
        _stop(str(error), UNREACHABLE if isinstance(error, ConnectionError) else USAGE)
    typer.echo(_report_json(report) if as_json else _report_text(report, entries))
    raise typer.Exit(BROKEN if report.faults else 0)


def capture(
    to: Annotated[str, typer.Option(help="Address of the drafter, e.g. tcp://127.0.0.1:7777.")],
    listen: Annotated[str, typer.Option(help="Where the verifier connects; port 0 takes a free one.")] = (
        "tcp://127.0.0.1:0"
    ),
    output: Annotated[Path | None, typer.Option(help="New .dspcap file.")] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(help="Fault to inject, e.g. 'corrupt,dir=down,type=ROW,every=7,fix=1'. Repeat it for more."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the injected faults.")] = 0,
    seconds: Annotated[float, typer.Option(min=0, help="Stop by itself after this time; 0: at SIGINT or SIGTERM.")] = 0,
) -> None:
    """Stand between a verifier and a drafter: pass frames, record them, and inject faults by rule."""
    from dspark_proto.capture import CaptureWriter, Middle, RuleError, parse_rule

    try:
        rules = [parse_rule(text) for text in rule or ()]
        server = _listen(listen)
    except (RuleError, OSError) as error:
        _stop(str(error), USAGE)
    try:
        writer = CaptureWriter(output, tool="dspark conformance capture") if output else None
    except OSError as error:
        server.close()
        _stop(f"--output {error}", USAGE)
    middle = Middle(server, lambda: _connect(to), rules, seed, writer, _kind(listen), _log_fault)
    typer.echo(f"middle ready {middle.endpoint}")
    try:
        _turn_until_told(middle.turn, seconds)
    finally:
        middle.close()
        if writer:
            writer.close()
    lost = f", {middle.undeliverable} undeliverable" if middle.undeliverable else ""
    typer.echo(f"{middle.passed} frames passed, {middle.faults} faults injected{lost}")


def codec(
    command: Annotated[str, typer.Argument(help="Testee, e.g. 'python -m dspark_proto.codec_pipe.testee'.")],
    vectors: Annotated[Path, typer.Option(help="Folder of golden vectors.")] = Path("proto/vectors"),
    timeout_ms: Annotated[int, typer.Option(min=1, max=600_000, help="How long to wait for one answer.")] = 5000,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the cases that passed, too.")] = False,
    as_json: Json = False,
) -> None:
    """Hold a codec in any language to the golden vectors, over its stdin and stdout."""
    from dspark_proto.codec_pipe import run_vectors

    try:
        judgements = run_vectors(shlex.split(command), vectors, timeout_ms / 1000)
    except (OSError, ValueError) as error:
        _stop(str(error), UNREACHABLE if isinstance(error, OSError) else USAGE)
    if not judgements:
        _stop(f"no vectors in {vectors}", USAGE)
    typer.echo(_codec_json(judgements) if as_json else _codec_text(judgements, verbose))
    raise typer.Exit(_codec_exit(judgements))


def _stop(text: str, code: int) -> Any:
    typer.echo(f"dspark: {text}", err=True)
    raise typer.Exit(code)


def _from_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise OSError(f"{text[:60]!r} is neither a file nor a frame in hex") from None


def _starts_with(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def _one_frame(path: Path) -> bytes:
    """A frame in a file of its own; one byte above the limit is enough to see that it is too long."""
    from dspark_proto.limits import FRAME_BYTES_MAX

    with path.open("rb") as file:
        return file.read(FRAME_BYTES_MAX + 1)


def _connect(endpoint: str) -> ClientTransport:
    """A client for ``endpoint``. Raises ``ConnectionError`` for an address that cannot be used."""
    from dspark_proto.transports import TransportError
    from dspark_proto.transports.opening import open_client

    try:
        return open_client(endpoint)
    except TransportError as error:
        raise ConnectionError(str(error)) from None


def _listen(endpoint: str) -> ServerTransport:
    """A server on ``endpoint``, which has to be loopback. Raises ``OSError``."""
    from dspark_proto import LocalProtocolError
    from dspark_proto.transports import TransportError
    from dspark_proto.transports.opening import open_server

    try:
        return open_server(endpoint)
    except LocalProtocolError as error:
        raise OSError(f"--listen {endpoint}: {error.remedy}") from None
    except TransportError as error:
        raise OSError(f"--listen {error}") from None


def _kind(endpoint: str) -> TransportKind:
    """What carries the frames, for the records of the capture."""
    from dspark_proto.capture import TransportKind

    named = {"plain+tcp": TransportKind.TCP, "tls+tcp": TransportKind.TCP, "ucx": TransportKind.UCX}
    return named.get(endpoint.partition("://")[0], TransportKind.ZMQ)


def _replay(entries: list[Entry], to: str, timeout_ms: int, same_rows: bool) -> Report:
    """Replay against ``to``, or in memory when it is empty."""
    from dspark_proto.capture import LiveDrafter, OwnDrafter, replay

    if not to:
        return replay(entries, OwnDrafter(entries), timeout_ms, same_rows)
    client = _connect(to)
    try:
        return replay(entries, LiveDrafter(client), timeout_ms, same_rows)
    finally:
        client.close()


def _turn_until_told(turn: Callable[[], None], seconds: float) -> None:
    import time

    told: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _frame: told.append(received))
    until = time.monotonic() + seconds if seconds else float("inf")
    while not told and time.monotonic() < until:
        turn()


def _log_fault(fault: Fault) -> None:
    typer.echo(str(fault))


def _report_text(report: Report, entries: list[Entry]) -> str:
    lines = [
        f"{len(entries)} frames in the capture, {report.sent} sent again",
        f"answers: {report.identical} byte for byte the same, {report.equivalent} the same in all that is fixed",
        f"retries that got the first reply again: {report.retries}",
    ]
    lines += [f"FAULT {one}" if one.is_fault else f"note  {one}" for one in report.differences]
    return "\n".join([*lines, "a requirement is broken" if report.faults else "no requirement is broken"])


def _report_json(report: Report) -> str:
    differences = [
        {"answer": one.answer, "what": one.what, "requirement": one.anchor or None} for one in report.differences
    ]
    numbers = {name: getattr(report, name) for name in ("sent", "identical", "equivalent", "retries")}
    return json.dumps(numbers | {"differences": differences, "faults": len(report.faults)}, indent=2)


def _codec_text(judgements: list[Judgement], verbose: bool) -> str:
    from dspark_proto.codec_pipe import Verdict

    shown = [str(one) for one in judgements if verbose or one.verdict not in (Verdict.PASSED, Verdict.UNSUPPORTED)]
    counts = {verdict: sum(one.verdict is verdict for one in judgements) for verdict in Verdict}
    total = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items() if count)
    return "\n".join([*shown, total])


def _codec_json(judgements: list[Judgement]) -> str:
    cases = [
        {"id": one.case.id, "requirement": one.case.requirement, "verdict": one.verdict.value, "detail": one.detail}
        for one in judgements
    ]
    return json.dumps({"cases": cases}, indent=2)


def _codec_exit(judgements: list[Judgement]) -> int:
    """127 when nothing was supported, so that a run over many testees can tell it from a failure."""
    from dspark_proto.codec_pipe import Verdict
    from dspark_proto.codec_pipe.process import UNSUPPORTED_EXIT

    verdicts = {one.verdict for one in judgements}
    if verdicts & {Verdict.TIMEOUT, Verdict.CRASHED}:
        return UNREACHABLE
    if Verdict.FAILED in verdicts:
        return BROKEN
    return UNSUPPORTED_EXIT if verdicts == {Verdict.UNSUPPORTED} else 0
