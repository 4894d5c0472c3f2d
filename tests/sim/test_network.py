"""A simulated channel on its own: what a fault may hold back, and what it must never bring back."""

from __future__ import annotations

from random import Random

import pytest

from dspark.sim.clock import MS, VirtualClock
from dspark.sim.faults import Fault
from dspark.sim.network import Channel
from dspark_proto import MessageType

HELLO, OPEN, PING = (bytes(6) + bytes([kind]) for kind in (MessageType.HELLO, MessageType.OPEN, MessageType.PING))


class Wire:
    """One channel with a fixed delay of a millisecond, and what arrived."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.arrived: list[bytes] = []
        self.channel = Channel(self.clock, Random(1), (1000, 1000), lambda frames, _: self.arrived.extend(frames), id)

    def run(self, until_ms: int) -> None:
        self.clock.after(until_ms * MS - self.clock.now_ns, lambda: None)
        while self.clock.now_ns < until_ms * MS and self.clock.step():
            pass


def _armed(kind: str, amount: int = 50) -> Fault:
    return Fault(0, kind, 0, 0, 0, MessageType.OPEN, amount)


@pytest.mark.parametrize("kind", ["delay", "duplicate"])
def test_a_late_frame_of_a_living_connection_arrives(kind: str) -> None:
    wire = Wire()
    fault = _armed(kind)
    wire.channel.armed.append(fault)
    wire.channel.send([OPEN])
    wire.run(2)
    assert wire.arrived == [OPEN] * (kind == "duplicate")
    wire.run(60)
    assert wire.arrived == [OPEN] * (1 + (kind == "duplicate"))
    assert fault.verified
    assert wire.channel.unaccounted == 0


@pytest.mark.parametrize("kind", ["delay", "duplicate", "reorder"])
def test_a_frame_that_a_clog_held_does_not_come_again_in_the_next_connection(kind: str) -> None:
    """The next connection begins when its HELLO is sent, before the clog lets go of the frames of the one before."""
    wire = Wire()
    fault = _armed(kind)
    clog = Fault(1, "clog", 0, 0, 0, 0, 0)
    wire.channel.clog = clog
    wire.channel.send([OPEN])
    wire.run(2)
    wire.channel.send([HELLO])
    wire.run(4)
    assert wire.arrived == []
    wire.channel.armed.append(fault)
    wire.channel.release()
    wire.channel.send([PING])
    wire.run(100)
    assert wire.arrived == [OPEN] * (kind == "duplicate") + [HELLO, PING]
    assert fault.verified
    assert clog.verified
    assert wire.channel.unaccounted == 0
