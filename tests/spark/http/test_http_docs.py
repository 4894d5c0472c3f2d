"""docs/reference/http.md names everything that the code knows, so that neither can move without the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dspark_spark.http.refusals import CHAT, COMPLETION
from dspark_spark.http.schema import ChatRequest, CompletionRequest
from dspark_spark.metrics import Metrics

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "http.md").read_text(encoding="utf-8")

PARAMETERS = sorted({*CHAT, *COMPLETION, *ChatRequest.model_fields, *CompletionRequest.model_fields})
SERIES = sorted(set(re.findall(r"^# TYPE dspark:(\S+) ", Metrics(1).render().decode(), re.MULTILINE)))


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_is_documented(name: str) -> None:
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("name", [name for name in SERIES if not name.endswith("_created")])
def test_series_is_documented(name: str) -> None:
    assert re.search(rf"`{re.escape(name)}[`{{]", PAGE)
