"""A worker that speaks wire version 1 only, and links with a secret: the engine over real frames.

Greedy requests are drafted for and say what the target alone says; sampled ones never reach a version 1 worker.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark import speculative
from dspark.errors import UserError
from dspark_proto import Authentication, Lane, MessageType, WireVersion, decode_frame
from dspark_proto.hello import Hello
from dspark_proto.messages import Open, Row, Step
from dspark_proto.registry import Representation
from dspark_proto.transports import Security
from dspark_spark.build import SparkSettings, build
from dspark_spark.draft_link import DraftLink
from dspark_spark.engine import EngineSettings
from dspark_workers import server
from tests.conftest import TinyPair
from tests.rig import Parts, Rig, build_rig

at_once = pytest.mark.usefixtures("retry_at_once")

V1, V2 = WireVersion.V1_0, WireVersion.V2_0
PROMPT = [3, 14, 15, 92, 65, 35]
SECRET, OTHER = b"the same on both ends", b"not the same secret at all"


def authentication(secret: bytes, binding: bytes = b"tcp") -> Authentication:
    return Authentication(secret, lambda: secrets.token_bytes(32), binding)


def rig_of(parts: Parts, spark: dict[str, Any], worker: dict[str, Any]) -> Rig:
    """An engine whose HELLO and whose worker's HELLO parameters are given; frames of both are kept."""
    return build_rig(parts, worker=parts.worker(step_deadline_ms=600_000, **worker), **spark)


def both_ways(rig: Rig) -> tuple[list[bytes], list[bytes]]:
    """From now on, the frames that the worker gets and sends."""
    up: list[bytes] = []
    down: list[bytes] = []

    def keep(kept: list[bytes], frame: bytes) -> list[bytes]:
        kept.append(frame)
        return [frame]

    rig.wire.up = lambda frame: keep(up, frame)
    rig.wire.down = lambda frame: keep(down, frame)
    return up, down


@pytest.fixture
def v1_only(parts: Parts) -> Rig:
    """A version 1 worker, and an engine that may fall back to it."""
    return rig_of(parts, {"versions": (V2, V1)}, {"versions": (V1,)})


# -- version 1 -------------------------------------------------------------------------------------------------


@at_once
def test_greedy_text_is_the_targets_with_drafts_accepted(v1_only: Rig) -> None:
    _, down = both_ways(v1_only)
    drafted = v1_only.answer(PROMPT)
    alone = v1_only.answer(PROMPT, speculate=False)
    assert drafted.ids == alone.ids
    assert v1_only.total("spec_decode_num_accepted_tokens_total") > 0
    rows = [m for m in (decode_frame(frame).message for frame in down) if isinstance(m, Row)]
    assert {row.representation for row in rows} == {Representation.TOKENS}
    assert v1_only.labelled("proposal_discards_total") == {}
    v1_only.check_books()
    v1_only.check_idle()


@at_once
def test_a_sampled_request_never_reaches_the_worker(v1_only: Rig) -> None:
    up, _ = both_ways(v1_only)
    sampled = v1_only.ask(PROMPT, temperature=1.0, seed=7)
    greedy = v1_only.ask(PROMPT)
    v1_only.finish(sampled, greedy)
    messages = [decode_frame(frame).message for frame in up]
    (opened,) = [message for message in messages if isinstance(message, Open)]
    assert opened.lane is Lane.GREEDY
    stepped = {item.session for message in messages if isinstance(message, Step) for item in message.items}
    assert stepped == {opened.session}
    assert len(sampled.ids) == 24
    assert sampled.ids == v1_only.answer(PROMPT, speculate=False, temperature=1.0, seed=7).ids
    assert v1_only.link.up
    v1_only.check_idle()


@at_once
@pytest.mark.parametrize(
    ("spark", "worker", "agreed"),
    [
        ((V2,), (V2,), V2),
        ((V2,), (V1,), None),
        ((V2,), (V2, V1), V2),
        ((V1,), (V2,), None),
        ((V1,), (V1,), V1),
        ((V1,), (V2, V1), V1),
        ((V2, V1), (V2,), V2),
        ((V2, V1), (V1,), V1),
        ((V2, V1), (V2, V1), V2),
    ],
)
def test_version_of_a_link(parts: Parts, spark: Any, worker: Any, agreed: WireVersion | None) -> None:
    rig = rig_of(parts, {"versions": spark}, {"versions": worker})
    reader = rig.answer(PROMPT, max_tokens=8)
    assert len(reader.ids) == 8
    terms = rig.link._connection.negotiated
    assert (terms.version if terms is not None else None) is agreed
    if agreed is None:
        assert not rig.link.up
        assert rig.link.last_error == "the worker refused: bad_version: HELLO.wire_versions"
        assert MessageType.OPEN not in rig.wire.sent


@at_once
def test_a_link_that_is_lost_asks_for_version_2_first_again(v1_only: Rig) -> None:
    """A worker that was replaced by a newer one is met as what it is, and the old connection never changed."""
    v1_only.answer(PROMPT, max_tokens=4)
    assert v1_only.wire.sent.count(MessageType.HELLO) == 2
    v1_only.wire.replace_worker(v1_only.parts.worker(step_deadline_ms=600_000, versions=(V2, V1)))
    v1_only.answer(PROMPT, max_tokens=16)
    terms = v1_only.link._connection.negotiated
    assert terms is not None
    assert terms.version is V2
    assert v1_only.wire.sent.count(MessageType.HELLO) == 3


# -- a secret --------------------------------------------------------------------------------------------------


@at_once
def test_drafts_come_over_a_link_whose_ends_share_a_secret(parts: Parts) -> None:
    both = {"authentication": authentication(SECRET)}
    rig = rig_of(parts, both, both)
    assert rig.answer(PROMPT).ids == rig.answer(PROMPT, speculate=False).ids
    assert rig.link.up
    assert rig.total("spec_decode_num_accepted_tokens_total") > 0
    rig.check_idle()


@at_once
@pytest.mark.parametrize(
    ("spark", "worker", "said"),
    [
        (SECRET, OTHER, "auth_failed"),
        (None, SECRET, "auth_required"),
        (SECRET, None, "auth_unsupported"),
    ],
)
def test_without_the_same_secret_the_target_answers_alone(
    parts: Parts, spark: bytes | None, worker: bytes | None, said: str
) -> None:
    given = [{} if one is None else {"authentication": authentication(one)} for one in (spark, worker)]
    rig = rig_of(parts, {"versions": (V2, V1), **given[0]}, given[1])
    up, _ = both_ways(rig)
    reader = rig.answer(PROMPT)
    hellos = [message for message in (decode_frame(frame).message for frame in up) if isinstance(message, Hello)]
    assert {hello.wire_versions for hello in hellos} == {(0x0200,)}
    assert reader.ids == rig.answer(PROMPT, speculate=False).ids
    assert not rig.link.up
    assert rig.link.last_error == f"the worker refused: {said}: HELLO.auth"
    assert MessageType.OPEN not in rig.wire.sent
    assert rig.wire.worker.free_slots == 4
    rig.check_idle()


@at_once
def test_a_lost_link_with_a_secret_comes_back(parts: Parts) -> None:
    both = {"authentication": authentication(SECRET)}
    rig = rig_of(parts, both, both)
    rig.answer(PROMPT, max_tokens=4)
    rig.wire.replace_worker(parts.worker(step_deadline_ms=600_000, **both))
    rig.answer(PROMPT, max_tokens=16)
    assert rig.link.up
    assert rig.link.reconnects == 1


# -- from files, over a socket ---------------------------------------------------------------------------------


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return path


@pytest.fixture
def served(tiny_pair: TinyPair, secret_file: Path) -> Iterator[str]:
    """The address of a worker with a secret that speaks both versions, in a thread of its own."""
    settings = server.WorkerSettings(
        "tcp://127.0.0.1:0",
        str(tiny_pair.target),
        tiny_pair.drafter,
        slots=2,
        length=256,
        threads=1,
        security=Security(psk_file=secret_file),
        allow_v1=True,
    )
    worker, stop = server.build(settings), threading.Event()
    transport = server._listen(settings)

    def turn() -> None:
        while not stop.is_set():
            server.turn(worker, transport, 20)

    thread = threading.Thread(target=turn)
    thread.start()
    yield transport.endpoint
    stop.set()
    thread.join()
    transport.close()
    assert worker.parameters.versions == (V2, V1)


def spark_settings(pair: TinyPair, endpoint: str, **changes: Any) -> SparkSettings:
    return SparkSettings(
        target=str(pair.target),
        worker=endpoint,
        speculative=speculative.parse(pair.speculative(4)),
        threads=1,
        draft_deadline_ms=5000,
        engine=EngineSettings(slots=2, max_context=128, threads=1),
        **changes,
    )


def pump(link: DraftLink) -> None:
    """Turn the link until it is up or was refused, for half a minute at most."""
    for _ in range(3000):
        link.pump()
        if link.up or link.last_error is not None:
            return
        time.sleep(0.01)


def test_settings_reach_the_handshake(tiny_pair: TinyPair, served: str, secret_file: Path) -> None:
    spark = build(spark_settings(tiny_pair, served, security=Security(psk_file=secret_file), allow_v1=True))
    link = spark.engine.link
    assert link is not None
    pump(link)
    assert (link.up, link.last_error) == (True, None)
    assert link._connection.parameters.versions == (V2, V1)
    link.close()


def test_a_rank_without_the_secret_is_told_so(tiny_pair: TinyPair, served: str) -> None:
    link = build(spark_settings(tiny_pair, served)).engine.link
    assert link is not None
    assert link._connection.parameters.versions == (V2,)
    pump(link)
    assert link.last_error == "the worker refused: auth_required: HELLO.auth"
    link.close()


def test_a_secret_that_others_may_read_is_refused(tiny_pair: TinyPair, secret_file: Path) -> None:
    secret_file.chmod(0o644)
    settings = spark_settings(tiny_pair, "tcp://127.0.0.1:9", security=Security(psk_file=secret_file))
    with pytest.raises(UserError, match=r"--secret-file: .*chmod 600"):
        build(settings)
