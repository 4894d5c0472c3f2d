"""A client that leaves: its generation is cancelled, in both modes, and nothing else is touched."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

EOS = 257


def open_request(url: str, body: object) -> socket.socket:
    """Send a completion request on a bare socket, which the test closes when it likes."""
    parts = urlsplit(url)
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    connection = socket.create_connection((parts.hostname, parts.port), timeout=5)
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [[30.0], [b"a", 30.0]], ids=["prefill", "decode"])
def test_leaving_cancels(
    endpoint: Any, eventually: Callable[..., bool], stream: bool, script: list[object]
) -> None:
    endpoint.engine.script = script
    before = endpoint.sample('dspark:request_success_total{finished_reason="abort"}')
    connection = open_request(endpoint.url, {"prompt": "x", "stream": stream})
    assert eventually(lambda: endpoint.engine.running == 1)
    connection.close()
    assert eventually(lambda: endpoint.engine.running == 0, 1.0)
    assert endpoint.engine.aborted == [endpoint.engine.requests[0].request_id]
    after = endpoint.sample('dspark:request_success_total{finished_reason="abort"}')
    assert after == before + 1


def test_leaving_cancels_every_choice(endpoint: Any, eventually: Callable[..., bool]) -> None:
    endpoint.engine.script = [30.0]
    connection = open_request(endpoint.url, {"prompt": ["x", "y", "z"]})
    assert eventually(lambda: endpoint.engine.running == 3)
    connection.close()
    assert eventually(lambda: endpoint.engine.running == 0, 1.0)


def test_leaving_a_stream_through_a_client(endpoint: Any, eventually: Callable[..., bool]) -> None:
    endpoint.engine.script = [b"a", 30.0]
    body = {"prompt": "x", "stream": True}
    with httpx.stream("POST", f"{endpoint.url}/v1/completions", json=body) as response:
        assert next(response.iter_text()).startswith("data: ")
    assert eventually(lambda: endpoint.engine.running == 0, 1.0)


def test_other_requests_go_on(endpoint: Any, eventually: Callable[..., bool]) -> None:
    endpoint.engine.scripts = {"stay": [b"a", 0.3, b"b", (EOS,)], "go": [30.0]}
    leaving = open_request(endpoint.url, {"prompt": "go"})
    staying = open_request(endpoint.url, {"prompt": "stay"})
    assert eventually(lambda: endpoint.engine.running == 2)
    leaving.close()
    assert b'"text":"ab"' in staying.recv(65536)
    staying.close()
    assert len(endpoint.engine.aborted) == 1


def test_finished_answers_are_not_counted_as_aborted(endpoint: Any) -> None:
    assert endpoint.complete().status_code == 200
    assert endpoint.complete(stream=True).status_code == 200
    assert endpoint.engine.aborted == []
