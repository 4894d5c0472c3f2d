"""Bad requests: each gets the right status, OpenAI's error shape, and the name of the parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from dspark_spark.api import Delta, EngineBusyError
from dspark_spark.http import EndpointSettings

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, after checking that it has all four keys and nothing else."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


REFUSED_IN_BOTH = {
    "n": 2,
    "best_of": 3,
    "length_penalty": 0.5,
    "logits_processors": ["x"],
    "use_beam_search": True,
    "thinking_token_budget": 10,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "a",
    "guided_decoding_backend": "x",
    "guided_whitespace_pattern": "x",
    "structural_tag": "x",
    "grammar": "x",
    "regex": "a",
    "ebnf": "a",
    "json_schema": "{}",
    "echo": True,
    "prompt_logprobs": 1,
    "prompt_embeds": "x",
    "truncate_prompt_tokens": 5,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "return_tokens_as_token_ids": True,
    "return_token_ids": True,
    "priority": 1,
    "cache_salt": "x",
    "kv_transfer_params": {"a": 1},
    "vllm_xargs": {"a": 1},
    "lora_path": "x",
}
REFUSED_IN_CHAT = {
    "logprobs": True,
    "top_logprobs": 3,
    "tools": [{"type": "function"}],
    "tool_choice": "auto",
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "modalities": ["text", "audio"],
    "audio": {"voice": "x"},
    "prediction": {"type": "content"},
    "reasoning_effort": "high",
    "include_reasoning": False,
    "verbosity": "low",
    "web_search_options": {},
    "add_special_tokens": True,
    "continue_final_message": True,
    "chat_template": "x",
    "chat_template_kwargs": {"a": 1},
    "documents": [{}],
    "mm_processor_kwargs": {},
}
REFUSED_IN_TEXT = {"logprobs": 0, "suffix": "x", "add_special_tokens": False}

REFUSALS = [
    *((CHAT, name, value) for name, value in (REFUSED_IN_BOTH | REFUSED_IN_CHAT).items()),
    *((TEXT, name, value) for name, value in (REFUSED_IN_BOTH | REFUSED_IN_TEXT).items()),
]


def minimal(path: str) -> dict[str, object]:
    return {"messages": USER} if path == CHAT else {"prompt": "hi"}


@pytest.mark.parametrize(("path", "name", "value"), REFUSALS)
def test_what_is_not_honoured_is_refused_by_name(endpoint: Any, path: str, name: str, value: object) -> None:
    error = error_of(endpoint.post(path, minimal(path) | {name: value}), 400)
    assert (error["code"], error["param"]) == ("unsupported_parameter", name)
    assert error["type"] == "invalid_request_error"
    assert endpoint.engine.requests == []


NEUTRAL_IN_BOTH = {
    "n": 1,
    "best_of": 1,
    "logit_bias": {},
    "presence_penalty": 0.0,
    "frequency_penalty": 0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "min_tokens": 0,
    "bad_words": [],
    "allowed_token_ids": None,
    "response_format": {"type": "text"},
    "echo": False,
    "logprobs": None,
    "tools": None,
    "user": "someone",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
}
NEUTRAL_IN_CHAT = {"logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "none"}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_neutral_values_pass_and_are_not_reported_as_ignored(endpoint: Any, path: str) -> None:
    fields = NEUTRAL_IN_BOTH | (NEUTRAL_IN_CHAT if path == CHAT else {})
    if path == TEXT:
        del fields["tools"]
    response = endpoint.post(path, minimal(path) | fields)
    assert response.status_code == 200
    assert "x-dspark-ignored-params" not in response.headers


def test_true_is_not_one(endpoint: Any) -> None:
    assert error_of(endpoint.chat(n=True), 400)["param"] == "n"


def test_unknown_fields_are_named_in_a_header(endpoint: Any) -> None:
    odd = {"guided_jsno": {}, "a,b\né": 1, "stream_options": {"include_usage": True, "x": 1}}
    messages = [{"role": "user", "content": "hi", "mood": "good"}]
    response = endpoint.chat(stream=True, messages=messages, **odd)
    assert response.status_code == 200
    names = response.headers["x-dspark-ignored-params"].split(", ")
    assert sorted(names) == ["a?b??", "guided_jsno", "messages[0].mood", "stream_options.x"]


BAD_VALUES = [
    ("temperature", 2.1, "temperature"),
    ("temperature", -0.1, "temperature"),
    ("temperature", "0.5", "temperature"),
    ("temperature", True, "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.01, "top_p"),
    ("top_k", -2, "top_k"),
    ("top_k", 1.5, "top_k"),
    ("seed", 2**63, "seed"),
    ("seed", "1", "seed"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", -1, "max_tokens"),
    ("max_tokens", 10.5, "max_tokens"),
    ("max_completion_tokens", 0, "max_completion_tokens"),
    ("stop", "", "stop[0]"),
    ("stop", ["a", ""], "stop[1]"),
    ("stop", ["a"] * 17, "stop"),
    ("stop", 5, "stop"),
    ("stop", ["x" * 1025], "stop[0]"),
    ("stop_token_ids", [258], "stop_token_ids[0]"),
    ("stop_token_ids", [1, -1], "stop_token_ids[1]"),
    ("stop_token_ids", ["1"], "stop_token_ids[0]"),
    ("ignore_eos", "yes", "ignore_eos"),
    ("min_tokens", -1, "min_tokens"),
    ("min_tokens", 1.0, "min_tokens"),
    ("min_tokens", 201, "min_tokens"),
    ("min_p", 1.01, "min_p"),
    ("min_p", -0.01, "min_p"),
    ("min_p", "0.1", "min_p"),
    ("presence_penalty", 2.01, "presence_penalty"),
    ("presence_penalty", True, "presence_penalty"),
    ("frequency_penalty", -2.01, "frequency_penalty"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("repetition_penalty", -1.0, "repetition_penalty"),
    ("repetition_penalty", 10**400, "repetition_penalty"),
    ("logit_bias", [5], "logit_bias"),
    ("logit_bias", {"5": 100.5}, "logit_bias.5"),
    ("logit_bias", {"5": -101}, "logit_bias.5"),
    ("logit_bias", {"5": "1"}, "logit_bias.5"),
    ("logit_bias", {"5": None}, "logit_bias.5"),
    ("logit_bias", {"1": 0, "258": 1}, "logit_bias.258"),
    ("logit_bias", {"-1": 1}, "logit_bias.-1"),
    ("logit_bias", {"07": 1}, "logit_bias.07"),
    ("logit_bias", {"x": 1}, "logit_bias.x"),
    ("logit_bias", {"²": 1}, "logit_bias.²"),
    ("logit_bias", {"": 1}, "logit_bias."),
    ("logit_bias", {"9" * 5000: 1}, "logit_bias." + "9" * 200 + "..."),
    ("logit_bias", {str(n): 0 for n in range(1025)}, "logit_bias"),
    ("bad_words", "x", "bad_words"),
    ("bad_words", ["x", ""], "bad_words[1]"),
    ("bad_words", ["x" * 1025], "bad_words[0]"),
    ("bad_words", ["x"] * 257, "bad_words"),
    ("bad_words", [5], "bad_words[0]"),
    ("allowed_token_ids", [], "allowed_token_ids"),
    ("allowed_token_ids", [1, 258], "allowed_token_ids[1]"),
    ("allowed_token_ids", [-1], "allowed_token_ids[0]"),
    ("allowed_token_ids", ["1"], "allowed_token_ids[0]"),
    ("stream", 1, "stream"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("stream_options", {"include_usage": "x"}, "stream_options.include_usage"),
    ("stream_options", {"continuous_usage_stats": True}, "stream_options.continuous_usage_stats"),
    ("dspark_token_origins", "x", "dspark_token_origins"),
    ("model", 5, "model"),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("name", "value", "param"), BAD_VALUES)
def test_wrong_types_and_ranges(endpoint: Any, path: str, name: str, value: object, param: str) -> None:
    error = error_of(endpoint.post(path, minimal(path) | {name: value}), 400)
    assert error["param"] == param
    assert endpoint.engine.requests == []


BAD_MESSAGES = [
    (None, "messages"),
    ([], "messages"),
    ("hi", "messages"),
    ([5], "messages[0]"),
    ([{"content": "x"}], "messages[0].role"),
    ([*USER, {"role": "wizard", "content": "x"}], "messages[1].role"),
    ([{"role": "tool", "content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
    ([*USER, {"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[1].tool_calls"),
    ([{"role": "assistant", "content": "x"}], "messages"),
]


@pytest.mark.parametrize(("messages", "param"), BAD_MESSAGES)
def test_wrong_messages(endpoint: Any, messages: object, param: str) -> None:
    assert error_of(endpoint.post(CHAT, {"messages": messages}), 400)["param"] == param


BAD_PROMPTS = [
    ([], "prompt"),
    ({}, "prompt"),
    (["a", 5], "prompt[1]"),
    (["a"] * 17, "prompt"),
    ([[]], "prompt[0]"),
    ([1, 258], "prompt[1]"),
    ([[1], [1, -1]], "prompt[1][1]"),
    ([1, True], "prompt[0]"),
]


@pytest.mark.parametrize(("prompt", "param"), BAD_PROMPTS)
def test_wrong_prompts(endpoint: Any, prompt: object, param: str) -> None:
    assert error_of(endpoint.post(TEXT, {"prompt": prompt}), 400)["param"] == param


def test_missing_fields_are_named(endpoint: Any) -> None:
    assert error_of(endpoint.post(CHAT, {}), 400)["param"] == "messages"
    error = error_of(endpoint.post(TEXT, {}), 400)
    assert (error["param"], error["code"]) == ("prompt", "missing_parameter")


BROKEN_BODIES = [b"", b"{", b'{"prompt": NaN}', b'{"prompt": "\\ud800x"}', b"[]", b"\xff", b"[" * 100_000]


@pytest.mark.parametrize("body", BROKEN_BODIES)
def test_broken_json(endpoint: Any, body: bytes) -> None:
    response = endpoint.http.post(TEXT, content=body, headers=JSON)
    assert error_of(response, 400)["code"] == "invalid_json"
    assert endpoint.complete().status_code == 200


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_wrong_content_type(endpoint: Any, content_type: str) -> None:
    headers = {"content-type": content_type}
    response = endpoint.http.post(TEXT, content=b'{"prompt": "x"}', headers=headers)
    assert error_of(response, 415)["code"] == "unsupported_media_type"


def test_content_type_may_have_parameters(endpoint: Any) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    response = endpoint.http.post(TEXT, content=b'{"prompt": "x"}', headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_large_body_is_refused_and_the_connection_stays_usable(
    serve_with: Callable[..., Any], chunked: bool
) -> None:
    piece = b'{"prompt": "' + b"x" * 5000
    with serve_with(EndpointSettings(max_body_bytes=4096)) as endpoint:
        content = iter([piece, piece]) if chunked else piece
        response = endpoint.http.post(TEXT, content=content, headers=JSON)
        assert error_of(response, 413)["code"] == "body_too_large"
        assert endpoint.http.post(TEXT, json={"prompt": "x"}).status_code == 200


def test_prompt_without_a_token_is_refused(endpoint: Any, monkeypatch: Any) -> None:
    """This tokenizer's BOS makes every text non-empty; one without BOS does not."""
    monkeypatch.setattr(endpoint.tokenizer, "encode", lambda text, add_special: [])
    assert error_of(endpoint.complete(prompt=""), 400)["param"] == "prompt"


def test_context_length(endpoint: Any) -> None:
    room = endpoint.engine.max_context - len("hi") - 1
    assert endpoint.complete(max_tokens=room).status_code == 200
    error = error_of(endpoint.complete(max_tokens=room + 1), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert f"at most {room}" in error["message"]


@pytest.mark.parametrize(("budget", "most"), [({}, 16), ({"max_tokens": 5}, 5), ({"max_completion_tokens": 7}, 7)])
def test_min_tokens_beyond_the_budget(endpoint: Any, budget: dict[str, int], most: int) -> None:
    assert endpoint.complete(min_tokens=most, **budget).status_code == 200
    error = error_of(endpoint.complete(min_tokens=most + 1, **budget), 400)
    assert error["param"] == "min_tokens"
    assert f"{most} tokens" in error["message"]


def test_a_bad_word_without_a_token_is_refused(endpoint: Any, monkeypatch: Any) -> None:
    def encode(text: str, add_special: bool) -> list[int]:
        return [] if text == "ghost" else list(text.encode())

    monkeypatch.setattr(endpoint.tokenizer, "encode", encode)
    assert error_of(endpoint.complete(bad_words=["a", "ghost"]), 400)["param"] == "bad_words[1]"


def test_prompt_that_fills_the_context(endpoint: Any) -> None:
    full = endpoint.engine.max_context
    answer = endpoint.complete(prompt=[65] * (full - 1)).json()
    assert answer["usage"]["total_tokens"] == full
    assert answer["choices"][0]["finish_reason"] == "length"
    error = error_of(endpoint.complete(prompt=[65] * full), 400)
    assert error["code"] == "context_length_exceeded"


def test_unknown_paths_and_methods(endpoint: Any) -> None:
    assert error_of(endpoint.get("/v1/responses"), 404)["code"] == "not_found"
    response = endpoint.get(CHAT)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


def test_no_cross_origin_header_is_sent(endpoint: Any) -> None:
    response = endpoint.get("/health", headers={"origin": "http://example.org"})
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("stream", [False, True])
def test_busy_engine(endpoint: Any, stream: bool) -> None:
    endpoint.engine.script = [EngineBusyError("full")]
    response = endpoint.chat(stream=stream)
    error = error_of(response, 503)
    assert (error["code"], error["type"]) == ("engine_busy", "service_unavailable_error")
    assert response.headers["retry-after"] == "1"


def test_refused_requests_are_not_counted_as_ended(endpoint: Any) -> None:
    before = endpoint.sample("dspark:e2e_request_latency_seconds_count")
    endpoint.engine.script = [EngineBusyError("full")]
    endpoint.chat()
    assert endpoint.sample("dspark:e2e_request_latency_seconds_count") == before


@pytest.mark.parametrize("stream", [False, True])
def test_refusing_one_choice_ends_the_others(endpoint: Any, eventually: Any, stream: bool) -> None:
    endpoint.engine.scripts = {"one": [EngineBusyError("full")], "two": [30.0]}
    assert endpoint.complete(prompt=["one", "two"], stream=stream).status_code == 503
    assert eventually(lambda: endpoint.engine.running == 0, 1.0)


@pytest.mark.parametrize("stream", [False, True])
def test_engine_that_is_not_ready_or_dead(endpoint: Any, stream: bool) -> None:
    endpoint.engine.ready = False
    assert error_of(endpoint.chat(stream=stream), 503)["code"] == "engine_not_ready"
    endpoint.engine.alive = False
    response = endpoint.chat(stream=stream)
    assert error_of(response, 503)["code"] == "engine_stopped"
    assert "retry-after" in response.headers


FAILURES = [
    ([b"ab", RuntimeError("a secret")], 500, "engine_error"),
    ([b"ab", Delta(finish_reason="error", error="NaN in the target row")], 500, "engine_error"),
    ([b"ab", Delta(finish_reason="abort")], 503, "request_aborted"),
    ([b"ab"], 500, "engine_error"),
]


@pytest.mark.parametrize(("script", "status", "code"), FAILURES)
def test_engine_failures(endpoint: Any, script: list[object], status: int, code: str) -> None:
    endpoint.engine.script = script
    response = endpoint.complete()
    assert error_of(response, status)["code"] == code
    assert "secret" not in response.text
    endpoint.engine.script = [b"ok", (257,)]
    assert endpoint.complete().json()["choices"][0]["text"] == "ok"


def test_engine_error_text_is_passed_on(endpoint: Any) -> None:
    endpoint.engine.script = [Delta(finish_reason="error", error="NaN in the target row")]
    assert error_of(endpoint.complete(), 500)["message"] == "NaN in the target row"
