"""Dense rounds over real connections: q comes to lie in the leased block without a copy, also after a broken link."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_wire_dense import LARGE, dense_arrays, offers
from transport_ends import KINDS, Kind, wait_until
from wire_pairs import MS, Pair, counted

from dspark_proto import (
    Accepted,
    DrafterConnection,
    HelloReceived,
    LeaseState,
    MessageType,
    ProposalReady,
    StepArrived,
    SupportPolicy,
    VerifierConnection,
    decode_frame,
    read_prefix,
)
from dspark_proto.capture import CaptureWriter, RecordingClient, TransportKind, read_frames
from dspark_proto.placement import PlacedFrame
from dspark_proto.transports.tcp import TcpServer
from tests.link_keys import Keys, make_keys

PLACING = tuple(kind for kind in KINDS if kind.name in ("tcp", "tls"))
ROW = MessageType.ROW
OTHERS = tuple(kind for kind in KINDS if kind.name in ("inproc", "zmq"))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys"))


class Ends:
    """A verifier and a drafter at the two ends of a link, in one thread."""

    def __init__(self, kind: Kind, keys: Keys) -> None:
        self.server = kind.server(keys)
        self.client = kind.client(keys, self.server)
        self.pair = Pair(VerifierConnection(offers(100, LARGE)), DrafterConnection(offers(200, LARGE)))
        self.client.place = self.pair.verifier.place
        self.kinds: list[type] = []
        self.peer = b""
        self.said: list[Any] = []

    def turn(self) -> list[Any]:
        """What has arrived at either end; the verifier's events. STEPs are answered."""
        for arrived in self.server.poll(1):
            self.peer = arrived.peer
            for event in self.pair.drafter.receive(arrived.frame, self.pair.now_ns):
                if isinstance(event, HelloReceived):
                    assert self.server.send(self.peer, [self.pair.drafter.accept(self.pair.now_ns)])
                if isinstance(event, StepArrived):
                    for item in event.items:
                        self.answer(self.pair.drafter.reply(item, **self.arrays(item.round)))
        events = []
        for frame in self.client.poll(1):
            self.kinds.append(type(frame))
            events += self.pair.verifier.receive(frame, self.pair.now_ns)
        self.said += events
        return events

    def answer(self, frames: Any) -> None:
        assert self.server.send(self.peer, [bytes(frame) for frame in frames], 1000)

    @staticmethod
    def arrays(round_: int) -> dict[str, Any]:
        return dense_arrays(5, LARGE, token=10 + round_)

    def until(self, kind: type) -> Any:
        self.said.clear()
        wait_until(lambda: self.turn() is None or [e for e in self.said if isinstance(e, kind)])
        return next(event for event in self.said if isinstance(event, kind))

    def connect(self) -> None:
        hello = self.pair.verifier.hello(self.pair.now_ns)
        wait_until(lambda: self.turn() is None or self.client.send([hello]))
        self.until(Accepted)
        self.send(self.pair.verifier.open(0, 77, seed=1, support=SupportPolicy.DENSE, lane=self.pair.item(1).lane))

    def send(self, frame: memoryview) -> None:
        assert self.client.send([frame], 1000)

    def round(self, round_: int) -> ProposalReady:
        self.send(self.pair.verifier.step([self.pair.item(round_)], self.pair.now_ns))
        found: ProposalReady = self.until(ProposalReady)
        return found

    def close(self) -> None:
        self.client.close()
        self.server.close()


@pytest.fixture
def ends(request: pytest.FixtureRequest, keys: Keys) -> Iterator[Ends]:
    made = Ends(request.param, keys)
    yield made
    made.close()


@pytest.mark.parametrize("ends", PLACING, indirect=True, ids=lambda kind: kind.name)
def test_q_is_received_where_it_stays(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark_proto.verifier_inbox.stage_rows", None)
    monkeypatch.setattr("dspark_proto.verifier_inbox.VerifierInbox._takes_expected_rows", None)
    ends.connect()
    for round_ in (1, 2, 3):
        ready = ends.round(round_)
        assert (ready.tokens, ready.q) == ((10 + round_,) * 5, ends.arrays(round_)["q"])
        ready.lease.storage[-1] ^= 1
        assert ready.q != ends.arrays(round_)["q"]
        ready.lease.storage[-1] ^= 1
        ready.lease.release()
    assert ends.kinds.count(PlacedFrame) == 9
    assert counted(ends.pair.verifier.counters) == {}


@pytest.mark.parametrize("ends", OTHERS, indirect=True, ids=lambda kind: kind.name)
def test_other_transports_take_no_notice(ends: Ends) -> None:
    ends.connect()
    ready = ends.round(1)
    assert ready.q == ends.arrays(1)["q"]
    assert set(ends.kinds) == {memoryview}


@pytest.mark.parametrize("ends", PLACING, indirect=True, ids=lambda kind: kind.name)
def test_nothing_is_placed_where_nobody_has_asked_for_it(ends: Ends) -> None:
    ends.client.place = None
    ends.connect()
    assert ends.round(1).q == ends.arrays(1)["q"]
    assert set(ends.kinds) == {memoryview}


@pytest.mark.parametrize("ends", PLACING, indirect=True, ids=lambda kind: kind.name)
def test_a_link_that_breaks_inside_a_row_costs_the_round_and_no_block(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends.connect()
    answer, verifier = ends.answer, ends.pair.verifier
    assert verifier.staging is not None
    for round_ in (1, 2):
        monkeypatch.setattr(ends, "answer", lambda frames: answer([bytes(frames[0])[:500_000]]))
        ends.send(verifier.step([ends.pair.item(1)], ends.pair.now_ns))
        wait_until(lambda: ends.turn() is None or verifier._write is not None)
        drop(ends)
        monkeypatch.setattr(ends, "answer", answer)
        ends.pair.drafter = DrafterConnection(offers(200 + round_, LARGE))
        ends.connect()
        assert verifier.staging.count(LeaseState.FREE) == 4
    assert ends.round(1).q == ends.arrays(1)["q"]
    assert counted(verifier.counters) == {}


def drop(ends: Ends) -> None:
    """The worker's end closes the connection; the client notices."""
    assert isinstance(ends.server, TcpServer)
    stream = ends.client._stream  # type: ignore[attr-defined]
    for peer in list(ends.server._peers.values()):
        peer.stream.close()
        ends.server._forget(peer)
    wait_until(lambda: ends.client.poll(1) == [] and stream.is_closed)


@pytest.mark.parametrize("ends", PLACING[:1], indirect=True, ids=lambda kind: kind.name)
def test_a_row_that_stops_half_way_is_late_and_its_memory_waits(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline ends the round. The rest of the row comes in another one, and harms nobody."""
    ends.connect()
    verifier = ends.pair.verifier
    assert verifier.staging is not None
    sent: list[bytes] = []
    stream: list[bytes] = []
    monkeypatch.setattr(ends, "answer", lambda frames: sent.extend(bytes(frame) for frame in frames))
    ends.send(verifier.step([ends.pair.item(1)], ends.pair.now_ns))
    wait_until(lambda: ends.turn() is None or sent)
    stream += [sent[0][:500_000]]
    raw = next(iter(ends.server._peers.values())).stream  # type: ignore[attr-defined]
    assert raw.send(stream, 1000)
    wait_until(lambda: ends.turn() is None or verifier._write is not None)
    verifier.expire(ends.pair.now_ns + 2000 * MS)
    assert verifier.staging.count(LeaseState.QUARANTINED) == 1
    assert verifier.staging.count(LeaseState.FREE) == 3
    assert raw.send([sent[0][500_000:], *sent[1:]], 1000)
    wait_until(lambda: ends.turn() is None or verifier.staging.count(LeaseState.FREE) == 4)  # type: ignore[union-attr]
    wait_until(lambda: ends.turn() is None or verifier.counters["late"] == 4)


def test_a_recording_has_placed_frames_whole(keys: Keys, tmp_path: Path) -> None:
    ends = Ends(PLACING[0], keys)
    path = tmp_path / "links.dspcap"
    with CaptureWriter(path) as writer:
        recorded = RecordingClient(ends.client, writer, TransportKind.TCP)
        assert recorded.place == ends.pair.verifier.place
        recorded.place = None
        assert ends.client.place is None
        recorded.place = ends.pair.verifier.place
        ends.client = recorded
        ends.connect()
        assert ends.round(1).q == ends.arrays(1)["q"]
    ends.close()
    assert PlacedFrame in ends.kinds
    rows = [
        decode_frame(entry.content) for entry in read_frames(path) if read_prefix(memoryview(entry.content)).type is ROW
    ]
    assert b"".join(frame.bodies[-1] for frame in rows) == ends.arrays(1)["q"]
