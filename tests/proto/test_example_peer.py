"""The example peer, which shares no code with the package: every case of its roles, and our verifier over ZeroMQ."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from wire_pairs import VOCAB, compatibility, parameters, taps, tokens_bytes

from dspark.dyadic import draw, validate_reply
from dspark.philox import Domain, Keys
from dspark_proto import (
    Accepted,
    Cause,
    ErrorCode,
    HelloParameters,
    Key,
    Lane,
    PeerError,
    PongReceived,
    ProposalReady,
    Rejected,
    SlotFailed,
    StatsReceived,
    StepFailed,
    StepItem,
    SupportPolicy,
    VerifierConnection,
    encode_frame,
    prefix_digest,
)
from dspark_proto.codec_pipe import run_vectors
from dspark_proto.conformance import all_cases, reference_facts
from dspark_proto.conformance.as_codec import CodecAnswer
from dspark_proto.conformance.record import Level, Role
from dspark_proto.conformance.runner import run, run_codec
from dspark_proto.conformance.testees import InProcess
from dspark_proto.conformance.verdicts import Behaviour
from dspark_proto.messages import Close, Stats
from dspark_proto.transports.zmq import ZmqClient

EXAMPLES = Path(__file__).parents[2] / "proto" / "examples"
PEER = EXAMPLES / "plain_peer.py"
OPEN: list[ZmqClient] = []
SESSION = 9
SEED = -77
TEXT = [5, 6, 7, 5, 6, 8, 5, 6, 7, 5]
"""The peer proposes the next id, or in sampled rows the one after it."""


def start(*options: str) -> tuple[subprocess.Popen[str], str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        [sys.executable, str(PEER), *options], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    ready, endpoint = process.stdout.readline().split()
    assert ready == "ready"
    return process, endpoint


def end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.communicate(timeout=20)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    process, address = start()
    yield address
    assert process.poll() is None, "the peer did not survive the tests"
    end(process)


@pytest.fixture(autouse=True)
def _sockets_are_closed() -> Iterator[None]:
    """Also after a failure: an open socket would keep the interpreter from ending."""
    yield
    while OPEN:
        OPEN.pop().close()


class Link:
    """Our verifier on a ZeroMQ connection; every frame that arrives is kept."""

    def __init__(self, endpoint: str, local: HelloParameters) -> None:
        self.client = ZmqClient(endpoint)
        OPEN.append(self.client)
        self.verifier = VerifierConnection(local)
        self.received: list[bytes] = []
        self.events: list[Any] = []

    def send(self, *frames: Any) -> None:
        assert self.client.send(frames, 5000)

    def until(self, wanted: Callable[[Any], bool]) -> Any:
        """The next event that is ``wanted``; all others are kept in ``events``."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for frame in self.client.poll(50):
                self.received.append(bytes(frame))
                self.events += self.verifier.receive(frame, time.monotonic_ns())
            self.client.send(self.verifier.frames_to_send())
            for index, event in enumerate(self.events):
                if wanted(event):
                    return self.events.pop(index)
        raise AssertionError(f"not among {self.events}, counters {self.verifier.counters}")

    def hello(self) -> Any:
        self.send(self.verifier.hello(time.monotonic_ns()))
        return self.until(lambda event: isinstance(event, Accepted | Rejected))

    def open(self, lane: Lane, support: SupportPolicy, temperature: int = 1_000_000) -> None:
        """Slot 0 with the text as context, token ids included."""
        verifier = self.verifier
        self.send(
            verifier.open(
                0, SESSION, seed=SEED, support=support, lane=lane, draft_temperature_micro=temperature, choice=3
            )
        )
        self.context()

    def context(self) -> None:
        rows = len(TEXT)
        sent = self.verifier.context(0, 0, rows, taps(rows), tokens_bytes(*TEXT))
        assert sent.rows == rows
        self.send(*sent.frames)

    def item(self, round_: int, before: list[int], anchor: int, lane: Lane, **changes: Any) -> StepItem:
        """A STEP item: ``before`` are the tokens whose taps it brings."""
        first = self.verifier.context_end(0)
        fields: dict[str, Any] = {
            "session": SESSION,
            "slot": 0,
            "generation": self.verifier.generation(0),
            "round": round_,
            "anchor_token": anchor,
            "anchor_position": first + len(before),
            "depth": 4,
            "lane": lane,
            "tap_first": first,
            "tap_rows": len(before),
            "taps": taps(len(before)),
        }
        return StepItem(**(fields | changes))

    def propose(self, item: StepItem) -> ProposalReady:
        self.send(self.verifier.step([item], time.monotonic_ns()))
        event = self.until(lambda one: isinstance(one, ProposalReady | StepFailed))
        assert isinstance(event, ProposalReady), event
        return event

    def counters(self) -> dict[str, int]:
        self.send(self.verifier.stats())
        stats: Stats = self.until(lambda one: isinstance(one, StatsReceived)).stats
        return {counter.code.name: counter.count for counter in stats.counters}

    def close(self) -> Stats:
        """End the session and the connection; returns the peer's last report."""
        for slot in range(2):
            if self.verifier.slot_state(slot).value != "free":
                self.send(self.verifier.close(slot))
        self.send(self.verifier.stats())
        stats: Stats = self.until(lambda one: isinstance(one, StatsReceived)).stats
        return stats


def connected(endpoint: str, **changes: Any) -> Link:
    link = Link(endpoint, parameters(epoch=100, **changes))
    assert isinstance(link.hello(), Accepted)
    return link


# The example's classes on the harness's virtual time


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[ModuleType, ModuleType]]:
    """(plain_codec, plain_peer), imported as the example's own process imports them."""
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("plain_codec"), importlib.import_module("plain_peer")
    sys.path.remove(str(EXAMPLES))


class Machine:
    """The example's connection as the harness wants one."""

    def __init__(self, peer: Any) -> None:
        self.peer = peer

    def start(self, now_ns: int) -> list[bytes]:
        return []

    def receive(self, frame: bytes, now_ns: int) -> list[bytes]:
        answers: list[bytes] = self.peer.receive(frame, now_ns / 1e9)
        return answers

    def expire(self, now_ns: int) -> list[bytes]:
        self.peer.expire(now_ns / 1e9)
        return []

    def held(self) -> dict[str, int]:
        return {"slots": sum(slot.session is not None for slot in self.peer.slots)}


class PlainCodec:
    def __init__(self, codec: ModuleType) -> None:
        self.codec = codec

    def decode(self, frame: bytes) -> CodecAnswer:
        try:
            name, key, control, bodies = self.codec.decode(frame)
        except self.codec.Refused as refusal:
            return CodecAnswer(ErrorCode[str(refusal)])
        return CodecAnswer(None, self.codec.encode(name, key, control, bodies))


def test_every_drafter_case_passes(plain: tuple[ModuleType, ModuleType]) -> None:
    facts = replace(reference_facts(), version_1=False)
    testee = InProcess(Role.DRAFTER, facts, lambda: Machine(plain[1].Peer(7, facts.compatibility.encoded())))
    cases = [case for case in all_cases() if case.role is Role.DRAFTER]
    results = run(testee, cases)
    assert [(r.case.id, r.note) for r in results if r.failed or (r.case.level is Level.MUST and not r.good)] == []
    skipped = {result.case.id for result in results if result.behaviour is Behaviour.UNSUPPORTED}
    assert {case.id for case in cases if case.needs_secret} <= skipped
    assert len(results) - len(skipped) >= 240


def test_every_codec_case_passes(plain: tuple[ModuleType, ModuleType]) -> None:
    results = run_codec(PlainCodec(plain[0]), [case for case in all_cases() if case.role is Role.CODEC])
    assert [(r.case.id, r.note) for r in results if not r.good] == []
    assert len(results) >= 160


def test_the_codec_answers_the_pipe() -> None:
    vectors = EXAMPLES.parent / "vectors"
    judgements = run_vectors([sys.executable, str(EXAMPLES / "plain_codec.py")], vectors, 20.0)
    verdicts = Counter(judgement.verdict.name for judgement in judgements)
    assert set(verdicts) == {"PASSED", "UNSUPPORTED"}, [str(one) for one in judgements if one.verdict.name == "FAILED"]
    assert verdicts["PASSED"] > 110


def digest(tokens: list[int]) -> bytes:
    return prefix_digest(tokens)


def test_the_example_shares_no_code_with_the_package() -> None:
    libraries = {"argparse", "collections", "crc32c", "hashlib", "json", "msgpack", "pathlib", "secrets", "struct",
                 "sys", "time", "tomllib", "xxhash", "zmq"}  # fmt: skip
    allowed = libraries | {"__future__"} | {path.stem for path in EXAMPLES.glob("*.py")}
    for path in EXAMPLES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed, path.name


def test_greedy_rounds_follow_the_commits(endpoint: str) -> None:
    link = connected(endpoint)
    link.open(Lane.GREEDY, SupportPolicy.K1, temperature=0)
    first = link.propose(link.item(1, [], TEXT[-1], Lane.GREEDY, prefix_digest=digest(TEXT), depth=4))
    assert first.tokens == (6, 7, 8, 9)
    assert first.entries == (1, 1, 1, 1)
    assert bytes(first.q) == bytes(np.ones(4, np.float32))
    first.lease.release()
    # Two drafts accepted, 9 is the correction: the anchor moves by three, and the peer checks the digest.
    before = [TEXT[-1], 6, 7]
    second = link.item(
        2, before, 9, Lane.GREEDY, prefix_digest=digest([*TEXT, *before]), accepted_count=2, commit_token=9
    )
    proposal = link.propose(second)
    assert proposal.anchor_position == len(TEXT) + 3
    assert proposal.tokens == (10, 11, 12, 13)
    proposal.lease.release()
    report = link.close()
    assert (report.slots_open, report.rounds_unresolved, report.replies_cached) == (0, 0, 0)
    assert report.credit_outstanding_rows == 0


def test_sampled_rows_are_dyadic_and_drawn_by_the_key(endpoint: str) -> None:
    link = connected(endpoint)
    link.open(Lane.RATIO, SupportPolicy.K16)
    item = link.item(1, [], TEXT[-1], Lane.RATIO, prefix_digest=digest(TEXT))
    drafted, seen_entries = set(), set()
    for round_ in range(1, 7):
        proposal = link.propose(replace(item, round=round_))
        rows = validate_reply(
            np.array(proposal.tokens, dtype=np.int32),
            np.array(proposal.entries, dtype=np.int32),
            np.frombuffer(proposal.ids, dtype=np.int32).reshape(4, 16),
            np.frombuffer(proposal.q, dtype=np.float32).reshape(4, 16),
            VOCAB, 4, 16,
        )  # fmt: skip
        keys = Keys(SEED, 0, round_, 3)
        for index, (row, token) in enumerate(zip(rows, proposal.tokens, strict=True)):
            assert draw(row, keys.draw24(Domain.PROPOSAL, len(TEXT) + 1 + index)) == token
        drafted.add(proposal.tokens)
        seen_entries |= set(proposal.entries)
        proposal.lease.release()
    assert len(drafted) > 1, "rounds have their own draws"
    assert seen_entries == {2}
    link.close()


def test_retry_gets_the_same_bytes_and_is_not_drawn_again(endpoint: str) -> None:
    link = connected(endpoint)
    link.open(Lane.RATIO, SupportPolicy.K16)
    item = link.item(1, [], TEXT[-1], Lane.RATIO, prefix_digest=digest(TEXT))
    step = bytes(link.verifier.step([item], time.monotonic_ns()))
    link.received.clear()
    link.send(step, step, step)
    proposal = link.until(lambda event: isinstance(event, ProposalReady))
    proposal.lease.release()
    assert link.counters()["DUPLICATE"] == 2
    replies = link.received[:-1]
    assert len(replies) == 6
    assert replies[0:2] == replies[2:4] == replies[4:6]
    link.close()


def test_reset_kills_the_old_generation(endpoint: str) -> None:
    link = connected(endpoint)
    link.open(Lane.MATCH, SupportPolicy.K1)
    item = link.item(1, [], TEXT[-1], Lane.MATCH, prefix_digest=digest(TEXT))
    stale = bytes(link.verifier.step([item], time.monotonic_ns()))
    link.send(stale)
    link.until(lambda event: isinstance(event, ProposalReady)).lease.release()
    link.send(link.verifier.reset(0, Cause.PREEMPTED))
    link.received.clear()
    link.send(stale)
    assert link.counters()["STALE_GENERATION"] == 1
    assert len(link.received) == 1, "the stale STEP got no answer"
    assert len(link.verifier.frames_to_send()) == 0
    link.context()
    again = link.item(1, [], TEXT[-1], Lane.MATCH, prefix_digest=digest(TEXT))
    assert again.generation == item.generation + 1
    proposal = link.propose(again)
    assert proposal.tokens == (6, 7, 8, 9)
    proposal.lease.release()
    link.send(link.verifier.cancel(0, Cause.CLIENT_GONE))
    link.send(link.verifier.reset(0, Cause.PREEMPTED))
    link.context()
    link.propose(link.item(5, [], TEXT[-1], Lane.MATCH, prefix_digest=digest(TEXT))).lease.release()
    link.close()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"prefix_digest": b"wrong..."}, ErrorCode.DIGEST_MISMATCH),
        ({"lane": Lane.GREEDY}, ErrorCode.LANE_MISMATCH),
        ({"anchor_token": 1000}, ErrorCode.TOKEN_OUT_OF_RANGE),
        ({"tap_first": 3}, ErrorCode.CONTEXT_GAP),
        ({"anchor_position": 11}, ErrorCode.ANCHOR_MISMATCH),
        ({"depth": 9}, ErrorCode.DEPTH_OUT_OF_RANGE),
        ({"accepted_count": 1, "commit_token": 1}, ErrorCode.COMMIT_MISMATCH),
    ],
)
def test_a_wrong_step_fails_the_slot_and_reset_revives_it(
    endpoint: str, changes: dict[str, Any], code: ErrorCode
) -> None:
    link = connected(endpoint)
    link.open(Lane.MATCH, SupportPolicy.K1)
    item = replace(link.item(1, [], TEXT[-1], Lane.MATCH, prefix_digest=digest(TEXT)), **changes)
    link.send(step_frame(item))
    failed = link.until(lambda event: isinstance(event, SlotFailed | StepFailed))
    assert failed.code is code
    assert link.counters()[code.name] == 1
    link.send(link.verifier.reset(0, Cause.REPLY_REFUSED))
    link.context()
    link.propose(link.item(1, [], TEXT[-1], Lane.MATCH, prefix_digest=digest(TEXT))).lease.release()
    link.close()


def step_frame(item: StepItem) -> memoryview:
    """A STEP without taps that our own verifier would refuse to send."""
    from dspark_proto.messages import Step

    return encode_frame(Step((item,), ()), Key(item.slot, item.generation, item.round))


def test_ping_and_unusable_frames(endpoint: str) -> None:
    link = connected(endpoint)
    link.open(Lane.MATCH, SupportPolicy.K1)
    ping = link.verifier.ping(time.monotonic_ns())
    damaged = bytearray(ping)
    damaged[50] ^= 1
    link.send(b"", b"DSPK", bytes(damaged), ping)
    assert link.until(lambda event: isinstance(event, PongReceived)).nonce == 1
    assert link.counters() == {"WRONG_SIZE": 2, "BAD_CONTROL_CRC": 1}
    # A message of another connection's slot: refused, and the session there is unharmed.
    link.send(encode_frame(Close(SESSION, Cause.FINISHED), Key(77, 50)))
    assert link.counters()["SLOT_OUT_OF_RANGE"] == 1
    link.propose(link.item(1, [], TEXT[-1], Lane.MATCH, prefix_digest=digest(TEXT))).lease.release()
    link.close()


def test_a_frame_before_hello_is_refused_once(endpoint: str) -> None:
    link = Link(endpoint, parameters(epoch=5))
    link.verifier.hello(0)
    link.send(encode_frame(Stats(5)))
    link.send(encode_frame(Stats(5)))
    error = link.until(lambda event: isinstance(event, PeerError))
    assert error.code is ErrorCode.HELLO_REQUIRED
    assert isinstance(link.hello(), Accepted)
    assert link.counters() == {"HELLO_REQUIRED": 2}
    assert not [event for event in link.events if isinstance(event, PeerError)]
    link.close()


def test_a_peer_with_its_own_compatibility_names_the_first_difference() -> None:
    ours = compatibility().encoded().hex()
    process, address = start("--compat", ours)
    try:
        link = Link(address, parameters(100, compatibility(vocab_size=999)))
        rejected = link.hello()
        assert isinstance(rejected, Rejected)
        assert (rejected.code, rejected.field) == (ErrorCode.INCOMPATIBLE, "vocab_size")
        assert (rejected.local, rejected.peer) == ("999", "1000")
        connected(address).close()
    finally:
        end(process)


def test_it_listens_on_loopback_only() -> None:
    command = [sys.executable, str(PEER), "--listen", "tcp://0.0.0.0:0"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert finished.returncode == 2
    assert "127.0.0.1 only" in finished.stderr
