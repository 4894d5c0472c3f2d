"""When a wait spins: the policy against clocks that are made up, and the ends of the transports that obey it."""

from __future__ import annotations

import importlib
import os
import random
import select
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transport_ends import KINDS, Kind, ping, receive_down, send_up

from dspark_proto.transports import patience as policy
from dspark_proto.transports.bounds import LinkLimits
from dspark_proto.transports.patience import EARNED_WAITS, SLEEP_AT_ONCE, SPIN_US, Patience

NO_KEYS: Any = None
"""Neither transport here has keys."""

SPIN_S = SPIN_US / 1e6
SHORT_S, LONG_S = SPIN_S / 2, 10 * SPIN_S
LOOK_S, WAKE_S = 2e-6, 50e-6


class World:
    """A clock, and one thing that arrives: a look takes 2 us, and a sleep ends 50 us late."""

    def __init__(self) -> None:
        self.now = 100.0
        self.arrives = 0.0
        self.looks: list[float] = []
        self.patience = Patience(clock=lambda: self.now)

    def look(self, timeout_ms: float) -> bool:
        self.looks.append(timeout_ms)
        self.now += LOOK_S
        if self.arrives <= self.now:
            return True
        ends = self.now + timeout_ms / 1000
        if timeout_ms:
            self.now = min(ends, self.arrives) + WAKE_S
        return self.arrives <= self.now

    def wait(self, takes_s: float, timeout_ms: float = 1000) -> bool:
        """Wait for what arrives in ``takes_s``; ``looks`` are those of this wait."""
        self.looks, self.arrives = [], self.now + takes_s
        return self.patience.wait(self.look, timeout_ms)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(policy.os, "cpu_count", lambda: 2)
    return World()


def earn(patience: Patience) -> None:
    for _ in range(EARNED_WAITS):
        patience.ended(SHORT_S, True)


def test_a_spin_is_earned_by_short_waits_in_a_row(world: World) -> None:
    for _ in range(EARNED_WAITS):
        assert world.patience.spin_s == 0
        assert world.wait(SHORT_S)
        assert world.looks == [1000]
    assert world.patience.spin_s == SPIN_S
    began = world.now
    assert world.wait(SHORT_S)
    assert set(world.looks) == {0}
    assert SHORT_S <= world.now - began < SHORT_S + WAKE_S
    assert world.patience.spin_s == SPIN_S


@pytest.mark.parametrize(("takes_s", "found"), [(LONG_S, True), (2 * SPIN_S, True), (5.0, False)])
def test_one_wait_that_is_no_short_one_ends_the_spinning(world: World, takes_s: float, found: bool) -> None:
    earn(world.patience)
    assert world.wait(takes_s) is found
    assert len(world.looks) > 2
    assert world.looks[-1] == pytest.approx(1000 - SPIN_US / 1000, abs=0.01)
    for _ in range(EARNED_WAITS):
        assert world.wait(SHORT_S)
        assert world.looks == [1000]


def test_a_wait_that_ends_with_nothing_is_no_short_one_however_short(world: World) -> None:
    earn(world.patience)
    world.patience.ended(SHORT_S, False)
    assert world.patience.spin_s == 0


def test_what_was_there_already_says_nothing(world: World) -> None:
    for _ in range(3 * EARNED_WAITS):
        assert world.wait(0)
    assert world.patience.spin_s == 0
    earn(world.patience)
    for _ in range(3 * EARNED_WAITS):
        assert world.wait(0)
        assert world.looks == [0]
    assert world.patience.spin_s == SPIN_S


def test_parts_of_one_reply_earn_nothing_where_rounds_are_long(world: World) -> None:
    """40 ms for the first part, and microseconds between the others: no wait of 100 rounds spins."""
    for _ in range(100):
        for takes_s in (0.04, *[20e-6] * (EARNED_WAITS - 1)):
            assert world.wait(takes_s)
            assert world.looks == [1000]


def test_drafts_of_eight_milliseconds_cost_one_look_each(world: World) -> None:
    earn(world.patience)
    world.wait(0.008)
    for _ in range(100):
        world.wait(0.008)
        assert world.looks == [1000]


def test_time_spun_in_vain_is_bounded_whatever_comes(world: World) -> None:
    chance = random.Random(5)
    waits, vain_s, vain = 20_000, 0.0, 0
    for _ in range(waits):
        takes_s = chance.choice([0.0, 20e-6, SHORT_S, SHORT_S, SPIN_S, 1.01 * SPIN_S, LONG_S, 5.0])
        if chance.random() < 0.9:
            takes_s = min(takes_s, SHORT_S)
        began = world.now
        world.wait(takes_s)
        spun = [look for look in world.looks if not look]
        if world.looks[-1]:
            vain_s += len(spun) * LOOK_S
            vain += bool(spun)
        assert len(spun) * LOOK_S <= SPIN_S + LOOK_S
        assert world.now - began <= 1.0 + WAKE_S + 2 * LOOK_S
    assert vain > 100
    assert vain_s <= waits * SPIN_S / EARNED_WAITS


@pytest.mark.parametrize("timeout_ms", [0, -1.0])
def test_without_a_timeout_there_is_one_look_and_nothing_is_learned(world: World, timeout_ms: float) -> None:
    earn(world.patience)
    assert world.wait(5.0, timeout_ms) is False
    assert world.looks == [timeout_ms]
    assert world.patience.spin_s == SPIN_S


def test_a_spin_is_part_of_the_timeout(world: World) -> None:
    earn(world.patience)
    began = world.now
    assert world.wait(5.0, 0.1) is False
    assert world.now - began <= 0.1e-3 + WAKE_S + 3 * LOOK_S
    assert 0 <= world.looks[-1] < 0.01


@pytest.mark.parametrize("cores", [1, None])
def test_a_machine_with_one_core_never_spins(monkeypatch: pytest.MonkeyPatch, cores: int | None) -> None:
    monkeypatch.setattr(policy.os, "cpu_count", lambda: cores)
    one = World()
    earn(one.patience)
    assert one.wait(SHORT_S)
    assert one.looks == [1000]


def test_no_spin_where_none_is_wanted() -> None:
    for patience in (Patience(0), SLEEP_AT_ONCE):
        earn(patience)
        assert patience.spin_s == 0


# The ends of the transports


@pytest.fixture(params=[kind for kind in KINDS if kind.name in ("tcp", "ucx")], ids=lambda kind: kind.name)
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """A server and a client that know each other, on a machine with two cores."""
    kind: Kind = request.param
    monkeypatch.setattr(policy.os, "cpu_count", lambda: 2)
    server = kind.server(NO_KEYS)
    client = kind.client(NO_KEYS, server)
    ((peer, _),) = send_up(server, client, ping(1))
    assert server.send(peer, [ping(2)], 1000)
    receive_down(server, client, 1)
    yield server, client
    client.close()
    server.close()


def looks_of(end: Any, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Timeouts of the looks that ``end`` makes from now on."""
    seen: list[float] = []

    def counted(look: Callable[[float], Any]) -> Callable[[float], Any]:
        return lambda timeout_ms: seen.append(timeout_ms) or look(timeout_ms)

    if hasattr(end, "_link"):
        monkeypatch.setattr(end._link, "look", counted(end._link.look))
    else:

        class Counted:
            poll = staticmethod(counted(end._waiting.poll))

        monkeypatch.setattr(end, "_waiting", Counted)
    return seen


@pytest.mark.parametrize("which", [0, 1], ids=["server", "client"])
def test_an_end_spins_once_when_it_was_earned_and_sleeps_from_then_on(
    ends: tuple[Any, Any], which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = ends[which]
    earn(end._for_frames)
    seen = looks_of(end, monkeypatch)
    assert end.poll(0) == []
    assert [one for one in seen if one] == []
    assert len(seen) <= 1
    seen.clear()
    assert end.poll(20) == []
    sleeps = [one for one in seen if one]
    assert seen.index(sleeps[0]) > 1
    assert all(0 < one <= 20 for one in sleeps)
    seen.clear()
    for _ in range(3):
        assert end.poll(20) == []
    assert len([one for one in seen if one]) >= 3
    assert len([one for one in seen if not one]) <= 3


@pytest.mark.parametrize("which", [0, 1], ids=["server", "client"])
def test_frames_that_come_while_an_end_spins_are_found(ends: tuple[Any, Any], which: int) -> None:
    server, client = ends
    ((peer, _),) = send_up(server, client, ping(3))
    for number in range(50):
        for end in ends:
            earn(end._for_frames)
        if which:
            assert server.send(peer, [ping(number)], 1000)
            assert receive_down(server, client, 1) == [ping(number)]
        else:
            assert send_up(server, client, ping(number)) == [(peer, ping(number))]


def test_the_limits_of_a_link_say_how_long_it_spins() -> None:
    tcp = importlib.import_module("dspark_proto.transports.tcp")
    assert (os.cpu_count() or 1) == 1 or LinkLimits().spin_us == SPIN_US
    server = tcp.TcpServer(limits=LinkLimits(spin_us=0))
    client = tcp.TcpClient(server.endpoint, limits=LinkLimits(spin_us=0))
    for end in (server, client):
        for patience in (end._for_frames, end._for_the_rest):
            earn(patience)
            assert patience.spin_s == 0
    client.close()
    server.close()


def test_waits_for_the_rest_of_a_frame_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large frame in many pieces, each of them quick, earns no spin before the next frame."""
    monkeypatch.setattr(policy.os, "cpu_count", lambda: 2)
    tcp = importlib.import_module("dspark_proto.transports.tcp")
    server = tcp.TcpServer()
    told: dict[str, list[bool]] = {"_for_frames": [], "_for_the_rest": []}
    for name, seen in told.items():
        patience = getattr(server, name)
        monkeypatch.setattr(patience, "ended", lambda waited_s, found, seen=seen: seen.append(found))
    ready = [True] * 12

    class Waiting:
        def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
            return [(server._listener.fileno(), select.POLLIN)] if ready and ready.pop() else []

    monkeypatch.setattr(server, "_waiting", Waiting())
    assert server.poll(5) == []
    assert told["_for_frames"] == [True]
    assert told["_for_the_rest"][:11] == [True] * 11
    server.close()
