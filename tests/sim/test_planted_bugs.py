"""Every planted bug is caught, and shrinking brings a failing world down to what matters."""

from __future__ import annotations

import pytest

from dspark.sim import plants
from dspark.sim.shrink import command, shrink
from dspark.sim.world import World

SEED = 1
CAUGHT = {
    "no-generation-check": (0, "forge", "stale_accepted"),
    "no-round-check": (0, "forge", "stale_accepted"),
    "no-epoch-check": (0, "forge", "stale_accepted"),
    "no-session-check": (0, "forge", "stale_accepted"),
    "no-digest-check": (0, "forge", "stale_accepted"),
    "no-body-checksum": (0, "corrupt", "corrupt_accepted"),
    "no-reply-checksum": (1, "forge", "stale_accepted"),
    "no-control-checksum": (1, "corrupt", "corrupt_accepted"),
    "redraw": (0, "duplicate", "keys_reused"),
    "same-round": (0, "drop", "keys_reused"),
    "no-round-in-key": (0, "drop", "wrong_tokens"),
    "early-reuse": (20, "delay", "double_leases"),
    "shared-block": (14, "drop", "crashes,unexplained"),
    "late-generation": (11, "delay", "model_violations"),
    "leak-at-close": (0, "drop", "leaked,not_live"),
    "unsent-close": (0, "drop", "not_live"),
    "context-gap": (0, "drop,reorder", "wrong_context"),
    "no-audit": (0, "lie", "corrupt_accepted"),
    "no-quarantine": (0, "lie", "quarantined_used"),
    "half-commit": (0, "rank_delay", "half_commits"),
    "repeated-decision": (0, "rank_duplicate,rank_delay", "half_commits"),
    "stale-confirmation": (0, "rank_duplicate,rank_delay", "half_commits"),
    "ignored-veto": (0, "rank_drop,rank_reorder", "half_commits"),
}
"""World, kinds of faults, violations: a world of the seed that shows the bug, in 300 rounds of that kind of faults."""


def test_the_table_has_every_plant() -> None:
    assert set(CAUGHT) == set(plants.PLANTS)


@pytest.mark.parametrize("name", CAUGHT)
def test_a_planted_bug_is_caught(name: str) -> None:
    world, kinds, violation = CAUGHT[name]
    with plants.planted(name):
        result = World(SEED, world, 300, kinds=tuple(kinds.split(","))).run()
    assert result.violations
    assert result.violations[0].kind in violation.split(",")


def test_a_plant_is_gone_after_its_context() -> None:
    kinds = ("corrupt",)
    clean = World(SEED, 0, 60, kinds=kinds).run()
    with plants.planted("no-body-checksum"):
        assert World(SEED, 0, 60, kinds=kinds).run().violations
    assert World(SEED, 0, 60, kinds=kinds).run().trace_hash == clean.trace_hash
    assert clean.violations == []


def test_a_failing_world_shrinks_to_the_one_fault_that_matters() -> None:
    found = shrink(SEED, 0, 300, "corrupt_accepted", "no-body-checksum", ("corrupt",))
    assert len(found.faults) == 1
    assert found.faults[0].kind == "corrupt"
    with plants.planted("no-body-checksum"):
        again = World(SEED, 0, 300, [found.faults[0].index], kinds=("corrupt",)).run()
    assert again.violations == [found.violation]
    assert command(found).startswith(f"dspark sim --seed 1 --world 0 --rounds 300 --faults {found.faults[0].index} ")


def test_a_world_that_does_not_fail_cannot_be_shrunk() -> None:
    with pytest.raises(ValueError, match="has no violation"):
        shrink(SEED, 0, 30, "wrong_tokens")
