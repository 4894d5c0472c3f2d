"""The stream as bytes: framing, order, headers, keepalives, failures."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from dspark_spark.api import Delta

EOS = 257


def transcript(response: httpx.Response) -> str:
    """The body with what changes from run to run replaced."""
    text = re.sub(r'"id":"(chatcmpl|cmpl)-[0-9a-f]{32}"', r'"id":"\1-ID"', response.text)
    return re.sub(r'"created":\d+', '"created":0', text)


CHAT_TRANSCRIPT = """\
data: {"id":"chatcmpl-ID","object":"chat.completion.chunk","created":0,"model":"toy",\
"system_fingerprint":"dspark-test","choices":[{"index":0,"logprobs":null,"finish_reason":null,\
"delta":{"role":"assistant","content":"né"}}],"usage":null}

data: {"id":"chatcmpl-ID","object":"chat.completion.chunk","created":0,"model":"toy",\
"system_fingerprint":"dspark-test","choices":[{"index":0,"logprobs":null,"finish_reason":"stop",\
"stop_reason":null,"delta":{"content":"!"}}],"usage":null}

data: {"id":"chatcmpl-ID","object":"chat.completion.chunk","created":0,"model":"toy",\
"system_fingerprint":"dspark-test","choices":[],"usage":{"prompt_tokens":19,"completion_tokens":5,\
"total_tokens":24,"prompt_tokens_details":{"cached_tokens":0,"audio_tokens":0},\
"completion_tokens_details":{"reasoning_tokens":0,"accepted_prediction_tokens":0,\
"rejected_prediction_tokens":0,"audio_tokens":0}},"speculation":{"lane":"none","rounds":0,"drafted":0,\
"verified":0,"accepted":0,"target_only_steps":0,"mean_tokens_per_step":0.0}}

data: [DONE]

"""

TEXT_TRANSCRIPT = """\
data: {"id":"cmpl-ID","object":"text_completion","created":0,"model":"org/toy",\
"system_fingerprint":"dspark-test","choices":[{"index":0,"logprobs":null,"finish_reason":null,\
"text":"ab"}]}

data: {"id":"cmpl-ID","object":"text_completion","created":0,"model":"org/toy",\
"system_fingerprint":"dspark-test","choices":[{"index":0,"logprobs":null,"finish_reason":"length",\
"stop_reason":null,"text":"c"}]}

data: [DONE]

"""


def test_chat_transcript(endpoint: Any) -> None:
    endpoint.engine.script = ["né".encode(), (ord("!"), EOS, 65)]
    response = endpoint.chat(stream=True, stream_options={"include_usage": True})
    assert transcript(response) == CHAT_TRANSCRIPT


def test_text_transcript(endpoint: Any) -> None:
    endpoint.engine.script = [b"ab", b"cdef"]
    response = endpoint.complete(model="org/toy", stream=True, max_tokens=3)
    assert transcript(response) == TEXT_TRANSCRIPT


def test_stream_headers(endpoint: Any) -> None:
    response = endpoint.chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


def test_rounds_that_show_nothing_send_nothing(endpoint: Any) -> None:
    endpoint.engine.script = [b"a", b"#", b"\xf0\x9f", b"\xa6\x9c", (EOS,)]
    lines = [line for line in endpoint.chat(stream=True, stop="#!").text.split("\n\n") if line]
    contents = [json.loads(line[6:])["choices"][0]["delta"].get("content") for line in lines[:-1]]
    assert contents == ["a", "#🦜", None]


def test_held_back_first_round_still_brings_the_role(endpoint: Any) -> None:
    endpoint.engine.script = [b"#", b"x", (EOS,)]
    lines = endpoint.chat(stream=True, stop="##").text.split("\n\n")
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines[:3]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "#x"}, {}]


def test_headers_come_before_the_prefill_ends_and_silence_is_kept_alive(endpoint: Any) -> None:
    prefill_ends = threading.Event()
    endpoint.engine.script = [prefill_ends, b"a", (EOS,)]
    body = {"prompt": "x", "stream": True}
    with endpoint.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        text = ""
        for piece in response.iter_text():
            text += piece
            if text.count(": keepalive\n\n") == 2:
                prefill_ends.set()
    assert text.startswith(": keepalive\n\n: keepalive\n\n")
    assert text.count('"text":"a"') == 1
    assert text.endswith("data: [DONE]\n\n")


MID_STREAM_FAILURES = [
    (RuntimeError("a secret"), "engine_error"),
    (Delta(finish_reason="error", error="lost rank 1"), "engine_error"),
    (Delta(finish_reason="abort"), "request_aborted"),
]


@pytest.mark.parametrize(("failure", "code"), MID_STREAM_FAILURES)
def test_failure_sends_an_error_and_no_finish(endpoint: Any, failure: object, code: str) -> None:
    endpoint.engine.script = [b"ab", failure]
    text = endpoint.chat(stream=True, stream_options={"include_usage": True}).text
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert json.loads(events[0])["choices"][0]["delta"]["content"] == "ab"
    error = json.loads(events[1])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert events[2:] == ["[DONE]"]
    assert '"finish_reason":"' not in text
    assert "secret" not in text


def test_failure_of_one_choice_ends_the_others(endpoint: Any, eventually: Callable[..., bool]) -> None:
    endpoint.engine.scripts = {"bad": [0.1, RuntimeError("x")], "good": [b"a", 30.0]}
    text = endpoint.complete(prompt=["good", "bad"], stream=True).text
    assert '"code":"engine_error"' in text
    assert eventually(lambda: len(endpoint.engine.aborted) == 2, 1.0)
