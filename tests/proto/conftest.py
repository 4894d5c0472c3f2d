"""The pair of connections that most protocol tests start from."""

from __future__ import annotations

import pytest
from wire_pairs import Pair, connect


@pytest.fixture
def pair() -> Pair:
    """Connected, with slot 0 open in the ratio lane."""
    joined = connect()
    joined.open(0)
    return joined
