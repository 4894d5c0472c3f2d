"""Makes pool members: what this verifier says in HELLO to a worker of a given drafter checkpoint.

A worker may serve another checkpoint than the configured one (a rolling swap), as long as the engine's taps are what
that checkpoint was trained on. Invariant: no member is made of a checkpoint that does not fit the running engine.
Called by `build`, once at the start and again when the workers file changes.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dspark.errors import UserError
from dspark.identity import compatibility
from dspark.models import drafter_config
from dspark.models.drafter_config import DrafterConfig
from dspark.models.source import TargetSource
from dspark.models.tokenizer import ChatTokenizer
from dspark.speculative import ResolvedDrafter
from dspark_proto import HelloParameters, WireVersion
from dspark_proto.auth import Authentication
from dspark_proto.limits import IN_FLIGHT_MIN
from dspark_proto.transports import Security, TransportError, open_client
from dspark_spark.pool_members import Member
from dspark_spark.workers_file import WorkerLine


@dataclass(frozen=True, slots=True)
class MemberMaker:
    """What all members have in common. slots: the engine's. deadline_ms: of a round."""

    source: TargetSource
    tokenizer: ChatTokenizer
    drafter: ResolvedDrafter
    security: Security
    slots: int
    deadline_ms: int
    allow_v1: bool

    def make(self, lines: Sequence[WorkerLine]) -> list[Member]:
        """A member for each line. Raises UserError for a secret or a checkpoint that cannot be used."""
        return [self._member(line) for line in lines]

    def _member(self, line: WorkerLine) -> Member:
        config = self.drafter.config if line.drafter is None else self._other_config(line.drafter)
        directory = line.drafter or self.drafter.directory
        versions = (WireVersion.V2_0, WireVersion.V1_0)
        parameters = HelloParameters(
            compatibility(self.source, self.tokenizer, directory, config),
            epoch=secrets.randbits(64),
            max_slots=self.slots,
            max_depth=min(self.drafter.depth, config.block_size),
            max_support=self.drafter.max_support,
            max_in_flight=max(IN_FLIGHT_MIN, self.slots),
            step_deadline_ms=self.deadline_ms,
            dense_rows=self.drafter.dense,
            versions=versions if self.allow_v1 else versions[:1],
            authentication=self._authentication(line.address),
        )
        connect = partial(open_client, line.address, self.security)
        return Member(line.address, parameters, self.deadline_ms, connect, str(directory))

    def _other_config(self, directory: Path) -> DrafterConfig:
        config = drafter_config.read(directory)
        config.check_target(self.source.config)
        wanted = self.drafter.config.target_layer_ids
        if config.target_layer_ids != wanted:
            raise UserError(
                f"{directory}: it taps target layers {list(config.target_layer_ids)}, and this verifier keeps "
                f"{list(wanted)}: start another verifier for it"
            )
        return config

    def _authentication(self, address: str) -> Authentication | None:
        try:
            return self.security.authentication(address)
        except TransportError as error:
            raise UserError(f"--secret-file: {error}") from None
