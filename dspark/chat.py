"""A terminal chat over a running endpoint: accepted draft tokens in green, the running acceptance under each answer.

Talks plain HTTP to any dspark endpoint (server-sent events over the standard library), keeps the conversation, and ends
on Ctrl-D; Ctrl-C stops the current answer, which cancels it at the server.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.text import Text

DRAFT_STYLE = "green"
TARGET_STYLE = "default"


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the command line asked for."""

    url: str
    temperature: float
    max_tokens: int
    system: str | None
    prompt: str | None


class ChatError(RuntimeError):
    """The endpoint refused or is not there; the text says which."""


@dataclass
class Acceptance:
    """Running totals over the conversation."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0

    def add(self, speculation: dict[str, Any]) -> None:
        self.drafted += speculation.get("drafted", 0)
        self.accepted += speculation.get("accepted", 0)
        self.steps += speculation.get("rounds", 0) + speculation.get("target_only_steps", 0)

    def line(self) -> str:
        if not self.drafted:
            return "no drafts were verified (target only)"
        return (
            f"{self.accepted} of {self.drafted} draft tokens accepted ({self.accepted / self.drafted:.0%}), "
            f"{1 + self.accepted / max(1, self.steps):.2f} tokens per step"
        )


@dataclass
class Conversation:
    """Messages so far and the endpoint that they go to."""

    options: ChatOptions
    messages: list[dict[str, str]] = field(default_factory=list)
    acceptance: Acceptance = field(default_factory=Acceptance)

    def ask(self, text: str, console: Console) -> None:
        """One turn: stream the answer to the console and remember it."""
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            with closing(stream(self.options, self.messages)) as events:
                for event in events:
                    answer += self._show(event, console)
        except KeyboardInterrupt:
            console.print("\n[stopped]", style="yellow", markup=False)
        console.print()
        self.messages.append({"role": "assistant", "content": answer})

    def _show(self, event: dict[str, Any], console: Console) -> str:
        if event.get("usage"):
            self.acceptance.add(event.get("speculation") or {})
        if not event["choices"]:
            return ""
        choice = event["choices"][0]
        piece: str = choice["delta"].get("content") or ""
        flags = (choice.get("dspark") or {}).get("from_draft") or [False]
        # Text of one step cannot be cut at token borders inside a character: the step's majority colours it.
        style = DRAFT_STYLE if sum(flags) * 2 >= len(flags) and any(flags) else TARGET_STYLE
        console.print(Text(piece, style=style), end="", soft_wrap=True)
        return piece


def stream(options: ChatOptions, messages: list[dict[str, str]]) -> Generator[dict[str, Any], None, None]:
    """Events of one streamed chat completion. Raises ChatError; closing the iterator closes the connection."""
    body = {
        "messages": messages,
        "model": _model(options.url),
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "dspark_token_origins": True,
    }
    with _response(options.url, "POST", "/v1/chat/completions", json.dumps(body)) as response:
        yield from _events(response)


@contextmanager
def _response(url: str, method: str, path: str, body: str | None = None) -> Iterator[http.client.HTTPResponse]:
    """The answer to one request; every way in which it can fail is a ChatError."""
    connection = _connection(url)
    try:
        connection.request(method, urlsplit(url).path.rstrip("/") + path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ChatError(_refusal(response.status, response.read()))
        yield response
    except OSError as error:
        raise ChatError(f"cannot reach {url}: {error}; start it with `dspark serve`") from None
    except (http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        raise ChatError(f"{url} does not answer like a dspark endpoint: {error!r}") from None
    finally:
        connection.close()


def _connection(url: str) -> http.client.HTTPConnection:
    kinds: dict[str, type[http.client.HTTPConnection]] = {
        "http": http.client.HTTPConnection,
        "https": http.client.HTTPSConnection,
    }
    try:
        parts = urlsplit(url)
        return kinds[parts.scheme](parts.hostname or "", parts.port)
    except (KeyError, ValueError):
        raise ChatError(f"--url {url!r}: give the endpoint's base URL, e.g. http://127.0.0.1:8000") from None


def _model(url: str) -> str:
    with _response(url, "GET", "/v1/models") as response:
        name: str = json.loads(response.read())["data"][0]["id"]
        return name


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for raw in response:
        line = raw.decode().strip()
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise ChatError(event["error"]["message"])
        yield event


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"{status}: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{status}: {body[:200].decode(errors='replace')}"


def run(options: ChatOptions) -> int:
    """The chat loop; returns the exit status."""
    console = Console(highlight=False)
    conversation = Conversation(options)
    if options.system:
        conversation.messages.append({"role": "system", "content": options.system})
    try:
        if options.prompt is not None:
            conversation.ask(options.prompt, console)
            console.print(conversation.acceptance.line(), style="dim")
            return 0
        console.print("Accepted draft tokens are ", Text("green", style=DRAFT_STYLE), ". Ctrl-D ends.", sep="")
        while True:
            conversation.ask(console.input("[bold]> [/bold]"), console)
            console.print(conversation.acceptance.line(), style="dim")
    except (EOFError, KeyboardInterrupt):
        console.print()
        return 0
    except ChatError as error:
        console.print(f"dspark chat: {error}", style="red", markup=False)
        return 1
