"""The speculative path in one thread (`tests.rig`), as fixtures."""

from __future__ import annotations

import pytest

from dspark_spark import draft_link
from tests.conftest import TinyPair
from tests.rig import Parts, Rig, build_rig, load_parts


@pytest.fixture(scope="module")
def parts(tiny_pair: TinyPair) -> Parts:
    return load_parts(tiny_pair.target, tiny_pair.drafter)


@pytest.fixture
def rig(parts: Parts) -> Rig:
    return build_rig(parts)


@pytest.fixture
def retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that was lost comes back in the same turn. Modules that want it for all their tests say so at the top."""
    monkeypatch.setattr(draft_link, "RETRY_S", 0.0)
    monkeypatch.setattr("dspark_spark.leases.LOSS_PAUSE_S", 0.0)
