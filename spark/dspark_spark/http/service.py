"""The routes around generation: models, tokenizer, liveness, readiness, metrics, version.

Purpose: what operators, load balancers and client libraries ask before and beside completions.
Invariants: /health says whether the process can ever answer, /ready whether it can answer now.
Called by: Starlette, for the routes that `app.py` mounts.
Never: starts a generation.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dspark_spark.api import AsyncEngine
from dspark_spark.http.admission import checked_model, model_names, require_engine
from dspark_spark.http.body import ignored_headers, read_model
from dspark_spark.http.errors import ApiError, bad_request, json_response
from dspark_spark.http.prompts import Ids, chat_prompt, check_ids
from dspark_spark.http.schema import DetokenizeRequest, TokenizeRequest
from dspark_spark.http.settings import EndpointSettings
from dspark_spark.http.tokenizer import ChatTokenizer
from dspark_spark.metrics import CONTENT_TYPE, Metrics


@dataclass(frozen=True, slots=True)
class ServiceRoutes:
    """All routes that do not generate."""

    engine: AsyncEngine
    tokenizer: ChatTokenizer
    metrics: Metrics
    settings: EndpointSettings
    started: int = field(default_factory=lambda: int(time.time()))

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        names = model_names(self.engine, self.settings)
        return json_response({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}."""
        return json_response(
            self._model(checked_model(self.engine, self.settings, request.path_params["model_id"]))
        )

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        fields = await read_model(request, TokenizeRequest, self.settings.max_body_bytes)
        checked_model(self.engine, self.settings, fields.model)
        ids = await asyncio.to_thread(self._tokens, fields)
        body = {"count": len(ids), "max_model_len": self.engine.max_context, "tokens": ids}
        return json_response(body, headers=ignored_headers(fields))

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        fields = await read_model(request, DetokenizeRequest, self.settings.max_body_bytes)
        checked_model(self.engine, self.settings, fields.model)
        ids = check_ids(self.tokenizer, fields.tokens, "tokens")
        text = (await asyncio.to_thread(self.tokenizer.decode_bytes, ids)).decode("utf-8", "replace")
        return json_response({"prompt": text}, headers=ignored_headers(fields))

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while the engine lives, loading or not."""
        if not self.engine.is_alive():
            require_engine(self.engine, self.settings)
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """GET /ready: 200 when a request would be served now; both answers describe the engine."""
        facts = self.engine.describe()
        try:
            require_engine(self.engine, self.settings)
        except ApiError as error:
            body = {"error": msgspec.to_builtins(error.body.error), "engine": facts}
            return json_response(body, error.status, error.headers)
        return json_response({"status": "ready", "engine": facts})

    async def render_metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(self.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return json_response(
            {
                "version": self.settings.version,
                "system_fingerprint": self.settings.system_fingerprint,
                "engine": self.engine.describe(),
            }
        )

    def _model(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "dspark",
            "root": self.engine.model_name,
            "max_model_len": self.engine.max_context,
        }

    def _tokens(self, fields: TokenizeRequest) -> Ids:
        if (fields.prompt is None) == (fields.messages is None):
            raise bad_request("prompt: give either prompt or messages", "prompt")
        if fields.messages is not None:
            with_prompt = fields.add_generation_prompt is not False
            return chat_prompt(self.tokenizer, fields.messages, with_prompt, bool(fields.add_special_tokens))
        return tuple(self.tokenizer.encode(fields.prompt or "", fields.add_special_tokens is not False))
