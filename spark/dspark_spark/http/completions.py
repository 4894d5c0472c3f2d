"""POST /v1/chat/completions and POST /v1/completions.

Purpose: the way of a request through validation, prompt, budget, engine and answer.
Invariants: everything is validated before the engine sees it; a client that leaves cancels its generation;
a busy engine is a 503 in both modes.
Called by: Starlette, for the two routes that `app.py` mounts.
Never: blocks the event loop; everything that encodes text runs in a worker thread.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from dspark_spark.api import AsyncEngine, GenerateRequest
from dspark_spark.http import refusals
from dspark_spark.http.admission import checked_model, require_engine
from dspark_spark.http.body import ignored_headers, read_model
from dspark_spark.http.budget import checked_lane, sampling_params, with_budget
from dspark_spark.http.disconnect import until_disconnect
from dspark_spark.http.errors import bad_request, json_response
from dspark_spark.http.generation import Generation
from dspark_spark.http.prompts import Ids, chat_prompt, completion_prompts
from dspark_spark.http.reply import ChatReply, Reply, ReplyHead, TextReply
from dspark_spark.http.schema import ChatRequest, CompletionRequest, GenerationFields
from dspark_spark.http.settings import EndpointSettings
from dspark_spark.http.stream import EventStream, frames
from dspark_spark.http.tokenizer import ChatTokenizer
from dspark_spark.metrics import Metrics

COMPLETION_DEFAULT_TOKENS = 16
"""OpenAI's default budget of /v1/completions."""


@dataclass(frozen=True, slots=True)
class CompletionRoutes:
    """The two generating routes over one engine."""

    engine: AsyncEngine
    tokenizer: ChatTokenizer
    metrics: Metrics
    settings: EndpointSettings

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        fields = await read_model(request, ChatRequest, self.settings.max_body_bytes, refusals.CHAT)
        head = self._head("chatcmpl", fields)
        with_prompt = fields.add_generation_prompt is not False

        def prompts() -> list[Ids]:
            return [chat_prompt(self.tokenizer, fields.messages, with_prompt)]

        return await self._answer(request, fields, ChatReply(head), prompts, None)

    async def text(self, request: Request) -> Response:
        """POST /v1/completions."""
        fields = await read_model(
            request, CompletionRequest, self.settings.max_body_bytes, refusals.COMPLETION
        )
        head = self._head("cmpl", fields)

        def prompts() -> list[Ids]:
            return completion_prompts(self.tokenizer, fields.prompt, self.settings.max_prompts)

        return await self._answer(request, fields, TextReply(head), prompts, COMPLETION_DEFAULT_TOKENS)

    def _head(self, prefix: str, fields: GenerationFields) -> ReplyHead:
        """Checks that need no prompt, then the identity of the answer."""
        if fields.stream_options is not None and not fields.stream:
            raise bad_request("stream_options: only allowed with stream=true", "stream_options")
        model = checked_model(self.engine, self.settings, fields.model)
        require_engine(self.engine, self.settings)
        return ReplyHead(
            id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=model,
            fingerprint=self.settings.system_fingerprint,
            with_usage=bool(fields.stream_options and fields.stream_options.include_usage),
            with_origins=bool(fields.dspark_token_origins),
        )

    async def _answer(
        self,
        request: Request,
        fields: GenerationFields,
        reply: Reply,
        prompts: Callable[[], Sequence[Ids]],
        default: int | None,
    ) -> Response:
        requests = await asyncio.to_thread(self._engine_requests, fields, reply.head.id, prompts, default)
        generation = Generation(self.engine, self.metrics, requests, self.settings.retry_after_s)
        headers = ignored_headers(fields)
        if fields.stream:
            return await self._stream(generation, reply, headers)
        return await until_disconnect(request.receive, _collect(generation, reply, headers))

    def _engine_requests(
        self, fields: GenerationFields, reply_id: str, prompts: Callable[[], Sequence[Ids]], default: int | None
    ) -> list[GenerateRequest]:
        """One engine request per prompt; the whole of it encodes text."""
        all_ids = prompts()
        params = sampling_params(fields, self.tokenizer)
        lane = checked_lane(fields, params.temperature)
        return [
            GenerateRequest(
                request_id=f"{reply_id}-{index}",
                prompt_ids=ids,
                params=with_budget(params, fields, self.engine.max_context, len(ids), default),
                speculate=fields.dspark_speculate is not False,
                lane=lane,
            )
            for index, ids in enumerate(all_ids)
        ]

    async def _stream(self, generation: Generation, reply: Reply, headers: dict[str, str]) -> Response:
        """Give the engine a moment to refuse, while a status code can still say so; then let the headers
        go."""
        try:
            first = await generation.next(self.settings.admission_grace_s)
        except BaseException:
            await generation.aclose()
            raise
        return EventStream(frames(generation, reply, first, self.settings.keepalive_s), generation, headers)


async def _collect(generation: Generation, reply: Reply, headers: dict[str, str]) -> Response:
    try:
        while not generation.finished:
            await generation.next()
        return json_response(reply.whole(generation.choices), headers=headers)
    finally:
        await generation.aclose()
