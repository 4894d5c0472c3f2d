"""The OpenAI-compatible endpoint.

Purpose: HTTP in, `dspark_spark.api` out.
Called by: the composition root (`dspark serve`).
Never: imports the engine; the two meet in `dspark_spark.api`.
"""

from __future__ import annotations

from dspark_spark.http.app import build_app
from dspark_spark.http.server import EndpointServer, make_server, serve
from dspark_spark.http.settings import EndpointSettings, fingerprint
from dspark_spark.http.tokenizer import ChatTokenizer

__all__ = [
    "ChatTokenizer",
    "EndpointServer",
    "EndpointSettings",
    "build_app",
    "fingerprint",
    "make_server",
    "serve",
]
