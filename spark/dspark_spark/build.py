"""Put a Spark rank together: target, tokenizer, engine, and the link to a worker when there is one."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import torch

from dspark.errors import UserError
from dspark.identity import compatibility
from dspark.models.config import ModelConfigError
from dspark.models.source import DTYPES, TargetSource, load_target, open_target
from dspark.models.tokenizer import ChatTokenizer
from dspark.speculative import ResolvedDrafter, SpeculativeConfig, resolve
from dspark_proto import HelloParameters, WireVersion
from dspark_proto.limits import IN_FLIGHT_MIN
from dspark_proto.transports import Security, TransportError, open_client
from dspark_proto.transports.security import NO_SECURITY
from dspark_spark.draft_link import DraftLink
from dspark_spark.engine import Engine, EngineSettings
from dspark_spark.metrics import Metrics


@dataclass(frozen=True, slots=True)
class SparkSettings:
    """How to build a rank. `worker` is the drafter's address; None (or k = 0) serves the target alone. `security`
    protects the link. `allow_v1`: a worker that refuses wire version 2 is asked for version 1, which drafts greedy
    requests only.
    """

    target: str
    worker: str | None = None
    speculative: SpeculativeConfig | None = None
    device: str = "cpu"
    dtype: str = "fp32"
    threads: int = 2
    draft_deadline_ms: int = 1000
    security: Security = NO_SECURITY
    allow_v1: bool = False
    engine: EngineSettings = field(default_factory=EngineSettings)


@dataclass(frozen=True, slots=True)
class Spark:
    """A built rank; `engine` is not started yet."""

    engine: Engine
    tokenizer: ChatTokenizer
    metrics: Metrics
    model_name: str
    facts: dict[str, object]


def build(settings: SparkSettings) -> Spark:
    """Load everything. Raises ModelConfigError before anything heavy when the configuration does not fit."""
    # This thread must never start an OpenMP team: beside a second one, the engine thread's own team counts as
    # oversubscribed, stops looking for work between parallel regions, and every forward pass takes half as long again.
    torch.set_num_threads(1)
    source = open_target(settings.target)
    if settings.engine.max_context > source.config.max_context:
        raise ModelConfigError(
            f"--max-context {settings.engine.max_context} is longer than the target's context: "
            f"give at most {source.config.max_context}"
        )
    drafter = None
    if settings.worker is not None and settings.speculative is not None:
        drafter = resolve(settings.speculative, settings.target, source.config)
    tokenizer = source.tokenizer()
    link = _link(settings, drafter, source, tokenizer) if drafter else None
    length = settings.engine.max_context + (drafter.depth if drafter else 0) + 1
    model = load_target(
        source, device=settings.device, dtype=DTYPES[settings.dtype], max_positions=length
    )
    metrics = Metrics(drafter.depth if drafter else 0)
    engine = Engine(model, tokenizer, settings.engine, metrics, drafter, link)
    facts: dict[str, object] = {
        "dtype": settings.dtype,
        "device": settings.device,
        "num_speculative_tokens": drafter.depth if drafter else 0,
        "q_semantics": "dyadic24-standard-v1" if drafter else None,
        "rejection_sample_method": drafter.rejection_sample_method if drafter else None,
        "max_context": settings.engine.max_context,
    }
    return Spark(engine, tokenizer, metrics, source.name, facts)


def _link(
    settings: SparkSettings, drafter: ResolvedDrafter, source: TargetSource, tokenizer: ChatTokenizer
) -> DraftLink:
    """The link to the configured worker. Raises UserError for an address, secret or key that cannot be used."""
    assert settings.worker is not None
    try:
        client = open_client(settings.worker, settings.security)
    except TransportError as error:
        raise UserError(f"--worker {error}") from None
    try:
        authentication = settings.security.authentication(settings.worker)
    except TransportError as error:
        client.close()
        raise UserError(f"--secret-file: {error}") from None
    versions = (WireVersion.V2_0, WireVersion.V1_0)
    parameters = HelloParameters(
        compatibility(source, tokenizer, drafter.directory, drafter.config),
        epoch=secrets.randbits(64),
        max_slots=settings.engine.slots,
        max_depth=drafter.depth,
        max_support=drafter.max_support,
        max_in_flight=max(IN_FLIGHT_MIN, settings.engine.slots),
        step_deadline_ms=settings.draft_deadline_ms,
        dense_rows=drafter.dense,
        versions=versions if settings.allow_v1 else versions[:1],
        authentication=authentication,
    )
    return DraftLink(settings.worker, parameters, settings.draft_deadline_ms, client)
