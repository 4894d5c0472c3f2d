"""What an operator sets on the endpoint, and the fingerprint that names a configuration.

Purpose: one frozen value that `build_app` and its routes read.
Invariants: every limit is positive.
Called by: the composition root (`dspark serve`), tests.
Never: reads the environment; the command line does that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Limits and identity of one endpoint.

    version: of dspark, for /version. system_fingerprint: sent with every completion, see `fingerprint`.
    model_aliases: further names that `model` may carry. api_key_file: one key a line; None asks for no key.
    max_body_bytes: larger request bodies get 413. max_prompts: choices that one /v1/completions call may
    ask for. keepalive_s: seconds of silence in a stream before a comment line is sent. admission_grace_s:
    seconds that a stream's headers wait for the engine to refuse the request, so that "busy" is a 503 and
    not a broken stream. retry_after_s: value of the Retry-After header of a 503.
    """

    version: str = "unknown"
    system_fingerprint: str = "dspark"
    model_aliases: tuple[str, ...] = ()
    api_key_file: Path | None = None
    max_body_bytes: int = 4 * 1024 * 1024
    max_prompts: int = 16
    keepalive_s: float = 15.0
    admission_grace_s: float = 0.02
    retry_after_s: int = 1

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_prompts", "keepalive_s", "admission_grace_s", "retry_after_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: {getattr(self, name)} is not positive; give a positive number")


def fingerprint(version: str, facts: Mapping[str, object]) -> str:
    """A name for everything that can change an answer: `dspark-<version>-<12 hex digits of SHA-256>`.

    `facts` are JSON values, for example target digest, dtype, RNG ABI, q id, depth; their order does not
    matter.
    """
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return f"dspark-{version}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
