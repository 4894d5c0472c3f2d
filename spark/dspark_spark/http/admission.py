"""Whether a request may reach the engine at all: the model's name, and the engine's state.

Purpose: the checks that every generating route makes before it spends time on the prompt.
Called by: `completions.py`, `service.py`.
Never: queues; a full queue is the engine's to report.
"""

from __future__ import annotations

from dspark_spark.api import AsyncEngine
from dspark_spark.http.errors import ApiError, clip, unavailable
from dspark_spark.http.settings import EndpointSettings


def model_names(engine: AsyncEngine, settings: EndpointSettings) -> tuple[str, ...]:
    """The model's own name, then its aliases."""
    return (engine.model_name, *settings.model_aliases)


def checked_model(engine: AsyncEngine, settings: EndpointSettings, asked: str | None) -> str:
    """The name to answer under. Raises ApiError 404 for a name that is not served; no name means the
    model's own."""
    if asked is None:
        return engine.model_name
    if asked in model_names(engine, settings):
        return asked
    message = f"the model {clip(asked)!r} does not exist; this server has {engine.model_name!r}"
    raise ApiError(404, message, param="model", code="model_not_found")


def require_engine(engine: AsyncEngine, settings: EndpointSettings) -> None:
    """Raises ApiError 503 unless the engine takes requests."""
    if not engine.is_alive():
        raise unavailable(
            "the engine has stopped; see the server's log", "engine_stopped", settings.retry_after_s
        )
    if not engine.is_ready():
        raise unavailable(
            "the model is still loading; try again later", "engine_not_ready", settings.retry_after_s
        )
