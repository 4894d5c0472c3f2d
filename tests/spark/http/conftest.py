"""A scripted engine behind a real server on a free loopback port.

The engine's script is a list of steps. `bytes` is one round of byte tokens (several tokens per delta, cut by
the production `TextStream`), `tuple` a round of ids, a `float` a pause in seconds, an event is waited for, an
exception is raised, a `Delta` is passed on as it is.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import pytest

from dspark_spark.api import Delta, GenerateRequest, SpeculationStats
from dspark_spark.http import EndpointSettings, build_app, make_server
from dspark_spark.metrics import Metrics
from dspark_spark.text import TextStream

BOS, EOS = 256, 257

Step = bytes | tuple[int, ...] | float | threading.Event | Exception | Delta


class ByteChatTokenizer:
    """One token per byte, then BOS and EOS."""

    vocab_size = 258
    eos_ids = (EOS,)

    def encode(self, text: str, add_special: bool) -> list[int]:
        return [BOS] * add_special + list(text.encode())

    def decode_bytes(self, token_ids: Sequence[int]) -> bytes:
        return bytes(token_id for token_id in token_ids if token_id < 256)

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool, **kwargs: object
    ) -> str:
        if messages[0]["role"] == "assistant":
            raise ValueError("the conversation must not begin with the assistant")
        turns = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return turns + ("<assistant>" if add_generation_prompt else "")


class ScriptedEngine:
    """Plays its script for every request; `scripts` may hold another script for a prompt."""

    model_name = "toy"
    max_context = 200

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.script: list[Step] = [b"ok", (EOS,)]
        self.scripts: dict[str, list[Step]] = {}
        self.stats = SpeculationStats()
        self.requests: list[GenerateRequest] = []
        self.running = 0
        self.aborted: list[str] = []
        self.ready = True
        self.alive = True

    def is_ready(self) -> bool:
        return self.ready

    def is_alive(self) -> bool:
        return self.alive

    def describe(self) -> dict[str, object]:
        return {"dtype": "float32", "speculation": "on"}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        self.requests.append(request)
        self.running += 1
        finished = False
        stream = TextStream(ByteChatTokenizer(), request.params, (EOS,))
        prompt = ByteChatTokenizer().decode_bytes(request.prompt_ids).decode()
        try:
            for step in self.scripts.get(prompt, self.script):
                delta = await self._play(step, stream)
                if delta is not None:
                    finished = delta.finish_reason is not None
                    yield delta
                if finished:
                    return
        finally:
            self.running -= 1
            if not finished:
                self.aborted.append(request.request_id)

    async def _play(self, step: Step, stream: TextStream) -> Delta | None:
        if isinstance(step, float):
            await asyncio.sleep(step)
            return None
        if isinstance(step, threading.Event):
            while not step.is_set():
                await asyncio.sleep(0.01)
            return None
        if isinstance(step, Exception):
            raise step
        if isinstance(step, Delta):
            return step
        pushed = stream.push(tuple(step))
        kept = tuple(step)[: pushed.kept_count]
        # The last token of a round is the target's own, those before it were drafted.
        origins = tuple(index < len(step) - 1 for index in range(len(kept)))
        return Delta(pushed.text, kept, origins, pushed.finish_reason, pushed.stop_reason, stats=self.stats)


@dataclass(frozen=True)
class Endpoint:
    """A running server, its engine and its metrics."""

    url: str
    engine: ScriptedEngine
    metrics: Metrics
    tokenizer: ByteChatTokenizer
    http: httpx.Client

    def post(self, path: str, body: object, **kwargs: object) -> httpx.Response:
        return self.http.post(path, json=body, **kwargs)  # type: ignore[arg-type]

    def get(self, path: str, **kwargs: object) -> httpx.Response:
        return self.http.get(path, **kwargs)  # type: ignore[arg-type]

    def chat(self, **fields: object) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]} | fields)

    def complete(self, **fields: object) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": "hi"} | fields)

    def sample(self, series: str) -> float:
        """The value of a series in /metrics; 0.0 when it does not exist yet."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(series + " "):
                return float(line.rpartition(" ")[2])
        return 0.0


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Poll a condition; its last value."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@contextmanager
def running_endpoint(settings: EndpointSettings) -> Iterator[Endpoint]:
    """Serve on 127.0.0.1 from a thread; the server is stopped on leaving."""
    engine, metrics, tokenizer = ScriptedEngine(), Metrics(num_speculative_tokens=3), ByteChatTokenizer()
    app = build_app(engine, tokenizer, metrics, settings)
    ports: queue.Queue[int] = queue.Queue()
    server = make_server(app, "127.0.0.1", 0, on_listening=ports.put, drain_s=2)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{ports.get(timeout=10)}"
        with httpx.Client(base_url=url, timeout=10) as http:
            yield Endpoint(url, engine, metrics, tokenizer, http)
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        assert not thread.is_alive(), "the server did not stop"


@pytest.fixture(scope="module")
def shared_endpoint() -> Iterator[Endpoint]:
    settings = EndpointSettings(
        version="1.2.3", system_fingerprint="dspark-test", model_aliases=("org/toy",), keepalive_s=0.1
    )
    with running_endpoint(settings) as endpoint:
        yield endpoint


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Iterator[Endpoint]:
    """The module's server, with a fresh script; no request may be left running."""
    shared_endpoint.engine.reset()
    yield shared_endpoint
    assert wait_until(lambda: shared_endpoint.engine.running == 0), "a request was left running"


@pytest.fixture
def serve_with() -> Callable[[EndpointSettings], object]:
    """A context manager that serves with other settings."""
    return running_endpoint


@pytest.fixture
def eventually() -> Callable[..., bool]:
    return wait_until
