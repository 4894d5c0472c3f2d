"""The man in the middle: faithful without rules, and each fault is what it says, between our own peers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from wire_pairs import parameters, reply_arrays, taps

from dspark_proto import (
    Accepted,
    DrafterConnection,
    ErrorCode,
    HelloReceived,
    Lane,
    MessageType,
    ProposalReady,
    StepArrived,
    StepFailed,
    StepItem,
    StepTimedOut,
    SupportPolicy,
    VerifierConnection,
    encode_frame,
    prefix_digest,
)
from dspark_proto.capture import (
    CaptureReader,
    CaptureWriter,
    Direction,
    EntryKind,
    Fault,
    Middle,
    RuleError,
    TransportKind,
    examine,
    parse_rule,
)
from dspark_proto.capture.faults import Action, apply
from dspark_proto.messages import Ping
from dspark_proto.transports.inproc import InprocServer
from dspark_proto.transports.tcp import TcpClient, TcpServer
from dspark_proto.transports.zmq import ZmqClient, ZmqServer

UP, DOWN = Direction.UP, Direction.DOWN


def ping(nonce: int) -> bytes:
    return bytes(encode_frame(Ping(1, nonce)))


class Bench:
    """A verifier's end, the middle and a drafter's end over in-process queues, with a clock of its own."""

    def __init__(self, *rules: str, seed: int = 0, writer: CaptureWriter | None = None) -> None:
        self.front, self.back = InprocServer(), InprocServer()
        self.now_ns = 0
        self.faults: list[Fault] = []
        self.middle = Middle(
            self.front, self.back.connect, [parse_rule(rule) for rule in rules], seed, writer,
            TransportKind.INPROC, self.faults.append, lambda: self.now_ns,
        )  # fmt: skip
        self.verifier = self.front.connect()

    def up(self, *frames: bytes) -> list[bytes]:
        """What the drafter gets of ``frames``."""
        self.verifier.send(frames)
        return self.wait(0)

    def wait(self, ms: int) -> list[bytes]:
        self.now_ns += ms * 1_000_000
        self.middle.turn(0)
        return [bytes(one.frame) for one in self.back.poll(0)]


PINGS = [ping(nonce) for nonce in range(1, 9)]


def test_without_rules_every_frame_passes_unchanged_in_order() -> None:
    bench = Bench()
    assert bench.up(*PINGS, b"no frame at all") == [*PINGS, b"no frame at all"]
    other = bench.front.connect()
    other.send([PINGS[0]])
    bench.middle.turn(0)
    first, second = bench.back._clients.values()
    bench.back.send(first.peer, [b"to the first"])
    bench.back.send(second.peer, [b"to the second"])
    bench.middle.turn(0)
    assert (bench.verifier.poll(0), other.poll(0)) == ([b"to the first"], [b"to the second"])
    assert (bench.middle.faults, bench.middle.passed, bench.faults) == (0, 12, [])


def test_drop_every_third() -> None:
    bench = Bench("drop,every=3")
    assert bench.up(*PINGS) == [PINGS[index] for index in (0, 1, 3, 4, 6, 7)]
    assert [fault.what for fault in bench.faults] == ["dropped"] * 2


def test_duplicate_the_second() -> None:
    bench = Bench("duplicate,nth=2,copies=3")
    assert bench.up(*PINGS[:3]) == [PINGS[0], PINGS[1], PINGS[1], PINGS[1], PINGS[2]]


def test_delay_holds_up_what_is_behind() -> None:
    bench = Bench("delay,ms=30,nth=2")
    assert bench.up(*PINGS[:3]) == [PINGS[0]]
    assert bench.wait(29) == []
    assert bench.wait(1) == PINGS[1:3]


def test_reorder_lets_others_overtake() -> None:
    bench = Bench("reorder,nth=1,behind=2")
    assert bench.up(*PINGS[:4]) == [PINGS[1], PINGS[2], PINGS[0], PINGS[3]]


def test_a_held_back_frame_goes_on_when_nothing_follows() -> None:
    bench = Bench("reorder,nth=1,behind=2")
    assert bench.up(PINGS[0]) == []
    assert bench.wait(49) == []
    assert bench.wait(1) == [PINGS[0]]


def test_the_first_rule_that_chooses_wins_and_keys_choose() -> None:
    bench = Bench("drop,dir=down", "drop,type=pong", "drop,slot=2", "drop,conn=1", "duplicate,type=ping,dir=up")
    assert bench.up(PINGS[0]) == [PINGS[0]] * 2
    assert [fault.rule for fault in bench.faults] == ["duplicate"]


def test_chance_is_seeded() -> None:
    def delivered(seed: int) -> list[bytes]:
        return Bench("drop,p=0.5", seed=seed).up(*PINGS)

    assert delivered(1) == delivered(1)
    assert len({tuple(delivered(seed)) for seed in range(8)}) > 1
    assert 0 < sum(len(delivered(seed)) for seed in range(20)) < 20 * len(PINGS)


@pytest.fixture(scope="module")
def row() -> bytes:
    """A whole ROW frame."""
    from wire_pairs import connect, reply_frames

    pair = connect()
    pair.open(0)
    return bytes(reply_frames(pair)[0])


@pytest.mark.parametrize(
    ("rule", "codes"),
    [
        ("corrupt,where=prefix", {"BAD_PREFIX_CRC"}),
        ("corrupt,where=control", {"BAD_CONTROL_CRC"}),
        ("corrupt,where=body", {"BAD_BODY_CHECKSUM"}),
        ("corrupt,where=body,fix=1", {None}),
        ("truncate", {"WRONG_SIZE"}),
        ("truncate,keep=47", {"WRONG_SIZE"}),
    ],
)
def test_damage_is_where_the_rule_says(row: bytes, rule: str, codes: set[str | None]) -> None:
    found = set()
    for seed in range(30):
        outcome = apply(parse_rule(rule), row, examine(row), Random(seed))
        assert outcome is not None
        (frame,) = outcome.frames
        assert frame != row
        fault = examine(frame).fault
        found.add(fault.code.name if fault else None)
    assert found == codes


def test_fixed_damage_gets_past_the_checksums(row: bytes) -> None:
    """Damaged control with fitting crcs is refused for what it says, if at all; a body for its rows."""
    codes: dict[str, set[ErrorCode | None]] = {"prefix": set(), "control": set()}
    for part, found in codes.items():
        for seed in range(200):
            outcome = apply(parse_rule(f"corrupt,where={part},fix=1"), row, examine(row), Random(seed))
            assert outcome is not None
            fault = examine(outcome.frames[0]).fault
            found.add(fault.code if fault else None)
    assert codes["prefix"] >= {ErrorCode.UNKNOWN_TYPE, ErrorCode.LIMIT_EXCEEDED, ErrorCode.WRONG_SIZE, None}
    assert codes["control"] >= {ErrorCode.NONCANONICAL, ErrorCode.BAD_FIELD, ErrorCode.BAD_DESCRIPTOR, None}
    assert ErrorCode.BAD_PREFIX_CRC not in codes["prefix"] | codes["control"]
    assert ErrorCode.BAD_CONTROL_CRC not in codes["control"]


def test_a_frame_without_bodies_is_left_alone() -> None:
    bench = Bench("corrupt,where=body", "truncate,keep=4000")
    assert bench.up(*PINGS) == PINGS
    assert bench.middle.faults == 0


@pytest.mark.parametrize(
    "text",
    [
        "explode", "drop,dir=sideways", "drop,type=NOTHING", "drop,p=often", "drop,every=0", "drop,nth=-1",
        "drop,colour=1", "corrupt,where=soul", "delay,ms", "",
    ],
)  # fmt: skip
def test_a_rule_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(RuleError):
        parse_rule(text)


def test_a_rule_is_read_whole() -> None:
    rule = parse_rule("corrupt,dir=down,type=row,slot=2,conn=1,nth=3,every=2,p=0.25,where=body,fix=1")
    assert (rule.action, rule.type) == (Action.CORRUPT, MessageType.ROW)
    assert (rule.direction, rule.slot, rule.conn, rule.nth, rule.every, rule.p) == (DOWN, 2, 1, 3, 2, 0.25)
    assert (rule.where, rule.fix) == ("body", 1)


def test_faults_are_noted_in_the_capture(tmp_path: Path) -> None:
    path = tmp_path / "a.dspcap"
    with CaptureWriter(path) as writer:
        bench = Bench("drop,nth=2", writer=writer)
        bench.up(*PINGS[:3])
    with CaptureReader(path) as reader:
        entries = list(reader)
    assert [entry.content for entry in entries if entry.kind is EntryKind.FRAME] == [PINGS[0], PINGS[2]]
    (note,) = [entry.content.decode() for entry in entries if entry.kind is EntryKind.NOTE]
    assert note == "fault 1: drop up connection 0: PING, 64 bytes: dropped" == str(bench.faults[0])


def test_an_absent_drafter_costs_frames_not_memory() -> None:
    bench = Bench()
    bench.up(PINGS[0])
    bench.back.close()
    assert bench.up(*PINGS) == []
    assert bench.middle.undeliverable == 0, "it may come back"
    bench.wait(2000)
    assert bench.middle.undeliverable == len(PINGS)


# Between real peers


Ends = tuple[Callable[[], Any], Callable[[str], Any]]
TRANSPORTS: dict[str, Ends] = {"zmq": (ZmqServer, ZmqClient), "tcp": (TcpServer, TcpClient)}


class Live:
    """Our drafter, the middle and our verifier over sockets of one thread."""

    def __init__(self, transport: str, *rules: str, **options: Any) -> None:
        listen, connect = TRANSPORTS[transport]
        self.back = listen()
        self.middle = Middle(
            listen(), lambda: connect(self.back.endpoint), [parse_rule(rule) for rule in rules], **options
        )
        self.client = connect(self.middle.endpoint)
        self.verifier = VerifierConnection(parameters(100, step_deadline_ms=2000))
        self.drafter = DrafterConnection(parameters(200))
        self.events: list[Any] = []

    def close(self) -> None:
        self.client.close()
        self.middle.close()
        self.back.close()

    def turn(self) -> None:
        self.middle.turn(2)
        now = time.monotonic_ns()
        for one in self.back.poll(2):
            frames = [answer for event in self.drafter.receive(one.frame, now) for answer in self.answers(event)]
            for frame in (*frames, *self.drafter.frames_to_send()):
                self.back.send(one.peer, [frame])
        self.middle.turn(2)
        for frame in self.client.poll(2):
            self.events += self.verifier.receive(frame, time.monotonic_ns())
        self.events += self.verifier.expire(time.monotonic_ns())
        self.client.send(self.verifier.frames_to_send())

    def answers(self, event: Any) -> list[memoryview]:
        if isinstance(event, HelloReceived):
            return [self.drafter.accept(time.monotonic_ns())]
        if isinstance(event, StepArrived):
            return [one for item in event.items for one in self.drafter.reply(item, **reply_arrays())]
        return []

    def until(self, kind: Any) -> Any:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for index, event in enumerate(self.events):
                if isinstance(event, kind):
                    return self.events.pop(index)
            self.turn()
        raise AssertionError(f"{self.events} {self.verifier.counters}")

    def start(self) -> None:
        """Shake hands and open slot 0."""
        hello = self.verifier.hello(time.monotonic_ns())
        while not self.client.send([hello]):
            self.turn()
        self.until(Accepted)
        self.client.send([self.verifier.open(0, 7, seed=1, support=SupportPolicy.K32, lane=Lane.RATIO)])

    def round(self, number: int) -> Any:
        """The outcome of one STEP that brings one tap row."""
        first = self.verifier.context_end(0)
        item = StepItem(
            7, 0, self.verifier.generation(0), number, 42, first + 1, prefix_digest([42] * (first + 1)), 5,
            Lane.RATIO, tap_first=first, tap_rows=1, taps=taps(1),
        )  # fmt: skip
        self.client.send([self.verifier.step([item], time.monotonic_ns())])
        return self.until((ProposalReady, StepFailed, StepTimedOut))


@pytest.mark.parametrize("transport", ["zmq", "tcp"])
def test_real_peers_do_not_notice_a_faithful_middle(transport: str) -> None:
    live = Live(transport)
    try:
        live.start()
        for number in range(1, 6):
            proposal = live.round(number)
            assert isinstance(proposal, ProposalReady)
            proposal.lease.release()
        assert not any(live.verifier.counters.values())
        assert not any(live.drafter.counters.values())
    finally:
        live.close()


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ("corrupt,dir=down,type=ROW,where=body,nth=2", ErrorCode.BAD_BODY_CHECKSUM),
        ("corrupt,dir=down,type=ROW,where=body,fix=1,nth=2", ErrorCode.BAD_REPLY_CHECKSUM),
        ("corrupt,dir=down,type=ROW,where=control,nth=2", ErrorCode.BAD_CONTROL_CRC),
        ("drop,dir=down,type=ROW,nth=2", ErrorCode.ROWS_MISSING),
    ],
)
def test_each_fault_ends_one_round_and_no_other(rule: str, code: ErrorCode) -> None:
    log: list[Fault] = []
    live = Live("zmq", rule, log=log.append)
    try:
        live.start()
        outcomes = [live.round(number) for number in range(1, 4)]
        assert [type(one) for one in outcomes[::2]] == [ProposalReady, ProposalReady]
        assert isinstance(outcomes[1], StepFailed)
        assert live.verifier.counters[code.counter] >= 1
        assert len(log) == 1
        assert "round 2" in log[0].subject
    finally:
        live.close()
