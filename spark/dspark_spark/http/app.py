"""The endpoint as a Starlette application.

Purpose: the table of routes, the middlewares and the error handlers.
Invariants: every error of every route has OpenAI's shape; no cross-origin header is ever sent.
Called by: the composition root (`dspark serve`), tests.
Never: opens a socket; see `server.py`.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from dspark_spark.api import AsyncEngine
from dspark_spark.http.completions import CompletionRoutes
from dspark_spark.http.errors import (
    ApiError,
    ClientGoneError,
    answer_api_error,
    answer_client_gone,
    answer_http_exception,
)
from dspark_spark.http.middleware import ApiKeyGuard, RequestEnvelope, read_key_digests
from dspark_spark.http.service import ServiceRoutes
from dspark_spark.http.settings import EndpointSettings
from dspark_spark.http.tokenizer import ChatTokenizer
from dspark_spark.metrics import Metrics


def build_app(
    engine: AsyncEngine, tokenizer: ChatTokenizer, metrics: Metrics, settings: EndpointSettings
) -> Starlette:
    """The application. Raises OSError or ValueError when `settings.api_key_file` cannot be used."""
    completions = CompletionRoutes(engine, tokenizer, metrics, settings)
    service = ServiceRoutes(engine, tokenizer, metrics, settings)
    return Starlette(
        routes=_routes(completions, service),
        middleware=_middleware(settings),
        exception_handlers={
            ApiError: answer_api_error,
            ClientGoneError: answer_client_gone,
            HTTPException: answer_http_exception,
        },
    )


def _routes(completions: CompletionRoutes, service: ServiceRoutes) -> list[Route]:
    return [
        Route("/v1/chat/completions", completions.chat, methods=["POST"]),
        Route("/v1/completions", completions.text, methods=["POST"]),
        Route("/v1/models", service.models, methods=["GET"]),
        Route("/v1/models/{model_id:path}", service.model, methods=["GET"]),
        Route("/tokenize", service.tokenize, methods=["POST"]),
        Route("/detokenize", service.detokenize, methods=["POST"]),
        Route("/health", service.health, methods=["GET"]),
        Route("/ready", service.ready, methods=["GET"]),
        Route("/metrics", service.render_metrics, methods=["GET"]),
        Route("/version", service.version, methods=["GET"]),
    ]


def _middleware(settings: EndpointSettings) -> list[Middleware]:
    stack = [Middleware(RequestEnvelope)]
    if settings.api_key_file is not None:
        stack.append(Middleware(ApiKeyGuard, digests=read_key_digests(settings.api_key_file)))
    return stack
