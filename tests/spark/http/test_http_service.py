"""The routes around generation, the API key, request ids, and the end of the server."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dspark_spark.api import SamplingParams
from dspark_spark.http import EndpointSettings, fingerprint

BOS, EOS = 256, 257
USER = [{"role": "user", "content": "hi"}]


def test_tokenize_a_prompt(endpoint: Any) -> None:
    body = endpoint.post("/tokenize", {"model": "toy", "prompt": "hé"}).json()
    assert body == {"count": 4, "max_model_len": 200, "tokens": [BOS, *"hé".encode()]}
    bare = endpoint.post("/tokenize", {"prompt": "h", "add_special_tokens": False}).json()
    assert bare["tokens"] == [104]


def test_tokenize_messages_gives_the_ids_of_chat(endpoint: Any) -> None:
    tokens = endpoint.post("/tokenize", {"messages": USER}).json()["tokens"]
    endpoint.chat(messages=USER)
    assert tuple(tokens) == endpoint.engine.requests[0].prompt_ids


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": USER}])
def test_tokenize_wants_one_source(endpoint: Any, body: dict[str, object]) -> None:
    assert endpoint.post("/tokenize", body).status_code == 400


def test_detokenize(endpoint: Any) -> None:
    tokens = [BOS, *"né".encode(), 0xF0, EOS]
    assert endpoint.post("/detokenize", {"tokens": tokens}).json() == {"prompt": "né\ufffd"}
    assert endpoint.post("/detokenize", {"tokens": [258]}).json()["error"]["param"] == "tokens[0]"
    assert endpoint.post("/detokenize", {"tokens": [], "model": "no"}).status_code == 404


def test_message_parts_are_joined_and_developer_is_system(endpoint: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    endpoint.chat(messages=[{"role": "developer", "content": "be"}, {"role": "user", "content": parts}])
    prompt = bytes(endpoint.engine.requests[0].prompt_ids)
    assert prompt == b"<system>be<user>a\nb<assistant>"


def test_generation_prompt_can_be_left_out(endpoint: Any) -> None:
    endpoint.chat(messages=USER, add_generation_prompt=False)
    assert bytes(endpoint.engine.requests[0].prompt_ids) == b"<user>hi"


def test_prompts_as_ids(endpoint: Any) -> None:
    endpoint.complete(prompt=[1, 2, 3])
    endpoint.complete(prompt=[[4, 5], [6]])
    assert [request.prompt_ids for request in endpoint.engine.requests] == [(1, 2, 3), (4, 5), (6,)]


ENGINE_PARAMETERS: list[tuple[dict[str, object], dict[str, Any]]] = [
    ({}, {}),
    ({"min_p": 0.25}, {"min_p": 0.25}),
    ({"min_p": 1}, {"min_p": 1.0}),
    ({"logit_bias": {"0": 1, "257": -100, "65": 0.5}}, {"logit_bias": {0: 1.0, 257: -100.0, 65: 0.5}}),
    ({"presence_penalty": 2, "frequency_penalty": -2}, {"presence_penalty": 2.0, "frequency_penalty": -2.0}),
    ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    ({"min_tokens": 3}, {"min_tokens": 3}),
    ({"allowed_token_ids": [5, 1]}, {"allowed_token_ids": (5, 1)}),
    ({"bad_words": ["ab"]}, {"bad_words": ((97, 98), (32, 97, 98))}),
    ({"bad_words": ["  ab", "ab", "c"]}, {"bad_words": ((97, 98), (32, 97, 98), (99,), (32, 99))}),
    ({"bad_words": [" ", "\n"]}, {"bad_words": ((32,), (32, 32), (10,), (32, 10))}),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("fields", "wanted"), ENGINE_PARAMETERS)
def test_fields_that_edit_rows_reach_the_engine(
    endpoint: Any, path: str, fields: dict[str, object], wanted: dict[str, Any]
) -> None:
    source: dict[str, object] = {"messages": USER} if "chat" in path else {"prompt": ["a", "b"]}
    response = endpoint.post(path, source | fields | {"max_tokens": 9})
    assert response.status_code == 200
    assert "x-dspark-ignored-params" not in response.headers
    assert [request.params for request in endpoint.engine.requests] == [
        SamplingParams(max_tokens=9, **wanted) for _ in endpoint.engine.requests
    ]
    assert len(endpoint.engine.requests) == (1 if "chat" in path else 2)


def test_words_are_encoded_off_the_event_loop(endpoint: Any, monkeypatch: Any) -> None:
    on_the_loop: dict[str, bool] = {}
    encode = endpoint.tokenizer.encode

    def watched(text: str, add_special: bool) -> list[int]:
        on_the_loop[text] = asyncio._get_running_loop() is not None
        ids: list[int] = encode(text, add_special)
        return ids

    monkeypatch.setattr(endpoint.tokenizer, "encode", watched)
    endpoint.complete(bad_words=["ab"])
    assert on_the_loop == {"hi": False, "ab": False, " ab": False}


def test_health_is_about_life_and_ready_about_service(endpoint: Any) -> None:
    assert endpoint.get("/health").status_code == 200
    assert endpoint.get("/ready").json()["engine"]["dtype"] == "float32"
    endpoint.engine.ready = False
    assert endpoint.get("/health").status_code == 200
    response = endpoint.get("/ready")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_not_ready"
    assert response.json()["engine"]["speculation"] == "on"
    endpoint.engine.alive = False
    assert endpoint.get("/health").json()["error"]["code"] == "engine_stopped"


def test_version(endpoint: Any) -> None:
    body = endpoint.get("/version").json()
    assert (body["version"], body["system_fingerprint"]) == ("1.2.3", "dspark-test")
    assert body["engine"]["dtype"] == "float32"


def test_metrics_follow_requests(endpoint: Any) -> None:
    names = [
        "prompt_tokens_total",
        "generation_tokens_total",
        "inter_token_latency_seconds_count",
        "time_to_first_token_seconds_count",
        'request_success_total{finished_reason="stop"}',
    ]
    before = {name: endpoint.sample(f"dspark:{name}") for name in names}
    endpoint.engine.script = [b"abc", b"de", (EOS,)]
    endpoint.complete(prompt="hello")
    gained = [endpoint.sample(f"dspark:{name}") - before[name] for name in names]
    assert gained == [6, 6, 2, 1, 1]
    assert endpoint.get("/metrics").headers["content-type"].startswith("text/plain")


def test_request_ids_are_echoed_when_plain_and_made_when_not(endpoint: Any) -> None:
    assert endpoint.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for odd in ("x" * 129, "a b", "", "<script>"):
        made = endpoint.get("/health", headers={"x-request-id": odd}).headers["x-request-id"]
        assert made.startswith("req-")
    assert endpoint.get("/nowhere").headers["x-request-id"].startswith("req-")
    assert endpoint.chat(stream=True).headers["x-request-id"].startswith("req-")


def test_same_request_id_twice_gives_two_engine_requests(endpoint: Any) -> None:
    for _ in range(2):
        endpoint.post("/v1/completions", {"prompt": "x"}, headers={"x-request-id": "same"})
    assert len({request.request_id for request in endpoint.engine.requests}) == 2


def test_internal_errors_have_the_shape_and_no_details(endpoint: Any, monkeypatch: Any) -> None:
    def fail() -> dict[str, object]:
        raise RuntimeError("a secret path")

    monkeypatch.setattr(endpoint.engine, "describe", fail)
    response = endpoint.get("/version", headers={"x-request-id": "r1"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"] == "r1"


def test_api_keys(serve_with: Callable[..., Any], tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("# two keys\nalpha\n\nbeta\n")
    with serve_with(EndpointSettings(api_key_file=key_file)) as endpoint:
        for path in ("/health", "/ready"):
            assert endpoint.get(path).status_code == 200
        for path in ("/v1/models", "/metrics", "/version", "/nowhere"):
            assert endpoint.get(path).status_code == 401
        for key in ("Bearer alpha", "bearer beta"):
            assert endpoint.get("/v1/models", headers={"authorization": key}).status_code == 200
        for key in ("Bearer gamma", "alpha", "Basic alpha", "Bearer", "Bearer # two keys"):
            response = endpoint.get("/v1/models", headers={"authorization": key})
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert endpoint.chat().status_code == 401
        assert endpoint.engine.requests == []


def test_key_file_without_a_key_does_not_open_the_endpoint(
    serve_with: Callable[..., Any], tmp_path: Path
) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("# none\n")
    with (
        pytest.raises(ValueError, match="api_key_file"),
        serve_with(EndpointSettings(api_key_file=key_file)),
    ):
        pass


def test_settings_refuse_limits_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="max_body_bytes"):
        EndpointSettings(max_body_bytes=0)


def test_fingerprint_depends_on_the_facts_and_not_on_their_order() -> None:
    first = fingerprint("1.0", {"dtype": "bf16", "k": 5})
    assert first == fingerprint("1.0", {"k": 5, "dtype": "bf16"})
    assert first != fingerprint("1.0", {"k": 6, "dtype": "bf16"})
    assert first.startswith("dspark-1.0-")


SERVER_PROGRAM = """
import asyncio
from dspark_spark.http import serve

async def slow(scope, receive, send):
    print("asked", flush=True)
    await asyncio.sleep(float(scope["path"][1:]))
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"done"})

serve(slow, "127.0.0.1", 0, on_listening=lambda port: print(port, flush=True), drain_s=20)
print("returned", flush=True)
"""


@contextmanager
def slow_server(seconds: float) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """A server process that works on one request, and the connection that waits for its answer."""
    command = [sys.executable, "-c", SERVER_PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(
                    f"GET /{seconds} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
                )
                assert process.stdout.readline() == "asked\n"
                yield process, connection
                assert process.wait(timeout=10) == 0
                assert process.stdout.read() == "returned\n"
        finally:
            process.kill()


def test_first_signal_lets_running_requests_finish() -> None:
    with slow_server(0.5) as (process, connection):
        process.send_signal(signal.SIGTERM)
        with connection.makefile("rb") as answer:
            assert answer.read().endswith(b"\r\n4\r\ndone\r\n0\r\n\r\n")


def test_second_signal_does_not_wait() -> None:
    with slow_server(30.0) as (process, _):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
