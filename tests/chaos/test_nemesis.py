"""The nemesis on faults of straw: order of steps, what counts as verified, healing whatever happens, locks."""

from __future__ import annotations

import threading
import time
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from dspark.chaos import faults as kinds
from dspark.chaos.faults import FAULTS, Evidence, Fault, Unverified, wait_for
from dspark.chaos.nemesis import Injected, Nemesis
from dspark.chaos.schedule import Planned


class Straw(Fault):
    """Writes down what is called; raises where it is told to."""

    kind = "straw"

    def __init__(self, link: Any, calls: list[str], fails: str = "") -> None:
        cluster: Any = SimpleNamespace(view=FakeView(0.0), links=[link])
        super().__init__(cluster, link, None, Random(1))  # type: ignore[arg-type]
        self.calls, self.fails = calls, fails

    def _call(self, name: str) -> Evidence:
        self.calls.append(name)
        if name == self.fails:
            raise Unverified(f"{name} missed")
        return {"of": name}

    def inject(self) -> Evidence:
        return self._call("inject")

    def verify(self) -> Evidence:
        return self._call("verify")

    def heal(self) -> None:
        self._call("heal")

    def verify_healed(self) -> Evidence:
        return self._call("verify_healed")


def link(number: int = 0) -> Any:
    return SimpleNamespace(number=number, lock=threading.Lock())


def carry_out(fault: Fault) -> Injected:
    ended: list[Injected] = []
    nemesis = Nemesis([Planned(0, 0.0, "straw", 0, 0)], lambda planned: fault, lambda fault: None, ended.append)
    nemesis.start()
    while not nemesis.done:
        time.sleep(0.005)
    nemesis.finish()
    (record,) = nemesis.injected
    assert ended == [record]
    return record


def test_a_fault_is_injected_verified_healed_and_verified_to_be_healed() -> None:
    calls: list[str] = []
    record = carry_out(Straw(link(), calls))
    assert calls == ["inject", "verify", "heal", "verify_healed"]
    assert record.ok
    times = [record.injected, record.verified, record.healed, record.recovered]
    assert times == sorted(times)  # type: ignore[type-var]
    assert {name: value["of"] for name, value in record.evidence.items()} == {
        "injected": "inject", "verified": "verify", "recovered": "verify_healed",
    }  # fmt: skip


@pytest.mark.parametrize("step", ["inject", "verify", "heal", "verify_healed"])
def test_a_step_that_fails_makes_the_fault_unverified_and_it_is_healed_all_the_same(step: str) -> None:
    calls: list[str] = []
    record = carry_out(Straw(link(), calls, fails=step))
    assert not record.ok
    assert record.problem is not None
    assert f"{step} missed" in record.problem
    assert "heal" in calls


def test_faults_on_one_link_wait_for_each_other_and_those_on_two_do_not() -> None:
    one, other = link(0), link(1)
    inside, gate = threading.Semaphore(0), threading.Event()

    class Slow(Straw):
        def verify(self) -> Evidence:
            inside.release()
            assert gate.wait(20)
            return {}

    made = {0: Slow(one, []), 1: Slow(one, []), 2: Slow(other, [])}
    plan = [Planned(n, 0.0, "straw", 0, 0) for n in made]
    nemesis = Nemesis(plan, lambda planned: made[planned.number], lambda fault: None, lambda fault: None)
    nemesis.start()
    assert inside.acquire(timeout=10)
    assert inside.acquire(timeout=10)
    assert len(nemesis.injected) == 2
    assert {record.planned.number for record in nemesis.injected} & {2} == {2}
    threading.Timer(0.05, gate.set).start()
    nemesis.finish()
    # The third found the run over when its link was free: it was not begun.
    assert len(nemesis.injected) == 2
    assert all(record.ok for record in nemesis.injected)


def test_evidence_is_waited_for_through_readings_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "PAUSE_S", 0.0)
    readings = iter([OSError("busy"), 0, 7])

    def read() -> int:
        found = next(readings)
        if isinstance(found, Exception):
            raise found
        return found

    assert wait_for("it", read, 5) == 7
    with pytest.raises(Unverified, match="it: not within 0 s"):
        wait_for("it", lambda: 0, 0)


class FakeProxy:
    """Counts what it is told to count."""

    def __init__(self, harmed: int) -> None:
        self.endpoint, self.harmed, self.passed, self.on = "tcp://p", harmed, 0, ""

    def switch_on(self, action: str, p: float, **fields: object) -> None:
        self.on = action

    def clear(self) -> None:
        self.on = ""

    def counts(self) -> dict[str, Any]:
        self.passed += 1
        return {"harmed": {self.on: self.harmed} if self.on else {}, "passed": self.passed, "accepted": 1, "cut": {}}


class FakeView:
    """An endpoint whose series come from a list of readings, the last of which stays."""

    def __init__(self, *drops: float, state: str = "up") -> None:
        self._drops, self._state = list(drops), state

    def metrics(self) -> Any:
        from dspark.chaos.endpoint_view import Metrics

        value = self._drops.pop(0) if len(self._drops) > 1 else self._drops[0]
        return Metrics({'wire_drops_total{cause="bad_prefix_crc"}': value})

    def state(self, address: str) -> str:
        return self._state


def frames_fault(kind: str, proxy: FakeProxy, view: FakeView) -> Fault:
    straw = SimpleNamespace(number=0, lock=threading.Lock(), proxy=proxy, address=proxy.endpoint)
    cluster = SimpleNamespace(view=view, links=[straw], pair=SimpleNamespace(draft_deadline_ms=10))
    return FAULTS[kind](cluster, straw, None, Random(1))  # type: ignore[arg-type]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("EFFECT_S", 0.1), ("HEALED_S", 0.1), ("PAUSE_S", 0.01), ("FRAMES_HOLD_S", (0.0, 0.0))):
        monkeypatch.setattr(kinds, name, value)


@pytest.mark.usefixtures("hasty")
def test_corruption_is_verified_by_the_proxy_and_by_the_endpoint() -> None:
    assert carry_out(frames_fault("corrupt", FakeProxy(5), FakeView(1.0, 4.0))).ok


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("leases", [0, 2])
def test_a_worker_without_requests_is_not_killed_for_a_takeover(leases: int, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[object] = []

    def kill(child: object) -> Evidence:
        killed.append(child)
        return {"pid": 1}

    monkeypatch.setattr(kinds, "_kill", kill)
    view = FakeView(0.0)
    view.workers = lambda: {"tcp://p": {"leases": leases}}  # type: ignore[attr-defined]
    fault = frames_fault("takeover", FakeProxy(0), view)
    fault.link.worker = "worker"  # type: ignore[assignment]
    monkeypatch.setattr(fault, "verify", lambda: {})
    monkeypatch.setattr(fault, "heal", lambda: None)
    record = carry_out(fault)
    assert (record.ok, len(killed)) == ((True, 1) if leases else (False, 0))


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("proxy", "view", "why"),
    [
        (FakeProxy(0), FakeView(1.0, 4.0), "frames to corrupt"),
        (FakeProxy(5), FakeView(1.0, 1.0), "wire_drops_total"),
        (FakeProxy(5), FakeView(1.0, 4.0, state="connecting"), "healing"),
    ],
    ids=["no frame was hurt", "the endpoint saw nothing", "the worker did not come back"],
)
def test_corruption_that_missed_or_stayed_is_unverified(proxy: FakeProxy, view: FakeView, why: str) -> None:
    record = carry_out(frames_fault("corrupt", proxy, view))
    assert not record.ok
    assert why in str(record.problem)
