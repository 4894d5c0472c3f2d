"""What the endpoint says of itself: `/metrics` as numbers, `/version` as workers with state and leases.

Reads only. Called by `faults`, `sampler`, `quiesce` and `cluster`.
"""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any

READ_S = 10.0
_PREFIX = "dspark:"

TROUBLE = (
    "proposal_discards_total",
    "wire_drops_total",
    "worker_reconnects_total",
    "generation_bumps_total",
    "lease_takeovers_total",
)
"""Counters that grow when a fault reached the verifier."""


@dataclass(frozen=True)
class Metrics:
    """One reading. `series`: full series name without prefix -> value."""

    series: dict[str, float]

    def total(self, name: str, **labels: str) -> float:
        """Sum over the labels that are not given; 0 when there is no such series."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            value
            for series, value in self.series.items()
            if series.partition("{")[0] == name and all(label in series for label in wanted)
        )

    def has(self, name: str) -> bool:
        """Whether any series of this name is there."""
        return any(series.partition("{")[0] == name for series in self.series)

    def trouble(self) -> dict[str, float]:
        """Series of `TROUBLE`, with their labels, that are not 0."""
        return {name: value for name, value in self.series.items() if value and name.partition("{")[0] in TROUBLE}


class EndpointView:
    """The endpoint at `url` ("http://host:port")."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._address = url.removeprefix("http://")

    def metrics(self) -> Metrics:
        """Raises OSError when the endpoint does not answer."""
        lines = (line.rpartition(" ") for line in self._get("/metrics").splitlines() if not line.startswith("#"))
        return Metrics({name.removeprefix(_PREFIX): float(value) for name, _, value in lines if name})

    def model(self) -> str:
        """Name of the served model. Raises OSError."""
        return str(json.loads(self._get("/v1/models"))["data"][0]["id"])

    def workers(self) -> dict[str, dict[str, Any]]:
        """State, leases and last error of each worker, by address. Raises OSError."""
        engine = json.loads(self._get("/version"))["engine"]
        return {worker["address"]: worker for worker in engine["workers"]}

    def state(self, address: str) -> str:
        """State of a worker; "gone" when the endpoint does not know it (any more)."""
        return str(self.workers().get(address, {"state": "gone"})["state"])

    def _get(self, path: str) -> str:
        connection = http.client.HTTPConnection(self._address, timeout=READ_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()
