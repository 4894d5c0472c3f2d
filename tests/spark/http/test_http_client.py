"""The official client is the judge: what `openai` reads from this server, sync and async, streamed and
whole."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from dspark_spark.api import EngineBusyError, SpeculationStats

EOS = 257
USER: Any = [{"role": "user", "content": "hi"}]
WORDS = "Grüße, 世界! 🦜 done"


@pytest.fixture
def client(endpoint: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def rounds(text: str, width: int) -> list[bytes]:
    """The bytes of a text as rounds of `width` tokens, which cut characters wherever they fall."""
    data = text.encode()
    return [data[start : start + width] for start in range(0, len(data), width)]


def chat_text(stream: Any) -> str:
    return "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)


def test_chat_answers_whole(endpoint: Any, client: Any) -> None:
    endpoint.engine.script = [*rounds(WORDS, 4), (EOS,)]
    answer = client.chat.completions.create(model="toy", messages=USER)
    assert answer.choices[0].message.content == WORDS
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.system_fingerprint == "dspark-test"
    assert answer.usage.prompt_tokens == len("<user>hi<assistant>")
    assert answer.usage.completion_tokens == len(WORDS.encode()) + 1


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 100])
def test_streamed_text_equals_whole_text_at_every_round_width(endpoint: Any, client: Any, width: int) -> None:
    endpoint.engine.script = [*rounds(WORDS, width), (EOS,)]
    stream = list(client.chat.completions.create(model="toy", messages=USER, stream=True))
    assert chat_text(stream) == WORDS
    assert all("�" not in (chunk.choices[0].delta.content or "") for chunk in stream)


def test_stream_has_one_identity_one_role_and_one_finish(endpoint: Any, client: Any) -> None:
    endpoint.engine.script = [b"ab", b"cd", (EOS,)]
    chunks = list(client.chat.completions.create(model="toy", messages=USER, stream=True))
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", None, None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]


def test_usage_chunk_comes_last_and_only_when_asked(endpoint: Any, client: Any) -> None:
    endpoint.engine.script = [b"abc", b"de", (EOS,)]
    endpoint.engine.stats = SpeculationStats("ratio", 2, 9, 6, 3, 1)
    plain = list(client.chat.completions.create(model="toy", messages=USER, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in plain)
    asked = list(
        client.chat.completions.create(
            model="toy", messages=USER, stream=True, stream_options={"include_usage": True}
        )
    )
    assert all(chunk.usage is None for chunk in asked[:-1])
    assert asked[-1].choices == []
    assert asked[-1].usage.completion_tokens == 6
    assert asked[-1].speculation == {
        "lane": "ratio",
        "rounds": 2,
        "drafted": 9,
        "verified": 6,
        "accepted": 3,
        "target_only_steps": 1,
        "mean_tokens_per_step": 2.0,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_tokens_and_never_drafts(endpoint: Any, client: Any, stream: bool) -> None:
    endpoint.engine.script = [b"abcde", b"fgh", (EOS, 65, 66)]
    endpoint.engine.stats = SpeculationStats("ratio", 3, 30, 20, 6, 0)
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = client.completions.create(model="toy", prompt="hello", **options)
    usage = list(answer)[-1].usage if stream else answer.usage
    assert usage.completion_tokens == 9
    assert usage.prompt_tokens == len("hello") + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 0
    details = usage.completion_tokens_details
    assert (details.reasoning_tokens, details.accepted_prediction_tokens) == (0, 0)
    assert details.rejected_prediction_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_across_tokens_and_rounds_is_never_shown(
    endpoint: Any, client: Any, stream: bool
) -> None:
    endpoint.engine.script = [b"abc#", b"#", b"#def", (EOS,)]
    answer = client.completions.create(model="toy", prompt="x", stop=["###"], stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == "abc"
    assert choices[-1].finish_reason == "stop"
    assert choices[-1].stop_reason == "###"


def test_text_that_only_began_like_a_stop_string_is_shown(endpoint: Any, client: Any) -> None:
    endpoint.engine.script = [b"abc#", b"#", (EOS,)]
    answer = client.completions.create(model="toy", prompt="x", stop="###")
    assert answer.choices[0].text == "abc##"


def test_stop_beats_the_budget_inside_one_round(endpoint: Any, client: Any) -> None:
    endpoint.engine.script = [(10, 11, 83, 20, 21, 22)]
    answer = client.completions.create(
        model="toy", prompt="x", max_tokens=5, extra_body={"stop_token_ids": [83]}
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == 83
    assert answer.choices[0].text == "\n\x0b"
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("budget", range(1, 9))
def test_budget_is_never_overshot_by_a_wide_round(endpoint: Any, client: Any, budget: int) -> None:
    endpoint.engine.script = [b"abcdefgh", b"ijklmnop"]
    answer = client.completions.create(model="toy", prompt="x", max_tokens=budget)
    assert answer.usage.completion_tokens == budget
    assert answer.choices[0].text == "abcdefgh"[:budget]
    assert answer.choices[0].finish_reason == "length"


def test_ignore_eos_goes_on(endpoint: Any, client: Any) -> None:
    endpoint.engine.script = [b"a", (EOS,), b"bc"]
    answer = client.completions.create(model="toy", prompt="x", max_tokens=4, extra_body={"ignore_eos": True})
    assert answer.choices[0].text == "abc"
    assert answer.usage.completion_tokens == 4


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_give_several_choices(endpoint: Any, client: Any, stream: bool) -> None:
    endpoint.engine.scripts = {"one": [b"1", 0.05, b"1", (EOS,)], "two": [b"2", (EOS,)]}
    prompt: list[str] = ["one", "two"]
    answer = client.completions.create(model="toy", prompt=prompt, stream=stream)
    pieces = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    texts = ["".join(piece.text for piece in pieces if piece.index == index) for index in (0, 1)]
    assert texts == ["11", "2"]
    finishes = [(piece.index, piece.finish_reason) for piece in pieces if piece.finish_reason]
    assert sorted(finishes) == [(0, "stop"), (1, "stop")]


def test_origins_name_every_token_of_the_stream(endpoint: Any, client: Any) -> None:
    endpoint.engine.script = [b"ab#", b"#c", (EOS,)]
    stream = client.chat.completions.create(
        model="toy", messages=USER, stream=True, stop="###", extra_body={"dspark_token_origins": True}
    )
    origins = [chunk.choices[0].dspark for chunk in stream]
    ids = [token_id for origin in origins for token_id in origin["token_ids"]]
    flags = [flag for origin in origins for flag in origin["from_draft"]]
    assert ids == [*b"ab##c", EOS]
    assert flags == [True, True, False, True, False, False]


def test_async_clients_are_served_at_the_same_time(endpoint: Any) -> None:
    endpoint.engine.script = [b"a", 0.1, b"b", (EOS,)]

    async def one(client: Any) -> str:
        stream = await client.chat.completions.create(model="toy", messages=USER, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def several() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client) for _ in range(5)))

    assert asyncio.run(several()) == ["ab"] * 5


def test_client_reads_over_keepalives(endpoint: Any, client: Any) -> None:
    endpoint.engine.script = [0.25, b"a", 0.15, b"b", (EOS,)]
    stream = client.chat.completions.create(model="toy", messages=USER, stream=True)
    assert chat_text(stream) == "ab"


def test_parameters_reach_the_engine(endpoint: Any, client: Any) -> None:
    client.chat.completions.create(
        model="toy",
        messages=USER,
        temperature=0.5,
        top_p=0.9,
        seed=-(2**63),
        max_completion_tokens=7,
        stop=["x", "yy"],
        extra_body={"top_k": 40, "stop_token_ids": [3], "dspark_speculate": False},
    )
    request = endpoint.engine.requests[0]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 40, -(2**63))
    assert (params.max_tokens, params.stop, params.stop_token_ids) == (7, ("x", "yy"), (3,))
    assert not request.speculate


def test_defaults(endpoint: Any, client: Any) -> None:
    client.chat.completions.create(model="toy", messages=USER, extra_body={"top_k": -1})
    client.completions.create(model="toy", prompt="hello")
    chat, text = endpoint.engine.requests
    assert chat.params.max_tokens == endpoint.engine.max_context - len(chat.prompt_ids)
    assert text.params.max_tokens == 16
    assert (chat.params.temperature, chat.params.top_p, chat.params.top_k) == (1.0, 1.0, 0)
    assert chat.params.seed is None
    assert chat.speculate


def test_errors_are_the_clients_exception_classes(endpoint: Any, client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=USER)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="toy", messages=USER, n=2)
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "n")
    endpoint.engine.script = [EngineBusyError("full")]
    with pytest.raises(openai.InternalServerError) as busy:
        client.chat.completions.create(model="toy", messages=USER)
    assert (busy.value.status_code, busy.value.code) == (503, "engine_busy")


def test_failure_in_mid_stream_raises_and_gives_no_finish(endpoint: Any, client: Any) -> None:
    endpoint.engine.script = [b"ab", 0.05, RuntimeError("a secret of the engine")]
    chunks: list[Any] = []
    stream = client.chat.completions.create(model="toy", messages=USER, stream=True)
    with pytest.raises(openai.APIError, match="the engine failed") as failure:
        chunks.extend(stream)
    assert chat_text(chunks) == "ab"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks)
    assert failure.value.code == "engine_error"
    assert "secret" not in str(failure.value)


def test_models_are_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["toy", "org/toy"]
    assert client.models.retrieve("org/toy").id == "org/toy"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
