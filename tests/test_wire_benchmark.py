"""`dspark bench wire`: real rounds against processes of their own, every key is there, and ratios are of one turn."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dspark import wire_benchmark
from dspark.wire_benchmark import DEPTH, TAP_ROWS, Round, Series
from dspark.wire_benchmark_peers import (
    TAP_LAYERS,
    TAP_WIDTH,
    Layout,
    StubDrafter,
    bound_to,
    plain_process,
    split_cores,
)
from dspark_proto import Buffer, MessageType
from dspark_proto.reply_frames import ReplyFrames
from dspark_proto.transports.base import PeerFrame

VOCAB = 500
CASES = ((Layout("sparse", 32, VOCAB), 2), (Layout("dense", 0, VOCAB), 1))
TRANSPORTS = ("zmq", "tcp", "memory")
UNITS = ("ratio", "us", "plain_us", "encode_us", "send_us", "wait_us", "validate_us", "stub_us")


@pytest.fixture(scope="module")
def result() -> dict[str, object]:
    return wire_benchmark.run(8, TRANSPORTS, CASES, trace=True)


def test_every_case_has_its_keys(result: dict[str, object]) -> None:
    quartiles = result["quartiles"]
    assert isinstance(quartiles, dict)
    cases = [f"{{}}_{transport}_{requests}" for _, requests in CASES for transport in TRANSPORTS]
    names = [layout.name for layout, _ in CASES for _ in TRANSPORTS]
    assert set(quartiles) == {
        f"{name}_{case.format(unit)}" for name, case in zip(names, cases, strict=True) for unit in UNITS
    }
    for key, (low, high) in quartiles.items():
        value = result[key]
        assert isinstance(value, float), key
        assert 0 <= low <= value <= high, key
    assert (result["turns"], result["transports"], result["depth"]) == (8, list(TRANSPORTS), DEPTH)


def test_the_bytes_are_those_of_steps_with_taps_and_of_whole_replies(result: dict[str, object]) -> None:
    taps = TAP_ROWS * len(TAP_LAYERS) * TAP_WIDTH * 2
    for layout, requests in CASES:
        up, down = result[f"{layout.name}_bytes_up_{requests}"], result[f"{layout.name}_bytes_down_{requests}"]
        assert isinstance(up, int)
        assert isinstance(down, int)
        assert requests * taps < up < requests * taps + 4096
        rows = DEPTH * (16 + (8 * layout.support or 4 * VOCAB))
        assert requests * rows < down < requests * (rows + 1024)


def test_a_traced_round_keeps_nothing(result: dict[str, object]) -> None:
    """Taps, rows and frames live in memory that was taken before: a round leaves nothing, and holds a few objects."""
    for layout, requests in CASES:
        for transport in TRANSPORTS:
            kept = result[f"{layout.name}_kept_bytes_{transport}_{requests}"]
            peak = result[f"{layout.name}_peak_bytes_{transport}_{requests}"]
            assert isinstance(kept, int)
            assert isinstance(peak, int)
            assert -100 < kept < 100
            assert 0 < peak < 12_000


@dataclass
class StubEnd:
    """The stub's end of a transport in memory. `log` is what the stub sent, in order."""

    arrived: list[PeerFrame] = field(default_factory=list)
    sent: list[memoryview] = field(default_factory=list)
    log: list[Any] = field(default_factory=list)
    endpoint: str = "memory"

    def poll(self, timeout_ms: int) -> list[PeerFrame]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def send(self, peer: bytes, frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        if frames:
            self.log.append([MessageType(memoryview(frame)[6]) for frame in frames])
            self.sent += [memoryview(bytes(frame)) for frame in frames]
        return True

    def close(self) -> None:
        pass


@dataclass
class VerifierEnd:
    """The verifier's end; the stub has its turn when it polls."""

    stub: StubDrafter
    other: StubEnd

    def send(self, frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        self.other.arrived += [PeerFrame(b"verifier", memoryview(bytes(frame))) for frame in frames]
        return True

    def poll(self, timeout_ms: int) -> list[memoryview]:
        self.stub.turn(self.other)
        sent, self.other.sent = self.other.sent, []
        return sent

    def close(self) -> None:
        pass


def joined(layout: Layout, requests: int) -> tuple[wire_benchmark.Verifier, list[Any]]:
    """A verifier that has opened its slots, and the log of what the stub sends from then on."""
    other = StubEnd()
    verifier = wire_benchmark.Verifier(VerifierEnd(StubDrafter(layout, requests), other), layout, requests)
    other.log.clear()
    return verifier, other.log


def test_the_stub_answers_all_requests_in_one_send() -> None:
    verifier, log = joined(CASES[0][0], 3)
    for _ in range(2):
        verifier.round(verifier.prepare())
    assert log == [[MessageType.ROW, MessageType.COMPLETION] * 3] * 2


def test_large_replies_of_the_stub_leave_while_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, log = joined(Layout("dense", 0, 100_000), 2)
    original = ReplyFrames.fill

    def fill(self: ReplyFrames, index: int, *arguments: Any) -> memoryview:
        log.append(index)
        return original(self, index, *arguments)

    monkeypatch.setattr(ReplyFrames, "fill", fill)
    verifier.round(verifier.prepare())
    row, completion = [MessageType.ROW], [MessageType.COMPLETION]
    assert log == [0, row, 1, row, 2, row, completion] * 2


def test_ratios_are_taken_inside_a_turn() -> None:
    """Drift that doubles every time of a turn changes no ratio."""
    rounds = [Round(3e-4 * s, 1e-4 * s, 0.5e-4 * s, 1e-4 * s, 0.5e-4 * s, 0.2e-4 * s) for s in (1, 2, 4)]
    series = Series("tcp", rounds, [1e-4, 2e-4, 4e-4])
    result: dict[str, object] = {}
    quartiles: dict[str, list[float]] = {}
    wire_benchmark._report(result, quartiles, series, "sparse", 4)
    assert result["sparse_ratio_tcp_4"] == 3
    assert quartiles["sparse_ratio_tcp_4"] == [3, 3]
    assert result["sparse_us_tcp_4"] == 600
    assert result["sparse_plain_us_tcp_4"] == 200
    assert result["sparse_stub_us_tcp_4"] == 40


def test_the_parts_of_a_round_are_the_round(result: dict[str, object]) -> None:
    seen: list[Round] = []
    layout = CASES[0][0]
    with wire_benchmark._verifiers(layout, 2, ("tcp",), []) as verifiers:
        verifier = verifiers["tcp"]
        seen += [verifier.round(verifier.prepare()) for _ in range(4)]
        staging = verifier.connection.staging
        assert staging is not None
        assert all(lease.state.value == "free" for lease in staging.leases)
    for one in seen:
        assert one.encode + one.send + one.wait + one.validate == pytest.approx(one.total)
        assert min(one.encode, one.send, one.wait, one.validate) > 0


def test_processes_end_with_the_benchmark() -> None:
    before = children()
    with plain_process([]):
        assert len(children() - before) >= 1
    until = time.monotonic() + 10
    while children() - before - resource_trackers():
        assert time.monotonic() < until


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_each_role_is_on_cores_of_its_own(result: dict[str, object]) -> None:
    allowed = os.sched_getaffinity(0)
    near, far = split_cores()
    assert near
    assert far
    assert (set(near) | set(far), set(near) & set(far)) == (allowed, set())
    assert result["cores_apart"] is True
    with bound_to(near), plain_process(far):
        assert os.sched_getaffinity(0) == set(near)
        assert set(far) in [os.sched_getaffinity(pid) for pid in children() - resource_trackers()]
    with bound_to([]):
        assert os.sched_getaffinity(0) == allowed


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}


def resource_trackers() -> set[int]:
    """The helper of Python's own that a spawned process brings; it ends with this process."""
    return {pid for pid in children() if b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()}


def test_output_for_machines_and_for_people(result: dict[str, object]) -> None:
    assert json.loads(wire_benchmark.as_json(result)) == result
    lines = wire_benchmark.as_table(result).splitlines()
    for name, requests, transport in (("sparse", "2", "zmq"), ("sparse", "2", "tcp"), ("dense", "1", "tcp")):
        (line,) = (one for one in lines if one.split()[:3] == [name, requests, transport])
        assert f"{result[f'{name}_ratio_{transport}_{requests}']:.2f}" in line.split()
    assert sum("a round keeps" in line for line in lines) == 6
