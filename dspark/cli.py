"""The `dspark` command: options, their help, and nothing else.

Nothing heavy is imported at the top: `--help` answers at once, and a role is imported only when its command runs, after
the OpenMP settings that it needs are in place (see `roles`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark import __version__, roles, wire_fuzz, wire_tools
from dspark.chaos import command as chaos_command
from dspark.sim import command as sim_command
from dspark.wrong_usage import ConformanceGroup

if TYPE_CHECKING:
    from dspark_proto.conformance import Peer

DEFAULT_SPECULATIVE = '{"method": "dspark"}'
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Speculative decoding with the drafter on another machine, and the output distribution kept exact.",
)
bench_app = typer.Typer(no_args_is_help=True, help="Measure: one command per benchmark, ratios from one run.")
app.add_typer(bench_app, name="bench")
conformance_app = typer.Typer(
    cls=ConformanceGroup, no_args_is_help=True, help="Hold a drafter, a verifier or a codec to the wire standard."
)
app.add_typer(conformance_app, name="conformance")
wire_tools.register(conformance_app)


def _device(value: str) -> str:
    if value != "cpu" and not value.startswith("cuda"):
        raise typer.BadParameter("use 'cpu' or 'cuda'")
    return value


def _dtype(value: str) -> str:
    if value not in ("auto", "fp32", "bf16"):
        raise typer.BadParameter("use 'auto', 'fp32' or 'bf16'")
    return value


class RequestGroups(StrEnum):
    """How many groups of requests take turns on the link."""

    AUTO = "auto"
    ONE = "1"
    TWO = "2"

    @property
    def number(self) -> int | None:
        return None if self is RequestGroups.AUTO else int(self.value)


Target = Annotated[
    str, typer.Option(help="'embedded' (SmolLM2-135M-Instruct), a .gguf file, or a Hugging Face model directory.")
]
Speculative = Annotated[
    str,
    typer.Option("--speculative-config", help="JSON as vLLM takes it; num_speculative_tokens 0: target alone."),
]
Device = Annotated[str, typer.Option(callback=_device, help="'cpu' or 'cuda'.")]
Dtype = Annotated[
    str, typer.Option("--dtype", callback=_dtype, help="'fp32', 'bf16', or 'auto': bf16 where the hardware has it.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="OpenMP threads of each role; default one per core.")]
Slots = Annotated[int, typer.Option(min=1, max=256, help="Requests that decode at once.")]
MaxContext = Annotated[int, typer.Option(min=16, max=131072, help="Longest prompt plus answer, in tokens.")]
Host = Annotated[str, typer.Option(help="Interface of the endpoint; loopback unless you mean it.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port of the endpoint; 0 takes a free one.")]
Deadline = Annotated[int, typer.Option(min=1, max=600_000, help="Milliseconds to wait for drafts before going on.")]
AuditRate = Annotated[float, typer.Option(min=0, max=1, help="Share of the drafted tokens whose draw is repeated.")]
AdaptiveDepth = Annotated[
    bool, typer.Option("--adaptive-depth", help="Choose depths by past acceptance and measured step times.")
]
Groups = Annotated[
    RequestGroups,
    typer.Option("--request-groups", help="Groups of requests that take turns on the link; 'auto' measures."),
]
ApiKeys = Annotated[Path | None, typer.Option(help="File with one API key a line; without it none is asked for.")]
SecretFile = Annotated[
    Path | None, typer.Option(help="File with a secret that both ends share, 16 bytes or more, readable by you alone.")
]
CurveSecretKey = Annotated[
    Path | None, typer.Option(help="CURVE: this end's secret key, made by `dspark keys`; for tcp:// (ZeroMQ).")
]
TlsCa = Annotated[Path | None, typer.Option(help="TLS: PEM file of the private CA; for tls+tcp://.")]
TlsCertificate = Annotated[Path | None, typer.Option(help="TLS: PEM file of this end's certificate.")]
TlsKey = Annotated[Path | None, typer.Option(help="TLS: PEM file of this end's private key, readable by you alone.")]
AllowV1 = Annotated[
    bool, typer.Option("--allow-v1", help="Also speak wire version 1: greedy requests only, tokens without rows.")
]
Copy = Annotated[
    bool, typer.Option("--copy/--no-copy", help="Draft what a text has said before where it begins to repeat itself.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Cases = Annotated[
    list[str] | None, typer.Option("--case", help="Case ids or families (ROW, 'DSP2-HEL-*'); repeatable.")
]


class PromptSet(StrEnum):
    """Names of `dspark_spark.held_out.PROMPT_SETS`."""

    SELF = "self"
    PEOPLE = "people"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dspark {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def serve(
    target: Target = "embedded",
    speculative: Speculative = DEFAULT_SPECULATIVE,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    threads: Threads = None,
    slots: Slots = 8,
    max_context: MaxContext = 2048,
    draft_deadline_ms: Deadline = 1000,
    audit_rate: AuditRate = 1.0,
    adaptive_depth: AdaptiveDepth = False,
    request_groups: Groups = RequestGroups.AUTO,
    api_key_file: ApiKeys = None,
    workers: Annotated[
        int, typer.Option(min=1, max=16, help="Drafter worker processes; requests are shared out among them.")
    ] = 1,
    restart_worker: Annotated[bool, typer.Option(help="Start a worker again when it dies.")] = True,
) -> None:
    """Everything on this machine: the endpoint, the Spark verifier, and drafter workers in processes of their own.

    With --workers 2 the requests of a worker that dies are taken over by the other one at once.
    """
    endpoint = roles.Endpoint(host, port, api_key_file)
    machine = roles.prepare_machine(target, device, dtype, threads, slots, max_context)
    with roles.local_workers(machine, speculative, workers, restart=restart_worker) as started:
        roles.say(f"loading the target {target!r} ({machine.dtype}, {device}, {machine.threads} threads)")
        spark = roles.build_spark(
            machine, speculative, [worker.endpoint for worker in started], draft_deadline_ms,
            audit_rate=audit_rate, adaptive_depth=adaptive_depth, request_groups=request_groups.number,
        )  # fmt: skip
        for worker in started:
            worker.wait_ready()
        roles.serve_endpoint(spark, endpoint)


@app.command()
def spark(
    worker: Annotated[
        list[str] | None,
        typer.Option(help="Address of a drafter worker, e.g. tcp://10.0.0.7:7777; repeat it for several."),
    ] = None,
    workers_file: Annotated[
        Path | None,
        typer.Option(
            help="File with one worker a line, ADDRESS [DRAFTER_DIRECTORY], '#' comments; looked at once a second: "
            "a new line joins, the worker of a missing line is drained."
        ),
    ] = None,
    target: Target = "embedded",
    speculative: Speculative = DEFAULT_SPECULATIVE,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    threads: Threads = None,
    slots: Slots = 8,
    max_context: MaxContext = 2048,
    draft_deadline_ms: Deadline = 1000,
    audit_rate: AuditRate = 1.0,
    adaptive_depth: AdaptiveDepth = False,
    request_groups: Groups = RequestGroups.AUTO,
    api_key_file: ApiKeys = None,
    secret_file: SecretFile = None,
    curve_secret_key: CurveSecretKey = None,
    curve_server_key: Annotated[Path | None, typer.Option(help="CURVE: file with the worker's public key.")] = None,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    allow_v1: AllowV1 = False,
) -> None:
    """A Spark verifier with the endpoint, whose drafter workers run elsewhere (`dspark worker`).

    Name them with --worker, or in a file that may be edited while this runs. Requests are shared out among the workers;
    those of a worker that dies go on with another one, or without drafts until there is one. No request notices.
    """
    if bool(worker) == (workers_file is not None):
        raise typer.BadParameter(
            "give the drafter's address (repeat it for several), or a --workers-file FILE, and not both",
            param_hint="--worker",
        )
    security = roles.link_security(
        secret_file, (curve_secret_key, curve_server_key), (tls_ca, tls_certificate, tls_key)
    )
    endpoint = roles.Endpoint(host, port, api_key_file)
    machine = roles.prepare_machine(target, device, dtype, threads, slots, max_context)
    built = roles.build_spark(
        machine, speculative, worker, draft_deadline_ms, workers_file=workers_file,
        audit_rate=audit_rate, adaptive_depth=adaptive_depth, request_groups=request_groups.number,
        security=security, allow_v1=allow_v1,
    )  # fmt: skip
    roles.serve_endpoint(built, endpoint)


@app.command()
def worker(
    drafter: Annotated[
        Path | None, typer.Option(help="Drafter directory; default the one that ships for the embedded target.")
    ] = None,
    listen: Annotated[
        str,
        typer.Option(help="Address to bind: tcp:// (ZeroMQ), plain+tcp://, tls+tcp:// or ucx://; port 0: a free one."),
    ] = "tcp://127.0.0.1:7777",
    target: Target = "embedded",
    device: Device = "cpu",
    dtype: Dtype = "auto",
    threads: Threads = None,
    slots: Slots = 16,
    max_context: MaxContext = 2048,
    secret_file: SecretFile = None,
    curve_secret_key: CurveSecretKey = None,
    curve_clients: Annotated[
        Path | None, typer.Option(help="CURVE: public keys of the verifiers that may connect, one a line.")
    ] = None,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    allow_v1: AllowV1 = False,
    copy: Copy = True,
    parent_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """A drafter worker: holds the drafter and serves Spark verifiers over the v2 wire."""
    security = roles.link_security(secret_file, (curve_secret_key, curve_clients), (tls_ca, tls_certificate, tls_key))
    machine = roles.prepare_machine(target, device, dtype, threads, slots, max_context)
    from dspark.speculative import SHIPPED_DRAFTER

    roles.run_worker(
        machine, drafter or SHIPPED_DRAFTER, listen,
        security=security, parent_pid=parent_pid, copy=copy, allow_v1=allow_v1,
    )  # fmt: skip


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Base URL of a running endpoint.")] = "http://127.0.0.1:8000",
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Ask this one question and end.")] = None,
) -> None:
    """Chat in the terminal; accepted draft tokens have another colour, the acceptance runs along."""
    from dspark import chat as terminal

    raise typer.Exit(terminal.run(terminal.ChatOptions(url, temperature, max_tokens, system, prompt)))


@app.command()
def train(
    output: Annotated[Path, typer.Option(help="Run directory: corpus, training state, checkpoint, report.")],
    target: Target = "embedded",
    tokens: Annotated[int, typer.Option(min=1000, help="Answer tokens that the target writes.")] = 400_000,
    blocks: Annotated[int, typer.Option(min=100, help="Blocks to train on.")] = 560_000,
    layers: Annotated[int, typer.Option(min=1, max=8, help="Draft layers.")] = 2,
    taps: Annotated[str, typer.Option(help="Target layers to tap, comma-separated, zero-based; default spread.")] = "",
    block: Annotated[int, typer.Option(min=1, max=32, help="Block size: the largest depth.")] = 5,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the Markov head.")] = 64,
    draft_vocab: Annotated[int, typer.Option(min=1, help="Size of the draft vocabulary.")] = 12288,
    learning_rate: Annotated[float, typer.Option(min=1e-6, help="Peak of the cosine schedule.")] = 1e-3,
    rows: Annotated[int, typer.Option(min=1, help="Sequences written in lock step.")] = 96,
    greedy_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the answers written at temperature 0, the others at 1.")
    ] = 0.6,
    initial: Annotated[
        Path | None, typer.Option(help="Drafter checkpoint to go on from; its shape, taps and vocabulary then hold.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the corpus and of the training.")] = 1,
    threads: Threads = None,
) -> None:
    """Train a drafter for a target. No data to download: the target writes its own. Interrupt and rerun to resume."""
    roles.prepare_machine(target, "cpu", "fp32", threads, 1, 16)
    from dspark.training import run

    run.train(
        run.TrainOptions(
            output=output, target=target, tokens=tokens, blocks=blocks, layers=layers, taps=taps, block=block,
            rank=rank, draft_vocab=draft_vocab, learning_rate=learning_rate, rows=rows, seed=seed,
            greedy_share=greedy_share, initial=initial,
        )
    )  # fmt: skip


@bench_app.command("spec")
def bench_spec(
    target: Target = "embedded",
    speculative: Speculative = DEFAULT_SPECULATIVE,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    threads: Threads = None,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts to use, in order.")] = 24,
    prompt_set: Annotated[
        PromptSet, typer.Option(help="'self': held-out instructions of the training corpus; 'people': written by hand.")
    ] = PromptSet.SELF,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens per answer.")] = 128,
    max_context: MaxContext = 1024,
    copy: Copy = True,
    as_json: Json = False,
) -> None:
    """Speculative against target-only decoding: same engine, interleaved, warm, T = 0 and T = 1."""
    machine = roles.prepare_machine(target, device, dtype, threads, 2, max_context)
    from dspark_spark import benchmark

    log = (lambda text: print(text, file=sys.stderr, flush=True)) if as_json else roles.say
    with roles.local_worker(machine, speculative, restart=False, log=log, copy=copy) as worker:
        if worker is None:
            raise typer.BadParameter("num_speculative_tokens is 0: there is nothing to compare")
        built = roles.build_spark(machine, speculative, worker.endpoint, 5000)
        worker.wait_ready()
        result = benchmark.run(built, benchmark.BenchOptions(prompts, max_tokens, prompt_set.value), log)
    typer.echo(benchmark.as_json(result) if as_json else benchmark.as_table(result))


@bench_app.command("rows")
def bench_rows(
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are over these.")] = 60,
    as_json: Json = False,
) -> None:
    """Proposal rows on one core: making, writing and checking them, against a softmax and a plain copy."""
    from dspark import row_benchmark

    result = row_benchmark.run(rounds)
    typer.echo(row_benchmark.as_json(result) if as_json else row_benchmark.as_table(result))


@bench_app.command("wire")
def bench_wire(
    turns: Annotated[int, typer.Option(min=8, help="Interleaved turns; cases with more bytes take fewer.")] = 400,
    transports: Annotated[str, typer.Option(help="Comma-separated: zmq, tcp, ucx, memory (no link).")] = "zmq,tcp",
    trace_allocations: Annotated[
        bool, typer.Option("--trace-allocations", help="Also measure the memory that a round takes, in extra rounds.")
    ] = False,
    as_json: Json = False,
) -> None:
    """A round on the wire, on each transport, beside a plain socket that moves the same bytes."""
    from dspark import wire_benchmark

    chosen = transports.split(",")
    if set(chosen) - set(wire_benchmark.SCHEMES):
        raise typer.BadParameter("use zmq, tcp, ucx, memory", param_hint="--transports")
    result = wire_benchmark.run(
        turns, chosen, trace=trace_allocations, log=lambda text: print(text, file=sys.stderr, flush=True)
    )
    typer.echo(wire_benchmark.as_json(result) if as_json else wire_benchmark.as_table(result))


@bench_app.command("overlap")
def bench_overlap(
    target: Target = "embedded",
    speculative: Speculative = DEFAULT_SPECULATIVE,
    threads: Threads = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Interleaved repetitions; medians are over these.")] = 5,
    max_tokens: Annotated[int, typer.Option(min=8, max=256, help="Tokens per answer.")] = 64,
    as_json: Json = False,
) -> None:
    """One group of requests against two in turn, over links with 0 to 20 ms added to a round trip."""
    machine = roles.prepare_machine(target, "cpu", "fp32", threads, 8, 512)
    from dspark_spark import overlap_benchmark as overlap

    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with roles.local_worker(machine, speculative, restart=False, log=log) as worker:
        if worker is None:
            raise typer.BadParameter("num_speculative_tokens is 0: there is nothing to overlap")
        worker.wait_ready()
        options = overlap.OverlapOptions(repetitions=repetitions, max_tokens=max_tokens)
        result = overlap.run(
            lambda address: roles.build_spark(machine, speculative, address, 5000), worker.endpoint, options, log
        )
    typer.echo(overlap.as_json(result) if as_json else overlap.as_table(result))


@bench_app.command("acceptance")
def bench_acceptance(
    target: Target = "embedded",
    speculative: Speculative = DEFAULT_SPECULATIVE,
    threads: Threads = None,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts to use, in order.")] = 20,
    prompt_set: Annotated[PromptSet, typer.Option(help="'self' or 'people', as in `bench spec`.")] = PromptSet.SELF,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens per answer.")] = 128,
    as_json: Json = False,
) -> None:
    """Acceptance against the width of the q rows: dense, k = 256 to 16, and the match lane, with bytes per reply."""
    machine = roles.prepare_machine(target, "cpu", "fp32", threads, 1, 16)
    from dspark_spark import acceptance_curve

    log = (lambda text: print(text, file=sys.stderr, flush=True)) if as_json else roles.say
    options = acceptance_curve.CurveOptions(prompts, max_tokens, prompt_set.value)
    result = acceptance_curve.run(roles.load_pair(machine, speculative), options, log)
    typer.echo(acceptance_curve.as_json(result) if as_json else acceptance_curve.as_table(result))


@app.command()
def prove(
    quick: Annotated[bool, typer.Option("--quick", help="Minutes instead of a quarter of an hour.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=10_000, help="Of all samples; the same seed is the same run.")] = 0,
    report: Annotated[Path | None, typer.Option(help="Directory for losslessness.md and losslessness.html.")] = None,
    plant: Annotated[
        str | None, typer.Option(help="Put a mutant in the sampler's place, e.g. residual-from-p: the proof must fail.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Prove that speculation changes no distribution: exact laws, deliberate mistakes, tests of the real path."""
    roles.prepare_machine("", "cpu", "fp32", 1, 1, 16)
    from dspark.proof import prove as proof
    from dspark.proof import report as reports

    options = proof.ProveOptions(quick=quick or plant is not None, seed=seed, plant=plant)
    found = proof.run(options, lambda text: print(text, file=sys.stderr, flush=True))
    if report is not None:
        for path in reports.write(found, report):
            print(f"wrote {path}", file=sys.stderr)
    typer.echo(json.dumps(found.as_object(), indent=2) if as_json else reports.as_text(found))
    raise typer.Exit(0 if found.holds else 1)


@app.command()
def keys(
    path: Annotated[Path, typer.Argument(help="File for the secret key; the public one is beside it, ending in .pub.")],
) -> None:
    """Make a pair of CURVE keys for one end of a ZeroMQ link between machines."""
    from dspark.errors import UserError
    from dspark_proto.transports import TransportError
    from dspark_proto.transports.curve import write_curve_keys

    try:
        public = write_curve_keys(path)
    except TransportError as error:
        raise UserError(str(error)) from None
    typer.echo(f"secret key: {path} (keep it here)\npublic key: {public} (give it to the other end)")


@conformance_app.command("run")
def conformance_run(
    own: Annotated[bool, typer.Option("--self", help="Our worker and our verifier, on every transport.")] = False,
    own_worker: Annotated[bool, typer.Option("--worker", help="This project's worker with a tiny drafter.")] = False,
    own_verifier: Annotated[bool, typer.Option("--verifier", help="This project's verifier, without a model.")] = False,
    drafter: Annotated[str | None, typer.Option(help="Address of a drafter, e.g. tcp://127.0.0.1:7777.")] = None,
    listen: Annotated[str | None, typer.Option(help="Address that a verifier will connect to.")] = None,
    facts: Annotated[Path | None, typer.Option(help="JSON file with the testee's identities.")] = None,
    case: Cases = None,
    transport: Annotated[
        list[str] | None, typer.Option(help="With --self: inproc, zmq, tcp or ucx; repeatable.")
    ] = None,
    known_failures: Annotated[Path | None, typer.Option(help="File with the ids of cases that may fail.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="A broken SHOULD fails the run too.")] = False,
    report: Annotated[Path | None, typer.Option(help="Directory for report.json, report.xml and report.html.")] = None,
    as_json: Json = False,
) -> None:
    """Run the cases against one testee: --self, --worker, --verifier, --drafter ADDRESS or --listen ADDRESS."""
    from dspark import conformance
    from dspark_proto.conformance import Role

    if sum((own, own_worker, own_verifier, drafter is not None, listen is not None)) != 1:
        raise typer.BadParameter("give one of --self, --worker, --verifier, --drafter, --listen")
    options = conformance.RunOptions(tuple(case or ()), tuple(transport or ()), known_failures, strict, as_json, report)
    if (own or own_worker or own_verifier) and "torch" not in sys.modules:
        roles.prepare_machine("", "cpu", "fp32", 1, 1, 16)
    if own:
        code = conformance.run_own(lambda: [*_own_workers(), *_own_verifiers()], options, typer.echo)
        raise typer.Exit(code)
    if own_worker:
        raise typer.Exit(conformance.run_peers(_own_workers, Role.DRAFTER, options, typer.echo))
    if own_verifier:
        raise typer.Exit(conformance.run_peers(_own_verifiers, Role.VERIFIER, options, typer.echo))
    testee = (
        conformance.remote_drafter(drafter, facts)
        if drafter is not None
        else conformance.remote_verifier(listen or "", facts, lambda text: typer.echo(text, err=True))
    )
    raise typer.Exit(conformance.run_testee(testee, drafter or listen or "", options, typer.echo))


def _own_workers() -> Sequence[Peer]:
    from dspark.conformance_worker import worker_peers
    from dspark_workers.worker import Worker

    return worker_peers(Worker)


def _own_verifiers() -> Sequence[Peer]:
    from dspark.conformance_verifier import VerifierParts, verifier_peers
    from dspark_spark.draft_link import DraftLink
    from dspark_spark.leases import DraftLease, DraftRequest
    from dspark_spark.proposals import read_proposal

    return verifier_peers(VerifierParts(DraftLink, DraftLease, DraftRequest, read_proposal))


@conformance_app.command("selftest")
def conformance_selftest(case: Cases = None, as_json: Json = False) -> None:
    """Prove that the cases find planted bugs: every mutant is found, and every case finds one."""
    from dspark import conformance

    raise typer.Exit(conformance.selftest(tuple(case or ()), as_json=as_json, say=typer.echo))


@conformance_app.command("list")
def conformance_list(case: Cases = None, as_json: Json = False) -> None:
    """All cases, one a line."""
    from dspark import conformance

    conformance.list_cases(tuple(case or ()), as_json=as_json, say=typer.echo)


@conformance_app.command("show")
def conformance_show(case: Annotated[str, typer.Argument(help="Id of a case, e.g. DSP2-ROW-100.")]) -> None:
    """What one case checks, and the sentence of the standard behind it."""
    from dspark import conformance

    conformance.show(case, typer.echo)


wire_fuzz.register(app)
sim_command.register(app)
chaos_command.register(app)


@app.command()
def doctor(as_json: Json = False) -> None:
    """What this machine has, what dspark will choose on it, and what will not work."""
    from dspark import doctor as checks

    report = checks.examine()
    typer.echo(checks.as_json(report) if as_json else checks.as_text(report))
    raise typer.Exit(0 if report.usable else 1)


def main() -> None:
    """Entry point: configuration errors are one clear line, not a traceback."""
    from dspark.errors import UserError

    try:
        app()
    except UserError as error:
        print(f"dspark: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
