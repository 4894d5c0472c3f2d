"""The real worker, with a tiny drafter, under every case of the conformance harness for drafters."""

from __future__ import annotations

import pytest

from dspark.conformance_worker import worker_peers
from dspark_proto import conformance as harness
from dspark_workers.worker import Worker


@pytest.fixture(scope="module")
def testee() -> harness.Testee:
    peer = worker_peers(Worker)[0]
    return peer.open("inproc", peer.facts)


def test_the_worker_passes_every_case(testee: harness.Testee) -> None:
    results = harness.run(testee, harness.select(harness.Role.DRAFTER))
    assert len(results) >= 200
    assert [(r.case.id, r.note, r.expected, r.actual) for r in results if not r.good] == []
    unsupported = [r for r in results if r.behaviour.value == "UNSUPPORTED" and not r.case.needs_secret]
    assert len(unsupported) < len(results) // 20


def test_a_worker_that_takes_cancel_for_close_is_found(testee: harness.Testee, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "_place", lambda *arguments: None)  # RESET finds nothing to renew
    results = harness.run(testee, harness.select(harness.Role.DRAFTER, ("DSP2-GEN-010",)))
    assert [r.case.id for r in results if not r.good] == ["DSP2-GEN-010"]
