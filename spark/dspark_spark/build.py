"""Put a Spark rank together: target, tokenizer, engine, and the pool of drafter workers when there are any."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dspark.errors import UserError
from dspark.models.config import ModelConfigError
from dspark.models.source import DTYPES, TargetSource, load_target, open_target
from dspark.models.tokenizer import ChatTokenizer
from dspark.speculative import ResolvedDrafter, SpeculativeConfig, resolve
from dspark_proto.transports import Security, TransportError
from dspark_proto.transports.security import NO_SECURITY
from dspark_spark import workers_file
from dspark_spark.draft_link import DraftLink
from dspark_spark.draft_pool import DraftPool
from dspark_spark.engine import Engine, EngineSettings
from dspark_spark.member_maker import MemberMaker
from dspark_spark.metrics import Metrics
from dspark_spark.workers_file import WorkerLine, WorkersWatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SparkSettings:
    """How to build a rank. `worker` is a drafter's address, or those of several; None (or k = 0) serves the target
    alone. `workers_file` names a file of them instead, which is followed while the rank runs. `security` protects the
    links. `allow_v1`: a worker that refuses wire version 2 is asked for version 1, which drafts greedy requests only.
    """

    target: str
    worker: str | Sequence[str] | None = None
    workers_file: Path | None = None
    speculative: SpeculativeConfig | None = None
    device: str = "cpu"
    dtype: str = "fp32"
    threads: int = 2
    draft_deadline_ms: int = 1000
    security: Security = NO_SECURITY
    allow_v1: bool = False
    engine: EngineSettings = field(default_factory=EngineSettings)

    @property
    def workers(self) -> tuple[str, ...]:
        """Addresses of the workers that are named one by one."""
        if self.worker is None:
            return ()
        return (self.worker,) if isinstance(self.worker, str) else tuple(self.worker)


@dataclass(frozen=True, slots=True)
class Spark:
    """A built rank; `engine` is not started yet, nor is `watch`, which follows the workers file."""

    engine: Engine
    tokenizer: ChatTokenizer
    metrics: Metrics
    model_name: str
    facts: dict[str, object]
    watch: WorkersWatch | None = None


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
    if (settings.workers or settings.workers_file) and settings.speculative is not None:
        drafter = resolve(settings.speculative, settings.target, source.config)
    tokenizer = source.tokenizer()
    drafts, watch = _drafts(settings, drafter, source, tokenizer) if drafter else (None, None)
    length = settings.engine.max_context + (drafter.depth if drafter else 0) + 1
    model = load_target(
        source, device=settings.device, dtype=DTYPES[settings.dtype], max_positions=length
    )
    metrics = Metrics(drafter.depth if drafter else 0)
    engine = Engine(model, tokenizer, settings.engine, metrics, drafter, drafts)
    facts: dict[str, object] = {
        "dtype": settings.dtype,
        "device": settings.device,
        "num_speculative_tokens": drafter.depth if drafter else 0,
        "q_semantics": "dyadic24-standard-v1" if drafter else None,
        "rejection_sample_method": drafter.rejection_sample_method if drafter else None,
        "max_context": settings.engine.max_context,
    }
    return Spark(engine, tokenizer, metrics, source.name, facts, watch)


def _drafts(
    settings: SparkSettings, drafter: ResolvedDrafter, source: TargetSource, tokenizer: ChatTokenizer
) -> tuple[DraftLink | DraftPool, WorkersWatch | None]:
    """The pool of the configured workers, and the watch of their file when there is one; a lone worker needs no pool.

    Raises UserError for a file, address, secret or key that cannot be used.
    """
    maker = MemberMaker(
        source,
        tokenizer,
        drafter,
        settings.security,
        settings.engine.slots,
        settings.draft_deadline_ms,
        settings.allow_v1,
    )
    path = settings.workers_file
    if path is None:
        if len(set(settings.workers)) < len(settings.workers):
            raise UserError("--worker: an address is there twice: name every worker once")
        with _named("--worker"):
            members = maker.make([WorkerLine(address) for address in settings.workers])
            return members[0].link() if len(members) == 1 else DraftPool(members), None
    raw = workers_file.read(path)
    option = f"--workers-file {path}:"
    with _named(option):
        pool = DraftPool(maker.make(workers_file.parse(raw, path)))

    def apply(changed: Sequence[WorkerLine]) -> None:
        with _named(option):
            pool.set_members(maker.make(changed))
        logger.info("%s %d workers", option, len(changed))

    def report(trouble: str | None) -> None:
        pool.trouble = trouble
        if trouble is not None:
            logger.warning("%s (nothing was changed)", trouble)

    return pool, WorkersWatch(path, raw, apply, report)


@contextmanager
def _named(option: str) -> Iterator[None]:
    """Transport errors name the option that they come from."""
    try:
        yield
    except TransportError as error:
        raise UserError(f"{option} {error}") from None
