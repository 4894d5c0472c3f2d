"""`dspark chat`: the answer, the acceptance under it, and one clear line when something is wrong."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from rich.console import Console

from dspark import chat
from dspark.chat import Acceptance, ChatOptions, Conversation
from tests.conftest import RunningEndpoint


def options(url: str, prompt: str | None = "hi", **changes: object) -> ChatOptions:
    values: dict[str, object] = {"temperature": 0.0, "max_tokens": 24, "system": None, "prompt": prompt, **changes}
    return ChatOptions(url, **values)  # type: ignore[arg-type]


def test_one_question_prints_the_answer_and_the_acceptance(
    tiny_endpoint: RunningEndpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat.run(options(tiny_endpoint.url)) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) >= 2
    assert "draft tokens accepted (" in lines[-1]
    assert "tokens per step" in lines[-1]


def test_accepted_text_is_green_and_the_conversation_is_kept(tiny_endpoint: RunningEndpoint) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", highlight=False)
    conversation = Conversation(options(tiny_endpoint.url, max_tokens=40))
    conversation.ask("hello", console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[32m" in shown
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"]
    assert conversation.messages[1]["content"]
    assert 0 < conversation.acceptance.accepted <= conversation.acceptance.drafted
    conversation.ask("again", console)
    assert len(conversation.messages) == 4


def test_acceptance_line() -> None:
    acceptance = Acceptance()
    assert "target only" in acceptance.line()
    acceptance.add({"drafted": 20, "accepted": 9, "rounds": 5, "target_only_steps": 1})
    assert acceptance.line() == "9 of 20 draft tokens accepted (45%), 2.50 tokens per step"


class Canned(BaseHTTPRequestHandler):
    """Answers every request with the server's `reply`: (status, body)."""

    def do_GET(self) -> None:
        if self.path.endswith("/v1/models"):
            self._answer(*self.server.models)  # type: ignore[attr-defined]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(*self.server.reply)  # type: ignore[attr-defined]

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def canned() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Canned)
    server.models = (200, b'{"data": [{"id": "m"}]}')  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


EVENT = {"choices": [{"delta": {"content": "half an ans"}}]}


@pytest.mark.parametrize(
    ("models", "reply", "words"),
    [
        ((200, b'{"data": [{"id": "m"}]}'), (503, b'{"error": {"message": "engine is busy"}}'), "503: engine is busy"),
        ((401, b'{"error": {"message": "no key"}}'), (200, b""), "401: no key"),
        ((200, b"<html>"), (200, b""), "does not answer like a dspark endpoint"),
        ((200, b'{"data": []}'), (200, b""), "does not answer like a dspark endpoint"),
        (
            (200, b'{"data": [{"id": "m"}]}'),
            (200, b"data: " + json.dumps(EVENT).encode() + b'\n\ndata: {"error": {"message": "engine failed"}}\n\n'),
            "engine failed",
        ),
    ],
)
def test_refusals_are_one_line_and_status_1(
    canned: HTTPServer,
    capsys: pytest.CaptureFixture[str],
    models: tuple[int, bytes],
    reply: tuple[int, bytes],
    words: str,
) -> None:
    canned.models, canned.reply = models, reply  # type: ignore[attr-defined]
    assert chat.run(options(f"http://127.0.0.1:{canned.server_port}")) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert words in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:9", "start it with `dspark serve`"),
        ("127.0.0.1:8000", "give the endpoint's base URL"),
        ("http://127.0.0.1:port", "give the endpoint's base URL"),
    ],
)
def test_an_endpoint_that_is_not_there(capsys: pytest.CaptureFixture[str], url: str, words: str) -> None:
    assert chat.run(options(url)) == 1
    assert words in " ".join(capsys.readouterr().out.split())


def test_end_of_input_ends_the_chat(
    canned: HTTPServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    canned.reply = (200, b"data: " + json.dumps(EVENT).encode() + b"\n\ndata: [DONE]\n\n")  # type: ignore[attr-defined]
    questions = iter(["first"])

    def ask(self: Console, *_: object) -> str:
        try:
            return next(questions)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(Console, "input", ask)
    assert chat.run(options(f"http://127.0.0.1:{canned.server_port}", prompt=None, system="be brief")) == 0
    assert "half an ans" in capsys.readouterr().out
