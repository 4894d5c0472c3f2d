"""The workers file: what a line means, what is wrong with one, and that an edit holds as a whole or not at all."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from dspark import speculative
from dspark.errors import UserError
from dspark_spark import workers_file
from dspark_spark.build import Spark, SparkSettings, build
from dspark_spark.draft_link import DraftLink
from dspark_spark.draft_pool import DraftPool
from dspark_spark.engine import EngineSettings
from dspark_spark.workers_file import WorkerLine, WorkersWatch, parse, read
from tests.conftest import TinyPair

PATH = Path("/etc/dspark/workers")


def test_lines_comments_and_directories() -> None:
    text = b"# workers\n\ntcp://a:1   # the first\n  plain+tcp://b:2\tsome dir/v2  \nucx://c:3 /abs\ntcp://d:4 ~/x\n"
    assert parse(text, PATH) == (
        WorkerLine("tcp://a:1"),
        WorkerLine("plain+tcp://b:2", Path("/etc/dspark/some dir/v2")),
        WorkerLine("ucx://c:3", Path("/abs")),
        WorkerLine("tcp://d:4", Path("~/x").expanduser()),
    )
    assert parse(b"", PATH) == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"tcp://a:1\nlocalhost:7\n", ["line 2", "'localhost:7' is no address", "tcp://HOST:PORT"]),
        (b"tcp://a:1\n#\ntcp://a:1 v2\n", ["line 3", "tcp://a:1", "twice"]),
        (b"tcp://a:1\n\xff\xfe\n", ["no UTF-8", "text file"]),
        (b"".join(b"tcp://a:%d\n" % i for i in range(1, 66)), ["65 workers", "at most 64"]),
    ],
)
def test_what_cannot_be_used_names_the_line_and_the_remedy(text: bytes, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse(text, PATH)
    assert str(caught.value).startswith("--workers-file /etc/dspark/workers: ")
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_file_that_is_not_there_or_too_large(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--workers-file .*No such file.*one worker address a line"):
        read(tmp_path / "workers")
    large = tmp_path / "large"
    large.write_bytes(b"#" * workers_file.BYTES_MAX)
    assert len(read(large)) == workers_file.BYTES_MAX
    large.write_bytes(b"#" * (workers_file.BYTES_MAX + 1))
    with pytest.raises(UserError, match="more than 65536 bytes"):
        read(large)


class Told:
    """What a watch applied and reported."""

    def __init__(self, path: Path) -> None:
        self.applied: list[list[str]] = []
        self.reported: list[str | None] = []
        self.refusal: str | None = None
        self.event = threading.Event()
        self.watch = WorkersWatch(path, path.read_bytes(), self.apply, self.reported.append, period_s=0.01)

    def apply(self, lines: Sequence[WorkerLine]) -> None:
        if self.refusal:
            raise UserError(self.refusal)
        self.applied.append([line.address for line in lines])
        self.event.set()


@pytest.fixture
def told(tmp_path: Path) -> Told:
    path = tmp_path / "workers"
    path.write_text("tcp://a:1\n")
    return Told(path)


def test_a_change_is_applied_once(told: Told, tmp_path: Path) -> None:
    told.watch.look()
    assert told.applied == []
    (tmp_path / "workers").write_text("tcp://a:1\ntcp://b:2\n")
    for _ in range(4):
        told.watch.look()
    assert told.applied == [["tcp://a:1", "tcp://b:2"]]
    assert told.reported == []


def test_a_file_that_is_being_written_is_left_alone(told: Told, tmp_path: Path) -> None:
    """Truncated, half a line, nothing there at all: nothing of it lasts for two looks."""
    path = tmp_path / "workers"
    for text in ("", "tcp:", "tcp://a:1\ntcp://b:2\n"):
        path.write_text(text)
        told.watch.look()
    path.unlink()
    told.watch.look()
    assert (told.applied, told.reported) == ([], [])
    path.write_text("tcp://b:2\n")
    told.watch.look()
    told.watch.look()
    assert (told.applied, told.reported) == ([["tcp://b:2"]], [])


def test_a_file_that_makes_no_sense_changes_nothing_and_is_reported_once(told: Told, tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_text("tcp://a:1\nrubbish\n")
    for _ in range(3):
        told.watch.look()
    assert told.applied == []
    assert len(told.reported) == 1
    assert "line 2" in (told.reported[0] or "")
    path.unlink()
    for _ in range(3):
        told.watch.look()
    assert "No such file" in (told.reported[1] or "")
    path.write_text("tcp://b:2\n")
    for _ in range(3):
        told.watch.look()
    assert told.applied == [["tcp://b:2"]]
    assert told.reported[2:] == [None]


def test_what_cannot_be_applied_is_reported(told: Told, tmp_path: Path) -> None:
    told.refusal = "tcp://b:2: no such library"
    (tmp_path / "workers").write_text("tcp://b:2\n")
    for _ in range(4):
        told.watch.look()
    assert told.reported == ["tcp://b:2: no such library"]


def test_it_looks_by_itself_until_it_is_stopped(told: Told, tmp_path: Path) -> None:
    told.watch.start()
    (tmp_path / "workers").write_text("tcp://c:3\n")
    assert told.event.wait(20)
    told.watch.stop()
    told.watch.stop()
    (tmp_path / "workers").write_text("tcp://d:4\n")
    assert told.applied == [["tcp://c:3"]]


# -- the rank that is built of it ------------------------------------------------------------------------------


def build_with(pair: TinyPair, path: Path | None, worker: Sequence[str] = ()) -> Spark:
    return build(
        SparkSettings(
            target=str(pair.target),
            worker=worker,
            workers_file=path,
            speculative=speculative.parse(pair.speculative(3)),
            threads=1,
            engine=EngineSettings(slots=2, max_context=128, threads=1),
        )
    )


@pytest.fixture
def other(tiny_pair: TinyPair, tmp_path: Path) -> Path:
    """Another checkpoint of the same shape."""
    from safetensors.torch import load_file, save_file

    directory = shutil.copytree(tiny_pair.drafter, tmp_path / "v2")
    tensors = load_file(directory / "model.safetensors")
    save_file({name: tensor * 0.5 if name == "fc.weight" else tensor for name, tensor in tensors.items()},
              directory / "model.safetensors")  # fmt: skip
    return directory


def test_several_named_workers_are_a_pool_and_a_lone_one_is_a_link(tiny_pair: TinyPair) -> None:
    addresses = ["tcp://127.0.0.1:9", "tcp://127.0.0.1:10"]
    pool, link, none = (build_with(tiny_pair, None, addresses[:n]).engine.link for n in (2, 1, 0))
    assert isinstance(pool, DraftPool)
    assert isinstance(link, DraftLink)
    assert none is None
    for source, count in ((pool, 2), (link, 1)):
        assert [(w.address, w.state, w.leases) for w in source.workers] == [
            (address, "connecting", 0) for address in addresses[:count]
        ]
        source.close()


def test_members_have_the_identity_of_their_own_checkpoint(tiny_pair: TinyPair, tmp_path: Path, other: Path) -> None:
    path = tmp_path / "workers"
    path.write_text(f"tcp://127.0.0.1:9\ntcp://127.0.0.1:10 {other.name}\n")
    spark = build_with(tiny_pair, path)
    pool = spark.engine.link
    assert isinstance(pool, DraftPool)
    assert [status.address for status in pool.workers] == ["tcp://127.0.0.1:9", "tcp://127.0.0.1:10"]
    first, second = [worker.member.parameters for worker in pool._workers]
    assert first.compatibility.draft_identity != second.compatibility.draft_identity
    assert first.compatibility.target_identity == second.compatibility.target_identity
    assert first.epoch != second.epoch
    assert first.max_depth == second.max_depth == 3
    pool.close()


def test_an_edit_reaches_the_pool_and_a_bad_one_is_shown(tiny_pair: TinyPair, tmp_path: Path, other: Path) -> None:
    path = tmp_path / "workers"
    path.write_text("tcp://127.0.0.1:9\n")
    spark = build_with(tiny_pair, path)
    pool, watch = spark.engine.link, spark.watch
    assert isinstance(pool, DraftPool)
    assert watch is not None

    def after(text: str) -> list[str]:
        path.write_text(text)
        watch.look()
        watch.look()
        pool.pump()
        return [status.address for status in pool.workers]

    assert after("tcp://127.0.0.1:9\ntcp://127.0.0.1:10\n") == ["tcp://127.0.0.1:9", "tcp://127.0.0.1:10"]
    kept = pool._workers[1]
    assert after("tcp://127.0.0.1:10\n") == ["tcp://127.0.0.1:10"]
    assert pool._workers == [kept]
    for text, words in [
        ("tcp://127.0.0.1:10\nx\n", "line 2"),
        ("tcp://127.0.0.1:10\ntls+tcp://127.0.0.1:11\n", "TLS certificates"),
        ("tcp://127.0.0.1:10 /nonexistent\n", "config.json"),
    ]:
        assert after(text) == ["tcp://127.0.0.1:10"]
        assert words in (pool.last_error or "")
    assert after(f"tcp://127.0.0.1:10 {other}\n") == ["tcp://127.0.0.1:10"]
    assert pool._workers != [kept]  # the same address, but another checkpoint
    assert pool.last_error is None
    pool.close()


def test_a_checkpoint_with_other_taps_is_refused(tiny_pair: TinyPair, tmp_path: Path, other: Path) -> None:
    config = other / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "target_layer_ids": [0]}))
    path = tmp_path / "workers"
    path.write_text(f"tcp://127.0.0.1:9 {other}\n")
    with pytest.raises(UserError, match=r"taps target layers \[0\].*start another verifier"):
        build_with(tiny_pair, path)
