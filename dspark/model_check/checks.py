"""The models at the sizes that are checked: each small enough for seconds, together every action of both.

Every entry makes one model; its goals say what must be reachable in it. Called by ``__main__`` and by tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from .explore import Model
from .slot_ledger import SlotLedger
from .two_rank_commit import TwoRankCommit

_UNSEEN: Final = "a rank committed what was never resolved"

CHECKS: Final[dict[str, Callable[[], Model]]] = {
    "slot: every action, two generations": lambda: SlotLedger(
        rounds=1, goals=("accepted in generation 1 of worker 200", "quarantine", "commit alone")
    ),
    "slot: two rounds of one generation": lambda: SlotLedger(generations=1, goals=("commit on STEP", "commit alone")),
    "slot: replies of a generation that timed out": lambda: SlotLedger(
        generations=3,
        rounds=1,
        without=("CANCEL", "CLOSE", "fail", "COMMIT"),
        goals=("accepted in generation 3 of worker 200", "quarantine"),
    ),
    "slot: commits that race a reset": lambda: SlotLedger(
        without=("CANCEL", "CLOSE", "fail", "deadline"),
        goals=("accepted in generation 2 of worker 200", "commit on STEP", "commit alone"),
    ),
    "slot: a new connection, a restarted worker": lambda: SlotLedger(
        rounds=1,
        reconnects=1,
        without=("CANCEL", "fail", "COMMIT"),
        goals=("accepted in generation 2 of worker 200", "accepted in generation 1 of worker 201", "quarantine"),
    ),
    "ranks: one step, one restart": lambda: TwoRankCommit(
        epochs=1,
        steps=1,
        goals=("resolved with drafts in epoch 1", "resolved after a veto in epoch 1", _UNSEEN),
    ),
    "ranks: two epochs, one step each, one restart": lambda: TwoRankCommit(
        steps=1, drafts=False, goals=("resolved target-only in epoch 2", _UNSEEN)
    ),
    "ranks: two epochs, no restart": lambda: TwoRankCommit(
        steps=1, restarts=0, goals=("resolved with drafts in epoch 2", "resolved after a veto in epoch 2", _UNSEEN)
    ),
    "ranks: two steps, one restart": lambda: TwoRankCommit(
        epochs=1, goals=("resolved with drafts in epoch 1", "resolved after a veto in epoch 1", _UNSEEN)
    ),
    "ranks: three ranks": lambda: TwoRankCommit(
        ranks=3, epochs=1, steps=1, restarts=0, goals=("resolved with drafts in epoch 1", _UNSEEN)
    ),
    "ranks: three ranks without faults": lambda: TwoRankCommit(
        ranks=3, epochs=1, faults=False, goals=("resolved with drafts in epoch 1", "resolved after a veto in epoch 1")
    ),
}
