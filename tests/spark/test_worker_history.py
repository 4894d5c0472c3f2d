"""What the worker believes the text to be is what the verifier has committed, round for round."""

from __future__ import annotations

from typing import Any

import pytest

from dspark_workers.chain import MarkovChain
from dspark_workers.history import TokenHistory
from tests.rig import Rig

PROMPT = [3, 14, 15, 92, 65, 35, 14, 15]


def watch(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """(the worker's tokens, the verifier's) at each draft of the one request that runs."""
    seen: list[tuple[list[int], list[int]]] = []
    sample = MarkovChain.sample

    def spy(
        self: MarkovChain, base: Any, anchor: int, position: int, policy: Any, keys: Any, told: Any, *, hidden: Any
    ) -> Any:
        assert isinstance(told, TokenHistory)
        ((sequence, _),) = rig.engine._running.values()
        seen.append((list(told._tokens), sequence.tokens[: position + 1]))
        return sample(self, base, anchor, position, policy, keys, told, hidden=hidden)

    monkeypatch.setattr(MarkovChain, "sample", spy)
    return seen


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_worker_knows_the_whole_text(rig: Rig, monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    """Prompt, surviving drafts and anchors, without a gap."""
    seen = watch(rig, monkeypatch)
    reader = rig.answer(PROMPT, temperature=temperature, seed=4, max_tokens=40)
    assert len(seen) > 5
    assert reader.last.stats.accepted > 0
    for worker, verifier in seen:
        assert worker == verifier


def test_without_copying_the_worker_keeps_no_text(rig: Rig) -> None:
    rig.wire.worker._copy = False
    rig.ask(PROMPT)
    rig.turns(4)
    leases = list(rig.wire.worker.peers[rig.wire.peer].leases.values())
    assert leases
    assert all(lease.history is None for lease in leases)
