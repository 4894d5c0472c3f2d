"""The simulator's worlds: what holds in a clean one, in a swarm, twice, and in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark.sim import campaign
from dspark.sim.faults import KINDS
from dspark.sim.world import World

SEED = 11
FINDINGS = json.loads((Path(__file__).parent / "seeds.json").read_text("utf-8"))


def test_without_faults_nothing_is_discarded_and_almost_everything_is_drafted() -> None:
    for number in (1, 5):
        result = World(SEED, number, 300, []).run()
        assert result.violations == []
        assert result.rounds >= 300
        assert not result.discards
        wanted = result.rounds - result.target_only["first_token"] - result.target_only["budget"]
        assert result.proposals > 0.8 * wanted
        assert result.proposals + sum(result.target_only.values()) == result.rounds


def test_a_short_swarm_is_clean_and_every_fault_is_verified() -> None:
    tally = campaign.run(SEED, 2000)
    assert tally.failures == []
    assert tally.unverified == 0
    assert tally.rounds >= 2000
    assert sum(tally.injected.values()) > 100
    assert tally.liveness_ms


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fault_takes_hold_and_does_no_harm(kind: str) -> None:
    """World 0 of this seed has ratio requests, two workers and no other faults than these."""
    result = World(SEED, 0, 150, kinds=(kind,)).run()
    assert result.violations == []
    injected = [fault for fault in result.faults if fault.injected]
    assert injected
    assert all(fault.verified for fault in injected)


def test_the_same_seed_gives_the_same_trace_in_every_process() -> None:
    """Hash randomisation orders sets and dictionaries of names differently there than here."""
    code = f"from dspark.sim.world import World; print(World({SEED}, 2, 200).run().trace_hash)"
    salt = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    elsewhere = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": salt},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    here = World(SEED, 2, 200).run().trace_hash
    assert elsewhere.stdout == here + "\n"
    assert World(SEED, 3, 200).run().trace_hash != here


def test_a_world_alone_is_the_world_of_the_run() -> None:
    first = campaign.run(SEED, 300)
    again = campaign.Tally()
    again.add(World(SEED, 0, 300).run(), 300)
    assert again.hashes.hexdigest() == first.hashes.hexdigest()


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda one: one["why"])
def test_what_failed_once_stays_repaired(finding: dict) -> None:
    kinds = tuple(finding["kinds"])
    result = World(finding["seed"], finding["world"], finding["rounds"], finding["faults"], kinds=kinds).run()
    assert result.violations == []


def test_the_report_has_every_figure() -> None:
    report = campaign.report(campaign.run(SEED, 200), SEED, 1.0)
    zero = ("wrong_tokens", "stale_accepted", "corrupt_accepted", "half_commits", "leaked", "faults_unverified")
    assert [report[key] for key in zero] == [0] * len(zero)
    assert report["rounds"] == report["proposals"] + report["target_only_rounds"]
    assert report["faults"] == sum(kind["injected"] for kind in report["by_kind"].values())
    assert report["failures"] == []
    assert json.loads(json.dumps(report)) == report
