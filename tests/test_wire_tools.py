"""The commands explain, replay, capture and codec, as they are mounted under a group."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dspark import wire_tools
from dspark_proto import Accepted, HelloParameters, VerifierConnection, encode_frame
from dspark_proto.capture import CaptureWriter, Direction, TransportKind, read_frames
from dspark_proto.hello import Compatibility
from dspark_proto.messages import Ping
from dspark_proto.registry import Dtype
from dspark_proto.transports.zmq import ZmqClient

ROOT = Path(__file__).parents[1]
PEER = ROOT / "proto" / "examples" / "plain_peer.py"
TESTEE = f"{sys.executable} -m dspark_proto.codec_pipe.testee"
PING = bytes(encode_frame(Ping(1, 2)))

app = typer.Typer()
group = typer.Typer()
wire_tools.register(group)
app.add_typer(group, name="conformance")
RUN = CliRunner()


def run(*words: str) -> tuple[int, str]:
    result = RUN.invoke(app, ["conformance", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def capture_file(tmp_path: Path) -> Path:
    path = tmp_path / "a.dspcap"
    with CaptureWriter(path, comment="of a test") as writer:
        writer.frame(Direction.UP, TransportKind.ZMQ, 0, PING)
    return path


# explain


def test_explain_takes_hex_a_frame_in_a_file_and_a_capture(capture_file: Path, tmp_path: Path) -> None:
    (tmp_path / "frame").write_bytes(PING)
    for source in (PING.hex(), str(tmp_path / "frame"), str(capture_file)):
        code, text = run("explain", source)
        assert (code, "PING no key, 64 bytes" in text, "nonce = 2" in text) == (0, True, True)
    assert "of a test" in run("explain", str(capture_file))[1]
    assert "nonce" not in run("explain", str(capture_file), "--brief")[1]
    assert "prefix crc (REQ-PFX-3)" in run("explain", PING.hex(), "--checks")[1]


def test_explain_says_what_is_wrong_with_a_frame() -> None:
    code, text = run("explain", PING[:60].hex())
    assert code == 0
    assert "WRONG_SIZE at frame: breaks REQ-FRM-1" in text


def test_explain_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    assert run("explain", "no such file")[0] == wire_tools.USAGE
    broken = tmp_path / "b.dspcap"
    broken.write_bytes(b"DSPCAP\x1a\n" + bytes(40))
    code, text = run("explain", str(broken))
    assert (code, "damaged" in text) == (wire_tools.USAGE, True)


# codec


def test_codec_passes_the_reference_testee() -> None:
    code, text = run("codec", TESTEE, "--vectors", str(ROOT / "proto" / "vectors"), "--timeout-ms", "20000")
    assert (code, text.splitlines()[-1].endswith(" passed")) == (0, True)


def test_codec_exit_codes_and_json(tmp_path: Path) -> None:
    vector = {"id": "DIG-1", "requirement": "REQ-DIG-1", "tokens": [], "digest_hex": "11" * 8}
    (tmp_path / "digests.json").write_text(json.dumps({"suite": "digests", "wire_version": "2.0", "vectors": [vector]}))
    folder = ("--vectors", str(tmp_path), "--timeout-ms", "20000")
    code, text = run("codec", TESTEE, *folder, "--json")
    (case,) = json.loads(text)["cases"]
    assert (code, case["id"], case["verdict"]) == (wire_tools.BROKEN, "DIG-1", "failed")
    assert run("codec", f"{sys.executable} -c 'raise SystemExit(127)'", *folder)[0] == 127
    assert run("codec", f"{sys.executable} -c 'raise SystemExit(3)'", *folder)[0] == wire_tools.UNREACHABLE
    assert run("codec", "/nonexistent/testee", *folder)[0] == wire_tools.UNREACHABLE
    (tmp_path / "digests.json").unlink()
    assert run("codec", TESTEE, *folder)[0] == wire_tools.USAGE


# capture and replay, with processes


def ready(*command: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "ready" in line, line
    return process, line.split()[-1]


MIDDLE = """
import sys, typer
from dspark import wire_tools
app = typer.Typer()
wire_tools.register(app)
app()
"""


def parameters() -> HelloParameters:
    compat = Compatibility(1000, bytes(32), "draft", "target", bytes(32), (1, 2), Dtype.BF16, 8)
    return HelloParameters(compat, epoch=55, max_slots=2, max_depth=4, max_support=16, max_in_flight=2)


def shake_hands(endpoint: str) -> None:
    """HELLO, PING and STATS from our verifier, until the answers are here."""
    client, verifier = ZmqClient(endpoint), VerifierConnection(parameters())
    try:
        assert client.send([verifier.hello(time.monotonic_ns())], 10_000)
        events: list[object] = []
        deadline = time.monotonic() + 20
        while len(events) < 3 and time.monotonic() < deadline:
            for frame in client.poll(50):
                events += verifier.receive(frame, time.monotonic_ns())
                if isinstance(events[-1], Accepted):
                    assert client.send([verifier.ping(time.monotonic_ns()), verifier.stats()])
        assert [type(event).__name__ for event in events] == ["Accepted", "PongReceived", "StatsReceived"]
    finally:
        client.close()


def test_a_session_is_captured_explained_and_replayed(tmp_path: Path) -> None:
    path = tmp_path / "session.dspcap"
    peer, peer_endpoint = ready(str(PEER))
    try:
        rule = "delay,ms=5,dir=down,type=PONG"
        middle, middle_endpoint = ready(
            "-c", MIDDLE, "capture", "--to", peer_endpoint, "--output", str(path), "--rule", rule
        )
        try:
            shake_hands(middle_endpoint)
        finally:
            middle.terminate()
            said = middle.communicate(timeout=20)[0]
        assert middle.returncode == 0
        assert "fault 1: delay down connection 0: PONG, 64 bytes: delayed by 5 ms" in said
        assert said.splitlines()[-1] == "6 frames passed, 1 faults injected"
        assert len(read_frames(path)) == 6
        text = run("explain", str(path), "--brief")[1]
        assert "totals: 1 ACCEPT, 1 HELLO, 1 PING, 1 PONG, 2 STATS, 1 notes" in text
        code, text = run("replay", str(path), "--to", peer_endpoint, "--json")
        report = json.loads(text)
        assert (code, report["faults"], report["sent"], report["identical"]) == (0, 0, 3, 3)
        code, text = run("replay", str(path), "--json")
        assert (code, json.loads(text)["faults"]) == (0, 0)
    finally:
        peer.terminate()
        peer.communicate(timeout=20)


def test_replay_tells_a_broken_requirement_and_what_is_no_capture(capture_file: Path, tmp_path: Path) -> None:
    assert run("replay", str(tmp_path / "none.dspcap"))[0] == wire_tools.USAGE
    code, text = run("replay", str(capture_file))
    assert (code, "from the start" in text) == (wire_tools.USAGE, True)
    assert run("replay", str(capture_file), "--to", "carrier-pigeon://x")[0] == wire_tools.UNREACHABLE


def test_capture_refuses_bad_rules_addresses_and_existing_files(capture_file: Path) -> None:
    to = ("--to", "tcp://127.0.0.1:9", "--seconds", "0.01")
    assert run("capture", *to, "--rule", "explode")[0] == wire_tools.USAGE
    assert run("capture", *to, "--output", str(capture_file))[0] == wire_tools.USAGE
    code, text = run("capture", *to, "--listen", "tcp://0.0.0.0:0")
    assert (code, "--listen" in text) == (wire_tools.USAGE, True)
    code, text = run("capture", *to, "--listen", "plain+tcp://127.0.0.1:0")
    assert (code, text.splitlines()[-1]) == (0, "0 frames passed, 0 faults injected")
