"""What leaves a worker when: small replies together, large ones while they are made, nothing behind a gap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from dspark_proto import Buffer, Lane, MessageType, ProposalReady, SupportPolicy, decode_frame
from dspark_proto.reply_frames import ReplyFrames
from dspark_proto.transports.base import PeerFrame
from dspark_workers.server import turn
from dspark_workers.worker import Worker
from tests.conftest import TinyPair
from tests.rig import Parts, load_parts, type_of
from tests.workers.test_worker import Spark, drafts, open_lane, spark_of

ROW, COMPLETION = MessageType.ROW, MessageType.COMPLETION
DENSE_ROW_BYTES = 16 + 4 * 288


@pytest.fixture(scope="module")
def parts(tiny_pair: TinyPair) -> Parts:
    return load_parts(tiny_pair.target, tiny_pair.drafter)


@dataclass
class Server:
    """A transport that gives `inbox` to one turn, and writes down every send; `refused` are sends by number."""

    inbox: list[PeerFrame] = field(default_factory=list)
    log: list[Any] = field(default_factory=list)
    sends: list[tuple[bytes, list[bytes]]] = field(default_factory=list)
    refused: set[int] = field(default_factory=set)
    tried: int = 0
    endpoint: str = "memory"
    clock: Any = None

    def poll(self, timeout_ms: int) -> list[PeerFrame]:
        frames, self.inbox = self.inbox, []
        return frames

    def send(self, peer: bytes, frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        self.tried += 1
        if self.clock is not None:
            self.clock.now += 1_000_000_000
        if self.tried - 1 in self.refused:
            return False
        self.log.append([type_of(frame) for frame in frames])
        self.sends.append((peer, [bytes(frame) for frame in frames]))
        return True

    def close(self) -> None:
        pass


def sent(frame: Buffer, name: bytes = b"a") -> PeerFrame:
    return PeerFrame(name, memoryview(bytes(frame)))


def delivered(server: Server, spark: Spark) -> list[Any]:
    """What the verifier makes of everything that was sent to it."""
    frames = [frame for peer, frames in server.sends if peer == spark.name for frame in frames]
    return [event for frame in frames for event in spark.connection.receive(frame, spark.now)]


@pytest.fixture
def one_row_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the tiny model are large ones: each fills a ROW, and is worth a send."""
    monkeypatch.setattr("dspark_proto.rows.ROW_CHUNK_BYTES", DENSE_ROW_BYTES)
    monkeypatch.setattr("dspark_workers.worker.LARGE_SEND_BYTES", DENSE_ROW_BYTES)


def dense_spark(parts: Parts, *slots: int) -> Spark:
    spark = spark_of(parts, parts.worker(dense_rows=True), dense_rows=True)
    for slot in slots:
        open_lane(spark, slot, Lane.RATIO, SupportPolicy.DENSE, seed=slot)
    return spark


def asked(spark: Spark, *slots: int) -> Server:
    """A server that has a STEP for these slots."""
    return Server([sent(spark.connection.step(spark.items(*slots), 0), spark.name)])


def test_small_replies_to_a_step_leave_in_one_send(parts: Parts) -> None:
    spark = spark_of(parts, parts.worker())
    for slot in range(3):
        spark.open(slot, seed=slot)
    server = asked(spark, 0, 1, 2)
    turn(spark.worker, server, 0)
    assert server.log == [[ROW, COMPLETION] * 3]
    assert set(drafts(delivered(server, spark))) == {0, 1, 2}


def test_each_verifier_has_its_own_send(parts: Parts) -> None:
    worker = parts.worker()
    sparks = [spark_of(parts, worker, name) for name in (b"a", b"b")]
    for spark in sparks:
        spark.open(0)
    server = Server([sent(spark.connection.step(spark.items(0), 0), spark.name) for spark in sparks])
    turn(worker, server, 0)
    assert [(peer, len(frames)) for peer, frames in server.sends] == [(b"a", 2), (b"b", 2)]
    for spark in sparks:
        assert set(drafts(delivered(server, spark))) == {0}


@pytest.mark.usefixtures("one_row_each")
def test_a_large_reply_leaves_while_it_is_made(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ROW is sent before the next one is filled, the COMPLETION before the next reply is begun."""
    spark = dense_spark(parts, 0, 1)
    server = asked(spark, 0, 1)
    original = ReplyFrames.fill

    def fill(self: ReplyFrames, index: int, *arguments: Any) -> memoryview:
        server.log.append(index)
        return original(self, index, *arguments)

    monkeypatch.setattr(ReplyFrames, "fill", fill)
    turn(spark.worker, server, 0)
    one = [0, [ROW], 1, [ROW], 2, [ROW], 3, [ROW], [COMPLETION]]
    assert server.log == one * 2
    assert set(drafts(delivered(server, spark))) == {0, 1}
    assert (spark.worker.counters.rounds, spark.worker.counters.drafted_tokens) == (2, 8)


@pytest.mark.usefixtures("one_row_each")
def test_the_rows_of_several_requests_are_not_mixed(parts: Parts) -> None:
    """They are packed into memory that all requests share: a reply is filled before the next one is packed."""
    together, alone = dense_spark(parts, 0, 1), dense_spark(parts, 0, 1)
    server = asked(together, 0, 1)
    turn(together.worker, server, 0)
    found = {e.slot: bytes(e.q) for e in delivered(server, together) if isinstance(e, ProposalReady)}
    for slot in (0, 1):
        (event,) = (e for e in alone.step(slot) if isinstance(e, ProposalReady))
        assert found[slot] == bytes(event.q)
    assert found[0] != found[1]


def test_replies_that_are_large_together_leave_in_few_sends(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    spark = spark_of(parts, parts.worker())
    for slot in range(4):
        spark.open(slot, seed=slot)
    server = asked(spark, 0, 1, 2, 3)
    monkeypatch.setattr("dspark_workers.worker.LARGE_SEND_BYTES", 3000)
    turn(spark.worker, server, 0)
    assert server.log == [[ROW, COMPLETION, ROW, COMPLETION, ROW], [COMPLETION], [ROW, COMPLETION]]
    assert set(drafts(delivered(server, spark))) == {0, 1, 2, 3}


@pytest.mark.usefixtures("one_row_each")
@pytest.mark.parametrize("lost", range(5))
def test_nothing_follows_a_gap_and_a_repeated_step_gets_the_whole_reply(parts: Parts, lost: int) -> None:
    spark = dense_spark(parts, 0, 1)
    step = bytes(spark.connection.step(spark.items(0, 1), 0))
    server = Server([sent(step)], refused={lost})
    turn(spark.worker, server, 0)
    frames = [decode_frame(frame).prefix for _, sent_frames in server.sends for frame in sent_frames]
    # Of both replies nothing more was tried; each round is answered all the same.
    assert [(prefix.slot, prefix.type) for prefix in frames] == [(0, ROW)] * lost
    assert server.tried == lost + 1
    assert spark.worker.counters.unsent_messages == 10 - lost
    assert spark.worker.counters.rounds == 2
    delivered(server, spark)

    again = Server([sent(step)])
    turn(spark.worker, again, 0)
    assert [len(frames) for _, frames in again.sends] == [10]
    events = delivered(again, spark)
    assert set(drafts(events)) == {0, 1}
    assert spark.worker.counters.rounds == 2


@pytest.mark.usefixtures("one_row_each")
def test_a_peer_out_of_reach_costs_the_others_nothing(parts: Parts) -> None:
    worker = parts.worker(dense_rows=True)
    sparks = [spark_of(parts, worker, name, dense_rows=True) for name in (b"a", b"b")]
    for spark in sparks:
        open_lane(spark, 0, Lane.RATIO, SupportPolicy.DENSE, seed=1)
    server = Server([sent(spark.connection.step(spark.items(0), 0), spark.name) for spark in sparks], refused={1})
    turn(worker, server, 0)
    assert {peer: sum(p == peer for p, _ in server.sends) for peer in (b"a", b"b")} == {b"a": 1, b"b": 5}
    assert set(drafts(delivered(server, sparks[1]))) == {0}
    delivered(server, sparks[0])
    # In the next turn it is tried again.
    server = Server([sent(sparks[0].connection.ping(1), b"a")])
    turn(worker, server, 0)
    assert server.log == [[MessageType.PONG]]


@pytest.mark.usefixtures("one_row_each")
def test_sending_is_no_part_of_the_time_that_drafting_took(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0)
    monkeypatch.setattr("dspark_workers.worker.time", SimpleNamespace(perf_counter_ns=lambda: clock.now))
    spark = dense_spark(parts, 0, 1)
    server = asked(spark, 0, 1)
    server.clock = clock
    turn(spark.worker, server, 0)
    assert server.tried == 10
    assert clock.now > 0
    assert spark.worker.counters.draft_ns == 0
    ready = [event for event in delivered(server, spark) if isinstance(event, ProposalReady)]
    assert [event.draft_us for event in ready] == [0, 0]


@pytest.mark.usefixtures("one_row_each")
def test_a_reply_that_breaks_in_the_middle_fails_its_step_alone(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    spark = dense_spark(parts, 0, 1)
    original = ReplyFrames.fill

    def fill(self: ReplyFrames, index: int, key: Any, *arguments: Any) -> memoryview:
        if key.slot == 0 and index == 2:
            raise MemoryError("planted")
        return original(self, index, key, *arguments)

    monkeypatch.setattr(ReplyFrames, "fill", fill)
    server = asked(spark, 0, 1)
    turn(spark.worker, server, 0)
    events = delivered(server, spark)
    assert set(drafts(events)) == {1}
    assert spark.worker.counters.failed_steps == 1
    assert [event.slot for event in events] == [0, 1]


def test_without_a_server_everything_waits_in_the_outbox(parts: Parts) -> None:
    worker: Worker = parts.worker()
    spark = spark_of(parts, worker)
    spark.open(0)
    worker.receive([sent(spark.connection.step(spark.items(0), 0))], 0)
    worker.draft_pending()
    ((peer, frames),) = worker.outbox()
    assert (peer, [type_of(frame) for frame in frames]) == (b"a", [ROW, COMPLETION])
    assert worker.outbox() == []
