"""Start the roles: worker, Spark rank with its endpoint, or both on this machine.

Part of the composition root with `cli`: it imports a role only inside the function that runs it, after `placement` has
set up the process. `Machine` is what all roles on one machine share.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dspark import __version__, launch, placement
from dspark.errors import UserError

if TYPE_CHECKING:
    from dspark.speculative import ResolvedDrafter
    from dspark_proto.transports import Security
    from dspark_spark.acceptance_curve import Pair
    from dspark_spark.build import Spark


LINK_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Options that every role on one machine shares; dtype is resolved ('fp32' or 'bf16'), lengths are in tokens."""

    target: str
    device: str
    dtype: str
    threads: int
    slots: int
    max_context: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the HTTP endpoint listens, and who may use it. Raises UserError for a key file that is not there."""

    host: str
    port: int
    api_key_file: Path | None

    def __post_init__(self) -> None:
        if self.api_key_file is not None and not self.api_key_file.is_file():
            raise UserError(f"--api-key-file {self.api_key_file}: no such file: write one key a line into it")


def say(text: str) -> None:
    """One line of progress, at once."""
    print(text, flush=True)


def prepare_machine(
    target: str, device: str, dtype: str, threads: int | None, slots: int, max_context: int
) -> Machine:
    """Choose dtype and threads and set up this process for them. Before torch is imported."""
    chosen = placement.choose(threads)
    placement.prepare(chosen)
    return Machine(target, device, placement.choose_dtype(dtype, device), chosen.threads, slots, max_context)


def check_device(device: str) -> None:
    """Raises UserError where torch cannot use `device`."""
    import torch

    if device == "cpu":
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {device}: {reason}: use --device cpu, or a torch build that has it") from None


def resolve_drafter(target: str, speculative: str) -> ResolvedDrafter | None:
    """The drafter that a --speculative-config names, checked against the target; None when it is off."""
    from dspark import speculative as speculation
    from dspark.models.source import open_target

    config = speculation.parse(speculative)
    return speculation.resolve(config, target, open_target(target).config) if config.enabled else None


@contextmanager
def local_worker(
    machine: Machine, speculative: str, *, restart: bool, log: Callable[[str], None] = say, copy: bool = True
) -> Iterator[launch.LocalWorker | None]:
    """A worker process for the block's duration; None when speculation is off."""
    with local_workers(machine, speculative, 1, restart=restart, log=log, copy=copy) as workers:
        yield workers[0] if workers else None


@contextmanager
def local_workers(
    machine: Machine,
    speculative: str,
    count: int,
    *,
    restart: bool,
    log: Callable[[str], None] = say,
    copy: bool = True,
) -> Iterator[list[launch.LocalWorker]]:
    """`count` worker processes for the block's duration; none when speculation is off."""
    check_device(machine.device)
    resolved = resolve_drafter(machine.target, speculative)
    if resolved is None:
        log("speculation is off (num_speculative_tokens 0): no drafter is loaded")
        yield []
        return
    arguments = [*_worker_arguments(machine, resolved.directory), *([] if copy else ["--no-copy"])]
    names = ["worker"] if count == 1 else [f"worker {number}" for number in range(1, count + 1)]
    workers = [launch.LocalWorker(arguments, restart=restart, log=log, name=name) for name in names]
    log("starting the drafter worker" + (" in its own process" if count == 1 else f"s, {count} processes"))
    try:
        for worker in workers:
            worker.start()
        yield workers
    finally:
        launch.stop_all(workers)


def _worker_arguments(machine: Machine, drafter: Path) -> list[str]:
    options = {
        "--target": machine.target,
        "--drafter": drafter,
        "--device": machine.device,
        "--dtype": machine.dtype,
        "--threads": machine.threads,
        "--slots": machine.slots,
        "--max-context": machine.max_context,
    }
    return [text for name, value in options.items() for text in (name, str(value))]


def link_security(
    secret: Path | None, curve: tuple[Path | None, Path | None], tls: tuple[Path | None, Path | None, Path | None]
) -> Security:
    """What protects the link: a shared secret, CURVE (secret key, peers' public keys), TLS (CA, certificate, key).

    Raises UserError for a set that is incomplete.
    """
    from dspark_proto.transports import CurveFiles, Security, TlsFiles

    if any(curve) and not all(curve):
        raise UserError("--curve-*: give both the secret key and the file of public keys")
    if any(tls) and not all(tls):
        raise UserError("--tls-*: give all of --tls-ca, --tls-certificate and --tls-key")
    (secret_key, peers), (ca, certificate, key) = curve, tls
    return Security(
        psk_file=secret,
        curve=CurveFiles(secret_key, peers) if secret_key and peers else None,
        tls=TlsFiles(ca, certificate, key) if ca and certificate and key else None,
    )


def run_worker(
    machine: Machine,
    drafter: Path,
    listen: str,
    *,
    security: Security,
    parent_pid: int | None,
    copy: bool,
    allow_v1: bool = False,
) -> None:
    """Serve drafts until SIGTERM."""
    check_device(machine.device)
    from dspark.models.source import DTYPES
    from dspark_workers.server import WorkerSettings, serve

    settings = WorkerSettings(
        endpoint=listen,
        target=machine.target,
        drafter=drafter,
        device=machine.device,
        dtype=DTYPES[machine.dtype],
        slots=machine.slots,
        length=machine.max_context,
        threads=machine.threads,
        security=security,
        parent_pid=parent_pid,
        copy=copy,
        allow_v1=allow_v1,
    )
    serve(settings, lambda endpoint: say(f"{launch.READY_PREFIX}{endpoint}"))


def build_spark(
    machine: Machine,
    speculative: str,
    worker: str | Sequence[str] | None,
    deadline_ms: int,
    *,
    workers_file: Path | None = None,
    audit_rate: float = 1.0,
    adaptive_depth: bool = False,
    request_groups: int | None = None,
    security: Security | None = None,
    allow_v1: bool = False,
) -> Spark:
    """Load the target and connect the workers (each comes up by itself once it answers).

    worker: an address or several, None for none; or `workers_file`, which is followed once the endpoint runs.
    request_groups: groups of requests that take turns on the link, 1 or 2; None measures which is quicker.
    """
    check_device(machine.device)
    from dspark import speculative as speculation
    from dspark_proto.transports import Security
    from dspark_spark.build import SparkSettings, build
    from dspark_spark.engine import EngineSettings

    return build(
        SparkSettings(
            target=machine.target,
            worker=worker,
            workers_file=workers_file,
            speculative=speculation.parse(speculative),
            device=machine.device,
            dtype=machine.dtype,
            threads=machine.threads,
            draft_deadline_ms=deadline_ms,
            security=security or Security(),
            allow_v1=allow_v1,
            engine=EngineSettings(
                slots=machine.slots,
                max_context=machine.max_context,
                threads=machine.threads,
                audit_rate=audit_rate,
                adaptive_depth=adaptive_depth,
                request_groups=request_groups,
            ),
        )
    )


def serve_endpoint(spark: Spark, endpoint: Endpoint) -> None:
    """Run the engine and the HTTP endpoint until a signal; the first drains, the second ends at once."""
    from dspark_spark.async_engine import EngineBridge
    from dspark_spark.http import EndpointSettings, build_app, fingerprint, serve

    settings = EndpointSettings(
        version=__version__,
        system_fingerprint=fingerprint(__version__, spark.facts),
        api_key_file=endpoint.api_key_file,
    )
    bridge = EngineBridge(spark.engine, spark.model_name, spark.facts)
    try:
        app = build_app(bridge, spark.tokenizer, spark.metrics, settings)
    except (OSError, ValueError) as error:
        raise UserError(f"--api-key-file: {error}") from None
    spark.engine.start()
    if spark.watch is not None:
        spark.watch.start()
    if spark.engine.link is not None and not spark.engine.link.wait_up(LINK_WAIT_S):
        say(f"the drafter worker does not answer yet (target-only until it does): {spark.engine.link.last_error}")
    try:
        serve(
            app,
            endpoint.host,
            endpoint.port,
            on_listening=lambda port: say(ready_line(endpoint.host, port, spark.model_name)),
        )
    finally:
        if spark.watch is not None:
            spark.watch.stop()
        spark.engine.stop()


def ready_line(host: str, port: int, model: str) -> str:
    """The line that ends the start: where it listens, and a command to paste."""
    url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
    question = {"role": "user", "content": "Why is the sky blue?"}
    body = json.dumps({"model": model, "stream": True, "messages": [question]})
    return f"ready: {url}  try: curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


def load_pair(machine: Machine, speculative: str) -> Pair:
    """Target and drafter in this process, for measurements that need no link."""
    from dspark import speculative as config
    from dspark.models.drafter import DrafterCheckpoint
    from dspark.models.source import DTYPES, load_embedding, load_target, open_target
    from dspark_spark.acceptance_curve import Pair

    source = open_target(machine.target)
    resolved = config.resolve(config.parse(speculative), machine.target, source.config)
    if resolved is None:
        raise UserError("--speculative-config: num_speculative_tokens is 0: there is no drafter to measure")
    checkpoint = DrafterCheckpoint(resolved.directory)
    return Pair(
        load_target(source, device=machine.device, dtype=DTYPES[machine.dtype]),
        source.tokenizer(),
        checkpoint.network(load_embedding(source), device=machine.device, dtype=DTYPES[machine.dtype]),
        checkpoint.draft_ids,
    )
