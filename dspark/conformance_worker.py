"""The product's worker as a testee: the real one, with a tiny drafter that is made for the run.

Called by `conformance`, which is handed the class of the workers package.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from dspark_proto import HelloParameters, WireVersion
from dspark_proto.conformance import Facts, InProcess, Peer, Role, ServedDrafter, Testee
from dspark_proto.conformance.facts import REFERENCE_SECRET
from dspark_proto.transports import PeerFrame

WORKER_EPOCH = 77
_PEER = b"harness"


class WorkerLike(Protocol):
    """What the harness needs of `dspark_workers.worker.Worker`."""

    def receive(self, arrivals: Any, now_ns: int) -> None: ...
    def draft_pending(self) -> None: ...
    def expire(self, now_ns: int) -> None: ...
    def outbox(self) -> Any: ...


class WorkerMachine:
    """The product's worker as a `PeerMachine`."""

    def __init__(self, worker: WorkerLike) -> None:
        self._worker = worker

    def start(self, now_ns: int) -> list[bytes]:
        """A drafter waits."""
        return []

    def receive(self, frame: bytes, now_ns: int) -> list[bytes]:
        """One frame; drafts wait for `expire`."""
        self._worker.receive([PeerFrame(_PEER, memoryview(frame))], now_ns)
        return self._sent()

    def expire(self, now_ns: int) -> list[bytes]:
        """Draft, and let timers run."""
        self._worker.draft_pending()
        self._worker.expire(now_ns)
        return self._sent()

    def held(self) -> dict[str, int]:
        """STATS tells."""
        return {}

    def _sent(self) -> list[bytes]:
        return [bytes(frame) for _, frames in self._worker.outbox() for frame in frames]


@dataclass(frozen=True)
class _Tiny:
    """A tiny drafter, loaded."""

    network: Any
    draft_ids: Any
    facts: Facts
    depth: int

    def worker(self, worker_class: Callable[..., WorkerLike], facts: Facts) -> WorkerMachine:
        """A fresh worker, with the secret of ``facts``."""
        parameters = HelloParameters(
            facts.compatibility,
            WORKER_EPOCH,
            max_slots=4,
            max_depth=self.depth,
            max_in_flight=4,
            dense_rows=True,
            versions=(WireVersion.V2_0, WireVersion.V1_0),
            authentication=facts.authentication,
        )
        return WorkerMachine(worker_class(self.network, self.draft_ids, parameters, slots=4, length=512))


@lru_cache(maxsize=1)
def _tiny() -> _Tiny:
    from dspark.identity import compatibility
    from dspark.models.drafter import DrafterCheckpoint
    from dspark.models.source import load_embedding, open_target
    from dspark.proof.tiny_pair import write_drafter, write_target

    with tempfile.TemporaryDirectory(prefix="dspark-conformance-") as folder:
        root = Path(folder)
        target = write_target(root / "target", scale=0.04)
        drafter = write_drafter(root / "drafter", target)
        source, checkpoint = open_target(str(target)), DrafterCheckpoint(drafter)
        network = checkpoint.network(load_embedding(source), max_positions=512)
        identity = compatibility(source, source.tokenizer(), drafter, checkpoint.config)
    return _Tiny(network, checkpoint.draft_ids, Facts(identity, version_1=True), checkpoint.config.block_size)


def worker_peers(worker_class: Callable[..., WorkerLike]) -> tuple[Peer, ...]:
    """Our worker, without a secret and with one; each connection has its own."""
    tiny = _tiny()

    def opened(transport: str, facts: Facts) -> Testee:
        def make() -> WorkerMachine:
            return tiny.worker(worker_class, facts)

        if transport == "inproc":
            return InProcess(Role.DRAFTER, facts, make)
        return ServedDrafter(transport, facts, make)

    found = [replace(tiny.facts, secret=secret) for secret in (b"", REFERENCE_SECRET)]
    return tuple(Peer("own worker", Role.DRAFTER, facts, opened) for facts in found)
