"""The load with the official client against an endpoint of straw: what each answer is recorded and judged as."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any

import pytest

from dspark.chaos.catalogue import Case, Lane, fixed_cases
from dspark.chaos.client import Answer, Client
from dspark.chaos.judge import Findings, Reference, Verdict, judge
from dspark.chaos.law import LawOutcome
from dspark.chaos.load import Load, Mix
from dspark.chaos.nemesis import Injected
from dspark.chaos.schedule import Planned
from tests.e2e.test_faults import wait_until

CASE = Case("greedy-0", Lane.GREEDY, "abc", 4)
REFERENCES = {"greedy-0": Reference((5, 6, 7, 8), "wxyz", 3)}
DEADLINE_S = 1.0


class Straw(BaseHTTPRequestHandler):
    """Answers `mode` of its server to every completion."""

    protocol_version = "HTTP/1.1"
    server: Any

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        mode = self.server.mode
        if mode == "hang":
            self.server.gate.wait(30)
        if mode == "500":
            self._send(500, {"error": {"message": "broken", "type": "server_error"}})
        elif body["stream"]:
            self._stream(mode)
        else:
            ids = [] if mode == "empty" else [5, 6, 7, 8]
            self._send(200, {**_chunk("wxyz"[: len(ids)], ids, "length"), "usage": _usage(len(ids))})

    def _send(self, status: int, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, mode: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        ids = {"empty": [], "wrong": [5, 6, 7, 9]}.get(mode, [5, 6, 7, 8])
        try:
            for place, token in enumerate(ids):
                self._event(_chunk("wxyz"[place], [token], None))
                if mode == "endless":
                    while not self.server.gate.wait(0.01):
                        self._event(_chunk("", [5], None))
            if mode == "error event":
                self._event({"error": {"message": "a failed round", "type": "server_error"}})
            elif mode != "broken off":
                self._event(_chunk("", [], "length"))
                self._event({**_chunk("", [], None), "choices": [], "usage": _usage(len(ids))})
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.server.left.set()

    def _event(self, body: dict[str, object]) -> None:
        self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


def _chunk(text: str, ids: list[int], finish: str | None) -> dict[str, object]:
    choice: dict[str, object] = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}
    if ids:
        choice["dspark"] = {"token_ids": ids, "from_draft": [False, *([True] * (len(ids) - 1))]}
    return {"id": "x", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}


def _usage(count: int) -> dict[str, int]:
    return {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}


@pytest.fixture
def straw() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Straw)
    server.mode, server.bodies, server.gate, server.left = "right", [], threading.Event(), threading.Event()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.gate.set()
    server.shutdown()
    server.server_close()
    thread.join(10)


def client(straw: Any) -> Client:
    return Client(f"http://127.0.0.1:{straw.server_port}", "m", DEADLINE_S)


def verdict(*answers: Answer) -> Verdict:
    fault = Injected(Planned(0, 0.0, "kill", 0, 0), 0.0, 0.0, 0.0, 0.0)
    return judge(Findings(answers, REFERENCES, DEADLINE_S, [fault], [], [], LawOutcome(0), 0.0))


@pytest.mark.parametrize(
    ("mode", "stream", "count"),
    [
        ("right", True, "completed"),
        ("right", False, "completed"),
        ("wrong", True, "wrong_tokens"),
        ("empty", True, "bad_200"),
        ("empty", False, "bad_200"),
        ("broken off", True, "bad_200"),
        ("error event", True, "failed"),
        ("500", True, "failed"),
        ("500", False, "failed"),
    ],
)
def test_answers_are_recorded_and_judged_as_what_they_were(straw: Any, mode: str, stream: bool, count: str) -> None:
    straw.mode = mode
    answer = Answer(CASE, stream, 0.0)
    client(straw).ask(CASE, answer)
    assert answer.ended is not None
    answer.started = answer.ended - 0.1
    assert verdict(answer).counts[count] == 1
    assert straw.bodies[0]["temperature"] == 0
    assert straw.bodies[0]["ignore_eos"] is True


def run_load(straw: Any, mix: Mix, clients: int = 2) -> Load:
    return Load(lambda: client(straw), [CASE], clients, 1, lambda answer: None, mix)


def test_a_hanging_request_is_hung_and_does_not_hold_up_the_end(straw: Any) -> None:
    straw.mode = "endless"
    load = run_load(straw, Mix(law=0.0, stream=1.0, leave=0.0))
    load.start()
    wait_until(lambda: len(load.running()) == 2, 10)
    load.finish(0.1)
    assert verdict(*load.answers).counts["hung"] == 2


def test_silence_past_the_deadline_is_a_failed_request(straw: Any) -> None:
    straw.mode = "hang"
    answer = Answer(CASE, False, 0.0)
    client(straw).ask(CASE, answer)
    assert answer.error is not None
    assert "Timeout" in answer.error


def test_clients_that_are_told_to_leave_close_their_connection(straw: Any) -> None:
    straw.mode = "endless"
    load = run_load(straw, Mix(law=0.0, stream=1.0, leave=0.0), clients=1)
    load.start()
    wait_until(lambda: load.running() and load.running()[0].ids, 10)
    load.leave(1)
    wait_until(lambda: load.left == 1, 10)
    assert straw.left.wait(10)
    left = load.answers[0]
    wait_until(lambda: left.ended is not None, 10)
    assert (left.cancelled, left.error) == (True, None)
    straw.gate.set()
    load.finish(10)


def test_texts_that_are_judged_by_law_are_never_left(straw: Any) -> None:
    load = run_load(straw, Mix(law=1.0, stream=1.0, leave=1.0))
    load.leave(1000)
    load.start()
    wait_until(lambda: len(load.answers) > 6, 10)
    load.finish(10)
    assert not any(answer.cancelled for answer in load.answers)
    seeds = [body["seed"] for body in straw.bodies]
    assert len(set(seeds)) == len(seeds)


def test_the_mix_of_a_thread_is_its_seeds(straw: Any) -> None:
    made = [Load(lambda: client(straw), fixed_cases(8), 1, 1, lambda answer: None, Mix()) for _ in range(2)]
    drawn = [[load._next_case(random).key for _ in range(50)] for load in made for random in [Random("1/0")]]
    assert drawn[0] == drawn[1]
    assert {"law", "greedy-0", "match-1"} <= set(drawn[0])
